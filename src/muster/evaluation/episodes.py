"""The episodes of an evaluation."""

from __future__ import annotations

from typing import NamedTuple


class EvaluatedEpisode(NamedTuple):
    """A complete episode.

    Attributes:
        env_id: number of the environment.
        episode: number of the episode in its environment, from 0.
        seed: seed of its reset: ``env.reset(seed=seed)`` and the same actions repeat it. None: the
            environment used its own generators (only batches of environments do, after their first
            episode).
        begin: time step of the evaluation at its start.
        episode_return: undiscounted sum of rewards as stored (float32), added up in float64.
        length: number of steps.
        terminated, truncated: flags of the last step.
        version: version of the weights that acted.
    """

    env_id: int
    episode: int
    seed: int | None
    begin: int
    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    version: int | str


class UnfinishedEpisode(NamedTuple):
    """An episode that could have counted, but was not complete at the end of the evaluation.

    Attributes:
        env_id, episode, seed: see ``EvaluatedEpisode``.
        steps: number of steps so far.
        return_so_far: sum of its rewards so far; NaN if batches do not contain the reward used for
            returns.
    """

    env_id: int
    episode: int
    seed: int | None
    steps: int
    return_so_far: float
