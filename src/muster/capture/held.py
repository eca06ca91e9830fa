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

from muster.capture.state import Survey, compare, survey

OF_POLICY = "policy"  # the root whose tensors are the user's to replace: weights


class HeldState:
    """The state of environments and policy, as recorded graphs use it.

    Args:
        roots: objects from which all of it is reachable, by the name that begins their paths.
        device: the device of the graphs.
        replaced: paths of tensors that a rollout replaces.
        lane: memory of the rollout, which tensors that are kept may be views of.

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
        self._roots = roots
        self._device = device
        self._replaced = frozenset(replaced)
        self.found = survey(roots, device)
        for path in replaced:
            if self._needs_own_memory(path, lane):
                self.found.own(path)
        self._addresses = {path: tensor.data_ptr() for path, tensor in self.found.tensors.items()}

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
        held = {_storage_of(tensor) for tensor in self.tensors.values()}
        done: set[int] = set()
        for path, target in self.tensors.items():
            source = now.tensors.get(path, target)
            if source is target or id(target) in done:
                continue
            done.add(id(target))
            source = source.detach()
            if _storage_of(source) in held:  # which may be overwritten before
                source = source.clone()
            moved.append((target, source))
        for target, source in moved:
            target.detach().copy_(source)

    def take_in(self) -> str:
        """Make the held tensors the present state; return why they cannot be, "" if they are.

        If nothing has changed since the last replay, this only compares.
        """
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
        own = _storage_of(tensor)
        if own is None:
            return False
        repeated = [size > 1 and not step for size, step in zip(tensor.shape, tensor.stride())]  # noqa: B905
        sharing = [other for other, value in self.tensors.items() if _storage_of(value) == own]
        together = self._replaced.issuperset(sharing)
        alone = len(self._replaced.intersection(sharing)) == 1
        if together and own != _storage_of(lane) and not any(repeated) and not tensor.requires_grad:
            return False
        if not alone:
            raise ValueError(f"{' and '.join(sharing[:4])} share memory with other tensors")
        return True


def _storage_of(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()
