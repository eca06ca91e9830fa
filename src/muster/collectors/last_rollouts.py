"""What is known of the rollouts that were collected last, and of the episodes that ended in them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muster.episodes.curve import EpisodeCurve
from muster.episodes.record import NO_EPISODES, Episodes, PendingEpisodes, join_episodes
from muster.episodes.summary import EpisodeWindow
from muster.keys import Key
from muster.memory.specs import Array
from muster.observing.stats import CaptureStats
from muster.rollout.marks import Final
from muster.utils.interrupts import postponed
from muster.weights.publish import PolicyWeights
from muster.workers.counters import FrameCounters
from muster.workers.messages import RolloutResult

# batches whose records are on their way from a device at the same time
MOST_UNREAD = 4
# batches, or episodes of one, whose records are here, and are added to the statistics together
MOST_TOGETHER = 64


class LastRollouts:
    """The rollouts of the last batch.

    Attributes:
        results: their results, by group.
        hidden: keys of the batch that only the pipeline uses.
        contributors: their groups.
        env_ids: numbers of their environments.
        lag: number of batches by the age of their weights in publications.
    """

    def __init__(self, counters: Sequence[FrameCounters], path: str) -> None:
        self._counters = counters
        self._first_path = path
        self.results: list[RolloutResult] = []
        self.hidden: list[Key] = []
        self.contributors: list[int] = []
        self.env_ids: Array = np.concatenate([counts.env_ids for counts in counters])
        self.lag: Counter[int] = Counter()
        # number of publishes when ``repeat`` has found the age of the weights; -1: not yet
        self._publishes = -1
        self._repeated = 0

    def repeat(self, weights: PolicyWeights) -> None:
        """Take the same results again, of rollouts of one group."""
        if weights.publishes != self._publishes:
            (result,) = self.results
            self._repeated = self._lag_of(result, weights)
            self._publishes = weights.publishes
        self.lag[self._repeated] += 1

    def _lag_of(self, result: RolloutResult, weights: PolicyWeights) -> int:
        """Return the age of the weights of a result, which its group has now."""
        lag = weights.lag(result.version)
        counts = self._counters[result.group]
        if counts.lag != lag:
            counts.acted_with_lag(lag)
        return lag

    @property
    def path(self) -> str:
        """How the policy was called; before the first rollout, how it will be."""
        return self.results[0].path if self.results else self._first_path

    @property
    def capture(self) -> CaptureStats | None:
        """Statistics of the groups' graphs; None: rollouts are not recorded."""
        parts = [
            result.capture for result in self.results if result.capture is not None
        ]
        return CaptureStats.of_all(parts)

    @property
    def finals(self) -> list[tuple[Array, Sequence[Final]]]:
        """``RolloutResult.finals``, with the global numbers of the environments."""
        return [
            (self._counters[result.group].env_ids, result.finals)
            for result in self.results
        ]

    def replace(
        self, results: list[RolloutResult], hidden: list[Key], weights: PolicyWeights
    ) -> tuple[int, list[Episodes]]:
        """Take the results of the next rollouts in place of these.

        Return their number of frames, and the episodes that ended in them.
        """
        most = 0
        frames = 0
        episodes = []
        groups = []
        for result in results:
            groups.append(result.group)
            frames += result.frames
            if result.episodes is None:  # its group was dropped
                continue
            if result.episodes is not NO_EPISODES:
                episodes.append(result.episodes)
            most = max(most, self._lag_of(result, weights))
        if groups != self.contributors:
            self.contributors = groups
            self.env_ids = np.concatenate(
                [self._counters[number].env_ids for number in groups]
            )
        self.results = results
        self._publishes = -1
        self.hidden = hidden
        self.lag[most] += 1
        return frames, episodes


class EndedEpisodes:
    """The episodes that have ended: those of the last batch, and statistics of all.

    Records are added to the statistics when these are read, or when there are many: adding each by
    itself takes several times as long, and some may be on their way from a device.

    Attributes:
        collected: those of the last batch that was collected.
        shown: those of the last batch that the user got.
    """

    def __init__(self) -> None:
        self._window = EpisodeWindow()
        self._curve = EpisodeCurve()
        # not in the statistics yet, with the number of frames until then
        self._unread: deque[tuple[int, Episodes]] = deque()
        self._reading = threading.Lock()  # other threads look at ``stats()``, too
        self.collected: Episodes = NO_EPISODES
        self.shown: Episodes = NO_EPISODES

    def collect(self, episodes: Sequence[Episodes], frames: int) -> None:
        """Take the episodes of the next batch. ``frames``: number of collected frames until now."""
        if not episodes:
            self.collected = NO_EPISODES
            return
        collected = join_episodes(episodes)
        self.collected = collected
        self._unread.append((frames, collected))
        if isinstance(collected, PendingEpisodes):
            self._read(MOST_UNREAD)
            return
        many = max(len(self._unread), len(collected.length))
        if many > MOST_TOGETHER:
            self._read(0)

    @property
    def window(self) -> EpisodeWindow:
        """Statistics of the newest."""
        if self._unread:
            self._read(0)
        return self._window

    @property
    def curve(self) -> EpisodeCurve:
        """Returns over frames."""
        if self._unread:
            self._read(0)
        return self._curve

    def _read(self, most: int) -> None:
        """Add the records that have arrived to the statistics; wait for them if there are more than
        ``most``.
        """
        unread = self._unread
        read = []
        with postponed(), self._reading:  # the user's thread may be the one that reads
            while unread and (len(unread) > most or not unread[0][1].would_wait):
                frames, episodes = unread.popleft()
                if len(episodes):
                    read.append(episodes)
                    self._curve.add(frames, episodes)
            # those of some groups may have infos, and those of others none
            are_alike = len({episodes.info is None for episodes in read}) == 1
            for episodes in [join_episodes(read)] if are_alike else read:
                self._window.add(episodes)

    def join(self, episodes: Episodes) -> None:
        """Take these for the episodes of the last batch, whose steps were collected one by one."""
        self.collected = episodes

    def show(self, episodes: Episodes) -> None:
        """The user gets a batch with these episodes."""
        self.shown = episodes

    def show_collected(self, episodes: Episodes) -> None:
        """The user gets the batch that was collected last."""
        self.collected = episodes
        self.shown = episodes

    def state_dict(self) -> dict[str, Any]:
        """Return the shown episodes and the statistics of the newest as plain data."""
        return {"episodes": self.shown.state_dict(), "window": self.window.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.window.load_state_dict(state["window"])
        self.show_collected(Episodes.from_state(state["episodes"]))
