"""Runs systems side by side: one process each, slices in turn, so that a slow moment of the machine
hits all.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
ANSWER_WITHIN_S = 180.0


class WorkerFailed(Exception):
    """A benchmark worker died, did not answer, or answered with an error."""


Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Slice:
    """What one slice measured: seconds on the wall, and of the CPU by this process (without its
    children).
    """

    frames: int
    wall: float
    cpu: float


@dataclass
class Series:
    """All slices of one system on one workload; ``note`` says why there are none."""

    slices: list[Slice] = field(default_factory=list)
    note: str = ""
    clock: Clock = "wall"

    @property
    def fps(self) -> list[float]:
        """Frames per second of each slice, by ``clock``."""
        return self.rates(self.clock)

    def rates(self, clock: Clock) -> list[float]:
        return [s.frames / getattr(s, clock) for s in self.slices]


def environment() -> dict[str, str]:
    """Of every subprocess: one thread, this checkout importable, no telemetry or accelerator
    look-ups.
    """
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **ONE_THREAD, **quiet, "PYTHONPATH": os.pathsep.join(path)}


def add_python_option(parser: argparse.ArgumentParser) -> None:
    """Where to look for peers, besides this interpreter."""
    parser.add_argument(
        "--python",
        action="append",
        default=[
            p for p in os.environ.get("MUSTER_BENCH_PYTHONS", "").split(os.pathsep) if p
        ],
        help="another interpreter to look for peers in (repeatable; also $MUSTER_BENCH_PYTHONS, ':'-separated)",
    )


def find_pythons(systems: Iterable[str], extra: Sequence[str]) -> dict[str, str | None]:
    """The first interpreter (this one, then ``extra``) in which all modules a system needs are
    installed.
    """
    wanted = sorted({module for name in systems for module in SYSTEMS[name].needs})
    script = (
        "import importlib.util as u, json, sys; "
        "print(json.dumps([m for m in sys.argv[1:] if u.find_spec(m) is not None]))"
    )
    found: dict[str, set[str]] = {}
    for python in (sys.executable, *extra):
        run = subprocess.run(
            [python, "-c", script, *wanted],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found[python] = set(json.loads(run.stdout))
    return {
        name: next(
            (
                python
                for python, modules in found.items()
                if modules.issuperset(SYSTEMS[name].needs)
            ),
            None,
        )
        for name in systems
    }


def peer_versions(pythons: Iterable[str | None]) -> dict[str, dict[str, str]]:
    """What is installed in each interpreter, of the packages that matter here."""
    script = (
        "import importlib.metadata as m, json, sys; "
        "found = {d.metadata['Name']: d.version for d in m.distributions()}; "
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    names = (
        "torch",
        "numpy",
        "gymnasium",
        "tensordict",
        "torchrl",
        "pandas",
        "tianshou",
        "ray",
        "pufferlib",
    )
    names += ("stable_baselines3", "stable-baselines3", "prt-rl")
    return {
        # by the environment's folder: where it lies on this machine is nobody's business
        Path(python).parent.parent.name: json.loads(
            subprocess.run(
                [python, "-c", script, *names], capture_output=True, timeout=60
            ).stdout
        )
        for python in sorted({python for python in pythons if python})
    }


class WorkerProcess:
    """Handle of one ``benchmarks.worker``, or of a module that extends it."""

    def __init__(self, python: str, module: str = "worker") -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment(),
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer.

        Raises:
            WorkerFailed: an error in the worker, its death, or no answer in time.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_WITHIN_S)
        if not ready:
            self._process.kill()
            raise WorkerFailed(f"no answer within {ANSWER_WITHIN_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def close(self) -> None:
        """End the process; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._process.wait(15)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["no output"]
        return f"worker ended with status {self._process.returncode}: {lines[-1][:200]}"


class Homes(ExitStack):
    """The processes of systems; those that share a home and an interpreter share one.

    They end with the context.

    Args:
        pythons: the interpreter of each system; None: it cannot run here.
        start: starts a process in an interpreter.
    """

    def __init__(
        self, pythons: Mapping[str, str | None], start: Callable[[str], WorkerProcess]
    ) -> None:
        super().__init__()
        self._pythons, self._start = pythons, start
        self._homes: dict[tuple[str, str], WorkerProcess] = {}

    def of(self, systems: Iterable[str]) -> dict[str, WorkerProcess]:
        """The process of each system that can run here, started if need be."""
        workers: dict[str, WorkerProcess] = {}
        for name in systems:
            if (python := self._pythons[name]) is None:
                continue
            home = (SYSTEMS[name].home or name, python)
            if home not in self._homes:
                self._homes[home] = self._start(python)
                self.callback(self._homes[home].close)
            workers[name] = self._homes[home]
        return workers


def measure(
    systems: Sequence[str],
    workloads: Sequence[str],
    *,
    slices: int,
    seconds: float,
    pythons: Sequence[str] = (),
    clock: Clock = "wall",
    progress: Callable[[str], None] = print,
) -> dict[str, dict[str, Series]]:
    """Slices of every system on every workload, as ``result[workload][system]``.

    A failing system gets a note.

    Args:
        systems, workloads: names.
        slices: rounds.
        seconds: per slice; a rollout that has begun is completed.
        pythons: interpreters to look for peers in, besides this one.
        clock: what rates are computed from. ``"cpu"`` is for machines that others use at the same
            time, and leaves out systems whose work is done by other processes.
        progress: gets one line per workload.
    """
    if clock == "cpu":
        systems = [name for name in systems if not SYSTEMS[name].children]
    results: dict[str, dict[str, Series]] = {}
    with Homes(find_pythons(systems, pythons), WorkerProcess) as homes:
        workers = homes.of(systems)
        for workload in workloads:
            results[workload] = measure_one(
                workload, systems, workers, slices=slices, seconds=seconds
            )
            for one in results[workload].values():
                one.clock = clock
            progress(
                f"{workload}: {slices} slices of {sum(not s.note for s in results[workload].values())} systems"
            )
    return results


def measure_one(
    workload: str,
    systems: Sequence[str],
    workers: dict[str, WorkerProcess],
    *,
    slices: int,
    seconds: float,
) -> dict[str, Series]:
    series = {
        name: Series(note="" if name in workers else "not installed")
        for name in systems
    }
    for name in workers:
        _try(series[name], workers[name], do="build", system=name, workload=workload)
    for turn in range(slices):
        for name in _rotated([n for n in systems if not series[n].note], turn):
            answer = _try(
                series[name], workers[name], do="run", system=name, seconds=seconds
            )
            if answer:
                series[name].slices.append(Slice(**answer))
    for name in workers:
        _try(Series(), workers[name], do="drop", system=name)
    return series


def _try(series: Series, worker: WorkerProcess, **command: Any) -> dict[str, Any]:
    try:
        return worker.ask(**command)
    except WorkerFailed as failure:
        series.note = str(failure)
        return {}


def _rotated(names: list[str], turn: int) -> list[str]:
    """Another system goes first in every round."""
    if not names:
        return names
    k = turn % len(names)
    return names[k:] + names[:k]
