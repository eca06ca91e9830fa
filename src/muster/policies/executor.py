"""Inference without module dispatch: runs common networks as a short list of calls into
preallocated outputs.

Usage::

    program = plan(net, row)  # None: the network is not supported here; call the module
    logits = program(row)  # the same tensor (or array) every time, overwritten by the next call
    if not program.current():  # once per rollout: layers, hooks or parameters were replaced
        program = plan(net, row)

A program reads the module's own parameter memory, so optimizer steps and ``copy_`` take effect at
once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_globals

from muster.memory.specs import Array
from muster.policies.normalization import RunningNorm
from muster.policies.numpy_layers import Call, numpy_steps
from muster.utils.private_names import usable

# NumPy is faster while the overhead of calls dominates. The choice must not depend on timing (same
# seed, same data), so the limit is a constant, in rows x multiply-adds. us torch / NumPy for
# 8-h-h-4 with tanh, then relu:
#   h 64: B=1 12.4 / 6.9; B=8 17.0 / 12.3, 13.3 / 9.7.   h 128: B=4 18.8 / 15.8, 15.4 / 13.1.   h
#   256: B=1 19.8 / 12.1. h 64, B=64 (311 k): 49.1 / 42.3, 23.4 / 21.0.   h 128, B=64 (1.1 M): 233 /
#   1798, 206 / 307.
# The limit is well below 262,144 per layer, from which on NumPy's BLAS starts threads (see the last
# number).
NUMPY_LIMIT = 200_000


@dataclass(frozen=True)
class _Watch:
    """The properties of one module that must not change while its program is used."""

    module: nn.Module
    cls: type[nn.Module]
    children: tuple[nn.Module | None, ...] | None  # None for a layer
    tensors: tuple[tuple[str, torch.Tensor | None, int], ...]  # name, object, address
    config: Call | None  # reads the other properties
    planned: Any  # value of ``config`` at planning


class Program:
    """A planned network, checked against the module on the example it was planned with.

    ``steps`` are calls, each on the result of the one before: tensors (kind ``"torch"``) or arrays
    (``"numpy"``).
    """

    def __init__(
        self,
        kind: Literal["torch", "numpy"],
        steps: tuple[Call, ...],
        watches: tuple[_Watch, ...],
    ) -> None:
        self.kind = kind
        self.steps = steps
        self._watches = watches

    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x

    def current(self) -> bool:
        """False if the module was changed and the program is no longer equal to it."""
        if _in_special_mode():
            return False
        # one function: this is most of the cost of starting a short rollout
        for watch in self._watches:
            module = watch.module
            cls = type(module)
            # see ``plain``
            if (
                cls is not watch.cls
                or module._forward_hooks
                or module._forward_pre_hooks
            ):
                return False
            if module._compiled_call_impl is not None or "forward" in module.__dict__:
                return False
            if cls.__call__ is not nn.Module.__call__:
                return False
            if watch.config is not None and watch.config(module) != watch.planned:
                return False
            if (
                watch.children is not None
                and tuple(module._modules.values()) != watch.children
            ):
                return False
            parameters = module._parameters
            for name, tensor, address in watch.tensors:
                now = parameters.get(name)
                if now is not tensor or (now is not None and now.data_ptr() != address):
                    return False
        return True


def plan(
    module: nn.Module,
    example: torch.Tensor,
    *,
    numpy_ok: bool = True,
) -> Program | None:
    """Plan ``module`` (a layer, or nested ``nn.Sequential``) for inputs like ``example``, and check
    the program on it.

    Returns a program that is bit-equal to the module on ``example`` (kind ``"numpy"``, if
    ``numpy_ok``: equal up to rounding), or None if the module is not supported.
    """
    leaves: list[nn.Module] = []
    watches: list[_Watch] = []
    if not layers_are_known() or _in_special_mode() or example.ndim == 0:
        return None
    if not _collect(module, leaves, watches):
        return None
    with torch.no_grad():
        try:
            trace = _trace(leaves, example)
        except Exception:  # noqa: BLE001  the module raises the better error when it is called
            return None
        if numpy_ok and _small(leaves, trace):
            steps = numpy_steps(leaves, trace)
            if steps is not None:
                program = Program("numpy", steps, tuple(watches))
                if _close(program(example.numpy()), trace[-1]):
                    return program
        steps = _torch_steps(leaves, trace)
        if steps is None:
            return None
        program = Program("torch", steps, tuple(watches))
        # A copy, since a layer with inplace=True may write into its input.
        return program if _equal(program(example.clone()), trace[-1]) else None


def _collect(module: nn.Module, leaves: list[nn.Module], watches: list[_Watch]) -> bool:
    """Append the layers in the order they run.

    False if any module is not a known, unmodified layer.
    """
    if not plain(module):
        return False
    children = tuple(module._modules.values())
    if _is_sequential(module):
        watches.append(_Watch(module, type(module), children, (), None, None))
        return all(
            child is not None and _collect(child, leaves, watches) for child in children
        )
    kind = _kind(module)
    if kind not in _CONFIG:
        return False
    if isinstance(kind, type) and any(child is not None for child in children):
        return False
    if type(module) is nn.Dropout and module.training:
        return False
    tensors: list[tuple[str, torch.Tensor | None, int]] = []
    for name, parameter in module._parameters.items():
        if parameter is None:
            tensors.append((name, None, 0))
            continue
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            return False
        tensors.append((name, parameter, parameter.data_ptr()))
    config = _CONFIG[kind]
    planned = None if config is None else config(module)
    watches.append(_Watch(module, type(module), None, tuple(tensors), config, planned))
    leaves.append(module)
    return True


def _is_sequential(module: nn.Module) -> bool:
    if type(module).forward is nn.Sequential.forward:
        return True
    # torchrl's MLP overrides forward only to concatenate several inputs and to reshape.
    cls = type(module)
    if cls.__name__ != "MLP" or not cls.__module__.startswith("torchrl.modules.models"):
        return False
    return not getattr(module, "_reshape_out", True)


@cache
def layers_are_known() -> bool:
    """Whether this version of torch has the private names used here; if not, modules are called."""
    own = (
        "_modules",
        "_parameters",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_compiled_call_impl",
    )
    everywhere = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return usable("torch", (nn.Module(), own), (module_globals, everywhere))


def plain(module: nn.Module) -> bool:
    """Whether a call of the module only runs the ``forward`` of its class."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or type(module).__call__ is not nn.Module.__call__
    )


def _in_special_mode() -> bool:
    return bool(
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or module_globals._global_forward_hooks
        or module_globals._global_forward_pre_hooks
    )


def _trace(leaves: list[nn.Module], example: torch.Tensor) -> list[Any]:
    """The input and the output of every layer, computed by the layers themselves."""
    trace: list[Any] = [example.clone()]
    for layer in leaves:
        before = trace[-1]
        if isinstance(before, torch.Tensor):
            before = before.clone()
        trace.append(layer(before))
    return trace


def _small(leaves: list[nn.Module], trace: list[Any]) -> bool:
    work = 0
    for layer, y in zip([None, *leaves], trace, strict=True):
        if not isinstance(y, torch.Tensor):
            return False
        if y.dtype != torch.float32 or y.device.type != "cpu":
            return False
        if layer is not None and _is_linear(layer):
            work += y.numel() * layer.in_features
    return work <= NUMPY_LIMIT


def _is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear


def _close(got: Array, expected: torch.Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    return np.allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        if len(got) != len(expected):
            return False
        return all(_equal(g, e) for g, e in zip(got, expected, strict=True))
    return got.dtype == expected.dtype and torch.equal(got, expected)


# --- torch ----------------------------------------------------------------------------------------


def _torch_steps(leaves: list[nn.Module], trace: list[Any]) -> tuple[Call, ...] | None:
    steps: list[Call] = []
    # the current value is a buffer of the program, so the next layer may work in place
    owned = False
    for layer, x, y in zip(leaves, trace, trace[1:], strict=False):
        if not isinstance(x, torch.Tensor):
            return None  # only the last layer may return several tensors
        if type(layer) in (nn.Identity, nn.Dropout):
            continue
        if type(layer) is nn.Flatten and x.shape == y.shape:
            continue
        in_place = _TORCH_IN_PLACE.get(type(layer))
        if not owned and (in_place is not None or getattr(layer, "inplace", False)):
            steps.append(torch.empty_like(x).copy_)
        steps.append(in_place or _torch_step(layer, x, y))
        owned = owned or type(layer) is not nn.Flatten
    return tuple(steps) if owned else None


_TORCH_IN_PLACE: dict[type[nn.Module], Call] = {
    nn.Tanh: torch.tanh_,
    nn.ReLU: torch.relu_,
    nn.Sigmoid: torch.sigmoid_,
}


def _torch_step(layer: Any, x: torch.Tensor, y: Any) -> Call:
    """The function of a layer, without a lookup of its parameters in every call."""
    kind: type[nn.Module] = type(layer)
    if kind is nn.Linear and x.ndim <= 2:
        return _torch_linear(layer, x, y)
    if kind is nn.LayerNorm:
        weight = _detached(layer.weight)
        bias = _detached(layer.bias)
        shape = layer.normalized_shape
        eps = layer.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    if kind is nn.Conv2d and layer.padding_mode == "zeros":
        weight = layer.weight.detach()
        bias = _detached(layer.bias)
        stride = layer.stride
        padding = layer.padding
        dilation = layer.dilation
        groups = layer.groups
        return lambda x: F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    forward: Call = layer.forward  # the attributes that it reads are watched
    return forward


def _detached(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.detach()


def _torch_linear(layer: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> Call:
    out = torch.empty_like(y)
    weight = layer.weight.detach()
    if layer.bias is None:
        if x.ndim == 1:
            return lambda x: torch.mv(weight, x, out=out)
        transposed = weight.t()
        return lambda x: torch.mm(x, transposed, out=out)
    bias = layer.bias.detach()
    if x.ndim == 1:
        addmv = torch.addmv
        return lambda x: addmv(bias, weight, x, out=out)
    transposed = weight.t()
    addmm = torch.addmm
    return lambda x: addmm(bias, x, transposed, out=out)


def _kind(module: nn.Module) -> type[nn.Module] | str:
    """The key in ``_CONFIG``: the exact class, or the name of a tensordict class, which this file
    does not import.
    """
    cls = type(module)
    if cls.__module__.startswith("tensordict.nn."):
        return f"tensordict:{cls.__name__}"
    return cls


# The attributes of each known layer, besides parameters, that a program relies on and that must not
# change.
_CONFIG: dict[type[nn.Module] | str, Call | None] = {
    nn.Linear: None,
    nn.Identity: None,
    nn.Tanh: None,
    nn.ReLU: None,
    nn.Sigmoid: None,
    nn.SiLU: operator.attrgetter("inplace"),
    nn.Dropout: operator.attrgetter("training"),
    nn.ELU: operator.attrgetter("alpha", "inplace"),
    nn.LeakyReLU: operator.attrgetter("negative_slope", "inplace"),
    nn.GELU: operator.attrgetter("approximate"),
    nn.Softplus: operator.attrgetter("beta", "threshold"),
    nn.LayerNorm: operator.attrgetter("normalized_shape", "eps"),
    nn.Flatten: operator.attrgetter("start_dim", "end_dim"),
    nn.Conv2d: operator.attrgetter(
        "stride", "padding", "dilation", "groups", "padding_mode"
    ),
    RunningNorm: lambda norm: (norm.clip, norm.shift.data_ptr(), norm.scale.data_ptr()),
    "tensordict:NormalParamExtractor": operator.attrgetter("scale_mapping", "scale_lb"),
    "tensordict:AddStateIndependentNormalScale": operator.attrgetter(
        "scale_mapping", "scale_lb"
    ),
}
