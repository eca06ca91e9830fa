"""Distributions that torch lacks, for the heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch.distributions import constraints


class Squash(D.Transform):
    """``middle + halfwidth * tanh(u)``, with the log-determinant from ``u`` so that it is exact in the tails."""

    domain = constraints.real
    codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, middle: torch.Tensor, halfwidth: torch.Tensor) -> None:
        super().__init__(cache_size=1)
        self.middle, self.halfwidth = middle, halfwidth

    def _call(self, u: torch.Tensor) -> torch.Tensor:
        return self.middle + self.halfwidth * u.tanh()

    def _inverse(self, action: torch.Tensor) -> torch.Tensor:
        limit = 1 - torch.finfo(action.dtype).eps
        return ((action - self.middle) / self.halfwidth).clamp(-limit, limit).atanh()

    def log_abs_det_jacobian(self, u: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.halfwidth.log() + 2 * (math.log(2) - u - F.softplus(-2 * u))


class Categoricals(D.Distribution):
    """Independent categorical variables, as one action of shape ``shape``; the first choice is called ``low``."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  torch's way

    def __init__(
        self, logits: torch.Tensor, nvec: tuple[int, ...], low: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        self.parts = [D.Categorical(logits=part) for part in torch.split(logits, list(nvec), -1)]
        self.low = torch.tensor(low, device=logits.device)
        super().__init__(logits.shape[:-1], torch.Size(shape), validate_args=False)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        return self._action([part.sample(torch.Size(sample_shape)) for part in self.parts])  # type: ignore[no-untyped-call]

    @property
    def mode(self) -> torch.Tensor:
        return self._action([part.mode for part in self.parts])

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        lead = value.shape[: value.ndim - len(self.event_shape)]
        index = (value.reshape(*lead, -1) - self.low).unbind(-1)
        log_probs = [part.log_prob(i) for part, i in zip(self.parts, index, strict=True)]  # type: ignore[no-untyped-call]
        return torch.stack(log_probs).sum(0)

    def entropy(self) -> torch.Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)  # type: ignore[no-untyped-call]

    def _action(self, parts: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(parts, -1) + self.low
        return stacked.reshape((*stacked.shape[:-1], *self.event_shape))
