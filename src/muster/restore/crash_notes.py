"""The action logs of a worker pool for episodes under way; crash reports and kept episodes are made
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.envs.build import is_environment
from muster.episodes.record import NO_EPISODES, Episodes, join_episodes
from muster.errors import HookError, MusterError
from muster.keys import AGENT, TERMINATED, TRAJ_DONE, TRAJ_IDS, TRUNCATED, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.restore.action_log import LIMIT_BYTES, ActionLog, Anchors, ResetLog
from muster.restore.crash_report import CrashDirectory, CrashReport
from muster.restore.kept_episodes import KeptEpisodes
from muster.rng import entries, seeds_of

if TYPE_CHECKING:
    from muster.rollout.group import Group
    from muster.workers.counters import FrameCounters
    from muster.workers.messages import RolloutResult
    from muster.workers.under_way import AtWork

TURNS = (
    "It cannot be replayed: agents take turns, and the actions of their last turns are in no row"
    " yet."
)
Replay = tuple[Path | None, str]  # a crash report, and the command that replays it
MOST_STEPS = 8192  # that ``LocalLog`` joins
MOST_BYTES = 1 << 20

TOGETHER = "Episodes cannot be repeated: the environments are made together and reset themselves."
OBJECT = (
    "Episodes cannot be repeated: an environment object cannot be made again. Give an id, or a"
    " function."
)


class CrashNotes:
    """The action logs of groups that were just made, in the parent; ``origins``: ``EnvFactory`` of
    each group.
    """

    def __init__(
        self,
        groups: Sequence[int],
        origins: Sequence[Any],
        counters: Sequence[FrameCounters],
        max_frames_per_traj: int | None,
        crash_dir: str | Path | None = None,
        episode_seeds: Sequence[int] | None = None,
    ) -> None:
        self._directory = CrashDirectory(crash_dir)
        self._episode_seeds = episode_seeds
        self.kept: KeptEpisodes | None = None  # episodes that are kept
        self._histories: dict[int, ActionLog] = {}
        self._infos = {number: counters[number].info for number in groups}
        self._begun: dict[
            int, int
        ] = {}  # by request under way: first row after an earlier result
        for number, factory in zip(groups, origins, strict=True):
            self._histories[number] = ActionLog(
                factory,
                name=self._infos[number].name,
                env_ids=counters[number].env_ids.tolist(),
                alone=self._infos[number].replays_alone,
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
        elif any(
            is_environment(history.factory.source)
            for history in self._histories.values()
        ):
            missing = OBJECT
        self.kept = KeptEpisodes(missing)
        return self.kept

    def reset(
        self,
        which: Mapping[int, Sequence[int]],
        options: dict[str, Any] | None,
    ) -> None:
        """Note a reset of these environments, by group."""
        for number, chosen in which.items():
            self._histories[number].reset(chosen, None, options)

    def may_have_reset(self, groups: Sequence[int]) -> None:
        """Note that the resets of these groups that are due may have been executed."""
        for number in groups:
            self._histories[number].may_have_reset()

    def forget(self, groups: Sequence[int]) -> None:
        """Note that the starts of these groups' current episodes are unknown."""
        for number in groups:
            self._histories[number].forget()

    def seeded(
        self,
        groups: Sequence[int],
        seed: int | Sequence[int] | None,
        *,
        static: bool = False,
        generation: int = 0,
    ) -> None:
        """Note a reset of all environments of these groups with the seeds of ``Worker.seed``."""
        if seed is None and self._episode_seeds is None:
            return
        for number in groups:
            history = self._histories[number]
            if self._episode_seeds is not None:
                # a successor continues at numbers of episodes that are not known here
                if not generation:
                    history.reset(None, entries(self._episode_seeds, history.env_ids))
                continue
            assert seed is not None
            env_ids = [0] * len(history.env_ids) if static else history.env_ids
            history.reset(None, seeds_of(seed, env_ids, generation))

    def reported(self, result: RolloutResult, lane: Lane) -> None:
        """Log the actions of a complete rollout."""
        begin = self._begun.pop(result.number, 0)
        end = result.done_steps
        actions = self._actions(result.group, lane, begin, end)
        ids = lane.arrays[TRAJ_IDS][begin:end]
        self.add(result.group, actions, ids, result.anchors, result.episodes)

    def add(
        self,
        group: int,
        actions: Mapping[Key, Array],
        ids: Array,
        log: ResetLog,
        ended: Episodes | None,
    ) -> None:
        """Log a rollout (actions ``[n, B, *shape]``, trajectory ids ``[n, B]``), and keep episodes
        that ended in it.
        """
        history = self._histories[group]
        stepped = ids >= 0 if self._infos[group].replays_alone else None
        if ended and self.kept is not None:
            self.kept.add(ended, ids, history, actions, log, stepped)
        history.add(actions, log, stepped)

    def action_keys(self, group: int, lane: Lane) -> list[Key]:
        """Return the keys of the actions in a lane."""
        return [key for key in self._infos[group].action_specs if key in lane.arrays]

    def failed(
        self,
        result: RolloutResult,
        lane: Lane,
        error: BaseException,
        index: int | None,
    ) -> Replay:
        """Save a crash report for an error of an environment or policy in a worker that still runs."""
        begin = self._begun.get(result.number, 0)
        row = result.done_steps
        self._begun[result.number] = row
        if isinstance(error, HookError):  # neither environment nor policy failed
            self._histories[result.group].forget()
            return None, ""
        end = row + (result.phase == "step")
        known = {
            "error": error,
            "phase": result.phase,
            "index": index,
            "log": result.anchors,
        }
        return self._save(self._crash_report(result.group, lane, begin, end, **known))

    def died(self, at_work: AtWork, error: MusterError) -> Callable[[], Replay]:
        """Make a crash report for a worker that is dead or hangs, from the rows that it has written
        into its lane.

        Returns a function that saves it, which can take long on a busy disk. That function does not
        use the lane.
        """
        request = at_work.request
        lane = at_work.lane
        index = at_work.index
        begin = self._begun.pop(request.number, 0)
        phase = error.phase or "step"
        done = max(begin, at_work.row + (phase == "reset"))
        flags: tuple[Key, ...] = (TRAJ_DONE,)
        if TRAJ_DONE not in lane.arrays:
            flags = (next_of(TERMINATED), next_of(TRUNCATED))
        ends = [lane.arrays[flag][begin:done] for flag in flags]
        ended = np.logical_or.reduce(ends).astype(bool)
        if phase == "reset" and len(ended) and ended[-1].sum() == 1:
            index = int(ended[-1].argmax())
        known = {"error": error, "phase": phase, "index": index, "ended": ended}
        end = done + (phase == "step")
        return partial(
            self._save, self._crash_report(request.group, lane, begin, end, **known)
        )

    def _crash_report(
        self,
        group: int,
        lane: Lane,
        begin: int,
        end: int,
        **known: Any,
    ) -> CrashReport:
        history = self._histories[group]
        observed: Mapping[Key, Array] = {}
        if end > begin:
            row = end - (known["phase"] == "step")
            keys = [
                key
                for key in self._infos[group].observation_specs
                if key in lane.arrays
            ]
            observed = {key: np.array(lane.arrays[key][row]) for key in keys}
        history.unpickle_factory()
        actions = self._actions(group, lane, begin, end)
        crash_report = history.crash_report(
            actions=actions, observation=observed, **known
        )
        if AGENT in self._infos[group].observation_specs:
            crash_report = replace(crash_report, missing=TURNS)
        history.forget()
        return crash_report

    def _save(self, crash_report: CrashReport) -> Replay:
        path = self._directory.save(crash_report)
        command = "" if path is None else crash_report.command(path)
        return path, command

    def _actions(
        self,
        group: int,
        lane: Lane,
        begin: int,
        end: int,
    ) -> dict[Key, Array]:
        return {
            key: lane.arrays[key][begin:end] for key in self.action_keys(group, lane)
        }


# --- a worker in the user's thread ----------------------------------------------------------------


class LocalLog:
    """Adds the rollouts of a worker in the user's thread, whose groups had no reset yet, to their
    action logs.

    It does as little work per rollout and reset as possible: short rollouts are joined, and added
    as one.
    """

    def __init__(self, notes: CrashNotes, groups: Sequence[Group]) -> None:
        self._notes = notes
        self._of = {group.number: _JoinedRollouts(notes, group) for group in groups}
        # see ``Worker.after_rollout``
        self.add = self._add if len(groups) > 1 else self._of[groups[0].number].add

    def _add(
        self,
        result: RolloutResult,
        lane: Lane,
        begin: int,
    ) -> None:
        self._of[result.group].add(result, lane, begin)

    def flush(self, *, at_end: bool = False) -> None:
        """Add what was joined so far; ``at_end``: the newest episode of it is kept."""
        if at_end and self._notes.kept is not None:
            self._notes.kept.keep_next()
        for joined in self._of.values():
            joined.flush()


class _JoinedRollouts:
    """The rollouts of a group that are not in its action log yet."""

    def __init__(self, notes: CrashNotes, group: Group) -> None:
        self._notes = notes
        self._number = group.number
        self._num_envs = group.B
        self._anchors = Anchors(group.env)
        self._keys: list[Key] = []  # of the actions, then of the trajectory ids
        self._columns: list[Array] = []  # [most, B, *shape] of each
        self._most = 0
        self._full = 0
        self._rows = 0
        self._forget()
        group.listen(self)

    def add(
        self,
        result: RolloutResult,
        lane: Lane,
        begin: int,
    ) -> None:
        if result.error is not None:
            self.lost_track()
            return
        rows = self._rows + result.done_steps - begin
        if rows > self._most:
            self._allocate(lane, rows)
        for key, column in zip(self._keys, self._columns, strict=True):
            column[self._rows : rows] = lane.arrays[key][begin : result.done_steps]
        self._rows = rows
        if result.episodes is not NO_EPISODES and result.episodes is not None:
            self._ended.append(result.episodes)
        kept = self._notes.kept
        newest_due = self._ended and kept is not None and kept.newest_due
        # bypassed rows have to be the last ones
        if rows >= self._full or newest_due or result.left_out:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        *actions, ids = (column[: self._rows] for column in self._columns)
        named = dict(zip(self._keys, actions, strict=False))
        episodes = join_episodes(self._ended)
        self._notes.add(self._number, named, ids, self._anchors.take(), episodes)
        self._forget()

    def _forget(self) -> None:
        self._rows = 0
        self._ended: list[Episodes] = []

    def lost_track(self, which: Iterable[int] = ()) -> None:
        """Forget all actions: the next ones do not follow them."""
        self._forget()
        self._anchors.forget()
        self._notes.forget([self._number])

    def before_reset(
        self,
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        # A rollout begins in row 0 of its lane, or continues after an error, which has forgotten
        # all earlier rows.
        self._anchors.before_reset(self._rows + row, which, seeds)

    def _allocate(self, lane: Lane, rows: int) -> None:
        """Make columns for at least ``rows`` rows."""
        before = self._columns
        known = self._rows
        self._keys = [*self._notes.action_keys(self._number, lane), TRAJ_IDS]
        like = [lane.arrays[key] for key in self._keys]
        row_bytes = sum(array[0].nbytes for array in like)
        self._full = max(1, min(MOST_STEPS // self._num_envs, MOST_BYTES // row_bytes))
        self._most = self._full + rows
        self._columns = [
            np.empty((self._most, *array.shape[1:]), array.dtype) for array in like
        ]
        for column, old in zip(self._columns, before, strict=False):
            column[:known] = old[:known]
