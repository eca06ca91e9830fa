"""``muster tune``: finds the fastest collector on this machine, for one environment and policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from tyro.conf import arg

from muster.cli.options import (
    NUM_ENVS,
    AllowImport,
    Count,
    Env,
    ObsDtype,
    Policy,
    check_numbers,
    check_seconds,
)
from muster.cli.request import obs_dtype_of, prepared
from muster.utils.texts import short

if TYPE_CHECKING:
    from torch import nn

    from muster.tuning import Candidate, Tuning

MOST_ROWS = 12  # of the table


@dataclass(frozen=True)
class Tune:
    """Time a grid of collectors on this machine, and print the constructor of the fastest."""

    env: Env
    policy: Policy = "random"

    seconds: Annotated[float, arg(metavar="S")] = 20.0
    """Total seconds of collecting, without the start of workers."""

    num_envs: Annotated[tuple[int, ...], NUM_ENVS] = ()
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
    cores = f"{found.cores:g} core{'s' * (found.cores != 1)}"
    print(
        f"A worker keeps its core {found.cpu_share:.0%} busy; {cores} available (policy:"
        f" {description})."
    )
    _print_table(found)
    print(f"\n{code}")
    return 0


def program(command: Tune, found: Tuning) -> str:
    """A complete Python program that makes the best collector."""
    dtype = {"policy": "", "env": ", obs_dtype='env'"}.get(
        command.obs_dtype, f", obs_dtype=torch.{command.obs_dtype}"
    )
    made = found.constructor_call(
        repr(command.env), "None" if command.policy == "random" else "policy", dtype
    )
    lines = [f"from muster import {made.partition('(')[0]}"]
    if "torch." in dtype or command.policy == "mlp":
        lines.append("import torch")
    if command.policy == "mlp" or command.policy.endswith(".safetensors"):
        lines += network(command)
    elif command.policy != "random":
        file, _, name = command.policy.rpartition(":")
        lines += ["import runpy", "", f"policy = runpy.run_path({file!r})[{name!r}]"]
    return "\n".join([*lines, f"collector = {made}"])


def network(command: Tune) -> list[str]:
    """The lines of the program that make the MLP of ``--policy``, with its weights."""
    from muster.cli import mlp
    from muster.cli.request import spaces_of

    spaces = spaces_of(command.env)
    fresh = command.policy == "mlp"
    policy, _ = (
        mlp.fresh(*spaces, seed=0)
        if fresh
        else mlp.from_file(Path(command.policy), *spaces)
    )
    layers = mlp.source(cast("nn.Module", policy.net))
    head = "categorical" if not hasattr(policy, "log_std") else "gaussian"
    lines = [f"from muster.policies import {head}"]
    if "OrderedDict" in layers:
        lines.append("from collections import OrderedDict")
    if not fresh:
        lines.append("from safetensors.torch import load_file")
    lines += ["from torch import nn", ""]
    if "Float()" in layers:
        lines += [
            "class Float(nn.Module):",
            "    def forward(self, x):",
            "        return x.float()",
            "",
        ]
    if fresh:
        lines.append("torch.manual_seed(0)")
    lines += [f"net = {layers}", f"policy = {head}(net)"]
    if not fresh:
        lines += mlp.source_of_weights(Path(command.policy), policy)
    return lines


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text} ...", file=sys.stderr)


def _print_table(found: Tuning) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("where it runs", "envs", "frames/s", ""):
        table.add_column(
            name,
            no_wrap=True,
            justify="right" if name in ("envs", "frames/s") else "left",
        )
    for candidate in found.candidates[:MOST_ROWS]:
        table.add_row(
            *_row(candidate, found.best),
            style="bold" if candidate == found.best else None,
        )
    console = Console(file=sys.stdout)
    console.print(table)
    console.print(
        "envs: groups x environments of each; finalist: median of several slices, in turns",
        soft_wrap=True,
    )
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
        (
            "best"
            if candidate == best
            else "finalist"
            if candidate.final
            else "not possible"
            if candidate.refused
            else ""
        ),
    ]
