"""The rows that a policy reads.

They are the batch itself, so a policy that writes into them is noticed.

A row, and the one before it, are copied before each call of the policy and compared with the copies
afterwards. If they differ, they are restored and ``BadPolicyOutput`` is raised: the batch is right,
and the next call repeats this one. Where torch has counted a write that is in neither, other inputs
are compared and restored, too, as far as their copies are kept. Limits: of rows of more than
``LARGE_BYTES`` only the last copy is kept, and NumPy's writes into them are noticed in one call of
``SAMPLED``. On a device nothing is compared, because the host would have to wait; torch's count is
all there is.

Objects and recurrent states are handed to policies as copies, with which they may do what they
want.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from muster.errors import BadPolicyOutput
from muster.keys import Key, dotted, next_of
from muster.memory.slots import MAX_ROW_VIEWS, Lane
from muster.protocols import Act
from muster.utils.private_names import usable

KEPT_BYTES = 1 << 20  # of the copies of a column
LARGE_BYTES = 1 << 16
SAMPLED = 16
# a column of the lanes of batches only: others have rows of their own
OF_STEPS = next_of(("terminated",))


class InputRows:
    """The rows of a lane that a policy reads.

    Args:
        lane: lane with the rows.
        keys: columns of arrays, which the policy does not write.
        policy: name of the policy in messages.

    Attributes:
        columns: tensors over the lane's columns, ``[rows, B, *shape]``. Only the policy writes into
            them: others use ``lane.tensors``, whose writes torch counts separately.
    """

    def __init__(
        self,
        lane: Lane,
        keys: Sequence[Key],
        policy: str,
    ) -> None:
        self._lane = lane
        self._policy = policy
        self.columns = {key: lane.tensors[key].data for key in keys}
        kind = _DeviceCopies if lane.mirrored else _HostCopies
        self._copies = []
        for key, column in self.columns.items():
            self._copies.append(kind(lane, key, column))
        # rows that the policy has read one after another
        self._first = 0
        self._last = -2

    def rows(self, key: Key) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return the rows of a column for the policy, ``[*batch_shape, *shape]`` each; see
        ``Lane.rows``.
        """
        tensor = self.columns[key]
        lead = self._lane.layout.lead
        if len(lead) != 1:
            tensor = tensor.reshape(len(tensor), *lead, *tensor.shape[2:])
        return tensor.unbind(0) if len(tensor) <= MAX_ROW_VIEWS else tensor

    def watched(self, act: Act) -> Act:
        """Return a function that calls ``act``, and raises ``BadPolicyOutput`` if the policy has
        changed a row.
        """
        every = self._copies
        if not every:
            return act
        if len(every) == 1 and isinstance(every[0], _HostCopies) and every[0].are_small:
            return self._watched_one(act, every[0])

        def act_and_compare(t: int) -> None:
            if t != self._last:
                self._go_on(t)
            for copies in every:
                copies.keep(t)
            try:
                act(t)
            except BaseException:
                self._restore(t)
                raise
            for copies in every:
                if copies.are_suspect(t):
                    self._refuse(t)

        return act_and_compare

    def _watched_one(self, act: Act, copies: _HostCopies) -> Act:
        """The same for one column of small rows, without a call for each part, which takes half of
        the time.
        """
        rows = copies.arrays
        kept = copies.kept
        most = copies.most
        counter = copies.counter

        def act_and_compare(t: int) -> None:
            if t == self._last + 1:
                self._last = t
            elif t != self._last:
                self._go_on(t)
            row = rows[t]
            last = rows[t - 1]
            kept[t] = before = row.tobytes()
            kept[t - 1] = last_before = last.tobytes()
            if t >= most:
                kept[t - most] = None
            try:
                act(t)
            except BaseException:
                self._restore(t)
                raise
            changed = row.tobytes() != before or last.tobytes() != last_before
            if changed or counter._version != copies.seen:
                self._refuse(t)

        return act_and_compare

    def _go_on(self, t: int) -> None:
        """Note that row ``t`` is next: after the last one, or the first of other steps, of which no
        copies are kept.
        """
        if t != self._last + 1:
            self._first = max(0, t - 1)
        self._last = t

    def _restore(self, t: int) -> list[tuple[int, Key]]:
        """Restore the rows that differ from their copies, and return them."""
        restored: list[tuple[int, Key]] = []
        for copies in self._copies:
            restored += [(row, copies.key) for row in copies.restore(self._first, t)]
        return sorted(restored)

    def _refuse(self, t: int) -> None:
        found = self._restore(t)
        if not found:  # it has written the values that were there already
            return
        row, key = found[0]
        raise BadPolicyOutput(changed_text(self._policy, key, self._where(row, t)))

    def _where(self, row: int, t: int) -> str:
        if OF_STEPS not in self._lane.data:
            return ""
        kept = "" if row == t else f" (the input of row {row}, which it has kept)"
        return f" at row {t} of the batch{kept}"


def changed_text(policy: str, key: Key, where: str = "") -> str:
    """Return the message about a policy that has changed an input."""
    return (
        f"policy {policy} changed its input {dotted(key)} in place{where}. That memory is the batch"
        " itself: use operations that return a new tensor (no inplace=True in the first layer, no"
        " `obs -= ...`), or copy it first (`obs = obs.clone()`). The input was restored."
    )


def unchanged_inputs(
    obs: Mapping[Key, Any],
    policy: str,
) -> tuple[dict[Key, Any], Callable[[], None]]:
    """Return copies of the tensors in ``obs`` for a call of the policy, and a function to call
    afterwards.

    The function raises ``BadPolicyOutput`` if the policy has changed a copy.
    """
    given = dict(obs)
    copies = {
        key: value.clone() for key, value in obs.items() if torch.is_tensor(value)
    }
    given.update(copies)

    def check() -> None:
        for key, copy in copies.items():
            if not torch.equal(_bytes(copy), _bytes(obs[key])):
                raise BadPolicyOutput(changed_text(policy, key))

    return given, check


class _HostCopies:
    """Copies of the last rows of a column in host memory.

    Between two calls of the policy, ``on_step`` hooks and environments whose agents take turns
    write into the row of the first: it is copied again before the second.

    Attributes:
        arrays: the rows, as arrays.
        kept: bytes of the rows, by row; of the last ``most``.
        are_small: the rows are small enough to compare them in every call.
        counter: counts the writes into the column, see ``_counter``; ``seen``: number that was
            looked at.
    """

    def __init__(
        self,
        lane: Lane,
        key: Key,
        column: torch.Tensor,
    ) -> None:
        self.key = key
        self.counter = _counter(column)
        self.seen = self.counter._version
        array = lane.arrays[key]
        self.arrays = list(array) if len(array) <= MAX_ROW_VIEWS else array
        self.kept: list[bytes | None] = [None] * len(array)
        row_bytes = max(1, array.nbytes // len(array))
        self.are_small = row_bytes <= LARGE_BYTES
        self.most = max(2, KEPT_BYTES // row_bytes) if self.are_small else 1

    def keep(self, t: int) -> None:
        self.kept[t] = self.arrays[t].tobytes()
        if self.are_small:
            self.kept[t - 1] = self.arrays[t - 1].tobytes()
        if t >= self.most:
            self.kept[t - self.most] = None

    def are_suspect(self, t: int) -> bool:
        if self.counter._version != self.seen:
            return True
        if not self.are_small:
            return t % SAMPLED == 0 and self._is_changed(t)
        return self._is_changed(t) or self._is_changed(t - 1)

    def restore(self, first: int, t: int) -> list[int]:
        """Restore the rows from ``first`` to ``t`` that have changed, and return their numbers."""
        found = [row for row in range(first, t + 1) if self._is_changed(row)]
        for row in found:
            before = self.kept[row]
            array = self.arrays[row]
            assert before is not None
            array[...] = np.frombuffer(before, array.dtype).reshape(array.shape)
        self.seen = self.counter._version
        return found

    def _is_changed(self, row: int) -> bool:
        before = self.kept[row]
        return before is not None and self.arrays[row].tobytes() != before


class _DeviceCopies:
    """A copy of the last row of a column on a device.

    Nothing is compared there: the host would have to wait.
    """

    def __init__(
        self,
        lane: Lane,
        key: Key,
        column: torch.Tensor,
    ) -> None:
        self.key = key
        self._counter = _counter(column)
        self._seen = self._counter._version
        self._rows = lane.tensors[key]
        self._kept = torch.empty_like(self._rows[0])

    def keep(self, t: int) -> None:
        self._kept.copy_(self._rows[t])

    def are_suspect(self, t: int) -> bool:
        return bool(self._counter._version != self._seen)

    def restore(self, first: int, t: int) -> list[int]:
        """Restore row ``t`` if there was a write, and return its number."""
        if not self.are_suspect(t):
            return []
        self._rows[t].copy_(self._kept)
        self._seen = self._counter._version
        return [t]


def _counter(column: torch.Tensor) -> Any:
    """Return an object whose ``_version`` grows with each of torch's writes into a column, or
    always is 0.
    """
    if usable("torch", (column, ("_version",))):
        return column
    return SimpleNamespace(_version=0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
