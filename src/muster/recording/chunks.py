"""One chunk: whole batches of one shape in a safetensors file, which can be read without the
manifest.

A leaf of N batches is one tensor ``[N, *batch, *shape]``. Its batch dimensions are in the order of
the memory layout, so that writing transposes nothing. Leaves of Python objects are uint8 tensors:
JSON, one line per batch.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from muster.errors import BadRecording, FileError
from muster.keys import Key
from muster.utils import tensor_files
from muster.utils.whole_files import (
    NO_LINKS,
    NO_WAIT,
    is_at,
    open_regular,
    try_lock,
    unlock,
)

MANIFEST = "recording.json"
LOCK = ".lock"
CHUNK = re.compile(r"chunk-(\d{6,12})\.safetensors")


def chunk_name(index: int) -> str:
    """Return the file name of a chunk; it matches ``CHUNK``."""
    return f"chunk-{index:06d}.safetensors"


def open_part(path: Path) -> IO[bytes]:
    """Open a file of a recording (no link) for reading. Raises ``BadRecording``."""
    try:
        return open_regular(path, links=False)
    except FileError as error:
        link = (
            " It is a symbolic link: put the file itself there."
            if path.is_symlink()
            else ""
        )
        raise BadRecording(f"{error}{link}") from error


class DirectoryLock:
    """The lock of a directory's only recorder. The kernel releases it when the process exits."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
            self._close = weakref.finalize(self, os.close, fd)
            try:
                if not try_lock(fd):
                    holder = (
                        os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
                    )
                    raise BadRecording(
                        f"{directory} is being recorded into by another recorder (pid {holder}). "
                        "Choose another directory, or close that one."
                    )
            except BaseException:
                self._close()
                raise
            if is_at(self._path, fd):
                break
            self._close()  # the previous recorder has removed the file after it was opened here
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        if self._close.alive:
            self._path.unlink(missing_ok=True)
            unlock(self._fd)
            self._close()


def is_locked(directory: Path) -> bool:
    """Return whether a recorder is using the directory."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | NO_LINKS | NO_WAIT)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


REMEDY = (
    "Restore the file from a copy, or leave it out with load(directory, skip_damaged=True), "
    "which reads and checks everything else."
)


class DamagedChunk(BadRecording):
    """The file was truncated or changed."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"{path} was cut, changed or damaged: {why}. {REMEDY}")


@dataclass(frozen=True)
class Chunk:
    """The header of a chunk."""

    path: Path
    size_bytes: int
    index: int
    first_batch: int
    batches: int
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...]
    order: tuple[int, ...]  # the stored dimension ``i`` is batch dimension ``order[i]``
    leaves: Mapping[Key, str]  # names of tensors by key
    objects: frozenset[str]
    manifest: Mapping[str, Any]

    @property
    def frames(self) -> int:
        return self.batches * math.prod(self.batch_size)


def encode(
    about: dict[str, Any],
    leaves: Mapping[Key, torch.Tensor],
    objects: Mapping[Key, bytes],
) -> bytes:
    """Return the content of a chunk, from contiguous CPU tensors ``[N, *batch, *shape]`` and JSON
    lines.
    """
    tensors = {_name(key): tensor for key, tensor in leaves.items()}
    tensors |= {
        _name(key): tensor_files.from_bytes(text) for key, text in objects.items()
    }
    try:
        names = [_name(key) for key in objects]
        return tensor_files.encode(tensors, about | {"objects": names})
    except ValueError as error:
        raise BadRecording(
            f"A chunk of {len(tensors)} keys cannot be written: {error}."
        ) from error


def read_chunk(path: Path) -> Chunk:
    """Read and check the header of a chunk, without its data."""
    file = open_part(path)
    try:
        with file, tensor_files.opened(file, path) as opened:
            return _parse(path, os.fstat(file.fileno()).st_size, opened)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # the message may contain any part of the file
        raise DamagedChunk(path, repr(str(error)[:200])) from error


def _parse(path: Path, size: int, opened: tensor_files.TensorFile) -> Chunk:
    about = opened.about
    batches = _size(about["batches"])
    batch_size = _shape(about["batch_size"])
    order = _shape(about["order"])
    names = tuple(about["names"])
    if not batches or not batch_size or not all(batch_size):
        raise ValueError("batches without frames")
    dims = len(batch_size)
    if sorted(order) != list(range(dims)) or len(names) != dims:
        raise ValueError("order, names and batch_size disagree")
    known = [name for name in names if name is not None]
    texts = all(isinstance(name, str) for name in known)
    if not texts or len(set(known)) < len(known):
        raise ValueError(f"names {names}")
    if batches * math.prod(batch_size) > size:
        raise ValueError(
            "more frames than bytes"
        )  # every frame takes at least one byte
    stored = (batches, *(batch_size[i] for i in order))
    objects = frozenset(about["objects"])
    for name in opened.names:
        shape = opened.shape(name)
        fits = len(shape) == 1 if name in objects else shape[: len(stored)] == stored
        if not fits:
            raise ValueError(f"{name!r} has shape {shape}, and the batches {stored}")
    leaves = {_key(name): name for name in opened.names}
    above = {key[:n] for key in leaves for n in range(1, len(key))}
    if not above.isdisjoint(leaves):
        raise ValueError("a key is also the parent of another one")
    first = _size(about["first_batch"])
    index = _size(about["chunk"])
    manifest = about["manifest"]
    if not isinstance(manifest["id"], str):
        raise TypeError("its recording has no id")
    return Chunk(
        path=path,
        size_bytes=size,
        index=index,
        first_batch=first,
        batches=batches,
        batch_size=batch_size,
        names=names,
        order=order,
        leaves=leaves,
        objects=objects,
        manifest=manifest,
    )


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _shape(values: Any) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _name(key: Key) -> str:
    """Convert ``("next", "reward")`` to ``next/reward``.

    Slashes within a part are escaped as in JSON pointers.
    """
    escaped = [part.replace("~", "~0").replace("/", "~1") for part in key]
    return "/".join(escaped)


def _key(name: str) -> Key:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))
