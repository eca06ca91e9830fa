"""Gymnasium spaces: their specs, leaves of their values, and random values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.envs.checks import FIX
from muster.errors import BadEnvOutput, UnsupportedSpace
from muster.keys import (
    ACTION,
    ACTION_MASK,
    OBSERVATION,
    RESERVED,
    REWARD,
    Key,
    dotted,
)
from muster.memory.drawing import draw
from muster.memory.specs import OBJECT, Array, ArraySpec, Specs
from muster.rng import GroupRng

Leaves = list[Any]


class SpaceCodec:
    """Splits the values of one space into leaves, and builds values from leaves.

    Nested Dict and Tuple spaces are split at all levels. A space without a fixed shape (Text,
    Sequence, Graph, OneOf, custom spaces) becomes one object leaf. ``root`` is the key of a space
    that is neither Dict nor Tuple.

    Attributes:
        specs: specs of the leaves by key, in the order of ``flatten`` and ``build``.
        single: the value itself is the only leaf.
    """

    def __init__(self, space: spaces.Space[Any], root: Key) -> None:
        self.space = space
        self.specs: Specs = {}
        self._spaces: list[spaces.Space[Any]] = []
        self._flatten: Callable[[Any, Leaves], None] = self._open(space, root)
        if not self.specs:
            raise UnsupportedSpace(
                f"{space} has no part that could be stored; give it at least one"
            )
        self.single = not isinstance(space, (spaces.Dict, spaces.Tuple))

    def flatten(self, value: Any, who: str = "") -> Leaves:
        """Return the leaves of ``value``, returned by ``who``; checks only number and keys
        (``BadEnvOutput``).
        """
        leaves: Leaves = []
        try:
            self._flatten(value, leaves)
        except BadEnvOutput as error:
            where = f"{who}: {error}. {FIX}" if who else str(error)
            raise BadEnvOutput(where) from None
        return leaves

    def build(self, leaves: Sequence[Any]) -> Any:
        source = iter(leaves)
        return _build(self.space, source)

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Draw uniform values (if unbounded: like ``Box.sample``), ``[*shape, *leaf shape]`` per
        leaf.
        """
        drawn: dict[Key, Array] = {}
        for number, (key, spec) in enumerate(self.specs.items()):
            space = self._spaces[number]
            drawn[key] = _sample(space, spec, rng.stream(number), shape)
        return drawn

    def _open(
        self,
        space: spaces.Space[Any],
        path: Key,
    ) -> Callable[[Any, Leaves], None]:
        if isinstance(space, spaces.Dict):
            parts = {}
            for name, part in space.spaces.items():
                parts[name] = self._open(part, (*path, str(name)))
            return lambda value, out: _flatten_dict(parts, path, value, out)
        if isinstance(space, spaces.Tuple):
            items = []
            for number, item in enumerate(space.spaces):
                items.append(self._open(item, (*path, str(number))))
            return lambda value, out: _flatten_tuple(items, path, value, out)
        if path in self.specs:
            raise UnsupportedSpace(
                f"two parts of {space} share the key {dotted(path)!r}; rename one of them"
            )
        self.specs[path] = leaf_spec(space)
        self._spaces.append(space)
        return lambda value, out: out.append(value)


def observation_codec(space: spaces.Space[Any]) -> SpaceCodec:
    """Return the codec of observations, with the key ``observation``, or the keys of a Dict space."""
    if not isinstance(space, spaces.Dict):
        return SpaceCodec(space, OBSERVATION)
    names = map(str, space.spaces)
    # not in RESERVED: policies may return a "reward", which has no other one after the step
    taken = sorted((RESERVED | {REWARD[-1]}).intersection(names))
    if taken:
        raise UnsupportedSpace(
            f"the observation space has the keys {taken}, which a batch needs for itself. "
            "Rename them with gymnasium.wrappers.TransformObservation."
        )
    return SpaceCodec(space, ())


def action_codec(space: spaces.Space[Any]) -> SpaceCodec:
    """Return the codec of actions, with the key ``action``, or ``("action", name)`` for a Dict or
    Tuple space.
    """
    return SpaceCodec(space, ACTION)


def action_masks(observed: Specs, actions: Specs, root: Key = ()) -> dict[Key, Key]:
    """Return the key of the action mask by key of the action, of the leaves called ``action_mask``
    (below ``root``).

    The mask ``("action_mask", *name)`` is that of the action ``("action", *name)``. A mask
    ``("action_mask",)`` of an action with several parts is that of its only discrete part. A mask
    of no action is returned as one of the first action. ``policies.sampling.check_masks`` raises if
    an action cannot have the mask.
    """
    depth = len(root) + 1  # of the names below ``action_mask``
    above = (*root, *ACTION_MASK)
    masks = []
    for key in observed:
        if key[:depth] == above and not key[-1].startswith("_"):
            masks.append(key)
    found: dict[Key, Key] = {}
    for key in masks:
        action = (*ACTION, *key[depth:])
        if action in actions:
            found[action] = key
    discrete = [action for action, spec in actions.items() if spec.is_discrete]
    for key in masks:
        if key in found.values():
            continue
        chosen = next(iter(actions))
        if len(discrete) == 1:
            (chosen,) = discrete
        found.setdefault(chosen, key)
    return found


def leaf_spec(space: spaces.Space[Any]) -> ArraySpec:
    """Return the spec of a space without parts."""
    if isinstance(space, spaces.Box):
        return ArraySpec(space.shape, space.dtype, space.low, space.high)
    if isinstance(space, spaces.Discrete):
        dtype = np.dtype(space.dtype)
        low = np.asarray(space.start, dtype)
        high = np.asarray(space.start + space.n - 1, dtype)
        return ArraySpec((), dtype, low, high)
    if isinstance(space, spaces.MultiDiscrete):
        dtype = np.dtype(space.dtype)
        low = space.start.astype(dtype)
        high = (space.start + space.nvec - 1).astype(dtype)
        return ArraySpec(space.shape, dtype, low, high)
    if isinstance(space, spaces.MultiBinary):
        dtype = np.dtype(space.dtype)
        low = np.zeros(space.shape, dtype)
        high = np.ones(space.shape, dtype)
        return ArraySpec(space.shape, dtype, low, high)
    if not isinstance(space, spaces.Space):
        raise UnsupportedSpace(
            f"expected a gymnasium.Space, got {type(space).__name__}: {space!r}"
        )
    return ArraySpec((), OBJECT)


def _flatten_dict(
    parts: Mapping[str, Callable[[Any, Leaves], None]],
    path: Key,
    value: Any,
    out: Leaves,
) -> None:
    name = dotted(path) or "observation"
    if not isinstance(value, Mapping):
        raise BadEnvOutput(
            f"{name}: expected a dict with the keys {sorted(parts)}, got {type(value).__name__}"
        )
    if value.keys() != parts.keys():
        missing = sorted(parts.keys() - value.keys())
        extra = sorted(map(str, value.keys() - parts.keys()))
        raise BadEnvOutput(
            f"{name}: expected the keys {sorted(parts)}, missing {missing}, unknown {extra}"
        )
    for key, part in parts.items():
        part(value[key], out)


def _flatten_tuple(
    items: Sequence[Callable[[Any, Leaves], None]],
    path: Key,
    value: Any,
    out: Leaves,
) -> None:
    is_sequence = isinstance(value, (tuple, list))
    if not is_sequence or len(value) != len(items):
        got = type(value).__name__
        if is_sequence:
            got += f" of {len(value)}"
        raise BadEnvOutput(
            f"{dotted(path)}: expected a tuple of {len(items)}, got {got}"
        )
    for item, part in zip(value, items, strict=True):
        part(item, out)


def _build(space: spaces.Space[Any], leaves: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _build(part, leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_build(part, leaves) for part in space.spaces)
    return next(leaves)


def _sample(
    space: spaces.Space[Any],
    spec: ArraySpec,
    rng: np.random.Generator,
    shape: tuple[int, ...],
) -> Array:
    if spec.is_tensor:
        return draw(spec, rng, shape)
    out = np.empty(shape, OBJECT)
    for index in np.ndindex(shape):
        space.seed(int(rng.integers(2**31)))
        out[index] = space.sample()
    return out
