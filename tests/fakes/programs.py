"""The programs of ``tests.fakes.fault_parents``, for tests that stop and kill them."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.fakes.fault_runs import all_gone, family
from tests.waits import wait_until, without_delays

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
# on a busy machine, where an interpreter that is to end must start first; it is promised for 5 s
GONE_S = 100.0
BORN_S = 120.0


class Program:
    """One of ``tests.fakes.fault_parents``, at its place."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.mark, self.folder = f"MUSTER_TEST={uuid.uuid4().hex}", folder
        key, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.fault_parents",
                name,
                str(folder),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, key: value, "PYTHONPATH": PATH},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[
            1
        ]

    def family(self) -> list[int]:
        """All processes that it has started, and those that these have started."""
        return [pid for pid in family(self.mark) if pid != self.process.pid]

    def killed_once(self, happened: Callable[[], object]) -> None:
        """Kill it then: what it has started, and what that may still start, ends without it."""

        def has_happened() -> bool:
            assert self.process.poll() is None, self.process.communicate()[1]
            return bool(happened())

        wait_until(has_happened, BORN_S)
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not self.family(), GONE_S)

    def end(self) -> tuple[str, int]:
        """What it says after its end, and its exit code; nothing must be left of it."""
        family = self.family()
        try:
            _, said = self.process.communicate(timeout=100)
        finally:
            self.process.kill()
        assert all_gone({*family, *self.family()}), said
        return without_delays(said), self.process.returncode
