"""What the first snapshot of a collection says about it: its options, versions and machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

import torch

from muster.collectors.options import CollectorOptions
from muster.utils.attributes import installed, name_of
from muster.utils.checked import Details

SECRET = ("token",)
DISTRIBUTIONS = ("torch", "tensordict", "gymnasium", "numpy", "torchrl")
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_MOST_ITEMS = 4
_MOST_TEXT = 200


def options_of(options: CollectorOptions) -> dict[str, str]:
    """Return the options that were given, as short texts by name.

    Objects are named by their type or function, mappings by their keys: their values may be long,
    or secret.
    """
    found = {}
    for field in dataclasses.fields(options):
        if not field.init or field.name in SECRET:
            continue
        value = getattr(options, field.name)
        if field.name == "slot_memory_limit" or _is_default(field, value):
            continue
        found[field.name] = _text(value)[:_MOST_TEXT]
    return found


def versions() -> dict[str, str]:
    """Return the versions of what computes, and the machine."""
    found = {"muster": installed("muster-rl") or "from a source tree"}
    found["python"] = platform.python_version()
    for name in DISTRIBUTIONS:
        if (version := installed(name)) is not None:
            found[name] = version
    found["system"] = platform.platform()
    found["host"] = f"{socket.gethostname()}, {os.cpu_count()} CPUs"
    return found


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if value is default:
        return True
    can_compare = isinstance(value, (*_PLAIN, Details, dict))
    return can_compare and type(value) is type(default) and bool(value == default)


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (*_PLAIN, Details)):
        return str(value)
    if isinstance(value, (list, tuple)):
        shown = [_text(item) for item in value[:_MOST_ITEMS]]
        more = len(value) - len(shown)
        return ", ".join([*shown, *([f"and {more} more"] if more else [])])
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(map(str, value))}"
    return name_of(value)
