"""rlpyt's environments as an env batch, which also keeps the records of their episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from muster.capabilities import Bypasses, CountsSteps, DrawsActions, TracksLives
from muster.compat.rlpyt.trees import BufferPart, mapped
from muster.env_spec import EnvSpec
from muster.envs.checks import as_flag, call, reward_problem
from muster.errors import BadEnvOutput, BadPolicyOutput, MusterError, described
from muster.keys import REWARD, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng

ENV_INFO: Key = next_of(("env_info",))
TERMINATED = next_of(("terminated",))


class TrajInfo(dict[str, Any]):
    """Statistics of one episode, as entries and attributes.

    All are logged, except names that begin with ``_``.

    A subclass can add more::

        class MyTrajInfo(TrajInfo):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.Lives = 0

            def step(self, observation, action, reward, done, agent_info, env_info):
                super().step(observation, action, reward, done, agent_info, env_info)
                self.Lives += done

    Attributes:
        Length: number of steps.
        Return: sum of rewards.
        NonzeroRewards: number of rewards that are not zero.
        DiscountedReturn: by ``_discount``, which samplers set on the class
            (``traj_info_kwargs=dict(discount=0.99)``).
    """

    _discount = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.Length = 0
        self.Return = 0
        self.NonzeroRewards = 0
        self.DiscountedReturn = 0
        self._cur_discount = 1.0

    def step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        done: Any,
        agent_info: Any,
        env_info: Any,
    ) -> None:
        """Add a step: called after every step, with the agent's observation and action, and their
        results.
        """
        self["Length"] += 1  # as entries, which is faster
        self["Return"] += reward
        self["NonzeroRewards"] += int(reward != 0)
        self["DiscountedReturn"] += self["_cur_discount"] * reward
        self["_cur_discount"] *= self._discount

    def terminate(self, observation: Any) -> TrajInfo:
        """Return the record of the episode; called with its last observation."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}; it has {sorted(self)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


class RlpytEnvs(EnvBatch, Bypasses, CountsSteps, DrawsActions, TracksLives):
    """B rlpyt environments stepped one after another; implements ``EnvBatch``.

    The sampler closes them.

    Args:
        resets_made: observations of resets that were already done, by environment.

    Attributes:
        traj_infos: records of the running episodes, ``[B]``.
        done: whether the last step, or an error after it, ended the agent's episode, ``[B]``.
        begun: whether the environment's episode has steps and continues, ``[B]``.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        TrajInfoCls: Any,
        *,
        observation: BufferPart,
        action: BufferPart,
        env_info: BufferPart | None = None,
        reward_dtype: Any = np.float32,
        resets_made: Mapping[int, Any] | None = None,
    ) -> None:
        self.envs = list(envs)
        self.observation = observation
        self.action = action
        self.env_info = env_info
        self.TrajInfoCls = TrajInfoCls
        B = len(self.envs)
        self.spec = EnvSpec(
            type(envs[0]).__name__,
            B,
            (B,),
            observation.specs,
            action.specs,
            step_specs=(
                {}
                if env_info is None
                else {key[1:]: s for key, s in env_info.specs.items()}
            ),
            reward_dtype=np.dtype(reward_dtype),
        )
        self.traj_infos = [TrajInfoCls() for _ in self.envs]
        self._deliver: Callable[[Any], None] = lambda info: None
        self._resets_made = {} if resets_made is None else dict(resets_made)
        self._agent_info: Any = None  # about the next actions
        self.done, self.begun = np.zeros((2, B), bool)
        self._after_done: Callable[[int], None] = lambda env: None
        self.bypassed: frozenset[int] = frozenset()
        self._lives_lost: list[int] = []

    def record(self, traj_infos: list[Any], deliver: Callable[[Any], None]) -> None:
        """Record the episodes from now on.

        Args:
            traj_infos: records of the running episodes, ``[B]``.
            deliver: called with the record of an episode that has ended.
        """
        self.traj_infos = traj_infos
        self._deliver = deliver
        self.done[:] = False

    def when_done(self, function: Callable[[int], None]) -> None:
        """Call a function with an environment whose agent's episode has ended."""
        self._after_done = function

    def acted(self, agent_info: Any, name: str) -> None:
        """Keep the information of the agent ``name`` about the next actions, ``[B]``; None: there is
        none.
        """
        self._agent_info = None
        if agent_info is None or (isinstance(agent_info, tuple) and not agent_info):
            return
        every = range(self.spec.num_envs)
        try:
            if _is_plain(agent_info):
                self._agent_info = [mapped(itemgetter(b), agent_info) for b in every]
            else:
                self._agent_info = [agent_info[b] for b in every]
        except (TypeError, IndexError, KeyError) as error:
            raise BadPolicyOutput(
                f"what {name} returned has an agent_info without a part [b] for each environment:"
                f" {described(error)}. Expected a namedarraytuple, or an array."
            ) from error

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Draw actions from the environments' own action spaces, and so from the process's
        generators.
        """
        drawn = {
            key: np.zeros((*shape, *spec.shape), spec.dtype)
            for key, spec in self.spec.action_specs.items()
        }
        for index in np.ndindex(shape):
            b = index[-1]
            self._must(
                self.action.write(drawn, index, self.envs[b].action_space.sample()),
                b,
                "action_space.sample",
            )
        return drawn

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        for b in which:
            observation = (
                self._resets_made.pop(b)
                if b in self._resets_made
                else self._call(b, "reset")
            )
            self._must(
                self.observation.write(arrays, (row, b), observation), b, "reset"
            )
            if self.begun[b]:
                self._abandon(b)

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        for key in self.spec.step_specs:
            # for fields that an environment does not return
            arrays[next_of(key)][lane.done_steps :] = 0
        # to records of episodes
        shown = {key: _read_only(arrays[key]) for key in self.spec.observation_specs}
        observations, actions = self.observation.over(shown), self.action.over(arrays)
        rewards = arrays[REWARD]
        terminated = arrays[TERMINATED]

        def step(t: int) -> Sequence[int] | None:
            # an environment may keep or change it
            before, action = observations[t], mapped(np.copy, actions[t])
            finished = []
            self._lives_lost.clear()
            for b in range(self.spec.num_envs):
                if b in self.bypassed:
                    rewards[t, b] = 0
                    for key in self.spec.observation_specs:
                        arrays[key][t + 1, b] = 0
                    continue
                observation, reward, done, over, env_info = self._step(b, action[b])
                rewards[t, b] = reward
                self._must(
                    self.observation.write(arrays, (t + 1, b), observation), b, "step"
                )
                if self.env_info is not None:
                    self._must(
                        self.env_info.write(arrays, (t, b), env_info, partial=True),
                        b,
                        "step",
                    )
                agent_info = None if self._agent_info is None else self._agent_info[b]
                self._note(
                    b,
                    over,
                    observation,
                    (before[b], action[b], reward, done, agent_info, env_info),
                )
                self.done[b], self.begun[b], terminated[t, b] = done, not over, done
                if done:
                    finished.append(b)
                    self._after_done(b)
                if done and not over:
                    self._lives_lost.append(b)
            self.executed_in_row = 0
            return finished or None

        return step

    def _abandon(self, env: int) -> None:
        """End the episode of an environment that was reset within it, after an error: its steps are
        in no batch, and belong to no record.
        """
        self.traj_infos[env] = self.TrajInfoCls()
        self.begun[env] = False
        self.done[env] = True
        self._after_done(env)

    def bypass(self, which: Collection[int]) -> None:
        self.bypassed = frozenset(which)

    def track_lives(self, key: str) -> Collection[int]:
        """Return the environments; lives are always tracked, by ``env_info.traj_done``."""
        return self._lives_lost

    def objects(self) -> Sequence[object]:
        return self.envs

    def _step(self, env: int, action: Any) -> tuple[Any, Any, bool, bool, Any]:
        """Step one environment: returns observation, reward, done, traj_done, env_info."""
        self.executed_in_row = env
        got = self._call(env, "step", action)
        self.executed_in_row = env + 1
        if not isinstance(got, tuple) or len(got) != 4:
            expected = "expected (observation, reward, done, env_info)"
            raise BadEnvOutput(
                f"{self._who(env, 'step')} returned {type(got).__name__}, {expected}"
            )
        observation, reward, done, env_info = got
        over = getattr(env_info, "traj_done", done)
        if type(reward) is not float and (problem := reward_problem(reward)):
            raise BadEnvOutput(f"{self._who(env, 'step')}: {problem}")
        if type(done) is not bool or type(over) is not bool:
            who = self._who(env, "step")
            done, over = as_flag(done, "done", who), as_flag(over, "traj_done", who)
        return observation, reward, done or over, over, env_info

    def _note(self, env: int, over: bool, last: Any, step: tuple[Any, ...]) -> None:
        """Add a step to the record of an episode; if it is over, ``last`` is its last observation."""
        try:
            self.traj_infos[env].step(*step)
            if over:
                ended, self.traj_infos[env] = (
                    self.traj_infos[env].terminate(last),
                    self.TrajInfoCls(),
                )
                self._deliver(ended)
        except Exception as error:
            self.begun[env] = True  # the record may have a part of the step
            record = type(self.traj_infos[env]).__name__
            who = f"{record} of {type(self.envs[env]).__name__}[{env}]"
            raise MusterError(
                f"{who}: recording a step raised {described(error)}"
            ) from error

    def _call(self, env: int, method: str, *args: Any) -> Any:
        return call(
            self.envs[env],
            method,
            f"{type(self.envs[env]).__name__}[{env}]",
            *args,
            index=env,
        )

    def _must(self, problem: str | None, env: int, method: str) -> None:
        if problem is not None:
            raise BadEnvOutput(f"what {self._who(env, method)} returned {problem}")

    def _who(self, env: int, method: str) -> str:
        return f"{type(self.envs[env]).__name__}[{env}].{method}"


def _is_plain(tree: Any) -> bool:
    """Whether ``[b]`` of a tree is one of its parts, and not the entry of an environment in each."""
    if isinstance(tree, Mapping):
        return True
    return getattr(type(tree), "__getitem__", None) is tuple.__getitem__


def _read_only(array: Array) -> Array:
    view: Array = array.view()
    view.flags.writeable = False
    return view
