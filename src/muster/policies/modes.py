"""The mode, ``train()`` or ``eval()``, in which a policy acts.

Collecting is not training. A policy acts in evaluation mode, wherever it acts: batch normalisation
uses the statistics that training has found and does not change them, and dropout is off. Before and
after, modules have the modes that the user has given them. Only the flags ``training`` are set:
``train()`` and ``eval()`` of a user's class may do more. Reasons:
docs/decisions/0026-acting-mode.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch
from torch import nn

from muster.policies.executor import layers_are_known
from muster.policies.heads import Categorical, Deterministic, Gaussian, TanhGaussian
from muster.policies.normalization import RunningNorm
from muster.protocols import PolicyMode

# Modules that do the same in both modes. Where a policy has no others, rollouts of one step save 2
# us.
INDIFFERENT = frozenset(
    (
        Categorical,
        Gaussian,
        TanhGaussian,
        Deterministic,
        RunningNorm,
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.Identity,
        nn.Flatten,
        nn.Linear,
        nn.Conv2d,
        nn.LayerNorm,
        nn.Embedding,
        nn.Tanh,
        nn.ReLU,
        nn.Sigmoid,
        nn.SiLU,
        nn.ELU,
        nn.LeakyReLU,
        nn.GELU,
        nn.Softplus,
    )
)


class ActingMode:
    """The modes of the modules of a policy that acts in this process, for the time of a rollout.

    Args:
        roots: the policy, or the modules that it uses; they may be the user's.
        mode: "eval", or "as_given": the modes that they have now.
    """

    def __init__(self, roots: Collection[torch.nn.Module], mode: PolicyMode) -> None:
        self._roots = roots
        self._given: dict[torch.nn.Module, bool] | None = None
        if mode != "eval":
            self._given = {module: module.training for module in all_modules(roots)}
        self._users: list[tuple[torch.nn.Module, bool]] = []

    def enter(self) -> None:
        """Set the modes in which the policy acts."""
        given = self._given
        modules = all_modules(self._roots)
        if given is None and INDIFFERENT.issuperset(map(type, modules)):
            return
        for module in modules:
            training = module.training
            wanted = False if given is None else given.get(module, training)
            if training is wanted:
                continue
            self._users.append((module, training))
            flags = module.__dict__  # ``Module.__setattr__`` takes ten times as long
            if "training" in flags:
                flags["training"] = wanted
            else:
                module.training = wanted  # a property, of scripted and compiled modules

    def leave(self) -> None:
        """Set the modes as they were before ``enter``; nothing if it was not called."""
        while self._users:
            module, training = self._users.pop()
            flags = module.__dict__
            if "training" in flags:
                flags["training"] = training
            else:
                module.training = training


def set_eval(roots: Iterable[torch.nn.Module], besides: Collection[int] = ()) -> None:
    """Set evaluation mode in modules that only act, except in those whose ``id`` is in ``besides``."""
    for module in all_modules(roots):
        if id(module) not in besides:
            module.training = False


def warn_of_noise(roots: Iterable[torch.nn.Module], mode: PolicyMode) -> None:
    """Warn of layers that explore in training mode only: ``NoisyLinear`` of TorchRL, Tianshou and
    others.
    """
    if mode != "eval":
        return
    noisy = {type(module).__name__ for module in all_modules(roots) if module.training}
    noisy = {name for name in noisy if "noisy" in name.lower()}
    if noisy:
        warnings.warn(
            f"the policy has layers of the class {', '.join(sorted(noisy))}. Layers of this name"
            " draw noise in training mode only, and policies act in evaluation mode. Pass"
            " execution=muster.Execution(policy_mode='as_given') to act in the modes that the"
            " modules have now, or call policy.eval() before if you want no noise.",
            stacklevel=2,
        )


def all_modules(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules and their submodules.

    Takes a fifth of the time of ``modules()``: it is called for each rollout.
    """
    found = list(roots)
    if not layers_are_known():
        return [module for root in found for module in root.modules()]
    for module in found:
        for child in module._modules.values():
            if child is not None:
                found.append(child)
    return found
