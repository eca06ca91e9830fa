"""``pettingzoo.ParallelEnv`` as an env batch: agents in groups, with a mask for absent agents.

AEC environments whose agents can act at the same time (``metadata["is_parallelizable"]``) are run
in parallel; those whose agents take turns are in ``envs/turns.py``.

Keys are TorchRL's (``PettingZooWrapper(use_mask=True, done_on_any=False)``). Agents ``name_0``,
``name_1``, ... with equal spaces form the group ``name``; any other agent is a group by itself. For
a group of k agents::

    (group, "observation")                        [k, *shape]; below it the keys of a Dict space
    (group, "action")                             [k, *shape]
    ("next", group, "reward")                     [k, 1] float32
    (group, "done" | "terminated" | "truncated")  [k, 1]: how the agent left; ``done`` is True while it is absent
    (group, "mask")                               [k]: the agent acts
    (group, "action_mask")                        [k, *shape], from Dict observations or infos; True for absent agents
    "state"                                       the global state, if the environment has a ``state_space``

An agent's last observation is in the row after its last step. Agents without an observation have
zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel

from muster.capabilities import (
    CastsValues,
    CountsSteps,
    DrawsActions,
    KeepsState,
    ResetsWithOptions,
    TellsInfos,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.checks import FIX, Casts
from muster.envs.spaces import SpaceCodec
from muster.envs.turns import AgentSpaces, TurnEnvs, name_of_game
from muster.errors import BadEnvOutput, UnsupportedEnv
from muster.keys import (
    FLAGS,
    RESERVED,
    TEAM_REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array, ArraySpec, Specs
from muster.protocols import ALL, EnvBatch, Step
from muster.rng import GroupRng

BOOL = np.dtype(bool)
FLOAT = np.dtype(np.float32)
Flags = tuple[bool, bool]  # terminated and truncated of an agent
AWAY: Flags = (True, False)  # has not acted yet


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a PettingZoo environment, parallel or AEC."""
    return isinstance(obj, (ParallelEnv, AECEnv))


def adapt(envs: list[Any], device: torch.device | None) -> EnvBatch:
    """Return the env batch of B environments of the same kind; ``device`` has no effect."""
    if any(isinstance(env, AECEnv) and not _is_parallelizable(env) for env in envs):
        return TurnEnvs(envs)
    parallel = [
        env if isinstance(env, ParallelEnv) else aec_to_parallel(env) for env in envs
    ]
    return ParallelEnvs(parallel)


class Team(AgentSpaces):
    """One group of agents."""

    def __init__(
        self,
        who: str,
        env: Any,
        name: str,
        agents: list[str],
        infos: Mapping[str, Any],
    ) -> None:
        if name in RESERVED | {"state"}:
            raise UnsupportedEnv(
                f"{who} has agents called {name!r}, which a batch needs for itself; rename them"
            )
        super().__init__(f"{who}: {name}", env, agents, infos, (name,))
        self.name = name
        self.agents = agents
        flags = [key[0] for key in FLAGS]
        columns = ("reward", "mask", "action_mask", *flags)
        self.keys: dict[str, Key] = {column: (name, column) for column in columns}


class ParallelEnvs(
    EnvBatch,
    CastsValues,
    CountsSteps,
    DrawsActions,
    KeepsState,
    ResetsWithOptions,
    TellsInfos,
):
    """Implements ``EnvBatch`` for B parallel environments with the same agents and spaces; owns
    (and closes) them.

    An episode ends when no agent is left; it is terminated if all agents were, else truncated.
    Episode records sum the rewards of all agents, and have those of each. Random actions respect action masks. The
    constructor resets environment 0 to see its infos.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self.envs = list(envs)
        env = self.envs[0]
        name = name_of_game(self.envs)
        for b, other in enumerate(self.envs[1:], 1):
            if _spaces(other) != _spaces(env):
                raise UnsupportedEnv(
                    f"{name}: environment {b} has other agents or spaces than environment 0"
                )
        _, infos = _reset(env, f"{name}[0]", 0)
        groups = _group(env)
        self.teams = [
            Team(name, env, team, agents, infos) for team, agents in groups.items()
        ]
        self._actions = SpaceCodec(_action_space(self.teams), ())
        state = getattr(env, "state_space", None)
        self._state = (
            SpaceCodec(state, ("state",)) if isinstance(state, spaces.Space) else None
        )
        observed = _observation_specs(self.teams, self._state)
        checks.check_arrays(name, observed, self._actions.specs)
        rewards: Specs = {}
        members: dict[Key, tuple[str, ...]] = {}
        masks: dict[Key, Key] = {}
        for each in self.teams:
            reward_key = each.keys["reward"]
            rewards[reward_key] = ArraySpec((len(each.agents), 1), FLOAT)
            members[next_of(reward_key)] = tuple(each.agents)
            if each.mask_shape is not None:
                masks[each.name, "action"] = each.keys["action_mask"]
        self.spec = EnvSpec(
            name,
            len(envs),
            (len(envs),),
            observed,
            self._actions.specs,
            step_specs=rewards,
            rewards=frozenset(rewards),
            action_masks=masks,
            reward_key=TEAM_REWARD,
            agent_rewards=members,
            reward_ends={each.keys["reward"]: each.keys["done"] for each in self.teams},
            single=True,
            seeds_episodes=True,
        )
        self.casts: Casts = Casts(name)
        self._acting: list[list[str]] = [[] for _ in envs]
        self._left: list[dict[str, Flags]] = [{} for _ in envs]
        self._keeps_infos = False
        self._told: list[Any] = [None] * len(envs)  # infos by agent
        self.new_infos = [(self._told, ALL)]

    # --- EnvBatch ---------------------------------------------------------------------------------

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        return self._actions.sample(rng, shape)

    def reset(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        options = self.take_options()
        for n, b in enumerate(which):
            seed = None if seeds is None else int(seeds[n])
            env = self.envs[b]
            given = checks.seed_argument(env, seed, self.spec.name, self.casts)
            given |= checks.kept_info(options)
            obs, infos = _reset(env, f"{self.spec.name}[{b}]", b, **given)
            self._acting[b] = list(env.agents)
            self._left[b] = {}
            if self._keeps_infos:
                self._told[b] = checks.kept_info(infos)
            self._write(arrays, row, b, obs, infos, "reset")

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        terminated_rows = arrays[next_of(TERMINATED)]
        truncated_rows = arrays[next_of(TRUNCATED)]
        total = arrays[TEAM_REWARD]
        rewards = [arrays[next_of(team.keys["reward"])] for team in self.teams]

        def step(t: int) -> Sequence[int] | None:
            finished = []
            for b in range(self.spec.num_envs):
                self.executed_in_row = b
                got = self._call(b, "step", self._action(arrays, t, b))
                self.executed_in_row = b + 1
                obs, reward, ended, cut, infos = self._checked(got, b)
                if self._keeps_infos:
                    self._told[b] = checks.kept_info(infos)
                total[t, b] = self._put_rewards(rewards, t, b, reward)
                left = self._left[b]
                still = []
                for agent in self.envs[b].agents:
                    over = ended.get(agent) or cut.get(agent)
                    if not over:
                        still.append(agent)
                for agent in self._acting[b]:
                    if agent not in still:
                        left[agent] = (ended[agent], cut[agent])
                self._acting[b] = still
                self._write(arrays, t + 1, b, obs, infos, "step")
                if not still:
                    by_end = all(terminated for terminated, _ in left.values())
                    terminated_rows[t, b] = by_end
                    truncated_rows[t, b] = not by_end
                    finished.append(b)
            self.executed_in_row = 0
            return finished or None

        return step

    def objects(self) -> Sequence[object]:
        return self.envs

    def keep_infos(self) -> None:
        self._keeps_infos = True

    def snapshot(self) -> dict[str, Any]:
        return {
            "acting": [list(names) for names in self._acting],
            "left": [dict(left) for left in self._left],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._acting = [list(names) for names in state["acting"]]
        self._left = [dict(left) for left in state["left"]]

    def close(self) -> None:
        checks.close_envs(enumerate(self.envs), self.spec.name)

    # --- rows -------------------------------------------------------------------------------------

    def _action(
        self,
        arrays: Mapping[Key, Array],
        t: int,
        b: int,
    ) -> dict[str, Any]:
        """Return the action of each acting agent: copies, which the environment may keep."""
        actions = {}
        acting = set(self._acting[b])
        for team in self.teams:
            leaves = [arrays[key][t, b] for key in team.action.specs]
            for i, agent in enumerate(team.agents):
                if agent in acting:
                    parts = [leaf[i].copy() for leaf in leaves]
                    actions[agent] = team.action.build(parts)
        return actions

    def _put_rewards(
        self,
        arrays: list[Array],
        t: int,
        b: int,
        reward: Mapping[str, Any],
    ) -> float:
        total = 0.0
        for team, array in zip(self.teams, arrays, strict=True):
            for i, agent in enumerate(team.agents):
                value = reward.get(agent, 0.0)
                if problem := self.casts.reward_problem(value):
                    raise BadEnvOutput(
                        f"{self.spec.name}[{b}].step: {agent}: {problem}. {FIX}"
                    )
                number = checks.number(value)
                array[t, b, i, 0] = number
                total += float(number)
        return total

    def _write(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        b: int,
        obs: Any,
        infos: Any,
        method: str,
    ) -> None:
        """Write row ``row`` of environment ``b``: observations, flags and masks of all agents, and
        the state.
        """
        acting = set(self._acting[b])
        for team in self.teams:
            self._write_team(arrays, row, b, team, acting, obs, infos, method)
        if self._state is not None:
            who = f"{self.spec.name}[{b}].state"
            specs = self._state.specs
            leaves = self._state.flatten(self._call(b, "state"))
            for key, leaf in zip(specs, leaves, strict=True):
                self.casts.check(leaf, specs[key], dotted(key), who)
                arrays[key][row, b] = leaf

    def _write_team(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        b: int,
        team: Team,
        acting: set[str],
        obs: Any,
        infos: Any,
        method: str,
    ) -> None:
        targets = [arrays[key][row, b] for key in team.observation.specs]
        ended = arrays[team.keys["terminated"]][row, b]
        cut = arrays[team.keys["truncated"]][row, b]
        done = arrays[team.keys["done"]][row, b]
        mask = arrays[team.keys["mask"]][row, b]
        for i, agent in enumerate(team.agents):
            here = agent in acting
            mask[i] = here
            done[i] = not here
            if here:
                ended[i] = cut[i] = False
            else:
                ended[i], cut[i] = self._left[b].get(agent, AWAY)
            seen = obs.get(agent)
            if seen is None and here:
                raise BadEnvOutput(
                    f"{self.spec.name}[{b}].{method} returned no observation of {agent}. {FIX}"
                )
            leaves: list[Any] = [0] * len(targets)
            legal: Any = True
            if seen is not None:
                who = f"{self.spec.name}[{b}].{method}: {agent}"
                leaves, legal = team.leaves(self.casts, seen, infos.get(agent), who)
            for target, leaf in zip(targets, leaves, strict=True):
                target[i] = leaf
            if team.mask_shape is not None:
                arrays[team.keys["action_mask"]][row, b, i] = legal if here else True

    # --- the environment's side -------------------------------------------------------------------

    def _checked(
        self,
        got: Any,
        b: int,
    ) -> tuple[Any, Any, dict[str, bool], dict[str, bool], Any]:
        five = isinstance(got, tuple) and len(got) == 5
        if not five or not all(isinstance(part, Mapping) for part in got):
            raise BadEnvOutput(
                f"{self.spec.name}[{b}].step returned {type(got).__name__}, expected five dicts."
                f" {FIX}"
            )
        obs, reward, ended, cut, infos = got
        who = f"{self.spec.name}[{b}].step"
        for name, part in (
            ("reward", reward),
            ("termination", ended),
            ("truncation", cut),
        ):
            missing = [agent for agent in self._acting[b] if agent not in part]
            if missing:
                raise BadEnvOutput(
                    f"{who} returned no {name} of {missing}, which acted. {FIX}"
                )
        ended = _flags(ended, "termination", who)
        cut = _flags(cut, "truncation", who)
        here = self.envs[b].agents
        for agent in self._acting[b]:
            if agent not in here and not (ended[agent] or cut[agent]):
                raise BadEnvOutput(
                    f"{who}: {agent} is gone, but neither terminated nor truncated. {FIX}"
                )
            if agent not in obs and not ended[agent]:
                raise BadEnvOutput(
                    f"{who} returned no observation of {agent}, which goes on or was truncated."
                    f" {FIX}"
                )
        return obs, reward, ended, cut, infos

    def _call(
        self,
        b: int,
        method: str,
        *args: Any,
        **given: Any,
    ) -> Any:
        who = f"{self.spec.name}[{b}]"
        return checks.call(self.envs[b], method, who, *args, index=b, **given)


def _flags(flags: Mapping[str, Any], name: str, who: str) -> dict[str, bool]:
    """Return the flag of each agent as a bool, after a check."""
    return {
        agent: checks.as_flag(flag, f"{name} of {agent}", who)
        for agent, flag in flags.items()
    }


def _reset(
    env: Any,
    who: str,
    b: int,
    **given: Any,
) -> tuple[Any, Any]:
    """Return observations and infos from the reset of environment ``b``, called ``who``."""
    got = checks.call(env, "reset", who, index=b, **given)
    obs, infos = checks.reset_pair(got, who)
    if not isinstance(obs, Mapping):
        raise BadEnvOutput(
            f"{who}.reset returned {type(obs).__name__}, expected two dicts. {FIX}"
        )
    return obs, infos


def _action_space(teams: Sequence[Team]) -> spaces.Dict:
    """Return the space of the actions of all groups, below the names of the groups."""
    parts: dict[str, spaces.Space[Any]] = {}
    for team in teams:
        batched = batch_space(team.action.space, len(team.agents))
        parts[team.name] = spaces.Dict({"action": batched})
    return spaces.Dict(parts)


def _observation_specs(teams: Sequence[Team], state: SpaceCodec | None) -> Specs:
    specs: Specs = dict(state.specs) if state else {}
    for team in teams:
        k = len(team.agents)
        space = batch_space(team.observation.space, k)
        codec = SpaceCodec(space, (team.name, "observation"))
        specs |= codec.specs
        for (flag,) in FLAGS:
            specs[team.keys[flag]] = ArraySpec((k, 1), BOOL)
        specs[team.keys["mask"]] = ArraySpec((k,), BOOL)
        if team.mask_shape is not None:
            specs[team.keys["action_mask"]] = ArraySpec((k, *team.mask_shape), BOOL)
    return specs


def _group(env: Any) -> dict[str, list[str]]:
    """Return agents by group: those named ``name_<number>`` with equal spaces together, others
    alone.
    """
    agents = [str(agent) for agent in env.possible_agents]
    groups: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        together = name and number.isdigit() and name not in agents
        if together and name in groups:
            first = groups[name][0]
            same_observations = env.observation_space(agent) == env.observation_space(
                first
            )
            together = same_observations and env.action_space(
                agent
            ) == env.action_space(first)
        groups.setdefault(name if together else agent, []).append(agent)
    return groups


def _spaces(env: Any) -> list[Any]:
    return [
        (agent, env.observation_space(agent), env.action_space(agent))
        for agent in env.possible_agents
    ]


def _is_parallelizable(env: Any) -> bool:
    metadata = getattr(env, "metadata", None) or {}
    return bool(metadata.get("is_parallelizable", False))
