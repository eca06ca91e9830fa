"""Writing batches to a replay buffer: TorchRL's, or any object with ``extend`` or ``add``."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.episodes.segment import MASK, take, time_last, written
from muster.errors import BadOption

if TYPE_CHECKING:
    from tensordict import TensorDict


class ReplaySink:
    """Writes batches to ``buffer``, in the thread that collects. The buffer's errors are raised unchanged.

    Batches are views of lent memory. A buffer that copies (``LazyTensorStorage``, ``LazyMemmapStorage``) releases it
    at once; a buffer that keeps references (a list) releases it when it drops them.

    Args:
        buffer: object with ``extend(batch)`` or ``add(transition)``.
        extend: False: use ``add`` even if there is an ``extend``.

    Raises:
        BadOption: the buffer does not have the method.
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
        self._dims: int | None = None  # number of leading dimensions of the buffer's items; 0: items are whole batches
        self._left: tuple[TensorDict, deque[TensorDict]] | None = None  # a batch, and its transitions still to be added
        self._added = 0  # number of its other transitions

    def write(self, batch: TensorDict) -> None:
        """Write ``[*lead, T]``.

        The ``extend`` of a TorchRL buffer gets one item per transition, ``[transitions]``: environment by environment,
        each in order of time, without blank rows. A storage with ``ndim=2`` gets ``[environments, T]``. Padded
        trajectories (``traj_format="pad"``, ``split_trajs``) stay one item each. The ``extend`` of any other
        buffer gets the batch unchanged.

        ``add`` gets one transition at a time (a copy, shape ``[]``), in the same order. After an error of ``add``,
        writing the same batch again continues with the transition that failed.
        """
        if self._extends:
            self.buffer.extend(self._items(batch))
            return
        if self._left is None or self._left[0] is not batch:
            self.continue_with(batch, 0)
        assert self._left is not None
        while left := self._left[1]:
            self.buffer.add(left[0])
            left.popleft()
            self._added += 1
        self._left = None

    def added(self, batch: Any) -> int:
        """Return the number of transitions of this batch that were added before an error of ``add``."""
        return self._added if self._left is not None and self._left[0] is batch else 0

    def continue_with(self, batch: TensorDict, added: int) -> None:
        """Let ``write`` add only those transitions of this batch that come after the first ``added``."""
        ordered = time_last(batch)
        rows = np.flatnonzero(written(ordered))[added:]
        self._left = batch, deque(take(ordered, rows).unbind(0) if len(rows) else ())
        self._added = added

    def _items(self, batch: TensorDict) -> TensorDict:
        """Return the batch in the shape that the buffer stores."""
        if self._dims is None:
            self._dims = _item_dims(self.buffer)
        names = getattr(batch, "names", None) or ()  # a postproc may return any object
        if "time" not in names or batch.get(MASK, None) is not None or not 0 < self._dims < batch.ndim:
            return batch
        ordered = time_last(batch)
        if self._dims > 1:
            return ordered.reshape(-1, *ordered.shape[1 - self._dims :])
        used = written(ordered)
        return ordered.reshape(-1) if used.all() else take(ordered, np.flatnonzero(used))


def _item_dims(buffer: Any) -> int:
    """Return the number of batch dimensions that index a TorchRL buffer's storage (also in a Ray actor); else 0."""
    if not hasattr(buffer, "dim_extend"):
        return 0
    len(buffer)  # initialises a lazy buffer
    dims = (buffer.dim_extend or 0) + 1
    if hasattr(type(buffer), "storage") and getattr(buffer, "service_backend", "direct") == "direct":
        dims = max(dims, buffer.storage.ndim)
    return int(dims)
