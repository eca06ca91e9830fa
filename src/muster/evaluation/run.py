"""One evaluation: counts the episodes of rollouts until the requested ones are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from muster.episodes.record import EpisodeRecord
from muster.episodes.rules import (
    ENDLESS,
    AtMost,
    DivisibleRule,
    RuleName,
    check_rule,
    make_rule,
)
from muster.errors import BadOption
from muster.evaluation.episodes import EvaluatedEpisode, UnfinishedEpisode
from muster.evaluation.result import Evaluation
from muster.evaluation.video import Tape
from muster.memory.specs import Array
from muster.rng import entries
from muster.utils.integers import integer


@dataclass(frozen=True)
class Plan:
    """The limits of an evaluation; see ``Evaluator``."""

    episodes: int | None = 10
    max_frames: int | None = None
    max_T: int | None = None  # noqa: N815 (T is the name of time steps)
    max_trajectories: int | None = None
    rule: RuleName = "per_env"

    def __post_init__(self) -> None:
        bounds = {
            name: getattr(self, name)
            for name in ("episodes", "max_frames", "max_T", "max_trajectories")
        }
        for name, value in bounds.items():
            if value is not None:
                object.__setattr__(self, name, integer(name, value, or_else="None"))
        check_rule(self.rule)
        if all(value is None for value in bounds.values()):
            raise BadOption(
                "nothing ends this evaluation: give episodes, max_trajectories, max_T or max_frames"
            )

    @property
    def goal(self) -> str | None:
        names = ("episodes", "max_trajectories")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def rule_name(self) -> str:
        """The rule in use: without a number of episodes there is none to share out."""
        return self.rule if self.episodes is not None else "first_done"

    def check(self, num_envs: int) -> None:
        """Raise ``BadOption`` if no step of all environments is within the limit."""
        if self.max_frames is not None and self.max_frames < num_envs:
            raise BadOption(
                f"max_frames={self.max_frames} is less than one step of {num_envs} environments"
            )

    def taking_part(self, num_envs: int) -> int:
        """Return the number of environments whose episodes can count; they are the first ones."""
        chosen_before = self.rule in ("per_env", "last_even")
        return (
            min(num_envs, self.episodes)
            if self.episodes is not None and chosen_before
            else num_envs
        )


class Run:
    """Counts the episodes of one evaluation.

    Its environments start together and are stepped together.

    Environments without awaited episodes are left out if that is possible.

    Attributes:
        t: number of time steps.
        frames: number of environment steps up to there.
        stopped_by: see ``Evaluation``; empty before the end.
        overrun: number of steps executed after the end.
        rule: has seen all ends.
    """

    def __init__(
        self,
        plan: Plan,
        num_envs: int,
        *,
        seed: int,
        seeded: bool,
        version: int | str,
        chosen: Sequence[int] | None = None,
    ) -> None:
        plan.check(num_envs)
        self.plan = plan
        self.num_envs = num_envs
        self.version = version
        self.rule: DivisibleRule = make_rule(plan.rule, plan.episodes, num_envs)
        if plan.max_trajectories is not None:
            self.rule = AtMost(self.rule, plan.max_trajectories, num_envs)
        self._seed = seed
        self._seeded = seeded
        self._chosen = chosen
        self.t = self.frames = self.overrun = 0
        self.stopped_by = ""
        self.records: list[EvaluatedEpisode] = []
        self.uncounted: list[EvaluatedEpisode] = []
        self._began = [0] * num_envs  # start of the current episode
        self._wanted = [self.rule.awaits(i) for i in range(num_envs)]  # at that time
        self._number = [0] * num_envs
        self._returns = np.zeros(num_envs)  # of the current episode so far
        self._stepping = num_envs  # number of environments in the last time step
        self._started: set[int] = set()  # episodes, by their ``traj_ids``

    def rows(self, most: int, *, apart: bool) -> int:
        """Return the number of time steps, up to ``most``, of the next rollout, which then exceeds
        no limit.

        Args:
            apart: groups of environments are stepped apart, and each decides by ``part_of`` which
                episodes it needs.
        """
        limits = [most]
        if self.plan.max_T is not None:
            limits.append(self.plan.max_T - self.t)
        if self.plan.max_frames is not None:
            limits.append((self.plan.max_frames - self.frames) // self._stepping)
        if apart and (certain := self.rule.certain_steps) is not None:
            limits.append(max(1, certain))
        return min(limits)

    def add(
        self, episodes: Sequence[EpisodeRecord], reward: Array, traj_ids: Array
    ) -> None:
        """Add a rollout of all environments.

        Args:
            episodes: records of the episodes that ended, in order by environment.
            reward: ``[T, B]``.
            traj_ids: ``[T, B]``: -1 where an environment was not stepped.
        """
        made = traj_ids >= 0
        T = int(made.any(axis=1).sum())  # from some row on, no environment was stepped
        self._started.update(traj_ids[made].tolist())
        stop = self.t + T
        ended: set[int] = set()
        for end, together in groupby(self._by_time(episodes), _end):
            if end > stop:
                break
            records = list(together)
            self._enter(records)
            ended |= {record.env_id for record in records}
            if self.stopped_by:
                stop = end
        rows = np.where(made, reward, 0)[: stop - self.t]
        self._returns += rows.sum(axis=0, dtype=np.float64)
        for i in ended:
            self._returns[i] = rows[self._began[i] - self.t :, i].sum(dtype=np.float64)
        self.frames += int(made[: stop - self.t].sum())
        self.overrun = int(made[stop - self.t :].sum())
        if T:
            self._stepping = int(made[T - 1].sum())
        self.t = stop
        if not self.stopped_by:
            self._check_limits()

    @property
    def complete(self) -> bool:
        return (
            self.stopped_by == self.plan.goal
            if self.plan.goal
            else not self.unfinished()
        )

    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Return the open episodes that could have counted when they started."""
        return tuple(
            UnfinishedEpisode(
                i,
                self._number[i],
                self._seed_of(i),
                self.t - began,
                float(self._returns[i]),
            )
            for i, began in enumerate(self._began)
            if began < self.t and self._wanted[i]
        )

    def stop(self, reason: str) -> None:
        """End the evaluation, unless it has ended."""
        self.stopped_by = self.stopped_by or reason

    def result(self, env: str, seconds: float, tape: Tape | None) -> Evaluation:
        unfinished, frames = self.unfinished(), self.frames
        shown = sum(record.length for record in self.records) + sum(
            episode.steps for episode in unfinished
        )
        discarded = {"uncounted": frames - shown, "overrun": self.overrun}
        return Evaluation(
            env=env,
            version=self.version,
            seed=self._seed,
            rule=self.plan.rule_name,
            biased=self.rule.biased,
            complete=self.complete,
            stopped_by=self.stopped_by,
            records=tuple(self.records),
            uncounted=tuple(self.uncounted),
            unfinished=unfinished,
            started=len(self._started),
            frames=frames,
            discarded={reason: steps for reason, steps in discarded.items() if steps},
            seconds=seconds,
            tape=tape,
        )

    def _by_time(self, episodes: Sequence[EpisodeRecord]) -> list[EvaluatedEpisode]:
        began = list(self._began)
        number = list(self._number)
        records = []
        for episode in episodes:
            _, i, value, length, terminated, truncated, _ = episode
            seed = self._seed_of(i, number[i])
            record = EvaluatedEpisode(
                i,
                number[i],
                seed,
                began[i],
                value,
                length,
                terminated,
                truncated,
                self.version,
            )
            began[i], number[i] = began[i] + length, number[i] + 1
            records.append(record)
        return sorted(records, key=lambda record: (_end(record), record.env_id))

    def _enter(self, records: Sequence[EvaluatedEpisode]) -> None:
        counted = self.rule.ended([record.env_id for record in records])
        for record in records:
            i = record.env_id
            (self.records if i in counted else self.uncounted).append(record)
            self._began[i], self._number[i], self._wanted[i] = (
                _end(record),
                record.episode + 1,
                self.rule.awaits(i),
            )
        if len(self.records) == self.plan.episodes:
            self.stopped_by = "episodes"
        elif len(self.records) == self.plan.max_trajectories:
            self.stopped_by = "max_trajectories"

    def _seed_of(self, env_id: int, episode: int | None = None) -> int | None:
        number = self._number[env_id] if episode is None else episode
        place = env_id + self.num_envs * number
        if self._chosen is not None:
            (seed,) = entries(self._chosen, [place])
            return seed
        return self._seed + place if self._seeded or number == 0 else None

    def _check_limits(self) -> None:
        plan = self.plan
        if plan.max_T is not None and self.t >= plan.max_T:
            self.stopped_by = "max_T"
        elif (
            plan.max_frames is not None
            and plan.max_frames - self.frames < self._stepping
        ):
            self.stopped_by = "max_frames"
        elif plan.max_T is None and plan.max_frames is None:
            self._check_that_they_end()

    def _check_that_they_end(self) -> None:
        going = (
            episode for episode in self.unfinished() if self.rule.awaits(episode.env_id)
        )
        endless = [episode.env_id for episode in going if episode.steps > ENDLESS]
        if endless:
            raise BadOption(
                f"environment {endless[0]} has been in one episode for over {ENDLESS:,} steps, and"
                " this evaluation has no other end: give max_frames_per_traj= (which truncates"
                " episodes), max_T= or max_frames="
            )


def _end(record: EvaluatedEpisode) -> int:
    return record.begin + record.length
