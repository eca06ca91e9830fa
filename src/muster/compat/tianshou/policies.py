"""Adapter of Tianshou's policies, which calls them as Tianshou's collectors do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from tianshou.data import Batch, to_numpy
from tianshou.data.batch import create_value

from muster.compat.tianshou.envs import (
    Actions,
    VectorEnvs,
    batch_of,
    copied,
    noted,
    stacked,
    unshared,
)
from muster.compat.tianshou.outputs import (
    check_actions,
    check_entry,
    check_result,
    check_state,
)
from muster.errors import BadPolicyOutput
from muster.keys import OBSERVATION, Key
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, Column
from muster.protocols import Act, Outputs
from muster.rng import GroupRng


class TianshouActor:
    """Chooses actions for the environments that are ready; implements ``Policy``.

    Errors are raised as they are.

    Attributes:
        state: the policy's state, ``[N, ...]``, which nothing else refers to; None: no environment
            has one.
    """

    path = "tianshou policy"
    draws_globally = True
    name = "policy"
    raises = (Exception,)  # none is replaced by a ``PolicyError``
    policy: Any

    def __init__(self, envs: VectorEnvs, action_spaces: Any) -> None:
        self.envs = envs
        self.action_spaces = action_spaces
        self.random = False
        self.noise = False
        self.no_grad = True
        self.state: Any = None

    def begin(self, policy: Any, *, random: bool, noise: bool, no_grad: bool) -> None:
        """Use this policy from now on; if ``random``, it only maps actions that are drawn from the
        action spaces.
        """
        self.policy, self.name = policy, type(policy).__name__
        self.random = random
        self.noise = noise
        self.no_grad = no_grad

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        raise NotImplementedError(f"{self.name} acts for Tianshou's collectors only")

    def columns(self) -> Sequence[Column]:
        return ()

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        envs = self.envs
        observations = lane.arrays[OBSERVATION]

        def act(t: int) -> None:
            envs.check()
            ids = envs.ready
            if begun := envs.pop_begun():
                self._begin_episodes(begun)
            try:
                if self.random:
                    envs.act(self._draw(ids))
                    return
                obs = (
                    observations[t].copy()
                    if len(ids) == lane.B
                    else observations[t, ids]
                )
                with nullcontext() if self.no_grad else torch.enable_grad():
                    envs.act(self._act(ids, obs))
            except Exception as error:
                who = f"{self.name} raised this. "
                if isinstance(error, BadPolicyOutput):
                    who = ""
                noted(
                    error,
                    f"{who}No environment was stepped since; the next call tries again.",
                )
                raise

        return act

    def forget(self) -> None:
        """Begin without a state of the policy."""
        self.state = None

    def _act(self, ids: Array, obs: Array) -> Actions:
        policy = self.policy
        whole = len(ids) == self.envs.spec.num_envs
        infos = self.envs.infos if whole else [self.envs.infos[i] for i in ids]
        batch = batch_of(obs=unshared(stacked(obs)), info=unshared(info_batch(infos)))
        result = policy(
            batch,
            self.state if whole or self.state is None else unshared(self.state[ids]),
        )
        check_result(self.name, result)
        act = to_numpy(result.act)
        check_actions(self.name, "returned", act, len(ids))
        if self.noise:
            act = policy.add_exploration_noise(act, batch)
            check_actions(self.name, "made, with noise,", act, len(ids))
        mapped = policy.map_action(act)
        check_actions(self.name, "mapped its actions to", mapped, len(ids))
        entry, state = result.get("policy", None), result.get("state", None)
        entry = Batch() if entry is None else entry
        if not isinstance(entry, Batch):
            raise BadPolicyOutput(
                f"what {self.name} returned has a policy of {type(entry).__name__}, expected a"
                " Batch"
            )
        has_rows = check_entry(self.name, entry, len(ids))
        if state is not None:
            check_state(self.name, state, len(ids))
            entry.hidden_state = state
        self._remember(ids, state, whole)
        return Actions(ids, act, mapped, entry, result.get("dist"), state, has_rows)

    def _draw(self, ids: Array) -> Actions:
        spaces = self.action_spaces
        try:
            mapped = np.array([spaces[i].sample() for i in ids])
        except TypeError:  # EnvPool has one space for all environments
            mapped = np.array([spaces.sample() for _ in ids])
        self.state = None
        return Actions(
            ids, self.policy.map_action_inverse(np.array(mapped)), mapped, Batch()
        )

    def _remember(self, ids: Array, state: Any, whole: bool) -> None:
        """Copy the state: the policy may change the one that it returned."""
        if whole or state is None:
            self.state = copied(state)
            return
        if self.state is None:
            self.state = create_value(state, self.envs.spec.num_envs, stack=False)
        self.state[ids] = unshared(state)

    def _begin_episodes(self, which: list[int]) -> None:
        state = self.state
        if state is None:
            return
        if isinstance(state, Batch):
            state.empty_(which)
        else:
            state[which] = None if getattr(state, "dtype", None) == OBJECT else 0


def info_batch(infos: Sequence[dict[str, Any]]) -> Any:
    """Convert the last infos for a policy: an empty Batch if all are empty; zeros (or None) in
    place of empty ones.
    """
    some = next((info for info in infos if info), None)
    if some is None:
        return Batch()
    empty = [i for i, info in enumerate(infos) if not info]
    if all(info.keys() <= {"env_id"} for info in infos):
        return batch_of(env_id=np.array([info.get("env_id", 0) for info in infos]))
    batch = Batch([info or some for info in infos])
    if empty:
        batch[np.array(empty)] = {}
    return batch
