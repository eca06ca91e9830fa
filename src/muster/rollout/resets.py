"""The environments of a group that must be reset before its next step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import index
from typing import Any, Protocol

from typing_extensions import Self


class ResetListener(Protocol):
    """What is told of a group's resets, for instance a log of actions."""

    def before_reset(
        self, row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        """Note a reset that comes now; the arguments are those of ``EnvBatch.reset``."""

    def lost_track(self, which: Sequence[int]) -> None:
        """Note that environments have made steps outside of all rollouts."""


class Due:
    """Environments that must be reset before the next step.

    Attributes:
        which: indices of the environments, ascending.
        seeds: seeds by environment; not every environment has one.
        error: error of an early reset that has not been raised yet.
        begun: environments that were reset early and have not been stepped since.
        is_lost: the environments failed: their states, and open turns of agents, are lost.
    """

    def __init__(
        self, which: Sequence[int], seeds: Mapping[int, int] | None = None
    ) -> None:
        self.which = list(which)
        self.seeds = dict(seeds or {})
        self.error: BaseException | None = None
        self.begun: set[int] = set()
        self.is_lost = False

    def add(self, which: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        """Add the environments ``which``."""
        self.which = sorted({*self.which, *which})
        if seeds is not None:
            self.seeds.update(zip(which, seeds, strict=True))

    def lose(self) -> None:
        """Note that the environments failed."""
        self.is_lost = True

    def recover(self) -> bool:
        """Return whether the environments had failed; their episodes are ended now."""
        was_lost = self.is_lost
        self.is_lost = False
        return was_lost

    def postpone(self, error: BaseException) -> None:
        """Keep the error of an early reset, for the next rollout to raise."""
        self.error = error

    def parts(self, which: Sequence[int]) -> list[tuple[list[int], list[int] | None]]:
        """Split ``which`` into environments with seeds, and those without (None); omits empty
        parts.
        """
        parts: list[tuple[list[int], list[int] | None]] = []
        seeded = [i for i in which if i in self.seeds]
        if seeded:
            parts.append((seeded, [self.seeds[i] for i in seeded]))
        others = [i for i in which if i not in self.seeds]
        if others:
            parts.append((others, None))
        return parts

    def undone(self, *, again: bool) -> list[int]:
        """Return the environments that still need a reset; not those reset early, unless they have
        a seed or ``again``.

        Raises:
            BaseException: ``error``, once.
        """
        error = self.error
        if error is not None:
            self.error = None
            raise error
        return [
            i for i in self.which if again or i in self.seeds or i not in self.begun
        ]

    def leave_out(self, which: Collection[int]) -> Self:
        """Remove these environments, and return them with their seeds, for ``done``."""
        due = [i for i in self.which if i in which]
        seeds = {i: self.seeds.pop(i) for i in due if i in self.seeds}
        held = type(self)(due, seeds)
        self.which = [i for i in self.which if i not in which]
        return held

    def done(self, held: Self | None = None, *, early: bool = False) -> None:
        """Replace the environments, which were reset (``early``: before their rollout), by
        ``held``.
        """
        self.begun = {*self.begun, *self.which} if early else set()
        self.which = []
        self.seeds = {}
        if held is not None:
            self.which = held.which
            self.seeds = held.seeds

    def load(self, which: Sequence[Any], seeds: Mapping[Any, Any], B: int) -> None:
        """Restore ``which`` of ``B`` environments, and their seeds.

        Raises ``IndexError`` or ``TypeError`` for other data.
        """
        due = [range(B)[index(i)] for i in which]
        known = {index(i): index(seed) for i, seed in seeds.items()}
        self.which = due
        self.seeds = known
        self.error = None
        self.begun = set()
