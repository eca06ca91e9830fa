"""``python -m benchmarks.recovery``: how long a batch is delayed by the kill of a worker; ``--kills
20`` for a look.

Two workers with three environments each, restarted; sync and first-ready. A worker is killed
(SIGKILL) at a random time while batches are collected, and again when its successor has delivered:
every kill is measured, from the signal to the batch with the successor's first rows. Environments
count their own steps, and the data says if any is lost or doubled.

What else runs on the machine is part of the result: the load, and how many cores other processes
took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import KINDS, quantiles
from benchmarks.report import RESULTS, machine
from muster import Restart
from muster.testing import OracleEnv, check_stream
from tests.faults.test_worker_resources import descendants

ENVS = 3  # per worker
WARM = 10  # batches before the first kill
UNTIL_S = 0.05  # from a recovery to the next kill, at most
TARGET_MS = 500.0
QUIET = 0.1  # cores that others take, at most; where it is more, the figures are not about Muster alone
TICKS = os.sysconf("SC_CLK_TCK")


class Timed(OracleEnv):
    """Writes how much CPU time its process had used when it was first stepped."""

    def __init__(self, path: Path, times: Path, first: int) -> None:
        super().__init__(path, first, ENVS)
        self._times: Path | None = times if self.number == first else None

    def step(self, action: int) -> Any:
        if self._times is not None:
            with open(self._times, "ab") as file:
                file.write(struct.pack("d", time.process_time()))
            self._times = None
        return super().step(action)


class Recoveries:
    """Batches of a collector whose workers are killed one after the other.

    Attributes:
        seconds: from each kill to the first batch of the successor.
        cpu: of this process meanwhile, each.
    """

    def __init__(self, collector: Any, path: Path, count: int) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self._collector, self._path, self._left, self._rng = (
            collector,
            path,
            count,
            random.Random(count),
        )
        self._killed_at = self._cpu_at = 0.0
        self._worker = self._run = 0

    def batches(self) -> Iterator[Any]:
        killing: threading.Thread | None = None
        for _ in range(WARM):
            yield self._collector.next()
        for batch in self._collector:
            now, cpu = time.monotonic(), time.process_time()
            yield batch
            if killing is None or (not killing.is_alive() and self._is_back(batch)):
                if killing is not None:
                    self.seconds.append(now - self._killed_at)
                    self.cpu.append(cpu - self._cpu_at)
                if not self._left:
                    return
                self._left -= 1
                killing = threading.Thread(target=self._kill)
                killing.start()

    def _kill(self) -> None:
        time.sleep(self._rng.uniform(0, UNTIL_S))  # noqa: TID251 (kills at random times are what is measured)
        worker = self._rng.choice(self._collector.stats().workers)
        self._worker, self._run = (
            worker.index,
            int(OracleEnv.read(self._path)[worker.index * ENVS, 0]),
        )
        self._killed_at, self._cpu_at = time.monotonic(), time.process_time()
        os.kill(worker.pid, signal.SIGKILL)

    def _is_back(self, batch: Any) -> bool:
        """Rows of the successor of the worker that was killed are in a batch."""
        last = batch["observation"][..., -1, :2].reshape(-1, 2)
        return bool(
            ((last[:, 0] == self._worker * ENVS) & (last[:, 1] >= self._run)).any()
        )


def measure(kind: str, count: int) -> dict[str, Any]:
    """So many kills, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder) / "counts", Path(folder) / "times"
        factories = [partial(Timed, path, times, ENVS * i) for i in range(2)]
        options = {
            "num_envs": ENVS,
            "frames_per_batch": 600,
            "seed": 1,
            "on_failure": Restart(max_restarts=None),
        }
        with KINDS[kind](factories, None, **options) as collector:
            recoveries, load = Recoveries(collector, path, count), os.getloadavg()[0]
            begun, own, every = time.monotonic(), own_ticks(), busy_ticks()
            check_stream(
                recoveries.batches()
            )  # raises if anything is lost, doubled or shifted
            own, every, seconds = (
                own_ticks() - own,
                busy_ticks() - every,
                time.monotonic() - begun,
            )
        stats, made = collector.stats(), int(OracleEnv.read(path)[:, 2].sum())
        workers = [cpu for (cpu,) in struct.iter_unpack("d", times.read_bytes())][
            len(factories) :
        ]
    return {
        "kills": len(recoveries.seconds),
        "seconds": round(seconds, 1),
        "restarts": stats.restarts,
        "recovery_ms": quantiles(recoveries.seconds),
        "cpu_of_the_worker_until_its_first_step_ms": quantiles(workers),
        "cpu_of_this_process_meanwhile_ms": round(
            1e3 * statistics.median(recoveries.cpu), 1
        ),
        "unaccounted": stats.executed
        - stats.frames
        - sum(stats.discarded.values())
        - stats.in_flight,
        "in_the_middle_of_a_step": made - stats.executed,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "cores_taken_by_others": round((every - own) / TICKS / seconds, 2),
    }


def busy_ticks() -> int:
    """Of all processors."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return user + nice + system + irq + softirq + steal


def own_ticks() -> int:
    """Of this process, and all that it has started, also of those that have ended."""
    total = 0
    for pid in [os.getpid(), *descendants()]:
        try:
            total += sum(
                map(
                    int,
                    Path(f"/proc/{pid}/stat")
                    .read_text()
                    .rpartition(")")[2]
                    .split()[11:15],
                )
            )
        except OSError:  # it has ended
            pass
    return total


def table(found: dict[str, Any]) -> str:
    """Figures, and whether they can be compared with what was asked for."""
    lines = []
    for kind, run in found.items():
        ms, others = run["recovery_ms"], run["cores_taken_by_others"]
        verdict = "met" if ms["p99"] <= TARGET_MS else "missed"
        quiet = (
            "quiet machine"
            if others <= QUIET
            else f"NOT a quiet machine: others took {others:g} cores, rerun"
        )
        worker_ms = run["cpu_of_the_worker_until_its_first_step_ms"]["p50"]
        own_ms = run["cpu_of_this_process_meanwhile_ms"]
        before, after = run["load"]
        lines += [
            f"{kind}: {run['kills']} kills in {run['seconds']:g} s",
            f"  recovery p50 {ms['p50']:g}, p99 {ms['p99']:g}, max {ms['max']:g} ms; p99 <= {TARGET_MS:g}: {verdict}",
            f"  {quiet}; load {before:g} to {after:g}",
            f"  CPU: worker until its first step {worker_ms:g} ms, this process {own_ms:g} ms",
            f"  frames unaccounted for {run['unaccounted']}; made and not seen {run['in_the_middle_of_a_step']}",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--output", type=Path, default=RESULTS / "recovery.json")
    options = parser.parse_args()
    about = machine()
    found = {kind: measure(kind, options.kills) for kind in KINDS}
    options.output.write_text(
        json.dumps({"machine": about, "recovery": found}, indent=1) + "\n"
    )
    print(f"{table(found)}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
