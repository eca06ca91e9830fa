"""Steps rlpyt's environments by Muster's loop, some rows at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from muster.compat.base import GroupRunner, borrowed
from muster.compat.rlpyt.envs import RlpytEnvs
from muster.envs.previous import PREV_ACTION, PREV_REWARD, with_previous
from muster.memory.specs import Array
from muster.rng import GroupRng


class AgentInputs(NamedTuple):
    """The inputs of an agent, ``[B, ...]`` each: views of the first rows of the next batch."""

    observation: Any
    prev_action: Any
    prev_reward: Any


class RlpytRunner(GroupRunner):
    """Runs environments some rows at a time; ``inputs`` are the next inputs of the agent.

    Args:
        rank: rank of the worker.
        ranks: ranks of the environments.
        global_B: number of environments of all workers.
        mid_batch_reset: reset finished environments at once; else they wait for the next batch.
        decorrelation: maximum of random steps before the first row.
    """

    def __init__(
        self,
        envs: RlpytEnvs,
        *,
        rank: int,
        ranks: Array | None = None,
        global_B: int = 1,
        mid_batch_reset: bool = True,
        decorrelation: int = 0,
    ) -> None:
        options = borrowed(
            reset_when_done=mid_batch_reset,
            max_decorrelation_steps=decorrelation,
            traj_done_key="traj_done",
            prev_action_reward=True,
            compact_obs=True,
        )
        if ranks is None:
            ranks = np.arange(envs.spec.num_envs)
        seed = int(np.random.randint(2**31)) if decorrelation else 0
        total_envs = max(global_B, int(ranks.max()) + 1)
        super().__init__(
            with_previous(envs),
            options,
            rng=GroupRng(seed, rank),
            env_ids=ranks,
            total_envs=total_envs,
        )
        self.envs = envs
        carry = {key: row[0] for key, row in self.group.carry.items()}
        prev_action = envs.action.over(carry, (PREV_ACTION,))
        self.inputs = AgentInputs(
            envs.observation.over(carry), prev_action, carry[PREV_REWARD]
        )
