"""Frame counts that travel: the main process has the numbers of the node, and gives up nothing
twice.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from muster.rollout.tally import Timing
from muster.workers.counters import FrameCounters, NodeCounts
from muster.workers.messages import RolloutResult

STEPS = st.integers(0, 50)
REASONS = st.sampled_from(["worker_died", "interrupted", "env_error"])


def counts() -> FrameCounters:
    return FrameCounters(None, np.arange(2))  # type: ignore[arg-type]


def result(executed: int, lost: int, *, complete: bool) -> RolloutResult:
    discarded = {"env_error": min(lost, executed)} if lost else {}
    return RolloutResult(
        1,
        0,
        executed=executed,
        discarded=discarded,
        timing=Timing(1.0, 2.0, 3.0, 6.0),
        lost=not complete,
    )


def sent(counts: NodeCounts) -> NodeCounts:
    arrived: NodeCounts = pickle.loads(pickle.dumps(counts))
    return arrived


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.builds(result, STEPS, STEPS, complete=st.booleans())),
    st.tuples(st.just("cut_short"), STEPS),
    st.tuples(st.just("give_up"), REASONS),
    st.tuples(st.just("travel"), st.none()),
)


@given(st.lists(EVENTS, max_size=30))
def test_what_has_arrived_is_what_was_counted(events: list[tuple[str, Any]]) -> None:
    ours, theirs, told = counts(), counts(), NodeCounts()
    for name, given_ in [*events, ("travel", None)]:
        if name == "travel":
            now = sent(theirs.counts())
            assert now.executed >= told.executed
            assert sum(now.discarded.values()) >= sum(told.discarded.values())
            ours.add_counts(now, told)
            told = now
        else:
            getattr(theirs, name)(given_)
    assert (ours.executed, +ours.discarded, ours.in_flight) == (
        theirs.executed,
        +theirs.discarded,
        theirs.in_flight,
    )
    assert ours.timing == theirs.timing


def test_steps_that_were_given_up_here_are_not_given_up_again() -> None:
    ours, theirs = counts(), counts()
    theirs.add(result(7, 0, complete=False))
    ours.add_counts(theirs.counts(), NodeCounts())
    told = theirs.counts()
    ours.give_up("policy_changed")
    theirs.give_up("worker_died")
    ours.add_counts(theirs.counts(), told)
    assert (ours.executed, ours.in_flight, +ours.discarded) == (
        7,
        0,
        {"policy_changed": 7},
    )


def test_a_lost_node_takes_only_what_has_not_arrived() -> None:
    ours, theirs = counts(), counts()
    theirs.add(result(20, 0, complete=True))
    theirs.add(result(5, 0, complete=False))
    ours.add_counts(theirs.counts(), NodeCounts())
    ours.arrived(20)
    ours.give_up("worker_died")
    assert (ours.executed, ours.in_flight, +ours.discarded) == (
        25,
        20,
        {"worker_died": 5},
    )


def test_steps_whose_result_has_not_arrived_are_told_apart() -> None:
    ours = counts()
    first = NodeCounts(executed=8)
    ours.add_counts(first, NodeCounts())
    assert (ours.in_flight, ours.without_result) == (8, 8)
    second = NodeCounts(executed=16, discarded={"env_error": 2})
    ours.add_counts(second, first)  # the lane of the first rollout comes later
    assert (ours.in_flight, ours.without_result) == (14, 14)
    ours.arrived(8)
    assert (ours.in_flight, ours.without_result) == (14, 6)
    ours.failed()  # the second one keeps its rows, and goes on
    assert (ours.in_flight, ours.without_result, ours.partial) == (14, 0, 6)
    third = NodeCounts(executed=18, discarded={"env_error": 2})
    ours.add_counts(third, second)
    ours.arrived(8)
    assert (ours.in_flight, ours.without_result, ours.partial) == (16, 0, 0)


def test_steps_that_are_given_up_are_not_waited_for() -> None:
    for give_up in (lambda c: c.give_up("worker_died"), lambda c: c.abandon("surplus")):
        ours = counts()
        ours.add_counts(NodeCounts(executed=8), NodeCounts())
        give_up(ours)
        assert (ours.in_flight, ours.without_result) == (0, 0)
