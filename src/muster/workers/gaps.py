"""Requests that follow a rollout which failed or was lost."""

from __future__ import annotations

from muster.rollout.request import RolloutRequest


class Gaps:
    """The requests of a worker or node that failed or were lost, and were not sent again.

    The sender of requests may not know the last results yet. A request after a failed one is lost,
    too, until both are sent again, in order.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def begin_with(self, number: int) -> None:
        """Note that this request failed or was lost."""
        self._numbers.add(number)

    def follows_one(self, request: RolloutRequest) -> bool:
        """Return whether a request is lost, because the one before it is."""
        self._numbers.discard(request.number)
        if request.after not in self._numbers:
            return False
        self._numbers.add(request.number)
        return True
