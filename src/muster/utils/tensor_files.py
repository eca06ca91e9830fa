"""Tensors and a JSON text in one safetensors file, all covered by CRC32 checksums: recordings and
checkpoints.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from muster.utils.whole_files import read_json

STORABLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
MOST_HEADER_BYTES = 100_000_000  # limit of safetensors

_CRC = b'{"crc32": "%08x",'
_CRC_BYTES = len(_CRC % 0)


class Damaged(ValueError):
    """The file is damaged: it differs from the written one."""


def seal(about: Mapping[str, Any], **options: Any) -> bytes:
    """Encode ``about`` as JSON (ASCII) whose first field is the CRC32 of the rest; ``options`` of
    ``json.dumps``.
    """
    rest = json.dumps(about, **options)[1:].encode()
    return _CRC % zlib.crc32(rest) + rest


def unseal(text: bytes) -> dict[str, Any]:
    """Decode a text from ``seal``. Raises ``Damaged`` if it was changed."""
    if text[:_CRC_BYTES] != _CRC % zlib.crc32(text[_CRC_BYTES:]):
        raise Damaged("its description does not match its checksum")
    try:
        about: dict[str, Any] = read_json(text)
    except ValueError as error:
        raise Damaged(f"its description is no JSON: {error}") from error
    del about["crc32"]
    return about


def encode(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
    """Return the content of a file with JSON and contiguous CPU tensors of ``STORABLE`` dtypes that
    share no memory.

    Raises ``ValueError`` if names and ``about`` exceed the size of a header.
    """
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    text = seal({"tensors": checksums, "about": about})
    content = save(dict(tensors), {"muster": text.decode()})
    size = int.from_bytes(content[:8], "little")
    if size > MOST_HEADER_BYTES:
        raise ValueError(
            f"{size:,} bytes of names and JSON, more than {MOST_HEADER_BYTES:,}"
        )
    return content


@dataclass(frozen=True)
class TensorFile:
    """An open file from ``encode``: its JSON, and the names of its tensors."""

    about: Any
    names: tuple[str, ...]
    _file: Any
    _checksums: Mapping[str, str]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str, *, check: bool = True) -> torch.Tensor:
        """Return a tensor as a private memory map; with ``check`` its checksum is verified
        (``Damaged``).
        """
        if name not in self.names:
            raise Damaged(f"{name!r} is missing")
        tensor: torch.Tensor = self._file.get_tensor(name)
        if tensor.dtype not in STORABLE:
            raise Damaged(f"{name!r} is of dtype {tensor.dtype}")
        if check and _checksum(tensor) != self._checksums[name]:
            raise Damaged(f"the values of {name!r} do not match their checksum")
        return tensor


@contextmanager
def opened(file: IO[bytes], path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Read the header of an open ``file``; its tensors stay valid after the context.

    Raises ``Damaged``.

    If the system supports it, the open file itself is read, even if ``path`` now names another one.
    """
    same = f"/proc/self/fd/{file.fileno()}"
    try:
        with safe_open(same if os.path.exists(same) else path, framework="pt") as found:
            text = (found.metadata() or {}).get("muster")
            if text is None:
                raise Damaged("it has no description of Muster's")
            about = unseal(text.encode())
            names = tuple(found.keys())
            if set(names) != set(about["tensors"]):
                raise Damaged("its tensors are not those of its description")
            yield TensorFile(about["about"], names, found, about["tensors"])
    except SafetensorError as error:
        raise Damaged(str(error)) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def from_bytes(content: bytes) -> torch.Tensor:
    """Return a copy of ``content``, ``[bytes]`` uint8."""
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _checksum(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    values = bytes_of(tensor) if tensor.numel() else b""
    return f"{zlib.crc32(values, zlib.crc32(kind)):08x}"
