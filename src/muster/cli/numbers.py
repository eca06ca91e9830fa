"""Numbers of frames: how they are written, and how they divide into batches."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from muster.errors import BadOption

TARGET_FRAMES = 2048  # per batch: large enough that batches cost nothing, small enough to stop and report often
MAX_FRAMES = 65_536
_FORM = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)([kmb]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def parse_count(text: str) -> int:
    """``100k``, ``1.5M``, ``1e6``, ``51_200`` or ``51,200`` as an int.

    Raises:
        ValueError: another form, no whole number, or not positive.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number of frames; write it like 51200, 51_200, 100k or 1e6")
    number = Decimal(re.sub("[_,]", "", match.group(1))) * _UNITS[match.group(2).lower()]
    if number != int(number) or number < 1:
        raise ValueError(f"{text!r} is not a whole, positive number of frames")
    return int(number)


def frames_per_batch(frames: int, envs: int, wanted: int | None, workers: int = 1, nodes: int = 1) -> int:
    """A batch size that gives exactly ``frames`` frames with ``envs`` environments of each worker.

    Args:
        frames: in total.
        envs: each makes the same number of steps.
        wanted: by the user; None takes the divisor nearest to ``TARGET_FRAMES``.
        workers: of each node that share a batch.
        nodes: that share a batch.

    Raises:
        BadOption: it does not come out even; the message names the nearest numbers that do.
    """
    if envs < 1:
        raise BadOption(f"--envs {envs}: at least one environment is needed.")
    of = f"--envs {envs}" if workers == 1 else f"--workers {workers} x --envs {envs}"
    of = of if nodes == 1 else f"--nodes {nodes} x {of}"
    envs *= workers * nodes
    if wanted is None:
        _check_multiple("--frames", frames, envs, of)
        steps = frames // envs
        fitting = [T for T in range(1, min(steps, max(1, MAX_FRAMES // envs)) + 1) if steps % T == 0]
        return envs * min(fitting, key=lambda T: abs(math.log(T * envs / TARGET_FRAMES)))
    _check_multiple("--frames-per-batch", wanted, envs, of)
    _check_multiple("--frames", frames, wanted, f"--frames-per-batch {wanted:,}")
    return wanted


def _check_multiple(name: str, number: int, unit: int, of: str) -> None:
    if number % unit:
        low = number // unit * unit
        near = " or ".join(f"{n:,}" for n in (low, low + unit) if n)
        raise BadOption(f"{name} {number:,} is not a multiple of {of}; the nearest are {near}.")
