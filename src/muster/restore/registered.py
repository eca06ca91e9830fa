"""The ids of a program's registry (``gymnasium.register``), for the processes that make its
environments.

Workers, nodes and replays import neither the program's main module nor the packages that it has
imported, so their own registries have Gymnasium's ids only. They get the program's: of every id a
pickle of its spec, which is unpickled when the id is used first. So an id that nothing uses costs
no import, and one that cannot be pickled disturbs nothing.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from gymnasium import Env
from gymnasium.envs.registration import EnvSpec, registry
from gymnasium.error import Error as GymnasiumError

from muster.errors import BadOption, described
from muster.restore.pickling import by_cloudpickle, dumps, loads

MAIN = "__main__"
# Gymnasium compares these of all ids at every look-up
AT_HAND = ("id", "namespace", "name", "version")
OWN = "gymnasium.envs."  # modules of Gymnasium's own environments
PLAIN: dict[str, tuple[type, ...]] = {  # fields of a spec in a file, with their types
    "id": (str,),
    "entry_point": (str,),
    "nondeterministic": (bool,),
    "order_enforce": (bool,),
    "disable_env_checker": (bool,),
    "max_episode_steps": (int, type(None)),
    "reward_threshold": (int, float, type(None)),
    "kwargs": (dict,),
}
_IN_A_MODULE = "or move the environment into a module, and register it with entry_point='my_module:MyEnv'"
REMEDIES = {  # by part of a spec that cannot be pickled
    "entry_point": f"Make it inside what entry_point names, {_IN_A_MODULE}.",
    "vector_entry_point": f"Make it inside what vector_entry_point names, {_IN_A_MODULE}.",
    "kwargs": "Make it in the environment, instead of passing it as kwargs=.",
    "additional_wrappers": "Make it in the wrapper, instead of passing it as an argument.",
}


@dataclass(frozen=True)
class SentIds:
    """The ids of a process's registry, for another process; see ``installed``.

    Attributes:
        packed: by id, the pickle of its spec and of the objects of the main module that the spec
            names.
    """

    packed: Mapping[str, bytes]


# --- in the process that has registered the ids ---------------------------------------------------


def ids_of_this_process(most_bytes: int | None = None) -> SentIds:
    """Return the ids of this process's registry.

    One that cannot be sent raises the reason where it is used.

    Gymnasium's own ids are among them (20 kB), since a program can register them again, or change
    their specs.

    Args:
        most_bytes: limit for the pickle of an id; a larger one counts as an id that cannot be sent.
            None: no limit.
    """
    packed = {}
    for env_id, spec in _registered():
        packed[env_id] = _packed_or_unusable(spec)
        if most_bytes is not None and len(packed[env_id]) > most_bytes:
            reason = f"The pickle of {env_id!r} has more than {most_bytes:,} bytes."
            packed[env_id] = _packed(_unusable(spec.id, reason))
    return SentIds(packed)


def with_later_ids(sent: SentIds) -> SentIds:
    """Return these ids and those that were registered since.

    An id keeps the spec that it has in ``sent``.
    """
    later = {
        env_id: _packed_or_unusable(spec)
        for env_id, spec in _registered()
        if env_id not in sent.packed
    }
    if not later:
        return sent
    return SentIds({**later, **sent.packed})


def check_id(env_id: str, what: str) -> None:
    """Raise ``BadOption`` if this process has registered an id that cannot be sent; ``what``: which
    option it is.
    """
    spec = spec_of(env_id)
    if spec is None:
        return
    try:
        _packed(spec)
    except BadOption as error:
        raise BadOption(f"{what}: {error}") from error


def spec_of(env_id: str) -> EnvSpec | None:
    """Return the spec that Gymnasium uses for an id; None: there is none.

    Without a version, it is the newest one.
    """
    _, _, name = env_id.rpartition(":")
    specs = dict(_registered())
    if name in specs:
        return specs[name]
    versions = [spec for spec in specs.values() if spec.id == f"{name}-v{spec.version}"]
    return max(versions, key=lambda spec: spec.version or 0, default=None)


def _registered() -> list[tuple[str, EnvSpec]]:
    """Return the ids that ``gymnasium.make`` takes, with their specs: programs may have put
    anything there.
    """
    found = list(registry.items())  # a copy: other threads may register
    specs = [(env_id, spec) for env_id, spec in found if isinstance(spec, EnvSpec)]
    return [(env_id, spec) for env_id, spec in specs if _is_id(env_id)]


def _is_id(env_id: Any) -> bool:
    try:
        EnvSpec(env_id)
    except (GymnasiumError, TypeError):
        return False
    return True


def _packed_or_unusable(spec: EnvSpec) -> bytes:
    try:
        return _packed(spec)
    except BadOption as error:
        return _packed(_unusable(spec.id, str(error)))


def _packed(spec: EnvSpec) -> bytes:
    """Pickle a spec.

    Raises ``BadOption`` with the id, the part that cannot be pickled, and the remedy.
    """
    if type(spec) is _SentSpec:
        unused = _unused(spec)
        if unused is not None:  # this process has got it itself
            packed, _ = unused
            return packed
    try:
        named = _named_in_main(spec)
        content = (spec, named)
        if type(spec) is EnvSpec and not named and _is_plain(vars(spec)):
            return pickle.dumps(
                content, pickle.HIGHEST_PROTOCOL
            )  # a tenth of cloudpickle's time
        return by_cloudpickle(content)
    except Exception as error:
        what = f"{spec.id!r} is registered in this program, and cannot be sent to other processes"
        for part, remedy in REMEDIES.items():
            dumps(getattr(spec, part), f"{what}: {part}", remedy)
        raise BadOption(
            f"{what}: {described(error)}. {REMEDIES['entry_point']}"
        ) from error


def _named_in_main(spec: EnvSpec) -> dict[str, Any]:
    """Return the objects of the main module that entry points such as ``"__main__:MyEnv"`` name."""
    main = vars(sys.modules[MAIN])
    of_wrappers = [wrapper.entry_point for wrapper in spec.additional_wrappers]
    entry_points = (spec.entry_point, spec.vector_entry_point, *of_wrappers)
    found = {}
    for entry_point in entry_points:
        if not isinstance(entry_point, str):
            continue
        module, _, name = entry_point.partition(":")
        if module == MAIN and name in main:
            found[name] = main[name]
    return found


def _is_plain(value: Any) -> bool:
    """Whether a plain pickle restores ``value`` in any process that has Gymnasium."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (type, FunctionType)) and str(value.__module__).startswith(
        "gymnasium."
    ):
        module = sys.modules.get(value.__module__)
        return getattr(module, value.__qualname__, None) is value
    return False


# --- in another process ---------------------------------------------------------------------------


@contextmanager
def installed(sent: SentIds | None) -> Iterator[None]:
    """Add the ids of another process to the registry of this process, for good.

    None: there are none.

    What is imported in the context may register some of them once more: they keep the specs that
    were sent, since the other process may have registered them again after the same import.
    """
    if sent is None:
        yield
        return
    # In the other process nothing was overridden.
    warnings.filterwarnings(
        "ignore", message=r".*Overriding environment \S+ already in registry"
    )
    specs: dict[str, EnvSpec] = {}
    for env_id, packed in sent.packed.items():
        own = registry.get(env_id)
        if own is None or _packed_or_unusable(own) != packed:
            specs[env_id] = _sent_spec(env_id, packed, specs)
    registry.update(specs)
    with _kept(specs):
        yield


@contextmanager
def _kept(env_ids: Mapping[str, Any]) -> Iterator[None]:
    """Undo what is registered under these ids in the context."""
    before = {env_id: registry[env_id] for env_id in env_ids if env_id in registry}
    try:
        yield
    finally:
        registry.update(before)


class _SentSpec(EnvSpec):
    """A spec of another process.

    The first use of an attribute, except those ``AT_HAND``, makes it an ``EnvSpec``.

    It is then unpickled, and the modules that Gymnasium needs to make an environment are imported.
    Gymnasium would do so next; but an import that registers ids must not replace those of the other
    process.
    """

    def __getattribute__(self, name: str) -> Any:
        if name not in AT_HAND:
            _use(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _use(self)
        object.__setattr__(self, name, value)


def _sent_spec(env_id: str, packed: bytes, others: Mapping[str, EnvSpec]) -> EnvSpec:
    """Make the spec of an id; ``others``: all ids that were sent, with their specs."""
    spec = EnvSpec(env_id)
    vars(spec)["_unused"] = (packed, others)
    spec.__class__ = _SentSpec
    return spec


def _unused(spec: EnvSpec) -> tuple[bytes, Mapping[str, EnvSpec]] | None:
    """Return the pickle of a spec that was sent, and all ids that were sent with it; None once it
    is used.
    """
    state: dict[str, Any] = object.__getattribute__(spec, "__dict__")
    return state.get("_unused")


def _use(spec: _SentSpec) -> None:
    """Make it an ``EnvSpec``.

    If that fails, the reason is raised where an environment is made of it.
    """
    unused = _unused(spec)
    if unused is None:  # another thread has done it
        return
    packed, others = unused
    with _kept(others):
        try:
            loaded, main = loads(packed, f"The registration of {spec.id!r}")
        except BadOption as error:
            loaded = _unusable(spec.id, str(error))
            main = {}
        vars(sys.modules[MAIN]).update(main)
        _import_what_makes(loaded)
    state: dict[str, Any] = object.__getattribute__(spec, "__dict__")
    state.update(vars(loaded))
    object.__setattr__(spec, "__class__", EnvSpec)
    state.pop("_unused", None)


def _import_what_makes(spec: EnvSpec) -> None:
    """Import the modules that make an environment of a spec.

    If that fails, the spec raises the reason.
    """
    for wrapper in spec.additional_wrappers:
        with suppress(Exception):  # raised by Gymnasium where an environment is made
            importlib.import_module(wrapper.entry_point.partition(":")[0])
    place = "vector_entry_point" if spec.entry_point is None else "entry_point"
    entry_point = getattr(spec, place)
    if not isinstance(entry_point, str):
        return
    module = entry_point.partition(":")[0]
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (raised where an environment is made)
        reason = (
            f"{spec.id!r} is registered with {place}={entry_point!r}, and importing {module!r} in"
            f" this process raised {described(error)}. Install its package where environments are"
            " made, or put its folder on sys.path in the main program before the collector is"
            " made."
        )
        setattr(spec, place, _Unusable(reason))


class _Unusable:
    """An entry point of an id that this process cannot use: raises the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, **_: object) -> NoReturn:
        raise BadOption(self.reason)


def _unusable(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(
        env_id, entry_point=_Unusable(reason), vector_entry_point=_Unusable(reason)
    )


# --- ids in files ---------------------------------------------------------------------------------


def plain_spec(env_id: str) -> dict[str, Any]:
    """Return the spec of an id as plain data (``PLAIN``), if it makes an environment of Gymnasium's
    own; else empty.
    """
    spec = spec_of(env_id)
    if (
        spec is None
        or spec.additional_wrappers
        or not str(spec.entry_point).startswith(OWN)
    ):
        return {}
    found = {name: getattr(spec, name) for name in PLAIN}
    return found if is_plain_spec(found) and _is_plain(found) else {}


def is_plain_spec(found: Any) -> bool:
    """Whether a value from a file is a spec as plain data. Imports nothing that it names."""
    if type(found) is not dict or found.keys() != PLAIN.keys():
        return False
    if not all(type(found[name]) in kinds for name, kinds in PLAIN.items()):
        return False
    try:
        EnvSpec(**found)
    except GymnasiumError:  # of an id that cannot be parsed
        return False
    return all(type(name) is str for name in found["kwargs"])


def imports_foreign_code(found: Mapping[str, Any]) -> bool:
    """Whether a spec as plain data names anything but an environment class of Gymnasium's own."""
    module, _, name = found["entry_point"].partition(":")
    parts = [*module.split("."), name]
    if not (module.startswith(OWN) and all(part.isidentifier() for part in parts)):
        return True
    try:
        named = getattr(importlib.import_module(module), name)
    except Exception:  # noqa: BLE001 (making the environment fails likewise: a package is missing)
        return False
    own = (
        isinstance(named, type)
        and issubclass(named, Env)
        and named.__module__.startswith(OWN)
    )
    return not own


def sent_spec(found: Mapping[str, Any]) -> SentIds | None:
    """Return an id from a file, for ``installed``; None if this process has registered the same."""
    if plain_spec(found["id"]) == found:
        return None
    return SentIds({found["id"]: _packed(EnvSpec(**found))})
