"""Between rlpyt's buffers and Muster's loop: the runner of a group of environments, and the rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.compat.base import GroupRunner, borrowed
from muster.compat.rlpyt.actors import AGENT_INFO
from muster.compat.rlpyt.envs import ENV_INFO, RlpytEnvs
from muster.compat.rlpyt.trees import BufferPart, leaves
from muster.envs.previous import PREV_ACTION, PREV_REWARD, with_previous
from muster.errors import BadOption
from muster.keys import ACTION, DONE, OBSERVATION, REWARD, Key, dotted, next_of
from muster.memory.slots import Lane
from muster.rng import GroupRng
from muster.rollout.columns import RolloutOptions

NEEDED = ("env", "observation"), ("env", "reward"), ("env", "done"), ("agent", "action")
OPTIONAL = ("env", "prev_reward"), ("env", "env_info"), ("agent", "prev_action"), ("agent", "agent_info")


class AgentInputs(NamedTuple):
    """The inputs of an agent, ``[B, ...]`` each: views of the first rows of the next batch."""

    observation: Any
    prev_action: Any
    prev_reward: Any


def options(*, mid_batch_reset: bool = True, decorrelation: int = 0, interruptor: Any = None) -> RolloutOptions:
    """The rollout options of rlpyt's collectors; their differences are the arguments."""
    return borrowed(
        reset_when_done=mid_batch_reset,
        max_decorrelation_steps=decorrelation,
        interruptor=interruptor,
        traj_done_key="traj_done",
        prev_action_reward=True,
        compact_obs=True,
    )


class RlpytRunner(GroupRunner):
    """Runs environments some rows at a time; ``inputs`` are the next inputs of the agent."""

    def __init__(
        self,
        envs: RlpytEnvs,
        options: RolloutOptions,
        *,
        rank: int = 0,
        env_ranks: Sequence[int] | None = None,
        global_B: int = 1,
    ) -> None:
        ranks = np.arange(envs.num_envs) if env_ranks is None else np.asarray(env_ranks, np.int64)
        seed = int(np.random.randint(2**31)) if options.max_decorrelation_steps else 0
        total_envs = max(global_B, int(ranks.max()) + 1)
        super().__init__(with_previous(envs), options, rng=GroupRng(seed, rank), env_ids=ranks, total_envs=total_envs)
        self.envs = envs
        carry = {key: row[0] for key, row in self.group.carry.items()}
        prev_action = envs.action.over(carry, (PREV_ACTION,))
        self.inputs = AgentInputs(envs.observation.over(carry), prev_action, carry[PREV_REWARD])


def envs_of(samples: Any, T: int, envs: Sequence[Any], TrajInfoCls: Any) -> tuple[RlpytEnvs, BufferPart | None]:
    """Return the environments with the columns of ``samples``, and the buffer of ``agent_info``; or ``BadOption``."""
    for side, name in (*NEEDED, *OPTIONAL):
        tree = getattr(getattr(samples, side, None), name, None)
        if tree is None and (side, name) in NEEDED:
            raise BadOption(f"samples_np has no {side}.{name}, which every batch is written to")
        for key, leaf in leaves(tree, (side, name)).items():
            if np.shape(leaf)[:2] != (T, len(envs)):
                raise BadOption(
                    f"samples_np.{dotted(key)} is {np.shape(leaf)}, expected ({T}, {len(envs)}, ...): batch_T={T} "
                    f"rows for {len(envs)} environments. A worker gets its own part of the sampler's buffer."
                )
    env, agent = samples.env, samples.agent
    return RlpytEnvs(
        envs,
        TrajInfoCls,
        observation=BufferPart(env.observation, OBSERVATION, 2),
        action=BufferPart(agent.action, ACTION, 2),
        env_info=BufferPart(env.env_info, ENV_INFO, 2) if hasattr(env, "env_info") else None,
        reward_dtype=env.reward.dtype,
    ), BufferPart(agent.agent_info, AGENT_INFO, 2) if hasattr(agent, "agent_info") else None


def store(lane: Lane, samples: Any) -> None:
    """Copy a batch into rlpyt's buffers.

    If ``prev_action`` and ``action`` (or the rewards) share memory, as in rlpyt's samplers, only the first row is
    written, and the others are the actions of the row before, even if the agent got other inputs.
    """
    env, agent = samples.env, samples.agent
    _copy(lane, env.observation, OBSERVATION)
    _copy(lane, env.reward, REWARD)
    _copy(lane, env.done, next_of(DONE))
    _copy(lane, getattr(env, "env_info", None), ENV_INFO)
    _copy(lane, agent.action, ACTION)
    _copy(lane, getattr(agent, "agent_info", None), AGENT_INFO)
    _copy(lane, getattr(env, "prev_reward", None), PREV_REWARD, shares_with=env.reward)
    _copy(lane, getattr(agent, "prev_action", None), (PREV_ACTION,), shares_with=agent.action)


def _copy(lane: Lane, buffer: Any, root: Key, shares_with: Any = None) -> None:
    others = leaves(shares_with, root) if shares_with is not None else {}
    for key, leaf in leaves(buffer, root).items():
        rows = 1 if key in others and np.may_share_memory(leaf, others[key]) else lane.T
        leaf[:rows] = lane.arrays[key][:rows]
