"""``Recorder``: writes batches to disk in chunks."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from muster.errors import BadOption, BadRecording, FileError, UnsupportedSpace
from muster.keys import Key, dotted, key_of
from muster.recording import chunks
from muster.utils.attributes import installed
from muster.utils.forks import Owner
from muster.utils.tensor_files import STORABLE, seal
from muster.utils.texts import counted
from muster.utils.whole_files import make_folder, write_whole

if TYPE_CHECKING:
    from tensordict import TensorDictBase

FORMAT = "muster-recording"
VERSION = 2
MAX_BATCHES_PER_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


class Recorder:
    """Writes batches to a new directory, from which ``load`` reads them back bit for bit.

    ``write`` copies batches; they are written to disk in chunks. Chunks on disk stay readable
    whatever happens to the process or the disk. If the disk is full, free some space and repeat the
    call that raised: nothing is lost or recorded twice. Not thread-safe.

    Args:
        directory: path; created if missing. It must not hold a recording, complete or not.
        meta: JSON-able description, stored unchanged; by convention with ``env``, ``seed`` and
            ``policy``.
        chunk_bytes: size in bytes at which a chunk is written; the recorder uses as much memory.
        max_age_s: age in seconds of its first batch at which a smaller chunk is written, to limit
            the loss by a crash.
        fresh: the first row of the first batch starts new episodes. False: recording starts later.

    Raises:
        BadRecording: the directory holds a recording, or another recorder is using it.
        BadOption: ``meta`` is not JSON-able, or ``chunk_bytes`` is not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        meta: dict[str, Any],
        chunk_bytes: int = 32 << 20,
        max_age_s: float = 30.0,
        fresh: bool = True,
    ) -> None:
        if chunk_bytes < 1:
            raise BadOption(f"chunk_bytes={chunk_bytes} is not positive.")
        try:
            meta = json.loads(_exact_json(meta))
        except TypeError as error:
            raise BadOption(
                f"meta may hold str, numbers, bool, None, lists and dicts, and has {error}."
            ) from None
        self.directory = Path(os.path.realpath(directory))
        self._chunk_bytes = chunk_bytes
        self._max_age_s = max_age_s
        # on disk
        self._chunks = 0
        self._batches = 0
        self._frames = 0
        self._pending: _Pending | None = None
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "id": uuid.uuid4().hex,
            "muster": installed("muster-rl")
            or "unknown",  # unknown if run from a source tree
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "fresh": fresh,
            "meta": meta,
        }
        # keys, dtypes and shapes of all batches
        self._signature: dict[Key, tuple[str, tuple[int, ...]]] | None = None
        self._about: dict[
            str, Any
        ] = {}  # description of the batches, for the final manifest
        self._owner = Owner("recorder", "files")
        self._lock: chunks.DirectoryLock | None = self._claim()

    @property
    def frames(self) -> int:
        """Number of frames on disk."""
        return self._frames

    @property
    def pending_frames(self) -> int:
        """Number of frames in memory, which a crash would lose."""
        return self._pending.frames if self._pending else 0

    def write(self, batch: TensorDictBase) -> None:
        """Add a batch. It may be changed or dropped afterwards.

        If this raises, the batch was not added, and the call may be repeated.

        Raises:
            BadRecording: the disk is full or fails; the batch differs from earlier ones in keys,
                shapes or dtypes; or the recorder is closed. Earlier batches are kept.
            UnsupportedSpace: a leaf is neither a plain tensor nor JSON-able objects.
            ForkedProcess: the caller is a fork of the recorder's process.
        """
        self._owner.check()
        if self._lock is None:
            raise BadRecording(f"The recorder of {self.directory} is closed.")
        content = _Content(batch)
        if self._signature not in (None, content.signature):
            raise BadRecording(
                f"A batch does not fit the recording {self.directory}: {self._difference(content)}."
            )
        if self._pending is not None and not self._pending.takes(content):
            self.flush()
        if self._pending is None or not self._pending.takes(content):
            self._pending = _Pending(content, self._chunk_bytes)
        self._pending.add(content)
        if (
            self._pending.full
            or time.monotonic() - self._pending.since > self._max_age_s
        ):
            try:
                self.flush()
            except BaseException:
                self._pending.remove_last()
                raise
        if self._signature is None:
            self._signature = content.signature
            self._about["frames_per_batch"] = content.frames
            self._about["batch_size"] = list(content.batch_size)
            self._about["keys"] = {
                dotted(key): {"dtype": dtype, "shape": list(shape)}
                for key, (dtype, shape) in content.signature.items()
            }

    def resume(self) -> None:
        """Say that the first batch continues episodes that began elsewhere, as ``fresh=False``
        does.

        Raises:
            BadRecording: batches were written already.
        """
        if self._signature is not None:
            raise BadRecording(
                f"{self.directory} has batches already, and after a state is loaded some could come"
                " again: load it before the first batch, or make the collector again with another"
                " directory."
            )
        self._manifest["fresh"] = False

    def flush(self) -> None:
        """Write the pending batches as a chunk.

        Raises:
            BadRecording: the disk is full or fails. The batches are still pending: repeat the call.
            ForkedProcess: the caller is a fork of the recorder's process.
        """
        self._owner.check()
        if self._pending is None or not self._pending.count:
            return
        about = {
            "chunk": self._chunks,
            "first_batch": self._batches,
            "manifest": self._manifest,
        }
        path = self.directory / chunks.chunk_name(self._chunks)
        content = self._pending.encode(about)
        try:
            write_whole(path, [content])
        except BaseException as error:
            # perhaps not written durably; a repeated call may write fewer batches
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._not_written(path.name, error) from error
            raise
        self._chunks += 1
        self._batches += self._pending.count
        self._frames += self._pending.frames
        self._pending.clear()

    def close(self) -> None:
        """Write the pending batches and finish.

        May be called again. Does nothing in a fork of the recorder's process.

        Raises:
            BadRecording: the disk is full or fails. The recorder stays open with its pending
                batches: repeat the call. Otherwise these are lost at the end of the process, and
                the recording is marked as not closed.
        """
        if self._lock is None or not self._owner.is_here():
            return
        self.flush()
        counts = {
            "frames": self._frames,
            "batches": self._batches,
            "chunks": self._chunks,
        }
        self._write_manifest(self._about | counts | {"closed": True})
        self._lock.release()
        self._lock = None
        self._pending = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BadRecording as second:
            if error is None:
                raise
            _log.error("%s", second)  # report the first error

    def __repr__(self) -> str:
        state = "closed" if self._lock is None else "open"
        held = f"{counted(self._frames, 'frame')} in {counted(self._chunks, 'chunk')}"
        return f"Recorder({str(self.directory)!r}, {state}, {held})"

    def _claim(self) -> chunks.DirectoryLock:
        try:
            make_folder(self.directory)
            lock = chunks.DirectoryLock(self.directory)
        except FileError as error:
            raise BadRecording(f"Cannot record: {error}") from error
        except OSError as error:
            raise BadRecording(
                f"Cannot record into {self.directory}: {error.strerror}."
            ) from error
        try:
            for name in sorted(os.listdir(self.directory)):
                if name == chunks.MANIFEST or chunks.CHUNK.fullmatch(name):
                    raise BadRecording(
                        f"{self.directory} already holds a recording ({name}), and recordings are"
                        " never overwritten. Choose another directory, or delete that one."
                    )
            self._write_manifest({"closed": False})
        except BaseException:
            lock.release()
            raise
        return lock

    def _write_manifest(self, state: dict[str, Any]) -> None:
        try:
            content = seal(self._manifest | state, indent=1)
            write_whole(self.directory / chunks.MANIFEST, [content])
        except OSError as error:
            raise self._not_written(chunks.MANIFEST, error) from error

    def _not_written(self, name: str, error: OSError) -> BadRecording:
        return BadRecording(
            f"Could not write {name} of {self.directory}: {error.strerror}. {self._frames:,} frames"
            f" in {self._chunks} chunks are on disk and readable. Free some space, then repeat the"
            " call that raised this: what it was given was not recorded, and what was pending"
            " before it still is."
        )

    def _difference(self, content: _Content) -> str:
        old = self._signature or {}
        new = content.signature
        lines = [f"{dotted(key)} is missing" for key in old if key not in new]
        lines += [f"{dotted(key)} is new" for key in new if key not in old]
        both = [key for key in new if key in old]
        lines += [
            f"{dotted(key)} is {new[key]}, was {old[key]}"
            for key in both
            if new[key] != old[key]
        ]
        return "; ".join(lines)


class _Content:
    """The checked leaves of one batch.

    ``signature``: dtype name (or ``"object"``) and shape of one frame, by key.
    """

    def __init__(self, batch: TensorDictBase) -> None:
        self.batch_size = tuple(batch.batch_size)
        self.frames = batch.numel()
        names = batch.names if batch.batch_dims else []
        self.names = [names[i] if names else None for i in range(len(self.batch_size))]
        self.tensors: dict[Key, torch.Tensor] = {}
        self.objects: dict[Key, str] = {}
        if not self.batch_size or not self.frames:
            raise BadRecording(
                f"A batch of size {self.batch_size} has no frames; expected [T], [B, T] or [W,"
                " B, T]."
            )
        for key, value in _leaves(batch):
            if isinstance(value, torch.Tensor):
                self.tensors[key] = _storable(key, value)
            else:
                self.objects[key] = _json_line(key, value)
        if not self.tensors and not self.objects:
            raise BadRecording("A batch without any leaf cannot be recorded.")
        dims = len(self.batch_size)
        self.signature: dict[Key, tuple[str, tuple[int, ...]]] = {}
        for key, tensor in self.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.signature[key] = (dtype, tuple(tensor.shape[dims:]))
        for key in self.objects:
            self.signature[key] = ("object", ())


class _Pending:
    """The next chunk in memory: up to ``capacity`` batches of one size."""

    def __init__(self, first: _Content, chunk_bytes: int) -> None:
        self.batch_size = first.batch_size
        self._names = first.names
        self._signature = first.signature
        dims = range(len(first.batch_size))
        tensors = first.tensors
        strides = next(
            (tensor.stride() for tensor in tensors.values()), tuple(reversed(dims))
        )
        # the memory order, so that a copy transposes nothing
        self.order = sorted(dims, key=lambda d: -strides[d])
        size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        self.capacity = min(max(1, chunk_bytes // max(1, size)), MAX_BATCHES_PER_CHUNK)
        self._chunk_bytes = chunk_bytes
        # Pages of an empty tensor take no memory until they are written.
        self._buffers: dict[Key, torch.Tensor] = {}
        for key, tensor in tensors.items():
            shape = (self.capacity, *self._permute(tensor).shape)
            self._buffers[key] = torch.empty(shape, dtype=tensor.dtype, device="cpu")
        self._lines: dict[Key, list[str]] = {key: [] for key in first.objects}
        self.clear()

    def clear(self) -> None:
        """Remove the batches.

        Their memory is reused, since new pages cost as much as filling them.
        """
        self.since = math.inf
        self.count = 0
        self._text_bytes = 0
        for lines in self._lines.values():
            lines.clear()

    @property
    def frames(self) -> int:
        return self.count * torch.Size(self.batch_size).numel()

    @property
    def full(self) -> bool:
        return self.count == self.capacity or self._text_bytes >= self._chunk_bytes

    def takes(self, content: _Content) -> bool:
        same_size = (
            content.batch_size == self.batch_size and content.names == self._names
        )
        return not self.full and same_size and content.signature == self._signature

    def add(self, content: _Content) -> None:
        for key, tensor in content.tensors.items():
            self._buffers[key][self.count].copy_(self._permute(tensor))
        for key, line in content.objects.items():
            self._lines[key][self.count :] = [line]
            self._text_bytes += len(line)
        self.count += 1
        self.since = min(self.since, time.monotonic())

    def remove_last(self) -> None:
        self.count -= 1
        self._text_bytes -= sum(len(lines.pop()) for lines in self._lines.values())
        if not self.count:
            self.clear()

    def encode(self, about: dict[str, Any]) -> bytes:
        size = {
            "batches": self.count,
            "batch_size": list(self.batch_size),
            "names": self._names,
            "order": self.order,
        }
        leaves = {key: buffer[: self.count] for key, buffer in self._buffers.items()}
        objects = {key: "\n".join(lines).encode() for key, lines in self._lines.items()}
        return chunks.encode(about | size, leaves, objects)

    def _permute(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(*self.order, *range(len(self.order), tensor.ndim))


def _leaves(batch: TensorDictBase) -> Iterator[tuple[Key, Any]]:
    from tensordict import NonTensorStack, TensorDictBase

    # a NonTensorStack is a TensorDictBase, too, but its keys() are empty
    def is_leaf(kind: type) -> bool:
        return issubclass(kind, NonTensorStack) or not issubclass(kind, TensorDictBase)

    for key in batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf):
        yield key_of(key), batch.get(key)


def _storable(key: Key, tensor: torch.Tensor) -> torch.Tensor:
    storable = tensor.dtype in STORABLE and tensor.layout is torch.strided
    if not storable or tensor.is_nested:
        raise UnsupportedSpace(
            f"{dotted(key)} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}, which a"
            " recording cannot hold. Convert it, or leave it out with batch.exclude(...)."
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _json_line(key: Key, value: Any) -> str:
    from tensordict import is_non_tensor

    if not is_non_tensor(value):
        raise UnsupportedSpace(
            f"{dotted(key)} is a {type(value).__name__}, which a recording cannot hold."
        )
    try:
        return _exact_json(value.tolist(), separators=(",", ":"))
    except TypeError as error:
        raise UnsupportedSpace(
            f"{dotted(key)} holds {error}. A recording keeps tensors, and objects made of str, int,"
            " float, bool, None, lists and dicts. Convert it, or leave it out with"
            " batch.exclude(...)."
        ) from error


def _exact_json(value: Any, **options: Any) -> str:
    """Return ``value`` as JSON that is read back equal and with the same types.

    Raises ``TypeError`` if impossible.
    """
    try:
        _check_plain(value)
        return json.dumps(value, **options)
    except (ValueError, RecursionError) as error:
        # circular, too deep, or an int of thousands of digits
        raise TypeError(
            f"{type(value).__name__} cannot be written as JSON: {error}"
        ) from error


def _check_plain(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(
                    f"a dict with the key {key!r} ({type(key).__name__}, not str)"
                )
            _check_plain(item)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
