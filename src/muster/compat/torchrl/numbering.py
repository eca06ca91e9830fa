"""TorchRL's trajectory ids: from one counter, in the order in which trajectories start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.keys import TRAJ_IDS, next_of
from muster.memory.specs import Array
from muster.policies.tensordict_program import as_key


class Numbering:
    """Numbers trajectories in the order of their starts: by time, then by environment.

    A trajectory ends where any done flag is set, also of a single agent, and even if TorchRL does
    not reset there.

    Args:
        num_envs: number of environments, B.
        done_keys: keys of the environment's done flags.
        pool: TorchRL's counter of ids.

    Attributes:
        current: ``[B]``, id of the current trajectory of each environment.
    """

    def __init__(self, num_envs: int, done_keys: Sequence[Any], pool: Any) -> None:
        self.pool = pool
        self._flags = [next_of(as_key(key)) for key in done_keys]
        self.current = np.full(num_envs, -1, np.int64)
        self.renumber(range(num_envs))

    def renumber(self, which: Sequence[int]) -> Array:
        """Assign new ids to the environments ``which``; returns the old ids."""
        index = np.asarray(which, np.int64)
        before = self.current[index]
        self.current[index] = self._new(len(index))
        return before

    def _new(self, n: int) -> Array:
        return np.asarray(self.pool.get_traj_and_increment(n) if n else [], np.int64)

    def write(self, batch: Any) -> None:
        """Replace the ids of a batch ``[*lead, T]``; steps that were not executed keep -1."""
        before = batch.get(TRAJ_IDS)
        made = before.reshape(len(self.current), -1).cpu().numpy() >= 0
        ids = np.where(made, self.current[:, None], -1)
        ends = np.argwhere((self._ends(batch) & made).T)  # in order of time
        for (t, env), new in zip(ends, self._new(len(ends)), strict=True):
            self.current[env] = new
            ids[env, t + 1 :] = np.where(made[env, t + 1 :], new, -1)
        batch.set(
            TRAJ_IDS, torch.from_numpy(ids).reshape(before.shape).to(before.device)
        )

    def _ends(self, batch: Any) -> Array:
        ends = np.zeros((len(self.current), batch.shape[-1]), bool)
        for flag in self._flags:
            value = batch.get(flag, None)
            if value is not None:
                ends |= value.reshape(*ends.shape, -1).any(-1).cpu().numpy()
        return ends

    def state_dict(self) -> dict[str, Any]:
        return {"current": self.current.copy(), "pool": dict(self.pool.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.current[...] = state["current"]
        self.pool.load_state_dict(state["pool"])
