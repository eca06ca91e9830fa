"""Weights in the forms that TorchRL takes, by the names of state dicts. TorchRL is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from muster.errors import BadWeights
from muster.weights.names import Weights, check_finite, check_fit, named_weights

# TorchRL's key for the extra state of a module, in a TensorDict of its weights
EXTRA_STATE = "__extra_state__"


def flattened(weights: Any) -> Any:
    """Return a dict of weights with the names of a state dict.

    Anything that is not a dict is returned unchanged.

    ``{"net": {"weight": w}}``, ``{("net", "weight"): w}`` and ``{"net.weight": w}`` are the same
    weights. Values that are dicts or TensorDicts are nested; arrays become tensors over their
    memory.
    """
    return (
        dict(_leaves(weights, ()))
        if isinstance(weights, Mapping) and not is_tensordict(weights)
        else weights
    )


def by_name(given: Any) -> Weights:
    """Return the tensors of a module, a TensorDict or a dict by name, without TorchRL's extra
    state.

    Raises:
        BadWeights: of anything else.
    """
    named = named_weights(flattened(given))
    return {
        name: tensor
        for name, tensor in named.items()
        if name.split(".")[0] != EXTRA_STATE
    }


def is_tensordict(weights: Any) -> bool:
    """Return whether this is a TensorDict, without importing tensordict."""
    return hasattr(weights, "flatten_keys")


def unsaved_buffers(module: torch.nn.Module) -> Weights:
    """Return the non-persistent buffers of a module, by name: TensorDicts of a module have them,
    state dicts do not.
    """
    saved = module.state_dict().keys()
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: buffer.detach() for name, buffer in buffers if name not in saved}


def fitted(given: Any, model: torch.nn.Module) -> Weights:
    """Return weights of the whole model, without changing it.

    Args:
        given: a module, a TensorDict or a dict; of the model, or of a module inside it. Other
            weights are the model's.

    Raises:
        BadWeights: the weights do not fit, or are not finite.
    """
    new = by_name(given)
    path = next((path for path, part in model.named_modules() if part is given), None)
    if path is None:
        path = _place(new, model)
    part = model.get_submodule(path)
    saved, unsaved = named_weights(part), unsaved_buffers(part)
    check_fit(
        new, saved | {name: buffer for name, buffer in unsaved.items() if name in new}
    )
    check_finite(new)
    prefix = f"{path}." if path else ""
    return named_weights(model) | {
        prefix + name: tensor for name, tensor in new.items()
    }


def fitting_parts(
    names: AbstractSet[str], model: torch.nn.Module
) -> dict[str, torch.nn.Module]:
    """Return the model and the modules inside it, by path, of which these are the names of weights."""
    found = {}
    for path, part in model.named_modules():
        saved = named_weights(part).keys()
        if saved and saved <= names <= saved | unsaved_buffers(part).keys():
            found[path] = part
    return found


def _place(new: Weights, model: torch.nn.Module) -> str:
    """Return the path of the module inside the model that has these names and shapes; empty for the
    model.
    """
    parts = fitting_parts(new.keys(), model)
    if "" in parts or not parts:
        return ""
    shapes = {name: tensor.shape for name, tensor in new.items()}
    alike = []
    for path, part in parts.items():
        own = named_weights(part) | unsaved_buffers(part)
        if all(own[name].shape == shape for name, shape in shapes.items()):
            alike.append(path)
    if len(alike) > 1:
        raise BadWeights(
            f"weights named {sorted(new)} fit several parts of the policy: {', '.join(alike)}. Give"
            " those of the whole policy. Nothing was changed."
        )
    return alike[0] if alike else next(iter(parts))


def _leaves(weights: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in weights.items():
        names = (*path, *map(str, key)) if isinstance(key, tuple) else (*path, str(key))
        if isinstance(value, Mapping) or (
            is_tensordict(value) and not torch.is_tensor(value)
        ):
            yield from _leaves(value, names)
        else:
            yield (
                ".".join(names),
                (torch.from_numpy(value) if isinstance(value, np.ndarray) else value),
            )
