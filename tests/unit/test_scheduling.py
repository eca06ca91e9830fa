"""Which process of ``pytest -n`` runs which tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import kind_of, kinds_for

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("tests/unit/test_spaces.py::test_a[Box]", "any"),
        ("tests/contract/test_collectors.py::test_a[sync]", "any"),
        ("tests/contract/test_collectors.py::test_a[ray-sync]", "ray"),
        ("tests/contract/test_collectors.py::test_a[rpc-sync]", "nodes"),
        ("tests/contract/test_links.py::TestLost::test_a[direct]", "nodes"),
        ("tests/contract/test_links.py::TestLost::test_a[ray]", "ray"),
        ("tests/unit/test_ray_nodes.py::test_a", "ray"),
        ("tests/unit/test_memory.py::test_a", "counts"),
        ("tests/faults/test_worker_deaths.py::test_a[sync]", "counts"),
        ("tests/faults/test_worker_deaths.py::test_a[sync_nodes]", "nodes"),
    ],
)
def test_kinds_of_tests(test: str, kind: str) -> None:
    assert kind_of(test) == kind


@pytest.mark.parametrize("processes", range(1, 9))
def test_every_kind_has_a_process_and_those_that_count_are_apart_from_nodes(
    processes: int,
) -> None:
    kinds = [kinds_for(number, processes) for number in range(processes)]
    assert {kind for each in kinds for kind in each} == {
        "counts",
        "nodes",
        "ray",
        "any",
    }
    assert all("any" in each for each in kinds)
    if processes > 1:
        assert not any(
            "counts" in each and {"nodes", "ray"} & {*each} for each in kinds
        )
    last = [kinds_for(number, processes, counting=False) for number in range(processes)]
    assert all({*each} >= {"any", "nodes", "ray"} for each in last)
    assert kinds_for(processes, processes) == [
        "counts",
        "nodes",
        "ray",
        "any",
    ]  # replaces another
    for number in range(processes):
        assert len(kinds_for(number, processes, alone=True)) == 4


CRASHES = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range(4))
def test_crashes(n):
    pathlib.Path(f"{__file__}.{n}").open("a").write("x")
    if n in (1, 3):
        os._exit(1)
"""
PASSES = """
import pytest

@pytest.mark.parametrize("n", range(20))
def test_passes(n): pass
"""


# Process gw0 is ready after gw1, and is the one that pytest-xdist ends if there is one file.
IN_ORDER = """
import os, pathlib

ready = pathlib.Path(__file__).with_name("ready")
process = os.environ.get("PYTEST_XDIST_WORKER")

def pytest_configure():
    while process == "gw0" and not ready.exists():
        pass

def pytest_collection():
    if process == "gw1":
        ready.touch()
"""


def in_two_processes(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "tests.scheduling"]
    # else the program, which starts the processes, would take itself for gw0, and wait for gw1
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", folder, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**outside, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )


def test_the_only_process_runs_what_others_would_have_run(tmp_path):
    (tmp_path / "conftest.py").write_text(IN_ORDER)
    folder = tmp_path / "tests" / "faults"  # whose tests are for the first process
    folder.mkdir(parents=True)
    (folder / "test_passes.py").write_text(PASSES)
    run = in_two_processes(tmp_path)
    assert "20 passed" in run.stdout, run.stdout + run.stderr


def test_processes_that_crash_are_replaced_and_every_test_runs_once(tmp_path):
    """Also the last test of all. The crashed test has failed, and is not tried again."""
    (tmp_path / "test_crashes.py").write_text(CRASHES)
    (tmp_path / "test_passes.py").write_text(PASSES)
    run = in_two_processes(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 failed, 22 passed" in run.stdout, run.stdout
    for n in range(4):
        assert (tmp_path / f"test_crashes.py.{n}").read_text() == "x"
