"""Export to a LeRobot dataset, format v3.0: steps in Parquet, pictures in MP4, and descriptions.

Written by hand, because the package ``lerobot`` needs other versions of Python and torch. The
layout is that of ``meta/info.json`` of published datasets:
https://huggingface.co/docs/lerobot/lerobot-dataset-v3
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.keys import (
    ACTION,
    DONE,
    INFO,
    OBSERVATION,
    REWARD,
    SEED,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
    next_of,
)
from muster.memory.specs import Array
from muster.recording.episodes import Recorded
from muster.recording.export import (
    CompleteEpisodes,
    Export,
    array_of,
    arrow_column,
    column_of,
    new_path,
    observation_keys,
    seed_of,
    write_tables,
)
from muster.utils.attributes import optional
from muster.utils.mp4 import check_ffmpeg, write_mp4
from muster.utils.whole_files import file_errors, make_folder

if TYPE_CHECKING:
    from tensordict import TensorDict

FILES_PER_CHUNK = 1000
FILE_BYTES = 100 << 20
FILE_PICTURES = 10_000
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def write_lerobot(
    recording: Recorded,
    directory: Any,
    *,
    fps: float,
    task: str,
    keys: Sequence[Key | str] | None,
) -> Export:
    """See ``Recording.to_lerobot``."""
    with optional("an export", "pyarrow", "lerobot"):
        import pyarrow as pa
    root = new_path(directory)
    observed = observation_keys(recording, keys)
    episodes = CompleteEpisodes(recording)
    first = episodes[0]
    pictured = [key for key in observed if _is_picture(array_of(first, key))]
    cameras = {_name(key, is_picture=True): key for key in pictured}
    columns = {_name(key): key for key in observed if key not in pictured}
    actions = [key for key in recording.keys if key[0] == ACTION[0]]
    infos = [key for key in recording.keys if key[0] == INFO]
    ends = (REWARD, next_of(DONE), next_of(TERMINATED), next_of(TRUNCATED))
    columns |= {dotted(key): key for key in (*actions, *infos, *ends)}
    if cameras:
        check_ffmpeg()
    row_bytes = sum(_bytes(column_of(first, key)) for key in columns.values())
    most = min(
        FILE_BYTES // max(1, row_bytes), FILE_PICTURES if cameras else FILE_BYTES
    )
    stats = {name: _Stats() for name in (*columns, *cameras)}
    numbers = itertools.count()

    def table(number: int) -> Any:
        data = episodes[number]
        seeds[number] = seed_of(data)
        length = len(data)
        frame = np.arange(length)
        values: dict[str, Any] = {
            name: column_of(data, key) for name, key in columns.items()
        }
        for name, rows in values.items():
            if isinstance(rows, np.ndarray):
                stats[name].add(rows.reshape(length, -1))
        values |= {
            "timestamp": (frame / fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, number),
            "index": np.fromiter(itertools.islice(numbers, length), np.int64),
            "task_index": np.zeros(length, np.int64),
        }
        return pa.table(
            {name: arrow_column(_flat(rows)) for name, rows in values.items()}
        )

    def pictures(camera: str, file: range) -> Iterator[Array]:
        for number in file:
            rows = _pictures(episodes[number], cameras[camera])
            stats[camera].add(rows.reshape(-1, 3) / 255)
            yield from rows

    seeds: dict[int, int | None] = {}
    rows: list[dict[str, Any]] = []
    try:
        with file_errors(root, "written"):
            for i, file in enumerate(_files(episodes.lengths, most)):
                place = {
                    "chunk_index": i // FILES_PER_CHUNK,
                    "file_index": i % FILES_PER_CHUNK,
                }
                path = root / DATA.format(**place)
                make_folder(path.parent)
                write_tables(path, map(table, file))
                for camera in cameras:
                    path = root / VIDEO.format(video_key=camera, **place)
                    make_folder(path.parent)
                    write_mp4(path, pictures(camera, file), fps)
                rows += _rows(file, episodes.lengths, place, fps, task, cameras)
            if SEED in recording.keys:
                for row in rows:
                    row["seed"] = seeds[row["episode_index"]]
            by_column = {name: [row[name] for row in rows] for name in rows[0]}
            info = _info(first, columns, cameras, episodes, fps)
            _write_meta(root, info, by_column, task, stats)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return episodes.written(root)


def _files(lengths: Sequence[int], most: int) -> list[range]:
    """Divide episodes into files of at most ``most`` rows; a longer episode has a file of its own."""
    files = [range(0, 0)]
    rows = 0
    for number, length in enumerate(lengths):
        if rows and rows + length > most:
            files.append(range(number, number))
            rows = 0
        files[-1] = range(files[-1].start, number + 1)
        rows += length
    return files


def _rows(
    file: range,
    lengths: Sequence[int],
    place: Mapping[str, int],
    fps: float,
    task: str,
    cameras: Iterable[str],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table of episodes for the episodes in a file."""
    since = sum(lengths[: file.start])
    begin = since
    for number in file:
        length = lengths[number]
        end = begin + length
        row: dict[str, Any] = {
            "episode_index": number,
            "tasks": [task],
            "length": length,
            "dataset_from_index": begin,
            "dataset_to_index": end,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        row |= {f"data/{name}": index for name, index in place.items()}
        for camera in cameras:
            row |= {f"videos/{camera}/{name}": index for name, index in place.items()}
            row[f"videos/{camera}/from_timestamp"] = (begin - since) / fps
            row[f"videos/{camera}/to_timestamp"] = (end - since) / fps
        yield row
        begin = end


class _Stats:
    """Statistics of a feature over all frames; those of pictures are per channel, in [0, 1]."""

    def __init__(self) -> None:
        self.parts: list[tuple[Any, ...]] = []  # none for texts

    def add(self, rows: Array) -> None:
        """Add rows ``[n, size]``."""
        rows = rows.astype(np.float64)
        squares = (rows**2).sum(0)
        part = (len(rows), rows.min(0), rows.max(0), rows.sum(0), squares)
        self.parts.append(part)

    def result(self, shape: Sequence[int], frames: int) -> dict[str, Any]:
        """Return them by name, with values of this shape."""
        columns = [np.stack(column) for column in zip(*self.parts, strict=True)]
        count, low, high, total, squares = columns
        number = count.sum()
        mean = total.sum(0) / number
        variance = squares.sum(0) / number - mean**2
        found = {
            "min": low.min(0),
            "max": high.max(0),
            "mean": mean,
            "std": np.sqrt(np.maximum(variance, 0)),
        }
        result: dict[str, Any] = {
            name: value.reshape(shape).tolist() for name, value in found.items()
        }
        result["count"] = [frames]
        return result


def _write_meta(
    root: Path,
    info: dict[str, Any],
    episodes: dict[str, list[Any]],
    task: str,
    stats: Mapping[str, _Stats],
) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    meta = root / "meta"
    path = meta / "episodes" / "chunk-000" / "file-000.parquet"
    make_folder(path.parent)
    pq.write_table(pa.table(episodes), path)
    # lerobot reads the tasks with pandas, as its index
    index = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [],
        "pandas_version": "2.0.0",
    }
    tasks = pa.table({"task_index": [0], "task": [task]})
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(index)})
    pq.write_table(tasks, meta / "tasks.parquet")
    found = {}
    for name, each in stats.items():
        if each.parts:
            feature = info["features"][name]
            shape = (3, 1, 1) if feature["dtype"] == "video" else feature["shape"]
            found[name] = each.result(shape, info["total_frames"])
    (meta / "stats.json").write_text(json.dumps(found, indent=1))
    (meta / "info.json").write_text(json.dumps(info, indent=1))


def _info(
    first: TensorDict,
    columns: Mapping[str, Key],
    cameras: Mapping[str, Key],
    episodes: CompleteEpisodes,
    fps: float,
) -> dict[str, Any]:
    features: dict[str, Any] = {}
    for name, key in columns.items():
        rows = _flat(column_of(first, key))
        shape = list(getattr(rows, "shape", ())[1:]) or [1]
        features[name] = {
            "dtype": str(getattr(rows, "dtype", "string")),
            "shape": shape,
            "names": None,
        }
    for name, key in cameras.items():
        # MP4 has even sizes
        _, high, wide, *_ = _pictures(first, key).shape
        height = high + high % 2
        width = wide + wide % 2
        video = {
            "video.height": height,
            "video.width": width,
            "video.channels": 3,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.fps": fps,
            "video.is_depth_map": False,
            "has_audio": False,
        }
        names = ["height", "width", "channels"]
        features[name] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": names,
            "info": video,
        }
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": len(episodes),
        "total_frames": sum(episodes.lengths),
        "total_tasks": 1,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": FILE_BYTES >> 20,
        "video_files_size_in_mb": 500,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA,
        "video_path": VIDEO if cameras else None,
        "features": features,
    }


def _name(key: Key, *, is_picture: bool = False) -> str:
    """Return LeRobot's name of an observation."""
    if key == OBSERVATION:
        return "observation.image" if is_picture else "observation.state"
    parts = key[1:] if key[0] == OBSERVATION[0] else key
    images = ("images",) if is_picture else ()
    return ".".join(("observation", *images, *parts))


def _is_picture(rows: Array) -> bool:
    if rows.dtype != np.uint8 or rows.ndim != 4:
        return False
    return 3 in (rows.shape[1], rows.shape[3])


def _pictures(data: TensorDict, key: Key) -> Array:
    """Return pictures as ``[length, height, width, 3]``."""
    rows = array_of(data, key)
    if rows.shape[3] != 3:
        rows = rows.transpose(0, 2, 3, 1)
    return rows


def _flat(rows: Array | list[str]) -> Array | list[str]:
    """Return features of one number as a column of numbers, as LeRobot has them."""
    if isinstance(rows, np.ndarray) and rows.shape[1:] == (1,):
        return rows[:, 0]
    return rows


def _bytes(rows: Array | list[str]) -> int:
    """Return the size of a row."""
    if isinstance(rows, np.ndarray):
        return int(rows[0].nbytes)
    return max(map(len, rows))
