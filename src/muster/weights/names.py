"""The weights of a policy, and their names."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from muster.errors import BadWeights
from muster.memory.specs import Array

Weights = dict[str, torch.Tensor]

# Where modules are looked for:
DEPTH = 6  # a function, in it an agent, in it a dict, in it a list, in it a module, and one more
TORCH_GRAIN = 32_768  # elements; with more, torch may copy and add in several threads
MAX_ITEMS = 256  # longer lists and dicts hold data
LIBRARIES = {"torch", "numpy", "gymnasium"}  # hold no modules of the user, but thousands of functions


def named_weights(source: Any) -> Weights:
    """The tensors of a module, TensorDict or dict, by ``state_dict`` name.

    Raises:
        BadWeights: of anything else.
    """
    if isinstance(source, torch.nn.Module) and not hasattr(source, "flatten_keys"):
        state = _uncompiled(source).state_dict()
        return {name: tensor.detach() for name, tensor in state.items() if torch.is_tensor(tensor)}
    if hasattr(source, "flatten_keys"):  # a TensorDict, without importing tensordict to ask
        flat = source.flatten_keys(".")
        return {str(name): tensor.detach() for name, tensor in flat.items() if torch.is_tensor(tensor)}
    if isinstance(source, Mapping) and all(torch.is_tensor(v) for v in source.values()):
        return {str(name): tensor.detach() for name, tensor in source.items()}
    raise BadWeights(
        f"cannot take weights from {type(source).__name__}: expected a module, a TensorDict, or a dict of tensors "
        f"such as module.state_dict()"
    )


def named_tensors(policy: Any) -> Weights:
    """The parameters and buffers of a policy; writing to them changes the policy.

    A copy of the policy in another process has the same names. Tied weights appear once, under their first name.

    Args:
        policy: a module; or a function, method, partial or object, whose modules are numbered: "0.weight", ...

    Raises:
        BadWeights: the policy has lazy layers that were not called yet.
    """
    module, seen = weight_bearer(policy), set[int]()
    state = {} if module is None else module.state_dict(keep_vars=True)
    named = {}
    for name, tensor in state.items():
        if torch.is_tensor(tensor) and id(tensor) not in seen:
            if torch.nn.parameter.is_lazy(tensor):
                raise BadWeights(f"weight {name} is of a lazy layer, which has none before the policy's first call")
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def weight_bearer(policy: Any) -> torch.nn.Module | None:
    """The module with all weights of the policy: itself, or a ``ModuleList`` of those it uses; None without any."""
    if isinstance(policy, torch.nn.Module):
        return _uncompiled(policy)
    modules = modules_of(policy)
    return torch.nn.ModuleList(modules) if modules else None


def modules_of(policy: Any) -> list[torch.nn.Module]:
    """The policy if it is a module, else the modules that a function or object reaches by name, each once.

    Searches closures, used globals, arguments of partials, attributes, and short lists and dicts, a few levels deep.
    The order is the same in a copy.
    """
    seen: dict[int, Any] = {}
    level = [policy]
    for _ in range(DEPTH + 1):
        new = {id(thing): thing for thing in level if id(thing) not in seen}
        seen |= new
        level = [held for thing in new.values() for held in _held(thing)]
    return [thing for thing in seen.values() if isinstance(thing, torch.nn.Module)]


def overwrite(old: Weights, new: Weights) -> None:
    """Copy values over tensors of the same names.

    Raises:
        BadWeights: names, shapes or dtypes differ, or values are not finite. Nothing was changed.
    """
    check_fit(new, old)
    check_finite(new)
    for name, tensor in old.items():
        copy_tensor(tensor, new[name])


def check_fit(new: Mapping[str, torch.Tensor], old: Mapping[str, Any]) -> None:
    """Raise BadWeights unless ``new`` has the names, shapes and dtypes of ``old``: of tensors, or of what has both."""
    if new.keys() != old.keys():
        missing, extra = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        raise BadWeights(
            f"the weights are named differently from those of the policy: missing {missing or 'nothing'}, unknown "
            f"{extra or 'nothing'}; expected {sorted(old)}. Nothing was changed."
        )
    for name, expected in old.items():
        tensor = new[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise BadWeights(
                f"weight {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{tuple(expected.shape)} and {expected.dtype}. Nothing was changed."
            )


def check_finite(weights: Weights) -> None:
    """Raise BadWeights if a value is infinite or not a number."""
    for name, tensor in weights.items():
        if not _finite(tensor):
            raise BadWeights(f"weight {name} is not finite: training has diverged. Nothing was published.")


def _finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.itemsize == 1:  # float8 has no arithmetic
        tensor = tensor.float()
    elif tensor.dtype != torch.complex32 and math.isfinite(abs(_sum(tensor))):
        return True  # a sum with one infinite or NaN term is one too, and takes a thirtieth of the time
    return bool(torch.isfinite(tensor).all())


def _sum(tensor: torch.Tensor) -> complex:
    if tensor.dtype not in (torch.float32, torch.float64) or not _is_large(tensor):
        return complex(tensor.sum().item())
    with np.errstate(all="ignore"):
        return complex(np.add.reduce(tensor.detach().view(-1).numpy()))


def copy_tensor(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the values; on the CPU in this thread only, because the threads of torch's pool wait for one another, which
    takes long while workers use the cores.
    """
    with torch.no_grad():
        if into.dtype == source.dtype and into.shape == source.shape and _is_large(into) and _is_large(source):
            np.copyto(_bytes(into), _bytes(source))
            into.view(-1)[:0].zero_()  # autograd is to know
        else:
            into.copy_(source)


def _is_large(tensor: torch.Tensor) -> bool:
    """Enough for torch to use threads; and it is an array of the same memory."""
    return (
        tensor.numel() > TORCH_GRAIN
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _bytes(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """``torch.compile`` wraps a module and prefixes its names."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


def _held(thing: Any) -> Iterator[Any]:
    """What an object holds, in an order that a copy of it has too."""
    if (
        isinstance(thing, (type, ModuleType, torch.nn.Module))
        or str(getattr(thing, "__module__", "")).split(".")[0] in LIBRARIES
    ):
        return
    if isinstance(thing, (list, tuple, dict)):
        if len(thing) <= MAX_ITEMS:
            yield from thing.values() if isinstance(thing, dict) else thing
    elif callable(thing):
        yield from _captured(thing)
    elif not _is_env(thing) and hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def _is_env(thing: Any) -> bool:
    """Environments are left alone: CPython 3.11 makes an object's attributes slower for ever once its dict is seen."""
    spaces = hasattr(thing, "observation_space") or hasattr(thing, "observation_spec")
    return spaces and hasattr(thing, "reset") and hasattr(thing, "step")


def _captured(function: Callable[..., Any]) -> list[Any]:
    """Objects that a plain function, method or partial can reach by name."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values(), *_captured(function.func)]
    bound = getattr(function, "__self__", None)
    held = [bound, *vars(bound).values()] if hasattr(bound, "__dict__") else []
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        return [*held, *vars(function).values()] if hasattr(function, "__dict__") else held
    known = inspect.getclosurevars(plain)
    return [*held, *known.nonlocals.values(), *known.globals.values()]
