"""The schedule in which a batch is what is complete first."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from muster.errors import MusterError, SlotsExhausted
from muster.memory.slots import Layout, Slot, SlotRing, SlotState
from muster.utils.interrupts import postponed
from muster.workers.group_state import layout_of, result_of, to_plain, write
from muster.workers.messages import RolloutRequest, RolloutResult
from muster.workers.pool import WorkerPool, give_warnings
from muster.workers.schedule import Bundle, CollectRequest, FilledSlot, Schedule

FAIR_AFTER = 8  # batches per group, before shares are compared
FAIR_SHARE = 0.5  # of an equal share; less is worth a warning


@dataclass(eq=False)
class _Requested:
    """Rollouts of a bundle that have been requested and not delivered; ``born`` is the number of publishes before."""

    requests: list[RolloutRequest]  # by lane
    bundle: Bundle
    ring: SlotRing
    slot: Slot
    born: int
    place: int  # among all that were ever requested
    results: dict[int, RolloutResult] = field(default_factory=dict)  # by request

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.requests)


class _Pool:
    """What has been requested and not delivered, oldest first. Nothing here takes longer with more workers."""

    def __init__(self) -> None:
        self._items: dict[int, _Requested] = {}  # by place
        self._of: dict[int, _Requested] = {}  # by number of the request
        self._waiting: defaultdict[int, list[_Requested]] = defaultdict(list)  # by first group of the bundle
        self._complete: list[int] = []  # places, sorted

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[_Requested]:
        return iter(list(self._items.values()))

    def add(self, requested: _Requested) -> None:
        """The newest, or one that was removed."""
        is_newest = not self._items or requested.place > next(reversed(self._items))
        self._items[requested.place] = requested
        self._of |= {request.number: requested for request in requested.requests}
        waiting = self._waiting[requested.bundle.groups[0]]
        waiting.append(requested)
        if not is_newest:
            self._items = dict(sorted(self._items.items()))
            waiting.sort(key=lambda other: other.place)
        self.note(requested)

    def remove(self, requested: _Requested) -> None:
        del self._items[requested.place]
        for request in requested.requests:
            del self._of[request.number]
        self._waiting[requested.bundle.groups[0]].remove(requested)
        if requested.place in self._complete:
            self._complete.remove(requested.place)

    def mend(self) -> None:
        """After an interruption (Ctrl-C in the middle of a change): all the rest follows from the items."""
        items = list(self._items.values())
        self._of = {request.number: requested for requested in items for request in requested.requests}
        self._waiting.clear()
        for requested in items:
            self._waiting[requested.bundle.groups[0]].append(requested)
        self._complete = [requested.place for requested in items if requested.complete]

    def find(self, number: int) -> _Requested | None:
        """That with an order of this number."""
        return self._of.get(number)

    def waiting(self, bundle: Bundle) -> list[_Requested]:
        """Those of a bundle, oldest first."""
        return self._waiting[bundle.groups[0]]

    def note(self, requested: _Requested) -> None:
        """It may be complete now."""
        if requested.complete:
            bisect.insort(self._complete, requested.place)

    def complete(self) -> list[_Requested]:
        return [self._items[place] for place in self._complete]


class FirstReady(Schedule):
    """Every batch has the rollouts of one bundle, whichever is complete first. Workers go on while the user trains.

    Args:
        bundles: groups that share batches; most often one group each.
        lead: rollouts of a group that are requested, made or waiting at a time.
        max_lag: publishes between the weights that act in a batch and its delivery, at most, if weights are published
            once per batch. Workers wait where it would be more.
        publishes: how many there were so far.
    """

    overlaps = True

    def __init__(
        self,
        pool: WorkerPool,
        bundles: Sequence[Bundle],
        T: Sequence[int],
        *,
        lead: int = 2,
        max_lag: int | None = None,
        publishes: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(pool, bundles, T)
        self._lead, self._max_lag, self._publishes = lead, max_lag, publishes
        self._requested = _Pool()
        self._places = itertools.count()
        self._lacking = {bundle.groups[0]: bundle for bundle in self.bundles}  # those with fewer rollouts than ``lead``
        self._unsure = False  # something was interrupted, and may have to be requested again
        self._delivered = 0
        self._begun: Counter[int] = Counter()  # rollouts that were requested, by group
        self._behind: set[int] = set()  # groups that were warned of

    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """The next rollout that is complete; see ``Schedule``."""
        self._compare_shares()  # first, since a warning may be an error
        if self.pool.elastic:
            self.pool.welcome()
        if not len(self._requested):  # else what is under way is finished first
            self._resize(wanted.rows)
        if self._unsure:
            self._mend()
            self._resubmit()
        self._unsure, postponed = True, False
        self._request_rollouts(wanted, wanted.batches)
        while (found := self._deliverable()) is None:
            self.pool.check_alive()
            result = self.pool.next_result()
            self._take_note(result)
            is_away = self.pool.elastic and not self._is_there(result.group)
            if (result.dropped or result.lost or is_away) and not (postponed := self.pool.has_bad_news):
                self._resubmit()
                self._request_rollouts(wanted, wanted.batches)  # the others do what it was to do
        give_warnings(self.pool)
        self._remove(found)
        results = [found.results[request.number] for request in found.requests]
        try:
            self._request_rollouts(wanted, None if wanted.batches is None else wanted.batches - 1, delivered=1)
        except SlotsExhausted:
            pass  # which is for the next call to raise; this one has a batch
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
        if not len(self._requested):
            self._resize(rows)
        counters = self.pool.counters
        sizes = [sum(self.T[n] * counters[n].info.num_envs for n in bundle.groups) for bundle in self.bundles]
        return -(-frames // min(sizes))

    def _batch_groups(self) -> Sequence[int]:
        return self.bundles[0].groups

    @postponed()
    def waiting(self) -> list[dict[str, Any]]:
        """See ``Schedule``. The rollouts stay, and are delivered as if nothing had been asked."""
        self._unsure = True
        while self.pool.outstanding:
            self._take_note(self.pool.next_result())
        made = []
        for requested in self._requested.complete():
            results = [requested.results[request.number] for request in requested.requests]
            age = self._publishes() - requested.born
            made.append({"groups": requested.bundle.groups, "age": age, **to_plain(requested.slot, results)})
        return made

    def restore(self, waiting: Sequence[dict[str, Any]]) -> None:
        """See ``Schedule``."""
        for plain in waiting:
            bundle = next(bundle for bundle in self.bundles if bundle.groups == plain["groups"])
            ring = bundle.ring_of(layout_of(plain))
            slot = ring.take()
            write(plain, slot)
            requests = [
                RolloutRequest(next(self.pool.numbers), group, lane, policy="")
                for lane, group in enumerate(bundle.groups)
            ]
            born, place = self._publishes() - plain["age"], next(self._places)
            requested = _Requested(requests, bundle, ring, slot, born, place)
            for request, part in zip(requests, plain["results"], strict=True):
                requested.results[request.number] = result_of(part, request.number)
                self.pool.counters[request.group].in_flight += part["frames"]
            slot.state = SlotState.FULL
            self._requested.add(requested)
        self._mend()

    @postponed()
    def abandon(self, reason: str) -> None:
        """See ``Schedule``; the environments go on where they are."""
        while self.pool.outstanding:
            with suppress(MusterError):
                self._take_note(self.pool.next_result())
        self._discard(reason)

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """Of the slots of the first group that is there."""
        bundle = next(filter(self._can_work, self.bundles), self.bundles[0])
        self._prepare(bundle, policy)
        return bundle.ring.layout

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        self._mend()
        for requested in self._requested:
            self._remove(requested)
            self._give_back(requested.ring, requested.slot)

    def _mend(self) -> None:
        self._requested.mend()
        lacking = [bundle for bundle in self.bundles if len(self._requested.waiting(bundle)) < self._lead]
        self._lacking = {bundle.groups[0]: bundle for bundle in lacking}

    def _remove(self, requested: _Requested) -> None:
        self._requested.remove(requested)
        self._lacking[requested.bundle.groups[0]] = requested.bundle

    def _compare_shares(self) -> None:
        """Warn, once, of each group that is left behind."""
        counters = self.pool.counters
        if self._delivered < FAIR_AFTER * len(counters) or self._delivered % len(counters):
            return
        fair = sum(counts.delivered for counts in counters) / len(counters)
        for number, counts in enumerate(counters):
            there = not (counts.dropped or counts.late)
            if counts.delivered < fair * FAIR_SHARE and number not in self._behind and there:
                self._behind.add(number)
                warnings.warn(
                    f"worker {self.pool.handle(number).index} is falling behind: environments "
                    f"{counts.env_ids.tolist()} ({counts.info.name}) have delivered {counts.delivered:,} frames, "
                    f"where an equal share would be {fair:,.0f}. The data is mostly that of quicker environments; "
                    f"MultiSyncCollector gives all the same share.",
                    stacklevel=2,
                )

    def _request_rollouts(self, wanted: CollectRequest, batches: int | None, *, delivered: int = 0) -> None:
        """Give work to every group that has too little."""
        # What is delivered now is followed by a publish.
        lag = None if self._max_lag is None else self._max_lag + 1 - delivered
        bounds = [n for n in (batches, lag) if n is not None]
        most = min(bounds, default=self._lead * len(self.bundles))
        for level in range(self._lead if len(self._requested) < most else 0):
            for bundle in sorted(self._lacking.values(), key=lambda bundle: self._begun[bundle.groups[0]]):
                if len(self._requested) >= most:
                    return
                if len(self._requested.waiting(bundle)) <= level and self._can_work(bundle):
                    requested = self._requested_from(bundle, wanted, delivered)
                    if requested is not None:
                        self._send(requested, requested.requests)
                        self._add(requested)

    def _is_dropped(self, bundle: Bundle) -> bool:
        return all(self.pool.counters[group].dropped for group in bundle.groups)

    def _is_there(self, group: int) -> bool:
        return self.pool.counters[group].dropped or not self.pool.handle(group).absent

    def _can_work(self, bundle: Bundle) -> bool:
        return not self._is_dropped(bundle) and all(self._is_there(group) for group in bundle.groups)

    def _requested_from(self, bundle: Bundle, wanted: CollectRequest, delivered: int) -> _Requested | None:
        """Rollouts to be requested from the groups of a bundle; None if it is dropped."""
        policy = wanted.policy(len(self._requested) + delivered)
        self._prepare(bundle, policy)
        if self._is_dropped(bundle):  # just now
            return None
        slot = bundle.ring.take()
        limit = self._limit(wanted.limit, bundle.groups)
        waiting = self._requested.waiting(bundle)
        before = waiting[-1].requests if waiting else None
        requests = [
            RolloutRequest(
                next(self.pool.numbers),
                group,
                lane,
                policy,
                limit=limit,
                sharing=self._sharing(bundle, group),
                spans=wanted.spans,
                after=before[lane].number if before else None,
                bootstrap=wanted.bootstrap,
            )
            for lane, group in enumerate(bundle.groups)
        ]
        return _Requested(requests, bundle, bundle.ring, slot, self._publishes(), next(self._places))

    def _add(self, requested: _Requested) -> None:
        """Rollouts that workers have been told of."""
        bundle = requested.bundle
        self._begun[bundle.groups[0]] += 1
        self._requested.add(requested)
        if len(self._requested.waiting(bundle)) >= self._lead:
            self._lacking.pop(bundle.groups[0], None)
        if self.ahead is not None:
            self.ahead.prepare(requested.ring, requested.slot)

    def _prepare(self, bundle: Bundle, policy: str) -> None:
        living = [group for group in bundle.groups if not self.pool.counters[group].dropped]
        handles = list(dict.fromkeys(self.pool.handle(group) for group in living))
        if bundle.laid_out and all(handle.prepared(policy) for handle in handles):
            return
        layouts: dict[int, Layout] = {}
        for handle in handles:
            layouts |= self._lay_out(handle, policy, None)  # when what was requested before is done
        for other in self.bundles:
            known = [group for group in other.groups if group in layouts]
            if known:  # nobody can be asked about those that were dropped
                other.lay_out([layouts.get(group, layouts[known[0]]) for group in other.groups], self._names(other))

    def _sharing(self, bundle: Bundle, group: int) -> tuple[int, int] | None:
        """Where a group stands among those that share batches; None: it has its own."""
        if len(bundle.groups) == 1:
            return None
        counters = [self.pool.counters[number] for number in bundle.groups]
        sizes = [0 if counts.dropped else counts.info.num_envs for counts in counters]
        return sum(sizes[: bundle.groups.index(group)]), sum(sizes)

    def _deliverable(self) -> _Requested | None:
        """A complete rollout, the oldest one first, that may overtake what is older and not complete."""
        now = self._publishes()
        for requested in self._requested.complete():
            if self._max_lag is None:
                return requested
            older = enumerate(o for o in self._requested if o.place < requested.place)
            if all(now + 1 - o.born + ahead <= self._max_lag for ahead, o in older):
                return requested
        return None

    def _take_note(self, result: RolloutResult) -> None:
        requested = self._requested.find(result.number)
        if requested is None:  # its bundle was dropped, or it is about no request
            pass
        elif result.dropped and self._is_dropped(requested.bundle):
            self._remove(requested)
            self._give_back(requested.ring, requested.slot)
        elif result.error is None and not result.lost:
            requested.results[result.number] = result
            self._requested.note(requested)
            if requested.complete:
                requested.slot.state = SlotState.FULL
        if result.error is not None:
            raise result.error

    def _withdraw(self, requested: _Requested) -> None:
        """A node that is gone cannot follow these requests, and others shall do the work."""
        for result in requested.results.values():
            self.pool.counters[result.group].discard("worker_died", result.frames)
        self._remove(requested)
        self._give_back(requested.ring, requested.slot)

    def _resubmit(self) -> None:
        """Go on with what an error interrupted."""
        under_way = {number for handle in self.pool.handles for number in handle.outstanding}
        for requested in list(self._requested):
            missing = [o for o in requested.requests if o.number not in requested.results and o.number not in under_way]
            if missing and self._is_dropped(requested.bundle):
                self._remove(requested)
                self._give_back(requested.ring, requested.slot)
                continue
            if missing and not self._can_work(requested.bundle):
                if len(missing) + len(requested.results) == len(
                    requested.requests
                ):  # else somebody writes into the slot
                    self._withdraw(requested)
                continue
            if missing:
                self._send(requested, missing)
                self._requested.note(requested)

    def _send(self, requested: _Requested, requests: Sequence[RolloutRequest]) -> None:
        """Give requests to workers; those that were dropped have nothing to do."""
        with self.pool.hold() if len(requests) > 1 else nullcontext():
            for request in requests:
                if self.pool.counters[request.group].dropped:
                    requested.results[request.number] = RolloutResult(request.number, request.group, dropped=True)
                else:
                    self.pool.handle(request.group).submit(request, requested.slot)
