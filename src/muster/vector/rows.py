"""Memory that the workers of a vector environment share with their caller."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from muster.memory.specs import Array
from muster.restore.pickling import unpickle

LINE = 64  # bytes of a cache line
# a step writes one half of the observations, and the last observations stay in the other
HALVES = 2


class VectorRows:
    """Rewards, flags and observations of all environments, and the calls of their workers, in
    shared memory.

    Args:
        space: observation space of one environment.
        num_envs: number of environments, N.
        workers: number of workers.
        shared: False: no memory for observations, which travel as pickles.
        block: memory ``uint8 [nbytes]``. None: only compute ``nbytes``.

    Attributes:
        rewards, terminated, truncated: arrays ``[N]``.
        exchanges: memory for the calls of each worker.
        obs: observations ``[N, ...]`` in the structure of ``space``, for each half. None: not
            ``shared``, or a part of the space has Python objects as values, which travel as
            pickles.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        num_envs: int,
        workers: int,
        shared: bool = True,
        block: Array | None = None,
    ) -> None:
        self._block = block
        self.nbytes = 0
        self.rewards = self._array((num_envs,), np.float64)
        self.terminated = self._array((num_envs,), np.bool_)
        self.truncated = self._array((num_envs,), np.bool_)
        self.exchanges: list[Exchange] = []
        for _ in range(workers):
            exchange = self._array((Exchange.NBYTES,), np.uint8)
            if block is not None:
                self.exchanges.append(Exchange(exchange))
        self.obs: list[Any] | None = None
        if shared and _has_arrays(space):
            self.obs = [
                create_empty_array(space, n=num_envs, fn=self._array)
                for _ in range(HALVES)
            ]

    def _array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        lines = -(-self.nbytes // LINE)
        begin = lines * LINE
        self.nbytes = begin + math.prod(shape) * dtype.itemsize
        if self._block is None:
            return np.empty(0, dtype)
        cells = self._block[begin : self.nbytes].view(dtype)
        rows: Array = cells.reshape(shape)
        return rows


def _has_arrays(space: spaces.Space[Any]) -> bool:
    """Return whether the values of a space are arrays of one shape and dtype, or dicts and tuples
    of such arrays.
    """
    if isinstance(space, spaces.Dict):
        return all(map(_has_arrays, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_has_arrays, space.spaces))
    plain = (
        spaces.Box,
        spaces.Discrete,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )
    return isinstance(space, plain)


def part_of(tree: Any, begin: int, end: int) -> Any:
    """Return views of rows of all arrays in a structure of dicts and tuples."""
    if isinstance(tree, dict):
        return {key: part_of(value, begin, end) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(part_of(value, begin, end) for value in tree)
    return tree[begin:end]


class Exchange:
    """Shared memory for the next call of a worker and for its result, as pickles.

    Args:
        block: memory ``uint8 [NBYTES]``.
    """

    ROOM = 1 << 18  # bytes of one pickle; larger ones travel as messages
    NBYTES = LINE + 2 * ROOM

    def __init__(self, block: Array) -> None:
        end = LINE + self.ROOM
        self._lengths: Any = memoryview(block[:LINE]).cast("q")  # type: ignore[arg-type]
        self._call = memoryview(block[LINE:end])  # type: ignore[arg-type]
        self._result = memoryview(block[end:])  # type: ignore[arg-type]

    def put_call(self, call: bytes) -> None:
        """Set the next call; empty: the worker returns to its messages."""
        self._call[: len(call)] = call
        self._lengths[0] = len(call)

    def call(self) -> Any:
        """Return the unpickled call; None: it is empty."""
        length = self._lengths[0]
        if not length:
            return None
        return unpickle(bytes(self._call[:length]))

    def put_result(self, result: bytes | None) -> None:
        length = 0 if result is None else len(result)
        self._result[:length] = result or b""
        self._lengths[1] = length

    def result(self) -> bytes | None:
        length = self._lengths[1]
        return bytes(self._result[:length]) or None
