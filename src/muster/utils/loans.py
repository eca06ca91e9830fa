"""Memory that is lent, and used again when nothing refers to it any more.

The end of a loan is not told, but looked for: a callback of a weak reference is Python code, and a
Ctrl-C that comes while it runs is lost (CPython prints the ``KeyboardInterrupt`` and goes on). The last
reference may go in any call, as in a backward pass that drops what it has saved of a batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Lent = TypeVar("Lent")


class Loans(Generic[Lent]):
    """Things that are lent, each to an object: it is free again when that object is gone. Several
    threads may use it.

    Args:
        most: number of loans that are remembered, None: all. What an older one has lent is not free
            again: it is gone with the object, if that refers to it.
        is_used: whether a thing is used although its object is gone; None: none is.
    """

    def __init__(
        self,
        most: int | None = None,
        is_used: Callable[[Lent], bool] | None = None,
    ) -> None:
        self._is_used = is_used
        self._loans: deque[tuple[Lent, weakref.ref[Any]]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, thing: Lent, to: Any) -> None:
        """Lend a thing to an object."""
        self._loans.append((thing, weakref.ref(to)))

    def ended(self) -> list[Lent]:
        """Return the things that are free."""
        free = []
        going_on = []
        for _ in range(len(self)):
            with contextlib.suppress(IndexError):  # another thread looks, too
                loan = self._loans.popleft()
                if self._is_free(loan):
                    free.append(loan[0])
                else:
                    going_on.append(loan)
        self._loans.extendleft(reversed(going_on))
        return free

    def one_ended(self, fits: Callable[[Lent], bool] | None = None) -> Lent | None:
        """Return the oldest thing that is free and fits; None: there is none."""
        found: Lent | None = None
        others = []
        for _ in range(len(self)):
            with contextlib.suppress(IndexError):
                loan = self._loans.popleft()
                if self._is_free(loan) and (fits is None or fits(loan[0])):
                    found = loan[0]
                    break
                others.append(loan)
        self._loans.extendleft(reversed(others))
        return found

    def forget_oldest(self) -> Lent | None:
        """Forget the oldest loan, and return what was lent; None: there is no loan."""
        with contextlib.suppress(IndexError):
            return self._loans.popleft()[0]
        return None

    def all(self) -> list[Lent]:
        """Return all things that are lent, free or not."""
        return [thing for thing, _ in list(self._loans)]

    def _is_free(self, loan: tuple[Lent, weakref.ref[Any]]) -> bool:
        thing, to = loan
        if to() is not None:
            return False
        return self._is_used is None or not self._is_used(thing)
