"""Programs that end while Muster is at work: ``python -m tests.fakes.ending_programs REPORT
NAME/END ...``.

Each runs in a fork of this process, which has imported everything and started nothing, up to the
real end of its interpreter. REPORT gets a JSON object: for each program its exit status (None: it
had to be killed), what it has written to standard error, and the seconds from the end of its main
thread's work to the end of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import tensordict
import torch
from torch import nn

import muster
from muster.testing import CountingEnv
from tests.waits import wait_until

with contextlib.suppress(ImportError):
    # If it is installed, an exit handler of torch imports it. That runs code from a string,
    # whereupon CPython forgets that the program was ended by Ctrl-C, and ends with status 1.
    import tabulate  # noqa: F401

LIMIT_S = 90.0
KEPT: list[Any] = []  # until the interpreter ends


class LastBatches:
    """A replay buffer that copies batches, and keeps the last few."""

    def __init__(self) -> None:
        self.rows, self._batches = 0, deque[Any](maxlen=4)

    def extend(self, batch: Any) -> None:
        self._batches.append(batch.clone())
        self.rows += batch.numel()


class Blocks(CountingEnv):
    """Its third step never ends: ``how`` it waits."""

    how = "lock"

    def step(self, action: Any) -> Any:
        if self.executed == 2:
            print("blocks", flush=True)
            if self.how == "lock":
                threading.Event().wait()
            while True:
                pass
        return super().step(action)


class Spins(Blocks):
    how = "loop"


class Wide(nn.Sequential):
    """In which the thread that acts is nearly always."""

    calls = 0

    def forward(self, observation: Any) -> Any:
        Wide.calls += 1
        return super().forward(observation)


def net() -> nn.Module:
    return Wide(
        nn.Linear(4, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 2)
    )


def options(**more: Any) -> dict[str, Any]:
    return {"frames_per_batch": 64, "seed": 0, **more}


def in_background(
    kind: Any,
    env: Any = "CartPole-v1",
    *,
    policy: Any = ...,
    frames: int = 64,
    buffer: Any = None,
    **more: Any,
) -> Any:
    buffer = buffer or LastBatches()
    policy = muster.policies.categorical(net()) if policy is ... else policy
    collector = kind(env, policy, **options(replay_buffer=buffer, **more))
    collector.start()
    KEPT.append(collector)
    if frames:
        wait_until(lambda: buffer.rows >= frames)
    return collector


def nothing() -> None:
    """What the end of an interpreter takes."""
    KEPT.append(net()(torch.ones(4)))


def in_process() -> None:
    in_background(muster.Collector, num_envs=32)


class Slow(LastBatches):
    """Takes its time, and says at the end of the program if it was interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.ended = 0
        atexit.register(self.check)

    def extend(self, batch: Any) -> None:
        self.begun += 1
        super().extend(batch)
        threading.Event().wait(0.4)
        self.ended += 1

    def check(self) -> None:
        if self.begun != self.ended:
            print("a batch was interrupted", file=sys.stderr)


def completes_its_batch() -> None:
    in_background(muster.Collector, CountingEnv, policy=None, buffer=Slow())


def dropped() -> None:
    """Nothing refers to the collector any more."""
    in_background(muster.Collector, num_envs=32)
    KEPT.clear()


def long_batch() -> None:
    """A batch that takes a minute: it is interrupted between two lines of Python."""
    in_background(muster.Collector, num_envs=32, frames_per_batch=1_600_000, frames=0)
    wait_until(lambda: Wide.calls > 20)


def blocked_in_a_lock() -> None:
    in_background(muster.Collector, Blocks, policy=None, frames=0)


def blocked_in_a_loop() -> None:
    in_background(muster.Collector, Spins, policy=None, frames=0)


def recorded_and_watched() -> None:
    folder = tempfile.mkdtemp()
    watch = muster.Watch(directory=folder)
    in_background(
        muster.Collector, num_envs=8, watch=watch, record=Path(folder, "recording")
    )


def processes() -> None:
    in_background(muster.MultiSyncCollector, ["CartPole-v1"] * 2, on_failure="restart")


def async_process() -> None:
    in_background(muster.AsyncCollector, on_failure="restart")


def threads() -> None:
    in_background(
        muster.MultiSyncCollector,
        ["CartPole-v1"] * 2,
        num_envs=32,
        backend="threads",
        frames_per_batch=640,
    )


def threads_ahead() -> None:
    """Nobody waits for them: they fill the batches that follow."""
    collector = muster.MultiAsyncCollector(
        ["CartPole-v1"] * 2,
        muster.policies.categorical(net()),
        **options(num_envs=32, backend="threads", frames_per_batch=640),
    )
    KEPT.append(collector)
    batches = iter(collector)
    next(batches)
    KEPT.append(batches)


def served() -> None:
    in_background(
        muster.MultiAsyncCollector, ["CartPole-v1"] * 2, num_envs=32, inference="server"
    )


def nodes() -> None:
    in_background(
        muster.DistributedCollector,
        ["CartPole-v1"] * 2,
        launcher="mp",
        on_failure="restart",
    )


def nodes_with_large_batches() -> None:
    """They are in torch, in threads of gloo and of Muster, most of the time."""
    in_background(
        muster.DistributedCollector,
        ["CartPole-v1"] * 2,
        launcher="mp",
        num_envs=512,
        frames_per_batch=1 << 17,
    )


def policy_server() -> None:
    """No client ever comes."""
    obs, act = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    server = muster.serve(
        muster.policies.categorical(net()),
        observation_space=obs,
        action_space=act,
        **{"max_clients": 3, "frames_per_batch": 20, "replay_buffer": LastBatches()},
    )
    server.start()
    KEPT.append(server)


def evaluator() -> None:
    made = muster.Evaluator(
        "CartPole-v1", muster.policies.categorical(net()), episodes=3, num_workers=1
    )
    made.trigger()
    KEPT.append(made)


def end(how: str) -> None:
    if how == "error":
        raise ValueError("of the program")
    if how == "exit":
        sys.exit(7)
    if how == "interrupt":
        raise KeyboardInterrupt


def report_of(pid: int, files: list[Path]) -> tuple[int | None, str, float]:
    """Wait for a program, and kill it after ``LIMIT_S``."""
    pause, deadline, status = threading.Event(), time.monotonic() + LIMIT_S, None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        pause.wait(0.01)
    now = time.time()
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said, left = (file.read_text() for file in files)
    return status, said, now - float(left or "nan")


if __name__ == "__main__":
    torch.set_num_threads(1)
    imported = (
        muster.Collector,
        muster.DistributedCollector,
        muster.Evaluator,
        muster.serve,
        muster.policies,
        tensordict,
    )
    gc.freeze()
    reports = {}
    for program in sys.argv[2:]:
        name, _, how = program.partition("/")
        said, left = (Path(tempfile.mkstemp()[1]) for _ in range(2))
        child = os.fork()
        if child == 0:
            os.dup2(os.open(said, os.O_WRONLY), 2)
            globals()[name]()
            left.write_text(str(time.time()))
            end(how)
            break
        reports[program] = report_of(child, [said, left])
    else:
        Path(sys.argv[1]).write_text(json.dumps(reports))
