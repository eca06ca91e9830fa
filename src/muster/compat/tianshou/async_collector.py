"""Tianshou's AsyncCollector: environments that are ready continue without waiting for the slowest."""

from __future__ import annotations

import warnings
from typing import Any

from tianshou.data import AsyncCollector as TianshouAsyncCollector

from muster.compat.tianshou.async_envs import AsyncVectorEnvs, drain
from muster.compat.tianshou.collector import ROWS_FOR_EPISODES, Collector
from muster.compat.tianshou.envs import VectorEnvs
from muster.compat.tianshou.sampling import Sampling
from muster.compat.tianshou.steps import StepByStep, Tally
from muster.memory.slots import Lane


class AsyncCollector(Collector):
    """Collects from a vector environment with ``wait_num`` or ``timeout``.

    The policy acts for the environments whose results have arrived. A call returns as soon as the requested number has
    arrived; it may collect more, see its statistics. Pending steps are part of the next call. A reset waits for them
    and discards them. The first episodes to end count, which favours short ones. Environments are not reset after
    ``n_episode``.

    Args:
        policy, env, buffer, exploration_noise, raise_on_nan_in_buffer: as for ``Collector``.
    """

    def __init__(
        self,
        policy: Any,
        env: Any,
        buffer: Any = None,
        exploration_noise: bool = False,
        raise_on_nan_in_buffer: bool = True,
    ) -> None:
        super().__init__(policy, env, buffer, exploration_noise, raise_on_nan_in_buffer=raise_on_nan_in_buffer)
        if not self.env.is_async:
            warnings.warn(
                f"{type(env).__name__} has no wait_num and no timeout, so all its environments wait for the slowest: "
                f"Collector does the same and collects exact numbers",
                stacklevel=2,
            )

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Wait for pending steps, then reset all environments; see ``Collector``."""
        drain(self.env)
        return super().reset_env(gym_reset_kwargs)

    def _make_envs(self, obs: Any) -> VectorEnvs:
        return AsyncVectorEnvs(self.env, obs)

    def _collect(self, sampling: Sampling, tally: Tally, n_step: int | None, n_episode: int | None) -> None:
        envs = sampling.envs
        assert isinstance(envs, AsyncVectorEnvs)
        by_step = None
        if self._looks_at_steps():
            by_step = StepByStep(self, sampling, tally, adds_entries=bool(n_episode)).watch

        def made() -> int:
            return envs.arrived if n_step else envs.ended

        def watch(lane: Lane, t: int) -> None:
            if by_step is not None:
                by_step(lane, t)
            lane.stopped = made() >= goal

        goal = made() + (n_step or n_episode or 0)
        while made() < goal:
            try:
                sampling.make(min(ROWS_FOR_EPISODES, sampling.most_rows), None, watch)
            finally:
                if by_step is None:
                    self._store(sampling, tally)
                sampling.going.forget(sampling.group.pending)

    def _warn(self, n_step: int | None, n_episode: int | None) -> None:
        """Do not warn: every call may collect more than requested."""


TianshouAsyncCollector.register(AsyncCollector)  # for isinstance, without inheritance
