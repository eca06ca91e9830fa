"""The modules behind ``muster.policies.categorical(net)`` and the other heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import distributions as D
from torch import nn

from muster.errors import BadOption
from muster.memory.specs import ArraySpec
from muster.policies import sampling
from muster.policies.distributions import Categoricals, Squash
from muster.policies.sampling import Emit, Rows

LOG_STD_BOUNDS = (-20.0, 2.0)


class Head(nn.Module):
    """A network and what its output means. ``net`` gets the observation (or a dict of its leaves)."""

    name = "head"
    has_log_prob = True

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.action_shape: tuple[int, ...] | None = None  # one environment's; known once bound

    def forward(self, obs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sample: ``(action, {"action_log_prob": ...})``."""
        distribution = self.distribution(obs)
        action = distribution.sample()
        return action, {"action_log_prob": distribution.log_prob(action)}

    def distribution(self, obs: Any) -> D.Distribution:
        """Over the environment's own actions: ``log_prob`` and ``entropy`` are ``[*batch]``."""
        raise NotImplementedError

    def mode(self, obs: Any) -> torch.Tensor:
        """The action without randomness."""
        raise NotImplementedError

    def bind(self, spec: ArraySpec) -> int:
        """Take shape and bounds from the action space.

        Returns:
            The number of values per environment that the network must return.

        Raises:
            BadOption: the head is for another kind of space.
        """
        raise NotImplementedError

    def emitter(self, rows: Rows, first: int, rng: np.random.Generator | None) -> Emit:
        """How to turn the network's output into rows, from row ``first`` on; ``rng=None`` for the mode."""
        raise NotImplementedError

    def needs(self, spec: ArraySpec) -> str:
        """Why the network must return what it must, for messages."""
        return f"the action space has {spec}"

    def _refuse(self, spec: ArraySpec, takes: str, instead: str) -> BadOption:
        return BadOption(f"{self.name}: for {takes}, but the action space has {spec}. Use {instead}.")

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """``[*batch, n]`` as ``[*batch, *action_shape]``."""
        return flat if self.action_shape is None else flat.reshape((*flat.shape[:-1], *self.action_shape))

    def _event_dims(self) -> int:
        return 1 if self.action_shape is None else len(self.action_shape)


class Categorical(Head):
    """See ``categorical``."""

    name = "categorical"

    def __init__(self, net: nn.Module, nvec: tuple[int, ...] | None) -> None:
        super().__init__(net)
        self.nvec = nvec
        self.low: tuple[int, ...] | None = None

    def distribution(self, obs: Any) -> D.Distribution:
        logits = self.net(obs)
        if self.nvec is None or (self.action_shape == () and self.low == (0,)):
            return D.Categorical(logits=logits)
        shape = (len(self.nvec),) if self.action_shape is None else self.action_shape
        return Categoricals(logits, self.nvec, self.low or (0,) * len(self.nvec), shape)

    def mode(self, obs: Any) -> torch.Tensor:
        return self.distribution(obs).mode

    def bind(self, spec: ArraySpec) -> int:
        choices, low = _choices(self, spec, "gaussian(net) or tanh_gaussian(net)")
        if self.nvec is not None and self.nvec != choices:
            raise BadOption(
                f"categorical: nvec={self.nvec}, but the action space has {choices} choices. Leave nvec out."
            )
        self.nvec, self.low, self.action_shape = choices, low, spec.shape
        return sum(choices)

    def needs(self, spec: ArraySpec) -> str:
        assert self.nvec is not None  # bound
        space = f"Discrete({self.nvec[0]})" if spec.shape == () else f"several variables, with {self.nvec} choices"
        return f"one logit per choice, and the action space is {space}"

    def emitter(self, rows: Rows, first: int, rng: np.random.Generator | None) -> Emit:
        assert self.nvec is not None and self.low is not None  # bound
        return sampling.categorical(rows, first, nvec=self.nvec, low=np.array(self.low), rng=rng)


class Gaussian(Head):
    """See ``gaussian``."""

    name = "gaussian"

    def __init__(self, net: nn.Module, log_std: float | torch.Tensor | None) -> None:
        super().__init__(net)
        if isinstance(log_std, (int, float)):
            log_std = nn.Parameter(torch.full((_outputs(net),), float(log_std)))
        if isinstance(log_std, nn.Parameter):
            self.log_std: torch.Tensor | None = log_std
        else:
            self.register_buffer("log_std", log_std)

    def distribution(self, obs: Any) -> D.Distribution:
        mean, log_std = self._parameters_at(obs)
        return D.Independent(D.Normal(self._shaped(mean), self._shaped(log_std.exp())), self._event_dims())

    def mode(self, obs: Any) -> torch.Tensor:
        return self._shaped(self._parameters_at(obs)[0])

    def bind(self, spec: ArraySpec) -> int:
        self.action_shape = _continuous(self, spec)
        n = math.prod(spec.shape)
        if self.log_std is None:
            return 2 * n
        if self.log_std.numel() not in (1, n):
            raise BadOption(
                f"gaussian: log_std has {self.log_std.numel()} entries, but the action space has {n}. "
                f"Pass log_std=torch.zeros({n})."
            )
        return n

    def emitter(self, rows: Rows, first: int, rng: np.random.Generator | None) -> Emit:
        if self.log_std is None:
            return sampling.gaussian_by_state(rows, first, log_std_bounds=LOG_STD_BOUNDS, squash=None, rng=rng)
        log_std = self.log_std.detach().to("cpu", torch.float32).numpy().reshape(-1)
        n = rows.matrix[0].shape[1]
        return sampling.gaussian(rows, first, log_std=np.broadcast_to(log_std, (n,)), rng=rng)

    def _parameters_at(self, obs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(obs)
        if self.log_std is None:
            return _mean_and_log_std(out, LOG_STD_BOUNDS)
        return out, self.log_std.reshape(-1).expand_as(out)


class TanhGaussian(Head):
    """See ``tanh_gaussian``."""

    name = "tanh_gaussian"

    def __init__(self, net: nn.Module, log_std_bounds: tuple[float, float]) -> None:
        super().__init__(net)
        self.log_std_bounds = log_std_bounds
        # Not in the state_dict: they belong to the environment, not to what was learned.
        self.register_buffer("middle", torch.zeros(()), persistent=False)
        self.register_buffer("halfwidth", torch.ones(()), persistent=False)
        self.middle: torch.Tensor
        self.halfwidth: torch.Tensor

    def distribution(self, obs: Any) -> D.Distribution:
        mean, log_std = _mean_and_log_std(self.net(obs), self.log_std_bounds)
        base = D.Independent(D.Normal(self._shaped(mean), self._shaped(log_std.exp())), self._event_dims())
        return D.TransformedDistribution(base, [Squash(self.middle, self.halfwidth)])

    def mode(self, obs: Any) -> torch.Tensor:
        mean, _ = _mean_and_log_std(self.net(obs), self.log_std_bounds)
        return Squash(self.middle, self.halfwidth)(self._shaped(mean))  # type: ignore[no-any-return]

    def bind(self, spec: ArraySpec) -> int:
        self.action_shape = _continuous(self, spec)
        if spec.low is None or spec.high is None or not np.isfinite([*spec.low.flat, *spec.high.flat]).all():
            raise BadOption(
                "tanh_gaussian: the action space is unbounded, there is no interval to squash to. Use gaussian(net), "
                "or bound the space (gymnasium.wrappers.RescaleAction)."
            )
        low, high = (torch.as_tensor(np.broadcast_to(bound, spec.shape).copy()) for bound in (spec.low, spec.high))
        self.middle = ((low + high) / 2).to(self.middle)
        self.halfwidth = ((high - low) / 2).to(self.halfwidth)
        return 2 * math.prod(spec.shape)

    def emitter(self, rows: Rows, first: int, rng: np.random.Generator | None) -> Emit:
        middle, half = (x.to("cpu", torch.float32).numpy().reshape(-1) for x in (self.middle, self.halfwidth))
        bounds = self.log_std_bounds
        return sampling.gaussian_by_state(rows, first, log_std_bounds=bounds, squash=(middle, half), rng=rng)


class Deterministic(Head):
    """See ``deterministic``."""

    name = "deterministic"
    has_log_prob = False

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.low: int | None = None  # the first action of a discrete space

    def forward(self, obs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``(action, {})``."""
        return self.mode(obs), {}

    def mode(self, obs: Any) -> torch.Tensor:
        out = self.net(obs)
        return self._shaped(out) if self.low is None else out.argmax(-1) + self.low

    def bind(self, spec: ArraySpec) -> int:
        if spec.dtype.kind == "f":
            self.action_shape = spec.shape
            return math.prod(spec.shape)
        choices, low = _choices(self, spec, "a Discrete or Box space")
        if spec.shape != ():
            raise self._refuse(spec, "Discrete and Box spaces", "categorical(net) with deterministic=True")
        self.low = low[0]
        return choices[0]

    def emitter(self, rows: Rows, first: int, rng: np.random.Generator | None) -> Emit:
        return sampling.identity(rows) if self.low is None else sampling.greedy(rows, low=np.array([self.low]))


def _mean_and_log_std(out: torch.Tensor, bounds: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = out.chunk(2, -1)
    return mean, log_std.clamp(*bounds)


def _choices(head: Head, spec: ArraySpec, instead: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number of choices and first choice of each variable of an integer space."""
    if spec.dtype.kind not in "iub" or spec.low is None or spec.high is None:
        raise head._refuse(spec, "integers with bounds (Discrete, MultiDiscrete, MultiBinary)", instead)
    if spec.one_hot:
        raise head._refuse(
            spec,
            "numbered choices",
            "an environment without one-hot actions: GymEnv(..., categorical_action_encoding=True)",
        )
    low, high = (np.broadcast_to(np.asarray(x, np.int64), spec.shape).reshape(-1) for x in (spec.low, spec.high))
    return tuple((high - low + 1).tolist()), tuple(low.tolist())


def _continuous(head: Head, spec: ArraySpec) -> tuple[int, ...]:
    if spec.dtype.kind != "f":
        raise head._refuse(spec, "floating-point actions (Box)", "categorical(net)")
    return spec.shape


def _outputs(net: nn.Module) -> int:
    """How many values the last linear layer returns."""
    sizes = [layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear)]
    if not sizes or isinstance(sizes[-1], nn.parameter.UninitializedParameter) or sizes[-1] == 0:
        raise BadOption(
            f"gaussian: cannot see from {type(net).__name__} how many actions it returns. "
            f"Pass log_std=torch.zeros(n), or torch.nn.Parameter(torch.zeros(n)) to learn it."
        )
    return int(sizes[-1])
