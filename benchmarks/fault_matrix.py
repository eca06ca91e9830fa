"""``python -m benchmarks.fault_matrix`` (``make faults``): every fault, on every backend, with
every ``on_failure``.

The result is docs/fault_matrix.md, cell by cell, and benchmarks/results/fault_matrix.json.
``--backend``, ``--fault`` and ``--failure`` run some cells again; their results replace those of
the last run.

Cells run in a program of their own (``fault_matrix_cells.serve``), several after one another,
unless the fault ends the program. A cell that takes longer than ``LIMIT_S`` is a finding: its
processes are killed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.fault_matrix_cells import BACKENDS, ENDS, FAULTS, serve
from benchmarks.report import RESULTS, machine
from tests.fakes.fault_runs import MODES, all_gone, family

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = {
    "here": 100.0,
    "threads": 100.0,
    "processes": 150.0,
    "nodes": 280.0,
}  # less than the deadlines of a cell
START_S = 120.0
OUTPUT, PAGE = RESULTS / "fault_matrix.json", ROOT / "docs" / "fault_matrix.md"
BEGIN, END = "<!-- made by make faults -->", "<!-- end -->"
PACKAGES = ("muster-rl", "torch", "tensordict", "numpy", "gymnasium", "ray")
Key = tuple[str, str, str]  # fault, backend, mode


class Program:
    """A program that runs cells, and everything that it starts."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"MUSTER_FAULTS={uuid.uuid4().hex}"
        self.folder = Path(tempfile.mkdtemp(prefix="program-", dir=folder))
        (self.folder / "tmp").mkdir()
        self.log = self.folder / "log"
        here, there = socket.socketpair()
        key, value = self.mark.split("=")
        with there, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.fault_matrix",
                    "--serve",
                    str(there.fileno()),
                    str(self.folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[there.fileno()],
                cwd=ROOT,
                env={
                    **os.environ,
                    key: value,
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT / "src"), str(ROOT), *sys.path]
                    ),
                },
                start_new_session=True,
            )
        self.connection = Connection(here.detach())
        self.cells = 0

    def run(self, key: Key, limit_s: float) -> tuple[str, str]:
        """The kind of the answer ("outcome", "finding") and its text."""
        self.cells += 1
        folder = self.folder / f"cell-{self.cells}"
        folder.mkdir()
        until = time.monotonic() + limit_s + (START_S if self.cells == 1 else 0)
        try:
            self.connection.send((*key, folder))
            while self.connection.poll(max(0.0, until - time.monotonic())):
                kind, said = self.connection.recv()
                if kind != "do":
                    return kind, said
                self.do(said)
        except (EOFError, OSError):
            return "ended", self.end()
        self.kill()
        return "finding", f"no end within {limit_s:g} s"

    def do(self, what: str) -> None:
        """What a cell cannot do itself, because it is about the program."""
        if what == "kill":
            self.process.kill()
        elif what == "interrupt":
            self.process.send_signal(signal.SIGINT)
        elif what == "stop":
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(3.0)  # noqa: TID251 (longer than a worker's deadlines)
            self.process.send_signal(signal.SIGCONT)
            self.connection.send("continued")

    def end(self) -> str:
        """How it has ended; a text with "left" if any of its processes has not."""
        code = self.process.wait(60)
        left = [pid for pid in family(self.mark) if pid != self.process.pid]
        if not all_gone(left):
            return f"processes are left: {left}"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> str:
        """Let it end by itself; says what is wrong, or nothing."""
        self.connection.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the program does not end"
        return "" if all_gone(family(self.mark)) else "processes outlive the program"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        all_gone(family(self.mark), 0.0)


def run_backend(
    name: str, keys: list[Key], folder: Path
) -> Iterator[tuple[Key, dict[str, str]]]:
    """All cells of a backend, one after another, and their results."""
    backend, shared = BACKENDS[name], None
    try:
        for key in keys:
            case = FAULTS[key[0]]
            if (usual := case.elsewhere.get(backend.where, ENDS)) != ENDS:
                yield key, {"outcome": usual}
                continue
            alone = case.alone(backend)
            program = shared if shared is not None and not alone else Program(folder)
            kind, said = program.run(key, LIMIT_S[backend.where])
            if case.ends(backend) and (kind, said) == ("ended", case.ending):
                kind, said = "outcome", ENDS
            elif kind == "ended" or (
                case.ends(backend) and not said.startswith("refused")
            ):
                kind, said = "finding", f"{kind}: {said}"
            gone = program.process.poll() is not None
            if alone and not gone and (wrong := program.close()):
                kind, said = "finding", f"{said}, and {wrong}"
            if not alone:
                shared = None if gone else program
            yield (
                key,
                {"outcome": said}
                if kind == "outcome"
                else {"finding": said, "log": program.tail()},
            )
        if shared is not None and (wrong := shared.close()):
            yield (
                ("end of the program", name, "raise"),
                {"finding": wrong, "log": shared.tail()},
            )
    finally:
        if shared is not None:
            shared.kill()


# --- the page -------------------------------------------------------------------------------------


def table(cells: dict[Key, dict[str, str]]) -> str:
    """A row for each fault and each set of backends that answer it in the same way."""
    lines = ["| fault | backends | raise | restart | drop |", "|---|---|---|---|---|"]
    for fault, case in FAULTS.items():
        rows: dict[tuple[str, ...], list[str]] = {}
        for backend, place in BACKENDS.items():
            if place.where in case.places:
                got = [
                    cells.get((fault, backend, mode), {"outcome": "not run"})
                    for mode in case.modes
                ]
                said = [
                    one.get("outcome") or f"**finding**: {one['finding']}"
                    for one in got
                ]
                if len(set(said)) == 1 and said != ["not run"] * len(MODES):
                    said[1:] = ['"'] * (len(MODES) - 1)
                rows.setdefault(tuple(said), []).append(backend)
        for number, (said, backends) in enumerate(rows.items()):
            columns = [
                fault if number == 0 else "",
                _short(backends),
                *map(_cell, said),
            ]
            lines.append(f"| {' | '.join(columns)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _short(backends: list[str]) -> str:
    return "all" if len(backends) == len(BACKENDS) else "; ".join(backends)


def page(result: dict[str, Any]) -> str:
    """The generated part."""
    cells = {tuple(key.split(" | ")): value for key, value in result["cells"].items()}
    versions = ", ".join(
        f"{name} {number}" for name, number in sorted(result["versions"].items())
    )
    found = sum("finding" in cell for cell in cells.values())
    return f"{len(cells)} cells, {found} findings; {result['date']}, {versions}.\n\n{table(cells)}"


def write(result: dict[str, Any]) -> None:
    """The JSON file, and the page made from it."""
    OUTPUT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    PAGE.write_text(f"{head}{begin}\n\n{page(result)}\n\n{end}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fault_matrix", description=__doc__
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=[*BACKENDS],
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--fault",
        action="append",
        choices=[*FAULTS],
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--failure",
        action="append",
        choices=MODES,
        help="only this on_failure; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=1, help="backends at the same time")
    parser.add_argument(
        "--dry", action="store_true", help="print the results, and write no file"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Connection(int(options.serve[0])), Path(options.serve[1]) / "tmp")
        return 0
    chosen = {
        name: [
            (fault, name, mode)
            for mode in options.failure
            or MODES  # a run that is interrupted has all faults with the first ones
            for fault, case in FAULTS.items()
            if place.where in case.places
            and fault in (options.fault or FAULTS)
            and mode in case.modes
        ]
        for name, place in BACKENDS.items()
        if name in (options.backend or BACKENDS)
    }
    folder = Path(tempfile.mkdtemp(prefix="muster-faults-"))
    result = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {"cells": {}}
    versions = {
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
    result |= {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions,
    }
    findings, writing = list[Key](), threading.Lock()

    def backend(name: str) -> None:
        for key, got in run_backend(name, chosen[name], folder):
            log = got.pop("log", "")
            kind, said = next(iter(got.items()))
            print(
                " | ".join(key),
                f": {'FINDING ' * (kind == 'finding')}{said}\n{log}".rstrip(),
                flush=True,
            )
            with writing:
                findings.extend([key] * (kind == "finding"))
                result["cells"][" | ".join(key)] = got
                if not options.dry:
                    write(result)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(backend, chosen))
    print(f"{sum(map(len, chosen.values()))} cells, {len(findings)} findings")
    if findings:
        print(f"The logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
