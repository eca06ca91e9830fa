"""A program that is killed while it makes a collector with nodes leaves nothing, wherever it has come to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from tests.fakes.fault_runs import all_gone, family
from tests.waits import wait_until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
ROOT = Path(__file__).parents[2]
GONE_S = 100.0  # on a busy machine, where an interpreter that is to end must start first; it is promised for 5 s
BORN_S = 120.0
NODES_OF_MP = 7  # the fork server; two nodes, each with a fork server of its own, and one worker


class Newborn:
    """One of ``tests.fakes.newborn_nodes``, which is making its collector."""

    def __init__(self, launcher: str, folder: Path) -> None:
        self.mark = f"MUSTER_TEST={uuid.uuid4().hex}"
        key, value = self.mark.split("=")
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.newborn_nodes", launcher, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, key: value, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.made = threading.Event()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, said) -> None:
        if said.readline() == "made\n":
            self.made.set()

    def until(self, happened) -> None:
        def has_happened() -> bool:
            assert self.process.poll() is None, "it has ended; standard error says why"
            return bool(happened())

        wait_until(has_happened, BORN_S)

    def family(self) -> list[int]:
        return [pid for pid in family(self.mark) if pid != self.process.pid]

    def killed(self) -> None:
        """What it has started, and what that may still start, ends without it."""
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not self.family(), GONE_S)


@pytest.fixture
def newborn(tmp_path):
    started = []

    def start(launcher: str) -> Newborn:
        started.append(Newborn(launcher, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        all_gone(one.family(), 0.0)


@pytest.mark.slow
def test_while_the_fork_server_is_in_a_long_call_of_c(newborn, tmp_path):
    """Loading torch is one; no handler of a signal runs meanwhile."""
    program = newborn("importing")
    program.until((tmp_path / "importing").exists)
    assert program.family()
    program.killed()


@pytest.mark.slow
@pytest.mark.parametrize("count", range(1, NODES_OF_MP + 1))
def test_when_so_many_processes_have_been_born(newborn, count):
    program = newborn("mp")
    program.until(lambda: len(program.family()) >= count)
    program.killed()


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")


@pytest.mark.slow
@needs_submitit
@pytest.mark.parametrize("count", [1, 2, 4, None])
def test_of_local_jobs(newborn, count):
    """A fork server, two nodes, and what they start."""
    program = newborn("submitit")
    program.until(lambda: program.made.is_set() if count is None else len(program.family()) >= count)
    program.killed()
