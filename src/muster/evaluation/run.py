"""One evaluation: counts the episodes of rollouts until the requested ones are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from muster.episodes.record import EpisodeRecord
from muster.episodes.rules import ENDLESS, RuleName, check_rule, make_rule
from muster.errors import BadOption
from muster.evaluation.result import EvaluatedEpisode, Evaluation, UnfinishedEpisode
from muster.evaluation.video import Tape
from muster.memory.specs import Array
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
        bounds = {name: getattr(self, name) for name in ("episodes", "max_frames", "max_T", "max_trajectories")}
        for name, value in bounds.items():
            if value is not None:
                object.__setattr__(self, name, integer(name, value, or_else="None"))
        check_rule(self.rule)
        if all(value is None for value in bounds.values()):
            raise BadOption("nothing ends this evaluation: give episodes, max_trajectories, max_T or max_frames")

    @property
    def goal(self) -> str | None:
        names = ("episodes", "max_trajectories")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def rule_name(self) -> str:
        """The rule in use: without a number of episodes there is none to share out."""
        return self.rule if self.episodes is not None else "first_done"

    def limit(self, num_envs: int) -> tuple[int | None, str]:
        """Return the maximum number of time steps, and the name of the option that limits it."""
        if self.max_frames is not None and self.max_frames < num_envs:
            raise BadOption(f"max_frames={self.max_frames} is less than one step of {num_envs} environments")
        steps = {"max_T": self.max_T, "max_frames": self.max_frames and self.max_frames // num_envs}
        given = [(value, name) for name, value in steps.items() if value is not None]
        return min(given, key=lambda entry: entry[0], default=(None, ""))


class Run:
    """Counts the episodes of one evaluation. Its environments start together and are stepped together.

    ``t``: number of time steps. ``stopped_by``: see ``Evaluation``; empty before the end. ``overrun``: number of steps
    executed after the end. ``seeded``: every episode has its own seed, see ``EpisodeSeeds``.
    """

    def __init__(self, plan: Plan, num_envs: int, *, seed: int, seeded: bool, version: int | str) -> None:
        self.plan, self.num_envs, self.version = plan, num_envs, version
        self.rule = make_rule(plan.rule, plan.episodes, num_envs)
        self._limit, self._limited_by = plan.limit(num_envs)
        self._seed, self._seeded = seed, seeded
        self.t = self.overrun = 0
        self.stopped_by = ""
        self.records: list[EvaluatedEpisode] = []
        self.uncounted: list[EvaluatedEpisode] = []
        self._began = [0] * num_envs  # start of the current episode
        self._wanted = [self.rule.awaits(i) for i in range(num_envs)]  # at that time
        self._number = [0] * num_envs
        self._returns = np.zeros(num_envs)  # of the current episode so far

    def add(self, episodes: Sequence[EpisodeRecord], reward: Array, T: int) -> None:
        """Add a rollout of all environments: its episodes, in order by environment, and its rewards ``[T, B]``."""
        stop = self.t + T if self._limit is None else min(self.t + T, self._limit)
        ended = set()
        for end, together in groupby(self._by_time(episodes), _end):
            if end > stop:
                break
            records = list(together)
            self._enter(records)
            ended |= {record.env_id for record in records}
            if self.stopped_by:
                stop = end
        rows = reward[: stop - self.t]
        self._returns += rows.sum(axis=0, dtype=np.float64)
        for i in ended:
            self._returns[i] = rows[self._began[i] - self.t :, i].sum(dtype=np.float64)
        self.overrun = (self.t + T - stop) * self.num_envs
        self.t = stop
        if not self.stopped_by and self.t == self._limit:
            self.stopped_by = self._limited_by
        if not self.stopped_by and self._limit is None:
            self._check_that_they_end()

    @property
    def complete(self) -> bool:
        return self.stopped_by == self.plan.goal if self.plan.goal else not self.unfinished()

    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Return the open episodes that could have counted when they started."""
        return tuple(
            UnfinishedEpisode(i, self._number[i], self._seed_of(i), self.t - began, float(self._returns[i]))
            for i, began in enumerate(self._began)
            if began < self.t and self._wanted[i]
        )

    def result(self, env: str, seconds: float, tape: Tape | None) -> Evaluation:
        unfinished, frames = self.unfinished(), self.t * self.num_envs
        shown = sum(record.length for record in self.records) + sum(episode.steps for episode in unfinished)
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
            frames=frames,
            discarded={reason: steps for reason, steps in discarded.items() if steps},
            seconds=seconds,
            tape=tape,
        )

    def _by_time(self, episodes: Sequence[EpisodeRecord]) -> list[EvaluatedEpisode]:
        began, number = list(self._began), list(self._number)
        records = []
        for episode in episodes:
            _, i, value, length, terminated, truncated, _ = episode
            seed = self._seed_of(i, number[i])
            record = EvaluatedEpisode(i, number[i], seed, began[i], value, length, terminated, truncated, self.version)
            began[i], number[i] = began[i] + length, number[i] + 1
            records.append(record)
        return sorted(records, key=lambda record: (_end(record), record.env_id))

    def _enter(self, records: Sequence[EvaluatedEpisode]) -> None:
        most = self.plan.max_trajectories
        counted = self.rule.ended([record.env_id for record in records])
        counted = counted[: None if most is None else most - len(self.records)]
        for record in records:
            i = record.env_id
            (self.records if i in counted else self.uncounted).append(record)
            self._began[i], self._number[i], self._wanted[i] = _end(record), record.episode + 1, self.rule.awaits(i)
        if len(self.records) == self.plan.episodes:
            self.stopped_by = "episodes"
        elif len(self.records) == most:
            self.stopped_by = "max_trajectories"

    def _seed_of(self, env_id: int, episode: int | None = None) -> int | None:
        number = self._number[env_id] if episode is None else episode
        return self._seed + env_id + self.num_envs * number if self._seeded or number == 0 else None

    def _check_that_they_end(self) -> None:
        going = (episode for episode in self.unfinished() if self.rule.awaits(episode.env_id))
        endless = [episode.env_id for episode in going if episode.steps > ENDLESS]
        if endless:
            raise BadOption(
                f"environment {endless[0]} has been in one episode for over {ENDLESS:,} steps, and this evaluation "
                f"has no other end: give max_frames_per_traj= (which truncates episodes), max_T= or max_frames="
            )


def _end(record: EvaluatedEpisode) -> int:
    return record.begin + record.length
