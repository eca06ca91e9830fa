"""The description of an env batch: what a worker sends home, and what a policy is fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.keys import FLAGS, REWARD, Key, dotted

if TYPE_CHECKING:
    import torch

    from muster.memory.specs import Specs


FLOAT: np.dtype[Any] = np.dtype(np.float32)


@dataclass(frozen=True)
class EnvSpec:
    """The description of B environments that are stepped together.

    Attributes:
        name: name in messages.
        num_envs: B.
        batch_shape: batch dimensions for policy and user, usually ``(B,)``.
        observation_specs: stored dtypes and shapes of the policy's input, and of other values
            carried from step to step (nested done flags, the state of a stateless environment).
            Writing into rows casts to these dtypes; see ``stored_as``.
        action_specs: the policy's actions.
        info_specs: columns of infos; written and carried as observations are, and hidden from
            policies.
        step_specs: other results of a step, stored below ``next``, for instance rewards per agent.
        rewards: which of ``step_specs`` are rewards.
        bookkeeping: keys of observations that only policies on TensorDicts get: counters, flags,
            state.
        own_dtype: keys of observations whose dtype must not be changed.
        action_masks: key of the action mask by key of the action, for discrete actions. A mask is
            an observation or an info with an entry for each choice (those of several variables one
            after another), or for each combination of choices; 0: not allowed. Collectors refuse
            masks that do not fit (``policies.sampling.check_masks``).
        samples_allowed: the batch's own random actions are allowed in the current state
            (TorchRL's ``rand_action``).
        repeats: observations that repeat another column of the row before, and that column; zero at
            the start of an agent's episode.
        flags: the flags among done, terminated and truncated in the user's batch; Muster stores all
            three.
        reward_key: column of the reward that episode records sum up, ``[B]``. ``TEAM_REWARD`` is
            hidden from the user, for environments whose own rewards are ``step_specs``.
        reward_dtype: dtype of that column.
        agent_rewards: names of the agents by the column of their rewards, ``[agents, 1]``, below
            ``next``, for the returns of agents in episode records.
        reward_ends: of columns of rewards whose agents end one by one, the observation ``done`` with
            the same shape: where they have ended.
        final_obs_certain: False: next/observation may be unknown at the end of an episode.
        device: device of the rows; None is the host. On a device ``reset`` and ``step`` get and
            write tensors (``lane.data``), and ``step`` must not synchronize: see ``WritesNext``.
        agents: names of agents that take turns. Each row is then a turn of one of them, whose
            number is in the column ``AGENT``, and each agent has its own episodes (see
            ``envs/turns.py``). Empty: agents do not take turns.
        ready: number of environments that act at the same time; None: all (see ``ActsWhenReady``).
        single: made of single environments: one of them, requested without ``num_envs``, gets the
            ``batch_shape`` ``()``.
        replays_alone: each environment can be replayed without the others.
        seeds_episodes: a reset of a single environment can have a seed.
    """

    name: str
    num_envs: int
    batch_shape: tuple[int, ...]
    observation_specs: Specs
    action_specs: Specs
    info_specs: Specs = field(default_factory=dict)
    step_specs: Specs = field(default_factory=dict)
    rewards: frozenset[Key] = frozenset()
    bookkeeping: frozenset[Key] = frozenset()
    own_dtype: frozenset[Key] = frozenset()
    action_masks: Mapping[Key, Key] = field(default_factory=dict)
    samples_allowed: bool = False
    repeats: Mapping[Key, Key] = field(default_factory=dict)
    flags: tuple[Key, ...] = FLAGS
    reward_key: Key = REWARD
    reward_dtype: np.dtype[Any] = FLOAT
    agent_rewards: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    reward_ends: Mapping[Key, Key] = field(default_factory=dict)
    final_obs_certain: bool = True
    device: torch.device | None = None
    agents: tuple[str, ...] = ()
    ready: int | None = None
    single: bool = False
    replays_alone: bool = False
    seeds_episodes: bool = False

    @property
    def carried_specs(self) -> Specs:
        """What is carried over from row to row: observations and infos."""
        return {**self.observation_specs, **self.info_specs}

    @property
    def acting_shape(self) -> tuple[int, ...]:
        """Batch dimensions of a policy's call."""
        return self.batch_shape if self.ready is None else (self.ready,)

    @property
    def observations(self) -> dict[str, str]:
        """Observation and info specs as text, by key."""
        return {dotted(key): str(spec) for key, spec in self.carried_specs.items()}

    @property
    def actions(self) -> dict[str, str]:
        """Action specs as text, by key."""
        return {dotted(key): str(spec) for key, spec in self.action_specs.items()}

    def stored_as(self, dtype: np.dtype[Any]) -> EnvSpec:
        """Return the spec with floating observations in another dtype, except ``own_dtype``."""
        specs = {
            key: spec if key in self.own_dtype else spec.stored_as(dtype)
            for key, spec in self.observation_specs.items()
        }
        return replace(self, observation_specs=specs)
