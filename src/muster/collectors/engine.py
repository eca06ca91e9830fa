"""The engine of a collector: groups, schedule, batch views, pipeline and counters."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from muster.collectors.batch_options import joins_time
from muster.collectors.batch_views import BatchViews
from muster.collectors.options import CollectorOptions
from muster.collectors.pipeline import Pipeline, PipelineItem
from muster.episodes.curve import EpisodeCurve
from muster.episodes.plain import Place, to_plain
from muster.episodes.record import NO_EPISODES, Episodes, join_episodes
from muster.episodes.recount import Recount
from muster.episodes.summary import EpisodeWindow
from muster.errors import BadOption
from muster.keys import Key
from muster.memory.slots import Layout
from muster.memory.specs import Array
from muster.observing.stats import CollectorStats
from muster.observing.timeline import Timeline
from muster.protocols import Policy
from muster.rollout.group import Group
from muster.rollout.marks import Final
from muster.utils.interrupts import allowed, checkpoint, postponed
from muster.utils.tracebacks import trimmed
from muster.weights.publish import PolicyWeights
from muster.workers.messages import RolloutResult
from muster.workers.requests import Reset, Seed
from muster.workers.schedule import CollectRequest, FilledSlot, Schedule
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from tensordict import TensorDict

OWN_TRACK = -1  # timeline track of spans outside of groups


class CollectedRollout(NamedTuple):
    """One rollout of every group, or of those that were ready first.

    Attributes:
        batch: the batch.
        hidden: keys in it that only the pipeline uses.
        frames: number of valid steps.
        episodes: records of the episodes that ended.
        env_ids: numbers of the environments.
        results: results by group.
    """

    batch: TensorDict
    hidden: list[Key]
    frames: int
    episodes: Episodes
    env_ids: Array
    results: list[RolloutResult]


@dataclasses.dataclass
class SteppedBatch:
    """A batch of ``extend_buffer=False`` under way: each time step is written to the buffer before
    the next.

    Attributes:
        steps: number of collected time steps.
        frames: number of valid steps in them.
        episodes: records of the episodes that ended in them.
        unwritten: the last time step, if it is not in the buffer yet.
        frames_unwritten: number of its valid steps.
    """

    steps: int = 0
    frames: int = 0
    episodes: Episodes = dataclasses.field(default_factory=lambda: NO_EPISODES)
    unwritten: TensorDict | None = None
    frames_unwritten: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain data."""
        return {
            "steps": self.steps,
            "frames": self.frames,
            "episodes": self.episodes.state_dict(),
            "unwritten": None if self.unwritten is None else to_plain(self.unwritten.clone()),
            "frames_unwritten": self.frames_unwritten,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], place: Place) -> SteppedBatch:
        """Restore ``state_dict()``."""
        unwritten = None if state["unwritten"] is None else place.take(state["unwritten"])
        return cls(
            index(state["steps"]),
            index(state["frames"]),
            Episodes.from_state(state["episodes"]),
            unwritten,
            index(state["frames_unwritten"]),
        )


class FrameHolder(Protocol):
    """Holds collected frames that are not delivered yet."""

    @property
    def frames_held(self) -> int:
        """Number of these frames."""

    @property
    def frames_ready(self) -> int:
        """Number of those that belong to complete batches."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that it will never deliver, by reason."""

    def retire(self, envs: Sequence[int]) -> None:
        """Stop waiting for environments that have no further rows."""


class Engine:
    """Collects batches, and passes them through the pipeline.

    Args:
        source: schedule whose workers collect; owned by the engine.
        weights: weights of the policy.
        stacked: batches have a leading dimension for the groups.
        cat_dim: dimension along which the rollouts of a batch are concatenated; None: they are not.
        local: the worker, if it is in this process.

    Attributes:
        frames, batches: numbers of delivered frames and batches.
        counted: number of frames in batches that count towards ``total_frames``.
        env_ids: numbers of the environments in the last batch.
        episodes: episodes that ended in the last batch that was collected.
        shown_episodes: episodes of the last batch that the user got.
        recount: makes the records of the episodes in batches of whole episodes.
        lag: number of batches by the age of their weights in publications.
        in_batch: the batch of the last rollout is not complete.
        hidden: keys of the last batch that only the pipeline uses.
        is_closed: nothing more can be delivered.
        joins_time: rows of different environments follow each other in a batch.
        rollouts: number of collected rollouts, each of one group or of all.
        results: results of the last rollouts, by group.
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
        self.num_envs = source.pool.num_envs
        self.rows = options.rows_per_batch(source.sharing)
        self.joins_time = joins_time(options, cat_dim, source.pool.counters[0].info.batch_shape)
        with_infos = options.info is not False
        self.recount = Recount(
            self.num_envs, source.pool.counters[0].info.reward_key, with_infos=with_infos
        )
        self.pipeline = Pipeline(options, self.num_envs, self.recount)
        self._holders: list[FrameHolder] = [self.pipeline]
        self._is_direct = self.pipeline.is_direct and options.post_collect_hook is None
        self.views = BatchViews(
            options, stacked=stacked, cat_dim=cat_dim, hidden=self.pipeline.needs_flags
        )
        if local is None:
            source.ahead = self.views
        self.timeline = Timeline()
        self.timeline.tracks[OWN_TRACK] = "collector"
        self.window, self.curve = EpisodeWindow(), EpisodeCurve()
        self.episodes = self.shown_episodes = NO_EPISODES
        self.env_ids: Array = np.arange(self.num_envs)
        self.contributors: list[int] = []  # groups of the last batch
        self.frames = self.counted = self.batches = self.rollouts = 0
        self.results: list[RolloutResult] = []
        self.lag: Counter[int] = Counter()
        self._retired: set[int] = set()  # dropped groups
        self.acting = "random" if options.init_random_frames else "policy"
        self._first_path = local.policies[self.acting].path if local is not None else ""
        self._elapsed = 0  # ns
        self._cut_short = 0
        self._ended_at = 0
        self.in_batch = False
        self.is_closed = False
        self.hidden: list[Key] = []
        self._stepped = SteppedBatch()
        # the request and slots of a batch that is not made yet
        self._unmade: tuple[object, FilledSlot] | None = None

    @property
    def place(self) -> Place:
        """Where the batches are."""
        return self.views.place(self.source.pool.counters[0].info.device)

    @property
    def groups(self) -> list[Group]:
        """The groups in this process."""
        return self.local.groups if self.local is not None else []

    @property
    def policy(self) -> Policy:
        """The policy adapted to the loop; may be replaced between batches."""
        assert self.local is not None
        return self.local.policies["policy"]

    @policy.setter
    def policy(self, policy: Policy) -> None:
        assert self.local is not None
        self.local.policies["policy"] = policy

    def iterate(
        self,
        check_open: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[], None] | None,
    ) -> Generator[Any, None, None]:
        """Yield batches until ``total_frames``.

        Args:
            check_open: raises if the collector is closed.
            before: called before collecting, when the user is done with the previous batch.
            after: called after collecting.
        """
        total = self.options.total_frames
        pipeline = self.pipeline
        while total < 0 or self.counted < total or not pipeline.is_empty:
            with trimmed:
                check_open()
                if not pipeline.is_empty:
                    pipeline.go_on()  # continue with batches that an error has kept
                if not pipeline.ready:
                    before()
                    self.put_batch()
                    if after is not None:
                        after()
            # In no ``with`` or ``try``: code that closes the generator could lose an interrupt.
            if pipeline.ready:
                self.shown_episodes = pipeline.ready[0].episodes
                # the pipeline has no reference to it while the next one is collected
                yield pipeline.take()
        # a Ctrl-C that came while the last batch was used; after the loop the program may have no
        # handler
        checkpoint()

    def put_batch(self) -> None:
        """Collect a batch, and put it through the hooks into the pipeline."""
        limit = self.options.frames
        if self.options.total_frames > 0:
            limit = min(limit, self.options.total_frames - self.counted + self._stepped.frames)
        if self.options.pre_collect_hook is not None:
            self.options.pre_collect_hook()
        if not self.options.extend_buffer:
            self._put_stepped(limit)
            return
        with postponed():
            checkpoint()
            batch, hidden, frames, *_ = self.collect(limit)
            self.counted += frames
            if self._is_direct and not hidden:
                self.pipeline.ready.append(PipelineItem(batch, (), frames, self.episodes))
                return
            try:
                if self.options.post_collect_hook is not None:
                    with allowed():
                        self.options.post_collect_hook(batch)
            finally:
                self.pipeline.put(
                    batch, hidden, self.env_ids, frames=frames, episodes=self.episodes
                )

    def hold_frames(self, holder: FrameHolder) -> None:
        """Count the frames of this object as not delivered yet."""
        self._holders.append(holder)

    def collect(
        self, limit: int | None, *, closes: bool = True, acting: str | None = None, **others: Any
    ) -> CollectedRollout:
        """Collect one rollout of every group. To be called within ``postponed()``.

        Args:
            limit: maximum number of valid steps.
            closes: the rollout ends a batch.
            acting: "policy" or "random"; None: as the options say.
            **others: see ``CollectRequest``.
        """
        began, timeline, before = time.perf_counter_ns(), self.timeline, self.frames
        if timeline.running and self._ended_at:
            timeline.add("wait", self._ended_at, began, OWN_TRACK)
        self.acting = acting or self.acting
        if self.local is None:
            others = {"batches": self._batches_left()} | others
        request = CollectRequest(
            (lambda ahead: self.acting) if self.in_batch or acting else self._who_acts,
            limit=limit,
            closes=closes,
            spans=timeline.running,
            **others,
        )
        self.in_batch = not closes
        filled, batch = self._next(request)
        self.batches += closes
        self.rollouts += 1
        self._note(filled.results)
        if self.local is None:
            self._retire_dropped()
        if self.source.preempts:
            self._cut_short += (
                sum(filled.layout.T - result.rows for result in filled.results) * filled.layout.B
            )
        overlaps = self.source.overlaps and self._ended_at  # the workers continued meanwhile
        since, self._ended_at = self._ended_at if overlaps else began, time.perf_counter_ns()
        self._elapsed += self._ended_at - since
        if timeline.running:
            for result in filled.results:
                for span in result.spans:
                    timeline.add(*span)
            timeline.add("collect", began, self._ended_at, OWN_TRACK)
        self.hidden = self.views.hidden_keys(filled.layout) if self.views.shows_hidden else []
        frames = self.frames - before
        return CollectedRollout(
            batch, self.hidden, frames, self.episodes, self.env_ids, self.results
        )

    def _note(self, results: list[RolloutResult]) -> None:
        """Count the rollouts of a batch, and the episodes that ended in them."""
        counters = self.source.pool.counters
        most = 0
        episodes = []
        groups = [result.group for result in results]
        for result in results:
            self.frames += result.frames
            if result.episodes is not None:  # otherwise its group was dropped
                if result.episodes is not NO_EPISODES:
                    episodes.append(result.episodes)
                counters[result.group].lag = lag = self.weights.lag(result.version)
                most = max(most, lag)
        if groups != self.contributors:
            self.contributors = groups
            self.env_ids = np.concatenate([counters[number].env_ids for number in groups])
        self.results = results
        self.episodes = NO_EPISODES
        if episodes:
            self.episodes = join_episodes(episodes)
            self.window.add(self.episodes)
            self.curve.add(self.frames, self.episodes)
        self.lag[most] += 1

    @property
    def finals(self) -> list[tuple[Array, Sequence[Final]]]:
        """``Group.finals`` of the last batch, with the global numbers of the environments."""
        counters = self.source.pool.counters
        return [(counters[result.group].env_ids, result.finals) for result in self.results]

    def layout(self) -> Layout:
        """Return the layout of rollouts of the policy.

        A policy that was never called is called once for it.
        """
        with self.weights.acting() as version:
            return self.source.layout("policy", version)

    def blank(self) -> TensorDict:
        """Return a batch of zeros."""
        layout = dataclasses.replace(self.layout(), T=self.rows)
        return self.views.blank(layout, self.source.pool.counters[0].info.device)

    @postponed()
    def reset(self, index: Sequence[int] | int | None, kwargs: dict[str, Any]) -> None:
        """See ``Collector.reset``."""
        given = np.arange(self.num_envs) if index is None else np.atleast_1d(np.asarray(index))
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
            if inside := [i - first for i in chosen if first <= i < first + len(counts.env_ids)]:
                which[number] = inside
        self.source.pool.call(Reset(which, check=True))
        self.source.pool.call(Reset(which, kwargs or None))
        if self.pipeline.episodes is not None:
            self.pipeline.episodes.flush(chosen)

    @postponed()
    def set_seed(self, seed: int, *, static: bool) -> int:
        """See ``Collector.set_seed``."""
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise BadOption(f"set_seed({seed!r}): expected an integer of at least 0")
        self.source.pool.call(Seed(seed, static))
        if self.pipeline.episodes is not None:
            self.pipeline.episodes.flush()
        return seed if static else seed + self.num_envs - 1

    def discard(self, reason: str, frames: int) -> None:
        """Count collected frames that will not be delivered."""
        self.source.pool.counters[0].discarded[reason] += frames
        self.frames -= frames

    def lose(
        self, batch: TensorDict, env_ids: Array, frames: int, reason: str = "interrupted"
    ) -> None:
        """Discard a collected batch that the pipeline does not have: its episodes will not be
        complete.
        """
        self.pipeline.skip(batch, env_ids)
        self.discard(reason, frames)

    def end_batch(self) -> None:
        """End a batch of several rollouts whose number was not known before."""
        self.batches += 1
        self.in_batch = False

    def give_up_batch(self) -> None:
        """No further rollouts belong to the batch of the last one."""
        self.in_batch = False

    def show(self, episodes: Episodes) -> None:
        """Set the records of the episodes in the batch that the user gets."""
        self.episodes = self.shown_episodes = episodes

    def stats(self) -> CollectorStats:
        counters = self.source.pool.counters
        env, policy, copied, total = (
            sum(getattr(counts.timing, part) for counts in counters) / 1e9
            for part in ("env", "policy", "copy", "total")
        )
        workers = self.source.pool.worker_stats()
        held = self._frames_held
        frames = self.frames - held - sum(self._dropped().values())
        in_flight, discarded = self.source.in_flight + held + self.frames_unmade, self._discarded()
        if self.is_closed:  # nothing of it can be delivered any more
            discarded["shutdown"] += in_flight
            in_flight = 0
        return CollectorStats(
            frames=frames,
            executed=sum(counts.executed for counts in counters) - self.source.pool.untaken,
            discarded=+discarded,
            in_flight=in_flight,
            batches=self.batches,
            episodes=self.window.count,
            return_mean=self.window.mean("returns"),
            length_mean=self.window.mean("lengths"),
            success_rate=self.window.mean("successes"),
            frames_per_s=self._rate(frames, total),
            env_s=env,
            policy_s=policy,
            copy_s=copied,
            rest_s=max(0.0, total - env - policy - copied),
            wait_s=self.source.pool.waited / 1e9,
            policy_path=self.results[0].path if self.results else self._first_path,
            policy_version=self.weights.version,
            policy_lag=dict(sorted(self.lag.items())),
            slots=self.source.slots(),
            restarts=sum(worker.restarts for worker in workers),
            unseen=sum(counts.unseen for counts in counters),
            cut_short=self._cut_short,
            workers=workers,
            inference=server.stats() if (server := self.source.pool.server) is not None else None,
            engine=self.source.pool.engine,
        )

    def _discarded(self) -> Counter[str]:
        """Return the number of steps that no batch contains, by reason."""
        counted = self._dropped()
        for counts in self.source.pool.counters:
            counted.update(counts.discarded)
        return counted

    @property
    def discarded_steps(self) -> int:
        """The sum of ``_discarded()``."""
        steps = sum(self._dropped().values())
        for counts in self.source.pool.counters:
            steps += sum(counts.discarded.values())
        return steps

    def _dropped(self) -> Counter[str]:
        """Return those of ``_discarded()`` that the source has delivered."""
        dropped = Counter[str]()
        for holder in self._holders:
            dropped.update(holder.dropped)
        return dropped

    @property
    def _frames_held(self) -> int:
        """Number of collected frames that are not delivered yet."""
        return self._stepped.frames_unwritten + sum(holder.frames_held for holder in self._holders)

    @property
    def frames_ready(self) -> int:
        """Number of collected frames in complete batches that are not delivered yet."""
        return sum(holder.frames_ready for holder in self._holders)

    @property
    def frames_unmade(self) -> int:
        """Frames of full slots whose batch could not be made yet; no other counter includes them."""
        return 0 if self._unmade is None else self._unmade[1].frames

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode statistics and the steps of the batch under way as plain data."""
        return {
            "frames": self.frames,
            "counted": self.counted,
            "batches": self.batches,
            "in_batch": self.in_batch,
            "acting": self.acting,
            "stepped": self._stepped.state_dict(),
            "episodes": self.shown_episodes.state_dict(),
            "window": self.window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.frames = index(state["frames"])
        self.counted = index(state["counted"])
        self.batches = index(state["batches"])
        self.in_batch = bool(state["in_batch"])
        self.acting = str(state["acting"])
        self.window.load_state_dict(state["window"])
        self.episodes = self.shown_episodes = Episodes.from_state(state["episodes"])
        self._stepped = SteppedBatch.from_state(state["stepped"], self.place)
        self._give_up_unmade()

    def source_state(self) -> dict[str, Any]:
        """Return the undelivered rollouts as plain data; see ``Schedule.state_dict``."""
        if self.source.overlaps:
            self.weights.catch_up()
            return self.source.state_dict(None)
        with self.weights.acting() as version:
            return self.source.state_dict(version)

    def _next(self, request: CollectRequest) -> tuple[FilledSlot, TensorDict]:
        """Collect the next slots, and return them and their batch.

        If making it fails, an equal request tries again.
        """
        like = request.limit, request.rows, request.closes, request.bootstrap
        if self._unmade is not None and self._unmade[0] != like:
            self.source.pool.counters[0].discarded["interrupted"] += self._give_up_unmade()
            self.reset(None, {})  # the rows that follow would continue episodes with a gap
        if self._unmade is None and self.source.overlaps:
            self.weights.catch_up()
            self._unmade = like, self.source.collect(request)
        elif self._unmade is None:
            # the same for all groups, whatever is published meanwhile
            request.version = self.weights.hold()
            try:
                self._unmade = like, self.source.collect(request, self.views.reused)
            finally:
                self.weights.release()
        filled = self._unmade[1]
        batch = self.views.batch(filled)
        self._unmade = None
        return filled, batch

    def _give_up_unmade(self) -> int:
        """Discard slots whose batch could not be made, and return their number of frames."""
        frames = self.frames_unmade
        if self._unmade is not None:
            self.views.give_up(self._unmade[1])
        self._unmade = None
        return frames

    def _retire_dropped(self) -> None:
        """Stop waiting for episodes of dropped groups."""
        for number, counts in enumerate(self.source.pool.counters):
            if counts.dropped and number not in self._retired:
                self._retired.add(number)
                for holder in self._holders:
                    holder.retire(counts.env_ids.tolist())

    def _rate(self, frames: int, in_rollouts: float) -> float:
        """Return frames per second: of collecting time, or of the rollouts alone if they run in
        this thread.
        """
        seconds = in_rollouts if self.local is not None else self._elapsed / 1e9
        return frames / seconds if seconds else 0.0

    def _who_acts(self, ahead: int) -> str:
        """Return which policy acts in the batch after ``ahead`` others, and set ``acting``."""
        random = self.frames + ahead * self.options.frames < (self.options.init_random_frames or 0)
        self.acting = "random" if random else "policy"
        return self.acting

    def _batches_left(self) -> int | None:
        """Return the number of batches up to ``total_frames``, at least 1 since one is requested;
        None: no limit.
        """
        left = self.options.total_frames - self.counted
        return None if self.options.total_frames < 0 else max(1, left // self.options.frames)

    @postponed()
    def _put_stepped(self, limit: int) -> None:
        """``extend_buffer=False``: collect each time step as a rollout, and write it to the buffer
        before the next.
        """
        batch = self._stepped
        self._write_step(batch)  # one that the buffer has refused
        while (rollout := self.collect_step(batch.steps, limit)) is not None:
            batch.unwritten = rollout.batch.squeeze(rollout.batch.names.index("time"))
            batch.frames_unwritten = rollout.frames
            batch.steps += 1
            batch.frames += rollout.frames
            batch.episodes = join_episodes([batch.episodes, rollout.episodes])
            self.counted += rollout.frames
            self._write_step(batch)
        self.episodes = batch.episodes
        self.pipeline.ready.append(PipelineItem(None, (), 0, batch.episodes))
        self._stepped = SteppedBatch()

    def _write_step(self, batch: SteppedBatch) -> None:
        if batch.unwritten is not None:
            assert self.pipeline.sink is not None
            self.pipeline.sink.buffer.add(batch.unwritten)
        batch.unwritten = None
        batch.frames_unwritten = 0

    def collect_step(self, number: int, limit: int) -> CollectedRollout | None:
        """Collect time step ``number`` of a batch of ``limit`` frames as a rollout; None after the
        last one.
        """
        begin = number * self.num_envs
        if begin >= limit:
            return None
        end = begin + self.num_envs
        return self.collect(min(limit - begin, self.num_envs), closes=end >= limit)
