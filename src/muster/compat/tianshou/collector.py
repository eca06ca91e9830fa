"""Tianshou's Collector: its names and results, with Muster's loop."""

from __future__ import annotations

import time
import warnings
from types import GenericAlias, TracebackType
from typing import Any

import numpy as np
from tianshou.config import ENABLE_VALIDATION
from tianshou.data import AsyncCollector as TianshouAsyncCollector
from tianshou.data import CachedReplayBuffer, CollectStats, ReplayBufferManager
from tianshou.data import Collector as TianshouCollector
from tianshou.data.buffer.buffer_base import MalformedBufferError
from tianshou.data.collector import BaseCollector
from tianshou.env import DummyVectorEnv
from tianshou.utils.torch_utils import torch_train_mode
from typing_extensions import Self

from muster.compat.tianshou.arguments import (
    check_buffer,
    check_env,
    check_hook,
    check_policy,
    check_stats_class,
    count,
)
from muster.compat.tianshou.envs import (
    AsyncVectorEnvs,
    VectorEnvs,
    drain,
    is_closed,
    listed,
)
from muster.compat.tianshou.policies import TianshouActor
from muster.compat.tianshou.steps import Collection, Sampling, is_tianshous
from muster.episodes.rules import LastEven
from muster.errors import BadOption, CollectorClosed
from muster.utils.tracebacks import trimmed

ROWS_FOR_EPISODES = (
    64  # at a time: the number for a number of episodes is not known before
)


class Collector(BaseCollector):  # type: ignore[misc] # of a package that mypy skips
    """Collects steps of a Tianshou policy in environments into a replay buffer.

    Args:
        policy: a ``Policy``, or an ``Algorithm``, whose policy is used.
        env: a vector environment, or one environment.
        buffer: a replay buffer, not reset here. None: a ``VectorReplayBuffer`` of 10,000 steps per
            environment.
        exploration_noise: apply the policy's ``add_exploration_noise`` to its actions.
        on_episode_done_hook: called with each episode from the buffer; may return more entries for
            it.
        on_step_hook: called with the actions and the steps of each row before they are added; may
            change the steps.
        raise_on_nan_in_buffer: check the whole buffer after each ``collect``.
        collect_stats_class: class of the result of ``collect``.

    Attributes:
        collect_step, collect_episode, collect_time: totals of all calls since ``reset_stat``.

    Raises:
        BadOption: an argument is of a wrong type, or the buffer has too few sub-buffers for the
            environments.
        UnsupportedEnv: ``env`` is no environment and no vector environment of Tianshou.
    """

    # Collector[CollectStats](...), as in Tianshou
    __class_getitem__: Any = classmethod(GenericAlias)
    _is_closed: bool

    def __init__(
        self,
        policy: Any,
        env: Any,
        buffer: Any = None,
        exploration_noise: bool = False,
        on_episode_done_hook: Any = None,
        on_step_hook: Any = None,
        raise_on_nan_in_buffer: bool = ENABLE_VALIDATION,
        collect_stats_class: Any = CollectStats,
    ) -> None:
        check_env(env)
        check_stats_class(collect_stats_class)
        check_hook("on_episode_done_hook", on_episode_done_hook)
        check_hook("on_step_hook", on_step_hook)
        if buffer is not None:
            check_buffer(buffer)
        if not hasattr(env, "__len__"):
            warnings.warn(
                "A single environment was given; it is wrapped in a DummyVectorEnv.",
                stacklevel=2,
            )
            env = DummyVectorEnv([lambda one=env: one])
        super().__init__(
            policy,
            env,
            buffer,
            exploration_noise,
            collect_stats_class,
            raise_on_nan_in_buffer,
        )
        check_policy(self.policy)
        self._on_episode_done_hook = on_episode_done_hook
        self._on_step_hook = on_step_hook
        self._sampling: Sampling | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments; later calls do nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._sampling = None
            self.env.close()

    def set_on_episode_done_hook(self, hook: Any) -> None:
        check_hook("on_episode_done_hook", hook)
        self._on_episode_done_hook = hook

    def set_on_step_hook(self, hook: Any) -> None:
        check_hook("on_step_hook", hook)
        self._on_step_hook = hook

    get_on_episode_done_hook = TianshouCollector.get_on_episode_done_hook
    get_on_step_hook = TianshouCollector.get_on_step_hook
    run_on_episode_done = TianshouCollector.run_on_episode_done
    run_on_step_hook = TianshouCollector.run_on_step_hook

    def reset_env(
        self, gym_reset_kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Reset all environments, and the policy with them; returns first observations and infos."""
        self._check_open()
        before = self._sampling
        try:
            self._settle()
            obs, infos = self.env.reset(**(gym_reset_kwargs or {}))
            infos = np.array(listed(infos))
            sampling = before
            if sampling is None or not sampling.envs.takes(obs):
                envs = self._make_envs(obs)
                sampling = Sampling(envs, TianshouActor(envs, self.action_space))
            sampling.begin(obs, infos)
        except Exception as error:
            if before is not None and not isinstance(error, StopIteration):
                before.lose(range(self.env_num))
            raise
        self._sampling = sampling
        return obs, infos

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        no_grad: bool = True,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Collect steps or episodes into the buffer.

        Args:
            n_step: steps over all environments; rounded up to a multiple of their number.
            n_episode: episodes, the first to begin; see ``LastEven``. All environments are reset
                afterwards.
            random: sample actions from the action spaces.
            render: seconds to wait after each step, after rendering the environments; 0: do not
                render.
            no_grad: call the policy without gradients.
            reset_before_collect: reset environments and counters first.
            gym_reset_kwargs: keyword arguments for all resets in this call.

        Returns:
            statistics of this call.

        Raises:
            BadOption: neither or both numbers are given, one is not whole, or the environments were
                not reset yet.
            BadPolicyOutput: the policy has returned something else than one row for each
                environment. The next call calls it again for the same observations.
            BadEnvOutput: an environment has returned something that cannot be stored. The next call
                first resets all environments.
            CollectorClosed: the environments are closed.
            Exception: what an environment, the policy, a hook or the buffer has raised, as it is,
                with a note of the place. All complete steps before it are in the buffer and in the
                totals. After an error of an environment, the next call first resets all
                environments; not after ``StopIteration`` in a reset, with which finite vector
                environments end a call.
        """
        self._no_grad = no_grad
        self._check_open()
        check_policy(self.policy)
        n_step = count("n_step", n_step)
        n_episode = count("n_episode", n_episode)
        self._validate_n_step_n_episode(n_episode, n_step)
        # Tianshou 2.0.1 takes the time of day, which can be set back
        begun = time.monotonic()
        try:
            if reset_before_collect:
                self.reset(reset_buffer=False, gym_reset_kwargs=gym_reset_kwargs)
                begun = time.monotonic()
            with torch_train_mode(self.policy, enabled=False):
                stats = self._collect(
                    n_step, n_episode, random, render, gym_reset_kwargs
                )
        finally:
            took = time.monotonic() - begun
            self.collect_time += took
        stats.set_collect_time(took, update_collect_speed=True)
        stats.refresh_all_sequence_stats()
        if self.raise_on_nan_in_buffer and self.buffer.hasnull():
            found = self.buffer.isnull().apply_values_transform(np.sum)
            raise MalformedBufferError(
                "there is NaN in the buffer. A hook that returns entries for some steps only leaves"
                " others empty, with n_step=, or an on_step_hook has written it. buffer.dropnull()"
                f" removes these steps. Number of NaNs by key:\n{found}"
            )
        return stats

    def _check_open(self) -> None:
        if is_closed(self.env):
            raise CollectorClosed(
                f"the environments of this {type(self).__name__} are closed: make new ones, and a new"
                f" {type(self).__name__}"
            )

    def _validate_n_step_n_episode(
        self, n_episode: int | None, n_step: int | None
    ) -> None:
        if bool(n_step) == bool(n_episode) or (n_step or n_episode or 0) < 0:
            raise BadOption(
                f"n_step={n_step}, n_episode={n_episode}: give one of them, and a number above 0"
            )
        self._warn(n_step, n_episode)

    def _collect(
        self,
        n_step: int | None,
        n_episode: int | None,
        random: bool,
        render: float | None,
        gym_reset_kwargs: dict[str, Any] | None,
    ) -> Any:
        if self._sampling is None:
            raise BadOption(
                "the environments have not been reset since the collector was made or closed: call"
                " reset() or reset_env(), or collect(..., reset_before_collect=True)"
            )
        sampling = self._sampling
        sampling.actor.begin(
            self.policy,
            random=random,
            noise=self.exploration_noise,
            no_grad=self._no_grad,
        )
        sampling.envs.configure(gym_reset_kwargs or {}, render)
        made = Collection(
            self, sampling, by_row=self._looks_at_steps(), adds_entries=bool(n_episode)
        )
        try:
            with trimmed:
                self._fill(made, n_step, n_episode)
        finally:
            self.collect_step += made.steps
            self.collect_episode += made.episodes
        return made.close()

    def _settle(self) -> None:
        """Wait for pending steps, and discard them: here there are none."""

    def _make_envs(self, obs: Any) -> VectorEnvs:
        if self.env.is_async:
            raise BadOption(
                f"{type(self.env).__name__} is asynchronous: use AsyncCollector"
            )
        return VectorEnvs(self.env, obs)

    def _fill(
        self, made: Collection, n_step: int | None, n_episode: int | None
    ) -> None:
        rule = LastEven(n_episode, self.env_num) if n_episode else None
        left = -(-n_step // self.env_num) if n_step else 0
        while left > 0 or (rule is not None and not rule.complete):
            rows = min(
                left if rule is None else ROWS_FOR_EPISODES, made.sampling.most_rows
            )
            made.make(rows, rule)
            left -= rows
        if n_episode:
            self.reset_env(made.sampling.envs.reset_kwargs)

    def _looks_at_steps(self) -> bool:
        own, kind = type(self), self.collect_stats_class
        return (
            not is_tianshous(self.buffer)
            or self._on_step_hook is not None
            or self._on_episode_done_hook is not None
            or own.run_on_step_hook is not Collector.run_on_step_hook
            or own.run_on_episode_done is not Collector.run_on_episode_done
            or kind.update_at_step_batch is not CollectStats.update_at_step_batch
            or kind.update_at_episode_done is not CollectStats.update_at_episode_done
        )

    def _warn(self, n_step: int | None, n_episode: int | None) -> None:
        if n_step and n_step % self.env_num:
            warnings.warn(
                f"n_step={n_step} is not a multiple of {self.env_num}, the number of environments: all"
                " of them make the last step, and more steps are collected",
                stacklevel=4,
            )
        if n_episode and n_episode < self.env_num:
            warnings.warn(
                f"n_episode={n_episode} is less than {self.env_num}, the number of environments:"
                f" the last {self.env_num - n_episode} of them take no part",
                stacklevel=4,
            )

    def _validate_buffer(self) -> None:
        """Raise ``BadOption`` if the buffer cannot store the steps of each environment separately."""
        name = type(self.buffer).__name__
        if isinstance(self.buffer, CachedReplayBuffer):
            room = self.buffer.cached_buffer_num
            what = "cached buffers"
        elif isinstance(self.buffer, ReplayBufferManager):
            room = self.buffer.buffer_num
            what = "buffers"
        else:
            room = 1
            what = "buffer"
            if self.buffer.maxsize == 0:
                raise BadOption(f"{name} has maxsize=0: there is no room for a step")
        if room < self.env_num:
            raise BadOption(
                f"{name} has {room} {what} for {self.env_num} environments: give it one for each,"
                f" as VectorReplayBuffer(total_size, {self.env_num}) has"
            )


TianshouCollector.register(Collector)  # for isinstance, without inheritance


class AsyncCollector(Collector):
    """Collects from a vector environment with ``wait_num`` or ``timeout``.

    The policy acts for the environments whose results have arrived. A call returns as soon as the
    requested number has arrived; it may collect more, see its statistics. Pending steps are part of
    the next call. A reset waits for them and discards them. The first episodes to end count, which
    favours short ones. Environments are not reset after ``n_episode``.

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
        super().__init__(
            policy,
            env,
            buffer,
            exploration_noise,
            raise_on_nan_in_buffer=raise_on_nan_in_buffer,
        )
        if not self.env.is_async:
            warnings.warn(
                f"{type(env).__name__} has no wait_num and no timeout, so all its environments wait"
                " for the slowest: Collector does the same and collects exact numbers",
                stacklevel=2,
            )

    def _settle(self) -> None:
        drain(self.env)

    def _make_envs(self, obs: Any) -> VectorEnvs:
        return AsyncVectorEnvs(self.env, obs)

    def _fill(
        self, made: Collection, n_step: int | None, n_episode: int | None
    ) -> None:
        envs: Any = made.sampling.envs
        counter = "arrived" if n_step else "ended"
        goal = getattr(envs, counter) + (n_step or n_episode or 0)
        while getattr(envs, counter) < goal:
            rows = min(ROWS_FOR_EPISODES, made.sampling.most_rows)
            made.make(rows, enough=lambda: getattr(envs, counter) >= goal)

    def _warn(self, n_step: int | None, n_episode: int | None) -> None:
        """Do not warn: every call may collect more than requested."""


TianshouAsyncCollector.register(AsyncCollector)  # for isinstance, without inheritance
