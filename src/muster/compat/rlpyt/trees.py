"""rlpyt's nested buffers, used by their ``_fields`` and indexing only, and their conversion to
Muster's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from muster.keys import Key, dotted
from muster.memory.specs import Array, ArraySpec, Specs


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
            array, spec = as_array(leaf), self.specs[key]
            if array.shape != lead + spec.shape:
                return (
                    f"has {dotted(key)} of shape {array.shape}, and its buffer is for"
                    f" {lead + spec.shape}"
                )
            if array.dtype != spec.dtype and not np.can_cast(
                array.dtype, spec.dtype, "same_kind"
            ):
                return f"has {dotted(key)} of dtype {array.dtype}, and its buffer is {spec.dtype}"
            columns[key][at] = array
            if isinstance(leaf, (bool, int, float, np.generic)):
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
