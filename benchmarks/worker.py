"""One or a few systems in a process of their own: ``python -m benchmarks.worker``, driven by lines
of JSON.

Commands on stdin, one answer each on stdout::

    {"do": "build", "system": s, "workload": w} -> {"ok": true}               builds, runs one rollout to warm up
    {"do": "run", "system": s, "seconds": n}    -> {"frames", "wall", "cpu"}  whole rollouts until n seconds are over
    {"do": "drop", "system": s}                 -> {"ok": true}               closes what was built

An exception is answered by ``{"error": ...}``; the process ends with its stdin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from typing import Any

from benchmarks.systems import SYSTEMS, System
from benchmarks.workloads import WORKLOADS


class Worker:
    def __init__(self) -> None:
        self.systems: dict[str, System] = {}

    def build(self, system: str, workload: str) -> dict[str, Any]:
        self.systems[system] = SYSTEMS[system].build(WORKLOADS[workload])
        self.systems[system].rollout()
        return {"ok": True}

    def run(self, system: str, seconds: float) -> dict[str, Any]:
        rollout = self.systems[system].rollout
        frames = 0
        cpu, start = time.process_time(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            frames += rollout()
        return {
            "frames": frames,
            "wall": time.perf_counter() - start,
            "cpu": time.process_time() - cpu,
        }

    def drop(self, system: str) -> dict[str, Any]:
        built = self.systems.pop(system, None)
        if built is not None:
            built.close()
        gc.collect()
        return {"ok": True}


def main(worker: Worker | None = None) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up between the answers
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    worker = worker or Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)
    for name in list(worker.systems):
        worker.drop(name)
    os._exit(0)  # some libraries leave threads behind that would keep the process


if __name__ == "__main__":
    main()
