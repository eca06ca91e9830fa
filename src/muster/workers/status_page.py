"""The status page of a worker, which its parent can read at any time, also when the worker hangs or is dead.

A page of counters that the worker stores into, then text: the stacks that ``faulthandler`` writes, which works without
the GIL and during a crash.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time

from muster.memory.shared import Arena
from muster.rollout.progress import CELLS


class StatusPage:
    """The counters and stacks of one worker.

    Attributes:
        cells: 64 integers (int64), stored and loaded as a whole; they outlive the status page.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._read = mmap.PAGESIZE  # end of the text that ``stack`` has read
        self.cells = memoryview(arena.view(0, CELLS * 8)).cast("q")  # type: ignore[arg-type]

    @classmethod
    def create(cls) -> StatusPage:
        """Make the parent's side; it uses one descriptor."""
        import fcntl

        arena = Arena.create("muster-status-page")
        arena.allocate(mmap.PAGESIZE)
        # Stacks follow the page, in every process that writes.
        fcntl.fcntl(arena.fd, fcntl.F_SETFL, os.O_APPEND | fcntl.fcntl(arena.fd, fcntl.F_GETFL))
        return cls(arena)

    @classmethod
    def attach(cls, fd: int) -> StatusPage:
        """Make the worker's side; ``fd`` was received from the parent, and is owned by this object."""
        return cls(Arena.attach(fd))

    @property
    def fd(self) -> int:
        return self._arena.fd

    def arm(self) -> None:
        """In a worker process: write the stacks of all threads on SIGUSR1 and on a crash of the interpreter."""
        faulthandler.register(signal.SIGUSR1, file=self.fd, all_threads=True)
        faulthandler.enable(file=self.fd, all_threads=True)

    def disarm(self) -> None:
        """In a fork of a worker process: detach it, so that it writes neither stacks nor counters to this page."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        self._arena.isolate()

    def stack(self, within_s: float = 0.0) -> str:
        """In the parent: return the text since the last call; waits up to ``within_s`` for complete text."""
        deadline = time.monotonic() + within_s
        size = os.fstat(self.fd).st_size
        while time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: TID251 (there is no event for the growth of a file)
            before, size = size, os.fstat(self.fd).st_size
            if size == before > self._read:
                break
        text = os.pread(self.fd, size - self._read, self._read)
        self._read += len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Close the descriptor; idempotent. ``cells`` stay readable."""
        self._arena.close()
