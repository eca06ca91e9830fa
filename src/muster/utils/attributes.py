"""Paths into the user's objects (``"policy.module[0].weight"``), their names, and optional imports."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from muster.errors import BadOption, text_of


def resolve(root: Any, path: str) -> Any:
    """Return the object at ``path`` from ``root``: attributes, and subscripts with a literal; else
    ``BadOption``.
    """
    try:
        expression = f"root{path}" if path.startswith("[") else f"root.{path}"
        tree = ast.parse(expression, mode="eval").body
        return _walk(root, tree)
    except (
        SyntaxError,
        AttributeError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ) as error:
        raise BadOption(
            f"the path {path!r} leads nowhere from {type(root).__name__}: {text_of(error)}"
        ) from error


def named(target: str) -> Any:
    """Import the module of ``"module:name"`` and return the object with this name."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def optional(who: str, package: str, extra: str) -> Iterator[None]:
    """Context of imports of an extra of Muster; if missing, raises ``BadOption`` with the command
    to install it.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the import of another module failed
        raise BadOption(
            f"{who} needs {package}, which is not installed: pip install 'muster-rl[{extra}]'."
        ) from error


@functools.cache
def installed(distribution: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def kind_of(thing: Any) -> str:
    """What a user has given, in messages: "of type int", or "the class Linear"."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"of type {type(thing).__name__}"


def name_of(thing: Any) -> str:
    """The name of a user's object in messages.

    Never its ``repr``, which can be long, slow, or raise.
    """
    if isinstance(thing, functools.partial):
        return name_of(thing.func)
    try:
        name = thing.__name__
    except Exception:  # noqa: BLE001  (foreign attributes)
        name = None
    return name if isinstance(name, str) else type(thing).__name__


def _walk(root: Any, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return root
    if isinstance(node, ast.Attribute):
        if node.attr.startswith("__"):
            raise TypeError(f"{node.attr} belongs to Python, and leads to everything")
        return getattr(_walk(root, node.value), node.attr)
    if isinstance(node, ast.Subscript):
        return _walk(root, node.value)[ast.literal_eval(node.slice)]
    raise TypeError("only attributes and subscripts with a literal are followed")
