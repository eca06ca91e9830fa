"""``load``: a recording as memory-mapped batches and a table of episodes."""

from __future__ import annotations

import math
import os
import reprlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.errors import BadRecording
from muster.keys import (
    DONE,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    dotted,
    nested,
    next_of,
)
from muster.recording.chunks import (
    CHUNK,
    MANIFEST,
    REMEDY,
    Chunk,
    DamagedChunk,
    chunk_name,
    is_locked,
    open_part,
    read_chunk,
)
from muster.recording.episodes import IS_INIT, Episode, cut_out, find_episodes, time_dim
from muster.recording.writer import FORMAT, VERSION
from muster.utils.tensor_files import Damaged, bytes_of, opened, unseal
from muster.utils.texts import counted
from muster.utils.whole_files import TEMPORARY, read_json

if TYPE_CHECKING:
    from tensordict import TensorDict

    from muster.memory.specs import Array
    from muster.recording.export import Export
    from muster.recording.minari import MinariRecording

MINARI = "minari:"  # before the id of a dataset
# to identify episodes
NEEDED: list[Key] = [
    TRAJ_IDS,
    REWARD,
    next_of(DONE),
    next_of(TERMINATED),
    next_of(TRUNCATED),
]


def load(
    directory: str | os.PathLike[str], *, skip_damaged: bool = False
) -> Recording | MinariRecording:
    """Open a recording, or a Minari dataset as batches.

    Only headers are read; data is read on first access.

    Args:
        directory: directory of a ``Recorder``, closed or not; or of a Minari dataset, or
            ``"minari:ID"`` of a local one.
        skip_damaged: leave out damaged and missing chunks, and describe them in ``Recording.lost``.
            Reads everything once.

    Raises:
        BadOption: the package ``minari`` is missing.
        BadRecording: there is no recording, or a part of it is damaged. A last chunk that is
            truncated by a crash, or whose header is damaged, is not an error: see
            ``Recording.lost``.
    """
    root = Path(os.path.realpath(directory))
    is_id = str(directory).startswith(MINARI)
    if is_id or (root / "data" / "metadata.json").exists():
        from muster.recording.minari import load_minari

        dataset_id = str(directory).removeprefix(MINARI) if is_id else None
        return load_minari(directory, dataset_id)
    try:
        names = os.listdir(root)
    except OSError as error:
        raise BadRecording(
            f"{root} cannot be read: {error.strerror}. Is it the directory of a recording?"
        ) from error
    matches = [CHUNK.fullmatch(name) for name in names]
    found = sorted(int(match.group(1)) for match in matches if match)
    if MANIFEST not in names and not found:
        raise BadRecording(
            f"{root} holds no recording: there is neither {MANIFEST} nor a chunk in it."
        )
    lost: list[str] = []
    manifest = None
    try:
        manifest = _read_manifest(root / MANIFEST)
    except BadRecording as error:
        lost.append(
            f"{error} What it says was taken from the chunks, which cannot tell whether some are"
            " missing."
        )
    if manifest is not None:
        _check_manifest(root / MANIFEST, manifest)
    chunks = _read_chunks(root, found, lost, skip_damaged)
    if manifest is None:
        if not chunks:
            raise BadRecording(f"{root} holds no readable recording: {' '.join(lost)}")
        manifest = dict(chunks[0].manifest)
        _check_manifest(chunks[0].path, manifest)
    for chunk in chunks:
        if chunk.manifest["id"] != manifest["id"]:
            raise BadRecording(
                f"{chunk.path} belongs to another recording. Move it away."
            )
    _note_missing_end(root, manifest, found, names, lost)
    return Recording(root, manifest, chunks, lost)


class Recording:
    """A recording: ``len()`` is its number of frames, with those of padding; iteration yields its
    batches as they were written.

    Every batch is a private, memory-mapped view: changing it changes neither the file nor another
    batch. Batches stay valid when the recording is dropped. The files must not be changed
    meanwhile. Recordings are made by ``load``.

    Attributes:
        directory: path of the directory.
        manifest: the recorder's metadata: ``muster`` (version), ``created``, ...; if the recorder
            was closed, also ``keys``, ``batch_size`` and ``frames_per_batch`` of the first batch.
        meta: the user's metadata.
        lost: why the end is or may be incomplete, and what was left out; None: nothing is missing.
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        chunks: list[Chunk],
        lost: list[str],
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.meta: dict[str, Any] = manifest["meta"]
        self.lost: str | None = " ".join(lost) or None
        self._chunks = chunks
        self._ends = list(accumulate(chunk.batches for chunk in chunks))
        self._checked: set[tuple[int, str]] = set()
        # The chunk that ``batch`` read last, and the places in it that were returned.
        self._mapped: tuple[Chunk | None, dict[Key, Any], dict[int, object]] = (
            None,
            {},
            {},
        )

    def __len__(self) -> int:
        return sum(chunk.frames for chunk in self._chunks)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return self._ends[-1] if self._ends else 0

    @property
    def keys(self) -> list[Key]:
        if not self._chunks:
            return []
        return list(self._chunks[0].leaves)

    def __iter__(self) -> Iterator[TensorDict]:
        for (
            chunk
        ) in self._chunks:  # each chunk is mapped once: its batches share no memory
            columns = self._columns(chunk, chunk.leaves)
            for place in range(chunk.batches):
                yield _tensordict(chunk, _values(chunk, columns, place))

    def batch(self, i: int) -> TensorDict:
        """Return batch ``i`` with the size, names, dtypes and (on disk) strides that it was written
        with.

        Raises:
            IndexError: there is no batch ``i``.
            BadRecording: its chunk does not match its checksums.
        """
        if not -self.batches <= i < self.batches:
            raise IndexError(f"batch {i} of a recording of {self.batches}")
        place = i % self.batches
        at = bisect_right(self._ends, place)
        chunk = self._chunks[at]
        place -= self._ends[at] - chunk.batches
        last, columns, given = self._mapped
        mine = object()
        # A batch that was returned once may have been changed: map it again. Threads may call this.
        if last is not chunk or given.setdefault(place, mine) is not mine:
            columns = self._columns(chunk, chunk.leaves)
            self._mapped = (chunk, columns, {place: mine})
        return _tensordict(chunk, _values(chunk, columns, place))

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        """The table of episodes, in the order of their first frames.

        Reads only ids, rewards and flags.

        Raises:
            BadRecording: the batches have no ``collector/traj_ids``, or no flags.
        """
        return find_episodes(self._rows())

    def episode(self, i: int) -> TensorDict:
        """Return episode ``i`` of the table (as far as recorded), ``[length]``, in order of time."""
        return cut_out(self.episodes[i], self.batch)

    def to_parquet(self, path: str | os.PathLike[str]) -> Export:
        """Write the complete episodes into one Parquet file: a row per step, a column per key.

        Columns are named ``observation``, ``next.reward`` and so on. The columns ``episode`` and
        ``step`` are numbered from 0. A value with dimensions is a list of fixed size.

        Args:
            path: a new file.

        Raises:
            BadOption: the path exists, or pyarrow is missing (``pip install
                'muster-rl[parquet]'``).
            BadRecording: no episode is complete, or a column has a dtype that Parquet has not.
        """
        from muster.recording.export import write_parquet

        return write_parquet(self, path)

    def to_minari(
        self,
        dataset_id: str,
        *,
        env: Any = None,
        observation_space: Any = None,
        action_space: Any = None,
        observation_keys: Sequence[Key | str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Export:
        """Write the complete episodes as a local Minari dataset, with the observation after the
        last step.

        Infos are those of the columns ``("info", ...)``. What a policy added to its actions is left
        out.

        Args:
            dataset_id: such as "cartpole/ppo-v0"; there must be no such dataset.
            env: Gymnasium id, environment or spec that the dataset names, and whose spaces it gets.
                None: ``meta["env"]`` if Gymnasium knows it, else none.
            observation_space, action_space: spaces of the dataset. None: those of ``env``; without
                one, spaces that have all recorded values.
            observation_keys: root keys of the observations. None: all that the batches also have
                below "next".
            metadata: further arguments of ``minari.create_dataset_from_buffers``:
                ``algorithm_name``, ``author``, ``code_permalink``, ``description`` and so on.
                Images are stored without loss, unless it has ``jpeg_encoding=True``.

        Raises:
            BadOption: Minari is missing (``pip install 'muster-rl[minari]'``), or refuses the
                dataset.
            BadRecording: no episode is complete, or there are no observations after steps
                (``compact_obs=True``).
        """
        from muster.recording.minari import write_minari

        return write_minari(
            self,
            dataset_id,
            env,
            observation_space,
            action_space,
            observation_keys,
            metadata or {},
        )

    def to_lerobot(
        self,
        directory: str | os.PathLike[str],
        *,
        fps: float = 30.0,
        task: str | None = None,
        observation_keys: Sequence[Key | str] | None = None,
    ) -> Export:
        """Write the complete episodes as a LeRobot dataset, format v3.0.

        RGB pictures (uint8, ``[height, width, 3]`` or ``[3, height, width]``) become H.264 videos,
        which lose a little; all other columns are exact. The format has no place for the
        observation after the last step.

        Args:
            directory: a new directory.
            fps: frames per second of the environment.
            task: description of the task. None: ``meta["env"]``.
            observation_keys: as in ``to_minari``.

        Raises:
            BadOption: the directory exists, or pyarrow or ffmpeg is missing (``pip install
                'muster-rl[lerobot]'``).
            BadRecording: no episode is complete, or a column has a dtype that Parquet has not.
        """
        from muster.recording.lerobot import write_lerobot

        named = str(self.meta.get("env", "")) if task is None else task
        return write_lerobot(
            self, directory, fps=fps, task=named, keys=observation_keys
        )

    def verify(self) -> None:
        """Read everything and verify its checksums.

        Raises:
            BadRecording: the data does not match its checksums, or its header.
        """
        for chunk in self._chunks:
            _values(chunk, self._columns(chunk, chunk.leaves), chunk.batches - 1)

    def __repr__(self) -> str:
        size = sum(chunk.size_bytes for chunk in self._chunks)
        env = f", env={self.meta['env']!r}" if "env" in self.meta else ""
        frames = counted(len(self), "frame")
        batches = counted(self.batches, "batch")
        chunks = counted(len(self._chunks), "chunk")
        lines = [
            f"Recording({str(self.directory)!r}{env}: {frames} in {batches} and {chunks},"
            f" {size / 1e6:,.1f} MB)"
        ]
        if self._chunks:
            first = self._chunks[0]
            names = ", ".join(first.leaves.values())
            lines.append(f"  batch {list(first.batch_size)}: {names}")
        if self.lost:
            lines.append(f"  lost: {self.lost}")
        return "\n".join(lines)

    def _columns(self, chunk: Chunk, keys: Iterable[Key]) -> dict[Key, Any]:
        """Map the leaves of all batches of a chunk.

        The first time, their checksums are verified.
        """
        file = open_part(chunk.path)
        columns: dict[Key, Any] = {}
        try:
            with file, opened(file, chunk.path) as stored:
                for key in keys:
                    name = chunk.leaves[key]
                    leaf = (chunk.index, name)
                    tensor = stored.tensor(name, check=leaf not in self._checked)
                    self._checked.add(leaf)
                    if name in chunk.objects:
                        columns[key] = bytes(bytes_of(tensor)).split(b"\n")
                    else:
                        columns[key] = _in_order(chunk, tensor)
        except Damaged as error:
            raise DamagedChunk(chunk.path, error) from error
        return columns

    def _rows(self) -> Iterator[tuple[dict[Key, Array], bool]]:
        """Yield the columns of ``find_episodes``."""
        expected = 0 if self.manifest["fresh"] else -1
        for chunk in self._chunks:
            missing = [key for key in NEEDED if key not in chunk.leaves]
            if missing:
                raise BadRecording(
                    f"{self.directory} has no table of episodes: {missing} were not recorded."
                )
            optional = [IS_INIT] if IS_INIT in chunk.leaves else []
            found = self._columns(chunk, [*NEEDED, *optional])
            columns = {}
            for key, column in found.items():
                if _has_numbers(column):
                    columns[key] = _flat(chunk, key, column)
            empty = [dotted(key) for key in NEEDED if key not in columns]
            if empty:
                raise BadRecording(
                    f"{self.directory} has no table of episodes: {empty} are not columns of numbers."
                )
            for place in range(chunk.batches):
                number = chunk.first_batch + place
                yield (
                    {key: rows[place] for key, rows in columns.items()},
                    number == expected,
                )
                expected = number + 1


def _tensordict(chunk: Chunk, values: dict[Key, Any]) -> TensorDict:
    from tensordict import TensorDict

    return TensorDict(
        nested(values), batch_size=chunk.batch_size, names=list(chunk.names)
    )


def _has_numbers(column: Any) -> bool:
    return torch.is_tensor(column) and column.numel() > 0


def _flat(chunk: Chunk, key: Key, column: torch.Tensor) -> Array:
    """Return a column of all batches as ``[N, E, T]``, environments flattened; nan if a reward is
    no single number.
    """
    time = time_dim(chunk.names)
    dims = len(chunk.batch_size)
    if column.dtype == torch.bfloat16:
        column = column.float()
    size = math.prod(column.shape[1 + dims :])
    shape = (chunk.batches, -1, chunk.batch_size[time], size)
    rows: Array = column.movedim(1 + time, dims).reshape(shape).numpy()
    if key != REWARD:
        return rows[..., 0]
    if size != 1:
        return np.full(rows.shape[:3], math.nan)
    return rows[..., 0].astype(np.float64)


def _in_order(chunk: Chunk, tensor: torch.Tensor) -> torch.Tensor:
    """Permute a leaf ``[N, *stored, *shape]`` to the batch's order of dimensions."""
    stored = len(chunk.order)
    back = [1 + chunk.order.index(dim) for dim in range(stored)]
    return tensor.permute(0, *back, *range(1 + stored, tensor.ndim))


def _values(chunk: Chunk, columns: Mapping[Key, Any], place: int) -> dict[Key, Any]:
    """Return one batch of a chunk by key."""
    values = {}
    try:
        for key, column in columns.items():
            value = column[place]
            if not torch.is_tensor(column):
                value = _stack(read_json(value), chunk.batch_size)
            values[key] = value
        return values
    except (ValueError, IndexError, RecursionError) as error:
        raise DamagedChunk(
            chunk.path, f"objects are not what the header says ({error})"
        ) from error


def _stack(value: Any, size: tuple[int, ...]) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if not size:
        return NonTensorData(value)
    if not isinstance(value, list) or len(value) != size[0]:
        raise ValueError(f"not {size[0]} entries")
    return NonTensorStack(*(_stack(item, size[1:]) for item in value))


def _read_manifest(path: Path) -> dict[str, Any]:
    file = open_part(path)
    with file:
        text = file.read()
    with suppress(Damaged):
        return unseal(text)
    with suppress(ValueError):
        found = read_json(text)
        if isinstance(found, dict) and found.get("version") != VERSION:
            return (
                found  # the caller refuses other versions, which have other checksums
            )
    raise BadRecording(f"{path} is damaged.")


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        # of any type
        found = [
            reprlib.repr(manifest.get(key)) for key in ("format", "version", "muster")
        ]
        raise BadRecording(
            f"{path} is of format {found[0]} version {found[1]}; this Muster reads {FORMAT!r}"
            f" version {VERSION}. Read it with the version that wrote it: muster {found[2]}."
        )
    expected: dict[str, type] = {"id": str, "meta": dict, "fresh": bool}
    if manifest.get("closed"):
        expected["chunks"] = int
    wrong = [
        key for key, kind in expected.items() if not isinstance(manifest.get(key), kind)
    ]
    if wrong:
        raise BadRecording(f"{path} is not as Muster writes it: look at {wrong}.")


def _read_chunks(
    root: Path, found: list[int], lost: list[str], skip_damaged: bool
) -> list[Chunk]:
    chunks: list[Chunk] = []
    for before, index in zip([-1, *found], found, strict=False):
        try:
            if index != before + 1:
                what = f"{root / chunk_name(before + 1)} is missing"
                if not skip_damaged:
                    raise BadRecording(f"{what}, and chunks follow it. {REMEDY}")
                lost.append(f"{what} ({index - before - 1} in a row).")
            chunk = read_chunk(root / chunk_name(index))
            first = sum(other.batches for other in chunks)
            complete = skip_damaged or chunk.first_batch == first
            if chunk.index != index or not complete:
                raise BadRecording(
                    f"{chunk.path} is chunk {chunk.index} under another name. {REMEDY}"
                )
            if skip_damaged:
                Recording(root, {"meta": {}}, [chunk], []).verify()
        except BadRecording as error:
            # the effect of a crash
            at_the_end = index == found[-1] and isinstance(error, DamagedChunk)
            if not (skip_damaged or at_the_end):
                raise
            lost.append(
                f"Its frames are lost: {error}" if at_the_end else f"Left out: {error}"
            )
        else:
            chunks.append(chunk)
    return chunks


def _note_missing_end(
    root: Path,
    manifest: dict[str, Any],
    found: list[int],
    names: list[str],
    lost: list[str],
) -> None:
    present = found[-1] + 1 if found else 0
    if manifest.get("closed"):
        missing = manifest["chunks"] - present
        if missing > 0:
            lost.append(
                f"The last {missing} of {manifest['chunks']} chunks are missing."
            )
    elif "closed" in manifest and is_locked(root):
        lost.append("It is still being recorded; load it again for more.")
    elif "closed" in manifest:
        cut = any(name.endswith(TEMPORARY) for name in names)
        more = " A chunk was being written; its frames are lost." if cut else ""
        lost.append(
            f"The recorder was not closed: frames after the last chunk, if any, are lost.{more}"
        )
