"""Evaluations: exact numbers of episodes, no bias, nobody disturbed, nothing dropped in silence."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muster import Collector, Evaluation, Evaluator
from muster.episodes.record import EpisodeRecord
from muster.episodes.rules import RuleName, make_rule
from muster.errors import (
    BadOption,
    BadWeights,
    CollectorBusy,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    PolicyError,
    UnknownOption,
    UnsupportedEnv,
    WorkerDied,
)
from muster.evaluation import run as run_module
from muster.evaluation.result import student_quantile
from muster.evaluation.run import Plan, Run
from muster.policies import categorical
from muster.testing import CountingEnv, FaultyEnv
from tests.tools import counting

PATIENCE = 60.0  # seconds after which a test gives up


class Dice(gymnasium.Env[Any, Any]):
    """Everything is drawn from the environment's generator: the length of an episode, and rewards."""

    def __init__(self, longest: int = 9) -> None:
        self.longest = longest
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.metadata = {"render_modes": []}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.length, self.t = int(self.np_random.integers(1, self.longest + 1)), 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(self.np_random.normal()) + float(action)
        return (
            np.array([self.length, self.t], np.float32),
            reward,
            self.t >= self.length,
            False,
            {},
        )


class Matching(CountingEnv):
    """One for an action that is the parity of the time step."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.action_space = spaces.Discrete(9)

    def step(self, action: Any) -> Any:
        right = int(action) == self.t % 2
        obs, _, *rest = super().step(action)
        return obs, float(right), *rest


class Gated(Matching):
    """Its first reset waits until somebody has written to a named pipe."""

    def __init__(self, pipe: str) -> None:
        super().__init__(4)
        self.pipe: str | None = pipe

    def reset(self, **options: Any) -> Any:
        if self.pipe is not None:
            Path(self.pipe).read_bytes()
            self.pipe = None
        return super().reset(**options)


class KillsOnce(Dice):
    """Ends its process in its fifth step, the first time."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.steps = Path(mark), 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class RaisesOnce(Dice):
    """Raises in its fifth step, the first time."""

    raised = False

    def step(self, action: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 5 and not RaisesOnce.raised:
            RaisesOnce.raised = True
            raise ValueError("once")
        return super().step(action)


class GlobalDraws(nn.Module):
    """Draws from all global generators, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.net = nn.Dropout(0.5), nn.Linear(2, 2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        draw = random.random() + np.random.rand() + float(torch.rand(()))
        return (self.drop(self.net(obs)).argmax(-1) + int(draw * 100)) % 2


class Constant(nn.Module):
    """Always the action that is its only weight."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))
        self.mode = nn.Dropout()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.action.detach().long().expand(obs.shape[:-1])


def set_action(policy: Constant, action: int) -> None:
    with torch.no_grad():
        policy.action.fill_(action)


def head(inputs: int = 2, outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return categorical(
        nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))
    )


def evaluated(env: Any, policy: Any = None, **options: Any) -> Evaluation:
    with Evaluator(env, policy, **options) as evaluator:
        return evaluator.evaluate(version="v")


def lengths(*numbers: int) -> list[Callable[[], Any]]:
    return [counting(n) for n in numbers]


def by_seed(evaluation: Evaluation) -> list[tuple[int | None, float, int]]:
    return sorted((r.seed, r.episode_return, r.length) for r in evaluation.records)


def assert_accounted(evaluation: Evaluation) -> None:
    """Every step up to the end is in a record, unfinished or uncounted, and every episode was
    started.
    """
    left_out = len(evaluation.uncounted)
    assert (
        evaluation.started
        >= len(evaluation.records) + len(evaluation.unfinished) + left_out
    )
    unfinished = sum(episode.steps for episode in evaluation.unfinished)
    uncounted = evaluation.discarded.get("uncounted", 0)
    assert evaluation.frames == evaluation.frames_counted + unfinished + uncounted


# --- which episodes count -------------------------------------------------------------------------


def test_every_environment_contributes_a_share_that_is_fixed_in_advance() -> None:
    done = evaluated(lengths(2, 5, 3), episodes=7)  # 3, 2 and 2 of them
    ends = [(r.begin + r.length, r.env_id, r.episode, r.length) for r in done.records]
    assert ends == [
        (2, 0, 0, 2),
        (3, 2, 0, 3),
        (4, 0, 1, 2),
        (5, 1, 0, 5),
        (6, 0, 2, 2),
        (6, 2, 1, 3),
        (10, 1, 1, 5),
    ]
    assert [r.episode_return for r in done.records] == [3, 6, 3, 15, 3, 6, 15]
    assert (done.complete, done.biased, done.stopped_by, done.unfinished) == (
        True,
        False,
        "episodes",
        (),
    )
    assert (done.frames, done.frames_counted, done.started) == (22, 22, 7)
    assert (done.uncounted, done.discarded) == ((), {})
    assert (done.mean, done.median, done.length_mean) == (51 / 7, 6, 22 / 7)
    assert_accounted(done)


def test_max_t_stops_every_environment_and_reports_what_is_unfinished() -> None:
    done = evaluated(lengths(2, 5, 3), episodes=7, max_T=5)
    assert [(r.env_id, r.begin) for r in done.records] == [
        (0, 0),
        (2, 0),
        (0, 2),
        (1, 0),
    ]
    assert [
        (u.env_id, u.episode, u.steps, u.return_so_far) for u in done.unfinished
    ] == [
        (0, 2, 1, 1),
        (2, 1, 2, 3),
    ]
    assert [u.seed for u in done.unfinished] == [6, 5]
    assert (done.complete, done.stopped_by, done.frames) == (False, "max_T", 15)
    assert "incomplete: stopped by max_T, 2 unfinished" in str(done)
    assert "overrun" not in done.discarded  # rollouts are as short as that
    assert_accounted(done)


def test_max_frames_is_never_passed() -> None:
    done = evaluated(lengths(2, 5, 3), episodes=7, max_frames=17, max_T=9)
    assert (done.frames, done.stopped_by, done.complete) == (15, "max_frames", False)
    done = evaluated(
        lengths(40, 45), episodes=2, max_frames=100
    )  # in the second rollout
    assert (done.frames, done.stopped_by, done.complete) == (85, "episodes", True)
    assert done.discarded == {}


@given(
    sizes=st.lists(
        st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    episodes=st.one_of(st.none(), st.integers(1, 9)),
    max_trajectories=st.one_of(st.none(), st.integers(1, 9)),
    max_T=st.integers(1, 40),
    rule=st.sampled_from(get_args(RuleName)),
    T=st.integers(1, 11),
)
def test_counting_over_rollouts_equals_counting_step_by_step(
    sizes: list[list[int]],
    episodes: int | None,
    max_trajectories: int | None,
    max_T: int,
    rule: Any,
    T: int,
) -> None:
    n = len(sizes)
    judge = make_rule(rule, episodes, n)
    wanted = [judge.awaits(i) for i in range(n)]
    run = Run(
        Plan(episodes, None, max_T, max_trajectories, rule),
        n,
        seed=0,
        seeded=True,
        version=0,
    )
    ids = np.arange(n) + n * np.zeros((T, 1), int)
    cycles = [itertools.cycle(size) for size in sizes]
    length, steps, number = [next(c) for c in cycles], [0] * n, [0] * n
    expected: list[tuple[int, int]] = []
    left_out: list[tuple[int, int]] = []
    stopped, t = "", 0
    while not stopped:
        t += 1
        steps = [so_far + 1 for so_far in steps]
        ended = [i for i in range(n) if steps[i] == length[i]]
        room = (
            math.inf if max_trajectories is None else max_trajectories - len(expected)
        )
        counted = [i for place, i in enumerate(judge.ended(ended)) if place < room]
        for i in ended:
            (expected if i in counted else left_out).append((i, number[i]))
            steps[i], length[i], number[i], wanted[i] = (
                0,
                next(cycles[i]),
                number[i] + 1,
                judge.awaits(i),
            )
        if len(expected) == episodes:
            stopped = "episodes"
        elif len(expected) == max_trajectories:
            stopped = "max_trajectories"
        elif t == max_T:
            stopped = "max_T"
    again = [itertools.cycle(size) for size in sizes]
    ends = [
        list(itertools.takewhile(lambda e: e <= 100, itertools.accumulate(cycle)))
        for cycle in again
    ]
    for begin in itertools.count(0, T):
        if run.stopped_by:
            break
        rows = run.rows(T, apart=False)
        assert rows == min(T, max_T - begin)
        found = [
            (e, i, k)
            for i, of_env in enumerate(ends)
            for k, e in enumerate(of_env)
            if begin < e <= begin + rows
        ]
        records = [
            EpisodeRecord(
                0, i, 0.0, ends[i][k] - (ends[i][k - 1] if k else 0), True, False
            )
            for _, i, k in sorted(found, key=lambda entry: (-entry[1], entry[0]))
        ]
        run.add(records, np.ones((rows, n), np.float32), ids[:rows])
    assert (run.stopped_by, run.t) == (stopped, t)
    assert [(r.env_id, r.episode) for r in run.records] == expected
    assert [(r.env_id, r.episode) for r in run.uncounted] == left_out
    going = [
        (i, number[i], steps[i], float(steps[i]))
        for i in range(n)
        if wanted[i] and steps[i]
    ]
    assert [
        (u.env_id, u.episode, u.steps, u.return_so_far) for u in run.unfinished()
    ] == going


def test_an_environment_that_never_ends_is_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "ENDLESS", 60)
    with pytest.raises(
        BadOption,
        match=r"environment 1 has been in one episode for over 60 steps.*max_frames_per_traj=",
    ):
        evaluated(lengths(3, 10**9), episodes=4)
    done = evaluated(lengths(3, 10**9), episodes=4, max_frames_per_traj=50)
    assert [(r.env_id, r.length, r.truncated) for r in done.records] == [
        (0, 3, False),
        (0, 3, False),
        (1, 50, True),
        (1, 50, True),
    ]
    assert evaluated(lengths(3, 10**9), episodes=4, max_T=70).unfinished[0].steps == 70


def test_whoever_watches_can_stop_it() -> None:
    seen = []

    def progress(episodes: int, frames: int) -> bool:
        seen.append((episodes, frames))
        return len(seen) < 2

    with Evaluator(counting(40), num_envs=2, episodes=100) as evaluator:
        done = evaluator.evaluate(progress=progress)
    assert seen == [(0, 64), (2, 128)]
    assert (done.stopped_by, done.complete, len(done.records)) == ("progress", False, 2)
    assert [u.steps for u in done.unfinished] == [24, 24]


# --- the same episodes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_envs": 1}, {"num_envs": 3}, {"num_envs": 2, "num_workers": 2}]
)
def test_the_episodes_are_those_of_the_first_seeds_however_many_environments_share_them(
    options: dict[str, Any],
) -> None:
    policy, expected = head(), []
    for seed in range(50, 57):
        env, total, ended = Dice(), 0.0, False
        obs, _ = env.reset(seed=seed)
        while not ended:
            action = int(policy.net(torch.as_tensor(obs)).argmax())
            obs, reward, ended, *_ = env.step(action)
            total += float(np.float32(reward))
        expected.append((seed, pytest.approx(total, abs=1e-12), env.t))
    assert by_seed(evaluated(Dice, policy, episodes=7, seed=50, **options)) == expected


def test_every_evaluation_begins_anew_with_the_same_episodes_unless_others_are_asked_for() -> (
    None
):
    with Evaluator(Dice, head(), num_envs=3, exploration_type="random") as evaluator:
        first, second = evaluator.evaluate(version=0), evaluator.evaluate(version=0)
        assert first == second
        assert first.seconds > 0
    with Evaluator(
        Dice, head(), num_envs=3, exploration_type="random", seed=1
    ) as evaluator:
        assert evaluator.evaluate(version=0) != first
    with Evaluator(Dice, head(), num_envs=3, reseed=True) as evaluator:
        a, b = evaluator.evaluate(version=0), evaluator.evaluate(version=0)
    with Evaluator(Dice, head(), num_envs=3, reseed=True) as evaluator:
        assert (evaluator.evaluate(version=0), evaluator.evaluate(version=0)) == (a, b)
    assert not {r.seed for r in a.records} & {r.seed for r in b.records}
    with Evaluator(Dice, head(), num_envs=3, seed=None) as evaluator:
        assert evaluator.evaluate().seed != evaluator.evaluate().seed


def test_workers_give_what_this_process_gives() -> None:
    factories = [functools.partial(Dice, 9), functools.partial(Dice, 30)]
    for exploration in ("deterministic", "random"):
        options: dict[str, Any] = {
            "num_envs": 2,
            "episodes": 9,
            "exploration_type": exploration,
        }
        here = evaluated(factories, head(), **options)
        assert evaluated(factories, head(), num_workers=2, **options) == here
        assert evaluated(factories, head(), num_workers=1, **options) == here


def test_batches_of_environments_are_seeded_once() -> None:
    def batch() -> SyncVectorEnv:
        return SyncVectorEnv([counting(2), counting(3), counting(4)])

    for workers in (0, 1):
        done = evaluated(batch, episodes=6, seed=7, num_workers=workers)
        assert [(r.env_id, r.episode, r.seed) for r in done.records] == [
            (0, 0, 7),
            (1, 0, 8),
            (0, 1, None),
            (2, 0, 9),
            (1, 1, None),
            (2, 1, None),
        ]
        with pytest.raises(UnsupportedEnv, match="had no seed of its own"):
            done.video(2)


# --- nobody is disturbed --------------------------------------------------------------------------


def state_of_the_process() -> list[Any]:
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy_state,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_streams_threads_grad_mode_and_the_policy_are_as_before(
    workers: int,
) -> None:
    policy = GlobalDraws()
    policy.train()
    random.seed(1), np.random.seed(2), torch.manual_seed(3), np.random.randn()
    before = state_of_the_process()
    with Evaluator(
        Dice, policy, num_envs=2, num_workers=workers, exploration_type="random"
    ) as evaluator:
        evaluator.evaluate()
        if workers:
            evaluator.trigger()
            evaluator.wait(PATIENCE)
        evaluator.evaluate()
    assert state_of_the_process() == before
    assert all(module.training for module in policy.modules())
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_the_copy_that_acts_is_in_evaluation_mode() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mode = nn.Dropout()

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return torch.full(obs.shape[:-1], int(self.mode.training))

    policy = Logits()
    for chosen in (policy, lambda obs: policy(obs)):
        for workers in (0, 1):
            done = evaluated(
                functools.partial(Matching, 1), chosen, episodes=2, num_workers=workers
            )
            assert done.mean == 1.0
    assert policy.mode.training


@pytest.mark.slow
def test_a_training_collector_yields_the_same_bits_beside_an_evaluation() -> None:
    def collected(evaluator: Evaluator | None) -> list[Any]:
        found = []
        torch.manual_seed(11)
        with Collector(
            Dice,
            GlobalDraws(),
            num_envs=2,
            frames_per_batch=64,
            total_frames=640,
            seed=4,
        ) as collector:
            for batch in collector:
                if evaluator is not None:
                    evaluator.trigger()
                    evaluator.poll()
                found.append(batch.clone())
                found.append(torch.rand(2))
        return found

    alone = collected(None)
    with Evaluator(Dice, head(), num_envs=2, num_workers=1, episodes=20) as evaluator:
        beside = collected(evaluator)
        assert evaluator.wait(PATIENCE).complete
    assert len(alone) == len(beside) == 20
    assert all(bool((a == b).all()) for a, b in zip(alone, beside, strict=True))


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_are_those_of_the_moment_of_the_call(workers: int) -> None:
    policy = Constant(0)
    with Evaluator(
        functools.partial(Matching, 4), policy, num_workers=workers, episodes=1
    ) as evaluator:
        set_action(policy, 5)
        assert evaluator.evaluate().mean == 0
        set_action(policy, 1)
        done = evaluator.evaluate()
        assert (done.mean, done.version, done.records[0].version) == (2, 2, 2)
        other = Constant(7)
        assert evaluator.evaluate(other, version="other").mean == 0
        assert evaluator.evaluate({"action": torch.tensor(1.0)}, version=9).version == 9
        with pytest.raises(BadWeights, match="unknown"):
            evaluator.evaluate({"nothing": torch.tensor(1.0)})
        with pytest.raises(BadWeights, match="not finite"):
            evaluator.evaluate({"action": torch.tensor(math.nan)})
        assert evaluator.evaluate().mean == 2
    assert policy.action.item() == 1


class Shifted(nn.Module):
    """The action is the sum of two weights, of which one is beside the network."""

    def __init__(self, action: int, shift: int) -> None:
        super().__init__()
        self.net, self.shift = (
            Constant(action),
            nn.Parameter(torch.tensor(float(shift))),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs) + self.shift.detach().long()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_part_of_the_policy_stands_for_all_of_it_and_other_parts_are_refused(
    num_workers: int,
) -> None:
    policy = Shifted(0, 7)
    env = functools.partial(Matching, 4)
    with Evaluator(env, policy, episodes=1, num_workers=num_workers) as evaluator:
        assert evaluator.evaluate().mean == 0
        set_action(policy.net, 3)
        policy.shift.data.fill_(-2.0)
        for source in (
            None,
            policy,
            policy.net,
            Shifted(0, 1),
            Shifted(2, -1).state_dict(),
            {"net": Constant(1), "shift": torch.tensor(0.0)},
        ):
            assert evaluator.evaluate(source).mean == 2
        for part in (
            Constant(1),
            Constant(1).state_dict(),
            {"net": {"action": torch.tensor(1.0)}},
        ):
            with pytest.raises(
                BadWeights,
                match=r"missing \['shift'\].*Call evaluate\(\) to evaluate the policy that",
            ):
                evaluator.evaluate(part)
        assert evaluator.evaluate().mean == 2


LIVE = Constant(1)


def live(obs: torch.Tensor) -> torch.Tensor:
    return LIVE(obs)


def test_modules_of_an_importable_function_are_the_users_and_are_not_written_to() -> (
    None
):
    loss = LIVE.action.square()  # whose backward pass would see a write
    with Evaluator(functools.partial(Matching, 4), live, episodes=1) as evaluator:
        assert evaluator.evaluate().mean == 2
        with pytest.raises(BadWeights, match="make the policy a module"):
            evaluator.evaluate(Constant(5))
    assert (LIVE.action.item(), LIVE.mode.training) == (1, True)
    loss.backward()


# --- in the background ----------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    return path


def let_go(pipe: str) -> None:
    Path(pipe).write_bytes(b"go")


def test_triggers_queue_up_and_each_has_the_weights_of_its_moment(pipe: str) -> None:
    policy = Constant(0)
    with Evaluator(
        functools.partial(Gated, pipe), policy, num_workers=1, episodes=2
    ) as evaluator:
        assert (evaluator.poll(), evaluator.is_running()) == (None, False)
        assert [evaluator.trigger(), evaluator.trigger(version="b")] == [1, 2]
        set_action(policy, 1)
        assert evaluator.trigger({"action": torch.tensor(0.0)}) == 3
        assert (
            evaluator.poll(),
            evaluator.is_running(),
            evaluator.stats().waiting,
        ) == (
            None,
            True,
            3,
        )
        assert "busy" in repr(evaluator)
        with pytest.raises(CollectorBusy, match="in the background"):
            evaluator.evaluate()
        with pytest.raises(CollectorTimeout, match="it goes on"):
            evaluator.wait(0.01)
        let_go(pipe)
        assert [evaluator.wait(PATIENCE).version for _ in range(3)] == [1, "b", 3]
        with pytest.raises(BadOption, match="nothing to wait for"):
            evaluator.wait(PATIENCE)
        assert not evaluator.is_running()
        assert evaluator.evaluate().version == 4
        stats = evaluator.stats()
        assert (stats.evaluations, stats.episodes, stats.waiting, stats.version) == (
            4,
            8,
            0,
            4,
        )
        assert stats.frames == 4 * 2 * 4


def test_who_is_busy_can_also_skip_or_refuse(pipe: str) -> None:
    for when_busy in ("skip", "raise"):
        with Evaluator(
            functools.partial(Gated, pipe), num_workers=1, when_busy=when_busy
        ) as evaluator:  # type: ignore[arg-type]
            assert evaluator.trigger() == 1
            if when_busy == "skip":
                assert (evaluator.trigger(), evaluator.stats().skipped) == (0, 1)
            else:
                with pytest.raises(CollectorBusy, match="poll"):
                    evaluator.trigger()
            let_go(pipe)
            assert evaluator.wait(PATIENCE).version == 1
            assert evaluator.trigger() == 2
            assert evaluator.wait(PATIENCE).version == 2


def test_the_background_takes_workers() -> None:
    with (
        Evaluator(counting(3)) as evaluator,
        pytest.raises(BadOption, match="num_workers=1"),
    ):
        evaluator.trigger()
    with Evaluator(
        counting(3), head(2, 2), num_workers=1, inference="server"
    ) as evaluator:
        assert evaluator.evaluate().mean == 6
        with pytest.raises(BadOption, match="not beside your training"):
            evaluator.trigger()


def runs(pid: int) -> bool:
    """The process has not ended; its keeper may not have waited for it yet."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def test_shutdown_ends_what_hangs_and_leaves_nothing_behind(pipe: str) -> None:
    evaluator = Evaluator(functools.partial(Gated, pipe), num_workers=1)
    pids = [worker.pid for worker in evaluator._open().stats().workers]
    evaluator.trigger()
    evaluator.trigger()
    evaluator.shutdown(timeout=0.05)
    evaluator.shutdown()
    assert not [pid for pid in pids if runs(pid)]
    assert not evaluator.is_running()
    assert "closed" in repr(evaluator)
    for call in (evaluator.evaluate, evaluator.trigger, evaluator.wait):
        with pytest.raises(CollectorClosed):
            call()


# --- failures -------------------------------------------------------------------------------------


def test_a_killed_worker_is_an_error_and_the_next_evaluation_has_a_new_one(
    tmp_path: Path,
) -> None:
    make = functools.partial(KillsOnce, str(tmp_path / "mark"))
    expected = evaluated(Dice, head(), episodes=12)
    with Evaluator(make, head(), num_workers=2, num_envs=2, episodes=12) as evaluator:
        with pytest.raises(WorkerDied):
            evaluator.evaluate()
        assert by_seed(evaluator.evaluate()) == by_seed(expected)


def test_restart_begins_the_evaluation_anew_and_accounts_for_what_was_lost(
    tmp_path: Path,
) -> None:
    make = functools.partial(KillsOnce, str(tmp_path / "mark"))
    options: dict[str, Any] = {
        "num_workers": 2,
        "num_envs": 2,
        "episodes": 12,
        "on_failure": "restart",
    }
    expected = evaluated(Dice, head(), **options)
    with Evaluator(make, head(), **options) as evaluator:
        evaluator.trigger()
        done = evaluator.wait(PATIENCE)
        assert (done.records, done.unfinished) == (
            tuple(r._replace(version=1) for r in expected.records),
            (),
        )
        assert evaluator.stats().restarts == 1
        assert done.discarded["restarted"] >= 0


def test_an_environment_that_raises_in_this_process_can_be_begun_anew_too() -> None:
    RaisesOnce.raised = False
    with (
        Evaluator(RaisesOnce, head(), num_envs=2) as evaluator,
        pytest.raises(EnvError, match="once"),
    ):
        evaluator.evaluate()
    RaisesOnce.raised = False
    with Evaluator(RaisesOnce, head(), num_envs=2, on_failure="restart") as evaluator:
        done = evaluator.evaluate()
        assert by_seed(done) == by_seed(evaluated(Dice, head(), num_envs=2))
        assert done.discarded["restarted"] == 8
        assert evaluator.stats().restarts == 1


def test_an_object_goes_on_after_an_error_and_policies_are_not_tried_again() -> None:
    env = FaultyEnv(4, error=functools.partial(ValueError, "once"))
    with Evaluator(env, episodes=3, on_failure="restart") as evaluator:
        assert evaluator.evaluate().complete
        assert env.closed == 0
    assert env.closed == 1

    def fails(obs: torch.Tensor) -> torch.Tensor:
        raise ValueError("no action")

    with Evaluator(counting(3), fails, on_failure="restart") as evaluator:
        with pytest.raises(PolicyError, match="no action"):
            evaluator.evaluate()
        assert evaluator.stats().restarts == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, "episodes=0: expected an integer of at least 1"),
        ({"episodes": True}, "episodes=True"),
        ({"episodes": None}, "nothing ends this evaluation"),
        ({"max_frames": 3, "num_envs": 4}, "less than one step of 4 environments"),
        ({"rule": "fastest"}, "rule='fastest': expected 'fair'.*'per_env'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"when_busy": "wait"}, "when_busy='wait'"),
        ({"on_failure": "drop"}, "on_failure='drop'"),
        ({"exploration_type": "greedy"}, "exploration_type='greedy'"),
    ],
)
def test_impossible_options_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadOption, match=message):
        Evaluator(counting(3), **options)


def test_options_that_evaluations_have_no_use_for_are_refused() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'max_frames_per_traj'"):
        Evaluator(counting(3), max_frames_per_trajectory=3)
    for name in ("frames_per_batch", "backend", "replay_buffer"):
        with pytest.raises(UnknownOption, match=f"unknown option '{name}'"):
            Evaluator(counting(3), **{name: 8})
    with pytest.raises(BadOption, match="lives in this process"):
        Evaluator(CountingEnv(3), num_workers=1)


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "df", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 9, 2.262157),
        (0.99, 4, 4.604095),
        (0.9, 30, 1.697261),
        (0.95, 10**6, 1.959966),
    ],
)
def test_quantiles_are_those_of_the_tables(
    level: float, df: int, expected: float
) -> None:
    assert student_quantile(level, df) == pytest.approx(expected, rel=2e-6)


def test_the_figures_are_those_of_the_returns() -> None:
    done = evaluated(lengths(1, 2, 3), episodes=3)
    assert done.returns.tolist() == [1, 3, 6]
    assert done.lengths.tolist() == [1, 2, 3]
    assert (done.mean, done.median, done.length_mean) == (10 / 3, 3, 2)
    assert done.std == pytest.approx(np.std([1, 3, 6], ddof=1))
    low, high = done.confidence_interval(0.95)
    assert (low + high) / 2 == pytest.approx(done.mean)
    assert high - low == pytest.approx(2 * 4.30265 * done.std / math.sqrt(3), rel=1e-5)
    assert done.confidence_interval(0.5)[0] > low
    with pytest.raises(BadOption, match="level"):
        done.confidence_interval(95)
    assert [done.index(which) for which in ("best", "worst", "median", 1, -1)] == [
        2,
        0,
        1,
        1,
        2,
    ]
    for which in ("longest", 3, True):
        with pytest.raises(BadOption, match="expected 'best'"):
            done.index(which)
    assert "return 3.33" in str(done)
    assert json.loads(json.dumps(done.as_dict()))["records"][2]["episode_return"] == 6
    assert (
        repr(Evaluator("CartPole-v1"))
        == "Evaluator(CartPole-v1, episodes=10, rule='per_env', idle)"
    )


def test_too_few_episodes_are_no_figures() -> None:
    one, none = (
        evaluated(counting(3), episodes=1),
        evaluated(counting(3), episodes=1, max_T=2),
    )
    assert one.confidence_interval() == (-math.inf, math.inf)
    assert math.isnan(one.std)
    assert all(map(math.isnan, (none.mean, none.std, none.median, none.length_mean)))
    assert (none.records, none.unfinished[0].return_so_far) == ((), 3.0)
    assert json.loads(json.dumps(none.as_dict()))["mean"] is None
    with pytest.raises(BadOption, match="none was finished"):
        none.video("best")


# --- videos ---------------------------------------------------------------------------------------


class Film(Dice):
    """Its picture is as bright as its time step says. Odd sizes."""

    def __init__(
        self,
        longest: int = 9,
        render_mode: str | None = None,
        size: tuple[int, int] = (31, 47),
    ) -> None:
        super().__init__(longest)
        self.render_mode, self.size = render_mode, size
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def render(self) -> Any:
        return np.full((*self.size, 3), 20 * self.t % 256, np.uint8)


class Forgetful(Film):
    """Not determined by its seed: renders other rewards than it had."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward + (self.render_mode is not None), *rest


def pictures(path: Path) -> tuple[dict[str, Any], list[Any]]:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    reader = ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return about, [
        np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader
    ]


def test_a_video_shows_the_reset_and_every_step_of_the_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    done = evaluated(Film, head(), num_envs=3, episodes=8)
    for which in ("best", "worst", "median", 5):
        record = done.records[done.index(which)]
        path = done.video(which, tmp_path / "films")
        about, frames = pictures(path)
        assert path.name.startswith(
            f"{which if isinstance(which, str) else 'episode'}-{done.index(which)}-return-"
        )
        assert (len(frames), about["size"], about["fps"]) == (
            record.length + 1,
            (48, 32),
            10,
        )
        assert [round(float(frame.mean()) / 20) for frame in frames] == list(
            range(record.length + 1)
        )
    assert len(list((tmp_path / "films").iterdir())) == 4
    assert not caplog.records  # of sizes that do not fit the format


ACTIONS = [
    spaces.Discrete(3),
    spaces.Box(-1, 1, (2,)),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))),
]


@pytest.mark.parametrize("action", ACTIONS, ids=["integer", "vector", "dict"])
def test_all_kinds_of_actions_are_repeated_over_rollouts_and_workers(
    tmp_path: Path, action: Any
) -> None:
    pytest.importorskip("imageio_ffmpeg")

    class Acting(Film):
        def __init__(self, **options: Any) -> None:
            super().__init__(70, **options)
            self.action_space = action

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            parts = action.values() if isinstance(action, dict) else [action]
            return super().step(sum(float(np.sum(part)) for part in parts))

    done = evaluated(Acting, num_envs=1, num_workers=2, episodes=6)
    for env in range(2):
        length, index = max(
            (r.length, i) for i, r in enumerate(done.records) if r.env_id == env
        )
        assert length > 32  # more than a rollout
        _, frames = pictures(
            done.video(index, tmp_path, fps=50)
        )  # warnings are errors here
        assert len(frames) == length + 1


def test_an_environment_that_cannot_be_repeated_is_warned_about_by_name(
    tmp_path: Path,
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    done = evaluated(Forgetful, head(), episodes=2)
    with pytest.warns(
        UserWarning, match="Forgetful is not determined by its seed and actions"
    ):
        path = done.video("best", tmp_path)
    assert path.exists()


def test_what_cannot_be_filmed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(UnsupportedEnv, match="has render_mode=None"):
        evaluated(counting(3)).video("best", tmp_path)
    with pytest.raises(BadOption, match="environment object"):
        evaluated(Film()).video("best", tmp_path)
    with pytest.raises(BadOption, match="record_actions=True"):
        evaluated(Film, record_actions=False).video("best", tmp_path)
    with pytest.raises(
        UnsupportedEnv, match=r"render\(\) returned uint8 \[4, 4, 3, 3\]"
    ):
        evaluated(functools.partial(Film, size=(4, 4, 3))).video("best", tmp_path)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(BadOption, match=r"pip install 'muster-rl\[video\]'"):
        evaluated(Film).video("best", tmp_path)
    assert not list(tmp_path.iterdir())
