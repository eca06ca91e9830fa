"""Single Gymnasium environments of which every episode begins with a seed of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium

from muster.attributes import name_of
from muster.envs.build import is_single


class EpisodeSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """After ``reset(seed=s)``, resets without a seed have ``s + stride``, ``s + 2 * stride`` and so on.

    Episodes then depend neither on those before them nor on how many environments share the work, and each can be
    repeated by itself.

    Attributes:
        seeds_episodes: True; environments made otherwise have no such attribute.
    """

    seeds_episodes = True

    def __init__(self, env: gymnasium.Env[Any, Any], stride: int) -> None:
        super().__init__(env)
        self._stride, self._next = stride, None  # type: int, int | None
        self.step = env.step  # type: ignore[method-assign]  # without a call in between

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seed = self._next if seed is None else seed
        self._next = None if seed is None else seed + self._stride
        return self.env.reset(seed=seed, options=options)

    @property
    def spec(self) -> Any:  # type: ignore[override]  # which is one there, too
        return self.env.spec


@dataclass(frozen=True)
class SeedingMaker:
    """Makes what ``source`` makes, with ``EpisodeSeeds`` around single Gymnasium environments.

    Args:
        source: an id, or a function.
        stride: number of environments that share the seeds.
    """

    source: Any
    stride: int

    def __call__(self, **kwargs: Any) -> Any:
        make: Any = gymnasium.make
        env = make(self.source, **kwargs) if isinstance(self.source, str) else self.source(**kwargs)
        return EpisodeSeeds(env, self.stride) if is_single(env) else env

    @property
    def __name__(self) -> str:
        return self.source if isinstance(self.source, str) else name_of(self.source)
