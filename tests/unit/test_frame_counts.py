"""Counts of steps that travel: whoever adds them up has the same numbers as whoever has counted."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from muster.progress import Timing
from muster.sources.crew import Account, FrameCounts
from muster.sources.messages import Report

STEPS = st.integers(0, 50)
REASONS = st.sampled_from(["worker_died", "interrupted", "env_error"])


def account() -> Account:
    return Account(None, np.arange(2))  # type: ignore[arg-type]


def report(executed: int, lost: int, *, complete: bool) -> Report:
    discarded = {"env_error": min(lost, executed)} if lost else {}
    made = Report(1, 0, executed=executed, discarded=discarded, timing=Timing(1.0, 2.0, 3.0, 6.0))
    made.lost = not complete
    return made


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.builds(report, STEPS, STEPS, complete=st.booleans())),
    st.tuples(st.just("cut_short"), STEPS),
    st.tuples(st.just("give_up"), REASONS),
    st.tuples(st.just("unseen"), STEPS),
    st.tuples(st.just("travel"), st.none()),
)


@given(st.lists(EVENTS, max_size=30))
def test_what_is_added_up_is_what_was_counted(events: list[tuple[str, Any]]) -> None:
    ours, theirs, told = account(), account(), FrameCounts()
    for name, given_ in [*events, ("travel", None)]:
        if name == "travel":
            now: FrameCounts = pickle.loads(pickle.dumps(theirs.counts()))
            ours.add_counts(now.since(told))
            told = now
        elif name == "unseen":
            theirs.unseen += given_
        else:
            getattr(theirs, name)(given_)
        assert theirs.executed == theirs.in_flight + sum(theirs.discarded.values())
    assert ours.counts() == theirs.counts()
    assert ours.in_flight == theirs.in_flight
