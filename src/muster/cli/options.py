"""Options of several commands; numbers: their notation, checks, and division into batches."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from muster.errors import BadOption

# per batch: large enough for a negligible cost per batch, small enough to stop and report often
TARGET_FRAMES = 2048
MAX_FRAMES = 65_536
_FORM = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)([kmb]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def parse_count(text: str) -> int:
    """Parse ``100k``, ``1.5M``, ``1e6``, ``51_200`` or ``51,200``; raises ``ValueError`` for other
    texts.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a number of frames; write it like 51200, 51_200, 100k or 1e6"
        )
    number = (
        Decimal(re.sub("[_,]", "", match.group(1))) * _UNITS[match.group(2).lower()]
    )
    if number != int(number) or number < 1:
        raise ValueError(f"{text!r} is not a whole, positive number of frames")
    return int(number)


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=lambda texts: parse_count(texts[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]

Env = Annotated[
    Positional[str],
    arg(
        metavar="ENV",
        help="Id for gymnasium.make; MODULE:ID imports MODULE and needs --allow-import.",
    ),
]

Policy = Annotated[
    str,
    arg(
        metavar="POLICY",
        help=(
            "random; mlp (fresh, 64x64 tanh); FILE.safetensors with the weights of such an MLP;"
            " FILE.py:NAME."
        ),
    ),
]

NUM_ENVS = arg(metavar="B")
"""``--num-envs`` has one name and metavar in all commands."""

ObsDtype = Annotated[
    Literal["policy", "env", "float16", "float32", "float64"],
    arg(
        metavar="DTYPE",
        help=(
            "Dtype of stored floating observations: policy (that of its parameters; random: of the"
            " environment), env, float16, float32 or float64."
        ),
    ),
]

AllowImport = Annotated[
    bool,
    arg(
        help=(
            "Allow ENV and --policy to import and run Python code (also from the current"
            " directory)."
        )
    ),
]


def refuse_given(command: Any, names: Sequence[str], what: str) -> None:
    """Raise ``BadOption`` if one of these fields is not the default; ``what``: their subject, and
    how to enable it.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    for name in names:
        if getattr(command, name) != defaults[name]:
            raise BadOption(f"{_flag(name)} is about {what}, or leave it out.")


def check_numbers(command: Any, **least: int) -> None:
    """Raise ``BadOption`` if a field of a command (or a number in it) is less than its bound; None
    is accepted.
    """
    for name, bound in least.items():
        value = getattr(command, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < bound:
                raise BadOption(f"{_flag(name)} {number}: expected at least {bound}.")


def check_seconds(command: Any, name: str) -> None:
    """Raise ``BadOption`` unless a field of a command is positive and finite."""
    if not 0 < (value := getattr(command, name)) < math.inf:
        raise BadOption(f"{_flag(name)} {value:g}: expected more than 0.")


def _flag(name: str) -> str:
    return "--" + name.replace("asynchronous", "async").replace("_", "-")


def frames_per_batch(
    frames: int, envs: int, wanted: int | None, workers: int = 1, nodes: int = 1
) -> int:
    """Return a batch size that divides ``frames`` and is a multiple of ``envs`` times ``workers``
    times ``nodes``.

    If ``wanted`` is None, it is the size nearest to ``TARGET_FRAMES``. ``BadOption`` names the
    nearest valid numbers.
    """
    of = (
        f"--num-envs {envs}"
        if workers == 1
        else f"--workers {workers} x --num-envs {envs}"
    )
    of = of if nodes == 1 else f"--nodes {nodes} x {of}"
    envs *= workers * nodes
    if wanted is None:
        _check_multiple("--frames", frames, envs, of)
        steps = frames // envs
        fitting = [
            T
            for T in range(1, min(steps, max(1, MAX_FRAMES // envs)) + 1)
            if steps % T == 0
        ]
        return envs * min(
            fitting, key=lambda T: abs(math.log(T * envs / TARGET_FRAMES))
        )
    _check_multiple("--frames-per-batch", wanted, envs, of)
    _check_multiple("--frames", frames, wanted, f"--frames-per-batch {wanted:,}")
    return wanted


def _check_multiple(name: str, number: int, unit: int, of: str) -> None:
    if number % unit:
        low = number // unit * unit
        near = " or ".join(f"{n:,}" for n in (low, low + unit) if n)
        raise BadOption(
            f"{name} {number:,} is not a multiple of {of}; the nearest are {near}."
        )
