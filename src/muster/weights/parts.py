"""The modules of a policy: which of them act, which are the user's, and what parts they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.errors import BadWeights
from muster.utils.attributes import name_of
from muster.weights.coverage import is_own
from muster.weights.names import (
    is_finite,
    place_of,
    replica,
    weight_bearer,
    with_unregistered,
)


@dataclass(frozen=True)
class PolicyPart:
    """A part of a policy, or all of it.

    Attributes:
        acting: the part of what acts, or of the copy from which workers get their weights.
        own: the same part of the user's policy; ``acting`` itself if the user's policy acts.
        path: of both in the policy.
    """

    acting: torch.nn.Module
    own: torch.nn.Module
    path: str


class PolicyModules:
    """The modules of a policy, and of what acts in its place.

    Made by ``here``, ``with_copy`` and ``of_workers``; never changed.

    Attributes:
        policy: what acts; with workers the private copy of the user's modules. None: none found.
        original: the user's policy or modules, where ``policy`` is a copy of them.
        users: all modules of the user's policy, where ``policy`` is a copy; else None.
        in_workers: copies of ``policy`` act in workers.
        has_model_ids: parts of the policy have ids: see ``BaseCollector.get_model``.
        name: of the user's policy, for messages.
    """

    def __init__(
        self,
        policy: Any,
        original: Any,
        users: torch.nn.Module | None,
        roots: Sequence[Any],
        *,
        in_workers: bool,
        has_model_ids: bool,
        name: str,
    ) -> None:
        self.policy = policy
        self.original = original
        self.users = users
        self.in_workers = in_workers
        self.has_model_ids = has_model_ids
        self.name = name
        self._roots = roots  # objects that stand for the whole policy
        bearer = (
            policy if isinstance(policy, torch.nn.Module) else weight_bearer(policy)
        )
        # buffers that were infinite from the start, such as masks
        self._unbounded = _infinite(bearer)

    @classmethod
    def here(
        cls, policy: Any, original: Any, roots: Sequence[Any], name: str
    ) -> PolicyModules:
        """Return the modules of a policy that acts in this process."""
        users = (
            with_unregistered(original)
            if isinstance(original, torch.nn.Module)
            else None
        )
        acting = (
            with_unregistered(policy) if isinstance(policy, torch.nn.Module) else policy
        )
        is_whole = isinstance(policy, torch.nn.Module) and acting is policy
        return cls(
            acting,
            original,
            users,
            roots,
            in_workers=False,
            has_model_ids=is_whole,
            name=name,
        )

    @classmethod
    def of_workers(cls, policy: Any, *, only_weights: bool) -> PolicyModules:
        """Return the modules of a policy whose copies act in workers, with a copy of their own.

        Raises:
            BadWeights: the policy cannot be copied.
        """
        users = weight_bearer(policy)
        copy = None if users is None else replica(users, only_weights=only_weights)
        original = policy if isinstance(policy, torch.nn.Module) else users
        return cls(
            copy,
            original,
            users,
            [policy, users],
            in_workers=True,
            has_model_ids=users is policy,
            name=name_of(policy),
        )

    def with_copy(self, policy: torch.nn.Module) -> PolicyModules:
        """Return the modules after a copy of the policy has taken its place."""
        return PolicyModules.here(
            policy, self.policy, [*self._roots, policy], self.name
        )

    @property
    def lazy(self) -> bool:
        """Whether layers of a policy in workers have no weights before its first call."""
        if not self.in_workers or self.policy is None:
            return False
        state = self.policy.state_dict(keep_vars=True)
        return any(map(torch.nn.parameter.is_lazy, state.values()))

    def is_whole(self, model: Any) -> bool:
        """Return whether an object stands for the whole policy."""
        return any(model is root for root in self._roots)

    def may_be_infinite(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the policy was infinite from the start."""
        return place_of(tensor) in self._unbounded

    def part(self, source: Any, model: Any) -> PolicyPart | None:
        """Return the part of the policy that weights of ``source`` for ``model`` are for.

        None: the policy has no weights, and none were given.

        Raises:
            BadWeights: there is no such part.
        """
        policy = self.policy
        if self.in_workers and policy is None:
            if source is None and model is None:
                return None
            raise BadWeights(
                f"the policy ({self.name}) has no modules that Muster can find, so there is"
                " nothing in the workers to copy weights to. Make the policy a module, or let it"
                " hold its networks as attributes."
            )
        if not isinstance(policy, torch.nn.Module):
            return self._part_of_function(source, model)
        users = policy if self.users is None else self.users
        if model is None:
            return PolicyPart(policy, users, "")
        for tree in (users, policy):
            for path, module in tree.named_modules():
                if module is model:
                    acting = policy.get_submodule(path)
                    return PolicyPart(acting, users.get_submodule(path), path)
        if self.in_workers:
            raise BadWeights(
                f"the model {type(model).__name__} is not a part of the policy that workers have"
            )
        return PolicyPart(model, model, "")

    def _part_of_function(self, source: Any, model: Any) -> PolicyPart | None:
        """``part`` of a function that acts here, whose modules are the user's."""
        bearer = weight_bearer(self.policy) if model is None else model
        if model is None and source is None:
            return None if bearer is None else PolicyPart(bearer, bearer, "")
        if bearer is None or (model is None and not is_own(source, bearer)):
            raise BadWeights(
                f"the policy ({self.name}) is not a module, so Muster cannot reach its weights."
                " Change them where the policy finds them, and call update_policy_weights_()"
                " without arguments to count a version."
            )
        return PolicyPart(bearer, bearer, "")


def _infinite(module: torch.nn.Module | None) -> frozenset[Any]:
    """Return the buffers with infinite values, such as the mask of an attention."""
    if module is None:
        return frozenset()
    infinite = [buffer for buffer in module.buffers() if not is_finite(buffer)]
    return frozenset(map(place_of, infinite))
