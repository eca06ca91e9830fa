"""SIGTERM to a worker's server at every instruction of it: ``python -m
tests.fakes.terminated_servers``.

Forks a process per instruction, from the one after its construction to its end; prints those after
which the environment was not closed, the parent not told so, or the process not ended by that
signal; and how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, SimpleNamespace
from typing import Any

from muster.rollout.progress import Progress
from muster.rollout.request import RolloutRequest
from muster.workers import main as worker_main
from muster.workers.channel import Channel
from muster.workers.config import WorkerConfig
from muster.workers.messages import CLOSED, Answer, RolloutResult, Tell
from muster.workers.requests import Call
from muster.workers.worker import Worker

TRACED = (
    *("serve", "carry_out", "answer", "follow", "_answer", "_send", "_close"),
    *("request", "begin_to_close", "begin_to_send", "end_sending"),
)
MESSAGES = [
    Tell(worker_main.WorkerMain.call, (Call(Worker.observe),), 1),
    RolloutRequest(1, 0, 0, "policy", offset=2, nbytes=3),
    Tell(worker_main.WorkerMain.close),
]
LIMIT = 2000  # instructions; there are some hundred


class Server(worker_main.WorkerMain):
    """With an environment that only says when it is closed."""

    worker: Any
    ready = False

    def _construct(self) -> list[Any]:
        self.made.callback(lambda: self.channel.send(("environment closed", None)))
        self.worker = SimpleNamespace(
            profile=lambda *_: None,
            observe=dict,
            run=lambda request, lane: RolloutResult(request.number, request.group),
            group=lambda _: SimpleNamespace(
                options=SimpleNamespace(reset_when_done=True)
            ),
            laid_out={},
        )
        lane = SimpleNamespace(done_steps=0, layout=SimpleNamespace(object_columns=()))
        self._lanes: Any = SimpleNamespace(of=lambda *_: (lane, lane))
        self.ready = True
        return []

    def _completed(self, result: RolloutResult, *_: Any) -> RolloutResult:
        """There is no lane to tell of."""
        return result


class Terminator:
    """Sends this process SIGTERM before instruction ``at`` of the server's."""

    def __init__(self, served: Server, at: int) -> None:
        self.served, self.at, self.passed = served, at, 0

    def enter(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code.co_filename != worker_main.__file__ or code.co_name not in TRACED:
            return None
        frame.f_trace_opcodes = True
        return self.follow

    def follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and self.served.ready:
            self.passed += 1
            if self.passed == self.at:
                self.served.channel.send(
                    ("sent", f"{frame.f_code.co_name}, line {frame.f_lineno}")
                )
                os.kill(os.getpid(), signal.SIGTERM)
        return self.follow


def serve(channel: Channel, at: int) -> None:
    """What the ``main`` of a worker does."""
    config = WorkerConfig(
        0, [0], factories=[], kwargs=None, policy=b"", is_factory=False, setting=None
    )
    served: Any = Server(channel, config, Progress(), None, [])  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, served.ending.terminate)
    sys.settrace(Terminator(served, at).enter)
    try:
        served.serve()
    except (EOFError, worker_main.Terminated):
        pass
    sys.settrace(None)
    if served.ending.terminated:
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
            message, _ = here.receive(timeout=20)
            if isinstance(message, Answer) and message.number == CLOSED:
                said["closed"] = message.failure
            elif isinstance(message, tuple):
                said[message[0]] = message[1]
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
        if (
            "environment closed" not in said
            or said.get("closed", 0) is not None
            or status != signal.SIGTERM
        ):
            print(f"{at}: {said}, status {status}")


if __name__ == "__main__":
    main()
