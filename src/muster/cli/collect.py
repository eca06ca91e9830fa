"""``muster collect``: experience from one environment id, shown and recorded."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from muster.cli import cluster
from muster.cli.numbers import frames_per_batch
from muster.cli.options import AllowImport, Count, Env, ObsDtype, Policy
from muster.cli.policies import Chosen, check_policy, choose_policy, needs_spaces, obs_dtype_of
from muster.cli.report import Returns, reporting, summary
from muster.cli.signals import StopSignals
from muster.errors import BadOption, BadRecording, EnvError, ImportRefused, MusterError, described

if TYPE_CHECKING:
    from muster.collectors.base import BaseCollector
    from muster.recording import Recorder


@dataclass(frozen=True)
class Collect:
    """Collect experience from a Gymnasium environment, and record it with --out."""

    env: Env

    frames: Count
    """Environment steps over all environments, exactly: 51200, 51_200, 100k, 1e6."""

    envs: Annotated[int, arg(metavar="B")] = 8
    """Environments stepped together; with --workers, so many in each."""

    workers: Annotated[int | None, arg(metavar="N")] = None
    """Worker processes, for N x B environments in all. Without it this one collects; with --backend: on each node."""

    backend: cluster.Backend | None = None
    """Workers on nodes: other machines, or processes of this one (mp). How, and what is there: muster cluster."""

    nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend: how many; under torchrun, all ranks but the first."""

    min_nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend and --async: begin when so many have come; the others are used from when they do."""

    address: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """With --backend ray: of the cluster; auto: the one of this machine; local: start one."""

    bind: Annotated[str | None, arg(metavar="HOST[:PORT]")] = None
    """With other backends: address of this machine where nodes find this process, by default loopback."""

    join_timeout: Annotated[float, arg(metavar="S")] = cluster.JOIN_S
    """With --backend: seconds for nodes to come, and to come back."""

    asynchronous: Annotated[bool, arg(name="async")] = False
    """With workers: batches from one each, as they are ready; nobody waits for the slowest."""

    threads: bool = False
    """With --workers: threads instead of processes, for environments that mostly wait."""

    inference: Literal["worker", "server"] = "worker"
    """With workers: each acts with a copy of the policy; or they only step, and this process or a node acts for all."""

    alternating: bool = False
    """With --inference server: half of the workers step while the other half is acted for."""

    on_failure: Literal["raise", "restart", "drop"] = "raise"
    """With workers: what to do if one dies or hangs, or its environment raises."""

    policy: Policy = "random"

    obs_dtype: ObsDtype = "policy"

    seed: Annotated[int, arg(metavar="S")] = 0
    """Same seed, same data. Environment i gets seed + i."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Directory to record into; must not hold a recording."""

    frames_per_batch: Annotated[Count | None, arg(metavar="N")] = None
    """Frames per batch; by default a divisor of --frames near 2048."""

    allow_import: AllowImport = False

    quiet: bool = False
    """Print errors only."""


def collect(command: Collect) -> int:
    """Run the command. Returns the exit code.

    Raises:
        MusterError: for whatever is wrong with the request, before anything is collected.
    """
    if cluster.is_node(command):
        return cluster.serve_rank(command)
    frames = _check_numbers(command)
    admit(command.env, command.policy, allow_import=command.allow_import)
    chosen = policy_for(command.env, command.policy, command.seed)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        stack.enter_context(in_short(command.env, allow_import=command.allow_import))
        collector = stack.enter_context(_make_collector(command, chosen.policy, frames))
        recorder = stack.enter_context(_recorder(command, chosen.description)) if command.out else None
        run = _Collection(command, collector, recorder, stop)
        run.loop()
        if recorder is not None:
            with _full_disk(recorder):
                recorder.close()  # before we say that it is there
        if not command.quiet:
            print(run.result())
        return stop.exit_code


@dataclass
class _Collection:
    """One collection, from the first batch to the summary."""

    command: Collect
    collector: BaseCollector
    recorder: Recorder | None
    stop: StopSignals
    returns: Returns = dataclasses.field(default_factory=Returns)
    recording_s: float = 0.0
    elapsed_s: float = 0.0

    def loop(self) -> None:
        began_s = time.perf_counter()
        with reporting(self.command.frames, self.collector.stats, quiet=self.command.quiet) as report:
            for batch in self.collector:
                self.returns.add(self.collector.episodes)
                if self.recorder is not None:
                    began = time.perf_counter()
                    with _full_disk(self.recorder):
                        self.recorder.write(batch)
                    self.recording_s += time.perf_counter() - began
                report(self.collector.stats())
                if self.stop.received is not None:
                    break
        self.elapsed_s = time.perf_counter() - began_s

    def result(self) -> str:
        stats = self.collector.stats()
        text = summary(stats, self.returns, None if self.recorder is None else self.recording_s, self.elapsed_s)
        if self.stop.received is not None:
            text = f"stopped after {stats.frames:,} of {self.command.frames:,} frames\n{text}"
        if self.recorder is None:
            return text
        path = self.recorder.directory
        size = sum(file.stat().st_size for file in path.iterdir())
        return (
            f"{text}\nwrote     {path}  ({self.recorder.frames:,} frames, {size / 1e6:,.1f} MB)\n"
            f'read it   python -c "import muster; print(muster.load({str(path)!r}))"'
        )


def _check_numbers(command: Collect) -> int:
    """The size of a batch, if all numbers fit together."""
    cluster.check(command)
    if command.workers is None and command.backend is None:
        given = {"async": command.asynchronous, "threads": command.threads, "on-failure": command.on_failure != "raise"}
        given |= {"inference": command.inference != "worker", "alternating": command.alternating}
        if useless := [f"--{name}" for name, is_given in given.items() if is_given]:
            raise BadOption(f"{useless[0]} is about workers: add --workers N, or leave it out.")
    elif command.workers is not None and command.workers < 1:
        raise BadOption(f"--workers {command.workers}: at least one is needed. Without --workers there are none.")
    if command.alternating and command.inference != "server":
        raise BadOption("--alternating is about --inference server: add that, or leave it out.")
    if command.seed < 0:
        raise BadOption(f"--seed {command.seed} is negative.")
    workers, nodes = (1, 1) if command.asynchronous else (command.workers or 1, cluster.nodes_of(command) or 1)
    return frames_per_batch(command.frames, command.envs, command.frames_per_batch, workers, nodes)


def _make_collector(command: Collect, policy: Any, frames: int) -> BaseCollector:
    from muster.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

    options: dict[str, Any] = {
        "num_envs": command.envs,
        "frames_per_batch": frames,
        "total_frames": command.frames,
        "seed": command.seed,
        "obs_dtype": obs_dtype_of(command.obs_dtype),
    }
    if command.backend is not None:
        return cluster.make_collector(command, policy, options)
    if command.workers is None:
        return Collector(command.env, policy, **options)
    return (MultiAsyncCollector if command.asynchronous else MultiSyncCollector)(
        [command.env] * command.workers,
        policy,
        backend="threads" if command.threads else "processes",
        inference=command.inference,
        alternating=command.alternating,
        on_failure=command.on_failure,
        **options,
    )


@contextmanager
def in_short(env: str, *, allow_import: bool) -> Iterator[None]:
    """Say the first part of errors and warnings about workers; the traceback only where code of the user's may run."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"muster: {_first_part(message)}", file=sys.stderr)
        try:
            yield
        except MusterError as error:
            if error.worker is None:
                raise
            if allow_import:
                print(error, file=sys.stderr)
            error.args = (f"{_first_part(error)}{_replay_hint(env, error)}",)
            raise error from None  # the original has no traceback in this process


def _first_part(error: object) -> str:
    return str(error).partition("\n\n")[0]


def _replay_hint(env: str, error: MusterError) -> str:
    if error.capsule is None:
        return ""
    trust = " --trust" if ":" in env else ""
    return f"\nSee it happen again with: muster replay {error.capsule}{trust}"


def admit(env: str, policy: str, *, allow_import: bool) -> None:
    """Refuse an id and a ``--policy`` that can be refused by name; imports, if allowed, find what is in this directory.

    Raises:
        ImportRefused, BadOption: see ``check_env_id``, ``check_policy`` and ``find_env``.
    """
    check_env_id(env, allow_import=allow_import)
    check_policy(policy, allow_import=allow_import)
    if allow_import and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    find_env(env)


def policy_for(env: str, policy: str, seed: int) -> Chosen:
    """What ``choose_policy`` makes of a ``--policy``; the environment is made only where its spaces are needed."""
    return choose_policy(policy, env_spaces(env) if needs_spaces(policy) else None, seed)


def check_env_id(env: str, *, allow_import: bool) -> None:
    """Refuse ids that import a module.

    Raises:
        ImportRefused: ``MODULE:ID`` without ``--allow-import``.
    """
    if ":" in env and not allow_import:
        raise ImportRefused(
            f"{env}: gymnasium imports the module before the colon, and so runs the code in it. "
            f"If you trust {env.partition(':')[0]!r}, add --allow-import."
        )


def find_env(env: str) -> None:
    """Look an id up (importing its module, if it names one) without making the environment.

    Raises:
        BadOption: there is no such id; the message names similar ones.
    """
    import gymnasium

    module, _, name = env.rpartition(":")
    try:
        if module:
            _import(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=4, cutoff=0.6)
        hint = f" Similar: {', '.join(near)}." if near else ""
        if isinstance(error, gymnasium.error.NamespaceNotFound):
            hint += (
                f" If an installed package has it, name the package: muster collect PACKAGE:{name} --allow-import "
                f"(ale_py for ALE)."
            )
        raise BadOption(f"There is no environment {name!r}.{hint}") from error


def _import(module: str) -> None:
    import importlib

    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # the module is there, and something that it imports is not
        raise BadOption(f"There is no module {module!r} to import (searched where Python does, and here).") from error


def env_spaces(env: str) -> tuple[Any, Any]:
    """Observation and action space of an environment.

    Raises:
        EnvError: it cannot be made.
    """
    import gymnasium

    make: Callable[..., Any] = gymnasium.make
    try:
        one = make(env)
    except Exception as error:  # whatever a foreign constructor raises; it is the cause
        raise EnvError(f"Making {env} raised {described(error)}") from error
    try:
        return one.observation_space, one.action_space
    finally:
        one.close()


@contextmanager
def _full_disk(recorder: Recorder) -> Iterator[None]:
    """Say what a command's user can do, who cannot repeat a call."""
    try:
        yield
    except BadRecording as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise BadRecording(
            f"Could not record into {recorder.directory}: {error.__cause__.strerror}. What was written before can be "
            f"read with muster.load. Free some space, and collect again with another --out."
        ) from error


def _recorder(command: Collect, policy: str) -> Recorder:
    from muster.recording import Recorder

    assert command.out is not None
    meta = {"env": command.env, "seed": command.seed, "policy": policy, "envs": command.envs, "frames": command.frames}
    where = {"workers": command.workers, "backend": command.backend, "nodes": cluster.nodes_of(command)}
    return Recorder(command.out, meta=meta | {name: value for name, value in where.items() if value is not None})
