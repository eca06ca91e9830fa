"""Which episodes count where several environments compete to end theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from muster.errors import BadOption

RuleName = Literal["fair", "last_even", "per_env", "first_done"]
ENDLESS = 100_000  # steps of one episode that somebody waits for after which a missing limit is an error


class Rule(Protocol):
    """Chooses episodes while they end; nothing is known of an episode but its environment and when it ended.

    Attributes:
        biased: where all environments are alike, short episodes have better chances than long ones.
    """

    biased: bool

    def ended(self, which: Sequence[int]) -> list[int]:
        """Episodes ended at one time step in the environments ``which`` (ascending).

        Returns:
            those that count, in the order in which they are delivered.
        """

    def awaits(self, env_id: int) -> bool:
        """An episode that is going on in this environment, or about to begin, can still count."""

    @property
    def complete(self) -> bool:
        """All that were wanted are there."""


class PerEnv:
    """A number fixed in advance from each environment, so that nobody wins by being quick.

    Args:
        episodes: in all; the first environments have one more where it does not come out even.
        num_envs: that share them.
    """

    biased = False

    def __init__(self, episodes: int, num_envs: int) -> None:
        share, more = divmod(episodes, num_envs)
        self._left = [share + (i < more) for i in range(num_envs)]

    def ended(self, which: Sequence[int]) -> list[int]:
        counted = [i for i in which if self.awaits(i)]
        for i in counted:
            self._left[i] -= 1
        return counted

    def part(self, which: Sequence[int]) -> PerEnv:
        """What is left to some of the environments, which are numbered from 0 there."""
        made = PerEnv(0, len(which))
        made._left = [self._left[i] for i in which]
        return made

    def awaits(self, env_id: int) -> bool:
        return self._left[env_id] > 0

    @property
    def complete(self) -> bool:
        return not any(self._left)


class Fair:
    """The same number from each environment, and what is missing from whichever are the first to end one more.

    At equal times the lowest environment is first; what is missing is delivered after the rest. It is prt_rl's rule.
    """

    def __init__(self, episodes: int, num_envs: int) -> None:
        share, self._further = divmod(episodes, num_envs)
        self._left = [share] * num_envs  # -1: has ended one more
        self.biased = self._further > 0

    def ended(self, which: Sequence[int]) -> list[int]:
        share = [i for i in which if self._left[i] > 0]
        further = [i for i in which if self._left[i] == 0][: self._further]
        for i in share + further:
            self._left[i] -= 1
        self._further -= len(further)
        return share + further

    def awaits(self, env_id: int) -> bool:
        return self._left[env_id] > 0 or (self._left[env_id] == 0 and self._further > 0)

    @property
    def complete(self) -> bool:
        return self._further == 0 and max(self._left) <= 0


class LastEven:
    """The first ``episodes`` to begin. Whoever ends one begins another while that makes no more than asked for.

    So each environment contributes at least one, the last of each is waited for, and what an episode is like has no
    influence on whether it counts; but environments with short ones contribute more of them. When several end at once
    and not all may go on, the lowest are let go. Of more environments than episodes the first take part. It is
    Tianshou's rule.
    """

    biased = False

    def __init__(self, episodes: int, num_envs: int) -> None:
        self._left = episodes
        self._running = set(range(min(episodes, num_envs)))

    def ended(self, which: Sequence[int]) -> list[int]:
        counted = [i for i in which if i in self._running]
        self._left -= len(counted)
        self._running -= {*counted[: max(0, len(self._running) - self._left)]}
        return counted

    def awaits(self, env_id: int) -> bool:
        return env_id in self._running

    @property
    def complete(self) -> bool:
        return self._left == 0


class FirstDone:
    """Whatever ends first (the lowest environment at equal times): fast, and biased towards short episodes.

    Args:
        episodes: None: all.
    """

    biased = True

    def __init__(self, episodes: int | None) -> None:
        self._left = episodes

    def ended(self, which: Sequence[int]) -> list[int]:
        counted = list(which[: self._left])
        if self._left is not None:
            self._left -= len(counted)
        return counted

    def awaits(self, env_id: int) -> bool:
        return not self.complete

    @property
    def complete(self) -> bool:
        return self._left == 0


class NobodyLetGo:
    """Another rule, for which all environments go on until it is complete."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self.biased = rule, rule.biased

    def ended(self, which: Sequence[int]) -> list[int]:
        return self._rule.ended(which)

    def awaits(self, env_id: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self._rule.complete


def make_rule(name: RuleName, episodes: int | None, num_envs: int) -> Rule:
    """A fresh rule; without a number of episodes there is nothing to share out, and all count as they end.

    Args:
        episodes: at least 1.
        num_envs: whose episodes compete.

    Raises:
        BadOption: there is no such rule.
    """
    check_rule(name)
    if episodes is None or name == "first_done":
        return FirstDone(episodes)
    kinds: dict[str, type[Fair | LastEven | PerEnv]] = {"fair": Fair, "last_even": LastEven, "per_env": PerEnv}
    return kinds[name](episodes, num_envs)


def check_rule(name: str) -> None:
    """Raise ``BadOption`` unless there is such a rule."""
    if name not in get_args(RuleName):
        raise BadOption(
            f"rule={name!r}: expected 'fair' (as many from each environment, the rest from whoever is first), "
            f"'last_even' (the first to begin), 'per_env' (numbers fixed in advance) or 'first_done' (the first to "
            f"end, which favours short episodes)"
        )
