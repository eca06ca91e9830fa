"""The counterpart of fakes: the same environments as plain Gymnasium ones, which say what the
others should give.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from muster.testing import ChainEnv


class OneWayChain(ChainEnv):
    """A ``ChainEnv`` whose episodes are never terminated and truncated at once: not every API can
    say both.

    Args:
        wins: the flag that stays where ``ChainEnv`` sets both.
    """

    def __init__(self, wins: Literal["terminated", "truncated"] = "terminated") -> None:
        super().__init__()
        self.wins = wins

    def follow(self, obs: Any, action: Any) -> Any:
        after, reward, terminated, truncated = super().follow(obs, action)
        if self.wins == "terminated":
            return after, reward, terminated, truncated & ~terminated
        return after, reward, terminated & ~truncated, truncated


class DictChain(OneWayChain):
    """The chain as a part of a Dict."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self._parts(
            self.observation_space, spaces.Box(0, 99, (1,))
        )

    def _parts(self, chain: Any, t: Any) -> Any:
        return (
            spaces.Dict({"chain": chain, "t": t})
            if isinstance(t, spaces.Space)
            else {"chain": chain, "t": t}
        )

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return self._parts(obs, np.array(obs[1:2], np.float32)), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return self._parts(obs, np.array(obs[1:2], np.float32)), *rest


class TupleChain(DictChain):
    def _parts(self, chain: Any, t: Any) -> Any:
        return spaces.Tuple((chain, t)) if isinstance(t, spaces.Space) else (chain, t)


class StackedChain(OneWayChain):
    """The last ``n`` observations in one row, zeros where there were none: what ``VecFrameStack``
    does.
    """

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.frames = np.zeros(3 * n, np.int64)
        self.observation_space = spaces.Box(0, 2**31, (3 * n,), np.int64)

    def _push(self, obs: Any) -> Any:
        self.frames = np.concatenate((self.frames[3:], obs))
        return self.frames

    def reset(self, **options: Any) -> Any:
        self.frames = np.zeros_like(self.frames)
        obs, info = super().reset(**options)
        return self._push(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return self._push(obs), *rest
