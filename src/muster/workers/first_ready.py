"""The asynchronous schedule: the rollouts that are complete first become the next batch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from operator import index
from typing import Any

from muster.errors import MusterError, SlotsExhausted
from muster.memory.slots import Layout, Slot, SlotRing
from muster.rollout.request import RolloutRequest
from muster.utils.interrupts import postponed
from muster.workers.group_state import layout_of, result_of, to_plain, write
from muster.workers.messages import RolloutResult
from muster.workers.pool import Pool
from muster.workers.schedule import Bundle, CollectRequest, FilledSlot, Schedule

LEAD = 2  # maximum of undelivered rollouts per bundle
FAIR_AFTER = 8  # batches per group before shares are compared
FAIR_SHARE = 0.5  # fraction of an equal share below which a warning is issued


@dataclass(eq=False)
class _Requested:
    """Requested, undelivered rollouts of a bundle; ``born`` is the number of publishes before the
    request.
    """

    requests: list[RolloutRequest]  # by lane
    bundle: Bundle
    ring: SlotRing
    slot: Slot
    born: int
    results: dict[int, RolloutResult] = field(default_factory=dict)  # by request

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.requests)

    @property
    def order(self) -> int:
        """The number of its first request: smaller ones are older."""
        return self.requests[0].number


class _Undelivered:
    """The requested, undelivered rollouts of all bundles.

    No method that every batch calls looks at all of them.
    """

    def __init__(self, bundles: Sequence[Bundle], lead: int) -> None:
        self._lead = lead
        self._of: dict[int, _Requested] = {}  # by request
        # oldest first
        self._queues: dict[int, list[_Requested]] = {
            bundle.groups[0]: [] for bundle in bundles
        }
        self._complete: dict[_Requested, None] = {}  # as an ordered set
        self._count = 0
        # bundles with fewer than ``lead``
        self.lacking = {bundle.groups[0]: bundle for bundle in bundles}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Requested]:
        """Iterate over a copy, oldest first."""
        every = [one for queue in self._queues.values() for one in queue]
        every.sort(key=lambda one: one.order)
        return iter(every)

    def add(self, requested: _Requested) -> None:
        self._of.update({request.number: requested for request in requested.requests})
        queue = self.of_bundle(requested.bundle)
        queue.append(requested)
        queue.sort(key=lambda one: one.order)
        self._count += 1
        if len(queue) >= self._lead:
            self.lacking.pop(requested.bundle.groups[0], None)
        self.note(requested)

    def remove(self, requested: _Requested) -> None:
        for request in requested.requests:
            del self._of[request.number]
        queue = self.of_bundle(requested.bundle)
        queue.remove(requested)
        self._count -= 1
        if len(queue) < self._lead:
            self.lacking[requested.bundle.groups[0]] = requested.bundle
        self._complete.pop(requested, None)

    def note(self, requested: _Requested) -> None:
        """Note that results of a rollout were added."""
        if requested.complete:
            self._complete[requested] = None

    def with_request(self, number: int | None) -> _Requested | None:
        return None if number is None else self._of.get(number)

    def of_bundle(self, bundle: Bundle) -> list[_Requested]:
        """Return the rollouts of a bundle, oldest first."""
        return self._queues[bundle.groups[0]]

    def oldest_complete(self) -> _Requested | None:
        """Return the oldest complete rollout of those that are the first of their bundle; None if
        there is none.
        """
        firsts = (one for one in self._complete if one is self.of_bundle(one.bundle)[0])
        return min(firsts, key=lambda one: one.order, default=None)


class FirstReady(Schedule):
    """Every batch has the rollouts of one bundle, whichever is complete first.

    Workers run while the user trains.

    Args:
        bundles: groups that share batches; most often one group each.
        max_lag: maximum of publishes between the weights that act in a batch and its delivery, if
            weights are published once per batch. Workers are idle where they would exceed it.
        publishes: returns the number of publishes so far.
        lead: maximum of undelivered rollouts per bundle.

    Attributes:
        idle_groups: groups may be idle for any time, since their environments wait for clients.
            Then a group that falls behind causes no warning, and the number of batches left does
            not limit requests: an idle group would hold one of the last.
    """

    overlaps = True
    idle_groups = False

    def __init__(
        self,
        pool: Pool,
        bundles: Sequence[Bundle],
        T: Sequence[int],
        *,
        max_lag: int | None = None,
        publishes: Callable[[], int] = lambda: 0,
        lead: int = LEAD,
    ) -> None:
        super().__init__(pool, bundles, T)
        self._max_lag = max_lag
        self._publishes = publishes
        self._requested, self._lead = _Undelivered(bundles, lead), lead
        # a call was interrupted, so that rollouts may have to be requested again
        self._unsure = False
        # an error has cut a rollout short, which was not requested again since
        self._has_failed = False
        self._delivered = 0
        # number of requested rollouts, by the bundle's first group
        self._begun: Counter[int] = Counter()
        self._behind: set[int] = (
            set()
        )  # groups for which ``_compare_shares`` has warned

    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """Return the slot of the next complete rollout; see ``Schedule``."""
        self._compare_shares()  # first, since a warning may be an error
        if self.pool.elastic:
            self.pool.welcome()
        if not self.ahead_of_user:  # else deliver the rollouts of the old length first
            self._resize(wanted.rows)
        if self._unsure:
            self._resubmit()
        self._unsure = True
        postponed = False
        self._request_rollouts(wanted, wanted.batches)
        while (found := self._deliverable()) is None:
            self.pool.check_alive()
            result = self.pool.next_result()
            self._take_note(result)
            is_away = self.pool.elastic and not self._is_there(result.group)
            if (result.dropped or result.lost or is_away) and not (
                postponed := self.pool.has_bad_news
            ):
                self._resubmit()
                self._request_rollouts(
                    wanted, wanted.batches
                )  # from other groups in its place
        if self.pool.unwarned:
            self.pool.give_warnings()
        self._requested.remove(found)
        results = [found.results[request.number] for request in found.requests]
        try:
            self._request_rollouts(
                wanted,
                None if wanted.batches is None else wanted.batches - 1,
                delivered=1,
            )
        except SlotsExhausted:
            pass  # the next call raises it; this one has a batch
        except BaseException:
            self._requested.add(found)
            raise
        for lane, result in enumerate(results):
            self._finish(found.slot, lane, result)
        self._delivered += 1
        self._unsure = postponed
        return FilledSlot([(found.ring, found.slot)], results)

    @property
    def ahead_of_user(self) -> bool:
        return len(self._requested) > 0

    def rollouts_for(self, frames: int, rows: int | None) -> int:
        if not self.ahead_of_user:
            self._resize(rows)
        counters = self.pool.counters
        sizes = [
            sum(self.T[n] * counters[n].info.num_envs for n in bundle.groups)
            for bundle in self.bundles
        ]
        return -(-frames // min(sizes))

    def _batch_groups(self) -> Sequence[int]:
        return self.bundles[0].groups

    @postponed()
    def settle(self) -> None:
        """See ``Schedule``."""
        self._unsure = True
        while self.pool.outstanding:
            self._take_note(self.pool.next_result())

    @postponed()
    def state_dict(self, version: int | str | None) -> dict[str, Any]:
        """See ``Schedule``.

        The rollouts are oldest first. Completes those that only a hook has interrupted.
        """
        if self._unsure and not self._has_failed:
            self._resubmit()
        self.settle()
        made = []
        for requested in self._requested:
            if not requested.complete:
                continue
            results = [
                requested.results[request.number] for request in requested.requests
            ]
            age = self._publishes() - requested.born
            made.append(
                {
                    "groups": requested.bundle.groups,
                    "age": age,
                    **to_plain(requested.slot, results),
                }
            )
        return {"rollouts": made, "T": list(self.T)}

    def can_load(self, state: Mapping[str, Any]) -> bool:
        bundles = [bundle.groups for bundle in self.bundles]
        return all(
            "age" in rollout and rollout["groups"] in bundles
            for rollout in state["rollouts"]
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.T = [index(rows) for rows in state["T"]]
        for plain in state["rollouts"]:
            bundle = next(
                bundle for bundle in self.bundles if bundle.groups == plain["groups"]
            )
            ring = bundle.ring_of(layout_of(plain))
            slot = ring.take()
            write(plain, slot)
            requests = [
                RolloutRequest(next(self.pool.numbers), group, lane, policy="")
                for lane, group in enumerate(bundle.groups)
            ]
            requested = _Requested(
                requests, bundle, ring, slot, self._publishes() - plain["age"]
            )
            for request, part in zip(requests, plain["results"], strict=True):
                requested.results[request.number] = result_of(part, request.number)
                self.pool.counters[request.group].restore(part["frames"])
            self._requested.add(requested)

    @postponed()
    def abandon(self, reason: str) -> None:
        """See ``Schedule``. Waits for rollouts under way; the environments are not reset."""
        while self.pool.outstanding:
            with suppress(MusterError):
                self._take_note(self.pool.next_result())
        self._discard(reason)

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """See ``Schedule``. The slots are those of the first bundle that can work."""
        bundle = next(filter(self._can_work, self.bundles), self.bundles[0])
        self._prepare(bundle, policy, grad=False)
        return bundle.ring.layout

    def lay_out_all(self, policy: str) -> None:
        """Lay out the rollouts of all bundles, which else happens before the first request to each."""
        for bundle in self.bundles:
            self._prepare(bundle, policy, grad=False)

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        for requested in self._requested:
            self._drop(requested)

    def _drop(self, requested: _Requested) -> None:
        """Discard a rollout that can no longer be delivered."""
        self._requested.remove(requested)
        self._give_back(requested.ring, requested.slot)

    def _compare_shares(self) -> None:
        """Warn once of each group that falls behind."""
        if self.idle_groups:
            return
        counters = self.pool.counters
        if self._delivered < FAIR_AFTER * len(counters) or self._delivered % len(
            counters
        ):
            return
        fair = sum(counts.delivered for counts in counters) / len(counters)
        for number, counts in enumerate(counters):
            there = not (counts.dropped or counts.late)
            if (
                counts.delivered < fair * FAIR_SHARE
                and number not in self._behind
                and there
            ):
                self._behind.add(number)
                warnings.warn(
                    f"worker {self.pool.handle(number).index} is falling behind: environments"
                    f" {counts.env_ids.tolist()} ({counts.info.name}) have delivered"
                    f" {counts.delivered:,} frames, where an equal share would be {fair:,.0f}. The"
                    " data is mostly that of quicker environments; MultiSyncCollector gives all"
                    " the same share.",
                    stacklevel=2,
                )

    def _fewest_first(self, bundle: Bundle) -> tuple[int, int]:
        number = bundle.groups[0]
        return self._begun[number], number

    def _request_rollouts(
        self, wanted: CollectRequest, batches: int | None, *, delivered: int = 0
    ) -> None:
        """Request rollouts from every bundle with fewer than ``lead``, as far as ``batches`` and
        ``max_lag`` allow.
        """
        # A rollout that is being delivered is followed by a publish.
        most = self._lead * len(self.bundles)
        if self._max_lag is not None:
            most = min(most, self._max_lag + 1 - delivered)
        if batches is not None and not self.idle_groups:
            most = min(most, batches)
        left = most - len(self._requested)
        for level in range(self._lead):
            known = self._requested
            lacking = [
                bundle
                for bundle in known.lacking.values()
                if len(known.of_bundle(bundle)) <= level
            ]
            lacking.sort(key=self._fewest_first)
            for bundle in lacking:
                if left <= 0:
                    return
                requested = (
                    self._requested_from(bundle, wanted, delivered)
                    if self._can_work(bundle)
                    else None
                )
                if requested is not None:
                    self._send(requested, requested.requests)
                    self._begun[bundle.groups[0]] += 1
                    self._requested.add(requested)
                    left -= 1
                    if self.ahead is not None:
                        self.ahead.prepare(requested.ring, requested.slot)

    def _is_dropped(self, bundle: Bundle) -> bool:
        return all(self.pool.counters[group].dropped for group in bundle.groups)

    def _is_there(self, group: int) -> bool:
        return self.pool.counters[group].dropped or not self.pool.handle(group).absent

    def _can_work(self, bundle: Bundle) -> bool:
        return not self._is_dropped(bundle) and all(
            self._is_there(group) for group in bundle.groups
        )

    def _requested_from(
        self, bundle: Bundle, wanted: CollectRequest, delivered: int
    ) -> _Requested | None:
        """Make requests for one rollout of each group of a bundle; None if the bundle is dropped."""
        policy = wanted.policy(len(self._requested) + delivered)
        self._prepare(bundle, policy, grad=wanted.grad)
        if self._is_dropped(bundle):  # just now
            return None
        slot = bundle.ring.take()
        limit = self._limit(wanted.limit, bundle.groups)
        earlier = self._requested.of_bundle(bundle)
        requests = [
            RolloutRequest(
                next(self.pool.numbers),
                group,
                lane,
                policy,
                limit=limit,
                sharing=self._sharing(bundle.groups, group)
                if len(bundle.groups) > 1
                else None,
                spans=wanted.spans,
                after=earlier[-1].requests[lane].number if earlier else None,
                bootstrap=wanted.bootstrap,
                grad=wanted.grad,
                pause=wanted.pause,
                offset=slot.offset,
                nbytes=slot.layout.nbytes,
            )
            for lane, group in enumerate(bundle.groups)
        ]
        return _Requested(requests, bundle, bundle.ring, slot, self._publishes())

    def _prepare(self, bundle: Bundle, policy: str, *, grad: bool) -> None:
        if not self._is_prepared([bundle], policy):
            self._lay_out(
                [bundle], policy, None, grad=grad
            )  # waits for earlier requests

    def _deliverable(self) -> _Requested | None:
        """Return the oldest complete rollout that may overtake all older incomplete ones; None if
        there is none.
        """
        if self._max_lag is None:
            return self._requested.oldest_complete()
        overtaken: set[int] = set()  # bundles
        lag = 0  # the largest one of all older rollouts if this one is delivered before them
        for ahead, requested in enumerate(self._requested):
            if lag > self._max_lag:
                return None
            if requested.complete and requested.bundle.groups[0] not in overtaken:
                return requested
            overtaken.add(requested.bundle.groups[0])
            lag = max(lag, self._publishes() + 1 - requested.born + ahead)
        return None

    def _take_note(self, result: RolloutResult) -> None:
        requested = self._requested.with_request(result.number)
        # the bundle was dropped, or the result belongs to no request (``news``)
        if requested is None:
            pass
        elif result.dropped and self._is_dropped(requested.bundle):
            self._drop(requested)
        elif result.error is None and not result.lost:
            requested.results[result.number] = result
            self._requested.note(requested)
            if requested.complete:
                requested.slot.complete()
        if result.error is not None:
            self._has_failed |= not result.paused
            raise result.error

    def _resubmit(self) -> None:
        """Submit requests again that have no result and are not under way, after an error or a
        loss.
        """
        self._has_failed = False
        under_way = {
            number
            for handle in self.pool.handles
            for number in handle.under_way.outstanding
        }
        for requested in self._requested:
            without = [
                o for o in requested.requests if o.number not in requested.results
            ]
            missing = [o for o in without if o.number not in under_way]
            if missing and self._is_dropped(requested.bundle):
                self._drop(requested)
            elif missing and self._can_work(requested.bundle):
                self._send(requested, missing)
                self._requested.note(requested)
            elif (
                missing and missing == without
            ):  # the node was lost, and does not write into the slot
                for result in requested.results.values():
                    self.pool.counters[result.group].discard(
                        "worker_died", result.frames
                    )
                self._drop(requested)

    def _send(self, requested: _Requested, requests: Sequence[RolloutRequest]) -> None:
        """Submit requests to workers. Requests to dropped groups get a dropped result at once.

        A request whose predecessor is lost is not submitted: ``_resubmit`` submits both, in order.
        """
        with self.pool.hold() if len(requests) > 1 else nullcontext():
            for request in requests:
                handle = self.pool.handle(request.group)
                after = request.after
                if self.pool.counters[request.group].dropped:
                    requested.results[request.number] = RolloutResult(
                        request.number, request.group, dropped=True
                    )
                elif (
                    after in handle.under_way.outstanding
                    or (earlier := self._requested.with_request(after)) is None
                    or after in earlier.results
                ):
                    handle.submit(request, requested.slot)
