"""What a worker's handle wants of whoever waits for workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from muster.sources.detached import DetachedWorker


class Restarted(Exception):
    """The worker that was asked has a successor, who has to be asked again."""


class Patience(Protocol):
    """Waits for workers in a crew's name; see ``supervision``."""

    def wait_for(self, handle: DetachedWorker, ready: Callable[[], bool]) -> None:
        """Until something is so.

        Raises:
            Restarted: see there.
            Exception: what became of the worker instead.
        """

    def told(self, handle: DetachedWorker, method: str, args: Sequence[Any]) -> None:
        """A worker has followed a call."""

    def restarted(self, handle: DetachedWorker) -> None:
        """A worker has a successor."""

    def ends(self, handle: DetachedWorker) -> None:
        """A worker is to do nothing more: halt it, and enter its steps."""
