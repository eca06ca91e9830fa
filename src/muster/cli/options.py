"""Options that several commands have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from muster.cli.numbers import parse_count
from muster.errors import BadOption

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
    arg(metavar="ENV", help="Id as for gymnasium.make; MODULE:ID imports MODULE and needs --allow-import."),
]

Policy = Annotated[
    str,
    arg(
        metavar="POLICY",
        help="random; mlp (fresh, 64x64 tanh); FILE.safetensors with the weights of such an MLP; FILE.py:NAME.",
    ),
]

ObsDtype = Annotated[
    Literal["policy", "env", "float16", "float32", "float64"],
    arg(
        metavar="DTYPE",
        help="Of stored floating observations: policy (its parameters'; random: the environment's), env, float16, "
        "float32 or float64.",
    ),
]

AllowImport = Annotated[
    bool, arg(help="Allow ENV and --policy to import and run Python code (the current directory is searched, too).")
]


def refuse_given(command: Any, names: Sequence[str], what: str) -> None:
    """Refuse options that have another value than their default.

    Args:
        command: an object of a command's class.
        names: of its fields.
        what: they are about, and how to get it.

    Raises:
        BadOption: one of them does.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    for name in names:
        if getattr(command, name) != defaults[name]:
            option = name.replace("asynchronous", "async").replace("_", "-")
            raise BadOption(f"--{option} is about {what}, or leave it out.")
