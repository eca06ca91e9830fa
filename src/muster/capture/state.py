"""The state that a rollout reads and changes: what is reachable from environments and policy.

A ``Survey`` has everything that is reachable from some objects at one moment, by path
(``env.unwrapped.counter``): tensors, generators, plain values, and the entries of all mutable
containers. Two surveys show what a rollout did:

- a tensor that is another object now was *replaced*; its name can be set back to the first one.
- a tensor that is the same object may have other contents, which ``Contents`` saves and restores.
- a plain value that differs was changed by Python, which a recorded graph does not run.

Objects without attributes that Python can see (handles of C++ libraries, arrays of other packages)
are listed in ``opaque``.
"""

from __future__ import annotations

import enum
import functools
import logging
import pickle
import random
import threading
import types
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from muster.memory.slots import Lane, Slot
from muster.utils.devices import with_index

MOST_ENTRIES = 50_000  # of a survey
MOST_DEPTH = 60
SHOWN = 60  # characters of a value in a message
SMALL_BYTES = 1 << 16  # of arrays in host memory that are compared before each replay
LARGE_BYTES = 1 << 24  # of larger arrays in host memory, only some values are compared
# packages whose objects a rollout changes without effect on its rows: caches, guards, locks
NOT_OPENED = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch.cuda.graphs",
    "logging",
    "threading",
    "importlib",
    "muster.observing",
)
CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    enum.Enum,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
WITHOUT_STATE = (
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MappingProxyType,
    property,
    weakref.ref,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    torch.finfo,
    torch.iinfo,
    Lane,
    Slot,
)
_MISSING = object()


class Entries:
    """The entries of a mutable container at one moment, which can be compared and set back."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self.saved: Any = self._now()

    @property
    def is_current(self) -> bool:
        """Whether the container still has these entries."""
        container = self.container
        now = container if isinstance(container, (dict, list)) else self._now()
        saved = self.saved
        if len(now) != len(saved):
            return False
        if isinstance(now, dict):
            for key, old in saved.items():
                new = now.get(key, _MISSING)
                if new is not old and not _is_same_constant(old, new):
                    return False
            return True
        for old, new in zip(saved, now, strict=True):
            if new is not old and not _is_same_constant(old, new):
                return False
        return True

    def put(self, key: Any, value: Any) -> None:
        """Replace an entry."""
        container = self.container
        if isinstance(container, types.CellType):
            container.cell_contents = value
        elif isinstance(container, (dict, list, deque)):
            container[key] = value
        else:
            setattr(container, key, value)
        self.saved = self._now()

    def set_back(self) -> None:
        """Make the container have these entries again."""
        if self.is_current:
            return
        container = self.container
        if isinstance(container, types.CellType):
            container.cell_contents = self.saved[0]
        elif isinstance(container, dict):
            _set_back_dict(container, self.saved)
        elif isinstance(container, (list, deque)):
            container.clear()
            container.extend(self.saved)
        elif isinstance(container, set):
            container.clear()
            container.update(self.saved)
        else:
            for name, value in self.saved.items():
                setattr(container, name, value)

    def _now(self) -> Any:
        container = self.container
        if isinstance(container, types.CellType):
            try:
                return [container.cell_contents]
            except ValueError:  # nothing is assigned yet
                return []
        if isinstance(container, dict):
            return dict(container)
        if isinstance(container, (list, deque)):
            return list(container)
        if isinstance(container, set):
            return list(container)
        return {name: getattr(container, name) for name in _slots_of(container)}


@dataclass
class Survey:
    """What is reachable from some objects at one moment, by path.

    Attributes:
        tensors: tensors on the device.
        generators: generators of torch on the device.
        values: what Python changes: constants, lengths of containers, digests of arrays, of tensors
            in host memory, and of generators there.
        entries: entries of all mutable containers.
        shared: attributes of classes, and globals of functions: owner, name and value.
        arrays: small arrays and tensors in host memory.
        places: the entries and the key of each tensor that is directly in a mutable container.
        opaque: types of objects that cannot be looked into.
        problem: why the state cannot be known; "" if it can.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    entries: list[Entries] = field(default_factory=list)
    shared: list[tuple[type | dict[str, Any], str, Any]] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[Entries, Any]] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def own(self, path: str) -> None:
        """Replace a tensor by a copy, which shares memory with no other.

        Raises:
            ValueError: it is in a tuple.
        """
        if path not in self.places:
            raise ValueError(f"{path} is in a tuple, and shares memory with others")
        entries, key = self.places[path]
        with torch.inference_mode(False):  # the environment may write into it
            self.tensors[path] = self.tensors[path].detach().clone()
        entries.put(key, self.tensors[path])

    def set_back(self) -> None:
        """Let all containers, classes and globals have their entries of that moment."""
        for entries in self.entries:
            entries.set_back()
        for owner, name, value in self.shared:
            if _looked_up(owner, name) is value:
                continue
            if isinstance(owner, type):
                setattr(owner, name, value)
            else:
                owner[name] = value

    @property
    def has_its_entries(self) -> bool:
        """Whether all containers, classes, globals and small arrays are as at that moment."""
        for entries in self.entries:
            if not entries.is_current:
                return False
        for owner, name, value in self.shared:
            now = _looked_up(owner, name)
            if now is not value and not _is_same_constant(value, now):
                return False
        return all(
            _digest(array) == self.values[path] for path, array in self.arrays.items()
        )


def survey(roots: Mapping[str, Any], device: torch.device) -> Survey:
    """Return what is reachable from ``roots``, whose names begin the paths, for rollouts on
    ``device``.
    """
    walk = _Walk(device)
    for name, root in roots.items():
        walk.visit(root, name, 0)
    return walk.found


class _Walk:
    """Visits every reachable object once; a tensor or constant at each of its paths."""

    def __init__(self, device: torch.device) -> None:
        self.found = Survey()
        self._device = with_index(device)
        self._seen: dict[
            int, Any
        ] = {}  # the objects, too: an id belongs to a living object
        self._visited = 0

    def visit(self, obj: Any, path: str, depth: int) -> None:
        found = self.found
        self._visited += 1
        if self._visited > MOST_ENTRIES and not found.problem:
            found.problem = (
                f"more than {MOST_ENTRIES:,} objects are reachable, at {path}"
            )
        if found.problem:
            return
        if isinstance(obj, CONSTANTS):
            found.values[path] = obj
            return
        if isinstance(obj, torch.Tensor):
            self._note_tensor(obj, path)
            return
        if isinstance(obj, WITHOUT_STATE) or _is_from(obj, NOT_OPENED):
            return
        if not isinstance(obj, tuple):  # equal tuples can be one object
            if id(obj) in self._seen:
                return
            self._seen[id(obj)] = obj
        if depth > MOST_DEPTH:
            found.problem = f"objects are nested more than {MOST_DEPTH} deep, at {path}"
            return
        if _is_from(obj, ("jax", "jaxlib")):
            found.problem = f"{path} is of JAX, whose operations are not torch's"
            return
        if self._note_random_state(obj, path):
            return
        self._open(obj, path, depth + 1)

    def _note_tensor(self, tensor: torch.Tensor, path: str) -> None:
        if with_index(tensor.device) == self._device:
            self.found.tensors[path] = tensor
        elif tensor.device.type == "cpu" and tensor.layout is torch.strided:
            self._note_array(tensor, path)
        else:
            self.found.opaque[path] = f"a tensor on {tensor.device}"

    def _note_array(self, array: Any, path: str) -> None:
        self.found.values[path] = _digest(array)
        if array.nbytes <= SMALL_BYTES and not path.startswith("adapter"):
            self.found.arrays[path] = array

    def _note_random_state(self, obj: Any, path: str) -> bool:
        """Note the state of a generator; return whether ``obj`` is one."""
        if isinstance(obj, torch.Generator):
            if with_index(obj.device) == self._device:
                self.found.generators[path] = obj
            else:
                self.found.values[path] = _digest(obj.get_state().cpu().numpy())
            return True
        state: Any = None
        if isinstance(obj, np.random.Generator):
            state = obj.bit_generator.state
        elif isinstance(obj, np.random.RandomState):
            state = obj.get_state(legacy=False)
        elif isinstance(obj, np.random.BitGenerator):
            state = obj.state
        elif isinstance(obj, random.Random):
            state = obj.getstate()
        if state is None:
            return False
        self.found.values[path] = RandomState(zlib.crc32(pickle.dumps(state)))
        return True

    def _open(self, obj: Any, path: str, depth: int) -> None:
        """Visit the parts of an object."""
        if isinstance(obj, np.ndarray):
            if obj.dtype == object:
                self._visit_all(enumerate(obj.flat), path, depth)
            else:
                self._note_array(obj, path)
        elif isinstance(obj, tuple):
            self.found.values[f"{path}()"] = Length(len(obj))
            self._visit_all(enumerate(obj), path, depth)
        elif isinstance(obj, frozenset):
            self.found.values[path] = obj
        elif isinstance(obj, (dict, list, deque, set)):
            self._open_container(obj, path, depth)
        elif isinstance(obj, functools.partial):
            self.visit(obj.func, path, depth)
            self.visit(obj.args, f"{path}.args", depth)
            self.visit(obj.keywords, f"{path}.keywords", depth)
        elif isinstance(obj, types.MethodType):
            self.visit(obj.__self__, path, depth)
            self.visit(obj.__func__, path, depth)
        elif isinstance(obj, types.BuiltinFunctionType):
            self.visit(obj.__self__, path, depth)  # a tensor's method, or a module
        elif isinstance(obj, types.FunctionType):
            self._open_function(obj, path, depth)
        else:
            self._open_object(obj, path, depth)

    def _open_container(self, obj: Any, path: str, depth: int) -> None:
        within = Entries(obj)
        self.found.entries.append(within)
        self.found.values[f"{path}()"] = Length(len(obj))
        if isinstance(obj, set):
            constant = all(isinstance(part, CONSTANTS) for part in obj)
            if constant:
                self.found.values[path] = frozenset(obj)
            else:
                self.found.opaque[path] = "a set of objects"
            return
        parts = obj.items() if isinstance(obj, dict) else enumerate(obj)
        self._visit_all(parts, path, depth, within)

    def _visit_all(
        self,
        parts: Iterable[tuple[Any, Any]],
        path: str,
        depth: int,
        within: Entries | None = None,
    ) -> None:
        for key, part in list(parts):
            shown = repr(key) if isinstance(key, CONSTANTS) else type(key).__name__
            self._visit_entry(within, key, part, f"{path}[{shown}]", depth)

    def _visit_entry(
        self, within: Entries | None, key: Any, part: Any, path: str, depth: int
    ) -> None:
        if within is not None and isinstance(part, torch.Tensor):
            self.found.places[path] = (within, key)
        self.visit(part, path, depth)

    def _open_function(
        self, function: types.FunctionType, path: str, depth: int
    ) -> None:
        compiled = function.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            self.visit(compiled, path, depth)
            return
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            entries = Entries(cell)
            self.found.entries.append(entries)
            for content in entries.saved:
                self._visit_entry(entries, 0, content, f"{path}.{name}", depth)
        self.visit(function.__defaults__ or (), f"{path}.__defaults__", depth)
        if function.__dict__:
            self._open_attributes(function.__dict__, path, depth)
        for name in function.__code__.co_names:
            used = function.__globals__.get(name)
            if isinstance(
                used, (torch.Tensor, torch.Generator, torch.nn.Module, float, int, list)
            ):
                self.found.shared.append((function.__globals__, name, used))
                self.visit(used, f"{path}: global {name}", depth)

    def _open_object(self, obj: Any, path: str, depth: int) -> None:
        attributes = getattr(obj, "__dict__", None)
        slots = _slots_of(obj)
        if not isinstance(attributes, dict) and not slots:
            if type(obj).__module__ != "builtins":
                self.found.opaque[path] = type(obj).__qualname__
            return
        if isinstance(attributes, dict):
            self._open_attributes(attributes, path, depth)
        if slots:
            entries = Entries(obj)
            self.found.entries.append(entries)
            for name, value in entries.saved.items():
                self._visit_entry(entries, name, value, f"{path}.{name}", depth)
        self._open_class(type(obj), path, depth)

    def _open_attributes(
        self, attributes: dict[str, Any], path: str, depth: int
    ) -> None:
        within = Entries(attributes)
        self.found.entries.append(within)
        for name, value in list(attributes.items()):
            if name in ("_parameters", "_buffers", "_modules") and isinstance(
                value, dict
            ):
                parts = Entries(value)
                self.found.entries.append(parts)
                for key, part in list(value.items()):
                    self._visit_entry(parts, key, part, f"{path}.{key}", depth)
                continue
            self._visit_entry(within, name, value, f"{path}.{name}", depth)

    def _open_class(self, cls: type, path: str, depth: int) -> None:
        """Visit the attributes of the user's classes that objects share, such as counters."""
        for base in cls.__mro__:
            if (
                id(base) in self._seen
                or base.__module__.partition(".")[0] in _LIBRARIES
            ):
                continue
            self._seen[id(base)] = base
            for name, value in list(vars(base).items()):
                kinds = (
                    bool,
                    int,
                    float,
                    str,
                    list,
                    dict,
                    torch.Tensor,
                    torch.Generator,
                )
                if isinstance(value, kinds) and not name.startswith("__"):
                    self.found.shared.append((base, name, value))
                    self.visit(value, f"type({path}).{name}", depth)


_LIBRARIES = (
    "builtins",
    "torch",
    "tensordict",
    "torchrl",
    "gymnasium",
    "abc",
    "typing",
    "muster",
)


def _looked_up(owner: type | dict[str, Any], name: str) -> Any:
    return (vars(owner) if isinstance(owner, type) else owner).get(name, _MISSING)


class Length(int):
    """The length of a container."""


class RandomState(int):
    """A digest of the state of a generator of random numbers in host memory."""


class Digest(int):
    """A digest of the contents of an array."""


def _digest(array: Any) -> Digest:
    if isinstance(array, torch.Tensor):
        array = array.detach().numpy(force=True)
    about = f"{array.shape} {array.dtype.str}".encode()
    if array.nbytes > LARGE_BYTES:
        flat = array.reshape(-1)
        array = flat[:: max(1, array.nbytes // LARGE_BYTES)]
    return Digest(zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(about)))


def _is_from(obj: Any, packages: Iterable[str]) -> bool:
    module = type(obj).__module__
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def _slots_of(obj: Any) -> list[str]:
    names: list[str] = []
    for cls in type(obj).__mro__:
        own = cls.__dict__.get("__slots__", ())
        for name in [own] if isinstance(own, str) else own:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    hidden = ("__dict__", "__weakref__")
    return [name for name in names if name not in hidden and hasattr(obj, name)]


def _is_same_constant(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or not isinstance(a, (*CONSTANTS, frozenset)):
        return False
    return bool(a == b) or bool(a != a and b != b)


def _set_back_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Set the entries, also of a dict whose order matters."""
    for key in [key for key in container if key not in saved]:
        del container[key]
    for key, value in saved.items():
        if key not in container or container[key] is not value:
            container[key] = value


# --- two surveys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """What a rollout did to the state.

    Attributes:
        replaced: paths of tensors that are other objects now.
        problem: a change that a graph cannot repeat, with its path; "" if there is none.
        settles: the problem may be one of the first rollouts only: attributes that were new.
    """

    replaced: tuple[str, ...] = ()
    problem: str = ""
    settles: bool = False


def compare(before: Survey, after: Survey) -> Changes:
    """Return what has changed between two surveys of the same roots."""
    problem = before.problem or after.problem
    if problem:
        return Changes(problem=problem)
    for path, old in before.values.items():
        new = after.values.get(path, _MISSING)
        if new is not old and not _is_same_constant(old, new):
            return Changes(problem=_change_text(path, old, new, after))
    for path, generator in before.generators.items():
        if after.generators.get(path) is not generator:
            return Changes(problem=f"{path} is another generator after a rollout")
    replaced: list[str] = []
    for path, tensor in before.tensors.items():
        now = after.tensors.get(path)
        if now is tensor:
            continue
        if now is None:
            return Changes(
                problem=f"{path} is not a tensor on the device after a rollout"
            )
        if _kind(now) != _kind(tensor):
            return Changes(
                problem=f"{path}: {_kind(tensor)} -> {_kind(now)} in a rollout"
            )
        replaced.append(path)
    for kind in ("values", "tensors", "generators"):
        for path in getattr(after, kind).keys() - getattr(before, kind).keys():
            return Changes(problem=f"{path} appeared in a rollout", settles=True)
    return Changes(tuple(replaced))


def _change_text(path: str, old: Any, new: Any, after: Survey) -> str:
    if isinstance(old, Length):
        where = path.removesuffix("()")
        now = after.values.get(path)
        length = "no container" if now is None else f"{int(now)}"
        return f"{where}: {int(old)} entries -> {length}"
    if isinstance(old, RandomState):
        return f"{path} draws random numbers on the host"
    if isinstance(old, Digest):
        return f"{path}: an array in host memory changes"
    shown = "missing" if new is _MISSING else _shown(new)
    if new is _MISSING and path in after.tensors:
        shown = "a tensor"
    return f"{path}: {_shown(old)} -> {shown}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# --- contents -------------------------------------------------------------------------------------


class Contents:
    """The contents of tensors, and the states of generators, at one moment.

    Args:
        tensors: by name.
        generators: generators on the device.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], generators: Iterable[torch.Generator]
    ) -> None:
        self._saved: dict[str, torch.Tensor] = {}
        cloned: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in cloned:
                cloned[id(tensor)] = tensor.detach().clone()
            self._saved[name] = cloned[id(tensor)]
        self._states = [(each, each.get_state()) for each in generators]

    def load(
        self, tensors: Mapping[str, torch.Tensor], besides: torch.Tensor | None = None
    ) -> None:
        """Write the contents into tensors of these names, except those in the memory of
        ``besides``, and set the generators' states.
        """
        written: set[int] = set()
        for name, saved in self._saved.items():
            tensor = tensors[name]
            if id(tensor) not in written and not share_memory(tensor, besides):
                written.add(id(tensor))
                distinct(tensor.detach()).copy_(distinct(saved, like=tensor))
        for generator, state in self._states:
            generator.set_state(state)

    def differences(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Yield the names of tensors whose bits differ, and "random numbers" if a generator's state
        does.
        """
        for name, saved in self._saved.items():
            if not same_bits(saved, tensors[name]):
                yield name
        for generator, state in self._states:
            if not torch.equal(generator.get_state(), state):
                yield "the state of a generator of random numbers"


def storage_of(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's memory; None if it has none."""
    if tensor is None or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def distinct(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a view without the repetitions of an expanded tensor (``like``, or itself)."""
    strides = (tensor if like is None else like).stride()
    for dim, step in enumerate(strides):
        if not step and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def share_memory(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether two tensors are parts of the same memory."""
    address = storage_of(a)
    return address is not None and address == storage_of(b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a = torch.view_as_real(a.resolve_conj())
        b = torch.view_as_real(b.resolve_conj())
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
