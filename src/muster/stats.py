"""What a collector can say about itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.trajectories import Episodes

WINDOW = 100  # episodes over which returns and lengths are averaged


@dataclass(frozen=True)
class CollectorStats:
    """A snapshot. Frames are environment steps: ``executed = frames + sum(discarded) + in_flight``.

    Attributes:
        frames: delivered in batches.
        executed: stepped, whatever became of them.
        discarded: stepped and not delivered, by reason.
        in_flight: stepped and kept for later: the rows of a batch that an error cut short, and with
            ``trajs_per_batch`` episodes that are not complete or wait for others.
        batches, episodes: delivered; episodes count with the batch in which they ended.
        return_mean, length_mean: over the last 100 episodes; None before the first.
        frames_per_s: delivered frames per second of collecting (the user's own time does not count).
        env_s, policy_s, copy_s, rest_s: where that time went; env and policy from every 16th step.
        policy_path: how actions are computed: "module", "torch executor", "numpy executor", "random", ...
        policy_version: of the weights that acted last.
        slots: blocks of memory in use, by state.
    """

    frames: int
    executed: int
    discarded: Mapping[str, int]
    in_flight: int
    batches: int
    episodes: int
    return_mean: float | None
    length_mean: float | None
    frames_per_s: float
    env_s: float
    policy_s: float
    copy_s: float
    rest_s: float
    policy_path: str
    policy_version: int | str
    slots: Mapping[str, int]


class EpisodeWindow:
    """The last episodes, for means."""

    def __init__(self) -> None:
        self.count = 0
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._lengths: deque[int] = deque(maxlen=WINDOW)

    def add(self, episodes: Episodes) -> None:
        self.count += len(episodes)
        self._returns.extend(episodes.episode_return[-WINDOW:].tolist())
        self._lengths.extend(episodes.length[-WINDOW:].tolist())

    @property
    def return_mean(self) -> float | None:
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def length_mean(self) -> float | None:
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "returns": list(self._returns), "lengths": list(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self._returns = deque(state["returns"], maxlen=WINDOW)
        self._lengths = deque(state["lengths"], maxlen=WINDOW)
