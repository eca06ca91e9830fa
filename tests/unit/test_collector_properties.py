"""Whatever the options, batches are what an obviously correct loop gives: by hypothesis, on
counting environments.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster import Collector
from muster.errors import MusterError
from muster.testing import CountingEnv
from tests.tools import assert_accounted, column, recorded

FLAGS = ("done", "terminated", "truncated")


class StopAfter:
    """An interruptor that stops at given calls; so many have been made."""

    def __init__(self, stops: set[int]) -> None:
        self.stops, self.calls = stops, 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls in self.stops


class Reference:
    """One group, row by row: environments ``first``, ``first + 1``, ... of ``total``, and what must
    come of them.
    """

    def __init__(
        self,
        lengths: list[int],
        first: int,
        total: int,
        interruptor: Any,
        **options: Any,
    ) -> None:
        self.lengths, self.first, self.total, self.options = (
            lengths,
            first,
            total,
            options,
        )
        self.interruptor = interruptor
        self.t, self.episode = [0] * len(lengths), [0] * len(lengths)
        self.executed = 0
        self.discarded: Counter[str] = Counter()
        self.ended: list[
            tuple[int, int, float]
        ] = []  # id, length and return of the last batch's episodes

    def reset(self, envs: list[int]) -> None:
        for e in envs:
            self.episode[e] += self.t[e] > 0  # what has not begun keeps its id
            self.t[e] = 0

    def batch(self, T: int, frames: int) -> list[list[dict[str, Any]]]:
        """Cells ``[B][T]``."""
        B, limit = len(self.lengths), self.options["max_frames_per_traj"]
        blank = dict.fromkeys(("reward", "obs", "next", "steps", *FLAGS), 0) | {
            "id": -1,
            "valid": False,
            "was": (0, 0, 0),
        }
        cells = [[dict(blank) for _ in range(T)] for _ in range(B)]
        over: set[int] = set()
        self.ended = []
        for row in range(T):
            for e in range(B):
                if e in over:
                    continue
                self.executed += 1
                name = self.first + e + self.total * self.episode[e]
                cell = cells[e][row]
                cell.update(
                    obs=(self.lengths[e], self.t[e]),
                    steps=self.t[e],
                    id=name,
                    valid=True,
                )
                self.t[e] += 1
                terminated = self.t[e] == self.lengths[e]
                truncated = self.t[e] == limit and not terminated
                cell.update(
                    reward=self.t[e],
                    next=(self.lengths[e], self.t[e]),
                    terminated=terminated,
                    truncated=truncated,
                )
                if terminated or truncated:
                    self.ended.append(
                        (name, self.t[e], self.t[e] * (self.t[e] + 1) / 2)
                    )
                    self.t[e], self.episode[e] = 0, self.episode[e] + 1
                    if not self.options["reset_when_done"]:
                        over.add(e)
            last = row
            if len(over) == B or (
                self.interruptor is not None and self.interruptor.collection_stopped()
            ):
                break
        for e in range(B):
            if (
                self.options["set_truncated"]
                and cells[e][last]["valid"]
                and not cells[e][last]["terminated"]
            ):
                cells[e][last]["truncated"] = True
            for row in range(T):
                cell = cells[e][row]
                if cell["valid"] and row * self.total + self.first + e >= frames:
                    self.discarded["surplus"] += 1
                    cell["valid"] = False
                elif not cell["valid"] and not self.options["reset_when_done"] and row:
                    cell.update({flag: cells[e][row - 1][flag] for flag in FLAGS})
                    cell["was"] = tuple(cell[flag] for flag in FLAGS)
                cell["done"] = cell["terminated"] or cell["truncated"]
                if cell["id"] < 0:
                    cell["was"] = tuple(int(cell[flag]) for flag in FLAGS)
        return cells


def values(cells: list[list[dict[str, Any]]], name: str) -> list[list[Any]]:
    return [[cell[name] for cell in row] for row in cells]


def assert_batch(
    batch: Any, cells: list[list[dict[str, Any]]], *, steps: bool, masked: bool
) -> None:
    """``batch`` (``[B, T]``) has the values of ``cells``."""
    for name in ("reward", *FLAGS):
        assert column(batch, "next", name) == values(cells, name), name
    for place, flag in enumerate(FLAGS):
        assert column(batch, flag) == [
            [cell["was"][place] for cell in row] for row in cells
        ], flag
    assert column(batch, "collector", "traj_ids") == values(cells, "id")
    for key, name in ((("observation",), "obs"), (("next", "observation"), "next")):
        expected = [[list(cell[name] or (0, 0)) for cell in row] for row in cells]
        assert column(batch, *key) == expected, name
    if steps:
        assert column(batch, "step_count") == values(cells, "steps")
        assert column(batch, "next", "step_count") == [
            [c["steps"] + (c["id"] >= 0) for c in row] for row in cells
        ]
    assert (("collector", "valid") in batch.keys(True)) == masked
    if masked:
        assert column(batch, "collector", "valid") == values(cells, "valid")


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    groups=st.sampled_from([1, 1, 2]),
    batches=st.integers(1, 4),
    stops=st.none() | st.sets(st.integers(1, 20), max_size=4),
    resets=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), max_size=3),
    unbatched=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "frames_per_batch": st.integers(1, 30),
            "max_frames_per_traj": st.sampled_from([None, 1, 2, 3, 5]),
            "reset_at_each_iter": st.booleans(),
            "set_truncated": st.booleans(),
            "reset_when_done": st.sampled_from([True, True, False]),
            "layout": st.sampled_from(["batch_major", "time_major"]),
        }
    ),
)
@example(  # an episode that set_truncated marks goes on, also without reset_when_done
    lengths=[2, 9],
    groups=1,
    batches=3,
    stops=None,
    resets=[],
    unbatched=False,
    options={"frames_per_batch": 2, "set_truncated": True, "reset_when_done": False},
)
def test_batches_are_those_of_the_reference(
    lengths, groups, batches, stops, resets, unbatched, options
):
    options = {
        "max_frames_per_traj": None,
        "reset_at_each_iter": False,
        "layout": "batch_major",
        **options,
    }
    frames, limit, order = (
        options[name] for name in ("frames_per_batch", "max_frames_per_traj", "layout")
    )
    stops = (
        None if groups > 1 else stops
    )  # groups ask one after another, each for itself
    B, total = len(lengths), len(lengths) * groups
    unbatched = unbatched and B == groups == 1
    factory, _ = recorded(lambda i: CountingEnv(lengths[i % B]))
    options["num_envs"] = None if unbatched else B
    reference_stops = StopAfter(stops) if stops is not None else None
    references = [
        Reference(lengths, g * B, total, reference_stops, **options)
        for g in range(groups)
    ]
    interruptor = StopAfter(stops) if stops is not None else None
    T = -(-frames // total)
    masked = bool(frames % total) or stops is not None or not options["reset_when_done"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        c = Collector(
            [factory] * groups if groups > 1 else factory,
            None,
            interruptor=interruptor,
            **options,
        )
    with c:
        seen = 0
        for n in range(batches):
            for when, env in resets:
                if when == n:
                    c.reset(env % total)
                    references[env % total // B].reset([env % total % B])
            batch = c.rollout()
            if order == "time_major":
                assert batch.names[0] == "time"
                batch = batch.permute(*range(1, batch.ndim), 0)
            assert batch.names[-1] == "time"
            batch = batch.unsqueeze(0) if unbatched else batch
            expected = [reference.batch(T, frames) for reference in references]
            assert batch.shape == ((groups, B, T) if groups > 1 else (B, T))
            for g, cells in enumerate(expected):
                part = batch[g] if groups > 1 else batch
                assert_batch(part, cells, steps=limit is not None, masked=masked)
                seen += sum(cell["valid"] for row in cells for cell in row)
            records = [(e.traj_id, e.length, e.episode_return) for e in c.episodes]
            assert records == [
                record for reference in references for record in reference.ended
            ]
            if options["reset_at_each_iter"]:
                for reference in references:
                    reference.reset(list(range(B)))
        stats = c.stats()
        assert stats.frames == seen
        assert stats.executed == sum(reference.executed for reference in references)
        assert stats.discarded == dict(
            sum((reference.discarded for reference in references), Counter())
        )
        assert_accounted(c)


def test_the_reference_itself_on_one_example():
    reference = Reference(
        [2, 9],
        0,
        2,
        None,
        max_frames_per_traj=3,
        set_truncated=False,
        reset_when_done=True,
    )
    cells = reference.batch(4, 7)
    assert values(cells, "reward") == [[1, 2, 1, 2], [1, 2, 3, 1]]
    assert values(cells, "id") == [[0, 0, 2, 2], [1, 1, 1, 3]]
    assert values(cells, "truncated") == [[False] * 4, [False, False, True, False]]
    assert np.array(values(cells, "valid")).sum() == 7


class Failing(CountingEnv):
    """Goes wrong at given steps of its life, in one of three ways; also in resets of given numbers."""

    def __init__(self, length: int, faults: dict[int, str]) -> None:
        super().__init__(length)
        self.faults, self.life, self.resets = faults, 0, 0

    def reset(self, **keywords: Any) -> Any:
        self.resets += 1
        if self.faults.get(-self.resets) is not None:
            raise OSError("reset")
        return super().reset(**keywords)

    def step(self, action: int) -> Any:
        self.life += 1
        fault = self.faults.get(self.life)
        obs, reward, *rest = super().step(action)
        if fault == "raise":
            raise OSError("step")
        if fault == "shape":
            return obs[:1], reward, *rest
        return obs, float("nan") if fault == "nan" else reward, *rest


@pytest.mark.slow
@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    groups=st.sampled_from([1, 2]),
    faults=st.dictionaries(
        st.one_of(st.integers(1, 30), st.integers(-4, -1)),
        st.sampled_from(["raise", "shape", "nan"]),
        max_size=4,
    ),
    policy_faults=st.sets(st.integers(1, 40), max_size=2),
    whole=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "frames_per_batch": st.integers(1, 24),
            "max_frames_per_traj": st.sampled_from([None, 3]),
            "reset_at_each_iter": st.booleans(),
            "reset_when_done": st.booleans(),
            "set_truncated": st.booleans(),
            "compact_obs": st.booleans(),
        }
    ),
)
# the first group is complete, and some of its rows are discarded, when the second one fails
@example(
    lengths=[1, 1],
    groups=2,
    faults={},
    policy_faults={4},
    whole=False,
    options={"frames_per_batch": 1, "max_frames_per_traj": None, "compact_obs": False},
)
def test_after_errors_rows_are_still_true_and_every_frame_is_accounted_for(
    lengths, groups, faults, policy_faults, whole, options
):
    B = len(lengths)
    total, limit = B * groups, options["max_frames_per_traj"]
    options = {**options, "num_envs": B}
    if whole:
        frames = -(-options["frames_per_batch"] // total) * total
        options |= {
            "frames_per_batch": frames,
            "trajs_per_batch": 2,
            "set_truncated": False,
        }
    factory, _ = recorded(lambda i: Failing(lengths[i % B], faults if i == 0 else {}))
    calls = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) in policy_faults:
            raise ValueError("policy")
        return torch.zeros(obs.shape[:-1], dtype=torch.int64)

    seen: dict[int, int] = {}  # by trajectory: how far it has come
    batches = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        c = Collector(
            [factory] * groups,
            policy,
            post_collect_hook=lambda b: batches.append(b.clone()),
            **options,
        )
    with c:
        done = 0
        for _ in range(12):
            try:
                c._engine.put_batch()
            except MusterError:
                assert_accounted(c)
                continue
            done += 1
            assert_accounted(c)
            finals = c.final_observations() if options["compact_obs"] else None
            for row in _rows(batches[-1], finals):
                assert row["after"] == [row["obs"][0], row["obs"][1] + 1], row
                assert row["reward"] == row["obs"][1] + 1
                assert row["obs"][1] == seen.get(row["id"], 0), "rows follow each other"
                seen[row["id"]] = row["after"][1]
                ended = row["after"][1] == row["obs"][0]
                assert row["terminated"] == ended
                assert row["done"] == (row["terminated"] or row["truncated"])
                assert row["truncated"] >= (row["after"][1] == limit and not ended)
                if ended or row["after"][1] == limit:
                    seen[row["id"]] = -1  # no row may follow
        assert done >= 12 - len(faults) * 2 - len(policy_faults)
        while whole and c._engine.pipeline.ready:
            group = c._engine.pipeline.take()
            assert column(group, "observation")[0][1] == 0
            assert sum(column(group, "next", "done")) == 2
            assert len(group["collector", "traj_ids"].unique()) == 2


def _rows(batch: Any, finals: Any) -> list[dict[str, Any]]:
    """The rows ``[G, B, T]`` that are transitions, environment by environment, with their next
    observations.
    """
    flat = batch.reshape(-1, batch.shape[-1])
    after: Any = flat.get(("next", "observation"), None)
    if after is None:
        after = torch.full_like(flat["observation"], torch.nan)
        after[:, :-1] = flat["observation"][:, 1:]
        for env, row, obs in (
            zip(finals["env"], finals["row"], finals["observation"], strict=True)
            if len(finals)
            else ()
        ):
            after[env, row] = obs
    found = []
    for e in range(flat.shape[0]):
        for t in range(flat.shape[1]):
            if flat["collector", "traj_ids"][e, t] >= 0:
                cell = {
                    "id": int(flat["collector", "traj_ids"][e, t]),
                    "reward": float(flat["next", "reward"][e, t]),
                }
                cell |= {
                    "obs": flat["observation"][e, t].tolist(),
                    "after": after[e, t].tolist(),
                }
                cell |= {name: bool(flat["next", name][e, t]) for name in FLAGS}
                found.append(cell)
    return found
