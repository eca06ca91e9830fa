"""One chunk: whole batches of one shape, as a valid safetensors file whose every byte is under a CRC32.

The header's ``__metadata__`` holds the CRC32 of the header itself and, under ``muster``, a JSON text
that describes the chunk without the manifest's help. A leaf of N batches is one tensor ``[N, *batch, *shape]``,
its batch dimensions in the order in which they lay in memory, so that nothing is transposed on the way.
Leaves of Python objects are ``U8`` tensors: JSON, one line per batch.

Whatever reads safetensors reads a chunk. The library neither writes nor reads it here: it orders the metadata as it
likes, where the seal needs its place; it copies all data to write them; and it takes twice as long to map a batch.
"""

from __future__ import annotations

import json
import math
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muster.errors import BadRecording
from muster.keys import Key
from muster.recording.files import UNSEALED, is_sealed, open_regular, seal
from muster.whole_files import read_json

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 16 << 20
ALIGNMENT = 64  # of the data's first byte


class Cut(BadRecording):
    """The file ends before its header says: what a crash leaves on a file system that lost the last writes."""


@dataclass(frozen=True)
class StoredTensor:
    """Where the values of one key lie in a chunk: ``shape`` is ``[N, *batch, *shape]``, or ``[bytes]`` for objects."""

    name: str  # of the safetensors tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # first byte in the file
    stop: int
    crc: int
    is_object: bool


@dataclass(frozen=True)
class Chunk:
    """What the header of a chunk says, checked against the file's size but not yet against the data."""

    path: Path
    size_bytes: int
    recording_id: str
    index: int
    first_batch: int
    batches: int
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...]
    order: tuple[int, ...]  # batch dimension ``order[i]`` is the stored dimension ``i``
    leaves: Mapping[Key, StoredTensor]
    manifest: Mapping[str, Any]

    @property
    def frames(self) -> int:
        return self.batches * math.prod(self.batch_size)


def encode(about: dict[str, Any], leaves: Mapping[Key, torch.Tensor], objects: Mapping[Key, bytes]) -> list[Any]:
    """The bytes of a chunk, as buffers to be written one after the other.

    Args:
        about: the fields of ``Chunk`` that the leaves do not tell; JSON.
        leaves: contiguous CPU tensors ``[N, *batch, *shape]``.
        objects: JSON lines.
    """
    tensors = [(_name(key), DTYPE_NAMES[t.dtype], list(t.shape), as_bytes(t)) for key, t in leaves.items()]
    tensors += [(_name(key), "U8", [len(text)], memoryview(text)) for key, text in objects.items()]
    crcs = {name: f"{zlib.crc32(blob):08x}" for name, _, _, blob in tensors}
    muster = about | {"crc32": crcs, "objects": sorted(_name(key) for key in objects)}
    parts = sealed_file(sorted(tensors, key=lambda tensor: tensor[0]), json.dumps(muster))
    if len(parts[1]) > MAX_HEADER_BYTES:
        raise BadRecording(
            f"{len(leaves)} keys need a header of {len(parts[1]):,} bytes, more than {MAX_HEADER_BYTES:,}."
        )
    return parts


def sealed_file(tensors: Sequence[tuple[str, str, Sequence[int], memoryview]], muster: str) -> list[Any]:
    """The bytes of a safetensors file whose header is sealed: its length, the header, and the data of each tensor.

    Args:
        tensors: name, safetensors dtype, shape, and contents.
        muster: what stands under that name in the ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": {"crc32": UNSEALED, "muster": muster}}
    position, blobs = 0, []
    # Wide items first: then each tensor starts at a multiple of its item size without padding.
    for name, dtype, shape, blob in sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(blob)]}
        position += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [len(text).to_bytes(8, "little"), seal(text), *blobs]


def read_chunk(path: Path) -> Chunk:
    """Read and check the header of a chunk; the data are left alone.

    Raises:
        Cut: the file is shorter than it says.
        BadRecording: its header is damaged, or not one of ours.
    """
    file, size = open_regular(path)
    with file:
        if size < 8:
            raise Cut(f"{path} is cut after {size} bytes")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise BadRecording(f"{path} claims a header of {length:,} bytes: it is damaged. {_REMEDY}")
        text = file.read(length)
    if len(text) < length:
        raise Cut(f"{path} is cut after {size:,} bytes")
    if not is_sealed(text):
        raise BadRecording(f"{path}: the header does not match its checksum, so it was changed or damaged. {_REMEDY}")
    try:
        chunk = _parse(path, size, read_json(text), 8 + length)
    except BadRecording:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        what = reprlib.repr(str(error))
        raise BadRecording(f"{path} has a header that Muster does not write ({what}). {_REMEDY}") from error
    end = max((leaf.stop for leaf in chunk.leaves.values()), default=8 + length)
    if size < end:
        raise Cut(f"{path} is cut after {size:,} of {end:,} bytes")
    if size > end:
        raise BadRecording(f"{path} is {size - end:,} bytes longer than its header says. {_REMEDY}")
    return chunk


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def damaged(chunk: Chunk, what: str) -> BadRecording:
    """The error for a chunk that is not as it was written."""
    return BadRecording(f"{chunk.path}: {what}, so it was changed or damaged. {_REMEDY}")


_REMEDY = (
    "Restore the file from a copy, or leave it out with load(directory, skip_damaged=True), "
    "which reads and checks everything else."
)


def _parse(path: Path, size: int, header: dict[str, Any], data: int) -> Chunk:
    about = read_json(header.pop("__metadata__")["muster"])
    batches, batch_size = _size(about["batches"]), _shape(about["batch_size"])
    order = _shape(about["order"])
    names = tuple(about["names"])
    if not batches or not all(batch_size):
        raise ValueError("batches without frames")
    if sorted(order) != list(range(len(batch_size))) or len(names) != len(batch_size) or not batch_size:
        raise ValueError("order, names and batch_size disagree")
    known = [name for name in names if name is not None]
    if not all(isinstance(name, str) for name in known) or len(set(known)) < len(known):
        raise ValueError(f"names {names}")
    if batches * math.prod(batch_size) > size:
        raise ValueError("more frames than bytes")  # a leaf of a frame is never smaller than that
    stored = (batches, *(batch_size[i] for i in order))
    objects = set(about["objects"])
    leaves: dict[Key, StoredTensor] = {}
    position = data
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = DTYPES[entry["dtype"]], _shape(entry["shape"])
        start, stop = (data + _size(offset) for offset in entry["data_offsets"])
        if start != position or stop - start != math.prod(shape) * dtype.itemsize or start % dtype.itemsize:
            raise ValueError(f"{name!r} does not lie where it should")
        if name not in objects and shape[: len(stored)] != stored:
            raise ValueError(f"{name!r} has shape {shape}, and the batches {stored}")
        if name in objects and (dtype != torch.uint8 or len(shape) != 1):
            raise ValueError(f"{name!r} is no text")
        crc32 = int(about["crc32"][name], 16)
        leaves[_key(name)] = StoredTensor(name, dtype, shape, start, stop, crc32, name in objects)
        position = stop
    if any(key[:n] in leaves for key in leaves for n in range(1, len(key))):
        raise ValueError("a key is also the parent of another one")
    first, index, manifest = _size(about["first_batch"]), _size(about["chunk"]), about["manifest"]
    return Chunk(path, size, manifest["id"], index, first, batches, batch_size, names, order, leaves, manifest)


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _shape(values: Any) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _name(key: Key) -> str:
    """``("next", "reward")`` as ``next/reward``; slashes within a part are escaped as in JSON pointers."""
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in key)


def _key(name: str) -> Key:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))
