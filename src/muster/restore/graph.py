"""Pickles of object graphs that are exact or fail, unlike the pickle support of many environments.

``gymnasium.utils.EzPickle`` keeps constructor arguments only, arrays no longer share memory,
functions get copies of their module's globals, and a pipe is restored as the number of an unrelated
file. Here objects are pickled by their ``__dict__`` where their own reduction would lose
attributes. An object that cannot be saved exactly raises.
"""

from __future__ import annotations

import array
import copyreg
import ctypes
import importlib
import io
import mmap
import operator
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.errors import described
from muster.restore.pickling import (
    Cached,
    Pickler,
    innermost,
    is_found_by_name,
    received,
    reduced_cache,
)

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

# the owner can be in the graph, too; also tensors
FOREIGN_MEMORY = (mmap.mmap, ctypes.Array, bytearray, array.array, np.ndarray)
# Modules of handles of this process, some of which can be pickled.
REFUSED = {"multiprocessing", "subprocess", "ctypes", "_ctypes", "socket", "asyncio"}
# called to make objects that have no reduction of their own
NEWOBJ: Any = vars(copyreg)["__newobj__"]
REDUCERS = ("__reduce_ex__", "__reduce__", "__getstate__")
RENDERER = ("gymnasium.envs.mujoco.mujoco_rendering", "MujocoRenderer")
MODEL_AT = 1  # offset of the MjModel in the bytes of an MjData

_models: deque[bytes] = deque(
    maxlen=16
)  # saved models, of which equal environments share one


class _Ordinary:
    pass


def keeps_all_in_dict(cls: type) -> bool:
    """Whether objects of the class have all their state in ``__dict__``: no slots, no state in C."""
    return cls.__basicsize__ <= _Ordinary.__basicsize__ and cls.__dictoffset__ != 0


def dump(
    value: Any,
    fixed: Mapping[int, Any],
    mujoco: Iterable[Any] = (),
) -> tuple[bytes, list[bytes]]:
    """Pickle ``value``; raises the exception of the pickler if an object in the graph cannot be
    saved exactly.

    ``fixed``: names by ``id`` of objects saved by reference. ``mujoco``: MjData in ``value``;
    others cost another attempt. Returns the pickle, and byte strings that it refers to by position;
    equal ones are mostly the same object.
    """
    known = list(mujoco)
    for _ in range(100):
        file = io.BytesIO()
        pickler = _GraphPickler(file, fixed, known)
        try:
            pickler.dump(value)
        except _DataFound:
            continue  # again, now that its model and its memory are known
        return file.getvalue(), pickler.shared
    raise pickle.PicklingError(
        "it makes new MjData whenever it is pickled, or has more than a hundred"
    )


def load(data: bytes, shared: list[bytes], fixed: Mapping[Any, Any]) -> Any:
    """Restore a value that ``dump`` has pickled; runs code that the pickle names.

    ``fixed``: live objects by name.
    """
    return _GraphUnpickler(data, shared, fixed).load()


def culprit(
    value: Any,
    fixed: Mapping[int, Any],
    mujoco: Iterable[Any],
    path: str,
) -> str | None:
    """A sentence with the path of the part of ``value`` that cannot be pickled, and the reason.

    None if all can.
    """
    why = _failure(value, fixed, mujoco)
    if why is None:
        return None

    def failure(child: Any) -> str | None:
        return _failure(child, fixed, mujoco)

    steps, value, why = innermost(value, why, _children, failure)
    path += "".join(steps)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{path} ({name}) cannot be saved: {why}"


class _DataFound(Exception):
    pass


class _GraphUnpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        shared: list[bytes],
        fixed: Mapping[Any, Any],
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=shared)
        self._fixed = fixed

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError:  # of the script, in a process that does not run it
            return _named(module, name)

    def persistent_load(self, name: Any) -> Any:
        kind, what = name
        if kind == "globals":
            return vars(importlib.import_module(what))
        if kind == "globals of a method":
            return _named(*what).__globals__
        return self._fixed[name]


class _GraphPickler(Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        fixed: Mapping[int, Any],
        mujoco: list[Any],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._in_band)
        self.shared: list[bytes] = []
        self._fixed = dict(fixed)
        self._mujoco = mujoco  # known MjData, by which their models are referred to
        self._rules: dict[type, Callable[[Any], Any]] = {}
        # ids of pickled objects, which the pickle keeps alive until it is done
        self._met: set[int] = set()
        # the arrays that own a ``bytearray``, by its id
        self._owners: dict[int, Any] = {}
        # memory of arrays, and memory that storages of tensors have from elsewhere: addresses of the
        # first byte, and of that behind the last one
        self._of_arrays: list[tuple[int, int]] = []
        self._borrowed: list[tuple[int, int]] = []

    def persistent_id(self, obj: Any) -> Any:
        return self._fixed.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls not in self._rules:
            self._rules[cls] = self._rule(cls)
        self._met.add(id(obj))
        return self._rules[cls](obj)

    def _in_band(self, buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if not isinstance(view.obj, bytes):
                return True
            self.shared.append(view.obj)
        return False

    def _rule(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, type):
            return self._class
        special: dict[Any, Callable[[Any], Any]] = {
            FunctionType: self._function,
            np.ndarray: self._array,
            io.TextIOWrapper: self._stream,
            weakref.ref: self._weak,
            Cached: _cached,
        }
        if "torch" in sys.modules:  # else no object is a tensor
            special[torch.Tensor] = self._tensor
            special[torch.UntypedStorage] = self._untyped_storage
        if cls in special:
            return special[cls]
        if cls.__module__.startswith("mujoco.") and cls.__name__ in (
            "MjData",
            "MjModel",
        ):
            return self._mujoco_data if cls.__name__ == "MjData" else self._mujoco_model
        if (cls.__module__, cls.__name__) == RENDERER:
            return self._renderer
        if any(base.__module__.split(".")[0] in REFUSED for base in cls.__mro__):
            return self._foreign
        if is_env(cls):
            return _by_dict
        changed = any(
            getattr(cls, name, None) is not getattr(object, name, None)
            for name in REDUCERS
        )
        ordinary = keeps_all_in_dict(cls) and not issubclass(cls, Enum)
        if changed and ordinary and cls not in self.dispatch_table:
            return self._whole
        return self._usual

    def _usual(self, obj: Any) -> Any:
        return super().reducer_override(obj)

    def _whole(self, obj: Any) -> Any:
        """Pickle an object by its ``__dict__`` if its own reduction would lose attributes."""
        return _by_dict(obj) if _loses(obj) else self._usual(obj)

    def _renderer(self, renderer: Any) -> Any:
        # its viewers are recreated when needed
        return _by_dict(renderer, {**vars(renderer), "_viewers": {}, "viewer": None})

    def _untyped_storage(self, storage: torch.UntypedStorage) -> Any:
        if not storage.resizable():  # the memory of an array, for instance
            begin = storage.data_ptr()
            memory = begin, begin + storage.nbytes()
            self._check_apart(memory, self._of_arrays)
            self._check_apart(memory, self._borrowed)
            self._borrowed.append(memory)
        return _storage, (_storage_bytes(storage), str(storage.device))

    def _class(self, cls: type) -> Any:
        if is_found_by_name(cls):
            return NotImplemented
        if cls.__module__ == "builtins":
            return self._usual(cls)
        if received.get(_name_of(cls)) is cls:
            return _named, _name_of(cls)
        raise pickle.PicklingError(
            f"class {cls.__qualname__} is made in a function; define it in a module"
        )

    def _function(self, function: Any) -> Any:
        """Pickle a lambda or closure by value, but with its module's own globals instead of copies."""
        if is_found_by_name(function):
            return NotImplemented
        own = function.__globals__
        module = sys.modules.get(function.__module__)
        if module is not None and vars(module) is own:
            self._fixed[id(own)] = ("globals", function.__module__)
        else:
            method = _method_with(own)
            if method is None:
                raise pickle.PicklingError(
                    f"function {function.__qualname__} belongs to no module that can be imported"
                )
            self._fixed[id(own)] = ("globals of a method", method)
        if own.get(function.__name__) is function:
            return operator.getitem, (own, function.__name__)
        _, (code, _, _, _, closure), (attributes, slots), *rest = self._usual(function)
        state = (attributes, {**slots, "__globals__": {}})
        arguments = (code, own, function.__name__, None, closure)
        return FunctionType, arguments, state, *rest

    def _array(self, array: Any) -> Any:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not self._owns_bytes(base):
            self._check_memory(base.base)
        first, _ = base.__array_interface__["data"]
        memory = first, first + base.nbytes
        self._check_apart(memory, self._borrowed)
        self._of_arrays.append(memory)
        if base is array:
            return NotImplemented
        contiguous = base.flags.c_contiguous or base.flags.f_contiguous
        if array.dtype.hasobject or not contiguous:
            raise pickle.PicklingError("it is a view that cannot be made again")
        address, _ = array.__array_interface__["data"]
        return _view, (base, array.shape, array.dtype, address - first, array.strides)

    def _owns_bytes(self, array: Any) -> bool:
        """Return whether the memory of an array is a ``bytearray`` that nothing else refers to, as in
        every array that pickle has made.
        """
        if not isinstance(array.base, memoryview):
            return False
        if type(array.base.obj) is not bytearray:
            return False
        unpickled = np.frombuffer(bytearray(1), np.uint8)
        if _references_to_memory(array) != _references_to_memory(unpickled):
            return False
        # memoryviews of one memoryview have one reference together
        return self._owners.setdefault(id(array.base.obj), array) is array

    def _check_memory(self, owner: Any) -> None:
        """Raise ``PicklingError`` if the memory of an array belongs to an object of another kind."""
        while isinstance(owner, memoryview):
            owner = owner.obj
        foreign: tuple[Any, ...] = FOREIGN_MEMORY
        if "torch" in sys.modules:
            foreign = (*foreign, torch.Tensor)
        of_mujoco = type(owner).__name__ == "PyCapsule" and bool(self._mujoco)
        if of_mujoco or isinstance(owner, foreign):
            raise pickle.PicklingError(
                f"it is a view into the memory of a {type(owner).__name__}"
            )

    def _check_apart(
        self, memory: tuple[int, int], others: Iterable[tuple[int, int]]
    ) -> None:
        """Raise ``PicklingError`` if memory overlaps with that of others: a tensor and an array that
        share it would get their own each.
        """
        begin, end = memory
        for first, last in others:
            if first < end and begin < last:
                raise pickle.PicklingError(
                    "a tensor and an array, or two tensors made from one array, share memory, and"
                    " would have their own each afterwards"
                )

    def _tensor(self, tensor: torch.Tensor) -> Any:
        unusual = tensor.requires_grad or tensor.is_quantized
        unusual = unusual or tensor.is_conj() or tensor.is_neg()
        if unusual or tensor.layout != torch.strided or tensor.device.type == "meta":
            return NotImplemented
        storage = (
            tensor.untyped_storage()
        )  # one object for all its tensors, so it is pickled once
        return _on_storage, (
            storage,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _foreign(self, obj: Any) -> Any:
        raise pickle.PicklingError("it belongs to this process")

    def _stream(self, stream: Any) -> Any:
        if stream in (sys.stdout, sys.stderr):
            return self._usual(stream)
        raise pickle.PicklingError("it is an open file")

    def _weak(self, reference: Any) -> Any:
        target = reference()
        # else it would be freed right after loading
        held = id(target) in self._met or id(target) in self._fixed
        if not held or reference.__callback__ is not None:
            raise pickle.PicklingError(
                f"it is a weak reference to a {type(target).__qualname__} held elsewhere"
            )
        return weakref.ref, (target,)

    def _mujoco_data(self, data: Any) -> Any:
        if not any(known is data for known in self._mujoco):
            self._mujoco.append(data)
            raise _DataFound
        if sum(known.model is data.model for known in self._mujoco) > 1:
            raise pickle.PicklingError("two MjData share one MjModel")
        state = data.__getstate__()
        known = [model for model in _models if state.startswith(model, MODEL_AT)]
        if known:
            model = known[0]
        else:
            model = data.model.__getstate__()
            if not state.startswith(
                model, MODEL_AT
            ):  # a MuJoCo version with another format
                return _with_state, (type(data), state)
            _models.append(model)
        before = state[:MODEL_AT]
        after = state[MODEL_AT + len(model) :]
        return _with_state, (type(data), before, pickle.PickleBuffer(model), after)

    def _mujoco_model(self, model: Any) -> Any:
        for data in self._mujoco:
            if data.model is model:
                return getattr, (data, "model")
        return NotImplemented


def is_env(cls: type) -> bool:
    """Whether objects of the class can be stepped and reset."""
    steps = callable(getattr(cls, "step", None))
    return steps and callable(getattr(cls, "reset", None))


# --- of the program's script, in a process that has got it with its code ---------------------------


def _name_of(obj: Any) -> tuple[str, str]:
    return obj.__module__, obj.__qualname__


def _named(module: str, name: str) -> Any:
    """Return a class of the script, or a method of one, by its qualified name: the one that has come,
    or that of this process's own script.

    Raises ``AttributeError`` if there is none.
    """
    cls, _, method = name.rpartition(".")
    if (module, name) in received:
        return received[module, name]
    if (module, cls) in received:
        return getattr(received[module, cls], method)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _method_with(own: dict[str, Any]) -> tuple[str, str] | None:
    """Return the name of a method of a class that has come, with these globals; None: there is none."""
    for (module, name), cls in list(received.items()):
        for attribute, value in vars(cls).items():
            if isinstance(value, FunctionType) and value.__globals__ is own:
                return module, f"{name}.{attribute}"
    return None


def _loses(obj: Any) -> bool:
    """Whether an object's own reduction leaves out some of its attributes."""
    reduced = obj.__reduce_ex__(4)
    if isinstance(reduced, str) or reduced[0] not in (type(obj), NEWOBJ):
        return False  # a global name, or a custom constructor
    state = reduced[2] if len(reduced) > 2 else None
    if not isinstance(state, dict):
        state = {}
    return any(state.get(name, ...) is not value for name, value in vars(obj).items())


def _cached(obj: Any) -> Any:
    return reduced_cache(obj, named=is_found_by_name(obj))


def _by_dict(obj: Any, state: Any = None) -> Any:
    if not keeps_all_in_dict(type(obj)):
        raise pickle.PicklingError("it keeps state outside its __dict__")
    if state is None:
        state = vars(obj)
    return NEWOBJ, (type(obj),), state, None, None, _set_dict


def _set_dict(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def _with_state(cls: Any, *parts: Any) -> Any:
    made = cls.__new__(cls)
    made.__setstate__(b"".join(parts))
    return made


def _references_to_memory(array: Any) -> int:
    return sys.getrefcount(array.base.obj)


def _view(
    base: Any,
    shape: Any,
    dtype: Any,
    offset: int,
    strides: Any,
) -> Any:
    return np.ndarray(shape, dtype, base.ravel(order="K"), offset, strides)


def _storage_bytes(storage: torch.UntypedStorage) -> Any:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat.cpu().numpy().copy()


def _storage(data: Any, device: str) -> torch.UntypedStorage:
    return torch.from_numpy(data).clone().to(device).untyped_storage()


def _on_storage(
    storage: Any,
    dtype: Any,
    offset: int,
    size: Any,
    stride: Any,
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, offset, size, stride
    )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield f"[{key!r}]", child
    elif isinstance(value, (list, tuple, deque)):
        for i, child in enumerate(value):
            yield f"[{i}]", child
    elif not isinstance(value, type):
        for name, child in getattr(value, "__dict__", {}).items():
            yield f".{name}", child


def _failure(value: Any, fixed: Mapping[int, Any], mujoco: Iterable[Any]) -> str | None:
    try:
        dump(value, fixed, mujoco)
    except Exception as error:  # noqa: BLE001  (foreign code; only its message is needed)
        return described(error)
    return None
