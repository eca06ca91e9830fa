"""Crash reports: from what workers and parents note to a file, and from there to the same bits once
more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muster import MultiSyncCollector
from muster.capabilities import pass_options
from muster.cli.main import main
from muster.envs.build import build_env
from muster.errors import (
    BadCrashReport,
    EnvError,
    ImportRefused,
    MusterError,
    WorkerDied,
    WorkerHung,
)
from muster.keys import next_of
from muster.memory.slots import Lane, Layout, Slot
from muster.policies import tanh_gaussian
from muster.policies.random import random_policy
from muster.restore import checkpoint
from muster.restore.action_log import (
    ActionLog,
    Anchors,
    ResetLog,
    generator_of,
    random_state,
)
from muster.restore.crash_report import (
    MOST_FILES,
    CrashDirectory,
    CrashReport,
    EnvFactory,
    Special,
)
from muster.restore.player import Player, same_bits
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.first_call import prime
from muster.rollout.group import Group
from muster.rollout.loop import rollout
from muster.rollout.options import RolloutOptions
from muster.rollout.request import RolloutRequest
from muster.testing import CountingEnv, FaultyEnv, SpaceEnv, TorchCartPole
from muster.workers.failures import send_error

ACTION, OBS = ("action",), ("observation",)
ERROR = EnvError("it broke")


class FailsAt(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fails at a step, or the reset, of that number over its life; ``None``: never."""

    def __init__(self, env: Any, at: int | None, *, on_reset: bool = False) -> None:
        super().__init__(env)
        self.at, self.on_reset, self.steps, self.resets = at, on_reset, 0, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if not self.on_reset and self.steps - 1 == self.at:
            raise ValueError("as asked")
        return self.env.step(action)

    def reset(self, **options: Any) -> Any:
        self.resets += 1
        if self.on_reset and self.resets - 1 == self.at:
            raise ValueError("as asked")
        return self.env.reset(**options)


class Rig:
    """A worker and its parent: a group that rolls out, and what both note of it.

    Args:
        envs: environments, or a vector environment.
        source: from which a replay makes them.
    """

    def __init__(
        self,
        envs: Any,
        source: Any,
        *,
        num_envs: int | None,
        T: int,
        seed: int | None = 3,
        **more: Any,
    ):
        limit = more.pop("limit_bytes", 1 << 20)
        factories = iter(envs if isinstance(envs, list) else [envs])
        self.env = build_env(
            lambda: next(factories), num_envs if isinstance(envs, list) else None
        )
        B = self.env.spec.num_envs
        self.anchors = Anchors(self.env)
        reset = self.env.reset

        def noted(arrays: Any, row: int, which: Any, seeds: Any) -> None:
            self.anchors.before_reset(row, which, seeds)
            reset(arrays, row, which, seeds)

        self.env.reset = noted  # type: ignore[method-assign]
        self.options = RolloutOptions(**more)
        self.group = Group(
            self.env,
            env_ids=np.arange(10, 10 + B),
            total_envs=B,
            rng=GroupRng(seed),
            options=self.options,
        )
        self.T = T
        self.policy = random_policy(self.env)
        self.history = ActionLog(
            EnvFactory(source, num_envs),
            name=self.env.spec.name,
            env_ids=range(10, 10 + B),
            alone=self.env.spec.replays_alone,
            limit_bytes=limit,
            max_frames_per_traj=self.options.max_frames_per_traj,
        )
        self.seen: list[Any] = []  # observations of all rows, [B, ...]
        if seed is not None:
            self.reset(seeds=list(range(seed, seed + B)))
        prime(self.group, self.policy, 0)
        self.history.may_have_reset()
        layout = Layout(
            T,
            B,
            lane_columns(self.env.spec, (), self.options),
            batch_shape=self.env.spec.batch_shape,
        )
        self.lane: Lane = Slot(layout).lanes[0]

    def reset(
        self, which: Sequence[int] | None = None, seeds: Sequence[int] | None = None
    ) -> None:
        self.group.reset(which, seeds)
        self.history.reset(which, seeds)

    def actions(self, end: int) -> dict[Any, Any]:
        return {key: self.lane.arrays[key][:end] for key in self.env.spec.action_specs}

    def rollout(self) -> None:
        """A whole one."""
        self.lane.restart()
        rollout(self.group, self.policy, RolloutRequest(0, 0, 0, "policy"), self.lane)
        self.seen += list(self.lane.arrays[OBS][: self.T].copy())
        self.history.add(
            self.actions(self.T), self.anchors.take(due=self.group.pending)
        )

    def run(
        self,
        rollouts: int,
        *,
        died: bool = False,
        index: int | None = 0,
        phase: str = "step",
    ) -> CrashReport:
        """Roll out until an environment fails, or else through; the crash report for that."""
        rows, error, log = self.T, ERROR, None
        try:
            for _ in range(rollouts):
                self.rollout()
            self.lane.restart()
            rollout(
                self.group, self.policy, RolloutRequest(0, 0, 0, "policy"), self.lane
            )
            rows -= 1  # let the last step be the one that failed: nothing came after it
        except EnvError as raised:
            rows, error = self.lane.done_steps, raised
        steps = rows + 1 if phase == "step" else rows
        flags = (
            self.lane.arrays[next_of(("terminated",))]
            | self.lane.arrays[next_of(("truncated",))]
        )
        self.seen += list(self.lane.arrays[OBS][: rows + 1].copy())
        if not died:
            log = self.anchors.take()
            log.resets = log.resets[log.resets[:, 1] <= rows]
            log.special = {
                n: entry for n, entry in log.special.items() if n < len(log.resets)
            }
        return self.history.crash_report(
            index,
            self.actions(steps),
            error=error,
            phase=phase,
            log=log,
            ended=flags[:rows] if died else None,
            observation={OBS: self.lane.arrays[OBS][rows]},
        )


def cartpoles(B: int, at: int | None = None, failing: int = 0) -> list[Any]:
    return [
        FailsAt(gymnasium.make("CartPole-v1"), at if b == failing else None)
        for b in range(B)
    ]


def replayed(crash_report: CrashReport) -> tuple[Player, list[Any]]:
    """The player before the last step, and the observations before every step but it."""
    player = Player(crash_report)
    moves = player.moves()
    assert moves.pop() == ("step", len(next(iter(crash_report.actions.values()))) - 1)
    seen = []
    for move in moves:
        if move[0] == "step":
            seen.append(player.observation()[OBS].copy())
        player.make(move)
    return player, seen


def assert_exact(crash_report: CrashReport, rig: Rig, index: int | slice) -> None:
    """Every observation from the crash report's beginning on comes back, bit for bit."""
    player, seen = replayed(crash_report)
    chosen = slice(index, index + 1) if isinstance(index, int) else index
    expected = [obs[chosen] for obs in rig.seen]
    for row, got in enumerate(reversed(seen)):
        assert same_bits(got, expected[-2 - row]), f"{row + 1} rows before the end"
    assert same_bits(player.observation()[OBS], expected[-1])
    assert (
        player.verdict()
        == "The observation before the failure is bit for bit the recorded one."
    )


def saved(crash_report: CrashReport, path: Path, **options: Any) -> CrashReport:
    crash_report.save(path)
    return CrashReport.load(path, **options)


# --- from a history to the same bits --------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 12),
    rollouts=st.integers(0, 8),
    at=st.integers(0, 80),
    limit=st.sampled_from([None, 1, 7, 20]),
    died=st.booleans(),
    seed=st.sampled_from([0, 3, None]),
    more=st.sampled_from(
        [
            {},
            {"set_truncated": True},
            {"reset_at_each_iter": True},
            {"compact_obs": True},
        ]
    ),
    data=st.data(),
)
def test_a_crash_report_brings_the_failing_environment_to_the_same_observation(
    tmp_path_factory: Any,
    B: int,
    T: int,
    rollouts: int,
    at: int,
    limit: Any,
    died: bool,
    seed: Any,
    more: Any,
    data: Any,
) -> None:
    index = data.draw(st.integers(0, B - 1))
    rig = Rig(
        cartpoles(B, at, index),
        "CartPole-v1",
        num_envs=B,
        T=T,
        seed=seed,
        max_frames_per_traj=limit,
        **more,
    )
    crash_report = rig.run(rollouts, died=died, index=index)
    if crash_report.missing:  # its only random state died with the worker
        assert seed is None
        assert died
        return
    assert (
        crash_report.env_ids,
        crash_report.name,
        crash_report.max_frames_per_traj,
    ) == (
        [10 + index],
        "CartPole-v1",
        limit,
    )
    path = tmp_path_factory.mktemp("c") / "a.crash"
    assert_exact(saved(crash_report, path), rig, index)


@settings(max_examples=20, deadline=None)
@given(
    calls=st.lists(
        st.sampled_from(["rollout", "reset", "reset all", "seed"]), max_size=8
    ),
    died=st.booleans(),
)
def test_resets_and_seeds_of_the_user_are_replayed(
    calls: list[str], died: bool
) -> None:
    rig = Rig(cartpoles(2), "CartPole-v1", num_envs=2, T=9, max_frames_per_traj=5)
    for n, call in enumerate(calls):
        if call == "rollout":
            rig.rollout()
        elif call == "reset":
            rig.reset([1])
        else:
            rig.reset(None, [50 + n, 70 + n] if call == "seed" else None)
    crash_report = rig.run(0, died=died, index=1)
    if died and calls and not {"rollout", "seed"} & set(calls):
        # it had begun an episode before; the worker has not told that, and was reset again
        assert "reset by request before its first step" in crash_report.missing
        return
    assert_exact(crash_report, rig, 1)


def test_the_history_keeps_no_more_than_what_follows_the_last_known_beginning() -> None:
    rig = Rig(cartpoles(2), "CartPole-v1", num_envs=2, T=10, max_frames_per_traj=5)
    sizes = []
    for _ in range(30):
        rig.rollout()
        sizes.append(rig.history.nbytes)
    assert max(sizes) < 10_000
    crash_report = rig.run(0, index=0)
    assert len(crash_report.actions[ACTION]) <= 20
    assert len(crash_report.resets) <= 5
    assert "begins with the random state before a reset" in crash_report.caveat
    assert_exact(crash_report, rig, 0)


def test_beyond_the_limit_the_crash_report_says_that_the_beginning_is_missing(
    tmp_path: Path,
) -> None:
    rig = Rig([CountingEnv(10**6)], CountingEnv, num_envs=1, T=10, limit_bytes=1000)
    rig.rollout()
    rig.reset(seeds=[5])
    crash_report = rig.run(30)
    assert rig.history.nbytes <= 1000
    assert "its beginning is missing" in crash_report.missing
    assert "1,000 bytes" in crash_report.missing
    crash_report.save(tmp_path / "a")
    assert main(["replay", str(tmp_path / "a"), "--trust"]) == 2
    # The same history within its limit is not missing anything.
    crash_report = Rig([CountingEnv(10**6)], CountingEnv, num_envs=1, T=10).run(30)
    assert (
        crash_report.missing,
        crash_report.caveat,
        len(crash_report.actions[ACTION]),
    ) == (
        "",
        "",
        310,
    )


def test_one_long_episode_costs_the_others_nothing() -> None:
    rig = Rig(
        [CountingEnv(10**6), CountingEnv(3)],
        CountingEnv,
        num_envs=2,
        T=10,
        limit_bytes=3000,
    )
    crash_report = rig.run(30, index=0)
    assert "beginning is missing" in crash_report.missing
    other = rig.history.crash_report(
        1, rig.actions(10), error=ERROR, phase="step", log=ResetLog()
    )
    assert other.missing == ""


def test_after_forgetting_nothing_is_known_until_a_seed_comes() -> None:
    rig = Rig(cartpoles(1), "CartPole-v1", num_envs=1, T=5)
    rig.rollout()
    rig.history.forget()
    assert rig.history.nbytes == 0
    crash_report = rig.history.crash_report(
        0, rig.actions(5), error=ERROR, phase="step", log=ResetLog()
    )
    assert "neither a seed nor a random state" in crash_report.missing
    rig.reset(seeds=[8])
    crash_report = rig.run(0, died=True)
    assert crash_report.special == {0: Special(8, None, None)}
    assert_exact(crash_report, rig, 0)


def test_which_environment_it_was_must_be_known_in_a_batch() -> None:
    rig = Rig(cartpoles(2), "CartPole-v1", num_envs=2, T=5)
    assert "not known which environment" in rig.run(0, index=None).missing
    assert (
        Rig(cartpoles(1), "CartPole-v1", num_envs=1, T=5).run(0, index=None).missing
        == ""
    )


def test_observations_that_were_stored_in_another_dtype_are_recognised(
    tmp_path: Path,
) -> None:
    """MuJoCo observes float64, and the collector had a float32 network."""
    with (
        MultiSyncCollector(
            [lambda: FailsAt(gymnasium.make("HalfCheetah-v5"), 25)],
            tanh_gaussian(nn.Linear(17, 12)),
            backend="threads",
            frames_per_batch=20,
            seed=0,
            crash_dir=tmp_path,
        ) as collector,
        pytest.raises(EnvError, match="as asked") as caught,
    ):
        for _ in collector:
            pass
    crash_report = CrashReport.load(caught.value.crash_report, trust=True)
    assert crash_report.observation[OBS].dtype == np.float32
    player = Player(crash_report)
    for move in player.moves()[:-1]:
        player.make(move)
    assert (
        player.verdict()
        == "The observation before the failure is bit for bit the recorded one."
    )
    player.close()


@pytest.mark.parametrize("died", [False, True])
def test_what_fails_in_a_reset_is_replayed_from_the_one_before(
    died: bool, tmp_path: Path
) -> None:
    source = partial(FailsAt, CountingEnv(4, noise=True), 3, on_reset=True)
    rig = Rig([CountingEnv(100, noise=True), source()], source, num_envs=2, T=8)
    crash_report = saved(
        rig.run(5, died=died, index=1, phase="reset"), tmp_path / "a", trust=True
    )
    player = Player(crash_report)
    moves = player.moves()
    assert [kind for kind, _ in moves].count("reset") == 4
    for move in moves[:-1]:
        player.make(move)
    assert (
        player.verdict()
        == "The observation before the failure is bit for bit the recorded one."
    )
    with pytest.raises(EnvError, match="as asked"):
        player.make(moves[-1])


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("more", [{}, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_environment_is_replayed_as_a_whole_from_its_seeds(
    mode: AutoresetMode, more: Any, died: bool, tmp_path: Path
) -> None:
    make = partial(
        SyncVectorEnv, [partial(gymnasium.make, "CartPole-v1")] * 3, autoreset_mode=mode
    )
    rig = Rig(make(), make, num_envs=None, T=13, max_frames_per_traj=11, **more)
    crash_report = saved(rig.run(4, index=1, died=died), tmp_path / "a", trust=True)
    assert (crash_report.env_ids, crash_report.alone) == ([10, 11, 12], False)
    assert len(crash_report.actions[ACTION]) == 5 * 13
    assert "together, from their seeds" in crash_report.caveat
    assert_exact(crash_report, rig, slice(None))


def test_what_resets_itself_is_truncated_again_where_it_was() -> None:
    rig = Rig(
        TorchCartPole(3),
        partial(TorchCartPole, 3),
        num_envs=None,
        T=7,
        max_frames_per_traj=5,
    )
    crash_report = rig.run(2)
    assert len(crash_report.resets) == 3
    assert_exact(crash_report, rig, slice(None))


def test_a_torchrl_environment_is_replayed_from_its_seed(tmp_path: Path) -> None:
    envs = pytest.importorskip("torchrl.envs")
    make = partial(envs.GymEnv, "CartPole-v1")
    rig = Rig(make(), make, num_envs=None, T=30)
    crash_report = saved(rig.run(2, index=0), tmp_path / "a", trust=True)
    assert not crash_report.alone
    assert_exact(crash_report, rig, slice(None))


@pytest.mark.parametrize("rollouts", [0, 2])
@pytest.mark.parametrize("died", [False, True])
def test_an_episode_after_one_that_waited_for_the_end_of_its_batch_is_replayed(
    died: bool, rollouts: int
) -> None:
    envs = [
        FailsAt(CountingEnv(3, noise=True), 3 * rollouts + 1),
        CountingEnv(9, noise=True),
    ]
    rig = Rig(
        envs,
        partial(CountingEnv, 3, noise=True),
        num_envs=2,
        T=9,
        reset_when_done=False,
    )
    crash_report = rig.run(rollouts, died=died, index=0)
    assert len(crash_report.actions[ACTION]) == 2  # since the last noted reset
    assert_exact(crash_report, rig, 0)


def test_composite_actions_and_objects_come_back(tmp_path: Path) -> None:
    spaces = gymnasium.spaces
    space = spaces.Dict(
        {
            "move": spaces.Box(-1, 1, (2,)),
            "word": spaces.Text(5),
            "kind": spaces.Discrete(3),
        }
    )
    source = partial(SpaceEnv, spaces.Box(-1, 1, (2,)), space)
    env = source()
    rig = Rig([env], source, num_envs=1, T=7)
    crash_report = saved(rig.run(1), tmp_path / "a", trust=True)
    assert crash_report.actions["action", "word"].dtype == object
    player, _ = replayed(crash_report)
    player.make(player.moves()[-1])
    assert str(player.env.unwrapped.actions) == str(
        env.actions[-len(player.env.actions) :]
    )
    assert str(player.action(0)) == str(player.env.actions[0])
    assert type(player.action(0)["kind"]) is type(player.env.actions[0]["kind"])


def test_options_of_a_reset_are_given_again(tmp_path: Path) -> None:
    for options in (
        {"low": 0.01, "high": 0.02},
        {"low": np.float64(0.01), "high": 0.02},
    ):
        rig = Rig(cartpoles(1), "CartPole-v1", num_envs=1, T=6)
        rig.rollout()
        rig.reset([0], [9])
        pass_options(rig.env, {"options": options})
        rig.rollout()
        crash_report = saved(rig.run(0), tmp_path / "a", trust=True)
        assert crash_report.special[0] == Special(9, None, {"options": options})
        assert_exact(crash_report, rig, 0)


# --- notes of a worker ----------------------------------------------------------------------------


def test_notes_say_the_last_seed_of_an_environment() -> None:
    rig = Rig([CountingEnv(4), CountingEnv(7)], CountingEnv, num_envs=2, T=10, seed=5)
    rig.rollout()
    assert rig.anchors.seeds == [5, 6]
    rig.anchors.before_reset(2, [0], None)
    rig.anchors.before_reset(6, [0], [77])
    assert rig.anchors.seeds == [77, 6]
    rig.anchors.forget()
    assert len(rig.anchors.take().resets) == 0


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_generator_of_numpy_can_be_saved_and_set(
    name: str, tmp_path: Path
) -> None:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.np_random = np.random.Generator(getattr(np.random, name)(4))
    env.unwrapped.np_random.integers(7, dtype=np.int32)
    state = random_state(env)
    expected = (
        env.unwrapped.np_random.random(5).tolist(),
        env.unwrapped.np_random.integers(9, size=5).tolist(),
    )
    crash_report = CrashReport(
        "x", EnvFactory("CartPole-v1"), [0], True, "step", "EnvError", ""
    )
    crash_report.special[0] = Special(None, state, None)
    again = saved(crash_report, tmp_path / "a").special[0].state
    assert again is not None
    fresh = gymnasium.make("CartPole-v1")
    fresh.unwrapped.np_random = generator_of(again)
    assert (
        fresh.unwrapped.np_random.random(5).tolist(),
        fresh.unwrapped.np_random.integers(9, size=5).tolist(),
    ) == (expected)


def test_what_has_no_generator_has_no_state() -> None:
    assert random_state(object()) is None
    with pytest.raises(ValueError, match="not a bit generator"):
        generator_of({"bit_generator": "Generator"})


# --- files ----------------------------------------------------------------------------------------


def test_a_file_from_another_machine_is_the_owners_whatever_the_umask(
    tmp_path: Path,
) -> None:
    directory = CrashDirectory(tmp_path)
    (tmp_path / "old.crash").touch(0o644)
    before = os.umask(0)
    try:
        found = [
            directory.put(name, b"content") for name in ("../new.crash", "old.crash")
        ]
    finally:
        os.umask(before)
    assert found == [tmp_path / "new.crash", tmp_path / "old.crash"]
    for path in found:
        assert path is not None
        assert path.read_bytes() == b"content"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_the_owners_and_all_of_it_comes_back(tmp_path: Path) -> None:
    rig = Rig(cartpoles(2), "CartPole-v1", num_envs=2, T=5, max_frames_per_traj=4)
    crash_report = rig.run(2, index=1)
    again = saved(crash_report, path := tmp_path / "a.crash")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.crash"]
    assert again.command(path) == f"muster replay {path}"
    for name in (
        "name",
        "env_ids",
        "alone",
        "phase",
        "kind",
        "message",
        "max_frames_per_traj",
        "missing",
        "caveat",
    ):
        assert getattr(again, name) == getattr(crash_report, name), name
    assert (again.versions, again.time, again.special) == (
        crash_report.versions,
        crash_report.time,
        crash_report.special,
    )
    assert again.resets.tolist() == crash_report.resets.tolist()
    assert same_bits(again.actions[ACTION], crash_report.actions[ACTION])
    assert same_bits(again.observation[OBS], crash_report.observation[OBS])
    assert again.factory == EnvFactory("CartPole-v1", 2)
    assert {"python", "gymnasium", "numpy", "torch"} <= crash_report.versions.keys()


def test_nothing_is_unpickled_or_imported_unasked(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").write_text, ("x",)

    factories = [
        EnvFactory(lambda: Evil()),
        EnvFactory("CartPole-v1", kwargs={"evil": Evil()}),
        EnvFactory("evil_module:CartPole-v1"),
    ]
    for factory in factories:
        crash_report = CrashReport("x", factory, [0], True, "step", "EnvError", "")
        assert crash_report.command(Path("c")) == "muster replay c --trust"
        crash_report.save(tmp_path / "c")
        with pytest.raises(
            ImportRefused, match=r"If you trust where it comes from, add --trust"
        ):
            CrashReport.load(tmp_path / "c")
        assert not (tmp_path / "ran").exists()
    plain = CrashReport(
        "x",
        EnvFactory("CartPole-v1", kwargs={"render_mode": None, "n": [1, 2.5]}),
        [0],
        True,
        "step",
        "E",
        "",
    )
    assert saved(plain, tmp_path / "c").factory.kwargs == {
        "render_mode": None,
        "n": [1, 2.5],
    }


def test_an_environment_that_cannot_be_pickled_is_missing(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    crash_report = CrashReport(
        "x", EnvFactory(lambda: file), [0], True, "step", "EnvError", ""
    )
    again = saved(crash_report, tmp_path / "c")
    file.close()
    assert (
        "It cannot be replayed: the environment: item 'source' -> closure variable 'file' is a _io.TextIOWrapper"
        in again.missing
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_with_one_error(
    tmp_path_factory: Any, data: Any
) -> None:
    path = tmp_path_factory.mktemp("d") / "c"
    CrashReport("x", EnvFactory("CartPole-v1"), [0], True, "step", "EnvError", "").save(
        path
    )
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    path.write_bytes(content)
    with contextlib.suppress(BadCrashReport):  # some bytes mean nothing
        assert CrashReport.load(path).name == "x"


def rewritten(path: Path, **changes: Any) -> Path:
    """A crash report with other fields."""
    CrashReport("x", EnvFactory("CartPole-v1"), [0], True, "step", "EnvError", "").save(
        path
    )
    checkpoint.save(path, checkpoint.load(path) | changes)
    return path


def test_other_files_and_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(BadCrashReport, match="not a crash report of format 2"):
        CrashReport.load(rewritten(path, format=99))
    with pytest.raises(BadCrashReport, match="is damaged"):
        CrashReport.load(rewritten(path, unknown=1))
    checkpoint.save(path, [1])
    with pytest.raises(BadCrashReport, match="not a crash report of format 2"):
        CrashReport.load(path)
    with pytest.raises(BadCrashReport, match="cannot be read: No such file"):
        CrashReport.load(tmp_path / "none")
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(BadCrashReport, match="damaged"):
        CrashReport.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 5},
        {"message": None},
        {"env_ids": []},
        {"env_ids": ["0"]},
        {"env_ids": 0},
        {"alone": "yes"},
        {"versions": []},
        {"max_frames_per_traj": "9"},
        {"missing": None},
        {"source": 5},
        {"num_envs": "2"},
        {"kwargs": []},
        {"device": 0},
        {"special": {0: ("1", None, None)}},
        {"special": {0: (1, 2, None)}},
        {"special": {"x": (1, None, None)}},
        {"special": {0: (1,)}},
        {"special": [1]},
        {"actions": [["action"]]},
        {"actions": {("action",): 1}},
        {"resets": np.zeros((1, 2), np.int64)},
        {"pickle": None},
    ],
)
def test_fields_of_another_type_are_refused(tmp_path: Path, changes: Any) -> None:
    with pytest.raises(BadCrashReport, match="is damaged"):
        CrashReport.load(rewritten(tmp_path / "c", **changes))


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("actions", {("action",): np.zeros((3, 1, 2), np.int64)}),
        ("actions", {("other",): np.zeros((3, 1), np.int64)}),
        ("resets", np.array([[0, 0, 1]])),
        ("resets", np.array([[0, 0, -1]])),
    ],
)
def test_a_crash_report_that_does_not_fit_its_environment_is_refused(
    tmp_path: Path, field: str, array: Any
) -> None:
    crash_report = CrashReport(
        "x",
        EnvFactory("CartPole-v1"),
        [0],
        True,
        "step",
        "EnvError",
        "",
        **{field: array},
    )
    with pytest.raises(
        BadCrashReport,
        match="x takes actions" if field == "actions" else "beyond the 1",
    ):
        Player(saved(crash_report, tmp_path / "c"))


def test_a_crash_directory_is_made_when_needed_and_never_fills_the_disk(
    tmp_path: Path,
) -> None:
    crash_report = CrashReport(
        "x", EnvFactory("CartPole-v1"), [7], True, "step", "EnvError", ""
    )
    own = CrashDirectory()
    assert own.path is None
    path = own.save(crash_report)
    assert path is not None
    assert path.parent.name.startswith("muster-crash-")
    assert path.name.endswith("-env-7.crash")
    assert own.path == path.parent
    path.unlink()
    path.parent.rmdir()
    given_one = CrashDirectory(tmp_path / "a" / "b")
    paths = [given_one.save(crash_report) for _ in range(MOST_FILES + 3)]
    assert paths[MOST_FILES:] == [None] * 3
    assert (
        len(list((tmp_path / "a" / "b").iterdir())) == len(set(paths)) - 1 == MOST_FILES
    )
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="No crash report was written"):
        assert CrashDirectory(tmp_path / "file").save(crash_report) is None


# --- muster replay --------------------------------------------------------------------------------


class Tilted(CartPoleEnv):
    """A CartPole that cannot bear certain angles: raises, kills or stops its process there, or ends
    it.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[0][2] > 0.15:
            if self.how == "raise":
                raise ValueError(f"cannot bear {result[0][2]:.3f}")
            if self.how == "exit":
                raise SystemExit(7)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                print("it hangs", flush=True)
                time.sleep(600)  # noqa: TID251  (a hang, which the test ends)
        return result


def tilted(
    how: str, path: Path, *, error: type[MusterError] = EnvError, trap: bool = True
) -> Path:
    """A crash report of a Tilted that failed in some episode; ``trap``: that fails again."""
    rig = Rig(
        [Tilted("raise")], partial(Tilted, how if trap else "never"), num_envs=1, T=16
    )
    crash_report = rig.run(50)
    assert "cannot bear" in crash_report.message
    crash_report.kind = error.__name__
    crash_report.save(path)
    return path


def command(*args: Any) -> list[str]:
    return [sys.executable, "-m", "muster.cli.main", "replay", *map(str, args)]


def test_replay_prints_the_traceback_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["replay", str(tilted("raise", tmp_path / "c")), "--trust", "--no-pdb"])
        == 1
    )
    out, err = capsys.readouterr()
    assert "Tilted, environment 10, 20" in out
    assert "EnvError in step: Tilted[0].step (row " in out
    assert "The observation before the failure is bit for bit the recorded one." in out
    assert "Failed again in env.step(" in out
    assert "ValueError: cannot bear 0.1" in err
    assert err.rstrip().splitlines()[-2].strip().startswith("raise ValueError")
    # Where the input is no terminal, as here, there is no debugger to wait for.
    assert main(["replay", str(tmp_path / "c"), "--trust"]) == 1


def test_replay_without_trust_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tilted("raise", tmp_path / "c"))]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--trust" in err


def test_replay_says_when_nothing_fails_this_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tilted("raise", tmp_path / "c", trap=False)
    assert main(["replay", str(path), "--trust"]) == 0
    assert "did not fail this time." in capsys.readouterr().out


def test_replay_says_when_it_gets_somewhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash_report = Rig(cartpoles(1), "CartPole-v1", num_envs=1, T=5).run(0)
    crash_report.observation[OBS][0, 0] += 1
    crash_report.versions["numpy"] = "0.1"
    crash_report.save(tmp_path / "c")
    assert main(["replay", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert (
        "is NOT the recorded one: this environment is not determined by its seed and actions alone."
        in out
    )
    assert f"Recorded with other versions: numpy 0.1 (here {np.__version__})." in out


def test_replay_reports_a_failure_that_comes_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = partial(FaultyEnv, 2, error=lambda: ValueError("early"), length=9)
    Rig([CountingEnv(9)], source, num_envs=1, T=5).run(0).save(tmp_path / "c")
    assert main(["replay", str(tmp_path / "c"), "--trust"]) == 1
    out, err = capsys.readouterr()
    assert (
        "Failed again in action 4 of 5, earlier than recorded." in out
    )  # a reset, and three actions
    assert "ValueError: early" in err

    def fails() -> Any:
        raise ValueError("no such maze")

    crash_report = Rig([CountingEnv(9)], fails, num_envs=1, T=5).run(0)
    crash_report.save(tmp_path / "c")
    assert main(["replay", str(tmp_path / "c"), "--trust"]) == 1
    out, err = capsys.readouterr()
    assert "Failed again in making the environment." in out
    assert "no such maze" in err


def test_replay_of_what_failed_outside_the_environment_plays_all(
    tmp_path: Path, capsys: Any
) -> None:
    rig = Rig(cartpoles(1), "CartPole-v1", num_envs=1, T=5)
    rig.run(0, phase="policy").save(tmp_path / "c")
    assert main(["replay", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert (
        "All actions are played. What failed came after them, in the phase 'policy'."
        in out
    )
    assert "4 actions and 1 resets." in out


@pytest.mark.slow
def test_replay_says_what_will_end_the_process_before_it_does(tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            tilted("kill", tmp_path / "c", error=WorkerDied), "--trust", "--no-pdb"
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines()[-1].startswith("Now env.step(")
    assert done.stdout.splitlines()[-1].endswith("), in which the worker died.")


def test_replay_of_an_exit_shows_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tilted("exit", tmp_path / "c")), "--trust"]) == 1
    assert "raise SystemExit(7)" in capsys.readouterr().err


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.execv(argv[0], argv)
        self.text = ""

    def until(self, text: str) -> str:
        """What came up to ``text``."""
        begin = len(self.text)
        while text not in self.text[begin:]:
            self.text += os.read(self.fd, 1 << 12).decode()
        return self.text[begin:]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        try:
            while os.read(self.fd, 1 << 12):
                pass
        except OSError:  # the other side is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_replay_on_a_terminal_is_a_debugger_where_the_environment_raised(
    tmp_path: Path,
) -> None:
    terminal = Terminal(command(tilted("raise", tmp_path / "c"), "--trust"))
    terminal.until("(Pdb) ")
    terminal.type("p 'how', self.how, float(result[0][2]) > 0.15\n")
    assert "('how', 'raise', True)" in terminal.until("(Pdb) ")
    terminal.type("q\n")
    assert terminal.end() == 1


@pytest.mark.slow
def test_replay_on_a_terminal_stops_before_what_hung(tmp_path: Path) -> None:
    terminal = Terminal(
        command(tilted("hang", tmp_path / "c", error=WorkerHung), "--trust")
    )
    assert "in which the worker hung." in terminal.until("(Pdb) ")
    terminal.type("p env.unwrapped.how, action\n")
    shown = re.search(r"\('hang', ([01])\)", terminal.until("(Pdb) "))
    assert shown is not None
    terminal.type("c\n")
    terminal.until("it hangs")
    terminal.type("\x03")
    assert f"Interrupted in env.step({shown[1]})." in terminal.until("(Pdb) ")
    terminal.type("p 'at', self.how\n")
    assert "('at', 'hang')" in terminal.until("(Pdb) ")
    terminal.type("q\n")
    assert terminal.end() == 1


def test_an_error_from_another_machine_names_the_file_here(tmp_path):
    """In its message, its attributes and the command that replays it."""
    there = tmp_path / "there.crash"
    there.write_bytes(b"content")
    error = EnvError(
        f"raised.\n\nTo see it happen again under a debugger: muster replay {there} --trust"
    )
    error.crash_report, error.replay_command = there, f"muster replay {there} --trust"
    made = send_error(error).here(CrashDirectory(tmp_path / "here")).error()
    here = tmp_path / "here" / "there.crash"
    assert not there.exists()
    assert here.read_bytes() == b"content"
    assert made.crash_report == here
    assert made.replay_command == f"muster replay {here} --trust"
    assert str(made).endswith(made.replay_command)
