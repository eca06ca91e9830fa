"""``muster tune``: finds the fastest collector on this machine, for one environment and policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from muster.cli.options import AllowImport, Count, Env, ObsDtype, Policy, check_numbers, check_seconds
from muster.cli.request import obs_dtype_of, prepared
from muster.observing.progress import short

if TYPE_CHECKING:
    from muster.tuning import Candidate, Tuning

MOST_ROWS = 12  # of the table


@dataclass(frozen=True)
class Tune:
    """Time a grid of collectors on this machine, and print the constructor of the fastest."""

    env: Env
    policy: Policy = "random"

    seconds: Annotated[float, arg(metavar="S")] = 20.0
    """Total seconds of collecting, without the start of workers."""

    num_envs: Annotated[tuple[int, ...], arg(metavar="N")] = ()
    """Total numbers of environments to try. Default: 8 32."""

    frames_per_batch: Annotated[Count, arg(metavar="N")] = 2048
    """Approximate number of frames per batch."""

    obs_dtype: ObsDtype = "policy"

    json: bool = False
    """Print everything as JSON."""

    allow_import: AllowImport = False


def tune(command: Tune) -> int:
    """Run the command. Returns the exit code."""
    check_seconds(command, "seconds")
    check_numbers(command, num_envs=1)
    with prepared(command, 0) as (policy, description):
        from muster.tuning import tune as find_best

        found = find_best(
            command.env,
            policy,
            seconds=command.seconds,
            num_envs=command.num_envs or None,
            frames_per_batch=command.frames_per_batch,
            say=_say,
            obs_dtype=obs_dtype_of(command.obs_dtype),
        )
    code = program(command, found)
    if command.json:
        print(json.dumps({**dataclasses.asdict(found), "program": code}, indent=2))
        return 0
    print(
        f"One worker computes {found.cpu_share:.0%} of the time, and this process may use {found.cores:g} cores "
        f"(policy: {description})."
    )
    _print_table(found)
    print(f"\n{code}")
    return 0


def program(command: Tune, found: Tuning) -> str:
    """A complete Python program that makes the best collector."""
    dtype = {"policy": "", "env": ", obs_dtype='env'"}.get(command.obs_dtype, f", obs_dtype=torch.{command.obs_dtype}")
    made = found.constructor_call(repr(command.env), "None" if command.policy == "random" else "policy", dtype)
    spaces = "env.observation_space, env.action_space"
    lines = [f"from muster import {made.partition('(')[0]}"]
    if "torch." in dtype:
        lines.append("import torch")
    if command.policy == "mlp" or command.policy.endswith(".safetensors"):
        chosen = f"mlp.fresh({spaces}, seed=0)"
        if command.policy != "mlp":
            lines.append("from pathlib import Path")
            chosen = f"mlp.from_file(Path({command.policy!r}), {spaces})"
        lines += ["from muster.cli import mlp", "import gymnasium"]
        lines += ["", f"env = gymnasium.make({command.env!r})", f"policy, _ = {chosen}"]
    elif command.policy != "random":
        file, _, name = command.policy.rpartition(":")
        lines += ["import runpy", "", f"policy = runpy.run_path({file!r})[{name!r}]"]
    return "\n".join([*lines, f"collector = {made}"])


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text} ...", file=sys.stderr)


def _print_table(found: Tuning) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("where it runs", "envs", "frames/s", ""):
        table.add_column(name, no_wrap=True, justify="right" if name in ("envs", "frames/s") else "left")
    for candidate in found.candidates[:MOST_ROWS]:
        table.add_row(*_row(candidate, found.best), style="bold" if candidate == found.best else None)
    console = Console(file=sys.stdout)
    console.print(table)
    console.print("envs: groups x environments of each; finalist: median of several slices, in turns", soft_wrap=True)
    if (more := len(found.candidates) - MOST_ROWS) > 0:
        console.print(f"{more} slower setups are not shown")
    for reason in dict.fromkeys(c.refused for c in found.candidates if c.refused):
        console.print(f"not possible: {reason}", soft_wrap=True)


def _row(candidate: Candidate, best: Candidate) -> list[str]:
    setup = candidate.setup
    return [
        setup.kind,
        f"{setup.groups} x {setup.num_envs}",
        "" if candidate.rate is None else short(candidate.rate),
        "best" if candidate == best else "finalist" if candidate.final else "not possible" if candidate.refused else "",
    ]
