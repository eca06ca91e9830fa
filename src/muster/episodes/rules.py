"""The rules that choose or order episodes while several environments compete to end theirs, each
under one name.

A ``Rule`` divides a fixed number of episodes (``collect(n_episode=)``, ``Evaluator``) among the
environments. An ``EpisodeQueue`` orders an endless stream (``trajs_per_batch``). A rule of both
kinds means the same under the same name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol, get_args

from muster.errors import BadOption

RuleName = Literal["fair", "last_even", "per_env", "first_done"]
StreamRule = Literal["first_begun", "per_env", "first_done"]
ENDLESS = 100_000  # number of steps without an awaited end after which an error suggests a limit


class Rule(Protocol):
    """Chooses episodes as they end, from their environments and the times of their ends only.

    ``biased``: among equal environments, short episodes are more likely to count than long ones.
    """

    biased: bool

    def ended(self, which: Sequence[int]) -> list[int]:
        """Return in order those of ``which`` (ascending) whose episode counts; all ended at the
        same time step.
        """

    def awaits(self, env_id: int) -> bool:
        """Return whether the current or next episode of this environment can still count."""

    @property
    def complete(self) -> bool: ...


class DivisibleRule(Rule, Protocol):
    """A rule by which environments that are stepped apart can choose episodes without knowing of
    each other's ends.

    They do so with a ``part`` of the rule, as long as ends of other environments cannot change it.
    """

    @property
    def certain_steps(self) -> int | None:
        """Number of time steps in which ``awaits`` can only change by an environment's own ends;
        None: always.
        """

    def part(self, which: Sequence[int]) -> DivisibleRule:
        """Return a rule that awaits these environments (renumbered from 0) as this one does for
        ``certain_steps``.
        """


class PerEnv:
    """Takes a fixed number from each environment.

    If they cannot share equally, the first give one more.
    """

    biased = False

    def __init__(
        self,
        episodes: int,
        num_envs: int,
        *,
        left: Sequence[int] | None = None,
    ) -> None:
        share, more = divmod(episodes, num_envs)
        self._left = [share + (i < more) for i in range(num_envs)]
        if left is not None:
            self._left = list(left)

    def ended(self, which: Sequence[int]) -> list[int]:
        counted = [i for i in which if self.awaits(i)]
        for i in counted:
            self._left[i] -= 1
        return counted

    def part(self, which: Sequence[int]) -> PerEnv:
        """Return the rule's remainder for some of the environments, renumbered from 0."""
        return PerEnv.of([self._left[i] for i in which])

    @classmethod
    def of(cls, left: Sequence[int]) -> PerEnv:
        """Make a rule that takes a number from each environment."""
        return cls(sum(left), len(left), left=left)

    @property
    def certain_steps(self) -> int | None:
        return None

    def awaits(self, env_id: int) -> bool:
        return self._left[env_id] > 0

    @property
    def complete(self) -> bool:
        return not any(self._left)


class Fair:
    """Takes the same number from each environment, and the rest from the first ones to end one more
    (delivered last).

    Of simultaneous ends the lowest environment is first. It is prt_rl's rule.
    """

    def __init__(
        self,
        episodes: int,
        num_envs: int,
        *,
        left: Sequence[int] | None = None,
        further: int | None = None,
    ) -> None:
        share, rest = divmod(episodes, num_envs)
        self._further = rest if further is None else further
        # -1: has given one of the rest
        self._left = [share] * num_envs if left is None else list(left)
        self.biased = rest > 0

    def ended(self, which: Sequence[int]) -> list[int]:
        share = [i for i in which if self._left[i] > 0]
        further = [i for i in which if self._left[i] == 0]
        further = further[: self._further]
        for i in share + further:
            self._left[i] -= 1
        self._further -= len(further)
        return share + further

    def awaits(self, env_id: int) -> bool:
        if self._left[env_id] > 0:
            return True
        return self._left[env_id] == 0 and self._further > 0

    @property
    def complete(self) -> bool:
        return self._further == 0 and max(self._left) <= 0

    @property
    def certain_steps(self) -> int | None:
        if self._further == 0:
            return None
        # An environment needs a step at least for each episode of its share before it can give one
        # of the rest.
        shares = sorted(left for left in self._left if left >= 0)
        return shares[self._further - 1]

    def part(self, which: Sequence[int]) -> Fair:
        further = len(which) if self._further else 0
        return Fair(0, len(which), left=[self._left[i] for i in which], further=further)


class LastEven:
    """Takes the first ``episodes`` to start: an environment starts another one as long as no
    surplus results.

    All started episodes are awaited, so the properties of an episode do not influence whether it
    counts. Environments with short episodes contribute more of them. When several end at once and
    not all may continue, the lowest stop. If there are more environments than episodes, the first
    ones take part. It is Tianshou's rule.
    """

    biased = False

    def __init__(
        self,
        episodes: int,
        num_envs: int,
        *,
        running: Iterable[int] | None = None,
    ) -> None:
        self._left = episodes
        self._running = set(range(min(episodes, num_envs)))
        if running is not None:
            self._running = set(running)

    def ended(self, which: Sequence[int]) -> list[int]:
        counted = [i for i in which if i in self._running]
        self._left -= len(counted)
        surplus = max(0, len(self._running) - self._left)
        self._running -= {*counted[:surplus]}
        return counted

    def awaits(self, env_id: int) -> bool:
        return env_id in self._running

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def certain_steps(self) -> int | None:
        spare = self._left - len(
            self._running
        )  # so many ends do not stop an environment
        return spare // len(self._running) if spare else None

    def part(self, which: Sequence[int]) -> LastEven:
        running = [place for place, i in enumerate(which) if i in self._running]
        stops = self._left == len(self._running)
        episodes = len(running) if stops else ENDLESS * len(which)
        return LastEven(episodes, len(which), running=running)


class FirstDone:
    """Takes the first to end (the lowest environment of simultaneous ends): fast, and biased
    towards short episodes.
    """

    biased = True

    def __init__(self, episodes: int | None, num_envs: int) -> None:
        self._left = episodes
        self._num_envs = num_envs

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

    @property
    def certain_steps(self) -> int | None:
        if self._left is None:
            return None
        return (self._left - 1) // self._num_envs

    def part(self, which: Sequence[int]) -> FirstDone:
        return FirstDone(None, len(which))


class AtMost:
    """Wraps a rule so that it is complete after a number of episodes; the first to end count."""

    def __init__(
        self,
        rule: DivisibleRule,
        episodes: int,
        num_envs: int,
    ) -> None:
        self._rule = rule
        self.biased = rule.biased
        self._first = FirstDone(episodes, num_envs)

    def ended(self, which: Sequence[int]) -> list[int]:
        return self._first.ended(self._rule.ended(which))

    def awaits(self, env_id: int) -> bool:
        return self._first.awaits(env_id) and self._rule.awaits(env_id)

    @property
    def complete(self) -> bool:
        return self._first.complete or self._rule.complete

    @property
    def certain_steps(self) -> int | None:
        both = (self._rule.certain_steps, self._first.certain_steps)
        return min((steps for steps in both if steps is not None), default=None)

    def part(self, which: Sequence[int]) -> DivisibleRule:
        return self._rule.part(which)


class NobodyLetGo:
    """Wraps a rule so that all environments continue until it is complete."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.biased = rule.biased

    def ended(self, which: Sequence[int]) -> list[int]:
        return self._rule.ended(which)

    def awaits(self, env_id: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self._rule.complete


def part_of(rule: DivisibleRule, which: Sequence[int]) -> DivisibleRule:
    """Return a rule for some of the environments, which are stepped apart from the others, for
    their next steps.

    If nothing is certain, it is for one step: no environment goes on after an end until ``rule``
    has seen all ends.
    """
    if rule.certain_steps == 0:
        return PerEnv.of([int(rule.awaits(i)) for i in which])
    return rule.part(which)


def make_rule(name: RuleName, episodes: int | None, num_envs: int) -> DivisibleRule:
    """Make a rule for ``episodes`` (None: all count as they end) of ``num_envs`` environments."""
    check_rule(name)
    if episodes is None or name == "first_done":
        return FirstDone(episodes, num_envs)
    kinds: dict[str, type[Fair | LastEven | PerEnv]] = {
        "fair": Fair,
        "last_even": LastEven,
        "per_env": PerEnv,
    }
    return kinds[name](episodes, num_envs)


def check_rule(name: str) -> None:
    """Raise ``BadOption`` unless there is a rule of this name."""
    if name not in get_args(RuleName):
        raise BadOption(
            f"rule={name!r}: expected 'fair' (as many from each environment, the rest from the"
            " first to end one), 'last_even' (the first to begin), 'per_env' (numbers fixed in"
            " advance) or 'first_done' (the first to end, which favours short episodes)"
        )


class EpisodeQueue(Protocol):
    """Orders the complete episodes of a stream. Number k is of environment ``k % num_envs`` and
    started at time ``k // num_envs``. The cost of all calls is proportional to the number of
    episodes, however long they wait.
    """

    def add(self, number: int) -> None:
        """Add an ended episode.

        Called in order of ends, and of environments among simultaneous ends.
        """

    def pop(self, first_open: int) -> list[int]:
        """Remove and return the next episodes, in order.

        No open episode has a lower number than ``first_open``.
        """


class InOrderOfBeginnings:
    """``"first_begun"``: an episode that ends early waits for all that started before it."""

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
    """Returns the next ``share`` episodes of every environment, by environment, then in order of
    ends.
    """

    def __init__(self, share: int, num_envs: int) -> None:
        self._share = share
        self._waiting: list[deque[int]] = [deque() for _ in range(num_envs)]
        self._short = num_envs  # number of environments with less than a share waiting

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
    """Make an empty queue.

    Args:
        name: ``"first_begun"``: in order of the episodes' first steps, then by environment.
            ``"per_env"``: as many of each environment in every group; surplus episodes of fast
            environments wait. ``"first_done"``: in order of their ends, as in TorchRL; short ones
            are too frequent in the first groups.
        group: number of episodes that are delivered together.
        num_envs: number of environments.
    """
    if name == "first_begun":
        return InOrderOfBeginnings()
    if name == "per_env":
        return EqualShares(group // num_envs, num_envs)
    return EqualShares(1, 1)


def check_stream_rule(option: str, name: str) -> None:
    """Raise ``BadOption`` unless there is a stream rule of this name; ``option`` is its parameter."""
    if name == "fair":
        raise BadOption(
            f"{option}='fair': this rule is called 'first_begun' for batches of whole episodes."
            " 'fair' is a rule of collect(n_episode=...) and Evaluator only: as many episodes from"
            " each environment"
        )
    if name not in get_args(StreamRule):
        raise BadOption(
            f"{option}={name!r}: expected 'first_begun' (in the order in which they began),"
            " 'per_env' (as many from each environment) or 'first_done' (in the order in which"
            " they ended, which favours short episodes)"
        )
