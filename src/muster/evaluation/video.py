"""Recorded actions of an evaluation, and videos, for which episodes are repeated in an environment
that renders.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import UnsupportedEnv
from muster.evaluation.episodes import EvaluatedEpisode
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.crash_report import CrashReport, EnvFactory, Special
from muster.restore.film import film as write_film
from muster.restore.film import is_same


@dataclass
class Tape:
    """Actions of all environments by rollout, ``[T, B, *shape]`` per leaf, and the factory of each
    group.

    ``begins``: time steps at which the rollouts start, which have different lengths.
    """

    name: str
    factories: list[tuple[Any, Mapping[str, Any] | None]]
    per_group: int
    rollouts: list[dict[Key, Array]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)

    def factory(self, env_id: int) -> tuple[Any, Mapping[str, Any] | None]:
        return self.factories[env_id // self.per_group]

    def actions(self, episode: EvaluatedEpisode) -> dict[Key, Array]:
        """Return the actions of one episode, ``[length, 1, *shape]`` per leaf."""
        first = bisect_right(self.begins, episode.begin) - 1
        last = bisect_right(self.begins, episode.begin + episode.length - 1) - 1
        begin = episode.begin - self.begins[first]
        env = episode.env_id
        parts = self.rollouts[first : last + 1]
        joined = {
            key: np.concatenate([part[key][:, env : env + 1] for part in parts])
            for key in parts[0]
        }
        return {
            key: array[begin : begin + episode.length] for key, array in joined.items()
        }

    def crash_report(
        self, episode: EvaluatedEpisode, factory: EnvFactory
    ) -> CrashReport:
        """Return the episode in the format of ``muster.restore.player``, to play in an environment
        of ``factory``.
        """
        return CrashReport(
            name=self.name,
            factory=factory,
            env_ids=[episode.env_id],
            alone=True,
            phase="close",
            kind="",
            message="",
            actions=self.actions(episode),
            resets=np.zeros((1, 3), np.int64),
            special={0: Special(episode.seed, None, None)},
        )


def film(
    tape: Tape, episode: EvaluatedEpisode, folder: Path, name: str, fps: float | None
) -> Path:
    """Write a video, see ``Evaluation.video``. The file name is ``name`` followed by the return."""
    if episode.seed is None:
        raise UnsupportedEnv(
            f"{tape.name}: this episode had no seed of its own, so it cannot be repeated:"
            " environments that are made together reset themselves. Evaluate single Gymnasium"
            " environments (num_envs=) for videos."
        )
    source, kwargs = tape.factory(episode.env_id)
    path = folder / f"{name}-return-{episode.episode_return:g}.mp4"
    rewards, _ = write_film(
        tape.crash_report(episode, EnvFactory(source, None, kwargs)), path, fps
    )
    if not is_same(rewards, episode.episode_return, episode.length):
        warnings.warn(
            f"{tape.name} is not determined by its seed and actions: the episode with return"
            f" {episode.episode_return:g} in {episode.length} steps gave {sum(rewards):g} in"
            f" {len(rewards)} when it was repeated for the video, which shows that.",
            stacklevel=2,
        )
    return path
