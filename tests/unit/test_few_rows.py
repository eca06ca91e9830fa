"""Off-policy collecting, a few rows at a time in a rollout that stays open: the memory, the records
and the counts are those of rollouts of so many rows, whatever comes in between.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import muster
from muster import Collector, ReplayMemory, policies
from muster.collectors import few_rows
from muster.collectors.few_rows import FEW, FewRows
from muster.errors import (
    BadEnvOutput,
    BadPolicyOutput,
    EnvError,
    MusterError,
)
from muster.testing import CountingEnv, FaultyEnv
from tests.tools import assert_balanced

CARTPOLE = "CartPole-v1"
PENDULUM = "Pendulum-v1"


def net(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


class Remembering(nn.Module):
    """A policy with a recurrent state, which counts from ``h0``."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.full((1,), 7.0))

    def forward(self, observation: torch.Tensor, state: Any) -> Any:
        count = torch.zeros_like(observation[..., :1]) if state is None else state
        action = (observation.sum(-1) + count[..., 0] > 0).long()
        return action, count + 1


def learned() -> nn.Module:
    return policies.recurrent(Remembering(), initial_state="h0")


CASES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "one environment": (lambda: CountingEnv(5), lambda: None, {"frames_per_batch": 1}),
    "three environments": (
        lambda: CountingEnv(5),
        lambda: None,
        {"frames_per_batch": 3, "num_envs": 3},
    ),
    "a limit of steps": (
        lambda: CountingEnv(50),
        lambda: None,
        {"frames_per_batch": 2, "num_envs": 2, "max_frames_per_traj": 7},
    ),
    "categorical": (
        CARTPOLE,
        lambda: policies.categorical(net(4, 2)),
        {"frames_per_batch": 4, "num_envs": 4, "keep": ["action_log_prob"]},
    ),
    "a module": (
        CARTPOLE,
        Greedy,
        {"frames_per_batch": 1, "keep": [("collector", "traj_ids")]},
    ),
    "random first": (
        CARTPOLE,
        lambda: policies.deterministic(net(4, 2)),
        {"frames_per_batch": 1, "init_random_frames": 20},
    ),
    "epsilon": (
        CARTPOLE,
        lambda: policies.epsilon_greedy(net(4, 2), 0.5),
        {"frames_per_batch": 1, "keep": ["action_log_prob"]},
    ),
    "gaussian": (
        PENDULUM,
        lambda: policies.gaussian(net(3, 1)),
        {
            "frames_per_batch": 2,
            "num_envs": 2,
            "init_random_frames": 10,
            "keep": ["action_log_prob"],
        },
    ),
    "tanh gaussian": (
        PENDULUM,
        lambda: policies.tanh_gaussian(net(3, 2)),
        {"frames_per_batch": 1, "keep": ["action_log_prob"], "max_frames_per_traj": 9},
    ),
    "a recurrent state": (
        CARTPOLE,
        Remembering,
        {"frames_per_batch": 2, "num_envs": 2, "keep": ["recurrent_state"]},
    ),
    "a learned initial state": (
        CARTPOLE,
        learned,
        {"frames_per_batch": 2, "num_envs": 2, "keep": ["recurrent_state", "is_init"]},
    ),
    "versions": (
        CARTPOLE,
        Greedy,
        {
            "frames_per_batch": 1,
            "track_policy_version": True,
            "keep": [("collector", "policy_version")],
        },
    ),
    "infos": (
        lambda: CountingEnv(5),
        lambda: None,
        {"frames_per_batch": 2, "num_envs": 2, "info": False},
    ),
}


def reset(c: Collector) -> None:
    c.reset()


def reset_one(c: Collector) -> None:
    c.reset(0)


def seed(c: Collector) -> None:
    c.set_seed(9)


def collect(c: Collector) -> None:
    c.collect(n_step=3 * c._engine.num_envs)


def roll_out(c: Collector) -> None:
    c.rollout()


def save(c: Collector) -> None:
    c.state_dict()


def publish(c: Collector) -> None:
    c.update_policy_weights_()


BETWEEN = {
    13: reset,
    21: reset_one,
    30: seed,
    33: collect,
    40: reset,
    41: roll_out,
    50: save,
    60: publish,
    66: collect,
}


def collected(
    case: str,
    batches: int = 90,
    between: dict[int, Callable[[Collector], None]] | None = None,
    rows: int = 1,
) -> tuple[Any, list[str], Any]:
    env, policy, options = CASES[case]
    options = dict(options)
    options["frames_per_batch"] *= rows
    memory = ReplayMemory(50 * rows, seed=1, keep=options.pop("keep", ()))
    records = []
    with Collector(env, policy(), replay_buffer=memory, seed=3, **options) as c:
        for row in range(batches):
            c.next()
            records += [str(record) for record in c.episodes]
            (between or {}).get(row, lambda _: None)(c)
        stats = c.stats()
        counts = (
            stats.frames,
            stats.executed,
            stats.discarded,
            stats.in_flight,
            stats.episodes,
        )
        return memory[:], records, counts


def assert_equal(one: Any, other: Any) -> None:
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


@pytest.fixture
def generic(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Each batch is a rollout from here on."""
    return lambda: monkeypatch.setattr(FewRows, "is_possible", False)


@pytest.mark.parametrize("rows", [1, 2, 5, FEW])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_rollouts(case, rows, generic):
    found = collected(case, between=BETWEEN, rows=rows)
    generic()
    expected = collected(case, between=BETWEEN, rows=rows)
    assert_equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert len(found[1]) or case in ("gaussian",)


def test_the_initial_state_is_that_of_the_first_step():
    rows, _, _ = collected("a learned initial state", batches=40)
    begins = rows["is_init"].flatten()
    assert begins.sum() > 1
    assert (rows["recurrent_state"][begins] == 7).all()
    assert (rows["recurrent_state"][~begins] > 7).all()


@pytest.mark.parametrize("rows", [1, 3, FEW])
def test_the_lane_stays_open(rows):
    with Collector(
        lambda: CountingEnv(5),
        None,
        frames_per_batch=rows,
        replay_buffer=ReplayMemory(100),
    ) as c:
        group = c._engine.groups[0]
        for _ in range(3):
            c.next()
        running = group.open
        c.next()
        assert group.open is running is not None
        c.reset()
        assert group.open is None


def test_batches_of_slow_environments_are_rollouts(monkeypatch):
    """So Ctrl-C takes effect between two of their rows."""
    monkeypatch.setattr(few_rows, "QUICK_NS", 0)
    memory = ReplayMemory(100)
    with Collector(
        lambda: CountingEnv(5), None, frames_per_batch=3, replay_buffer=memory
    ) as c:
        for _ in range(7):
            c.next()
        assert c._engine.groups[0].open is None
        assert not c._engine._few_rows.is_possible
    assert memory[:]["observation"][:, -1].tolist() == [t % 5 for t in range(21)]


@pytest.mark.parametrize("fails", ["step", "reset"])
def test_after_an_error_rows_go_on(fails, generic):
    def run() -> Any:
        memory = ReplayMemory(100, seed=0)
        on_reset = fails == "reset"
        at = 2 if on_reset else 8
        no = partial(ValueError, "no")
        make = partial(FaultyEnv, at, error=no, length=5, on_reset=on_reset)
        errors = 0
        with Collector(
            make, None, frames_per_batch=1, replay_buffer=memory, seed=0
        ) as c:
            for _ in range(20):
                try:
                    c.next()
                except EnvError:
                    errors += 1
            stats = c.stats()
        assert errors
        assert_balanced(stats)
        return memory[:], (stats.frames, stats.executed, stats.discarded, errors)

    found = run()
    generic()
    expected = run()
    assert_equal(found[0], expected[0])
    assert found[1] == expected[1]


class FailsToReset(CountingEnv):
    """A reset of environment 1 fails once, when ``fails``."""

    fails = False

    def __init__(self, number: int) -> None:
        super().__init__(1000)
        self.number = number

    def reset(self, **options: Any) -> Any:
        if self.number == 1 and FailsToReset.fails:
            FailsToReset.fails = False
            raise RuntimeError("planned")
        return super().reset(**options)


@pytest.mark.parametrize("between", ["nothing", "collect", "save"])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_reset_that_fails_takes_nothing_from_the_other_environments(
    between: str, remembers: bool
) -> None:
    """They go on with the observation, and the state, that they had."""
    numbers = iter(range(2))
    memory = ReplayMemory(100, seed=0)
    with Collector(
        lambda: FailsToReset(next(numbers)),
        learned() if remembers else None,
        num_envs=2,
        frames_per_batch=2,
        replay_buffer=memory,
        seed=0,
    ) as c:
        for _ in range(5):
            c.next()
        c.reset([1])
        FailsToReset.fails = True
        with pytest.raises(EnvError, match="planned"):
            c.next()
        if between == "collect":
            c.collect(n_step=2)
        elif between == "save":
            c.state_dict()
        for _ in range(5):
            c.next()
        rows = memory[:]
        expected = c.stats().frames // 2
    first = rows[0::2]  # of environment 0
    steps = [first["observation"][:, 1], first["next", "observation"][:, 1]]
    assert steps[0].tolist() == list(range(expected))
    assert steps[1].tolist() == list(range(1, expected + 1))


class Faulty(CountingEnv):
    """A counting environment of which one step fails: the process's ``at``-th one."""

    steps = 0
    at = 0
    how = "nothing"

    def step(self, action: Any) -> Any:
        Faulty.steps += 1
        fails = Faulty.steps == Faulty.at
        if fails and self.how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        if fails and self.how == "step":
            raise ValueError("planned")
        observation, reward, *others = super().step(action)
        if fails and self.how == "reward":
            reward = float("nan")
        return observation, reward + float(action), *others


class FaultyPolicy(nn.Module):
    """Draws actions with torch; one call fails."""

    calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        FaultyPolicy.calls += 1
        if Faulty.how == "policy" and FaultyPolicy.calls == Faulty.at:
            raise ValueError("planned")
        return torch.randint(2, observation.shape[:-1])


def with_a_fault(
    how: str, at: int, rows: int, policy: str, *, generic_batches: bool = False
) -> tuple[Any, list[str], Any, int]:
    """Return all transitions, the records of episodes, the statistics, and the number of errors."""
    Faulty.steps = FaultyPolicy.calls = 0
    Faulty.at = at
    Faulty.how = how
    memory = ReplayMemory(500, seed=0, keep=[("collector", "traj_ids")])
    acting: Any = FaultyPolicy()
    if policy == "head":
        torch.manual_seed(0)
        acting = policies.categorical(nn.Linear(2, 2))
    errors = 0
    records = []
    with Collector(
        lambda: Faulty(11),
        acting,
        frames_per_batch=2 * rows,
        num_envs=2,
        replay_buffer=memory,
        seed=0,
    ) as c:
        for _ in range(30):
            try:
                c.next()
                records += [str(record) for record in c.episodes]
            except (MusterError, KeyboardInterrupt):
                errors += 1
                stats = c.stats()
                assert_balanced(stats)
                if generic_batches:
                    continue
                assert stats.written == len(memory) == stats.frames + stats.in_flight
        stats = c.stats()
        assert_balanced(stats)
        return memory[:].exclude("index"), records, stats, errors


FAULTS = [
    ("step", "head"),
    ("step", "module"),
    ("reward", "head"),
    ("reward", "module"),
    ("policy", "module"),
]


def places_of_faults(rows: int) -> list[int]:
    """Every step of the first batch, which opens a rollout, and of the third, which goes on with it."""
    batch = range(1, 2 * rows + 1)
    return [*batch, *(4 * rows + step for step in batch)]


@pytest.mark.parametrize(("how", "policy"), FAULTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_around_an_error_are_those_of_rollouts(
    how, rows, policy, generic, monkeypatch
):
    """Wherever in a batch it comes. Nothing but the row that has failed is missing."""
    monkeypatch.setattr(few_rows, "MOST_ROWS", 4 * rows)
    places = places_of_faults(rows)
    found = {at: with_a_fault(how, at, rows, policy) for at in places}
    generic()
    for at in places:
        batch, records, stats, errors = found[at]
        expected, others_records, others, expected_errors = with_a_fault(
            how, at, rows, policy, generic_batches=True
        )
        assert errors == expected_errors == 1
        n = min(len(batch), len(expected))
        assert n >= 2 * rows * 28
        ended = min(len(records), len(others_records))
        assert ended > n // 11 - 4
        assert records[:ended] == others_records[:ended]
        assert_equal(batch[:n], expected[:n])
        assert stats.discarded == others.discarded


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", ["head", "module"])
def test_ctrl_c_changes_no_row(rows, policy, monkeypatch):
    monkeypatch.setattr(few_rows, "MOST_ROWS", 4 * rows)
    expected, _, _, _ = with_a_fault("nothing", 0, rows, policy)
    for at in places_of_faults(rows):
        batch, _, stats, errors = with_a_fault("Ctrl-C", at, rows, policy)
        assert errors == 1
        assert not stats.discarded
        n = min(len(batch), len(expected))
        assert n >= 2 * rows * 29
        assert_equal(batch[:n], expected[:n])


def test_a_bad_reward_is_refused_and_its_row_is_not_there():
    class Bad(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, reward, *others = super().step(action)
            if observation[-1] == 3:
                reward = float("nan")
            return observation, reward, *others

    memory = ReplayMemory(100)
    with Collector(lambda: Bad(5), None, frames_per_batch=1, replay_buffer=memory) as c:
        c.next()
        c.next()
        with pytest.raises(BadEnvOutput, match="row 0 of the batch"):
            c.next()
        c.next()
        assert len(memory) == 3
        assert memory[:]["observation"][:, -1].tolist() == [0, 1, 0]
        assert memory[:]["next", "observation"][:, -1].tolist() == [1, 2, 1]


@pytest.mark.parametrize("action", [-1, 2])
def test_an_action_beyond_its_space_is_refused_in_each_row(action):
    calls = 0

    def policy(obs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.tensor(action if calls > 5 else 1).expand(obs.shape[:-1])

    memory = ReplayMemory(100)
    with Collector(
        lambda: CountingEnv(9), policy, frames_per_batch=1, replay_buffer=memory
    ) as c:
        made = 0
        with pytest.raises(BadPolicyOutput, match=f": {action} is"):
            while made < 20:
                c.next()
                made += 1
        assert len(memory) == made < 6


def test_ctrl_c_after_a_row_loses_nothing():
    class Interrupting(CountingEnv):
        steps = 0

        def step(self, action: Any) -> Any:
            type(self).steps += 1
            if self.steps == 4:
                import signal

                signal.raise_signal(signal.SIGINT)
            return super().step(action)

    memory = ReplayMemory(100)
    with Collector(
        lambda: Interrupting(50), None, frames_per_batch=1, replay_buffer=memory
    ) as c:
        iterator = iter(c)
        for _ in range(3):
            next(iterator)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        c.next()
        c.next()
        frames = len(memory)
        assert memory[:]["observation"][:, -1].tolist() == list(range(frames))
        stats = c.stats()
        assert_balanced(stats)
        assert stats.executed == frames
        assert not stats.discarded


@pytest.mark.parametrize("case", ["categorical", "random first", "tanh gaussian"])
def test_a_saved_run_goes_on_with_the_rows_of_its_twin(case):
    env, policy, options = CASES[case]
    options = {name: value for name, value in options.items() if name != "keep"}
    twin = ReplayMemory(1000, seed=0)
    with Collector(env, policy(), replay_buffer=twin, seed=3, **options) as c:
        for _ in range(25):
            c.next()
        state = c.state_dict()
        for _ in range(60):
            c.next()
    resumed = ReplayMemory(1000, seed=0)
    with Collector(env, policy(), replay_buffer=resumed, seed=4, **options) as c:
        assert c.load_state_dict(state, trust=True).exact
        for _ in range(60):
            c.next()
    assert_equal(
        twin[len(twin) - len(resumed) :].exclude("index"), resumed[:].exclude("index")
    )


def test_ids_of_two_collectors_do_not_make_their_rows_one_episode():
    memory = ReplayMemory(100)
    make = partial(CountingEnv, 50)
    with (
        Collector(make, None, frames_per_batch=1, replay_buffer=memory, seed=0) as one,
        Collector(
            make, None, frames_per_batch=1, replay_buffer=memory, seed=0
        ) as other,
    ):
        for _ in range(4):
            one.next()
            other.next()
            other.next()
    batch = memory[:]
    steps = batch["next", "observation"][:, -1] - batch["observation"][:, -1]
    assert steps.tolist() == [1.0] * 12


READ: dict[str, Callable[[ReplayMemory, Any], Any]] = {
    "len": lambda memory, _: len(memory),
    "index": lambda memory, _: len(memory[:]),
    "newest": lambda memory, _: len(memory.newest(99)),
    "sample": lambda memory, _: len(memory.sample(300)["index"].unique()),
    "iteration": lambda memory, _: len(list(memory)),
    "state": lambda memory, _: memory.state_dict()["rings"][0]["hi"],
    "text": lambda memory, _: int(repr(memory).split("(")[1].split(" ")[0]),
    "save": lambda memory, path: saved_size(memory, path),
}


def saved_size(memory: ReplayMemory, path: Any) -> int:
    memory.save(path / "memory")
    other = ReplayMemory(100, seed=0)
    other.load(path / "memory")
    return len(other)


def counting_into(memory: ReplayMemory, length: int) -> Collector:
    """Collects one step of an environment at a time, whose episodes have this length."""
    return Collector(
        lambda: CountingEnv(length), None, frames_per_batch=1, replay_buffer=memory
    )


@pytest.mark.parametrize("how", READ)
def test_rows_that_are_written_late_are_there_when_the_memory_is_read(how, tmp_path):
    memory = ReplayMemory(100, seed=0)
    with counting_into(memory, 5) as c:
        for rows in (1, 2, 9, 10, 11, 30):
            while c.stats().frames < rows:
                c.next()
            assert READ[how](memory, tmp_path) == rows


def test_rows_that_are_written_late_are_there_after_the_end_of_the_collector():
    memory = ReplayMemory(100)
    with counting_into(memory, 5) as c:
        for _ in range(13):
            c.next()
    assert memory[:]["observation"][:, -1].tolist() == [t % 5 for t in range(13)]


def test_rows_that_are_written_late_are_counted():
    def made() -> Collector:
        memory = ReplayMemory(100)
        return Collector("CartPole-v1", frames_per_batch=1, replay_buffer=memory)

    with made() as collector:
        for _ in range(40):
            collector.next()
        assert collector.stats().written == collector.stats().executed == 40
        for _ in range(7):
            collector.next()
        state = collector.state_dict()
    with made() as resumed:
        resumed.load_state_dict(state)
        assert resumed.stats().written == 47
        resumed.next()
        assert resumed.stats().written == 48


def test_clear_drops_rows_that_are_written_late():
    memory = ReplayMemory(100)
    with counting_into(memory, 50) as c:
        for _ in range(7):
            c.next()
        memory.clear()
        assert not len(memory)
        for _ in range(3):
            c.next()
        assert memory[:]["observation"][:, -1].tolist() == [7, 8, 9]


def test_rows_that_are_written_late_have_the_priority_of_when_they_came():
    memory = ReplayMemory(100, alpha=1.0, seed=0)
    with counting_into(memory, 50) as c:
        c.next()
        first = memory[0]["index"]
        for _ in range(4):
            c.next()
        memory.update_priority([int(first)], 8.0)
        drawn = memory.sample(6_000)["index"]
        shares = [(drawn == first + t).float().mean().item() for t in range(5)]
        assert shares == pytest.approx([8 / 12] + [1 / 12] * 4, abs=0.02)
        c.next()
        drawn = memory.sample(6_000)["index"]
        assert (drawn == first + 5).float().mean().item() == pytest.approx(
            0.4, abs=0.03
        )


def test_it_is_public():
    assert muster.ReplayMemory is ReplayMemory
