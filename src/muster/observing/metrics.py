"""Returns and lengths of episodes, computed step by step from rewards and done flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muster.episodes.clock import TrajectoryClock
from muster.errors import BadCheckpoint, BadOption, HookError
from muster.memory.specs import Array
from muster.observing.loggers import as_logger
from muster.utils.integers import integer


class MetricsTracker:
    """Sums up rewards of environments that are stepped together, and logs when episodes finish.

    ::

        tracker = MetricsTracker(num_envs=8, logger=JsonlLogger("log.jsonl"))
        tracker.update(reward, done)  # after every step of all environments

    Logs one record per finished episode: ``episode_reward``, ``episode_length``,
    ``cumulative_reward`` and ``episode_number``, at the step ``collected_steps``; episodes that
    finish at the same time share this step.

    Args:
        num_envs: number of environments N.
        logger: any object that ``as_logger`` accepts. None: no logging.

    Attributes:
        collected_steps: number of environment steps; every update adds N.
        cumulative_reward: sum of all rewards, including those of unfinished episodes.
        episode_count: number of finished episodes.
        last_episode_reward, last_episode_length: return and length of the last finished episode; 0
            before the first.
    """

    def __init__(self, num_envs: int, logger: Any = None) -> None:
        self.num_envs = integer("num_envs", num_envs, of="MetricsTracker")
        self._log = None if logger is None else as_logger(logger)
        self._clock = TrajectoryClock(np.arange(num_envs), num_envs)
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        self.collected_steps = 0
        self.cumulative_reward = 0.0
        self.episode_count = 0
        self.last_episode_reward = 0.0
        self.last_episode_length = 0
        self.abandon()

    def abandon(self, which: Sequence[int] | Array | None = None) -> None:
        """Discard the unfinished episodes of environments that were reset before their end.

        Their steps and rewards stay in ``collected_steps`` and ``cumulative_reward``.

        Args:
            which: numbers of environments. None: all.
        """
        self._clock.abandon(np.arange(self.num_envs) if which is None else which)

    def update(self, reward: Any, done: Any) -> None:
        """Count one step of all environments.

        Args:
            reward: rewards ``[N]`` or ``[N, ...]`` (such as ``[N, 1]`` or ``[N, agents, 1]``),
                summed over all dimensions but the first. Arrays, tensors on any device, lists; for
                one environment also a number.
            done: flags ``[N]`` or ``[N, 1]``: the episode ended with this step.

        Raises:
            BadOption: a shape is wrong. Nothing was counted.
            HookError: the logger raised. Everything was counted, and the other records were logged.
        """
        rewards = self._rows("reward", reward).reshape(self.num_envs, -1).sum(axis=1)
        ended = self._rows("done", done)
        if ended.size != self.num_envs:
            raise BadOption(
                f"done has shape {list(ended.shape)}: expected one flag for each of {self.num_envs}"
                " environments"
            )
        self.update_rows(rewards[None], ended.reshape(1, -1))

    def update_rows(self, reward: Array, done: Array) -> None:
        """Count T steps of all environments, ``[T, N]`` arrays each, as T calls of ``update``
        would.

        Raises:
            HookError: the first error of the logger; see ``update``.
        """
        failure = None
        ended = done.astype(bool)
        episodes = self._clock.advance(reward, ended, ended, ended)
        steps = np.flatnonzero(ended) // self.num_envs  # step of each of these episodes
        cumulative = self.cumulative_reward + np.cumsum(
            reward.sum(axis=1, dtype=np.float64)
        )
        before = self.collected_steps
        self.collected_steps += reward.size
        self.cumulative_reward = (
            float(cumulative[-1]) if len(reward) else self.cumulative_reward
        )
        for episode, step in zip(episodes, steps.tolist(), strict=True):
            self.episode_count += 1
            self.last_episode_reward = episode.episode_return
            self.last_episode_length = episode.length
            record = {
                "episode_reward": episode.episode_return,
                "episode_length": episode.length,
                "cumulative_reward": float(cumulative[step]),
                "episode_number": self.episode_count,
            }
            try:
                if self._log is not None:
                    self._log(record, before + (step + 1) * self.num_envs)
            except HookError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain data and copies of arrays."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {
            **counts,
            "rewards": self._clock.returns.copy(),
            "lengths": self._clock.steps.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``.

        Raises ``BadCheckpoint`` if the number of environments differs.
        """
        if len(state["rewards"]) != self.num_envs:
            raise BadCheckpoint(
                f"The metrics are those of {len(state['rewards'])} environments, and this tracker"
                f" is for {self.num_envs}. Load into one of the same number."
            )
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._clock.returns[...] = state["rewards"]
        self._clock.steps[...] = state["lengths"]

    def _rows(self, name: str, given: Any) -> Array:
        """Return ``given`` as ``[N, ...]`` float64."""
        try:
            host = (
                given.detach().cpu().double().numpy()
                if hasattr(given, "detach")
                else given
            )
            rows = np.atleast_1d(np.asarray(host, np.float64))
        except (TypeError, ValueError) as error:
            raise BadOption(
                f"{name}={given!r}: expected numbers, one row for each environment"
            ) from error
        if len(rows) != self.num_envs:
            raise BadOption(
                f"{name} has shape {list(np.shape(host))}: expected {self.num_envs} rows, one for"
                " each environment"
            )
        return rows


_COUNTS = (
    "collected_steps",
    "cumulative_reward",
    "episode_count",
    "last_episode_reward",
    "last_episode_length",
)
