"""Which episodes an evaluation counts, where environments finish at different times.

A rule is asked about every end, in order of time and, within a time step, of environments.
"""

from __future__ import annotations

from typing import Literal, Protocol

from muster.errors import BadOption

RuleName = Literal["per_env", "first_done"]


class Rule(Protocol):
    """See the module.

    Attributes:
        biased: short episodes have better chances to be counted than long ones.
    """

    biased: bool

    def take(self, env_id: int) -> bool:
        """An episode of an environment has ended: whether it counts."""

    def awaits(self, env_id: int) -> bool:
        """The episode that is going on in an environment was wanted when it began."""

    @property
    def complete(self) -> bool:
        """All that were wanted are there."""


class PerEnv:
    """Fixes in advance how many episodes each environment contributes, so that nobody wins by being quick.

    Args:
        episodes: in all; the first environments have one more where it does not come out even.
        num_envs: that share them.
    """

    biased = False

    def __init__(self, episodes: int, num_envs: int) -> None:
        share, more = divmod(episodes, num_envs)
        self._left = [share + (i < more) for i in range(num_envs)]

    def take(self, env_id: int) -> bool:
        counts = self._left[env_id] > 0
        self._left[env_id] -= counts
        return counts

    def awaits(self, env_id: int) -> bool:
        return self._left[env_id] > 0

    @property
    def complete(self) -> bool:
        return not any(self._left)


class FirstDone:
    """Counts whatever ends first: fast, and biased towards short episodes.

    Args:
        episodes: None: all.
    """

    biased = True

    def __init__(self, episodes: int | None) -> None:
        self._left = episodes

    def take(self, env_id: int) -> bool:
        if self._left is None:
            return True
        counts = self._left > 0
        self._left -= counts
        return counts

    def awaits(self, env_id: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self._left == 0


def make_rule(name: RuleName, episodes: int | None, num_envs: int) -> Rule:
    """A fresh rule for one evaluation; without a number of episodes there is nothing to share out."""
    if name == "per_env" and episodes is not None:
        return PerEnv(episodes, num_envs)
    return FirstDone(episodes)


def check_rule(name: str) -> None:
    """Raise ``BadOption`` unless there is such a rule."""
    if name not in ("per_env", "first_done"):
        raise BadOption(f"rule={name!r}: expected 'per_env' (unbiased) or 'first_done' (fast, favours short episodes)")
