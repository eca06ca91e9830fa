"""Copies from a device to the host that are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import Self

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

Result = TypeVar("Result")


class Arrival(Protocol):
    """The end of the copies that a thread has started on its stream of the device."""

    @property
    def has_come(self) -> bool:
        """Whether they are complete."""

    def wait(self) -> None:
        """Wait until they are complete."""

    def then(self, copy: Callable[[], Result]) -> tuple[Result, Arrival]:
        """Start further copies on the same stream, in any thread; return the result of ``copy`` and
        their end.
        """


class _Event:
    """Implements ``Arrival`` with an event of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module: Any = torch.get_device_module(device)
        self._stream: Any = module.current_stream(device)
        self._in_stream: Callable[[Any], Any] = module.stream
        self._event: Any = module.Event()
        self._event.record(self._stream)

    @property
    def has_come(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def then(self, copy: Callable[[], Result]) -> tuple[Result, Arrival]:
        with self._in_stream(self._stream):
            return copy(), type(self)(self._device)


class _AtOnce:
    """Implements ``Arrival`` where a copy is complete when it returns."""

    has_come = True

    def wait(self) -> None:
        """Nothing: there is nothing to wait for."""

    def then(self, copy: Callable[[], Result]) -> tuple[Result, Self]:
        return copy(), self


def arrival_from(device: torch.device) -> Arrival:
    """Return the end of the copies from ``device`` that the calling thread has started."""
    return _AtOnce() if device.type == "cpu" else _Event(device)
