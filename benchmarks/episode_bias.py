"""What rules for a number of episodes make of the mean return: the tables of
``docs/evaluation.md``, as Markdown.

    python -m benchmarks.episode_bias

An episode has 10 steps and return 1, or 100 steps and return 0. Either each is one or the other
with probability 1/2, whatever the environment; or half of the environments have only the short
ones, and half only the long ones. In both cases the true mean is 0.5. Seeded; takes a few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from muster.episodes.rules import RuleName, make_rule

SHORT, LONG = 10, 100
COUNTED = 60_000  # episodes in each mean
CASES = (
    (8, 4),
    (8, 12),
    (8, 32),
    (8, 128),
    (32, 16),
    (32, 32),
    (32, 48),
    (32, 128),
)  # environments, episodes

Lengths = Callable[[int], int]


def alike(rng: np.random.Generator, _: int) -> Lengths:
    """Every episode of every environment is short or long with probability 1/2."""
    return lambda env: SHORT if rng.random() < 0.5 else LONG


def different(rng: np.random.Generator, num_envs: int) -> Lengths:
    """Half of the environments (others in each run) have short episodes only."""
    place = rng.permutation(num_envs)
    return lambda env: SHORT if place[env] < num_envs // 2 else LONG


def counted(
    name: RuleName, episodes: int, num_envs: int, lengths: Lengths
) -> Iterator[int]:
    """Lengths of the episodes that a rule counts; all environments begin together."""
    rule = make_rule(name, episodes, num_envs)
    length = [lengths(i) for i in range(num_envs)]
    end = list(length)
    while not rule.complete:
        now = min(end)
        which = [i for i in range(num_envs) if end[i] == now]
        yield from (length[i] for i in rule.ended(which))
        for i in which:
            length[i] = lengths(i)
            end[i] += length[i]


def mean_return(
    name: RuleName, episodes: int, num_envs: int, kind: Callable[..., Lengths]
) -> tuple[float, float]:
    """Over all runs, and its standard error."""
    rng = np.random.default_rng([episodes, num_envs])
    means = [
        np.mean(
            [
                length == SHORT
                for length in counted(name, episodes, num_envs, kind(rng, num_envs))
            ]
        )
        for _ in range(COUNTED // episodes)
    ]
    return float(np.mean(means)), float(np.std(means) / math.sqrt(len(means)))


def main() -> None:
    worst = 0.0
    for kind in (alike, different):
        print(f"\n{kind.__name__}: {kind.__doc__}\n")
        print(
            "| B | n | " + " | ".join(f"`{name}`" for name in get_args(RuleName)) + " |"
        )
        print("|---|---|" + "---|" * len(get_args(RuleName)))
        for num_envs, episodes in CASES:
            results = [
                mean_return(name, episodes, num_envs, kind)
                for name in get_args(RuleName)
            ]
            worst = max(worst, *(error for _, error in results))
            print(
                f"| {num_envs} | {episodes} | "
                + " | ".join(f"{mean:.2f}" for mean, _ in results)
                + " |"
            )
    print(f"\nThe standard error is {worst:.3f} at most")


if __name__ == "__main__":
    main()
