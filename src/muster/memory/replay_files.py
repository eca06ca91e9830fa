"""Files of a ``ReplayMemory``: a directory with a manifest, and tensors that are not written twice.

A directory has

- ``memory.json``: the manifest. It describes the memory, and names all other files.
- ``rows-RING-FIRST-END-ORIGIN.safetensors``: a block of rows. Its rows do not change any more, so it
  is written once; a later save names it again.
- ``newest-SERIAL-ORIGIN.safetensors``: the rows of the last block, and all that changes: what follows
  the newest rows, and priorities.

``ORIGIN`` is a random name of the memory that has written the rows, so that two memories that go on
from the same files never take each other's rows for their own.

A save writes new files, then replaces the manifest, then removes files that the manifest does not name.
After a crash at any moment the directory has the complete old or new memory.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import BadCheckpoint, FileError
from muster.memory.ring import Ring
from muster.memory.saved_rows import SavedRows, Tensors
from muster.utils import tensor_files
from muster.utils.whole_files import make_folder, open_regular, write_whole

MANIFEST = "memory.json"
FORMAT = 2
BLOCK_BYTES = 1 << 24  # of rows in a file
FILE = re.compile(r"(rows-\d+-\d+-\d+|newest-\d+)-[0-9a-f]{16}\.safetensors")
LEFT_OVER = re.compile(FILE.pattern + r"\.[0-9a-f]{12}\.tmp")
UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RuntimeError,
)


@dataclass(frozen=True)
class Snapshot:
    """What changes with every row, at one moment.

    Attributes:
        about: description of the memory, as JSON has it.
        spans: rows ``lo`` to ``hi`` of each ring.
        newest: of each ring, what follows the newest row, and priorities.
    """

    about: Mapping[str, Any]
    spans: Sequence[tuple[int, int]]
    newest: Sequence[Tensors]


class MemoryFiles:
    """Knows the files that have the rows of a memory already."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(8)
        self._serial = 0
        self._names: dict[tuple[int, int], str] = {}  # of blocks, by ring and number

    def save(
        self,
        directory: Path,
        rings: Sequence[Ring],
        lock: AbstractContextManager[Any],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        """Save rings; rows may be written meanwhile.

        Args:
            lock: held while rows are read.
            snapshot: called with the lock.

        Raises:
            FileError: a file cannot be written. The directory has what it had.
        """
        with lock:
            now = snapshot()
            self._serial += 1
            tensors: Tensors = {}
            ends = []
            for number, (ring, newest) in enumerate(
                zip(rings, now.newest, strict=True)
            ):
                rows_of = SavedRows(ring)
                size = _block_rows(ring)
                # blocks can be overwritten before they are saved, and the newest row needs ``reach``
                # rows before it
                end = max(rows_of.kept, (ring.hi - 1 - ring.reach) // size * size)
                ends.append(end)
                rows = rows_of.rows(end, ring.hi)
                tensors |= {
                    f"{number}.{name}": values for name, values in newest.items()
                }
                tensors |= {
                    f"{number}.rows.{name}": values for name, values in rows.items()
                }
        make_folder(directory)
        name = f"newest-{self._serial}-{self._origin}.safetensors"
        _write(directory / name, tensors, {"firsts": ends})
        saved = []
        named = {name}
        for number, (ring, end) in enumerate(zip(rings, ends, strict=True)):
            lo, hi = now.spans[number]
            blocks, whole_from = self._save_blocks(
                directory, number, ring, (lo, end), lock
            )
            named.update(block["name"] for block in blocks)
            kept = blocks[0]["first"] if blocks else end
            saved.append(
                {
                    "lo": max(whole_from, kept + ring.reach if kept else 0),
                    "powers_from": lo,
                    "hi": hi,
                    "end": end,
                    "block_rows": _block_rows(ring),
                    "blocks": blocks,
                }
            )
        manifest = {
            "format": FORMAT,
            "memory": now.about,
            "newest": name,
            "rings": saved,
        }
        write_whole(directory / MANIFEST, [tensor_files.seal(manifest)])
        _remove_others(directory, named)

    def _save_blocks(
        self,
        directory: Path,
        number: int,
        ring: Ring,
        span: tuple[int, int],
        lock: AbstractContextManager[Any],
    ) -> tuple[list[dict[str, Any]], int]:
        """Write those blocks of a ring that have no file.

        Returns:
            all blocks: the last ones that follow each other without a gap; and the first row that is
            whole in them. Of rows that were dropped before they were copied, only the columns are
            there, which later rows need.
        """
        size = _block_rows(ring)
        lo, end = span
        whole_from = lo
        found: list[dict[str, Any]] = []
        for block in range(max(0, lo - ring.reach) // size, end // size):
            name = self._names.get((number, block))
            if name is None or not (directory / name).is_file():
                rows_of = SavedRows(ring)
                with lock:
                    first = max(block * size, rows_of.kept)
                    if first >= (block + 1) * size:  # overwritten meanwhile
                        found.clear()
                        continue
                    if first < ring.lo:
                        whole_from = ring.lo
                    rows = rows_of.rows(first, (block + 1) * size)
                name = f"rows-{number}-{first}-{(block + 1) * size}-{self._origin}.safetensors"
                about = {"ring": number, "rows": [first, (block + 1) * size]}
                _write(directory / name, rows, about)
                self._names[number, block] = name
            first = int(name.split("-")[2])
            if found and first != found[-1]["end"]:
                found.clear()
            found.append({"first": first, "end": (block + 1) * size, "name": name})
        gone = [
            key for key in self._names if key[0] == number and (key[1] + 1) * size <= lo
        ]
        for key in gone:
            del self._names[key]
        return found, whole_from

    def load(
        self,
        directory: Path,
        make: Callable[[Mapping[str, Any]], Sequence[Ring]],
    ) -> Loaded:
        """Read a directory.

        Args:
            directory: of ``save``.
            make: called with the description of the memory; returns empty rings for its rows.

        Returns:
            the rings, and what else was saved.

        Raises:
            BadCheckpoint: a file is missing, damaged, or of another format.
        """
        path = directory / MANIFEST
        try:
            with open_regular(path, links=False) as file:
                manifest = tensor_files.unseal(file.read())
        except FileError as error:
            raise BadCheckpoint(f"There is no saved ReplayMemory: {error}") from error
        except ValueError as error:
            raise BadCheckpoint(f"{path} was changed or damaged: {error}") from error
        if manifest.get("format") != FORMAT:
            raise BadCheckpoint(
                f"{path} has the format {manifest.get('format')!r}, and this version of Muster reads"
                f" format {FORMAT}"
            )
        rings = make(manifest["memory"])
        names = {}
        for number, (ring, saved) in enumerate(
            zip(rings, manifest["rings"], strict=True)
        ):
            for block in saved["blocks"]:
                rows, about = _read(directory, block["name"])
                _check_is(
                    directory / block["name"],
                    about,
                    {"ring": number, "rows": [block["first"], block["end"]]},
                )
                _put(ring, block["first"], rows, saved, directory / block["name"])
                if saved["block_rows"] == _block_rows(ring):
                    names[number, block["first"] // _block_rows(ring)] = block["name"]
        newest, about = _read(directory, manifest["newest"])
        ends = [ring_saved["end"] for ring_saved in manifest["rings"]]
        _check_is(directory / manifest["newest"], about, {"firsts": ends})
        others = []
        for number, (ring, saved) in enumerate(
            zip(rings, manifest["rings"], strict=True)
        ):
            mine = _part(newest, f"{number}.")
            rows = _part(mine, "rows.")
            path = directory / manifest["newest"]
            _put(ring, saved["end"], rows, saved, path)
            others.append(mine)
        spans = [(saved["lo"], saved["hi"]) for saved in manifest["rings"]]
        firsts = [saved["powers_from"] for saved in manifest["rings"]]
        self._origin = secrets.token_hex(8)
        self._names = names
        return Loaded(rings, manifest["memory"], spans, others, firsts)


@dataclass(frozen=True)
class Loaded:
    """What ``MemoryFiles.load`` has read.

    Attributes:
        rings: with the rows, which are not readable yet.
        about, spans, newest: see ``Snapshot``.
        powers_from: of each ring, the first row that has a priority.
    """

    rings: Sequence[Ring]
    about: Mapping[str, Any]
    spans: Sequence[tuple[int, int]]
    newest: Sequence[Tensors]
    powers_from: Sequence[int]


def _block_rows(ring: Ring) -> int:
    """Return the number of rows of a block."""
    return max(1, BLOCK_BYTES // ring.stored.row_bytes)


def _put(
    ring: Ring,
    first: int,
    rows: Tensors,
    saved: Mapping[str, Any],
    path: Path,
) -> None:
    """Put rows of a file into the ring."""
    try:
        SavedRows(ring).put(first, rows, saved["lo"], saved["hi"])
    except UNREADABLE as error:
        raise BadCheckpoint(
            f"{path} does not fit to its manifest: {str(error)[:200]}"
        ) from error


def _part(tensors: Tensors, prefix: str) -> Tensors:
    """Return those with a prefix, without it."""
    return {
        name.removeprefix(prefix): values
        for name, values in tensors.items()
        if name.startswith(prefix)
    }


def _write(path: Path, tensors: Tensors, about: Mapping[str, Any]) -> None:
    write_whole(path, [tensor_files.encode(tensors, about)])


def _read(directory: Path, name: str) -> tuple[Tensors, Any]:
    """Return the tensors of a file, and its description."""
    path = directory / name
    try:
        if not FILE.fullmatch(name):
            raise ValueError("it is no file of a ReplayMemory")
        with (
            open_regular(path, links=False) as file,
            tensor_files.opened(file, path) as found,
        ):
            return {each: found.tensor(each) for each in found.names}, found.about
    except FileError as error:
        raise BadCheckpoint(
            f"A file of the saved ReplayMemory is missing: {error}"
        ) from error
    except UNREADABLE as error:
        raise BadCheckpoint(
            f"{path} was cut, changed or damaged: {str(error)[:200]}"
        ) from error


def _check_is(path: Path, about: Any, expected: Mapping[str, Any]) -> None:
    """Raise ``BadCheckpoint`` if a file is another one than its name says."""
    if about != expected:
        raise BadCheckpoint(
            f"{path} has the content of another file of a ReplayMemory: {about}, expected {expected}"
        )


def _remove_others(directory: Path, named: set[str]) -> None:
    """Remove files of former saves, and of saves that were killed."""
    for name in os.listdir(directory):
        if name not in named and (FILE.fullmatch(name) or LEFT_OVER.fullmatch(name)):
            with suppress(OSError):
                (directory / name).unlink()
