"""Waiting for what happens, counting what is open or called, and a free port; for tests that run
without torch, too.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def wait_until(happened: Callable[[], Any], within_s: float = 60.0) -> Any:
    """What it returns once that is true."""
    pause, deadline = threading.Event(), time.monotonic() + within_s
    while not (found := happened()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        pause.wait(0.01)
    return found


def wait_for_time(seconds: float) -> None:
    """For tests of deadlines: until it has passed."""
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > seconds)


def open_files() -> int:
    """How many descriptors this process has, without those that garbage of other tests holds.

    Compare with ``<=`` and wait for it: threads that other tests have left may close theirs at any
    time.
    """
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def without_gc() -> Iterator[None]:
    """No cycles are collected: what is counted does not depend on the garbage of other tests.

    A collection calls functions (hypothesis registers callbacks; weak references and ``__del__`` do
    the same), and closes files, between any two lines of a test.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open so many more, whichever numbers are free."""
    limit, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limit[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in taken:
            os.close(fd)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def without_delays(said: str) -> str:
    """Standard error without what a construction logs that takes long, on a busy machine."""
    return re.sub(r"^Waiting for .* so far\)\.\n", "", said, flags=re.MULTILINE)
