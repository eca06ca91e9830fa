"""Weights as one block of bytes: a version and every tensor, at offsets known to sender and
receiver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from muster.errors import BadWeights
from muster.memory.specs import Array
from muster.weights.names import check_fit, copy_tensor

HEADER_BYTES = 128
ALIGNMENT = 64
TEXT_BYTES = 64
WRITING = -1  # instead of a sequence number
# int64 cells of the header; a number has no length (-1)
_SEQUENCE = 0
_TEXT_LENGTH = 1
_NUMBER = 2
_TEXT = 3


@dataclass(frozen=True)
class Entry:
    """One tensor; ``offset`` in bytes from the beginning of the block."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class Manifest:
    """What is where in a block of ``nbytes``; ``entries`` by name."""

    entries: Mapping[str, Entry]
    nbytes: int

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> Manifest:
        """Raises BadWeights for sparse and quantized tensors."""
        entries = {}
        end = HEADER_BYTES
        for name, tensor in weights.items():
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise BadWeights(
                    f"weight {name} is sparse or quantized ({tensor.dtype}); only dense tensors are"
                    " sent"
                )
            entries[name] = Entry(tuple(tensor.shape), tensor.dtype, end)
            end += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(entries, end)


class Buffer:
    """A block with weights in it.

    Args:
        memory: uint8 ``[manifest.nbytes]``; other processes may look at it too.
        manifest: what is where.

    Attributes:
        tensors: by name, in ``memory``.
    """

    def __init__(self, memory: Array, manifest: Manifest) -> None:
        self.memory = memory
        self._manifest = manifest
        self._header = memory[:HEADER_BYTES].view(np.int64)
        self.tensors = {
            name: _view(memory, entry) for name, entry in manifest.entries.items()
        }

    @classmethod
    def private(cls, manifest: Manifest) -> Buffer:
        return cls(np.empty(manifest.nbytes, np.uint8), manifest)

    @property
    def sequence(self) -> int:
        """Number of the publish in this buffer, from 1; negative while it is being written."""
        return int(self._header[_SEQUENCE])

    def begin_writing(self) -> None:
        """Mark the weights as incomplete."""
        self._header[_SEQUENCE] = WRITING

    def finish_writing(self, sequence: int) -> None:
        """Mark the weights as complete, with the number of their publish."""
        self._header[_SEQUENCE] = sequence

    @property
    def version(self) -> int | str:
        length = int(self._header[_TEXT_LENGTH])
        if length < 0:
            return int(self._header[_NUMBER])
        text: bytes = self._header[_TEXT:].tobytes()
        return text[:length].decode()

    def write(
        self, weights: Mapping[str, torch.Tensor], version: int | str, sequence: int
    ) -> None:
        """Copy everything in, between two changes of ``sequence``.

        Raises:
            BadWeights: they do not fit, or ``version`` does not. What was in here still is.
        """
        check_fit(weights, self._manifest.entries)
        is_text = isinstance(version, str)
        text = version.encode() if isinstance(version, str) else b""
        number = 0 if is_text else int(version)
        if len(text) > TEXT_BYTES or not -(2**63) <= number < 2**63:
            raise BadWeights(
                f"policy version {version!r} cannot be sent: expected a 64-bit integer, or text of"
                f" at most {TEXT_BYTES} bytes as UTF-8"
            )
        self.begin_writing()
        self._header[_TEXT_LENGTH] = len(text) if is_text else -1
        self._header[_NUMBER] = number
        self._header[_TEXT:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        _copy(weights, self.tensors)
        self.finish_writing(sequence)

    def read(self, into: Mapping[str, torch.Tensor]) -> int | str:
        """Copy everything out into tensors on any device; gives the version.

        Raises:
            BadWeights: they do not fit. Nothing was changed.
        """
        check_fit(into, self._manifest.entries)
        _copy(self.tensors, into)
        return self.version


def _copy(source: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in into.items():
        copy_tensor(tensor, source[name])


def _view(memory: Array, entry: Entry) -> torch.Tensor:
    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
    if nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    part = torch.from_numpy(memory[entry.offset : entry.offset + nbytes])
    return part.view(entry.dtype).view(entry.shape)
