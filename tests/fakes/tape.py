"""A graph of operations on the CPU that behaves like a CUDA graph.

``TapeGraph`` records every operation of torch (function, arguments, results) and replays them on the
same memory: no Python of environments or policies runs. So a wrong address, a Python counter, or a
tensor that was not copied back shows on a machine without a GPU. What a recording on a GPU cannot
do raises here, too: numbers for Python, sizes that depend on values, tensors made from Python's
data, generators that were not registered. Operations are not executed while they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from muster.capture import graph

aten = torch.ops.aten
SYNCHRONIZING = {
    aten._local_scalar_dense.default: "a number for Python",
    aten.nonzero.default: "a size that depends on values",
    aten.masked_select.default: "a size that depends on values",
    aten.unique_dim.default: "a size that depends on values",
    aten._unique2.default: "a size that depends on values",
    aten.equal.default: "a bool for Python",
    aten.is_nonzero.default: "a bool for Python",
    aten.lift_fresh.default: "a copy from host memory",
}
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
FLAGS = (torch.bool, torch.uint8)


class NotRecordable(RuntimeError):
    """An operation that a CUDA graph cannot record."""


class TapePool:
    """Implements ``GraphPool``: what it counts is for tests.

    Attributes:
        made: all graphs, the last one last.
        fail_at: number of the recording that fails in its middle; None: none does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: list[TapeGraph] = []
        self.fail_at: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self.made if not graph.released)

    def graph(self) -> TapeGraph:
        self.made.append(TapeGraph(fails=len(self.made) == self.fail_at))
        return self.made[-1]


class TapeGraph:
    """Implements ``Graph`` on the CPU.

    Attributes:
        replays: number of replays.
        during: called in each replay; None: nothing is.
        released: it was released.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._fails = fails
        self.replays = 0
        self.during: Callable[[], None] | None = None
        self.released = False

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for *_, outs in self._calls for out in outs)

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(
        self, function: Callable[[], None], generators: Iterable[torch.Generator]
    ) -> None:
        assert not self._calls, "it was recorded already"
        registered = [torch.default_generator, *generators]
        states = [generator.get_state() for generator in registered]
        tape = _Tape(self._calls, registered, fails=self._fails)
        try:
            with tape:
                function()
        except BaseException:
            tape.undo()
            for generator in registered:  # as on a GPU, they are unusable
                generator.manual_seed(0xBAD)
            raise
        tape.undo()
        for generator, state in zip(registered, states, strict=True):
            generator.set_state(state)

    def replay(self) -> None:
        assert self._calls
        assert not self.released
        self.replays += 1
        if self.during is not None:
            self.during()
        with torch.inference_mode():
            for function, args, kwargs, outs in self._calls:
                results, _ = tree_flatten(function(*args, **kwargs))
                tensors = [each for each in results if isinstance(each, torch.Tensor)]
                for out, result in zip(outs, tensors, strict=True):
                    if out.data_ptr() != result.data_ptr():
                        out.copy_(result)

    def release(self) -> None:
        self.released = True
        self._calls.clear()


class _Tape(TorchDispatchMode):
    """Keeps operations, and what they overwrite."""

    def __init__(
        self, calls: list[Any], generators: list[torch.Generator], *, fails: bool
    ) -> None:
        super().__init__()
        self._calls = calls
        self._generators = generators
        self._fails = fails
        self._own: set[int] = set()  # memory of results
        self._overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SYNCHRONIZING:
            raise NotRecordable(f"{func}: {SYNCHRONIZING[func]}")
        with (
            self
        ):  # in inference mode, also operations that consist of others come here
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        given, _ = tree_flatten((args, kwargs))
        for value in given:
            if isinstance(value, torch.Generator) and not self._is_registered(value):
                raise NotRecordable(f"{func}: the generator was not registered")
        if func in INDEXING and any(
            i is not None and i.dtype in FLAGS for i in args[1]
        ):
            raise NotRecordable(f"{func}: a size that depends on values")
        if self._fails and len(self._calls) > 20:
            raise NotRecordable("this recording fails")
        for tensor in _written(func, args, kwargs):
            self._save(tensor)
        out = func(*args, **kwargs)
        results, _ = tree_flatten(out)
        outs = [each for each in results if isinstance(each, torch.Tensor)]
        inputs = {
            each.untyped_storage().data_ptr() for each in given if torch.is_tensor(each)
        }
        for each in outs:
            if each.untyped_storage().data_ptr() not in inputs:
                self._own.add(each.untyped_storage().data_ptr())
        if not _is_view(func):
            self._calls.append((func, args, kwargs, outs))
        return out

    def undo(self) -> None:
        """Restore what recorded operations have overwritten: a GPU would not have executed them."""
        with torch.inference_mode():
            for storage, saved in self._overwritten.values():
                storage.copy_(saved)

    def _is_registered(self, generator: torch.Generator) -> bool:
        """Compare states: torch makes another Python object for the same generator."""
        state = generator.get_state()
        return any(torch.equal(state, known.get_state()) for known in self._generators)

    def _save(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address in self._own or address in self._overwritten:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._overwritten[address] = whole, whole.clone()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _is_view(func: Any) -> bool:
    """Whether the results are views of arguments that nothing is written into."""
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(
        info is not None and not info.is_write for info in returned
    )


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[TapePool]:
    """Graphs of the CPU are tapes; those that a test makes, by group."""
    made: list[TapePool] = []

    def pool(device: torch.device) -> TapePool:
        made.append(TapePool(device))
        return made[-1]

    monkeypatch.setitem(graph.GRAPHS, "cpu", pool)
    return made
