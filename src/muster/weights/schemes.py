"""Which transport is meant."""

from __future__ import annotations

import platform
from typing import Any

from muster.errors import BadOption
from muster.weights.no_sync import NoSync
from muster.weights.pipe import Pipe
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import Scheme

_BY_NAME: dict[str, type[SharedMemory | Pipe | NoSync]] = {"shared": SharedMemory, "pipe": Pipe, "none": NoSync}
_OF_TORCHRL: dict[str, type[SharedMemory | Pipe | NoSync]] = {
    "SharedMemWeightSyncScheme": SharedMemory,
    "MultiProcessWeightSyncScheme": Pipe,
    "NoWeightSyncScheme": NoSync,
}
_ORDERED = ("x86_64", "amd64", "i386", "i686")  # processors that keep the order that SharedMemory relies on


def default_scheme() -> Scheme:
    """Shared memory where the processor allows it, else a pipe."""
    return SharedMemory() if platform.machine().lower() in _ORDERED else Pipe()


def scheme_for(value: Any) -> Scheme:
    """The scheme that was asked for.

    Args:
        value: a scheme, "shared", "pipe" or "none", a scheme of TorchRL's for one machine; None is the default.

    Raises:
        BadOption: anything else.
    """
    if value is None:
        return default_scheme()
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]()
    for name in (cls.__name__ for cls in type(value).__mro__):
        if name in _OF_TORCHRL:
            return _OF_TORCHRL[name]()
    if isinstance(value, Scheme) and not isinstance(value, type):
        return value
    raise BadOption(
        f"{value!r} is no way to send weights to workers on this machine: expected muster.weights.SharedMemory(), "
        f"Pipe() or NoSync(), the same as 'shared', 'pipe' or 'none', or TorchRL's {', '.join(_OF_TORCHRL)}"
    )
