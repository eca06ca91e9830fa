"""What environments and policies do that fork, and what becomes of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch


def nothing(_: Path) -> None:
    pass


def returns(path: Path) -> None:
    """The fork goes on like its parent."""
    _parent_notes(path, os.fork())


def exits(path: Path) -> None:
    if pid := os.fork():
        _parent_notes(path, pid)
    else:
        sys.exit(7)


def raises(path: Path) -> None:
    if pid := os.fork():
        _parent_notes(path, pid)
    else:
        raise ValueError("in the fork")


def runs_and_ends(path: Path) -> None:
    if pid := os.fork():
        _parent_notes(path, pid)
    else:
        os._exit(_work())


def runs_a_program(path: Path) -> None:
    if pid := os.fork():
        _parent_notes(path, pid)
    else:
        os.execv("/bin/sh", ["sh", "-c", "exit 5"])


def is_crashed(path: Path) -> None:
    if pid := os.fork():
        _parent_notes(path, pid)
    else:
        os.kill(os.getpid(), signal.SIGSEGV)


def runs_a_function(path: Path) -> None:
    """As multiprocessing does."""
    child = multiprocessing.get_context("fork").Process(target=_run)
    child.start()
    child.join()
    _note(path, child.exitcode)


def is_terminated(path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    child.start()
    child.terminate()
    child.join()
    _note(path, child.exitcode)


WAYS = {
    returns: 1,
    exits: 7,
    raises: 1,
    runs_and_ends: 5,
    runs_a_program: 5,
    is_crashed: -signal.SIGSEGV,
    runs_a_function: 5,
    is_terminated: -signal.SIGTERM,
}


def check(path: Path, do: Any) -> None:
    """Forks were made, and all of them have ended as they should."""
    found = list(map(int, path.read_text().split()))
    assert found, "nobody forked"
    assert set(found) == {WAYS[do]}


class ForkingPolicy(torch.nn.Module):
    """Chooses action 1; its forks go on like their parent."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.calls = path, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 10 == 5:
            returns(Path(self.path))
        return torch.ones(obs.shape[:-1], dtype=torch.int64)


class Buffer:
    """A replay buffer that counts."""

    def __init__(self) -> None:
        self.count, self._changed = 0, threading.Condition()

    def extend(self, _: Any) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, 60.0)


def _work() -> int:
    return len([n for n in range(1000) if n % 200 == 0])


def _run() -> None:
    sys.exit(_work())


def _parent_notes(path: Path, pid: int) -> None:
    if pid:
        _note(path, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _note(path: Path, code: int | None) -> None:
    with open(path, "a") as file:
        file.write(f"{code}\n")
