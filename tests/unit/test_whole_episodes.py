"""Groups of whole episodes against a loop that keeps lists, for every rule; bias, memory, resume."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from muster import Collector
from muster.episodes.kept import CopiedRows
from muster.episodes.whole import WholeEpisodes
from muster.errors import BadOption
from tests.tools import counting, push
from tests.waits import without_gc

INVALID = -1


@dataclass(eq=False)
class Episode:
    env: int
    traj_id: int
    began: int
    ended: int | None = None
    rows: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    dropped: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.ended is not None and self.dropped is None


class Stream:
    """Batches as a collector would give them, and the episodes in them, written down one row at a
    time.
    """

    def __init__(self, lengths: list[list[int]], lead: tuple[int, ...]) -> None:
        self.lengths, self.lead, self.envs = lengths, lead, len(lengths)
        self.episodes: list[Episode] = []
        self.running: list[Episode | None] = [None] * self.envs
        self.version = self.time = self.number = 0
        self.made = [0] * self.envs

    def reset(self, which: list[int]) -> None:
        for i in which:
            if (episode := self.running[i]) is not None:
                episode.dropped = episode.dropped or "cut"
                self.running[i] = None

    def batch(
        self, T: int, holes: set[int] = frozenset(), versions: list[int] | None = None
    ) -> TensorDict:
        """``T`` rows; those of ``holes`` (``env * T + t``) are of an interrupted rollout."""
        columns: dict[str, Any] = {
            key: np.zeros((self.envs, T), int)
            for key in ("row", "id", "done", "version")
        }
        for i in range(self.envs):
            for t in range(T):
                version = self.version if versions is None else versions[t]
                columns["version"][i, t] = version
                if i * T + t in holes:
                    columns["id"][i, t] = INVALID
                    continue
                columns["id"][i, t], columns["row"][i, t], columns["done"][i, t] = (
                    self._step(i, self.time + t, version)
                )
        self.time += T
        shape = (*self.lead, T)
        tensor = {
            key: torch.from_numpy(value).reshape(shape)
            for key, value in columns.items()
        }
        entries = {
            "row": tensor["row"],
            "next": {"done": tensor["done"].bool().unsqueeze(-1)},
            "collector": {
                "traj_ids": tensor["id"],
                "policy_version": tensor["version"],
            },
        }
        return TensorDict(entries, shape, names=[*[None] * len(self.lead), "time"])

    def _step(self, env: int, time: int, version: int) -> tuple[int, int, bool]:
        episode = self.running[env]
        if episode is None:
            episode = self.running[env] = Episode(
                env, env + self.envs * self.made[env], time
            )
            self.made[env] += 1
            self.episodes.append(episode)
        self.number += 1
        episode.rows.append(self.number)
        episode.versions.add(version)
        lengths = self.lengths[env]
        done = len(episode.rows) == lengths[(self.made[env] - 1) % len(lengths)]
        if done:
            episode.ended, self.running[env] = time, None
        return episode.traj_id, self.number, done

    def due(self, rule: str, n: int) -> list[list[Episode]]:
        """All groups that can be delivered by now, from the definitions of the rules."""
        alive = [e for e in self.episodes if e.dropped is None]
        if rule == "per_env":
            of_env = [
                [e for e in alive if e.env == i and e.is_complete]
                for i in range(self.envs)
            ]
            share = n // self.envs
            groups = min(len(episodes) // share for episodes in of_env)
            return [
                [e for env in of_env for e in env[g * share : (g + 1) * share]]
                for g in range(groups)
            ]
        if rule == "first_begun":
            order = sorted(alive, key=lambda e: (e.began, e.env))
            complete = [e.is_complete for e in order]
            order = order[: complete.index(False)] if False in complete else order
        else:
            order = sorted(
                (e for e in alive if e.is_complete), key=lambda e: (e.ended, e.env)
            )
        return [order[i : i + n] for i in range(0, len(order) - n + 1, n)]


def rows_of(group: TensorDict) -> list[list[int]]:
    """Row numbers of a group, episode by episode; checks what must hold for its layout."""
    if group.ndim == 1:
        assert group.names == ["time"]
        assert ("collector", "mask") not in group
        ends = group["next", "done"].squeeze(-1).nonzero().flatten() + 1
        assert ends[-1] == len(group)
        return [part.tolist() for part in group["row"].tensor_split(ends[:-1])]
    assert group.names == [None, "time"]
    mask = group["collector", "mask"]
    assert mask.any(0).all(), "no longer than the longest episode"
    assert (group["collector", "traj_ids"][~mask] == -1).all()
    assert not group["row"][~mask].any()
    length = mask.sum(1)
    assert group["next", "done"][torch.arange(len(group)), length - 1].all()
    assert group["next", "done"].sum() == len(group)
    return [
        row[:n].tolist() for row, n in zip(group["row"], length.tolist(), strict=True)
    ]


def rows_in(state: dict[str, Any]) -> int:
    """Of a saved state."""
    return 0 if state["rows"] is None else state["rows"]["shape"][0]


@st.composite
def histories(draw):
    """Episode lengths, and what happens: batches of some length with holes, and resets between
    them.
    """
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    envs = int(np.prod(lead))
    lengths = [
        draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)) for _ in range(envs)
    ]
    events = []
    for _ in range(draw(st.integers(1, 8))):
        T = draw(st.integers(1, 6))
        holes = (
            draw(st.sets(st.integers(0, envs * T - 1), max_size=2))
            if draw(st.booleans())
            else set()
        )
        reset = (
            draw(st.sets(st.integers(0, envs - 1)))
            if draw(st.integers(0, 3)) == 0
            else set()
        )
        versions = sorted(draw(st.lists(st.integers(0, 2), min_size=T, max_size=T)))
        events.append((T, holes, sorted(reset), versions, draw(st.booleans())))
    return lead, lengths, events


@given(
    histories(),
    st.sampled_from(["first_begun", "per_env", "first_done"]),
    st.sampled_from(["cat", "pad"]),
    st.integers(1, 3),
)
def test_groups_equal_lists_kept_by_hand(history, rule, layout, share):
    lead, lengths, events = history
    stream = Stream(lengths, lead)
    n = share * stream.envs if rule == "per_env" else share
    make = lambda: WholeEpisodes(n, num_envs=stream.envs, layout=layout, rule=rule)  # noqa: E731
    episodes, delivered, frames = make(), [], 0
    for T, holes, reset, _, resume in events:
        stream.reset(reset)
        before = episodes.frames_held
        assert episodes.flush(reset) == before - episodes.frames_held
        batch = stream.batch(T, holes)
        groups = push(episodes, batch)
        for group in groups:
            delivered.append(rows_of(group.batch))
            assert group.frames == sum(map(len, delivered[-1]))
            frames += group.frames
        batch.zero_()  # what is held is a copy
        assert delivered == [[e.rows for e in group] for group in stream.due(rule, n)]
        expected = Counter(
            e.dropped for e in stream.episodes for _ in e.rows if e.dropped
        )
        assert episodes.dropped == expected
        assert stream.number == frames + episodes.dropped.total() + episodes.frames_held
        if resume:
            state = episodes.state_dict()
            assert rows_in(state) == episodes.frames_held
            episodes = make()
            episodes.load_state_dict(state)


@given(histories(), st.integers(1, 3))
def test_on_policy_only_drops_episodes_of_several_policies(history, n):
    lead, lengths, events = history
    stream = Stream(lengths, lead)
    episodes, delivered = (
        WholeEpisodes(n, num_envs=stream.envs, on_policy_only=True),
        [],
    )
    for T, holes, _, versions, resume in events:
        delivered += [
            rows_of(group.batch)
            for group in push(episodes, stream.batch(T, holes, versions))
        ]
        for e in stream.episodes:
            e.dropped = "mixed_policy" if len(e.versions) > 1 else None
        if resume:
            state = episodes.state_dict()
            assert rows_in(state) == episodes.frames_held
            episodes = WholeEpisodes(n, num_envs=stream.envs, on_policy_only=True)
            episodes.load_state_dict(state)
    assert delivered == [
        [e.rows for e in group] for group in stream.due("first_begun", n)
    ]
    mixed = sum(len(e.rows) for e in stream.episodes if e.dropped)
    assert episodes.dropped == Counter(mixed_policy=mixed)
    assert stream.number == mixed + episodes.frames_held + sum(
        len(rows) for group in delivered for rows in group
    )


# --- batches of some of the environments ----------------------------------------------------------


def part(batch: TensorDict, envs: list[int], time: slice) -> TensorDict:
    """Of a batch ``[*lead, T]``, ``[len(envs), time]``."""
    rows = batch.reshape(-1, batch.shape[-1])[envs, time]
    rows.names = [None, "time"]
    return rows


@st.composite
def interleavings(draw):
    """A stream, and an order in which groups of its environments (in any order) give their next few
    rows.
    """
    envs, T = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    stream = Stream(
        [
            draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
            for _ in range(envs)
        ],
        (envs,),
    )
    holes = draw(st.sets(st.integers(0, envs * T - 1), max_size=4))
    batch = stream.batch(
        T, holes, sorted(draw(st.lists(st.integers(0, 3), min_size=T, max_size=T)))
    )
    order = draw(st.permutations(range(envs)))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, envs))) - {envs}), envs]
    groups = [order[a:b] for a, b in pairwise(cuts)]
    times, events = [0] * len(groups), []
    while waiting := [g for g, t in enumerate(times) if t < T]:
        g = draw(st.sampled_from(waiting))
        end = min(T, times[g] + draw(st.integers(1, 12)))
        events.append((groups[g], slice(times[g], end), draw(st.integers(0, 5)) == 0))
        times[g] = end
    return stream, batch, events


@given(
    interleavings(),
    st.sampled_from(["first_begun", "per_env"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_groups_do_not_depend_on_the_speed_of_environments(
    history, rule, on_policy_only, share
):
    stream, batch, events = history
    n = share * stream.envs if rule == "per_env" else share
    make = lambda: WholeEpisodes(  # noqa: E731
        n, num_envs=stream.envs, rule=rule, on_policy_only=on_policy_only
    )
    lockstep = [rows_of(group.batch) for group in push(make(), batch)]
    episodes, delivered, pushed = make(), [], 0
    for envs, time, resume in events:
        rows = part(batch, envs, time)
        pushed += int((rows["collector", "traj_ids"] != INVALID).sum())
        delivered += [rows_of(group.batch) for group in push(episodes, rows, envs)]
        assert delivered == lockstep[: len(delivered)]
        frames = sum(len(episode) for group in delivered for episode in group)
        assert pushed == frames + episodes.dropped.total() + episodes.frames_held
        if resume:
            state, episodes = episodes.state_dict(), make()
            episodes.load_state_dict(state)
    assert delivered == lockstep


@given(interleavings(), st.integers(1, 3))
def test_first_done_is_the_order_of_arrival(history, n):
    stream, batch, events = history
    ends = {e.rows[-1]: (e.ended, e.env) for e in stream.episodes if e.is_complete}
    episodes, delivered, expected = (
        WholeEpisodes(n, num_envs=stream.envs, rule="first_done"),
        [],
        [],
    )
    for envs, time, resume in events:
        rows = part(batch, envs, time)
        delivered += [
            e[-1] for group in push(episodes, rows, envs) for e in rows_of(group.batch)
        ]
        expected += sorted(
            set(rows["row"].flatten().tolist()) & ends.keys(), key=ends.__getitem__
        )
        assert delivered == expected[: len(expected) // n * n]
        if resume:
            state, episodes = (
                episodes.state_dict(),
                WholeEpisodes(n, num_envs=stream.envs, rule="first_done"),
            )
            episodes.load_state_dict(state)


def lengths_pushed(
    episodes: WholeEpisodes, batch: TensorDict, envs: list[int], time: slice
) -> list[list[int]]:
    return [
        [len(e) for e in rows_of(g.batch)]
        for g in push(episodes, part(batch, envs, time), envs)
    ]


def test_the_fair_rule_holds_what_a_slow_environment_may_come_before_and_no_more():
    batch, episodes = Stream([[2], [3]], (2,)).batch(12), WholeEpisodes(1, num_envs=2)
    assert lengths_pushed(episodes, batch, [0], slice(0, 6)) == [
        [2]
    ]  # began with environment 1, and is before it
    assert episodes.frames_held == 4
    assert lengths_pushed(episodes, batch, [1], slice(0, 2)) == []
    assert lengths_pushed(episodes, batch, [1], slice(2, 3)) == [
        [3],
        [2],
    ]  # the next of 1 begins at 3, that of 0 at 4
    assert lengths_pushed(episodes, batch, [1], slice(3, 9)) == [
        [3],
        [2],
    ]  # began at 3, 4
    assert episodes.frames_held == 3  # began at 6, where 0 is now
    assert lengths_pushed(episodes, batch, [0], slice(6, 7)) == []
    assert lengths_pushed(episodes, batch, [0], slice(7, 8)) == [[2], [3]]


def test_environments_that_are_gone_are_not_waited_for():
    batch, episodes = (
        Stream([[2], [3], [4]], (3,)).batch(12),
        WholeEpisodes(1, num_envs=3),
    )
    assert (
        lengths_pushed(episodes, batch, [1, 2], slice(0, 6)) == []
    )  # those of environment 0 come before them
    push(episodes, part(batch, [0], slice(0, 1)), [0])
    assert episodes.retire([0]) == 1
    state, episodes = episodes.state_dict(), WholeEpisodes(1, num_envs=3)
    episodes.load_state_dict(state)
    assert lengths_pushed(episodes, batch, [1, 2], slice(6, 9)) == [
        [3],
        [4],
        [3],
        [4],
        [3],
    ]
    assert episodes.retire(iter([1, 2])) == 1
    assert episodes.dropped == {"cut": 2}
    with pytest.raises(
        BadOption, match=r"retire\(\[2\]\): rule='per_env' needs episodes of every"
    ):
        WholeEpisodes(3, num_envs=3, rule="per_env").retire([2])


def test_a_skipped_part_cuts_only_its_own_environments():
    batch, episodes = Stream([[4], [4]], (2,)).batch(12), WholeEpisodes(1, num_envs=2)
    push(episodes, part(batch, [0, 1], slice(0, 2)), [0, 1])
    episodes.skip(part(batch, [1], slice(2, 6)), [1])
    assert episodes.dropped == {"cut": 2}
    assert lengths_pushed(episodes, batch, [0], slice(2, 9)) == [
        [4],
        [4],
    ]  # 1 is at time 6, and 0 began at 0, 4, 8
    assert lengths_pushed(episodes, batch, [1], slice(6, 12)) == []
    assert episodes.dropped == {"cut": 4}
    assert episodes.frames_held == 1 + 4
    assert lengths_pushed(episodes, batch, [0], slice(9, 12)) == [[4], [4]]


# --- groups taken by hand -------------------------------------------------------------------------


@given(histories(), st.sampled_from(["cat", "pad"]), st.data())
def test_groups_taken_by_hand_are_the_episodes_that_were_named(history, layout, data):
    lead, lengths, events = history
    stream, frames = Stream(lengths, lead), 0
    make = lambda: WholeEpisodes(num_envs=stream.envs, layout=layout, rule=None)  # noqa: E731
    episodes, told, gone = make(), [], []
    for T, holes, reset, _, resume in events:
        stream.reset(reset)
        episodes.flush(reset)
        assert push(episodes, stream.batch(T, holes)) == []
        held = sorted(
            (e for e in stream.episodes if e.is_complete and e not in gone),
            key=lambda e: (e.ended, e.env),
        )
        assert [number % stream.envs for number in episodes.held] == [
            e.env for e in held
        ]
        named = dict(zip(episodes.held, held, strict=True))
        if data.draw(st.booleans(), "ask"):
            new = [e for e in held if e not in told]
            times = sorted({e.ended for e in new})
            found = [[named[number] for number in step] for step in episodes.new_ends()]
            assert found == [[e for e in new if e.ended == t] for t in times]
            assert episodes.new_ends() == []
            told += new
        if (
            chosen := data.draw(
                st.lists(st.sampled_from(episodes.held), unique=True), "take"
            )
            if held
            else []
        ):
            group = episodes.take(chosen)
            assert rows_of(group.batch) == [named[number].rows for number in chosen]
            assert group.frames == sum(len(named[number].rows) for number in chosen)
            frames += group.frames
            gone += [named[number] for number in chosen]
        if data.draw(st.integers(0, 4), "clear") == 0:
            left = sum(
                len(e.rows)
                for e in stream.episodes
                if e.dropped is None and e not in gone
            )
            assert (episodes.clear("surplus"), episodes.frames_held) == (left, 0)
            gone += [e for e in held if e not in gone]
            for e in filter(None, stream.running):
                e.dropped = e.dropped or "cut"
            assert (episodes.held, episodes.new_ends()) == ([], [])
        assert stream.number == frames + episodes.dropped.total() + episodes.frames_held
        if resume:
            state, episodes = episodes.state_dict(), make()
            assert state["episodes"][:, 4].sum() == rows_in(state)
            episodes.load_state_dict(state)


@given(interleavings())
def test_ends_of_parts_are_told_in_order_of_arrival(history):
    stream, batch, events = history
    ends = {e.rows[-1]: e for e in stream.episodes if e.is_complete}
    episodes, told, expected = WholeEpisodes(num_envs=stream.envs, rule=None), [], []
    for envs, time, resume in events:
        rows = part(batch, envs, time)
        push(episodes, rows, envs)
        ended = sorted(
            (ends[row] for row in {*rows["row"].flatten().tolist()} & ends.keys()),
            key=lambda e: e.env,
        )
        expected += [
            [e.env for e in ended if e.ended == t]
            for t in sorted({e.ended for e in ended})
        ]
        if resume:
            told += episodes.new_ends()
            state, episodes = (
                episodes.state_dict(),
                WholeEpisodes(num_envs=stream.envs, rule=None),
            )
            episodes.load_state_dict(state)
    told += episodes.new_ends()
    assert [[number % stream.envs for number in step] for step in told] == expected


def test_what_is_not_there_cannot_be_taken():
    stream, episodes = Stream([[2], [9]], (2,)), WholeEpisodes(num_envs=2, rule=None)
    push(episodes, stream.batch(4))
    assert episodes.held == [0, 4]  # number 1 is open
    for numbers in ([], [0, 0], [1], [4, 2]):
        with pytest.raises(
            BadOption,
            match=r"take\(\[.*: expected different numbers of complete episodes",
        ):
            episodes.take(numbers)
    assert rows_of(episodes.take([4, 0]).batch) == [[3, 4], [1, 2]]
    with pytest.raises(BadOption, match=r"take\(\[0\]\)"):
        episodes.take([0])
    assert episodes.clear("surplus") == 4
    assert episodes.clear("nothing") == 0
    assert episodes.dropped == {"surplus": 4}


# --- bias -----------------------------------------------------------------------------------------


def mean_lengths(rule: str, groups: int) -> list[float]:
    """Mean length of the episodes in each group; environment i has episodes of length i + 1, ten of
    them.
    """
    stream, means = Stream([[i + 1] for i in range(10)], (10,)), []
    episodes = WholeEpisodes(10, num_envs=10, rule=rule)
    while len(means) < groups:
        means += [group.frames / 10 for group in push(episodes, stream.batch(3))]
    return means[:groups]


def test_the_first_to_end_are_short_and_the_first_to_begin_are_not():
    assert mean_lengths("first_begun", 1) == [
        5.5
    ]  # the ten environments' first episodes: 1, 2, ... 10
    assert mean_lengths("first_done", 1) == [
        2.1
    ]  # within five steps: 1 1 1 1 1, 2 2, 3, 4, 5
    assert mean_lengths("per_env", 3) == [5.5] * 3


# --- with a collector -----------------------------------------------------------------------------


def test_groups_do_not_keep_batches_alive():
    episodes, groups = WholeEpisodes(2, num_envs=2), []
    with Collector(counting(5), None, num_envs=2, frames_per_batch=8) as collector:
        for _ in range(20):
            groups += push(episodes, collector.rollout())
        assert collector.stats().slots["lent"] == 0
        assert len(groups) == 16
        assert episodes.frames_held == 0


# --- what waits costs nothing ---------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of functions, and the rows that are copied by an index."""
    counts: Counter[str] = Counter()
    index = TensorDict.__getitem__

    def rows(batch: TensorDict, key: Any) -> Any:
        found = index(batch, key)
        counts["rows"] += found.numel() if isinstance(found, TensorDict) else 0
        return found

    def called(frame: Any, event: str, arg: Any) -> None:
        counts["calls"] += event in ("call", "c_call")

    with without_gc(), mock.patch.object(TensorDict, "__getitem__", rows):
        sys.setprofile(called)
        try:
            yield counts
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize(
    ("rule", "n", "groups"),
    [("first_done", 9, 10), ("first_begun", 9, 0), ("per_env", 10, 0), (None, None, 0)],
)
def test_a_batch_costs_the_same_however_many_episodes_and_batches_wait(rule, n, groups):
    stream, episodes = (
        Stream([[10**6], *[[2]] * 9], (10,)),
        WholeEpisodes(n, num_envs=10, rule=rule),
    )
    costs = []
    for batch in (stream.batch(20) for _ in range(30)):
        with counted() as counts:
            made = push(episodes, batch)
            episodes.new_ends() if rule is None else None
            assert episodes.frames_held
        assert len(made) == groups
        costs.append(counts)
    assert episodes.frames_held == 30 * 20 * (1 if groups else 10)
    assert costs[-1] == costs[10]


def test_what_is_taken_of_many_episodes_costs_the_same():
    stream, episodes, costs = (
        Stream([[2], [10**6]], (2,)),
        WholeEpisodes(num_envs=2, rule=None),
        [],
    )
    for _ in range(50):
        push(episodes, stream.batch(4))
        with counted() as counts:
            episodes.take([episodes.new_ends()[0][0]])
        costs.append(counts)
    assert costs[-1] == costs[10]
    assert len(episodes.held) == 50


# --- details --------------------------------------------------------------------------------------


def test_groups_do_not_share_memory():
    stream = Stream([[1]], ())
    groups = push(WholeEpisodes(1, num_envs=1), stream.batch(3))
    groups[0].batch.zero_()
    assert [rows_of(group.batch) for group in groups[1:]] == [[[2]], [[3]]]


def test_objects_and_nested_entries_survive_joining_and_saving():
    def batch(first: int) -> TensorDict:
        words = NonTensorStack.from_list([[f"{first + t}"] * 2 for t in range(3)])
        entries = {
            "row": torch.arange(first, first + 3),
            "words": words,
            "agents": TensorDict({"x": torch.ones(3, 2, 4)}, [3, 2]),
            "next": {"done": torch.tensor([0, 0, first == 3]).bool()},
            "collector": {"traj_ids": torch.zeros(3, dtype=torch.int64)},
        }
        return TensorDict(entries, [3])

    episodes = WholeEpisodes(1, num_envs=1, layout="pad")
    push(episodes, batch(0))
    state, episodes = episodes.state_dict(), WholeEpisodes(1, num_envs=1)
    episodes.load_state_dict(state)
    (group,) = push(episodes, batch(3))
    assert group.batch["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert group.batch["words"] == [[str(i)] * 2 for i in range(6)]
    assert group.batch["agents"].batch_size == (6, 2)


def test_rows_of_delivered_episodes_are_freed_at_once():
    def copies() -> int:
        return sum(type(each) is CopiedRows for each in gc.get_objects())

    gc.collect()
    others = copies()
    episodes = WholeEpisodes(num_envs=2, rule=None)
    episodes.add(Stream([[3], [3]], (2,)).batch(3))
    assert copies() == others + 1
    assert [len(episode) for episode in episodes.take_all()] == [3, 3]
    assert copies() == others


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 1}, r"n=None\): expected an integer of at least 1"),
        ({"n": 0, "num_envs": 1}, r"n=0\): expected an integer of at least 1"),
        ({"n": 2.0, "num_envs": 1}, "n=2.0"),
        ({"n": True, "num_envs": 1}, "n=True"),
        ({"n": 1, "num_envs": 0}, "num_envs=0"),
        (
            {"n": 1, "num_envs": 1, "rule": "fast"},
            "rule='fast'.*'first_begun' .*, 'per_env' .* or 'first_done'",
        ),
        ({"n": 1, "num_envs": 1, "layout": "list"}, "layout='list'.*'cat' or 'pad'"),
        (
            {"n": 3, "num_envs": 2, "rule": "per_env"},
            "3 is not a multiple of num_envs=2",
        ),
    ],
)
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises(BadOption, match=message):
        WholeEpisodes(**arguments)


def test_batches_that_do_not_fit_are_refused():
    batch = Stream([[3], [3]], (2,)).batch(4)
    with pytest.raises(BadOption, match=r"\[2, 4\] has 2 environments.*expected 3"):
        push(WholeEpisodes(1, num_envs=3), batch)
    with pytest.raises(BadOption, match="no agents.done.*done_key="):
        push(WholeEpisodes(1, num_envs=2, done_key=("agents", "done")), batch)
    with pytest.raises(
        BadOption, match="collector.policy_version.*track_policy_version=True"
    ):
        push(
            WholeEpisodes(1, num_envs=2, on_policy_only=True),
            batch.exclude(("collector", "policy_version")),
        )
    with pytest.raises(
        BadOption, match=r"\[2, 4\] has 2 environments.*expected 1 .*envs=\[1\]"
    ):
        push(WholeEpisodes(1, num_envs=3), batch, [1])
    for envs in ([0, 0], [0, 3], [-1, 0], [True, False], [[0], [1]], [0.0, 1.0]):
        for take in (
            WholeEpisodes(1, num_envs=3).add,
            WholeEpisodes(1, num_envs=3).skip,
        ):
            with pytest.raises(
                BadOption, match=r"envs=.*: expected different numbers from 0 to 2"
            ):
                take(batch, envs)
    with pytest.raises(BadOption, match="numbered 0 to 1"):
        WholeEpisodes(1, num_envs=2).flush([2])


def test_a_state_stays_what_it_was_when_it_was_saved():
    batch, episodes = Stream([[2], [3]], (2,)).batch(12), WholeEpisodes(1, num_envs=2)
    push(episodes, part(batch, [0], slice(0, 5)), [0])
    state = episodes.state_dict()
    for _ in range(3):
        assert lengths_pushed(episodes, batch, [1], slice(0, 4)) == [[3], [2]]
        episodes = WholeEpisodes(1, num_envs=2)
        episodes.load_state_dict(state)


def test_the_state_of_other_environments_is_refused():
    with pytest.raises(BadOption, match="2 environments, but num_envs=3"):
        WholeEpisodes(1, num_envs=3).load_state_dict(
            WholeEpisodes(1, num_envs=2).state_dict()
        )


def test_rows_of_changing_shapes_are_joined_but_not_saved():
    ragged = LazyStackedTensorDict(
        *(TensorDict({"x": torch.ones(n)}) for n in (1, 2, 3, 4)), stack_dim=0
    )
    batch = Stream([[3]], ()).batch(4).set("ragged", ragged)
    episodes = WholeEpisodes(1, num_envs=1)
    (group,) = push(episodes, batch)
    assert [row["ragged", "x"].numel() for row in group.batch] == [1, 2, 3]
    with pytest.raises(BadOption, match="changing shapes"):
        episodes.state_dict()
