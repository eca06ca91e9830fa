"""``muster serve``: chooses actions for programs that connect, and records the steps that they
make.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from muster.cli.collect import run
from muster.cli.options import (
    AllowImport,
    Count,
    ObsDtype,
    Policy,
    check_numbers,
    check_seconds,
    frames_per_batch,
)
from muster.cli.report import StopSignals
from muster.cli.request import obs_dtype_of, prepared
from muster.errors import BadOption

SPACE_FORMS = (
    "discrete:N, multidiscrete:N,N,..., multibinary:N, or DTYPE:SHAPE[:LOW:HIGH] such as float32:4,"
    " uint8:84,84,3 or float32:2:-1:1"
)


@dataclass(frozen=True)
class Serve:
    """Serve actions to programs that run their own loop, and record their steps with --out.

    See docs/serve.md.
    """

    policy: Positional[Policy]
    obs: Annotated[
        str, arg(metavar="SPACE", help=f"Space of observations: {SPACE_FORMS}.")
    ]
    act: Annotated[
        str, arg(metavar="SPACE", help="Space of actions, in the same form.")
    ]
    frames: Count
    """Number of steps to collect from all clients: 51200, 51_200, 100k, 1e6."""

    address: Annotated[str, arg(metavar="HOST:PORT")] = "127.0.0.1:0"
    """Address at which clients connect. Port 0: any free port. Beyond loopback, set MUSTER_SERVE_TOKEN."""

    max_clients: Annotated[int, arg(metavar="N")] = 1
    """Maximum number of clients at the same time."""

    step_timeout: Annotated[float, arg(metavar="S")] = 60.0
    """Seconds that a client may take for a step. Then its episode is truncated, and its connection ends."""

    obs_dtype: ObsDtype = "policy"

    seed: Annotated[int, arg(metavar="S")] = 0
    """Seed of random actions and of new weights."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Directory for the recording; must not contain a recording."""

    frames_per_batch: Annotated[Count | None, arg(metavar="N")] = None
    """Frames per batch; each batch has steps of one client. Default: a divisor of --frames near 2048."""

    allow_import: AllowImport = False

    quiet: bool = False
    """Print errors only: also no warnings, and not the address."""


def serve(command: Serve) -> int:
    """Run the command. Returns the exit code."""
    check_numbers(command, max_clients=1, seed=0)
    check_seconds(command, "step_timeout")
    spaces = parse_space("--obs", command.obs), parse_space("--act", command.act)
    frames = frames_per_batch(command.frames, 1, command.frames_per_batch)
    with ExitStack() as stack:
        policy, description = stack.enter_context(
            prepared(command, command.seed, spaces)
        )
        stop = stack.enter_context(StopSignals(quiet=command.quiet))
        from muster.serving.server import serve as collector_of

        server = stack.enter_context(
            collector_of(
                policy,
                observation_space=spaces[0],
                action_space=spaces[1],
                address=command.address,
                max_clients=command.max_clients,
                timeouts={"step": command.step_timeout},
                frames_per_batch=frames,
                total_frames=command.frames,
                seed=command.seed,
                obs_dtype=obs_dtype_of(command.obs_dtype),
            )
        )
        recorder = None
        if command.out is not None:
            from muster.recording import Recorder

            told = {
                "obs": command.obs,
                "act": command.act,
                "seed": command.seed,
                "policy": description,
            }
            recorder = stack.enter_context(
                Recorder(command.out, meta={**told, "frames": command.frames})
            )
        if not command.quiet:
            print(f"serving   {server.address}  (Ctrl-C ends it)", flush=True)
        return run(command, server, recorder, stop)


def parse_space(option: str, text: str) -> Any:
    """Return the Gymnasium space that a text of the form ``SPACE_FORMS`` names.

    Raises ``BadOption``.
    """
    import numpy as np
    from gymnasium import spaces

    kind, *parts = text.split(":")
    try:
        sizes = (
            [int(size) for size in parts[0].split(",")] if parts and parts[0] else []
        )
        if kind == "discrete" and len(parts) == 1:
            (n,) = sizes
            return spaces.Discrete(n)
        if kind == "multidiscrete" and len(parts) == 1:
            return spaces.MultiDiscrete(sizes)
        if kind == "multibinary" and len(parts) == 1:
            return spaces.MultiBinary(sizes)
        if len(parts) in (1, 3) and all(size > 0 for size in sizes):
            dtype = np.dtype(kind)
            number = float if dtype.kind == "f" else int
            low, high = (0, 1) if dtype.kind == "b" else (-math.inf, math.inf)
            if dtype.kind in "iu":
                low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            if len(parts) == 3:
                low, high = number(parts[1]), number(parts[2])
            return spaces.Box(low, high, tuple(sizes), dtype.type)
    except (AssertionError, OverflowError, TypeError, ValueError) as error:
        raise BadOption(
            f"{option} {text!r} is not a space ({error}); expected {SPACE_FORMS}."
        ) from None
    raise BadOption(f"{option} {text!r} is not a space; expected {SPACE_FORMS}.")
