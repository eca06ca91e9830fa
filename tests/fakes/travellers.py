"""Python objects in rows and results that a worker cannot send, or its parent cannot read."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

LENGTH = 7  # steps of an episode
BAD = 5  # observation of each episode that is bad
# the process that reads; workers inherit it
READER = "MUSTER_TEST_READER"


class Traveller:
    """The object of an observation, of a class that its own package can make anywhere.

    Args:
        number: of the observation in its episode.
        trouble: "": none; "sending": it cannot be pickled; "reading": not unpickled in the process
            of ``READER``; "everywhere": nowhere.
    """

    def __init__(self, number: int, trouble: str) -> None:
        self.number = number
        self.trouble = trouble

    def __deepcopy__(self, memo: Any) -> Traveller:
        return self  # it never changes

    def __reduce__(self) -> Any:
        if self.trouble == "sending":
            raise RuntimeError("it does not travel")
        return arrive, (self.number, self.trouble)


def arrive(number: int, trouble: str) -> Traveller:
    """Unpickle a ``Traveller``."""
    if trouble == "everywhere":
        raise ValueError("it cannot be made again")
    if trouble == "reading" and str(os.getpid()) == os.environ.get(READER):
        raise ValueError("it cannot be made here")
    return Traveller(number, trouble)


class Travellers(spaces.Space[Traveller]):
    """The space of all ``Traveller`` objects."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Traveller:
        return Traveller(0, "")

    def contains(self, x: Any) -> bool:
        return isinstance(x, Traveller)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Travellers)


class TravelEnv(gymnasium.Env[Any, Any]):
    """Observation ``BAD`` of the episodes ``in_episodes`` is a bad one.

    Observations are ``x``, the number of the observation in its episode and that of the environment,
    and ``who``, a ``Traveller``.
    """

    def __init__(
        self,
        env: int,
        trouble: str = "",
        in_episodes: Collection[int] = (),
        cls: type[Traveller] = Traveller,
    ) -> None:
        self.observation_space = spaces.Dict(
            x=spaces.Box(0, LENGTH, (2,)), who=Travellers()
        )
        self._env = env
        self._cls = cls
        self.action_space = spaces.Discrete(2)
        self._trouble = trouble
        self._in_episodes = in_episodes
        self._episode = -1
        self._number = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._number = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._number += 1
        return self._observation(), 1.0, False, self._number >= LENGTH, {}

    def _observation(self) -> dict[str, Any]:
        is_bad = self._number == BAD and self._episode in self._in_episodes
        who = self._cls(self._number, self._trouble if is_bad else "")
        return {"x": np.array([self._number, self._env], np.float32), "who": who}


def own_traveller(name: str = "Own") -> type[Traveller]:
    """Return a class that no other process can import, like those of a function."""

    class Own(Traveller):
        def __reduce__(self) -> Any:
            return type(self), (self.number, self.trouble)

    Own.__qualname__ = Own.__name__ = name
    return Own


def traveller_of_script(monkeypatch: pytest.MonkeyPatch) -> type[Traveller]:
    """Return a class of the program's script, whose name in other processes means nothing."""
    cls = own_traveller("OfScript")
    cls.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "OfScript", cls, raising=False)
    return cls


class InfoEnv(gymnasium.Env[Any, Any]):
    """The first step has a ``Traveller`` in its info."""

    observation_space = spaces.Box(0, LENGTH, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, trouble: str) -> None:
        self._info = {"who": Traveller(0, trouble)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        info = self._info
        self._info = {}
        return np.zeros(1, np.float32), 1.0, False, False, info


class Numbers(nn.Module):
    """A policy of the observation ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:-1], dtype=torch.long)


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observations are the last action, a ``Traveller`` of a class."""

    observation_space = Travellers()
    action_space = Travellers()

    def __init__(self, cls: type[Traveller]) -> None:
        self._cls = cls

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._cls(0, ""), {}

    def step(self, action: Any) -> Any:
        assert type(action) is self._cls
        return action, 1.0, False, False, {"who": action}


def traveller_of(env: Any, trouble: str) -> Traveller:
    """A function for ``map_envs``."""
    return Traveller(3, trouble)
