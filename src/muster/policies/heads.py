"""Heads: a network and the action distribution of its output, for the learner and for collecting.

::

    actor = muster.policies.categorical(net)  # an nn.Module: parameters, state_dict, deepcopy as usual
    action, extras = actor(obs)  # plain torch, any batch shape
    log_prob = actor.distribution(obs).log_prob(batch["action"])  # in the loss

``categorical``, ``epsilon_greedy`` and ``deterministic`` choose among the actions that an action mask
allows. The mask
is the leaf ``action_mask`` of the observation, which the network does not get, or the argument
``action_mask``. With a mask of the combinations of several variables, the distribution of
``categorical`` is the product of its variables, renormalised over the allowed combinations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from muster.errors import BadOption
from muster.keys import ACTION_MASK, Key, dotted
from muster.memory.specs import Array, ArraySpec, Specs, choices_of, is_joint_mask
from muster.policies import sampling
from muster.policies.distributions import (
    Categoricals,
    ClippedNormal,
    JointCategoricals,
    SquashedNormal,
    joint_logits,
)
from muster.policies.sampling import ActionMask, ActionRows, Emitter, split_index
from muster.utils.attributes import kind_of

LOG_STD_BOUNDS = (-20.0, 2.0)

Drawn = tuple[torch.Tensor, "torch.Tensor | None"]  # actions, and log-probabilities [B]


class Head(nn.Module):
    """A network and the distribution of its output.

    ``net`` gets the observation (or a dict of its leaves).
    """

    name = "head"
    has_log_prob = True
    takes_mask = False
    mask: ActionMask | None = None
    # choices of each variable; None: the outputs of the network are choices
    nvec: tuple[int, ...] | None = None

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if isinstance(net, type) or not callable(net):
            raise BadOption(
                f"{self.name}: the network is {kind_of(net)}. Pass an nn.Module."
            )
        self.net = net
        # of one environment; None until bound
        self.action_shape: tuple[int, ...] | None = None

    def forward(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sample: ``(action, {"action_log_prob": ...})``."""
        distribution = self.distribution(obs, action_mask=action_mask)
        action = distribution.sample()
        log_prob = distribution.log_prob(action)
        return action, {"action_log_prob": log_prob}

    def distribution(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> D.Distribution:
        """Return the distribution of the environment's actions: ``log_prob`` and ``entropy`` are
        ``[*batch]``.

        Args:
            obs: observation, ``[*batch, *shape]``, or a dict or TensorDict of its leaves.
            action_mask: ``[*batch, n]``, an entry for each output of the network, or ``[*batch,
                *nvec]``, one for each combination of choices; 0 or False: not allowed. None: the
                leaf ``action_mask`` of ``obs``, if there is one. Not for continuous actions.

        Raises:
            BadOption: the size of the mask does not fit.
        """
        raise NotImplementedError

    def mode(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the action without randomness."""
        distribution = self.distribution(obs, action_mask=action_mask)
        return distribution.mode

    def fit(
        self,
        action_specs: Specs,
        masks: Sequence[ActionMask],
    ) -> tuple[Key, ArraySpec, int]:
        """Bind the head to the one action of an environment, and to its mask.

        Returns the action's key and spec, and the result of ``bind``.
        """
        if len(action_specs) != 1:
            raise BadOption(
                f"{self.name}: chooses one action, but the action space has several parts:"
                f" {list(map(dotted, action_specs))}. Use a function or a TensorDict module that"
                " returns all of them."
            )
        ((key, spec),) = action_specs.items()
        self.mask = None
        if self.takes_mask and masks:
            self.mask = masks[0]
        width = self.bind(spec)
        return key, spec, width

    def bind(self, spec: ArraySpec) -> int:
        """Set shape and bounds from the action space (``BadOption`` if the head is for another kind
        of space).

        Returns the number of values per environment that the network must return.
        """
        raise NotImplementedError

    def emitter(self, rows: ActionRows) -> Emitter:
        """Return what turns the network's output into rows of actions."""
        raise NotImplementedError

    def restrict(self, out: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Return the network's output with the lowest value for what a mask does not allow.

        Raises:
            BadOption: the size of the mask does not fit.
        """
        return allowed_only(out, action_mask)

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        """Draw actions from the network's output ``[B, width]`` (float32), on its device and
        without synchronizing.

        The distribution is that of ``emitter``, but noise is torch's, drawn row by row, and the
        network's output is not checked to be finite, because that would synchronize. If there is a
        mask, ``out`` is the result of ``restrict``.
        """
        raise NotImplementedError

    def needs(self, spec: ArraySpec) -> str:
        """The reason for the required size of the network's output, for messages."""
        return f"the action space has {spec}"

    def remedy(self, width: int, returned: int | None) -> str:
        """What to do about a network that must return ``width`` values, and returned another number
        (None: unknown).
        """
        return f"Change the last layer to return {_values(width)}."

    def _refuse(
        self,
        spec: ArraySpec,
        takes: str,
        instead: str | None = None,
    ) -> BadOption:
        if instead is None:
            instead = _suitable(spec)
        return BadOption(
            f"{self.name}: for {takes}, but the action space has {spec}. Use {instead}."
        )

    def _bind_floats(self, spec: ArraySpec) -> int:
        """Set the shape from a continuous space; returns the number of its entries."""
        if spec.dtype.kind != "f":
            raise self._refuse(spec, "floating-point actions (Box)")
        self.action_shape = spec.shape
        return math.prod(spec.shape)

    def _no_mask(self, action_mask: torch.Tensor | None) -> None:
        if action_mask is not None:
            raise BadOption(
                f"{self.name}: action masks are for discrete actions. Use categorical(net)."
            )

    def _output_and_mask(
        self,
        obs: Any,
        action_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the network's output for ``obs`` without its mask, and the mask."""
        if action_mask is None:
            mask_key = ACTION_MASK
            if self.mask is not None:
                mask_key = self.mask.key
            obs, action_mask = _without_mask(obs, mask_key)
        out: torch.Tensor = self.net(obs)
        return out, action_mask

    def _is_joint(self, out: torch.Tensor, action_mask: torch.Tensor) -> bool:
        """Return whether a mask has an entry for each combination of choices, not for each output
        of the network.

        Raises:
            BadOption: its size is neither.
        """
        lead = out.ndim - 1
        shape = tuple(action_mask.shape[lead:])
        known = self.mask
        own = self.nvec
        if own is None:
            own = (out.shape[-1],)
        if known is not None:
            own = known.own_nvec
            shape = shape[known.agents > 1 :]
        try:
            if action_mask.shape[:lead] != out.shape[:-1]:
                raise ValueError(
                    f"shape {tuple(action_mask.shape)} is for other rows than the output"
                    f" {tuple(out.shape)}"
                )
            both_fit = math.prod(shape) == sum(own) == math.prod(own)
            if known is not None and both_fit:
                return known.joint
            return is_joint_mask(own, shape)
        except ValueError as error:
            raise BadOption(f"{self.name}: the action mask with {error}") from None

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape ``[*batch, n]`` to ``[*batch, *action_shape]``."""
        if self.action_shape is None:
            return flat
        lead = flat.shape[:-1]
        return flat.reshape((*lead, *self.action_shape))

    def _normal(self, mean: torch.Tensor, log_std: torch.Tensor) -> D.Distribution:
        std = self._shaped(log_std.exp())
        normal = D.Normal(self._shaped(mean), std)
        return D.Independent(normal, self._dims)

    @property
    def _dims(self) -> int:
        """Number of dimensions of an action."""
        if self.action_shape is None:
            return 1
        return len(self.action_shape)


def allowed_only(out: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """Return the network's output with the lowest value for what the mask does not allow."""
    # Not -inf: a blank row of a batch allows nothing, and must not make a loss NaN.
    forbidden = action_mask.reshape(out.shape) == 0
    lowest = torch.finfo(out.dtype).min
    return out.masked_fill(forbidden, lowest)


def categorical(
    net: nn.Module,
    *,
    nvec: tuple[int, ...] | None = None,
) -> Categorical:
    """A policy for Discrete, MultiDiscrete and MultiBinary spaces; ``net`` returns logits.

    Args:
        net: returns ``[*batch, n]``; the logits of several variables are concatenated.
        nvec: choices per variable. A collector fills it in from the action space.
    """
    if nvec is not None:
        nvec = tuple(int(n) for n in nvec)
    return Categorical(net, nvec)


class Categorical(Head):
    """See ``categorical``."""

    name = "categorical"
    takes_mask = True

    def __init__(self, net: nn.Module, nvec: tuple[int, ...] | None) -> None:
        super().__init__(net)
        self.nvec = nvec
        self.low: tuple[int, ...] | None = None

    def distribution(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> D.Distribution:
        logits, action_mask = self._output_and_mask(obs, action_mask)
        joint = False
        if action_mask is not None:
            joint = self._is_joint(logits, action_mask)
            logits = self.restrict(logits, action_mask)
        if joint and self.nvec is not None:
            return JointCategoricals(
                logits,
                self.nvec,
                self._first_choices,
                self._event_shape,
                self._agents,
            )
        plain = self.action_shape == () and self.low == (0,)
        if self.nvec is None or plain:
            return D.Categorical(logits=logits)
        return Categoricals(
            logits,
            self.nvec,
            self._first_choices,
            self._event_shape,
        )

    def restrict(self, out: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """See ``Head.restrict``; with a joint mask, the result has the logits of combinations of
        choices.
        """
        joint = self._is_joint(out, action_mask)
        if joint and self.nvec is not None:
            out = joint_logits(out, self.nvec, self._agents)
        return allowed_only(out, action_mask)

    @property
    def _agents(self) -> int:
        if self.mask is None:
            return 1
        return self.mask.agents

    @property
    def _first_choices(self) -> tuple[int, ...]:
        if self.low:
            return self.low
        variables = len(self.nvec or ())
        return (0,) * variables

    @property
    def _event_shape(self) -> tuple[int, ...]:
        if self.action_shape is None:
            variables = len(self.nvec or ())
            return (variables,)
        return self.action_shape

    def bind(self, spec: ArraySpec) -> int:
        choices, low = _choices(self, spec)
        if self.nvec is not None and self.nvec != choices:
            raise BadOption(
                f"categorical: nvec={self.nvec}, but the action space has {choices} choices. Leave"
                f" nvec out, and let the network return {_values(sum(choices))}."
            )
        self.nvec = choices
        self.low = low
        self.action_shape = spec.shape
        return sum(choices)

    def needs(self, spec: ArraySpec) -> str:
        assert self.nvec is not None  # bound
        if spec.shape == ():
            space = f"Discrete({self.nvec[0]})"
        else:
            space = f"several variables, with {self.nvec} choices"
        return f"one logit per choice, and the action space is {space}"

    def emitter(self, rows: ActionRows) -> Emitter:
        assert self.nvec is not None  # bound
        assert self.low is not None
        return sampling.categorical(
            rows,
            nvec=self.nvec,
            low=np.array(self.low),
        )

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        assert self.nvec is not None  # bound
        assert self.low is not None
        joint = self.mask
        if joint is not None and not joint.joint:
            joint = None
        drawn = self.nvec if joint is None else joint.drawn
        logits_of: Sequence[torch.Tensor] = (out,)
        if len(drawn) > 1:
            logits_of = torch.split(out, list(drawn), -1)
        indices = []
        log_probs = []
        for logits in logits_of:
            log_prob = logits.log_softmax(-1)
            noisy = log_prob
            if not deterministic:
                # The Gumbel-max trick: ``torch.multinomial`` would synchronize, to check its input.
                exponential = torch.empty_like(log_prob).exponential_()
                noisy = log_prob - exponential.log()
            index = noisy.argmax(-1, keepdim=True)
            if joint is None:
                indices.append(index)
            else:
                indices += split_index(index, joint.own_nvec)
            log_probs.append(log_prob.gather(-1, index))
        actions = []
        for index, low in zip(indices, self.low, strict=True):
            actions.append(index + low if low else index)
        # each operation takes as long on a GPU as a small network's layer
        action = actions[0]
        if len(actions) > 1:
            action = torch.cat(actions, -1)
        if len(log_probs) == 1:
            (log_prob,) = log_probs
            return action, log_prob.squeeze(-1)
        log_prob = torch.cat(log_probs, -1)
        return action, log_prob.sum(-1)


def gaussian(
    net: nn.Module,
    *,
    log_std: float | torch.Tensor | None = 0.0,
    clip: bool = False,
) -> Gaussian:
    """A normal distribution over Box actions.

    Without ``clip``, actions can lie outside of the space: use it for unbounded spaces, and for
    environments that clip their actions themselves.

    Args:
        net: returns the mean ``[*batch, n]``; with ``log_std=None`` mean and log_std, concatenated:
            ``[*batch, 2 n]``.
        log_std: a number is the initial value of a learned parameter of the head, one per action
            and the same in all states; a Parameter or tensor ``[n]`` is used directly. None:
            ``net`` returns it; it is clamped to [-20, 2].
        clip: clip actions to the bounds of the space (which a collector binds). The batch has what
            the environment got, and the log-probability of a bound is that of all that lies beyond
            it, so that ``distribution(obs).log_prob`` agrees with the batch ("Clipped Action Policy
            Gradient", Fujita and Maeda, 2018).

    Raises:
        BadOption: ``net`` does not show the number of actions; pass ``log_std=torch.zeros(n)``.
    """
    return Gaussian(net, log_std, clip=clip)


class Gaussian(Head):
    """See ``gaussian``."""

    name = "gaussian"

    def __init__(
        self,
        net: nn.Module,
        log_std: float | torch.Tensor | None,
        *,
        clip: bool,
    ) -> None:
        super().__init__(net)
        self.clip = clip
        # Not in the state_dict: they belong to the environment, not to the learned weights.
        low = torch.tensor(-math.inf)
        high = torch.tensor(math.inf)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.low: torch.Tensor
        self.high: torch.Tensor
        if not isinstance(log_std, (int, float, torch.Tensor, type(None))):
            raise BadOption(
                f"gaussian: log_std is {type(log_std).__name__}, expected a number, a tensor, or"
                " None if the network returns it. Pass torch.as_tensor(log_std)."
            )
        # the number of actions is that of a layer of ``net``
        self._counted = isinstance(log_std, (int, float))
        if isinstance(log_std, (int, float)):
            actions = _outputs(net)
            initial = torch.full((actions,), float(log_std))
            log_std = nn.Parameter(initial)
        if isinstance(log_std, nn.Parameter):
            self.log_std: torch.Tensor | None = log_std
        else:
            self.register_buffer("log_std", log_std)

    def distribution(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> D.Distribution:
        self._no_mask(action_mask)
        out = self.net(obs)
        mean, log_std = self._parameters_of(out)
        if not self.clip:
            return self._normal(mean, log_std)
        mean = self._shaped(mean)
        std = self._shaped(log_std.exp())
        normal = ClippedNormal(mean, std, self.low, self.high)
        return D.Independent(normal, self._dims)

    def bind(self, spec: ArraySpec) -> int:
        n = self._bind_floats(spec)
        if self.clip:
            self._bind_bounds(spec)
        if self.log_std is None:
            return 2 * n
        entries = self.log_std.numel()
        if entries not in (1, n):
            if self._counted:
                raise BadOption(
                    f"gaussian: the last linear layer of the network returns {_values(entries)},"
                    f" but an action has {n}. {self.remedy(n, entries)} If the network returns"
                    f" {_values(n)} all the same, pass log_std=torch.zeros({n}), or"
                    f" torch.nn.Parameter(torch.zeros({n})) to learn it."
                )
            raise BadOption(
                f"gaussian: log_std has {_values(entries)}, but an action has {n}. Pass"
                f" log_std=torch.zeros({n}) with a network that returns {_values(n)}, or"
                f" log_std=None with one that returns {2 * n} (mean and log_std)."
            )
        return n

    def needs(self, spec: ArraySpec) -> str:
        n = math.prod(spec.shape)
        if self.log_std is not None:
            return f"the mean of {_values(n)}"
        return f"mean and log_std of {_values(n)}"

    def remedy(self, width: int, returned: int | None) -> str:
        if self.log_std is None:
            alone = ""
            if returned is not None and width == 2 * returned:
                alone = f" Or pass log_std=torch.zeros({returned}) if it returns the mean only."
            return f"Change the last layer to return {width} values (mean and log_std).{alone}"
        if returned == 2 * width:
            return (
                "Pass log_std=None if the network returns mean and log_std; else change the last"
                f" layer to return {_values(width)}."
            )
        return (
            f"Change the last layer to return {_values(width)}, or {2 * width} (mean and log_std)"
            " with log_std=None."
        )

    def emitter(self, rows: ActionRows) -> Emitter:
        n = rows.matrix[0].shape[1]
        read: sampling.Read | None = None
        if self.log_std is None:
            emitter = sampling.gaussian_by_state(
                rows,
                log_std_bounds=LOG_STD_BOUNDS,
                squash=None,
            )
        else:
            read = partial(self._log_std_of, n)
            emitter = sampling.gaussian(rows, log_std=read)
        if not self.clip:
            return emitter
        low = _flat_on_cpu(self.low)
        high = _flat_on_cpu(self.high)
        return sampling.clipped(
            rows,
            emitter,
            np.broadcast_to(low, (n,)),
            np.broadcast_to(high, (n,)),
            log_std=read,
            log_std_bounds=LOG_STD_BOUNDS,
        )

    def _log_std_of(self, n: int) -> Array:
        """Return the head's own ``log_std`` as it is now, for ``n`` values of an action."""
        assert self.log_std is not None
        log_std = _flat_on_cpu(self.log_std.detach().float())
        if len(log_std) == n:
            return log_std
        return np.broadcast_to(log_std, (n,))

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        mean, log_std = self._parameters_of(out)
        action, log_prob = _draw_normal(mean, log_std, deterministic=deterministic)
        if not self.clip:
            return action, log_prob
        low = self.low.reshape(-1)
        high = self.high.reshape(-1)
        normal = ClippedNormal(mean, log_std.exp(), low, high)
        action = action.clamp(low, high)
        log_probs = normal.log_prob(action)
        return action, log_probs.sum(-1)

    def _bind_bounds(self, spec: ArraySpec) -> None:
        low = -math.inf if spec.low is None else spec.low
        high = math.inf if spec.high is None else spec.high
        has_low = np.isfinite(low).any()
        has_high = np.isfinite(high).any()
        if not has_low and not has_high:
            raise BadOption(
                "gaussian: the action space is unbounded, there is nothing to clip to. Leave out"
                " clip=True, or use an environment whose actions have bounds."
            )
        # in the dtype of the space: an action at a bound is compared with it
        lows = np.full(spec.shape, low, spec.dtype)
        highs = np.full(spec.shape, high, spec.dtype)
        at = self.low.device
        self.low = torch.from_numpy(lows).to(at)
        self.high = torch.from_numpy(highs).to(at)

    def _parameters_of(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.log_std is None:
            return _mean_and_log_std(out, LOG_STD_BOUNDS)
        log_std = self.log_std.reshape(-1)
        return out, log_std.expand_as(out)


def tanh_gaussian(
    net: nn.Module,
    *,
    log_std_bounds: tuple[float, float] = LOG_STD_BOUNDS,
) -> TanhGaussian:
    """A normal distribution squashed by tanh to the bounds of the Box (-1 to 1 until a collector
    binds the head).

    ``distribution(obs)`` has no closed-form entropy. The log-probability of an action exactly at a
    bound is that of the nearest action inside.

    Args:
        net: returns ``[mean, log_std]``, concatenated: ``[*batch, 2 n]``.
        log_std_bounds: ``log_std`` is clamped to these.
    """
    return TanhGaussian(net, log_std_bounds)


class TanhGaussian(Head):
    """See ``tanh_gaussian``."""

    name = "tanh_gaussian"

    def __init__(self, net: nn.Module, log_std_bounds: tuple[float, float]) -> None:
        super().__init__(net)
        self.log_std_bounds = log_std_bounds
        # Not in the state_dict: they belong to the environment, not to the learned weights.
        middle = torch.zeros(())
        halfwidth = torch.ones(())
        self.register_buffer("middle", middle, persistent=False)
        self.register_buffer("halfwidth", halfwidth, persistent=False)
        self.middle: torch.Tensor
        self.halfwidth: torch.Tensor

    def distribution(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> D.Distribution:
        self._no_mask(action_mask)
        out = self.net(obs)
        mean, log_std = _mean_and_log_std(out, self.log_std_bounds)
        return SquashedNormal(
            self._shaped(mean),
            self._shaped(log_std),
            self.middle,
            self.halfwidth,
            self._dims,
        )

    def bind(self, spec: ArraySpec) -> int:
        n = self._bind_floats(spec)
        if not _is_bounded(spec):
            raise BadOption(
                "tanh_gaussian: the action space is unbounded, there is no interval to squash to."
                f" Use gaussian(net, log_std=None), with a network that returns {2 * n} values, or"
                " an environment whose actions have bounds."
            )
        assert spec.low is not None  # bounded
        assert spec.high is not None
        lows = np.broadcast_to(spec.low, spec.shape)
        highs = np.broadcast_to(spec.high, spec.shape)
        low = torch.from_numpy(lows.copy())
        high = torch.from_numpy(highs.copy())
        middle = (low + high) / 2
        halfwidth = (high - low) / 2
        self.middle = middle.to(self.middle)
        self.halfwidth = halfwidth.to(self.halfwidth)
        return 2 * n

    def needs(self, spec: ArraySpec) -> str:
        return f"mean and log_std of {_values(math.prod(spec.shape))}"

    def remedy(self, width: int, returned: int | None) -> str:
        return f"Change the last layer to return {width} values (mean and log_std)."

    def emitter(self, rows: ActionRows) -> Emitter:
        middle = _flat_on_cpu(self.middle.float())
        half = _flat_on_cpu(self.halfwidth.float())
        return sampling.gaussian_by_state(
            rows,
            log_std_bounds=self.log_std_bounds,
            squash=(middle, half),
        )

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        mean, log_std = _mean_and_log_std(out, self.log_std_bounds)
        u, log_prob = _draw_normal(mean, log_std, deterministic=deterministic)
        middle = self.middle.reshape(-1)
        half = self.halfwidth.reshape(-1)
        action = middle + half * u.tanh()
        # rounding can exceed the bounds
        action = action.clamp(middle - half, middle + half)
        # of ``tanh(u)``, and of ``half * tanh(u)``
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        log_slope = half.log() + log_slope
        return action, log_prob - log_slope.sum(-1)


class Greedy(Head):
    """A head whose mode is the network's output (Box), or the action with the highest one
    (Discrete).
    """

    takes_mask = True

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.low: int | None = None  # the first action of a discrete space

    def mode(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out, action_mask = self._output_and_mask(obs, action_mask)
        if action_mask is not None:
            out = self.restrict(out, action_mask)
        return self._shaped(self._action_of(out))

    def restrict(self, out: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        self._is_joint(out, action_mask)  # raises for another size
        return allowed_only(out, action_mask)

    def _bind_choice(
        self,
        spec: ArraySpec,
        takes: str,
        instead: str | None = None,
    ) -> int:
        """Set the first action from a discrete space; returns the number of its actions."""
        choices, low = _choices(self, spec)
        if spec.shape != ():
            raise self._refuse(spec, takes, instead)
        (self.low,) = low
        return choices[0]

    def _action_of(self, out: torch.Tensor) -> torch.Tensor:
        if self.low is None:
            return out
        return out.argmax(-1) + self.low


def deterministic(net: nn.Module) -> Deterministic:
    """A policy whose action is the network's output (Box), or its argmax (Discrete).

    It has no log-probability.
    """
    return Deterministic(net)


class Deterministic(Greedy):
    """See ``deterministic``."""

    name = "deterministic"
    has_log_prob = False

    def forward(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return ``(action, {})``."""
        action = self.mode(obs, action_mask=action_mask)
        return action, {}

    def bind(self, spec: ArraySpec) -> int:
        if spec.dtype.kind == "f":
            return self._bind_floats(spec)
        return self._bind_choice(
            spec,
            "Discrete and Box spaces",
            f"{_suitable(spec)} and exploration_type='mode'",
        )

    def emitter(self, rows: ActionRows) -> Emitter:
        if self.low is None:
            return sampling.identity(rows)
        low = np.array([self.low])
        return sampling.greedy(rows, low=low)

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        return self._action_of(out), None


def epsilon_greedy(net: nn.Module, epsilon: float = 0.1) -> EpsilonGreedy:
    """A policy for Discrete spaces: the action with the highest value, or with probability
    ``epsilon`` one of all allowed actions, with equal probabilities (Watkins, 1989; DQN: Mnih et
    al., 2015).

    ``policy.epsilon`` is a buffer, so it is published with the weights: lower it with
    ``policy.epsilon.fill_(0.05)`` and ``collector.update_policy_weights_()``.

    Args:
        net: returns the value of each action, ``[*batch, n]``.
        epsilon: from 0 (no exploration) to 1 (random actions).

    Raises:
        BadOption: ``epsilon`` is no probability; also later, before a rollout.
    """
    return EpsilonGreedy(net, epsilon)


class EpsilonGreedy(Greedy):
    """See ``epsilon_greedy``.

    Attributes:
        epsilon: the probability of exploration, a tensor without dimensions; in the ``state_dict``.
    """

    name = "epsilon_greedy"

    def __init__(self, net: nn.Module, epsilon: float) -> None:
        super().__init__(net)
        self.low = 0
        initial = torch.tensor(_probability(epsilon))
        self.register_buffer("epsilon", initial)
        self.epsilon: torch.Tensor

    def distribution(
        self,
        obs: Any,
        *,
        action_mask: torch.Tensor | None = None,
    ) -> D.Distribution:
        values, action_mask = self._output_and_mask(obs, action_mask)
        legal = torch.ones_like(values, dtype=torch.bool)
        if action_mask is not None:
            values = self.restrict(values, action_mask)
            legal = action_mask.reshape(values.shape) != 0
        count = legal.sum(-1, keepdim=True).clamp(min=1)  # a blank row allows nothing
        probabilities = self.epsilon * legal / count
        best = values.argmax(-1, keepdim=True)
        more = (1 - self.epsilon).expand_as(best).to(probabilities.dtype)
        logits = probabilities.scatter_add(-1, best, more).log()
        if not self.low:
            return D.Categorical(logits=logits)
        return Categoricals(logits, (values.shape[-1],), (self.low,), ())

    def bind(self, spec: ArraySpec) -> int:
        if spec.dtype.kind == "f":
            raise self._refuse(spec, "Discrete spaces")
        return self._bind_choice(spec, "Discrete spaces")

    def needs(self, spec: ArraySpec) -> str:
        return f"one value per action, and the action space has {spec}"

    def emitter(self, rows: ActionRows) -> Emitter:
        return sampling.epsilon_greedy(
            rows,
            low=np.array([self.low]),
            epsilon=lambda: _probability(self.epsilon),
        )

    def draw(self, out: torch.Tensor, *, deterministic: bool) -> Drawn:
        assert self.low is not None
        legal = torch.ones_like(out, dtype=torch.bool)
        if self.mask is not None:
            legal = out != torch.finfo(out.dtype).min  # see ``allowed_only``
        best = out.argmax(-1) + self.low
        action = best
        if not deterministic:
            explores, which = torch.rand((2, len(out)), device=out.device)
            if self.mask is None:
                drawn = (which * out.shape[-1]).long() + self.low
            else:
                drawn = self.mask.draw_on_device(legal, which[:, None])[:, 0]
            action = torch.where(explores < self.epsilon, drawn, best)
        count = legal.sum(-1).clamp(min=1)  # a blank row allows nothing
        share = self.epsilon / count
        probability = share + (1 - self.epsilon) * (action == best)
        return action, probability.log()


def _probability(epsilon: Any) -> float:
    """Return a number from 0 to 1. Raises ``BadOption``."""
    is_number = isinstance(epsilon, (int, float, np.number))
    if isinstance(epsilon, torch.Tensor):
        is_number = epsilon.numel() == 1
    if is_number and 0 <= float(epsilon) <= 1:
        return float(epsilon)
    raise BadOption(
        f"epsilon_greedy: epsilon is {epsilon!r}, expected a number from 0 to 1: the probability of"
        " a random action"
    )


def _draw_normal(
    mean: torch.Tensor,
    log_std: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw values ``[B, n]``; return them and their log-densities ``[B]``."""
    log_std = log_std.to(mean.dtype)
    if deterministic:
        noise = torch.zeros_like(mean)
    else:
        noise = torch.randn_like(mean)
    densities = -0.5 * noise.square() - log_std
    n = mean.shape[-1]
    log_prob = densities.sum(-1) - 0.5 * n * math.log(2 * math.pi)
    values = mean + log_std.exp() * noise
    return values, log_prob


def _mean_and_log_std(
    out: torch.Tensor,
    bounds: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = out.chunk(2, -1)
    return mean, log_std.clamp(*bounds)


def _flat_on_cpu(parameters: torch.Tensor) -> Array:
    array: Array = parameters.cpu().numpy()
    return array.reshape(-1)


def _choices(
    head: Head,
    spec: ArraySpec,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number of choices and first choice of each variable of an integer space."""
    if spec.dtype.kind not in "iub" or not _is_bounded(spec):
        raise head._refuse(
            spec, "integers with bounds (Discrete, MultiDiscrete, MultiBinary)"
        )
    if spec.one_hot:
        raise head._refuse(spec, "numbered choices")
    return choices_of(spec)


def _suitable(spec: ArraySpec) -> str:
    """What to use for an action space, and what the network must return."""
    if spec.dtype.kind not in "iubf":
        return "a function that returns actions"
    if spec.one_hot:
        return "an environment without one-hot actions: GymEnv(..., categorical_action_encoding=True)"
    if spec.dtype.kind != "f":
        if not _is_bounded(spec):
            return "an environment whose actions have bounds"
        choices, _ = choices_of(spec)
        logits = sum(choices)
        return f"categorical(net), with a network that returns {_values(logits)}"
    n = math.prod(spec.shape)
    squashed = ""
    if _is_bounded(spec):
        squashed = f", or tanh_gaussian(net), with one that returns {2 * n}"
    return f"gaussian(net), with a network that returns {_values(n)}{squashed}"


def _values(n: int) -> str:
    return "1 value" if n == 1 else f"{n} values"


def _is_bounded(spec: ArraySpec) -> bool:
    if spec.low is None or spec.high is None:
        return False
    has_low = np.isfinite(spec.low).all()
    has_high = np.isfinite(spec.high).all()
    return bool(has_low and has_high)


def _without_mask(obs: Any, path: Key) -> tuple[Any, torch.Tensor | None]:
    """Return an observation without its action mask, as the network gets it, and the mask; None if
    it has none.
    """
    left, mask = _taken_out(obs, path)
    if mask is None:
        return left, None
    while isinstance(left, Mapping) and len(left) == 1:
        (left,) = left.values()
    return left, mask


def _taken_out(obs: Any, path: Key) -> tuple[Any, torch.Tensor | None]:
    name, *below = path
    if not hasattr(obs, "keys"):
        return obs, None
    if name not in obs.keys():  # noqa: SIM118 (a TensorDict is no Mapping)
        return obs, None
    left = {key: obs[key] for key in obs.keys()}  # noqa: SIM118
    mask: Any = left.pop(name)
    if below:
        inner, mask = _taken_out(mask, tuple(below))
        if len(inner):
            left[name] = inner
    return left, mask


def _outputs(net: nn.Module) -> int:
    """The output size of the last linear layer."""
    size: Any = 0
    if isinstance(net, nn.Module):
        for layer in net.modules():
            if isinstance(layer, nn.Linear):
                size = layer.out_features
    if isinstance(size, nn.parameter.UninitializedParameter) or size == 0:
        raise BadOption(
            f"gaussian: cannot see from {type(net).__name__} how many actions it returns. For n"
            " actions pass log_std=torch.zeros(n), or torch.nn.Parameter(torch.zeros(n)) to learn"
            " it; or log_std=None if the network returns mean and log_std."
        )
    return int(size)
