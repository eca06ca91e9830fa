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
from muster.workers.group_state import layout_of, report_of, to_plain, write
from muster.workers.messages import Order, Report
from muster.workers.pool import WorkerPool, give_warnings
from muster.workers.schedule import Bundle, CollectRequest, FilledSlot, Schedule

FAIR_AFTER = 8  # batches per group, before shares are compared
FAIR_SHARE = 0.5  # of an equal share; less is worth a warning


@dataclass(eq=False)
class _Ordered:
    """Rollouts of a bundle that have been ordered and not delivered; ``born`` is the number of publishes before."""

    orders: list[Order]  # by lane
    bundle: Bundle
    ring: SlotRing
    slot: Slot
    born: int
    place: int  # among all that were ever ordered
    reports: dict[int, Report] = field(default_factory=dict)  # by order

    @property
    def complete(self) -> bool:
        return len(self.reports) == len(self.orders)


class _Pool:
    """What has been ordered and not delivered, oldest first. Nothing here takes longer with more workers."""

    def __init__(self) -> None:
        self._items: dict[int, _Ordered] = {}  # by place
        self._of: dict[int, _Ordered] = {}  # by number of the order
        self._waiting: defaultdict[int, list[_Ordered]] = defaultdict(list)  # by first group of the bundle
        self._complete: list[int] = []  # places, sorted

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[_Ordered]:
        return iter(list(self._items.values()))

    def add(self, ordered: _Ordered) -> None:
        """The newest, or one that was removed."""
        is_newest = not self._items or ordered.place > next(reversed(self._items))
        self._items[ordered.place] = ordered
        self._of |= {order.number: ordered for order in ordered.orders}
        waiting = self._waiting[ordered.bundle.groups[0]]
        waiting.append(ordered)
        if not is_newest:
            self._items = dict(sorted(self._items.items()))
            waiting.sort(key=lambda other: other.place)
        self.note(ordered)

    def remove(self, ordered: _Ordered) -> None:
        del self._items[ordered.place]
        for order in ordered.orders:
            del self._of[order.number]
        self._waiting[ordered.bundle.groups[0]].remove(ordered)
        if ordered.place in self._complete:
            self._complete.remove(ordered.place)

    def mend(self) -> None:
        """After an interruption (Ctrl-C in the middle of a change): all the rest follows from the items."""
        items = list(self._items.values())
        self._of = {order.number: ordered for ordered in items for order in ordered.orders}
        self._waiting.clear()
        for ordered in items:
            self._waiting[ordered.bundle.groups[0]].append(ordered)
        self._complete = [ordered.place for ordered in items if ordered.complete]

    def find(self, number: int) -> _Ordered | None:
        """That with an order of this number."""
        return self._of.get(number)

    def waiting(self, bundle: Bundle) -> list[_Ordered]:
        """Those of a bundle, oldest first."""
        return self._waiting[bundle.groups[0]]

    def note(self, ordered: _Ordered) -> None:
        """It may be complete now."""
        if ordered.complete:
            bisect.insort(self._complete, ordered.place)

    def complete(self) -> list[_Ordered]:
        return [self._items[place] for place in self._complete]


class FirstReady(Schedule):
    """Every batch has the rollouts of one bundle, whichever is complete first. Workers go on while the user trains.

    Args:
        bundles: groups that share batches; most often one group each.
        lead: rollouts of a group that are ordered, made or waiting at a time.
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
        self._ordered = _Pool()
        self._places = itertools.count()
        self._lacking = {bundle.groups[0]: bundle for bundle in self.bundles}  # those with fewer rollouts than ``lead``
        self._unsure = False  # something was interrupted, and may have to be ordered again
        self._delivered = 0
        self._begun: Counter[int] = Counter()  # rollouts that were ordered, by group
        self._behind: set[int] = set()  # groups that were warned of

    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """The next rollout that is complete; see ``Schedule``."""
        self._compare_shares()  # first, since a warning may be an error
        if self.pool.elastic:
            self.pool.welcome()
        if not len(self._ordered):  # else what is under way is finished first
            self._resize(wanted.rows)
        if self._unsure:
            self._mend()
            self._resubmit()
        self._unsure, postponed = True, False
        self._order(wanted, wanted.batches)
        while (found := self._deliverable()) is None:
            self.pool.check_alive()
            report = self.pool.next_report()
            self._take_note(report)
            is_away = self.pool.elastic and not self._is_there(report.group)
            if (report.dropped or report.lost or is_away) and not (postponed := self.pool.has_bad_news):
                self._resubmit()
                self._order(wanted, wanted.batches)  # the others do what it was to do
        give_warnings(self.pool)
        self._remove(found)
        reports = [found.reports[order.number] for order in found.orders]
        try:
            self._order(wanted, None if wanted.batches is None else wanted.batches - 1, delivered=1)
        except SlotsExhausted:
            pass  # which is for the next call to raise; this one has a batch
        except BaseException:
            self._ordered.add(found)
            raise
        for lane, report in enumerate(reports):
            self._finish(found.slot, lane, report)
        self._delivered += 1
        self._unsure = postponed
        return FilledSlot([(found.ring, found.slot)], reports)

    @property
    def ahead_of_user(self) -> bool:
        return len(self._ordered) > 0

    def rollouts_for(self, frames: int, rows: int | None) -> int:
        if not len(self._ordered):
            self._resize(rows)
        accounts = self.pool.accounts
        sizes = [sum(self.T[n] * accounts[n].info.num_envs for n in bundle.groups) for bundle in self.bundles]
        return -(-frames // min(sizes))

    def _batch_groups(self) -> Sequence[int]:
        return self.bundles[0].groups

    @postponed()
    def waiting(self) -> list[dict[str, Any]]:
        """See ``Schedule``. The rollouts stay, and are delivered as if nothing had been asked."""
        self._unsure = True
        while self.pool.outstanding:
            self._take_note(self.pool.next_report())
        made = []
        for ordered in self._ordered.complete():
            reports = [ordered.reports[order.number] for order in ordered.orders]
            age = self._publishes() - ordered.born
            made.append({"groups": ordered.bundle.groups, "age": age, **to_plain(ordered.slot, reports)})
        return made

    def restore(self, waiting: Sequence[dict[str, Any]]) -> None:
        """See ``Schedule``."""
        for plain in waiting:
            bundle = next(bundle for bundle in self.bundles if bundle.groups == plain["groups"])
            ring = bundle.ring_of(layout_of(plain))
            slot = ring.take()
            write(plain, slot)
            orders = [
                Order(next(self.pool.numbers), group, lane, policy="") for lane, group in enumerate(bundle.groups)
            ]
            born, place = self._publishes() - plain["age"], next(self._places)
            ordered = _Ordered(orders, bundle, ring, slot, born, place)
            for order, part in zip(orders, plain["reports"], strict=True):
                ordered.reports[order.number] = report_of(part, order.number)
                self.pool.accounts[order.group].in_flight += part["frames"]
            slot.state = SlotState.FULL
            self._ordered.add(ordered)
        self._mend()

    @postponed()
    def abandon(self, reason: str) -> None:
        """See ``Schedule``; the environments go on where they are."""
        while self.pool.outstanding:
            with suppress(MusterError):
                self._take_note(self.pool.next_report())
        self._discard(reason)

    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """Of the slots of the first group that is there."""
        bundle = next(filter(self._can_work, self.bundles), self.bundles[0])
        self._prepare(bundle, policy)
        return bundle.ring.layout

    def _discard(self, reason: str) -> None:
        super()._discard(reason)
        self._mend()
        for ordered in self._ordered:
            self._remove(ordered)
            self._give_back(ordered.ring, ordered.slot)

    def _mend(self) -> None:
        self._ordered.mend()
        lacking = [bundle for bundle in self.bundles if len(self._ordered.waiting(bundle)) < self._lead]
        self._lacking = {bundle.groups[0]: bundle for bundle in lacking}

    def _remove(self, ordered: _Ordered) -> None:
        self._ordered.remove(ordered)
        self._lacking[ordered.bundle.groups[0]] = ordered.bundle

    def _compare_shares(self) -> None:
        """Warn, once, of each group that is left behind."""
        accounts = self.pool.accounts
        if self._delivered < FAIR_AFTER * len(accounts) or self._delivered % len(accounts):
            return
        fair = sum(account.delivered for account in accounts) / len(accounts)
        for number, account in enumerate(accounts):
            there = not (account.dropped or account.late)
            if account.delivered < fair * FAIR_SHARE and number not in self._behind and there:
                self._behind.add(number)
                warnings.warn(
                    f"worker {self.pool.handle(number).index} is falling behind: environments "
                    f"{account.env_ids.tolist()} ({account.info.name}) have delivered {account.delivered:,} frames, "
                    f"where an equal share would be {fair:,.0f}. The data is mostly that of quicker environments; "
                    f"MultiSyncCollector gives all the same share.",
                    stacklevel=2,
                )

    def _order(self, wanted: CollectRequest, batches: int | None, *, delivered: int = 0) -> None:
        """Give work to every group that has too little."""
        # What is delivered now is followed by a publish.
        lag = None if self._max_lag is None else self._max_lag + 1 - delivered
        bounds = [n for n in (batches, lag) if n is not None]
        most = min(bounds, default=self._lead * len(self.bundles))
        for level in range(self._lead if len(self._ordered) < most else 0):
            for bundle in sorted(self._lacking.values(), key=lambda bundle: self._begun[bundle.groups[0]]):
                if len(self._ordered) >= most:
                    return
                if len(self._ordered.waiting(bundle)) <= level and self._can_work(bundle):
                    ordered = self._ordered_from(bundle, wanted, delivered)
                    if ordered is not None:
                        self._send(ordered, ordered.orders)
                        self._add(ordered)

    def _is_dropped(self, bundle: Bundle) -> bool:
        return all(self.pool.accounts[group].dropped for group in bundle.groups)

    def _is_there(self, group: int) -> bool:
        return self.pool.accounts[group].dropped or not self.pool.handle(group).absent

    def _can_work(self, bundle: Bundle) -> bool:
        return not self._is_dropped(bundle) and all(self._is_there(group) for group in bundle.groups)

    def _ordered_from(self, bundle: Bundle, wanted: CollectRequest, delivered: int) -> _Ordered | None:
        """Rollouts to be ordered from the groups of a bundle; None if it is dropped."""
        policy = wanted.policy(len(self._ordered) + delivered)
        self._prepare(bundle, policy)
        if self._is_dropped(bundle):  # just now
            return None
        slot = bundle.ring.take()
        limit = self._limit(wanted.limit, bundle.groups)
        waiting = self._ordered.waiting(bundle)
        before = waiting[-1].orders if waiting else None
        orders = [
            Order(
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
        return _Ordered(orders, bundle, bundle.ring, slot, self._publishes(), next(self._places))

    def _add(self, ordered: _Ordered) -> None:
        """Rollouts that workers have been told of."""
        bundle = ordered.bundle
        self._begun[bundle.groups[0]] += 1
        self._ordered.add(ordered)
        if len(self._ordered.waiting(bundle)) >= self._lead:
            self._lacking.pop(bundle.groups[0], None)
        if self.ahead is not None:
            self.ahead.prepare(ordered.ring, ordered.slot)

    def _prepare(self, bundle: Bundle, policy: str) -> None:
        living = [group for group in bundle.groups if not self.pool.accounts[group].dropped]
        handles = list(dict.fromkeys(self.pool.handle(group) for group in living))
        if bundle.laid_out and all(handle.prepared(policy) for handle in handles):
            return
        layouts: dict[int, Layout] = {}
        for handle in handles:
            layouts |= self._lay_out(handle, policy, None)  # when what was ordered before is done
        for other in self.bundles:
            known = [group for group in other.groups if group in layouts]
            if known:  # nobody can be asked about those that were dropped
                other.lay_out([layouts.get(group, layouts[known[0]]) for group in other.groups], self._names(other))

    def _sharing(self, bundle: Bundle, group: int) -> tuple[int, int] | None:
        """Where a group stands among those that share batches; None: it has its own."""
        if len(bundle.groups) == 1:
            return None
        accounts = [self.pool.accounts[number] for number in bundle.groups]
        sizes = [0 if account.dropped else account.info.num_envs for account in accounts]
        return sum(sizes[: bundle.groups.index(group)]), sum(sizes)

    def _deliverable(self) -> _Ordered | None:
        """A complete rollout, the oldest one first, that may overtake what is older and not complete."""
        now = self._publishes()
        for ordered in self._ordered.complete():
            if self._max_lag is None:
                return ordered
            older = enumerate(o for o in self._ordered if o.place < ordered.place)
            if all(now + 1 - o.born + ahead <= self._max_lag for ahead, o in older):
                return ordered
        return None

    def _take_note(self, report: Report) -> None:
        ordered = self._ordered.find(report.number)
        if ordered is None:  # its bundle was dropped, or it is about no order
            pass
        elif report.dropped and self._is_dropped(ordered.bundle):
            self._remove(ordered)
            self._give_back(ordered.ring, ordered.slot)
        elif report.error is None and not report.lost:
            ordered.reports[report.number] = report
            self._ordered.note(ordered)
            if ordered.complete:
                ordered.slot.state = SlotState.FULL
        if report.error is not None:
            raise report.error

    def _withdraw(self, ordered: _Ordered) -> None:
        """A node that is gone cannot follow these orders, and others shall do the work."""
        for report in ordered.reports.values():
            self.pool.accounts[report.group].discard("worker_died", report.frames)
        self._remove(ordered)
        self._give_back(ordered.ring, ordered.slot)

    def _resubmit(self) -> None:
        """Go on with what an error interrupted."""
        under_way = {number for handle in self.pool.handles for number in handle.outstanding}
        for ordered in list(self._ordered):
            missing = [o for o in ordered.orders if o.number not in ordered.reports and o.number not in under_way]
            if missing and self._is_dropped(ordered.bundle):
                self._remove(ordered)
                self._give_back(ordered.ring, ordered.slot)
                continue
            if missing and not self._can_work(ordered.bundle):
                if len(missing) + len(ordered.reports) == len(ordered.orders):  # else somebody writes into the slot
                    self._withdraw(ordered)
                continue
            if missing:
                self._send(ordered, missing)
                self._ordered.note(ordered)

    def _send(self, ordered: _Ordered, orders: Sequence[Order]) -> None:
        """Give orders to workers; those that were dropped have nothing to do."""
        with self.pool.hold() if len(orders) > 1 else nullcontext():
            for order in orders:
                if self.pool.accounts[order.group].dropped:
                    ordered.reports[order.number] = Report(order.number, order.group, dropped=True)
                else:
                    self.pool.handle(order.group).submit(order, ordered.slot)
