"""What nobody can beat: ``env.step`` in a loop, alone and with one policy call per time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.nets import PlainPolicy, is_discrete
from benchmarks.workloads import Workload


class Bare:
    """Precomputed actions, nothing stored, reset where an episode ends."""

    def __init__(self, workload: Workload) -> None:
        self.frames = workload.frames
        self.T = workload.T
        self.envs = [workload.make() for _ in range(workload.B)]
        for i, env in enumerate(self.envs):
            env.reset(seed=i)
            env.action_space.seed(i)
        self.actions = [
            [env.action_space.sample() for env in self.envs] for _ in range(self.T)
        ]
        if is_discrete(self.envs[0]):
            self.actions = [[int(a) for a in row] for row in self.actions]
        self.steps = [(env.step, env.reset) for env in self.envs]

    def rollout(self) -> int:
        steps = self.steps
        for row in self.actions:
            for (step, reset), action in zip(steps, row, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    reset()
        return self.frames

    def close(self) -> None:
        for env in self.envs:
            env.close()


def cells_of(row: NDArray[Any]) -> list[Any]:
    """One place to write to per environment; memoryviews where they can be used, as they are faster
    than arrays.
    """
    return [memoryview(cell) if cell.ndim == 1 else cell for cell in row]


class BareWithPolicy:
    """The bare loop with ``act()`` called once per time step, between ``self.obs`` and
    ``self.action``.

    Observations are stacked into ``obs`` ``[B, ...]``, which is all that is written.
    """

    def __init__(self, workload: Workload) -> None:
        self.frames, self.T = workload.frames, workload.T
        self.envs = [workload.make() for _ in range(workload.B)]
        space = self.envs[0].observation_space
        self.obs = np.zeros((workload.B, *(space.shape or ())), space.dtype)
        for i, env in enumerate(self.envs):
            self.obs[i], _ = env.reset(seed=i)
        self.steps = [(env.step, env.reset) for env in self.envs]

    def policy(self) -> Callable[[], Any]:
        """``act()``: one action per env for the observations in ``self.obs``."""
        raise NotImplementedError

    def rollout(self) -> int:
        act, cells, steps = self.policy(), cells_of(self.obs), self.steps
        with torch.inference_mode():
            for _ in range(self.T):
                for (step, reset), action, cell in zip(
                    steps, act(), cells, strict=True
                ):
                    obs, _, terminated, truncated, _ = step(action)
                    if terminated or truncated:
                        obs, _ = reset()
                    cell[:] = obs
        return self.frames

    def close(self) -> None:
        for env in self.envs:
            env.close()


class LimitPlain(BareWithPolicy):
    """The bare loop with ``PlainPolicy``."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.module = PlainPolicy(self.envs[0]).eval()

    def policy(self) -> Callable[[], Any]:
        obs, module = torch.from_numpy(self.obs), self.module
        if self.module.discrete:
            return lambda: module(obs)[0].tolist()
        return lambda: module(obs)[0].numpy()
