"""Writing batches to a replay buffer: TorchRL's, or any object with ``extend`` or ``add``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.segment import take, time_last, written
from muster.episodes.stored import StoredItems
from muster.errors import BadOption
from muster.keys import MASK, VALID

if TYPE_CHECKING:
    from tensordict import TensorDict


class ReplaySink:
    """Writes batches to ``buffer``, in the thread that collects.

    The buffer's errors are raised unchanged, except where the shape of the batch is their cause.

    Batches are views of lent memory. A buffer that copies (``LazyTensorStorage``,
    ``LazyMemmapStorage``) releases it at once; a buffer that keeps references (a list) releases it
    when it drops them.

    Args:
        buffer: object with ``extend(batch)`` or ``add(transition)``.
        extend: False: use ``add`` even if there is an ``extend``.

    Raises:
        BadOption: the buffer does not have the method.
    """

    def __init__(self, buffer: Any, *, extend: bool = True) -> None:
        methods = [
            name for name in ("extend", "add") if callable(getattr(buffer, name, None))
        ]
        if isinstance(buffer, type) or not methods:
            what = (
                f"the class {buffer.__name__}"
                if isinstance(buffer, type)
                else f"a {type(buffer).__name__}"
            )
            raise BadOption(
                f"replay_buffer is {what}: expected an object with extend(batch) or add(transition)"
            )
        if not extend and "add" not in methods:
            raise BadOption(
                f"extend_buffer=False needs replay_buffer.add, which {type(buffer).__name__}"
                " has not"
            )
        self.buffer = buffer
        self._extends = extend and "extend" in methods
        self._stored: StoredItems | None = None
        # a batch, and its transitions still to be added
        self._left: tuple[TensorDict, deque[TensorDict]] | None = None
        self._added = 0  # number of its other transitions

    def write(self, batch: TensorDict) -> None:
        """Write ``[*lead, T]``.

        The ``extend`` of a TorchRL buffer gets one item per transition, ``[transitions]``:
        environment by environment, each in order of time, without blank rows. A storage with
        ``ndim=2`` gets ``[environments, T]``, blank cells included, and ``collector/valid`` always
        says which are transitions: a storage keeps what was in its memory for a column that a batch
        does not have. Padded trajectories (``traj_format="pad"``, ``split_trajs``) stay one item
        each. The ``extend`` of any other buffer gets the batch unchanged.

        ``add`` gets one transition at a time (a copy, shape ``[]``), in the same order. After an
        error of ``add``, writing the same batch again continues with the transition that failed.

        Raises:
            BadOption: the batch has another shape or other columns than a TorchRL buffer stores.
                Nothing was written.
        """
        if self._extends:
            self._extend(batch)
            return
        if self._left is None or self._left[0] is not batch:
            self.continue_with(batch, 0)
        assert self._left is not None
        while left := self._left[1]:
            self._add(left[0])
            left.popleft()
            self._added += 1
        self._left = None

    def write_step(self, step: TensorDict) -> None:
        """``add`` one time step of all environments, ``[*lead]``.

        Raises:
            BadOption: see ``write``.
        """
        self._add(_marked(step) if step.ndim else step.exclude(VALID))

    def added(self, batch: Any) -> int:
        """Return the number of transitions of this batch that were added before an error of
        ``add``.
        """
        return self._added if self._left is not None and self._left[0] is batch else 0

    def continue_with(self, batch: TensorDict, added: int) -> None:
        """Let ``write`` add only those transitions of this batch that come after the first
        ``added``.
        """
        ordered = time_last(batch)
        rows = np.flatnonzero(written(ordered))[added:]
        items = take(ordered, rows).exclude(VALID)
        self._left = batch, deque(items.unbind(0) if len(rows) else ())
        self._added = added

    def _extend(self, batch: TensorDict) -> None:
        if self._stored is None:
            self._stored = StoredItems(self.buffer)
        items = self._items(batch, self._stored.dims)
        problem = self._stored.problem(items)
        with self._explained(self._stored, problem):
            self.buffer.extend(items)
        self._stored.wrote(items)

    def _add(self, item: TensorDict) -> None:
        if self._stored is None:
            self._stored = StoredItems(self.buffer)
        problem = self._stored.problem_of_item(item)
        with self._explained(self._stored, problem):
            self.buffer.add(item)
        self._stored.wrote_item(item)

    @staticmethod
    @contextmanager
    def _explained(stored: StoredItems, problem: str) -> Iterator[None]:
        """Raise a problem before the write if it is certain, else instead of the buffer's error."""
        if problem and stored.is_certain:
            raise BadOption(problem)
        try:
            yield
        except Exception as error:
            if not problem:
                raise
            raise BadOption(problem) from error

    def _items(self, batch: TensorDict, dims: int) -> TensorDict:
        """Return the batch in the shape that the buffer stores, indexed by ``dims`` dimensions."""
        names = getattr(batch, "names", None) or ()  # a postproc may return any object
        if (
            "time" not in names
            or batch.get(MASK, None) is not None
            or not 0 < dims <= batch.ndim
        ):
            return batch
        ordered = time_last(batch)
        if dims > 1:
            return _marked(ordered).reshape(-1, *ordered.shape[1 - dims :])
        used = written(ordered)
        if used.all():
            return ordered.reshape(-1).exclude(VALID)
        return take(ordered, np.flatnonzero(used)).exclude(VALID)


def _marked(batch: TensorDict) -> TensorDict:
    """Return a batch in which ``collector/valid`` says which cells are transitions: all, if it has
    no such column.
    """
    if batch.get(VALID, None) is not None:
        return batch
    valid = torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device)
    marked: TensorDict = batch.copy()
    marked.set(VALID, valid)
    return marked
