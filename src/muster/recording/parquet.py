"""Export to Parquet: one row per step, one column per key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.errors import BadRecording
from muster.keys import dotted
from muster.recording.export import CompleteEpisodes, Export, column_of, new_path
from muster.utils.attributes import optional
from muster.utils.whole_files import written_elsewhere

if TYPE_CHECKING:
    from muster.recording.reader import Recording

ROWS_PER_GROUP = 1 << 14


def write_parquet(recording: Recording, path: Any) -> Export:
    """See ``Recording.to_parquet``."""
    target, episodes = new_path(path), CompleteEpisodes(recording)
    with optional("an export", "pyarrow", "parquet"):
        import pyarrow as pa
    target.parent.mkdir(parents=True, exist_ok=True)
    keys = recording.keys

    def tables() -> Iterator[Any]:
        for number, data in enumerate(episodes):
            columns: dict[str, Any] = {"episode": np.full(len(data), number), "step": np.arange(len(data))}
            columns |= {dotted(key): column_of(data, key) for key in keys}
            yield pa.table({name: arrow_column(column) for name, column in columns.items()})

    with written_elsewhere(target) as made:
        write_tables(made, tables())
    return episodes.written(target)


def write_tables(path: Path, tables: Iterator[Any]) -> None:
    """Write tables with the same columns into one file, in row groups of about ``ROWS_PER_GROUP`` rows."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    writer, waiting = None, list[Any]()
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
    """Return an array ``[n, *shape]`` as nested lists of fixed sizes, or a list of strings, as an Arrow array."""
    import pyarrow as pa

    if isinstance(values, list):
        return pa.array(values, pa.string())
    if values.dtype.kind == "c" or 0 in values.shape:
        raise BadRecording(f"Parquet has no columns of {values.dtype} {list(values.shape[1:])}.")
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
