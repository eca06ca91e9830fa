"""The newest, best and worst episodes of a collection, kept as seeds and actions, from which ``film`` repeats them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muster.episodes.record import EpisodeRecord, Episodes
from muster.errors import BadCheckpoint, BadCrashReport
from muster.keys import Key
from muster.memory.specs import Array
from muster.observing.snapshots import EPISODES, WHICH
from muster.restore.action_log import ActionLog, ResetLog
from muster.restore.crash_report import CrashReport

FORMAT = 1
LIMIT_BYTES = 4 << 20  # for the actions of an episode, and for the pickle of its environment
NEWEST_EVERY_S = 5.0
_NUMBERS = {"episode_return": float, "length": int, "env_id": int, "traj_id": int}


@dataclass(frozen=True)
class KeptEpisode:
    """A finished episode: its record, and the resets and actions that repeat it, from a known start on.

    ``moves`` may begin with earlier episodes of the same environment: the last reset starts the kept one.
    """

    moves: CrashReport
    episode_return: float
    length: int
    env_id: int
    traj_id: int

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the numbers of its record, by name."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def save(self, path: Path) -> str:
        """Write the file atomically, readable for its owner only. Returns why it cannot be repeated; else empty.

        Raises:
            OSError: it cannot be written.
        """
        from muster.restore import checkpoint  # needs torch

        state = self.moves.state() if not self.moves.missing else {"missing": self.moves.missing, "pickle": b""}
        if len(state["pickle"]) > LIMIT_BYTES:
            return f"The pickle of its environment has more than {LIMIT_BYTES:,} bytes."
        if not state["missing"]:
            path.parent.mkdir(exist_ok=True)
            checkpoint.save(path, {"format": FORMAT, "moves": state, **self.numbers}, mode=0o600)
        return str(state["missing"])

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> KeptEpisode:
        """Read a file that ``save`` has written.

        Args:
            trust: allow unpickling, and an environment id that imports a module.

        Raises:
            ImportRefused: the file needs ``trust``.
            BadCrashReport: the file is missing or damaged.
        """
        from muster.restore import checkpoint

        try:
            state = checkpoint.load(path)
        except BadCheckpoint as error:
            raise BadCrashReport(f"No episode: {error}") from error
        if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
            raise BadCrashReport(f"{path} is no episode of format {FORMAT}, which this version of Muster reads.")
        moves = state.pop("moves", None)
        if state.keys() != _NUMBERS.keys() or any(type(state[name]) is not kind for name, kind in _NUMBERS.items()):
            raise BadCrashReport(f"{path} is damaged: look at {sorted(state)}.")
        return cls(CrashReport.from_state(moves, path, trust=trust), **state)


class KeptEpisodes:
    """Keeps the newest, best and worst of the finished episodes. One thread adds episodes, another one saves them.

    The newest one is replaced every five seconds, so that long collections of short episodes cost next to nothing.

    Args:
        missing: why no episode can be repeated; empty: they can.

    Attributes:
        newest_due: the newest episode is to be replaced by the next one that ends.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self._best, self._worst = -math.inf, math.inf
        self.newest_due, self._newest_at = not missing, -math.inf
        self._unsaved: dict[str, KeptEpisode] = {}

    def _wanted(self, episodes: Episodes) -> dict[str, int]:
        """Return the positions of the episodes that are to be kept, by "newest", "best" and "worst"."""
        returns = episodes.episode_return.tolist()
        found = {"newest": len(returns) - 1} if self.newest_due and math.isfinite(returns[-1]) else {}
        high, low = max(returns), min(returns)
        if self._best < high < math.inf:
            self._best, found["best"] = high, returns.index(high)
        if self._worst > low > -math.inf:
            self._worst, found["worst"] = low, returns.index(low)
        return found

    def add(
        self,
        episodes: Episodes,
        ids: Array,
        history: ActionLog,
        actions: Mapping[Key, Array],
        log: ResetLog,
        stepped: Array | None,
    ) -> None:
        """Keep what is newest, best or worst of the episodes that ended in the next rollout of an action log.

        Args:
            episodes: episodes that ended in the rollout.
            ids: trajectory ids, ``[n, B]``.
            history: action log, to which the rollout is not added yet.
            actions, log, stepped: the rollout, see ``ActionLog.add``.
        """
        if self.missing:
            return
        wanted = self._wanted(episodes)
        for which, position in wanted.items():
            record = episodes[position]
            index = history.env_ids.index(record.env_id)
            ends = np.flatnonzero(ids[:, index] == record.traj_id)
            if len(ends):
                moves = history.episode(index, int(ends[-1]) + 1, actions, log, stepped)
                self._unsaved[which] = _kept(moves, record)
        if "newest" in wanted:
            self.newest_due, self._newest_at = False, time.monotonic()

    def save(self, directory: Path) -> Iterator[dict[str, Any]]:
        """Write the episodes that were kept since the last call. Yields their numbers, for the snapshots of the run.

        Args:
            directory: directory of the run.

        Raises:
            OSError: a file cannot be written.
        """
        now = time.monotonic()
        for which in WHICH:
            if (kept := self._unsaved.pop(which, None)) is not None:
                missing = kept.save(directory / EPISODES / f"{which}.episode")
                yield {"which": which, "missing": missing, **kept.numbers}
        if now - self._newest_at > NEWEST_EVERY_S and not self.missing:
            self.newest_due = True


def _kept(moves: CrashReport, record: EpisodeRecord) -> KeptEpisode:
    if sum(array.nbytes for array in moves.actions.values()) > LIMIT_BYTES:
        moves.actions, moves.missing = {}, f"It cannot be replayed: its actions have more than {LIMIT_BYTES:,} bytes."
    return KeptEpisode(moves, record.episode_return, record.length, record.env_id, record.traj_id)
