"""Programs with a collector, for tests that kill them: ``python -m tests.fakes.fault_parents NAME
FOLDER``.

Each says "ready" when it is where it is to be killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster import (
    AsyncCollector,
    DistributedCollector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.testing import Fault, OracleEnv
from tests.fakes import faults
from tests.fakes.lost_nodes import NodeSignalled

T = 20

# Nothing is compiled here, and tensordict would import the compiler: 2 seconds of CPU time for each
# program.
torch.compiler.allow_in_graph = torch.compiler.assume_constant_result = (
    lambda function: function
)


def collector(
    folder: Path,
    fault: Fault | None = None,
    kind: Any = MultiSyncCollector,
    **options: Any,
) -> Any:
    path = folder / "counts"
    factories = [partial(OracleEnv, path, 0, 1, fault), partial(OracleEnv, path, 1)]
    return kind(factories, None, frames_per_batch=2 * T, **options)


def ready() -> None:
    print("ready", flush=True)


def idle(folder: Path, **options: Any) -> None:
    with collector(folder, **options) as made:
        made.next()
        ready()
        while True:
            select.select([], [], [])


def stepping(folder: Path) -> None:
    with collector(folder, kind=MultiAsyncCollector) as made:
        for number, _ in enumerate(made):
            if number == 5:
                ready()


def waiting(folder: Path) -> None:
    """For a worker that takes for ever, without a deadline."""
    hung(folder, faults.waits)


def hung(folder: Path, way: Any = faults.holds_the_gil) -> None:
    made = collector(folder, Fault(way, at=30), timeouts={"step": None})
    watch(folder)
    with made:
        for _ in made:
            pass


def stopped_midway(folder: Path) -> None:
    """For a step that takes as long as there is no file "go", with a deadline of 3 s."""
    fault = Fault(faults.WaitsFor(folder / "go"), at=30)
    made = collector(folder, fault, timeouts={"step": 3.0}, total_frames=8 * T)
    watch(folder)
    with made:
        print(sum(batch.numel() for batch in made), flush=True)


def has_child(folder: Path, *, detached: bool) -> Fault:
    """Every environment starts a program; ``detached``: in a session of its own."""
    return Fault(
        faults.HasChild(str(folder / "pids"), detached=detached), "construct", runs=None
    )


def grandchildren(folder: Path, *, detached: bool = False) -> None:
    collecting(folder, fault=has_child(folder, detached=detached))


def collecting(folder: Path, **options: Any) -> None:
    with collector(folder, **options) as made:
        made.next()
        ready()
        while True:
            made.next()


simulators = partial(grandchildren, detached=True)
threads = partial(collecting, backend="threads")
spawned = partial(collecting, start_method="spawn")


def raises(folder: Path, fault: Fault | None = None) -> None:
    made = collector(folder, fault)
    made.next()
    ready()
    raise ValueError("in the user's own loop")


def simulators_raise(folder: Path) -> None:
    raises(folder, has_child(folder, detached=True))


def starting(folder: Path) -> None:
    watch(folder, begun=0)
    collector(folder, Fault(faults.waits, "construct"))


class KilledAt:
    """A profiler that ends the program by SIGKILL at the n-th "call" or "return" of a function."""

    def __init__(self, place: str) -> None:
        self.file, self.function, self.event, count = place.split(":")
        self.left = int(count)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == self.event
            and code.co_name == self.function
            and code.co_filename.endswith(self.file)
        ):
            self.left -= 1
            if not self.left:
                os.write(1, b"ready\n")
                os.kill(os.getpid(), signal.SIGKILL)


def constructing(folder: Path, kind: str, place: str) -> None:
    """Killed there, with a simulator in a session of its own for each environment that is made."""
    killer = KilledAt(place)
    threading.setprofile(killer)
    sys.setprofile(killer)
    fault = has_child(folder, detached=True)
    factories = [
        partial(OracleEnv, folder / "counts", number, 1, fault) for number in range(2)
    ]
    if kind == "AsyncCollector":
        AsyncCollector(factories[0], None, frames_per_batch=T)
    elif kind == "Evaluator":
        evaluator = Evaluator(factories[0], None, num_envs=1, num_workers=2)
        evaluator.trigger()
        evaluator.wait()
    elif kind == "served":
        policy = faults.FaultyPolicy(str(folder / "mark"), None, at=1 << 60)
        MultiSyncCollector(
            factories, policy, frames_per_batch=2 * T, inference="server"
        )
    else:
        cls = (
            MultiSyncCollector if kind == "MultiSyncCollector" else MultiAsyncCollector
        )
        cls(factories, None, frames_per_batch=2 * T)


def closing_hangs(folder: Path) -> None:
    made = collector(
        folder, Fault(faults.holds_the_gil, "close"), timeouts={"close": None}
    )
    made.next()
    ready()
    made.shutdown()


def never_shut_down(folder: Path) -> None:
    made = collector(folder, kind=MultiAsyncCollector)
    made.next()
    globals()["kept"] = made  # until the interpreter ends
    ready()


def thrown_away_with_a_hang(folder: Path) -> None:
    made = collector(
        folder,
        Fault(faults.holds_the_gil, at=30),
        kind=MultiAsyncCollector,
        timeouts={"step": None},
    )
    made.next()
    globals()["kept"] = made
    while OracleEnv.read(folder / "counts")[0, 1] < 31:
        select.select([], [], [], 0.01)
    ready()


def served(folder: Path, kind: Any = MultiSyncCollector, do: Any = None) -> None:
    """A server acts; it goes wrong in its 60th call."""
    policy = faults.FaultyPolicy(str(folder / "mark"), do or (lambda _: ready()), at=60)
    factories = [partial(OracleEnv, folder / "counts", number) for number in range(2)]
    with kind(
        factories,
        policy,
        frames_per_batch=2 * T,
        inference="server",
        timeouts={"policy": None},
    ) as made:
        for _ in made:
            pass


def served_as_ready(folder: Path) -> None:
    served(folder, MultiAsyncCollector)


def served_never(folder: Path) -> None:
    def waits(_: object) -> None:
        ready()
        faults.waits(None)

    served(folder, do=waits)


def served_and_forgotten(folder: Path) -> None:
    policy = faults.FaultyPolicy(str(folder / "mark"), None, at=1 << 60)
    factories = [partial(OracleEnv, folder / "counts", number) for number in range(2)]
    made = MultiAsyncCollector(
        factories, policy, frames_per_batch=2 * T, inference="server"
    )
    made.next()
    globals()["kept"] = made  # until the interpreter ends
    ready()


def nodes(folder: Path, **options: Any) -> None:
    from tests.fakes.node_runs import async_nodes

    with collector(folder, kind=async_nodes, **options) as made:
        for number, _ in enumerate(made):
            if number == 5:
                ready()


def nodes_idle(folder: Path) -> None:
    from tests.fakes.node_runs import sync_nodes

    idle(folder, kind=sync_nodes)


def nodes_hung(folder: Path) -> None:
    """A worker never ends a step, and its node never says anything again."""
    from tests.fakes.node_runs import async_nodes

    watch(folder)
    with collector(
        folder,
        Fault(NodeSignalled(signal.SIGSTOP), at=30),
        kind=async_nodes,
        timeouts={"heartbeat": 1000.0},
    ) as made:
        for _ in made:
            pass


def nodes_joining(folder: Path) -> None:
    """They never come."""
    from tests.fakes.node_runs import births, late

    launcher = late(folder / "births", joins=0)
    say_when(lambda: len(births(folder / "births")) == 2)
    nodes(folder, launcher=launcher)


SLOW_IMPORT = """
import ctypes, os, pathlib
class Environment: "As in the real dm_env."
if os.getpid() != int(os.environ["MUSTER_TEST_MAIN"]):  # the fork server, which imports what the main process has
    pathlib.Path(__file__).with_name("importing").touch()
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # for ever, with the GIL, and no signal wakes it: as loading torch, but longer
"""


def making_nodes(folder: Path, launcher: str) -> None:
    """Says "made" when the collector is."""
    if launcher == "importing":
        (folder / "dm_env.py").write_text(SLOW_IMPORT)
        os.environ["MUSTER_TEST_MAIN"] = str(os.getpid())
        sys.path.insert(0, str(folder))
        assert "dm_env" not in sys.modules
        import dm_env  # noqa: F401  (is preloaded)

        launcher = "mp"
    os.chdir(folder)  # for the files of jobs
    warnings.filterwarnings("ignore", "There is no SLURM here")
    ready()
    with collector(
        folder, kind=DistributedCollector, launcher=launcher, sync=True
    ) as made:
        print("made", flush=True)
        for _ in made:
            pass


def watch(folder: Path, begun: int = 31) -> None:
    """Say "ready" when environment 0 is made and has begun so many steps."""

    def has_begun() -> bool:
        counts = OracleEnv.read(folder / "counts")
        return bool(len(counts) and counts[0, 0] and counts[0, 1] >= begun)

    say_when(has_begun)


def say_when(happened: Callable[[], bool]) -> None:
    """Say "ready" then, wherever the program is."""

    def look() -> None:
        while not happened():
            select.select([], [], [], 0.01)
        ready()

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    sys.stdout = os.fdopen(1, "w", buffering=1)
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
