"""``muster collect``: collects experience from one environment id, shows statistics, and records
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from muster.cli import cluster
from muster.cli.options import (
    NUM_ENVS,
    AllowImport,
    Count,
    Env,
    ObsDtype,
    Policy,
    check_numbers,
    frames_per_batch,
    refuse_given,
)
from muster.cli.report import StopSignals, summary
from muster.cli.request import obs_dtype_of, prepared
from muster.errors import BadOption, BadRecording
from muster.observing.progress import in_one_line, progress, worker_lines

if TYPE_CHECKING:
    from muster.collectors.base import BaseCollector
    from muster.recording import Recorder


@dataclass(frozen=True)
class Collect:
    """Collect experience from a Gymnasium environment, and record it with --out."""

    env: Env
    frames: Count
    """Exact number of environment steps over all environments: 51200, 51_200, 100k, 1e6."""

    num_envs: Annotated[int, NUM_ENVS] = 8
    """Number of environments that are stepped together; with --workers, in each worker."""

    workers: Annotated[int | None, arg(metavar="N")] = None
    """Number of worker processes (with --backend, on each node), with B environments each. Default: no workers."""

    backend: cluster.Backend | None = None
    """Collect on other machines, or in local processes (mp). `muster cluster` lists backends and nodes."""

    nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend: number of nodes. Default under torchrun: all ranks but the first."""

    min_nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend and --async: start when this number of nodes has joined; the others may join later."""

    address: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """With --backend ray: address of the cluster; auto: the cluster of this machine; local: start one."""

    bind: Annotated[str | None, arg(metavar="HOST[:PORT]")] = None
    """With other backends: address of this machine at which nodes join. Default: loopback."""

    join_timeout: Annotated[float, arg(metavar="S")] = cluster.JOIN_S
    """With --backend: seconds to wait for nodes to join, and to join again."""

    asynchronous: Annotated[bool, arg(name="async")] = False
    """With workers: yield the batch of each worker when it is ready, without waiting for the slowest."""

    threads: bool = False
    """With --workers: use threads instead of processes, for environments that mostly wait."""

    inference: Literal["worker", "server"] = "worker"
    """With workers: run the policy in each worker, or once for all workers, in this process or on the node."""

    alternating: bool = False
    """With --inference server: half of the workers step during the policy call for the other half."""

    on_failure: Literal["raise", "restart", "drop"] = "raise"
    """With workers: the reaction if a worker dies or hangs, or its environment raises."""

    policy: Policy = "random"
    obs_dtype: ObsDtype = "policy"

    seed: Annotated[int, arg(metavar="S")] = 0
    """Same seed, same data. Environment i gets seed + i."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Directory for the recording; must not contain a recording."""

    frames_per_batch: Annotated[Count | None, arg(metavar="N")] = None
    """Frames per batch. Default: a divisor of --frames near 2048."""

    watch: bool = False
    """Show the collection on a local web page, whose address is printed. `muster watch DIR` shows it afterwards."""

    watch_address: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """With --watch: address of the page. Beyond loopback, viewers need the token in the printed address."""

    allow_import: AllowImport = False

    quiet: bool = False
    """Print errors only: also no warnings, and not the address of --watch."""


def collect(command: Collect) -> int:
    """Run the command. Returns the exit code."""
    if cluster.is_node(command):
        return cluster.serve_rank(command)
    frames = _check(command)
    with ExitStack() as stack:
        policy, description = stack.enter_context(prepared(command, command.seed))
        stop = stack.enter_context(StopSignals(quiet=command.quiet))
        collector = stack.enter_context(_make_collector(command, policy, frames))
        recorder = stack.enter_context(_recorder(command, description)) if command.out else None
        return run(command, collector, recorder, stop)


def run(
    command: Any, collector: BaseCollector, recorder: Recorder | None, stop: StopSignals
) -> int:
    """Collect the ``frames`` of a command, or until a signal; print a summary, and return the exit
    code.
    """
    from muster.episodes.curve import EpisodeTotals

    episodes, recording_s, began_s = EpisodeTotals(), 0.0, time.perf_counter()
    total = command.frames
    stats = collector.stats
    with progress(
        "collect", total, quiet=command.quiet, lines=lambda: worker_lines(stats().workers)
    ) as show:
        for batch in collector:
            episodes = episodes.plus(collector.episodes)
            if recorder is not None:
                began = time.perf_counter()
                with _full_disk(recorder):
                    recorder.write(batch)
                recording_s += time.perf_counter() - began
            now = stats()
            show(now.frames, in_one_line(now, total), now.frames_per_s)
            if stop.received is not None:
                break
    elapsed_s, now = time.perf_counter() - began_s, stats()
    lines = [] if stop.received is None else [f"stopped after {now.frames:,} of {total:,} frames"]
    lines.append(summary(now, episodes, None if recorder is None else recording_s, elapsed_s))
    if recorder is not None:
        with _full_disk(recorder):
            recorder.close()
        path = recorder.directory
        size = sum(file.stat().st_size for file in path.iterdir())
        lines.append(f"wrote     {path}  ({recorder.frames:,} frames, {size / 1e6:,.1f} MB)")
        lines.append(f'read it   python -c "import muster; print(muster.load({str(path)!r}))"')
    if not command.quiet:
        print("\n".join(lines))
    return stop.exit_code


def _check(command: Collect) -> int:
    """Check the options, and return the frames per batch."""
    cluster.check(command)
    if command.workers is None and command.backend is None:
        of_workers = ("asynchronous", "threads", "on_failure", "inference", "alternating")
        refuse_given(command, of_workers, "workers: add --workers N")
    if command.watch_address is not None and not command.watch:
        raise BadOption("--watch-address needs --watch. Add it, or remove --watch-address.")
    if command.alternating and command.inference != "server":
        raise BadOption("--alternating needs --inference server. Add it, or remove --alternating.")
    check_numbers(command, workers=1, num_envs=1, seed=0)
    workers, nodes = (
        (1, 1) if command.asynchronous else (command.workers or 1, cluster.nodes_of(command) or 1)
    )
    return frames_per_batch(
        command.frames, command.num_envs, command.frames_per_batch, workers, nodes
    )


def _make_collector(command: Collect, policy: Any, frames: int) -> BaseCollector:
    from muster.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from muster.collectors.options import Watch

    options: dict[str, Any] = {
        "num_envs": command.num_envs,
        "frames_per_batch": frames,
        "total_frames": command.frames,
        "seed": command.seed,
        "obs_dtype": obs_dtype_of(command.obs_dtype),
    }
    if command.watch:
        address: dict[str, Any] = (
            {} if command.watch_address is None else {"address": command.watch_address}
        )
        options["watch"] = Watch(command.out, **address, announce=not command.quiet)
    if command.backend is not None:
        return cluster.make_collector(command, policy, options)
    if command.workers is None:
        return Collector(command.env, policy, **options)
    return (MultiAsyncCollector if command.asynchronous else MultiSyncCollector)(
        [command.env] * command.workers,
        policy,
        backend="threads" if command.threads else "processes",
        inference=cluster.inference_of(command),
        on_failure=command.on_failure,
        **options,
    )


@contextmanager
def _full_disk(recorder: Recorder) -> Iterator[None]:
    """Replace the advice of ``BadRecording``, which is to repeat a call, by one for the command
    line.
    """
    try:
        yield
    except BadRecording as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise BadRecording(
            f"Could not record into {recorder.directory}: {error.__cause__.strerror}. The batches"
            " written before can be read with muster.load. Free some space, and collect again with"
            " another --out."
        ) from error


def _recorder(command: Collect, policy: str) -> Recorder:
    from muster.recording import Recorder

    assert command.out is not None
    meta = {
        "env": command.env,
        "seed": command.seed,
        "policy": policy,
        "envs": command.num_envs,
        "frames": command.frames,
    }
    where = {
        "workers": command.workers,
        "backend": command.backend,
        "nodes": cluster.nodes_of(command),
    }
    return Recorder(
        command.out, meta=meta | {name: value for name, value in where.items() if value is not None}
    )
