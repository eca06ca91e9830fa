"""What is left when the user's program ends, in whatever way: nothing."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from muster import MultiAsyncCollector, MultiSyncCollector
from muster.testing import OracleEnv
from tests.fakes.fault_runs import all_gone
from tests.fakes.programs import PATH, ROOT

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
PLACES = [
    "idle",
    "stepping",
    "waiting",
    "hung",
    "grandchildren",
    "starting",
    "threads",
    "spawned",
    "closing_hangs",
]
PLACES += ["simulators"]
SERVED = ["served", "served_as_ready", "served_never"]
needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="needs submitit"
)
SLOW = pytest.mark.slow  # a program of its own costs some 6 CPU seconds
NODES = ["nodes", "nodes_idle", "nodes_hung", "nodes_joining"]


@pytest.mark.parametrize(
    "place",
    [
        *PLACES,
        *NODES,
        SERVED[0],
        *(pytest.param(place, marks=SLOW) for place in SERVED[1:]),
    ],
)
def test_nothing_outlives_a_killed_program(start, place):
    program = start(place)
    family = program.family()
    expected = {
        "threads": 0,
        "spawned": 2,
        "grandchildren": 4,
        "simulators": 4,
        "closing_hangs": 2,
    }.get(place, 3)  # and the fork server
    expected = (
        7 if place in NODES and place != "nodes_joining" else expected
    )  # two nodes, each with a fork server
    assert len(family) >= expected, "they are seen at all"
    assert (
        place not in SERVED or len(family) == 5
    )  # with the fork server, and a keeper beside each worker
    program.process.kill()
    assert program.end()[1] == -signal.SIGKILL
    assert all_gone(family)


WHILE_MADE = [
    "launch.py:_python:return:1",  # the fork server is an interpreter that begins
    "channel.py:send:return:1",  # it is asked for a worker, and imports torch
    "launch.py:fork_shared:return:1",  # there is a worker, which was told nothing
    "proxy.py:start:return:1",
    "worker_pool.py:built:call:1",  # all make their environments
    "worker_pool.py:built:return:1",
]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("MultiSyncCollector", place) for place in WHILE_MADE),
        *(("MultiAsyncCollector", WHILE_MADE[n]) for n in (1, 5)),
        *(("AsyncCollector", WHILE_MADE[n]) for n in (0, 4)),
        *(("served", WHILE_MADE[n]) for n in (2, 5)),
        *(("Evaluator", WHILE_MADE[n]) for n in (1, 5)),
    ],
)
def test_nothing_outlives_a_program_that_is_killed_while_its_collector_is_made(
    start, kind, place
):
    program = start("constructing", kind, place)
    said, code = program.end()
    assert code == -signal.SIGKILL, said
    assert not program.family()


@pytest.mark.slow
def test_nothing_outlives_a_program_whose_fork_server_is_in_a_long_call_of_c(
    start, tmp_path
):
    """Loading torch is one; no handler of a signal runs meanwhile."""
    program = start("making_nodes", "importing")
    program.killed_once(lambda: (tmp_path / "importing").exists() and program.family())


NODES_OF_MP = (
    7  # the fork server; two nodes, each with a fork server of its own, and one worker
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        *(("mp", count) for count in range(1, NODES_OF_MP + 1)),
        *(
            pytest.param("submitit", count, marks=needs_submitit)
            for count in (1, 2, 4, None)
        ),
    ],
)
def test_nothing_outlives_a_program_that_is_killed_when_so_many_processes_have_been_born(
    start, launcher, count
):
    """None: when the collector is made."""
    program = start("making_nodes", launcher)
    if count is None:
        program.killed_once(lambda: program.process.stdout.readline() == "made\n")
    else:
        program.killed_once(lambda: len(program.family()) >= count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["stepping", "nodes", "served", "served_never"]
)  # hung ones die like killed ones
def test_nothing_outlives_a_program_that_is_asked_to_end(start, place):
    program = start(place)
    program.process.terminate()
    assert program.end() == ("", -signal.SIGTERM)


@pytest.mark.parametrize(
    ("place", "send"),
    [
        ("served", os.kill),
        *(
            pytest.param(place, os.kill, marks=SLOW)
            for place in ("idle", "stepping", "waiting")
        ),
        *(
            pytest.param(place, os.killpg, marks=SLOW)
            for place in ("stepping", "threads", "served_as_ready")
        ),
    ],
)
def test_ctrl_c_is_one_traceback_and_a_clean_end(start, place, send):
    program = start(place)
    send(program.process.pid, signal.SIGINT)
    said, code = program.end()
    assert code == -signal.SIGINT
    assert said.count("Traceback (most recent call last)") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")
    if place != "waiting":  # that one had to be killed
        assert OracleEnv.read(program.folder / "counts")[:, 3].tolist() == [1, 1], (
            "environments were closed"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "send"),
    [("nodes", os.kill), ("nodes", os.killpg), ("nodes_joining", os.kill)],
)
def test_ctrl_c_ends_nodes_too(start, place, send):
    program = start(place)
    send(program.process.pid, signal.SIGINT)
    said, code = program.end()
    assert code == -signal.SIGINT, said
    assert said.count("Traceback (most recent call last)") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")
    if place == "nodes":
        assert OracleEnv.read(program.folder / "counts")[:, 3].tolist() == [1, 1], (
            "environments were closed"
        )


@pytest.mark.slow
def test_ctrl_c_ends_a_shutdown_that_takes_too_long(start):
    program = start("closing_hangs")
    os.kill(program.process.pid, signal.SIGINT)
    said, code = program.end()
    assert code == -signal.SIGINT
    assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["never_shut_down", "thrown_away_with_a_hang", "served_and_forgotten"]
)
def test_a_program_that_forgets_to_shut_down_ends_at_once_and_leaves_nothing(
    start, place
):
    assert start(place).end() == ("", 0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["raises", "simulators_raise"])
def test_a_program_that_fails_in_its_own_loop_says_only_that(start, place):
    said, code = start(place).end()
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 1
    assert said.rstrip().endswith("ValueError: in the user's own loop")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("iterating", [False, True])
def test_the_workers_of_a_collector_that_is_thrown_away_end(tmp_path, kind, iterating):
    collector = kind(
        [partial(OracleEnv, tmp_path / "counts", n) for n in range(2)],
        None,
        frames_per_batch=40,
    )
    batches = iter(collector)
    batch = next(batches)
    pids = [worker.pid for worker in collector.stats().workers]
    kept = batch.clone()
    if not iterating:
        del batches
    else:
        batches.close()
    del collector
    gc.collect()
    assert all_gone(pids)
    assert (batch == kept).all()  # what the user holds is still there


@pytest.mark.slow
def test_a_worker_closes_its_environments_wherever_it_is_when_it_is_told_to_end():
    told = subprocess.run(
        [sys.executable, "-m", "tests.fakes.terminated_servers"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=80,
        check=True,
    ).stdout.split()
    assert told[1:] == ["instructions"]
    assert int(told[0]) > 100
