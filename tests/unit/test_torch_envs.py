"""The environments on tensors of ``muster.testing``: their dynamics, against other programs of the
same task; and that a step can be recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode as Mode
from torch import nn
from torch._dynamo.utils import counters

from muster import Collector, policies
from muster.capture import graph
from muster.testing import EnvContract, TorchCartPole, TorchGridWorld, TorchPendulum
from tests.fakes.device_rows import on_device
from tests.fakes.tape import TapePool
from tests.tools import assert_same
from tests.unit.test_device_lanes import CUDA, Waits

SIZE = 6
Place = tuple[int, int]


# --- the contract ---------------------------------------------------------------------------------


class OfPendulum(EnvContract):
    num_envs = None
    steps = 40
    mode = Mode.SAME_STEP

    def make_env(self) -> Any:
        return TorchPendulum(3, max_steps=15, autoreset=self.mode)


class TestPendulumSameStep(OfPendulum):
    pass


class TestPendulumDisabled(OfPendulum):
    mode = Mode.DISABLED


class OfGridWorld(EnvContract):
    num_envs = None
    steps = 40
    mode = Mode.SAME_STEP

    def make_env(self) -> Any:
        return TorchGridWorld(3, size=5, max_steps=15, autoreset=self.mode)


class TestGridWorldSameStep(OfGridWorld):
    pass


class TestGridWorldDisabled(OfGridWorld):
    mode = Mode.DISABLED


# --- the pendulum ---------------------------------------------------------------------------------


def test_the_pendulum_moves_as_gymnasium_s_acrobot():
    B = 8
    ours = TorchPendulum(B, autoreset=Mode.DISABLED)
    theirs = [gymnasium.make("Acrobot-v1") for _ in range(B)]
    ours.reset(seed=0)
    assert (ours.state.abs() <= 0.1).all()
    generator = np.random.default_rng(0)
    ended = 0
    for _ in range(10):
        # Half of the states are close to the goal, and so fast that velocities reach their bounds.
        start = generator.uniform([-3, -3, -13, -29], [3, 3, 13, 29], (B, 4)).astype(
            np.float32
        )
        start[: B // 2] *= 0.05
        ours.state.copy_(torch.from_numpy(start))
        for env in theirs:
            env.reset()
        for _ in range(4):
            for row, env in zip(ours.state, theirs, strict=True):
                env.unwrapped.state = row.double().numpy()  # type: ignore[attr-defined]
            actions = generator.integers(3, size=B)
            torque = torch.from_numpy(actions - 1.0).float()[:, None]
            obs, reward, terminated, truncated, _ = ours.step(torque)
            for i, env in enumerate(theirs):
                after, expected_reward, expected_end, _, _ = env.step(actions[i])
                np.testing.assert_allclose(obs[i].numpy(), after, rtol=1e-4, atol=1e-3)
                assert reward[i].item() == expected_reward
                assert terminated[i].item() == expected_end
                ended += expected_end
        assert not truncated.any()
    assert 0 < ended < 10 * 4 * B


def test_states_of_the_pendulum_stay_within_their_bounds():
    env = TorchPendulum(256, autoreset=Mode.DISABLED)
    env.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([math.pi, math.pi, 4 * math.pi, 9 * math.pi]) * (1 + 1e-6)
    env.state.copy_((torch.rand(256, 4, generator=generator) * 4 - 2) * bounds)
    for _ in range(20):
        obs, *_ = env.step(torch.rand(256, 1, generator=generator) * 2 - 1)
        assert (env.state.abs() <= bounds).all()
        assert env.single_observation_space.contains(obs[0].numpy())


def energy_error(dt: float) -> float:
    """How far the energy is from its first value after two seconds without torque."""
    env = TorchPendulum(64, dt=dt, autoreset=Mode.DISABLED)
    env.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    env.state.copy_(torch.rand(64, 4, generator=generator) * 4 - 2)
    before = env.energy()
    for _ in range(round(2 / dt)):
        env.step(torch.zeros(64, 1))
    return float((env.energy() - before).abs().max())


def test_without_torque_energy_is_conserved_to_the_order_of_the_integrator():
    coarse, fine, finest = map(energy_error, (0.1, 0.05, 0.025))

    assert finest < 2e-4  # of up to 19 J
    assert coarse / fine > 2**4 * 0.9
    assert fine / finest > 2**4 * 0.9


def test_torque_does_the_work_that_the_energy_gains():
    env = TorchPendulum(32, dt=0.01, autoreset=Mode.DISABLED)
    env.reset(seed=1)
    before = env.energy()
    work = torch.zeros(32)
    for t in range(200):
        torque = torch.full((32, 1), math.sin(t / 20))
        rate = env.state[:, 3].clone()
        env.step(torque)
        work += torque[:, 0] * (rate + env.state[:, 3]) / 2 * 0.01
    gained = env.energy() - before
    assert gained.min() < 0.07
    assert gained.max() > 0.25
    torch.testing.assert_close(gained, work, rtol=0, atol=2e-3)


def test_torques_beyond_the_space_count_as_its_bounds():
    outcomes = []
    for torque in (1.0, 7.0):
        env = TorchPendulum(2)
        env.reset(seed=0)
        outcomes.append(env.step(torch.full((2, 1), torque))[0])
    assert torch.equal(*outcomes)


# --- the grid world -------------------------------------------------------------------------------


class Reference:
    """The rules of the grid world for one environment, on Python numbers."""

    MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))

    def __init__(self, env: TorchGridWorld, i: int) -> None:
        places = (env.agent, env.key, env.door, env.goal)
        self.agent, self.key, self.door, self.goal = (place(at[i]) for at in places)
        self.size = env.size
        self.has_key = bool(env.has_key[i])
        self.steps = 0

    def is_free(self, cell: Place) -> bool:
        row, column = cell
        if min(cell) < 1 or max(cell) > self.size - 2:
            return False
        if column != self.door[1]:
            return True
        return row == self.door[0] and self.has_key

    def target(self, action: int) -> Place:
        row, column = self.MOVES[action]
        return self.agent[0] + row, self.agent[1] + column

    def mask(self) -> list[int]:
        return [int(self.is_free(self.target(action))) for action in range(4)]

    def step(self, action: int) -> tuple[float, bool]:
        if self.is_free(self.target(action)):
            self.agent = self.target(action)
        if self.agent == self.key:
            self.has_key = True
        self.steps += 1
        return float(self.agent == self.goal), self.agent == self.goal

    def colour(self, cell: Place) -> str:
        if cell == self.agent:
            return "agent with key" if self.has_key else "agent"
        if cell == self.goal:
            return "goal"
        if cell == self.key and not self.has_key:
            return "key"
        if cell == self.door:
            return "door"
        on_border = min(cell) == 0 or max(cell) == self.size - 1
        return "wall" if on_border or cell[1] == self.door[1] else "floor"

    def pixels(self, cell: int) -> list[Any]:
        colours = TorchGridWorld.COLOURS
        number = self.size * cell
        return [
            [list(colours[self.colour((y // cell, x // cell))]) for x in range(number)]
            for y in range(number)
        ]


def place(cell: torch.Tensor) -> Place:
    row, column = cell.tolist()
    return row, column


def assert_observes(
    obs: dict[str, torch.Tensor], i: int, reference: Reference, cell: int
) -> None:
    assert obs["pixels"][i].tolist() == reference.pixels(cell)
    assert obs["action_mask"][i].tolist() == reference.mask()


@pytest.mark.parametrize(
    ("size", "cell", "mode"), [(5, 2, Mode.SAME_STEP), (6, 1, Mode.DISABLED)]
)
def test_the_grid_world_is_that_of_the_reference(size, cell, mode):
    B = 9
    env = TorchGridWorld(B, size=size, cell=cell, autoreset=mode, max_steps=100)
    obs, _ = env.reset(seed=0)
    references = [Reference(env, i) for i in range(B)]
    generator = np.random.default_rng(0)
    ends = {"terminated": 0, "truncated": 0}
    refused = 0
    for _ in range(200):
        for i, reference in enumerate(references):
            assert_observes(obs, i, reference, cell)
        actions = generator.integers(4, size=B)
        obs, reward, terminated, truncated, info = env.step(torch.from_numpy(actions))
        last = info["final_obs"] if mode is Mode.SAME_STEP else obs
        for i, reference in enumerate(references):
            refused += not reference.is_free(reference.target(actions[i]))
            expected_reward, expected_end = reference.step(int(actions[i]))
            assert (reward[i].item(), terminated[i].item()) == (
                expected_reward,
                expected_end,
            )
            assert truncated[i].item() == (reference.steps >= 100)
            assert_observes(last, i, reference, cell)
        done = terminated | truncated
        ends["terminated"] += int(terminated.sum())
        ends["truncated"] += int((truncated & ~terminated).sum())
        if mode is Mode.DISABLED:
            obs, _ = env.reset(options={"reset_mask": done})
        for i in done.nonzero()[:, 0].tolist():
            references[i] = Reference(env, i)
    assert refused > 100
    assert min(ends.values()) >= 3, ends


def test_every_place_of_the_grid_world_is_drawn_and_every_goal_can_be_reached():
    env = TorchGridWorld(4000, size=SIZE)
    env.reset(seed=0)
    inner = set(range(1, SIZE - 1))
    assert set(env.door[:, 1].tolist()) == {2, 3}  # a room has at least one column
    assert set(env.door[:, 0].tolist()) == inner
    left = {(row, column) for row in inner for column in (1, 2)}
    right = {(row, column) for row in inner for column in (3, 4)}
    assert (
        set(map(tuple, env.agent.tolist())) == set(map(tuple, env.key.tolist())) == left
    )
    assert set(map(tuple, env.goal.tolist())) == right
    assert (env.agent[:, 1] < env.door[:, 1]).all()
    assert (env.key[:, 1] < env.door[:, 1]).all()
    assert (env.goal[:, 1] > env.door[:, 1]).all()
    assert (env.agent != env.key).any(1).all()
    assert not env.has_key.any()


def test_a_grid_without_room_for_two_rooms_is_refused():
    with pytest.raises(
        ValueError, match="size=4: two rooms between walls need at least 5 cells"
    ):
        TorchGridWorld(2, size=4)


class Looks(nn.Module):
    """Logits of four moves, from pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 4))

    def forward(self, pixels: torch.Tensor) -> Any:
        return self.net(pixels.float() / 255)


@pytest.mark.parametrize("mode", [Mode.SAME_STEP, Mode.DISABLED])
def test_masks_and_pixels_through_a_collector(mode):
    B, T = 6, 200
    make = lambda: TorchGridWorld(B, size=SIZE, max_steps=40, autoreset=mode)  # noqa: E731
    actor = policies.categorical(Looks())
    with Collector(make, actor, frames_per_batch=B * T, seed=0) as collector:
        batch = collector.rollout()

    assert batch["pixels"].dtype == torch.uint8
    assert batch["pixels"].shape == (B, T, SIZE, SIZE, 3)
    allowed = batch["action_mask"].gather(-1, batch["action"][..., None])
    assert allowed.all(), "a head chooses only moves that are allowed"
    assert batch["next", "terminated"].any()
    assert (batch["next", "truncated"] & ~batch["next", "terminated"]).any()
    colours = torch.tensor(list(TorchGridWorld.COLOURS.values()))
    for i in range(B):
        rows = batch[i]
        for t in range(T):
            row = rows[t]
            picture = row["pixels"].int()
            agents = [(picture == colours[kind].int()).all(-1) for kind in (5, 6)]
            (cell,) = (agents[0] | agents[1]).nonzero().tolist()
            move = Reference.MOVES[row["action"].item()]
            target = cell[0] + move[0], cell[1] + move[1]
            after = row["next", "pixels"][target].tolist()
            assert after in colours[5:].tolist(), (
                "next/pixels is the true observation after"
            )
            at_goal = row["pixels"][target].tolist() == colours[4].tolist()
            assert row["next", "terminated"].item() == at_goal
            assert row["next", "reward"].item() == float(at_goal)


# --- what all have in common ----------------------------------------------------------------------

MAKES: dict[str, Callable[..., Any]] = {
    "cartpole": TorchCartPole,
    "pendulum": TorchPendulum,
    "grid world": TorchGridWorld,
}
OF = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
MODES = pytest.mark.parametrize("mode", [Mode.SAME_STEP, Mode.DISABLED])


def actions_of(env: Any, steps: int) -> list[torch.Tensor]:
    env.single_action_space.seed(0)
    drawn = []
    for _ in range(steps):
        samples = [env.single_action_space.sample() for _ in range(env.num_envs)]
        drawn.append(torch.as_tensor(np.stack(samples), device=env.device))
    return drawn


def run(env: Any, actions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Step, and reset where episodes ended; return all that came."""
    found: list[torch.Tensor] = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        last = info.get("final_obs", obs)
        if env.metadata["autoreset_mode"] is Mode.DISABLED:
            obs, _ = env.reset(options={"reset_mask": terminated | truncated})
        for part in (obs, last):
            found += part.values() if isinstance(part, dict) else [part]
        found += [reward, terminated, truncated]
    return found


@OF
@MODES
def test_seeds_repeat_episodes_and_only_masked_environments_are_reset(make, mode):
    outcomes = []
    for seed in (3, 3, 4):
        env = make(4, max_steps=7, autoreset=mode)
        env.reset(seed=seed)
        outcomes.append(run(env, actions_of(env, 20)))
    equal = [
        [torch.equal(*pair) for pair in zip(outcomes[0], o, strict=True)]
        for o in outcomes
    ]
    assert all(equal[1])
    assert not all(equal[2])

    mask = torch.tensor([True, False, True, False])
    before = {name: value.clone() for name, value in state_of(env).items()}
    env.reset(options={"reset_mask": mask})
    after = state_of(env)
    assert all(torch.equal(after[name][~mask], before[name][~mask]) for name in before)
    assert any(
        not torch.equal(after[name][mask], before[name][mask]) for name in before
    )
    assert not after["_steps"][mask].any()


def state_of(env: Any) -> dict[str, torch.Tensor]:
    """Tensors with a row for each environment."""
    return {
        name: value
        for name, value in vars(env).items()
        if torch.is_tensor(value) and len(value) == env.num_envs and "_co" not in name
    }


@OF
@MODES
def test_a_step_waits_for_nothing_and_keeps_its_state_in_tensors(make, mode):
    env = make(5, max_steps=6, autoreset=mode)
    env.reset(seed=0)
    actions = actions_of(env, 20)
    objects = {name: id(value) for name, value in vars(env).items()}
    with Waits() as seen:
        run(env, actions)
    assert seen.calls > 100  # it has been looking
    assert not seen.found
    replaced = {name for name, value in vars(env).items() if id(value) != objects[name]}
    # The CartPole shows what a collector has to handle: a tensor that each step replaces.
    assert replaced == ({"state"} if make is TorchCartPole else set())


@OF
@MODES
def test_recorded_rollouts_are_those_row_by_row(make, mode, monkeypatch):
    monkeypatch.setitem(graph.GRAPHS, "cpu", TapePool)
    B, T = 6, 12
    envs = on_device(partial(make, B, autoreset=mode, max_steps=7))
    options: Any = {"frames_per_batch": B * T, "seed": 0}
    joined = []
    for capture in (False, True):
        with Collector(envs, None, capture=capture, **options) as collector:
            batches = [collector.next().clone() for _ in range(5)]
            stats = collector.stats().capture
        joined.append(torch.cat(batches, 1))
    assert stats.replays == 3, "the first rollout is run, the second one recorded"
    assert_same(*joined)


@pytest.mark.slow
@OF
def test_a_step_is_compiled_as_one_graph_beside_its_random_numbers(make):
    torch.compiler.reset()
    counters.clear()
    plain, traced = (make(5, max_steps=6) for _ in range(2))
    for env in (plain, traced):
        env.reset(seed=0)
    actions = actions_of(plain, 20)
    expected = run(plain, actions)
    traced.step = torch.compile(traced.step, backend="eager")
    found = run(traced, actions)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("on", [CUDA])
@OF
@MODES
def test_steps_recorded_as_a_cuda_graph_are_those_without(make, mode, on):
    outcomes = []
    for recorded in (False, True):
        env = make(64, on, max_steps=6, autoreset=mode)
        env.reset(seed=0)
        actions = actions_of(env, 20)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(env, actions)
        stream.synchronize()
        env.reset(seed=1)
        if not recorded:
            outcomes.append(run(env, actions))
            continue
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(env._generator)
        with torch.cuda.graph(graph):
            outcomes.append(run(env, actions))
        graph.replay()
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
