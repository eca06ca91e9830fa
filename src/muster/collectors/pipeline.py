"""The stages between a collected batch and the user: whole episodes, splitting, hooks, postproc,
replay buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.collectors.episode_hook import EpisodeHook
from muster.collectors.options import CollectorOptions
from muster.collectors.replay_buffer import ReplaySink
from muster.episodes.plain import Place, is_tensordict, to_plain
from muster.episodes.record import NO_EPISODES, Episodes
from muster.episodes.recount import Recount
from muster.episodes.segment import ENDED, split_trajectories
from muster.episodes.whole import Envs, EpisodeGroup, WholeEpisodes
from muster.keys import TRAJ_DONE, Key
from muster.recording.writer import Recorder
from muster.rollout.hooks import call_hook
from muster.utils.containers import is_several
from muster.utils.interrupts import allowed, postponed
from muster.utils.tracebacks import trimmed

if TYPE_CHECKING:
    from tensordict import TensorDict

Stage = Callable[[Any], Any]
KEPT = "The batch is kept: the next call goes on with it."


class PipelineItem:
    """An item that passes through stages.

    After an error or Ctrl-C it continues with the stage that failed.

    Ctrl-C takes effect in the user's functions. Writing to a recording or a buffer is completed
    first.

    Args:
        made: the item before the first stage; None: its rows are in the buffer already.

    Attributes:
        item: what the last complete stage has made of it.
        frames: number of its valid steps.
        episodes: records of the episodes that ended in it.
    """

    def __init__(
        self,
        made: TensorDict | None,
        stages: Iterable[Stage],
        frames: int,
        episodes: Episodes,
    ) -> None:
        self.frames = frames
        self.episodes = episodes
        self._made = made
        self.item: Any = made
        self._stages: Any = deque(stages) if stages else ()

    def go_on(self) -> Any:
        """Run the remaining stages, and return the resulting item."""
        if self._stages:
            with trimmed, postponed():
                while self._stages:
                    self.item = self._stages[0](self.item)
                    self._stages.popleft()
        return self.item

    def state_dict(self, added: Callable[[Any], int]) -> dict[str, Any]:
        """Return the item as it is after the last complete stage, as plain data that shares no
        memory with it.

        If a postproc has made something else than a TensorDict of it, the state is that of before
        the first stage.

        Args:
            added: see ``ReplaySink.added``.
        """
        item: Any = self.item
        left: int | None = len(self._stages)
        if item is not None and not is_tensordict(item):
            item = self._made
            left = None
        return {
            "frames": self.frames,
            "item": None if item is None else to_plain(item.clone()),
            "left": left,
            "added": added(item),
            "episodes": self.episodes.state_dict(),
        }


class _Put(NamedTuple):
    """A batch to be processed, with ``frames`` valid steps, in which ``episodes`` ended."""

    batch: TensorDict
    hidden: Sequence[Key]
    envs: Envs
    frames: int
    episodes: Episodes


class Pipeline:
    """Turns collected batches into the items that iteration yields.

    After an error of a user's function the item is kept, and the next call continues with this
    function. If joining or splitting episodes fails, the batch is kept, and ``go_on`` tries again.

    Args:
        num_envs: number of environments over all groups.
        recount: makes the records of the episodes in batches of whole episodes.
        pad_id: trajectory id of padding.

    Attributes:
        episodes: episode assembler of ``trajs_per_batch`` and ``replay_write_mode="trajectory"``.
        episode_hook: hook of ``on_episode_done``.
        sink: writer to the replay buffer.
        recorder: writer to disk.
        writes: False: items are already in the replay buffer.
        ready: items to yield before anything else is collected.
        needs_flags: uses ``("next", "done")``, which an environment may not show.
        is_direct: batches are yielded as they were collected.
        needs_batches: False: nothing uses the batches, whose rows are in a ``ReplayMemory``.
    """

    def __init__(
        self,
        options: CollectorOptions,
        num_envs: int,
        recount: Recount,
        *,
        pad_id: int = -1,
    ) -> None:
        self._options = options
        self._pad_id = pad_id
        done_key = ENDED if options.traj_done_key is None else TRAJ_DONE
        self.episodes = _assembler(options, num_envs, done_key)
        self.episode_hook: EpisodeHook | None = None
        if options.on_episode_done is not None:
            self.episode_hook = EpisodeHook(options.on_episode_done, num_envs, done_key)
        self.sink: ReplaySink | None = None
        # rows of a ReplayMemory are written before they come here
        has_sink = options.replay_buffer is not None and not options.has_memory
        if has_sink:
            self.sink = ReplaySink(options.replay_buffer, extend=options.extend_buffer)
        self.writes = self.sink is not None
        self.recorder = _recorder(options)
        self.recount = recount
        self.ready: list[PipelineItem] = []
        self._put: deque[_Put] = deque()  # batches that were not processed yet
        self._unsorted = False  # there may be complete groups of episodes
        self._hidden: Sequence[Key] = ()  # keys of the last batch
        self.needs_flags = bool(
            options.joins_episodes or options.split_trajs or options.on_episode_done
        )
        buffered = (
            has_sink or options.on_batch is not None or options.postproc is not None
        )
        self.is_direct = not (self.needs_flags or buffered or self.recorder is not None)
        self.needs_batches = not (options.has_memory and self.is_direct)

    def leave_to_nodes(self) -> None:
        """Nodes write items into the replay buffer before they arrive here."""
        self.writes = False

    @property
    def frames_ready(self) -> int:
        """Number of frames in ``ready``."""
        return sum(item.frames for item in self.ready)

    @property
    def frames_held(self) -> int:
        """Number of frames in ``ready``, in episodes that are kept, and in batches that were not
        processed yet.
        """
        waiting = sum(put.frames for put in self._put) + (
            self.episodes.frames_held if self.episodes else 0
        )
        return self.frames_ready + waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be yielded before something else is collected."""
        return not (self.ready or self._put or self._unsorted)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that no group of episodes will contain, by reason."""
        return self.episodes.dropped if self.episodes else {}

    def retire(self, envs: Sequence[int]) -> None:
        """Stop waiting for episodes of environments without further rows."""
        if self.episodes is not None:
            self.episodes.retire(envs)

    def put(
        self,
        batch: TensorDict,
        hidden: Sequence[Key],
        envs: Envs = None,
        *,
        frames: int = 0,
        episodes: Episodes = NO_EPISODES,
    ) -> None:
        """Process a batch of ``frames`` steps, of ``envs`` (None: all).

        The results are appended to ``ready``.

        Args:
            hidden: keys to remove.
            episodes: records of the episodes that ended in it.

        Raises:
            BadOption: no episode of an environment ends; see ``WholeEpisodes.check_ends``. The
                batch was processed.
        """
        self._put.append(_Put(batch, hidden, envs, frames, episodes))
        self.go_on()

    def go_on(self) -> None:
        """Process the batches that were put."""
        while self._put:
            batch, self._hidden, envs, frames, ended = self._put[0]
            if self.episodes is not None:
                self.episodes.add(batch, envs)
                self._unsorted = True
            else:
                item = (
                    split_trajectories(batch, pad_id=self._pad_id)
                    if self._options.split_trajs
                    else batch
                )
                self._make_ready(
                    item, self.watching(batch, envs, self._hidden), frames, ended
                )
            self._put.popleft()
        if self._unsorted:
            assert self.episodes is not None
            groups = _complete(self.episodes)
            for group in groups:
                self._make_ready(
                    group.batch,
                    self.showing,
                    group.frames,
                    self.recount.of(group.batch),
                )
            if self.episodes.rule is None and not groups:
                # iteration yields None for each batch: a learner goes on while episodes are long
                self.ready.append(PipelineItem(None, (), 0, NO_EPISODES))
            self._unsorted = False
            self.episodes.check_ends(
                self._options.joins_episodes, resets=self._options.reset_at_each_iter
            )

    def _make_ready(
        self, item: TensorDict, first: Sequence[Stage], frames: int, episodes: Episodes
    ) -> None:
        shown = item.exclude(*self._hidden) if self._hidden else item
        self.ready.append(self.begin(shown, first, frames, episodes))

    def take(self) -> Any:
        """Remove and return the next ready item, which has passed through all stages; None if it was
        written to a buffer.
        """
        item = self.ready.pop(0).item
        return None if self._options.replay_buffer is not None else item

    def begin(
        self, item: TensorDict, first: Sequence[Stage], frames: int, episodes: Episodes
    ) -> PipelineItem:
        """Make an item that passes through postproc, ``on_batch``, the recorder and the replay
        buffer.

        Args:
            first: earlier stages, from ``watching`` or ``showing``.
            frames: number of valid steps in the item.
            episodes: records of the episodes that ended in the item.
        """
        return PipelineItem(item, [*first, *self._stages], frames, episodes)

    def resumed(
        self, state: Mapping[str, Any], place: Place, *, whole: bool
    ) -> PipelineItem:
        """Restore the state of an item, which is a batch of whole episodes or not."""
        item = None if state["item"] is None else place.take(state["item"])
        first = (
            self.showing if whole else []
        )  # ``begin_anew`` has forgotten other episodes
        stages = [*first, *self._stages]
        left = (
            len(stages)
            if state["left"] is None
            else min(index(state["left"]), len(stages))
        )
        if item is not None and state["added"] and self.sink is not None:
            self.sink.continue_with(item, index(state["added"]))
        episodes = Episodes.from_state(state["episodes"])
        return PipelineItem(
            item, stages[len(stages) - left :], index(state["frames"]), episodes
        )

    def state_of(self, item: PipelineItem) -> dict[str, Any]:
        """Return the state of an item, for ``resumed``."""
        return item.state_dict(self._added)

    def watching(
        self, batch: TensorDict, envs: Envs = None, hidden: Sequence[Key] = ()
    ) -> list[Stage]:
        """Record rows that are delivered as they are.

        Return the stage that shows their ended episodes to the hook.
        """
        if (hook := self.episode_hook) is None:
            return []
        episodes = hook.watch(batch, envs, hidden)
        return [partial(_pass_to, lambda _: hook.show(episodes))]

    @property
    def showing(self) -> list[Stage]:
        """The stage that shows the episodes of an item of whole episodes to the hook, and adds its
        columns.
        """
        return [] if self.episode_hook is None else [self.episode_hook.whole]

    def close(self) -> None:
        """Close the recorder, if it was made here."""
        if self.recorder is not None and self.recorder is not self._options.record:
            self.recorder.close()

    def skip(self, batch: TensorDict, envs: Envs = None) -> None:
        """Record a batch that is delivered elsewhere: episodes with rows in it will not be
        complete.
        """
        for each in (self.episodes, self.episode_hook):
            if each is not None:
                each.skip(batch, envs)

    def state_dict(self) -> dict[str, Any]:
        """Return everything collected and not yielded, as plain data that shares no memory with it."""
        self.go_on()
        ready = [self.state_of(item) for item in self.ready]
        return {
            "episodes": None if self.episodes is None else self.episodes.state_dict(),
            "ready": ready,
        }

    def load_state_dict(self, state: Mapping[str, Any], place: Place) -> None:
        """Restore ``state_dict()``. ``on_episode_done`` is called for later episodes only."""
        if self.episodes is not None:
            self.episodes.load_state_dict(state["episodes"], place)
        if self.episode_hook is not None:
            self.episode_hook.begin_anew()
        self.ready = []
        self._unsorted = False
        self._put.clear()
        for saved in state["ready"]:
            self.ready.append(
                self.resumed(saved, place, whole=self.episodes is not None)
            )

    # --- parts ------------------------------------------------------------------------------------

    def _added(self, item: Any) -> int:
        return 0 if self.sink is None else self.sink.added(item)

    @property
    def _stages(self) -> list[Stage]:
        """The stages of every item."""
        options, stages = self._options, list[Stage]()
        if options.postproc is not None:
            stages.append(partial(_process, options.postproc))
        if options.on_batch is not None:
            stages.append(partial(_show, options.on_batch))
        if self.recorder is not None:
            stages.append(partial(_pass_to, self.recorder.write))
        if self.sink is not None and self.writes:
            stages.append(partial(_pass_to, self.sink.write))
        return stages


def _assembler(
    options: CollectorOptions, num_envs: int, done_key: Key
) -> WholeEpisodes | None:
    """Return what joins episodes over batches; None: batches are not joined."""
    if not options.joins_episodes:
        return None
    wanted = options.trajectories
    return WholeEpisodes(
        None if wanted is None else wanted.per_batch,
        num_envs=num_envs,
        layout=options.traj_format or "cat",
        rule=None if wanted is None else wanted.rule,
        on_policy_only=wanted is not None and wanted.on_policy_only,
        done_key=done_key,
    )


def _complete(episodes: WholeEpisodes) -> list[EpisodeGroup]:
    """Return the groups of episodes that are complete: without a rule, one group of all."""
    if episodes.rule is not None:
        return episodes.groups()
    return [episodes.take(episodes.held)] if episodes.held else []


def _process(postproc: Stage, item: Any) -> Any:
    with allowed():
        processed = postproc(item)
    return item if processed is None else processed


def _show(on_batch: Callable[[Any], object], item: Any) -> Any:
    with allowed():
        call_hook("on_batch", on_batch, item, advice=KEPT)
    return item


def _pass_to(function: Callable[[Any], Any], item: Any) -> Any:
    function(item)
    return item


def _recorder(options: CollectorOptions) -> Recorder | None:
    """Return the recorder of a collector: the user's, or a new one for a directory."""
    if options.record is None or isinstance(options.record, Recorder):
        return options.record
    given = options.create_env_fn
    envs = list(given) if is_several(given) else [given]
    known: dict[str, Any] = {
        "env": envs[0]
        if isinstance(envs[0], str) and envs.count(envs[0]) == len(envs)
        else None
    }
    known["seed"] = options.seed
    return Recorder(
        options.record,
        meta={name: value for name, value in known.items() if value is not None},
    )
