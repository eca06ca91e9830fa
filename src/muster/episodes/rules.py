"""Which episodes count or come next, where several environments compete to end theirs: every rule, by its one name.

A number of episodes that is fixed beforehand (``collect(n_episode=)``, ``Evaluator``) is shared out by a ``Rule``. A
stream without an end (``trajs_per_batch``) is put in order by an ``EpisodeQueue``. Where both have a rule of the same
name it means the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol, get_args

from muster.errors import BadOption

RuleName = Literal["fair", "last_even", "per_env", "first_done"]
StreamRule = Literal["first_begun", "per_env", "first_done"]
ENDLESS = 100_000  # steps of one awaited episode after which a missing limit is an error


class Rule(Protocol):
    """Chooses episodes while they end, knowing of each only its environment and when it ended.

    ``biased``: where all environments are alike, short episodes have better chances than long ones.
    """

    biased: bool

    def ended(self, which: Sequence[int]) -> list[int]:
        """Which episodes that ended at one time step in environments ``which`` (ascending) count, in order."""

    def awaits(self, env_id: int) -> bool:
        """An episode that is going on in this environment, or about to begin, can still count."""

    @property
    def complete(self) -> bool: ...


class PerEnv:
    """A number fixed in advance from each environment (the first have one more where it does not come out even)."""

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
    """The same number from each environment, and what is missing from the first to end one more (delivered last).

    At equal times the lowest environment is first. It is prt_rl's rule.
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
    """The first ``episodes`` to begin: an environment begins another one while that makes no more than asked for.

    The last of each is waited for, so what an episode is like has no influence on whether it counts; but environments
    with short ones contribute more of them. When several end at once and not all may go on, the lowest stop. Of more
    environments than episodes the first take part. It is Tianshou's rule.
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
    """Whatever ends first (the lowest environment at equal times): fast, and biased towards short episodes."""

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
    """A fresh rule for ``episodes`` (None: all count as they end) of ``num_envs`` environments."""
    check_rule(name)
    if episodes is None or name == "first_done":
        return FirstDone(episodes)
    kinds: dict[str, type[Fair | LastEven | PerEnv]] = {"fair": Fair, "last_even": LastEven, "per_env": PerEnv}
    return kinds[name](episodes, num_envs)


def check_rule(name: str) -> None:
    """Raise ``BadOption`` unless there is such a rule."""
    if name not in get_args(RuleName):
        raise BadOption(
            f"rule={name!r}: expected 'fair' (as many from each environment, the rest from the first to end one), "
            f"'last_even' (the first to begin), 'per_env' (numbers fixed in advance) or 'first_done' (the first to "
            f"end, which favours short episodes)"
        )


class EpisodeQueue(Protocol):
    """Puts the complete episodes of a stream in order. Number k is of environment ``k % num_envs``, begun at time
    ``k // num_envs``. The work of all calls grows with the number of episodes, not with how long they wait.
    """

    def add(self, number: int) -> None:
        """An episode has ended. Called in order of ends, ties in order of environments."""

    def pop(self, first_open: int) -> list[int]:
        """The next episodes, in order, as far as known: no open episode has a lower number than ``first_open``."""


class InOrderOfBeginnings:
    """``"first_begun"``: what ends early waits for what began before it, so every episode is delivered in its turn."""

    def __init__(self) -> None:
        self._waiting: list[int] = []  # a heap

    def add(self, number: int) -> None:
        heappush(self._waiting, number)

    def pop(self, first_open: int) -> list[int]:
        due = []
        while self._waiting and self._waiting[0] < first_open:
            due.append(heappop(self._waiting))
        return due


class EqualShares:
    """The next ``share`` of every environment, environment by environment, each in order of ends."""

    def __init__(self, share: int, num_envs: int) -> None:
        self._share = share
        self._waiting: list[deque[int]] = [deque() for _ in range(num_envs)]
        self._short = num_envs  # environments with less than a share waiting

    def add(self, number: int) -> None:
        waiting = self._waiting[number % len(self._waiting)]
        waiting.append(number)
        self._short -= len(waiting) == self._share

    def pop(self, first_open: int) -> list[int]:
        due = []
        while not self._short:
            for waiting in self._waiting:
                due += [waiting.popleft() for _ in range(self._share)]
            self._short = sum(len(waiting) < self._share for waiting in self._waiting)
        return due


def make_queue(name: StreamRule, group: int, num_envs: int) -> EpisodeQueue:
    """An empty queue.

    Args:
        name: ``"first_begun"``: in the order in which the episodes began, then by environment.
            ``"per_env"``: as many of every environment in each group; the surplus of quick environments waits.
            ``"first_done"``: in the order in which they ended (TorchRL's). The first groups have too many short ones.
        group: number of episodes that are delivered together.
        num_envs: whose episodes compete.
    """
    if name == "first_begun":
        return InOrderOfBeginnings()
    return EqualShares(group // num_envs, num_envs) if name == "per_env" else EqualShares(1, 1)


def check_stream_rule(option: str, name: str) -> None:
    """Raise ``BadOption`` unless there is such a rule for streams; ``option`` is what it was given as."""
    if name == "fair":
        raise BadOption(
            f"{option}='fair': this rule is called 'first_begun' for batches of whole episodes. 'fair' is a rule of "
            f"collect(n_episode=...) and Evaluator only: as many episodes from each environment"
        )
    if name not in get_args(StreamRule):
        raise BadOption(
            f"{option}={name!r}: expected 'first_begun' (in the order in which they began), 'per_env' (as many from "
            f"each environment) or 'first_done' (in the order in which they ended, which favours short episodes)"
        )
