"""Ids of ``gymnasium.register`` for the processes that TorchRL starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.restore.registered import SentIds, ids_of_this_process, installed


@dataclass(frozen=True)
class WithIds:
    """TorchRL's ``init_fn``, which a process calls before it makes environments: it first gets the
    program's ids.

    Attributes:
        sent: the ids.
        init_fn: the user's function; None: there is none.
    """

    sent: SentIds
    init_fn: Callable[[], Any] | None

    def __call__(self) -> None:
        with installed(self.sent):
            pass
        if self.init_fn is not None:
            self.init_fn()


def with_ids(init_fn: Callable[[], Any] | None) -> WithIds:
    """Return an ``init_fn`` that adds the ids of this process, and then calls the given one."""
    return WithIds(ids_of_this_process(), init_fn)
