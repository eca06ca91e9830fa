"""The returns of agents that act at the same time, for records of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from muster.episodes.record import Episodes
from muster.errors import BadCheckpoint
from muster.keys import Key
from muster.memory.specs import OBJECT, Array

AGENT_RETURNS = "agent_returns"  # entry of the info of a record
# the names of the agents by the column of their rewards, ``[..., agents, 1]``
AgentRewards = Mapping[Key, Sequence[str]]


class AgentReturns:
    """The sums of the rewards of each agent in the current episode of each environment.

    Args:
        agents: see ``AgentRewards``.
        num_envs: number of environments of the group.
    """

    def __init__(self, agents: AgentRewards, num_envs: int) -> None:
        self._agents = agents
        self._names: list[str] = []
        for names in agents.values():
            self._names += names
        self._sums = np.zeros((num_envs, len(self._names)))

    def abandon(self, which: Sequence[int]) -> None:
        """Start new episodes in ``which``."""
        self._sums[list(which)] = 0.0

    def advance(
        self,
        columns: Mapping[Key, Array],
        over: Array,
    ) -> list[dict[str, float]]:
        """Advance to the end of rows; return the returns of the episodes that ended, by agent.

        Args:
            columns: with those of the rewards, at least as many rows as ``over``.
            over: where episodes end, ``[n, B]``.

        Returns:
            a dict for each end, in the order of rows, then environments.
        """
        rewards = joined(columns, self._agents, len(over))
        ended: list[dict[str, float]] = []
        begin: dict[int, int] = {}
        for t, i in np.argwhere(over).tolist():
            first = begin.get(i, 0)
            added = rewards[first : t + 1, i].sum(axis=0)
            total = self._sums[i] + added
            by_name = zip(self._names, total.tolist(), strict=True)
            ended.append(dict(by_name))
            begin[i] = t + 1
            self._sums[i] = 0.0
        for i, t in begin.items():
            rewards[:t, i] = 0.0
        self._sums += rewards.sum(axis=0)
        return ended

    def state_dict(self) -> Array:
        """Return a copy of the sums."""
        sums: Array = self._sums.copy()
        return sums

    def load_state_dict(self, state: Array | None) -> None:
        """Restore ``state_dict()``; None: a state of before agents had returns."""
        if state is None:
            self._sums[...] = 0.0
            return
        sums = np.asarray(state)
        if sums.shape != self._sums.shape:
            raise BadCheckpoint(
                f"the returns of agents have shape {sums.shape}, expected {self._sums.shape}"
            )
        self._sums[...] = sums


def joined(
    columns: Mapping[Key, Array],
    agents: AgentRewards,
    rows: int,
) -> Array:
    """Return the rewards of all agents in the first ``rows``, ``[rows, ..., agents]`` float64."""
    parts = []
    for key in agents:
        rewards = np.asarray(columns[key][:rows])
        parts.append(rewards[..., 0])
    return np.concatenate(parts, axis=-1, dtype=np.float64)


def with_returns(
    episodes: Episodes,
    returns: Sequence[Mapping[str, float]],
) -> Episodes:
    """Return records whose infos have these returns of agents, too."""
    infos = np.empty(len(episodes), OBJECT)
    for row, by_agent in enumerate(returns):
        known = {}
        if episodes.info is not None:
            known = episodes.info[row]
        infos[row] = {**known, AGENT_RETURNS: dict(by_agent)}
    return replace(episodes, info=infos)
