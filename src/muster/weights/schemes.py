"""Which transport is meant."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from muster.errors import BadOption
from muster.weights.no_sync import NoSync
from muster.weights.pipe import Pipe
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import Scheme

_BY_NAME: dict[str, type[SharedMemory | Pipe | NoSync]] = {"shared": SharedMemory, "pipe": Pipe, "none": NoSync}
_BY_CLASS: dict[str, type[SharedMemory | Pipe | NoSync]] = {
    "SharedMemoryWeightSyncScheme": SharedMemory,
    "SharedMemWeightSyncScheme": SharedMemory,  # TorchRL's
    "MultiProcessWeightSyncScheme": Pipe,
    "NoWeightSyncScheme": NoSync,
}
OF_NODES = {
    "DistributedWeightSyncScheme": "DistributedCollector",
    "RPCWeightSyncScheme": "RPCCollector",
    "RayWeightSyncScheme": "RayCollector",
}
_ORDERED = ("x86_64", "amd64", "i386", "i686")  # processors that keep the order that SharedMemory relies on


def default_scheme() -> Scheme:
    """Shared memory where the processor allows it, else a pipe."""
    return SharedMemory() if platform.machine().lower() in _ORDERED else Pipe()


def one_scheme(schemes: Mapping[str, Any] | None) -> Any:
    """What a collector was told for all of its models, which it publishes together; None if nothing.

    Args:
        schemes: by model id, see ``scheme_for``.

    Raises:
        BadOption: models are to be sent in different ways.
    """
    if schemes is None:
        return None
    if not isinstance(schemes, Mapping):
        raise BadOption(f"weight_sync_schemes={schemes!r}: expected a dict, such as {{'policy': 'shared'}}")
    given = list(schemes.items())
    for model_id, other in given[1:]:
        if _meaning(other) != _meaning(given[0][1]):
            raise BadOption(
                f"weight_sync_schemes: {given[0][0]!r} has {given[0][1]!r} and {model_id!r} has {other!r}, but models "
                f"are published together, as one version: give all of them the same"
            )
    return given[0][1] if given else None


def class_names(value: Any) -> list[str]:
    """Names of the class of a scheme and of what it is derived from; a scheme of TorchRL's is known by them."""
    return [cls.__name__ for cls in type(value).__mro__]


def scheme_for(value: Any) -> Scheme:
    """The scheme that was asked for.

    Args:
        value: a scheme, "shared", "pipe" or "none", a ``WeightSyncScheme`` for one machine or TorchRL's of the same
            name; None is the default.

    Raises:
        BadOption: anything else.
    """
    if value is None:
        return default_scheme()
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]()
    for name in class_names(value):
        if name in _BY_CLASS:
            return _BY_CLASS[name]()
        if name in OF_NODES:
            raise BadOption(
                f"{name} is for {OF_NODES[name]}, whose workers are on other machines. Leave weight_sync_schemes out "
                f"here, or give SharedMemoryWeightSyncScheme or MultiProcessWeightSyncScheme"
            )
    if isinstance(value, Scheme) and not isinstance(value, type):
        return value
    raise BadOption(
        f"{value!r} is no way to send weights to workers on this machine: expected muster.weights.SharedMemory(), "
        f"Pipe() or NoSync(), the same as 'shared', 'pipe' or 'none', or {', '.join(_BY_CLASS)} (Muster's or TorchRL's)"
    )


def _meaning(value: Any) -> Any:
    """Equal for what does the same."""
    try:
        return scheme_for(value)
    except BadOption:
        return value if isinstance(value, str) else type(value).__name__
