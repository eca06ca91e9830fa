"""One file that holds a nested state, for ``load`` to give back bit for bit: safetensors and JSON, no pickle.

Tensors, arrays and byte strings are safetensors tensors named "0", "1", ...; everything else is a JSON text in the
header's ``__metadata__``. Header and data are under CRC32s.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muster.errors import BadCheckpoint
from muster.recording.chunks import DTYPE_NAMES, DTYPES, as_bytes, sealed_file
from muster.recording.files import is_sealed
from muster.whole_files import read_json, write_whole

MAX_HEADER_BYTES = 100_000_000  # what safetensors allows
FORMAT = 1
SMALL = 1 << 63  # integers that any JSON reader takes
NATIVE = {np.dtype(kind): kind for kind in ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")}


def save(path: str | Path, state: Any) -> None:
    """Write ``state`` into the file ``path``: after a crash there is the new file or the old one, whole.

    Args:
        state: None, bool, int of any size, float, str, bytes, tensors, NumPy arrays and numbers, and lists, tuples
            and dicts of these (keys: str, int, tuples of str). Tensors lose their gradients, device and strides.

    Raises:
        BadCheckpoint: something else is in it; the message has its place.
        OSError: the file cannot be written, and nothing was changed.
    """
    writer = _Writer()
    try:
        about = {"format": FORMAT, "state": writer.encode(state, "state"), "crc32": writer.crcs}
        muster = json.dumps(about, allow_nan=False)
    except RecursionError as error:
        raise BadCheckpoint("The state is nested too deeply, or holds itself.") from error
    write_whole(Path(path), writer.parts(muster))


def load(path: str | Path) -> Any:
    """What ``save`` has written, in memory of its own, tensors on the CPU. Runs no code from the file.

    Raises:
        BadCheckpoint: the file is missing, damaged, or something else.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from error
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    if not 8 < 8 + length <= min(len(content), MAX_HEADER_BYTES) or not is_sealed(header):
        raise BadCheckpoint(f"{path} is no checkpoint of Muster's, or its header is damaged.")
    try:
        fields = read_json(header)
        about = read_json(fields.pop("__metadata__")["muster"])
        if about["format"] != FORMAT:
            raise BadCheckpoint(f"{path} has format {about['format']}, and this version of Muster reads {FORMAT}.")
        return _Reader(content, 8 + length, fields, about["crc32"]).decode(about["state"])
    except BadCheckpoint:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise BadCheckpoint(f"{path} is damaged: {error}. Restore it from a copy.") from error


class _Writer:
    def __init__(self) -> None:
        self.crcs: list[int] = []
        self._tensors: list[tuple[str, list[int], memoryview]] = []  # dtype, shape, data
        self._known: dict[int, int] = {}  # byte strings by id: equal environments share one

    def encode(self, value: Any, place: str) -> Any:
        """``value`` as JSON, in which what is large is a number of a tensor."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and -SMALL <= value < SMALL):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is int:
            return {"int": hex(value)}
        if kind is list:
            return [self.encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(item, f"{place}[{i}]") for i, item in enumerate(value)]}
        if kind in (dict, OrderedDict):
            return {"dict": [[self._key(k, place), self.encode(v, f"{place}[{k!r}]")] for k, v in value.items()]}
        if kind is bytes:
            if id(value) not in self._known:
                self._known[id(value)] = self._add("U8", [len(value)], memoryview(value))
            return {"bytes": self._known[id(value)]}
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
            return self._tensor(value.detach())
        if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufcSUmM":
            return self._array(np.ascontiguousarray(value), value)
        raise BadCheckpoint(f"{place} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold.")

    def parts(self, muster: str) -> list[Any]:
        """The bytes of the file, as buffers to be written one after the other."""
        parts = sealed_file([(str(n), *tensor) for n, tensor in enumerate(self._tensors)], muster)
        if len(parts[1]) > MAX_HEADER_BYTES:
            raise BadCheckpoint(f"The state needs {len(parts[1]):,} bytes of JSON; put its numbers into arrays.")
        return parts

    def _key(self, key: Any, place: str) -> Any:
        if type(key) in (str, int) or (type(key) is tuple and all(type(part) is str for part in key)):
            return self.encode(key, place)
        raise BadCheckpoint(f"{place} has the key {key!r}; expected str, int, or a tuple of str.")

    def _tensor(self, tensor: torch.Tensor) -> Any:
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = as_bytes(flat) if flat.numel() else memoryview(b"")  # of no elements, strides are anything
        if tensor.dtype in DTYPE_NAMES:
            return {"tensor": self._add(DTYPE_NAMES[tensor.dtype], list(tensor.shape), data)}
        number = self._add("U8", [flat.nbytes], data)
        return {"tensor": number, "dtype": str(tensor.dtype).split(".")[-1], "shape": list(tensor.shape)}

    def _array(self, array: Any, value: Any) -> Any:
        kind, shape = "array" if type(value) is np.ndarray else "scalar", list(np.shape(value))
        flat = memoryview(array.reshape(-1).view(np.uint8))
        if array.dtype in NATIVE:
            dtype = DTYPE_NAMES[torch.from_numpy(np.empty(0, array.dtype)).dtype]
            return {kind: self._add(dtype, shape, flat), "dtype": array.dtype.str}
        return {kind: self._add("U8", [len(flat)], flat), "dtype": array.dtype.str, "shape": shape}

    def _add(self, dtype: str, shape: list[int], data: memoryview) -> int:
        self._tensors.append((dtype, shape, data))
        self.crcs.append(zlib.crc32(data))
        return len(self.crcs) - 1


class _Reader:
    def __init__(self, content: bytes, start: int, header: dict[str, Any], crcs: list[int]) -> None:
        self._blobs: list[tuple[str, list[int], bytes]] = []
        end = start
        for n, crc in enumerate(crcs):
            entry = header[str(n)]
            begin, stop = (start + offset for offset in entry["data_offsets"])
            blob = content[begin:stop]
            if not start <= begin <= stop == begin + len(blob) or zlib.crc32(blob) != crc:
                raise ValueError(f"tensor {n} does not match its checksum")
            self._blobs.append((entry["dtype"], entry["shape"], blob))
            end = max(end, stop)
        if len(content) != end:
            raise ValueError(f"it is {len(content):,} bytes long, and its header says {end:,}")

    def decode(self, value: Any) -> Any:
        """The inverse of ``_Writer.encode``."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if not value:
            raise ValueError("an empty entry")
        kind, content = next(iter(value.items()))
        if kind in ("float", "int"):
            return struct.unpack(">d", bytes.fromhex(content))[0] if kind == "float" else int(content, 16)
        if kind == "tuple":
            return tuple(self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        dtype, shape, blob = self._blobs[content]
        shape = value.get("shape", shape)
        if kind == "bytes":
            return blob
        if kind == "tensor":
            return _as_tensor(blob, getattr(torch, value["dtype"]) if "dtype" in value else DTYPES[dtype], shape)
        array = np.frombuffer(blob, np.dtype(value["dtype"])).reshape(shape)
        return array[()] if kind == "scalar" else array.copy()


def _as_tensor(blob: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not blob and not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype).reshape(shape)
