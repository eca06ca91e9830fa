"""One line per trajectory, padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.errors import BadOption
from muster.keys import Key
from muster.sinks.rows import ENDED, NEVER, find_pieces, padded, time_last

if TYPE_CHECKING:
    from tensordict import TensorDict


def split_trajectories(batch: TensorDict, *, pad_id: int = NEVER, done_key: Key = ENDED) -> TensorDict:
    """The trajectories of a batch (``[*lead, T]``), each on a line of its own.

    A trajectory that goes on in another batch is not joined; ``WholeEpisodes`` does that. Lines are cut where
    the trajectory id changes and after every end, so an id that comes twice gives two lines. Rows that were not
    written (id -1, or ``("collector", "valid")`` False) are on none.

    Args:
        batch: with ``("collector", "traj_ids")``; it is not changed.
        pad_id: trajectory id of the padding; TorchRL's is 0.
        done_key: what says that an episode ended; without such a column only ids count.

    Returns:
        a copy, ``[lines, longest]``, names ``[None, "time"]``: lines by environment (``lead`` flattened), then time;
        zeros on the right (None for objects); ``("collector", "mask")`` (bool) is True for what is not padding.

    Raises:
        BadOption: the batch has no trajectory ids, or not a single row of a trajectory.
    """
    batch = time_last(batch)
    pieces = find_pieces(batch, done_key)
    if not len(pieces.rows):
        raise BadOption(f"no row of this batch ({list(batch.shape)}) was written, so there is nothing to split")
    return padded(batch, pieces.rows, pieces.length, pad_id)
