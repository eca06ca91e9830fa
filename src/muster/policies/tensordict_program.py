"""tensordict modules without their dispatch: runs networks by the executor, and distributions in a
few calls.

The result must equal the module's bit for bit, from the same state of torch's global generator.
``TensorDictPolicy`` compares both on the first real batch, and uses the module if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from muster.errors import BadPolicyOutput
from muster.keys import Key
from muster.policies.executor import Program, layers_are_known, plain, plan
from muster.utils.private_names import usable

Values = dict[Key, torch.Tensor]
Stage = Callable[[Values], None]
Sampler = Callable[..., "tuple[torch.Tensor, torch.Tensor | None]"]

SEQUENTIAL = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
INTERACTIONS = (
    InteractionType.RANDOM,
    InteractionType.DETERMINISTIC,
    InteractionType.MODE,
)
LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


class TensorDictProgram:
    """Stages that read and write a flat dict of tensors; ``programs`` are the programs of its
    networks.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        programs: Sequence[Program],
        modules: Sequence[tuple[nn.Module, tuple[Any, ...]]],
    ) -> None:
        self._stages = tuple(stages)
        self._programs = tuple(programs)
        self._modules = tuple(modules)

    def __call__(self, values: Values) -> None:
        for stage in self._stages:
            stage(values)

    def current(self) -> bool:
        if not all(program.current() for program in self._programs):
            return False
        return all(
            plain(module) and _parts(module) == parts for module, parts in self._modules
        )


def fuse(
    module: Any,
    values: Values,
    interaction: InteractionType,
) -> TensorDictProgram | None:
    """Return a program for ``module`` with the inputs ``values`` (outputs are added), or None if
    not supported.
    """
    flat: list[Any] = []
    watched: list[tuple[nn.Module, tuple[Any, ...]]] = []
    if not layers_are_known() or not _flatten(module, flat, watched):
        return None
    stages: list[Stage] = []
    programs: list[Program] = []
    for part in flat:
        if isinstance(part, ProbabilisticTensorDictModule):
            stage: Stage | None = _distribution(part, interaction)
        else:
            stage = _network(part, values, programs)
        if stage is None:
            return None
        stage(values)
        stages.append(stage)
    return TensorDictProgram(stages, programs, watched) if programs else None


def as_key(key: Any) -> Key:
    """Convert a key of tensordict, ``"a"`` or ``("a", "b")``, to a ``Key``."""
    return (key,) if isinstance(key, str) else tuple(key)


def _flatten(
    module: Any,
    out: list[Any],
    watched: list[tuple[nn.Module, tuple[Any, ...]]],
) -> bool:
    if not isinstance(module, torch.nn.Module) or not plain(module):
        return False
    part: Any = module
    known = (*SEQUENTIAL, TensorDictModule.forward)
    if type(module).forward not in known and not _is_distribution(module):
        return False
    watched.append((module, _parts(module)))
    if type(module).forward in SEQUENTIAL:
        if part.partial_tolerant:
            return False
        children = list(part.module._modules.values())
        return all(_flatten(child, out, watched) for child in children)
    if type(module).forward is TensorDictModule.forward:
        if not usable("tensordict", (part, ("_kwargs", "_get_kwargs"))):
            return False
        usual = part.method is None and part._kwargs is None and not part._get_kwargs
        if not usual or part.method_kwargs or len(part.in_keys) != 1:
            return False
    out.append(module)
    return True


def _is_distribution(module: nn.Module) -> bool:
    if not isinstance(module, ProbabilisticTensorDictModule):
        return False
    own = type(module).forward is ProbabilisticTensorDictModule.forward
    return own or _is_torchrl(module)


def _is_torchrl(module: nn.Module) -> bool:
    """Whether it is TorchRL's module, which computes log-probabilities from values before the
    squashing.
    """
    cls = type(module)
    return cls.__name__ == "SafeProbabilisticModule" and cls.__module__.startswith(
        "torchrl."
    )


def _parts(module: Any) -> tuple[Any, ...]:
    if type(module).forward in SEQUENTIAL:
        return tuple(module.module._modules.values())
    if isinstance(module, ProbabilisticTensorDictModule):
        return (
            module.distribution_class,
            module.return_log_prob,
            *module.in_keys,
            *module.out_keys,
        )
    return (module.module, *module.in_keys, *module.out_keys)


def _network(part: Any, values: Values, programs: list[Program]) -> Stage | None:
    source = as_key(part.in_keys[0])
    targets = [as_key(key) for key in part.out_keys]
    if source not in values or not isinstance(part.module, nn.Module):
        return None
    program = plan(part.module, values[source], numpy_ok=False)
    if program is None:
        return None
    programs.append(program)

    def one(values: Values) -> None:
        values[targets[0]] = program(values[source])

    def several(values: Values) -> None:
        values.update(zip(targets, program(values[source]), strict=True))

    return one if len(targets) == 1 else several


def _distribution(part: Any, interaction: InteractionType) -> Stage:
    sampler = _sampler(part, interaction)
    if sampler is None:
        return _as_it_is(part)
    sources = [as_key(key) for key in part.in_keys]
    action = as_key(part.out_keys[0])
    log_prob = as_key(part.log_prob_key) if part.return_log_prob else None

    def stage(values: Values) -> None:
        values[action], logs = sampler(*[values[key] for key in sources])
        if log_prob is not None and logs is not None:
            values[log_prob] = logs

    return stage


def _as_it_is(part: Any) -> Stage:
    """A stage that calls the module itself, on a TensorDict with the distribution's parameters
    only.
    """
    sources = [as_key(key) for key in part.in_keys]
    targets = [as_key(key) for key in part.out_keys]
    named = [(key if len(key) > 1 else key[0], key) for key in sources]

    def stage(values: Values) -> None:
        lead = values[sources[0]].shape[:-1]
        parameters = {name: values[key] for name, key in named}
        out = part(TensorDict(parameters, batch_size=lead))
        for key in targets:
            values[key] = out.get(key)

    return stage


def _sampler(part: Any, interaction: InteractionType) -> Sampler | None:
    """A function from parameters to ``(sample, log_prob)``, or None for unknown distributions."""
    cls = part.distribution_class
    options = part.distribution_kwargs
    random = interaction is InteractionType.RANDOM
    if not usable("tensordict", (part, ("_generator", "_generator_key"))):
        return None
    if part._generator is not None or part._generator_key is not None:
        return None
    if part.num_samples is not None:
        return None
    if interaction not in INTERACTIONS:
        return None
    names = tuple(as_key(key)[-1] for key in part.dist_keys)
    torchrl = cls.__module__.startswith("torchrl.modules.distributions")
    ours = torchrl or cls.__module__.startswith("tensordict.nn.distributions")
    if names == ("logits",) and not options:
        if cls is torch.distributions.Categorical:
            return _categorical(random, one_hot=False)
        if ours and cls.__name__ == "OneHotCategorical":
            return _categorical(random, one_hot=True)
    if names != ("loc", "scale"):
        return None
    independent = torchrl and cls.__name__ == "IndependentNormal"
    if not options and (independent or cls is torch.distributions.Normal):
        return _normal(random, summed=torchrl)
    squashed = (
        torchrl and cls.__name__ == "TanhNormal" and {*options} <= {"low", "high"}
    )
    if squashed and interaction is not InteractionType.MODE:
        low = options.get("low", -1.0)
        high = options.get("high", 1.0)
        preimage = random and part.return_log_prob and _is_torchrl(part)
        return _tanh_normal(random, low, high, preimage)
    return None


def _categorical(random: bool, *, one_hot: bool) -> Sampler:
    noise: dict[torch.Size, torch.Tensor] = {}

    def sample(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalizer = logits.logsumexp(-1, keepdim=True)
        _require_finite(normalizer)
        normalized = logits - normalizer
        probs = torch.softmax(normalized, -1)
        if random:  # torch.multinomial, for one sample: the largest of probs / Exp(1)
            race = noise.get(probs.shape)
            if race is None:
                race = noise[probs.shape] = torch.empty_like(probs)
            action = torch.div(probs, race.exponential_(), out=race).argmax(-1)
        else:
            action = (normalized if one_hot else probs).argmax(-1)
        log_prob = normalized.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        if one_hot:
            action = F.one_hot(action, probs.shape[-1])
        return action, log_prob

    return sample


def _normal(random: bool, *, summed: bool) -> Sampler:
    def sample(
        loc: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        action = _rsample(loc, scale) if random else loc
        _require_finite(action)
        density = _density(action, loc, scale)
        return action, density.sum(-1) if summed else density

    return sample


def _tanh_normal(
    random: bool,
    low: Any,
    high: Any,
    preimage: bool,
) -> Sampler:
    low = torch.as_tensor(low, device="cpu")
    high = torch.as_tensor(high, device="cpu")
    trivial = bool((low == -1).all() and (high == 1).all())
    middle = (high + low) / 2
    half = (high - low) / 2

    def sample(
        loc: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u = _rsample(loc, scale) if random else loc
        _require_finite(u)
        limit = 1.0 - torch.finfo(u.dtype).resolution
        action = u.tanh().clamp(-limit, limit)
        if not trivial:
            action = middle + half * action
        if (
            not preimage
        ):  # tensordict computes the log-probability of the action it wrote
            squashed = action if trivial else (action - middle) / half
            u = squashed.clamp(-limit, limit).atanh()
        volume = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        if not trivial:
            volume = volume + half.abs().log().expand_as(volume)
        density = _density(u, loc, scale).sum(-1)
        if preimage:
            return action, density - volume.sum(-1)
        return action, (0.0 - volume.sum(-1)) + density

    return sample


def _rsample(loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(loc, memory_format=torch.contiguous_format).normal_()
    return loc + noise * scale


def _density(x: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The log-density of a normal distribution, in torch.distributions' order of operations."""
    exponent = -((x - loc) ** 2) / (2 * scale**2)
    return exponent - scale.log() - LOG_SQRT_2PI


def _require_finite(x: torch.Tensor) -> None:
    """Raise if ``x`` is not finite; torch.distributions refuses NaN parameters, too."""
    if not math.isfinite(x.sum().item()):
        raise BadPolicyOutput(
            "the policy's network returned NaN or infinity. Check the observations and the last"
            " weight update (learning rate, gradient norm)."
        )
