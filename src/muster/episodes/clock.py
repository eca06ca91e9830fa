"""The current episode of each environment of a group, or of each agent: ids, step counts, and
records of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from muster.episodes.record import NO_EPISODES, Episodes
from muster.errors import BadCheckpoint
from muster.memory.specs import OBJECT, Array

# environments from which on a loop over rows is faster than an operation along the columns
MANY = 256
# rows of rewards that are kept to be added later: adding one by itself takes ten times as long
MOST_REWARDS = 256


class TrajectoryClock:
    """Tracks the current episode of each environment (``env_ids``, ``[B]``) of a group: its steps
    and return so far.

    Ids are ``env_id + total_envs * episode``: unique over all groups without communication,
    independent of where a group runs, and never reused.

    Rewards are added one after another, in the order of the steps: returns do not depend on how the
    steps of an episode are divided into rollouts, and ``TensorClock`` has the same.
    """

    def __init__(self, env_ids: Array, total_envs: int) -> None:
        self.env_ids = env_ids
        self.total_envs = total_envs
        self.episode = np.zeros(len(env_ids), np.int64)
        self._steps = np.zeros(len(env_ids), np.int64)
        # rows not yet added to ``_steps``: without an end in a batch, no addition is necessary
        self._since = 0
        self._returns = np.zeros(len(env_ids), np.float64)
        # rows not yet added to ``_returns``, and their dtypes
        self._rewards: list[tuple[bytes, Any]] = []
        self._ids: Array = env_ids.copy()  # ids of the current trajectories

    @property
    def steps(self) -> Array:
        """Number of steps in the current episode of each environment, ``[B]`` int64; may be written
        to.
        """
        if self._since:
            self._steps += self._since
            self._since = 0
        return self._steps

    def take_back(self, steps: Array, ended: Sequence[int]) -> None:
        """Correct the last ``advance`` by rows in which environments made no steps.

        Args:
            steps: number of these rows, ``[B]``.
            ended: environments whose next episode has not begun.
        """
        current = self.steps
        current -= steps
        current[ended] = 0
        self.returns[ended] = 0.0

    @property
    def returns(self) -> Array:
        """Sum of the rewards of the current episode of each environment, ``[B]`` float64; may be
        written to.
        """
        if self._rewards:
            dtype = self._rewards[0][1]
            rows = np.frombuffer(b"".join([row for row, _ in self._rewards]), dtype)
            sums = np.concatenate(
                (self._returns[None], rows.reshape(-1, len(self._returns))),
                dtype=np.float64,
            )
            # one after another, other than ``sum``
            self._returns[...] = np.add.accumulate(sums, 0)[-1]
            self._rewards.clear()
        return self._returns

    @property
    def ids(self) -> Array:
        """Ids of the current trajectories, ``[B]`` int64."""
        return self._ids

    def set(
        self,
        ids: Array,
        steps: Array,
        returns: Array,
    ) -> None:
        """Set the ids, steps and returns of the current trajectories, ``[B]`` each."""
        self.episode[...] = (ids - self.env_ids) // self.total_envs
        self.steps[...] = steps
        self.returns[...] = returns
        self._number()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all variables, and the environments that they belong to."""
        arrays = {
            "env_ids": self.env_ids,
            "episode": self.episode,
            "steps": self.steps,
            "returns": self.returns,
        }
        state: dict[str, Any] = {}
        for name, array in arrays.items():
            state[name] = array.copy()
        state["total_envs"] = self.total_envs
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``.

        Raises ``BadCheckpoint`` if it belongs to other environments.
        """
        same_envs = np.array_equal(state["env_ids"], self.env_ids)
        if state["total_envs"] != self.total_envs or not same_envs:
            raise BadCheckpoint(
                f"The trajectories are those of environments {state['env_ids'].tolist()} of"
                f" {state['total_envs']}, and these are {self.env_ids.tolist()} of"
                f" {self.total_envs}. Load into the same number of environments."
            )
        for name in ("episode", "steps", "returns"):
            getattr(self, name)[...] = state[name]
        self._number()

    def begin_at(self, episode: Array) -> None:
        """Continue the numbering of trajectories at these episodes (``[B]``)."""
        self.episode[...] = episode
        self._number()

    def abandon(self, which: Sequence[int] | Array) -> None:
        """Start new trajectories in ``which``. A trajectory without steps keeps its id."""
        index = np.asarray(which, np.int64)
        self.episode[index] += self.steps[index] > 0
        self.steps[index] = 0
        self.returns[index] = 0.0
        self._number()

    def fill_ids(self, ids: Array, done: Array) -> Array:
        """Write the trajectory id of every row (``[T, B]`` int64), before ``advance``.

        Returns:
            number of steps in each trajectory before the first row, ``[B]``.
        """
        steps: Array = self._steps + self._since
        if done.shape[1] >= MANY:
            row = self._ids
            for t, ended in enumerate(done):
                ids[t] = row
                row = row + self.total_envs * ended
            return steps
        ids[...] = self._ids
        if len(done) > 1 and 1 in done.tobytes():
            ids[1:] += self.total_envs * np.cumsum(done[:-1], axis=0)
        return steps

    def fill_step_counts(self, counts: Array, done: Array) -> None:
        """Write the steps taken before every row in its episode (``[T, B]`` int64), before
        ``advance``.
        """
        if done.shape[1] >= MANY:
            row = self.steps
            for t, ended in enumerate(done):
                counts[t] = row
                row = (row + 1) * ~ended
            return
        rows = np.arange(len(counts), dtype=np.int64)[:, None]
        began = np.broadcast_to(-self.steps, counts.shape).copy()
        np.copyto(began[1:], rows[1:], where=done[:-1])
        last_began = np.maximum.accumulate(began, axis=0)
        np.subtract(rows, last_began, out=counts)

    def advance_row(self, ids: Array, reward: bytes, dtype: Any) -> None:
        """Write the trajectory ids of a row in which no episode ends (``[B]``), and advance to its
        end.

        Args:
            reward: the bytes of its rewards.
            dtype: of the rewards.
        """
        ids[...] = self._ids
        self._since += 1
        self._rewards.append((reward, dtype))
        if len(self._rewards) > MOST_REWARDS:
            self.returns  # noqa: B018 (adds them)

    def advance(
        self,
        reward: Array,
        terminated: Array,
        truncated: Array,
        done: Array,
    ) -> Episodes:
        """Advance to the end of the rows (``[T, B]`` each).

        Return the episodes that ended, in order.
        """
        T, B = reward.shape
        if (T <= 1 or B < MANY) and 1 not in done.tobytes():
            self._since += T
            if T == 1 and len(self._rewards) < MOST_REWARDS:
                self._rewards.append((reward.tobytes(), reward.dtype))
            else:
                addends = (self.returns[None], reward)
                sums = np.concatenate(addends, dtype=np.float64)
                np.add.accumulate(sums, 0, out=sums)
                self._returns[...] = sums[-1]
            return NO_EPISODES
        if T == 1:
            return self._advance_to_ends(
                reward[0], terminated[0], truncated[0], done[0]
            )
        if B >= MANY:
            return self._advance_by_rows(reward, terminated, truncated, done)
        # from here on rows are numbered by environment, then time
        end = np.flatnonzero(done.T)
        env, t = np.divmod(end, T)
        lane = np.arange(B) * T  # first row of each environment
        followed = t < T - 1
        begin = np.union1d(lane, end[followed] + 1)  # first rows of pieces of episodes
        rewards = reward.T.reshape(-1).astype(np.float64)
        rewards[lane] += self.returns
        pieces = np.arange(len(begin))
        piece_of = np.repeat(pieces, np.diff(begin, append=B * T))
        # adds one after another, other than ``reduceat``
        total = np.bincount(piece_of, rewards)
        # first piece of each environment, which continues from earlier rows
        first = np.searchsorted(begin, lane)
        begin[first] -= self.steps
        first_end = np.searchsorted(env, env)
        number = np.arange(len(end)) - first_end  # of the end, of its environment
        piece = first[env] + number
        episode = self.episode[env] + number
        traj_id = self.env_ids[env] + self.total_envs * episode
        length = end + 1 - begin[piece]
        in_time = np.argsort(t, kind="stable")
        episodes = Episodes(
            traj_id[in_time],
            self.env_ids[env][in_time],
            total[piece][in_time],
            length[in_time],
            terminated[t, env][in_time],
            truncated[t, env][in_time],
        )
        last = np.append(first[1:], len(begin)) - 1
        goes_on = ~done[-1]
        self.episode += np.bincount(env, minlength=B)
        self._number()
        steps = lane + T - begin[last]
        self.steps[...] = np.where(goes_on, steps, 0)
        self.returns[...] = np.where(goes_on, total[last], 0.0)
        return episodes

    def _advance_to_ends(
        self, reward: Array, terminated: Array, truncated: Array, done: Array
    ) -> Episodes:
        """Advance to the end of a row in which episodes end (``[B]`` each)."""
        returns = self.returns
        returns += reward
        steps = self.steps
        steps += 1
        (env,) = done.nonzero()
        episodes = Episodes(
            self._ids[env],
            self.env_ids[env],
            returns[env],
            steps[env],
            terminated[env],
            truncated[env],
        )
        self.episode[env] += 1
        steps[env] = 0
        returns[env] = 0.0
        self._number()
        return episodes

    def _advance_by_rows(
        self,
        reward: Array,
        terminated: Array,
        truncated: Array,
        done: Array,
    ) -> Episodes:
        """Advance row by row, without the sums over pieces of episodes."""
        begin = -self.steps
        returns = self.returns
        parts = []
        for t, ended in enumerate(done):
            returns += reward[t]
            env = ended.nonzero()[0]
            ids = self.env_ids[env] + self.total_envs * self.episode[env]
            lengths = t + 1 - begin[env]
            parts.append(
                (
                    ids,
                    self.env_ids[env],
                    returns[env],
                    lengths,
                    terminated[t, env],
                    truncated[t, env],
                )
            )
            self.episode[env] += 1
            begin[env] = t + 1
            returns[env] = 0.0
        self.steps[...] = len(done) - begin
        self._number()
        columns = zip(*parts, strict=True)
        return Episodes(*map(np.concatenate, columns))

    def _number(self) -> None:
        self._ids = self.env_ids + self.total_envs * self.episode


class AgentClock:
    """A ``TrajectoryClock`` for environments whose ``agents`` take turns: each agent has its own
    episodes.

    Ids are ``env_id + total_envs * (agent + len(agents) * episode)``. Records have the agent's name
    in ``info["agent"]``. ``episode`` and ``steps`` are ``[B * agents]``.
    """

    def __init__(
        self,
        env_ids: Array,
        total_envs: int,
        agents: Sequence[str],
    ) -> None:
        self.env_ids = env_ids
        self.total_envs = total_envs
        self.agents = agents
        numbers = np.arange(len(agents))
        ids = env_ids[:, None] + total_envs * numbers
        columns = total_envs * len(agents)
        self._clock = TrajectoryClock(ids.reshape(-1), columns)
        self._at: tuple[Array, Array]

    @property
    def episode(self) -> Array:
        return self._clock.episode

    @property
    def steps(self) -> Array:
        return self._clock.steps

    def state_dict(self) -> dict[str, Any]:
        return self._clock.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clock.load_state_dict(state)

    def begin_at(self, episode: Array) -> None:
        self._clock.begin_at(episode)

    def abandon(self, which: Sequence[int] | Array, agent: int | None = None) -> None:
        """Start new trajectories of all agents of the environments ``which``, or of one agent."""
        agents = np.arange(len(self.agents))
        if agent is not None:
            agents = np.array([agent])
        envs = np.asarray(which, np.int64)
        first = envs[:, None] * len(self.agents)
        columns = first + agents
        self._clock.abandon(columns.reshape(-1))

    def sort(self, agent: Array) -> None:
        """Take the agents of the rows (``[T, B]``) to which the following calls apply.

        The rows of each agent are moved to the beginning of a column of its own; zeros follow them.
        """
        place = np.zeros(agent.shape, np.int64)
        for number in range(len(self.agents)):
            of_agent = agent == number
            row_of_agent = of_agent.cumsum(0) - 1
            place[of_agent] = row_of_agent[of_agent]
        envs = np.arange(len(self.env_ids))
        column = agent + len(self.agents) * envs
        self._at = (place, column)

    def fill_ids(self, ids: Array, done: Array) -> None:
        """See ``TrajectoryClock``; returns nothing."""
        self._fill(self._clock.fill_ids, ids, done)

    def fill_step_counts(self, counts: Array, done: Array) -> None:
        """See ``TrajectoryClock``."""
        self._fill(self._clock.fill_step_counts, counts, done)

    def advance(
        self,
        reward: Array,
        terminated: Array,
        truncated: Array,
        done: Array,
    ) -> Episodes:
        """See ``TrajectoryClock``."""
        T = len(reward)
        columns = len(self._clock.env_ids)
        records = self._clock.advance(
            self._apart(reward),
            self._apart(terminated),
            self._apart(truncated),
            self._apart(done),
        )
        _, own_column = self._at
        rows_of_agent = np.bincount(own_column.reshape(-1), minlength=columns)
        self._clock.take_back(T - rows_of_agent, [])  # the zeros
        if not len(records):
            return records
        rows = np.broadcast_to(np.arange(T)[:, None], reward.shape)
        place, column = self._apart(done).nonzero()  # in the order of the records
        t = self._apart(rows)[place, column]
        in_time = np.lexsort((column, t))
        ended = Episodes(*(values[in_time] for values in records.columns()))
        number, env_id = np.divmod(ended.env_id, self.total_envs)
        infos = [{"agent": self.agents[i]} for i in number]
        return replace(ended, env_id=env_id, info=np.array(infos, OBJECT))

    def _fill(
        self,
        fill: Callable[[Array, Array], object],
        out: Array,
        done: Array,
    ) -> None:
        apart = self._apart(done)
        values = np.empty(apart.shape, np.int64)
        fill(values, apart)
        out[...] = values[self._at]

    def _apart(self, values: Array) -> Array:
        shape = (len(values), len(self._clock.env_ids))
        out = np.zeros(shape, values.dtype)
        out[self._at] = values
        return out
