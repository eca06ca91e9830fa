"""The action logs of a worker pool for episodes under way; crash reports and kept episodes are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.envs.build import is_environment
from muster.episodes.record import Episodes
from muster.errors import HookError, MusterError
from muster.keys import AGENT, TERMINATED, TRAJ_DONE, TRAJ_IDS, TRUNCATED, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.restore.action_log import LIMIT_BYTES, ActionLog, ResetLog
from muster.restore.crash_report import CrashDirectory, CrashReport
from muster.restore.kept_episodes import KeptEpisodes
from muster.restore.pickling import unpickled
from muster.workers.build import seeds_of
from muster.workers.messages import GroupInfo, RolloutResult

if TYPE_CHECKING:
    from muster.workers.counters import FrameCounters
    from muster.workers.under_way import AtWork

TURNS = "It cannot be replayed: agents take turns, and the actions of their last turns are in no row yet."
Replay = tuple[Path | None, str]  # a crash report, and the command that replays it


TOGETHER = "Episodes cannot be repeated: the environments are made together and reset themselves."
OBJECT = "Episodes cannot be repeated: an environment object cannot be made again. Give an id, or a function."


class CrashNotes:
    """The action logs of groups that were just made, in the parent.

    Args:
        groups: numbers of the groups.
        origins: ``EnvFactory`` of each group.
        counters: frame counters, by number of the group.
        max_frames_per_traj, crash_dir: see the collector's options.

    Attributes:
        kept: episodes that are kept; None: none.
    """

    def __init__(
        self,
        groups: Sequence[int],
        origins: Sequence[Any],
        counters: Sequence[FrameCounters],
        max_frames_per_traj: int | None,
        crash_dir: str | Path | None = None,
    ) -> None:
        self._directory = CrashDirectory(crash_dir)
        self.kept: KeptEpisodes | None = None
        self._histories: dict[int, ActionLog] = {}
        self._infos: dict[int, GroupInfo] = {}
        self._begun: dict[int, int] = {}  # by request under way: first row after an earlier result
        for number, factory in zip(groups, origins, strict=True):
            info, ids = counters[number].info, counters[number].env_ids
            self._infos[number] = info
            self._histories[number] = ActionLog(
                factory,
                name=info.name,
                env_ids=ids.tolist(),
                alone=info.replays_alone,
                limit_bytes=LIMIT_BYTES // len(origins),
                max_frames_per_traj=max_frames_per_traj,
            )

    def keep_episodes(self) -> KeptEpisodes:
        """Keep the newest, best and worst of the episodes that end from now on."""
        missing = ""
        if not all(info.replays_alone for info in self._infos.values()):
            missing = TOGETHER
        elif any(AGENT in info.observation_specs for info in self._infos.values()):
            missing = TURNS
        elif any(is_environment(history.factory.source) for history in self._histories.values()):
            missing = OBJECT
        self.kept = KeptEpisodes(missing)
        return self.kept

    def reset(self, which: Mapping[int, Sequence[int]], options: dict[str, Any] | None) -> None:
        """Note a reset of these environments, by group."""
        for number, chosen in which.items():
            self._histories[number].reset(chosen, None, options)

    def forget(self, groups: Sequence[int]) -> None:
        """Note that the starts of these groups' current episodes are unknown."""
        for number in groups:
            self._histories[number].forget()

    def seeded(self, groups: Sequence[int], seed: int | None, *, static: bool = False, generation: int = 0) -> None:
        """Note a reset of all environments of these groups with the seeds of ``Worker.seed``."""
        if seed is None:
            return
        for number in groups:
            history = self._histories[number]
            history.reset(None, seeds_of(seed, [0] * len(history.env_ids) if static else history.env_ids, generation))

    def restarted(self, groups: Sequence[int], seed: int | None, static: bool, generation: int) -> None:
        """Note that these groups were made again by a restarted worker."""
        self.forget(groups)
        self.seeded(groups, seed, static=static, generation=generation)

    def reported(self, result: RolloutResult, lane: Lane) -> None:
        """Log the actions of a complete rollout."""
        begin = self._begun.pop(result.number, 0)
        end = result.done_steps
        actions, ids = self._actions(result.group, lane, begin, end), lane.arrays[TRAJ_IDS][begin:end]
        self.add(result.group, actions, ids, result.anchors, result.episodes)

    def add(self, group: int, actions: Mapping[Key, Array], ids: Array, log: ResetLog, ended: Episodes | None) -> None:
        """Log a rollout, and keep episodes that ended in it.

        Args:
            group: number of the group.
            actions: ``[n, B, *shape]`` per leaf.
            ids: trajectory ids, ``[n, B]``.
            log: resets of the rollout.
            ended: episodes that ended in it.
        """
        history, stepped = self._histories[group], ids >= 0 if self._infos[group].replays_alone else None
        if ended and self.kept is not None:
            self.kept.add(ended, ids, history, actions, log, stepped)
        history.add(actions, log, stepped)

    def action_keys(self, group: int, lane: Lane) -> list[Key]:
        """Return the keys of the actions in a lane."""
        return [key for key in self._infos[group].action_specs if key in lane.arrays]

    def failed(self, result: RolloutResult, lane: Lane, error: BaseException, index: int | None) -> Replay:
        """Save a crash report for an error of an environment or policy in a worker that still runs."""
        begin, row = self._begun.get(result.number, 0), result.done_steps
        self._begun[result.number] = row
        if isinstance(error, HookError):  # neither environment nor policy failed
            self._histories[result.group].forget()
            return None, ""
        end = row + (result.phase == "step")
        known = {"error": error, "phase": result.phase, "index": index, "log": result.anchors}
        return self._save(self._crash_report(result.group, lane, begin, end, **known))

    def died(self, at_work: AtWork, error: MusterError) -> Callable[[], Replay]:
        """Make a crash report for a worker that is dead or hangs, from the rows that it has written into its lane.

        Returns:
            a function that saves the crash report, which can take long on a busy disk. It does not use the lane.
        """
        request, lane, index = at_work.request, at_work.lane, at_work.index
        begin, phase = self._begun.pop(request.number, 0), error.phase or "step"
        done = max(begin, at_work.row + (phase == "reset"))
        flags = (TRAJ_DONE,) if TRAJ_DONE in lane.arrays else (next_of(TERMINATED), next_of(TRUNCATED))
        ended = np.logical_or.reduce([lane.arrays[flag][begin:done] for flag in flags]).astype(bool)
        if phase == "reset" and len(ended) and ended[-1].sum() == 1:
            index = int(ended[-1].argmax())
        known = {"error": error, "phase": phase, "index": index, "ended": ended}
        return partial(self._save, self._crash_report(request.group, lane, begin, done + (phase == "step"), **known))

    def _crash_report(self, group: int, lane: Lane, begin: int, end: int, **known: Any) -> CrashReport:
        history = self._histories[group]
        observed: Mapping[Key, Array] = {}
        if end > begin:
            keys = [key for key in self._infos[group].observation_specs if key in lane.arrays]
            observed = {key: np.array(lane.arrays[key][end - (known["phase"] == "step")]) for key in keys}
        history.factory = unpickled(history.factory, "create_env_fn")
        crash_report = history.crash_report(
            actions=self._actions(group, lane, begin, end), observation=observed, **known
        )
        if AGENT in self._infos[group].observation_specs:
            crash_report.missing = TURNS
        history.forget()
        return crash_report

    def _save(self, crash_report: CrashReport) -> Replay:
        path = self._directory.save(crash_report)
        return path, "" if path is None else crash_report.command(path)

    def _actions(self, group: int, lane: Lane, begin: int, end: int) -> dict[Key, Array]:
        return {key: lane.arrays[key][begin:end] for key in self.action_keys(group, lane)}
