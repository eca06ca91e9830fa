"""Checkpoints: a nested state in one file, which ``load`` restores bit for bit: safetensors and
JSON, no pickle.

Tensors, arrays and byte strings are safetensors tensors named "0", "1", ...; everything else is a
JSON text in the header's ``__metadata__``. CRC32 checksums cover the whole file.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muster.errors import BadCheckpoint, FileError
from muster.utils.tensor_files import (
    STORABLE,
    Damaged,
    TensorFile,
    bytes_of,
    encode,
    from_bytes,
    opened,
)
from muster.utils.whole_files import open_regular, write_whole

FORMAT = 2
SMALL = 1 << 63  # limit of integers that any JSON reader supports
KINDS = ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")
NATIVE = {np.dtype(kind) for kind in KINDS}


def save(path: str | Path, state: Any, *, mode: int = 0o666) -> None:
    """Write ``state`` to the file ``path`` atomically: after a crash the file is the complete new
    or old one.

    Args:
        state: None, bool, int of any size, float, str, bytes, tensors, NumPy arrays and numbers,
            and lists, tuples and dicts of these (keys: str, int, tuples of str). Tensors lose their
            gradients, device and strides.
        mode: permissions of a new file, before the umask is applied.

    Raises:
        BadCheckpoint: the state contains a value of another type; the message says where.
        FileError: the file cannot be written, and nothing was changed.
    """
    writer = _Writer()
    try:
        about = {"format": FORMAT, "state": writer.encode(state, "state")}
        content = encode(writer.tensors, about)
    except BadCheckpoint:
        raise
    except RecursionError as error:
        raise BadCheckpoint(
            "The state is nested too deeply, or holds itself."
        ) from error
    except ValueError as error:
        raise BadCheckpoint(
            f"The state does not fit into a file: {error}. Put its numbers into arrays."
        ) from error
    write_whole(Path(path), [content], mode=mode)


def load(path: str | Path) -> Any:
    """Return a state that ``save`` has written, in new memory, tensors on the CPU.

    Runs no code from the file.

    Raises:
        BadCheckpoint: the file is missing, damaged, or not a checkpoint.
    """
    try:
        with open_regular(path) as file, opened(file, path) as found:
            if found.about["format"] != FORMAT:
                raise BadCheckpoint(
                    f"{path} has format {found.about['format']}, and this version of Muster reads"
                    f" {FORMAT}."
                )
            return _decode(found.about["state"], found)
    except BadCheckpoint:
        raise
    except FileError as error:
        raise BadCheckpoint(str(error)) from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from error
    except Damaged as error:
        raise BadCheckpoint(
            f"{path} is not a Muster checkpoint (or it is damaged): {error}. Restore it from a"
            " copy."
        ) from error
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        struct.error,
    ) as error:
        raise BadCheckpoint(
            f"{path} is damaged: {error}. Restore it from a copy."
        ) from error


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # tensor of a byte string, by its id: equal environments share one
        self._known: dict[int, int] = {}
        self._memory: set[int] = set()  # addresses of the tensors' memory

    def encode(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON, in which large values are replaced by the number of a tensor."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -SMALL <= value < SMALL else {"int": hex(value)}
        if kind is float:
            return (
                value
                if math.isfinite(value)
                else {"float": struct.pack(">d", value).hex()}
            )
        if kind in (list, tuple):
            items = [self.encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in (dict, OrderedDict):
            entries = []
            for key, item in value.items():
                entries.append(
                    [self._key(key, place), self.encode(item, f"{place}[{key!r}]")]
                )
            return {"dict": entries}
        if kind is bytes:
            if id(value) not in self._known:
                self._known[id(value)] = self._add(from_bytes(value))
            return {"bytes": self._known[id(value)]}
        if _is_plain_tensor(value):
            return self._tensor(value.detach())
        if _is_plain_array(value):
            return self._array(np.ascontiguousarray(value), value)
        raise BadCheckpoint(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold."
        )

    def _key(self, key: Any, place: str) -> Any:
        texts = type(key) is tuple and all(type(part) is str for part in key)
        if texts or type(key) in (str, int):
            return self.encode(key, place)
        raise BadCheckpoint(
            f"{place} has the key {key!r}; expected str, int, or a tuple of str."
        )

    def _tensor(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.dtype in STORABLE:
            return {"tensor": self._add(tensor)}
        number = self._add(tensor.reshape(-1).view(torch.uint8))
        return {
            "tensor": number,
            "dtype": str(tensor.dtype).split(".")[-1],
            "shape": list(tensor.shape),
        }

    def _array(self, array: Any, value: Any) -> Any:
        kind = "array" if type(value) is np.ndarray else "scalar"
        shape = list(np.shape(value))
        dtype = array.dtype.str
        if array.dtype in NATIVE:
            number = self._add(torch.from_numpy(array).reshape(shape))
            return {kind: number, "dtype": dtype}
        number = self._add(from_bytes(array.tobytes()))
        return {kind: number, "dtype": dtype, "shape": shape}

    def _add(self, tensor: torch.Tensor) -> int:
        memory = tensor.untyped_storage().data_ptr()
        number = len(self.tensors)
        # safetensors shares no memory
        self.tensors[str(number)] = tensor.clone() if memory in self._memory else tensor
        self._memory.add(memory)
        return number


def _is_plain_tensor(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and not value.is_quantized


def _is_plain_array(value: Any) -> bool:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    return value.dtype.kind in "biufcSUmM"


def _decode(value: Any, file: TensorFile) -> Any:
    if isinstance(value, list):
        return [_decode(item, file) for item in value]
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("an empty entry")
    kind, content = next(iter(value.items()))
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return tuple(_decode(item, file) for item in content)
    if kind == "dict":
        return {_decode(key, file): _decode(item, file) for key, item in content}
    tensor = file.tensor(str(content)).clone()
    shape = value.get("shape", tensor.shape)
    if kind == "bytes":
        return bytes(bytes_of(tensor))
    if kind == "tensor":
        if "dtype" not in value:
            return tensor
        return tensor.view(getattr(torch, value["dtype"])).reshape(shape)
    array = np.frombuffer(bytes_of(tensor), np.dtype(value["dtype"])).reshape(shape)
    return array[()] if kind == "scalar" else array.copy()
