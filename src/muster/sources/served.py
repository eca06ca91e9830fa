"""The policy as a worker sees it that only steps environments: somebody else acts, in the very rows of its lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.progress import ORDER, Progress
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.sources.lines import Line


class ServedPolicy:
    """Implements ``Policy``; every row is a question to the server.

    Args:
        line: to the server.
        progress: says which order is at work.
    """

    name, path, draws_globally = "policy", "server", False

    def __init__(self, line: Line, progress: Progress) -> None:
        self.line = line
        self._progress = progress
        self._columns: Sequence[Column] = ()

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        """The server makes the first call, for row 0."""
        raise NotImplementedError

    def learn(self, columns: Sequence[Column]) -> None:
        """The server knows by now which columns there are."""
        self._columns = columns

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        ask, order = self.line.ask, int(self._progress.cells[ORDER])
        return lambda t: ask(order, t)
