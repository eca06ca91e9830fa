"""An asynchronous EnvPool (``batch_size < num_envs``) as an env batch: rows are filled by the
environments ready first.

A step of the pool sends ``batch_size`` actions, and returns the results of the ``batch_size``
environments that are ready first. So environments are at different rows at any time. Those ahead of
others write into rows that are kept here until all environments have completed them, and are then
copied into the lane, one row after another: the lane holds the same rows as that of a synchronous
pool.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from muster.capabilities import (
    ActsWhenReady,
    CastsValues,
    CountsSteps,
    DrawsActions,
    HoldsSteps,
    LimitsResets,
    ResetsWithOptions,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.checks import FIX, Casts
from muster.envs.spaces import action_codec, action_masks, observation_codec
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv
from muster.keys import (
    IS_INIT,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
    next_of,
)
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array, ArraySpec, Column
from muster.protocols import Act, EnvBatch, Step
from muster.rng import GroupRng
from muster.utils.interrupts import postponed

# maximum size of the rows in which ready environments act; policies prepare for them at once
BUFFER_BYTES = 1 << 20
# rows that environments may be ahead of the slowest; at least those of one rollout
LEAST_WINDOW = 8
RESULTS = REWARD, next_of(TERMINATED), next_of(TRUNCATED)


class PoolInfo:
    """The sizes, spaces and seeds of an EnvPool.

    Attributes:
        batch_size: number of environments that the pool steps at a time; ``num_envs`` if it is
            synchronous.
        observation_space, action_space: those of one environment.
        codec: codec of the observations.

    Raises:
        UnsupportedEnv: not a pool of type "gymnasium", or several players.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.name = type(pool).__name__
        config = pool.config
        self.num_envs = int(config["num_envs"])
        self.batch_size = int(config["batch_size"] or self.num_envs)
        if not isinstance(pool, gymnasium.Env):
            raise UnsupportedEnv(
                f"{self.name} is not of type 'gymnasium': make it with envpool.make_gymnasium(...)"
            )
        if config.get("max_num_players", 1) > 1:
            raise UnsupportedEnv(
                f"{self.name} has up to {config['max_num_players']} players, whose rows come and"
                " go; Muster takes pools of one player. Multi-agent environments can be given as"
                " PettingZoo ParallelEnv."
            )
        self.observation_space = _unbounded(pool.observation_space)
        self.action_space = _unbounded(pool.action_space)
        self.codec = observation_codec(self.observation_space)
        self._seeds = list(config.get("env_seed") or ())
        if not self._seeds:
            self._seeds = [config["seed"] + i for i in range(self.num_envs)]
        self._warned = False

    def leaves(self, obs: Any) -> list[Array]:
        """Return the leaves of an observation, in the dtypes of their spaces where that is
        lossless.
        """
        leaves = []
        specs = self.codec.specs.values()
        for leaf, spec in zip(self.codec.flatten(obs), specs, strict=True):
            if np.can_cast(leaf.dtype, spec.dtype):
                leaves.append(leaf.astype(spec.dtype, copy=False))
            else:
                leaves.append(leaf)
        return leaves

    def check_seed(self, seed: Any, *, running: bool) -> None:
        """Warn once if environments of this pool cannot have this seed, or list of seeds.

        Args:
            running: the pool was reset before, so that its own seeds come too late, too.
        """
        if np.ndim(seed) == 0:
            seeds = [seed + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        fitting = seeds == self._seeds and not running
        if self._warned or fitting:
            return
        self._warned = True
        warnings.warn(
            "EnvPool cannot be seeded after it was made: this one was made with the seeds"
            f" {self._seeds[:3]}..., and goes on with them although {seeds[:3]}... were asked for."
            " Pass the seed to envpool.make_gymnasium too, and make a new pool to restart.",
            stacklevel=3,
        )


def _unbounded(space: Any) -> Any:
    """Remove the bounds that mean unbounded in EnvPool: low is ``numeric_limits<float>::min()``,
    which is above 0.
    """
    if isinstance(space, spaces.Dict):
        parts = {}
        for key, part in space.spaces.items():
            parts[key] = _unbounded(part)
        return spaces.Dict(parts)
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    free = (space.low == limits.tiny) & (space.high == limits.max)
    low = np.where(free, -np.inf, space.low).astype(space.dtype)
    high = np.where(free, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)


class AsyncPoolEnvs(
    EnvBatch,
    ActsWhenReady,
    CastsValues,
    CountsSteps,
    DrawsActions,
    HoldsSteps,
    LimitsResets,
    ResetsWithOptions,
):
    """Implements ``EnvBatch`` for an asynchronous EnvPool; owns (and closes) it.

    Every row has one step of each environment. The policy acts for the ``ready_envs``. Where an
    episode ends, EnvPool resets the environment in its next step; the policy acts in that step,
    too, and the action is not used.

    Attributes:
        ready_envs: the environments that the next call of the policy acts for, ``[batch_size]``.
    """

    def __init__(self, info: PoolInfo) -> None:
        self._info = info
        B = info.num_envs
        self._actions = action_codec(info.action_space)
        self.spec = EnvSpec(
            info.name,
            B,
            (B,),
            info.codec.specs,
            self._actions.specs,
            action_masks=action_masks(info.codec.specs, self._actions.specs),
            ready=info.batch_size,
        )
        self.casts: Casts = Casts(info.name)
        self.ready_envs: Array = np.arange(info.batch_size)
        self._rows = RowsAhead(info.num_envs)
        # those whose result the pool has not returned
        self._running = np.zeros(info.num_envs, bool)
        # environments that the last step ended, and ``reset`` has not shown yet
        self._finished: set[int] = set()
        # ``_begun``: the pool was reset; ``_shows``: the next step also writes the observations
        # before it
        self._begun = False
        self._shows = False
        self._dropped = 0
        self._ahead = 0  # number of steps that are in no row of a lane yet

    late = 0  # a step completes its row

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        return self._actions.sample(rng, shape)

    def check_partial_reset(self) -> None:
        raise UnsupportedEnv(
            f"{self.spec.name} is asynchronous, and EnvPool resets single environments only at the"
            " ends of their episodes. Leave batch_size out, or reset all environments."
        )

    def reset(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        chosen = seeds is not None or bool(self.reset_options)
        ended = bool(self._finished) and self._finished.issuperset(which)
        if ended and not chosen:
            self._finished.difference_update(which)
            for key in self.spec.observation_specs:
                arrays[key][row, which] = self._rows.first(key)[which]
            return
        if self.reset_options:
            raise BadOption(
                f"{self.spec.name}.reset takes no options, not {sorted(self.reset_options)}; leave"
                " them out"
            )
        if len(which) < self.spec.num_envs:
            self.check_partial_reset()
        if seeds is not None:
            self._info.check_seed(list(seeds), running=self._begun)
        self._restart()
        ready = self.ready_envs
        for key in self.spec.observation_specs:
            arrays[key][row, ready] = self._rows.first(key)[ready]

    def start(self, lane: Lane) -> Step:
        raise UnsupportedEnv(
            f"{self.spec.name} is asynchronous (batch_size={len(self.ready_envs)} of"
            f" num_envs={self.spec.num_envs}), and this caller steps all environments at the same"
            " time. Leave batch_size out."
        )

    def start_ready(
        self,
        lane: Lane,
        prepare: Callable[[Lane], Act],
        written: Collection[Key],
        *,
        acted_last: bool,
    ) -> Step:
        arrays = lane.arrays
        rows = self._rows
        if not acted_last:
            rows.begins[:] = True
        ready: ReadyRows | None = lane.cache.get(self)
        if ready is None:
            columns = {*self.spec.action_specs, *written}
            ready = lane.cache[self] = ReadyRows(lane, len(self.ready_envs), columns)
        if not rows.hold(ready.kept, self.spec.observation_specs) and self._ahead:
            raise BadOption(
                f"{self.spec.name}: the policy writes other columns than before, and {self._ahead}"
                " steps made ahead have no values in them. Call collector.reset() first."
            )
        version = arrays[POLICY_VERSION][lane.done_steps, 0] if ready.stamps else None
        ready.begin(prepare, version)
        carried = []
        states = []
        others = []
        for column in ready.kept:
            pair = (column.key, arrays[column.key])
            if not column.carry:
                others.append(pair)
                continue
            carried.append(pair)
            if column.key in rows.states:
                states.append(pair)
        terminated = arrays[next_of(TERMINATED)]
        truncated = arrays[next_of(TRUNCATED)]
        window = max(lane.T, LEAST_WINDOW)
        self._finished = set()

        def step(t: int) -> Sequence[int] | None:
            while rows.behind:
                self._advance(ready, window)
            for key, array in others:
                array[t] = rows.first(key)
            for (
                key,
                array,
            ) in states:  # the policy may have set those that it began with
                array[t] = rows.first(key)
            if self._shows:
                for key, array in carried:
                    array[t] = rows.first(key)
                self._shows = False
            rows.drop_first()
            for key, array in carried:
                array[t + 1] = rows.first(key)
            self._ahead -= self.spec.num_envs
            finished: list[int] = np.flatnonzero(terminated[t] | truncated[t]).tolist()
            for i in finished:
                last = rows.last[i].popleft()
                for key, leaf in zip(self.spec.observation_specs, last, strict=True):
                    arrays[key][t + 1, i] = leaf
            self._finished = set(finished)
            return finished or None

        return step

    def drop_open(self) -> None:
        self._dropped += self._ahead
        self._ahead = 0

    def take_dropped(self) -> int:
        dropped = self._dropped
        self._dropped = 0
        return dropped

    def objects(self) -> Sequence[object]:
        return [self._info.pool]

    def close(self) -> None:
        self._info.pool.close()

    # --- the pool ---------------------------------------------------------------------------------

    def _advance(self, ready: ReadyRows, window: int) -> None:
        """Act for the ready environments, and wait for the next ones.

        Environments that are more than ``window`` rows ahead wait for the others, as far as the
        pool allows: it has to run ``batch_size`` environments to return any.
        """
        rows = self._rows
        ids = self.ready_envs
        near: Any = rows.steps[ids] <= window
        if near.all():
            near = slice(None)
        else:
            least = len(ids) - int(np.count_nonzero(self._running))
            number = max(least, int(np.count_nonzero(near)))
            near = np.argsort(rows.steps[ids], kind="stable")[:number]
        acting = ids[near]
        actions = ready.act(rows, ids, self.spec.action_specs) if len(acting) else []
        try:
            if actions:
                sent = self._actions.build([leaf[near] for leaf in actions])
                self._send(sent, acting)
                rows.begins[acting] = False
            self._receive()
        except BaseException:  # also Ctrl-C
            self.executed_in_row = self._ahead
            self._ahead = 0
            raise

    def _send(self, actions: Any, ids: Array) -> None:
        resets = int(np.count_nonzero(self._rows.over[ids]))
        self._ahead += len(ids) - resets
        with postponed():
            numbers = ids.astype(np.int32)
            checks.call(self._info.pool, "send", self.spec.name, actions, numbers)
            self._running[ids] = True

    def _receive(self) -> None:
        """Wait for the environments that are ready first, and store their results."""
        rows = self._rows
        over = self._rows.over
        ids, leaves, results = self._results()
        begun = over[ids]
        stepped = ids
        if begun.any():
            over[ids] = False
            stepped = ids[~begun]
            results = [column[~begun] for column in results]
        if len(stepped):
            cells = rows.cells(stepped)
            for key, column in zip(RESULTS, results, strict=True):
                rows.flat[key][cells] = column
            rows.step(stepped)
        ended = results[1] | results[2]
        over[stepped[ended]] = True
        cells = rows.cells(ids)
        for key, leaf in zip(self.spec.observation_specs, leaves, strict=True):
            rows.flat[key][cells] = leaf
        for key, state in rows.states.items():
            rows.flat[key][cells] = state[ids]
            rows.flat[key][cells[begun]] = key == IS_INIT
        self._keep_last(stepped[ended])
        idle = np.flatnonzero(~self._running)
        if idle.size > ids.size:
            fewest_first = np.argsort(rows.steps[idle], kind="stable")
            ids = idle[fewest_first[: ids.size]]
        self.ready_envs = ids

    def _keep_last(self, ids: Array) -> None:
        """Keep the last observations of episodes that have just ended in environments ``ids``."""
        rows = self._rows
        cells = rows.cells(ids).tolist()
        for i, cell in zip(ids.tolist(), cells, strict=True):
            leaves = [rows.flat[key][cell] for key in self.spec.observation_specs]
            rows.last[i].append([leaf.copy() for leaf in leaves])

    def _results(self) -> tuple[Array, list[Array], list[Array]]:
        """Return environments, the leaves of their observations, and rewards and flags."""
        with postponed():
            got = checks.call(self._info.pool, "recv", self.spec.name)
            obs, *columns, info = checks.step_values(got, f"{self.spec.name}.recv")
            ids = np.asarray(info["env_id"]).astype(np.int64)
            complete = len(ids) == len(self.ready_envs)
            known = complete and ids.min() >= 0 and ids.max() < self.spec.num_envs
            if not known or not self._running[ids].all():
                raise BadEnvOutput(
                    f"{self.spec.name}.recv returned the environments {ids}, expected"
                    f" {len(self.ready_envs)} of {np.flatnonzero(self._running)}"
                )
            self._running[ids] = False
        results = [np.asarray(column) for column in columns]
        if [column.shape for column in results] != [ids.shape] * 3:
            raise BadEnvOutput(
                f"{self.spec.name}.recv: rewards and flags have other shapes than {ids.shape}."
                f" {FIX}"
            )
        leaves = self._info.leaves(obs)
        who = f"{self.spec.name}.recv"
        specs = self._info.codec.specs
        for key, leaf in zip(specs, leaves, strict=True):
            spec = specs[key]
            rows = ArraySpec((len(ids), *spec.shape), spec.dtype)
            self.casts.check(leaf, rows, dotted(key), who)
        return ids, leaves, results

    def _restart(self) -> None:
        """Reset all environments, and wait for those that are ready first.

        Before, the pool must return all results. It returns ``batch_size`` at a time: if fewer are
        left, some environments make one more step.
        """
        while left := int(np.count_nonzero(self._running)):
            again = max(0, len(self.ready_envs) - left)
            if again:
                space = batch_space(self._info.action_space, again)
                space.seed(0)
                idle = np.flatnonzero(~self._running)
                self._send(space.sample(), idle[:again])
            ids, _, (_, terminated, truncated) = self._results()
            self._rows.over[ids] = terminated | truncated
        self.drop_open()
        self._rows.clear(self.spec.observation_specs)
        self._finished = set()
        self._shows = True
        self._begun = True
        with postponed():
            checks.call(self._info.pool, "async_reset", self.spec.name)
            self._running[:] = True
        self._receive()


class RowsAhead:
    """Rows of environments that are at different steps: a ring of time steps, from the first that
    is not complete.

    Attributes:
        flat: by column, ``[size * num_envs, *shape]``; see ``cells``.
        size: number of rows in memory.
        states: recurrent states after the last step of each environment, ``[num_envs, *shape]`` by
            column.
        steps: number of rows that each environment has completed, ``[num_envs]``.
        over: environments whose episode has ended, and whose next one has no observation yet.
        begins: environments whose next step is the first of a policy that did not act last.
        last: last observations of the ended episodes of each environment, oldest first.
    """

    def __init__(self, num_envs: int) -> None:
        self.steps = np.zeros(num_envs, np.int64)
        self.over = np.ones(num_envs, bool)
        self.begins = np.zeros(num_envs, bool)
        self.last: list[deque[list[Array]]] = [deque() for _ in range(num_envs)]
        self.flat: dict[Key, Array] = {}
        self.states: dict[Key, Array] = {}
        self._first = 0
        self.size = 4

    @property
    def behind(self) -> bool:
        """Whether the first row, or an observation after it, is missing."""
        return bool((self.steps - self.over).min() < 1)

    def first(self, key: Key) -> Array:
        """Return a column of the first row, ``[num_envs, *shape]``."""
        num_envs = len(self.steps)
        begin = self._first * num_envs
        return self.flat[key][begin : begin + num_envs]

    def drop_first(self) -> None:
        """Make the second row the first."""
        self._first = (self._first + 1) % self.size
        self.steps -= 1

    def cells(self, ids: Array) -> Array:
        """Return the positions of the current rows of environments in ``flat``."""
        row = (self._first + self.steps[ids]) % self.size
        cells: Array = row * len(self.steps) + ids
        return cells

    def step(self, ids: Array) -> None:
        """Go on to the next rows of environments."""
        self.steps[ids] += 1
        if self.steps.max() >= self.size:  # double it, with the first row in front
            for key, flat in self.flat.items():
                in_order = np.roll(flat, -self._first * len(self.steps), 0)
                self.flat[key] = np.concatenate([in_order, np.zeros_like(in_order)])
            self._first = 0
            self.size *= 2

    def hold(self, columns: Sequence[Column], observed: Collection[Key]) -> bool:
        """Allocate memory for columns; those that are carried and not ``observed`` are recurrent
        states.

        Returns: whether all columns had memory before.
        """
        new = [column for column in columns if column.key not in self.flat]
        for column in new:
            self._allocate(column.key, column.shape, column.dtype)
            if column.carry and column.key not in observed:
                shape = (len(self.steps), *column.shape)
                self.states[column.key] = np.zeros(shape, column.dtype)
        return not new

    def clear(self, observed: Mapping[Key, ArraySpec]) -> None:
        """Drop all rows. All environments await their first observation."""
        self.steps[:] = 0
        self.over[:] = True
        for last in self.last:
            last.clear()
        for key, spec in observed.items():
            if key not in self.flat:
                self._allocate(key, spec.shape, spec.dtype)
        for key in self.states:
            self.flat[key][...] = key == IS_INIT

    def _allocate(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        cells = self.size * len(self.steps)
        self.flat[key] = np.zeros((cells, *shape), dtype)
        if key == IS_INIT:
            self.flat[key][...] = True


class ReadyRows:
    """Rows in which the policy acts for the environments that are ready, of the columns of a lane.

    Attributes:
        kept: columns of the lane that ``RowsAhead`` holds.
        stamps: whether the version of the policy is one of them, and the policy does not write it.
    """

    def __init__(
        self,
        lane: Lane,
        count: int,
        written: Collection[Key],
    ) -> None:
        of_lane = lane.layout.columns
        columns = tuple(c for c in of_lane if c.carry or c.key in written)
        env_bytes = sum(math.prod(c.shape) * c.dtype.itemsize for c in columns)
        calls = lane.T * -(-lane.B // count)  # of the policy, in one rollout
        self._T = max(1, min(calls, BUFFER_BYTES // (count * env_bytes)))
        layout = Layout(self._T, count, columns, batch_shape=(count,))
        self._lane = Slot(layout).lanes[0]
        self._row = self._T
        self._version: Any = None
        arrays = self._lane.arrays
        self._inputs: list[tuple[Key, Array]] = []
        self._outputs: list[tuple[Key, Array]] = []
        self._states: list[tuple[Key, Array]] = []
        for column in columns:
            key = column.key
            pair = (key, arrays[key])
            if not column.carry:
                self._outputs.append(pair)
                continue
            self._inputs.append(pair)
            if key in written and key != IS_INIT:
                self._states.append(pair)
        others = {*RESULTS, POLICY_VERSION} - {c.key for c in columns}
        results = [c for c in of_lane if c.key in others]
        self.kept = [*columns, *results]
        self.stamps = any(c.key == POLICY_VERSION for c in results)

    def begin(self, prepare: Callable[[Lane], Act], version: Any) -> None:
        """Start a rollout of a policy that ``prepare`` prepares for a lane."""
        self._prepare = prepare
        self._version = version
        self._row = self._T

    def act(
        self,
        rows: RowsAhead,
        ids: Array,
        actions: Collection[Key],
    ) -> list[Array]:
        """Act for the environments ``ids``, in their current rows.

        Return copies of the leaves of the actions.
        """
        if self._row == self._T:
            self._lane.begin_at(0)
            self._act = self._prepare(self._lane)
            self._row = 0
        cells = rows.cells(ids)
        k = self._row
        for key, column in self._inputs:
            column[k] = rows.flat[key][cells]
            if key == IS_INIT:
                column[k] |= rows.begins[ids]
        self._act(k)
        self._row += 1
        for key, column in self._outputs:
            rows.flat[key][cells] = column[k]
        if self.stamps:
            rows.flat[POLICY_VERSION][cells] = self._version
        for key, column in self._states:
            rows.flat[key][cells] = column[k]
            rows.states[key][ids] = column[k + 1]
        return [self._lane.arrays[key][k].copy() for key in actions]
