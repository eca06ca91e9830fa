"""``collect(n_episode=n)``: exactly n, and which; against environments that are simulated by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster import Collector, MultiSyncCollector
from tests.fakes.patterned import (
    Contest,
    PatternEnv,
    Patterns,
    Whole,
    contest,
    return_of,
    walk,
    wholes,
)
from tests.tools import assert_accounted

RULES = ["fair", "last_even", "per_env", "first_done"]


@st.composite
def patterns(draw: st.DrawFn, most: int = 5) -> list[list[int]]:
    """Lengths of episodes, by environment; often the same for all, so that many end at once."""
    num_envs = draw(st.integers(1, most))
    lengths = st.lists(
        st.integers(1, draw(st.sampled_from([2, 7, 40]))), min_size=1, max_size=3
    )
    return draw(st.lists(lengths, min_size=num_envs, max_size=num_envs))


amounts = st.lists(st.integers(1, 12), min_size=1, max_size=3)


def make(lengths: Patterns, groups: int = 1, **options: Any) -> Collector:
    """In process; one environment without ``num_envs`` where ``groups`` is 0."""
    env = partial(PatternEnv, lengths)
    if groups == 0:
        return Collector(env, None, seed=0, **options)
    return Collector(
        [env] * groups if groups > 1 else env,
        None,
        num_envs=len(lengths) // groups,
        seed=0,
        **options,
    )


def assert_is(found: Any, expected: Contest, lengths: Patterns) -> None:
    """Batch and statistics of ``collect_batch`` are those of the chosen episodes."""
    batch, stats = found
    assert wholes(batch, lengths) == expected.chosen
    assert stats.n_collected_episodes == len(expected.chosen)
    assert (
        stats.n_collected_steps
        == len(batch)
        == sum(whole.length for whole in expected.chosen)
    )
    assert stats.returns.tolist() == [return_of(whole) for whole in expected.chosen]
    assert stats.lens.tolist() == [whole.length for whole in expected.chosen]


@given(patterns(), amounts, st.sampled_from(RULES), st.booleans())
@example([[1], [2], [3], [10]], [8], "last_even", True)
@example([[1], [5]], [7], "last_even", True)
@example([[1], [2], [3]], [7], "fair", True)
@example([[1], [4]], [5, 1, 2], "fair", True)
@example([[2], [2], [2]], [2, 4, 3], "last_even", True)
@example([[300]], [2, 1], "fair", False)
def test_exactly_n_episodes_and_those_that_the_rule_says(
    lengths, wanted, rule, numbered
):
    begins = [0] * len(lengths)
    made = 0
    with make(lengths, groups=int(numbered or len(lengths) > 1)) as c:
        for n in wanted:
            expected = contest(rule, n, lengths, begins)
            found = c.collect_batch(n_episode=n, rule=rule)
            assert_is(found, expected, lengths)
            begins, made = expected.begins, made + sum(expected.steps)
            assert c.stats().executed == made, "who is not awaited rests"
            assert found.stats.n_discarded_steps == sum(expected.steps) - len(
                found.batch
            )
            assert_accounted(c)


@given(patterns(3), st.integers(1, 15), st.sampled_from(RULES), st.integers(2, 3))
def test_several_groups_compete_as_one_would(lengths, n, rule, groups):
    lengths = lengths * groups
    with make(lengths, groups) as c:
        assert_is(
            c.collect_batch(n_episode=n, rule=rule),
            contest(rule, n, lengths, [0] * len(lengths)),
            lengths,
        )
        assert_accounted(c)
        again = c.collect_batch(n_episode=n, rule=rule)
        assert len(wholes(again.batch, lengths)) == n
        assert_accounted(c)


@given(patterns(), amounts, st.integers(1, 2))
def test_nothing_is_lost_where_surplus_is_kept(lengths, wanted, groups):
    """The first to end of several calls are those of a single one."""
    lengths = lengths * groups
    total = sum(wanted)
    found: list[Any] = []
    with make(lengths, groups) as c:
        for n in wanted:
            batch, stats = c.collect_batch(
                n_episode=n, rule="first_done", surplus="keep"
            )
            found += wholes(batch, lengths)
            assert stats.n_kept_steps == c.stats().in_flight
            assert stats.n_discarded_steps == 0
            assert not c.stats().discarded
            assert_accounted(c)
    assert found == contest("first_done", total, lengths, [0] * len(lengths)).chosen


@given(patterns(), amounts, st.sampled_from(RULES))
def test_every_episode_is_delivered_once_where_surplus_is_kept(lengths, wanted, rule):
    B = len(lengths)
    seen: list[tuple[int, int]] = []
    with make(lengths) as c:
        for n in wanted:
            batch, stats = c.collect_batch(n_episode=n, rule=rule, surplus="keep")
            found = wholes(batch, lengths)
            assert len(found) == stats.n_collected_episodes == n
            counts = [sum(whole.env == i for whole in found) for i in range(B)]
            share, more = divmod(n, B)
            assert rule != "per_env" or counts == [share + (i < more) for i in range(B)]
            assert (
                rule != "fair"
                or sorted(counts) == [share] * (B - more) + [share + 1] * more
            )
            assert rule != "last_even" or all(counts[: min(n, B)])
            seen += [whole[:2] for whole in found]
            assert not c.stats().discarded
            assert_accounted(c)
    assert len({*seen}) == len(seen)
    for i in range(B):
        assert [episode for env, episode in seen if env == i] == list(
            range(sum(env == i for env, _ in seen))
        )


any_call = st.tuples(
    st.sampled_from(["steps", "discard", "keep", "reset"]),
    st.integers(1, 9),
    st.sampled_from(RULES),
)


@given(patterns(3), st.integers(1, 2), st.lists(any_call, min_size=3, max_size=8))
def test_every_episode_is_whole_and_delivered_at_most_once_whatever_was_called_before(
    lengths, groups, wanted
):
    lengths = lengths * groups
    seen: list[Whole] = []
    with make(lengths, groups) as c:
        for call, n, rule in wanted:
            if call == "steps":
                assert c.collect(n_step=n).n_collected_steps == n
            elif call == "reset":
                c.reset()
            else:
                batch, stats = c.collect_batch(n_episode=n, rule=rule, surplus=call)
                found = wholes(batch, lengths)
                assert len(found) == n
                assert stats.returns.tolist() == [return_of(whole) for whole in found]
                assert stats.n_kept_steps == c.stats().in_flight
                seen += found
            assert_accounted(c)
    assert len({*seen}) == len(seen)


@given(
    patterns(3),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=2, max_size=5),
)
def test_steps_go_on_where_episodes_stopped_and_episodes_begin_anew(lengths, calls):
    at = [(0, 0)] * len(lengths)  # episode and step that each environment is in
    with make(lengths) as c:
        for by_episode, n in calls:
            if by_episode:
                expected = contest(
                    "last_even", n, lengths, [episode + (t > 0) for episode, t in at]
                )
                assert_is(
                    c.collect_batch(n_episode=n, rule="last_even"), expected, lengths
                )
                at = expected.stands
            else:
                batch, stats = c.collect_batch(n_step=n)
                assert batch.shape == (len(lengths), -(-n // len(lengths)))
                shown = batch["observation"][..., :3].tolist()
                at, ended = walk(shown, at, lengths)
                assert stats.n_collected_steps == n
                assert stats.lens.tolist() == [whole.length for whole in ended]
                assert stats.returns.tolist() == [return_of(whole) for whole in ended]
            assert_accounted(c)


FIXED = [
    ([[1], [2], [3], [10]], 8),
    ([[2, 5], [1], [3], [3]], 11),
    ([[4], [4], [4], [4]], 6),
    ([[7], [1, 2], [30], [2]], 3),
]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_give_the_same_episodes(num_workers):
    for lengths, n in FIXED:
        env = partial(PatternEnv, lengths)
        with MultiSyncCollector(
            [env] * 2, None, num_envs=2, seed=0, num_workers=num_workers
        ) as c:
            for rule in RULES:
                c.set_seed(0)
                assert_is(
                    c.collect_batch(n_episode=n, rule=rule),
                    contest(rule, n, lengths, [0] * 4),
                    lengths,
                )
                assert_accounted(c)
