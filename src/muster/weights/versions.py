"""Versions of weights: counted by Muster, or by an object of the user's."""

from __future__ import annotations

from typing import Any

REMEMBERED = 10_000  # versions whose age is known


class Versions:
    """Counts publishes.

    Args:
        counter: an object with ``version`` and ``increment_version()`` that counts versions; None:
            the version is the number of publishes.

    Attributes:
        publishes: their number, whatever counts versions.
    """

    def __init__(self, counter: Any = None) -> None:
        self.counter = counter
        self.publishes = 0
        self._count = 0
        self._born: dict[
            int | str, int
        ] = {}  # publishes before each of the last versions

    @property
    def newest(self) -> int | str:
        """The version of the newest publish."""
        version: int | str = (
            self._count if self.counter is None else self.counter.version
        )
        return version

    def increment(self, to: int | None = None) -> int | str:
        """Count a publish, and return its version.

        Args:
            to: the version, where a learner counts them; None: the next one.
        """
        before = self.newest
        if to is not None:
            self.restore(to)
        elif self.counter is not None:
            self.counter.increment_version()
        else:
            self._count += 1
        if not self._born:
            self._born[before] = self.publishes
        self.publishes += 1
        version = self.newest
        self._born[version] = self.publishes
        if len(self._born) > REMEMBERED:
            del self._born[next(iter(self._born))]
        return version

    def restore(self, version: int | str) -> None:
        """Continue from a version."""
        if self.counter is not None:
            self.counter.version = version
        elif isinstance(version, int):
            self._count = version

    def lag(self, version: int | str) -> int:
        """Return the number of publishes since a version.

        An unknown version (from before a load) counts as the newest.
        """
        return self.publishes - self._born.get(version, self.publishes)
