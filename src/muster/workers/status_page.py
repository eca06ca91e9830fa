"""What a worker is doing, readable by its parent at any time, also when the worker hangs or is dead.

A page of counters that the worker stores into, then text: the stacks that ``faulthandler`` writes, for which the
worker needs neither the GIL nor to be well.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time

from muster.memory.shared import Arena
from muster.rollout.progress import CELLS, STOP


class StatusPage:
    """The counters and stacks of one worker.

    Attributes:
        cells: 64 integers (int64), stored and loaded as a whole; they outlive the status page.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._read = mmap.PAGESIZE  # up to where ``stack`` has read
        self.cells = memoryview(arena.view(0, CELLS * 8)).cast("q")  # type: ignore[arg-type]

    @classmethod
    def create(cls) -> StatusPage:
        """The parent's side; costs one descriptor."""
        import fcntl

        arena = Arena.create("muster-status-page")
        arena.allocate(mmap.PAGESIZE)
        # Stacks follow the page, in every process that writes.
        fcntl.fcntl(arena.fd, fcntl.F_SETFL, os.O_APPEND | fcntl.fcntl(arena.fd, fcntl.F_GETFL))
        return cls(arena)

    @classmethod
    def attach(cls, fd: int) -> StatusPage:
        """The worker's side; ``fd`` came from the parent and is owned by this object."""
        return cls(Arena.attach(fd))

    @property
    def fd(self) -> int:
        return self._arena.fd

    def arm(self) -> None:
        """In a worker process: from now on SIGUSR1, and a crash of the interpreter, write the stacks of all threads."""
        faulthandler.register(signal.SIGUSR1, file=self.fd, all_threads=True)
        faulthandler.enable(file=self.fd, all_threads=True)

    def disarm(self) -> None:
        """In a fork of a worker process: nothing that it does is seen here any more."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        self._arena.isolate()

    def stop(self, number: int) -> None:
        """In the parent: requests up to this number end after their current step."""
        self.cells[STOP] = number

    def stack(self, within_s: float = 0.0) -> str:
        """In the parent: what has been written since the last call; waits so long for something, and for its end."""
        deadline = time.monotonic() + within_s
        size = os.fstat(self.fd).st_size
        while time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: TID251 (a file does not announce that it has grown)
            before, size = size, os.fstat(self.fd).st_size
            if size == before > self._read:
                break
        text = os.pread(self.fd, size - self._read, self._read)
        self._read += len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Close the descriptor; idempotent. ``cells`` stay readable."""
        self._arena.close()
