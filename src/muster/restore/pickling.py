"""Pickles for worker processes, with errors that locate the object that cannot be pickled."""

from __future__ import annotations

import dis
import inspect
import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle
from cloudpickle import cloudpickle as by_value

from muster.errors import BadOption, described, text_of
from muster.utils.private_names import usable

MAKE_POLICY = (
    "Pass policy_factory=make in place of policy=, where make is a function that returns the"
    " policy."
)
MAKE_KWARGS = "Make it inside a function, and pass that function as create_env_fn."
MAKE_OPTION = (
    "Make it inside the function when it is first called, or leave the option out."
)
BY_VALUE = b"_make_skeleton_"  # in the pickle of a class with its code
PRIVATE = (
    "_make_skeleton_class",
    "_make_skeleton_enum",
    "_class_setstate",
    "_DYNAMIC_CLASS_TRACKER_BY_ID",
)
DEEPEST = 50  # levels of the search for the culprit
NOT_OWN = (
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
)  # attributes of every class


def dumps(obj: Any, what: str, remedy: str | None = None) -> bytes:
    """Pickle ``obj``, called ``what`` in messages, also lambdas, closures, and classes of a
    notebook.

    Args:
        obj: anything.
        what: its name.
        remedy: what to do if it cannot be pickled. None: make the part inside a function.

    Raises:
        BadOption: a part cannot be pickled; the message has its type and place.
    """
    try:
        return by_cloudpickle(obj)
    except Exception as error:
        if remedy is None:
            remedy = "Pass a function that makes it."
            if isinstance(obj, (FunctionType, MethodType, partial)):
                remedy = "Make it inside the function instead."
        raise BadOption(f"{what}{_culprit(obj, error)} {remedy}") from error


def packed(value: Any, what: str, remedy: str | None = None) -> bytes:
    """Pickle a value as ``dumps``, in much less time where its classes can be imported."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 (cloudpickle may be able to)
        return dumps(value, what, remedy)
    # a class of the script or notebook, most often, which is another one in the other process
    return dumps(value, what, remedy) if b"__main__" in data else data


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what cloudpickle does, and what ``functools`` makes of functions of a script or notebook:
    ``cache`` and ``lru_cache``, ``cached_property`` and ``singledispatch``.
    """

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls is Cached:
            return reduced_cache(obj, named=_can_be_imported(obj))
        if cls is cached_property:  # with Python 3.11 it has a lock
            state = {"attrname": obj.attrname, "__doc__": obj.__doc__}
            return cached_property, (obj.func,), state
        if cls is WeakKeyDictionary:  # of ``singledispatch``
            return WeakKeyDictionary, (dict(obj),)
        return super().reducer_override(obj)


Cached = type(lru_cache(len))  # what ``functools.cache`` and ``lru_cache`` return


def reduced_cache(cached: Any, *, named: bool) -> Any:
    """Return what pickles the result of ``functools.lru_cache``, which comes back without its contents.

    ``named``: by its name.
    """
    if named:
        return cached.__reduce__()
    given = cached.cache_parameters(), cached.__wrapped__
    return _with_cache, given, vars(cached)


def _with_cache(parameters: Mapping[str, Any], function: Any) -> Any:
    return lru_cache(**parameters)(function)


def is_found_by_name(obj: Any) -> bool:
    """Return whether this process finds an object by its module and qualified name."""
    found: Any = sys.modules.get(obj.__module__ or "")
    for name in getattr(obj, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is obj


def _can_be_imported(obj: Any) -> bool:
    """Return whether other processes find an object by its name, too."""
    parts = (obj.__module__ or "").split(".")
    above = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return not above & by_value and is_found_by_name(obj)


def by_cloudpickle(obj: Any) -> bytes:
    """Pickle an object, also if it is made of a script or notebook. Raises whatever that raises."""
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


def unpickle(data: bytes, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle an object from ``dumps`` or ``packed``; classes that this process knows stay as they
    are.

    Runs code that the pickle names. Raises whatever that code raises.

    Args:
        buffers: memory that the pickle refers to.
    """
    if BY_VALUE in data and usable("cloudpickle", (by_value, PRIVATE)):
        return _Unpickler(data, buffers).load()
    return pickle.loads(data, buffers=buffers)


class _Unpickler(pickle.Unpickler):
    """Leaves classes alone that this process knows.

    A class of a script or notebook travels with its attributes and the code of its methods.
    cloudpickle finds the class here if this process has sent or received it before, and sets all of
    these again: what was set here since would be lost, and its methods would use a copy of the
    script's variables.
    """

    def __init__(self, data: bytes, buffers: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._known: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is by_value._make_skeleton_class:
            return partial(self._class, found, 4)
        if found is by_value._make_skeleton_enum:
            return partial(self._class, found, 5)
        if found is by_value._class_setstate:
            return self._set_attributes
        return found

    def _class(self, make: Callable[..., type], place: int, *args: Any) -> type:
        """Call cloudpickle's function, one of whose arguments is the id of the class."""
        known = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[place])
        made = make(*args)
        if made is not known:
            _unfinished.add(made)
        elif made not in _unfinished:
            self._known.add(made)
        return made

    def _set_attributes(self, cls: type, attributes: Any) -> type:
        if cls not in self._known:
            by_value._class_setstate(cls, attributes)
            _unfinished.discard(cls)
            received[cls.__module__, cls.__qualname__] = cls
        return cls


# classes made here whose attributes are not set yet: their pickle goes on, or could not be read
_unfinished: WeakSet[type] = WeakSet()

received: WeakValueDictionary[tuple[str, str], type] = WeakValueDictionary()
"""The classes that came to this process with their code, by module and qualified name; of several
the newest.
"""


@dataclass(frozen=True)
class Sealed:
    """A value of the user's code in a message, pickled by itself: the rest of the message can be read
    also if the value cannot.
    """

    data: bytes


def opened(given: Any, what: str) -> Any:
    """Return the value in a ``Sealed``, which comes from a process, or ``given`` as it is, which comes
    from a thread.

    Raises ``BadOption`` like ``loads``.
    """
    return loads(given.data, what) if isinstance(given, Sealed) else given


def loads(data: bytes, what: str) -> Any:
    """Unpickle an object from ``dumps``.

    Runs code that the pickle names. Raises ``BadOption`` if this fails.
    """
    try:
        return unpickle(data)
    except Exception as error:
        raise BadOption(
            f"{what} was pickled, but could not be unpickled in another process:"
            f" {described(error)}. What it uses must be importable there, and its own __reduce__ or"
            " __setstate__ must take what it gave."
        ) from error


def unpickled(given: Any, what: str) -> Any:
    """Return an argument of a worker, which a process gets as a pickle, and a thread as it is."""
    return loads(given, what) if isinstance(given, bytes) else given


def _culprit(obj: Any, error: BaseException) -> str:
    """The end of a sentence: path and type of the innermost part of ``obj`` that cannot be pickled."""
    path, obj, error = innermost(obj, error, _parts, _failure)
    reason = "" if "cannot pickle" in text_of(error) else f" ({described(error)})"
    where = f": {' -> '.join(path)}" if path else ""
    module = f"{type(obj).__module__}." if type(obj).__module__ != "builtins" else ""
    return f"{where} is a {module}{type(obj).__qualname__}, which cannot be pickled{reason}."


def innermost(
    obj: Any,
    why: Any,
    parts: Callable[[Any], Iterable[tuple[str, Any]]],
    failure: Callable[[Any], Any],
) -> tuple[list[str], Any, Any]:
    """The path to the innermost part of ``obj`` with a ``failure``, as names; that part; and the
    failure.
    """
    path: list[str] = []
    seen = {id(obj)}
    while len(path) < DEEPEST:
        for name, child in parts(obj):
            found = failure(child) if id(child) not in seen else None
            if found is not None:
                seen.add(id(child))
                path.append(name)
                obj = child
                why = found
                break
        else:
            break
    return path, obj, why


def _failure(obj: Any) -> Exception | None:
    try:
        by_cloudpickle(obj)
    except Exception as error:  # noqa: BLE001  (after any exception, it cannot be pickled)
        return error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, MethodType):
        yield "the object it is a method of", obj.__self__
        yield f"method {obj.__name__!r}", obj.__func__
    elif isinstance(obj, partial):
        yield "the function of the partial", obj.func
        for i, value in enumerate(obj.args):
            yield f"argument {i} of the partial", value
        for name, value in obj.keywords.items():
            yield f"argument {name!r} of the partial", value
    elif isinstance(obj, Mapping):
        for key in obj:
            yield f"key {key!r}", key
        for key, value in obj.items():
            yield f"item {key!r}", value
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        for i, value in enumerate(obj):
            yield f"item {i}", value
    elif isinstance(obj, type):
        for base in obj.__bases__:
            yield f"base class {base.__name__!r}", base
        for name, value in vars(obj).items():
            if name not in NOT_OWN:
                yield f"class attribute {name!r}", value
    if not isinstance(obj, (type, ModuleType)):
        for name, value in _attributes(obj):
            yield f"attribute {name!r}", value


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            yield f"closure variable {name!r}", cell.cell_contents
        except ValueError:  # the cell is still empty
            pass
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            yield f"default of {parameter.name!r}", parameter.default
    names = sorted(_globals_of(function.__code__) & function.__globals__.keys())
    for name in names:
        yield f"global {name!r}", function.__globals__[name]


def _globals_of(code: CodeType) -> set[str]:
    loads_global = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in loads_global
    }
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _globals_of(inner)
    return names


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(obj, "__dict__", {}).items()
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)
