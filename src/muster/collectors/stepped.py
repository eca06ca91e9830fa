"""``extend_buffer=False``: a batch whose time steps are written to the buffer one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from muster.collectors.replay_buffer import ReplaySink
from muster.episodes.plain import Place, to_plain
from muster.episodes.record import NO_EPISODES, Episodes, join_episodes

if TYPE_CHECKING:
    from tensordict import TensorDict


class SteppedBatch:
    """The batch under way: each time step is written before the next is collected. Holds the frames
    of a step that the buffer has refused (``FrameHolder``).

    Attributes:
        steps: number of collected time steps.
        frames: number of valid steps in them.
        episodes: records of the episodes that ended in them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.frames = 0
        self.episodes: Episodes = NO_EPISODES
        self._unwritten: TensorDict | None = None  # the last time step
        self._frames_unwritten = 0

    def add(self, step: TensorDict, frames: int, episodes: Episodes) -> None:
        """Add a time step, which is not written yet."""
        self.steps += 1
        self.frames += frames
        self.episodes = join_episodes([self.episodes, episodes])
        self._unwritten = step
        self._frames_unwritten = frames

    def write(self, sink: ReplaySink) -> None:
        """Write the time step that the buffer does not have yet, if there is one."""
        if self._unwritten is not None:
            sink.write_step(self._unwritten)
        self._unwritten = None
        self._frames_unwritten = 0

    def clear(self) -> None:
        """Begin another batch."""
        self.steps = 0
        self.frames = 0
        self.episodes = NO_EPISODES

    @property
    def frames_held(self) -> int:
        """Number of frames that are not in the buffer yet."""
        return self._frames_unwritten

    @property
    def frames_ready(self) -> int:
        """None of them belongs to a complete batch."""
        return 0

    @property
    def dropped(self) -> Mapping[str, int]:
        """All frames are written."""
        return {}

    def retire(self, envs: Sequence[int]) -> None:
        """It waits for no episodes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain data."""
        unwritten = self._unwritten
        return {
            "steps": self.steps,
            "frames": self.frames,
            "episodes": self.episodes.state_dict(),
            "unwritten": None if unwritten is None else to_plain(unwritten.clone()),
            "frames_unwritten": self._frames_unwritten,
        }

    def load_state_dict(self, state: Mapping[str, Any], place: Place) -> None:
        """Restore ``state_dict()``."""
        self.steps = index(state["steps"])
        self.frames = index(state["frames"])
        self.episodes = Episodes.from_state(state["episodes"])
        saved = state["unwritten"]
        self._unwritten = None if saved is None else place.take(saved)
        self._frames_unwritten = index(state["frames_unwritten"])
