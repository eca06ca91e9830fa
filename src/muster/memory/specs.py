"""Specs of arrays (shape, dtype, bounds), and the columns that store them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from muster.keys import Key

Array = NDArray[Any]

OBJECT = np.dtype(object)


@dataclass(frozen=True, eq=False)
class ArraySpec:
    """One leaf of an observation or action, for one environment.

    ``dtype`` is ``object`` for values without a fixed shape (text, sequences, graphs); such leaves
    are stored as Python objects. ``ragged``: these objects are tensors or TensorDicts of varying
    shape. ``low`` and ``high`` are inclusive bounds, ``None`` if unbounded. ``one_hot``: the value
    consists of one-hot vectors of these sizes, one after another in the last dimension; empty: it
    does not. ``inner``: number of leading dimensions of the shape that belong to the nested
    TensorDict of the leaf (agents, for instance), besides the batch dimensions.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: Array | None = None
    high: Array | None = None
    one_hot: tuple[int, ...] = ()
    ragged: bool = False
    inner: int = 0

    @property
    def is_tensor(self) -> bool:
        return self.dtype != OBJECT

    @property
    def is_discrete(self) -> bool:
        """Whether the value is a choice, or several: bounded integers or flags."""
        return (
            self.dtype.kind in "iub" and self.low is not None and self.high is not None
        )

    def stored_as(self, dtype: np.dtype[Any]) -> ArraySpec:
        """Return the same leaf in another floating dtype; itself if its dtype is not floating."""
        if self.dtype.kind != "f" or self.dtype == dtype:
            return self
        with np.errstate(over="ignore"):
            low, high = (
                None if bound is None else bound.astype(dtype)
                for bound in (self.low, self.high)
            )
        return replace(self, dtype=dtype, low=low, high=high)

    def __str__(self) -> str:
        return f"shape {self.shape}, dtype {self.dtype}"


Specs = dict[Key, ArraySpec]


def choices_of(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of choices and the first choice of each variable of a bounded integer
    space.

    A one-hot vector is one variable with a choice for each entry, numbered from 0.
    """
    if spec.one_hot:
        nvec = spec.one_hot * math.prod(spec.shape[:-1])
        return nvec, (0,) * len(nvec)
    assert spec.low is not None and spec.high is not None
    low, high = (
        np.broadcast_to(np.asarray(x, np.int64), spec.shape).reshape(-1)
        for x in (spec.low, spec.high)
    )
    return tuple((high - low + 1).tolist()), tuple(low.tolist())


MOST_SHOWN = 10**9  # larger products of choices are not written out in messages


def is_joint_mask(nvec: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether an action mask has an entry for each combination of choices, not for each
    choice.

    Args:
        nvec: numbers of choices of the action's variables.
        shape: shape of the mask, without batch dimensions. A mask with ``sum(nvec)`` entries has an
            entry for each choice of each variable, one variable after another; with ``prod(nvec)``
            entries it has one for each combination, in C order. If both are the same number, a mask
            of the shape ``nvec`` is joint, and one of the shape ``(1, sum(nvec))`` is not.

    Raises:
        ValueError: the number of entries is neither, or does not tell; the message is the end of
            "action mask with".
    """
    entries, each, joint = math.prod(shape), sum(nvec), math.prod(nvec)
    variables = (
        f"the action has {len(nvec)} variables with {nvec if len(nvec) <= 8 else f'{nvec[:8]}...'}"
        " choices"
    )
    if entries not in (each, joint):
        got = f"shape {shape} has {entries} entries"
        if len(nvec) == 1:
            raise ValueError(
                f"{got}, but the action has {each} choices: expected {each} entries, one for each"
                " choice"
            )
        combinations = f"{joint}" if joint <= MOST_SHOWN else "the product of these"
        raise ValueError(
            f"{got}, but {variables}: expected {each} entries (one for each choice of each"
            f" variable, one variable after another) or {combinations} (one for each combination of"
            " choices)"
        )
    if each != joint:
        return entries == joint
    if len(nvec) == 1 or shape == (1, each):
        return False
    if shape == nvec:
        return True
    raise ValueError(
        f"shape {shape} has {entries} entries, and {variables}: this can be one entry for each"
        " choice of each variable, or one for each combination of choices. Give it the shape (1,"
        f" {each}) for the former, {nvec} for the latter"
    )


Role = Literal["observation", "action", "reward"]


@dataclass(frozen=True)
class Column:
    """One named array of a rollout: ``[T, B, *shape]``, or ``[T + 1, B, *shape]`` with ``carry``.

    A carried column (observations, recurrent states) has one row more than the rollout has steps:
    row ``t`` is the policy's input at step ``t``, row ``T`` its next input.
    ``trailing``: the user's view has TorchRL's trailing dimension (flags and rewards).
    ``hidden``: the column is not in that view. ``host``: Muster's bookkeeping, which also has an
    array in host memory if the slot is on another device. ``ragged`` and ``inner``: see
    ``ArraySpec``. ``by_policy``: a recurrent state that the environment declares, too; the
    environment writes it at resets only. ``role``: what it is to a learner, whatever its key.
    ``ended_by``: of rewards of agents that end one by one, the column that says where they have.
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
    role: Role | None = None
    ended_by: Key | None = None

    @property
    def is_tensor(self) -> bool:
        return self.dtype != OBJECT
