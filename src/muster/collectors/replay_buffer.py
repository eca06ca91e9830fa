"""Batches into a replay buffer: TorchRL's, or anything with ``extend`` or ``add``."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.episodes.segment import MASK, take, time_last, written
from muster.errors import BadOption

if TYPE_CHECKING:
    from tensordict import TensorDict


class ReplaySink:
    """Writes batches into ``buffer``, which is called in the thread that collects; its errors pass unchanged.

    Batches are views on lent memory: a buffer that copies (``LazyTensorStorage``, ``LazyMemmapStorage``) gives the
    memory back at once, one that keeps references (a list) when it drops them.

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
        self._dims: int | None = None  # leading dimensions of what the buffer takes as items; 0: as they come
        self._left: tuple[TensorDict, deque[TensorDict]] | None = None  # a batch, and what is to be added of it

    def write(self, batch: TensorDict) -> None:
        """Write ``[*lead, T]``.

        A buffer of TorchRL's gets one item per transition: ``extend`` gets ``[transitions]``, environment by
        environment, each in order of time. Rows that an interrupted rollout left over are none. For a storage with
        ``ndim=2`` it is ``[environments, T]``. Trajectories that were padded (``traj_format="pad"``, ``split_trajs``)
        stay one item each. Any other buffer's ``extend`` gets the batch as it is.

        ``add`` gets one transition at a time (a copy, shape ``[]``), in the same order. After an error of ``add``,
        writing the same batch again goes on with the transition that failed.
        """
        if self._extends:
            self.buffer.extend(self._items(batch))
            return
        if self._left is None or self._left[0] is not batch:
            ordered = time_last(batch)
            rows = np.flatnonzero(written(ordered))
            self._left = batch, deque(take(ordered, rows).unbind(0) if len(rows) else ())
        while left := self._left[1]:
            self.buffer.add(left[0])
            left.popleft()
        self._left = None

    def _items(self, batch: TensorDict) -> TensorDict:
        """The batch as the buffer stores it."""
        if self._dims is None:
            self._dims = _item_dims(self.buffer)
        names = getattr(batch, "names", None) or ()  # a postproc may have made anything else of it
        if "time" not in names or batch.get(MASK, None) is not None or not 0 < self._dims < batch.ndim:
            return batch
        ordered = time_last(batch)
        if self._dims > 1:
            return ordered.reshape(-1, *ordered.shape[1 - self._dims :])
        used = written(ordered)
        return ordered.reshape(-1) if used.all() else take(ordered, np.flatnonzero(used))

    def write_frame(self, frame: TensorDict) -> None:
        """Write one time step of all environments (``[*lead]``) with ``add``; for ``extend=False``."""
        self.buffer.add(frame)


def _item_dims(buffer: Any) -> int:
    """How many dimensions of a batch are places in the storage of a TorchRL buffer (also in a Ray actor); else 0."""
    if not hasattr(buffer, "dim_extend"):
        return 0
    len(buffer)  # one that is made lazily is made now
    dims = (buffer.dim_extend or 0) + 1
    if hasattr(type(buffer), "storage") and getattr(buffer, "service_backend", "direct") == "direct":
        dims = max(dims, buffer.storage.ndim)
    return int(dims)


class WrittenElsewhere(ReplaySink):
    """In the place of the sink of a buffer that has got the batches already."""

    def __init__(self) -> None: ...

    def write(self, batch: TensorDict) -> None:
        """Nothing is left to do."""
