"""Actions of the heads where the environments' rows lie on a device: sampled there, without waiting for it.

The same distributions as in ``sampling``, but noise is torch's, drawn row by row, and nothing checks that the
network's output is finite: that would wait.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from muster.policies.head_modules import LOG_STD_BOUNDS, Categorical, Deterministic, Gaussian, Head, TanhGaussian

Drawn = tuple[torch.Tensor, torch.Tensor | None]


def elsewhere(device: torch.device | None, rows: torch.device | None) -> torch.device | None:
    """``device``, where a policy computes, if rows have to be moved to it; else None."""
    home = torch.empty(0, device=rows).device  # with its index
    return None if device is None or device == home else device


def draw(head: Head, out: torch.Tensor, *, deterministic: bool) -> Drawn:
    """Actions ``[B, n]`` (or ``[B]``) and log-probabilities ``[B]`` from the network's output ``[B, width]``.

    Args:
        head: bound; what it is decides what ``out`` means.
        out: floats.
        deterministic: take the mode.
    """
    out = out.float()
    if isinstance(head, Categorical):
        return _categorical(head, out, deterministic)
    if isinstance(head, Deterministic):
        return (out if head.low is None else out.argmax(-1) + head.low), None
    assert isinstance(head, (Gaussian, TanhGaussian))
    if isinstance(head, Gaussian) and head.log_std is not None:
        mean, log_std = out, head.log_std.reshape(-1).float().expand_as(out)
    else:
        bounds = head.log_std_bounds if isinstance(head, TanhGaussian) else LOG_STD_BOUNDS
        mean, log_std = out.chunk(2, -1)
        log_std = log_std.clamp(*bounds)
    noise = torch.zeros_like(mean) if deterministic else torch.randn_like(mean)
    u = mean + log_std.exp() * noise
    log_prob = (-0.5 * noise.square() - log_std).sum(-1) - 0.5 * mean.shape[-1] * math.log(2 * math.pi)
    if isinstance(head, Gaussian):
        return u, log_prob
    half, middle = head.halfwidth.reshape(-1), head.middle.reshape(-1)
    slope = half.log() + 2 * (math.log(2) - u - F.softplus(-2 * u))
    action = (middle + half * u.tanh()).clamp(middle - half, middle + half)  # rounding could leave the interval
    return action, log_prob - slope.sum(-1)


def _categorical(head: Categorical, out: torch.Tensor, deterministic: bool) -> Drawn:
    """Gumbel's way: ``torch.multinomial`` would wait, to check its input."""
    assert head.nvec is not None and head.low is not None
    actions, log_probs = [], []
    for logits, low in zip(torch.split(out, list(head.nvec), -1), head.low, strict=True):
        log_prob = logits.log_softmax(-1)
        noisy = log_prob if deterministic else log_prob - torch.empty_like(log_prob).exponential_().log()
        index = noisy.argmax(-1, keepdim=True)
        actions.append(index + low)
        log_probs.append(log_prob.gather(-1, index))
    return torch.cat(actions, -1), torch.cat(log_probs, -1).sum(-1)
