"""The shape in which a TorchRL buffer stores batches, and which batches fit into it.

A storage with ``ndim=n`` indexes its items by n dimensions of a batch: by environment and time for
``ndim=2``. Storages that allocate all items at the first write (``LazyTensorStorage`` and its
subclasses) need the same shape of all later batches, apart from the dimension along which they
grow: ``dim_extend``, which is time. TorchRL notices a batch of another shape only after it has
counted its items, and leaves items into which nothing was written. So ``problem`` looks first.
"""

from __future__ import annotations

from typing import Any

import torch

from muster.episodes.segment import MASK


def leading_dims(buffer: Any) -> int:
    """Return the number of batch dimensions that index the items of a TorchRL buffer in this
    process.

    It is at least 1, as far as a buffer that makes its storage later shows it; 0 for buffers of
    other kinds, and for those in other processes.
    """
    storage = _storage(buffer)
    if storage is None:
        return 0
    return max((buffer.dim_extend or 0) + 1, int(getattr(storage, "ndim", 1)))


class StoredItems:
    """What a buffer expects of batches.

    Attributes:
        dims: number of the batch's leading dimensions that index items; 0: the buffer is not
            TorchRL's, and an item is a batch.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.dims = self._grows = 0  # dimension along which the buffer grows
        if hasattr(buffer, "dim_extend"):
            len(buffer)  # initialises a lazy buffer
            self._grows = int(buffer.dim_extend or 0)
            self.dims = max(leading_dims(buffer), self._grows + 1)
        # shape at one time of the newest batch that was written
        self._last: tuple[int, ...] | None = None

    @property
    def is_certain(self) -> bool:
        """Whether a batch with a problem is an error: the buffer is here, and has no transform of
        its own.
        """
        if _storage(self._buffer) is None:
            return False
        transform = getattr(self._buffer, "transform", None)
        return transform is not None and not len(transform)

    def problem(self, batch: Any) -> str:
        """Return why a batch does not fit, and what to change; "" if it fits, as far as can be
        known.
        """
        shape = getattr(batch, "batch_size", None)  # a postproc may return any object
        if shape is None or not self.dims:
            return ""
        if len(shape) < self.dims:
            return _too_flat(list(shape), self.dims)
        found = self._at_one_time(shape)
        if (
            found == self._last
        ):  # the storage is not asked for every batch, which takes some 40 us
            return ""
        allocated = self._allocated()
        expected = None if allocated is None else tuple(allocated.batch_size)
        # in another process: the newest batch that it took shows its shape
        if _storage(self._buffer) is None:
            expected = self._last
        if expected not in (None, found):
            is_padded = batch.get(MASK, None) is not None
            return _of_other_shape(
                self._in_order(expected or ()), list(shape), is_padded=is_padded
            )
        return "" if allocated is None else _of_other_columns(allocated, batch)

    def wrote(self, batch: Any) -> None:
        """Remember a batch that the buffer has taken."""
        shape = getattr(batch, "batch_size", ())
        if len(shape) >= self.dims > 0:
            self._last = self._at_one_time(shape)

    def _at_one_time(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a batch at one time, in the order of a storage: the buffer swaps time
        and the first.
        """
        sizes = list(shape)
        sizes[self._grows] = sizes[0]
        return tuple(sizes[1:])

    def _in_order(self, at_one_time: tuple[int, ...]) -> list[Any]:
        """Return the shape of a batch, with "any" for the dimension along which the buffer grows."""
        sizes: list[Any] = ["any", *at_one_time]
        sizes[0], sizes[self._grows] = sizes[self._grows], sizes[0]
        return sizes

    def _allocated(self) -> Any:
        """Return the items at one time, a TensorDict; None: they are not allocated yet, or may
        differ in shape.
        """
        storage = _storage(self._buffer)
        if not getattr(
            storage, "initialized", False
        ):  # a list of items has no such attribute
            return None
        items = storage[0]
        return items if hasattr(items, "batch_size") else None


def _storage(buffer: Any) -> Any:
    """Return the storage of a TorchRL buffer; None for one in another process (a Ray actor), and
    other buffers.
    """
    kind = type(buffer)
    if not (hasattr(kind, "dim_extend") and hasattr(kind, "storage")):
        return None
    if getattr(buffer, "service_backend", "direct") != "direct":
        return None
    return buffer.storage


def _too_flat(shape: list[int], dims: int) -> str:
    names = {2: "[environments, T]", 3: "[groups, environments, T]"}
    expected = names.get(dims, f"of {dims} dimensions")
    remedy = f"Use ndim={len(shape)}"
    if len(shape) == 1:
        remedy += (
            ", or collect batches that have a dimension for environments: pass num_envs (num_envs=1"
            " for one), and use neither trajs_per_batch nor collect(n_episode=), whose episodes"
            " follow one another in one dimension"
        )
    return (
        f"The replay buffer stores batches {expected} (ndim={dims} of its storage, or its"
        f" dim_extend), and this one is {shape}. {remedy}."
    )


def _of_other_columns(allocated: Any, batch: Any) -> str:
    """Compare the columns' shapes."""
    lead = len(batch.batch_size)
    before = len(allocated.batch_size)
    for key, column in batch.items(include_nested=True, leaves_only=True):
        stored = allocated.get(key, None)
        if not (torch.is_tensor(stored) and torch.is_tensor(column)):
            continue
        expected = list(stored.shape[before:])
        found = list(column.shape[lead:])
        if expected != found:
            return (
                f"The storage of the replay buffer has allocated {key!r} with shape {expected} per"
                f" item, and in this batch it has {found}. Use a buffer for each kind of"
                " environment."
            )
    return ""


def _of_other_shape(expected: list[Any], shape: list[int], *, is_padded: bool) -> str:
    remedy = "Use a buffer for each shape, or a ListStorage"
    if is_padded:
        remedy = (
            "Trajectories are padded to the longest of their batch, so shapes differ between"
            " batches. Use a ListStorage or a LazyStackStorage, which keep a trajectory of any"
            " length per item; or an item per frame (ndim=1, without split_trajs and"
            " traj_format='pad'); or pad all to one shape in postproc"
        )
    stored = ", ".join(map(str, expected))
    return (
        f"The storage of the replay buffer has allocated its items for batches [{stored}], and this"
        f" one is {shape}. {remedy}."
    )
