"""``muster collect``: collects experience from one environment id, shows statistics, and records
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muster.cli import cluster
from muster.cli.collect_command import Collect
from muster.cli.options import (
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


def collect(command: Collect) -> int:
    """Run the command. Returns the exit code."""
    if cluster.is_node(command):
        return cluster.serve_rank(command)
    _check(command)
    command, frames = _sized(command)
    with ExitStack() as stack:
        policy, description = stack.enter_context(prepared(command, command.seed))
        stop = stack.enter_context(StopSignals(quiet=command.quiet))
        collector = stack.enter_context(_make_collector(command, policy, frames))
        recorder = (
            stack.enter_context(_recorder(command, description))
            if command.out
            else None
        )
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
        "collect",
        total,
        quiet=command.quiet,
        lines=lambda: worker_lines(stats().workers),
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
    lines = (
        []
        if stop.received is None
        else [f"stopped after {now.frames:,} of {total:,} frames"]
    )
    lines.append(
        summary(now, episodes, None if recorder is None else recording_s, elapsed_s)
    )
    if recorder is not None:
        with _full_disk(recorder):
            recorder.close()
        path = recorder.directory
        size = sum(file.stat().st_size for file in path.iterdir())
        lines.append(
            f"wrote     {path}  ({recorder.frames:,} frames, {size / 1e6:,.1f} MB)"
        )
        lines.append(
            f'read it   python -c "import muster; print(muster.load({str(path)!r}))"'
        )
    if not command.quiet:
        print("\n".join(lines))
    return stop.exit_code


def _check(command: Collect) -> None:
    """Check options that need others, and numbers."""
    cluster.check(command)
    if command.workers is None and command.backend is None:
        of_workers = (
            "asynchronous",
            "threads",
            "on_failure",
            "inference",
            "alternating",
        )
        refuse_given(command, of_workers, "workers: add --workers N")
    if command.watch_address is not None and not command.watch:
        raise BadOption(
            "--watch-address needs --watch. Add it, or remove --watch-address."
        )
    if command.alternating and command.inference != "server":
        raise BadOption(
            "--alternating needs --inference server. Add it, or remove --alternating."
        )
    check_numbers(command, workers=1, num_envs=1, seed=0)


def _sized(command: Collect) -> tuple[Collect, int]:
    """Return the command with the frames that will be collected, and the frames per batch."""
    workers, nodes = (
        (1, 1)
        if command.asynchronous
        else (command.workers or 1, cluster.nodes_of(command) or 1)
    )
    if command.round_up:
        unit = command.frames_per_batch or command.num_envs * workers * nodes
        command = replace(command, frames=-(-command.frames // unit) * unit)
    return command, frames_per_batch(
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
        command.out,
        meta=meta | {name: value for name, value in where.items() if value is not None},
    )
