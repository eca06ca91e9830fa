"""Records of options whose fields are checked by their types.

A field is checked when its record is made, by the first rule that applies to its type::

    Annotated[T, check]         ``check(name, value)`` returns the value to keep, or raises BadOption
    bool                        True or False
    Literal["a", "b"]           one of these; with other types, a text is one of these
    a subclass of ``Details``   an object of it
    Callable[...]               a function

``None`` passes if the type allows it, and other types are not checked. The types are resolved, so
that a type has the same meaning under each of its names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from muster.errors import BadOption
from muster.utils.integers import integer

Check = Callable[[str, Any], Any]
Record = TypeVar("Record")


class Checked:
    """Base of dataclasses whose fields are checked and normalized by their types."""

    def __post_init__(self) -> None:
        for name, check in _checks(cast(Any, type(self))).items():
            value = getattr(self, name)
            kept = check(name, value)
            if kept is not value:
                object.__setattr__(self, name, kept)


class Details(Checked):
    """Base of the dataclasses that are values of an option; its repr shows only values that are not
    the default.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = []
        for field in fields:
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


def base_part(base: type[Record], record: Record) -> Record:
    """Return the fields that a record has from this base, as an object of the base."""
    if not isinstance(record, base):
        raise TypeError(f"{type(record).__name__} does not extend {base.__name__}")
    fields = dataclasses.fields(base)  # type: ignore[arg-type]
    return base(**{f.name: getattr(record, f.name) for f in fields})


# --- types ----------------------------------------------------------------------------------------


def at_least(least: int) -> Check:
    """Return the check of an integer that is not less than this."""

    def check(name: str, value: Any) -> int:
        return integer(name, value, least)

    return check


def limit(name: str, value: Any) -> int | None:
    """Return the limit; None if it is None, 0 or negative."""
    if value is None:
        return None
    number = integer(name, value, None)
    return number if number > 0 else None


def one_of(*known: str) -> Check:
    """Return the check of a text that is one of a few."""

    def check(name: str, value: Any) -> str:
        if value not in known:
            raise BadOption(
                f"{name}={value!r}: expected {' or '.join(map(repr, known))}"
            )
        return str(value)

    return check


def list_of_seeds(name: str, value: Any) -> tuple[int, ...]:
    """Return the seeds; at least one, and integers of at least 0."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadOption(f"{name}={value!r}: expected a list of seeds")
    seeds = tuple(integer(f"{name}[{i}]", seed, 0) for i, seed in enumerate(value))
    if not seeds:
        raise BadOption(f"{name} is an empty list: expected at least one seed")
    return seeds


def seed_or_seeds(name: str, value: Any) -> int | tuple[int, ...]:
    """Return a seed, or seeds."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return list_of_seeds(name, value)
    return integer(name, value, 0)


Number = Annotated[int, at_least(0)]
PositiveNumber = Annotated[int, at_least(1)]
Seeds = Annotated[Sequence[int], list_of_seeds]
Seed = Annotated[int | Sequence[int], seed_or_seeds]
Limit = Annotated[int | None, limit]


# --- checks ---------------------------------------------------------------------------------------


def check_bool(name: str, value: Any) -> bool:
    """Return the truth value. Raise ``BadOption`` for any other value."""
    if not isinstance(value, bool):
        raise BadOption(f"{name}={value!r}: expected True or False")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return the value. Raise ``BadOption`` unless it is one of the choices."""
    if value not in choices:
        raise BadOption(
            f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}"
        )
    return str(value)


def _check_function(name: str, value: Any) -> Any:
    if not callable(value):
        raise BadOption(f"{name}={value!r}: expected a function")
    return value


@cache
def _checks(record: type) -> dict[str, Check]:
    """Return the checks of a record's fields, by name."""
    kinds = get_type_hints(record, include_extras=True)
    found = {
        f.name: _check_of(kinds[f.name]) for f in dataclasses.fields(record) if f.init
    }
    return {name: check for name, check in found.items() if check is not None}


def _check_of(kind: Any) -> Check | None:
    """Return the check of a type; None: any value is valid."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    allows_none = NoneType in members
    literals = [member for member in members if get_origin(member) is Literal]
    texts = tuple(text for literal in literals for text in get_args(literal))
    others = [
        member
        for member in members
        if member is not NoneType and member not in literals
    ]
    check = _check_of_members(texts, others)
    if check is None:
        return None
    found = check

    def checked(name: str, value: Any) -> Any:
        if value is None and allows_none:
            return None
        if isinstance(value, str) and value in texts:
            return value
        return found(name, value)

    return checked


def _check_of_members(texts: tuple[str, ...], others: list[Any]) -> Check | None:
    """Return the check of a union of texts and other types."""
    for member in others:
        if get_origin(member) is Annotated:
            return cast(Check, get_args(member)[1])
    if texts:
        classes = tuple(member for member in others if isinstance(member, type))

        def check_text(name: str, value: Any) -> Any:
            if isinstance(value, classes) and not isinstance(value, bool):
                return value
            return check_choice(name, value, texts)

        return check_text
    if others == [bool]:
        return check_bool
    if (
        len(others) == 1
        and isinstance(others[0], type)
        and issubclass(others[0], Details)
    ):
        return _check_details(others[0])
    if any(get_origin(member) is Callable for member in others):
        return _check_function
    return None


def _check_details(cls: type[Details]) -> Check:
    def check(name: str, value: Any) -> Details:
        if not isinstance(value, cls):
            raise BadOption(f"{name}={value!r}: expected muster.{cls.__name__}(...)")
        return value

    return check
