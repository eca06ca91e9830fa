"""The engine of a collector: groups, schedule, batch views, pipeline and counters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muster.collectors.batch_options import joins_time
from muster.collectors.batch_views import BatchViews
from muster.collectors.collecting_time import CollectingTime
from muster.collectors.few_rows import FEW, FewRows
from muster.collectors.into_memory import MemoryWriter
from muster.collectors.last_rollouts import EndedEpisodes, LastRollouts
from muster.collectors.ledger import Ledger
from muster.collectors.options import CollectorOptions, check_seeds
from muster.collectors.pipeline import Pipeline, PipelineItem
from muster.collectors.stepped import SteppedBatch
from muster.collectors.use import CollectorUse
from muster.episodes.plain import Place
from muster.episodes.record import NO_EPISODES, Episodes
from muster.episodes.recount import Recount
from muster.errors import BadOption
from muster.keys import Key
from muster.memory.replay import ReplayMemory
from muster.memory.slots import Layout
from muster.memory.specs import Array
from muster.observing.stats import CollectorStats
from muster.protocols import Policy
from muster.rng import seeds_of
from muster.rollout.group import Group
from muster.utils.interrupts import allowed, checkpoint, postponed
from muster.utils.tracebacks import trimmed
from muster.weights.publish import PolicyWeights
from muster.workers.messages import RolloutResult
from muster.workers.requests import Reset, Seed
from muster.workers.schedule import CollectRequest, FilledSlot, Schedule
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from tensordict import TensorDict


class CollectedRollout(NamedTuple):
    """One rollout of every group, or of those that were ready first.

    Attributes:
        batch: the batch; None: its rows are in the memory only.
        hidden: keys in it that only the pipeline uses.
        frames: number of valid steps.
        episodes: records of the episodes that ended.
        env_ids: numbers of the environments.
        results: results by group.
    """

    batch: Any
    hidden: list[Key]
    frames: int
    episodes: Episodes
    env_ids: Array
    results: list[RolloutResult]


class NextBatch:
    """The call for the next batch.

    1. ``make`` has the schedule collect, and makes the batch of the full slots.
    2. If making it fails (no memory for a copy, for instance), the slots stay here: their frames are
       in flight, and no other counter includes them.
    3. The same request makes the batch of these slots; before another request, ``give_up`` discards
       them.

    Where rollouts go to a ``ReplayMemory``, they are written before the batch is made.

    Attributes:
        is_partial: the batch consists of several rollouts, and more of them follow.
    """

    def __init__(
        self, source: Schedule, weights: PolicyWeights, views: BatchViews
    ) -> None:
        self._source = source
        self._weights = weights
        self._views = views
        self._reuses = views.reuses
        # the request of the slots, in what it has to be equal to continue
        self._like: object = None
        self._filled: FilledSlot | None = None
        self._is_written = False
        self.is_partial = False

    @property
    def frames(self) -> int:
        """Number of frames of full slots whose batch could not be made yet."""
        return 0 if self._filled is None else self._filled.frames

    def make(
        self,
        request: CollectRequest,
        discard: Callable[[int], None],
        *,
        memory: MemoryWriter | None = None,
        shown: bool = True,
    ) -> tuple[FilledSlot, Any]:
        """Return the next full slots, and their batch.

        Args:
            discard: called with the number of frames that were kept for another request.
            memory: writes the rollouts; None: they go to no memory.
            shown: False: make no batch, but free the slots.
        """
        self.is_partial = not request.closes
        like = request.limit, request.rows, request.closes, request.bootstrap
        if self._filled is not None and self._like != like:
            discard(self.give_up())
        filled = self._filled
        if filled is None:
            self._like = like
            if self._source.overlaps:
                self._weights.catch_up()
                filled = self._source.collect(request)
            else:
                # the same for all groups, whatever is published meanwhile
                request.version = self._weights.hold()
                try:
                    reused = self._views.reused if self._reuses else None
                    filled = self._source.collect(request, reused)
                finally:
                    self._weights.release()
            self._filled = filled
            self._is_written = False
        if memory is not None and not self._is_written:
            memory.write(filled)
            self._is_written = True
        batch = None
        if shown:
            batch = self._views.batch(filled)
        else:
            for ring, slot in filled.slots:
                ring.give_back(slot)
        self._filled = None
        return filled, batch

    def give_up(self) -> int:
        """Release the slots whose batch could not be made, and return their number of frames."""
        frames = self.frames
        if self._filled is not None:
            self._views.give_up(self._filled)
        self._filled = None
        return frames

    def end_batch(self) -> None:
        """End a batch of several rollouts."""
        self.is_partial = False

    def load(self, *, is_partial: bool) -> None:
        """Restore the state, without full slots."""
        self.give_up()
        self.is_partial = is_partial


class Engine:
    """Collects batches, and passes them through the pipeline.

    Args:
        source: schedule whose workers collect; owned by the engine.
        weights: weights of the policy.
        stacked: batches have a leading dimension for the groups.
        cat_dim: dimension along which the rollouts of a batch are concatenated; None: they are not.
        local: the worker, if it is in this process.

    Attributes:
        memory: writes the rollouts into the user's ``ReplayMemory``; None: there is none.
        acting: policy of the last rollouts, "policy" or "random".
        ledger: what became of every frame.
        last: the rollouts that were collected last.
        ended: the episodes that have ended.
        time: the time of collecting, with the timeline.
        next_batch: the call for the next batch.
        stepped: the batch of ``extend_buffer=False`` under way.
    """

    def __init__(
        self,
        options: CollectorOptions,
        source: Schedule,
        weights: PolicyWeights,
        *,
        stacked: bool,
        cat_dim: int | None = None,
        local: Worker | None = None,
    ) -> None:
        self.options = options
        self.source = source
        self.weights = weights
        self.local = local
        pool = source.pool
        with_infos = options.info is not False
        first = pool.counters[0].info
        recount = Recount(
            pool.num_envs,
            first.reward_key,
            with_infos=with_infos,
            agents=first.agent_rewards,
        )
        self.pipeline = Pipeline(options, pool.num_envs, recount)
        self.views = BatchViews(
            options, stacked=stacked, cat_dim=cat_dim, hidden=self.pipeline.needs_flags
        )
        self.memory: MemoryWriter | None = None
        if isinstance(options.replay_buffer, ReplayMemory):
            self.memory = MemoryWriter(
                options.replay_buffer, pool, options.devices.storing
            )
        self._few_rows: FewRows | None = None
        rows, rest = divmod(options.frames, pool.num_envs)
        if (
            self.memory is not None
            and local is not None
            and len(pool.counters) == 1
            and rest == 0
            and 1 <= rows <= FEW
            and not self.pipeline.needs_batches
        ):
            self._few_rows = FewRows(
                rows, local, self.memory, pool.counters[0], pool.numbers, source.layout
            )
        is_shown = self.pipeline.needs_batches and not pool.changes_memory
        if local is None and is_shown:
            source.prepare_ahead(self.views)
        self.next_batch = NextBatch(source, weights, self.views)
        self.stepped = SteppedBatch()
        self.ledger = Ledger(source, self.next_batch)
        self.ledger.hold(self.pipeline)
        self.ledger.hold(self.stepped)
        self.time = CollectingTime()
        self.ended = EndedEpisodes()
        self.acting = "random" if options.init_random_frames else "policy"
        path = local.policies[self.acting].path if local is not None else ""
        self.last = LastRollouts(pool.counters, path)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self.source.pool.num_envs

    @property
    def rows(self) -> int:
        """Number of time steps of a batch."""
        return self.options.rows_per_batch(self.source.sharing)

    @property
    def joins_time(self) -> bool:
        """Whether rows of different environments follow each other in a batch."""
        shape = self.source.pool.counters[0].info.batch_shape
        return joins_time(self.options, self.views.cat_dim, shape)

    @property
    def place(self) -> Place:
        """Where the batches are."""
        return self.views.place(self.source.pool.counters[0].info.device)

    @property
    def groups(self) -> list[Group]:
        """The groups in this process, as they are between two rollouts: one that stays open ends."""
        if self.local is None:
            return []
        for group in self.local.groups:
            group.leave()
        return self.local.groups

    @property
    def policy(self) -> Policy:
        """The policy adapted to the loop."""
        assert self.local is not None
        return self.local.policies["policy"]

    def act_with(self, policy: Policy) -> None:
        """Use another policy from the next rollout on."""
        assert self.local is not None
        self.local.policies["policy"] = policy

    def go_on_with(self, copied: Policy) -> None:
        """Use a copy of the policy from the next rollout on; see ``Worker.go_on_with``."""
        assert self.local is not None
        self.local.go_on_with(copied)

    def iterate(
        self,
        use: CollectorUse,
        check_open: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[], None] | None,
    ) -> Generator[Any, None, None]:
        """Yield batches until ``total_frames``.

        Args:
            use: entered for each batch, until it is ready.
            check_open: raises if the collector is closed.
            before: called before collecting, when the user is done with the previous batch.
            after: called after collecting.
        """
        total = self.options.total_frames
        pipeline = self.pipeline
        while total < 0 or self.ledger.counted < total or not pipeline.is_empty:
            if not use.enter_at_once():
                use.wait()
            try:
                with trimmed:
                    check_open()
                    if not pipeline.is_empty:
                        pipeline.go_on()  # continue with batches that an error has kept
                    if not pipeline.ready:
                        before()
                        self.put_batch()
                        if after is not None:
                            after()
                    if pipeline.ready:
                        self.ended.show(pipeline.ready[0].episodes)
                        pipeline.ready[0].go_on()
            finally:
                use.leave()
            # In no ``with`` or ``try``: code that closes the generator could lose an interrupt.
            if pipeline.ready:
                # the pipeline has no reference to it while the next one is collected
                yield pipeline.take()
        for group in [] if self.local is None else self.local.groups:
            group.check_earlier(wait=True)
        # a Ctrl-C that came while the last batch was used; after the loop the program may have no
        # handler
        checkpoint()

    def put_batch(self) -> None:
        """Collect a batch, and put it through the hooks into the pipeline."""
        limit = self.options.frames
        if self.options.total_frames > 0:
            left = self.options.total_frames - self.ledger.counted
            limit = min(limit, left + self.stepped.frames)
        if self.options.pre_collect_hook is not None:
            self.options.pre_collect_hook()
        if not self.options.extend_buffer:
            self._put_stepped(limit)
            return
        if self._few_rows is not None and self._stays_open(self._few_rows, limit):
            self._put_rows(self._few_rows)
            return
        with postponed():
            checkpoint()
            hook = self.options.post_collect_hook
            batch, hidden, frames, episodes, *_ = self.collect(
                limit,
                shown=self.pipeline.needs_batches or hook is not None,
                counts=True,
            )
            if self.pipeline.is_direct and hook is None and not hidden:
                self.pipeline.ready.append(PipelineItem(batch, (), frames, episodes))
                return
            try:
                if hook is not None:
                    with allowed():
                        hook(batch)
            finally:
                self.pipeline.put(
                    batch, hidden, self.last.env_ids, frames=frames, episodes=episodes
                )

    def collect(
        self,
        limit: int | None,
        *,
        closes: bool = True,
        acting: str | None = None,
        shown: bool = True,
        remembered: bool = True,
        counts: bool = False,
        **others: Any,
    ) -> CollectedRollout:
        """Collect one rollout of every group. To be called within ``postponed()``.

        Args:
            limit: maximum number of valid steps.
            closes: the rollout ends a batch.
            acting: "policy" or "random"; None: as the options say.
            shown: a batch is made.
            remembered: the rollouts go to the ``ReplayMemory``, if there is one.
            counts: the frames count towards ``total_frames``.
            **others: see ``CollectRequest``.
        """
        began = time.perf_counter_ns()
        self.acting = acting or self.acting
        if self.local is None:
            others = {"batches": self._batches_left()} | others
        is_chosen = self.next_batch.is_partial or acting is not None
        request = CollectRequest(
            (lambda ahead: self.acting) if is_chosen else self._who_acts,
            limit=limit,
            closes=closes,
            spans=self.time.timeline.running,
            **others,
        )
        memory = self.memory
        if memory is not None and remembered:
            if not memory.is_open:
                self._open(memory, self.acting if is_chosen else self._who_acts(0))
        elif memory is not None:
            memory.forget()  # the rows that follow do not continue those that were written
            memory = None
        filled, batch = self.next_batch.make(
            request, self._discard_unmade, memory=memory, shown=shown
        )
        hidden = []
        if batch is not None and self.views.shows_hidden:
            hidden = self.views.hidden_keys(filled.layout)
        cut_short = 0
        if self.source.preempts:
            cells = sum(filled.layout.T - result.rows for result in filled.results)
            cut_short = cells * filled.layout.B
        frames = self._note(
            filled.results, hidden, closes=closes, counts=counts, cut_short=cut_short
        )
        if self.local is None:
            self.ledger.retire_dropped()
        # else the time of the rollouts is that of collecting
        if self.local is None or self.time.timeline.running:
            self.time.end(began, filled.results, overlaps=self.source.overlaps)
        return CollectedRollout(
            batch,
            hidden,
            frames,
            self.ended.collected,
            self.last.env_ids,
            filled.results,
        )

    def _open(self, memory: MemoryWriter, acting: str) -> None:
        """Open the memory before the first rollout that it gets, in which ``acting`` acts: another
        policy would make a first call that no rollout uses.
        """
        memory.open(self._layout_for(acting), self.rows)

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """See ``Collector.set_post_collect_hook``."""
        if (
            hook is not None
            and self.pipeline.sink is not None
            and not self.pipeline.writes
        ):
            raise BadOption(
                "post_collect_hook: nodes write batches into the replay buffer, so that none passes"
                " through this process. Pass the hook to the constructor"
            )
        self.options = dataclasses.replace(self.options, post_collect_hook=hook)

    def _stays_open(self, rows: FewRows, limit: int) -> bool:
        """Return whether the next batch is made in a rollout that stays open: it is whole, and
        nothing else is under way or watched.
        """
        if (
            limit != self.options.frames
            or self.options.post_collect_hook is not None
            or self.time.timeline.running
        ):
            return False
        if rows.is_open:  # any other request would have ended the rollout
            return True
        return (
            not self.next_batch.is_partial
            and not self.source.has_begun
            and not self.next_batch.frames
            and rows.is_possible
        )

    def _put_rows(self, rows: FewRows) -> None:
        """Collect a few rows into the memory, and put their records into the pipeline."""
        with postponed():
            checkpoint()
            policy = self._who_acts(0)
            assert self.memory is not None
            if not self.memory.is_open:
                self._open(self.memory, policy)
            version = self.weights.hold()
            try:
                results = rows.collect(policy, version)
            finally:
                self.weights.release()
            if results is not rows.usual:
                self._put_results(results)
                return
            item = rows.item
            if self.last.results is results:
                self.last.repeat(self.weights)
            else:
                self.last.replace(results, [], self.weights)
            self.ledger.collected(item.frames, closes=True, counts=True)
            ended = rows.ended
            if ended is not NO_EPISODES:
                self.ended.collect([ended], self.ledger.frames)
                item = PipelineItem(None, (), item.frames, self.ended.collected)
            elif self.ended.collected is not NO_EPISODES:
                self.ended.collect((), self.ledger.frames)
            self.pipeline.ready.append(item)

    def _put_results(self, results: Sequence[RolloutResult]) -> None:
        """Count the results of a batch of few rows, and put its records into the pipeline.

        Raises:
            BaseException: the error that has interrupted it; Ctrl-C, if both have.
        """
        pool = self.source.pool
        counters = pool.counters[0]
        error: BaseException | None = None
        for result in results:
            counters.add(result)
            if result.error is not None:
                error = error or result.error
                continue
            counters.deliver(result.frames)
            frames = self._note([result], [], closes=True, counts=True)
            self.pipeline.ready.append(
                PipelineItem(None, (), frames, self.ended.collected)
            )
            if result.warnings:
                pool.warn_later(result)
        if error is not None:
            try:
                raise error
            finally:
                del error, results, result
        if pool.unwarned:
            pool.give_warnings()

    def _note(
        self,
        results: list[RolloutResult],
        hidden: list[Key],
        *,
        closes: bool,
        counts: bool,
        cut_short: int = 0,
    ) -> int:
        """Note the results of rollouts, and return their number of frames; see
        ``Ledger.collected``.
        """
        frames, episodes = self.last.replace(results, hidden, self.weights)
        self.ledger.collected(frames, closes=closes, counts=counts, cut_short=cut_short)
        if episodes or self.ended.collected is not NO_EPISODES:
            self.ended.collect(episodes, self.ledger.frames)
        return frames

    def layout(self) -> Layout:
        """Return the layout of rollouts of the policy.

        A policy that was never called is called once for it.
        """
        return self._layout_for("policy")

    def _layout_for(self, acting: str) -> Layout:
        """Return the layout of rollouts in which this policy acts, and lets it make its first call
        if it did not act last.
        """
        with self.weights.acting() as version:
            return self.source.layout(acting, version)

    def blank(self) -> TensorDict:
        """Return a batch of zeros."""
        layout = dataclasses.replace(self.layout(), T=self.rows)
        return self.views.blank(layout, self.source.pool.counters[0].info.device)

    @postponed()
    def reset(self, index: Sequence[int] | int | None, kwargs: dict[str, Any]) -> None:
        """See ``Collector.reset``."""
        given = (
            np.arange(self.num_envs)
            if index is None
            else np.atleast_1d(np.asarray(index))
        )
        if given.dtype == bool and given.shape == (self.num_envs,):
            given = np.flatnonzero(given)
        chosen = given.tolist()
        for i in chosen:
            if type(i) is not int or not 0 <= i < self.num_envs:
                raise BadOption(
                    f"reset(index={index}): environments are numbered 0 to {self.num_envs - 1}"
                )
        which: dict[int, list[int]] = {}
        for number, counts in enumerate(self.source.pool.counters):
            first = int(counts.env_ids[0])
            if inside := [
                i - first for i in chosen if first <= i < first + len(counts.env_ids)
            ]:
                which[number] = inside
        self.source.pool.call(Reset(which, check=True))
        self.source.pool.call(Reset(which, kwargs or None))
        if self.pipeline.episodes is not None:
            self.pipeline.episodes.flush(chosen)

    @postponed()
    def set_seed(self, seed: int | Sequence[int], *, static: bool) -> int:
        """See ``Collector.set_seed``."""
        seed = check_seeds(seed, self.num_envs, static=static)
        self.source.pool.call(Seed(seed, static))
        if self.pipeline.episodes is not None:
            self.pipeline.episodes.flush()
        last = 0 if static else self.num_envs - 1
        return seeds_of(seed, [last], 0)[0]

    def lose(
        self,
        batch: TensorDict,
        env_ids: Array,
        frames: int,
        reason: str = "interrupted",
    ) -> None:
        """Discard a collected batch that the pipeline does not have: its episodes will not be
        complete.
        """
        self.pipeline.skip(batch, env_ids)
        self.ledger.discard(reason, frames)

    def end_batch(self) -> None:
        """End a batch of several rollouts whose number was not known before."""
        self.ledger.end_batch()
        self.next_batch.end_batch()

    def stats(self, *, with_ready: bool = False) -> CollectorStats:
        """Return counters, times and rates.

        ``with_ready``: batches that are complete count as delivered.
        """
        counters = self.source.pool.counters
        env, policy, copied, total = (
            sum(getattr(counts.timing, part) for counts in counters) / 1e9
            for part in ("env", "policy", "copy", "total")
        )
        workers = self.source.pool.worker_stats()
        terms = self.ledger.terms()
        ready = self.ledger.frames_ready if with_ready else 0
        frames = terms.delivered + ready
        window = self.ended.window
        return CollectorStats(
            frames=frames,
            executed=terms.executed,
            discarded=terms.discarded,
            in_flight=terms.in_flight - ready,
            batches=self.ledger.batches,
            episodes=window.count,
            return_mean=window.mean("returns"),
            length_mean=window.mean("lengths"),
            success_rate=window.mean("successes"),
            frames_per_s=self._rate(frames, total),
            env_s=env,
            policy_s=policy,
            copy_s=copied,
            rest_s=max(0.0, total - env - policy - copied),
            wait_s=self.source.pool.waited / 1e9,
            policy_path=self.last.path,
            policy_version=self.weights.version,
            policy_lag=dict(sorted(self.last.lag.items())),
            slots=self.source.slots(),
            restarts=sum(worker.restarts for worker in workers),
            unseen=sum(counts.unseen for counts in counters),
            cut_short=self.ledger.cut_short,
            workers=workers,
            inference=server.stats()
            if (server := self.source.pool.server) is not None
            else None,
            engine=self.source.pool.engine,
            completed=window.frames,
            written=self._written(terms.delivered),
            capture=self.last.capture,
        )

    def _written(self, delivered: int) -> int:
        """Return the number of frames that the replay buffer has got."""
        if self.memory is not None:
            return self.memory.frames
        if self.options.replay_buffer is None:
            return 0
        return delivered - self.ledger.extra

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode statistics and the steps of the batch under way as plain data."""
        return {
            **self.ledger.state_dict(),
            **self.ended.state_dict(),
            "in_batch": self.next_batch.is_partial,
            "acting": self.acting,
            "stepped": self.stepped.state_dict(),
            "written": None if self.memory is None else self.memory.frames,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.ledger.load_state_dict(state)
        self.ended.load_state_dict(state)
        self.acting = str(state["acting"])
        self.stepped.load_state_dict(state["stepped"], self.place)
        if self.memory is not None:
            self.memory.forget()
            written = state.get("written")  # earlier states have none
            if written is not None:
                self.memory.count_from(int(written))
        if self._few_rows is not None:
            self._few_rows.forget()
        self.next_batch.load(is_partial=bool(state["in_batch"]))

    def source_state(self) -> dict[str, Any]:
        """Return the undelivered rollouts as plain data; see ``Schedule.state_dict``."""
        if self.source.overlaps:
            self.weights.catch_up()
            return self.source.state_dict(None)
        with self.weights.acting() as version:
            return self.source.state_dict(version)

    def _discard_unmade(self, frames: int) -> None:
        """Discard the slots of another request, whose batch could not be made."""
        self.ledger.discard_uncollected("interrupted", frames)
        self.reset(None, {})  # the rows that follow would continue episodes with a gap

    def _rate(self, frames: int, in_rollouts: float) -> float:
        """Return frames per second: of collecting time, or of the rollouts alone if they run in
        this thread.
        """
        seconds = in_rollouts if self.local is not None else self.time.elapsed / 1e9
        return frames / seconds if seconds else 0.0

    def _who_acts(self, ahead: int) -> str:
        """Return which policy acts in the batch after ``ahead`` others, and set ``acting``."""
        random = self.ledger.frames + ahead * self.options.frames < (
            self.options.init_random_frames or 0
        )
        self.acting = "random" if random else "policy"
        return self.acting

    def _batches_left(self) -> int | None:
        """Return the number of batches up to ``total_frames``, at least 1 since one is requested;
        None: no limit.
        """
        left = self.options.total_frames - self.ledger.counted
        return (
            None
            if self.options.total_frames < 0
            else max(1, left // self.options.frames)
        )

    @postponed()
    def _put_stepped(self, limit: int) -> None:
        """``extend_buffer=False``: collect each time step as a rollout, and write it to the buffer
        before the next.
        """
        sink = self.pipeline.sink
        assert sink is not None
        batch = self.stepped
        batch.write(sink)  # a step that the buffer has refused
        while (
            rollout := self.collect_step(batch.steps, limit, counts=True)
        ) is not None:
            step = rollout.batch.squeeze(rollout.batch.names.index("time"))
            batch.add(step, rollout.frames, rollout.episodes)
            batch.write(sink)
        self.ended.join(batch.episodes)
        self.pipeline.ready.append(PipelineItem(None, (), 0, batch.episodes))
        batch.clear()

    def collect_step(
        self, number: int, limit: int, *, counts: bool = False
    ) -> CollectedRollout | None:
        """Collect time step ``number`` of a batch of ``limit`` frames as a rollout; None after the
        last one.

        Args:
            counts: the frames count towards ``total_frames``.
        """
        begin = number * self.num_envs
        if begin >= limit:
            return None
        end = begin + self.num_envs
        frames = min(limit - begin, self.num_envs)
        return self.collect(frames, closes=end >= limit, counts=counts)
