"""What becomes of a batch before it is yielded: whole episodes, splitting, postproc, replay buffer, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muster.collectors.options import CollectorOptions
from muster.keys import TRAJ_DONE, Key
from muster.sinks.episodes import Envs, WholeEpisodes
from muster.sinks.plain import from_plain, to_plain
from muster.sinks.replay_buffer import ReplaySink
from muster.sinks.rows import ENDED
from muster.sinks.split import split_trajectories

if TYPE_CHECKING:
    from tensordict import TensorDict


class Outlet:
    """Turns a collected batch into what iteration yields.

    Args:
        num_envs: over all groups.
        pad_id: trajectory id of padding.

    Attributes:
        episodes: the assembler of ``trajs_per_batch``.
        sink: of the replay buffer.
        ready: what is to be yielded before anything else is collected; None stands for what is in a buffer already.
        needs_flags: it looks at ``("next", "done")``, which an environment may not show.
    """

    def __init__(self, options: CollectorOptions, num_envs: int, *, pad_id: int = -1) -> None:
        self._options, self._pad_id = options, pad_id
        self.episodes = (
            WholeEpisodes(
                options.trajs_per_batch,
                num_envs=num_envs,
                layout=options.traj_format or "cat",
                rule=options.traj_rule or "fair",
                on_policy_only=options.on_policy_only,
                done_key=ENDED if options.traj_done_key is None else TRAJ_DONE,
            )
            if options.trajs_per_batch
            else None
        )
        self.sink: ReplaySink | None = None
        if options.replay_buffer is not None:
            self.sink = ReplaySink(options.replay_buffer, extend=options.extend_buffer)
        self.ready: list[TensorDict | None] = []
        self.needs_flags = bool(options.trajs_per_batch or options.split_trajs)

    @property
    def frames_held(self) -> int:
        """Frames of episodes that wait to be complete."""
        return self.episodes.frames_held if self.episodes else 0

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames that no group of episodes will show, by reason."""
        return self.episodes.dropped if self.episodes else {}

    def put(self, batch: TensorDict, hidden: Sequence[Key], envs: Envs = None) -> None:
        """Take a batch, of ``envs`` (None: all); what comes of it is ``ready``. ``hidden`` keys are taken out."""
        made: list[TensorDict] = [batch]
        if self.episodes is not None:
            made = [group.batch for group in self.episodes.push(batch, envs)]
        elif self._options.split_trajs:
            made = [split_trajectories(batch, pad_id=self._pad_id)]
        self.ready += [item.exclude(*hidden) if hidden else item for item in made]

    def take(self) -> Any:
        """The next of what is ready, as it is to be yielded; None in the place of what a buffer took."""
        item: Any = self.ready.pop(0)
        if item is None:
            return None
        if self._options.postproc is not None:
            processed = self._options.postproc(item)
            item = item if processed is None else processed
        if self.sink is None:
            return item
        self.sink.write(item)
        return None

    def state_dict(self) -> dict[str, Any]:
        """What has been collected and not yielded, as plain data that shares no memory with it."""
        ready = [to_plain(item.clone()) for item in self.ready if item is not None]
        return {"episodes": None if self.episodes is None else self.episodes.state_dict(), "ready": ready}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``."""
        if self.episodes is not None:
            self.episodes.load_state_dict(state["episodes"])
        self.ready = []
        for plain in state["ready"]:
            item = from_plain(plain)
            item.names = [*[None] * (item.ndim - 1), "time"]
            self.ready.append(item)
