"""The synchronous schedule: every batch has a rollout of every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from muster.memory.slots import Layout, Slot, SlotState
from muster.utils.interrupts import postponed
from muster.workers.messages import RolloutRequest, RolloutResult
from muster.workers.pool import WorkerPool, give_warnings
from muster.workers.requests import Reset
from muster.workers.schedule import Bundle, CollectRequest, FilledSlot, Schedule
from muster.workers.threads import GlobalStreams


class Sync(Schedule):
    """Every batch has a rollout of every group. Between batches the workers are idle.

    An error leaves the slot as it is; the next ``collect`` requests the rollouts that are missing in it.

    Args:
        enough: number of complete groups after which the others end at their current step; None: all groups.
        streams: checks whether threads draw from the process's random generators; None: no check.
    """

    def __init__(
        self,
        pool: WorkerPool,
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
        self._filling: list[Slot] = []
        # Of every group: index of its bundle, lane in the bundle's slots, number.
        lanes = [(i, *place) for i, bundle in enumerate(bundles) for place in enumerate(bundle.groups)]
        self._places: list[tuple[int, int, int]] = lanes
        self._complete: dict[int, RolloutResult] = {}  # by group
        self._ruled = False  # the last request had a rule
        self._begun: dict[int, int] = {}  # numbers of the requests for ``_filling``, by group

    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """Return slots with a rollout of every group; see ``Schedule``."""
        local = self.pool.local
        if local is None:
            self.pool.check_alive()
        policy = wanted.policy(0)
        if self._resize(wanted.rows):
            self.abandon("resized")
        if self._ruled is not (wanted.rule is not None):
            self.abandon("interrupted")  # a rollout for chosen episodes does not become one of all, nor the reverse
            self._ruled = not self._ruled
        self._prepare(policy, wanted.version)
        if not self._filling:
            again = into is not None and into.layout == self.bundles[0].ring.layout
            self._filling = [cast(Slot, into).begin()] if again else [b.ring.take() for b in self.bundles]
        if local is not None:
            limit = self._limit(wanted.limit, self._batch_groups())
            for index, lane, group in self._places:
                if group not in self._complete:
                    request = self._request(group, lane, wanted, policy, limit)
                    result = local.run(request, self._filling[index].lanes[lane])
                    self.pool.enter(result)
                    if result.error is not None:
                        _raise_error_of(result)
                    self._complete[group] = result
        else:
            before = None if self._streams is None else self._streams.before()
            self._work(wanted, policy)
            if self._streams is not None and before is not None:
                self._streams.check(before)
            self.pool.check_alive()
        give_warnings(self.pool)
        return self._filled()

    def _request(self, group: int, lane: int, wanted: CollectRequest, policy: str, limit: int | None) -> RolloutRequest:
        """Return the request of a group for its lane: a new one, or the same number to continue an interrupted one."""
        if group not in self._begun:
            self._begun[group] = next(self.pool.numbers)
        rule = None if wanted.rule is None else wanted.rule(group)
        return RolloutRequest(
            self._begun[group],
            group,
            lane,
            policy,
            wanted.version,
            wanted.closes,
            limit,
            spans=wanted.spans,
            rule=rule,
            bootstrap=wanted.bootstrap,
        )

    def _work(self, wanted: CollectRequest, policy: str) -> None:
        """Submit the requests of all groups, and wait for all results; raises the first error."""
        limit = self._limit(wanted.limit, self._batch_groups())
        with self.pool.hold():
            shares = any(counts.dropped for counts in self.pool.counters)
            for index, lane, group in self._places:
                # After Ctrl-C in the last call, some are still under way.
                under_way = self.pool.handle(group).under_way
                if group in self._complete or self._begun.get(group) in under_way.outstanding:
                    continue
                request = self._request(group, lane, wanted, policy, limit)
                if self.pool.counters[group].dropped:
                    self._complete[group] = RolloutResult(request.number, group, dropped=True)
                else:
                    if shares:
                        request.sharing = self._sharing(self._batch_groups(), group)
                    self.pool.handle(group).submit(request, self._filling[index])
        if self.ahead is not None:
            for bundle, slot in zip(self.bundles, self._filling, strict=True):
                self.ahead.prepare(bundle.ring, slot)
        failed: RolloutResult | None = None
        try:
            while self.pool.outstanding:
                result = self.pool.next_result()
                if result.error is None and not result.lost:
                    self._complete[result.group] = result
                    if len(self._complete) >= self._enough:
                        self.pool.stop()
                elif result.error is not None and failed is None:
                    failed = result
        finally:
            if self.pool.server is not None:
                self.pool.server.settle()
        if failed is not None:
            _raise_error_of(failed)

    @postponed()
    def abandon(self, reason: str) -> None:
        """See ``Schedule``. Resets the environments if rollouts have begun."""
        if not self._filling:
            return
        self._discard(reason)
        self.pool.call(Reset({n: range(a.info.num_envs) for n, a in enumerate(self.pool.counters)}))

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        self._prepare(policy, version)
        return self.bundles[0].ring.layout

    def _prepare(self, policy: str, version: int | str | None) -> None:
        laid_out = all(bundle.laid_out for bundle in self.bundles)
        if laid_out and (local := self.pool.local) is not None and local.prepared(policy):
            return
        if not self._is_prepared(self.bundles, policy):
            self.abandon("policy_changed")
            self._lay_out(self.bundles, policy, version)
            self.pool.check_alive()

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        for bundle, slot in zip(self.bundles, self._filling, strict=False):
            if slot.state is not SlotState.LENT:  # else the user holds it (``return_same_td``)
                self._give_back(bundle.ring, slot)
        self._filling, self._complete, self._begun = [], {}, {}

    def _filled(self) -> FilledSlot:
        results = []
        for index, lane, group in self._places:
            results.append(self._complete[group])
            self._finish(self._filling[index], lane, results[-1])
        slots = [(bundle.ring, slot) for bundle, slot in zip(self.bundles, self._filling, strict=True)]
        self._filling, self._complete, self._begun = [], {}, {}
        return FilledSlot(slots, results)


def _raise_error_of(result: RolloutResult) -> None:
    error, result.error = result.error, None
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame: slots would wait for the cycle collector
