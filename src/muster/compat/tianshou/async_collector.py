"""Tianshou's AsyncCollector: environments that are ready continue without waiting for the slowest.

A row of the lane has the results that arrived at its step.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tianshou.data import AsyncCollector as TianshouAsyncCollector
from tianshou.data import Batch
from tianshou.data.batch import alloc_by_keys_diff

from muster.compat.tianshou.collector import ROWS_FOR_EPISODES, Collector
from muster.compat.tianshou.envs import Actions, Row, VectorEnvs, listed
from muster.compat.tianshou.sampling import Sampling
from muster.compat.tianshou.steps import Tally
from muster.keys import OBSERVATION, REWARD, TERMINATED, TRUNCATED, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import Step


class AsyncVectorEnvs(VectorEnvs):
    """A vector environment with ``wait_num`` or ``timeout``: a step's result may arrive many rows after its action.

    Until then the environment's observation is repeated. The row of arrival has the complete step: observation, action,
    result. ``arrived`` and ``ended`` count results and ended episodes.
    """

    def __init__(self, venv: Any, obs: Array) -> None:
        super().__init__(venv, obs)
        self.arrived = self.ended = 0
        self._sent = Batch()  # ``[N, ...]``: the pending action of each environment, and the policy's entry for it

    def reset(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        super().reset(arrays, row, which, seeds)
        self.ready = np.union1d(self.ready, which)

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        observations, rewards = arrays[OBSERVATION], arrays[REWARD]
        terminated, truncated = arrays[next_of(TERMINATED)], arrays[next_of(TRUNCATED)]

        def step(t: int) -> Sequence[int] | None:
            actions = self.actions
            self._keep(actions)
            observations[t + 1], rewards[t] = observations[t], 0
            try:
                obs, rew, *flags, infos = self.venv.step(actions.mapped, actions.ids)
            except Exception as error:
                raise self._failure("step", error) from error
            infos = listed(infos)
            unordered = [int(info["env_id"]) for info in infos]
            order = np.argsort(unordered)
            ids, rew = np.asarray(unordered)[order], np.asarray(rew)[order]
            self._take(ids, [infos[i] for i in order])
            self._write_all(observations, t + 1, ids, obs[order])
            if rew.ndim == 1:
                rewards[t, ids] = rew
            terminated[t, ids], truncated[t, ids] = (np.asarray(flag, bool)[order] for flag in flags)
            sent = self._sent[ids]
            self.rows.append(Row(ids, sent.act, sent.policy, rew, [self.infos[i] for i in ids], actions))
            finished: list[int] = ids[terminated[t, ids] | truncated[t, ids]].tolist()
            self.ready, self.arrived, self.ended = ids, self.arrived + len(ids), self.ended + len(finished)
            if finished:
                self._reset_ahead(finished)
            return finished or None

        return step

    def bypass(self, which: Collection[int]) -> None:
        """Do nothing: only environments with pending steps are left out."""

    def _keep(self, actions: Actions) -> None:
        sent = Batch(act=actions.act, policy=actions.policy)
        alloc_by_keys_diff(self._sent, sent, self.num_envs, stack=False)
        if self._sent.act.dtype != actions.act.dtype:
            self._sent.act = self._sent.act.astype(np.result_type(self._sent.act, actions.act))
        self._sent[actions.ids] = sent

    def _reset_ahead(self, which: Sequence[int]) -> None:
        if not set(which).isdisjoint(self.venv.waiting_id):
            drain(self.venv)
        super()._reset_ahead(which)


def drain(venv: Any) -> None:
    """Wait for all pending steps, and discard their results."""
    while venv.waiting_id:
        venv.step(None, venv.waiting_id)


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

    def _fill(self, sampling: Sampling, tally: Tally, n_step: int | None, n_episode: int | None, by_step: Any) -> None:
        envs = sampling.envs
        assert isinstance(envs, AsyncVectorEnvs)

        def made() -> int:
            return envs.arrived if n_step else envs.ended

        def watch(lane: Lane, t: int) -> None:
            if by_step is not None:
                by_step(lane, t)
            lane.stopped = made() >= goal

        goal = made() + (n_step or n_episode or 0)
        while made() < goal:
            rows = min(ROWS_FOR_EPISODES, sampling.most_rows)
            self._make(sampling, tally, rows, None, watch, stores=by_step is None)

    def _warn(self, n_step: int | None, n_episode: int | None) -> None:
        """Do not warn: every call may collect more than requested."""


TianshouAsyncCollector.register(AsyncCollector)  # for isinstance, without inheritance
