"""The synchronous schedule: every batch has a rollout of every group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from muster.memory.slots import Layout, Slot, SlotRing, SlotState
from muster.rollout.request import RolloutRequest
from muster.utils.interrupts import postponed
from muster.workers.group_state import layout_of, result_of, to_plain, write
from muster.workers.messages import RolloutResult
from muster.workers.pool import Pool
from muster.workers.requests import Reset
from muster.workers.schedule import Bundle, CollectRequest, FilledSlot, Schedule
from muster.workers.turns import GlobalStreams


@dataclass
class SyncBatch:
    """A batch under way: requested, and not delivered yet.

    Attributes:
        wanted: the request for it, with the present version of the weights.
        policy: name of the policy that acts in it.
        slots: one slot of each bundle, with its ring.
        numbers: numbers of the requests, by group.
        results: results of the complete rollouts, by group.
        has_failed: an error has cut a rollout short.
    """

    wanted: CollectRequest
    policy: str
    slots: list[tuple[SlotRing, Slot]]
    numbers: dict[int, int] = field(default_factory=dict)
    results: dict[int, RolloutResult] = field(default_factory=dict)
    has_failed: bool = False

    def renew(self, wanted: CollectRequest) -> None:
        """Continue the batch for an equal request, which may have a later version."""
        self.wanted = wanted

    def note_failure(self, result: RolloutResult) -> None:
        """Note that an error has interrupted a rollout; Ctrl-C between two rows only pauses it."""
        if not result.paused:
            self.has_failed = True


class Sync(Schedule):
    """Every batch has a rollout of every group. Between batches the workers are idle.

    After an error or Ctrl-C the batch under way stays as it is. An equal request completes it: it
    requests the rollouts that are missing. Any other request discards it.

    Args:
        enough: number of complete groups after which the others end at their current step; None:
            all groups.
        streams: checks whether threads draw from the process's random generators; None: no check.
    """

    def __init__(
        self,
        pool: Pool,
        bundles: Sequence[Bundle],
        T: Sequence[int],
        *,
        enough: int | None = None,
        streams: GlobalStreams | None = None,
    ) -> None:
        super().__init__(pool, bundles, T)
        self._enough = len(T) if enough is None else enough
        self.preempts = enough is not None
        self._streams = streams
        self._batch: SyncBatch | None = None
        # rollouts were discarded, and environments may be in the middle of their steps
        self._must_reset = False
        # Of every group: index of its bundle, lane in the bundle's slots, number.
        self._places: list[tuple[int, int, int]] = [
            (i, lane, group)
            for i, bundle in enumerate(bundles)
            for lane, group in enumerate(bundle.groups)
        ]

    def collect(
        self, wanted: CollectRequest, into: Slot | None = None, *, keep: bool = False
    ) -> FilledSlot:
        """Return slots with a rollout of every group; see ``Schedule``.

        Args:
            keep: only complete the batch, which another call delivers.
        """
        local = self.pool.local
        if local is None:
            self.pool.check_alive()
        policy = wanted.policy(0)
        if self._must_reset:
            self.abandon("interrupted")
        if not self._has_length(wanted.rows):
            self.abandon("resized")
            self._resize(wanted.rows)
        batch = self._batch
        if batch is not None and not _is_like(batch.wanted, wanted):
            self.abandon("interrupted")
            batch = None
        if (
            batch is None
            or batch.policy != policy
            or len(batch.results) < len(self._places)
        ):
            self._prepare(policy, wanted.version, grad=wanted.grad)
            batch = self._begun(wanted, policy, into)
            if local is not None:
                limit = self._limit(wanted.limit, self._batch_groups())
                for place, lane, group in self._places:
                    if group not in batch.results:
                        request = self._request(group, lane, batch, limit)
                        result = local.run(request, batch.slots[place][1].lanes[lane])
                        self.pool.counters[group].add(result)
                        if result.warnings:
                            self.pool.warn_later(result)
                        if result.error is not None:
                            batch.note_failure(result)
                            _raise_error_of(result)
                        batch.results[group] = result
            else:
                # A thread that is at work since an interrupted call has the generators of its group
                # in place.
                is_quiet = not self.pool.outstanding
                before = (
                    self._streams.before()
                    if self._streams is not None and is_quiet
                    else None
                )
                self._work(batch)
                if self._streams is not None and before is not None:
                    self._streams.check(before)
                self.pool.check_alive()
        if self.pool.unwarned:
            self.pool.give_warnings()
        results = [batch.results[group] for _, _, group in self._places]
        if not keep:
            for (place, lane, _), result in zip(self._places, results, strict=True):
                self._finish(batch.slots[place][1], lane, result)
            self._batch = None
        return FilledSlot(batch.slots, results)

    @property
    def has_begun(self) -> bool:
        return self._batch is not None

    def _begun(
        self, wanted: CollectRequest, policy: str, into: Slot | None
    ) -> SyncBatch:
        """Return the batch under way, or a new one in free slots (``into``, if it still has the
        layout).
        """
        batch = self._batch
        if batch is not None:
            batch.renew(wanted)
            return batch
        ring = self.bundles[0].ring
        if into is not None and into.layout == ring.layout:
            slots = [(ring, into.begin())]
        else:
            slots = [(bundle.ring, bundle.ring.take()) for bundle in self.bundles]
        batch = self._batch = SyncBatch(wanted, policy, slots)
        return batch

    def _request(
        self,
        group: int,
        lane: int,
        batch: SyncBatch,
        limit: int | None,
        *,
        sharing: tuple[int, int] | None = None,
        offset: int = 0,
        nbytes: int = 0,
    ) -> RolloutRequest:
        """Return the request of a group for its lane: a new one, or the same number to continue an
        interrupted one.
        """
        wanted = batch.wanted
        if group not in batch.numbers:
            batch.numbers[group] = next(self.pool.numbers)
        rule = None if wanted.rule is None else wanted.rule(group)
        return RolloutRequest(
            batch.numbers[group],
            group,
            lane,
            batch.policy,
            wanted.version,
            wanted.closes,
            limit,
            sharing=sharing,
            spans=wanted.spans,
            rule=rule,
            bootstrap=wanted.bootstrap,
            grad=wanted.grad,
            pause=wanted.pause,
            offset=offset,
            nbytes=nbytes,
        )

    def _work(self, batch: SyncBatch) -> None:
        """Submit the requests of all groups, and wait for all results; raises the first error."""
        limit = self._limit(batch.wanted.limit, self._batch_groups())
        with self.pool.hold():
            shares = any(counts.dropped for counts in self.pool.counters)
            for place, lane, group in self._places:
                # After Ctrl-C in the last call, some are still under way.
                under_way = self.pool.handle(group).under_way
                if (
                    group in batch.results
                    or batch.numbers.get(group) in under_way.outstanding
                ):
                    continue
                slot = batch.slots[place][1]
                sharing = self._sharing(self._batch_groups(), group) if shares else None
                request = self._request(
                    group,
                    lane,
                    batch,
                    limit,
                    sharing=sharing,
                    offset=slot.offset,
                    nbytes=slot.layout.nbytes,
                )
                if self.pool.counters[group].dropped:
                    batch.results[group] = RolloutResult(
                        request.number, group, dropped=True
                    )
                else:
                    self.pool.handle(group).submit(request, slot)
        if self.ahead is not None:
            for ring, slot in batch.slots:
                self.ahead.prepare(ring, slot)
        failed: RolloutResult | None = None
        try:
            while self.pool.outstanding:
                result = self.pool.next_result()
                if result.error is None and not result.lost:
                    batch.results[result.group] = result
                    if len(batch.results) >= self._enough:
                        self.pool.stop()
                elif result.error is not None:
                    batch.note_failure(result)
                    failed = failed or result
        finally:
            if self.pool.server is not None:
                self.pool.server.settle()
        if failed is not None:
            _raise_error_of(failed)

    @postponed()
    def abandon(self, reason: str) -> None:
        """See ``Schedule``. If rollouts have begun, waits for them, and resets the environments.

        After Ctrl-C, another call does what is left.

        Raises:
            MusterError: an abandoned rollout has failed; everything else is done.
        """
        if self._batch is None and not self._must_reset:
            return
        failed: RolloutResult | None = None
        while self.pool.outstanding:
            result = self.pool.next_result()
            if result.error is not None:
                failed = failed or result
        self._must_reset = True
        self._discard(reason)
        every = {}
        for group, counts in enumerate(self.pool.counters):
            every[group] = range(counts.info.num_envs)
        self.pool.call(Reset(every))
        self._must_reset = False
        if failed is not None:
            _raise_error_of(failed)

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        if self._batch is not None and self._batch.policy == policy:
            return self._batch.slots[0][0].layout
        self._prepare(policy, version, grad=False)
        return self.bundles[0].ring.layout

    @postponed()
    def state_dict(self, version: int | str | None) -> dict[str, Any]:
        """See ``Schedule``. Completes a batch that Ctrl-C has interrupted."""
        if self._must_reset:
            self.abandon("interrupted")
        state: dict[str, Any] = {"rollouts": [], "T": list(self.T)}
        batch = self._batch
        if batch is None or batch.has_failed:
            return state
        self.collect(
            replace(batch.wanted, policy=lambda ahead: batch.policy, version=version),
            keep=True,
        )
        for bundle, (_, slot) in zip(self.bundles, batch.slots, strict=True):
            results = [batch.results[group] for group in bundle.groups]
            state["rollouts"].append(
                {"groups": bundle.groups, **to_plain(slot, results)}
            )
        state["request"] = _request_state(batch)
        return state

    def can_load(self, state: Mapping[str, Any]) -> bool:
        groups = [rollout["groups"] for rollout in state["rollouts"]]
        return not groups or (
            "request" in state and groups == [bundle.groups for bundle in self.bundles]
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.T = [index(rows) for rows in state["T"]]
        if not state["rollouts"]:
            return
        made = state["request"]
        batch = self._batch = SyncBatch(
            CollectRequest(
                lambda ahead: str(made["policy"]),
                limit=made["limit"],
                closes=made["closes"],
                rows=made["rows"],
                rule=(lambda group: None) if made["has_rule"] else None,
                bootstrap=made["bootstrap"],
            ),
            str(made["policy"]),
            [],
        )
        for bundle, saved in zip(self.bundles, state["rollouts"], strict=True):
            ring = bundle.ring_of(layout_of(saved))
            slot = ring.take()
            write(saved, slot)
            batch.slots.append((ring, slot))
            for group, part in zip(bundle.groups, saved["results"], strict=True):
                number = batch.numbers[group] = next(self.pool.numbers)
                batch.results[group] = result_of(part, number)
                self.pool.counters[group].restore(part["frames"])

    def _prepare(self, policy: str, version: int | str | None, *, grad: bool) -> None:
        local = self.pool.local
        # its groups share one bundle
        if local is not None and self.bundles[0].laid_out and local.prepared(policy):
            return
        if not self._is_prepared(self.bundles, policy):
            self.abandon("policy_changed")
            self._lay_out(self.bundles, policy, version, grad=grad)
            self.pool.check_alive()

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        batch, self._batch = self._batch, None
        for ring, slot in () if batch is None else batch.slots:
            if (
                slot.state is not SlotState.LENT
            ):  # else the user holds it (``return_same_td``)
                self._give_back(ring, slot)


def _is_like(begun: CollectRequest, wanted: CollectRequest) -> bool:
    """Return whether a batch that was begun for one request fulfils another one of the same policy
    and length.
    """
    return (
        begun.limit == wanted.limit
        and begun.closes == wanted.closes
        and begun.bootstrap == wanted.bootstrap
        and (begun.rule is None) == (wanted.rule is None)
    )


def _request_state(batch: SyncBatch) -> dict[str, Any]:
    wanted = batch.wanted
    return {
        "policy": batch.policy,
        "limit": wanted.limit,
        "closes": wanted.closes,
        "rows": wanted.rows,
        "has_rule": wanted.rule is not None,
        "bootstrap": wanted.bootstrap,
    }


def _raise_error_of(result: RolloutResult) -> None:
    error, result.error = result.error, None
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame: slots would wait for the cycle collector
