"""Off-policy collecting: a step, then a sample of 256 transitions. Muster with its own memory and
with TorchRL's, a loop written by hand, and the peers.

Importing this makes them known. All act greedily with the same network, and all samples are tensors
of observations, actions, rewards, flags and next observations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import envs, workers_envs
from benchmarks import short_batches_systems as short
from benchmarks.runner import Clock
from benchmarks.systems import SYSTEMS
from benchmarks.workers_systems import Crewed
from benchmarks.workloads import WORKLOADS, Workload

SAMPLE = 256
CAPACITY = 8_192  # transitions


@dataclass(frozen=True)
class Case(Workload):
    """What an iteration consists of.

    Args:
        systems: names.
        collects: an iteration collects a rollout.
        samples: an iteration samples.
        fill: number of rollouts before the first iteration.
        clock: of its rates.
    """

    systems: tuple[str, ...] = ()
    collects: bool = True
    samples: bool = True
    fill: int = 512
    clock: Clock = "cpu"

    @property
    def counted(self) -> int:
        """Frames that an iteration counts: those that it collects, or of one row."""
        return self.frames if self.collects else self.B


class OffPolicy:
    """An iteration of a case: ``collect`` and ``sample`` of a subclass."""

    def __init__(self, case: Case) -> None:
        self._steps = [self.collect] * case.collects + [self.sample] * case.samples
        self._counted = case.counted
        for _ in range(case.fill):
            self.collect()

    def rollout(self) -> int:
        for step in self._steps:
            step()
        return self._counted

    def collect(self) -> None:
        """Collect one rollout, and store its transitions."""
        raise NotImplementedError

    def sample(self) -> Any:
        raise NotImplementedError

    def bytes_per_transition(self) -> float:
        """Return the size of the memory, which is full."""
        raise NotImplementedError

    def close(self) -> None: ...


class SampledRing(short.Ring):
    """A ``Ring`` from which transitions are gathered, column by column."""

    def __init__(self, case: Case, obs: Any) -> None:
        super().__init__(case, obs, CAPACITY)
        self.columns = self.obs, self.action, self.reward, self.done, self.next_obs
        self.flat = [c.reshape(-1, *c.shape[2:]) for c in self.columns]
        self.rng = np.random.default_rng(0)
        self.size = 0  # transitions

    def add(self, *row: Any) -> None:
        super().add(*row)
        self.size = min(self.size + len(row[1]), len(self.flat[0]))

    def sample(self) -> list[torch.Tensor]:
        index = self.rng.integers(self.size, size=SAMPLE)
        return [torch.from_numpy(column[index]) for column in self.flat]


class Hand(OffPolicy):
    """A loop written by hand, and a ``SampledRing``."""

    def __init__(self, case: Case) -> None:
        self.loop = short.Loop(case, "plain")
        self.ring = self.loop.ring = SampledRing(case, self.loop.obs)
        self.collect, self.sample = self.loop.rollout, self.ring.sample
        super().__init__(case)

    def bytes_per_transition(self) -> float:
        return sum(column.nbytes for column in self.ring.columns) / len(
            self.ring.flat[0]
        )

    def close(self) -> None:
        self.loop.close()


class Muster(OffPolicy):
    """Muster's ``Collector``.

    Args:
        buffer: "memory" (``ReplayMemory``) or "torchrl".
        policy: "plain" or "head".
    """

    def __init__(self, case: Case, buffer: str, policy: str = "plain") -> None:
        import muster

        if buffer == "memory":
            self.memory: Any = muster.ReplayMemory(CAPACITY, seed=0)
        else:
            self.memory = _torchrl_buffer()
        greedy = short.Greedy(case.make())
        self.collector: Any = muster.Collector(
            case.make,
            muster.policies.deterministic(greedy.net) if policy == "head" else greedy,
            num_envs=None if case.B == 1 else case.B,
            frames_per_batch=case.frames,
            seed=0,
            replay_buffer=self.memory,
        )
        self.batches: Iterator[Any] = iter(self.collector)
        super().__init__(case)

    def collect(self) -> None:
        next(self.batches)

    def sample(self) -> Any:
        return self.memory.sample(SAMPLE)

    def bytes_per_transition(self) -> float:
        if hasattr(self.memory, "nbytes"):
            return float(self.memory.nbytes) / len(self.memory)
        return float(self.memory[:].bytes()) / len(self.memory)

    def close(self) -> None:
        self.collector.shutdown()


class SB3(OffPolicy):
    """DQN's ``collect_rollouts``, which fills its own replay buffer."""

    def __init__(self, case: Case) -> None:
        self.collecting = short.SB3(case, CAPACITY)
        self.buffer = self.collecting.dqn.replay_buffer
        super().__init__(case)

    def collect(self) -> None:
        self.collecting.rollout()

    def sample(self) -> Any:
        return self.buffer.sample(SAMPLE)

    def close(self) -> None:
        self.collecting.close()


class TorchRL(OffPolicy):
    """Its ``Collector``, whose batches are written to its ``ReplayBuffer``."""

    def __init__(self, case: Case) -> None:
        self.collecting = short.TorchRL(case)
        self.buffer = _torchrl_buffer()
        super().__init__(case)

    def collect(self) -> None:
        self.buffer.extend(next(self.collecting.batches).reshape(-1))

    def sample(self) -> Any:
        return self.buffer.sample()

    def close(self) -> None:
        self.collecting.close()


class PeerBuffer(OffPolicy):
    """The buffer of a peer alone; what a loop by hand adds to it is not measured."""

    def __init__(self, case: Case) -> None:
        self.env = case.make()
        self.obs, _ = self.env.reset(seed=0)
        self.T = case.T
        super().__init__(case)

    def collect(self) -> None:
        for _ in range(self.T):
            after, reward, terminated, truncated, _ = self.env.step(0)
            self.add(after, float(reward), terminated, truncated)
            self.obs = self.env.reset()[0] if terminated or truncated else after

    def add(self, after: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Add the transition from ``self.obs``."""
        raise NotImplementedError


class SB3Buffer(PeerBuffer):
    def __init__(self, case: Case) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer

        env = case.make()
        spaces = env.observation_space, env.action_space
        self.buffer: Any = ReplayBuffer(CAPACITY, *spaces, device="cpu")
        super().__init__(case)

    def add(self, after: Any, reward: float, terminated: bool, truncated: bool) -> None:
        done = np.array([terminated or truncated])
        info = {"TimeLimit.truncated": truncated and not terminated}
        self.buffer.add(
            self.obs, after, np.array([0]), np.array([reward]), done, [info]
        )

    def sample(self) -> Any:
        return self.buffer.sample(SAMPLE)

    def bytes_per_transition(self) -> float:
        arrays = [
            value
            for value in vars(self.buffer).values()
            if isinstance(value, np.ndarray)
        ]
        return sum(array.nbytes for array in arrays) / CAPACITY


class TianshouBuffer(PeerBuffer):
    def __init__(self, case: Case) -> None:
        from tianshou.data import Batch, ReplayBuffer

        self.batch = Batch
        self.buffer: Any = ReplayBuffer(CAPACITY)
        super().__init__(case)

    def add(self, after: Any, reward: float, terminated: bool, truncated: bool) -> None:
        row = {"obs": self.obs, "act": 0, "rew": reward, "obs_next": after, "info": {}}
        self.buffer.add(self.batch(**row, terminated=terminated, truncated=truncated))

    def sample(self) -> Any:
        return self.buffer.sample(SAMPLE)

    def bytes_per_transition(self) -> float:
        arrays = [
            value
            for value in self.buffer._meta.values()
            if isinstance(value, np.ndarray)
        ]
        return sum(array.nbytes for array in arrays) / CAPACITY


class Workers:
    """Two worker processes that collect into a ``ReplayMemory`` in the background. They pause between
    iterations, which take a fixed time.

    Args:
        learner: what this thread does: "waits", "samples" from the memory all the time, or samples
            "elsewhere", from a ring of its own: what a busy learner takes from the workers.
    """

    ITERATION_S = 0.3

    def __init__(self, case: Case, learner: str) -> None:
        import muster

        self.memory = muster.ReplayMemory(CAPACITY, seed=0)
        ring = SampledRing(case, np.zeros((case.B, workers_envs.FLOATS), np.float32))
        ring.size = CAPACITY
        work = {
            "waits": self._wait,
            "samples": lambda: self.memory.sample(SAMPLE),
            "elsewhere": ring.sample,
        }
        self.work = work[learner]
        self.collector: Any = muster.MultiAsyncCollector(
            [case.make] * case.B,
            short.Greedy(case.make()),
            frames_per_batch=case.T,
            seed=0,
            replay_buffer=self.memory,
        )
        self.collector.start()
        while len(self.memory) < case.fill:
            self._wait()
        self.pause = self.collector.pause()
        self.pause.__enter__()

    def rollout(self) -> int:
        before = self.collector.stats().frames
        self.pause.__exit__(None, None, None)
        end = time.perf_counter() + self.ITERATION_S
        while time.perf_counter() < end:
            self.work()
        self.pause = self.collector.pause()
        self.pause.__enter__()
        return int(self.collector.stats().frames - before)

    def close(self) -> None:
        self.pause.__exit__(None, None, None)
        self.collector.shutdown()

    def _wait(self) -> None:
        time.sleep(1e-3)  # noqa: TID251 (a learner that does nothing)


def _torchrl_buffer() -> Any:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=SAMPLE)


def _system(
    name: str, label: str, *needs: str, home: str = "", **options: Any
) -> Crewed:
    modules = ("torch", "gymnasium", *needs)
    path = f"off_policy_systems:{name}"
    return Crewed(path, label, modules, home=home, children=False, options=options)


TENSORDICT = "tensordict"
BOTH = {
    "off-hand": _system("Hand", "loop by hand, NumPy ring", home="muster"),
    "off-memory": _system(
        "Muster", "Muster, ReplayMemory", TENSORDICT, home="muster", buffer="memory"
    ),
    "off-memory-head": _system(
        "Muster",
        "Muster, ReplayMemory, head",
        TENSORDICT,
        home="muster",
        buffer="memory",
        policy="head",
    ),
    "off-muster-torchrl": _system(
        "Muster",
        "Muster, TorchRL's buffer",
        TENSORDICT,
        "torchrl",
        home="muster",
        buffer="torchrl",
    ),
    "off-sb3": _system("SB3", "SB3 DQN and its buffer", "stable_baselines3"),
    "off-torchrl": _system(
        "TorchRL", "TorchRL Collector and buffer", TENSORDICT, "torchrl"
    ),
}
BUFFERS = {
    "off-sb3-buffer": _system("SB3Buffer", "SB3 ReplayBuffer", "stable_baselines3"),
    "off-tianshou-buffer": _system(
        "TianshouBuffer", "Tianshou ReplayBuffer", "tianshou"
    ),
}
WORKERS = {
    f"off-workers-{learner}": _system(
        "Workers", f"two workers, {label}", TENSORDICT, home="muster", learner=learner
    )
    for learner, label in (
        ("waits", "the learner waits"),
        ("elsewhere", "it samples from a ring of its own"),
        ("samples", "it samples from their memory"),
    )
}
SYSTEMS.update(BOTH | BUFFERS | WORKERS)

PIXELS = Case(
    "off-pixels",
    envs.FRAMES,
    1,
    64,
    f"sample {SAMPLE} of 84x84x4 pixels",
    ("off-hand", "off-memory", "off-muster-torchrl", *BUFFERS),
    collects=False,
    fill=CAPACITY // 64 + 8,
)
CASES = {
    case.name: case
    for case in (
        Case(
            "off-cartpole",
            "CartPole-v1",
            1,
            1,
            f"collect 1, sample {SAMPLE}",
            tuple(BOTH),
        ),
        Case(
            "off-four",
            "CartPole-v1",
            1,
            4,
            f"collect 4, sample {SAMPLE}",
            tuple(BOTH),
        ),
        Case(
            "off-floats",
            workers_envs.SEVENTEEN,
            8,
            1,
            f"8 environments of 17 floats, collect 8, sample {SAMPLE}",
            tuple(BOTH),
        ),
        PIXELS,
        Case(
            "off-collect", "CartPole-v1", 1, 1, "collect 1", tuple(BOTH), samples=False
        ),
        Case(
            "off-workers",
            workers_envs.WAIT,
            2,
            16,
            "two worker processes, steps that wait 0.5 ms",
            tuple(WORKERS),
            clock="wall",
        ),
    )
}
WORKLOADS.update(CASES)
