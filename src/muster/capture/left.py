"""What resets and loads of saved states leave: the environments' own tensors, not the user's.

A tensor that no rollout replaces is another one before a rollout for two reasons. The user has
replaced it, and may write into it later, where it is; then a graph must read that one. Or
``reset()`` of the environments has, and nothing else refers to it; then its contents can be copied
to where graphs read. So everything that is reachable from the environments is looked through before
and after each reset.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from muster.capture.state import Survey


class Left:
    """The tensors and objects that resets and loads have left, by path."""

    def __init__(self) -> None:
        self._tensors: dict[str, weakref.ref[torch.Tensor]] = {}
        self._objects: dict[str, Any] = {}
        # paths of what may be a part of a saved state, which must not be written into
        self._loaded: set[str] = set()

    def note(self, before: Survey, after: Survey, *, loaded: bool) -> None:
        """Note what has changed between two surveys.

        Args:
            loaded: a saved state was loaded.
        """
        if before.problem or after.problem:
            self.forget()
            return
        changed: set[str] = set()
        for path, tensor in after.tensors.items():
            if before.tensors.get(path) is not tensor:
                self._tensors[path] = weakref.ref(tensor)
                changed.add(path)
        for path, obj in after.objects.items():
            if before.objects.get(path) is not obj:
                self._objects[path] = obj
                changed.add(path)
        if loaded:
            self._loaded |= changed
        else:
            self._loaded -= changed
        self._drop_others(after)

    def settle(
        self, held: Survey, tensors: Iterable[str], objects: Iterable[str]
    ) -> None:
        """Note that names refer to the tensors and objects of ``held`` again, at these paths."""
        for path in tensors:
            self._tensors[path] = weakref.ref(held.tensors[path])
        for path in objects:
            self._objects[path] = held.objects[path]
        self._loaded.difference_update(tensors, objects)
        self._drop_others(held)

    def forget(self) -> None:
        """Forget everything."""
        self._tensors.clear()
        self._objects.clear()
        self._loaded.clear()

    def has_tensor(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a reset or a load has left this tensor."""
        return path in self._tensors and self._tensors[path]() is tensor

    def has_object(self, path: str, obj: Any) -> bool:
        """Whether a reset or a load has left this container or object."""
        return path in self._objects and self._objects[path] is obj

    def of_resets(self, now: Survey) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paths of the present tensors, and of the objects, that resets have left: these
        may be written into.
        """
        tensors = {
            path for path, each in now.tensors.items() if self.has_tensor(path, each)
        }
        objects = {
            path for path, each in now.objects.items() if self.has_object(path, each)
        }
        return frozenset(tensors - self._loaded), frozenset(objects - self._loaded)

    def _drop_others(self, now: Survey) -> None:
        """Forget the objects that are not there any more: they may be large."""
        for path in list(self._objects):
            if now.objects.get(path) is not self._objects[path]:
                del self._objects[path]
