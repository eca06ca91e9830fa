"""Writes the rollouts of a node into a replay buffer elsewhere, past the main process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from muster.errors import WorkerError, described
from muster.memory.slots import Slot
from muster.memory.views import BatchView, Order
from muster.sources.messages import Report

END_S = 5.0


class Writer:
    """A thread that writes what is put, in order.

    Args:
        sink: with ``write(TensorDict)``, which is done with the memory when it returns, and its ``buffer``.
        order: of the batches' dimensions.
        written: called in the thread, for each report: None or what went wrong, its leaf's life, and it.
    """

    def __init__(self, sink: Any, order: Order, written: Callable[[Exception | None, int, Report], None]) -> None:
        self._sink, self._order, self._written = sink, order, written
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._view: BatchView | None = None  # of the newest layout
        self._failed: dict[int, Exception] = {}  # by life; what follows on a rollout that is missing is not written
        self._thread = threading.Thread(target=self._run, name="muster-agent-writes", daemon=True)
        self._thread.start()

    def put(self, slot: Slot, life: int, report: Report) -> None:
        """A rollout is in this slot, which is left alone until the report has gone."""
        self._queue.put(partial(self._write, slot, life, report))

    def then(self, function: Callable[[], None]) -> None:
        """Call it in the thread, once all has been written that was put."""
        self._queue.put(function)

    def close(self) -> None:
        """End the thread, once it has written what was put."""
        self._queue.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _write(self, slot: Slot, life: int, report: Report) -> None:
        if life not in self._failed:
            try:
                self._sink.write(self._batch(slot, report))
            except Exception as raised:  # noqa: BLE001 (the main process's to raise)
                error = WorkerError(
                    f"the replay buffer that this node writes into, a {type(self._sink.buffer).__name__}, raised "
                    f"{described(raised)}. The rollout is not in it, and counts as discarded"
                )
                error.__cause__ = raised
                self._failed[life] = error
        self._written(self._failed.get(life), life, report)

    def _batch(self, slot: Slot, report: Report) -> Any:
        for key, array in report.objects.items():
            slot.lanes[0].arrays[key][...] = array
        if self._view is None or self._view.layout is not slot.layout:
            self._view = BatchView(slot.layout, stacked=False, order=self._order)
        return self._view.tensordict(torch.from_numpy(slot.block), slot)
