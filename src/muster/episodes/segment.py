"""The rows of a batch as a flat list (by environment, then time), and the pieces of trajectories in
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from muster.errors import BadOption
from muster.keys import (
    AGENT,
    DONE,
    MASK,
    RESUMED,
    TRAJ_IDS,
    VALID,
    Key,
    dotted,
    next_of,
)
from muster.memory.objects import copied_cells
from muster.memory.specs import Array
from muster.utils.private_names import tensordict_maker

if TYPE_CHECKING:
    from tensordict import TensorDict

ENDED: Key = next_of(DONE)
NEVER = -1  # trajectory id of blank rows


class Pieces(NamedTuple):
    """The pieces of trajectories in a batch, by environment, then time.

    The index of a row is ``env * T + t``.

    ``rows`` are the indices of all rows in pieces. ``first`` (``[n]``) is the place in ``rows`` of
    each piece's first row. ``ended`` (``[n]``) tells whether its last row is done. Where agents
    take turns, the rows of a piece are those of one ``agent`` (``[n]``; else 0), and pieces are by
    environment, then the time of their first row.
    """

    rows: Array
    first: Array
    length: Array
    traj_id: Array
    ended: Array
    agent: Array


def time_last(batch: TensorDict) -> TensorDict:
    """Return a view of ``batch`` with its time dimension (by name, else the last one) as the last
    one.
    """
    names = batch.names
    dims = sorted(range(batch.ndim), key=lambda dim: names[dim] == "time")
    if dims == list(range(batch.ndim)):
        return batch
    return _stacked_outside(batch.permute(*dims))


def written(batch: TensorDict) -> Array:
    """Return a mask of the rows that are transitions, ``[envs, T]`` bool; an interrupted rollout
    has others.
    """
    T = batch.shape[-1]
    envs = math.prod(batch.shape[:-1])
    result = np.ones((envs, T), bool)
    for key in (TRAJ_IDS, VALID):
        column = batch.get(key, None)
        if column is not None:
            values = _host(column).reshape(-1, T)
            if key == TRAJ_IDS:
                values = values != NEVER
            result &= values
    return result


def find_pieces(batch: TensorDict, done_key: Key = ENDED) -> Pieces:
    """Cut ``[*lead, T]`` at every change of trajectory id, after every end, and at blank rows."""
    ids = batch.get(TRAJ_IDS, None)
    if ids is None:
        raise BadOption(
            f"the batch has no {dotted(TRAJ_IDS)}, which say what belongs together:"
            " track_traj_ids=True"
        )
    ids = _host(ids).reshape(-1, batch.shape[-1])
    ended = np.zeros(ids.shape, bool)
    done = batch.get(done_key, None)
    if done is not None:
        of_rows = _host(done).reshape(*ids.shape, -1)
        ended |= of_rows.any(-1)
    usable = written(batch)
    agent = batch.get(AGENT, None)
    if agent is None:
        return cut(ids, usable, ended)
    agents = _host(agent).reshape(ids.shape)
    return _cut_by_agent(ids, usable, ended, agents)


def _cut_by_agent(
    ids: Array,
    usable: Array,
    ended: Array,
    agents: Array,
) -> Pieces:
    """Cut rows as ``cut``, those of each agent by themselves; see ``Pieces``."""
    # the rows of each agent one after another
    order = np.argsort(agents, axis=1, kind="stable")

    def sort(column: Array) -> Array:
        return np.take_along_axis(column, order, 1)

    pieces = cut(sort(ids), sort(usable), sort(ended))
    begin = pieces.rows[pieces.first]
    agent = sort(agents).reshape(-1)[begin]
    envs, T = order.shape
    place = order + np.arange(envs)[:, None] * T
    rows = place.reshape(-1)[pieces.rows]
    in_time = np.argsort(rows[pieces.first])
    length = pieces.length[in_time]
    first = np.cumsum(length) - length
    moved = np.repeat(pieces.first[in_time] - first, length)
    return Pieces(
        rows=rows[np.arange(len(rows)) + moved],
        first=first,
        length=length,
        traj_id=pieces.traj_id[in_time],
        ended=pieces.ended[in_time],
        agent=agent[in_time],
    )


def cut(ids: Array, usable: Array, ended: Array) -> Pieces:
    """Cut rows, ``[envs, T]`` each, at every change of id, after every end, and at rows that are
    not usable.
    """
    begins = usable.copy()
    ends = usable.copy()
    goes_on = usable[:, 1:] & usable[:, :-1]
    goes_on &= ids[:, 1:] == ids[:, :-1]
    goes_on &= ~ended[:, :-1]
    begins[:, 1:] &= ~goes_on
    ends[:, :-1] &= ~goes_on
    begin = np.flatnonzero(begins)
    end = np.flatnonzero(ends)
    length = end - begin + 1
    return Pieces(
        np.flatnonzero(usable),
        np.cumsum(length) - length,
        length,
        ids.reshape(-1)[begin],
        ended.reshape(-1)[end],
        np.zeros_like(begin),
    )


def take(batch: TensorDict, rows: Array) -> TensorDict:
    """Return a copy of the rows with these indices (a non-empty int64 array), in the array's shape."""
    places = np.unravel_index(rows, batch.shape)
    index = []
    for place in places:
        index.append(torch.from_numpy(place).to(batch.device))
    are_all = False
    if rows.shape == (batch.numel(),):
        are_all = bool((rows[1:] > rows[:-1]).all())
    result: TensorDict = _indexed(
        batch,
        tuple(index),
        rows.shape,
        are_all=are_all,
    )
    return result


def equalize(batches: Sequence[TensorDict]) -> None:
    """Add ``("collector", "resumed")``, which batches have after a load only, to others that are
    joined with such.
    """
    without = [batch for batch in batches if batch.get(RESUMED, None) is None]
    if len(without) == len(batches):
        return
    for batch in without:
        resumed = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
        batch.set(RESUMED, resumed)


def padded(
    batch: TensorDict,
    rows: Array,
    length: Array,
    pad_id: int,
) -> TensorDict:
    """Return rows as ``[len(length), max(length)]``: line ``i`` has the next ``length[i]`` of them,
    then zeros.

    The padding has None for objects, ``pad_id`` for trajectory ids, and False in ``("collector",
    "mask")``.
    """
    mask = np.arange(length.max()) < length[:, None]
    spread = np.zeros(mask.shape, np.int64)
    spread[mask] = rows
    result = take(batch, spread)
    where = torch.from_numpy(mask).to(result[TRAJ_IDS].device)
    if not mask.all():
        _blank(result, (~where).nonzero(as_tuple=True))
        result[TRAJ_IDS][~where] = pad_id
    result.set(MASK, where)
    result.names = [None, "time"]
    return result


def split_trajectories(
    batch: TensorDict,
    *,
    pad_id: int = NEVER,
    done_key: Key = ENDED,
) -> TensorDict:
    """Return the trajectories of a batch (``[*lead, T]``), each on its own line.

    A trajectory that continues in another batch is not joined; ``WholeEpisodes`` does that. Lines
    are cut where the trajectory id changes and after every end, so an id that occurs twice gives
    two lines. Blank rows (id -1, or ``("collector", "valid")`` False) are left out.

    Args:
        batch: batch with ``("collector", "traj_ids")``; it is not changed.
        pad_id: trajectory id of the padding; 0 in TorchRL.
        done_key: column that marks the ends of episodes; if it is missing, only ids are used.

    Returns:
        a copy, ``[lines, longest]``, names ``[None, "time"]``: lines by environment (``lead``
        flattened), then time; zeros on the right (None for objects); ``("collector", "mask")``
        (bool) is False for padding.

    Raises:
        BadOption: the batch has no trajectory ids, or only blank rows.
    """
    batch = time_last(batch)
    pieces = find_pieces(batch, done_key)
    if not len(pieces.rows):
        raise BadOption(
            f"no row of this batch ({list(batch.shape)}) was written, so there is nothing to split"
        )
    return padded(batch, pieces.rows, pieces.length, pad_id)


def _stacked_outside(node: TensorDict) -> TensorDict:
    """Return ``node`` with its lazy stacks (also those of objects) stacked along their first
    dimension.

    TensorDict (0.14) returns a wrong shape for an index of several dimensions if they are stacked
    along another one.
    """
    from tensordict import LazyStackedTensorDict, is_tensor_collection

    if isinstance(node, LazyStackedTensorDict):
        parts = [_stacked_outside(part) for part in node.unbind(0)]
        if not node.stack_dim:  # its parts were changed in place
            return node
        return LazyStackedTensorDict.lazy_stack(parts, 0)
    for key, value in node.items():
        if not is_tensor_collection(value):
            continue
        stacked = _stacked_outside(value)
        if stacked is not value:
            node.set(key, stacked)
    return node


def _host(tensor: torch.Tensor) -> Array:
    return tensor.cpu().numpy()


def _indexed(
    node: Any,
    index: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    *,
    are_all: bool,
) -> Any:
    """Return a copy of the rows of ``index``, of this shape. Every row gets its own object.

    TensorDict's own indexing takes longer, and shares the entries of lazy stacks.

    Args:
        are_all: they are all rows in order; a copy of a whole tensor takes less time.
    """
    from tensordict import (
        LazyStackedTensorDict,
        NonTensorData,
        NonTensorStack,
        TensorDict,
    )

    from muster.memory.cells import objects_of, stacked_objects

    if isinstance(node, (NonTensorStack, NonTensorData)):
        place = tuple(each.cpu().numpy() for each in index)
        objects = copied_cells(objects_of(node)[place])
        stack = stacked_objects(objects)
        if node.device is None:
            return stack
        return stack.to(node.device)
    if isinstance(node, LazyStackedTensorDict):
        return node[index].clone()
    if are_all and isinstance(node, torch.Tensor):
        whole = node.clone(memory_format=torch.contiguous_format)
        return whole.flatten(0, len(index) - 1)
    if type(node) is not TensorDict:
        return node[index]
    entries = {}
    for key, value in node.items():
        entries[key] = _indexed(value, index, shape, are_all=are_all)
    inner = node.batch_size[len(index) :]
    size = torch.Size((*shape, *inner))
    make = tensordict_maker()
    return make(entries, batch_size=size, device=node.device)


class Cuts:
    """Which rows of some batches, ``[frames]`` each, become which TensorDicts.

    Args:
        lengths: of each batch: the lengths of successive pieces, which are all its rows.
        pieces: of each TensorDict: the numbers of its pieces, counted over all batches.
        rows: of each TensorDict: its number of rows.
    """

    def __init__(
        self,
        lengths: Sequence[list[int]],
        pieces: Sequence[Sequence[int]],
        rows: Sequence[int],
    ) -> None:
        self.lengths = lengths
        self.rows = rows
        self.first = [piece for piece, *_ in pieces]
        self.several: list[int] = []
        self.joined: list[int] = []
        for number, own in enumerate(pieces):
            if len(own) > 1:
                self.several.append(number)
                self.joined += own


def split(batch: TensorDict, lengths: list[int]) -> list[TensorDict]:
    """Return views of a batch, ``[frames]``, with these numbers of rows, faster than
    ``TensorDict.split``.
    """
    pieces = [[piece] for piece in range(len(lengths))]
    return cut_apart([batch], Cuts([lengths], pieces, lengths))


def cut_apart(
    nodes: Sequence[Any],
    cuts: Cuts,
    hidden: Sequence[Key] = (),
    path: Key = (),
) -> list[Any]:
    """Return the TensorDicts of ``cuts``, with names ``["time"]``. Those of one piece are views,
    the others are copied together.

    Args:
        nodes: the batches, which have the same columns; or their entries at ``path``.
        hidden: columns to leave out.
    """
    from tensordict import TensorDict

    first = nodes[0]
    if any(type(node) is not TensorDict for node in nodes):
        return _cut_leaves(nodes, cuts)
    entries: list[dict[str, Any]] = [{} for _ in cuts.rows]
    for key in first.keys():  # noqa: SIM118 (TensorDicts iterate over rows)
        here = (*path, key)
        if here in hidden:
            continue
        below = [node.get(key) for node in nodes]
        parts = cut_apart(below, cuts, hidden, here)
        for entry, value in zip(entries, parts, strict=True):
            entry[key] = value
    make = tensordict_maker()
    inner = first.batch_size[1:]
    device = first.device
    names = ["time", *[None] * len(inner)]
    made = []
    for entry, rows in zip(entries, cuts.rows, strict=True):
        size = torch.Size((rows, *inner))
        made.append(make(entry, batch_size=size, names=names, device=device))
    return made


def _cut_leaves(nodes: Sequence[Any], cuts: Cuts) -> list[Any]:
    pieces: list[Any] = []
    for node, lengths in zip(nodes, cuts.lengths, strict=True):
        pieces += _parts(node, lengths)
    result = [pieces[number] for number in cuts.first]
    if cuts.several:
        joined: Any = torch.cat([pieces[number] for number in cuts.joined])
        lengths = [cuts.rows[number] for number in cuts.several]
        parts = _parts(joined, lengths)
        for number, rows in zip(cuts.several, parts, strict=True):
            result[number] = rows
    return result


def _parts(node: Any, lengths: list[int]) -> Sequence[Any]:
    """Return views of successive rows.

    They have no common version counter for autograd, which takes time, too.
    """
    parts: Sequence[Any]
    if isinstance(node, torch.Tensor):
        parts = torch.unsafe_split_with_sizes(node, lengths)
    else:
        parts = node.split(lengths)
    return parts


def _blank(node: TensorDict, where: tuple[torch.Tensor, ...]) -> None:
    """Set every leaf at ``where`` to 0, objects to None."""
    from tensordict import (
        LazyStackedTensorDict,
        NonTensorData,
        is_non_tensor,
        is_tensor_collection,
    )

    if is_non_tensor(node):
        cells = len(where[0])
        node[where] = NonTensorData(None, batch_size=[cells])
    elif isinstance(node, LazyStackedTensorDict):
        node[where] = torch.zeros_like(node[where])
    elif is_tensor_collection(node):
        for value in node.values():
            _blank(value, where)
    else:
        node[where] = 0
