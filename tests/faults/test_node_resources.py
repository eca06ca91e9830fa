"""What is left in the main process of collectors with nodes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.testing import CountingEnv
from tests.fakes import on_nodes
from tests.faults.test_worker_resources import descendants, descriptors
from tests.waits import without_delays

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
needs_rpc = pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
)
CYCLES = 3
END_S = 60.0


def resources() -> dict[str, int]:
    gc.collect()
    shared = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:" in line
    ]
    return {
        "descriptors": len(descriptors()),
        "mappings": len(shared),
        "processes": len(descendants()),
        "threads of Python": threading.active_count(),
    }


def threads() -> int:
    """Those of C++, too."""
    return len(os.listdir("/proc/self/task"))


def cycle(cls: Any, **options: Any) -> None:
    with cls([CountingEnv] * 2, None, frames_per_batch=20, **options) as collector:
        assert collector.next() is not None


@pytest.mark.parametrize(
    "cls",
    [
        on_nodes.Together,
        on_nodes.AsReady,
        pytest.param(on_nodes.RpcTogether, marks=needs_rpc),
    ],
)
def test_nothing_is_left_of_collectors_that_were_shut_down(cls):
    cycle(on_nodes.Together)  # imports, and the fork server
    if cls is on_nodes.RpcTogether:
        cycle(cls)  # torch keeps threads of the first agent of a process
    before = resources()
    cycle(cls)
    running = threads()
    for _ in range(CYCLES):
        cycle(cls)
    ends = threading.Event()
    for _ in range(int(END_S / 0.05)):
        found = resources()
        left = {
            what: (before[what], count)
            for what, count in found.items()
            if count > before[what]
        }
        if not left and threads() <= running:
            break
        ends.wait(0.05)
    assert not left
    assert threads() <= running


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", ["DistributedCollector", pytest.param("RPCCollector", marks=needs_rpc)]
)
def test_a_process_that_ends_without_shutdown_says_nothing(cls):
    """Neither torch nor this library aborts, or prints a traceback, when the interpreter is taken
    down.
    """
    code = f"""
import muster
from muster.testing import CountingEnv
c = muster.{cls}([CountingEnv] * 2, None, launcher="mp", sync=False, frames_per_batch=20)
assert c.next() is not None
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
    )
    assert (without_delays(done.stderr), done.returncode) == ("", 0)
