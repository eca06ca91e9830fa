"""The shape in which a TorchRL buffer stores batches, and which batches fit into it.

A storage with ``ndim=n`` indexes its items by n dimensions of a batch: by environment and time for
``ndim=2``. Storages that allocate all items at the first write (``LazyTensorStorage`` and its
subclasses) need the same shape of all later batches, apart from the dimension along which they
grow: ``dim_extend``, which is time. TorchRL notices a batch of another shape only after it has
counted its items, and leaves items into which nothing was written. It takes a batch that lacks a
column, and leaves there what was in the memory. So ``problem`` looks first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from muster.keys import MASK

if TYPE_CHECKING:
    from tensordict import TensorDict


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
        # all columns of what was written
        self._columns: frozenset[Any] = frozenset()
        # shape of the newest item that was added by itself
        self._last_item: tuple[int, ...] | None = None

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
        lacking = self._lacking(batch)
        if lacking:
            return lacking
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
            self._columns |= _columns(batch)

    def problem_of_item(self, item: TensorDict) -> str:
        """Return why an item does not fit that is added by itself; see ``problem``."""
        if not self.dims:
            return ""
        found = tuple(item.batch_size)
        allocated = None
        if found != self._last_item:
            allocated = self._allocated()
        if allocated is None:
            return self._lacking(item)
        expected = tuple(allocated.batch_size)
        if expected != found:
            return _of_other_steps(list(expected), list(found))
        return self._lacking(item) or _of_other_columns(allocated, item)

    def wrote_item(self, item: TensorDict) -> None:
        """Remember an item that the buffer has taken."""
        if self.dims:
            self._last_item = tuple(item.batch_size)
            self._columns |= _columns(item)

    def _lacking(self, batch: Any) -> str:
        """Return a sentence about columns that earlier batches had and this one has not, whose items
        would keep what was in the memory before; "": there are none.
        """
        missing = self._columns - _columns(batch)
        if not missing or self._allocated() is None:
            return ""
        names = ", ".join(sorted(map(repr, missing)))
        return (
            f"The storage of the replay buffer has the columns {names} of earlier batches, and this"
            " batch has not: the storage would keep other values there. Call collect() with the same"
            " options each time (bootstrap), return the same columns from postproc, or use a buffer"
            " for each kind of batch."
        )

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


def _columns(batch: Any) -> frozenset[Any]:
    return frozenset(batch.keys(include_nested=True, leaves_only=True))


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


def _of_other_steps(expected: list[int], found: list[int]) -> str:
    return (
        "The storage of the replay buffer has allocated its items for time steps"
        f" {expected}, and this one is {found}: with num_envs, iteration adds time steps of all"
        " environments, and collect() adds single transitions. Use one of them, or a buffer for"
        " each, or extend_buffer=True."
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
