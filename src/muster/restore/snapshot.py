"""Snapshots: the state of an environment object, restored bit for bit in another process.

An environment is a stack of layers (wrappers, the environment itself, those in a vector
environment). A snapshot has one part per layer: the result of the layer's own methods
(``get_state`` and ``set_state``, ``state_dict`` and ``load_state_dict``, ``clone_state`` and
``restore_state``), else its ``__dict__``. If all parts are plain data, the snapshot is plain (way
"plain"); else it is a pickle (way "pickle"), which is loaded from trusted files only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.spaces import Space
from gymnasium.utils import EzPickle

from muster.errors import described
from muster.restore.graph import culprit, dump, is_env, keeps_all_in_dict, load
from muster.restore.plain_state import Decoder, Encoder, Mismatch, NotPlain, same

Snapshot = dict[str, Any]  # plain data: see ``muster.restore.checkpoint``

LINKS = ("env", "_env", "base_env", "envs")  # attributes that hold further layers
PAIRS = (
    ("get_state", "set_state"),
    ("state_dict", "load_state_dict"),
    ("clone_state", "restore_state"),
)
# attributes that constructors set, and nothing changes
CONSTRUCTION = {"env_fns", "metadata", *vars(EzPickle())}


def _random_attributes() -> set[str]:
    """The attributes in which Gymnasium's base class stores an environment's generator and seed."""
    env: gymnasium.Env[Any, Any] = gymnasium.Env()
    before = set(vars(env))
    assert env.np_random is not None  # creates the generator
    return set(vars(env)) - before


RANDOM = _random_attributes()
# https://github.com/Farama-Foundation/Arcade-Learning-Environment/pull/739; seen in one of twenty
# states with 0.12.1
ALE_INEXACT = (
    "ALE's clone_state leaves out a part of the video chip: what follows is nearly always equal,"
    " but in some states screens, RAM and even rewards differ."
)
PYTHON = ".".join(map(str, sys.version_info[:2]))


def take(env: Any) -> Snapshot:
    """Return the state of ``env`` as plain data, or ``{"way": "none", "reason": ...}`` if this
    cannot be exact.
    """
    try:
        layers = _layers(env)
        for layer in layers:
            known = keeps_all_in_dict(type(layer)) or _own(layer) is not None
            if not known or not hasattr(layer, "__dict__"):
                raise Mismatch(
                    f"{_name(layer)} keeps state outside its __dict__ and has no get_state and"
                    " set_state"
                )
        parts = [_part(layer, layers) for layer in layers]
        about: Snapshot = {"layers": [_name(layer) for layer in layers]}
        try:
            return {"way": "plain", **about, "data": _encoded(parts, layers)}
        except NotPlain:
            return _pickled(parts, layers) | about
    except Mismatch as error:
        return {"way": "none", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  (foreign code can raise anything; there is no snapshot then)
        return {
            "way": "none",
            "reason": f"saving {_name(env)} raised {described(error)}",
        }


def restore(env: Any, snapshot: Snapshot, trust: bool) -> str | None:
    """Restore the saved state into ``env``, which was made like the saved one.

    All layers stay the same objects.

    ``trust`` allows a snapshot that runs code (way "pickle"). Returns None if every bit was
    restored, else the reason as a sentence; then ``env`` must be reset before use.
    """
    if snapshot["way"] == "none":
        return str(snapshot["reason"])
    if snapshot["way"] == "pickle" and not trust:
        return (
            "The state is a pickle, which can run any code: pass trust=True if you trust where it"
            " comes from."
        )
    layers = _layers(env)
    names = [_name(layer) for layer in layers]
    if names != snapshot["layers"]:
        was = " > ".join(snapshot["layers"])
        now = " > ".join(names)
        return f"It was saved from {was}, and is now {now}."
    try:
        if snapshot["way"] == "pickle":
            parts = _unpickled(snapshot, layers)
        else:
            parts = _decoded(snapshot["data"], layers)
        for part, layer in reversed(list(zip(parts, layers, strict=True))):
            _put_back(part, layer)
        for part, layer in zip(parts, layers, strict=True):
            _check(part, layer, layers)
    except Mismatch as error:
        return f"{error}."
    except Exception as error:  # noqa: BLE001  (foreign code can raise anything; the state is not restored then)
        return f"Restoring {_name(env)} raised {described(error)}"
    if any(type(layer).__module__.startswith("ale_py.") for layer in layers):
        return ALE_INEXACT
    return None


# --- layers ---------------------------------------------------------------------------------------


def _layers(env: Any) -> list[Any]:
    found = [env]
    for layer in found:  # the loop appends to it
        held = getattr(layer, "__dict__", {})
        held = {
            **(held.get("_modules") or {}),
            **held,
        }  # a torch module has its submodules there
        links = [held.get(name) for name in LINKS]
        for link in links:
            children = link if isinstance(link, (list, tuple)) else [link]
            for child in children:
                if is_env(type(child)) and not any(child is other for other in found):
                    found.append(child)
    return found


def _numbers(layers: list[Any]) -> dict[int, int]:
    return {id(layer): number for number, layer in enumerate(layers)}


def _name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _own(layer: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for get, put in PAIRS:
        functions = [getattr(type(layer), name, None) for name in (get, put)]
        # A torch module's state_dict has its parameters only, not the state of an environment.
        if not all(
            callable(f) and not str(f.__module__).startswith("torch") for f in functions
        ):
            continue
        read = getattr(layer, get)
        write = getattr(layer, put)
        try:
            inspect.signature(write).bind(None)
            inspect.signature(read).bind()
        except (TypeError, ValueError):  # another function of that name, or one in C
            continue
        if "include_rng" in inspect.signature(read).parameters:
            read = partial(read, include_rng=True)
        return read, write
    return None


# --- parts ----------------------------------------------------------------------------------------


def _part(layer: Any, layers: list[Any]) -> dict[str, Any]:
    own = _own(layer)
    held: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in vars(layer).items():
        if _draws(layer, value):
            left_out.append(name)
        elif not _is_construction(name, value):
            held[f".{name}"] = value
    if own is None:
        return {"left_out": left_out, **held}
    read, _ = own
    state = read()
    part: dict[str, Any]
    if hasattr(state, "serialize") and hasattr(state, "__setstate__"):  # ALEState
        part = {"bytes": state.__getstate__()}
    else:
        part = {"state": state}
    part["check"] = _plain_attributes(layer, layers)
    of_gymnasium = {name: v for name, v in held.items() if _is_gymnasiums(name[1:], v)}
    return part | of_gymnasium


def _is_construction(name: str, value: Any) -> bool:
    """Whether an attribute is a fact of the layer's construction: it is no state, and often cannot
    be pickled.
    """
    return name in CONSTRUCTION or type(value).__name__ == "EnvSpec"


def _is_gymnasiums(name: str, value: Any) -> bool:
    """Whether an attribute is random state of Gymnasium's, which a layer's own methods do not
    contain.
    """
    return name in RANDOM or isinstance(value, Space)


def _draws(layer: Any, value: Any) -> bool:
    """Whether ``value`` is a pygame object, such as a window, that Gymnasium's environments
    recreate if missing.
    """
    package = type(value).__module__.split(".")[0]
    return package == "pygame" and type(layer).__module__.startswith("gymnasium.envs.")


def _plain_attributes(layer: Any, layers: list[Any]) -> list[Any]:
    found = []
    for name, value in vars(layer).items():
        if _is_construction(name, value) or _is_gymnasiums(name, value):
            continue
        try:
            encoded = Encoder(_numbers(layers), compares=True).encode(value)
        except NotPlain:
            continue
        found.append([name, encoded])
    return found


def _put_back(part: dict[str, Any], layer: Any) -> None:
    own = _own(layer)
    attributes = {name[1:]: value for name, value in part.items() if name[0] == "."}
    if own is not None:
        read, write = own
        state = part.get("state")
        if "bytes" in part:
            cls: Any = type(read())
            state = cls.__new__(cls)
            state.__setstate__(part["bytes"])
        write(state)
        vars(layer).update(attributes)
        return
    live = vars(layer)
    kept = {}
    for name, value in live.items():
        left_out = name in part["left_out"] or _draws(layer, value)
        if left_out or _is_construction(name, value):
            kept[name] = value
    live.clear()
    live.update(attributes | kept)


def _check(part: dict[str, Any], layer: Any, layers: list[Any]) -> None:
    now = dict(_plain_attributes(layer, layers)) if "check" in part else {}
    for name, value in part.get("check", ()):
        if not same(value, now.get(name, ...)):
            raise Mismatch(
                f"The own methods of {_name(layer)} for its state leave its attribute {name!r} out"
            )


# --- plain and pickled snapshots ------------------------------------------------------------------


def _pickled(parts: list[dict[str, Any]], layers: list[Any]) -> Snapshot:
    fixed = {id(layer): ("layer", number) for number, layer in enumerate(layers)}
    fixed |= {id(type(layer)): ("class", number) for number, layer in enumerate(layers)}
    mujoco = []
    for part in parts:
        mujoco += [value for value in part.values() if type(value).__name__ == "MjData"]
    try:
        data, shared = dump(parts, fixed, mujoco)
    except Exception as error:
        for part, layer in zip(parts, layers, strict=True):
            for name, value in part.items():
                why = culprit(value, fixed, mujoco, f"{type(layer).__name__}{name}")
                if why:
                    raise Mismatch(why) from error
        raise
    return {"way": "pickle", "python": PYTHON, "data": data, "shared": shared}


def _unpickled(snapshot: Snapshot, layers: list[Any]) -> list[dict[str, Any]]:
    if snapshot["python"] != PYTHON:
        raise Mismatch(
            f"The state was pickled by Python {snapshot['python']}, and this is Python {PYTHON}"
        )
    fixed: dict[Any, Any] = {
        ("layer", number): layer for number, layer in enumerate(layers)
    }
    fixed |= {("class", number): type(layer) for number, layer in enumerate(layers)}
    parts: list[dict[str, Any]] = load(snapshot["data"], snapshot["shared"], fixed)
    return parts


def _encoded(parts: list[dict[str, Any]], layers: list[Any]) -> list[dict[str, Any]]:
    """Return the parts as plain data; raises ``NotPlain``."""
    encoder = Encoder(_numbers(layers))
    encoded = []
    for part in parts:
        encoded.append({name: encoder.encode(value) for name, value in part.items()})
    return encoded


def _decoded(data: list[Any], layers: list[Any]) -> list[dict[str, Any]]:
    decoder = Decoder(layers)
    parts = []
    for encoded, layer in zip(data, layers, strict=True):
        part = {}
        for name, value in encoded.items():
            try:
                part[name] = decoder.decode(value, vars(layer).get(name[1:]))
            except Mismatch as error:
                raise Mismatch(f"{_name(layer)}{name} {error}") from error
        parts.append(part)
    return parts
