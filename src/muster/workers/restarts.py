"""What is remembered of a worker: whether it gets on, how often it was started again, and when it is the next time."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.errors import EnvError
from muster.workers.messages import GroupInfo, Report

if TYPE_CHECKING:
    from muster.workers.failures import Where

BACK_OFF = (0.0, 0.1, 0.5, 2.0)  # seconds before a restart, by restarts without a batch
FRUITLESS = 3  # restarts without a batch are enough


@dataclass
class Record:
    """Of one worker.

    Attributes:
        signs, since: of life, and since when (``time.monotonic``) they are these.
        restarts: times within the last minute.
        fruitless: restarts since its last batch.
        revive_at: when it will be started again; None: nobody has to.
    """

    signs: tuple[Any, ...] = ()
    since: float = 0.0
    restarts: deque[float] = field(default_factory=deque)
    fruitless: int = 0
    revive_at: float | None = None

    def may_restart(self, most: int | None) -> bool:
        """Within the budget, ``most`` per minute; one more is counted."""
        now = time.monotonic()
        while self.restarts and self.restarts[0] < now - 60:
            self.restarts.popleft()
        self.restarts.append(now)
        self.fruitless += 1
        return most is None or (len(self.restarts) <= most and self.fruitless <= FRUITLESS)

    def plan(self) -> None:
        """A restart; later, if others have not helped."""
        self.revive_at = time.monotonic() + BACK_OFF[min(self.fruitless, len(BACK_OFF)) - 1]


def news(group: int, error: Exception | None = None) -> Report:
    """About no order: who can be given any has changed, at the worker of a group."""
    return Report(0, group, lost=True, error=error)


def unlike(where: Where, expected: GroupInfo, got: GroupInfo) -> EnvError:
    """The error for environments of a node that came later, and are not as many as was taken for granted."""
    error = EnvError(
        f"{where} has come with {got.num_envs} environments in a batch of shape {got.batch_shape} ({got.name}), where "
        f"{expected.num_envs} in {expected.batch_shape} ({expected.name}) were expected: with min_nodes, all entries "
        f"of create_env_fn have to make equally many."
    )
    error.worker, error.phase = where.worker, "construct"
    return error
