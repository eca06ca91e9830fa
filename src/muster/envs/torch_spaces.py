"""Gymnasium spaces of environments on tensors: one environment's space, and random values on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from muster.errors import UnsupportedSpace
from muster.memory.slots import torch_dtype
from muster.memory.specs import ArraySpec

Draw = Callable[[torch.Generator], torch.Tensor]


def drawing(spec: ArraySpec, B: int, on: torch.device) -> Draw:
    """Values for B environments, distributed as by ``SpaceCodec.sample``."""
    assert spec.low is not None and spec.high is not None
    size, dtype = (B, *spec.shape), torch_dtype(spec.dtype)
    low, high = (torch.as_tensor(np.array(x, np.float64), device=on) for x in (spec.low, spec.high))

    def uniform(generator: torch.Generator) -> torch.Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64, device=on)

    if spec.dtype.kind in "iub":
        return lambda g: torch.minimum(low + (uniform(g) * (high - low + 1)).floor(), high).to(dtype)
    below, above = low.isfinite(), high.isfinite()
    low0, high0 = low.where(below, torch.zeros_like(low)), high.where(above, torch.zeros_like(high))

    def floats(generator: torch.Generator) -> torch.Tensor:
        u = uniform(generator)
        normal = torch.randn(size, generator=generator, dtype=torch.float64, device=on)
        tail = -torch.log1p(-u)
        one_sided = torch.where(below, low0 + tail, high0 - tail)
        both = low0 + u * (high0 - low0)
        return torch.where(below & above, both, torch.where(below | above, one_sided, normal)).to(dtype)

    return floats


def single_space(env: Any, name: str, B: int) -> spaces.Space[Any]:
    """The space of one environment; wrappers know the batch's only."""
    base, batched = getattr(env, "unwrapped", env), getattr(env, name, None)
    if hasattr(env, f"single_{name}") or batched is getattr(base, name, None):
        space = getattr(env, f"single_{name}", getattr(base, f"single_{name}", None))
        if isinstance(space, spaces.Space):
            return space
    return _unbatched(batched, B)


def _unbatched(space: Any, B: int) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _unbatched(part, B) for key, part in space.spaces.items()})
    if not isinstance(space, (spaces.Box, spaces.MultiDiscrete)) or space.shape[:1] != (B,):
        raise UnsupportedSpace(
            f"{space} is no space of {B} environments: give the environment single_observation_space and "
            f"single_action_space"
        )
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)
    if space.nvec.ndim == 1:
        return spaces.Discrete(int(space.nvec[0]), start=int(space.start[0]))
    return spaces.MultiDiscrete(space.nvec[0], start=space.start[0])
