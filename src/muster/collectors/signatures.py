"""Signatures made from a dataclass of options, so that every parameter is declared once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import indent
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args, get_type_hints

from muster.errors import UnknownOption
from muster.utils.tracebacks import trimmed

P = ParamSpec("P")
Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# arguments that would have no effect here
OF_TORCHRL = ("local_init_rb", "no_cuda_sync", "use_buffers")
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes(
    options: Callable[P, Options],
) -> Callable[
    [Callable[[Any, Options], Result]], Callable[Concatenate[Any, P], Result]
]:
    """Decorate a method that takes checked options, so that it takes the fields of the dataclass
    instead.

    ``help()``, ``inspect.signature`` and type checkers show these fields as its parameters.
    """
    shown = inspect.Signature([_SELF, *parameters(options)])

    def decorate(
        method: Callable[[Any, Options], Result],
    ) -> Callable[Concatenate[Any, P], Result]:
        def made(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            with trimmed:
                try:
                    given = options(*args, **kwargs)
                except TypeError as error:
                    problem = error
                else:
                    return method(self, given)
                check_names(shown, kwargs)
                # raises an error that does not mention the dataclass
                shown.bind(self, *args, **kwargs)
                raise problem

        functools.update_wrapper(made, method)
        meanings = [*documented(options).values(), *_details(options)]
        _show(made, shown, "Args:", meanings)
        return made

    return decorate


def passes_on(
    *options: Callable[..., Any], names: Sequence[str] | None = None
) -> Callable[[Function], Function]:
    """Decorate a function that passes on its ``**options``, so that its signature and help show
    fields of dataclasses.

    Args:
        *options: the dataclasses. A field that several have is that of the last one.
        names: names of the fields. None: all.
    """
    fields = {
        p.name: p for each in options for p in parameters(each) if p.kind is _KEYWORD
    }
    if unknown := sorted(set(names or ()) - fields.keys()):
        raise AttributeError(f"there are no options {', '.join(unknown)}")
    more = [p for p in fields.values() if names is None or p.name in names]

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        before = [
            p
            for p in own.parameters.values()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shown = own.replace(
            parameters=[*before, *(p for p in more if p.name not in own.parameters)]
        )

        def checked(*args: Any, **kwargs: Any) -> Any:
            with trimmed:
                check_names(shown, kwargs)
                return function(*args, **kwargs)

        functools.update_wrapper(checked, function)
        passed = {p.name for p in more} - own.parameters.keys()
        entries = {
            names: entry
            for each in options
            for names, entry in documented(each).items()
        }
        meanings = [
            entry
            for names, entry in entries.items()
            if not passed.isdisjoint(names.split(", "))
        ]
        _show(checked, shown, "Args passed on:", meanings)
        return cast(Function, checked)

    return decorate


def _show(
    function: Callable[..., Any],
    signature: inspect.Signature,
    title: str,
    meanings: Sequence[str],
) -> None:
    """Let ``help()`` and ``inspect.signature`` show this signature, and the parameters' meanings."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    if meanings:
        own_text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = "\n".join([own_text, "", title, *meanings])


def parameters(options: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of the dataclass, with resolved types and with default values in place
    of factories.

    Those named in ``SHOWN_ORDER`` of the dataclass come first, in this order.
    """
    hints = get_type_hints(options)
    found = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(options).parameters.values()
    ]
    made = {
        f.name: f.default_factory
        for f in dataclasses.fields(cast(Any, options))
        if callable(f.default_factory)
    }
    found = [p.replace(default=made[p.name]()) if p.name in made else p for p in found]
    order = getattr(options, "SHOWN_ORDER", ())
    if unknown := sorted(set(order) - hints.keys()):
        raise AttributeError(f"SHOWN_ORDER has no options {', '.join(unknown)}")
    places = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda p: (p.kind, places.get(p.name, len(places))))


def _details(options: Callable[..., Any]) -> Iterator[str]:
    """Yield the documentation of dataclasses that are values of options."""
    for p in parameters(options):
        for cls in get_args(p.annotation) or [p.annotation]:
            if isinstance(cls, type) and dataclasses.is_dataclass(cls):
                yield f"\n    ``muster.{cls.__name__}``, for {p.name}:"
                yield from (
                    indent(entry, 4 * " ") for entry in documented(cls).values()
                )


def check_names(signature: inspect.Signature, given: Iterable[str]) -> None:
    """Raise ``UnknownOption`` for an unknown keyword; the message names the most similar one."""
    known = [p.name for p in signature.parameters.values() if p.name != "self"]
    for name in given:
        if name in OF_TORCHRL and name not in known:
            raise UnknownOption(
                f"unknown option {name!r}: it has no effect in Muster, so leave it out. Only the"
                " collectors of muster.compat.torchrl accept it."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known options are {', '.join(known)}."
            )
            raise UnknownOption(f"unknown option {name!r}; {hint}")


def documented(options: Any) -> dict[str, str]:
    """Return the entries under ``Attributes:`` of a dataclass and its bases, by name (or names)."""
    found: dict[str, str] = {}
    for cls in reversed(
        [cls for cls in options.__mro__ if dataclasses.is_dataclass(cls)]
    ):
        text = (
            inspect.cleandoc(cls.__doc__ or "")
            .partition("Attributes:\n")[2]
            .partition("\n\n")[0]
        )
        for entry in re.findall(r"^    \w.*(?:\n     .*)*", text, re.MULTILINE):
            found[entry.partition(":")[0].strip()] = entry
    return found
