"""Rules of which episodes count, against the selections of other libraries, written as those
describe them.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.episodes.rules import RuleName, check_rule, make_rule
from muster.errors import BadOption

NAMES = get_args(RuleName)


class End(NamedTuple):
    time: int
    env: int
    length: int


class Race:
    """Environments whose episodes have given lengths, in turn; all begin together."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths = lengths

    def ends_of(self, env: int, until: int) -> list[End]:
        found, time = [], 0
        for length in itertools.cycle(self.lengths[env]):
            time += length
            if time > until:
                return found
            found.append(End(time, env, length))
        raise AssertionError("a cycle does not end")

    def steps(self) -> itertools.chain[list[End]]:
        """What ends at time 1, 2, ..., by environment."""
        time = 0
        cycles = [itertools.cycle(lengths) for lengths in self.lengths]
        lengths = [next(cycle) for cycle in cycles]
        began = [0] * len(cycles)
        while True:
            time += 1
            now = [
                End(time, i, lengths[i])
                for i in range(len(cycles))
                if time - began[i] == lengths[i]
            ]
            for end in now:
                began[end.env], lengths[end.env] = time, next(cycles[end.env])
            yield now


def counted(name: RuleName, lengths: list[list[int]], n: int) -> list[End]:
    """What the rule counts; on the way it must never count more than it awaits, nor go on when it
    is complete.
    """
    rule = make_rule(name, n, len(lengths))
    found: list[End] = []
    for ends in Race(lengths).steps():
        assert not rule.complete
        awaited = {i for i in range(len(lengths)) if rule.awaits(i)}
        assert awaited, "nobody can count any more, and not all are there"
        chosen = rule.ended([end.env for end in ends]) if ends else []
        assert {*chosen} <= awaited & {end.env for end in ends}
        found += [next(end for end in ends if end.env == i) for i in chosen]
        if rule.complete:
            assert not any(rule.awaits(i) for i in range(len(lengths)))
            return found
        assert len(found) < n
    raise AssertionError("steps go on for ever")


# --- the selections of other libraries, as they are described -------------------------------------


def by_prt_rl(lengths: list[list[int]], n: int) -> list[End]:
    """Step all until every environment has n // B and n % B of them one more; then select from the
    whole record.
    """
    base, rest = divmod(n, len(lengths))
    for until in itertools.count(1):
        of_env = [Race(lengths).ends_of(i, until) for i in range(len(lengths))]
        if (
            all(len(e) >= base for e in of_env)
            and sum(len(e) > base for e in of_env) >= rest
        ):
            chosen = [end for ends in of_env for end in ends[:base]]
            chosen += sorted(
                (ends[base] for ends in of_env if len(ends) > base),
                key=lambda end: end.time,
            )[:rest]
            return sorted(chosen, key=lambda end: end.time)
    raise AssertionError


def by_tianshou(lengths: list[list[int]], n: int) -> list[End]:
    """Environments that are ready make a step; as many of those that end in it are dropped as are
    too many.
    """
    ready = list(range(min(n, len(lengths))))
    episode = dict.fromkeys(ready, 0)
    steps = dict.fromkeys(ready, 0)
    collected: list[End] = []
    time = 0
    while len(collected) < n:
        time += 1
        done = []
        for i in ready:
            steps[i] += 1
            length = lengths[i][episode[i] % len(lengths[i])]
            if steps[i] == length:
                done.append(i)
                collected.append(End(time, i, length))
                steps[i], episode[i] = 0, episode[i] + 1
        surplus = len(ready) - (n - len(collected))
        if done and surplus > 0:
            ready = [i for i in ready if i not in done[:surplus]]
    return collected


def by_share(lengths: list[list[int]], n: int) -> list[End]:
    shares = Counter(i % len(lengths) for i in range(n))
    until = n * max(map(max, lengths))
    return sorted(
        end
        for i, share in shares.items()
        for end in Race(lengths).ends_of(i, until)[:share]
    )


def by_time(lengths: list[list[int]], n: int) -> list[End]:
    until = n * max(map(max, lengths))
    return sorted(
        end for i in range(len(lengths)) for end in Race(lengths).ends_of(i, until)
    )[:n]


REFERENCES: dict[RuleName, Callable[[list[list[int]], int], list[End]]] = {
    "fair": by_prt_rl,
    "last_even": by_tianshou,
    "per_env": by_share,
    "first_done": by_time,
}

races = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6
)


@pytest.mark.parametrize("name", NAMES)
@given(lengths=races, n=st.integers(1, 20))
def test_every_rule_counts_what_its_description_selects(
    name: RuleName, lengths: list[list[int]], n: int
) -> None:
    found = counted(name, lengths, n)
    assert len(found) == n
    assert found == REFERENCES[name](lengths, n)


@pytest.mark.parametrize(
    ("name", "lengths", "n", "expected"),
    [
        ("last_even", (1, 2, 3, 10), 8, [1, 1, 2, 1, 3, 2, 3, 10]),
        ("last_even", (1, 5), 7, [1, 1, 1, 1, 1, 5, 5]),
        ("last_even", (9, 1, 1), 2, [1, 9]),
        ("fair", (1, 2, 3), 7, [1, 1, 2, 3, 1, 2, 3]),
        ("fair", (1, 4), 5, [1, 1, 1, 4, 4]),
        ("fair", (9, 1, 1), 2, [1, 1]),
        ("per_env", (1, 4), 5, [1, 1, 1, 4, 4]),
        ("per_env", (9, 1, 1), 2, [1, 9]),
        ("first_done", (1, 4), 5, [1, 1, 1, 1, 4]),
        ("first_done", (9, 1, 1), 3, [1, 1, 1]),
    ],
)
def test_documented_selections(
    name: RuleName, lengths: tuple[int, ...], n: int, expected: list[int]
) -> None:
    assert [
        end.length for end in counted(name, [[length] for length in lengths], n)
    ] == expected


@given(lengths=races, n=st.integers(1, 20))
def test_last_even_counts_the_first_to_begin_and_so_leaves_none_unfinished(
    lengths: list[list[int]], n: int
) -> None:
    found = counted("last_even", lengths, n)
    latest = max(end.time - end.length for end in found)
    for i in range(len(lengths)):
        begun = [
            end
            for end in Race(lengths).ends_of(i, 200)
            if end.time - end.length < latest
        ]
        assert n < len(lengths) or {*begun} <= {*found}
    if n >= len(lengths):
        assert {end.env for end in found} == {*range(len(lengths))}


@pytest.mark.parametrize("name", NAMES)
@given(lengths=races, n=st.integers(1, 20), stop=st.integers(0, 30))
def test_a_rule_goes_on_after_pickling_as_if_nothing_had_been(
    name: RuleName, lengths: list[list[int]], n: int, stop: int
) -> None:
    rules = [make_rule(name, n, len(lengths)) for _ in range(2)]
    for ends in itertools.islice(Race(lengths).steps(), 60):
        which = [end.env for end in ends]
        if ends and ends[0].time == stop:
            rules[1] = pickle.loads(pickle.dumps(rules[1]))
        assert rules[0].ended(which) == rules[1].ended(
            which
        )  # also after they are complete
        assert rules[0].complete == rules[1].complete
        assert [r.awaits(0) for r in rules] == [rules[0].awaits(0)] * 2


@pytest.mark.parametrize("name", NAMES)
@given(lengths=races, n=st.integers(1, 20))
def test_a_complete_rule_counts_nothing_more(
    name: RuleName, lengths: list[list[int]], n: int
) -> None:
    rule, total = make_rule(name, n, len(lengths)), 0
    for ends in itertools.islice(Race(lengths).steps(), n * 6 + 6):
        total += len(rule.ended([end.env for end in ends]))
    assert total == n
    assert rule.complete


@pytest.mark.parametrize("name", NAMES)
def test_without_a_number_everything_counts_and_nothing_is_ever_complete(
    name: RuleName,
) -> None:
    rule = make_rule(name, None, 3)
    assert [rule.ended([0, 2]), rule.ended([]), rule.ended([1])] == [[0, 2], [], [1]]
    assert (rule.complete, rule.awaits(1), rule.biased) == (False, True, True)


def test_a_rule_says_whether_short_episodes_have_better_chances() -> None:
    biased = {name: [make_rule(name, n, 4).biased for n in (3, 8, 9)] for name in NAMES}
    assert biased == {
        "fair": [True, False, True],  # unless it comes out even
        "last_even": [False] * 3,
        "per_env": [False] * 3,
        "first_done": [True] * 3,
    }


@pytest.mark.parametrize(
    "check",
    [
        check_rule,
        lambda name: make_rule(name, None, 1),
        lambda name: make_rule(name, 3, 1),
    ],
)
def test_an_unknown_rule_is_refused_with_the_known_ones(
    check: Callable[[str], object],
) -> None:
    with pytest.raises(
        BadOption,
        match=r"rule='fastest': expected 'fair'.*'last_even'.*'per_env'.*'first_done'",
    ):
        check("fastest")
