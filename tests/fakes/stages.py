"""Something that happens when this process reaches a place in its own code, for tests of what may
happen anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.workers import launch


class Stage:
    """``file:function:event``, or ``file:function:event:n`` for the n-th time; ``event`` is "call"
    or "return".
    """

    def __init__(self, text: str, do: Callable[[], object]) -> None:
        self.file, self.function, self.event, *count = text.split(":")
        self.left, self.do = int(count[0]) if count else 1, do

    @property
    def reached(self) -> bool:
        return self.left <= 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event != self.event
            or code.co_name != self.function
            or not code.co_filename.endswith(self.file)
        ):
            return
        self.left -= 1
        if self.left == 0:
            self.do()


@contextmanager
def at_stage(text: str, do: Callable[[], object]) -> Iterator[Stage]:
    """Within this context, call ``do`` when this thread gets there, once."""
    stage = Stage(text, do)
    sys.setprofile(stage)
    try:
        yield stage
    finally:
        sys.setprofile(None)


def fork_server(*, light: bool) -> int | None:
    """The pid of this process's fork server."""
    server = launch._ForkServer.shared.get(light)
    return None if server is None else server.pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
