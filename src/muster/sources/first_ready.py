"""The schedule in which a batch is one rollout, whichever is complete first."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from muster.errors import MusterError, SlotsExhausted
from muster.memory.slots import Layout, Slot, SlotRing, SlotState
from muster.sources.crew import Crew
from muster.sources.messages import Order, Report
from muster.sources.schedule import Bundle, Filled, Schedule, Wanted, filled

FAIR_AFTER = 8  # batches per group, before shares are compared
FAIR_SHARE = 0.5  # of an equal share; less is worth a warning


@dataclass
class _Ordered:
    """A rollout that has been ordered and not delivered; ``born`` is the number of publishes before it."""

    order: Order
    bundle: Bundle
    ring: SlotRing
    slot: Slot
    born: int
    report: Report | None = None


class FirstReady(Schedule):
    """Every batch is one rollout of one group, whichever is complete first. Workers go on while the user trains.

    Args:
        bundles: one for each group.
        lead: rollouts of a group that are ordered, made or waiting at a time.
        max_lag: publishes between the weights that act in a batch and its delivery, at most, if weights are published
            once per batch. Workers wait where it would be more.
        publishes: how many there were so far.
    """

    def __init__(
        self,
        crew: Crew,
        bundles: Sequence[Bundle],
        T: Sequence[int],
        *,
        lead: int = 2,
        max_lag: int | None = None,
        publishes: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(crew, bundles, T)
        self._lead, self._max_lag, self._publishes = lead, max_lag, publishes
        self._ordered: list[_Ordered] = []  # oldest first
        self._delivered = 0
        self._begun: Counter[int] = Counter()  # rollouts that were ordered, by group
        self._behind: set[int] = set()  # groups that were warned of

    def collect(self, wanted: Wanted, into: Slot | None = None) -> Filled:
        """The next rollout that is complete.

        Raises:
            MusterError: what went wrong; the next call goes on.
        """
        self._compare_shares()  # first, since a warning may be an error
        if not self._ordered:  # else what is under way is finished first
            self._resize(wanted.rows)
        self._resubmit()
        self._order(wanted, wanted.batches)
        while (found := self._deliverable()) is None:
            self.crew.check_alive()
            report = self._next_report()
            self._take_note(report)
            self._resubmit()
            if report.dropped or report.lost:
                self._order(wanted, wanted.batches)  # the others do what it was to do
        self._ordered.remove(found)
        made = cast(Report, found.report)
        try:
            self._order(wanted, None if wanted.batches is None else wanted.batches - 1, delivered=1)
        except SlotsExhausted:
            pass  # which is for the next call to raise; this one has a batch
        except BaseException:
            self._ordered.insert(0, found)
            raise
        self._finish(found.slot, 0, made)
        self._delivered += 1
        return filled(self.crew, [(found.ring, found.slot)], [made])

    @property
    def ahead_of_user(self) -> bool:
        """Rollouts were begun that nobody has got."""
        return bool(self._ordered)

    def rollouts_for(self, frames: int, rows: int | None) -> int:
        """How many rollouts have at least so many frames, whoever makes them."""
        if not self._ordered:
            self._resize(rows)
        sizes = [T * account.info.num_envs for T, account in zip(self.T, self.crew.accounts, strict=True)]
        return -(-frames // min(sizes))

    def _batch_groups(self) -> Sequence[int]:
        return self.bundles[0].groups

    def rest(self) -> bool:
        """Wait until no worker has anything to do; whether rollouts are left that nobody has got."""
        while self.crew.outstanding:
            self._take_note(self._next_report())
        return any(ordered.report is not None for ordered in self._ordered)

    def abandon(self, reason: str) -> None:
        """Give up all that nobody has got; the environments go on where they are."""
        while self.crew.outstanding:
            with suppress(MusterError):
                self._take_note(self._next_report())
        self._discard(reason)

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """Of the slots of the first group."""
        self._prepare(self.bundles[0], policy)
        return self.bundles[0].ring.layout

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        for ordered in self._ordered:
            self._give_back(ordered.ring, ordered.slot)
        self._ordered = []

    def _compare_shares(self) -> None:
        """Warn, once, of each group that is left behind."""
        accounts = self.crew.accounts
        if self._delivered < FAIR_AFTER * len(accounts) or self._delivered % len(accounts):
            return
        fair = sum(account.delivered for account in accounts) / len(accounts)
        for number, account in enumerate(accounts):
            if account.delivered < fair * FAIR_SHARE and number not in self._behind and not account.dropped:
                self._behind.add(number)
                warnings.warn(
                    f"worker {self.crew.handle(number).index} is falling behind: environments "
                    f"{account.env_ids.tolist()} ({account.info.name}) have delivered {account.delivered:,} frames, "
                    f"where an equal share would be {fair:,.0f}. The data is mostly that of quicker environments; "
                    f"MultiSyncCollector gives all the same share.",
                    stacklevel=2,
                )

    def _order(self, wanted: Wanted, batches: int | None, *, delivered: int = 0) -> None:
        """Give work to every group that has too little."""
        # What is delivered now is followed by a publish.
        lag = None if self._max_lag is None else self._max_lag + 1 - delivered
        bounds = [n for n in (batches, lag) if n is not None]
        most = min(bounds, default=self._lead * len(self.bundles))
        waiting = Counter(ordered.order.group for ordered in self._ordered)
        for level in range(self._lead):
            for bundle in sorted(self.bundles, key=lambda bundle: self._begun[bundle.groups[0]]):
                (group,) = bundle.groups
                if len(self._ordered) >= most:
                    return
                if waiting[group] <= level and not self.crew.accounts[group].dropped:
                    self._submit(bundle, wanted, delivered)
                    waiting[group] += 1

    def _submit(self, bundle: Bundle, wanted: Wanted, delivered: int) -> None:
        policy = wanted.policy(len(self._ordered) + delivered)
        self._prepare(bundle, policy)
        (group,) = bundle.groups
        if self.crew.accounts[group].dropped:  # just now
            return
        slot = bundle.ring.take()
        limit = self._limit(wanted.limit, [group])
        after = next((o.order.number for o in reversed(self._ordered) if o.order.group == group), None)
        order = self.crew.submit(
            group, slot, 0, policy=policy, limit=limit, spans=wanted.spans, after=after, bootstrap=wanted.bootstrap
        )
        self._begun[group] += 1
        self._ordered.append(_Ordered(order, bundle, bundle.ring, slot, self._publishes()))
        if self.ahead is not None:
            self.ahead.prepare(bundle.ring, slot)

    def _prepare(self, bundle: Bundle, policy: str) -> None:
        handle = self.crew.handle(bundle.groups[0])
        if bundle.laid_out and handle.prepared(policy):
            return
        layouts = self._lay_out(handle, policy, None)  # when what was ordered before is done
        for other in self.bundles:
            if other.groups[0] in layouts:
                other.lay_out([layouts[other.groups[0]]], self._names(other))

    def _deliverable(self) -> _Ordered | None:
        """A complete rollout, the oldest one first, that may overtake what is older and not complete."""
        now = self._publishes()
        for place, ordered in enumerate(self._ordered):
            if ordered.report is not None:
                older = enumerate(self._ordered[:place])
                if self._max_lag is None or all(now + 1 - o.born + ahead <= self._max_lag for ahead, o in older):
                    return ordered
        return None

    def _take_note(self, report: Report) -> None:
        ordered = next((o for o in self._ordered if o.order.number == report.number), None)
        if ordered is None:  # its group was dropped
            return
        if report.dropped:
            self._ordered.remove(ordered)
            self._give_back(ordered.ring, ordered.slot)
        elif report.error is None and not report.lost:
            ordered.report, ordered.slot.state = report, SlotState.FULL
        if report.error is not None:
            raise report.error

    def _resubmit(self) -> None:
        """Go on with what an error interrupted."""
        under_way = {number for handle in self.crew.handles for number in handle.outstanding}
        for ordered in list(self._ordered):
            if ordered.report is not None or ordered.order.number in under_way:
                continue
            if self.crew.accounts[ordered.order.group].dropped:
                self._ordered.remove(ordered)
                self._give_back(ordered.ring, ordered.slot)
            else:
                self.crew.handle(ordered.order.group).submit(ordered.order, ordered.slot)
