"""The built-in network: linear layers with tanh between them, with new weights or those of a file."""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from muster.errors import BadWeights, UnsupportedSpace
from muster.policies.heads import categorical, gaussian

HIDDEN = (64, 64)
_LAYER = re.compile(r"(\d+)\.(weight|bias)")
_INSTEAD = "Use --policy random, or your own with --policy FILE.py:NAME --allow-import."


class Float(nn.Module):
    """Converts other dtypes to float32, unscaled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def fresh(observation: Any, action: Any, seed: int) -> tuple[nn.Module, str]:
    """Return a head with a new network, and its description."""
    inputs, outputs = _widths(observation, action)
    sizes = [inputs, *HIDDEN, outputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _head(_mlp(observation, sizes), action)
    return head, f"fresh MLP {_arrow(sizes)} tanh, seed {seed}"


def from_file(path: Path, observation: Any, action: Any) -> tuple[nn.Module, str]:
    """Load a network's (or its head's) ``state_dict()`` from a safetensors file; return the head,
    and a description.
    """
    ends = _widths(observation, action)
    tensors = _read(path)
    layers = {
        key.removeprefix("net."): value
        for key, value in tensors.items()
        if key != "log_std"
    }
    sizes = _sizes(path, layers)
    if (sizes[0], sizes[-1]) != ends:
        raise BadWeights(
            f"{path} holds an MLP {_arrow(sizes)}, but the environment needs one from {ends[0]}"
            f" inputs (observation {observation}) to {ends[1]} outputs (action {action})."
        )
    head = _head(_mlp(observation, sizes), action)
    state = {f"net.{key}": value for key, value in layers.items()}
    spread = {
        key: tensors.get(key, value)
        for key, value in head.state_dict().items()
        if key == "log_std"
    }
    if (
        wrong := tensors.keys()
        - layers.keys()
        - {f"net.{key}" for key in layers}
        - spread.keys()
    ):
        raise BadWeights(
            f"{path} does not fit the MLP {_arrow(sizes)}: look at {sorted(wrong)}."
        )
    try:
        head.load_state_dict(state | spread)
    except RuntimeError as error:
        raise BadWeights(f"{path} does not fit: {error}") from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return head, f"MLP {_arrow(sizes)} tanh from {path.name}, sha256 {digest}"


def source(net: nn.Module) -> str:
    """Return Python code that makes a network of ``fresh`` or ``from_file``.

    It needs ``nn`` and, maybe, ``Float``.
    """
    layers = {name: _source_of(layer) for name, layer in net.named_children()}
    if all(name.isdecimal() for name in layers):
        return f"nn.Sequential({', '.join(layers.values())})"
    named = ", ".join(f"({name!r}, {layer})" for name, layer in layers.items())
    return f"nn.Sequential(OrderedDict([{named}]))"


def _source_of(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear):
        return f"nn.Linear({layer.in_features}, {layer.out_features})"
    if isinstance(layer, nn.Flatten):
        return f"nn.Flatten({layer.start_dim})"
    if isinstance(layer, nn.Unflatten):
        return f"nn.Unflatten({layer.dim}, {layer.unflattened_size})"
    return "Float()" if isinstance(layer, Float) else f"nn.{type(layer).__name__}()"


def source_of_weights(path: Path, head: nn.Module) -> list[str]:
    """Return the lines of Python that load a file of ``from_file`` into ``policy``, which is
    ``head(net)``.
    """
    names = _read(path).keys()
    lines = [f"weights = load_file({str(path)!r})"]
    if any(name.startswith("net.") for name in names):
        partly = "" if names == head.state_dict().keys() else ", strict=False"
        return [*lines, f"policy.load_state_dict(weights{partly})"]
    if "log_std" in names:
        lines.append(
            "policy.load_state_dict({'log_std': weights.pop('log_std')}, strict=False)"
        )
    return [*lines, "net.load_state_dict(weights)"]


def _widths(observation: Any, action: Any) -> tuple[int, int]:
    """The numbers of inputs and outputs of a network for these spaces."""
    if not isinstance(observation, spaces.Box):
        raise UnsupportedSpace(
            f"The built-in MLP takes Box observations, and these are {observation}. {_INSTEAD}"
        )
    inputs = math.prod(observation.shape)
    if isinstance(action, spaces.Discrete):
        return inputs, int(action.n)
    if isinstance(action, spaces.MultiDiscrete):
        return inputs, int(action.nvec.sum())
    if isinstance(action, spaces.Box) and action.dtype.kind == "f":
        return inputs, math.prod(action.shape)
    raise UnsupportedSpace(
        f"The built-in MLP gives Discrete, MultiDiscrete or float Box actions, not {action}."
        f" {_INSTEAD}"
    )


def _mlp(observation: Any, sizes: list[int]) -> nn.Sequential:
    """Make linear layers at 0, 2, 4, ... with tanh between them; preprocessing layers have names,
    not numbers.
    """
    net = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(sizes)):
        if i:
            net.append(nn.Tanh())
        net.append(nn.Linear(a, b))
    prepare: list[tuple[str, nn.Module]] = []
    if observation.dtype.name != "float32":
        prepare.append(("to_float32", Float()))
    if len(observation.shape) != 1:
        prepare.append(
            (
                "flatten",
                (
                    nn.Flatten(-len(observation.shape))
                    if observation.shape
                    else nn.Unflatten(-1, (-1, 1))
                ),
            )
        )
    if not prepare:
        return net
    return nn.Sequential(OrderedDict([*prepare, *net.named_children()]))


def _head(net: nn.Module, action: Any) -> nn.Module:
    return gaussian(net) if isinstance(action, spaces.Box) else categorical(net)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadWeights(
            f"{path} is not a readable safetensors file: {error}"
        ) from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise BadWeights(
                f"{path}: {name} ({tensor.dtype}) has values that are not finite floating-point"
                " numbers."
            )
    return tensors


def _sizes(path: Path, layers: dict[str, torch.Tensor]) -> list[int]:
    """``[inputs, hidden, ..., outputs]`` from the shapes of ``0.weight``, ``0.bias``, ``2.weight``,
    ...
    """
    expected = (
        "the state_dict() of nn.Sequential(Linear, Tanh, Linear, ...): 0.weight, 0.bias,"
        " 2.weight, ..."
    )
    numbers = sorted(
        {int(match.group(1)) for match in map(_LAYER.fullmatch, layers) if match}
    )
    names = {f"{n}.{part}" for n in numbers for part in ("weight", "bias")}
    if (
        not numbers
        or numbers != list(range(0, 2 * len(numbers), 2))
        or names != set(layers)
    ):
        raise BadWeights(f"{path} has the keys {sorted(layers)}; expected {expected}.")
    sizes: list[int] = []
    for n in numbers:
        weight = layers[f"{n}.weight"]
        bias = layers[f"{n}.bias"]
        if (
            weight.ndim != 2
            or bias.shape != weight.shape[:1]
            or (sizes and sizes[-1] != weight.shape[1])
        ):
            raise BadWeights(
                f"{path}: layer {n} has weight {tuple(weight.shape)} and bias {tuple(bias.shape)},"
                " which does not follow the layer before it."
            )
        sizes = [*(sizes or [weight.shape[1]]), weight.shape[0]]
    return sizes


def _arrow(sizes: list[int]) -> str:
    return "-".join(map(str, sizes))
