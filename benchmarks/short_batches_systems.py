"""Batches of few steps: Muster in its forms, a loop written by hand, and the peers.

Importing this makes them known.

All act greedily with the same network, as DQN does once it explores no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.nets import trunk
from benchmarks.systems import SYSTEMS
from benchmarks.workers_systems import Crewed
from benchmarks.workloads import WORKLOADS, Workload

BUFFER_SIZE = 16_384
BATCH_SIZES = (1, 8, 32)
ENVS = (1, 8, 64)


class Greedy(nn.Module):
    """The action with the highest value."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.net = trunk(env)

    def forward(self, obs: Tensor) -> Tensor:
        best: Tensor = self.net(obs).argmax(-1)
        return best


class Ring:
    """A replay buffer as people write it in NumPy; rows are time steps of all environments."""

    def __init__(self, case: Workload, obs: Any, capacity: int = BUFFER_SIZE) -> None:
        rows = capacity // case.B
        self.rows, self.at = rows, 0
        self.obs, self.next_obs = (
            np.zeros((rows, *obs.shape), obs.dtype) for _ in range(2)
        )
        self.action, self.reward = (
            np.zeros((rows, case.B), np.int64),
            np.zeros((rows, case.B), np.float32),
        )
        self.done = np.zeros((rows, case.B), bool)

    def add(self, obs: Any, action: Any, reward: Any, done: Any, next_obs: Any) -> None:
        at = self.at
        self.obs[at], self.next_obs[at], self.action[at] = obs, next_obs, action
        self.reward[at], self.done[at] = reward, done
        self.at = (at + 1) % self.rows

    def add_rows(self, batch: Any) -> None:
        """A batch ``[B, T]`` (``[T]``) of Muster's."""
        T = batch.shape[-1]
        where = np.arange(self.at, self.at + T) % self.rows
        after = batch["next"]
        for column, tensor in (
            (self.obs, batch["observation"]),
            (self.next_obs, after["observation"]),
            (self.action, batch["action"]),
            (self.reward, after["reward"].squeeze(-1)),
            (self.done, after["done"].squeeze(-1)),
        ):
            rows = tensor.numpy()
            column[where] = rows.swapaxes(0, 1) if batch.ndim > 1 else rows[:, None]
        self.at = (self.at + T) % self.rows


class Loop:
    """Written by hand: ``env.step``, the network where there is one, and a ``Ring``."""

    def __init__(self, case: Workload, policy: str) -> None:
        self.frames, self.T = case.frames, case.T
        self.envs = [case.make() for _ in range(case.B)]
        self.obs = np.stack([env.reset(seed=i)[0] for i, env in enumerate(self.envs)])
        self.module = Greedy(self.envs[0]) if policy == "plain" else None
        self.ring = Ring(case, self.obs)
        self.reward, self.done = np.zeros(case.B, np.float32), np.zeros(case.B, bool)
        self.next_obs = np.empty_like(self.obs)

    def act(self) -> list[int]:
        if self.module is None:
            drawn: list[int] = np.random.randint(2, size=len(self.envs)).tolist()
            return drawn
        with torch.no_grad():
            chosen: list[int] = self.module(torch.from_numpy(self.obs)).tolist()
        return chosen

    def rollout(self) -> int:
        for _ in range(self.T):
            actions, before = self.act(), self.obs.copy()
            for i, env in enumerate(self.envs):
                obs, self.reward[i], terminated, truncated, _ = env.step(actions[i])
                self.next_obs[i] = obs
                self.done[i] = terminated or truncated
                self.obs[i] = env.reset()[0] if self.done[i] else obs
            self.ring.add(before, actions, self.reward, self.done, self.next_obs)
        return self.frames

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Muster:
    """Muster's ``Collector``.

    Args:
        policy: "plain", "heads" or "random".
        asks: call ``collect(n_step=)`` instead of iterating.
        buffer: "ring" or "torchrl"; empty: none.
    """

    def __init__(
        self, case: Workload, policy: str, *, asks: bool = False, buffer: str = ""
    ) -> None:
        import muster

        env = case.make()
        acting = {
            "plain": lambda: Greedy(env),
            "heads": lambda: muster.policies.deterministic(trunk(env)),
        }
        options: dict[str, Any] = {}
        if buffer == "torchrl":
            from torchrl.data import LazyTensorStorage, ReplayBuffer

            options["replay_buffer"] = ReplayBuffer(
                storage=LazyTensorStorage(BUFFER_SIZE), batch_size=32
            )
        self.frames, self.asks = case.frames, asks
        self.collector: Any = muster.Collector(
            case.make,
            acting[policy]() if policy in acting else None,
            num_envs=None if case.B == 1 else case.B,
            frames_per_batch=case.frames,
            seed=0,
            **options,
        )
        self.batches: Iterator[Any] = iter(self.collector)
        like = np.zeros((case.B, *(env.observation_space.shape or ())), np.float32)
        self.ring = Ring(case, like) if buffer == "ring" else None

    def rollout(self) -> int:
        if self.asks:
            batch = self.collector.collect_batch(n_step=self.frames).batch
        else:
            batch = next(self.batches)
        if self.ring is not None:
            self.ring.add_rows(batch)
        return self.frames

    def close(self) -> None:
        self.collector.shutdown()


class SB3:
    """DQN's ``collect_rollouts``, which fills its own replay buffer."""

    def __init__(self, case: Workload, capacity: int = BUFFER_SIZE) -> None:
        from stable_baselines3 import DQN
        from stable_baselines3.common.vec_env import DummyVecEnv

        from benchmarks.systems.sb3_ import _Nothing

        self.frames = case.frames
        self.dqn: Any = DQN(
            "MlpPolicy",
            DummyVecEnv(case.factories()),
            policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
            buffer_size=capacity,
            train_freq=(case.T, "step"),
            exploration_initial_eps=0.0,
            exploration_final_eps=0.0,
            device="cpu",
        )
        _, self.callback = self.dqn._setup_learn(
            total_timesteps=10**12, callback=_Nothing()
        )

    def rollout(self) -> int:
        dqn = self.dqn
        dqn.collect_rollouts(
            dqn.env, self.callback, dqn.train_freq, dqn.replay_buffer, learning_starts=0
        )
        return self.frames

    def close(self) -> None:
        self.dqn.env.close()


class TorchRL:
    """Its ``Collector``; several environments are a SerialEnv."""

    def __init__(self, case: Workload) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import Collector
        from torchrl.envs import GymWrapper, SerialEnv

        def make() -> Any:
            return GymWrapper(
                case.make(), categorical_action_encoding=True, from_pixels=False
            )

        env = make() if case.B == 1 else SerialEnv(case.B, make)
        actor = TensorDictModule(Greedy(case.make()), ["observation"], ["action"])
        self.collector: Any = Collector(
            env, actor, frames_per_batch=case.frames, total_frames=-1
        )
        self.batches: Iterator[Any] = iter(self.collector)

    def rollout(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


def _muster(label: str, **options: Any) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict") + (
        ("torchrl",) if options.get("buffer") == "torchrl" else ()
    )
    return Crewed(
        "short_batches_systems:Muster",
        label,
        needs,
        home="muster",
        children=False,
        options=options,
    )


def _loop(label: str, policy: str) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict")
    return Crewed(
        "short_batches_systems:Loop",
        label,
        needs,
        home="muster",
        children=False,
        options={"policy": policy},
    )


OWN = {
    "loop-plain": _loop("hand-written loop, NumPy buffer", "plain"),
    "loop-random": _loop("hand-written loop, random actions", "random"),
    "short-random": _muster("Muster, random actions", policy="random"),
    **{f"short-{p}": _muster(f"Muster, {p}", policy=p) for p in ("plain", "heads")},
    **{
        f"short-{p}-asked": _muster(
            f"Muster, {p}, collect(n_step=)", policy=p, asks=True
        )
        for p in ("plain", "heads")
    },
    **{
        f"short-heads-{buffer}": _muster(
            f"Muster, heads, {buffer} buffer", policy="heads", buffer=buffer
        )
        for buffer in ("ring", "torchrl")
    },
    "short-plain-ring": _muster(
        "Muster, plain, ring buffer", policy="plain", buffer="ring"
    ),
}


def _peer(name: str, label: str, needs: str) -> Crewed:
    return Crewed(f"short_batches_systems:{name}", label, (needs,), children=False)


PEERS = {
    "short-sb3": _peer("SB3", "SB3 DQN, collect_rollouts", "stable_baselines3"),
    "short-torchrl": _peer("TorchRL", "TorchRL Collector", "torchrl"),
}
SYSTEMS.update(OWN | PEERS)


@dataclass(frozen=True)
class Case(Workload):
    """A workload of short batches."""

    systems: tuple[str, ...] = ("bare", "limit-heads", *OWN, *PEERS)


CASES = {
    case.name: case
    for T in BATCH_SIZES
    for B in ENVS
    for case in [
        Case(
            f"short-{T}-{B}",
            "CartPole-v1",
            B,
            T,
            f"{B} x CartPole, batches of {T} time steps",
        )
    ]
}
WORKLOADS.update(CASES)
