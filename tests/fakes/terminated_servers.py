"""SIGTERM to a worker's server at every instruction of it: ``python -m tests.fakes.terminated_servers``.

Forks a process per instruction, from the one after its construction to its end; prints those after which the
environment was not closed, the parent not told so, or the process not ended by that signal; and how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, SimpleNamespace
from typing import Any

from muster.progress import Progress
from muster.sources import server
from muster.sources.channel import Channel
from muster.sources.messages import Payload, Report, Start

TRACED = ("serve", "_attend", "_answer", "_send", "_close")
MESSAGES = [("call", "ping", ()), ("order", 1, 2, 3), ("close",)]
LIMIT = 2000  # instructions; there are some hundred


class Server(server.Server):
    """With an environment that only says when it is closed."""

    worker: Any
    ready = False

    def _construct(self) -> list[Any]:
        self.made.callback(lambda: self.channel.send(("environment closed", None)))
        self.worker = SimpleNamespace(
            profile=lambda *_: None, group=lambda _: SimpleNamespace(begin=lambda early: None)
        )
        self.ready = True
        return []

    def ping(self) -> int:
        return 1

    def _follow(self, *_: Any) -> Report:
        return Report(1, 0)


class Terminator:
    """Sends this process SIGTERM before instruction ``at`` of the server's."""

    def __init__(self, served: Server, at: int) -> None:
        self.served, self.at, self.passed = served, at, 0

    def enter(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code.co_filename != server.__file__ or code.co_name not in TRACED:
            return None
        frame.f_trace_opcodes = True
        return self.follow

    def follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and self.served.ready:
            self.passed += 1
            if self.passed == self.at:
                self.served.channel.send(("sent", f"{frame.f_code.co_name}, line {frame.f_lineno}"))
                os.kill(os.getpid(), signal.SIGTERM)
        return self.follow


def serve(channel: Channel, at: int) -> None:
    """What ``server.main`` does."""
    payload = Payload(makers=[], kwargs=None, policy=b"", is_factory=False, options=None)
    start = Start(0, 0, payload, groups=[0], threads=None, stoppable=False, in_thread=False)
    served: Any = Server(channel, start, Progress(), None, [])  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, served.terminate)
    sys.settrace(Terminator(served, at).enter)
    try:
        served.serve()
    except (EOFError, server.Terminated):
        pass
    sys.settrace(None)
    if served.terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def follow(at: int) -> tuple[dict[str, Any], int]:
    """What such a server says, and its status."""
    here, there = Channel.pair()
    for message in MESSAGES:
        here.send(message)
    if not (pid := os.fork()):
        here.close()
        try:
            serve(there, at)
        finally:
            os._exit(0)
    there.close()
    said: dict[str, Any] = {}
    try:
        while True:
            (kind, content), _ = here.receive(timeout=20)
            said[kind] = content
    except EOFError:
        return said, os.waitpid(pid, 0)[1]
    finally:
        here.close()


def main() -> None:
    """See the module."""
    for at in range(1, LIMIT):
        said, status = follow(at)
        if "sent" not in said:
            print(at - 1, "instructions")
            return
        if "environment closed" not in said or said.get("closed", 0) is not None or status != signal.SIGTERM:
            print(f"{at}: {said}, status {status}")


if __name__ == "__main__":
    main()
