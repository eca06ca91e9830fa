"""Specs of arrays (shape, dtype, bounds), and the columns that store them."""

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

    ``dtype`` is ``object`` for values without a fixed shape (text, sequences, graphs); such leaves
    are stored as Python objects. ``ragged``: these objects are tensors or TensorDicts of varying shape.
    ``low`` and ``high`` are inclusive bounds, ``None`` if unbounded. ``one_hot``: exactly one entry is 1.
    ``inner``: number of leading dimensions of the shape that belong to the nested TensorDict of the leaf
    (agents, for instance), besides the batch dimensions.
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
        """Return the same leaf in another floating dtype; itself if its dtype is not floating."""
        if self.dtype.kind != "f" or self.dtype == dtype:
            return self
        with np.errstate(over="ignore"):
            low, high = (None if bound is None else bound.astype(dtype) for bound in (self.low, self.high))
        return replace(self, dtype=dtype, low=low, high=high)

    def __str__(self) -> str:
        return f"shape {self.shape}, dtype {self.dtype}"


Specs = dict[Key, ArraySpec]


def choices_of(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of choices and the first choice of each variable of a bounded integer space."""
    assert spec.low is not None and spec.high is not None
    low, high = (np.broadcast_to(np.asarray(x, np.int64), spec.shape).reshape(-1) for x in (spec.low, spec.high))
    return tuple((high - low + 1).tolist()), tuple(low.tolist())


@dataclass(frozen=True)
class Column:
    """One named array of a rollout: ``[T, B, *shape]``, or ``[T + 1, B, *shape]`` with ``carry``.

    A carried column (observations, recurrent states) has one row more than the rollout has steps:
    row ``t`` is the policy's input at step ``t``, row ``T`` its next input.
    ``trailing``: the user's view has TorchRL's trailing dimension (flags and rewards).
    ``hidden``: the column is not in that view. ``host``: Muster's bookkeeping, which also has an array
    in host memory if the slot is on another device. ``ragged`` and ``inner``: see ``ArraySpec``.
    ``by_policy``: a recurrent state that the environment declares, too; the environment writes it at resets only.
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
