"""Between Tianshou's buffers and Muster's loop: a group of environments, its policy, and the collected steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tianshou.data import Batch

from muster.compat.base import GroupRunner, borrowed
from muster.compat.tianshou.envs import Row, VectorEnvs, batch_of, stacked
from muster.compat.tianshou.policies import TianshouActor
from muster.episodes.rules import Rule
from muster.keys import OBSERVATION, TERMINATED, TRUNCATED, next_of
from muster.memory.slots import Lane, Layout
from muster.memory.specs import Array
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns


class Taken(NamedTuple):
    """Steps: ``batch`` has Tianshou's keys, ``[M, ...]``, by row, then environment; ``t``, ``env`` are ``[M]``."""

    t: Array
    env: Array
    rows: int
    batch: Any

    def pieces(self) -> Iterator[tuple[int, int]]:
        if self.rows == 1:
            return iter([(0, len(self.env))])
        ends = np.searchsorted(self.t, np.arange(self.rows + 1)).tolist()
        return itertools.pairwise(ends)


class Ended(NamedTuple):
    """An ended episode; ``t`` is the row of its end within ``Taken``."""

    t: int
    env: int
    total: Any
    steps: int


class Going(NamedTuple):
    """Rewards (``[N]`` or ``[N, agents]``) and steps (``[N]``) so far of the running episodes."""

    totals: Array
    steps: Array

    @classmethod
    def of(cls, totals: list[Any], steps: list[int]) -> Going:
        if any(isinstance(total, np.ndarray) for total in totals):
            totals = list(np.broadcast_arrays(*totals))
        return cls(np.array(totals), np.array(steps))

    def forget(self, which: list[int]) -> None:
        self.totals[which], self.steps[which] = 0, 0

    def after(self, taken: Taken) -> tuple[Going, list[Ended]]:
        """Return the running episodes after these steps, and the episodes that ended in them, by time.

        Rewards are added one by one in their own precision, as in Tianshou's buffers.
        """
        rew, done, N = taken.batch.rew, taken.batch.done, len(self.steps)
        totals = np.zeros((N, *rew.shape[1:]), rew.dtype if rew.dtype.kind == "f" else float)
        totals += self.totals if self.totals.ndim == rew.ndim else self.totals.reshape(N, 1)
        going, ended = Going(totals, self.steps.copy()), list[Ended]()
        for t, (begin, end) in enumerate(taken.pieces()):
            which = taken.env[begin:end] if end - begin < N else slice(None)
            going.totals[which] += rew[begin:end]
            going.steps[which] += 1
            if done[begin:end].any():
                over = taken.env[begin:end][done[begin:end]].tolist()
                ended += [Ended(t, env, going.totals[env].copy(), int(going.steps[env])) for env in over]
                going.forget(over)
        return going, ended


LANE_BYTES, LANE_ROWS = 1 << 26, 512  # limits of the memory between the environments and the buffer

STORED = OBSERVATION, next_of(OBSERVATION), next_of(TERMINATED), next_of(TRUNCATED)
OPTIONS = borrowed(validate="off")  # Tianshou accepts any reward


class Sampling(GroupRunner):
    """Runs a policy in environments, with the running episodes (``going``) and the ``last`` lane."""

    def __init__(self, envs: VectorEnvs, actor: TianshouActor) -> None:
        super().__init__(envs, OPTIONS, rng=GroupRng(0))
        self.envs, self.actor = envs, actor
        row_bytes = Layout(1, envs.num_envs, lane_columns(envs, (), OPTIONS)).nbytes
        self.most_rows = max(1, min(LANE_ROWS, LANE_BYTES // max(row_bytes, 1)))
        self.going: Going
        self.last: Lane

    def begin(self, obs: Array, infos: Any) -> None:
        self.envs.begin(obs, infos)
        self.actor.state, self.going = None, Going.of([0.0] * len(infos), [0] * len(infos))
        self.group.reset()
        self.group.begin()

    def make(self, rows: int, rule: Rule | None, watch: Callable[[Lane, int], object] | None) -> Lane:
        """Collect ``rows`` rows, fewer if the rule is complete, into ``last``; their number is its ``done_steps``."""
        self.last = self.lane(self.actor, rows)
        self.envs.rows.clear()
        try:
            self.run(self.actor, self.last, rule=rule, watch=watch)
        except BaseException:
            self.group.leave(self.last)
            raise
        return self.last

    def pieces(self, lane: Lane) -> Iterator[tuple[int, int]]:
        """Split the lane's rows into pieces in which the policy's entries have one structure: mostly one piece."""
        begin, before = 0, None
        for t in range(lane.done_steps):
            structure = _structure(self.envs.rows[t].policy)
            if t and structure != before:
                yield begin, t
                begin = t
            before = structure
        if begin < lane.done_steps:
            yield begin, lane.done_steps

    def taken(self, lane: Lane, begin: int, end: int, *, lent: bool = False) -> Taken:
        """Return the steps of rows ``begin`` to ``end``; ``lent``: they may be views of the lane."""
        rows, arrays, B = self.envs.rows[begin:end], lane.arrays, lane.B
        env = _joined([row.ids for row in rows])
        whole = len(env) == B * len(rows)
        t = np.repeat(np.arange(len(rows)), B if whole else [len(row.ids) for row in rows])
        columns = [arrays[key] for key in STORED]
        if whole:
            parts = [array[begin:end].reshape(-1, *array.shape[2:]) for array in columns]
            obs, obs_next, terminated, truncated = parts if lent else [part.copy() for part in parts]
        else:
            obs, obs_next, terminated, truncated = (array[t + begin, env] for array in columns)
        batch = batch_of(
            obs=stacked(obs),
            act=_joined([row.act for row in rows]),
            policy=_joined([row.policy for row in rows]),
            obs_next=stacked(obs_next),
            rew=_joined([row.rew for row in rows]),
            terminated=terminated,
            truncated=truncated,
            done=terminated | truncated,
            info=_infos(rows, env),
        )
        return Taken(t, env, len(rows), batch)


def _structure(tree: Any) -> Any:
    return [(key, _structure(value)) for key, value in tree.__dict__.items()] if isinstance(tree, Batch) else type(tree)


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate arrays, tensors, or Batches of them with one structure."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, Batch):
        return batch_of(**{key: _joined([part[key] for part in parts]) for key in first.get_keys()})
    return torch.cat(list(parts)) if isinstance(first, torch.Tensor) else np.concatenate(parts)


def _infos(rows: Sequence[Row], env: Array) -> Any:
    """Return all infos as a Batch; skips its slow conversion if all infos have the same names and only numbers."""
    if all(row.infos is None for row in rows):
        return batch_of(env_id=env.copy())
    infos: list[dict[str, Any]] = []
    for row in rows:
        infos += [{"env_id": i} for i in row.ids] if row.infos is None else row.infos
    names = infos[0].keys()
    if all(info.keys() == names for info in infos):
        columns = {name: [info[name] for info in infos] for name in names}
        kinds = {type(value) for column in columns.values() for value in column}
        if kinds <= {int, float, bool, np.float64, np.float32, np.int64, np.bool_}:
            return batch_of(**{name: np.array(column) for name, column in columns.items()})
    return Batch(np.array(infos, object))
