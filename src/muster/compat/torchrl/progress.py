"""How far a collector is: the numbers that TorchRL 0.15 has in ``stats()``.

``stepped_frames``: steps of the environments. ``completed_frames`` and ``completed_trajectories``:
frames and number of the episodes that have ended. ``pending_frames``: frames of trajectories that
have not ended, where whole ones are assembled. ``written_frames``: frames in the replay buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NAMES = (
    "stepped_frames",
    "completed_frames",
    "completed_trajectories",
    "pending_frames",
    "written_frames",
)


class Written:
    """The frames that the replay buffer of a collector has got.

    Frames go there directly, or are handed to the assembly of trajectories, which writes them when
    their trajectory has ended, or drops them.
    """

    def __init__(self) -> None:
        self._given = 0

    def give(self, frames: int) -> None:
        """Note frames that were written, or handed over."""
        self._given += frames

    def drop(self, frames: int) -> None:
        """Note frames of trajectories that will not be written."""
        self._given -= frames

    def count(self, pending: int) -> int:
        """Return the number of frames in the buffer.

        Args:
            pending: frames of trajectories that have not ended.
        """
        return self._given - pending


class SharedProgress:
    """The numbers of all workers, which they write and the main process reads.

    Args:
        workers: number of workers.
    """

    def __init__(self, workers: int) -> None:
        rows = torch.zeros((workers, len(NAMES)), dtype=torch.int64, device="cpu")
        self._rows: torch.Tensor = rows.share_memory_()  # type: ignore[no-untyped-call]

    def write(self, worker: int, numbers: Sequence[int]) -> None:
        """Replace the numbers of a worker."""
        self._rows[worker].copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def total(self) -> dict[str, int]:
        """Return the sums over all workers."""
        sums: list[int] = self._rows.sum(0).tolist()
        return dict(zip(NAMES, sums, strict=True))


def pending_frames(assembly: Any) -> int:
    """Return the number of frames of trajectories that have not ended.

    Args:
        assembly: TorchRL's parts of trajectories by id, and trajectories that have ended; None:
            trajectories are not assembled.
    """
    if assembly is None:
        return 0
    return sum(
        len(part) for parts in list(assembly[0].values()) for part in list(parts)
    )
