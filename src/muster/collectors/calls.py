"""The calls of a collector that collect on demand, and what an error leaves of them.

A call collects rollouts until it is complete. After an error or Ctrl-C it keeps what it has, and
``run`` continues.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from muster.collectors.batch_views import set_names
from muster.collectors.collect_arguments import CollectArguments
from muster.collectors.engine import CollectedRollout, Engine
from muster.collectors.pipeline import Stage
from muster.episodes.plain import to_plain
from muster.episodes.record import Episodes, join_episodes
from muster.episodes.rules import NobodyLetGo, PerEnv, Rule, RuleName, make_rule
from muster.episodes.segment import equalize, split_trajectories, time_last
from muster.episodes.whole import EpisodeGroup, WholeEpisodes
from muster.errors import BadOption, CollectorTimeout, WorkerDied
from muster.keys import AGENT, NEXT_VALUE, VALID, Key
from muster.memory.specs import Array
from muster.workers.messages import RolloutResult
from muster.workers.pool import Pool

if TYPE_CHECKING:
    from tensordict import TensorDict

RULE: RuleName = "per_env"  # makes no unneeded steps, and is never biased
ROWS = 32  # time steps of rollouts for episodes without frames_per_batch


@dataclass
class Part:
    """One rollout of a call for steps.

    Attributes:
        batch: its visible columns.
        frames: number of its valid steps.
        episodes: records of the episodes that ended in it.
        last: values after its last rows.
        first: the first stages of its pipeline.
    """

    batch: TensorDict
    frames: int
    episodes: Episodes
    last: torch.Tensor | None
    first: list[Stage]


class CallResult(NamedTuple):
    """The result of a complete call, before the stages of the pipeline.

    Attributes:
        batch: the batch.
        frames: number of its valid steps.
        episodes: records of the episodes that ended in it.
        first: the first stages of its pipeline.
        native: further fields of ``CollectStats``.
        whole: it has whole episodes.
    """

    batch: TensorDict
    frames: int
    episodes: Episodes
    first: list[Stage]
    native: dict[str, Any]
    whole: bool


class UserCall(ABC):
    """A call under way."""

    @property
    @abstractmethod
    def frames(self) -> int:
        """Number of collected frames that are neither delivered nor kept elsewhere."""

    @abstractmethod
    def give_up(self) -> None:
        """Discard what was collected; the call does not continue."""

    @property
    @abstractmethod
    def can_be_saved(self) -> bool:
        """Whether there is a ``state_dict``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the call as plain data."""


class CollectCall(UserCall):
    """A call of ``collect``."""

    def __init__(self, engine: Engine, arguments: CollectArguments) -> None:
        self.arguments = arguments
        self._engine = engine
        self._source = engine.source
        self._options = engine.options

    @abstractmethod
    def run(self) -> CallResult:
        """Collect what is missing, and return the result."""

    def _collect(self, limit: int | None, **others: Any) -> CollectedRollout:
        arguments = self.arguments
        return self._engine.collect(
            limit,
            acting="random" if arguments.random else None,
            grad=not arguments.no_grad,
            pause=arguments.render,
            **others,
        )

    def _rows(self, rows: int) -> int | None:
        """Return the time steps of one of several rollouts; None: as many as in a batch."""
        return None if self._options.frames_per_batch else min(rows, ROWS)

    def _living(self) -> list[int]:
        """Return the numbers of all environments that were not dropped."""
        return [
            int(i)
            for a in self._source.pool.counters
            if not a.dropped
            for i in a.env_ids
        ]


class StepsCall(CollectCall):
    """``collect(n_step=)``: one rollout of all groups, or as many rollouts of first-ready groups as
    necessary.
    """

    def __init__(self, engine: Engine, arguments: CollectArguments) -> None:
        super().__init__(engine, arguments)
        self._parts: list[Part] = []
        # the next part, still without values of next observations
        self._rollout: CollectedRollout | None = None

    @property
    def frames(self) -> int:
        frames = sum(part.frames for part in self._parts)
        return frames if self._rollout is None else frames + self._rollout.frames

    def run(self) -> CallResult:
        n = self.arguments.n_step or 0
        parts = self._parts
        while (
            self._rollout is not None
            or not parts
            or (self._source.overlaps and self.frames < n)
        ):
            if self._rollout is None:
                self._rollout = self._roll_out(n - self.frames)
            self._finish_part(self._rollout)
        values = [part.last for part in parts if part.last is not None]
        return CallResult(
            _joined(parts),
            self.frames,
            join_episodes([part.episodes for part in parts]),
            [stage for part in parts for stage in part.first],
            {"last_value_est": torch.cat(values)} if values else {},
            whole=False,
        )

    def give_up(self) -> None:
        for part in self._parts:
            self._engine.ledger.discard("interrupted", part.frames)
        if self._rollout is not None:
            self._engine.lose(
                self._rollout.batch, self._rollout.env_ids, self._rollout.frames
            )
        self._parts = []
        self._rollout = None

    @property
    def can_be_saved(self) -> bool:
        return self._rollout is None and self.arguments.state_dict() is not None

    def state_dict(self) -> dict[str, Any]:
        parts = [
            {
                "batch": to_plain(part.batch.clone()),
                "frames": part.frames,
                "episodes": part.episodes.state_dict(),
                "last": None if part.last is None else part.last.clone(),
            }
            for part in self._parts
        ]
        return {"arguments": self.arguments.state_dict(), "parts": parts}

    @classmethod
    def from_state(cls, engine: Engine, state: Mapping[str, Any]) -> StepsCall:
        """Restore ``state_dict()``. Hooks for episodes that ended in its parts are not called."""
        call = cls(engine, CollectArguments(**state["arguments"]))
        for saved in state["parts"]:
            batch = engine.place.take(saved["batch"])
            episodes = Episodes.from_state(saved["episodes"])
            call._parts.append(
                Part(batch, saved["frames"], episodes, saved["last"], [])
            )
        return call

    def _roll_out(self, missing: int) -> CollectedRollout:
        """Collect one of the rollouts for ``missing`` steps."""
        n = self.arguments.n_step or 0
        bootstrap = self.arguments.values
        if self._source.overlaps:
            rows = self._rows(-(-n // self._engine.num_envs))
            batches = self._source.rollouts_for(missing, rows)
            return self._collect(None, rows=rows, batches=batches, bootstrap=bootstrap)
        return self._collect(
            n, rows=-(-n // max(len(self._living()), 1)), bootstrap=bootstrap
        )

    def _finish_part(self, rollout: CollectedRollout) -> None:
        """Make a part of the rollout.

        If the policy fails to return values, the next call repeats this.
        """
        engine = self._engine
        batch = rollout.batch
        hidden = rollout.hidden
        n = self.arguments.n_step or 0
        if (
            not self._source.overlaps
            and n < batch.numel()
            and VALID not in batch.keys(True)
        ):
            batch.set(VALID, self._valid(batch, n))
        last = None
        try:
            if self.arguments.bootstrap:
                last = add_next_values(batch, rollout.results, engine.source.pool)
        except (
            WorkerDied,
            CollectorTimeout,
        ):  # the lost server had the recurrent states
            engine.lose(batch, rollout.env_ids, rollout.frames, "worker_died")
            self._rollout = None
            raise
        first = engine.pipeline.watching(batch, rollout.env_ids, hidden)
        batch = split_trajectories(batch) if self._options.split_trajs else batch
        batch = batch.exclude(*hidden) if hidden else batch
        self._parts.append(Part(batch, rollout.frames, rollout.episodes, last, first))
        self._rollout = None

    def _valid(self, batch: TensorDict, n: int) -> torch.Tensor:
        """Return a mask of the first ``n`` cells, in order of time."""
        counters = self._engine.source.pool.counters
        living = np.concatenate(
            [np.full(a.info.num_envs, not a.dropped) for a in counters]
        )
        time_dim = batch.names.index("time")
        T = batch.numel() // len(living)
        place = (
            np.arange(T) * living.sum() + (np.cumsum(living) - 1)[:, None]
        )  # [environments, T]
        valid = torch.from_numpy((place < n) & living[:, None])
        if self._engine.joins_time:  # groups follow each other
            valid = torch.cat(valid.chunk(len(counters)), dim=1)
        lead = [size for dim, size in enumerate(batch.shape) if dim != time_dim]
        return valid.reshape(*lead, -1).movedim(-1, time_dim).to(batch.device or "cpu")


class Choice:
    """The episodes chosen by a rule, by their numbers in the store.

    Attributes:
        rule: the rule; it knows the environments by their places in ``envs``.
        envs: numbers of the environments that take part.
        numbers: the chosen episodes.
    """

    def __init__(self, name: RuleName, n: int, envs: list[int], num_envs: int) -> None:
        self.rule: Rule = make_rule(name, n, len(envs))
        self.envs = envs
        self.numbers: list[int] = []
        self._num_envs = num_envs
        self._place = {env: place for place, env in enumerate(envs)}
        self._shown: list[
            list[int]
        ] = []  # all that the rule was shown; a rule is a function of it

    def take(self, steps: Sequence[Sequence[int]]) -> None:
        """Show ended episodes to the rule, time step by time step."""
        for step in steps:
            self._shown.append(list(step))
            numbers = {
                self._place[n % self._num_envs]: n
                for n in step
                if n % self._num_envs in self._place
            }
            if not self.rule.complete:
                self.numbers += [
                    numbers[place] for place in self.rule.ended(sorted(numbers))
                ]

    def state_dict(self) -> dict[str, Any]:
        """Return the choice so far as plain data."""
        return {"envs": list(self.envs), "shown": [list(step) for step in self._shown]}


class EpisodesCall(CollectCall):
    """``collect(n_episode=)``: rollouts until the rule is complete.

    Their rows are kept in the store.

    Args:
        store: keeps the rows, also of episodes for later calls.
        keep: surplus episodes are kept for the next call.
        stored: called after a rollout was put into the store.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: CollectArguments,
        store: WholeEpisodes,
        *,
        keep: bool,
        stored: Callable[[], None],
    ) -> None:
        super().__init__(engine, arguments)
        self._store = store
        self._keep = keep
        self._stored = stored
        self._unkept: CollectedRollout | None = None  # not yet in the store
        self._group: EpisodeGroup | None = None  # the complete result
        self._choice = self._new_choice()
        self._choice.take([[number] for number in store.held])
        store.new_ends()

    @property
    def frames(self) -> int:
        frames = 0 if self._unkept is None else self._unkept.frames
        return frames if self._group is None else frames + self._group.frames

    @property
    def has_unkept(self) -> bool:
        """Whether a rollout was not put into the store yet."""
        return self._unkept is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self._group is not None

    def run(self) -> CallResult:
        engine = self._engine
        store = self._store
        while self._unkept is not None or not self._choice.rule.complete:
            if self._unkept is None:
                self._unkept = self._collect(
                    None, closes=False, rows=self._rows(ROWS), rule=self._rule_of
                )
            self._store_rollout(self._unkept)
            store.check_ends("collect(n_episode=...)", resets=False)
        if self._group is None:
            self._group = store.take(self._choice.numbers)
            engine.end_batch()
        batch = self._group.batch
        hidden = [key for key in engine.last.hidden if key in batch.keys(True)]
        return CallResult(
            batch.exclude(*hidden) if hidden else batch,
            self._group.frames,
            engine.pipeline.recount.of(batch),
            engine.pipeline.showing,
            {"rule": self.arguments.rule or RULE, "biased": self._choice.rule.biased},
            whole=True,
        )

    def give_up(self) -> None:
        if self._unkept is not None:
            self._engine.lose(
                self._unkept.batch, self._unkept.env_ids, self._unkept.frames
            )
        if self._group is not None:
            self._engine.ledger.discard("interrupted", self._group.frames)
        self._unkept = self._group = None
        self._engine.next_batch.end_batch()

    @property
    def can_be_saved(self) -> bool:
        return (
            self._group is None
            and self._unkept is None
            and self.arguments.state_dict() is not None
        )

    def settle(self) -> None:
        """Put a collected rollout into the store, if an error has prevented that."""
        if self._unkept is not None:
            self._store_rollout(self._unkept)

    def state_dict(self) -> dict[str, Any]:
        return {
            "arguments": self.arguments.state_dict(),
            "choice": self._choice.state_dict(),
        }

    def load_choice(self, state: Mapping[str, Any]) -> None:
        """Restore ``Choice.state_dict()``; the store is restored already."""
        if state["envs"] == self._choice.envs:
            self._choice = self._new_choice()
            self._choice.take(state["shown"])

    def _new_choice(self) -> Choice:
        self._source.pool.check_alive()
        arguments = self.arguments
        return Choice(
            arguments.rule or RULE,
            arguments.n_episode or 0,
            self._living(),
            self._store.num_envs,
        )

    def _store_rollout(self, rollout: CollectedRollout) -> None:
        """Put the rollout into the store, and show what has ended to the rule.

        After an error, repeat this.
        """
        self._store.add(rollout.batch, rollout.env_ids)
        self._unkept = None
        self._engine.pipeline.skip(rollout.batch, rollout.env_ids)
        self._stored()
        if self._living() == self._choice.envs:
            self._choice.take(self._store.new_ends())
        else:  # without the dropped environments
            self._choice = self._new_choice()
            self._choice.take([[number] for number in self._store.held])
            self._store.new_ends()

    def _rule_of(self, group: int) -> Rule | None:
        """Return a rule by which a group knows by itself which episodes are needed; None: it cannot
        know.
        """
        rule = self._choice.rule
        counters = self._source.pool.counters
        if AGENT in counters[group].info.observation_specs:
            return None
        if len(counters) == 1:
            own = copy.deepcopy(rule)
            return NobodyLetGo(own) if self._keep else own
        if (
            isinstance(rule, PerEnv)
            and not self._keep
            and not any(counts.dropped for counts in counters)
        ):
            return rule.part(counters[group].env_ids.tolist())
        return None


class ExtraBatch(UserCall):
    """``rollout()``: a batch that passes through no stages."""

    def __init__(
        self,
        engine: Engine,
        parts: Sequence[TensorDict] = (),
        hidden: Sequence[Key] = (),
        frames: int = 0,
    ) -> None:
        self._engine = engine
        # the batch, or with ``extend_buffer=False`` its time steps
        self._parts = list(parts)
        self._hidden = list(hidden)
        # of a batch that the pipeline has not recorded as delivered elsewhere
        self._env_ids: Array | None = None
        self._frames = frames

    @property
    def frames(self) -> int:
        return self._frames

    def run(self) -> TensorDict:
        """Collect what is missing, and return the batch."""
        engine = self._engine
        limit = self._engine.options.frames
        if engine.options.extend_buffer:
            if not self._parts:
                rollout = engine.collect(limit, remembered=False)
                self._add(rollout)
                self._env_ids = rollout.env_ids
            if self._env_ids is not None:
                engine.pipeline.skip(self._parts[0], self._env_ids)
                self._env_ids = None
            (batch,) = self._parts
            return batch.exclude(*self._hidden) if self._hidden else batch
        while (step := engine.collect_step(len(self._parts), limit)) is not None:
            self._add(step)
        joined: TensorDict = torch.cat(self._parts, self._parts[0].names.index("time"))
        return joined

    def give_up(self) -> None:
        if self._env_ids is not None:
            self._engine.lose(self._parts[0], self._env_ids, self._frames)
        else:
            self._engine.ledger.discard("interrupted", self._frames)
        self._parts = []
        self._frames = 0
        self._env_ids = None
        self._engine.next_batch.end_batch()

    @property
    def can_be_saved(self) -> bool:
        return self._env_ids is None

    def state_dict(self) -> dict[str, Any]:
        parts = [to_plain(part.clone()) for part in self._parts]
        return {"parts": parts, "hidden": list(self._hidden), "frames": self._frames}

    @classmethod
    def from_state(cls, engine: Engine, state: Mapping[str, Any]) -> ExtraBatch:
        """Restore ``state_dict()``."""
        parts = [engine.place.take(part) for part in state["parts"]]
        return cls(engine, parts, list(state["hidden"]), state["frames"])

    def _add(self, rollout: CollectedRollout) -> None:
        self._parts.append(rollout.batch)
        self._hidden = rollout.hidden
        self._frames += rollout.frames


def _joined(parts: Sequence[Part]) -> TensorDict:
    """Join rollouts side by side, or one after another if their shapes differ."""
    batches = [part.batch for part in parts]
    first = batches[0]
    if len(batches) == 1:
        return first
    equalize(batches)
    whole: TensorDict
    if len({batch.shape for batch in batches}) == 1 and first.ndim > 1:
        whole = torch.cat(
            batches, next(dim for dim, name in enumerate(first.names) if name != "time")
        )
        set_names(whole, first.names)
    else:
        whole = torch.cat([time_last(batch).reshape(-1) for batch in batches])
        set_names(whole, ["time"])
    return whole


def add_next_values(
    batch: TensorDict, results: Sequence[RolloutResult], pool: Pool
) -> torch.Tensor:
    """Add ``("next", "state_value")`` to a rollout: the policy's values of next observations, 0 in
    all other rows.

    Returns:
        the values after the last rows, ``[*lead, 1]``; 0 where an episode has terminated there.
    """
    groups = [
        (pool.counters[result.group].info.num_envs, result.group, result.values)
        for result in results
    ]
    num_envs, time_dim = sum(B for B, *_ in groups), batch.names.index("time")
    T = batch.shape[time_dim]
    if batch.numel() != num_envs * T:
        raise BadOption(
            "bootstrap: the batch is concatenated over time, and its last rows are not last: leave"
            " cat out"
        )
    values, last = np.zeros((num_envs, T), np.float32), np.zeros(num_envs, np.float32)
    first = 0
    for B, number, made in groups:
        if made is not None:  # otherwise its group was dropped
            if made.values is None and len(made.t):
                assert pool.server is not None
                made = pool.server.ask("value", number, made, group=number)
            found = made.values if len(made.t) else np.empty(0, np.float32)
            values[first + made.env, made.t] = found
            at_last = made.t == made.last[made.env]
            last[first + made.env[at_last]] = found[at_last]
        first += B
    lead = [size for dim, size in enumerate(batch.shape) if dim != time_dim]
    device = batch.device or "cpu"
    shown = torch.from_numpy(values).reshape(*lead, T).movedim(-1, time_dim)
    batch.set(NEXT_VALUE, shown.unsqueeze(-1).to(device))
    return torch.from_numpy(last).reshape(*lead, 1).to(device)
