"""The program that makes docs/fault_matrix.md: some of its cells, that it finds what it should, and
its page.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile

import pytest
import torch

from benchmarks import fault_matrix, fault_matrix_cells
from benchmarks.fault_matrix_cells import BACKENDS, ENDS, FAULTS, Backend, Case, always
from muster import (
    Collector,
    DistributedCollector,
    MultiSyncCollector,
    RPCCollector,
    load,
)
from muster.errors import BadRecording, WorkerDied
from muster.testing import CountingEnv, OracleEnv
from tests.fakes import faults
from tests.tools import files_limited_to
from tests.waits import descriptors_left, wait_until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

CELLS = {
    ("error", "in process", "raise"): "EnvError, phase step",
    (
        "error",
        "in process",
        "drop",
    ): "refused: no worker that could be restarted or dropped",
    (
        "construct fails",
        "in process",
        "raise",
    ): "the constructor raises EnvError, phase construct",
    ("error", "threads", "raise"): "EnvError, phase step, worker 0, environment 0",
    ("wrong shape", "threads", "restart"): (
        "restarted; 1 row discarded (bad_env_output); 10 rows discarded (env_error)"
    ),
    (
        "hang in Python",
        "threads",
        "restart",
    ): "restarted; 10 rows discarded (worker_hung); its thread stays",
}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return tmp_path


@pytest.mark.parametrize("key", CELLS, ids=", ".join)
def test_a_cell_says_what_happens(temporary, key):
    assert fault_matrix_cells.cell(*key, temporary, None) == CELLS[key]


class Leaky(OracleEnv):
    """Environments of programs that are wrong, each in its way."""

    way = ""

    def step(self, action):
        got = super().step(action)
        if self._calls["step"] == 25:
            if self.way == "counted twice":
                self._cells[2] += 1
            elif self.way == "torn":
                got = (got[0] + 1, *got[1:])
            elif self.way == "left":
                self.kept = os.pipe()
            elif self.way == "file":
                tempfile.mkdtemp()
        return got


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("counted twice", "counted"),
        ("torn", "next/observation"),
        ("left", "descriptors"),
        ("file", "temporary folder"),
    ],
)
def test_a_cell_finds_what_is_wrong(temporary, monkeypatch, way, says):
    monkeypatch.setattr(
        fault_matrix_cells, "OracleEnv", type(f"{way}Env", (Leaky,), {"way": way})
    )
    fault_matrix_cells._warm.add("threads")
    monkeypatch.setattr(
        fault_matrix_cells, "more_than", lambda before, but: _more(before)
    )
    monkeypatch.setitem(FAULTS, "none", Case(always(faults.Does(int))))
    kept = []
    monkeypatch.setattr(
        OracleEnv, "close", lambda self: kept.append(getattr(self, "kept", ()))
    )
    try:
        with pytest.raises(AssertionError, match=says):
            fault_matrix_cells.cell("none", "threads", "raise", temporary, None)
    finally:
        for fd in sum(map(tuple, kept), ()):
            os.close(fd)


def _more(before):
    """At once; threads and processes of other tests may come and go."""
    now = fault_matrix_cells.resources()
    return {what: now[what] for what in ("descriptors",) if now[what] > before[what]}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case(always(faults.Raising(ValueError)), errors=("WorkerDied",)), "EnvError"),
        (
            Case(
                always(faults.Raising(ValueError)),
                errors=("EnvError",),
                says="nothing like it",
            ),
            "ValueError",
        ),
        (
            Case(
                always(faults.Raising(ValueError)), errors=("EnvError",), phase="reset"
            ),
            "phase step",
        ),
        (Case(always(faults.Raising(ValueError))), "EnvError"),
        (Case(always(faults.Does(int)), errors=("EnvError",)), r"\[\]"),
    ],
)
def test_a_cell_with_another_error_than_expected_is_a_finding(
    temporary, monkeypatch, case, says
):
    monkeypatch.setitem(FAULTS, "this", case)
    with pytest.raises(AssertionError, match=says):
        fault_matrix_cells.cell("this", "in process", "raise", temporary, None)


def test_a_cell_that_discards_rows_for_another_reason_is_a_finding(
    temporary, monkeypatch
):
    """The environment fails before its fault is made, and is restarted."""
    monkeypatch.setitem(
        FAULTS, "this", Case(always(faults.Raising(ValueError)), errors=("WorkerDied",))
    )
    with pytest.raises(AssertionError, match="env_error"):
        fault_matrix_cells.cell("this", "threads", "restart", temporary, None)


def test_a_program_that_ends_and_one_that_does_not(tmp_path, monkeypatch):
    """In processes of their own; a cell that takes too long is a finding, and its processes are
    ended.
    """
    monkeypatch.setitem(fault_matrix.LIMIT_S, "here", 1.0)
    key = ("SIGKILL", "in process", "raise")
    ((found, got),) = fault_matrix.run_backend("in process", [key], tmp_path)
    assert (found, got) == (key, {"outcome": ENDS})
    program = fault_matrix.Program(tmp_path)
    program.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fault_matrix, "START_S", 0.0)
    assert program.run(key, 0.5) == ("finding", "no end within 0.5 s")
    assert program.process.returncode == -signal.SIGKILL


def test_the_page_has_a_row_for_each_fault_and_set_of_backends_with_the_same_results():
    assert BACKENDS["threads"] == Backend(
        BACKENDS["threads"].make, "threads", frames=2 * fault_matrix_cells.T
    )
    cells = {
        (fault, backend, mode): {"outcome": "|"}
        for fault in FAULTS
        for backend in BACKENDS
        for mode in ("raise",)
    }
    cells["SIGKILL", "RPC", "raise"] = {"finding": "wrong"}
    lines = fault_matrix.table(cells).splitlines()
    assert lines[2].startswith("| SIGKILL | in process; processes;")
    assert lines[2].endswith("| \\| | not run | not run |")
    assert lines[3] == "| | RPC | **finding**: wrong | not run | not run |"
    assert sum(line.startswith("| program is killed |") for line in lines) == 1


def test_the_page_is_that_of_the_results():
    result = json.loads(fault_matrix.OUTPUT.read_text())
    page = fault_matrix.PAGE.read_text()
    assert fault_matrix.page(result) in page
    assert set(FAULTS) >= {key.split(" | ")[0] for key in result["cells"]}


# --- what the matrix has found --------------------------------------------------------------------


def test_shutdown_again_writes_what_a_full_disk_has_refused(tmp_path):
    collector = Collector(
        CountingEnv, None, frames_per_batch=20, record=tmp_path / "recording"
    )
    collector.next()
    with files_limited_to(10), pytest.raises(BadRecording):
        collector.shutdown()
    collector.shutdown()
    assert sum(batch.numel() for batch in load(tmp_path / "recording")) == 20
    collector.shutdown()


@pytest.mark.parametrize("left", [0, 4])
def test_a_collector_that_lacks_descriptors_leaves_none(left):
    policy, before = (
        faults.FaultyPolicy("", None, at=1 << 60),
        fault_matrix_cells.resources()["descriptors"],
    )
    with (
        descriptors_left(left),
        pytest.raises((OSError, ValueError), match="open files|descriptors"),
    ):
        MultiSyncCollector(
            [CountingEnv] * 2, policy, frames_per_batch=20, inference="server"
        )
    wait_until(lambda: fault_matrix_cells.resources()["descriptors"] <= before)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 5])
def test_nodes_that_lack_descriptors_leave_none(left):
    check_nodes_that_lack_descriptors(DistributedCollector, left)


@pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
)
@pytest.mark.parametrize("left", [0, 4, 8, 12])
def test_agents_that_lack_descriptors_do_not_end_the_program(left):
    """As TensorPipe would, whose own threads notice it."""
    check_nodes_that_lack_descriptors(RPCCollector, left)


def check_nodes_that_lack_descriptors(kind, left):
    """Those that lack more than the first few are lost with that reason while they join."""
    before, errors = fault_matrix_cells.resources(), (OSError, ValueError, WorkerDied)
    with descriptors_left(left), pytest.raises(errors, match="open files|descriptors"):
        kind([CountingEnv] * 2, None, frames_per_batch=20, launcher="mp")
    gc.collect()  # would find what is not closed
    wait_until(lambda: not fault_matrix_cells.more_than(before))
