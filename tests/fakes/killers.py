"""Kills at random times while a collector collects.

``MUSTER_KILLS`` in the environment is the number of random kills of nodes of each kind.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

RANDOM_KILLS = int(os.environ.get("MUSTER_KILLS", "12"))


class Killer:
    """Kills processes of a collector at random times, in a thread of its own, while batches are
    collected.

    Args:
        kills: number of them.
        longest_s: between two.
        kill: kills one process of the collector, chosen with the generator; returns whether it was
            still there.

    Attributes:
        done: kills so far.
    """

    def __init__(
        self,
        kills: int,
        rng: random.Random,
        longest_s: float,
        kill: Callable[[Any, random.Random], bool],
    ) -> None:
        self.kills, self.done = kills, 0
        self._rng, self._longest_s, self._kill = rng, longest_s, kill
        self._over = threading.Event()

    def until_done(self, collector: Any) -> Iterator[Any]:
        """The batches of the collector, until all kills are done or it has ended."""
        thread = threading.Thread(target=self._run, args=(collector,), daemon=True)
        thread.start()
        try:
            for batch in collector:
                yield batch
                if not thread.is_alive():
                    return
        finally:
            self._over.set()
            thread.join()

    def _run(self, collector: Any) -> None:
        while self.done < self.kills and not self._over.wait(
            self._rng.uniform(0, self._longest_s)
        ):
            self.done += self._kill(collector, self._rng)
