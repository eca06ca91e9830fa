"""The cells of ``benchmarks.fault_matrix``: faults, backends, and what is checked for each pair.

A cell collects ``FRAMES`` frames from environments that count their steps in memory that survives
SIGKILL (``muster.testing.OracleEnv``), of which number 0 fails. It passes if no frame is lost,
counted twice or torn, the error is of the right type and phase and says what to do, and nothing is
left behind. Its outcome is one line for the table.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import muster
from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from muster.errors import BadRecording, MusterError, UnknownOption, text_of
from muster.testing import Fault, OracleEnv
from tests.fakes import faults, foreign
from tests.fakes.adding import Adds
from tests.fakes.fault_runs import (
    ALL_DROPPED,
    FRAMES,
    LEFT_OUT,
    MODES,
    Outcome,
    T,
    deadlines,
    run,
)
from tests.fakes.lost_nodes import NodeSignalled
from tests.fakes.mounts import mount, own_mounts
from tests.fakes.node_runs import KilledForMemory, has_events
from tests.faults.test_worker_resources import descriptors, more_than, resources
from tests.waits import descriptors_left, wait_until

AT = {
    "construct": 0,
    "reset": 2,
    "step": 30,
    "close": 0,
}  # the call that fails; step 30 is row 10 of the second rollout
LONG_S = 300.0  # deadlines that no cell may come to: it would be ended before, and be a finding
SHORT_S = 1.0  # the deadline of a phase that hangs
YOURS = "does not apply: the process is your own"
PLACES = ("here", "threads", "processes", "nodes")
ENDS = "ends your program; nothing is left of it"
REASONS = {  # why rows are discarded, by the type of the error
    "EnvError": {"env_error"},
    "BadEnvOutput": {"bad_env_output", "env_error"},
    "WorkerDied": {"worker_died"},
    "WorkerHung": {"worker_hung"},
}


class NotHere(Exception):
    """This machine cannot make the fault."""


# --- backends -------------------------------------------------------------------------------------


def on_ray(*given: Any, **options: Any) -> RayCollector:
    from tests.fakes.ray_cluster import cluster

    cluster()
    return RayCollector(
        *given, remote_configs={"num_cpus": 1, "memory": 2**28}, **options
    )


@dataclass(frozen=True)
class Backend:
    """A collector of two environments (``workers`` 2), or one.

    Attributes:
        where: one of ``PLACES``: where environments run; "here" is the main thread.
    """

    make: Callable[..., Any]
    where: str = "processes"
    workers: int = 2
    frames: int = T  # per batch

    def options(
        self, path: Path, folder: Path, fault: Fault | None, mode: str
    ) -> dict[str, Any]:
        factories = [
            partial(OracleEnv, path, 0, 1, fault),
            partial(OracleEnv, path, 1),
        ][: self.workers]
        given: dict[str, Any] = {
            "create_env_fn": factories[0] if self.where == "here" else factories,
            "policy": Adds(),
            "frames_per_batch": self.frames,
            "crash_dir": folder,
            "seed": 1,
        }
        if self.where == "here":
            given["crash_dir"] = LEFT_OUT
        if self.where != "here" or mode != "raise":
            given["on_failure"] = mode
        return given

    def collector(
        self, folder: Path, fault: Fault | None = None, **options: Any
    ) -> Any:
        """One that collects until it is shut down."""
        given = {**self.options(folder / "counts", folder, fault, "raise"), **options}
        return self.make(
            **{key: value for key, value in given.items() if value is not LEFT_OUT}
        )


BACKENDS = {
    "in process": Backend(Collector, "here", 1),
    "processes": Backend(MultiSyncCollector, frames=2 * T),
    "processes, first ready": Backend(MultiAsyncCollector),
    "threads": Backend(
        partial(MultiSyncCollector, backend="threads"), "threads", frames=2 * T
    ),
    "server": Backend(partial(MultiSyncCollector, inference="server"), frames=2 * T),
    "server, first ready": Backend(partial(MultiAsyncCollector, inference="server")),
    "AsyncCollector": Backend(AsyncCollector, workers=1),
    "torch.distributed": Backend(
        partial(DistributedCollector, launcher="mp", sync=True), "nodes"
    ),
    "RPC": Backend(partial(RPCCollector, launcher="mp", sync=True), "nodes"),
    "Ray": Backend(partial(on_ray, sync=True), "nodes"),
    "direct": Backend(
        partial(DistributedCollector, transport="direct", launcher="mp", sync=True),
        "nodes",
    ),
}


# --- faults of the program ------------------------------------------------------------------------


def killed(place: Backend, folder: Path, connection: Connection) -> str:
    for number, _ in enumerate(place.collector(folder)):
        if number == 3:
            connection.send(("do", "kill"))
    raise AssertionError("it has no end")


def stopped(place: Backend, folder: Path, connection: Connection) -> str:
    """For longer than a worker's deadlines."""
    batches: list[Any] = []
    with place.collector(folder, timeouts=deadlines(SHORT_S)) as collector:
        for batch in collector:
            batches.append(batch.clone())
            if len(batches) == 3:
                connection.send(("do", "stop"))
            if connection.poll():
                break
        batches.extend(collector.next().clone() for _ in range(3))
    got = Outcome(batches, [], collector.stats(), OracleEnv.read(folder / "counts"))
    got.check(frames=None)
    assert set(got.stats.discarded) <= {"shutdown"} and not got.stats.restarts, (
        got.stats.discarded
    )
    return "no effect"


def interrupted_twice(place: Backend, folder: Path, connection: Connection) -> str:
    """While an environment hangs, and while ``shutdown()`` waits for it; neither has a deadline
    that comes.
    """
    undisturbed(place, folder)
    before, counts, batches = Before(place), folder / "counts", list[Any]()
    collector = place.collector(
        folder, Fault(faults.waits, at=AT["step"]), timeouts=deadlines(LONG_S)
    )

    def press() -> None:
        wait_until(
            lambda: len(found := OracleEnv.read(counts)) and found[0, 1] > AT["step"]
        )
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        batches.extend(batch.clone() for batch in collector)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    try:
        connection.send(("do", "interrupt"))
        collector.shutdown()
        threading.Event().wait(60.0)
        raise AssertionError("not interrupted again")
    except KeyboardInterrupt:
        pass
    collector.shutdown()
    Outcome(batches, [], collector.stats(), OracleEnv.read(counts)).check(
        frames=None, unseen=4 * T if place.where == "nodes" else 0
    )
    del collector
    remark = before.allow_hung()
    before.check()
    return f"KeyboardInterrupt, twice{remark}"


def first_batch(place: Backend, folder: Path) -> None:
    with place.collector(folder) as collector:
        collector.next()


def out_of_descriptors(place: Backend, folder: Path, _: Connection) -> str:
    """While the collector is made, with few left; it can be made when there are more again."""
    undisturbed(place, folder)
    said = set[str]()
    for left in range(0, 12, 2):
        before = Before(place)
        try:
            with descriptors_left(left):
                first_batch(place, folder)
        except (MusterError, OSError) as error:
            assert re.search("open files|descriptors", text_of(error)), error
            said.add(type(error).__name__)
        before.check()
    undisturbed(place, folder)
    return (
        f"the constructor raises {' or '.join(sorted(said))}: too many open files"
        if said
        else "no effect"
    )


def out_of_disk(place: Backend, folder: Path, _: Connection) -> str:
    """While batches are recorded; there is room later."""
    (full := folder / "full").mkdir()
    try:
        mount(str(full), "1m")
    except OSError as error:
        raise NotHere(f"{error}, for a small file system") from error
    filler = full / "filler"
    collector = place.collector(folder, record=full / "recording", total_frames=FRAMES)
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass
    batches = [batch.clone() for batch in collector]
    try:
        collector.shutdown()
        raise AssertionError("it was recorded")
    except BadRecording as error:
        assert "No space left" in text_of(error), error
    filler.unlink()
    collector.shutdown()
    Outcome(batches, [], collector.stats(), OracleEnv.read(folder / "counts")).check()
    recorded = sum(batch.numel() for batch in muster.load(full / "recording"))
    assert recorded == FRAMES, f"{recorded} frames were recorded"
    return "shutdown() raises BadRecording: No space left; after space is freed, shutdown() again writes all frames"


def tiny_shm(place: Backend, folder: Path, _: Connection) -> str:
    try:
        mount("/dev/shm", "64k")
    except OSError as error:
        raise NotHere(f"{error}, for a small /dev/shm") from error
    undisturbed(place, folder)
    return "no effect"


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fault, and what has to come of it.

    Attributes:
        make: what the failing environment does, from the folder of the cell; or what the program
            does.
        errors: types of the error with ``on_failure="raise"``, by name; empty: the fault has no
            effect.
        says: pattern in the error's text: what happened, and what to do.
        apart: in places where environments share the program, the cell has a program of its own.
        elsewhere: outcomes that are not the rule, by ``Backend.where``: ``ENDS``, or why the fault
            does not apply.
        phase: that of the error, if it is not ``on``.
        ending: how a program ends where the outcome is ``ENDS``.
        run: what the cell does, if the fault is one of the program.
    """

    make: Any
    on: str = "step"
    errors: tuple[str, ...] = ()
    says: str = ""
    deadlines: dict[str, float] = field(default_factory=dict)
    apart: bool = False
    elsewhere: dict[str, str] = field(default_factory=dict)
    ending: str = ""
    phase: str = ""
    places: tuple[str, ...] = PLACES
    run: Callable[..., str] | None = None

    @property
    def modes(self) -> list[str]:
        """Faults of the program are the same for all."""
        return MODES if self.run is None else MODES[:1]

    def ends(self, backend: Backend) -> bool:
        """Whether the program ends."""
        return self.elsewhere.get(backend.where) == ENDS

    def alone(self, backend: Backend) -> bool:
        """Whether the cell has a program of its own."""
        shares = backend.where in ("here", "threads")
        return self.run is not None or self.ends(backend) or (self.apart and shares)


def always(what: Any) -> Callable[[Path], Any]:
    return lambda _: what


def dies(do: Any, ending: str, says: str, make: Any = None) -> Case:
    """The process of the environment ends."""
    elsewhere = {"here": ENDS, "threads": ENDS}
    return Case(
        make or always(do),
        errors=("WorkerDied",),
        says=says,
        elsewhere=elsewhere,
        ending=ending,
    )


def short_of_memory(folder: Path) -> Any:
    """The kernel's SIGKILL and its event, both made here: control groups are not ours to change."""
    try:
        if not Path("/sys/fs/cgroup/memory.events").is_symlink():
            has_events(events())
    except OSError as error:
        raise NotHere(f"{error}, for the events of a control group") from error
    events().write_text("oom 0\noom_kill 0\n")
    return KilledForMemory(events())


def events() -> Path:
    return Path(tempfile.gettempdir(), "memory-events")


def hangs(
    do: Any,
    *,
    on: str = "step",
    threads: str = "",
    says: str = r"its deadline is 1 s\..*longer deadline",
) -> Case:
    elsewhere = {
        "here": "does not apply: your own thread has no deadline; Ctrl-C ends it"
    }
    if threads:
        elsewhere["threads"] = f"does not apply: {threads}"
    return Case(
        always(do),
        on,
        errors=("WorkerHung",),
        says=says,
        deadlines={on: SHORT_S},
        elsewhere=elsewhere,
    )


def raises(error: Any, says: str, on: str = "step") -> Case:
    return Case(always(faults.Raising(error)), on, errors=("EnvError",), says=says)


def returns(do: Any, says: str) -> Case:
    """A step of the environment returns something else."""
    return Case(always(do), errors=("BadEnvOutput",), says=says)


def changes(do: Any, *args: Any, **elsewhere: str) -> Case:
    """The environment changes its process and goes on."""
    return Case(always(faults.Does(do, *args)), apart=True, elsewhere=elsewhere)


def breaks(do: Any, *args: Any) -> Case:
    """The environment takes from its worker what it needs to answer; the step itself is complete."""
    return Case(
        always(faults.Does(do, *args)),
        errors=("WorkerDied",),
        says="ended with exit code 1 during idle.*see standard error",
        phase="idle",
        elsewhere={"here": YOURS, "threads": YOURS},
    )


def forks(folder: Path) -> Any:
    """The fork raises an error into Muster's code."""
    from tests.fakes.forks import raises as forks_and_raises

    return faults.Does(forks_and_raises, folder / "forks")


MAIN_ONLY = "does not apply: Python allows it in the main thread only"
STOPS = "it stops your program, until SIGCONT"

FAULTS: dict[str, Case] = {
    "SIGKILL": dies(
        faults.Signalled(signal.SIGKILL),
        "SIGKILL",
        r"killed by SIGKILL during step\. .*Another program sent SIGKILL",
    ),
    "SIGSEGV": dies(
        faults.Signalled(signal.SIGSEGV),
        "SIGSEGV",
        r"killed by SIGSEGV during step\. That is a crash in native code",
    ),
    "out of memory": dies(
        None,
        "SIGKILL",
        r"killed by SIGKILL during step\. Probably out of memory",
        short_of_memory,
    ),
    "os._exit": dies(
        faults.exits_at_once,
        "exit code 0",
        r"ended with exit code 0 during step\. .*\(os\._exit, or",
    ),
    "hang in Python": hangs(faults.waits),
    "hang in C, GIL held": hangs(
        faults.holds_the_gil,
        threads="a thread that keeps the GIL stops the whole program",
    ),
    "SIGSTOP": hangs(
        faults.stops,
        threads=STOPS,
        says=r"its deadline is 1 s\. The process is stopped",
    ),
    "error": raises(partial(ValueError, "boom"), "ValueError: boom"),
    "unpicklable error": raises(faults.Unpicklable, "Unpicklable: holds a function"),
    "chained error": raises(faults.chained, r"ValueError: outer.*'inner'"),
    "BaseException": raises(faults.OwnBase, "OwnBase was raised"),
    "SystemExit": raises(partial(SystemExit, 3), "SystemExit was raised: 3"),
    "KeyboardInterrupt": raises(KeyboardInterrupt, "KeyboardInterrupt was raised"),
    "StopIteration": raises(partial(StopIteration, 7), "StopIteration: 7"),
    "error whose __str__ raises": raises(
        foreign.Mute, "Mute: <could not be shown: ZeroDivisionError>"
    ),
    "error whose __reduce__ raises": raises(foreign.Unreducible, "Unreducible"),
    "error whose properties raise": raises(foreign.Shy, "Shy"),
    "wrong shape": returns(
        faults.wrong_shape,
        r"observation is an array of shape \(3,\).* Fix the environment",
    ),
    "wrong dtype": returns(
        faults.wrong_dtype,
        "observation is an array of dtype complex128.* Fix the environment",
    ),
    "NaN": returns(faults.nan_reward, "reward is nan. The 10 rows before it are kept"),
    "inf": returns(
        faults.Reward(float("inf")), "reward is inf. The 10 rows before it are kept"
    ),
    "None": returns(faults.nothing, "returned NoneType"),
    "str": returns(faults.text, "observation is str"),
    "reset fails": raises(partial(ValueError, "boom"), "ValueError: boom", "reset"),
    "construct fails": raises(
        partial(ValueError, "boom"), "ValueError: boom", "construct"
    ),
    "close fails": raises(partial(ValueError, "boom"), "ValueError: boom", "close"),
    "close hangs": hangs(faults.waits, on="close"),
    "close exits": Case(
        always(faults.exits_at_once),
        "close",
        elsewhere={"here": ENDS, "threads": ENDS},
        ending="exit code 0",
    ),
    "forks": Case(forks, elsewhere={"here": YOURS, "threads": YOURS}),
    "starts threads": Case(
        always(faults.Does(faults.starts_threads)),
        elsewhere={"here": YOURS, "threads": YOURS},
    ),
    "closes descriptors": breaks(faults.closes_descriptors),
    "changes signal handlers": changes(
        faults.changes_signal_handlers, threads=MAIN_ONLY
    ),
    "changes the directory": changes(faults.changes_directory),
    "changes modules": changes(faults.removes_modules, "gymnasium"),
    "removes Muster's modules": breaks(faults.removes_modules, "muster"),
    "program is killed": Case(
        killed, run=killed, elsewhere=dict.fromkeys(PLACES, ENDS), ending="SIGKILL"
    ),
    "program is stopped": Case(stopped, run=stopped),
    "Ctrl-C, twice": Case(interrupted_twice, run=interrupted_twice),
    "out of descriptors": Case(out_of_descriptors, run=out_of_descriptors),
    "out of disk": Case(out_of_disk, run=out_of_disk),
    "tiny /dev/shm": Case(tiny_shm, run=tiny_shm),
    "node is killed": Case(
        always(NodeSignalled(signal.SIGKILL)),
        errors=("WorkerDied",),
        says="is lost with its node",
        places=("nodes",),
    ),
    "node is stopped": Case(
        always(NodeSignalled(signal.SIGSTOP)),
        errors=("WorkerDied",),
        says="is lost with its node",
        deadlines={"heartbeat": 3.0},
        places=("nodes",),
    ),
}


# --- one cell -------------------------------------------------------------------------------------


def cell(
    fault: str, backend: str, mode: str, folder: Path, connection: Connection
) -> str:
    """Run one and check it.

    Returns:
        the outcome.

    Raises:
        AssertionError: a finding.
        NotHere: the fault cannot be made on this machine.
    """
    case, place = FAULTS[fault], BACKENDS[backend]
    if case.run is not None:
        return case.run(place, folder, connection)
    if case.alone(place):
        return environment_fails(case, place, mode, folder)
    if backend not in _warm:
        undisturbed(place, folder)
        _warm.add(backend)
    before = Before(place)
    outcome = environment_fails(case, place, mode, folder)
    if case.errors == ("WorkerHung",):
        outcome += before.allow_hung()
    before.check()
    return outcome


_warm: set[str] = set()


def undisturbed(place: Backend, folder: Path) -> None:
    """Collect once without a fault. What fork servers need and imports open stays open."""
    inside = Path(tempfile.mkdtemp(dir=folder))
    run(
        inside,
        None,
        place.make,
        counts=inside / "counts",
        **place.options(inside / "counts", inside, None, "raise"),
    ).check()


class Before:
    """What there was before a cell; ``check`` refuses more."""

    def __init__(self, place: Backend) -> None:
        self.place = place
        # Threads that hang, and those that an environment of this process starts, are the user's.
        self.but: tuple[str, ...] = (
            ("threads",) if place.where in ("here", "threads") else ()
        )
        self.resources, self.files = resources(), self._files()

    def allow_hung(self) -> str:
        """A thread that hangs cannot be ended: it keeps what it has.

        Return a remark on that for the table.
        """
        if self.place.where == "threads":
            self.but += ("descriptors",)
            return "; its thread stays"
        return ""

    def check(self) -> None:
        grown = more_than(self.resources, self.but)
        assert not grown, f"left behind: {grown}; open are {descriptors()}"
        left = self._files() - self.files
        assert not left, f"left behind in the temporary folder: {left}"

    def _files(self) -> set[str]:
        return {*os.listdir(tempfile.gettempdir())} - {events().name}


def environment_fails(case: Case, place: Backend, mode: str, folder: Path) -> str:
    fault = Fault(case.make(folder), case.on, AT[case.on])
    options = place.options(folder / "counts", folder, fault, mode)
    options["timeouts"] = {**deadlines(LONG_S), **case.deadlines}
    try:
        got = run(folder, fault, place.make, counts=folder / "counts", **options)
    except UnknownOption as error:
        assert place.where == "here" and mode != "raise", error
        return "refused: no worker that could be restarted or dropped"
    except MusterError as error:
        assert case.on == "construct", error
        return f"the constructor raises {named(error, case, place)}"
    return judged(got, case, place, mode)


def judged(got: Outcome, case: Case, place: Backend, mode: str) -> str:
    """Check what holds for all cells, and that the reaction is that of the mode."""
    over = [error for error in got.errors if ALL_DROPPED in text_of(error)]
    errors = [error for error in got.errors if error not in over]
    gaps = got.stats.discarded.get("bad_env_output", 0) if mode == "raise" else 0
    of_node = place.where == "nodes" and case.places == ("nodes",)
    got.check(
        gaps=gaps, frames=None if over else FRAMES, unseen=2 * T if of_node else 0
    )
    said = []
    if case.on == "close":
        assert len(errors) <= 1 and not got.stats.discarded
    elif case.errors:
        assert len(errors) == (mode == "raise"), errors
        assert bool(over) == (mode == "drop" and place.workers == 1), got.errors
    else:
        assert not got.errors, got.errors
        assert not got.stats.discarded and not got.stats.restarts
    said += [named(error, case, place) for error in errors]
    if got.stats.restarts:
        said.append("restarted")
    if mode == "drop" and case.errors and case.on != "close":
        said.append(
            "dropped; then WorkerDied, as no worker is left" if over else "dropped"
        )
    # What was in flight at the end depends on timing.
    lost = {why: rows for why, rows in got.stats.discarded.items() if why != "shutdown"}
    assert {*lost} <= {why for name in case.errors for why in REASONS[name]}, lost
    said += [
        f"{rows} {'row' if rows == 1 else 'rows'} discarded ({why})"
        for why, rows in lost.items()
    ]
    return "; ".join(said) or "no effect"


def named(error: Any, case: Case, place: Backend) -> str:
    """The error in words of the table, after a check of its type, its phase and its text."""
    name = type(error).__name__
    if place.where == "here" and not isinstance(error, MusterError):
        return f"{name} as it was raised"
    assert name in case.errors, f"{name}: {text_of(error)}"
    assert error.phase == (case.phase or case.on) or case.places == ("nodes",), (
        f"phase {error.phase}: {text_of(error)}"
    )
    text = text_of(error)
    if type(error.__cause__) is ValueError:  # no other one is chained
        text += text_of(error.__cause__.__cause__ or ValueError())
    assert re.search(case.says, text, re.DOTALL), text
    phase = (
        "" if case.places == ("nodes",) else f", phase {error.phase}"
    )  # of the last message of the node
    where = f", worker {error.worker}" if error.worker is not None else ""
    where += f", environment {error.env_id}" if error.env_id is not None else ""
    return name + phase + where


# --- the process that runs cells ------------------------------------------------------------------


def serve(connection: Connection, temporary: Path) -> None:
    """Run the cells that are sent until there is no other."""
    tempfile.tempdir = str(temporary)
    with suppress(
        OSError
    ):  # without the right to, the names of all programs are counted
        own_mounts()
        mount("/dev/shm")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = ("outcome", cell(*request, connection))
        except NotHere as error:
            answer = ("outcome", f"not made here: {error}")
        except BaseException as error:
            traceback.print_exc()
            answer = ("finding", f"{type(error).__name__}: {text_of(error)}"[:600])
        connection.send(answer)
