"""The state that a rollout reads and changes: what is reachable from environments and policy.

A ``Survey`` has everything that is reachable from some objects at one moment, by path
(``env.unwrapped.counter``): tensors, generators, plain values, and the entries of all mutable
containers. Two surveys show what a rollout did:

- a tensor that is another object now was *replaced*; its name can be set back to the first one.
- a tensor that is the same object may have other contents, which ``Contents`` saves and restores.
- a plain value that differs was changed by Python, which a recorded graph does not run.

Everything that is reachable leaves a trace in it: constants themselves, the type of every other
object, the code of functions. So nothing can be replaced by something else without a difference.
Objects that cannot be looked into (handles of C++ libraries) are listed in ``opaque``.

State is also found where no attribute leads: attributes of the user's classes, and globals that
their methods, or functions that these call, refer to.
"""

from __future__ import annotations

import enum
import logging
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from muster.memory.slots import Lane, Slot
from muster.memory.specs import Array

SHOWN = 60  # characters of a value in a message
SMALL_BYTES = (
    1 << 16
)  # of larger arrays in host memory, a sample is compared before each replay
LARGE_BYTES = 1 << 24  # of larger arrays in host memory, only some values are compared
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
    types.CodeType,
    types.FrameType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MappingProxyType,
    weakref.ref,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    torch.finfo,
    torch.iinfo,
    Lane,
    Slot,
)
# containers that Python's own functions iterate over
ITERATED = (dict, OrderedDict, list, deque, set)
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
            if list(now) != list(saved):
                return False  # the order counts, too
            saved = saved.values()
            now = now.values()
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
        elif isinstance(container, np.ndarray):
            container.flat[key] = value
        else:
            object.__setattr__(container, key, value)  # it may be frozen
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
        elif isinstance(container, np.ndarray):
            for number, value in enumerate(self.saved):
                container.flat[number] = value
        else:
            for name in slots_of(container):
                if name not in self.saved:
                    object.__delattr__(container, name)
            for name, value in self.saved.items():
                object.__setattr__(container, name, value)

    def _now(self) -> Any:
        container = self.container
        if isinstance(container, types.CellType):
            try:
                return [container.cell_contents]
            except ValueError:  # nothing is assigned yet
                return []
        if isinstance(container, dict):
            return dict(container)
        if isinstance(container, (list, deque, set)):
            return list(container)
        if isinstance(container, np.ndarray):
            return list(container.flat)
        return {name: getattr(container, name) for name in slots_of(container)}


class Unchanged:
    """The entries of containers, classes and globals at one moment, compared in a few calls.

    There are hundreds before each replay, and nearly always all of them are the same objects. So
    the entries of containers of the usual types are compared as one sequence, by identity, and most
    containers are empty. What looks like a difference may be none: an equal constant.

    Args:
        entries: of the containers.
        shared: see ``Survey``.
    """

    def __init__(
        self,
        entries: Iterable[Entries],
        shared: Iterable[tuple[type | dict[str, Any], str, Any]],
    ) -> None:
        self._empty: list[Any] = []
        self._dicts: list[Any] = []
        self._sequences: list[Any] = []
        self._cells: list[Any] = []
        self._others: list[Entries] = []
        for each in entries:
            container = each.container
            kind = type(container)
            if kind is types.CellType and each.saved:
                self._cells.append(container)
            elif kind not in ITERATED:
                self._others.append(each)
            elif not container:
                self._empty.append(container)
            elif kind in (dict, OrderedDict):
                self._dicts.append(container)
            else:
                self._sequences.append(container)
        self._shared = [
            (vars(owner) if isinstance(owner, type) else owner, name)
            for owner, name, _ in shared
        ]
        self._lengths = self._lengths_now()
        self._keys = list(chain.from_iterable(self._dicts))
        self._entries = self._entries_now()

    @property
    def is_so(self) -> bool:
        """Whether all of them are the same objects as then."""
        if any(self._empty) or self._lengths_now() != self._lengths:
            return False
        if list(chain.from_iterable(self._dicts)) != self._keys:
            return False
        try:
            now = self._entries_now()
        except ValueError:  # a variable of a closure has no value any more
            return False
        # not ``==``, which tensors do in their own way
        if len(now) != len(self._entries) or not all(map(is_, now, self._entries)):
            return False
        return all(each.is_current for each in self._others)

    def _lengths_now(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _entries_now(self) -> list[Any]:
        found: list[Any] = []
        for each in self._dicts:
            found += each.values()
        found += chain.from_iterable(self._sequences)
        found += [cell.cell_contents for cell in self._cells]
        found += [names.get(name, _MISSING) for names, name in self._shared]
        return found


class Watched:
    """An array or a tensor in host memory, with its contents at one moment; of a large one, a sample
    of them.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._is_plain = type(array) is np.ndarray
        self._then = self._now()

    @property
    def is_current(self) -> bool:
        """Whether it still has these contents."""
        return bool(self._now() == self._then)

    def _now(self) -> Any:
        array = self._array
        if self._is_plain:
            return array.shape, array.dtype, _sample(array, SMALL_BYTES).tobytes()
        return digest(array, SMALL_BYTES)


@dataclass
class Survey:
    """What is reachable from some objects at one moment, by path.

    Attributes:
        tensors: tensors on the device.
        generators: generators of torch on the device.
        values: what Python changes: constants, types, lengths of containers, digests of arrays, of
            tensors in host memory, and of generators there.
        entries: entries of all mutable containers.
        objects: mutable containers, and objects with attributes.
        shared: attributes of classes, and globals of functions: owner, name and value.
        arrays: arrays and tensors in host memory that are compared before each replay.
        places: the entries and the key of each tensor that is directly in a mutable container.
        fixed: tensors whose names cannot be set back.
        opaque: types of objects that cannot be looked into.
        problem: why the state cannot be known; "" if it can.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    entries: list[Entries] = field(default_factory=list)
    shared: list[tuple[type | dict[str, Any], str, Any]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    arrays: list[Watched] = field(default_factory=list)
    places: dict[str, tuple[Entries, Any]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    opaque: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    _unchanged: Unchanged | None = None

    def give_up(self, problem: str) -> None:
        """The state cannot be known; the first problem is kept."""
        self.problem = self.problem or problem

    def note(self, path: str, value: Any) -> None:
        """Note a value at a path, or beside it, if another value has this path."""
        self.values[self.free(path, self.values)] = value

    def note_array(self, path: str, array: Any, *, watched: bool) -> None:
        """Note an array in host memory; ``watched``: it is compared before each replay."""
        path = self.free(path, self.values)
        self.values[path] = digest(array)
        if watched:
            self.arrays.append(Watched(array))

    @staticmethod
    def free(path: str, taken: Mapping[str, Any]) -> str:
        """Return a path that nothing has yet: an attribute can have the name of a closure's
        variable.
        """
        while path in taken:
            path += "'"
        return path

    def own(self, path: str) -> None:
        """Replace a tensor by a copy, which shares memory with no other.

        Raises:
            ValueError: it is in a tuple.
        """
        if path not in self.places:
            raise ValueError(
                f"{path} shares memory with others, and is in a tuple, a global, or an array of"
                " another package"
            )
        entries, key = self.places[path]
        with torch.inference_mode(False):  # the environment may write into it
            self.tensors[path] = self.tensors[path].detach().clone()
        entries.put(key, self.tensors[path])
        self._unchanged = None

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
        if self._unchanged is None or not self._unchanged.is_so:
            if not self._has_equal_entries():
                return False
            self._unchanged = Unchanged(self.entries, self.shared)
        return all(array.is_current for array in self.arrays)

    def _has_equal_entries(self) -> bool:
        """Whether all entries are the same objects, or equal constants."""
        for entries in self.entries:
            if not entries.is_current:
                return False
        for owner, name, value in self.shared:
            now = _looked_up(owner, name)
            if now is not value and not _is_same_constant(value, now):
                return False
        return True


def _looked_up(owner: type | dict[str, Any], name: str) -> Any:
    return (vars(owner) if isinstance(owner, type) else owner).get(name, _MISSING)


class Length(int):
    """The length of a container."""


class RandomState(int):
    """A digest of the state of a generator of random numbers in host memory."""


class Digest(int):
    """A digest of the contents of an array."""


class Order(tuple[str, ...]):
    """The keys of a dict."""


class Identity:
    """Some objects, which are equal only to themselves."""

    def __init__(self, *objects: Any) -> None:
        self._objects = {id(each): each for each in objects}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Identity)
            and self._objects.keys() == other._objects.keys()
        )

    def __hash__(self) -> int:
        return hash(frozenset(self._objects))


def digest(array: Any, most: int = LARGE_BYTES) -> Digest:
    """Return a digest of the contents of an array, of a tensor in host memory, or of an object that
    shows its memory; of more than ``most`` bytes, that of some of its values.
    """
    if isinstance(array, torch.Tensor):
        about = f"{tuple(array.shape)} {array.dtype}".encode()
        flat = array.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy()
    elif isinstance(array, np.ndarray):
        about = f"{array.shape} {array.dtype.str}".encode()
    else:
        with memoryview(array) as view:
            return Digest(zlib.crc32(view.tobytes(), view.nbytes))
    contents = np.ascontiguousarray(_sample(array, most)).tobytes()
    return Digest(zlib.crc32(contents, zlib.crc32(about)))


def _sample(array: Array, most: int) -> Array:
    """Return an array, or some of its values if it has more than ``most`` bytes."""
    if array.nbytes <= most:
        return array
    flat_array = array.reshape(-1) if array.flags.c_contiguous else array
    return flat_array[:: -(-array.nbytes // most)]


def is_from(obj: Any, packages: Iterable[str]) -> bool:
    """Return whether the type of an object is defined in one of these packages or modules."""
    module = type(obj).__module__
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def slots_of(obj: Any) -> list[str]:
    """Return the names of an object's slots that have values."""
    names = _slot_names(type(obj))  # type: ignore[arg-type] # a class is hashable
    return [name for name in names if hasattr(obj, name)]


@lru_cache(maxsize=1024)
def _slot_names(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for cls in kind.__mro__:
        own = cls.__dict__.get("__slots__", ())
        for name in [own] if isinstance(own, str) else own:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_same_constant(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or not isinstance(a, _COMPARED):
        return False
    return bool(a == b) or bool(a != a and b != b)


_COMPARED = (*CONSTANTS, frozenset, Identity, Order, types.CodeType)


def _set_back_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Set the entries, in their order."""
    for key in [key for key in container if key not in saved]:
        del container[key]
    if list(container) != [key for key in saved if key in container]:
        container.clear()
    for key, value in saved.items():
        if key not in container or container[key] is not value:
            container[key] = value
    if list(container) != list(saved):
        container.clear()
        container.update(saved)


# --- two surveys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """What a rollout did to the state.

    Attributes:
        replaced: paths of tensors that are other objects now.
        problem: a change that a graph cannot repeat, with its path; "" if there is none.
        settles: the problem may be one of the first rollouts only: attributes that were new.
        moved: paths of containers and objects that are others now.
    """

    replaced: tuple[str, ...] = ()
    problem: str = ""
    settles: bool = False
    moved: tuple[str, ...] = ()


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
            return Changes(problem=f"{path}: {_kind(tensor)} -> {_kind(now)}")
        if path in before.fixed:
            return Changes(problem=f"{path} is another tensor after a rollout")
        replaced.append(path)
    for kind in ("values", "tensors", "generators"):
        for path in getattr(after, kind).keys() - getattr(before, kind).keys():
            return Changes(problem=f"{path} appeared in a rollout", settles=True)
    moved = tuple(
        path
        for path, obj in before.objects.items()
        if path in after.objects and after.objects[path] is not obj
    )
    return Changes(tuple(replaced), moved=moved)


def _change_text(path: str, old: Any, new: Any, after: Survey) -> str:
    if isinstance(old, Length):
        where = path.removesuffix("()")
        now = after.values.get(path)
        length = "no container" if now is None else f"{int(now)}"
        return f"{where}: {int(old)} entries -> {length}"
    if isinstance(old, Order):
        return f"{path} of its entries changes"
    if isinstance(old, Identity):
        return f"{path} is another object"
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
