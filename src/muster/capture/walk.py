"""The walk through everything that is reachable from environments and policy: see ``Survey``.

It begins at attributes, and goes on through containers, closures, classes of the user, and globals
that the user's functions refer to. Libraries' own classes and functions are not opened: their
state is in their objects.
"""

from __future__ import annotations

import dis
import functools
import io
import pickle
import random
import sys
import types
import warnings
import weakref
import zlib
from abc import ABC
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from muster.capture.state import (
    CONSTANTS,
    WITHOUT_STATE,
    Entries,
    Identity,
    Length,
    Order,
    RandomState,
    Survey,
    digest,
    is_from,
    slots_of,
)
from muster.utils.devices import with_index

MOST_ENTRIES = 50_000  # of a survey
MOST_DEPTH = 60
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
# packages whose classes and functions are not opened
LIBRARIES = sys.stdlib_module_names | {
    "torch",
    "tensordict",
    "torchrl",
    "gymnasium",
    "numpy",
    "muster",
}
RANDOM = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)
SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# globals of these types are state, and so are those of the user's classes
GLOBAL_STATE = (
    *CONSTANTS,
    *RANDOM,
    *SUSPENDED,
    torch.Tensor,
    torch.Generator,
    torch.nn.Module,
    np.ndarray,
    bytearray,
    dict,
    list,
    set,
    tuple,
    deque,
    functools.partial,
    types.MethodType,
    types.SimpleNamespace,
    Namespace,
)
# what other packages' arrays say about their memory, by type of device
INTERFACES = {"cuda": "__cuda_array_interface__", "cpu": "__array_interface__"}
# tensors over the memory of other packages' arrays: the same one for the same memory
_foreign: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


OF_EVERY_CLASS = frozenset(vars(ABC))  # what Python keeps in abstract ones, too


class _Where(NamedTuple):
    """Where an object is: a key of a mutable container."""

    within: Entries
    key: Any


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
        # the objects, too: an id belongs to a living object
        self._seen: dict[int, Any] = {}
        self._visited = 0

    def visit(
        self, obj: Any, path: str, depth: int, place: _Where | None = None
    ) -> None:
        found = self.found
        self._visited += 1
        if self._visited > MOST_ENTRIES:
            found.give_up(
                f"more than {MOST_ENTRIES:,} objects are reachable, at {path}"
            )
        if found.problem:
            return
        if isinstance(obj, CONSTANTS):
            found.note(path, obj)
            if isinstance(obj, type):
                self._open_class(obj, path, depth)
            return
        if isinstance(obj, torch.Tensor):
            self._note_tensor(obj, path, place)
            return
        if isinstance(obj, WITHOUT_STATE) or is_from(obj, NOT_OPENED):
            found.note(f"{path}: type", type(obj))
            return
        if not isinstance(obj, tuple):  # equal tuples can be one object
            if id(obj) in self._seen:
                return
            self._seen[id(obj)] = obj
        if depth > MOST_DEPTH:
            found.give_up(f"objects are nested more than {MOST_DEPTH} deep, at {path}")
            return
        if is_from(obj, ("jax", "jaxlib")):
            found.give_up(f"{path} is of JAX, whose operations are not torch's")
            return
        if self._note_random_state(obj, path):
            return
        array = self._array_of(obj)
        if array is not None:
            self._note_tensor(array, path, None)
            return
        self._open(obj, path, depth + 1)

    # --- leaves -----------------------------------------------------------------------------------

    def _note_tensor(
        self, tensor: torch.Tensor, path: str, place: _Where | None
    ) -> None:
        found = self.found
        if tensor.layout is not torch.strided:
            found.opaque[path] = f"a tensor with the layout {tensor.layout}"
            found.note(path, Identity(tensor))
        elif with_index(tensor.device) == self._device:
            free = found.free(path, found.tensors)
            found.tensors[free] = tensor
            if place is not None:
                found.places[free] = place
        elif tensor.device.type == "cpu":
            self._note_array(tensor, path)
        else:
            found.opaque[path] = f"a tensor on {tensor.device}"
            found.note(path, Identity(tensor))

    def _note_array(self, array: Any, path: str) -> None:
        self.found.note_array(path, array, watched=not path.startswith("adapter"))

    def _note_random_state(self, obj: Any, path: str) -> bool:
        """Note the state of a generator; return whether ``obj`` is one."""
        found = self.found
        if isinstance(obj, torch.Generator):
            if with_index(obj.device) == self._device:
                found.generators[found.free(path, found.generators)] = obj
            else:
                found.note(path, digest(obj.get_state().cpu()))
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
        found.note(path, RandomState(zlib.crc32(pickle.dumps(state))))
        return True

    def _array_of(self, obj: Any) -> torch.Tensor | None:
        """Return a tensor over the memory of another package's array on the device; None: ``obj``
        is none.
        """
        name = INTERFACES.get(self._device.type, "")
        if isinstance(obj, (np.ndarray, type)) or not hasattr(type(obj), name):
            return None
        try:
            about = getattr(obj, name)
            start = about["data"][0]
            key = (start, about["shape"], about.get("strides"), about["typestr"])
            if key in _foreign:
                return _foreign[key]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # memory that must not be written
                with torch.inference_mode(False):
                    given = np.asarray(obj) if self._device.type == "cpu" else obj
                    tensor = torch.as_tensor(given, device=self._device)
        except Exception:  # noqa: BLE001 (of the package: an array that is not on the device)
            return None
        if tensor.numel() and tensor.data_ptr() != start:
            return None  # a copy
        _foreign[key] = tensor
        return tensor

    # --- objects ----------------------------------------------------------------------------------

    def _open(self, obj: Any, path: str, depth: int) -> None:
        """Visit the parts of an object."""
        found = self.found
        if isinstance(obj, types.FunctionType):
            self._open_function(obj, path, depth)
            return
        if not isinstance(obj, types.ModuleType):
            found.note(f"{path}: type", type(obj))
        if isinstance(obj, np.ndarray):
            if obj.dtype == object:
                self._open_container(obj, path, depth)
            else:
                self._note_array(obj, path)
        elif isinstance(obj, tuple):
            found.note(f"{path}()", Length(len(obj)))
            self._visit_all(enumerate(obj), path, depth)
        elif isinstance(obj, frozenset):
            found.note(path, obj)
        elif isinstance(obj, (dict, list, deque, set)):
            self._open_container(obj, path, depth)
            attributes = getattr(obj, "__dict__", None)
            if isinstance(attributes, dict):
                self._open_attributes(attributes, path, depth)
        elif isinstance(obj, functools.partial):
            self.visit(obj.func, path, depth)
            self.visit(obj.args, f"{path}.args", depth)
            self.visit(obj.keywords, f"{path}.keywords", depth)
        elif isinstance(obj, types.MethodType):
            self.visit(obj.__self__, path, depth)
            self.visit(obj.__func__, path, depth)
        elif isinstance(obj, types.BuiltinFunctionType):
            found.note(f"{path}: function", obj.__qualname__)
            self.visit(obj.__self__, path, depth)  # a tensor's method, or a module
        elif isinstance(obj, (staticmethod, classmethod)):
            self.visit(obj.__func__, path, depth)
        elif isinstance(obj, property):
            self._visit_all(enumerate((obj.fget, obj.fset)), path, depth)
        elif isinstance(obj, types.ModuleType):
            found.note(path, Identity(obj))
            self._open_module(obj, path, depth)
        elif isinstance(obj, SUSPENDED):
            self._open_suspended(obj, path, depth)
        else:
            self._open_object(obj, path, depth)

    def _open_container(self, obj: Any, path: str, depth: int) -> None:
        found = self.found
        within = Entries(obj)
        found.entries.append(within)
        found.objects[path] = obj
        found.note(f"{path}()", Length(len(obj)))
        parts: Iterable[tuple[Any, Any]] = enumerate(
            obj.flat if isinstance(obj, np.ndarray) else obj
        )
        if isinstance(obj, set):
            if all(isinstance(part, CONSTANTS) for part in obj):
                found.note(path, frozenset(obj))
                return
            found.note(path, Identity(*within.saved))  # its order is stable meanwhile
        elif isinstance(obj, dict):
            parts = [
                (key if isinstance(key, CONSTANTS) else _Nameless(key, number), part)
                for number, (key, part) in enumerate(obj.items())
            ]
            found.note(f"{path}: order", Order([shown(key) for key, _ in parts]))
        self._visit_all(parts, path, depth, within)

    def _visit_all(
        self,
        parts: Iterable[tuple[Any, Any]],
        path: str,
        depth: int,
        within: Entries | None = None,
    ) -> None:
        for key, part in list(parts):
            own = key.key if isinstance(key, _Nameless) else key
            place = None if within is None else _Where(within, own)
            self.visit(part, f"{path}[{shown(key)}]", depth, place)

    def _open_object(self, obj: Any, path: str, depth: int) -> None:
        if self._note_buffer(obj, path):
            return
        if self._open_attributes_of(obj, path, depth):
            self.found.objects[path] = obj
            if _has_more_than_attributes(type(obj)):
                self.found.opaque[path] = type(obj).__qualname__
            self._open_class(type(obj), path, depth)
            return
        if type(obj) is object:
            return
        if hasattr(type(obj), "__next__") and not isinstance(obj, io.IOBase):
            self._open_iterator(obj, path, depth)
            return
        if is_from(obj, ("builtins",)) and isinstance(
            obj, (type({}.keys()), type({}.values()), type({}.items()))
        ):
            with self._fixed():
                self._visit_all(enumerate(obj), path, depth)
            return
        self.found.opaque[path] = type(obj).__qualname__
        self.found.note(path, Identity(obj))
        self._open_class(type(obj), path, depth)

    def _note_buffer(self, obj: Any, path: str) -> bool:
        """Note the bytes of an object that shows its memory, such as a ``bytearray``."""
        try:
            with memoryview(obj):
                pass
        except TypeError:
            return False
        self._note_array(obj, path)
        return True

    def _open_iterator(self, obj: Any, path: str, depth: int) -> None:
        """Visit what an iterator of Python would be made of again, with its position."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made_of = obj.__reduce_ex__(2)
        except TypeError:
            self.found.give_up(
                f"{path} is an iterator ({type(obj).__qualname__}), whose position Python"
                " does not show"
            )
            return
        self.visit(made_of, f"{path}: position", depth)

    def _open_suspended(self, obj: Any, path: str, depth: int) -> None:
        """Visit the frame of a generator: a graph does not let it go on."""
        frame = next(
            getattr(obj, name)
            for name in ("gi_frame", "cr_frame", "ag_frame")
            if hasattr(obj, name)
        )
        self.found.note(f"{path}: frame", frame is not None)
        if frame is None:
            return
        self.found.note(f"{path}: position", frame.f_lasti)
        with self._fixed():
            for name, value in dict(frame.f_locals).items():
                self.visit(value, f"{path}.{name}", depth)

    @contextmanager
    def _fixed(self) -> Iterator[None]:
        """The tensors that are visited meanwhile and have no place cannot be set back."""
        found = self.found
        before = set(found.tensors)
        yield
        found.fixed.update(found.tensors.keys() - before - found.places.keys())

    def _open_attributes_of(self, obj: Any, path: str, depth: int) -> bool:
        """Visit the attributes of an object; return whether it can have any."""
        attributes = getattr(obj, "__dict__", None)
        has_attributes = isinstance(attributes, dict)
        if isinstance(attributes, dict):
            self._open_attributes(attributes, path, depth)
        slots = slots_of(obj)
        if slots:
            entries = Entries(obj)
            self.found.entries.append(entries)
            for name, value in entries.saved.items():
                place = _Where(entries, name)
                self.visit(value, f"{path}.{name}", depth, place)
        return has_attributes or bool(slots)

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
                    self.visit(part, f"{path}.{key}", depth, _Where(parts, key))
                continue
            self.visit(value, f"{path}.{name}", depth, _Where(within, name))

    # --- classes, functions and modules of the user -----------------------------------------------

    def _open_class(self, cls: type, path: str, depth: int) -> None:
        """Visit what objects of the user's classes share: counters, and what methods refer to."""
        for base in cls.__mro__:
            if id(base) in self._seen or not is_users(base.__module__):
                continue
            self._seen[id(base)] = base
            for name, value in list(vars(base).items()):
                called = isinstance(value, types.FunctionType)
                if name in OF_EVERY_CLASS or (name.startswith("__") and not called):
                    continue
                if isinstance(value, WITHOUT_STATE):
                    continue
                self.found.shared.append((base, name, value))
                self.visit(value, f"type({path}).{name}", depth)

    def _open_module(self, module: types.ModuleType, path: str, depth: int) -> None:
        """Visit the state in a module of the user that an attribute refers to."""
        if not is_users(module.__name__):
            return
        for name, value in list(vars(module).items()):
            if not name.startswith("__"):
                self._visit_global(vars(module), name, value, f"{path}.{name}", depth)

    def _open_function(
        self, function: types.FunctionType, path: str, depth: int
    ) -> None:
        found = self.found
        # torch documents no name for it
        compiled = function.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            self.visit(compiled, path, depth)
            return
        found.note(f"{path}: code", function.__code__)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            entries = Entries(cell)
            found.entries.append(entries)
            for content in entries.saved:
                self.visit(content, f"{path}.{name}", depth, _Where(entries, 0))
        self.visit(function.__defaults__ or (), f"{path}.__defaults__", depth)
        if function.__kwdefaults__:
            self.visit(function.__kwdefaults__, f"{path}.__kwdefaults__", depth)
        if function.__dict__:
            self._open_attributes(function.__dict__, path, depth)
        around = function.__globals__
        used, attributes = names_in(function.__code__)
        for name in used:
            if name not in around:
                continue
            value = around[name]
            where = f"{path}: global {name}"
            if isinstance(value, types.ModuleType) and is_users(value.__name__):
                for part in attributes & vars(value).keys():
                    of_module = vars(value)
                    content = of_module[part]
                    self._visit_global(
                        of_module, part, content, f"{where}.{part}", depth
                    )
            else:
                self._visit_global(around, name, value, where, depth)

    def _visit_global(
        self, around: dict[str, Any], name: str, value: Any, path: str, depth: int
    ) -> None:
        """Visit a global, if it is state, or a function or class of the user."""
        if isinstance(value, types.FunctionType):
            is_state = is_users(value.__module__)
        else:
            is_state = (
                isinstance(value, GLOBAL_STATE)
                or is_users(type(value).__module__)
                or _is_iterator(value)
            )
        if is_state:
            self.found.shared.append((around, name, value))
            self.visit(value, path, depth)


class _Nameless(NamedTuple):
    """A key of a dict that has no name in paths, and its number."""

    key: Any
    number: int


def shown(key: Any) -> str:
    """Return how a path shows a key."""
    if not isinstance(key, _Nameless):
        return repr(key)
    if isinstance(key.key, tuple) and all(isinstance(k, CONSTANTS) for k in key.key):
        return repr(tuple(key.key))
    return f"{type(key.key).__name__} {key.number}"


def _has_more_than_attributes(cls: type) -> bool:
    """Return whether objects have memory that is none of their attributes: that of a C library."""
    slots = sum(len(base.__dict__.get("__slots__", ())) for base in cls.__mro__)
    return cls.__basicsize__ > object.__basicsize__ + 8 * (2 + slots)


def is_users(module: str | None) -> bool:
    """Return whether a module is none of the libraries that are known here."""
    return bool(module) and str(module).partition(".")[0] not in LIBRARIES


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and is_from(
        value, ("builtins", "itertools")
    )


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the globals that a function refers to, in order, and all names of attributes."""
    used: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if "GLOBAL" in operation or "LOAD_NAME" in operation:
            used[str(instruction.argval)] = None
        elif "ATTR" in operation or "METHOD" in operation:
            attributes.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = names_in(constant)
            used |= dict.fromkeys(inner)
            attributes |= more
    return tuple(used), frozenset(attributes)
