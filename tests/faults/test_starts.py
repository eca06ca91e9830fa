"""Starts and restarts of workers that fail: whatever is killed or used up meanwhile, no call waits
without an end.

The next call works, or raises the same error again at once; and when the cause is gone, it works.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muster import MultiAsyncCollector, MultiSyncCollector, Restart
from muster.errors import (
    EnvError,
    MusterError,
    WorkerDied,
    WorkerHung,
    WorkerNotStarted,
)
from muster.policies import categorical
from muster.testing import Fault, OracleEnv, check_stream
from muster.workers import launch
from muster.workers import proxy as proxies
from tests.fakes import faults
from tests.fakes.fault_runs import KINDS, alive, all_gone, deadlines
from tests.fakes.stages import at_stage, fork_server, parent
from tests.tools import assert_balanced
from tests.waits import descriptors_left, open_files, wait_until, without_gc

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="kills processes, and looks into /proc"
    )
]

T = 10
AT_ONCE_S = 20.0  # on a busy machine; the shortest deadline of a phase is 60 s
MOST_ERRORS = 6
ROOT = Path(__file__).parents[2]
NOBODY = 65534
BACKENDS: dict[str, dict[str, Any]] = {
    "processes": {},
    "served": {"inference": "server"},
    "threads": {"backend": "threads"},
}


def policy() -> Any:
    return categorical(Ones())


class Ones(nn.Module):
    """Logits of the five actions of ``OracleEnv``. Its observations are integers."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*observation.shape[:-1], 5)


def make(
    kind: Any,
    path: Any,
    on_failure: Any = "restart",
    fault: Fault | None = None,
    **options: Any,
) -> Any:
    factories = [partial(OracleEnv, path, 0, 1, fault), partial(OracleEnv, path, 1)]
    frames = 2 * T if kind is MultiSyncCollector else T
    given = {
        "frames_per_batch": frames,
        "seed": 1,
        "on_failure": on_failure,
        "crash_dir": path.parent,
        **options,
    }
    return kind(factories, policy(), **given)


@contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE_S


def collect(collector: Any, batches: list[Any], count: int) -> list[Exception]:
    """Collect more batches, as a user does who goes on after errors; returns the errors."""
    errors: list[Exception] = []
    wanted = len(batches) + count
    while len(batches) < wanted:
        try:
            with at_once():
                batches.append(collector.next().clone())
        except WorkerDied as error:
            errors.append(error)
            assert len(errors) <= MOST_ERRORS, errors
    return errors


def check_accounts(collector: Any, batches: list[Any], path: Any) -> None:
    collector.shutdown()
    stats, truth = collector.stats(), OracleEnv.read(path)[:, 2].sum()
    assert stats.frames == sum(check_stream(batches).values())
    assert_balanced(stats, in_flight=0)
    assert (
        stats.executed
        <= truth
        <= stats.executed + len(OracleEnv.read(path)) * MOST_ERRORS
    )  # as in a kill


def kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- what is used up ------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["raise", "restart", "drop"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["processes", "served"])
def test_without_descriptors_every_call_says_so_and_with_them_it_goes_on(
    tmp_path, kind, on_failure, backend
):
    collector, batches = (
        make(kind, tmp_path / "counts", on_failure, **BACKENDS[backend]),
        [],
    )
    collect(collector, batches, 2)
    before = open_files()
    pids = [worker.pid for worker in collector.stats().workers]
    with descriptors_left(3), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a worker is dropped|No crash report")
        for pid in pids:
            kill(pid)
        assert all_gone(pids)
        errors = refusals(collector, batches)
    if on_failure == "drop":
        assert "all workers have been dropped" in str(errors[-1])
        collector.shutdown()
        return
    for error in errors[-3:]:
        assert type(error) is WorkerNotStarted
        assert isinstance(error.__cause__, (OSError, MusterError))
        assert "could not be started" in str(error)
        assert "`ulimit -n 4096`" in str(error)
    assert collect(collector, batches, 4) == []
    assert open_files() <= before
    assert sum(worker.restarts for worker in collector.stats().workers) == 2, (
        "failed starts are none"
    )
    check_accounts(collector, batches, tmp_path / "counts")


def refusals(
    collector: Any, batches: list[Any], count: int = 5, over: Callable[[], bool] = bool
) -> list[Exception]:
    """The errors of so many calls, or until it is over; batches that were ready before come first."""
    errors: list[Exception] = []
    while len(errors) < count and not over():
        try:
            with at_once():
                batches.append(collector.next().clone())
        except (WorkerDied, EnvError) as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_lacks_descriptors_says_so(tmp_path, kind):
    fails = Fault(faults.Raising(ValueError), at=T + 3)
    before = set(threading.enumerate())
    collector, batches = (
        make(kind, tmp_path / "counts", "restart", fails, backend="threads"),
        [],
    )
    collect(collector, batches, 1)
    with descriptors_left(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No crash report")
        errors = refusals(collector, batches, 3)
    for error in (
        errors
    ):  # the second one: it has started, and its environment lacks descriptors, too
        assert type(error) in (WorkerNotStarted, EnvError)
        assert "open files" in str(error)
    assert collect(collector, batches, 6) == []
    workers = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("muster-worker-")
    ]
    assert len(set(workers) - before) == 2, (
        "those that could not be told what they are have ended"
    )
    check_accounts(collector, batches, tmp_path / "counts")


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_other_workers_are_asked_while_one_cannot_be_started(tmp_path, on_failure):
    """A call names the worker that cannot answer; it does not wait for it."""
    collector, batches = make(MultiSyncCollector, tmp_path / "counts", on_failure), []
    collect(collector, batches, 1)
    pid = collector.stats().workers[1].pid
    with descriptors_left(3):
        kill(pid)
        assert all_gone([pid])
        for _ in range(3):
            with at_once(), pytest.raises(WorkerDied):
                collector.getattr_env("number")
        with (
            at_once(),
            pytest.raises(
                WorkerNotStarted, match="Worker 1, environment 1 could not be started"
            ),
        ):
            collector.getattr_env("number")
    assert collector.getattr_env("number") == [0, 1]
    errors = collect(collector, batches, 2)
    assert [type(error) for error in errors] in ([], [WorkerDied]), (
        "its death, at most; not what has been raised"
    )
    check_accounts(collector, batches, tmp_path / "counts")


def test_restarts_that_cannot_start_end_at_the_deadline_of_a_construction(tmp_path):
    """Also without a budget of restarts."""
    options = {"timeouts": {"construct": 3.0}}
    collector = make(
        MultiSyncCollector, tmp_path / "counts", Restart(max_restarts=None), **options
    )
    batches = []
    collect(collector, batches, 1)
    pid = collector.stats().workers[0].pid
    with descriptors_left(3):
        kill(pid)
        assert all_gone([pid])
        refusals(collector, batches, 2)
    assert collect(collector, batches, 2) == []
    check_accounts(collector, batches, tmp_path / "counts")


def test_a_construction_that_lacks_descriptors_is_an_error_of_its_options(tmp_path):
    before = open_files()
    with (
        descriptors_left(12),
        at_once(),
        pytest.raises((ValueError, OSError), match="descriptors|open files"),
    ):
        make(MultiSyncCollector, tmp_path / "counts")
    wait_until(lambda: open_files() <= before)


# --- what is killed -------------------------------------------------------------------------------

LIFE = {  # of a worker, as its parent sees it; and what can be killed there
    "launch.py:fork:call": "the fork server is about to be asked",
    "launch.py:fork:return": "it was born",
    "proxy.py:_send_config:return": "it was told what it is",
    "proxy.py:start:return": "it has its requests",
    "proxy.py:answered:call": "it has made its environments",
    "under_way.py:report:call": "it has made a rollout",
    "proxy.py:submit:return": "it has another request",
}


def victim(collector: Any, name: str) -> int | None:
    """The pid of the fork server, or of the newest worker or its keeper."""
    if name == "fork server":
        return fork_server(light=True)
    handle = collector._engine.source.pool.handles[0]
    if handle.process.child.exit_code() is not None:
        return None
    pid = int(handle.process.child.pid)
    return pid if name == "worker" else parent(pid)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("name", ["fork server", "keeper", "worker"])
@pytest.mark.parametrize("stage", LIFE)
def test_whatever_is_killed_while_a_worker_is_started_again(
    tmp_path, stage, name, on_failure
):
    collector = make(
        MultiSyncCollector, tmp_path / "counts", on_failure, **BACKENDS["served"]
    )
    batches: list[Any] = []
    collect(collector, batches, 1)
    pid = collector.stats().workers[0].pid
    kill(pid)
    assert all_gone([pid])
    with at_stage(stage, lambda: kill(victim(collector, name))) as reached:
        errors = collect(collector, batches, 3)
    assert reached.reached
    assert len(errors) <= (4 if on_failure == "raise" else 0), errors
    assert collect(collector, batches, 1) == []
    check_accounts(collector, batches, tmp_path / "counts")


@pytest.mark.parametrize("name", ["fork server", "keeper", "worker"])
@pytest.mark.parametrize(
    "stage",
    ["launch.py:fork:call:2", "launch.py:fork:return", "proxy.py:_send_config:return"],
)
def test_whatever_is_killed_while_a_collector_is_made(
    tmp_path, stage, name, monkeypatch
):
    """It is made, or says why not; then nothing is left of it."""
    born: list[int] = []
    original = launch.Child.__init__

    def noted(child: Any, *args: Any, **options: Any) -> None:
        original(child, *args, **options)
        born.append(child.pid)

    monkeypatch.setattr(launch.Child, "__init__", noted)

    def strike() -> None:
        if name == "fork server":
            kill(fork_server(light=True))
        elif born and alive(born[-1]):
            kill(born[-1] if name == "worker" else parent(born[-1]))

    with at_stage(stage, strike), at_once(), suppress(WorkerDied):
        make(
            MultiSyncCollector, tmp_path / "counts", "restart", **BACKENDS["served"]
        ).shutdown()
    assert born
    assert all_gone(born)


def test_a_fork_server_that_dies_every_time_is_the_error_until_it_does_not(
    tmp_path, monkeypatch
):
    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    launch.shutdown_forkserver()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        errors = refusals(collector, batches, 3)
    for error in errors:
        assert type(error) is WorkerNotStarted
        assert "The fork server ended before it had started muster-worker-" in str(
            error
        )
    assert collect(collector, batches, 2) == []
    check_accounts(collector, batches, tmp_path / "counts")


def test_a_start_that_fails_for_a_moment_is_no_error_with_restarts(
    tmp_path, monkeypatch
):
    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    launch.shutdown_forkserver()
    interpreter = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    mends = threading.Timer(0.2, setattr, (sys, "executable", interpreter))
    with at_stage("launch.py:_python:call", mends.start) as started:
        assert collect(collector, batches, 2) == []
    assert started.reached
    mends.join()
    check_accounts(collector, batches, tmp_path / "counts")


def test_a_fork_server_that_does_not_answer_is_replaced_at_its_deadline(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(launch, "START_S", 4.0)
    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    server = fork_server(light=True)
    assert server is not None
    kill(collector.stats().workers[0].pid)
    os.kill(server, signal.SIGSTOP)
    assert collect(collector, batches, 3) == []
    assert fork_server(light=True) != server
    assert not alive(server)
    check_accounts(collector, batches, tmp_path / "counts")


def test_ctrl_c_is_raised_while_a_fork_server_does_not_answer(tmp_path):
    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    server = fork_server(light=True)
    assert server is not None
    pid = collector.stats().workers[0].pid
    os.kill(server, signal.SIGSTOP)
    kill(pid)
    presses = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    with (
        at_once(),
        pytest.raises(KeyboardInterrupt),
        at_stage("launch.py:fork:call", presses.start),
    ):
        while True:
            batches.append(collector.next().clone())
    os.kill(server, signal.SIGCONT)
    assert collect(collector, batches, 3) == []
    assert fork_server(light=True) == server
    check_accounts(collector, batches, tmp_path / "counts")


@pytest.mark.parametrize("born", ["keeper", "worker"])
def test_what_is_killed_at_birth_says_so(tmp_path, monkeypatch, born):
    """Before it has done anything: the fork server has just forked it."""
    launch.shutdown_forkserver()
    plan = tmp_path / "plan"
    monkeypatch.setenv("MUSTER_TEST_BIRTHS", str(plan))
    monkeypatch.setattr(launch, "LIGHT", (*launch.LIGHT, "tests.fakes.births"))
    import tests.fakes.births  # noqa: F401  (the fork server imports it, too)

    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    try:
        collect(collector, batches, 1)
        plan.write_text(born)
        kill(collector.stats().workers[0].pid)
        assert collect(collector, batches, 3) == []
        assert not plan.exists()
        plan.write_text(born)
        with at_once(), suppress(WorkerDied):
            make(
                MultiSyncCollector, tmp_path / "others", **BACKENDS["served"]
            ).shutdown()
        assert not plan.exists()
        check_accounts(collector, batches, tmp_path / "counts")
    finally:
        launch.shutdown_forkserver()


# --- what interrupts ------------------------------------------------------------------------------


POINTS = 200  # to which a restart and a batch come, most often


@pytest.mark.parametrize(
    ("backend", "step"),
    [
        ("served", 29),
        pytest.param("served", 3, marks=pytest.mark.slow),
        pytest.param("threads", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket"
)  # made just before, and garbage now
def test_wherever_a_restart_is_interrupted_the_next_call_goes_on(
    tmp_path, backend, step
):
    """As by a second Ctrl-C, which takes effect at once.

    What was not sent any more is a hang, at its deadline.
    """
    options = {"timeouts": deadlines(1.5), **BACKENDS[backend]}
    collector = make(
        MultiSyncCollector, tmp_path / "counts", Restart(max_restarts=None), **options
    )
    batches: list[Any] = []
    reached = 0
    with collector:
        collect(collector, batches, 1)
        for point in range(1, POINTS, step):
            loses(collector)
            with interrupted_at(point) as interruption, suppress(KeyboardInterrupt):
                collector.next()
            reached += bool(interruption.where)
            try:
                collect(collector, batches, 1)
            except BaseException as error:
                raise AssertionError(
                    f"after an interruption at {interruption.where}"
                ) from error
    assert reached > POINTS // step // 2, "some come to the end before"


def loses(collector: Any) -> None:
    """Lose a worker, as if it had been killed."""
    handle = collector._engine.source.pool.handles[0]
    if handle.config.in_thread:
        handle._pool._lose(handle, WorkerDied("lost"), "worker_died")
    else:
        kill(handle.process.child.pid)


class Interruption:
    """A profiler that raises KeyboardInterrupt at the n-th point at which a handler of a signal
    could.

    These are the beginnings of functions of the files that start and supervise workers, and what
    follows on their calls of functions in C.
    """

    names = (
        "life",
        "proxy",
        "supervision",
        "worker_pool",
        "launch",
        "inference",
        "pool",
        "under_way",
        "mailbox",
        "threads",
    )
    files = tuple(f"/workers/{name}.py" for name in names)

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.endswith(
            self.files
        ):
            return
        if (
            code.co_flags & inspect.CO_GENERATOR
        ):  # which may be closed just now: then nobody gets an exception
            return
        self.left -= 1
        if self.left == 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt


@contextmanager
def interrupted_at(point: int) -> Iterator[Interruption]:
    interruption = Interruption(point)
    with without_gc():
        sys.setprofile(interruption)
        try:
            yield interruption
        finally:
            sys.setprofile(None)


# --- what does not listen -------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_worker_that_reads_nothing_hangs(tmp_path, monkeypatch, on_failure):
    """A message of 4 MB does not fit into its socket."""
    monkeypatch.setattr(proxies, "SEND_S", 0.5)
    collector, batches = make(MultiSyncCollector, tmp_path / "counts", on_failure), []
    collect(collector, batches, 1)
    pid = collector.stats().workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    attribute = "x" * (4 << 20)
    expected = (
        WorkerHung if on_failure == "raise" else MusterError
    )  # the successor has no such attribute
    with at_once(), pytest.raises(expected):
        collector.getattr_env(attribute)
    assert not alive(pid)
    assert collect(collector, batches, 2) == []
    check_accounts(collector, batches, tmp_path / "counts")


def test_the_end_of_the_servers_thread_is_an_error_at_once_every_time(
    tmp_path, monkeypatch
):
    collector, batches = (
        make(MultiAsyncCollector, tmp_path / "counts", **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    server = collector._engine.source.pool.server

    def ends() -> bool:
        raise SystemExit

    # The thread asks this between two calls of the policy. An exception inside a call would be the
    # policy's error.
    monkeypatch.setattr(server, "_has_work", ends)
    server.mailbox.wake_up.ring()
    server._thread.join(60)
    assert not server._thread.is_alive()
    for _ in range(3):
        with (
            at_once(),
            pytest.raises(
                MusterError,
                match=r"server of this collector has ended because of SystemExit",
            ),
        ):
            while True:
                collector.next()
    with at_once():
        collector.shutdown()


# --- what the system does not allow ---------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "processes/restart",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "processes/raise",
                "threads/restart",
                "nodes/raise",
                "nodes/restart",
            )
        ),
    ],
)
def test_without_processes_and_threads_every_call_says_so_and_with_them_it_goes_on(
    program,
):
    got = as_nobody("tests.fakes.used_up", program)
    said = json.loads(got)
    assert said["longest"] < AT_ONCE_S
    assert said["exact"]
    assert said["batches"] == 4
    assert len(said["errors"]) == (7 if program.startswith("processes") else 4)
    for kind, text in said["errors"][1:]:  # the first one may be its death
        assert kind == "WorkerNotStarted"
        assert "(`ulimit -u`, pids.max of the control group)" in text
        assert text.endswith("The next call tries again.")


def as_nobody(module: str, *arguments: str) -> str:
    """The output of a program that is subject to limits; those of processes do not hold for root."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", module, *arguments]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv (util-linux)")
        keeps = "+dac_read_search"  # the interpreter and this file may lie in a folder of root
        rights = [
            f"--inh-caps={keeps}",
            f"--ambient-caps={keeps}",
            f"--bounding-set=-all,{keeps}",
        ]
        command = [
            "setpriv",
            f"--reuid={NOBODY}",
            f"--regid={NOBODY}",
            "--clear-groups",
            *rights,
            *command,
        ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "on_failure", ["raise", pytest.param("restart", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("what", [resource.RLIMIT_AS, resource.RLIMIT_NOFILE])
def test_a_fork_server_without_memory_or_descriptors_starts_nothing_until_it_has_them(
    tmp_path, what, on_failure
):
    launch.shutdown_forkserver()
    collector, batches = (
        make(MultiSyncCollector, tmp_path / "counts", on_failure, **BACKENDS["served"]),
        [],
    )
    collect(collector, batches, 1)
    server = fork_server(light=True)
    assert server is not None
    used = {
        resource.RLIMIT_AS: int(Path(f"/proc/{server}/statm").read_text().split()[0])
        * resource.getpagesize(),
        resource.RLIMIT_NOFILE: len(os.listdir(f"/proc/{server}/fd"))
        + 4,  # those that come with the request
    }[what]
    before = resource.prlimit(server, what, (used, resource.getrlimit(what)[1]))
    pid = collector.stats().workers[0].pid
    kill(pid)
    assert all_gone([pid])
    # It may end by that, too. Its successor has no such limit.
    errors = refusals(
        collector,
        batches,
        3,
        over=lambda: fork_server(light=True) not in (None, server),
    )
    assert {type(error) for error in errors} <= {WorkerDied, WorkerNotStarted}
    if fork_server(light=True) == server:
        resource.prlimit(server, what, before)
    errors = collect(collector, batches, 3)
    assert len(errors) <= 2, errors
    check_accounts(collector, batches, tmp_path / "counts")
    launch.shutdown_forkserver()
