"""Records of the episodes in a batch of whole episodes, counted from its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.agent_returns import AgentRewards, joined, with_returns
from muster.episodes.record import Episodes, info_records
from muster.episodes.segment import ENDED, find_pieces
from muster.keys import INFO, TERMINATED, TRUNCATED, Key, key_of, next_of
from muster.memory.specs import Array

if TYPE_CHECKING:
    from tensordict import TensorDict


class Recount:
    """Makes the records of the episodes in batches of whole episodes.

    Args:
        num_envs: number of environments over all groups.
        reward_key: column of the reward that episode records sum up.
        with_infos: the batches have columns of infos.
        agents: see ``AgentRewards``.
    """

    def __init__(
        self,
        num_envs: int,
        reward_key: Key,
        *,
        with_infos: bool,
        agents: AgentRewards,
    ) -> None:
        self._agents = agents
        self._num_envs = num_envs
        self._reward_key = reward_key
        self._with_infos = with_infos

    def of(self, batch: TensorDict) -> Episodes:
        """Return the records of the episodes in ``[frames]`` or ``[n, longest]``, in the batch's
        order.
        """
        lines = batch if batch.ndim > 1 else batch.unsqueeze(0)
        pieces = find_pieces(lines, ENDED)
        last = pieces.rows[pieces.first + pieces.length - 1]

        def column(key: Key) -> Array:
            array: Array = batch.get(key).detach().cpu().numpy()
            return array.reshape(batch.numel(), -1)

        rewards = column(self._reward_key)[pieces.rows, 0]
        returns = np.add.reduceat(rewards.astype(np.float64), pieces.first)
        infos = _infos_at(batch, last) if self._with_infos else None
        episodes = Episodes(
            traj_id=pieces.traj_id,
            env_id=pieces.traj_id % self._num_envs,
            episode_return=returns,
            length=pieces.length,
            terminated=column(next_of(TERMINATED))[last, 0],
            truncated=column(next_of(TRUNCATED))[last, 0],
            info=infos,
        )
        if not self._agents:
            return episodes
        count = batch.numel()
        columns: dict[Key, Array] = {}
        names: list[str] = []
        for key, of_team in self._agents.items():
            columns[key] = column(key).reshape(count, len(of_team), 1)
            names += of_team
        rewards_of_agents = joined(columns, self._agents, count)
        totals = np.add.reduceat(rewards_of_agents[pieces.rows], pieces.first, axis=0)
        by_agent = [dict(zip(names, total, strict=True)) for total in totals.tolist()]
        return with_returns(episodes, by_agent)


def _infos_at(batch: TensorDict, rows: Array) -> Array:
    """Return the ``info_records`` of these rows of the flattened batch."""
    from tensordict import is_leaf_nontensor

    flat = batch["next", INFO].reshape(-1)
    columns: dict[Key, Any] = {}
    for key in flat.keys(True, True, is_leaf=is_leaf_nontensor):
        column = flat.get(key)
        if torch.is_tensor(column):
            values: Any = column.cpu().numpy()[rows]
        else:
            values = [column[row].data for row in rows.tolist()]
        columns[key_of(key)] = values
    return info_records(columns, len(rows))
