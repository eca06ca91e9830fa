"""Who answers workers that wait: the inference server, or the caller of a vector environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muster.workers.mailbox import Mailbox


class Responder(Protocol):
    """Answers the questions of workers.

    A worker that waits for an answer is not hanging, however long that takes.

    Attributes:
        mailbox: where workers ask.
    """

    mailbox: Mailbox

    def waits(self, worker: int) -> bool:
        """Return whether a worker waits for an answer."""

    def check(self) -> None:
        """Raise an error if there will be no more answers, or one takes too long."""

    def excuse(self, seconds: float) -> None:
        """Take so many seconds out of what the present answer has taken: this process was stopped."""

    def lost(self, worker: int, groups: Sequence[int]) -> None:
        """Forget the question of a lost worker with these groups."""

    def close(self) -> None:
        """Release what it holds; may be called again."""
