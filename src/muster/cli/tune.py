"""``muster tune``: which collector is fastest on this machine, for one environment and policy."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from muster.cli.collect import Count, admit, in_short, policy_for
from muster.cli.policies import ObsDtype, obs_dtype_of
from muster.cli.report import short
from muster.errors import BadOption

if TYPE_CHECKING:
    from muster.collectors.tuning import Candidate, Tuning
    from muster.tuning.model import Costs

CROWDED = 0.1  # share of the time from which on figures say more about others
MOST_ROWS = 12  # of the table, besides those that were tried


@dataclass(frozen=True)
class Tune:
    """Measure this machine for some seconds, and print the constructor of the fastest collector."""

    env: Annotated[Positional[str], arg(metavar="ENV")]
    """Id as for gymnasium.make; MODULE:ID imports MODULE and needs --allow-import."""

    policy: Annotated[str, arg(metavar="POLICY")] = "random"
    """random; mlp (fresh, 64x64 tanh); FILE.safetensors with the weights of such an MLP; FILE.py:NAME."""

    seconds: Annotated[float, arg(metavar="S")] = 20.0
    """For measuring and trying; starting workers takes some more."""

    num_envs: Annotated[tuple[int, ...], arg(metavar="N")] = ()
    """Numbers of environments in all to choose from; by default 8 16 32 64."""

    frames_per_batch: Annotated[Count, arg(metavar="N")] = 2048
    """Frames per batch, about."""

    obs_dtype: Annotated[ObsDtype, arg(metavar="DTYPE")] = "policy"
    """Of stored floating observations: policy (its parameters'; random: the environment's), env, float16, float32 or
    float64."""

    json: bool = False
    """Print everything as JSON."""

    allow_import: bool = False
    """Allow ENV and --policy to import and run Python code (the current directory is searched, too)."""


def tune(command: Tune) -> int:
    """Run the command. Returns the exit code.

    Raises:
        MusterError: for whatever is wrong with the request, the environment or the policy.
    """
    if not 0 < command.seconds < math.inf:
        raise BadOption(f"--seconds {command.seconds:g}: expected more than 0.")
    if wrong := [n for n in command.num_envs if n < 1]:
        raise BadOption(f"--num-envs {wrong[0]}: at least one environment is needed.")
    admit(command.env, command.policy, allow_import=command.allow_import)
    chosen = policy_for(command.env, command.policy, 0)
    with in_short(command.env, allow_import=command.allow_import):
        from muster.collectors.tuning import tune as find_best

        found = find_best(
            command.env,
            chosen.policy,
            seconds=command.seconds,
            num_envs=command.num_envs or None,
            frames_per_batch=command.frames_per_batch,
            say=_say,
            obs_dtype=obs_dtype_of(command.obs_dtype),
        )
    code = program(command, found)
    if command.json:
        print(as_json(found, code))
        return 0
    print(costs_in_words(found.costs, chosen.description))
    _print_table(found)
    if found.costs.crowded > CROWDED:
        print(
            f"Others had the core that was wanted for {found.costs.crowded:.0%} of the time: repeat it when they rest."
        )
    print(f"\n{code}")
    return 0


def program(command: Tune, found: Tuning) -> str:
    """Python that makes the best collector, as it stands."""
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


def as_json(found: Tuning, code: str) -> str:
    """All of it; null for infinite numbers."""
    return json.dumps(_plain({**dataclasses.asdict(found), "program": code}), indent=2)


def costs_in_words(costs: Costs, policy: str) -> str:
    """What was measured, a line for each kind."""
    fixed, slope = costs.policy_s
    loop = costs.loop_s[0] + costs.loop_s[1]
    step = (
        f"{time_of(costs.step_s)} per step ({time_of(costs.step_cpu_s)} computing, deviation {time_of(costs.step_sd_s)}"
    )
    tail = f", slowest hundredth {time_of(costs.step_tail_s)})"
    never = "no episode ended" if math.isinf(costs.episode_length) else f"every {costs.episode_length:,.0f} steps"
    lines = {
        "env": step + tail,
        "reset": f"{time_of(costs.reset_s)}, {never}; {costs.env_bytes / 1e6:,.1f} MB per environment",
        "policy": f"{time_of(fixed)} per call and {time_of(slope)} per environment  ({policy})",
        "muster": f"{time_of(loop)} per time step, {time_of(costs.batch_s)} per batch "
        f"and {time_of(costs.order_s)} per worker in it",
        "machine": f"{costs.cores:g} cores, {costs.slowdown:.2f} times slower when all compute; "
        f"wake-up {time_of(costs.wake_s)}; worker {costs.worker_bytes / 1e6:,.0f} MB",
    }
    return "\n".join(f"{name:<9} {text}" for name, text in lines.items())


def time_of(seconds: float) -> str:
    """``0.000012`` as ``12 us``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _print_table(found: Tuning) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    tried = [c for c in found.candidates if c.measured is not None]
    shown = [c for i, c in enumerate(found.candidates) if i < MOST_ROWS or c in tried]
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("where it runs", "envs", "predicted", "measured", "ratio", ""):
        table.add_column(name, no_wrap=True, justify="left" if name in ("where it runs", "") else "right")
    for candidate in shown:
        table.add_row(*_row(candidate, found.best), style="bold" if candidate == found.best else None)
    console = Console(file=sys.stdout)
    console.print(table)
    console.print("frames per second; groups x environments in each; ratio: measured / predicted", soft_wrap=True)
    if more := len(found.candidates) - len(shown):
        console.print(f"{more} slower ones are left out")
    for reason in dict.fromkeys(c.refused for c in shown if c.refused):
        console.print(f"not possible: {reason}", soft_wrap=True)


def _row(candidate: Candidate, best: Candidate) -> list[str]:
    setup, measured = candidate.setup, candidate.measured
    return [
        setup.kind,
        f"{setup.groups} x {setup.num_envs}",
        short(candidate.predicted),
        "" if measured is None else short(measured),
        "" if measured is None else f"{measured / candidate.predicted:.2f}",
        "best" if candidate == best else "not possible" if candidate.refused else "",
    ]


def _plain(value: Any) -> Any:
    """As JSON has it: without infinite numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
