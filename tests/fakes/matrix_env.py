"""An environment in which every mistake shows, for every kind of action.

Imports no torch: workers do without.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

ActionKind = Literal["discrete", "1-d", "n-d", "dict"]
ACTION_KINDS: tuple[ActionKind, ...] = ("discrete", "1-d", "n-d", "dict")
CHOICES = 101  # values of each part of an action: 0 to 100
OBSERVATION = 4  # length, episode, t, heard


def action_shape(kind: ActionKind) -> tuple[int, ...]:
    """Of an action, or of the array in it."""
    return {"discrete": (), "1-d": (2,), "n-d": (2, 3), "dict": (2,)}[kind]


def action_space(kind: ActionKind) -> spaces.Space[Any]:
    if kind == "discrete":
        return spaces.Discrete(CHOICES)
    box = spaces.Box(0, CHOICES - 1, action_shape(kind), np.float32)
    return (
        spaces.Dict({"left": spaces.Discrete(CHOICES), "right": box})
        if kind == "dict"
        else box
    )


def heard(kind: ActionKind, action: Any) -> int:
    """A number that says which action this was."""
    if kind == "discrete":
        return int(action)
    if kind == "dict":
        return (3 * int(action["left"]) + 5 * heard("1-d", action["right"])) % 97
    parts = np.asarray(action, np.int64)
    assert parts.shape == action_shape(kind)
    return int((parts.ravel() * np.arange(1, parts.size + 1)).sum()) % 97


class MatrixEnv(gymnasium.Env[Any, Any]):
    """Observation ``[length, episode, t, heard]``, reward ``10 t + heard``; ``heard`` says what the
    action was.

    Episodes end by termination, by truncation, and by both, in turns.

    Args:
        length: steps per episode.
        kind: of actions.
        life: so many steps end the agent's episode, with ``info["traj_done"]`` False; 0: none do.
    """

    def __init__(
        self, length: int, kind: ActionKind = "discrete", life: int = 0
    ) -> None:
        self.length, self.kind, self.life = length, kind, life
        self.observation_space = spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
        self.action_space = action_space(kind)
        self.episode, self.t = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        said = heard(self.kind, action)
        over, lost = self.t >= self.length, bool(self.life) and self.t % self.life == 0
        terminated, truncated = (
            (over and self.episode % 3 != 1) or lost,
            over and self.episode % 3 > 0,
        )
        info = {"traj_done": over} if self.life and (over or lost) else {}
        return (
            self._observe(said),
            float(10 * self.t + said),
            terminated,
            truncated,
            info,
        )

    def _observe(self, said: int) -> Any:
        return np.array([self.length, self.episode, self.t, said], np.float32)


class Numbered:
    """Makes ``MatrixEnv``s, each one step longer than the one before.

    Args:
        first: length of the first one.
        count: the next one begins anew, as another worker's copy would.
    """

    def __init__(self, first: int, count: int, kind: ActionKind, life: int = 0) -> None:
        self.first, self.count, self.kind, self.life = first, count, kind, life
        self._made = 0

    def __call__(self) -> MatrixEnv:
        self._made += 1
        return MatrixEnv(
            self.first + (self._made - 1) % self.count, self.kind, self.life
        )


NUMBERS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(9),
    "Box(())": spaces.Box(0, 9, (), np.float32),
    "Box((1,))": spaces.Box(0, 9, (1,), np.float32),
}
LENGTH = 5


class NumberEnv(gymnasium.Env[Any, Any]):
    """Observes the time step in ``space``; the reward is the action."""

    def __init__(self, space: str) -> None:
        self.observation_space, self.action_space = NUMBERS[space], spaces.Discrete(7)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._observe(), float(action), self.t == LENGTH, False, {}

    def _observe(self) -> Any:
        space = self.observation_space
        return (
            self.t
            if isinstance(space, spaces.Discrete)
            else np.full(space.shape, self.t, np.float32)
        )
