"""A head as a policy: runs the network by the executor if possible, and samples actions with the
group's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.errors import BadPolicyOutput
from muster.keys import LOG_PROB, Key, nested
from muster.memory.slots import Lane, torch_dtype
from muster.memory.specs import Array, Column
from muster.policies.checks import MASKED_RAISES, PolicySetting, called_first
from muster.policies.executor import Program, plan
from muster.policies.heads import Head
from muster.policies.inputs import InputRows, unchanged_inputs
from muster.policies.sampling import ActionRows, Emit, Emitter
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.utils.devices import moved


class _Views:
    """The rows of a lane, as a head reads and writes them.

    Attributes:
        inputs, tensors, arrays: the observations.
        rows: the actions.
    """

    def __init__(
        self,
        inputs: InputRows,
        tensors: list[Any],
        arrays: list[Array],
        rows: ActionRows,
    ) -> None:
        self.inputs = inputs
        self.tensors = tensors
        self.arrays = arrays
        self.rows = rows
        # of one row, or of a rollout that stays open
        self._emitter: Emitter | None = None
        self._rng: GroupRng | None = None  # of its noise
        self._act: Act | None = None
        self._program: Program | None = None

    def kept_emitter(self, head: Head, rng: GroupRng) -> Emitter:
        """Return the emitter that all these requests of a group use, with its memory for noise. (A
        server prepares one lane for several groups, and each has noise of its own.)
        """
        if self._emitter is None or rng is not self._rng:
            self._emitter = head.emitter(self.rows)
            self._rng = rng
            self._act = None
        return self._emitter

    def kept_act(self, program: Program | None, make: Callable[[], Act]) -> Act:
        """Return the function that acts for these requests, while the program is the same."""
        if self._act is None or program is not self._program:
            self._act = make()
            self._program = program
        return self._act


class HeadPolicy:
    """Implements ``Policy`` for a head, and binds it to the action space (``BadOption`` if it does
    not fit).

    Noise is drawn from ``rng.numpy`` once per rollout, the same for every ``path``; on a device see
    ``Head.draw``. The cost of ``act`` for a 4-64-64-2 network is in
    docs/decisions/0002-executor-choice.md.

    The network gets a tensor if there is one observation, else a nested dict of tensors; the action
    mask is not part of it. Actions are sampled where the rows are.
    """

    raises = MASKED_RAISES

    def __init__(self, head: Head, setting: PolicySetting) -> None:
        fitted = head.fit(setting.action_specs, setting.masks)
        self._action_key, self._spec, self._width = fitted
        self.head = head
        self.name = head.name
        self.path = "module"
        self._mask = head.mask
        obs_keys = list(setting.obs_specs)
        if self._mask is not None and self._mask.key in obs_keys:
            obs_keys.remove(self._mask.key)
        self._obs_keys = tuple(obs_keys)
        self._batch_dims = len(setting.batch_shape)
        self._batched = bool(setting.batch_shape)
        self._deterministic = setting.deterministic
        self._device = setting.device
        self._on_device = setting.rows_device is not None
        is_module = isinstance(head.net, torch.nn.Module)
        fits_executor = is_module and len(self._obs_keys) == 1
        self._executor = setting.executor and fits_executor
        self._program: Program | None = None

    @torch.no_grad()
    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        own = {key: obs[key] for key in self._obs_keys}
        given, check_unchanged = unchanged_inputs(own, self.head.name)
        leaves = list(own.values())
        lead = tuple(leaves[0].shape[: self._batch_dims])

        def call() -> Any:
            x = self._input(list(given.values()))
            return self.head.net(x)

        out = called_first(call, given, lead, self.head.name)
        check_unchanged()
        x = self._input(leaves)
        B = math.prod(lead)
        self._check(out, lead)
        self._plan(x)
        if self._on_device:
            return self._drawn(out, leaves[0], obs)
        shape = (1, B, *self._spec.shape)
        action = np.zeros(shape, self._spec.dtype)
        masked = None
        if self._mask is not None:
            legal = obs[self._mask.key].numpy()
            masked = (self._mask, legal.reshape(1, B, -1))
        rows = ActionRows(self.head.name, action, None, masked)
        emitter = self.head.emitter(rows)
        emitter.draw(0, 1, self._noise(rng))
        emitter.emit(0, _host(out).reshape(B, -1))
        chosen = torch.from_numpy(rows.action[0])
        chosen = chosen.reshape((*lead, *self._spec.shape))
        extras = {}
        if self.head.has_log_prob:
            log_prob = torch.from_numpy(rows.log_prob_array[0])
            extras[LOG_PROB] = log_prob.reshape(lead)
        return Outputs({self._action_key: chosen}, extras)

    @property
    def draws_globally(self) -> bool:
        return not self.path.endswith("executor")

    def columns(self) -> Sequence[Column]:
        if not self.head.has_log_prob:
            return []
        return [Column(LOG_PROB, (), np.dtype(np.float32))]

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        if lane.mirrored:
            return self._start_on_device(lane)
        if self not in lane.cache:
            lane.cache[self] = self._views(lane)
        views: _Views = lane.cache[self]
        first = lane.acts_from
        until = lane.acts_until
        if self._program is not None and not self._program.current():
            row = [leaf[first] for leaf in views.tensors]
            self._plan(self._input(row))
        has_several = until == lane.T and lane.T > 1
        if has_several:
            emitter = self.head.emitter(views.rows)
            emitter.draw(first, until, self._noise(rng))
            return self._make_act(views, emitter.emit, lane.B)
        # one row, or a rollout that stays open: the next ones have the same functions
        emitter = views.kept_emitter(self.head, rng)
        if first < until:
            emitter.draw(first, until, self._noise(rng))
        return views.kept_act(
            self._program, lambda: self._make_act(views, emitter.emit, lane.B)
        )

    def _make_act(self, views: _Views, emit: Emit, B: int) -> Act:
        program = self._program
        if program is not None and program.kind == "numpy":
            return _act_numpy(program.steps, views.arrays, emit, self._batched)
        tensors = views.tensors
        compute: Callable[[Any], Any] = program or self.head.net
        if self._device is None and len(tensors) == 1:
            act = _act_module(compute, tensors[0], emit, B)
        else:

            def act(t: int) -> None:
                x = self._input([leaf[t] for leaf in tensors])
                out = _host(compute(x))
                emit(t, out.reshape(B, -1))

        if program is not None or self._device is not None:
            return act
        return views.inputs.watched(act)

    def _start_on_device(self, lane: Lane) -> Act:
        if self._program is not None and not self._program.current():
            leaves = [lane.rows(key) for key in self._obs_keys]
            row = [leaf[lane.acts_from] for leaf in leaves]
            self._plan(self._input(row))
        program, act = lane.cache.get(self, (None, None))
        # the same function while nothing has changed, as recorded rollouts require
        if act is None or program is not self._program:
            act = self._make_device_act(lane)
            lane.cache[self] = self._program, act
        return act  # type: ignore[no-any-return]

    def _make_device_act(self, lane: Lane) -> Act:
        inputs = InputRows(lane, self._obs_keys, self.head.name)
        tensors = [inputs.rows(key) for key in self._obs_keys]
        actions = lane.tensors[self._action_key]
        log_probs = lane.tensors.get(LOG_PROB)
        compute: Callable[[Any], Any] = self._program or self.head.net
        head = self.head
        deterministic = self._deterministic
        B = lane.B
        masks = None
        if self._mask is not None:
            masks = lane.tensors[self._mask.key]

        def act(t: int) -> None:
            x = self._input([leaf[t] for leaf in tensors])
            out = compute(x).reshape(B, -1).float()
            if masks is not None:
                out = head.restrict(out, masks[t])
            action, log_prob = head.draw(out, deterministic=deterministic)
            row = actions[t]
            row.copy_(action.reshape(row.shape))
            if log_probs is not None and log_prob is not None:
                log_probs[t].copy_(log_prob)

        if self._program is not None or self._device is not None:
            return act
        return inputs.watched(act)

    def _drawn(
        self,
        out: torch.Tensor,
        like: torch.Tensor,
        obs: Mapping[Key, torch.Tensor],
    ) -> Outputs:
        lead = tuple(like.shape[: self._batch_dims])
        flat = out.reshape(math.prod(lead), -1).float()
        if self._mask is not None:
            flat = self.head.restrict(flat, obs[self._mask.key])
        drawn = self.head.draw(flat, deterministic=self._deterministic)
        action, log_prob = drawn
        action = action.reshape((*lead, *self._spec.shape))
        action = action.to(torch_dtype(self._spec.dtype))
        extras = {}
        if log_prob is not None:
            extras[LOG_PROB] = log_prob.reshape(lead)
        return Outputs({self._action_key: action}, extras)

    def _noise(self, rng: GroupRng) -> np.random.Generator | None:
        return None if self._deterministic else rng.numpy

    def _plan(self, x: Any) -> None:
        self._program = None
        self.path = "module"
        if self._executor:
            numpy_ok = self._device is None and not self._on_device
            self._program = plan(self.head.net, x, numpy_ok=numpy_ok)
        if self._program is not None:
            self.path = f"{self._program.kind} executor"

    def _views(self, lane: Lane) -> _Views:
        inputs = InputRows(lane, self._obs_keys, self.head.name)
        tensors = [inputs.rows(key) for key in self._obs_keys]
        first = lane.arrays[self._obs_keys[0]]
        if not self._batched:
            first = first[:, 0]
        arrays = list(first)
        masked = None
        if self._mask is not None:
            masked = (self._mask, lane.arrays[self._mask.key])
        actions = lane.arrays[self._action_key]
        log_probs = lane.arrays.get(LOG_PROB)
        rows = ActionRows(self.head.name, actions, log_probs, masked)
        return _Views(inputs, tensors, arrays, rows)

    def _input(self, leaves: Sequence[torch.Tensor]) -> Any:
        if self._device is not None:
            leaves = [moved(leaf, self._device) for leaf in leaves]
        if len(leaves) == 1:
            return leaves[0]
        by_key = zip(self._obs_keys, leaves, strict=True)
        return nested(dict(by_key))

    def _check(self, out: Any, lead: tuple[int, ...]) -> None:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            got = type(out).__name__
            if isinstance(out, torch.Tensor):
                got = f"{out.dtype} tensor"
            raise BadPolicyOutput(
                f"{self.head.name}: the network returned a {got}, expected one tensor of floats."
            )
        for_rows = tuple(out.shape[: len(lead)]) == lead
        size = math.prod(lead) * self._width
        if not for_rows or out.numel() != size:
            returned = None
            if for_rows:
                returned = math.prod(out.shape[len(lead) :])
            raise BadPolicyOutput(
                f"{self.head.name}: the network returned shape {tuple(out.shape)}, expected"
                f" {(*lead, self._width)}: {self.head.needs(self._spec)}."
                f" {self.head.remedy(self._width, returned)}"
            )


def _act_numpy(
    steps: tuple[Callable[[Any], Any], ...],
    obs: list[Array],
    emit: Emit,
    batched: bool,
) -> Act:
    def act(t: int) -> None:
        x = obs[t]
        for step in steps:
            x = step(x)
        emit(t, x)

    def act_unbatched(t: int) -> None:
        x = obs[t]
        for step in steps:
            x = step(x)
        emit(t, x[None])

    if batched:
        return act
    return act_unbatched


def _act_module(
    compute: Callable[[Any], Any],
    obs: Sequence[torch.Tensor],
    emit: Emit,
    B: int,
) -> Act:
    def act(t: int) -> None:
        emit(t, _host(compute(obs[t])).reshape(B, -1))

    return act


def _host(out: torch.Tensor) -> Array:
    """Return ``out`` as float32 on the CPU, without a copy if it already is."""
    if out.dtype != torch.float32 or out.requires_grad or out.device.type != "cpu":
        out = out.detach().to("cpu", torch.float32)
    array: Array = out.numpy()
    return array
