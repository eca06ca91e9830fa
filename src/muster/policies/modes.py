"""The mode, ``train()`` or ``eval()``, in which a policy acts.

Collecting is not training. A policy acts in evaluation mode, wherever it acts: batch normalisation
uses the statistics that training has found and does not change them, and dropout is off. Before and
after, modules have the modes that the user has given them. Only the flags ``training`` are set:
``train()`` and ``eval()`` of a user's class may do more. Reasons:
docs/decisions/0026-acting-mode.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from muster.policies.executor import layers_are_known
from muster.policies.heads import (
    Categorical,
    Deterministic,
    EpsilonGreedy,
    Gaussian,
    TanhGaussian,
)
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
        EpsilonGreedy,
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
        self._known: _KnownModules | None = None
        # modules and their modes that are set again, and the attributes of those that were training
        self._users: list[tuple[torch.nn.Module, bool]] = []
        self._trained: Sequence[dict[str, Any]] = ()

    def enter(self) -> None:
        """Set the modes in which the policy acts."""
        known = self._known
        if known is None or self._given is not None or not known.are_current():
            self._look_and_enter(self._given)
        elif known.differ:
            self._trained = known.training()
            for attributes in self._trained:
                # ``Module.__setattr__`` takes ten times as long
                attributes["training"] = False

    def leave(self) -> None:
        """Set the modes as they were before ``enter``; nothing if it was not called."""
        if self._trained:
            for attributes in self._trained:
                attributes["training"] = True
            self._trained = ()
        while self._users:
            module, training = self._users.pop()
            _set_mode(module, training)

    def _look_and_enter(self, given: Mapping[torch.nn.Module, bool] | None) -> None:
        modules = all_modules(self._roots)
        if given is None and _KnownModules.can_be(modules):
            self._known = _KnownModules(modules)
        if given is None and INDIFFERENT.issuperset(map(type, modules)):
            return
        for module in modules:
            training = module.training
            wanted = False if given is None else given.get(module, training)
            if training is not wanted:
                self._users.append((module, training))
                _set_mode(module, wanted)


class _KnownModules:
    """The modules of a policy, as they were found. Whether they are still the same, and which are in
    training mode, takes no loop: it is asked before each rollout.

    Attributes:
        differ: some of them may do something else in training mode.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.differ = not INDIFFERENT.issuperset(map(type, modules))
        self._attributes = [module.__dict__ for module in modules]
        # most are layers, and have none
        self._none = [module._modules for module in modules if not module._modules]
        self._parents = [module._modules for module in modules if module._modules]
        self._children = [[*children.values()] for children in self._parents]

    @staticmethod
    def can_be(modules: list[torch.nn.Module]) -> bool:
        """Return whether all modules have their mode as an attribute, as those of TorchScript have
        not.
        """
        return layers_are_known() and all(
            "training" in module.__dict__ for module in modules
        )

    def are_current(self) -> bool:
        """Return whether no module has got or lost another one."""
        if any(self._none):
            return False
        return [*map(list, map(dict.values, self._parents))] == self._children

    def training(self) -> Sequence[dict[str, Any]]:
        """Return the attributes of the modules in training mode."""
        modes = list(map(_TRAINING, self._attributes))
        if all(modes):
            return self._attributes
        return list(compress(self._attributes, modes))


_TRAINING = itemgetter("training")


def _set_mode(module: torch.nn.Module, training: bool) -> None:
    attributes = module.__dict__
    if "training" in attributes:
        attributes["training"] = training
    else:
        module.training = training  # a property, of scripted and compiled modules


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
