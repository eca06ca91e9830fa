"""The process's random generators, which all threads share: whose streams they are, and whether
environments draw from them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.protocols import Act, Outputs, Policy
from muster.rng import GroupRng, global_streams
from muster.rollout.progress import ALL_ORDERS, STOP, Phase, Progress

if TYPE_CHECKING:
    import torch

LOOKED_AT = 8  # number of batches that ``GlobalStreams`` checks
LOOK_S = 0.1  # interval at which a thread that waits for its turn checks whether it was ended
ENDED = "This worker was ended while the policy was called, or while it waited for its turn."


class GlobalStreams:
    """Warns if environments in threads draw from the process's random generators, which all threads
    share.

    Their data are then not reproducible, and the user's random numbers change. A check takes some
    microseconds, so only the first few batches are checked, and only those that the main thread
    waits for: while a collector runs in the background the user may draw.
    """

    def __init__(self) -> None:
        self._left = LOOKED_AT

    def before(self) -> dict[str, Any] | None:
        """Return the states of the generators before a batch, while no thread has the turn; None:
        do not check.
        """
        if not self._left or threading.current_thread() is not threading.main_thread():
            return None
        self._left -= 1
        return global_streams()

    def check(self, before: dict[str, Any]) -> None:
        """Warn, once, if the states have changed during the batch."""
        if moved := [
            name
            for name, state in global_streams().items()
            if state != before.get(name, state)
        ]:
            self._left = 0
            warnings.warn(
                f"The global random generators of {', '.join(moved)} moved while threads collected."
                " An environment, a hook or another thread of this program draws from them."
                " Threads share them: the same seed does not give the same data, and your own"
                " random numbers change. Let environments draw from self.np_random, or use"
                " backend='processes'.",
                stacklevel=2,
            )


class Turns:
    """Lets one thread at a time act, with the streams of its group as the global ones.

    ``revoke`` ends the turn of a thread that hangs: the user's streams are the global ones again,
    and other threads continue. If the thread continues later, the end of its revoked turn changes
    nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._present: ExitStack | None = None  # closing it restores the user's streams
        self._thread: int | None = None  # whose turn it is

    @contextmanager
    def turn(self, rng: GroupRng, progress: Progress) -> Iterator[None]:
        """Wait for the turn of the calling thread, and hold it in this context.

        Raises:
            MusterError: the worker was ended while it waited, or its turn was revoked.
        """
        mine = ExitStack()
        with self._changed:
            if self._present is not None:
                self._wait(progress)
            mine.enter_context(rng.as_global())
            self._present, self._thread = mine, threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                revoked = self._present is not mine
                self._end(mine)
        if revoked:  # the outputs are not used any more
            raise MusterError(ENDED)

    def revoke(self, thread: int | None) -> None:
        """End the turn of a thread, if it has the turn. Called from another thread."""
        with self._changed:
            if self._present is not None and self._thread == thread:
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

    def _end(self, turn: ExitStack) -> None:
        turn.close()
        if self._present is turn:
            self._present = None
            self._changed.notify()


class OneAtATime:
    """Implements ``Policy``: acts in the turn of its thread.

    Policies that draw only from the group's own generator need a turn for their first call only.
    """

    def __init__(self, policy: Policy, turns: Turns, progress: Progress) -> None:
        self.inner = policy
        self._turns = turns
        self._progress = progress
        self.name = policy.name
        self.draws_globally = False

    @property
    def path(self) -> str:
        return self.inner.path

    @property
    def coroutines(self) -> Any:
        return getattr(self.inner, "coroutines", None)

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        with self._turns.turn(rng, self._progress):
            return self.inner.first(obs, rng)

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        act = self.inner.start(lane, rng)
        if not self.inner.draws_globally:
            return act
        turn = self._turns.turn
        progress = self._progress

        def act_alone(t: int) -> None:
            with turn(rng, progress):
                act(t)

        return act_alone

    def columns(self) -> Sequence[Column]:
        return self.inner.columns()
