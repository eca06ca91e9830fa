"""Exact resume: from any point on, and in a new process, the same bits; where that cannot be, a
report that says so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import muster
from muster import (
    AsyncCollector,
    Autosave,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.errors import BadCheckpoint, BadWeights, EnvError, PolicyError, WorkerDied
from muster.testing import ChainEnv, CountingEnv, Fault, FaultyEnv, OracleEnv
from tests.tools import assert_accounted, assert_same, column, counting

FILE = "collector.safetensors"
MARK = ("collector", "resumed")
COUNTS = ("frames", "executed", "discarded", "in_flight", "batches", "episodes")


def mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Recurrent(nn.Module):
    """A cell with dropout: recurrent state, and draws from torch's global generator."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.cell, self.out = nn.GRUCell(inputs, 6), nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        self.calls += 1
        state = self.cell(nn.functional.dropout(obs, 0.3), state)
        draw = torch.distributions.Categorical(logits=self.out(state)).sample()
        return draw, {"calls": self.calls.expand(obs.shape[:-1])}, state


class Global(nn.Module):
    """Draws from Python's and NumPy's global generators."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        import random

        draw = random.random() + np.random.rand() + np.random.randn()
        return torch.full(obs.shape[:-1], int(draw * 1000) % 2)


ENVS: dict[str, Callable[[], Any]] = {
    "CartPole": lambda: gymnasium.make("CartPole-v1", max_episode_steps=9),
    "noise": counting(5, noise=True),
    "chain": ChainEnv,
}
POLICIES: dict[str, Callable[[int], Any]] = {
    "random": lambda inputs: None,
    "head": lambda inputs: muster.policies.categorical(mlp(inputs, 2)),
    "recurrent": Recurrent,
    "global": lambda inputs: Global(),
}


def sync_vector() -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")


SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (ENVS["CartPole"], {"frames_per_batch": 7}),
    "stacked": (ENVS["CartPole"], {"frames_per_batch": 21, "num_envs": 3}),
    "vector": (sync_vector, {"frames_per_batch": 21}),
    "groups": ([ENVS["CartPole"]] * 2, {"frames_per_batch": 28, "num_envs": 2}),
}


def make(env: Any, policy: Any, **options: Any) -> Collector:
    return Collector(env, policy, **{"frames_per_batch": 6, "seed": 5, **options})


def goes_on(
    of: Callable[[], Collector],
    before: int,
    *,
    path: Path | None = None,
    used: int = 0,
    trust: bool = False,
) -> None:
    """Save after ``before`` batches and load into another collector, which has made ``used``;
    compare what follows.
    """
    with of() as first, of() as second:
        for _ in range(before):
            first.rollout()
        state = first.state_dict()
        if path is not None:
            muster.save_state(path, first.state_dict())
        expected = [first.rollout().clone() for _ in range(4)]
        for _ in range(used):
            second.rollout()
        report = second.load_state_dict(state if path is None else path, trust=trust)
        assert report.exact, str(report)
        for batch in expected:
            assert_same(batch, second.rollout())
        assert first.episodes == second.episodes
        a, b = first.stats(), second.stats()
        for name in (*COUNTS, "return_mean", "length_mean"):
            assert getattr(a, name) == getattr(b, name), name
        assert_accounted(second)
        return report


# --- bit by bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_arrangement_goes_on_bit_by_bit(shape, policy, tmp_path):
    env, options = SHAPES[shape]
    goes_on(
        lambda: make(env, POLICIES[policy](4), **options),
        2,
        path=tmp_path / FILE,
        trust=shape == "vector",
    )


@settings(max_examples=25)
@given(
    env=st.sampled_from(sorted(ENVS)),
    before=st.integers(0, 5),
    T=st.integers(1, 6),
    used=st.integers(0, 2),
    options=st.fixed_dictionaries(
        {
            "num_envs": st.sampled_from([None, 1, 3]),
            "max_frames_per_traj": st.sampled_from([None, 4]),
            "reset_at_each_iter": st.booleans(),
            "set_truncated": st.booleans(),
            "reset_when_done": st.booleans(),
        }
    ),
)
def test_any_save_point_under_any_option(env, before, T, used, options):
    options |= {
        "frames_per_batch": T * (options["num_envs"] or 1),
        "track_policy_version": True,
    }
    goes_on(lambda: make(ENVS[env], None, **options), before, used=used)


@pytest.mark.parametrize("policy", ["head", "recurrent"])
@pytest.mark.parametrize("frames", [6, 12, 15, 100])
@pytest.mark.parametrize("used", [0, 4])
def test_random_frames_that_are_not_over_go_on(policy, frames, used):
    of = lambda: make(  # noqa: E731
        counting(5, noise=True), POLICIES[policy](3), init_random_frames=frames
    )
    goes_on(of, 2, used=used)


def test_pending_resets_and_seeds_are_kept():
    def of() -> Collector:
        return make(counting(9, noise=True), None, num_envs=3)

    with of() as first, of() as second:
        first.rollout()
        first.reset([1])
        first.set_seed(77)
        second.load_state_dict(first.state_dict())
        assert_same(first.rollout(), second.rollout())
        first.reset([0, 2])
        second.load_state_dict(first.state_dict())
        batch = second.rollout()
        assert_same(first.rollout(), batch)
        assert column(batch, "observation")[1][0][1] == 2


def test_torchrls_version_counter_is_restored():
    tracker = pytest.importorskip("torchrl.envs.llm.transforms").PolicyVersion
    first_counter, second_counter = (
        tracker(version_type="uuid"),
        tracker(version_type="uuid"),
    )
    with (
        make(counting(5), Global(), track_policy_version=first_counter) as first,
        make(counting(5), Global(), track_policy_version=second_counter) as second,
    ):
        second.load_state_dict(first.state_dict())
        assert second_counter.version == first_counter.version


# --- whole episodes -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["cat", "pad"])
@pytest.mark.parametrize("before", range(5))
def test_whole_episodes_that_are_held_come_later(layout, before, tmp_path):
    def of() -> Collector:
        options = {
            "num_envs": 2,
            "frames_per_batch": 14,
            "total_frames": 84,
            "trajs_per_batch": 1,
        }
        return make(counting(5, noise=True), None, traj_format=layout, **options)

    with of() as first, of() as second:
        groups = iter(first)
        for _ in range(before):
            next(groups)
        muster.save_state(tmp_path / FILE, first.state_dict())
        held = first.stats().in_flight
        expected = [group.clone() for group in groups]
        second.next()  # and what it has left is forgotten
        assert second.load_state_dict(tmp_path / FILE).exact
        assert second.stats().in_flight == held
        got = list(second)
        assert len(got) == len(expected) > 2
        for a, b in zip(expected, got, strict=True):
            assert_same(a, b)
            assert a.names == b.names
        assert_accounted(second)


def test_an_episode_whose_environment_is_lost_is_dropped():
    def of() -> Collector:
        return make(
            Unpicklable,
            None,
            num_envs=2,
            frames_per_batch=12,
            total_frames=120,
            trajs_per_batch=2,
        )

    with of() as first, of() as second:
        next(iter(first))
        report = second.load_state_dict(first.state_dict())
        assert set(report.not_restored) == {0, 1}
        assert (second.stats().discarded, second.stats().in_flight) == ({"cut": 2}, 0)
        for batch in second:
            assert column(batch, "observation")[0][1] == 0
            assert column(batch, "next", "done").count(True) == 2
        assert_accounted(second)


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_worker_that_is_restarted_after_a_load_has_the_same_columns_as_the_others():
    with MultiSyncCollector(
        [Unpicklable] * 2, None, frames_per_batch=12, on_failure="restart"
    ) as collector:
        collector.next()
        assert set(collector.load_state_dict(collector.state_dict()).not_restored) == {
            0,
            1,
        }
        os.kill(collector.stats().workers[0].pid, signal.SIGKILL)
        marks = [collector.next()[MARK].any(-1).tolist() for _ in range(3)]
        assert marks[0][1]
        assert not any(marks[2])
        assert collector.stats().restarts == 1


# --- errors in the middle -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["env", "policy"])
def test_rows_that_an_error_had_cut_short_are_not_restored_and_said_so(kind):
    calls = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if kind == "policy" and len(calls) == 9:
            raise ValueError("no")
        return torch.tensor(0)

    env = (
        (lambda: FaultyEnv(8, error=RuntimeError, length=9))
        if kind == "env"
        else counting(9)
    )
    with make(env, policy) as first, make(env, policy) as second:
        first.rollout()
        with pytest.raises((EnvError, PolicyError)):
            first.rollout()
        in_flight = first.stats().in_flight
        assert in_flight == 2
        report = second.load_state_dict(first.state_dict())
        assert not report.exact
        assert set(report.not_restored) == {0}
        assert "2 steps" in str(report)
        if kind == "env":
            second._groups[0].env.objects()[0].steps = 100
        batch = second.rollout()
        assert column(batch, "next", "reward") == [1, 2, 3, 4, 5, 6]
        assert batch[MARK].tolist() == [True] + [False] * 5
        assert second.stats().discarded["not_saved"] == 2
        assert_accounted(second)
        assert column(first.rollout(), "next", "reward")[:2] == [7, 8], (
            "saving changed nothing here"
        )


def test_an_unfinished_batch_of_the_loading_collector_is_given_up_and_counted():
    env = FaultyEnv(8, error=RuntimeError, length=9)
    with make(counting(9), None) as first, make(env, None) as second:
        first.rollout()
        state = first.state_dict()
        second.rollout()
        with pytest.raises(EnvError):
            second.rollout()
        with pytest.raises(BadCheckpoint):
            second.load_state_dict({**state, "format": 99})
        assert second.stats().in_flight == 2, "nothing was changed"
        report = second.load_state_dict(state)
        assert report.not_restored, "it is another class"
        assert second.stats().in_flight == 0
        assert_accounted(second)


# --- what cannot be restored ----------------------------------------------------------------------


class Unpicklable(CountingEnv):
    """Holds something that cannot be saved."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.handle = (n for n in range(3))


class Pickled(CountingEnv):
    """Holds something that needs a pickle."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.helper = Helper()


class Helper:
    pass


def test_environments_that_cannot_be_saved_begin_anew_and_are_marked():
    with (
        make(Unpicklable, None, num_envs=2) as first,
        make(Unpicklable, None, num_envs=2) as second,
    ):
        first.rollout()
        report = second.load_state_dict(first.state_dict())
        assert not report.exact
        assert report.restored == ()
        assert set(report.not_restored) == {0, 1}
        assert all("handle" in why for why in report.not_restored.values())
        assert "2 begin new episodes" in str(report)
        assert "environment 1: " in str(report)
        batch = second.rollout()
        assert batch[MARK].tolist() == [[True, False, False]] * 2
        assert column(batch, "next", "reward") == [[1, 2, 3]] * 2
        assert column(batch, "collector", "traj_ids") == [[2] * 3, [3] * 3], "new ids"
        assert not second.rollout()[MARK].any()
        assert_accounted(second)


def test_steps_join_rollouts_of_before_and_after_the_load_of_a_part():
    def made() -> MultiAsyncCollector:
        return MultiAsyncCollector(
            [Unpicklable], None, frames_per_batch=4, seed=0, backend="threads"
        )

    with made() as first, made() as second:
        first.next()
        state = first.state_dict()
        before = sum(
            result["frames"]
            for rollout in state["source"]["rollouts"]
            for result in rollout["results"]
        )
        assert before
        assert set(second.load_state_dict(state).not_restored) == {0}
        batch = second.collect_batch(n_step=before + 4)[0]
        assert batch[MARK].tolist() == [False] * before + [True] + [False] * 3
        assert_accounted(second)


def test_episodes_join_rows_of_before_and_after_the_load_of_a_part():
    def made() -> MultiSyncCollector:
        options = {
            "frames_per_batch": 4,
            "trajs_per_batch": 2,
            "seed": 0,
            "backend": "threads",
        }
        return MultiSyncCollector([counting(5), Unpicklable], None, **options)

    with made() as first, made() as second:
        first.next()  # the rows 0 to 5 of both: one episode of each, and the first step of the next
        assert first.stats().in_flight == 2
        assert set(second.load_state_dict(first.state_dict()).not_restored) == {1}
        group = second.next()
        assert column(group, "next", "reward") == [1, 2, 3, 4, 5] * 2
        assert group[MARK].tolist() == [False] * 5 + [True] + [False] * 4
        assert_accounted(second)


def test_a_pickle_needs_trust(tmp_path):
    with make(Pickled, None) as first:
        first.rollout()
        muster.save_state(tmp_path / FILE, first.state_dict())
        expected = first.rollout()
        with make(Pickled, None) as second:
            report = second.load_state_dict(tmp_path / FILE)
            assert "trust=True" in report.not_restored[0]
            assert second.rollout()[MARK][0]
            assert second.load_state_dict(tmp_path / FILE, trust=True).exact
            batch = second.rollout()
            assert not batch[MARK].any()
            assert_same(expected, batch, ignore=(MARK,))


# --- wrong, damaged -------------------------------------------------------------------------------


def test_a_function_is_noted():
    def policy(obs: torch.Tensor) -> int:
        return 0

    with make(counting(5), policy) as first, make(counting(5), policy) as second:
        report = second.load_state_dict(first.state_dict())
        assert (report.exact, report.not_restored) == (False, {})
        assert "not a module" in str(report)


class TwoActions(CountingEnv):
    def __init__(self) -> None:
        super().__init__(5)
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 2])


OTHERS: dict[str, Callable[[], Collector]] = {
    "number": lambda: make(counting(5), Global(), num_envs=3),
    "groups": lambda: make([counting(5)] * 2, Global()),
    "observations": lambda: make(counting(5, noise=True), Global(), num_envs=2),
    "trajs_per_batch": lambda: make(
        counting(5), Global(), num_envs=2, trajs_per_batch=2
    ),
    "policy": lambda: make(counting(5), None, num_envs=2),
    "actions": lambda: make(TwoActions, None, num_envs=2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_collector_is_refused_and_nothing_changes(other):
    policy = None if other == "actions" else Global()
    with (
        make(counting(5), policy, num_envs=2) as first,
        OTHERS[other]() as second,
        OTHERS[other]() as untouched,
    ):
        for c in (first, second, untouched):
            c.rollout()
        with pytest.raises(BadCheckpoint, match="Nothing was changed"):
            second.load_state_dict(first.state_dict())
        assert second.stats().frames == 6
        assert_same(second.rollout(), untouched.rollout())


@pytest.mark.parametrize("other", ["shape", "names"])
def test_weights_that_do_not_fit_change_nothing(other):
    class Net(nn.Module):
        def __init__(self, width: int, name: str = "b") -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.add_module(name, nn.Linear(2, width))

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return self.a(obs).argmax(-1)

    policy = Net(3) if other == "shape" else Net(2, "c")
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with make(counting(5), Net(2)) as first, make(counting(5), policy) as second:
        first.rollout()
        with pytest.raises(BadWeights, match="Nothing was changed"):
            second.load_state_dict(first.state_dict())
        assert all(
            torch.equal(before[name], value)
            for name, value in policy.state_dict().items()
        )
        assert second.stats().frames == 0


@pytest.mark.parametrize(
    "state", [None, {}, 3, {"format": 0}, {"policy_state_dict": None}], ids=str
)
def test_what_is_no_state_is_refused(state):
    with (
        make(counting(5), None) as c,
        pytest.raises(BadCheckpoint, match="not a state of a collector"),
    ):
        c.load_state_dict(state)


def test_a_missing_or_damaged_file_is_refused_and_nothing_changes(tmp_path):
    path = tmp_path / FILE
    with (
        make(counting(5, noise=True), None) as c,
        make(counting(5, noise=True), None) as untouched,
    ):
        with pytest.raises(BadCheckpoint, match="cannot be read"):
            c.load_state_dict(path)
        c.rollout()
        untouched.rollout()
        muster.save_state(path, c.state_dict())
        content = path.read_bytes()
        for damaged in (
            content[:-1],
            content[:100],
            b"",
            content[:-9] + b"x" + content[-8:],
        ):
            path.write_bytes(damaged)
            with pytest.raises(BadCheckpoint):
                c.load_state_dict(path)
        assert_same(c.rollout(), untouched.rollout())


def test_a_state_from_a_foreign_checkpoint_file_is_refused(tmp_path):
    muster.save_state(tmp_path / FILE, {"weights": torch.ones(2)})
    with (
        make(counting(5), None) as c,
        pytest.raises(BadCheckpoint, match="not a state of a collector"),
    ):
        c.load_state_dict(tmp_path)


# --- workers that go on while the user trains -----------------------------------------------------


def steps(batch: Any) -> list[int]:
    """Of an environment whose episode never ends: times, in the batch's order."""
    return [int(t) for t in batch["observation"][..., 1].reshape(-1)]


ENDLESS = counting(10**6)
CALLS: dict[str, Callable[[Any], Any]] = {
    "next": lambda c: c.next(),
    "rollout": lambda c: c.rollout(),
    "collect": lambda c: c.collect_batch(n_step=4)[0],
}
ORDERS = [
    ["next", "rollout", "collect", "next"],
    ["collect", "collect", "next", "rollout", "next", "next"],
]


def in_threads(cls: Any, env: Any = ENDLESS, **options: Any) -> Any:
    envs = env if cls is AsyncCollector else [env] * 2
    return cls(
        envs,
        None,
        **{"frames_per_batch": 4, "seed": 0, "backend": "threads", **options},
    )


def took(c: Any, batch: Any, before: int) -> int:
    """Frames delivered by now; all are accounted for."""
    stats = c.stats()
    assert stats.frames == before + batch.numel()
    assert_accounted(c)
    return stats.frames


@pytest.mark.parametrize("calls", ORDERS, ids=" ".join)
def test_a_state_changes_nothing_of_what_comes_next(calls):
    """Whichever call that is, it gets the oldest rollout; what waits is not delivered."""
    with in_threads(AsyncCollector) as c:
        c.next()
        frames, seen = 4, [0, 1, 2, 3]
        for call in calls:
            c.state_dict()
            assert c.stats().frames == frames
            assert_accounted(c)
            batch = CALLS[call](c)
            frames, seen = took(c, batch, frames), seen + steps(batch)
        assert seen == list(range(4 * len(calls) + 4))


def test_a_state_in_the_middle_leaves_total_frames_exact(tmp_path):
    for options in (
        {},
        {"autosave": Autosave(tmp_path, every=1e-9)},
        {"max_policy_lag": 1},
    ):
        with in_threads(AsyncCollector, total_frames=20, **options) as c:
            seen = []
            for number, batch in enumerate(c):
                seen += [steps(batch)]
                if not options or number % 2:
                    c.state_dict()
            assert [t for part in seen for t in part] == list(range(20))
            assert c.stats().frames == 20
            assert_accounted(c)


@pytest.mark.parametrize("amount", ["trajs_per_batch", "n_episode"])
def test_a_state_changes_no_episodes(amount):
    """Groups of episodes are those that there would be; only what was given is delivered."""
    runs = []
    for saves in (False, True):
        options = (
            {"trajs_per_batch": 2, "frames_per_batch": 14}
            if amount == "trajs_per_batch"
            else {}
        )
        with in_threads(AsyncCollector, ChainEnv, **options) as c:
            groups, frames = [], 0
            for _ in range(5):
                batch = c.next() if options else c.collect_batch(n_episode=2)[0]
                frames = took(c, batch, frames)
                groups.append(batch.clone())
                if saves:
                    c.state_dict()
                    assert c.stats().frames == frames
                    assert_accounted(c)
            runs.append(groups)
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


class Words(CountingEnv):
    """Also observes a text."""

    def __init__(self) -> None:
        super().__init__(5)
        self.observation_space: Any = gymnasium.spaces.Dict(
            {"observation": self.observation_space, "word": gymnasium.spaces.Text(9)}
        )

    def _observe(self) -> Any:
        return {"observation": super()._observe(), "word": f"at {self.t}"}


@pytest.mark.parametrize(
    "options",
    [
        {"track_policy_version": True, "max_frames_per_traj": 3},
        {"num_envs": 3, "frames_per_batch": 12},
        {"compact_obs": True},
        {"init_random_frames": 12},
        {"backend": "processes"},
    ],
    ids=str,
)
def test_rollouts_that_wait_come_with_all_that_belongs_to_them(options, tmp_path):
    def take(c: Any) -> list[Any]:
        made = []
        for _ in range(5):
            batch = c.next()
            last = (
                c.final_observations().to_dict() if options.get("compact_obs") else {}
            )
            made.append((batch.clone(), list(c.episodes), c.stats().batches, last))
        return made

    with in_threads(AsyncCollector, Words, **options) as c:
        c.next()
        muster.save_state(tmp_path / FILE, c.state_dict())
        expected = take(c)
    with in_threads(AsyncCollector, Words, **options) as c:
        assert c.load_state_dict(tmp_path / FILE).exact
        for (batch, *rest), (of_batch, *of_rest) in zip(take(c), expected, strict=True):
            assert batch["word"] == of_batch["word"]
            assert_same(
                batch.exclude("word", ("next", "word")),
                of_batch.exclude("word", ("next", "word")),
            )
            assert str(rest) == str(of_rest)
        assert_accounted(c)


def test_a_collector_whose_workers_wait_for_each_other_refuses_rollouts_that_wait():
    with in_threads(MultiAsyncCollector) as c:
        c.next()
        state = c.state_dict()
        assert state["source"]["rollouts"]
    with in_threads(MultiSyncCollector, frames_per_batch=8) as c:
        before = steps(c.rollout())
        with pytest.raises(
            BadCheckpoint,
            match="rollouts that were collected and not delivered yet, .*MultiSyncCollector .*Nothing was",
        ):
            c.load_state_dict(state)
        assert steps(c.rollout()) == [t + 4 for t in before]


def test_a_batch_that_a_postproc_has_refused_is_not_delivered_yet():
    fails = [True]

    def postproc(batch: Any) -> Any:
        if fails:
            fails.pop()
            raise ValueError("not yet")
        return batch

    options = {
        "num_envs": 2,
        "frames_per_batch": 6,
        "postproc": postproc,
        "layout": "time_major",
    }
    with make(counting(3), None, **options) as c:
        with pytest.raises(ValueError, match="not yet"):
            c.next()
        assert (c.stats().frames, c.stats().in_flight) == (0, 6)
        state = c.state_dict()
        batch = c.next()
        assert (c.stats().frames, c.stats().in_flight) == (6, 0)
    with make(counting(3), None, **options) as c:
        c.load_state_dict(state)
        assert (c.stats().frames, c.stats().in_flight) == (0, 6)
        again = c.next()
        assert again.names == batch.names == ["time", None]
        assert_same(again, batch)
        assert c.stats().frames == 6
        assert_accounted(c)


def test_a_step_that_a_buffer_has_refused_is_not_delivered_yet():
    class Refuses:
        def __init__(self, refused: int | None) -> None:
            self.steps: list[int] = []
            self.refused = refused

        def add(self, row: Any) -> None:
            if len(self.steps) == self.refused:
                self.refused = None
                raise ValueError("full")
            self.steps.append(row["observation"][0, -1].item())

    buffer = Refuses(2)
    options = {
        "num_envs": 2,
        "frames_per_batch": 8,
        "extend_buffer": False,
        "replay_buffer": buffer,
    }
    with make(counting(30), None, **options) as c:
        with pytest.raises(ValueError, match="full"):
            c.next()
        assert (c.stats().frames, c.stats().in_flight) == (4, 2)
        state = c.state_dict()
        c.next()
        assert c.stats().in_flight == 0
        assert c.stats().frames == 2 * len(buffer.steps) == 8
    buffer = Refuses(None)
    with make(counting(30), None, **{**options, "replay_buffer": buffer}) as c:
        assert c.load_state_dict(state).exact
        assert (c.stats().frames, c.stats().discarded, c.stats().in_flight) == (
            4,
            {},
            2,
        )
        c.next()
        assert buffer.steps == [2, 3], "the refused one, and the last one of the batch"
        assert (c.stats().frames, c.stats().discarded, c.stats().in_flight) == (
            8,
            {},
            0,
        )


class Labelled(gymnasium.Env[Any, Any]):
    """Episodes of five steps, with a text in the infos."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {"text": "reset"}

    def step(self, action: Any) -> Any:
        self.t += 1
        return (
            np.full(2, self.t, np.float32),
            1.0,
            self.t == 5,
            False,
            {"text": f"step {self.t}"},
        )


@pytest.mark.parametrize("storing_device", [None, "cpu"])
@pytest.mark.parametrize(
    "options",
    [{"trajs_per_batch": 1}, {"on_batch": lambda batch: None}],
    ids=["episodes", "hook"],
)
def test_rows_of_a_state_are_where_the_batches_are(tmp_path, storing_device, options):
    given = {
        "frames_per_batch": 7,
        "storing_device": storing_device,
        "info": {"text": gymnasium.spaces.Text(9)},
    }
    given |= options
    with make(Labelled, None, **given) as first:
        first.next()
        muster.save_state(tmp_path / "state", first.state_dict())
        expected = [first.next() for _ in range(3)]
    with make(Labelled, None, **given) as second:
        assert second.load_state_dict(tmp_path / "state").exact
        for batch in expected:
            found = second.next()
            assert found.device == batch.device
            assert found["next", "info", "text"] == batch["next", "info", "text"]
            assert (found == batch).all()


@pytest.mark.parametrize(
    "options", [{}, {"trajs_per_batch": 2}, {"extend_buffer": False}], ids=str
)
def test_records_of_episodes_are_those_of_the_batch_that_the_user_has(options):
    class Buffer:
        def add(self, row: Any) -> None: ...

    given = {"num_envs": 2, "frames_per_batch": 16, **options}
    if "extend_buffer" in options:
        given["replay_buffer"] = Buffer()
    with make(counting(3), None, **given) as c:
        for _ in range(3):
            batch = c.next()
            if options == {"trajs_per_batch": 2}:
                assert [record.traj_id for record in c.episodes] == batch[
                    "collector", "traj_ids"
                ].unique().tolist()
                assert [record.length for record in c.episodes] == [3, 3]
            elif options:
                assert len(c.episodes) in (4, 6), "of all its steps"
        state, records = c.state_dict(), list(c.episodes)
    with make(counting(3), None, **given) as c:
        c.load_state_dict(state)
        assert list(c.episodes) == records


def test_weights_of_which_only_some_fit_are_loaded_where_that_is_asked_for():
    class Net(nn.Module):
        def __init__(self, other: str) -> None:
            super().__init__()
            self.both = nn.Linear(4, 2)
            setattr(self, other, nn.Linear(1, 1))

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return self.both(obs).argmax(-1)

    old, new = Net("old"), Net("new")
    kept = new.new.weight.clone()  # type: ignore[union-attr]
    with Collector("CartPole-v1", old, frames_per_batch=4, seed=0) as c:
        c.next()
        state = c.state_dict()
    with Collector("CartPole-v1", new, frames_per_batch=4, seed=0) as c:
        before = new.both.weight.clone()
        with pytest.raises(
            BadWeights, match="missing .'new.bias', 'new.weight'.*strict=False"
        ):
            c.load_state_dict(state)
        assert torch.equal(new.both.weight, before), "nothing was changed"
        report = c.load_state_dict(state, strict=False)
        assert torch.equal(new.both.weight, old.both.weight)
        assert torch.equal(new.new.weight, kept)  # type: ignore[union-attr]
        assert not report.exact
        assert "'new.weight'] of the policy are not in the state" in str(report)
        assert "'old.weight'] of the state are not in the policy" in str(report)


# --- files ----------------------------------------------------------------------------------------


def test_autosave_writes_a_state_from_which_it_goes_on(tmp_path):
    def of(**options: Any) -> Collector:
        return make(
            counting(5, noise=True), POLICIES["head"](3), total_frames=30, **options
        )

    with of(autosave=Autosave(tmp_path / "new" / "folder", every=1e-9)) as first:
        batches = [batch.clone() for batch in first]
    with of() as second:
        assert second.load_state_dict(tmp_path / "new" / "folder").exact
        rest = list(second)
        assert 1 <= len(rest) <= 2
        for a, b in zip(batches[-len(rest) :], rest, strict=True):
            assert_same(a, b)


def test_autosave_not_more_often_than_asked(tmp_path):
    with make(
        counting(5), None, total_frames=30, autosave=Autosave(tmp_path, every=3600.0)
    ) as c:
        list(c)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.test_resume import SHAPES, POLICIES, make
env, options = SHAPES["groups"]
with make(env, POLICIES["recurrent"](4), **options) as c:
    report = c.load_state_dict(sys.argv[1])
    batches = [c.rollout() for _ in range(3)]
    print(json.dumps([report.exact, [[b[k].tolist() for k in ("observation", "action")] for b in batches]]))
"""


def test_a_new_process_goes_on_bit_by_bit(tmp_path):
    env, options = SHAPES["groups"]
    with make(env, POLICIES["recurrent"](4), **options) as c:
        for _ in range(3):
            c.rollout()
        muster.save_state(tmp_path / FILE, c.state_dict())
        expected = [
            [b[k].tolist() for k in ("observation", "action")]
            for b in (c.rollout() for _ in range(3))
        ]
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / FILE), root]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, expected]


def fails(honest: Any) -> Any:
    raise OSError("the simulator is gone")


@pytest.mark.filterwarnings("ignore:a worker is dropped")
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("which", [0, 1], ids=["first", "last"])
def test_the_state_after_a_worker_was_dropped_begins_its_environments_anew(
    kind, which, tmp_path
):
    def made(name: str, fault: Fault | None) -> Any:
        faults = [None, None]
        faults[which] = fault
        return kind(
            [
                partial(OracleEnv, tmp_path / name, 2 * number, 2, fault)
                for number, fault in enumerate(faults)
            ],
            None,
            num_envs=2,
            frames_per_batch=12,
            on_failure="drop",
            backend="threads",
            seed=0,
        )

    lost = {2 * which, 2 * which + 1}
    options: dict[str, Any] = {"trust": True}
    with made("first", Fault(fails, at=8)) as first:
        ids: set[int] = set()
        while not any(worker.state == "dropped" for worker in first.stats().workers):
            batch = first.next()
            ids |= set(batch["collector", "traj_ids"].flatten().tolist())
        muster.save_state(tmp_path / FILE, first.state_dict())
        report = first.load_state_dict(tmp_path / FILE, **options)
        assert lost <= set(report.not_restored), "nobody runs them here"
        assert "is dropped in this collector" in report.not_restored[min(lost)]
        first.next()
        assert_accounted(first)
    with made("second", None) as second:
        second.next()
        report = second.load_state_dict(tmp_path / FILE, **options)
        assert lost <= set(report.not_restored)
        assert "had been dropped" in report.not_restored[min(lost)]
        begun: set[int] = set()
        # which worker's batch comes first is not known
        for batch in islice(second, 10_000):
            env = batch["observation"][..., 0].flatten()
            found = batch["collector", "traj_ids"].flatten()
            begun |= set(found[[int(i) in lost for i in env]].tolist())
            if begun:
                break
        assert_accounted(second)
    assert begun, "the others are there again"
    assert not begun & ids, "with new trajectories"


@pytest.mark.filterwarnings("ignore:a worker is dropped")
def test_episodes_of_nobody_are_refused():
    with MultiSyncCollector(
        [partial(FaultyEnv, 3, error=OSError)],
        None,
        frames_per_batch=12,
        on_failure="drop",
        backend="threads",
    ) as c:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="all workers have been dropped"):
                c.collect(n_episode=2)
