"""The transport for the option ``weight_sync_schemes``.

A value of the option is a transport, the name of one ("shared", "none"), or a weight sync scheme of
another system, known by the name of its class (``muster.weights.add_schemes``). A scheme means a
transport, or that the links of a collector with nodes carry the weights (``NodeScheme``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.errors import BadOption
from muster.weights import added_schemes
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import NoSync, Transport

_TRANSPORTS: dict[str, SharedMemory | NoSync] = {
    "shared": SharedMemory(),
    "none": NoSync(),
}


@dataclass(frozen=True)
class NodeScheme:
    """A scheme for nodes.

    Attributes:
        name: name of its class.
        collector: name of the collector that it is for.
        engine: the engine that connects the nodes, a ``Carrier.name``.
    """

    name: str
    collector: str
    engine: str


def transport_for(given: Any) -> Transport:
    """Return the transport for one value of ``weight_sync_schemes``.

    Args:
        given: a transport, "shared" or "none", or a weight sync scheme for one machine; None is
            shared memory.

    Raises:
        BadOption: anything else.
    """
    meaning = SharedMemory() if given is None else meaning_of(given)
    if isinstance(meaning, Transport) and not isinstance(meaning, type):
        return meaning
    kinds = SharedMemory | NoSync
    local = [
        name for name, meant in added_schemes().items() if isinstance(meant, kinds)
    ]
    if isinstance(meaning, NodeScheme):
        raise BadOption(
            f"{meaning.name} is for {meaning.collector}, whose workers are on other machines. Leave"
            f" weight_sync_schemes out here, or give {' or '.join(local)}"
        )
    raise BadOption(
        f"{given!r} is not a way to send weights to workers on this machine: expected"
        f" muster.weights.SharedMemory() or NoSync(), or one of {', '.join([*_TRANSPORTS, *local])}"
        " (Muster's or TorchRL's)"
    )


def one_transport(given: Mapping[str, Any] | None) -> Any:
    """Return the one value for all models of a collector, which are published together; None if
    there is none.

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
        if meaning_of(other) != meaning_of(value):
            raise BadOption(
                f"weight_sync_schemes: {first!r} has {value!r} and {model_id!r} has {other!r}, but"
                " models are published together, as one version: give all of them the same"
            )
    return value


def meaning_of(given: Any) -> Any:
    """Return the transport or ``NodeScheme`` that a value means; else the value itself."""
    if given is None or isinstance(given, Transport):
        return given
    if isinstance(given, str) and given in _TRANSPORTS:
        return _TRANSPORTS[given]
    schemes = added_schemes()
    # a class derived from a scheme means the same
    names = (
        [given]
        if isinstance(given, str)
        else [cls.__name__ for cls in type(given).__mro__]
    )
    return next((schemes[name] for name in names if name in schemes), given)


def node_schemes(engine: str) -> list[NodeScheme]:
    """Return the schemes for nodes that this engine connects; all, if none is for it alone."""
    schemes = [
        meant for meant in added_schemes().values() if isinstance(meant, NodeScheme)
    ]
    return [scheme for scheme in schemes if scheme.engine == engine] or schemes
