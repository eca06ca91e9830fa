"""The state that recorded graphs read and write, at fixed addresses.

A step that replaces a tensor (``self.state = ...``) leaves its result at another address each time.
A graph has one address: the *held* tensor. So the last operations of each recorded rollout copy the
replaced tensors back into the held ones, and afterwards the names of the environment refer to the
held tensors again. Eager rollouts, resets and loads between two replays leave other tensors there:
``take_in`` copies these, and sets the names back, before the next replay.

Only what rollouts or resets replace is copied. If anything else was replaced, it is the user's: who
may change it later, where it is. Then the graph is recorded again, with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from muster.capture.left import Left
from muster.capture.state import (
    Changes,
    Survey,
    compare,
    distinct,
    share_memory,
    storage_of,
)
from muster.capture.walk import survey


class Unlike(Exception):
    """The state is not as a rollout leaves it."""


class _Layout(NamedTuple):
    """Where a tensor is in memory: an address, bytes from there on, and strides."""

    storage: int | None
    start: int
    strides: tuple[int, ...]

    def is_beside(self, other: _Layout) -> bool:
        """Whether it is in the same memory."""
        return self.storage == other.storage

    def is_placed(self, other: _Layout, as_in: tuple[_Layout, _Layout]) -> bool:
        """Whether it is as far from another tensor as the first of two others from the second."""
        one, two = as_in
        return (
            self.is_beside(other) and self.start - other.start == one.start - two.start
        )


def _layout(tensor: torch.Tensor) -> _Layout:
    storage = storage_of(tensor)
    start = 0 if storage is None else tensor.data_ptr() - storage
    return _Layout(storage, start, tensor.stride())


class HeldState:
    """The state of environments and policy, as recorded graphs use it.

    Args:
        roots: objects from which all of it is reachable, by the name that begins their paths.
        device: the device of the graphs.
        changes: what a rollout does: the paths of tensors, containers and objects that it replaces.
        lane: memory of the rollout; tensors that environments or policy keep may be rows of it.
        left: what resets and loads have left.

    Attributes:
        found: what was reachable when it was made.

    Raises:
        ValueError: a replaced tensor cannot have memory of its own.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        device: torch.device,
        changes: Changes,
        lane: torch.Tensor,
        left: Left,
    ) -> None:
        self._roots = dict(roots)
        self._device = device
        self.found = survey(roots, device)
        self._moved = frozenset(changes.moved)
        self._layouts = {path: _layout(kept) for path, kept in self.tensors.items()}
        rows = {path for path, kept in self.tensors.items() if share_memory(kept, lane)}
        self._replaced = (
            frozenset(changes.replaced) | rows
        )  # the next lane has other rows
        for path in sorted(self._replaced):
            if self._needs_own_memory(path, lane):
                self.found.own(path)
        self._reset, self._reset_objects = self._of_resets(left, lane)
        self._held_layouts = {
            path: _layout(kept) for path, kept in self.tensors.items()
        }
        self._addresses = [tensor.data_ptr() for tensor in self.tensors.values()]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The held tensors, by path."""
        return self.found.tensors

    def look(self) -> Survey:
        """Return the present state."""
        return survey(self._roots, self._device)

    def set_back(self) -> None:
        """Let all names refer to the held tensors again."""
        self.found.set_back()

    def copy_back(self, now: Survey) -> None:
        """Copy what a rollout has left in other tensors into the held ones."""
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        held = {storage_of(tensor) for tensor in self.tensors.values()}
        done: set[int] = set()
        for path, target in self.tensors.items():
            source = now.tensors.get(path, target)
            if source is target or id(target) in done:
                continue
            done.add(id(target))
            source = source.detach()
            if storage_of(source) in held:  # which may be overwritten before
                source = source.clone()
            moved.append((target, source))
        for target, source in moved:
            target.detach().copy_(source)

    def take_in(self, roots: Mapping[str, Any], left: Left) -> str:
        """Make the held tensors the present state; return why they cannot be, "" if they are.

        If nothing has changed since the last replay, this only compares.

        Args:
            roots: the present objects.
            left: what resets and loads have left.

        Raises:
            Unlike: the state has the same tensors, but not as rollouts leave them; a rollout row by
                row will.
        """
        for name, root in self._roots.items():
            if roots.get(name) is not root:
                return f"{name} is another object"
        addresses = [tensor.data_ptr() for tensor in self.tensors.values()]
        if addresses != self._addresses:
            paths = zip(self.tensors, addresses, self._addresses, strict=True)
            moved = next(path for path, now, then in paths if now != then)
            return f"{moved} has other memory"
        if not self.found.has_its_entries:
            now = self.look()
            stale = self._differs(now, left)
            if stale:
                return stale
            unlike = self.unlike(now)
            if unlike:
                raise Unlike(unlike)
            self.copy_back(now)
            self.set_back()
            left.settle(self.found, self._reset, self._reset_objects)
        return ""

    def _differs(self, now: Survey, left: Left) -> str:
        """Return what is there now that neither a rollout nor a reset leaves; "": nothing."""
        changes = compare(self.found, now)
        if changes.problem:
            return changes.problem
        for path in changes.moved:
            is_left = left.has_object(path, now.objects[path])
            if path not in self._moved and not (
                path in self._reset_objects and is_left
            ):
                return f"{path} is another object"
        for path in changes.replaced:
            is_left = left.has_tensor(path, now.tensors[path])
            if path not in self._replaced and not (path in self._reset and is_left):
                return f"{path} is another tensor"
        return ""

    def _of_resets(
        self, left: Left, lane: torch.Tensor
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paths of tensors and of objects that only resets replace, and that nothing else
        knows: what a further reset leaves can be copied into these tensors.
        """
        tensors, objects = left.of_resets(self.found)
        others = {
            storage_of(kept)
            for path, kept in self.tensors.items()
            if path not in tensors
        }
        found = {
            path
            for path in tensors - self._replaced
            if storage_of(self.tensors[path]) not in others
            and not share_memory(self.tensors[path], lane)
            and not self.tensors[path].requires_grad
            and distinct(self.tensors[path]).shape == self.tensors[path].shape
        }
        return frozenset(found), objects - self._moved

    def unlike(self, now: Survey) -> str:
        """Return which tensors are not as a rollout leaves them; "": all are.

        The strides are the same, or tensors are views of the same memory that were not.
        """
        held = self._held_layouts
        first = self._layouts
        layouts = {path: _layout(tensor) for path, tensor in now.tensors.items()}
        moved: dict[int, list[str]] = {}  # those in the same memory
        for path, layout in layouts.items():
            if layout.strides not in (held[path].strides, first[path].strides):
                return f"{path} has the strides {layout.strides}"
            if layout.storage is not None:
                moved.setdefault(layout.storage, []).append(path)
        for paths in moved.values():
            one = paths[0]
            for path in paths[1:]:
                if not (
                    first[path].is_beside(first[one]) or held[path].is_beside(held[one])
                ):
                    return f"{path} and {one} share memory"
        together: dict[int, str] = {}
        for path, layout in held.items():
            if layout.storage is None:
                continue
            one = together.setdefault(layout.storage, path)
            is_there = now.tensors[path] is self.tensors[path]
            if is_there and now.tensors[one] is self.tensors[one]:
                continue
            if not layouts[path].is_placed(layouts[one], as_in=(layout, held[one])):
                return f"{path} and {one} do not share memory"
        return ""

    def _needs_own_memory(self, path: str, lane: torch.Tensor) -> bool:
        """Whether a replaced tensor must not be written into: others use its memory.

        Tensors that are replaced together may share memory.

        Raises:
            ValueError: some of those that share it are replaced, others are not.
        """
        tensor = self.tensors[path]
        own = storage_of(tensor)
        if own is None:
            return False
        is_expanded = distinct(tensor).shape != tensor.shape
        sharing = [
            other for other, value in self.tensors.items() if storage_of(value) == own
        ]
        if share_memory(tensor, lane):
            return True
        together = self._replaced.issuperset(sharing)
        if together and not is_expanded and not tensor.requires_grad:
            return False
        if len(self._replaced.intersection(sharing)) > 1:
            raise ValueError(
                f"{' and '.join(sharing[:4])} share memory with other tensors"
            )
        return True
