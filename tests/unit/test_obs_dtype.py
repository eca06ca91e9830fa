"""``obs_dtype``: floating observations are stored once, in the dtype of the network that takes
them.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

import muster
from muster import Collector, Evaluator, MultiSyncCollector
from muster.errors import BadCheckpoint, BadEnvOutput, BadOption, PolicyError
from muster.policies import categorical, tanh_gaussian
from muster.testing import SpaceEnv
from tests.tools import assert_accounted, assert_same, collect, joined

CHEETAH, SEED, FRAMES = "HalfCheetah-v5", 3, 40
F32, F64 = torch.float32, torch.float64
processes = pytest.mark.skipif(sys.platform == "win32", reason="no worker processes")


class Wide(gymnasium.Env[Any, Any]):
    """Observes ``[length, t + 1/3]`` in float64, which is not a float32 number; the reward is its
    second entry.
    """

    def __init__(
        self, length: int = 3, dtype: Any = np.float64, high: float = np.inf
    ) -> None:
        self.length, self.t = length, 0
        self.observation_space = spaces.Box(-np.inf, high, (2,), dtype)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._observe(), float(self.t), self.t >= self.length, False, {}

    def _observe(self) -> Any:
        return np.array([self.length, self.t + 1 / 3], self.observation_space.dtype)


def rows(first: int, n: int = 6, dtype: Any = F32) -> torch.Tensor:
    """Observations of ``Wide`` from t = ``first`` on, with resets after 3."""
    t = torch.tensor(
        [(first + k) % 3 if first == 0 else k % 3 + 1 for k in range(n)], dtype=F64
    )
    return torch.stack([torch.full_like(t, 3), t + 1 / 3], -1).to(dtype)


def net(dtype: torch.dtype = F32, inputs: int = 2, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).to(
        dtype
    )


class Greedy(nn.Module):
    """A plain module on the observation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.inner(obs).argmax(-1)


# --- MuJoCo ---------------------------------------------------------------------------------------


def cheetah_policy(kind: str, dtype: torch.dtype = F32) -> Any:
    if kind == "head":
        return tanh_gaussian(net(dtype, 17, 12))
    if kind == "module":
        return nn.Sequential(net(dtype, 17, 6), nn.Tanh())
    return TensorDictModule(
        nn.Sequential(net(dtype, 17, 6), nn.Tanh()), ["observation"], ["action"]
    )


def assert_as_stepped(batch: Any, dtype: torch.dtype = F32, seed: int = SEED) -> None:
    """The batch ``[B, T]`` has, cast once, what the environments observe when they are given its
    actions.
    """
    assert (batch["observation"].dtype, batch["next", "observation"].dtype) == (
        dtype,
        dtype,
    )
    assert (batch["action"].dtype, batch["next", "reward"].dtype) == (F32, F32)
    for b, row in enumerate(batch):
        env = gymnasium.make(CHEETAH)
        seen = [env.reset(seed=seed + b)[0]]
        for action in row["action"]:
            obs, reward, *_ = env.step(action.numpy())
            seen.append(obs)
        env.close()
        assert seen[0].dtype == np.float64
        expected = torch.as_tensor(np.stack(seen)).to(dtype)
        assert torch.equal(row["observation"], expected[:-1])
        assert torch.equal(row["next", "observation"], expected[1:])
        assert row["next", "reward"][-1, 0] == np.float32(reward)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("kind", ["head", "module", "tensordict"])
def test_mujoco_at_once(kind, dtype):
    policy = cheetah_policy(kind, dtype)
    batch = collect(
        CHEETAH, policy, num_envs=2, frames_per_batch=FRAMES, batches=2, seed=SEED
    )
    assert_as_stepped(batch, dtype)


@processes
@pytest.mark.parametrize(
    "options", [{}, {"inference": "server"}], ids=["worker", "server"]
)
def test_mujoco_in_processes(options):
    with MultiSyncCollector(
        [CHEETAH] * 2,
        cheetah_policy("head"),
        frames_per_batch=FRAMES,
        seed=SEED,
        **options,
    ) as collector:
        assert_as_stepped(joined(collector, 2))


def test_mujoco_is_evaluated():
    options = {"episodes": 2, "num_envs": 2, "max_frames_per_traj": 10, "seed": SEED}
    with Evaluator(CHEETAH, cheetah_policy("head"), **options) as evaluator:
        found = evaluator.evaluate()
        assert torch.float32 == evaluator._open().rollout()["observation"].dtype
    returns = []
    for record in found.records:
        env = gymnasium.make(CHEETAH)
        obs, _ = env.reset(seed=SEED + record.env_id)
        total = 0.0
        for _ in range(10):
            with torch.no_grad():
                action = cheetah_policy("head").mode(torch.as_tensor(obs, dtype=F32))
            obs, reward, *_ = env.step(action.numpy().clip(-1, 1))
            total += reward
        returns.append(total)
    # Not bit by bit: the head here was not bound to the action space, and NumPy computes the
    # network there.
    assert found.returns.tolist() == pytest.approx(returns, rel=1e-3)
    with Evaluator(CHEETAH, None, obs_dtype=torch.float16, **options) as evaluator:
        assert evaluator._open().rollout()["observation"].dtype == torch.float16


# --- which dtype ----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Its first parameter is of integers, its first floating one float32, its second float64."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(
            torch.zeros((), dtype=torch.int64), requires_grad=False
        )
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 2).double()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(obs).double()).argmax(-1)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LazyLinear(2, dtype=F64)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.inner(obs).argmax(-1)


class SelfCasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net(torch.bfloat16)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        assert obs.dtype == F32
        return self.inner(obs.bfloat16()).argmax(-1)


CHOICES: dict[
    str, tuple[Any, Any, torch.dtype]
] = {  # policy, obs_dtype, and what is stored of float64
    "random": (lambda: None, None, F64),
    "function": (
        lambda: lambda obs: torch.zeros(obs.shape[:-1], dtype=torch.int64),
        None,
        F64,
    ),
    "no parameters": (lambda: Greedy(nn.Identity()), None, F64),
    "head": (lambda: categorical(net()), None, F32),
    "double": (lambda: categorical(net(F64)), None, F64),
    "half": (lambda: categorical(net(torch.float16)), None, torch.float16),
    "bfloat16": (SelfCasting, None, F32),
    "mixed": (Mixed, None, F32),
    "lazy": (Lazy, None, F64),
    "random, told": (lambda: None, F32, F32),
    "function, told": (lambda: lambda obs: Greedy(net())(obs), F32, F32),
    "head, told": (lambda: categorical(net(F64)), F64, F64),
    "the environment's": (
        lambda: Greedy(nn.Sequential(nn.Identity(), net(F64))),
        "env",
        F64,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_what_decides(name, num_envs):
    policy, obs_dtype, dtype = CHOICES[name]
    B = num_envs or 1
    batch = collect(
        Wide, policy(), num_envs=num_envs, frames_per_batch=6 * B, obs_dtype=obs_dtype
    )
    batch = batch if num_envs else batch[None]
    for b in range(B):
        assert torch.equal(batch["observation"][b], rows(0, dtype=dtype))
        assert torch.equal(batch["next", "observation"][b], rows(1, dtype=dtype))
    assert batch["observation"].dtype == batch["next", "observation"].dtype == dtype


def test_a_dtype_that_does_not_fit_names_the_option():
    for policy, options in (
        (categorical(net()), {"obs_dtype": "env"}),
        (categorical(net(torch.bfloat16)), {}),
    ):
        with (
            Collector(Wide, policy, frames_per_batch=6, **options) as collector,
            pytest.raises(
                PolicyError,
                match="must have the same dtype.*pass obs_dtype=torch.float32",
            ),
        ):
            collector.rollout()


@pytest.mark.parametrize(
    "wrong", ["float32", torch.bfloat16, torch.int64, np.float32, 32, ["env"]]
)
def test_what_is_no_dtype_is_refused(wrong):
    with pytest.raises(
        BadOption,
        match=r"obs_dtype=.*expected None, 'env', or one of torch.float16, torch.float32",
    ):
        Collector(Wide, None, frames_per_batch=6, obs_dtype=wrong)


def test_only_floating_leaves_are_cast():
    box = partial(spaces.Box, -1, 1)
    space = spaces.Dict(
        {
            "wide": box((2,), np.float64),
            "deep": spaces.Tuple((box((), np.float64), spaces.Discrete(3))),
            "half": box((1,), np.float16),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "text": spaces.Text(3),
        }
    )
    made = SpaceEnv(space, spaces.Discrete(2))
    batch = collect(
        made, None, frames_per_batch=7, obs_dtype=F32, seed=0, validate="full"
    )
    kinds = {
        "wide": F32,
        ("deep", "0"): F32,
        ("deep", "1"): torch.int64,
        "half": F32,
        "image": torch.uint8,
    }
    assert {key: batch[key].dtype for key in kinds} == kinds
    seen = made.observations[:3]
    assert torch.equal(
        batch["wide"][:3], torch.as_tensor(np.stack([o["wide"] for o in seen])).float()
    )
    assert torch.equal(
        batch["deep", "0"][:3],
        torch.as_tensor([float(o["deep"][0]) for o in seen]).float(),
    )
    assert torch.equal(
        batch["image"][:3], torch.as_tensor(np.stack([o["image"] for o in seen]))
    )
    assert batch[:3]["text"] == [o["text"] for o in seen]


# --- everywhere that observations are -------------------------------------------------------------


def test_previous_actions_and_rewards_are_observations():
    space = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (1,), np.float32)
    options = {
        "num_envs": 2,
        "frames_per_batch": 12,
        "prev_action_reward": True,
        "obs_dtype": F64,
    }
    batch = collect(lambda: SpaceEnv(*space), None, **options)
    assert batch["action"].dtype == F32
    going = ~batch["next", "done"][:, :-1, 0]
    for key, source in (("prev_action", "action"), ("prev_reward", ("next", "reward"))):
        assert batch[key].dtype == F64
        before = batch[source][:, :-1].double()
        assert torch.equal(
            batch[key][:, 1:][going].reshape(-1), before[going].reshape(-1)
        )


class Awaited:
    """A ``Wide`` with coroutine functions."""

    def __init__(self) -> None:
        self._wide = Wide()
        self.observation_space = self._wide.observation_space
        self.action_space = self._wide.action_space

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._wide.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        return *self._wide.step(action)[:4], {"cost": 1.0}


class Costly(Wide):
    """A ``Wide`` with an info."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"cost": 1.0}


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Wide, {"prev_action_reward": True}),
        (Costly, {"info": ["cost"]}),
        (Costly, {"info": ["cost"], "prev_action_reward": True}),
        (Awaited, {}),
    ],
    ids=["previous", "infos", "both", "coroutines"],
)
def test_environments_that_add_columns(make, options, num_envs):
    batch = collect(
        make, None, num_envs=num_envs, frames_per_batch=12, obs_dtype=F32, **options
    )
    lines = batch["observation"].reshape(-1, 12 // (num_envs or 1), 2)
    for line in lines:
        assert torch.equal(line, rows(0, len(line)))


def test_a_resumed_collection_goes_on_in_the_same_dtype(tmp_path):
    make = partial(
        Collector, Wide, categorical(net()), num_envs=2, frames_per_batch=8, seed=1
    )
    with make() as collector:
        collector.rollout()
        muster.save_state(tmp_path / "state", collector.state_dict())
        expected = collector.rollout().clone()
    with make() as collector:
        collector.load_state_dict(tmp_path / "state", trust=True)
        batch = collector.rollout()
        assert batch["observation"].dtype == F32
        assert_same(batch, expected, ignore=(("collector", "resumed"),))
    with (
        make(obs_dtype=F64) as collector,
        pytest.raises(BadCheckpoint, match="dtype float32.*dtype float64"),
    ):
        collector.load_state_dict(tmp_path / "state", trust=True)


# --- values beyond the range ----------------------------------------------------------------------


class Huge(Wide):
    def _observe(self) -> Any:
        return np.array([3.0, 1e39 if self.t == 2 else self.t])


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_values_beyond_the_range_become_infinite_and_full_validation_tells():
    batch = collect(Huge, None, frames_per_batch=6, obs_dtype=F32)
    assert batch["next", "observation"][:, 1].tolist() == [1, np.inf, 3, 1, np.inf, 3]
    with Collector(
        Huge, None, frames_per_batch=6, obs_dtype=F32, validate="full"
    ) as collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"Huge\[0\] \(row 1 of the batch\): observation inf is not finite",
        ):
            collector.rollout()
        assert_accounted(collector)


def test_bounds_are_rounded_as_values_are():
    """float32(1/3) is above 1/3."""
    assert float(np.float32(1 / 3)) > 1 / 3
    space = spaces.Box(0, 1 / 3, (2,), np.float64)

    class AtTheTop(SpaceEnv):
        def _observe(self) -> Any:
            return np.full(2, 1 / 3)

    make = lambda: AtTheTop(space, spaces.Discrete(2))  # noqa: E731
    batch = collect(make, None, frames_per_batch=6, obs_dtype=F32, validate="full")
    assert batch["observation"].dtype == F32
