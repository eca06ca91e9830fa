"""What collectors must give for ``matrix_env`` and ``matrix_policies``: one environment at a time,
in plain Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fakes.matrix_env import ActionKind, action_shape, heard
from tests.fakes.matrix_policies import StateKind, advance, choose, parts_of

Row = dict[tuple[str, ...], Any]
ID = ("collector", "traj_ids")


@dataclass(frozen=True)
class Told:
    """What a reference has to know.

    Attributes:
        T: rows of a batch.
        envs: over all groups.
        wait: ``reset_when_done=False``.
        bias: of the policy.
        life, prev: see ``MatrixEnv`` and ``Plain``.
    """

    kind: ActionKind
    state: StateKind
    T: int
    envs: int
    wait: bool = False
    bias: int = 0
    life: int = 0
    prev: bool = False


@dataclass
class OneEnv:
    """An environment and the agent that acts in it.

    Args:
        number: among all environments.
        length: of its episodes.

    Attributes:
        biases: of the weights that act, by batch; empty: that of ``told``.
        executed: steps so far.
    """

    told: Told
    number: int
    length: int
    biases: list[int] = field(default_factory=list)
    executed: int = 0

    def batches(self) -> Iterator[Row]:
        """Batches without an end: columns by key, ``[T, ...]`` each."""
        told = self.told
        self.episode = self.t = self.said = 0
        self._begin_agent()
        for batch in itertools.count():
            bias = self.biases[batch] if self.biases else told.bias
            rows: list[Row] = []
            for _ in range(told.T):
                if told.wait and rows and rows[-1]["next", "done"]:
                    rows.append(self._blank(rows[-1]))
                else:
                    rows.append(self._step(bias))
            yield {
                key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]
            }

    def _step(self, bias: int) -> Row:
        told = self.told
        obs = (self.length, self.episode, self.t, self.said)
        row: Row = {**self._seen(obs), **self._state()}
        prev = (
            int(
                sum(np.sum(part) for part in _leaves(self.action).values())
                + self.reward
            )
            if told.prev
            else 0
        )
        begins = 31 * self.begins if told.state == "tensordict" else 0
        choice = choose(np, obs, self.count, self.hidden, bias + begins, prev)
        self.action = parts_of(np.array(choice), told.kind)
        if told.state != "none":
            self.count, self.hidden = advance(obs, self.count, self.hidden)
        row |= {
            ("action", *key): part for key, part in _leaves(self.action).items()
        } | {("choice",): choice}
        self.begins = False
        # the environment
        self.executed += 1
        self.t, self.said = self.t + 1, heard(told.kind, self.action)
        self.reward = 10 * self.t + self.said
        over, lost = self.t == self.length, bool(told.life) and self.t % told.life == 0
        terminated, truncated = (
            (over and self.episode % 3 != 1) or lost,
            over and self.episode % 3 != 0,
        )
        row["next", "reward"] = np.float32(self.reward)
        row |= self._seen((self.length, self.episode, self.t, self.said), ("next",))
        for flag, value in (
            ("done", terminated or truncated),
            ("terminated", terminated),
            ("truncated", truncated),
        ):
            row[flag,], row["next", flag] = False, value
        row[ID] = self.number + told.envs * self.episode
        if told.wait:
            row["collector", "valid"] = True
        if told.life:
            row["next", "traj_done"] = over
        if over:
            self.episode, self.t, self.said = self.episode + 1, 0, 0
        if terminated or truncated:
            self._begin_agent()
        return row

    def _begin_agent(self) -> None:
        self.count = self.hidden = self.reward = 0
        self.begins = True
        zero = np.zeros(action_shape(self.told.kind), np.int64)
        self.action = {"left": 0, "right": zero} if self.told.kind == "dict" else zero

    def _blank(self, last: Row) -> Row:
        row = {key: np.zeros_like(value) for key, value in last.items()}
        row[ID] = -1
        for flag in ("done", "terminated", "truncated"):
            row[flag,] = row["next", flag] = last["next", flag]
        return row

    def _seen(self, obs: tuple[int, ...], below: tuple[str, ...] = ()) -> Row:
        seen: Row = {(*below, "observation"): np.array(obs, np.float32)}
        if self.told.prev:
            seen |= {
                (*below, "prev_action", *key): np.array(part)
                for key, part in _leaves(self.action).items()
            }
            seen[(*below, "prev_reward")] = np.float32(self.reward)
        return seen

    def _state(self) -> Row:
        key, count, hidden = "recurrent_state", self.count, self.hidden
        if self.told.state == "dict":
            return {(key, "count"): count, (key, "deep", "0"): [hidden]}
        if self.told.state == "tensordict":
            return {("count",): count, ("hidden",): hidden, ("is_init",): self.begins}
        dtype = np.int64 if self.told.state == "array" else np.float32
        return (
            {}
            if self.told.state == "none"
            else {(key,): np.array([count, hidden], dtype)}
        )


def _leaves(action: Any) -> dict[tuple[str, ...], Any]:
    return (
        {(name,): part for name, part in action.items()}
        if isinstance(action, dict)
        else {(): action}
    )
