"""The rows for the next step of a group, and the policy's call on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muster.env_spec import EnvSpec
from muster.keys import IS_INIT, Key
from muster.memory.slots import as_tensor, torch_dtype
from muster.memory.specs import ArraySpec, Column
from muster.protocols import Outputs, Policy

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


class FirstCall(NamedTuple):
    """A policy's call on the rows for the next step, made before a rollout begins.

    It determines the policy's columns, and its outputs become row 0 of the next rollout.
    """

    policy: Policy
    outputs: Outputs
    version: int | str


class Carry(dict[Key, Any]):
    """Observations, infos and recurrent states before the next step, ``[1, B, *shape]`` each.

    They are arrays, or tensors on a device. With them goes what else belongs to row 0 of the next
    rollout: the policy's first call, and marks of resumed episodes.

    Args:
        env_spec: description of the env batch that writes the observations.

    Attributes:
        first_call: the kept call; None: none.
        resumed: environments whose next row is the first after a load; None: the rollouts have no
            column for that.
    """

    def __init__(self, env_spec: EnvSpec) -> None:
        self._env_spec = env_spec
        self._by_env = env_spec.carried_specs
        self.first_call: FirstCall | None = None
        self.resumed: list[int] | None = None
        super().__init__({key: self._zeros(spec) for key, spec in self._by_env.items()})

    def of(self, column: Column) -> Any:
        """Return the rows of a carried column; allocates those of a recurrent state in the first
        call.
        """
        if column.key not in self:
            rows = self._zeros(ArraySpec(column.shape, column.dtype))
            rows[...] = column.key == IS_INIT
            self[column.key] = rows
        return self[column.key]

    def take(self, key: Key, row: Any, but: Collection[int]) -> None:
        """Set the next row of a carried column, ``[1, B, *shape]``, for all environments except
        ``but``.
        """
        here = self[key]
        if but:
            which = [i for i in range(here.shape[1]) if i not in but]
            here[0, which] = row[0, which]
        else:
            here[...] = row

    def begin_anew(self, which: Sequence[int]) -> None:
        """Set the recurrent states of ``which`` to their values at the start of an episode."""
        for key, row in self.items():
            if key not in self._by_env:
                row[0, which] = key == IS_INIT

    def seen(self, key: Key) -> torch.Tensor:
        """Return a row as policies get it: ``[*batch_shape, *shape]``; an array for objects."""
        row = self[key][0]
        if isinstance(row, np.ndarray) and row.dtype == object:
            return row  # type: ignore[return-value]
        tensor = as_tensor(row)
        return tensor.reshape((*self._env_spec.batch_shape, *tensor.shape[1:]))

    # --- first calls ------------------------------------------------------------------------------

    def call_of(self, policy: Policy) -> FirstCall | None:
        """Return the kept call, if it is this policy's."""
        call = self.first_call
        if call is None or call.policy is not policy:
            return None
        return call

    def keep_call(self, call: FirstCall) -> None:
        """Keep a call whose outputs become row 0 of the next rollout."""
        self.first_call = call

    def take_call(self) -> FirstCall:
        """Return the kept call, which is used now."""
        call = self.first_call
        assert call is not None
        self.first_call = None
        return call

    def discard_call(self) -> None:
        """Discard the kept call: the rows that it was made on are not the next ones any more."""
        self.first_call = None

    # --- resumed episodes -------------------------------------------------------------------------

    def mark_resumed(self, which: Sequence[int] | None = None) -> None:
        """Let rollouts have the column of resumed episodes, in which those of ``which`` are marked
        (None: those that are marked already).
        """
        if which is not None:
            self.resumed = list(which)
        elif self.resumed is None:
            self.resumed = []

    def take_resumed(self) -> list[int]:
        """Return the environments whose next row is the first after a load, for the last time."""
        resumed = self.resumed or []
        if self.resumed is not None:
            self.resumed = []
        return resumed

    def _zeros(self, spec: ArraySpec) -> Any:
        shape = (1, self._env_spec.num_envs, *spec.shape)
        device = self._env_spec.device
        if device is None or not spec.is_tensor:
            return np.zeros(shape, spec.dtype)
        # rollouts run in it, but carried rows are also written outside of rollouts
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=device)
