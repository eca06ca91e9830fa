"""The seeds with which the episodes of a group begin (``episode_seeds``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muster.env_spec import EnvSpec
from muster.episodes.clock import AgentClock, TrajectoryClock
from muster.errors import BadCheckpoint, UnsupportedEnv
from muster.memory.specs import Array
from muster.rng import entries
from muster.rollout.options import RolloutOptions


class EpisodeSeeding:
    """The seeds with which the episodes of a group begin.

    Episode k of an environment has a place in the list that its trajectory id determines, so it has
    the same seed wherever the group runs, and after a restart of its worker.

    Args:
        options: with the list (``episode_seeds``); without it, episodes have no seeds besides those
            of ``set_seed``.
        spec: of the group's env batch.
        clock: of the group.
        tells: environments are reset by their group only.

    Attributes:
        current: seeds of the current episodes, ``[B]`` int64; -1: none.

    Raises:
        UnsupportedEnv: the environments cannot be reset with a seed one by one, or
            ``track_seeds`` cannot know the resets.
    """

    def __init__(
        self,
        options: RolloutOptions,
        spec: EnvSpec,
        clock: TrajectoryClock | AgentClock,
        *,
        tells: bool,
    ) -> None:
        chosen = options.episode_seeds
        self._chosen = chosen
        self._clock = clock
        self._tracks = options.track_seeds
        self.current = np.full(spec.num_envs, -1, np.int64)
        # number of the episode that has the list's first seeds
        self._first = np.zeros(spec.num_envs, np.int64)
        # environments whose next episode has the list's first seeds
        self._restarts = np.zeros(spec.num_envs, bool)
        if chosen is not None and not spec.seeds_episodes:
            raise UnsupportedEnv(
                f"episode_seeds: {spec.name} cannot be reset with a seed for each episode of each"
                " environment. Leave the option out, or give an id or a function that makes one"
                " environment"
            )
        if self._tracks and (not tells or spec.agents or spec.ready is not None):
            raise UnsupportedEnv(
                f"track_seeds: {spec.name} resets its environments itself, so the seeds of their"
                " episodes are not known. Leave the option out"
            )

    @property
    def is_chosen(self) -> bool:
        """Whether all seeds are those of the list."""
        return self._chosen is not None

    def restart(self) -> None:
        """Begin with the list's first seeds again at the next resets."""
        self._restarts[...] = True

    def seeds_of(
        self,
        which: Sequence[int],
        given: Sequence[int] | None,
        ended: Array | None = None,
    ) -> Sequence[int] | None:
        """Return the seeds of the episodes that begin now in the environments ``which``.

        Args:
            given: seeds of ``set_seed``, which are used without a list.
            ended: number of episodes of each environment that have ended since the clock was
                advanced, ``[B]``; None: none.
        """
        if self._chosen is None:
            return given
        episode = self._clock.episode if ended is None else self._clock.episode + ended
        again = [i for i in which if self._restarts[i]]
        self._first[again] = episode[again]
        self._restarts[again] = False
        number = episode - self._first
        places = self._clock.env_ids + self._clock.total_envs * number
        return entries(self._chosen, places[list(which)].tolist())

    def note(self, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Note that environments were reset, with these seeds or without."""
        if self._tracks:
            self.current[list(which)] = -1 if seeds is None else seeds

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all variables."""
        return {
            "first": self._first.copy(),
            "restarts": self._restarts.copy(),
            "current": self.current.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore ``state_dict()``; None: a state of before there were seeds of episodes."""
        if state is None:
            self._first[...] = 0
            self._restarts[...] = False
            self.current[...] = -1
            return
        first = np.asarray(state["first"])
        restarts = np.asarray(state["restarts"])
        if first.shape != self._first.shape or restarts.shape != self._restarts.shape:
            raise BadCheckpoint(
                f"seeds of {first.size} environments, and there are {self._first.size}"
            )
        self._first[...] = first
        self._restarts[...] = restarts
        self.current[...] = state.get("current", -1)
