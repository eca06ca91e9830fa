"""What observes a collector: its logger, progress bar and snapshots."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.collectors.about import options_of, versions
from muster.collectors.engine import Engine
from muster.collectors.options import CollectorOptions
from muster.observing.loggers import CollectionLog
from muster.observing.progress import CollectionProgress
from muster.observing.watching import WatchedRun
from muster.restore.film import film_command
from muster.restore.kept_episodes import KeptEpisodes
from muster.utils.streams import Unfailing

NO_FILMS = "For films, pass watch=Watch(films=True)."
NODES = "Episodes cannot be repeated: their actions are not kept by this collector."


class Observers:
    """Shows every batch to the logger, the progress bar and the snapshots that the options ask for.

    ``error``, if any, has ended the collection; the last snapshot has it.
    """

    def __init__(
        self, collector: Any, options: CollectorOptions, engine: Engine
    ) -> None:
        self._engine = engine
        self._log = None if options.logger is None else CollectionLog(options.logger)
        self._progress: CollectionProgress | None = None
        if options.progress:
            self._progress = CollectionProgress(
                options.total_frames, engine.source.pool.worker_stats
            )
            weakref.finalize(collector, self._progress.close)
        self.watched: WatchedRun | None = None
        self.error = ""
        if (watch := options.watching) is not None:
            pool = engine.source.pool
            recorder = engine.pipeline.recorder
            beside = (
                Path("runs", time.strftime("%Y%m%d-%H%M%S"))
                if recorder is None
                else recorder.directory
            )
            names = ", ".join(sorted({counts.info.name for counts in pool.counters}))
            known = {
                "frames_per_batch": options.frames_per_batch,
                "total_frames": options.total_frames,
                "seed": options.seed,
                "options": options_of(options),
                "versions": versions(),
            }
            if watch.films is False or (
                watch.films is None and engine.local is not None
            ):
                kept = KeptEpisodes(NO_FILMS)
            else:
                kept = (
                    KeptEpisodes(NODES)
                    if pool.notes is None
                    else pool.notes.keep_episodes()
                )
            self.watched = WatchedRun(
                watch.directory or _unused(beside, recorded=recorder is not None),
                {
                    "collector": type(collector).__name__,
                    "env": names,
                    "num_envs": pool.num_envs,
                    **known,
                }
                | {"no_film": kept.missing},
                engine.stats(),
                workers=pool.worker_stats,
                causes=lambda: {
                    handle.index: getattr(handle, "cause", None)
                    for handle in pool.handles
                },
                address=watch.address,
                save_episodes=kept.save,
                film=film_command(trust=True),  # of files that this process writes
            )
            weakref.finalize(collector, self.watched.close_unattended)
            if watch.address is not None and watch.announce:
                later = f"muster watch {self.watched.directory}"
                address = f"watch     {self.watched.url}  (afterwards: {later})"
                print(address, file=Unfailing(sys.stderr), flush=True)

    def collection_ended(self, error: str) -> None:
        """Show in the last snapshot which error has ended the collection."""
        self.error = error

    @property
    def need_batches(self) -> bool:
        """Whether ``wrote`` is to be called after every batch."""
        return not (
            self._log is None and self._progress is None and self.watched is None
        )

    def wrote(self) -> None:
        """Show the batch that was collected last."""
        due = self.watched is not None and self.watched.due
        if self._log is None and self._progress is None and not due:
            return
        stats = self._engine.stats(with_ready=True)
        if due and self.watched is not None:
            self.watched.wrote(stats, self._engine.ended.curve.totals)
        if self._progress is not None:
            self._progress.wrote(stats)
        if self._log is not None:
            self._log.wrote(stats, self._engine.ended.collected)

    def log(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Show metrics of the user's on the page and to the logger."""
        if self.watched is None and self._log is None:
            return
        frames = self._engine.ledger.terms().delivered
        if self.watched is not None:
            self.watched.log(metrics, frames)
        if self._log is not None:
            self._log.log(metrics, frames if step is None else step)

    def close(self) -> None:
        """End the progress bar and the snapshots. May be called again."""
        if self._progress is not None:
            self._progress.close()
        if self.watched is not None:
            if (log := self._engine.source.pool.log) is not None:
                log.flush(at_end=True)
            self.watched.wrote(self._engine.stats(), self._engine.ended.curve.totals)
            self.watched.close(self.error)


def _unused(directory: Path, *, recorded: bool) -> Path:
    """Return the directory, or the first one with a number at its end that does not exist."""
    number = 1
    found = directory
    while not recorded and found.exists():
        number += 1
        found = directory.with_name(f"{directory.name}-{number}")
    return found
