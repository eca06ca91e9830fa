"""Uniform random actions, drawn for a whole rollout at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from muster.errors import MusterError
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, Column
from muster.protocols import Act, Outputs
from muster.rng import GroupRng

if TYPE_CHECKING:
    import torch
else:
    from muster import lazy_torch as torch

Sample = Callable[[GroupRng, tuple[int, ...]], dict[Key, Array]]


class RandomPolicy:
    """Implements ``Policy`` with the action space's own distribution.

    Args:
        sample: ``sample(rng, shape)`` returns ``[*shape, *leaf shape]`` per action leaf.
        batch_shape: see ``Layout``.
    """

    name = path = "random"
    draws_globally = False
    raises = (MusterError,)  # that of the environments, which draw the actions

    def __init__(self, sample: Sample, batch_shape: tuple[int, ...]) -> None:
        self._sample = sample
        self._shape = batch_shape

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        drawn = self._sample(rng, self._shape)
        tensors = {key: torch.as_tensor(a) for key, a in drawn.items() if a.dtype != OBJECT}
        return Outputs(tensors, objects={key: a for key, a in drawn.items() if a.dtype == OBJECT})

    def columns(self) -> Sequence[Column]:
        return ()

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        """Fills the action rows that are still to be acted on; ``act`` then has nothing left to do."""
        begin = lane.acts_from
        for key, drawn in self._sample(rng, (lane.T - begin, lane.B)).items():
            lane.data[key][begin:] = drawn
        return _nothing


def _nothing(t: int) -> None:
    pass
