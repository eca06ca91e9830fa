"""Uniform random actions, and the values of the policy's other columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.capabilities import DrawsActions, capability
from muster.errors import MusterError
from muster.keys import IS_INIT, Key
from muster.memory.drawing import draw
from muster.memory.slots import Lane, as_tensor
from muster.memory.specs import OBJECT, Array, Column
from muster.policies.sampling import ActionMask, masks_of
from muster.protocols import Act, EnvBatch, Outputs
from muster.rng import GroupRng

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

Sample = Callable[[GroupRng, tuple[int, ...]], dict[Key, Array]]
FIRST_MASKED = 1 << 19  # first stream for masked actions; see ``GroupRng.stream``


def sampler_of(env: EnvBatch) -> Sample:
    """Return the function that draws actions of an env batch: its own, or from the specs."""
    drawing = capability(env, DrawsActions)
    if drawing is None:
        return partial(_draw_actions, env)
    return drawing.sample


def _draw_actions(
    env: EnvBatch,
    rng: GroupRng,
    shape: tuple[int, ...],
) -> dict[Key, Array]:
    drawn = {}
    for i, (key, spec) in enumerate(env.spec.action_specs.items()):
        drawn[key] = draw(spec, rng.stream(i), shape)
    return drawn


def random_policy(env: EnvBatch) -> RandomPolicy:
    """Return the policy that draws the actions of an env batch uniformly, among the allowed ones."""
    return RandomPolicy(
        sampler_of(env), env.spec.acting_shape, masks=masks_of(env.spec)
    )


class RandomPolicy:
    """Implements ``Policy`` with ``sample(rng, shape)``, which returns ``[*shape, *leaf shape]``
    per action leaf.

    Actions of a rollout are drawn at once; those with an action mask (``masks``) in each row, among
    the allowed ones. Rollouts have the columns of the collector's policy, so that all its batches
    have the same columns. Rows without an output of that policy are filled: extras with ``unknown``
    (integers 0, flags False, objects None), and recurrent states with those of the start of an
    episode, from which the policy continues: zeros, or what the environment's reset has written
    (TorchRL's ``TensorDictPrimer``).
    """

    name = path = "random"
    draws_globally = False
    raises = (MusterError,)  # errors of the environments, which draw the actions

    def __init__(
        self,
        sample: Sample,
        batch_shape: tuple[int, ...],
        unknown: float = float("nan"),
        *,
        masks: Sequence[ActionMask] = (),
    ) -> None:
        self._sample = sample
        self._masks = masks
        self._shape = batch_shape
        self._unknown = unknown
        self._columns: Sequence[Column] = ()
        self._cells: Mapping[Key, Array] = {}

    def learn(self, columns: Sequence[Column], cells: Mapping[Key, Array]) -> None:
        """Fill the columns of another policy from now on; ``cells`` are examples of its columns of
        objects.
        """
        self._columns = columns
        self._cells = cells

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        drawn = self._sample(rng, self._shape)
        for place, mask in enumerate(self._masks):
            action = drawn[mask.action]
            lead = len(self._shape)
            legal = obs[mask.key]
            rows = legal.reshape(-1, *legal.shape[lead:])
            stream = rng.stream(FIRST_MASKED + place)
            uniform = stream.random((len(rows), len(mask.drawn)))
            if torch.is_tensor(action):
                numbers = torch.from_numpy(uniform).to(rows.device)
                chosen = mask.draw_on_device(rows, numbers).to(action.dtype)
                drawn[mask.action] = chosen.reshape(action.shape)
            else:
                values = mask.draw(rows.numpy(), uniform).astype(action.dtype)
                drawn[mask.action] = values.reshape(np.shape(action))
        tensors: dict[Key, torch.Tensor] = {}
        objects: dict[Key, Array] = {}
        for key, value in drawn.items():
            if value.dtype == OBJECT:
                objects[key] = value
            else:
                tensors[key] = as_tensor(value)
        return Outputs(tensors, objects=objects)

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        """Fill all remaining rows; the returned ``act`` only does what depends on each row."""
        begin = lane.acts_from
        until = lane.acts_until
        acts = []
        for place, mask in enumerate(self._masks):
            stream = rng.stream(FIRST_MASKED + place)
            if lane.mirrored:
                acts.append(self._masked_there(mask, lane, stream))
            else:
                acts.append(self._masked(mask, lane, stream))
        # also without a row: environments that choose actions themselves notice the rollout
        shape = (max(0, until - begin), lane.B)
        for key, drawn in self._sample(rng, shape).items():
            lane.data[key][begin:until] = drawn
        of_env = {column.key for column in lane.layout.columns if column.by_policy}
        for column in self._columns:
            rows = lane.data[column.key]
            begin = lane.done_steps
            if column.ragged:
                rows[begin:until] = self._emptied(self._cells[column.key].flat[0])
            elif not column.carry:
                rows[begin:until] = self._empty(column)
            elif column.key in of_env:
                hold = _holds(rows)
                acts.append(hold)
                for t in range(
                    begin, lane.acts_from
                ):  # rows that have an action already
                    hold(t)
            elif column.key != IS_INIT:  # the loop writes IS_INIT
                rows[begin + 1 : until + 1] = 0
        if not acts:
            return _nothing
        if not lane.mirrored:
            return _all_of(acts)
        act = lane.cache.get(
            self
        )  # the same function each time, as recorded rollouts require
        if act is None:
            act = lane.cache[self] = _all_of(acts)
        return act

    def _masked(
        self,
        mask: ActionMask,
        lane: Lane,
        stream: np.random.Generator,
    ) -> Act:
        first = lane.acts_from
        rows = lane.data[mask.key]
        actions = lane.data[mask.action]
        most = max(0, lane.acts_until - first)
        uniform = stream.random((most, lane.B, len(mask.drawn)))

        def draw(t: int) -> None:
            chosen = mask.draw(rows[t], uniform[t - first])
            actions[t] = chosen.reshape(actions[t].shape)

        return draw

    def _masked_there(
        self,
        mask: ActionMask,
        lane: Lane,
        stream: np.random.Generator,
    ) -> Act:
        """The same on a device: the same function for all rollouts in a lane."""
        first = lane.acts_from
        most = max(0, lane.acts_until - first)
        uniform = torch.from_numpy(stream.random((most, lane.B, len(mask.drawn))))
        key = (self, mask.action)
        if key not in lane.cache:
            lane.cache[key] = _drawing_there(mask, lane, uniform)
        numbers, draw = lane.cache[key]
        numbers[first : first + most].copy_(uniform)
        return draw  # type: ignore[no-any-return]

    def _empty(self, column: Column) -> Any:
        if not column.is_tensor:
            return None
        return self._unknown if column.dtype.kind in "fc" else 0

    def _emptied(self, cell: Any) -> Array:
        """The same for one cell of a ragged column; as a 0-d object array, so that NumPy does not
        convert it.
        """
        out = np.empty((), OBJECT)
        if hasattr(cell, "apply"):
            out[()] = cell.apply(self._emptied_tensor)
        else:
            out[()] = self._emptied_tensor(cell)
        return out

    def _emptied_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.full_like(tensor, self._unknown)
        return torch.zeros_like(tensor)


def _holds(rows: Any) -> Act:
    """Return the function that keeps the state of a row for the next one."""

    def hold(t: int) -> None:
        rows[t + 1] = rows[t]

    return hold


def _nothing(t: int) -> None:
    pass


def _all_of(acts: Sequence[Act]) -> Act:
    def act(t: int) -> None:
        for each in acts:
            each(t)

    return act


def _drawing_there(
    mask: ActionMask,
    lane: Lane,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, Act]:
    """Return the memory of the random numbers of all rows of a lane, and the function that draws an
    action with them.
    """
    rows = lane.data[mask.key]
    actions = lane.data[mask.action]
    numbers = torch.empty(
        (lane.T, *uniform.shape[1:]), dtype=uniform.dtype, device=rows.device
    )

    def draw(t: int) -> None:
        chosen = mask.draw_on_device(rows[t], numbers[t])
        actions[t].copy_(chosen.reshape(actions[t].shape))

    return numbers, draw
