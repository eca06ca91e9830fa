"""The actions of an evaluation, to repeat an episode of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from muster.evaluation.result import EvaluatedEpisode
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.crash_report import CrashReport, Maker, Special


@dataclass
class Tape:
    """See the module.

    Attributes:
        name: of the environments.
        makers: of each group of environments, with keywords.
        per_group: environments in each.
        rollouts: actions, ``[T, B, *shape]`` per leaf, of all environments; the same T each time.
    """

    name: str
    makers: list[tuple[Any, Mapping[str, Any] | None]]
    per_group: int
    rollouts: list[dict[Key, Array]] = field(default_factory=list)

    def maker(self, env_id: int) -> tuple[Any, Mapping[str, Any] | None]:
        """What an environment was made from."""
        return self.makers[env_id // self.per_group]

    def actions(self, episode: EvaluatedEpisode) -> dict[Key, Array]:
        """Of one episode, ``[length, 1, *shape]`` per leaf."""
        T = len(next(iter(self.rollouts[0].values())))
        first, last = episode.begin // T, (episode.begin + episode.length - 1) // T
        begin, env = episode.begin - first * T, episode.env_id
        parts = self.rollouts[first : last + 1]
        joined = {key: np.concatenate([part[key][:, env : env + 1] for part in parts]) for key in parts[0]}
        return {key: array[begin : begin + episode.length] for key, array in joined.items()}

    def crash_report(self, episode: EvaluatedEpisode, maker: Maker) -> CrashReport:
        """The episode as what ``muster.restore.player`` plays, in an environment of ``maker``."""
        return CrashReport(
            name=self.name,
            maker=maker,
            env_ids=[episode.env_id],
            alone=True,
            phase="close",
            kind="",
            message="",
            actions=self.actions(episode),
            resets=np.zeros((1, 3), np.int64),
            special={0: Special(episode.seed, None, None)},
        )
