"""The transport for the option ``weight_sync_schemes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.errors import BadOption
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import NoSync, Transport

# By name, and by class of TorchRL's schemes and of Muster's that are called the same.
_TRANSPORTS: dict[str, type[SharedMemory | NoSync]] = {
    "shared": SharedMemory,
    "none": NoSync,
    "SharedMemoryWeightSyncScheme": SharedMemory,
    "SharedMemWeightSyncScheme": SharedMemory,
    "MultiProcessWeightSyncScheme": SharedMemory,
    "NoWeightSyncScheme": NoSync,
}
OF_NODES = {
    "DistributedWeightSyncScheme": "DistributedCollector",
    "RPCWeightSyncScheme": "RPCCollector",
    "RayWeightSyncScheme": "RayCollector",
}


def transport_for(given: Any) -> Transport:
    """The transport for one value of ``weight_sync_schemes``.

    Args:
        given: a transport, "shared" or "none", a weight sync scheme for one machine (Muster's or
            TorchRL's); None is shared memory.

    Raises:
        BadOption: anything else.
    """
    meaning = SharedMemory() if given is None else _meaning(given)
    if isinstance(meaning, Transport) and not isinstance(meaning, type):
        return meaning
    if isinstance(meaning, str) and meaning in OF_NODES:
        raise BadOption(
            f"{meaning} is for {OF_NODES[meaning]}, whose workers are on other machines. Leave"
            " weight_sync_schemes out here, or give SharedMemoryWeightSyncScheme or"
            " MultiProcessWeightSyncScheme"
        )
    raise BadOption(
        f"{given!r} is no way to send weights to workers on this machine: expected"
        f" muster.weights.SharedMemory() or NoSync(), or one of {', '.join(_TRANSPORTS)} (Muster's"
        " or TorchRL's)"
    )


def one_transport(given: Mapping[str, Any] | None) -> Any:
    """The one value for all models of a collector, which are published together; None if there is
    none.

    Args:
        given: by model id, see ``transport_for``.

    Raises:
        BadOption: models are to be sent in different ways.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadOption(
            f"weight_sync_schemes={given!r}: expected a dict, such as {{'policy': 'shared'}}"
        )
    first, value = next(iter(given.items()), ("", None))
    for model_id, other in given.items():
        if _meaning(other) != _meaning(value):
            raise BadOption(
                f"weight_sync_schemes: {first!r} has {value!r} and {model_id!r} has {other!r}, but"
                " models are published together, as one version: give all of them the same"
            )
    return value


def class_names(given: Any) -> list[str]:
    """Names of the class of a scheme and of its bases: a scheme of TorchRL's is known by them."""
    return [cls.__name__ for cls in type(given).__mro__]


def _meaning(given: Any) -> Any:
    """A transport, the class name of a scheme for nodes, or ``given`` itself."""
    for name in [given] if isinstance(given, str) else class_names(given):
        if name in _TRANSPORTS:
            return _TRANSPORTS[name]()
        if name in OF_NODES:
            return name
    return given
