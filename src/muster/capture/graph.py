"""A recorded sequence of a device's operations, and the one of CUDA.

``GRAPHS`` has the kind of graph for a type of device. A graph reads and writes the memory that it
was recorded with, and runs no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from muster.utils.devices import with_index

# Graphs whose recording failed. The allocator refers to them without owning them, until the end of
# a recording that they never have.
_failed: list[Any] = []


class Graph(Protocol):
    """A sequence of operations on a device.

    Its life: ``warm_up`` any number of times, ``record`` once, ``replay`` any number of times,
    ``release``.
    """

    def warm_up(self, function: Callable[[], None]) -> None:
        """Call ``function`` as it will be recorded; its operations are executed."""

    def record(
        self, function: Callable[[], None], generators: Iterable[torch.Generator]
    ) -> None:
        """Call ``function`` and keep its operations, which are not executed.

        Args:
            generators: from which it draws random numbers, besides the default one of the device.

        Raises:
            Exception: an operation cannot be recorded. The states of all generators must be set
                before these are used again.
        """

    def replay(self) -> None:
        """Execute the operations; does not wait for them."""

    def release(self) -> None:
        """Free the memory of the graph; it is not replayed any more."""


class GraphPool(Protocol):
    """What the graphs of one group share."""

    def graph(self) -> Graph:
        """Return a graph that is not recorded yet."""

    @property
    def nbytes(self) -> int:
        """Memory of intermediate results, of all graphs, in bytes; 0 if it is unknown."""


class CudaPool:
    """Memory for the intermediate results of graphs that are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device  # with or without a number
        self._stream: Any = None
        self._handle: Any = None
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def graph(self) -> Graph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._handle = torch.cuda.graph_pool_handle()
        return CudaGraph(self._stream, self._handle, self._note)

    def _note(self, nbytes: int) -> None:
        self._nbytes += max(0, nbytes)


class CudaGraph:
    """Implements ``Graph`` with ``torch.cuda.CUDAGraph``.

    Args:
        stream: a stream beside the current one, for warming up and recording.
        pool: handle of the memory of intermediate results.
        note: called with the number of bytes that a recording has added to it.
    """

    def __init__(self, stream: Any, pool: Any, note: Callable[[int], None]) -> None:
        self._stream = stream
        self._pool = pool
        self._note = note
        self._graph: Any = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:
            current.wait_stream(self._stream)

    def record(
        self, function: Callable[[], None], generators: Iterable[torch.Generator]
    ) -> None:
        device = self._stream.device
        known = list(generators)
        for generator in known:
            self._graph.register_generator_state(generator)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        failed: BaseException | None = None
        try:
            # the end of a recording that failed leaves its stream the current one
            back = torch.cuda.stream(torch.cuda.current_stream(device))
            with back, self._recording(self._graph, pool=self._pool):
                try:
                    function()
                except BaseException as error:
                    failed = error
                    raise
        except BaseException:
            _failed.append(self._graph)
            with suppress(Exception):  # the reason is the first error
                self._free_generators(known)
            if failed is not None:
                # the end of the failed recording raises another error
                raise failed  # noqa: B904
            raise
        self._note(torch.cuda.memory_reserved(device) - before)

    def _recording(self, graph: Any, **pool: Any) -> AbstractContextManager[None]:
        # Other threads may use the device meanwhile; only this one must not synchronize.
        recording: AbstractContextManager[None] = torch.cuda.graph(
            graph, stream=self._stream, capture_error_mode="thread_local", **pool
        )
        return recording

    def _free_generators(self, generators: Iterable[torch.Generator]) -> None:
        """Let generators draw again after a recording that failed: before torch 2.13, they wait for
        its end, and setting their states is not enough. A recording that succeeds ends it.
        """
        device = self._stream.device
        graph: Any = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        number = torch.zeros(1, device=device)
        back = torch.cuda.stream(torch.cuda.current_stream(device))
        with back, self._recording(graph):
            number.zero_()
        graph.reset()

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of a device that operations without a generator draw from."""
    if device.type != "cuda":
        return torch.default_generator
    found: torch.Generator = torch.cuda.default_generators[with_index(device).index]
    return found


# the kinds of graphs, by type of device
GRAPHS: dict[str, Callable[[torch.device], GraphPool]] = {"cuda": CudaPool}
