"""Running means and variances of observations and returns, exact over all batches of a collection."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from muster.errors import BadOption
from muster.keys import MASK, TRAJ_IDS, VALID, dotted


class RunningNorm(nn.Module):
    """A first layer that normalises observations: ``(x - mean) / sqrt(variance + eps)``, clipped.

    Its statistics are buffers of the policy. So they are published with its weights and have their
    version, are in its ``state_dict`` and in the state of a collector, and act wherever the policy
    acts. Batches have raw observations::

        norm = policies.RunningNorm(4)
        actor = policies.categorical(nn.Sequential(norm, nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)))
        for batch in collector:
            ...  # train first: the batch was collected with the statistics that the policy has now
            norm.update(batch["observation"])
            collector.update_policy_weights_()

    The statistics do not depend on how the observations are divided into batches, up to rounding in
    float64: parts are merged as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979). Before the first ``update`` the layer only
    clips.

    Args:
        shape: shape of an observation.
        clip: largest absolute value of the result.
        eps: added to the variance.

    Attributes:
        count: number of observations, a float64 scalar.
        mean, m2: mean and sum of squared deviations, float64 ``[*shape]``.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self,
        shape: int | tuple[int, ...],
        *,
        clip: float = 10.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        if not (clip > 0 and eps >= 0):
            raise BadOption(
                f"RunningNorm(clip={clip!r}, eps={eps!r}): expected clip > 0 and eps >= 0"
            )
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.clip = clip
        self.eps = eps
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(self.shape))
        self.register_buffer("shift", torch.zeros(self.shape))

    @property
    def variance(self) -> torch.Tensor:
        """The variance (of the population), float64 ``[*shape]``; 0 before the first ``update``."""
        return self.m2 / self.count.clamp(min=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise observations ``[..., *shape]`` of any dtype; the result has the layer's
        (float32).
        """
        normalised = (x.to(self.shift.dtype) - self.shift) * self.scale
        return normalised.clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(
        self,
        observations: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Add observations.

        Args:
            observations: ``[..., *shape]``, any dtype.
            mask: bool ``[...]``; which of them count, e.g. ``batch.get(("collector", "valid"),
                None)``. None: all.

        Raises:
            BadOption: they have another shape, or contain NaN or infinity. Nothing was changed.
        """
        observations = torch.as_tensor(observations)
        lead = observations.ndim - len(self.shape)
        if lead < 0 or tuple(observations.shape[lead:]) != self.shape:
            raise BadOption(
                f"RunningNorm.update: expected observations of shape {self.shape}, got"
                f" {tuple(observations.shape)}"
            )
        if mask is None:
            rows = observations.reshape(
                math.prod(observations.shape[:lead]), *self.shape
            )
        else:
            rows = observations[torch.as_tensor(mask).bool()]
        rows = rows.to(self.mean)
        if not len(rows):
            return
        if not rows.isfinite().all():
            raise BadOption(
                "RunningNorm.update: the observations contain NaN or infinity"
            )
        mean = rows.mean(0)
        total = self.count + len(rows)
        delta = mean - self.mean
        between = delta.square() * (self.count * len(rows) / total)
        self.m2 += (rows - mean).square().sum(0) + between
        self.mean += delta * (len(rows) / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.variance + self.eps).rsqrt())

    def extra_repr(self) -> str:
        return f"{self.shape}, clip={self.clip}, eps={self.eps}"


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of discounted returns, as SB3's ``VecNormalize``
    does.

    The return of a row is the discounted sum of the rewards of its trajectory so far. Trajectories
    continue from batch to batch, from any worker::

        scaler = policies.RewardScaler(gamma=0.99)
        for batch in collector:
            scaler.update(batch)
            rewards = scaler(batch["next", "reward"])

    Args:
        gamma: discount, from 0 to 1.
        clip: largest absolute value of a scaled reward.
        eps: added to the variance.

    Attributes:
        returns: the statistics of the returns.
        open: the return so far of each unfinished trajectory, by ``("collector", "traj_ids")``.
    """

    def __init__(
        self,
        gamma: float,
        *,
        clip: float = 10.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise BadOption(
                f"RewardScaler(gamma={gamma!r}): expected a discount from 0 to 1"
            )
        self.gamma = gamma
        self.returns = RunningNorm((), clip=clip, eps=eps)
        self.open: dict[int, float] = {}

    def forward(self, rewards: torch.Tensor) -> torch.Tensor:
        """Scale rewards of any shape."""
        norm = self.returns
        if not norm.count:
            return rewards
        return (rewards * norm.scale).clamp(-norm.clip, norm.clip)

    def update(self, batch: Any) -> None:
        """Add the rows of a batch, time last (as every batch of a collector). Padding does not count.

        Raises:
            BadOption: a reward is NaN or infinite, or the batch has no trajectory ids. Nothing was
                changed.
        """
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise BadOption(
                f"RewardScaler.update: the batch has no {dotted(TRAJ_IDS)}, which say what belongs"
                " together: track_traj_ids=True"
            )
        counts = ids >= 0
        for key in (VALID, MASK):
            flags = batch.get(key, None)
            if flags is not None:
                counts = counts & flags
        rows = batch[counts]  # each trajectory's rows are in order
        numbers = rows[TRAJ_IDS].flatten().tolist()
        rewards = rows["next", "reward"].flatten().tolist()
        dones = rows["next", "done"].flatten().tolist()
        found = []
        now = dict(self.open)
        for number, reward, done in zip(numbers, rewards, dones, strict=True):
            now[number] = now.get(number, 0.0) * self.gamma + reward
            found.append(now[number])
            if done:
                del now[number]
        self.returns.update(torch.tensor(found, dtype=torch.float64, device="cpu"))
        self.open = now

    def get_extra_state(self) -> dict[int, float]:
        return dict(self.open)

    def set_extra_state(self, state: dict[int, float]) -> None:
        self.open = dict(state)
