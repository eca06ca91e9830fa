"""The specs of a TorchRL environment as Muster's specs of one environment, and random actions from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.data.tensor_specs import StackedComposite
from torchrl.envs import EnvBase

from muster.errors import UnsupportedEnv
from muster.keys import FLAGS, REWARD, TEAM_REWARD, Key, next_of
from muster.memory.drawing import draw
from muster.memory.slots import numpy_dtype
from muster.memory.specs import OBJECT, Array, ArraySpec, Specs

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


@dataclass(frozen=True)
class Nesting:
    """A nested TensorDict: its dimensions besides those of the batch, and its tensorclass, if any."""

    shape: tuple[int, ...] = ()
    kind: Any = None


@dataclass(frozen=True)
class Declared:
    """The specs of an environment; ``lead`` is its batch size.

    Attributes:
        observations: leaves before and after a step: observations, state, and done flags below the
            root.
        steps: leaves after a step only: rewards, except a single ordinary one.
        state, state_only: keys of observations that are inputs of a step, and those of them that it
            need not return.
        ends: done flags that end an episode.
        nodes: nested TensorDicts with further dimensions or a tensorclass.
    """

    lead: tuple[int, ...]
    observations: Specs
    actions: Specs
    steps: Specs
    flags: tuple[Key, ...]
    ends: tuple[Key, ...]
    state: frozenset[Key]
    state_only: frozenset[Key]
    done: Specs
    rewards: Specs
    reward_key: Key
    reward_dtype: np.dtype[Any]
    nodes: dict[Key, Nesting]

    @property
    def reward_ends(self) -> dict[Key, Key]:
        """The nested flags ``done`` beside rewards of the same shape; see ``EnvSpec``."""
        found = {}
        for key, spec in self.steps.items():
            done = (*key[:-1], "done")
            if (
                len(key) > 1
                and done in self.done
                and self.done[done].shape == spec.shape
            ):
                found[key] = done
        return found

    def same_as(self, other: Declared) -> bool:
        """Return whether environments with these specs can share columns."""
        return self._signature() == other._signature()

    def _signature(self) -> tuple[Any, ...]:
        leaves = []
        for specs in (
            self.observations,
            self.actions,
            self.done,
            self.rewards,
        ):
            for key, spec in specs.items():
                low = _raw(spec.low)
                high = _raw(spec.high)
                leaves.append((key, str(spec), spec.ragged, low, high))
        return (
            self.lead,
            self.flags,
            self.ends,
            self.reward_key,
            leaves,
        )


def declared(env: EnvBase) -> Declared:
    """Read the specs of ``env``. Raises ``UnsupportedEnv`` for a reserved key."""
    lead = tuple(env.batch_size)
    nodes: dict[Key, Nesting] = {}

    def specs(composite: Composite) -> Specs:
        found: Specs = {}
        for key, leaf in _leaves(composite, len(lead), nodes):
            spec = _array_spec(leaf, len(lead))
            inner = 0
            if len(key) > 1 and spec.is_tensor:
                node = nodes[key[:-1]]
                inner = len(node.shape)
            found[key] = replace(spec, inner=inner)
        return found

    done = specs(env.full_done_spec)
    rewards = specs(env.full_reward_spec)
    at_root = [key for key in FLAGS if key in done]
    flags = tuple(key for key in at_root if done[key].shape == (1,))
    # A reward that is also a state is carried from step to step.
    state = specs(env.full_state_spec)
    returned = specs(env.full_observation_spec)
    observations = {**state, **returned}
    for key, spec in done.items():
        if key not in flags:
            observations[key] = spec
    for key in observations:
        if key[0] in ("next", "collector", "action") or key in FLAGS:
            raise UnsupportedEnv(
                f"{type(env).__name__} has an observation or state {key}, a name that a batch needs"
                " for itself. Rename it with torchrl.envs.RenameTransform."
            )
    reward_key: Key = ("reward",)
    reward = ArraySpec((), OBJECT)
    if rewards:
        reward_key, reward = next(iter(rewards.items()))
    the_only = len(rewards) <= 1 and next_of(reward_key) == REWARD
    plain = the_only and reward.shape == (1,) and reward.dtype.kind == "f"
    steps: Specs = {}
    reward_dtype = reward.dtype
    if not plain:
        reward_dtype = np.dtype(np.float32)
        for key, spec in rewards.items():
            if key not in observations:
                steps[key] = spec
    actions = specs(env.full_action_spec)
    return Declared(
        lead=lead,
        observations=observations,
        actions=actions,
        steps=steps,
        flags=flags,
        ends=_ends(done),
        state=frozenset(state),
        state_only=frozenset(state.keys() - returned.keys()),
        done=done,
        rewards=rewards,
        reward_key=REWARD if plain else TEAM_REWARD,
        reward_dtype=reward_dtype,
        nodes={key: node for key, node in nodes.items() if node != Nesting()},
    )


def _raw(bound: Array | None) -> bytes | None:
    if bound is None:
        return None
    return bound.tobytes()


def _ends(done: Specs) -> tuple[Key, ...]:
    """Return the flags that decide in TorchRL: ``done`` at the root, or else the flags nearest to
    the root.
    """
    if ("done",) in done and ("terminated",) in done:
        return (("done",),)
    parents = {key[:-1] for key in done}

    def has_parent(key: Key) -> bool:
        return any(key[:depth] in parents for depth in range(len(key) - 1))

    return tuple(key for key in done if not has_parent(key))


def _leaves(
    composite: Composite,
    dims: int,
    nodes: dict[Key, Nesting],
    path: Key = (),
) -> Iterator[tuple[Key, TensorSpec | None]]:
    """Yield leaves by key; None for a leaf that only some parts of a stack have."""
    if path:
        kind = getattr(composite, "data_cls", None)
        nodes[path] = Nesting(tuple(composite.shape[dims:]), kind)
    if isinstance(composite, StackedComposite):
        names: dict[Any, None] = {}  # in order
        for part in composite._specs:
            names |= dict.fromkeys(part.keys())
    else:
        names = dict.fromkeys(composite.keys())
    shared = set(composite.keys())
    for name in names:
        key = (*path, name)
        spec = None
        if name in shared:
            spec = composite[name]
        if isinstance(spec, Composite):
            yield from _leaves(spec, dims, nodes, key)
        else:
            yield key, spec


def _array_spec(spec: TensorSpec | None, dims: int) -> ArraySpec:
    if isinstance(spec, NonTensor):
        return ArraySpec((), OBJECT)
    ragged = ArraySpec((), OBJECT, ragged=True)
    if spec is None or spec.dtype is None:
        return ragged
    if any(n < 0 for n in spec.shape):
        return ragged
    try:
        dtype = numpy_dtype(spec.dtype)
    except TypeError:  # a dtype that NumPy lacks, such as bfloat16
        return ragged
    shape = tuple(spec.shape[dims:])
    low, high = _bounds(spec, dims)
    if low is None or high is None:
        return ArraySpec(shape, dtype)
    low = np.broadcast_to(low, shape)
    high = np.broadcast_to(high, shape)
    return ArraySpec(
        shape,
        dtype,
        low.astype(dtype),
        high.astype(dtype),
        one_hot=_one_hot_sizes(spec),
    )


def _one_hot_sizes(spec: TensorSpec) -> tuple[int, ...]:
    if isinstance(spec, MultiOneHot):
        return tuple(int(space.n) for space in spec.space)
    if isinstance(spec, OneHot):
        return (int(spec.space.n),)
    return ()


def _bounds(spec: TensorSpec, dims: int) -> tuple[Any, Any]:
    """Return inclusive bounds: the widest ones of all environments of a batch."""
    if isinstance(spec, (OneHot, Binary)) or spec.dtype == torch.bool:
        return 0, 1
    if isinstance(spec, MultiCategorical):
        nvec = spec.nvec.reshape(-1, spec.nvec.shape[-1])
        most = nvec.amax(0).numpy()
        return 0, most - 1
    if isinstance(spec, Categorical):
        n = spec.space.n
        if n <= 0:
            return None, None
        return 0, n - 1
    if isinstance(spec, Bounded):
        low = spec.space.low.cpu()
        high = spec.space.high.cpu()
        for _ in range(dims):
            low = low.amin(0)
            high = high.amax(0)
        return low.numpy(), high.numpy()
    return None, None


# --- random actions -------------------------------------------------------------------------------


def drawers(composite: Composite, dims: int) -> dict[Key, Draw] | None:
    """Return a function per action leaf that draws ``[*shape, *leaf shape]`` from the distribution
    of ``spec.rand``.

    None if the kind of a leaf is unknown, or the distributions of the environments differ.
    """
    found = {}
    for key, spec in _leaves(composite, dims, {}):
        if spec is None:
            return None
        draw = _drawer(spec, _array_spec(spec, dims), dims)
        if draw is None:
            return None
        found[key] = draw
    return found


def masked(composite: Composite) -> bool:
    """Return whether a spec has an action mask."""
    leaves = _leaves(composite, 0, {})
    return any(getattr(spec, "mask", None) is not None for _, spec in leaves)


def _drawer(spec: TensorSpec, row: ArraySpec, dims: int) -> Draw | None:
    kind = type(spec)
    if not row.is_tensor or getattr(spec, "mask", None) is not None:
        return None
    dtype = row.dtype
    shape = row.shape
    if kind is OneHot:
        table = np.eye(int(spec.space.n), dtype=dtype)

        def one_hot(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
            rows = (*size, *shape[:-1])
            chosen = rng.integers(len(table), size=rows)
            return table[chosen]

        return one_hot
    if kind is MultiOneHot:
        tables = [np.eye(int(space.n), dtype=dtype) for space in spec.space]
        widths = [len(table) for table in tables]

        def several(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
            rows = (*size, *shape[:-1])
            chosen = rng.integers(widths, size=(*rows, len(widths)))
            hot = []
            for i, table in enumerate(tables):
                hot.append(table[chosen[..., i]])
            return np.concatenate(hot, -1)

        return several
    unbounded_floats = isinstance(spec, Unbounded) and dtype.kind == "f"
    alike = kind in (Categorical, Binary) or unbounded_floats
    if kind is MultiCategorical:
        alike = spec.nvec.ndim == 1 or _alike(spec.nvec, dims)
    elif isinstance(spec, Bounded):
        lows_alike = _alike(spec.space.low, dims)
        alike = lows_alike and _alike(spec.space.high, dims)
    elif isinstance(spec, Unbounded):
        low = np.full(shape, -np.inf)
        high = np.full(shape, np.inf)
        row = replace(row, low=low, high=high)
    if not alike or row.low is None:
        return None
    if kind in (Categorical, Binary, MultiCategorical) and dtype.kind == "f":
        assert row.high is not None
        low, high = row.low.astype(np.int64), row.high.astype(np.int64)
        whole = ArraySpec(shape, np.dtype(np.int64), low, high)
        # the numbers of choices, not all floats between them
        return lambda rng, size: draw(whole, rng, size).astype(dtype)
    return partial(draw, row)


def _alike(bound: torch.Tensor, dims: int) -> bool:
    rows = bound.unsqueeze(0)
    if dims:
        rows = bound.flatten(0, dims - 1)
    as_first = rows == rows[0]
    return bool(as_first.all())
