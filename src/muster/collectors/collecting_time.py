"""The time of collecting, and the spans of the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable

from muster.observing.timeline import Timeline
from muster.workers.messages import RolloutResult

OWN_TRACK = -1  # timeline track of spans outside of groups


class CollectingTime:
    """The time in which batches are collected.

    Attributes:
        timeline: see ``muster.Timeline``.
        elapsed: nanoseconds of collecting; where workers run while the user has a batch, of all.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.timeline.tracks[OWN_TRACK] = "collector"
        self.elapsed = 0
        self._ended_at = 0  # when the last batch was collected; 0: there was none

    def end(
        self, began: int, results: Iterable[RolloutResult], *, overlaps: bool
    ) -> None:
        """Add the time since ``began``, when collecting these rollouts has begun.

        ``overlaps``: the workers continued since the last batch.
        """
        before = self._ended_at
        now = time.perf_counter_ns()
        self._ended_at = now
        self.elapsed += now - (before if overlaps and before else began)
        timeline = self.timeline
        if timeline.running:
            if before:
                timeline.add("wait", before, began, OWN_TRACK)
            for result in results:
                for span in result.spans:
                    timeline.add(*span)
            timeline.add("collect", began, now, OWN_TRACK)
