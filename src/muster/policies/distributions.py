"""The distributions of heads that torch has not, or that are faster than torch's.

Parameters come from a network that has just computed them, and values from a batch. Each has a ``mode``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch.distributions import constraints

from muster.policies.sampling import split_index

FAR = 40.0  # standard deviations, beyond which float32 has no probability


class Choices(D.Distribution):
    """Choices of several variables as one action of shape ``shape``; choices are numbered from
    ``low``.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as in torch

    def __init__(
        self,
        logits: torch.Tensor,
        low: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> None:
        self.low = torch.tensor(low, device=logits.device)
        super().__init__(
            logits.shape[:-1],
            torch.Size(shape),
            validate_args=False,
        )

    def _action(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the action of the choices ``[*batch, variables]``, numbered from 0."""
        lead = indices.shape[:-1]
        return (indices + self.low).reshape((*lead, *self.event_shape))

    def _indices_of(self, action: torch.Tensor) -> torch.Tensor:
        """Return the choices of an action, as ``_action`` takes them."""
        dims = action.ndim - len(self.event_shape)
        lead = action.shape[:dims]
        return action.reshape(*lead, -1) - self.low


class Categoricals(Choices):
    """Independent categorical variables, as one action of shape ``shape``; choices are numbered
    from ``low``.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        nvec: tuple[int, ...],
        low: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> None:
        logits_of = torch.split(logits, list(nvec), -1)
        self.parts = [D.Categorical(logits=part) for part in logits_of]
        super().__init__(logits, low, shape)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        size = torch.Size(sample_shape)
        choices = [part.sample(size) for part in self.parts]  # type: ignore[no-untyped-call]
        return self._action(torch.stack(choices, -1))

    @property
    def mode(self) -> torch.Tensor:
        modes = [part.mode for part in self.parts]
        return self._action(torch.stack(modes, -1))

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        indices = self._indices_of(value).unbind(-1)
        log_probs = []
        for part, of_part in zip(self.parts, indices, strict=True):
            log_probs.append(part.log_prob(of_part))  # type: ignore[no-untyped-call]
        return torch.stack(log_probs).sum(0)

    def entropy(self) -> torch.Tensor:
        entropies = [part.entropy() for part in self.parts]  # type: ignore[no-untyped-call]
        return torch.stack(entropies).sum(0)


def joint_logits(
    logits: torch.Tensor,
    nvec: tuple[int, ...],
    agents: int = 1,
) -> torch.Tensor:
    """Return the logit of each combination of choices, ``[*batch, prod(nvec)]``, from those of the
    variables.

    With several agents, of each one's combinations, one agent after another; ``nvec`` are the
    variables of all.
    """
    lead = logits.shape[:-1]
    own = nvec[: len(nvec) // agents]
    own_logits = logits.reshape(*lead, agents, -1)
    first, *others = torch.split(own_logits, list(own), -1)
    joint = first
    for part in others:
        pairs = joint.unsqueeze(-1) + part.unsqueeze(-2)
        joint = pairs.flatten(-2)
    return joint.flatten(-2)


class JointCategoricals(Choices):
    """A categorical distribution of combinations of choices, as one action of shape ``shape``; see
    ``Categoricals``.

    ``logits`` are those of combinations, in C order; of several agents with equal spaces, one after
    another.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        nvec: tuple[int, ...],
        low: tuple[int, ...],
        shape: tuple[int, ...],
        agents: int,
    ) -> None:
        variables = len(nvec) // agents
        self._nvec = nvec[:variables]
        lead = logits.shape[:-1]
        of_agents = logits.reshape(*lead, agents, -1)
        self.combinations = D.Categorical(logits=of_agents)  # [*batch, agents]
        super().__init__(logits, low, shape)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        size = torch.Size(sample_shape)
        number = self.combinations.sample(size)  # type: ignore[no-untyped-call]
        return self._action_of(number)

    @property
    def mode(self) -> torch.Tensor:
        return self._action_of(self.combinations.mode)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        indices = self._indices_of(value)
        lead = indices.shape[:-1]
        by_variable = indices.reshape(*lead, -1, len(self._nvec))
        number, *others = by_variable.unbind(-1)
        for choice, n in zip(others, self._nvec[1:], strict=True):
            number = number * n + choice
        log_prob: torch.Tensor = self.combinations.log_prob(number)  # type: ignore[no-untyped-call]
        return log_prob.sum(-1)

    def entropy(self) -> torch.Tensor:
        entropy: torch.Tensor = self.combinations.entropy()  # type: ignore[no-untyped-call]
        return entropy.sum(-1)

    def _action_of(self, number: torch.Tensor) -> torch.Tensor:
        """Return the action of the combinations with these numbers, ``[*batch, agents]``."""
        variables = split_index(number, self._nvec)
        by_variable = torch.stack(variables, -1)
        return self._action(by_variable.flatten(-2))


class ClippedNormal(D.Distribution):
    """A normal variable that is clipped to ``[low, high]``, which may be infinite: the probability
    of a bound is that of all that lies beyond it.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as in torch

    def __init__(
        self,
        mean: torch.Tensor,
        std: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
    ) -> None:
        self.normal = D.Normal(mean, std, validate_args=False)
        self.low = low
        self.high = high
        super().__init__(mean.shape, validate_args=False)

    @property
    def mode(self) -> torch.Tensor:
        return self.normal.loc.clamp(self.low, self.high)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        size = torch.Size(sample_shape)
        drawn: torch.Tensor = self.normal.sample(size)  # type: ignore[no-untyped-call]
        return drawn.clamp(self.low, self.high)

    def rsample(self, sample_shape: Any = ()) -> torch.Tensor:
        drawn = self.normal.rsample(torch.Size(sample_shape))
        return drawn.clamp(self.low, self.high)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        below, above, _ = self._tails()
        inside: torch.Tensor = self.normal.log_prob(value)  # type: ignore[no-untyped-call]
        from_low = torch.where(value >= self.high, above, inside)
        return torch.where(value <= self.low, below, from_low)

    def entropy(self) -> torch.Tensor:
        """Of the bounds as events, and of the density between them."""
        below, above, (a, b) = self._tails()
        constant = self.normal.scale.log() + 0.5 * math.log(2 * math.pi)
        within = 1 - below.exp() - above.exp()
        squares = within - b * _density(b) + a * _density(a)
        bounds = -below.exp() * below - above.exp() * above
        return bounds + constant * within + 0.5 * squares

    def _tails(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the log-probabilities of the bounds, and the bounds as standard deviations from
        the mean. Infinite bounds are replaced by far ones, whose gradients are numbers.
        """
        mean = self.normal.loc
        std = self.normal.scale
        far = FAR * std.detach()
        far_below = mean.detach() - far
        far_above = mean.detach() + far
        low = torch.where(self.low.isinf(), far_below, self.low)
        high = torch.where(self.high.isinf(), far_above, self.high)
        a = (low - mean) / std
        b = (high - mean) / std
        below = torch.special.log_ndtr(a)
        above = torch.special.log_ndtr(-b)
        return below, above, (a, b)


def _density(x: torch.Tensor) -> torch.Tensor:
    log_density = -0.5 * x.square() - 0.5 * math.log(2 * math.pi)
    return log_density.exp()


class SquashedNormal(D.Distribution):
    """Independent normal variables squashed by tanh into ``middle - halfwidth`` to ``middle +
    halfwidth``, as one action of the shape of ``mean`` without its first dimensions, ``[*batch]``.

    The log-density is that of Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018),
    appendix C, with ``log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``, which is exact for large
    ``u``, too. That of an action that was just drawn is computed from the ``u`` that was drawn, as in
    ``TransformedDistribution`` of torch, which takes twice as long. The log-density of an action at a
    bound is that of the nearest action inside.

    Args:
        mean: of the normal variables, ``[*batch, *shape]``.
        log_std: logarithm of their standard deviations; the same shape.
        middle: of the interval; expands to ``[*shape]``.
        halfwidth: of the interval; likewise.
        dims: number of dimensions of ``shape``.

    Attributes:
        normal: of the variables before they are squashed; its parameters are checked as torch
            checks them.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as in torch
    has_rsample = True

    def __init__(
        self,
        mean: torch.Tensor,
        log_std: torch.Tensor,
        middle: torch.Tensor,
        halfwidth: torch.Tensor,
        dims: int,
    ) -> None:
        self.normal = D.Normal(mean, log_std.exp())
        self.middle = middle
        self.halfwidth = halfwidth
        self._log_std = log_std
        self._drawn: _Drawn | None = None
        first = mean.ndim - dims
        super().__init__(mean.shape[:first], mean.shape[first:])

    @property
    def support(self) -> constraints.Constraint:
        real = constraints.real
        return constraints.independent(real, len(self.event_shape))  # type: ignore[no-untyped-call]

    @property
    def mode(self) -> torch.Tensor:
        return self._squashed(self.normal.loc)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample(self, sample_shape: Any = ()) -> torch.Tensor:
        mean = self.normal.loc
        shape = torch.Size(sample_shape) + mean.shape
        noise = torch.randn(shape, dtype=mean.dtype, device=mean.device)
        u = torch.addcmul(mean, self.normal.scale, noise)
        action = self._squashed(u)
        self._drawn = _Drawn(action, u, noise)
        return action

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        drawn = self._drawn
        noise: torch.Tensor | None = None
        # an action whose gradients have been turned on since is one of the user's
        is_own = (
            drawn is not None
            and drawn.action is value
            and drawn.u.requires_grad == value.requires_grad
        )
        if drawn is not None and is_own:
            u = drawn.u
            # ``u`` follows the parameters, so the noise is a constant; or ``u`` is the constant, and
            # the noise follows the parameters
            if u.requires_grad or not torch.is_grad_enabled():
                noise = drawn.noise
        else:
            u = self._not_squashed(value)
        if noise is None:  # which checks the value, as torch does
            of_normal = self.normal.log_prob(u)  # type: ignore[no-untyped-call]
        else:
            half_square = 0.5 * noise.square() + 0.5 * math.log(2 * math.pi)
            of_normal = -half_square - self._log_std
        negative_log_slope = 2 * (u + F.softplus(-2 * u)) - 2 * math.log(2)
        densities: torch.Tensor = of_normal + negative_log_slope - self.halfwidth.log()
        dims = tuple(range(-len(self.event_shape), 0))
        return densities.sum(dims) if dims else densities

    def _squashed(self, u: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.middle, self.halfwidth, u.tanh())

    def _not_squashed(self, value: torch.Tensor) -> torch.Tensor:
        limit = 1 - torch.finfo(value.dtype).eps
        squashed = (value - self.middle) / self.halfwidth
        return squashed.clamp(-limit, limit).atanh()


class _Drawn(NamedTuple):
    """The last action, and the normal variables and the noise that it was made of."""

    action: torch.Tensor
    u: torch.Tensor
    noise: torch.Tensor


@D.register_kl(SquashedNormal, SquashedNormal)  # type: ignore[no-untyped-call,untyped-decorator]
def _kl_of_squashed(p: SquashedNormal, q: SquashedNormal) -> torch.Tensor:
    """Return that of the normal variables, since both are squashed by one function."""
    alike = torch.equal(p.middle, q.middle) and torch.equal(p.halfwidth, q.halfwidth)
    if not alike:
        raise NotImplementedError(
            "the divergence of actions with different bounds is not known: bind both heads to the"
            " same action space"
        )
    dims = len(p.event_shape)
    normals = [D.Independent(each.normal, dims) for each in (p, q)]
    return D.kl_divergence(*normals)
