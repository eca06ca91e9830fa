"""Shape, dtype and bounds of one array, and what it takes to store it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.keys import Key

Array = NDArray[Any]

OBJECT = np.dtype(object)


@dataclass(frozen=True, eq=False)
class ArraySpec:
    """One leaf of an observation or action, for one environment.

    ``dtype`` is ``object`` for what has no fixed shape (text, sequences, graphs); such leaves
    are kept as Python objects. ``ragged`` says that these are tensors or TensorDicts, of shapes that
    differ. ``low`` and ``high`` are inclusive bounds, ``None`` if unbounded.
    ``one_hot``: exactly one entry is 1. ``inner``: so many leading dimensions of
    the shape belong to the nested TensorDict that the leaf is in, besides the batch's (agents, for instance).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: Array | None = None
    high: Array | None = None
    one_hot: bool = False
    ragged: bool = False
    inner: int = 0

    @property
    def is_tensor(self) -> bool:
        return self.dtype != OBJECT

    def stored_as(self, dtype: np.dtype[Any]) -> ArraySpec:
        """The same leaf in another floating dtype; itself where it is not floating."""
        if self.dtype.kind != "f" or self.dtype == dtype:
            return self
        with np.errstate(over="ignore"):
            low, high = (None if bound is None else bound.astype(dtype) for bound in (self.low, self.high))
        return replace(self, dtype=dtype, low=low, high=high)

    def __str__(self) -> str:
        return f"shape {self.shape}, dtype {self.dtype}"


Specs = dict[Key, ArraySpec]


@dataclass(frozen=True)
class Column:
    """One named array of a rollout: ``[T, B, *shape]``, or ``[T + 1, B, *shape]`` with ``carry``.

    A carried column (observations, recurrent states) has one row more than there are steps:
    row ``t`` is what the policy saw before step ``t``, row ``T`` what it will see next.
    ``trailing`` adds TorchRL's trailing dimension in the user's view (flags and rewards).
    ``hidden`` columns are not in that view; ``host`` columns are Muster's bookkeeping, which also has an array
    in the host's memory where the slot lies on another device. ``ragged`` and ``inner`` are as in ``ArraySpec``.
    ``by_policy``: a recurrent state that the environment declares too; it writes only what the state is after a reset.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    carry: bool = False
    trailing: bool = False
    hidden: bool = False
    host: bool = False
    ragged: bool = False
    by_policy: bool = False
    inner: int = 0

    @property
    def is_tensor(self) -> bool:
        return self.dtype != OBJECT
