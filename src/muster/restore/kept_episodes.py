"""The newest, best and worst episodes of a collection, kept as seeds and actions, from which
``film`` repeats them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from muster.episodes.record import EpisodeRecord, Episodes
from muster.keys import Key
from muster.memory.specs import Array
from muster.observing.snapshots import EPISODES, WHICH
from muster.restore.action_log import ActionLog, ResetLog
from muster.restore.crash_report import EPISODE, CrashReport
from muster.utils.whole_files import make_folder

LIMIT_BYTES = (
    4 << 20
)  # for the actions of an episode, and for the pickle of its environment
NEWEST_EVERY_S = 5.0


class KeptEpisodes:
    """Keeps the newest, best and worst of the finished episodes.

    One thread adds episodes, another one saves them.

    The newest one is replaced every five seconds, so that long collections of short episodes cost
    next to nothing: ``newest_due`` says that the next one replaces it. ``missing`` says why no
    episode can be repeated; else empty.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self._best = -math.inf
        self._worst = math.inf
        self.newest_due = not missing
        self._newest_at = -math.inf
        self._unsaved: dict[str, CrashReport] = {}

    def _wanted(self, episodes: Episodes) -> dict[str, int]:
        """Return the positions of the episodes that are to be kept, by "newest", "best" and
        "worst".
        """
        returns = episodes.episode_return.tolist()
        found: dict[str, int] = {}
        if self.newest_due and math.isfinite(returns[-1]):
            found["newest"] = len(returns) - 1
        high = max(returns)
        low = min(returns)
        if self._best < high < math.inf:
            self._best = high
            found["best"] = returns.index(high)
        if self._worst > low > -math.inf:
            self._worst = low
            found["worst"] = returns.index(low)
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
        """Keep what is newest, best or worst of ``episodes``, which ended in a rollout that is not
        in the log yet.

        ``ids``: trajectory ids of the rollout, ``[n, B]``. ``actions``, ``log``, ``stepped``: as
        for ``ActionLog.add``.
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
                self._unsaved[which] = _limited(moves, record)
        if "newest" in wanted:
            self.newest_due = False
            self._newest_at = time.monotonic()

    def keep_next(self) -> None:
        """Have the next episode replace the newest one."""
        self.newest_due = not self.missing

    def save(self, directory: Path) -> Iterator[dict[str, Any]]:
        """Write the episodes kept since the last call into the directory of a run.

        Yields their numbers.
        """
        now = time.monotonic()
        for which in WHICH:
            kept = self._unsaved.pop(which, None)
            if kept is not None:
                missing = _save(kept, directory / EPISODES / f"{which}.episode")
                yield {"which": which, "missing": missing, **kept.episode}
        if now - self._newest_at > NEWEST_EVERY_S and not self.missing:
            self.newest_due = True


def _limited(moves: CrashReport, record: EpisodeRecord) -> CrashReport:
    if sum(array.nbytes for array in moves.actions.values()) > LIMIT_BYTES:
        missing = (
            f"It cannot be replayed: its actions have more than {LIMIT_BYTES:,} bytes."
        )
        moves = replace(moves, actions={}, missing=missing)
    return replace(moves, episode={name: getattr(record, name) for name in EPISODE})


def _save(kept: CrashReport, path: Path) -> str:
    """Write the file of an episode. Returns why it cannot be repeated; else empty."""
    from muster.restore import checkpoint  # needs torch

    if kept.missing:
        return kept.missing
    state = kept.state()
    if len(state["pickle"]) > LIMIT_BYTES:
        return f"The pickle of its environment has more than {LIMIT_BYTES:,} bytes."
    if not state["missing"]:
        make_folder(path.parent)
        checkpoint.save(path, state, mode=0o600)
    return str(state["missing"])
