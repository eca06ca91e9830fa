"""Environments with episodes of known lengths, and in plain Python which of these episodes count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Patterns = Sequence[Sequence[int]]


class PatternEnv(gymnasium.Env[Any, Any]):
    """Observation ``[env, episode, t, mark]`` (float32), reward ``100 * episode + t + 1``.

    Odd episodes are truncated, even ones terminated. The number of the environment is the seed of
    its last seeded reset, with which episode 0 begins: make the collector with ``seed=0``.

    Args:
        patterns: by environment, lengths of its episodes, which repeat.
        fault: the step, counted over the environment's life, that raises; 0 is the first.

    Attributes:
        rendered: how often.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (as Gymnasium has it)
    render_mode = "rgb_array"

    def __init__(self, patterns: Patterns, fault: int = -1) -> None:
        self.patterns, self.fault = patterns, fault
        self.observation_space = spaces.Box(0, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.number, self.episode, self.t, self.mark = 0, -1, 0, 0
        self.made = self.rendered = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.number, self.episode = seed, -1
        self.episode, self.t, self.mark = (
            self.episode + 1,
            0,
            (options or {}).get("mark", 0),
        )
        return self._observe(), {}

    def step(self, action: int) -> Any:
        self.made += 1
        if self.made == self.fault + 1:
            raise ValueError("the gripper slipped")
        self.t += 1
        done = self.t >= length(self.patterns, self.number, self.episode)
        odd = self.episode % 2 == 1
        return (
            self._observe(),
            float(100 * self.episode + self.t),
            done and not odd,
            done and odd,
            {},
        )

    def render(self) -> NDArray[np.uint8]:
        self.rendered += 1
        return np.zeros((2, 2, 3), np.uint8)

    def _observe(self) -> Any:
        return np.array([self.number, self.episode, self.t, self.mark], np.float32)


class Whole(NamedTuple):
    """A whole episode."""

    env: int
    episode: int
    length: int


def length(patterns: Patterns, env: int, episode: int) -> int:
    """Steps in an episode."""
    of_env = patterns[env % len(patterns)]
    return of_env[episode % len(of_env)]


def return_of(whole: Whole) -> float:
    """Of an episode."""
    return float(sum(100 * whole.episode + t + 1 for t in range(whole.length)))


@dataclass
class Contest:
    """What a rule makes of environments that begin together.

    Attributes:
        chosen: the episodes that count, in the order of their ends, then by environment; with
            "fair" the further ones come after the others that end at the same time.
        steps: that each environment takes until the last of these ends, if it rests when nothing is
            expected of it.
        stands: where this leaves each environment: the episode, and steps made in it.
    """

    chosen: list[Whole]
    steps: list[int]
    stands: list[tuple[int, int]]

    @property
    def begins(self) -> list[int]:
        """The next whole episode of each environment: what was begun is not gone on with."""
        return [episode + (t > 0) for episode, t in self.stands]


def contest(rule: str, n: int, patterns: Patterns, first: Sequence[int]) -> Contest:
    """Who wins, from the definitions of the rules; environment i begins with its episode
    ``first[i]``.
    """
    B = len(first)
    ends: list[
        dict[int, Whole]
    ] = []  # by environment: the episodes that it would end, by time
    for i in range(B):
        t, ends_of = 0, {}
        for episode in range(first[i], first[i] + n):  # none can contribute more
            whole = Whole(i, episode, length(patterns, i, episode))
            t += whole.length
            ends_of[t] = whole
        ends.append(ends_of)
    timed = _last_even(n, ends) if rule == "last_even" else _by_place(rule, n, ends)
    over = timed[-1][0]
    steps = [min(over, _rests(rule, n, ends, i, timed)) for i in range(B)]
    return Contest(
        [whole for _, whole in timed],
        steps,
        [_stand(first[i], ends[i], steps[i]) for i in range(B)],
    )


End = tuple[int, Whole]


def _by_place(rule: str, n: int, ends: list[dict[int, Whole]]) -> list[End]:
    """The rules that look at the place of an episode among those of its environment, or at nothing."""
    B, ordered = len(ends), [sorted(of_env.items()) for of_env in ends]
    if rule == "first_done":
        everything = [end for of_env in ordered for end in of_env]
        return sorted(everything, key=lambda end: (end[0], end[1].env))[:n]
    if rule == "per_env":
        return sorted(
            (end for i in range(B) for end in ordered[i][: n // B + (i < n % B)]),
            key=lambda end: end[0],
        )
    further = sorted(
        (of_env[n // B] for of_env in ordered if n % B),
        key=lambda end: (end[0], end[1].env),
    )
    shares = [end for of_env in ordered for end in of_env[: n // B]]
    return sorted(shares + further[: n % B], key=lambda end: end[0])


def _last_even(n: int, ends: list[dict[int, Whole]]) -> list[End]:
    """Who ends is let go, lowest first, as soon as there are more environments than episodes to
    come.
    """
    taking_part = list(range(min(n, len(ends))))
    chosen: list[End] = []
    t = 0
    while len(chosen) < n:
        t += 1
        ended = [i for i in taking_part if t in ends[i]]
        chosen += [(t, ends[i][t]) for i in ended]
        surplus = max(0, len(taking_part) - (n - len(chosen)))
        for i in ended[:surplus]:
            taking_part.remove(i)
    return chosen


def _rests(
    rule: str, n: int, ends: list[dict[int, Whole]], i: int, chosen: list[End]
) -> int:
    """After how many steps nothing is expected of environment ``i`` any more."""
    B = len(ends)
    own = [t for t, whole in chosen if whole.env == i]
    if rule == "first_done":
        return 1 << 60
    if rule in ("per_env", "last_even"):
        return max(own, default=0)
    times, further = (
        sorted(ends[i]),
        sorted(t for t, whole in chosen if _place(whole, ends) == n // B),
    )
    all_taken = further[-1] if further else 0
    for place, t in enumerate(times, 1):
        if place > n // B or (place == n // B and t >= all_taken):
            return t
    raise AssertionError("n episodes are enough")


def _place(whole: Whole, ends: list[dict[int, Whole]]) -> int:
    return whole.episode - min(w.episode for w in ends[whole.env].values())


def _stand(first: int, ends: dict[int, Whole], steps: int) -> tuple[int, int]:
    over = [t for t in ends if t <= steps]
    return first + len(over), steps - max(over, default=0)


def walk(
    shown: list[list[list[float]]], at: list[tuple[int, int]], patterns: Patterns
) -> tuple[list[tuple[int, int]], list[Whole]]:
    """See that rows ``[environments, T]`` of observations follow each other.

    Args:
        at: episode and step that each environment is in before them.

    Returns:
        the same after them, and the episodes that ended, in the order of their ends.
    """
    at, ended = list(at), []
    for t in range(len(shown[0])):
        for env, (episode, step) in enumerate(at):
            assert shown[env][t][:3] == [env, episode, step]
            at[env] = episode, step + 1
            if step + 1 == length(patterns, env, episode):
                ended.append(Whole(env, episode, step + 1))
                at[env] = episode + 1, 0
    return at, ended


def wholes(batch: Any, patterns: Patterns) -> list[Whole]:
    """The episodes of a batch ``[frames]``; checks that each is whole, and that everything in it
    fits.
    """
    assert batch.names == ["time"]
    done = batch["next", "done"].squeeze(-1)
    pieces = batch.split((np.diff(np.flatnonzero([True, *done.tolist()]))).tolist())
    assert bool(done[-1]), "it ends with an episode"
    return [_whole(piece, patterns) for piece in pieces]


def _whole(piece: Any, patterns: Patterns) -> Whole:
    env, episode = (int(value) for value in piece["observation"][0, :2])
    n = length(patterns, env, episode)
    assert len(piece) == n, (
        f"episode {episode} of environment {env} has {n} steps, and not {len(piece)}"
    )
    assert piece["observation"][:, :3].tolist() == [[env, episode, t] for t in range(n)]
    assert piece["next", "observation"][:, :3].tolist() == [
        [env, episode, t + 1] for t in range(n)
    ]
    assert piece["next", "reward"].squeeze(-1).tolist() == [
        100 * episode + t + 1 for t in range(n)
    ]
    last = [False] * (n - 1) + [True]
    odd = episode % 2 == 1
    for flag, expected in (("done", True), ("terminated", not odd), ("truncated", odd)):
        assert piece["next", flag].squeeze(-1).tolist() == [
            expected and at_end for at_end in last
        ]
        assert not piece[flag].any()
    assert len(piece["collector", "traj_ids"].unique()) == 1
    return Whole(env, episode, n)
