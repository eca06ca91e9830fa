"""The public contract on TorchRL environments."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from muster import Collector, policies
from muster.testing import EnvContract

torchrl = pytest.importorskip("torchrl")

from torchrl.data import Binary, Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import (  # noqa: E402
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    TransformedEnv,
)
from torchrl.testing import mocking_classes as mocks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class TestGymEnv(EnvContract):
    steps = 60

    def make_env(self) -> Any:
        return GymEnv("CartPole-v1")


class TestUnbatchedGymEnv(EnvContract):
    num_envs = None
    steps = 60

    def make_env(self) -> Any:
        return GymEnv("Pendulum-v1")


class TestTransformedEnv(EnvContract):
    steps = 60

    def make_env(self) -> Any:
        return TransformedEnv(
            GymEnv("CartPole-v1"), Compose(RewardSum(), InitTracker())
        )


class TestSerialEnv(EnvContract):
    num_envs = None
    steps = 60

    def make_env(self) -> Any:
        return SerialEnv(3, lambda: GymEnv("CartPole-v1"))


class TestNested(EnvContract):
    def make_env(self) -> Any:
        return mocks.NestedCountingEnv(max_steps=3)


class TestMultiKey(EnvContract):
    def make_env(self) -> Any:
        return mocks.MultiKeyCountingEnv(max_steps=3)


class TestBatchedMultiKey(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return mocks.MultiKeyCountingEnv(max_steps=3, batch_size=(2,))


class TestText(EnvContract):
    steps = 8

    def make_env(self) -> Any:
        return mocks.CountingEnvWithString(max_steps=3)


class TestAgents(EnvContract):
    steps = 12

    def make_env(self) -> Any:
        return mocks.MultiAgentCountingEnv(n_agents=2, max_steps=3)


def test_episodes_have_the_columns_of_batches() -> None:
    """Rollouts have all flags; those that the environment does not have are shown nowhere."""
    episodes: list[Any] = []
    options: dict[str, Any] = {
        "frames_per_batch": 64,
        "seed": 0,
        "on_episode_done": episodes.append,
    }
    with Collector(
        lambda: mocks.CountingEnv(max_steps=3), None, **options
    ) as collector:
        batch = collector.next()
    assert ("next", "truncated") not in batch.keys(True)
    assert episodes
    assert all(
        set(episode.keys(True, True)) == set(batch.keys(True, True))
        for episode in episodes
    )


# --- environments without a state, on tensors -----------------------------------------------------


class StatelessPendulum(EnvBase):  # type: ignore[misc]
    """A batch of pendulums in the style of TorchRL's tutorial: the state is in the TensorDict, also
    the length, a parameter of each environment. Episodes are truncated after 7 steps.
    """

    batch_locked = False

    def __init__(self, B: int, device: str = "cpu") -> None:
        super().__init__(device=device, batch_size=(B,))
        number = Unbounded((B,), device=device)
        self.observation_spec = Composite(
            th=number.clone(),
            thdot=Bounded(-8, 8, (B,), device=device),
            t=Unbounded((B,), dtype=torch.int64, device=device),
            params=Composite(length=Bounded(0.5, 2, (B,), device=device), shape=(B,)),
            shape=(B,),
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-2, 2, (B, 1), device=device)
        self.reward_spec = Unbounded((B, 1), device=device)
        flags = ("done", "terminated", "truncated")
        flag = Binary(1, (B, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite({name: flag.clone() for name in flags}, shape=(B,))

    def _reset(self, td: Any = None, **_: Any) -> Any:
        u = torch.rand(3, *self.batch_size, generator=self.rng, device=self.device)
        params = TensorDict({"length": u[2] * 1.5 + 0.5}, self.batch_size)
        t = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        state = {
            "th": (u[0] * 2 - 1) * torch.pi,
            "thdot": u[1] * 2 - 1,
            "t": t,
            "params": params,
        }
        return TensorDict(state, self.batch_size, device=self.device)

    @staticmethod
    def follow(th: Any, thdot: Any, length: Any, torque: Any) -> Any:
        """Angle and velocity after 0.05 s, and the cost."""
        cost = ((th + torch.pi) % (2 * torch.pi) - torch.pi) ** 2 + 0.1 * thdot**2
        cost = cost + 0.001 * torque**2
        gain = 15 / length * th.sin() + 3 / length**2 * torque
        thdot = (thdot + gain * 0.05).clamp(-8, 8)
        return th + thdot * 0.05, thdot, cost

    def _step(self, td: Any) -> Any:
        length = td["params", "length"]
        th, thdot, cost = self.follow(td["th"], td["thdot"], length, td["action"][:, 0])
        t = td["t"] + 1
        late = (t >= 7)[:, None]
        never = torch.zeros_like(late)
        flags = {"done": late, "terminated": never, "truncated": late}
        after = {"th": th, "thdot": thdot, "t": t, "params": td["params"]}
        after |= {"reward": -cost[:, None], **flags}
        return TensorDict(after, td.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self.rng = torch.Generator(self.device).manual_seed(seed or 0)


class TestStateless(EnvContract):
    num_envs = None
    steps = 40

    def make_env(self) -> Any:
        return StatelessPendulum(3)


class Joined(nn.Module):
    """A network of all three leaves of the observation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)

    def forward(self, parts: Any) -> Any:
        leaves = [parts["th"], parts["thdot"], parts["params"]["length"]]
        return self.net(torch.stack(leaves, -1))


@pytest.mark.parametrize("policy", ["random", "head"])
def test_a_stateless_batch_goes_where_its_equations_say(policy: str) -> None:
    B, T = 4, 20
    actor = None if policy == "random" else policies.tanh_gaussian(Joined())
    env = StatelessPendulum(B)
    with Collector(env, actor, frames_per_batch=B * T, seed=0) as collector:
        batch = torch.cat([collector.next().clone() for _ in range(2)], 1)

    after = batch["next"]
    length = batch["params", "length"]
    torque = batch["action"][..., 0]
    th, thdot, cost = StatelessPendulum.follow(
        batch["th"], batch["thdot"], length, torque
    )
    torch.testing.assert_close(after["th"], th)
    torch.testing.assert_close(after["thdot"], thdot)
    torch.testing.assert_close(after["reward"][..., 0], -cost)
    assert torque.abs().max() > 0.1
    # Episodes of 7 steps, truncated; parameters are drawn for each, and kept in it.
    ends = (torch.arange(2 * T) % 7 == 6).expand(B, -1)
    assert torch.equal(after["truncated"][..., 0], ends)
    assert torch.equal(after["done"][..., 0], ends)
    assert not after["terminated"].any()
    assert torch.equal(after["params", "length"], length)
    changes = length[:, 1:] != length[:, :-1]
    assert torch.equal(changes, ends[:, :-1])
    assert torch.equal(
        batch["th"][:, 1:][~ends[:, :-1]], after["th"][:, :-1][~ends[:, :-1]]
    )


class TestVmas(EnvContract):
    num_envs = None
    steps = 40

    def make_env(self) -> Any:
        return vmas_env()


def vmas_env() -> Any:
    """The scenario "balance": three agents; rewards and actions of each are below ``agents``."""
    pytest.importorskip("vmas")
    libs = importlib.import_module("torchrl.envs.libs.vmas")
    return libs.VmasEnv("balance", num_envs=3, max_steps=15, seed=0)


def test_a_batch_of_vmas_is_that_of_the_simulator_itself() -> None:
    with Collector(vmas_env(), None, frames_per_batch=3 * 30, seed=5) as collector:
        batch = collector.next()

    assert batch["agents", "observation"].shape == (3, 30, 3, 16)
    assert torch.equal(
        batch["next", "done"][..., 0], (torch.arange(30) % 15 == 14).expand(3, -1)
    )
    env = vmas_env()
    env.set_seed(5)
    now = env.reset()
    for t in range(15):
        torch.testing.assert_close(
            now["agents", "observation"], batch["agents", "observation"][:, t]
        )
        now["agents", "action"] = batch["agents", "action"][:, t]
        now = env.step(now)["next"]
        torch.testing.assert_close(
            now["agents", "reward"], batch["next", "agents", "reward"][:, t]
        )
