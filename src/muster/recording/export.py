"""Export to Parquet, one row per step, one column per key; and what all exports share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.errors import BadOption, BadRecording
from muster.keys import (
    FLAGS,
    INFO,
    NEXT_OBS_VALID,
    RESERVED,
    REWARD,
    SEED,
    STEP_COUNT,
    Key,
    dotted,
    next_of,
)
from muster.memory.specs import Array
from muster.recording.episodes import Recorded, cut_out
from muster.utils.attributes import optional
from muster.utils.texts import counted
from muster.utils.whole_files import file_errors, make_folder, written_elsewhere

if TYPE_CHECKING:
    from tensordict import TensorDict

UNFINISHED = "unfinished: the recording does not have all of their steps"
UNKNOWN_END = "the last observation is unknown"
ROWS_PER_GROUP = 1 << 14  # of a Parquet file
MOST_BATCHES = 64  # kept open; they are memory-mapped


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        path: file or directory.
        episodes, frames: number of exported episodes, and of their steps.
        left_out: number of episodes that were not exported, by reason.
    """

    path: Path
    episodes: int
    frames: int
    left_out: dict[str, int]

    def __str__(self) -> str:
        said = "".join(
            f"\nleft out  {count:,} ({why})" for why, count in self.left_out.items()
        )
        episodes = counted(self.episodes, "episode")
        frames = counted(self.frames, "frame")
        return f"wrote     {self.path}  ({episodes}, {frames}){said}"


class CompleteEpisodes:
    """The complete episodes of a recording: a sequence of ``TensorDict [length]``, read when they
    are taken.

    ``with_last`` leaves out episodes whose last observation is unknown. ``lengths`` has the number
    of steps of each. Raises ``BadRecording`` if no episode is complete.
    """

    def __init__(self, recording: Recorded, *, with_last: bool = False) -> None:
        self._recording = recording
        # most episodes share theirs with others
        self._batch = lru_cache(MOST_BATCHES)(recording.batch)
        self._left_out: Counter[str] = Counter()
        self._numbers: list[int] = []
        flagged = with_last and NEXT_OBS_VALID in recording.keys
        for number, episode in enumerate(recording.episodes):
            if not episode.complete:
                self._left_out[UNFINISHED] += 1
            elif flagged and not self._episode(number)[NEXT_OBS_VALID][-1].all():
                self._left_out[UNKNOWN_END] += 1
            else:
                self._numbers.append(number)
        if not self._numbers:
            left_out = self._left_out.items()
            why = "; ".join(
                f"{count:,} left out ({reason})" for reason, count in left_out
            )
            reasons = f": {why}" if why else ""
            raise BadRecording(
                f"{recording.directory} has no complete episode{reasons}; there is nothing to"
                " export."
            )
        self.lengths = [recording.episodes[number].length for number in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[TensorDict]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> TensorDict:
        return self._episode(self._numbers[i])

    def _episode(self, number: int) -> TensorDict:
        return cut_out(self._recording.episodes[number], self._batch)

    def written(self, path: Path) -> Export:
        """Return the report of an export of all of these episodes."""
        return Export(path, len(self), sum(self.lengths), dict(self._left_out))


def observation_keys(
    recording: Recorded, given: Sequence[Key | str] | None = None
) -> list[Key]:
    """Return the root keys of the observations: ``given``, or those that the batches also have
    below "next".

    Raises ``BadRecording`` if the recording lacks them, or has no observations after the steps
    (``compact_obs=True``).
    """
    keys = recording.keys
    if given is not None:
        found = [(key,) if isinstance(key, str) else tuple(key) for key in given]
    else:
        after = [key for key in keys if next_of(key) in keys and key != STEP_COUNT]
        found = [key for key in after if key[0] not in (*RESERVED, INFO)]
    missing = [
        dotted(key) for key in found if key not in keys or next_of(key) not in keys
    ]
    if missing or not found:
        what = "an observation below next"
        if missing:
            what = f"{', '.join(missing)} and the same below next"
        raise BadRecording(
            f"{recording.directory} does not have {what}, but {', '.join(map(dotted, keys))}."
            " Record without compact_obs=True, and give observation_keys=[...] if the observations"
            " have other names."
        )
    return found


def seed_of(data: TensorDict) -> int | None:
    """Return the seed with which an episode was reset; None: it is not known, or there was none."""
    if SEED not in data.keys(True):
        return None
    seed = int(data.get(SEED)[0])
    return seed if seed >= 0 else None


def column_of(data: TensorDict, key: Key) -> Array | list[str]:
    """Return a column of an episode: as ``array_of``, or a list of texts; other Python objects
    become JSON.
    """
    if torch.is_tensor(data.get(key)):
        return array_of(data, key)
    values = data.get(key).tolist()
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def array_of(data: TensorDict, key: Key) -> Array:
    """Return a column as an array ``[length, *shape]``; flags and rewards of one number lose that
    axis.
    """
    tensor = data.get(key)
    if not torch.is_tensor(tensor):
        raise BadRecording(
            f"{dotted(key)} has text or objects, and an export needs numbers there."
        )
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.numpy()
    is_scalar = key in (REWARD, *FLAGS, *map(next_of, FLAGS)) or key[0] == "collector"
    if is_scalar and array.shape[1:] == (1,):
        return array[:, 0]
    return array


def new_path(path: Any) -> Path:
    """Return a path at which nothing exists. Raises BadOption if something does."""
    target = Path(path).absolute()
    if target.exists():
        raise BadOption(f"{target} exists: give a new path, or remove it.")
    return target


def write_parquet(recording: Recorded, path: Any) -> Export:
    """See ``Recording.to_parquet``."""
    target = new_path(path)
    episodes = CompleteEpisodes(recording)
    with optional("an export", "pyarrow", "parquet"):
        import pyarrow as pa
    make_folder(target.parent)
    keys = recording.keys

    def tables() -> Iterator[Any]:
        for number, data in enumerate(episodes):
            columns: dict[str, Any] = {
                "episode": np.full(len(data), number),
                "step": np.arange(len(data)),
            }
            for key in keys:
                columns[dotted(key)] = column_of(data, key)
            yield pa.table(
                {name: arrow_column(column) for name, column in columns.items()}
            )

    with written_elsewhere(target) as made, file_errors(made, "written"):
        write_tables(made, tables())
    return episodes.written(target)


def write_tables(path: Path, tables: Iterator[Any]) -> None:
    """Write tables with the same columns into one file, in row groups of about ``ROWS_PER_GROUP``
    rows.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    writer = None
    waiting: list[Any] = []
    try:
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(path, table.schema)
            waiting.append(table)
            if sum(map(len, waiting)) >= ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(waiting).combine_chunks())
                waiting.clear()
        if writer is not None and waiting:
            writer.write_table(pa.concat_tables(waiting).combine_chunks())
    finally:
        if writer is not None:
            writer.close()


def arrow_column(values: Any) -> Any:
    """Return an array ``[n, *shape]`` as nested lists of fixed sizes, or a list of strings, as an
    Arrow array.
    """
    import pyarrow as pa

    if isinstance(values, list):
        return pa.array(values, pa.string())
    if values.dtype.kind == "c" or 0 in values.shape:
        raise BadRecording(
            f"Parquet has no columns of {values.dtype} {list(values.shape[1:])}."
        )
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
