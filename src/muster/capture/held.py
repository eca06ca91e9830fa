"""The state that recorded graphs read and write, at fixed addresses.

A step that replaces a tensor (``self.state = ...``) leaves its result at another address each time.
A graph has one address: the *held* tensor. So the last operations of each recorded rollout copy the
replaced tensors back into the held ones, and afterwards the names of the environment refer to the
held tensors again. Eager rollouts, resets and loads between two replays leave other tensors there:
``take_in`` copies these, and sets the names back, before the next replay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from muster.capture.state import (
    Survey,
    compare,
    distinct,
    share_memory,
    storage_of,
    survey,
)

OF_POLICY = "policy"  # the root whose tensors are the user's to replace: weights


class HeldState:
    """The state of environments and policy, as recorded graphs use it.

    Args:
        roots: objects from which all of it is reachable, by the name that begins their paths.
        device: the device of the graphs.
        replaced: paths of tensors that a rollout replaces.
        lane: memory of the rollout; tensors that environments or policy keep may be rows of it.

    Attributes:
        found: what was reachable when it was made.

    Raises:
        ValueError: a replaced tensor cannot have memory of its own.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        device: torch.device,
        replaced: Collection[str],
        lane: torch.Tensor,
    ) -> None:
        self._roots = dict(roots)
        self._device = device
        self.found = survey(roots, device)
        rows = {path for path, kept in self.tensors.items() if share_memory(kept, lane)}
        self._replaced = frozenset(replaced) | rows  # the next lane has other rows
        for path in sorted(self._replaced):
            if self._needs_own_memory(path, lane):
                self.found.own(path)
        self._addresses = {
            path: tensor.data_ptr() for path, tensor in self.found.tensors.items()
        }

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

    def take_in(self, roots: Mapping[str, Any]) -> str:
        """Make the held tensors the present state; return why they cannot be, "" if they are.

        If nothing has changed since the last replay, this only compares.

        Args:
            roots: the present objects.
        """
        for name, root in self._roots.items():
            if roots.get(name) is not root:
                return f"{name} is another object"
        if not self.found.has_its_entries:
            now = self.look()
            changes = compare(self.found, now)
            if changes.problem:
                return changes.problem
            for path in set(changes.replaced) - self._replaced:
                given = now.tensors[path]
                is_weight = isinstance(given, torch.nn.Parameter) or given.requires_grad
                if is_weight or path.startswith(OF_POLICY):
                    return f"{path} is another tensor"
            self.copy_back(now)
            self.set_back()
        for path, tensor in self.found.tensors.items():
            if tensor.data_ptr() != self._addresses[path]:
                return f"{path} has other memory"
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
