"""The weights of a policy: the modules that have them, the names of their tensors, checks and
copies.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from muster.errors import BadWeights, described
from muster.memory.specs import Array

Weights = dict[str, torch.Tensor]

# Where modules are looked for:
DEPTH = 6  # a function, in it an agent, in it a dict, in it a list, in it a module, and one more
TORCH_GRAIN = 32_768  # elements; with more, torch may copy and add in several threads
MAX_ITEMS = 256  # longer lists and dicts hold data
# hold no modules of the user, but thousands of functions
LIBRARIES = {"torch", "numpy", "gymnasium"}
# torch's name in a state_dict for what ``get_extra_state`` returns, with underscores
EXTRA_STATE = "extra_state"
_OF_EVERY_MODULE = frozenset(
    vars(torch.nn.Module())
)  # attributes: parameters, submodules, hooks


def named_weights(source: Any) -> Weights:
    """The tensors of a module, TensorDict or dict, by ``state_dict`` name.

    A dict may be nested, as the result of ``TensorDict.to_dict()`` is; its values may also be
    modules and TensorDicts.

    Raises:
        BadWeights: of anything else.
    """
    entries: Mapping[str, Any] | None = None
    if _is_tensordict(source):
        entries = source.flatten_keys(".")
    elif isinstance(source, torch.nn.Module):
        entries = _uncompiled(source).state_dict()
    if entries is not None:
        named = {}
        for name, tensor in entries.items():
            if torch.is_tensor(tensor):
                named[str(name)] = _detached(tensor)
        return named
    if isinstance(source, Mapping):
        return _named_in_dict(source)
    raise BadWeights(
        f"cannot take weights from {type(source).__name__}: expected a module, a TensorDict, or a"
        " dict of tensors such as module.state_dict()"
    )


def _named_in_dict(given: Mapping[Any, Any]) -> Weights:
    named: Weights = {}
    for key, value in given.items():
        name = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
        last = name.rpartition(".")[2]
        is_extra_state = last.lstrip("_") == EXTRA_STATE and not torch.is_tensor(value)
        # a layer without bias; what ``get_extra_state`` returned
        if value is None or is_extra_state:
            continue
        if torch.is_tensor(value):
            found = {name: _detached(value)}
        elif isinstance(value, (Mapping, torch.nn.Module)) or _is_tensordict(value):
            found = {}
            for inner, tensor in named_weights(value).items():
                found[f"{name}.{inner}"] = tensor
        else:
            raise BadWeights(
                f"cannot take weights from {type(given).__name__}: its entry {key!r} is"
                f" {type(value).__name__}, expected tensors, or dicts of tensors such as"
                " module.state_dict()"
            )
        twice = named.keys() & found.keys()
        if twice:
            raise BadWeights(
                f"the dict of weights has {sorted(twice)} twice. Nothing was changed."
            )
        named |= found
    return named


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if torch.nn.parameter.is_lazy(tensor):
        return tensor
    return tensor.detach()


def _is_tensordict(thing: Any) -> bool:
    """Whether it is a TensorDict, without importing tensordict."""
    return hasattr(thing, "flatten_keys")


def named_tensors(policy: Any) -> Weights:
    """The parameters and buffers of a policy; writing to them changes the policy.

    A copy of the policy in another process has the same names. Tied weights appear once, under
    their first name.

    Args:
        policy: a module; or a function, method, partial or object, whose modules are numbered:
            "0.weight", ...

    Raises:
        BadWeights: the policy has lazy layers that were not called yet.
    """
    return each_once(weight_bearer(policy))


def each_once(module: torch.nn.Module | None) -> Weights:
    """The tensors of a module's ``state_dict``, which change with it; tied weights under their
    first name.
    """
    seen: set[int] = set()
    named: Weights = {}
    state = {} if module is None else module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if torch.is_tensor(tensor) and id(tensor) not in seen:
            if torch.nn.parameter.is_lazy(tensor):
                raise BadWeights(
                    f"weight {name} is of a lazy layer, which has none before the policy's first"
                    " call"
                )
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def weight_bearer(policy: Any) -> torch.nn.Module | None:
    """The module with all weights of the policy: itself, or a ``ModuleList`` of those it uses; None
    without any.
    """
    if isinstance(policy, torch.nn.Module):
        return with_unregistered(_uncompiled(policy))
    return _list_of(*_reached([policy]))


def with_unregistered(module: torch.nn.Module) -> torch.nn.Module:
    """The module; or a ``ModuleList`` of it and of the modules that its functions use without being
    submodules.

    The network of ``TensorDictModule(lambda obs: net(obs), ...)`` is not in the ``state_dict``, and
    acts.
    """
    functions = [
        function for part in module.modules() for function in _functions_of(part)
    ]
    if not functions:
        return module
    modules, parameters = _reached(functions)
    own = {id(part) for part in module.modules()}
    own |= {id(tensor) for tensor in tensors_in(module)}
    others = [other for other in modules if id(other) not in own]
    modules = [other for other in others if tensors_in(other)]
    parameters = [parameter for parameter in parameters if id(parameter) not in own]
    if not modules and not parameters:
        return module
    return _list_of([module, *modules], parameters) or module


def tensors_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module, each once, with those that are not in the
    ``state_dict``.
    """
    return [*module.parameters(), *module.buffers()]


def replica(module: torch.nn.Module, *, only_weights: bool = False) -> torch.nn.Module:
    """A copy on the CPU, for its weights.

    Args:
        module: the user's.
        only_weights: where ``copy.deepcopy`` fails, return plain modules with the same names, and
            copies of the tensors.

    Raises:
        BadWeights: the module cannot be copied.
    """
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:
        skeleton = plain_modules(module) if only_weights else torch.nn.Module()
        named = {
            name
            for name, value in module.state_dict().items()
            if torch.is_tensor(value)
        }
        if skeleton.state_dict().keys() == named:
            return skeleton
        raise BadWeights(
            f"the policy cannot be copied for its workers: copy.deepcopy raised {described(error)}"
        ) from error


def plain_modules(module: torch.nn.Module) -> torch.nn.Module:
    """Return plain modules with the names of these, and copies of the tensors on the CPU: of no class
    of the user's, which another process may not be able to import.
    """
    made: dict[int, torch.nn.Module] = {}
    copies: dict[int, Any] = {}
    root = torch.nn.Module()
    for path, part in module.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        is_known = id(part) in made
        plain = made.setdefault(id(part), torch.nn.Module() if path else root)
        if path:
            root.get_submodule(parent).add_module(name, plain)
        if is_known:
            continue
        saved = part.state_dict(keep_vars=True).keys()
        for name, parameter in part.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            data = parameter.detach().to("cpu", copy=True)
            copied = torch.nn.Parameter(data, parameter.requires_grad)
            copied = copies.setdefault(id(parameter), copied)
            plain.register_parameter(name, copied)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            data = buffer.detach().to("cpu", copy=True)
            copied = copies.setdefault(id(buffer), data)
            plain.register_buffer(name, copied, persistent=name in saved)
    return root


def acting_modules(policy: Any) -> list[torch.nn.Module]:
    """The modules that act: the policy, and those that it or its functions use without being
    submodules.
    """
    if not isinstance(policy, torch.nn.Module):
        return modules_of(policy)
    functions = [
        function for part in policy.modules() for function in _functions_of(part)
    ]
    reached, _ = _reached(functions)
    return [policy, *reached]


def place_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors in the same memory, also where a ``state_dict`` makes new
    ones for each call.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    address = tensor.data_ptr()
    if not address:
        return id(tensor)
    return address, tensor.device, tensor.shape, tensor.stride()


def modules_of(policy: Any) -> list[torch.nn.Module]:
    """The policy if it is a module, else the modules that a function or object reaches by name,
    each once.

    Searches closures, used globals, arguments of partials, attributes, and short lists and dicts, a
    few levels deep. The order is the same in a copy.
    """
    modules, _ = _reached([policy])
    return modules


def _reached(things: list[Any]) -> tuple[list[torch.nn.Module], list[torch.Tensor]]:
    """See ``modules_of``; and the parameters that are reached beside the modules."""
    seen: dict[int, Any] = {}
    level = things
    for _ in range(DEPTH + 1):
        new = {id(thing): thing for thing in level if id(thing) not in seen}
        seen |= new
        level = [held for thing in new.values() for held in _held(thing)]
    modules = [thing for thing in seen.values() if isinstance(thing, torch.nn.Module)]
    inside = {id(tensor) for module in modules for tensor in tensors_in(module)}
    tensors = [thing for thing in seen.values() if torch.is_tensor(thing)]
    trained = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    return modules, [tensor for tensor in trained if id(tensor) not in inside]


def _list_of(
    modules: list[torch.nn.Module], parameters: list[torch.Tensor]
) -> torch.nn.ModuleList | None:
    if not modules and not parameters:
        return None
    listed = torch.nn.ModuleList(modules)
    if parameters:
        alone = torch.nn.Module()
        for number, tensor in enumerate(parameters):
            alone.register_buffer(str(number), tensor)  # also if it is no ``Parameter``
        listed.append(alone)
    return listed


def _functions_of(module: torch.nn.Module) -> Iterator[Any]:
    """The functions and callable objects among a module's attributes, also in lists and dicts."""
    if _is_of_library(type(module)):
        return
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield from _functions_in(value, 2)


def _functions_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        if depth and len(value) <= MAX_ITEMS:
            items = value.values() if isinstance(value, dict) else value
            for item in items:
                yield from _functions_in(item, depth - 1)
        return
    if not callable(value) or isinstance(value, (type, torch.nn.Module)):
        return
    if not _is_of_library(value):
        yield value


def overwrite(old: Weights, new: Weights) -> None:
    """Copy values over tensors of the same names.

    Raises:
        BadWeights: names, shapes or dtypes differ, or values are not finite. Nothing was changed.
    """
    check_fit(new, old)
    check_finite(new)
    for name, tensor in old.items():
        copy_tensor(tensor, new[name])


def check_fit(
    new: Mapping[str, torch.Tensor], old: Mapping[str, Any], remedy: str = ""
) -> None:
    """Raise BadWeights unless ``new`` has the names, shapes and dtypes of ``old``: of tensors, or
    of what has both.
    """
    if new.keys() != old.keys():
        missing = sorted(old.keys() - new.keys()) or "nothing"
        extra = sorted(new.keys() - old.keys()) or "nothing"
        advice = f"{remedy} " if remedy else ""
        raise BadWeights(
            f"the weights are named differently from those of the policy: missing {missing},"
            f" unknown {extra}; expected {sorted(old)}. {advice}Nothing was changed."
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
        if not is_finite(tensor):
            raise BadWeights(
                f"weight {name} is not finite: training has diverged. Nothing was published."
            )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are numbers and not infinite; also of a lazy layer, which has no values."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":
        return True
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.itemsize == 1:  # float8 has no arithmetic
        tensor = tensor.float()
    elif tensor.dtype != torch.complex32 and math.isfinite(abs(_sum(tensor))):
        # a sum with one infinite or NaN term is one too, and takes a thirtieth of the time
        return True
    return bool(torch.isfinite(tensor).all())


def _sum(tensor: torch.Tensor) -> complex:
    if not (_is_large(tensor) and is_array(tensor)):
        return complex(tensor.sum().item())
    numbers = tensor.detach().view(-1).numpy()
    with np.errstate(all="ignore"):
        return complex(np.add.reduce(numbers))


def copy_tensor(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the values; on the CPU in this thread only, because the threads of torch's pool wait for
    one another, which takes long while workers use the cores.
    """
    with torch.no_grad():
        alike = into.dtype == source.dtype and into.shape == source.shape
        if alike and _is_large(into) and _is_large(source):
            np.copyto(_bytes(into), _bytes(source))
            into.view(-1)[:0].zero_()  # autograd is to know
        else:
            into.copy_(source)


def is_array(tensor: torch.Tensor) -> bool:
    """Return whether it is an array of float32 or float64 in C order."""
    return tensor.dtype in (torch.float32, torch.float64) and _is_memory(tensor)


def _is_large(tensor: torch.Tensor) -> bool:
    """Enough for torch to use threads; and it is an array of the same memory."""
    return tensor.numel() > TORCH_GRAIN and _is_memory(tensor)


def _is_memory(tensor: torch.Tensor) -> bool:
    """Return whether the values are those of the memory, one after another."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if not tensor.is_contiguous():
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _bytes(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """``torch.compile`` wraps a module and prefixes its names."""
    inner = getattr(module, "_orig_mod", module)
    if not isinstance(inner, torch.nn.Module):
        return module
    return inner


def _held(thing: Any) -> Iterator[Any]:
    """What an object holds, in an order that a copy of it has too."""
    if isinstance(thing, (type, ModuleType, torch.nn.Module)) or _is_of_library(thing):
        return
    if isinstance(thing, (list, tuple, dict)):
        if len(thing) <= MAX_ITEMS:
            yield from thing.values() if isinstance(thing, dict) else thing
    elif callable(thing):
        yield from _captured(thing)
    elif not _is_env(thing) and hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def _is_of_library(thing: Any) -> bool:
    module = str(getattr(thing, "__module__", ""))
    return module.split(".")[0] in LIBRARIES


def _is_env(thing: Any) -> bool:
    """Environments are left alone: CPython 3.11 makes an object's attributes slower for ever once
    its dict is seen.
    """
    spaces = hasattr(thing, "observation_space") or hasattr(thing, "observation_spec")
    return spaces and hasattr(thing, "reset") and hasattr(thing, "step")


def _captured(function: Callable[..., Any]) -> list[Any]:
    """Objects that a plain function, method or partial can reach by name."""
    if isinstance(function, functools.partial):
        return [
            function.func,
            *function.args,
            *function.keywords.values(),
            *_captured(function.func),
        ]
    bound = getattr(function, "__self__", None)
    held: list[Any] = []
    if hasattr(bound, "__dict__") and not _is_env(bound):
        held = [bound, *vars(bound).values()]
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        if hasattr(function, "__dict__"):
            held += vars(function).values()
        return held
    known = inspect.getclosurevars(plain)
    return [*held, *known.nonlocals.values(), *known.globals.values()]
