"""Programs that end while threads of Muster are at work: with their own exit status, and in
silence.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waits import without_delays

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]
ROOT = Path(__file__).parents[2]
STATUS = {"": 0, "error": 1, "exit": 7, "interrupt": -signal.SIGINT}
LAST_LINE = {
    "": "",
    "error": "ValueError: of the program",
    "exit": "",
    "interrupt": "KeyboardInterrupt",
}
LONGEST_S = 40.0  # on a busy machine; threads get 5 s, and the end of an interpreter with torch takes one

PROGRAMS = [
    "in_process/",
    "in_process/error",
    "in_process/exit",
    "in_process/interrupt",
]
PROGRAMS += [
    "completes_its_batch/exit",
    "threads/error",
    "served/exit",
    "policy_server/exit",
    "blocked_in_a_loop/",
]
ALONE = [
    "dropped/",
    "long_batch/error",
    "blocked_in_a_lock/exit",
    "recorded_and_watched/error",
    "threads_ahead/exit",
]
OTHERS = [
    "processes/error",
    "async_process/interrupt",
    "served/",
    "nodes/error",
    "nodes_with_large_batches/exit",
    "evaluator/",
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "programs",
    [
        PROGRAMS,
        *(pytest.param(more, marks=pytest.mark.slow) for more in (ALONE, OTHERS)),
    ],
    ids=["usual", "alone", "with others"],
)
def test_a_program_that_does_not_shut_down_ends_with_its_own_status(tmp_path, programs):
    """All are forks of one program, which has imported torch for them."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fakes.ending_programs",
            str(tmp_path / "report"),
            *programs,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        timeout=480,
        check=True,
    )
    reports = json.loads((tmp_path / "report").read_text())
    assert list(reports) == programs
    for program, (status, said, seconds) in reports.items():
        how = program.partition("/")[2]
        lines = [
            line
            for line in without_delays(said).splitlines()
            if not line.startswith("watch  ")
        ]
        assert status == STATUS[how], (program, status, said)
        assert seconds < LONGEST_S, (program, seconds)
        assert lines[-1:] == ([LAST_LINE[how]] if LAST_LINE[how] else []), (
            program,
            said,
        )
        assert said.count("Traceback") == (how in ("error", "interrupt")), (
            program,
            said,
        )
