"""Writing values into one row of several columns at once: on a device, each copy of its own takes as
long as a layer of a small network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from muster.utils.private_names import usable

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

Rows = Sequence["torch.Tensor"]
Values = Sequence["torch.Tensor"]
Write = Callable[[int, Values], None]
Copy = Callable[[list["torch.Tensor"], list["torch.Tensor"]], Any]


def joint_rows(columns: Sequence[tuple[Rows, int]]) -> Write:
    """Return ``write(t, values)``, which writes a value for each of the columns.

    Columns of one dtype are written by one operation.

    Args:
        columns: the rows of each column, and the number that is added to ``t`` for it: 1 for the
            next row.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for place, (rows, _) in enumerate(columns):
        groups.setdefault(rows[0].dtype, []).append(place)
    copy = copier()
    singles: list[tuple[int, Rows, int]] = []
    joint: list[tuple[list[int], list[list[torch.Tensor]]]] = []
    for places in groups.values():
        if len(places) == 1:
            rows, later = columns[places[0]]
            singles.append((places[0], rows, later))
            continue
        together = [columns[place] for place in places]
        steps = min(len(rows) - later for rows, later in together)
        targets = []
        for t in range(steps):
            targets.append([rows[t + later] for rows, later in together])
        joint.append((places, targets))

    def write(t: int, values: Values) -> None:
        for place, rows, later in singles:
            rows[t + later].copy_(values[place])
        for places, targets in joint:
            copy(targets[t], [values[place] for place in places])

    return write


@cache
def copier() -> Copy:
    """Return the function that copies a list of tensors into others."""
    if usable("torch", (torch, ("_foreach_copy_",))):
        copy: Copy = torch._foreach_copy_
        return copy
    return _copy_each


def _copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
