"""``collect``: a given number of steps or episodes on demand."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from muster.collectors.collect_methods import Asked, Collected
from muster.collectors.contradictions import NEEDS_ENVS
from muster.collectors.engine import Engine
from muster.collectors.pipeline import PipelineItem, Stage
from muster.episodes.record import Episodes, info_records, join_episodes
from muster.episodes.rules import NobodyLetGo, PerEnv, Rule, RuleName, make_rule
from muster.episodes.segment import ENDED, equalize, find_pieces, split_trajectories, time_last
from muster.episodes.summary import CollectStats, stats_of_call
from muster.episodes.whole import WholeEpisodes
from muster.errors import BadOption, CollectorTimeout, UnsupportedEnv, WorkerDied
from muster.keys import AGENT, INFO, TERMINATED, TRAJ_DONE, TRUNCATED, VALID, Key, next_of
from muster.memory.specs import Array
from muster.protocols import carried_specs
from muster.rollout.bootstrap import check_bootstrap
from muster.utils.interrupts import postponed
from muster.workers.messages import RolloutResult
from muster.workers.pool import WorkerPool
from muster.workers.requests import Call, EnableGrad
from muster.workers.worker import Worker, running

if TYPE_CHECKING:
    from tensordict import TensorDict

RULE: RuleName = "per_env"  # makes no unneeded steps, and is never biased
ROWS = 32  # time steps of rollouts for episodes without frames_per_batch
NEXT_VALUE: Key = ("next", "state_value")


class CollectedRollout(NamedTuple):
    """A batch of ``Engine.collect``, and the engine's attributes for it."""

    batch: TensorDict
    hidden: list[Any]
    frames: int
    episodes: Episodes
    env_ids: Array
    results: list[RolloutResult]


class Part(NamedTuple):
    """One rollout of a call, with the values after its last rows, and the first stages of its pipeline."""

    batch: TensorDict
    episodes: Episodes
    last: torch.Tensor | None
    first: list[Stage]


class Choice:
    """The episodes chosen by a rule, by their numbers in the store."""

    def __init__(self, name: RuleName, n: int) -> None:
        self._name, self._n = name, n
        self.rule: Rule
        self.envs: list[int]
        self.numbers: list[int]

    def begin(self, envs: list[int], store: WholeEpisodes) -> None:
        """Start with these environments, and with their episodes in the store."""
        self.rule, self.numbers = make_rule(self._name, self._n, len(envs)), []
        self.envs, self._store, self._place = envs, store, {env: place for place, env in enumerate(envs)}
        self.take([[number] for number in store.held])
        store.new_ends()

    def take(self, steps: Sequence[Sequence[int]]) -> None:
        """Show ended episodes to the rule, time step by time step."""
        num_envs = self._store.num_envs
        for step in steps:
            numbers = {self._place[n % num_envs]: n for n in step if n % num_envs in self._place}
            if not self.rule.complete:
                self.numbers += [numbers[place] for place in self.rule.ended(sorted(numbers))]


class OnDemand:
    """Implements ``collect`` by means of a collector's engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._options = engine, engine.options
        self._source = engine.source
        self.batch: TensorDict | None = None  # of the last call
        self.unreported: Collected | None = None  # not returned yet, because of an error
        self._waiting: tuple[PipelineItem, CollectStats] | None = None  # refused by a hook or buffer
        self._seen = -1  # number of the last rollout in the store
        self._interrupted: Asked | None = None  # the call that an error interrupted
        self._choice: Choice  # of the call for episodes
        self._parts: list[Part] = []  # of the call for steps
        self._rollout: CollectedRollout | None = None  # the next part, still without values of next observations
        self._unkept: CollectedRollout | None = None  # of the call for episodes, not yet in the store
        self._random = False  # the store has random actions

    def collect(self, asked: Asked) -> Collected:
        """See ``BaseCollector.collect_batch``."""
        self._check(asked)
        if self._waiting is None:
            with postponed():
                self._waiting = self._make(asked)
        item, made = self._waiting
        self.batch = item.go_on()
        self._waiting, self._engine.undelivered = None, 0
        return Collected(self.batch, made)

    def _make(self, asked: Asked) -> tuple[PipelineItem, CollectStats]:
        engine, began, before = self._engine, time.perf_counter(), self._engine.discarded_steps
        if self._interrupted != asked or (asked.n_episode is not None and not self._goes_on):
            self._begin_anew(asked)  # otherwise the same call continues after an error
        steps = self._steps if asked.n_episode is None else self._episodes
        if asked.no_grad and asked.render is None:
            done = steps(asked)
        else:
            with self._mode(asked):
                done = steps(asked)
        batch, native, first = done
        made = stats_of_call(
            engine.episodes,
            engine.undelivered,
            time.perf_counter() - began,
            n_discarded_steps=engine.discarded_steps - before,
            n_kept_steps=0 if engine.kept is None else engine.kept.frames_held,
            **native,
        )
        return engine.pipeline.begin(batch, first), made

    def state_dict(self) -> dict[str, Any] | None:
        """Return episodes that are kept for the next call, as plain data."""
        if self._unkept is not None:
            self._keep(self._unkept)
        kept = self._engine.kept
        if kept is None:
            return None
        return {"kept": kept.state_dict(), "goes_on": self._goes_on, "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore ``state_dict()``."""
        self._waiting, self._interrupted, self._parts, self._rollout, self._unkept = None, None, [], None, None
        self._engine.kept, self._engine.undelivered = None, 0
        if state is not None:
            self._store().load_state_dict(state["kept"])
            self._seen = self._engine.rollouts if state["goes_on"] else -1
            self._random = state["random"]

    # --- steps ------------------------------------------------------------------------------------

    def _steps(self, asked: Asked) -> tuple[TensorDict, dict[str, Any], list[Stage]]:
        """``n_step``: collect one rollout of all groups, or as many rollouts of first-ready groups as necessary.

        Returns:
            the batch, further statistics, and the first stages of its pipeline.
        """
        engine, n, parts = self._engine, asked.n_step or 0, self._parts
        while self._rollout is not None or not parts or (self._source.overlaps and engine.undelivered < n):
            if self._rollout is None:
                self._rollout = self._roll_out(asked, n - engine.undelivered)
            parts.append(self._part(asked, self._rollout))
            self._rollout = None
        values = [part.last for part in parts if part.last is not None]
        native = {"last_value_est": torch.cat(values)} if values else {}
        batch, engine.episodes = joined(parts), join_episodes([part.episodes for part in parts])
        self._parts, self._interrupted = [], None  # not before: if joining them fails, the next call tries again
        return batch, native, [stage for part in parts for stage in part.first]

    def _roll_out(self, asked: Asked, missing: int) -> CollectedRollout:
        """Collect one of the rollouts for ``missing`` steps."""
        n, limit = asked.n_step or 0, None
        others: dict[str, Any] = {"bootstrap": asked.values}
        if self._source.overlaps:
            rows = self._rows(-(-n // self._engine.num_envs))
            others |= {"rows": rows, "batches": self._source.rollouts_for(missing, rows)}
        else:
            limit, others["rows"] = n, -(-n // max(len(self._living()), 1))
        return self._collect(asked, limit, **others)

    def _collect(self, asked: Asked, limit: int | None, **others: Any) -> CollectedRollout:
        engine, before = self._engine, self._engine.frames
        batch, hidden = engine.collect(limit, acting="random" if asked.random else None, **others)
        frames = engine.frames - before
        engine.undelivered += frames
        return CollectedRollout(batch, hidden, frames, engine.episodes, engine.env_ids, engine.results)

    def _part(self, asked: Asked, rollout: CollectedRollout) -> Part:
        """Return the visible part of a rollout. If the policy fails to return values, the next call repeats this."""
        engine, batch, hidden, n = self._engine, rollout.batch, rollout.hidden, asked.n_step or 0
        if not self._source.overlaps and n < batch.numel() and VALID not in batch.keys(True):
            batch.set(VALID, self._valid(batch, n))
        try:
            last = add_next_values(batch, rollout.results, engine.source.pool) if asked.bootstrap else None
        except (WorkerDied, CollectorTimeout):  # the lost server had the recurrent states
            self._give_up("worker_died", rollout.frames)
            self._rollout = None
            raise
        first = engine.pipeline.watching(batch, rollout.env_ids, hidden)
        batch = split_trajectories(batch) if self._options.split_trajs else batch
        return Part(batch.exclude(*hidden) if hidden else batch, rollout.episodes, last, first)

    def _valid(self, batch: TensorDict, n: int) -> torch.Tensor:
        """Return a mask of the first ``n`` cells, in order of time."""
        counters = self._engine.source.pool.counters
        living = np.concatenate([np.full(a.info.num_envs, not a.dropped) for a in counters])
        time_dim = batch.names.index("time")
        T = batch.numel() // len(living)
        place = np.arange(T) * living.sum() + (np.cumsum(living) - 1)[:, None]  # [environments, T]
        valid = torch.from_numpy((place < n) & living[:, None])
        if self._engine.joins_time:  # groups follow each other
            valid = torch.cat(valid.chunk(len(counters)), dim=1)
        lead = [size for dim, size in enumerate(batch.shape) if dim != time_dim]
        return valid.reshape(*lead, -1).movedim(-1, time_dim).to(batch.device or "cpu")

    # --- episodes ---------------------------------------------------------------------------------

    def _episodes(self, asked: Asked) -> tuple[TensorDict, dict[str, Any], list[Stage]]:
        """``n_episode``: collect rollouts until the rule is complete."""
        engine, store = self._engine, self._store()
        keep = self._keeps(asked)
        while self._unkept is not None or not self._choice.rule.complete:
            if self._unkept is None:
                rule = partial(self._rule_of, keep=keep)
                self._unkept = self._collect(asked, None, closes=False, rows=self._rows(ROWS), rule=rule)
            self._keep(self._unkept)
            if self._living() == self._choice.envs:
                self._choice.take(store.new_ends())
            else:
                self._choice.begin(self._living(), store)
            store.check_ends("collect(n_episode=...)", resets=False)
        group = store.take(self._choice.numbers)
        engine.batches, engine.in_batch = engine.batches + 1, False
        self._interrupted = None
        if not keep:
            store.clear("surplus")
            self._seen = -1  # episodes that continue from there are not complete
        if asked.special:
            self._give_up_ahead()
        hidden = [key for key in engine.hidden if key in group.batch.keys(True)]
        engine.episodes, engine.undelivered = self._ended_in(group.batch), group.frames
        native = {"rule": asked.rule or RULE, "biased": self._choice.rule.biased}
        visible = group.batch.exclude(*hidden) if hidden else group.batch
        return visible, native, engine.pipeline.showing

    def _keep(self, rollout: CollectedRollout) -> None:
        """Put the rollout into the store. After an error, the next call repeats this."""
        self._store().add(rollout.batch, rollout.env_ids)
        self._unkept = None
        self._engine.undelivered -= rollout.frames
        self._engine.pipeline.skip(rollout.batch, rollout.env_ids)
        self._seen = self._engine.rollouts

    def _begin_anew(self, asked: Asked) -> None:
        """Discard the remains of an earlier call, unless this call keeps them."""
        engine, kwargs = self._engine, dict(asked.reset_kwargs or {})
        if self._parts or self._rollout is not None or self._unkept is not None:
            self._give_up("interrupted", engine.undelivered)
            self._parts, self._rollout, self._unkept = [], None, None
        self._interrupted = asked
        gone = asked.special and self._give_up_ahead()
        if asked.n_episode is not None:
            store, keep = self._store(), self._keeps(asked)
            if asked.random != self._random:
                store.clear("policy_changed")
            elif asked.special or not keep:
                store.clear("surplus")
            goes_on = keep and self._goes_on and asked.random == self._random and not asked.special
            if not goes_on:
                store.flush()
                self._give_up_ahead()
            gone = not goes_on or gone
            self._random, self._choice = asked.random, Choice(asked.rule or RULE, asked.n_episode)
        if asked.reset_before_collect or (kwargs and gone):
            engine.reset(None, kwargs)
        elif gone:
            self._reset_running()
        if asked.n_episode is not None:
            self._choice.begin(self._living(), self._store())
            self._seen = engine.rollouts

    def _give_up_ahead(self) -> bool:
        """Discard rollouts that first-ready workers have started for other calls; return whether there were any."""
        if not self._source.ahead_of_user:
            return False
        self._source.abandon("surplus")
        self._seen = -1
        return True

    def _reset_running(self) -> None:
        """Reset environments in the middle of an episode."""
        pool = self._engine.source.pool
        parts = [part for part in pool.call(Call(running)) if part]
        ids = [int(pool.counters[n].env_ids[i]) for part in parts for n, which in part.items() for i in which]
        try:
            self._engine.reset(ids, {})
        except UnsupportedEnv:  # some environments cannot be reset alone
            self._engine.reset(None, {})

    def _keeps(self, asked: Asked) -> bool:
        return (asked.surplus or ("keep" if self._source.overlaps else "discard")) == "keep"

    @property
    def _goes_on(self) -> bool:
        """Whether no rollout was collected since the last one in the store, or ``_unkept``."""
        return self._seen == self._engine.rollouts - (self._unkept is not None)

    def _store(self) -> WholeEpisodes:
        engine, options = self._engine, self._options
        if engine.kept is None:
            engine.views.show_hidden()  # flags that the environment does not have mark the ends of episodes
            engine.kept = WholeEpisodes(
                num_envs=engine.num_envs,
                layout=options.traj_format or "cat",
                rule=None,
                on_policy_only=options.trajectories is not None and options.trajectories.on_policy_only,
                done_key=ENDED if options.traj_done_key is None else TRAJ_DONE,
            )
        return engine.kept

    def _living(self) -> list[int]:
        """Return the numbers of all environments that were not dropped."""
        return [int(i) for a in self._engine.source.pool.counters if not a.dropped for i in a.env_ids]

    def _rule_of(self, group: int, *, keep: bool) -> Rule | None:
        """Return a rule by which a group knows by itself which episodes are needed; None: it cannot know."""
        rule, counters = self._choice.rule, self._engine.source.pool.counters
        if AGENT in counters[group].info.observation_specs:
            return None
        if len(counters) == 1:
            return NobodyLetGo(copy.deepcopy(rule)) if keep else copy.deepcopy(rule)
        if isinstance(rule, PerEnv) and not keep and not any(counts.dropped for counts in counters):
            return rule.part(counters[group].env_ids.tolist())
        return None

    def _ended_in(self, batch: TensorDict) -> Episodes:
        """Return the records of the episodes in a batch of whole episodes."""
        pieces = find_pieces(batch if batch.ndim > 1 else batch.unsqueeze(0), ENDED)
        rows = pieces.rows[pieces.first + pieces.length - 1]

        def column(key: Any) -> Array:
            array: Array = batch.get(key).detach().cpu().numpy()
            return array.reshape(batch.numel(), -1)

        reward_key = self._engine.source.pool.counters[0].info.reward_key
        rewards = column(reward_key)[pieces.rows, 0].astype(np.float64)
        flags = [column(next_of(flag))[rows, 0] for flag in (TERMINATED, TRUNCATED)]
        returns = np.add.reduceat(rewards, pieces.first)
        traj_id, env_id = pieces.traj_id, pieces.traj_id % self._engine.num_envs
        infos = _infos_at(batch, rows) if self._options.info is not False else None
        return Episodes(traj_id, env_id, returns, pieces.length, flags[0], flags[1], infos)

    def _give_up(self, reason: str, frames: int) -> None:
        """Count collected frames that will not be delivered."""
        self._engine.discard(reason, frames)
        self._engine.undelivered -= frames

    # --- parts ------------------------------------------------------------------------------------

    def _check(self, asked: Asked) -> None:
        options, info = self._options, self._engine.source.pool.counters[0].info
        if asked.bootstrap:
            columns = self._engine.layout().columns
            check_bootstrap(columns, tuple(carried_specs(info)), reset_when_done=options.reset_when_done)
        if options.trajs_per_batch and asked.n_step:
            raise BadOption(
                "trajs_per_batch makes batches of episodes, and n_step of steps: use collect(n_episode=...)"
            )
        if options.compact_obs and (asked.n_episode or asked.bootstrap):
            raise BadOption("compact_obs leaves out next observations, which n_episode and bootstrap need")
        if asked.n_episode and not options.reset_when_done:
            raise BadOption("reset_when_done=False has one episode of each environment in a batch: use n_step")
        if asked.n_episode and self._engine.joins_time:
            raise BadOption(f"collect(n_episode=...) {NEEDS_ENVS}")
        if asked.n_episode and options.return_same_td:
            raise BadOption("return_same_td: episodes are put together in new memory every time; leave it out")

    def _rows(self, rows: int) -> int | None:
        """Return the time steps of one of several rollouts; None: as many as in a batch."""
        return None if self._options.frames_per_batch else min(rows, ROWS)

    @contextmanager
    def _mode(self, asked: Asked) -> Iterator[None]:
        pool = self._engine.source.pool
        if not asked.no_grad:
            self._enable_grad(True)
        if asked.render is not None:
            pool.call(Call(Worker.render, (asked.render,)))
        try:
            yield
        finally:
            if asked.render is not None:
                pool.call(Call(Worker.render, (None,)))
            if not asked.no_grad:
                self._enable_grad(False)

    def _enable_grad(self, on: bool) -> None:
        pool = self._engine.source.pool
        pool.call(EnableGrad(on))
        if pool.server is not None:
            pool.server.ask("enable_grad", on)


def joined(parts: Sequence[Part]) -> TensorDict:
    """Join rollouts side by side, or one after another if their shapes differ."""
    batches = [part.batch for part in parts]
    first = batches[0]
    if len(batches) == 1:
        return first
    equalize(batches)
    whole: TensorDict
    if len({batch.shape for batch in batches}) == 1 and first.ndim > 1:
        whole = torch.cat(batches, next(dim for dim, name in enumerate(first.names) if name != "time"))
        whole.names = first.names
    else:
        whole = torch.cat([time_last(batch).reshape(-1) for batch in batches])
        whole.names = ["time"]
    return whole


def add_next_values(batch: TensorDict, results: Sequence[RolloutResult], pool: WorkerPool) -> torch.Tensor:
    """Add ``("next", "state_value")`` to a rollout: the policy's values of next observations, 0 in all other rows.

    Returns:
        the values after the last rows, ``[*lead, 1]``; 0 where an episode has terminated there.
    """
    groups = [(pool.counters[result.group].info.num_envs, result.group, result.values) for result in results]
    num_envs, time_dim = sum(B for B, *_ in groups), batch.names.index("time")
    T = batch.shape[time_dim]
    if batch.numel() != num_envs * T:
        raise BadOption("bootstrap: the batch is concatenated over time, and its last rows are not last: leave cat out")
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


def _infos_at(batch: TensorDict, rows: Array) -> Array:
    """Return the ``info_records`` of these rows of the flattened batch."""
    from tensordict import is_leaf_nontensor

    flat, columns = batch["next", INFO].reshape(-1), dict[Key, Any]()
    for key in flat.keys(True, True, is_leaf=is_leaf_nontensor):
        column = flat.get(key)
        values = column.cpu().numpy()[rows] if torch.is_tensor(column) else [column[row].data for row in rows.tolist()]
        columns[key if isinstance(key, tuple) else (key,)] = values
    return info_records(columns, len(rows))
