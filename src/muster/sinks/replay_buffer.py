"""Batches into a replay buffer: TorchRL's, or anything with ``extend`` or ``add``."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.errors import BadOption
from muster.sinks.rows import take, time_last, written

if TYPE_CHECKING:
    from tensordict import TensorDict


class ReplaySink:
    """Writes batches into ``buffer``, which is called in the thread that collects; its errors pass unchanged.

    What it is given are views on lent memory: a buffer that copies (``LazyTensorStorage``, ``LazyMemmapStorage``) gives
    the memory back at once, one that keeps references (``ListStorage``, a list) when it drops them.

    Args:
        buffer: with ``extend(batch)``, or ``add(transition)``.
        extend: False uses ``add`` also where there is an ``extend``.

    Raises:
        BadOption: the buffer lacks the method.
    """

    def __init__(self, buffer: Any, *, extend: bool = True) -> None:
        methods = [name for name in ("extend", "add") if callable(getattr(buffer, name, None))]
        if isinstance(buffer, type) or not methods:
            what = f"the class {buffer.__name__}" if isinstance(buffer, type) else f"a {type(buffer).__name__}"
            raise BadOption(f"replay_buffer is {what}: expected an object with extend(batch) or add(transition)")
        if not extend and "add" not in methods:
            raise BadOption(f"extend_buffer=False needs replay_buffer.add, which {type(buffer).__name__} has not")
        self.buffer = buffer
        self._extends = extend and "extend" in methods
        self._left: tuple[TensorDict, deque[TensorDict]] | None = None  # a batch, and what is to be added of it

    def write(self, batch: TensorDict) -> None:
        """Write ``[*lead, T]``.

        ``extend`` gets the batch as it is: for TorchRL's one-dimensional storages a ``[B, T]`` batch is B items of
        shape ``[T]``, with ``ndim=2`` it is B * T items. ``add`` gets one transition at a time (a copy, shape
        ``[]``), environment by environment, each in order of time; rows that an interrupted rollout left over are
        none. After an error of ``add``, writing the same batch again goes on with the transition that failed.
        """
        if self._extends:
            self.buffer.extend(batch)
            return
        if self._left is None or self._left[0] is not batch:
            ordered = time_last(batch)
            rows = np.flatnonzero(written(ordered))
            self._left = batch, deque(take(ordered, rows).unbind(0) if len(rows) else ())
        while left := self._left[1]:
            self.buffer.add(left[0])
            left.popleft()
        self._left = None

    def write_frame(self, frame: TensorDict) -> None:
        """Write one time step of all environments (``[*lead]``) with ``add``; for ``extend=False``."""
        self.buffer.add(frame)


class WrittenElsewhere(ReplaySink):
    """In the place of the sink of a buffer that has got the batches already."""

    def __init__(self) -> None: ...

    def write(self, batch: TensorDict) -> None:
        """Nothing is left to do."""
