"""What a publish brings: new values for everything that acts, or none.

A policy is more than its network: heads have parameters of their own, wrappers and normalisers have
buffers. So a module that is a part of the user's policy stands for all of it, and weights from
elsewhere (a copy, a dict, a TensorDict) must cover all of the policy, or of the model that they are
for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from muster.errors import BadWeights
from muster.weights.names import (
    Weights,
    check_fit,
    named_weights,
    place_of,
    tensors_in,
    weight_bearer,
)

ModelId = Callable[
    [str], "str | None"
]  # of a part of the policy, by its path; None: it has none
OF_COLLECTOR = (
    "Call update_policy_weights_() to publish the policy that the collector was made with, or give"
    " the weights of all of it"
)


@dataclass(frozen=True)
class NewWeights:
    """Checked new values for a module.

    Attributes:
        weights: by name in the module; all of its parameters and buffers.
        is_own: they are those of the user's policy.
        given: the names that the source has itself; the others were taken from the user's policy
            beside it.
    """

    weights: Weights
    is_own: bool
    given: frozenset[str]


def taken(
    source: Any,
    target: torch.nn.Module,
    own: torch.nn.Module,
    model_id: ModelId | None = None,
    remedy: str = OF_COLLECTOR,
) -> NewWeights:
    """Find the new values for ``target`` in ``source``.

    Args:
        source: see ``PolicyWeights.publish``.
        target: what acts, or a copy of it.
        own: the same part of the user's policy; ``target`` itself if the user's policy acts.
        model_id: of parts of ``target``, for messages; None: they have none.
        remedy: for messages.

    Raises:
        BadWeights: names, shapes or dtypes do not fit, or a part of the target is not covered.
    """
    held = _module_of(source)
    if is_own(source, own):
        weights = tensors_of(own)
        given = frozenset(weights)
        if held is not None:
            inside = {place_of(tensor) for tensor in tensors_in(held)}
            given = frozenset(
                n for n, tensor in weights.items() if place_of(tensor) in inside
            )
        if own is not target:
            _check_not_lazy(weights)
            check_fit(weights, tensors_of(target))
        return NewWeights(weights, True, given)
    new = named_weights(source if held is None else held)
    _check_not_lazy(new)
    _check_not_lazy(tensors_of(target))
    weights = _fitted(new, target, model_id, remedy)
    return NewWeights(weights, False, frozenset(weights))


def is_own(source: Any, own: torch.nn.Module) -> bool:
    """Whether a source is the user's policy: None, a part of it, or a module that contains it.

    What counts is the memory of the tensors, however they are wrapped.
    """
    module = _module_of(source)
    if module is None:
        return source is None
    if any(module is part for part in own.modules()):
        return True
    inside = {place_of(tensor) for tensor in tensors_in(module)}
    outside = {place_of(tensor) for tensor in tensors_in(own)}
    if not inside or not outside:
        return False
    return inside <= outside or outside <= inside


def tensors_of(module: torch.nn.Module) -> Weights:
    """The tensors of a module's ``state_dict``; those of lazy layers have no values yet."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if torch.is_tensor(tensor)}


def _module_of(source: Any) -> torch.nn.Module | None:
    """A source that is a module, or a function that uses modules, as a module; None for other
    sources.
    """
    # ``TensorDictParams`` is a module, too
    if isinstance(source, (Mapping, type)) or hasattr(source, "flatten_keys"):
        return None
    return weight_bearer(source) if callable(source) else None


def _fitted(
    new: Weights,
    target: torch.nn.Module,
    model_id: ModelId | None,
    remedy: str,
) -> Weights:
    """The new weights by name in the target."""
    whole = tensors_of(target)
    named = _without_unsaved(new, target, whole)
    if _covers(named, whole):  # then no part has these names too
        check_fit(named, {name: whole[name] for name in named})
        return named
    parts = _parts_named_like(new, target)
    fitting = {path: part for path, part in parts.items() if _have_shapes(*part)}
    if len(fitting) > 1:
        ids = [] if model_id is None else [model_id(path) for path in fitting]
        which = ""
        if ids and all(ids):
            which = f", or name the part: {' or '.join(filter(None, ids))}"
        raise BadWeights(
            f"weights named {sorted(new)} fit several parts of the policy: {', '.join(fitting)}."
            f" Give those of the whole policy{which}. Nothing was changed."
        )
    if not parts:
        check_fit(named, whole, f"{remedy}.")  # raises: the names differ
    path, (weights, part) = next(iter((fitting or parts).items()))
    check_fit(weights, {name: part[name] for name in weights})
    covered = {place_of(tensor) for tensor in part.values()}
    missing = sorted(
        name for name, tensor in whole.items() if place_of(tensor) not in covered
    )
    if missing:
        named_part = None if model_id is None else model_id(path)
        which = (
            ""
            if named_part is None
            else f", or publish only this part with {named_part}"
        )
        raise BadWeights(
            f"the weights are those of {path}, which is only a part of the policy: missing"
            f" {missing}. {remedy}{which}. Nothing was changed."
        )
    return {f"{path}.{name}": tensor for name, tensor in weights.items()}


def _have_shapes(weights: Weights, part: Weights) -> bool:
    """Whether weights have the shapes of a part's tensors of the same names."""
    return all(tensor.shape == part[name].shape for name, tensor in weights.items())


def _parts_named_like(
    new: Weights, target: torch.nn.Module
) -> dict[str, tuple[Weights, Weights]]:
    """The parts of the target that have these names, by path: the new weights and the part's
    tensors, by name in it.
    """
    found = {}
    for path, module in target.named_modules():
        part = tensors_of(module)
        named = _without_unsaved(new, module, part)
        if path and part and _covers(named, part):
            found[path] = (named, part)
    return found


def _covers(named: Weights, tensors: Weights) -> bool:
    """Whether these are names of all tensors; of a tensor with several names (tied weights), one is
    enough.
    """
    if not named.keys() <= tensors.keys():
        return False
    covered = {place_of(tensors[name]) for name in named}
    return all(place_of(tensor) in covered for tensor in tensors.values())


def _without_unsaved(new: Weights, module: torch.nn.Module, saved: Weights) -> Weights:
    """Leave out buffers that are not in the ``state_dict``: ``named_buffers`` and TensorDicts have
    them, too.
    """
    unsaved = {name for name, _ in module.named_buffers()} - saved.keys()
    return {name: tensor for name, tensor in new.items() if name not in unsaved}


def _check_not_lazy(weights: Weights) -> None:
    for name, tensor in weights.items():
        if is_lazy(tensor):
            raise BadWeights(
                f"weight {name} is of a lazy layer, which has no values before the policy's first"
                " call. Call the policy once, or collect a batch. Nothing was changed."
            )
