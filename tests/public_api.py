"""Every public name with its methods, parameters and defaults.

``python -m tests.public_api`` writes them to a file.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import muster

FILE = Path(__file__).with_name("public_api.txt")
WIDTH = 120
PARTS = (  # classes of values inside public results
    "muster.evaluation.EvaluatedEpisode",
    "muster.evaluation.UnfinishedEpisode",
    "muster.observing.stats.WorkerStats",
    "muster.observing.stats.CaptureStats",
    "muster.observing.profiling.ProfileConfig",
)


def describe() -> list[str]:
    """A line for each name and method; where it would be long, one for each parameter (``kw``: by
    keyword only).
    """
    seen: set[Any] = (
        set()
    )  # members that several classes inherit are shown once, at the shortest name
    names = [
        f"muster.{name}"
        for name in sorted(muster.__all__, key=lambda name: (len(name), name))
    ]
    return [
        line
        for name in [*names, *PARTS]
        for line in _of(name, pkgutil.resolve_name(name), seen)
    ]


def _of(name: str, value: Any, seen: set[Any]) -> Iterator[str]:
    if isinstance(value, ModuleType):
        inside = getattr(value, "__all__", None) or [
            n for n, v in vars(value).items() if _is_own(n, v, value)
        ]
        for other in sorted(inside):
            yield from _of(f"{name}.{other}", getattr(value, other), seen)
        return
    yield from _signature(name, value)
    if isinstance(value, type):
        for other, member in sorted(_members(value)):
            own = (
                inspect.unwrap(member) if inspect.isfunction(member) else member
            )  # which a class may have decorated
            if own not in seen:
                yield from _signature(f"{name}.{other}", member)
            seen.add(own)


def _is_own(name: str, value: Any, module: ModuleType) -> bool:
    return (
        not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that Muster defines."""
    for name in {
        name
        for base in cls.__mro__
        if base.__module__.startswith("muster")
        for name in vars(base)
    }:
        member = inspect.getattr_static(cls, name)
        member = getattr(member, "__func__", member)  # of class and static methods
        if not name.startswith("_") and (
            inspect.isfunction(member)
            or isinstance(member, (property, cached_property))
        ):
            yield name, member


def _signature(name: str, value: Any) -> list[str]:
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # a property, a constant; an exception
        return [name]
    shown = [_shown(p) for p in given if p.name not in ("self", "cls")]
    line = f"{name}({', '.join(shown)})"
    return (
        [line]
        if len(line) <= WIDTH
        else [f"{name}(", *(f"    {one}," for one in shown), ")"]
    )


def _shown(p: inspect.Parameter) -> str:
    star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**", p.KEYWORD_ONLY: "kw "}.get(
        p.kind, ""
    )
    return f"{star}{p.name}{'' if p.default is p.empty else '=' + _default(p.default)}"


def _default(value: Any) -> str:
    return (
        value.__name__
        if inspect.isroutine(value) or isinstance(value, type)
        else repr(value)
    )


if __name__ == "__main__":
    FILE.write_text("\n".join(describe()) + "\n")
