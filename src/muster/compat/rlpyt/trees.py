"""rlpyt's nested buffers, used by their ``_fields`` and indexing only, and their conversion to
Muster's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from muster.envs.checks import NUMBERS, described_value
from muster.errors import text_of
from muster.keys import Key, dotted
from muster.memory.specs import Array, ArraySpec, Specs


class Fit(Enum):
    """Whether the values of one dtype can be stored in another one."""

    ALWAYS = "always"
    SOME = "some"
    NEVER = "never"


@lru_cache(maxsize=256)
def fit(source: Any, target: Any) -> Fit:
    """Return whether a dtype can hold the values of another one. Digits of floats may be lost.

    Of ``float32`` and larger, no value is looked at: only numbers above 3e38 do not fit.
    """
    if not np.can_cast(source, target, "same_kind"):
        return Fit.NEVER
    if np.can_cast(source, target):
        return Fit.ALWAYS
    if target.kind in "fc" and target.itemsize >= 4:
        return Fit.ALWAYS
    return Fit.SOME


def first_lost(array: Array, target: Any) -> Any:
    """Return the first value that another dtype cannot hold; None: there is none."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(target)
    lost = cast != array
    if target.kind in "fc":
        lost = np.isfinite(array) & ~np.isfinite(cast)
    if not lost.any():
        return None
    return array[lost].reshape(-1)[0]


def leaves(tree: Any, root: Key = ()) -> dict[Key, Any]:
    """The arrays of a namedarraytuple, namedtuple or dict; ``tree`` itself if it is an array; none
    of None and ().
    """
    if tree is None or (isinstance(tree, tuple) and not tree):
        return {}
    fields = getattr(tree, "_fields", None)
    if fields is not None:
        parts = {name: getattr(tree, name) for name in fields}
    elif isinstance(tree, Mapping):
        parts = dict(tree)
    else:
        return {root: tree}
    return {
        key: leaf
        for name, part in parts.items()
        for key, leaf in leaves(part, (*root, str(name))).items()
    }


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with ``function`` applied to its leaves."""
    source = map(function, leaves(tree).values())
    return _rebuilt(tree, source)


class BufferPart:
    """One of rlpyt's buffers (or an example of its content) as columns whose keys begin with
    ``root``.

    ``lead`` is the number of time and environment dimensions of its leaves; ``specs`` are those of
    one environment.
    """

    def __init__(self, tree: Any, root: Key, lead: int) -> None:
        self.tree = tree
        self.root = root
        arrays = {key: as_array(leaf) for key, leaf in leaves(tree, root).items()}
        self.specs: Specs = {
            key: ArraySpec(array.shape[lead:], array.dtype)
            for key, array in arrays.items()
        }
        flat = all(len(key) == len(root) + 1 for key in arrays)
        self._fields = tuple(key[-1] for key in arrays) if flat else None
        self._numbers: set[tuple[Key, type]] = (
            set()
        )  # types of numbers known to fit, by column

    def over(self, columns: Mapping[Key, Any], root: Key | None = None) -> Any:
        """Return the columns (below ``root``) as a tree like the buffer, whose ``[t]`` and ``[t,
        b]`` are rows.
        """
        base = root or self.root
        return _rebuilt(
            self.tree, (columns[base + key[len(self.root) :]] for key in self.specs)
        )

    def write(
        self,
        columns: Mapping[Key, Array],
        at: Any,
        value: Any,
        *,
        lead: tuple[int, ...] = (),
        partial: bool = False,
    ) -> str | None:
        """Copy ``value`` (leaves ``[*lead, *shape]``) to rows or entries ``at``; ``partial``:
        leaves may be missing.

        Returns the problem as the end of a sentence about the value; None if it was copied.
        """
        spec = self.specs.get(self.root)
        if (
            spec
            and type(value) is np.ndarray
            and value.dtype == spec.dtype
            and value.shape == lead + spec.shape
        ):
            columns[self.root][at] = value
            return None
        found = self._leaves(value)
        if found.keys() != self.specs.keys():
            unknown, missing = (
                found.keys() - self.specs.keys(),
                self.specs.keys() - found.keys(),
            )
            if unknown:
                return (
                    f"has {_names(unknown)}, for which there is no buffer (there are"
                    f" {_names(self.specs.keys())})"
                )
            if not partial:
                return f"lacks {_names(missing)}"
        for key, leaf in found.items():
            if not lead and (key, type(leaf)) in self._numbers:
                columns[key][at] = leaf
                continue
            spec = self.specs[key]
            try:
                array = as_array(leaf)
            except (TypeError, ValueError, RuntimeError) as error:
                return (
                    f"has {dotted(key)} {described_value(leaf)}, which is no array:"
                    f" {text_of(error)}"
                )
            if array.shape != lead + spec.shape:
                return (
                    f"has {dotted(key)} of shape {array.shape}, and its buffer is for"
                    f" {lead + spec.shape}"
                )
            fits = fit(array.dtype, spec.dtype)
            if fits is Fit.NEVER:
                return f"has {dotted(key)} of dtype {array.dtype}, and its buffer is {spec.dtype}"
            if fits is Fit.SOME:
                lost = first_lost(array, spec.dtype)
                if lost is not None:
                    return (
                        f"has {dotted(key)} with the value {lost}, which its buffer of"
                        f" {spec.dtype} cannot hold"
                    )
            columns[key][at] = array
            if fits is Fit.ALWAYS and isinstance(leaf, (bool, int, float, np.generic)):
                self._numbers.add((key, type(leaf)))
        return None

    def _leaves(self, value: Any) -> dict[Key, Any]:
        """Like ``leaves``, but faster for trees of one level."""
        if getattr(value, "_fields", False) != self._fields:
            return leaves(value, self.root)
        return {
            key: leaf
            for key, leaf in zip(self.specs, value, strict=True)
            if leaf is not None
        }


def example_problem(tree: Any) -> str | None:
    """Return why a tree is no example of observations or actions, as the end of a sentence about
    it; None: it is one.
    """
    found = leaves(tree)
    if not found:
        return f"is {described_value(tree)}, expected arrays or numbers"
    for key, leaf in found.items():
        name = dotted(key) or "it"
        try:
            array = as_array(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"is no array: {name} is {described_value(leaf)} ({text_of(error)})"
        if array.dtype.kind not in NUMBERS:
            return f"has no numbers: {name} is {described_value(leaf)}"
    return None


def overwrite_problem(target: Any, source: Any) -> str | None:
    """Return why ``overwrite`` cannot copy ``source``, as the end of a sentence about it; None: it
    can.
    """
    places = leaves(target)
    found = leaves(source)
    if found.keys() != places.keys():
        return f"has {_names(found.keys())}, expected {_names(places.keys())}"
    for key, place in places.items():
        leaf = found[key]
        shape = np.shape(leaf)
        if shape != place.shape:
            return f"has {dotted(key)} of shape {shape}, expected {place.shape}"
        dtype = as_array(leaf).dtype
        if fit(dtype, place.dtype) is not Fit.ALWAYS:
            return f"has {dotted(key)} of dtype {dtype}, expected {place.dtype}"
    return None


def overwrite(target: Any, source: Any, which: Any = ...) -> None:
    """Copy the environments ``which`` of one tree into another."""
    for place, leaf in zip(
        leaves(target).values(), leaves(source).values(), strict=True
    ):
        place[which] = as_array(leaf)[which]


def as_array(leaf: Any) -> Array:
    """Convert a tensor (on any device, with or without gradients), array or number to an array;
    avoids copies.
    """
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)


def _names(keys: Set[Key]) -> str:
    return ", ".join(sorted(map(dotted, keys))) or "nothing"


def _rebuilt(template: Any, source: Iterator[Any]) -> Any:
    if template is None:
        return None
    fields = getattr(template, "_fields", None)
    if fields is not None:
        return template._make(
            [_rebuilt(getattr(template, name), source) for name in fields]
        )
    if isinstance(template, Mapping):
        return {name: _rebuilt(part, source) for name, part in template.items()}
    return next(source)
