"""Signals from another process, which interrupt this one at any line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SENDER = """
import os, random, select, signal, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
target, number, most, pause = (float(text) for text in sys.argv[1:])
chance = random.Random(1)
while os.getppid() == target:
    for _ in range(chance.randint(1, int(most))):
        os.kill(int(target), int(number))
        select.select([], [], [], 3e-4 * chance.random() ** 2 if most > 1 else 0)
    select.select([], [], [], pause * (1 + chance.random()))
"""


@contextmanager
def storm(
    handler: Callable[..., Any],
    number: int = signal.SIGUSR2,
    *,
    together: int = 1,
    pause_s: float = 1e-4,
) -> Iterator[None]:
    """Up to ``together`` signals at a time, some 0.1 ms apart, and then one to two times
    ``pause_s`` none.
    """
    # It may hit finalizers, and such hooks.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    previous = signal.signal(number, handler)
    what = [str(os.getpid()), str(int(number)), str(together), str(pause_s)]
    sender = subprocess.Popen([sys.executable, "-S", "-c", SENDER, *what])
    try:
        yield
    finally:
        sender.kill()
        sender.wait()
        signal.signal(number, previous)
        sys.unraisablehook = hook
