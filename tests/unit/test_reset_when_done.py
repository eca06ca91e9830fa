"""``reset_when_done=False``: an environment that has ended is left alone until the next batch, and
reset meanwhile.
"""

from __future__ import annotations

import copy
import signal
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import Collector, MultiSyncCollector
from muster.errors import BadEnvOutput, EnvError, PolicyError, WorkerDied
from muster.testing import (
    ChainEnv,
    CountingEnv,
    Fault,
    FaultyEnv,
    OracleEnv,
    SpaceEnv,
    check_stream,
)
from muster.testing.oracle import follow
from tests.fakes import faults
from tests.tools import assert_accounted, assert_same, column, counting, recorded

WAIT = {"reset_when_done": False}


def lengths(*numbers: int) -> tuple[Any, list[Any]]:
    """A factory of counting environments of these lengths, and the list of those made."""
    return recorded(lambda i: CountingEnv(numbers[i % len(numbers)]))


class Watcher:
    """A policy that keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        self.seen.append(obs.clone())
        return torch.ones(obs.shape[:-1], dtype=torch.int64)


# --- what is recorded -----------------------------------------------------------------------------


def test_the_policy_sees_zeros_after_an_end_also_in_memory_that_was_used_before():
    watcher, (make, _) = Watcher(), lengths(2, 5)
    with Collector(
        make, watcher, num_envs=2, frames_per_batch=10, return_same_td=True, **WAIT
    ) as c:
        for _ in range(3):
            c.rollout()
    times = torch.stack(watcher.seen[-10:])[
        ..., 1
    ].tolist()  # of two batches, which have the same rows
    assert times == [[0, 0], [1, 1], [0, 2], [0, 3], [0, 4]] * 2
    assert watcher.seen[-1].tolist() == [[0, 0], [5, 4]]


@pytest.mark.parametrize("space", ["array", "dict", "text"])
def test_every_kind_of_observation_can_wait(space):
    box = spaces.Box(1, 5, (2, 2), np.float32)
    observations = {
        "array": box,
        "dict": spaces.Dict(
            {
                "a": box,
                "b": spaces.Tuple(
                    (spaces.Discrete(3, start=1), spaces.Text(4, min_length=1))
                ),
            }
        ),
        "text": spaces.Text(4, min_length=1),
    }[space]
    seen: list[Any] = []

    def policy(obs: Any) -> torch.Tensor:
        seen.append(copy.deepcopy(obs))  # of objects it is a view
        return torch.zeros(2, dtype=torch.int64)

    make, made = recorded(
        lambda i: SpaceEnv(observations, spaces.Discrete(2), (1, 3)[i])
    )
    with Collector(
        make, policy, num_envs=2, frames_per_batch=8, validate="full", seed=1, **WAIT
    ) as c:
        c.rollout(), c.rollout()
        assert c.stats().executed == 8
    assert [len(env.actions) for env in made] == [2, 6]
    last = made[0].observations[-1]
    if space == "array":
        assert not seen[-1][0].any()
        assert seen[-1][1].any()
    elif space == "dict":
        assert not seen[-1]["a"][0].any()
        assert seen[-1]["b"]["0"][0] == 0
        assert (
            seen[-1]["b"]["1"][0] == last["b"][1]
        )  # nothing else of its kind is known
    else:
        assert seen[-1][0] == last


# --- errors ---------------------------------------------------------------------------------------


def failing(at: int, **kind: Any) -> Any:
    """Of three environments of lengths 2, 9 and 7, the last goes wrong in its step ``at``."""
    return recorded(
        lambda i: FaultyEnv(at, length=7, **kind) if i == 2 else CountingEnv((2, 9)[i])
    )


@pytest.mark.parametrize("batch", [0, 1])
def test_after_an_error_the_batch_ends_where_it_was(batch):
    at, error = 4 + 6 * batch, faults_value_error
    make, made = recorded(
        lambda i: (
            FaultyEnv(at, error=error, length=20) if i == 2 else CountingEnv((2, 20)[i])
        )
    )
    with Collector(make, None, num_envs=3, frames_per_batch=18, seed=0, **WAIT) as c:
        for _ in range(batch):
            c.rollout()
        with pytest.raises(EnvError, match="as asked"):
            c.rollout()
        assert_accounted(c)
        got = c.rollout()
        assert got["collector", "valid"].sum(-1).tolist() == [2, 4, 4]
        assert column(got, "next", "truncated") == [
            [False] * 6,
            [False] * 3 + [True] * 3,
            [False] * 3 + [True] * 3,
        ]
        again = c.rollout()
        assert column(again, "next", "reward")[1] == [1, 2, 3, 4, 5, 6]
        assert_accounted(c)
        assert sum(env.executed for env in made) == c.stats().executed


def slips(_: Any) -> Any:
    raise RuntimeError("the gripper slipped")


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_after_an_error_every_episode_is_there_from_its_first_step(tmp_path, mode, at):
    """Environments that cannot be left out are reset and stepped on until all have ended: not those
    that an error has ended, too.
    """
    for seed in range(6):
        path = tmp_path / f"{seed}"
        fault = Fault(slips, at=at)
        makes = [partial(OracleEnv, path, 0, 1, fault), partial(OracleEnv, path, 1)]
        make = makes
        if mode is not None:
            make = partial(SyncVectorEnv, makes, autoreset_mode=mode)
        errors = 0
        before: list[Any] = [None, None]
        with Collector(make, None, frames_per_batch=12, seed=seed, **WAIT) as collector:
            while collector.stats().batches < 6:
                try:
                    batch = collector.next()
                except EnvError:
                    errors += 1
                    continue
                check_whole(batch, before)
            assert_accounted(collector)
        assert errors == 1


def check_whole(batch: Any, before: list[Any]) -> None:
    """Each environment begins an episode, or goes on with the observation of ``before``, which is
    replaced.
    """
    for i in range(2):
        lane = batch[i][batch["collector", "valid"][i]]
        obs = lane["observation"]
        after = lane["next", "observation"]
        if before[i] is None:
            assert obs[0, 3] == 0
        else:
            assert torch.equal(obs[0], before[i])
        assert torch.equal(obs[1:], after[:-1])
        expected, reward, terminated, _ = follow(
            tuple(obs.numpy().T), lane["action"].numpy()
        )
        np.testing.assert_array_equal(after.numpy().T, np.array(expected))
        np.testing.assert_array_equal(lane["next", "reward"].squeeze(-1), reward)
        np.testing.assert_array_equal(
            lane["next", "terminated"].squeeze(-1), terminated
        )
        before[i] = None if lane["next", "done"][-1] else after[-1]


def test_a_value_that_cannot_be_right_takes_back_only_what_was_stepped():
    make, made = failing(3, output={"reward": float("nan")})
    with Collector(make, None, num_envs=3, frames_per_batch=18, **WAIT) as c:
        with pytest.raises(BadEnvOutput, match="reward is nan"):
            c.rollout()
        # Rows 3, 4 and 5 of the two that had not ended.
        assert c.stats().discarded == {"bad_env_output": 6}
        got = c.rollout()
        assert got["collector", "valid"].sum(-1).tolist() == [2, 3, 3]
        assert c.stats().executed == sum(env.executed for env in made) == 14
        assert_accounted(c)


def test_an_error_of_the_policy_leaves_those_alone_who_wait():
    calls: list[int] = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if calls[-1] in (4, 5):
            raise ValueError("as asked")
        return torch.zeros(2, dtype=torch.int64)

    make, made = lengths(2, 9)
    with Collector(make, policy, num_envs=2, frames_per_batch=14, **WAIT) as c:
        for _ in range(2):
            with pytest.raises(PolicyError, match="as asked"):
                c.rollout()
            assert_accounted(c)
        assert column(c.rollout(), "next", "reward") == [
            [1, 2, 0, 0, 0, 0, 0],
            [1, 2, 3, 4, 5, 6, 7],
        ]
        assert (
            c.stats().executed
            == c.stats().frames
            == sum(env.executed for env in made)
            == 9
        )


# --- workers --------------------------------------------------------------------------------------


def between(c: Any, action: str, states: list[Any]) -> None:
    if action == "reset":
        c.reset()
    elif action == "seed":
        c.set_seed(7)
    elif action == "state":
        states.append(c.state_dict())
    elif action == "load" and states:
        c.load_state_dict(states[-1])


@settings(max_examples=12, deadline=None)
@given(
    ends=st.integers(2, 6),
    rows=st.integers(1, 6),
    backend=st.sampled_from(["threads", "threads", "processes"]),
    limit=st.sampled_from([None, 3]),
    actions=st.lists(st.sampled_from(["", "reset", "state", "load"]), max_size=4),
)
def test_workers_give_the_same_data_whenever_they_reset(
    ends, rows, backend, limit, actions
):
    options = {
        "num_envs": 2,
        "frames_per_batch": 6 * rows,
        "seed": 5,
        "max_frames_per_traj": limit,
        **WAIT,
    }
    runs = []
    for cls, more in (
        (Collector, {}),
        (MultiSyncCollector, {"num_workers": 2, "backend": backend}),
    ):
        with cls([partial(ChainEnv, ends)] * 3, None, **options, **more) as c:
            states: list[Any] = []
            batches = [c.next().clone()]
            for action in actions:
                between(c, action, states)
                batches.append(c.next().clone())
            runs.append(batches)
            assert_accounted(c)
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


class Signals(CountingEnv):
    """Says when it is reset."""

    def __init__(self, length: int = 2) -> None:
        super().__init__(length)
        self.begun = threading.Semaphore(0)

    def reset(self, **options: Any) -> Any:
        got = super().reset(**options)
        self.begun.release()
        return got


def test_a_worker_resets_while_nobody_waits_for_it():
    make, made = recorded(Signals)
    with MultiSyncCollector(
        [make], None, frames_per_batch=5, backend="threads", **WAIT
    ) as c:
        c.next()
        assert all(
            made[0].begun.acquire(timeout=60) for _ in range(2)
        )  # without another batch
        c.next()
        assert all(made[0].begun.acquire(timeout=60) for _ in range(1))
        assert made[0].executed == 4
        assert c.stats().executed == 4


@pytest.mark.parametrize("place", ["here", "threads", "processes"])
def test_an_error_of_an_early_reset_is_raised_with_the_next_batch_and_loses_nothing(
    place,
):
    env = partial(FaultyEnv, 1, error=faults_value_error, on_reset=True, length=2)
    cls, more = (
        (Collector, {}) if place == "here" else (MultiSyncCollector, {"backend": place})
    )
    with cls(
        [env, counting(4)], None, frames_per_batch=10, seed=0, **WAIT, **more
    ) as c:
        first = c.next().clone()
        with pytest.raises(EnvError, match="as asked") as caught:
            c.next()
        assert caught.value.phase == "reset"
        again = c.next()
        assert column(first, "next", "reward") == column(again, "next", "reward")
        assert again["collector", "traj_ids"].max(-1).values.tolist() == [2, 3]
        assert c.stats().executed == c.stats().frames == 12


def faults_value_error() -> ValueError:
    return ValueError("as asked")


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
@pytest.mark.parametrize("at", [13, 20])
def test_a_worker_that_is_killed_has_made_no_steps_with_those_who_waited(tmp_path, at):
    path = tmp_path / "counts"

    def make() -> OracleEnv:
        env = OracleEnv(path, 0, 3)
        env.fault = (
            Fault(faults.Signalled(signal.SIGKILL), at=at) if env.number == 2 else None
        )
        return env

    with MultiSyncCollector(
        make, None, num_workers=1, num_envs=3, frames_per_batch=24, seed=2, **WAIT
    ) as c:
        batches = []
        with pytest.raises(WorkerDied) as caught:
            while True:
                batches.append(c.next().clone())
        assert "environment 2" in str(caught.value)
        assert sum(c.stats().discarded.values()) < 24 - 8 + 2
        batches += [c.next().clone() for _ in range(2)]
        assert_accounted(c)
        stats, counts = c.stats(), OracleEnv.read(path)
        assert stats.executed == counts[:, 2].sum()
        assert sum(check_stream(batches).values()) == stats.frames
