"""The evaluator's own policy, and snapshots of the user's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from muster.errors import BadWeights, described
from muster.restore.pickling import dumps, loads
from muster.weights.names import Weights, modules_of, named_tensors, named_weights, weight_bearer


def private_copy(policy: Any) -> Any:
    """A copy of a policy, all of whose modules are in evaluation mode (no dropout, fixed statistics).

    What a function of an importable file reaches by name cannot be copied within one process: such modules stay the
    user's, as they are.

    Raises:
        BadWeights, BadOption: it cannot be copied, or has lazy layers that have not been called yet.
    """
    if policy is None:
        return None
    named_tensors(policy)  # which raises for lazy layers
    try:
        own = copy.deepcopy(policy) if isinstance(policy, torch.nn.Module) else loads(dumps(policy, "policy"), "policy")
    except (RuntimeError, TypeError) as error:
        raise BadWeights(f"the policy cannot be copied: {described(error)}") from error
    for module in modules_of(own):
        if not shares_modules(module, policy):
            module.eval()
    return own


def shares_modules(policy: Any, other: Any) -> bool:
    """Some module is part of both."""
    others = {id(module) for module in modules_of(other)}
    return any(id(module) in others for module in modules_of(policy))


def weights_of(source: Any, *, copied: bool) -> Weights | None:
    """The weights of a policy, module, TensorDict or dict, by name; None for what has none, such as plain functions.

    Args:
        copied: later changes of ``source`` do not show.

    Raises:
        BadWeights: lazy layers that have not been called yet.
    """
    plain = isinstance(source, (torch.nn.Module, Mapping)) or hasattr(source, "flatten_keys")
    bearer = source if plain else weight_bearer(source)
    if bearer is None:
        return None
    if isinstance(bearer, torch.nn.Module):
        named_tensors(bearer)  # which raises for lazy layers
    weights = named_weights(bearer)
    return {name: tensor.clone() for name, tensor in weights.items()} if copied else weights
