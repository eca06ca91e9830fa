"""The layers of ``executor`` in NumPy, for networks so small that call overhead is most of their
time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from muster.memory.specs import Array
from muster.policies.normalization import RunningNorm

Call = Callable[[Any], Any]


def numpy_steps(
    leaves: list[nn.Module],
    trace: list[torch.Tensor],
) -> tuple[Call, ...] | None:
    """Calls that compute ``leaves`` on float32 arrays, or None if a layer has no NumPy version."""
    steps: list[Call] = []
    owned = False
    for layer, x, y in zip(leaves, trace, trace[1:], strict=False):
        kind: type[nn.Module] = type(layer)
        if kind in (nn.Identity, nn.Dropout):
            continue
        if kind is nn.Flatten and x.shape == y.shape:
            continue
        if kind is nn.Flatten:
            steps.append(operator.methodcaller("reshape", tuple(y.shape)))
            continue
        if kind not in _NUMPY:
            return None
        if kind is not nn.Linear and not owned:
            steps.append(_copy(np.empty(x.shape, np.float32)))
        step = _NUMPY[kind](layer, np.empty(y.shape, np.float32))
        if step is None:
            return None
        steps.append(step)
        owned = True
    return tuple(steps) if owned else None


def _copy(out: Array) -> Call:
    def copy(x: Array) -> Array:
        np.copyto(out, x)
        return out

    return copy


def _linear(layer: nn.Linear, out: Array) -> Call:
    weight = layer.weight.detach().numpy().T
    add = np.add  # not ``np.dot``, a Python function
    if layer.bias is None:
        return lambda x: x.dot(weight, out)
    bias = layer.bias.detach().numpy()
    return lambda x: add(x.dot(weight, out), bias, out)


def _elu(layer: Any, y: Array) -> Call:
    def of_negative(x: Any) -> Any:
        return np.multiply(np.expm1(x, x), layer.alpha, x)

    return _two_sided(y, of_negative)


def _leaky_relu(layer: Any, y: Array) -> Call:
    return _two_sided(
        y, lambda negative: np.multiply(negative, layer.negative_slope, negative)
    )


def _two_sided(y: Array, of_negative: Call) -> Call:
    """A call that computes ``max(x, 0) + of_negative(min(x, 0))``."""
    zero = np.zeros_like(y)
    part = np.empty_like(y)

    def apply(x: Array) -> Array:
        of_negative(np.minimum(x, zero, out=part))
        positive = np.maximum(x, zero, out=x)
        return np.add(positive, part, out=x)

    return apply


def _relu(layer: Any, y: Array) -> Call:
    zero = np.zeros_like(y)  # an array, since a Python scalar costs 1 us more
    maximum = np.maximum
    return lambda x: maximum(x, zero, out=x)


def _sigmoid(layer: Any, y: Array) -> Call:
    half = np.full_like(y, 0.5)  # computed by tanh, which cannot overflow

    def apply(x: Array) -> Array:
        np.multiply(x, half, x)
        np.tanh(x, x)
        np.multiply(x, half, x)
        return np.add(x, half, x)

    return apply


def _silu(layer: Any, y: Array) -> Call:
    sigmoid = _sigmoid(layer, y)
    return lambda x: np.multiply(x, sigmoid(np.copy(x)), x)


def _softplus(layer: Any, y: Array) -> Call:
    zero = np.zeros_like(y)
    beta = layer.beta

    def apply(x: Any) -> Any:
        np.multiply(x, beta, x)
        np.logaddexp(x, zero, x)
        return np.divide(x, beta, x)

    return apply


def _gelu(layer: Any, y: Array) -> Call | None:
    if layer.approximate != "tanh":
        return None  # NumPy has no erf

    def apply(x: Array) -> Array:
        cubed = 0.044715 * x * x * x
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + cubed))
        return np.multiply(x, 0.5 * (1 + inner), x)

    return apply


def _layer_norm(layer: Any, y: Array) -> Call | None:
    if len(layer.normalized_shape) != 1:
        return None
    # a product, because reductions are slower
    width = y.shape[-1]
    average = np.full((width, 1), 1 / width, np.float32)
    weight = _array(layer.weight)
    bias = _array(layer.bias)
    eps = layer.eps
    square = np.empty_like(y)

    def apply(x: Array) -> Array:
        np.subtract(x, np.dot(x, average), x)
        variance = np.dot(np.multiply(x, x, square), average)
        np.divide(x, np.sqrt(variance + eps), x)
        if weight is not None:
            np.multiply(x, weight, x)
        if bias is None:
            return x
        return np.add(x, bias, x)

    return apply


def _array(parameter: torch.Tensor | None) -> Array | None:
    if parameter is None:
        return None
    array: Array = parameter.detach().numpy()
    return array


def _running_norm(layer: RunningNorm, y: Array) -> Call:
    shift = layer.shift.numpy()
    scale = layer.scale.numpy()
    most = np.full_like(y, layer.clip)
    least = -most

    def apply(x: Array) -> Array:
        np.subtract(x, shift, x)
        np.multiply(x, scale, x)
        bounded = np.maximum(x, least, out=x)
        return np.minimum(bounded, most, out=x)

    return apply


_NUMPY: dict[type[nn.Module], Callable[[Any, Array], Call | None]] = {
    nn.Linear: _linear,
    RunningNorm: _running_norm,
    nn.Tanh: lambda layer, y: lambda x: np.tanh(x, x),
    nn.ReLU: _relu,
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.Sigmoid: _sigmoid,
    nn.SiLU: _silu,
    nn.Softplus: _softplus,
    nn.GELU: _gelu,
    nn.LayerNorm: _layer_norm,
}
