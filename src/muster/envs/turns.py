"""``pettingzoo.AECEnv`` as an env batch: agents take turns, and a row is one turn of one agent.

A row is complete when its agent's next turn comes or its episode ends. Rows of a game are in the
order in which they are complete; where agents alternate, that is the order of turns. The keys of a
row are those of a single agent::

    "observation"                       what the agent observed; the keys of a Dict space
    "action_mask"                       bool, from Dict observations or infos, if the environment has masks
    ("collector", "agent")              number of the agent in ``possible_agents``, int64
    "action"                            the agent's action
    ("next", "reward")                  sum of the rewards of the agent since this action, up to its next turn
    ("next", "observation")             what it observes at its next turn, or last of all
    "terminated", "truncated"           the agent's

Rewards before an agent's first action belong to no row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.capabilities import (
    CastsValues,
    CountsSteps,
    DrawsActions,
    HoldsSteps,
    KeepsState,
    ResetsWithOptions,
    WritesNext,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.checks import FIX, Casts
from muster.envs.spaces import SpaceCodec, action_masks, observation_codec
from muster.errors import BadEnvOutput, UnsupportedEnv, UnsupportedSpace
from muster.keys import (
    ACTION_MASK,
    AGENT,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array, ArraySpec, Specs, choices_of, is_joint_mask
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng

BOOL = np.dtype(bool)
INTEGER = np.dtype(np.int64)
(MASK,) = ACTION_MASK
# written when a row is complete
NOT_HELD = {"next", "collector", "done", "terminated", "truncated", "step_count"}
Leaves = dict[Key, Array]


class AgentSpaces:
    """Codecs for agents with equal spaces, which share columns, and their action masks: of Dict
    observations or infos.

    Attributes:
        observation: of one agent, without its action mask.
        mask_shape: shape of an action mask; None: there are none.

    Raises:
        UnsupportedSpace: the mask does not fit the action space.
    """

    def __init__(
        self,
        who: str,
        env: Any,
        agents: Sequence[str],
        infos: Mapping[str, Any],
        root: Key = (),
    ) -> None:
        space = env.observation_space(agents[0])
        action_space = env.action_space(agents[0])
        self._mask_in_obs = isinstance(space, spaces.Dict) and MASK in space.spaces
        if self._mask_in_obs:
            parts = dict(space.spaces)
            del parts[MASK]
            space = spaces.Dict(parts)
        if root:
            self.observation = SpaceCodec(space, (*root, "observation"))
        else:
            self.observation = observation_codec(space)
        self.action = SpaceCodec(action_space, (*root, "action"))
        self.mask_shape = self._find_mask(env, agents, infos)
        if self.mask_shape is not None:
            action, *more = self.action.specs.values()
            if more or not action.is_discrete:
                raise UnsupportedSpace(
                    f"{who} has an action_mask, but its actions are {action_space}"
                )
            try:
                is_joint_mask(choices_of(action)[0], self.mask_shape)
            except ValueError as error:
                raise UnsupportedSpace(
                    f"{who}: the action mask {MASK!r} with {error}. Change the mask."
                ) from None

    def leaves(
        self,
        casts: Casts,
        seen: Any,
        info: Any,
        who: str,
    ) -> tuple[list[Any], Array | bool]:
        """Return the checked leaves of an agent's observation, and its action mask (True: all are
        allowed).
        """
        source = seen if self._mask_in_obs else info
        mask: Any = source.get(MASK) if isinstance(source, Mapping) else None
        if mask is not None and self.mask_shape is None:
            raise BadEnvOutput(
                f"{who}: its info has an action_mask, but no info of the first reset had one, so there is"
                " no column for it. Let reset return the infos of all possible_agents, with their"
                " masks, or put the masks into Dict observations"
            )
        if mask is not None and np.shape(mask) != self.mask_shape:
            raise BadEnvOutput(
                f"{who}: its action_mask has shape {np.shape(mask)}, expected"
                f" {self.mask_shape}. {FIX}"
            )
        if self._mask_in_obs and isinstance(seen, Mapping):
            seen = {key: value for key, value in seen.items() if key != MASK}
        leaves = self.observation.flatten(seen, who)
        specs = self.observation.specs
        for key, leaf in zip(specs, leaves, strict=True):
            casts.check(leaf, specs[key], dotted(key), who)
        return leaves, True if mask is None else np.array(mask, bool)

    def _find_mask(
        self,
        env: Any,
        agents: Sequence[str],
        infos: Mapping[str, Any],
    ) -> tuple[int, ...] | None:
        """Return the shape of an agent's mask: that of its space, or of the first info that has
        one. Where others have masks, those of agents without an info have a number for each choice.
        """
        if self._mask_in_obs:
            space = env.observation_space(agents[0])[MASK]
            return tuple(space.shape) if space.shape is not None else ()
        for agent in agents:
            mask = _mask_in(infos, agent)
            if mask is not None:
                shape: tuple[int, ...] = np.shape(mask)
                return shape
        if any(agent in infos for agent in agents):
            return None
        if all(_mask_in(infos, other) is None for other in infos):
            return None
        specs = list(self.action.specs.values())
        if len(specs) > 1 or not specs[0].is_discrete:
            return None
        nvec, _ = choices_of(specs[0])
        return (sum(nvec),)


def _mask_in(infos: Mapping[str, Any], agent: str) -> Any:
    """Return the action mask in an agent's info; None: there is none."""
    info = infos.get(agent)
    return info.get(MASK) if isinstance(info, Mapping) else None


def name_of_game(envs: Sequence[Any]) -> str:
    """Return the name of PettingZoo environments; ``UnsupportedEnv`` if they have no agents, or are
    the same object.
    """
    env = envs[0]
    metadata = getattr(env, "metadata", None) or {}
    class_name = type(getattr(env, "unwrapped", env)).__name__
    name = str(metadata.get("name", class_name))
    if not getattr(env, "possible_agents", None):
        raise UnsupportedEnv(
            f"{name} has no possible_agents: Muster must know all agents that may ever come"
        )
    checks.check_distinct(envs, name)
    return name


@dataclass
class Turn:
    """A turn of an agent: the cells of its row, and what the agent got since."""

    cells: Leaves
    reward: float = 0.0
    after: Leaves = field(default_factory=dict)  # the next observation
    terminated: bool = False
    truncated: bool = False


@dataclass
class Game:
    """The state of one environment.

    Attributes:
        env: the AEC environment.
        open: turns whose rows are not complete, by agent.
        complete: turns to deliver, in order.
        turns: number of turns of each agent in its episode.
        seen: what the agent that acts next observes.
    """

    env: Any
    open: dict[str, Turn] = field(default_factory=dict)
    complete: deque[Turn] = field(default_factory=deque)
    turns: dict[str, int] = field(default_factory=dict)
    seen: Leaves = field(default_factory=dict)

    @property
    def agent(self) -> str:
        """The agent that acts next."""
        return str(self.env.agent_selection)


class TurnEnvs(
    EnvBatch,
    CastsValues,
    CountsSteps,
    DrawsActions,
    HoldsSteps,
    KeepsState,
    ResetsWithOptions,
    WritesNext,
):
    """Implements ``EnvBatch`` for B AEC environments with the same agents; owns (and closes) them.

    All agents must have the same spaces. A game is reset as soon as it ends. With k agents, up to k
    - 1 turns of each game are open at any time: so many steps (``late``) are made before the first
      row. ``max_frames_per_traj`` counts
    the turns of an agent; the game is cut when an agent reaches it, as it is by ``reset``: all open
    turns are truncated. The constructor resets environment 0 to see its infos.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        env = envs[0]
        name = name_of_game(envs)
        agents = tuple(str(agent) for agent in env.possible_agents)
        first = env.observation_space(agents[0]), env.action_space(agents[0])
        for b, other in enumerate(envs):
            if tuple(other.possible_agents) != agents:
                raise UnsupportedEnv(
                    f"{name}: environment {b} has other agents than environment 0"
                )
            for agent in agents:
                if (other.observation_space(agent), other.action_space(agent)) != first:
                    raise UnsupportedEnv(
                        f"{name}: {agent} of environment {b} has other spaces than"
                        f" {agents[0]} of environment 0. Agents that take turns share the"
                        " columns of a batch: pad their spaces to the same shape"
                        " (supersuit.pad_observations_v0, pad_action_space_v0)."
                    )
        checks.call(env, "reset", f"{name}[0]", index=0)
        self._games = [Game(each) for each in envs]
        self._spaces = AgentSpaces(name, env, agents, env.infos)
        self._actions = self._spaces.action
        specs: Specs = dict(self._spaces.observation.specs)
        if self._spaces.mask_shape is not None:
            specs[ACTION_MASK] = ArraySpec(self._spaces.mask_shape, BOOL)
        last = np.asarray(len(agents) - 1)
        number = ArraySpec((), INTEGER, np.asarray(0), last)
        observed = {**specs, AGENT: number}
        checks.check_arrays(name, observed, self._actions.specs)
        self.spec = EnvSpec(
            name,
            len(envs),
            (len(envs),),
            observed,
            self._actions.specs,
            bookkeeping=frozenset({AGENT}),
            action_masks=action_masks(specs, self._actions.specs),
            agents=agents,
            single=True,
        )
        self.casts: Casts = Casts(name)
        self._limit: int | None = None  # turns of an agent per episode

    @property
    def late(self) -> int:  # type: ignore[override]
        """The number of steps to make before the next row can be complete."""
        fewest = min(len(game.open) + len(game.complete) for game in self._games)
        return len(self.spec.agents) - 1 - fewest

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
            self._cut(b)
            env = self._games[b].env
            seed = None if seeds is None else int(seeds[n])
            given = checks.seed_argument(env, seed, self.spec.name, self.casts)
            self._call(b, "reset", **given, **checks.kept_info(options))
            self._next_turn(b)
            self._show(arrays, row, b)

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        held = [key for key in arrays if key[0] not in NOT_HELD]
        held += [key for key in (AGENT, POLICY_VERSION) if key in arrays]
        actions = [arrays[key] for key in self.spec.action_specs]
        rewards = arrays[REWARD]
        terminated = arrays[next_of(TERMINATED)]
        truncated = arrays[next_of(TRUNCATED)]
        after = [(key, arrays[next_of(key)]) for key in self.spec.observation_specs]

        def step(t: int) -> None:
            delivers = self.late <= 0
            for b, game in enumerate(self._games):
                self.executed_in_row = b
                agent = game.agent
                cells = {key: np.array(arrays[key][t, b]) for key in held}
                game.open[agent] = Turn(cells)
                game.turns[agent] = game.turns.get(agent, 0) + 1
                parts = [self._given(rows[t, b]) for rows in actions]
                self._call(b, "step", self._actions.build(parts))
                for other, open_turn in game.open.items():
                    reward = game.env.rewards.get(other, 0.0)
                    open_turn.reward += float(checks.number(reward))
                self._next_turn(b)
                self.executed_in_row = b + 1
                self._show(arrays, t + 1, b)
            self.executed_in_row = 0
            if not delivers:
                return
            for b, game in enumerate(self._games):
                turn = game.complete.popleft()
                for key, cell in turn.cells.items():
                    arrays[key][t, b] = cell
                for key, rows in after:
                    rows[t, b] = turn.after[key]
                rewards[t, b] = turn.reward
                terminated[t, b] = turn.terminated
                truncated[t, b] = turn.truncated

        return step

    def limit_episodes(self, steps: int) -> None:
        self._limit = steps

    def take_dropped(self) -> int:
        return 0  # the steps of open turns count as executed in other rows

    def drop_open(self) -> None:
        for game in self._games:
            game.open.clear()
            game.complete.clear()

    def objects(self) -> Sequence[object]:
        return [game.env for game in self._games]

    def snapshot(self) -> dict[str, Any]:
        return {"games": [_plain(game) for game in self._games]}

    def restore(self, state: dict[str, Any]) -> None:
        for game, saved in zip(self._games, state["games"], strict=True):
            game.open = {agent: Turn(**plain) for agent, plain in saved["open"].items()}
            game.complete = deque(Turn(**plain) for plain in saved["complete"])
            game.turns = dict(saved["turns"])
            game.seen = dict(saved["seen"])

    def close(self) -> None:
        envs = [game.env for game in self._games]
        checks.close_envs(enumerate(envs), self.spec.name)

    # --- turns ------------------------------------------------------------------------------------

    def _next_turn(self, b: int) -> None:
        """Go on to the next agent that acts, and complete the rows of agents whose turn comes, or
        whose episode ends.

        A game that is over, or was cut, is reset.
        """
        game = self._games[b]
        who = f"{self.spec.name}[{b}]"
        resets = 0
        while True:
            if not game.env.agents:
                gone = list(game.open)
                if gone:
                    raise BadEnvOutput(
                        f"{who}: {gone} left without a last turn, in which they are done. {FIX}"
                    )
                resets += 1
                if resets > 2:
                    raise BadEnvOutput(
                        f"{who}.reset returned twice without an agent that can act. {FIX}"
                    )
                game.turns.clear()
                self._call(b, "reset")
                continue
            agent = game.agent
            got = self._call(b, "last")
            if not isinstance(got, tuple) or len(got) != 5:
                raise BadEnvOutput(
                    f"{who}.last returned {type(got).__name__}, expected five values. {FIX}"
                )
            obs, reward, ended, cut, info = got
            ended = checks.as_flag(ended, f"termination of {agent}", who)
            cut = checks.as_flag(cut, f"truncation of {agent}", who)
            game.seen = self._leaves(b, agent, obs, info)
            turn = game.open.pop(agent, None)
            if turn is not None:
                problem = self.casts.reward_problem(reward)
                if problem:
                    raise BadEnvOutput(f"{who}.last: {agent}: {problem}. {FIX}")
                at_limit = self._limit is not None and game.turns[agent] >= self._limit
                limited = at_limit and not ended
                turn.reward = float(checks.number(reward))
                turn.terminated = ended
                turn.truncated = cut or limited
                turn.after = game.seen
                game.complete.append(turn)
                if limited and not cut:
                    self._cut(b)
                    self._call(b, "reset")
                    continue
            if not (ended or cut):
                return
            self._call(b, "step", None)  # removes the agent

    def _cut(self, b: int) -> None:
        """Complete all open turns as truncated: the environment will be reset."""
        game = self._games[b]
        for agent, turn in game.open.items():
            obs = self._call(b, "observe", agent)
            info = game.env.infos.get(agent)
            turn.after = self._leaves(b, agent, obs, info)
            turn.truncated = True
            game.complete.append(turn)
        game.open.clear()
        game.turns.clear()

    def _leaves(
        self,
        b: int,
        agent: str,
        obs: Any,
        info: Any,
    ) -> Leaves:
        """Return the observation of an agent, with its mask and number."""
        who = f"{self.spec.name}[{b}]: {agent}"
        parts, mask = self._spaces.leaves(self.casts, obs, info, who)
        leaves: Leaves = {AGENT: np.array(self.spec.agents.index(agent))}
        if ACTION_MASK in self.spec.observation_specs:
            shape = self.spec.observation_specs[ACTION_MASK].shape
            leaves[ACTION_MASK] = np.full(shape, mask)
        for key, leaf in zip(self._spaces.observation.specs, parts, strict=True):
            leaves[key] = np.array(leaf)
        return leaves

    def _show(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        b: int,
    ) -> None:
        for key, leaf in self._games[b].seen.items():
            arrays[key][row, b] = leaf

    def _given(self, action: Any) -> Any:
        """Return a copy of the action, which the environment may keep; a number as an int."""
        if np.ndim(action) == 0 and action.dtype.kind in "iu":
            return int(action)
        return np.array(action)

    def _call(
        self,
        b: int,
        method: str,
        *args: Any,
        **given: Any,
    ) -> Any:
        who = f"{self.spec.name}[{b}]"
        return checks.call(self._games[b].env, method, who, *args, index=b, **given)


def _plain(game: Game) -> dict[str, Any]:
    """Return the state of a game besides its environment, in plain values, for ``snapshot``."""
    return {
        "open": {agent: asdict(turn) for agent, turn in game.open.items()},
        "complete": [asdict(turn) for turn in game.complete],
        "turns": dict(game.turns),
        "seen": dict(game.seen),
    }
