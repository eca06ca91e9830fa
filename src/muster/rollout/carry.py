"""The rows for the next step of a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.env_spec import EnvSpec
from muster.keys import IS_INIT, Key
from muster.memory.slots import as_tensor, torch_dtype
from muster.memory.specs import ArraySpec, Column

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


class Carry(dict[Key, Any]):
    """Observations, infos and recurrent states before the next step, ``[1, B, *shape]`` each.

    They are arrays, or tensors on a device.

    Args:
        env_spec: description of the env batch that writes the observations.
    """

    def __init__(self, env_spec: EnvSpec) -> None:
        self._env_spec = env_spec
        self._by_env = env_spec.carried_specs
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

    def _zeros(self, spec: ArraySpec) -> Any:
        shape = (1, self._env_spec.num_envs, *spec.shape)
        device = self._env_spec.device
        if device is None or not spec.is_tensor:
            return np.zeros(shape, spec.dtype)
        # rollouts run in it, but carried rows are also written outside of rollouts
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=device)
