"""A policy in several threads, where what it draws comes from the process's generators."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.errors import MusterError
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.progress import ALL_ORDERS, STOP, Phase, Progress
from muster.protocols import Act, Outputs, Policy
from muster.rng import GroupRng

if TYPE_CHECKING:
    import torch

ENDED = "This worker was ended while the policy was called, or while it waited for its turn."
LOOK_S = 0.1  # between two looks of a thread that waits, at whether it still has to


@dataclass
class _Turn:
    thread: int
    streams: ExitStack = field(default_factory=ExitStack)  # closed, it has put back the user's


class Turns:
    """Lets one thread at a time act, with its group's streams in the place of the global ones.

    A thread that hangs in its turn loses it by ``revoke``: the user's streams are the global ones again and the others
    go on. When it gets on again, it ends a turn that is over, which changes nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._present: _Turn | None = None

    @contextmanager
    def turn(self, rng: GroupRng, progress: Progress) -> Iterator[None]:
        """The calling thread's, when the others have ended theirs.

        Raises:
            MusterError: its worker was ended while it waited, or hung in its turn.
        """
        mine = _Turn(threading.get_ident())
        with self._changed:
            if self._present is not None:
                self._wait(progress)
            mine.streams.enter_context(rng.as_global())
            self._present = mine
        try:
            yield
        finally:
            with self._changed:
                revoked = self._present is not mine
                self._end(mine)
        if revoked:  # nothing is done any more with what came of it
            raise MusterError(ENDED)

    def revoke(self, thread: int | None) -> None:
        """End the turn of a thread, if it has it; from another thread."""
        with self._changed:
            if self._present is not None and self._present.thread == thread:
                self._end(self._present)

    def _wait(self, progress: Progress) -> None:
        phase = progress.begin(Phase.WAIT)
        try:
            while self._present is not None:
                if progress.cells[STOP] >= ALL_ORDERS:
                    raise MusterError(ENDED)
                self._changed.wait(LOOK_S)
        finally:
            progress.begin(phase)

    def _end(self, turn: _Turn) -> None:
        turn.streams.close()
        if self._present is turn:
            self._present = None
            self._changed.notify()


class OneAtATime:
    """Implements ``Policy``: acts when it is its thread's turn.

    Policies that draw from the group's own generator need no turn, but for their first call.

    Args:
        turns: common to all threads.
        progress: of this thread's worker.
    """

    def __init__(self, policy: Policy, turns: Turns, progress: Progress) -> None:
        self.inner, self._turns, self._progress = policy, turns, progress
        self.name, self.draws_globally = policy.name, False

    @property
    def path(self) -> str:
        return self.inner.path

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        with self._turns.turn(rng, self._progress):
            return self.inner.first(obs, rng)

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        act = self.inner.start(lane, rng)
        if not self.inner.draws_globally:
            return act
        turn, progress = self._turns.turn, self._progress

        def act_alone(t: int) -> None:
            with turn(rng, progress):
                act(t)

        return act_alone

    def columns(self) -> Sequence[Column]:
        return self.inner.columns()
