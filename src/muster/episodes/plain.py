"""Conversion of a ``TensorDict`` to dicts, tensors and lists, which can be written without pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from muster.errors import BadOption
from muster.memory.objects import copied

if TYPE_CHECKING:
    from tensordict import TensorDict


def is_tensordict(item: Any) -> bool:
    """Return whether ``to_plain`` takes this object."""
    from tensordict import is_non_tensor, is_tensor_collection

    if not is_tensor_collection(item) or is_non_tensor(item):
        return False
    return hasattr(item, "names")


def to_plain(node: TensorDict) -> dict[str, Any]:
    """Return the same tensors, and copies of objects, with all that is needed to rebuild the
    ``TensorDict``.
    """
    from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection

    if isinstance(node, LazyStackedTensorDict):
        raise BadOption(
            "rows of changing shapes cannot be saved as tensors; collect them as objects, or save"
            " without"
        )
    entries: dict[str, Any] = {}
    for name, value in node.items():
        if is_non_tensor(value):
            entries[name] = {"ndim": value.ndim, "objects": _objects(value)}
        elif is_tensor_collection(value):
            entries[name] = to_plain(value)
        else:
            entries[name] = value
    return {
        "shape": list(node.batch_size),
        "names": list(node.names),
        "entries": entries,
    }


@dataclass(frozen=True)
class Place:
    """Where the batches of a collector are: rows of a state, which may come from a file, are
    brought there.

    Attributes:
        device: device of the tensors.
        shown: the batches have this device as their attribute ``device``, not None.
    """

    device: torch.device
    shown: bool

    def take(self, plain: dict[str, Any]) -> TensorDict:
        """Rebuild a ``TensorDict`` from the result of ``to_plain``.

        It shares tensors that are on this device.
        """
        made: TensorDict = from_plain(plain).to(self.device)
        return made if self.shown else made.clear_device_()


def from_plain(plain: dict[str, Any]) -> TensorDict:
    """Rebuild a ``TensorDict`` from the result of ``to_plain``; it shares the tensors."""
    from tensordict import TensorDict

    entries: dict[str, Any] = {}
    for name, value in plain["entries"].items():
        if torch.is_tensor(value):
            entries[name] = value
        elif "entries" in value:
            entries[name] = from_plain(value)
        else:
            entries[name] = _stack(value["objects"], value["ndim"])
    return TensorDict(entries, plain["shape"], names=plain["names"])


def _objects(value: Any) -> Any:
    if value.ndim:
        return [_objects(part) for part in value.unbind(0)]
    return copied(value.data)


def _stack(objects: Any, ndim: int) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if not ndim:
        return NonTensorData(objects)
    return NonTensorStack(*(_stack(part, ndim - 1) for part in objects))
