"""Acting on rows of several groups in one call of the policy.

For a single group the policy reads and writes the rows of its lane. Rows of several groups are
copied into a *gather buffer*, a lane of a few steps for all their environments. The outputs are
copied back to the lanes. Each row is copied once, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from muster.env_spec import EnvSpec
from muster.errors import BadOption
from muster.keys import AGENT, INFO, IS_INIT, POLICY_VERSION, Key, dotted
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array
from muster.policies.adapt import place
from muster.policies.gradients import gradients_enabled
from muster.protocols import Act, Policy
from muster.rng import GroupRng
from muster.rollout.acting import call_policy, keep, store_outputs
from muster.rollout.bootstrap import BootstrapRows, fill_values, spare_lane
from muster.rollout.request import RolloutRequest
from muster.weights.names import named_tensors
from muster.weights.transport import Subscriber
from muster.workers.build import fit_policy
from muster.workers.options import WorkerSetting
from muster.workers.requests import ServedOutputs
from muster.workers.streams import ServedStreams

# maximum size of a buffer with several steps; policies prepare for its steps at once
GATHER_BYTES = 1 << 20

# arrays of a buffer and of lanes: rows first, all other dimensions equal
_Pairs = list[tuple[Array, Array]]
_Pairs3 = tuple[_Pairs, _Pairs, _Pairs]


class ServedRollout:
    """The state of a worker's rollout.

    Attributes:
        number: number of the request.
        group: number of the group.
        slot, index: slot, and index of the lane in it.
        version: version of the weights at the start of the rollout.
        error: error of the policy that interrupted the rollout.
        act: policy prepared for this lane alone, while ``epoch`` is the current one; see ``Actor``.
        prepared: by size of the buffer, as its leader.
        pairs: see ``Actor._parts``.
    """

    def __init__(self, request: RolloutRequest, slot: Slot, version: int | str) -> None:
        self.number = request.number
        self.group = request.group
        self.slot = slot
        self.index = request.lane
        self.version = version
        self.error: Exception | None = None
        self.act: Act | None = None
        self.epoch = -1
        self.prepared: dict[tuple[int, int], _Prepared] = {}
        self.pairs: dict[Any, _Pairs3 | None] = {}

    @property
    def lane(self) -> Lane:
        return self.slot.lanes[self.index]

    def prepare(self, act: Act, epoch: int) -> None:
        """Note that the policy is prepared for this lane alone."""
        self.act = act
        self.epoch = epoch

    def act_together(self) -> None:
        """Note that the policy acts in a buffer: ``act`` is prepared for consecutive rows."""
        self.act = None

    def end_call(self, error: Exception | None) -> None:
        """Note how the last call of the policy has ended; None: without an error."""
        self.error = error


class _Prepared:
    """A policy prepared for the steps of a buffer; ``row`` is the first step that was not used."""

    def __init__(self, act: Act, row: int, epoch: int) -> None:
        self.act = act
        self.row = row
        self.epoch = epoch

    def act_next(self) -> None:
        """Act on the next step."""
        self.act(self.row)
        self.row += 1


class Actor:
    """A policy, which it owns, the random streams of groups, and memory for acting on several of
    them.

    Args:
        weights: subscriber from which the newest weights are taken at the start of rollouts.
        exclusive, keeps_streams: see ``ServedStreams``.
        look: see ``CoroutineRunner``.
    """

    def __init__(
        self,
        policy: Any,
        setting: WorkerSetting,
        weights: Subscriber,
        *,
        exclusive: bool,
        keeps_streams: bool,
        look: Callable[[], bool],
    ) -> None:
        self._setting = setting
        self._weights = weights
        self._look = look
        self._policy, self._device = place(policy, setting.policy_device)
        self._in_place = self._device is None or self._device.type == "cpu"
        self._into = named_tensors(self._policy)
        self._infos: Mapping[int, EnvSpec] = {}
        self._streams = ServedStreams(
            self._device, exclusive=exclusive, keeps=keeps_streams
        )
        self._policies: dict[tuple[int, ...], Policy] = {}  # by shape of the batch
        self._buffers: dict[
            tuple[int, int], Lane
        ] = {}  # by number of environments and of steps
        # likewise; used if runs need not be reproducible
        self._prepared: dict[tuple[int, int], _Prepared] = {}
        self._outputs = ServedOutputs()
        self._grad = False
        self._epoch = (
            0  # grows with each change after which policies have to prepare again
        )

    def open(self, infos: Mapping[int, EnvSpec]) -> None:
        """Register groups by number.

        Raises ``BadOption`` if one policy call cannot act for all of them.
        """
        for info in infos.values():
            check_alike(info, next(iter(infos.values())))
        self._infos = infos

    def adopt(
        self, groups: Mapping[int, tuple[dict[Key, Array], dict[str, Any]]], acts: bool
    ) -> ServedOutputs:
        """Return what the policy writes.

        A policy that was not called yet is called once to determine them.

        Args:
            groups: observations to act on and state of the random streams, by group.
            acts: the policy will act for these groups, and continue their streams.
        """
        if acts:
            for number, (_, state) in groups.items():
                self._streams.add(number, state)
        if not self._policies:
            number = min(groups)
            obs, state = groups[number]
            lead = self._infos[number].batch_shape
            tensors = _batched(obs, lead)
            self._take_weights()
            rng = self._streams.restored(number, state)
            policy = self._policy_for(lead, lambda: tensors, rng)
            columns = list(policy.columns())
            actions = getattr(policy, "own_actions", {})
            self._outputs = ServedOutputs(columns, actions)
        return self._outputs

    # --- random streams ---------------------------------------------------------------------------

    def reseed(
        self,
        groups: Sequence[int],
        seed: int | Sequence[int] | None,
        generation: int = 0,
    ) -> None:
        """Replace the random streams of groups that have some here; ``adopt`` brings the streams of
        the others.
        """
        self._streams.reseed(groups, seed, generation)
        if not generation:  # a restart must not change the rollouts of other groups
            self._epoch += 1

    def add_streams(
        self, groups: Sequence[int], states: Sequence[dict[str, Any]]
    ) -> None:
        """Write the policy's random streams into the states of groups; the environments' streams
        are unchanged.
        """
        self._streams.add_to(groups, states)

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """Restore the streams in states of groups.

        Return the states for workers, without those of torch.
        """
        left = self._streams.load(states)
        self._epoch += 1
        return left

    # --- acting -----------------------------------------------------------------------------------

    def begin(self, request: RolloutRequest, slot: Slot) -> ServedRollout:
        """Start a rollout with the newest weights."""
        self._take_weights()
        return ServedRollout(request, slot, self._weights.version or 0)

    def act(self, asked: Sequence[tuple[ServedRollout, int]]) -> None:
        """Act on a row of each rollout in one call of the policy.

        The caller converts the policy's own errors.
        """
        version = self._weights.version or 0
        for rollout, row in asked:
            if POLICY_VERSION in rollout.lane.arrays:
                rollout.lane.arrays[POLICY_VERSION][row] = version
        # The first call for groups is ``Policy.first``, as in workers that run the policy.
        first = all(
            row == 0 and not self._streams.has_acted(rollout.group)
            for rollout, row in asked
        )
        if len(asked) == 1 and self._in_place:
            self._act_alone(*asked[0], first=first)
        else:
            self._act_together(asked, first=first)
        self._streams.note_acted(rollout.group for rollout, _ in asked)

    def path(self, rollout: ServedRollout) -> str:
        """Return how actions were computed, for ``stats()``."""
        policy = self.any_policy()
        if rollout.act is not None:  # prepared for this lane alone
            policy = self._policies.get(rollout.lane.layout.lead, policy)
        return f"server: {policy.path}"

    @property
    def _sets_initial_state(self) -> bool:
        """Whether the policy writes the state with which episodes start."""
        return bool(getattr(self.any_policy(), "sets_initial_state", False))

    def any_policy(self) -> Policy:
        return next(reversed(self._policies.values()))

    def _any_info(self) -> EnvSpec:
        return next(iter(self._infos.values()))

    def enable_grad(self, on: bool) -> None:
        """See ``Worker.enable_grad``."""
        self._grad = on
        self._epoch += 1

    def value(self, group: int, made: BootstrapRows) -> BootstrapRows:
        """Fill in the values of next observations of a group."""
        info = self._infos[group]
        rng = self._streams[group]
        lead = info.batch_shape
        some = np.arange(info.num_envs) % len(made.t)
        seen = _batched({key: rows[some] for key, rows in made.rows.items()}, lead)
        policy = self._policy_for(lead, lambda: seen, rng)

        @contextmanager
        def around() -> Iterator[None]:
            try:
                with self._context(policy, rng):
                    yield
            finally:
                self.settle()

        self.settle()  # installed streams can be neither saved nor restored
        lane = spare_lane(made.columns, info.num_envs, lead)
        fill_values(made, policy, rng, lane, around())
        return made

    def _act_alone(self, rollout: ServedRollout, row: int, *, first: bool) -> None:
        lane = rollout.lane
        rng = self._streams[rollout.group]
        policy = self._policy_for(lane.layout.lead, lambda: self._seen(lane, row), rng)
        if first:
            self._act_first(policy, lane, row, rng)
            return
        with self._context(policy, rng):
            if rollout.act is None or rollout.epoch != self._epoch:
                lane.begin_at(row)
                act = call_policy(policy, lambda: policy.start(lane, rng))
                rollout.prepare(act, self._epoch)
            else:
                act = rollout.act
            act(row)

    def _act_together(
        self, asked: Sequence[tuple[ServedRollout, int]], *, first: bool
    ) -> None:
        """Gather rows, act on all of them in one call, and copy the outputs to the lanes."""
        leader, row = asked[0]
        B = sum(rollout.lane.B for rollout, _ in asked)
        rng = self._streams[leader.group]
        size = (B, leader.lane.T)
        buffer = self._buffer(*size, leader.lane.layout)
        # Noise is drawn for many steps at once. Each leader has its own: it must not depend on
        # which other groups ask.
        prepared = leader.prepared if self._streams.exclusive else self._prepared
        ready = prepared.get(size)
        if ready is not None and (ready.epoch != self._epoch or ready.row == buffer.T):
            ready = None
        if first:
            here = 0
        elif ready is None:
            left = (
                leader.lane.T - row
            )  # start so late in the buffer that all noise drawn is used
            here = max(0, buffer.T - left)
        else:
            here = ready.row
        parts = self._parts(asked, buffer)
        for (into, _, _), row in parts:
            for there, lane in into:
                there[here] = lane[row]
        for rollout, _ in asked:
            rollout.act_together()
        policy = self._policy_for((B,), lambda: self._seen(buffer, here), rng)
        if first:
            self._act_first(policy, buffer, here, rng)
        else:
            with self._context(policy, rng):
                if ready is None:
                    buffer.begin_at(here)
                    act = call_policy(policy, lambda: policy.start(buffer, rng))
                    ready = prepared[size] = _Prepared(act, here, self._epoch)
                ready.act_next()
        for (_, out, later), row in parts:
            for there, lane in out:
                lane[row] = there[here]
            for there, lane in later:
                lane[row + 1] = there[here + 1]

    def _act_first(self, policy: Policy, lane: Lane, row: int, rng: GroupRng) -> None:
        with self._context(policy, rng, first=True):
            outputs = call_policy(
                policy, lambda: policy.first(self._seen(lane, row), rng)
            )
        store_outputs(keep(outputs), lane, row)

    def _parts(
        self, asked: Sequence[tuple[ServedRollout, int]], buffer: Lane
    ) -> list[tuple[_Pairs3, int]]:
        """Return the arrays to copy: a single part if all lanes lie evenly in one slot, else one
        part per rollout.
        """
        leader, row = asked[0]
        if all(other == row for _, other in asked):
            rollouts = [rollout for rollout, _ in asked]
            numbers = [rollout.number for rollout in rollouts]
            together = (buffer.B, buffer.T, *numbers)
            if together not in leader.pairs:
                leader.pairs[together] = self._pairs(buffer, 0, rollouts)
            pairs = leader.pairs[together]
            if pairs is not None:
                return [(pairs, row)]
        parts: list[tuple[_Pairs3, int]] = []
        begin = 0
        for rollout, row in asked:
            alone = (buffer.B, buffer.T, begin)
            if alone not in rollout.pairs:
                rollout.pairs[alone] = self._pairs(buffer, begin, [rollout])
            parts.append((cast("_Pairs3", rollout.pairs[alone]), row))
            begin += rollout.lane.B
        return parts

    def _pairs(
        self, buffer: Lane, begin: int, rollouts: Sequence[ServedRollout]
    ) -> _Pairs3 | None:
        """Pair arrays of a buffer (from environment ``begin``) and lanes: inputs, outputs, outputs
        of the next row.

        None: the lanes are not evenly spaced in one slot. (A view over several slots would also
        cover the memory between them: NumPy sees overlaps, and copies take very long.)
        """
        slot = rollouts[0].slot
        n = len(rollouts)
        places = [rollout.index for rollout in rollouts]
        apart = places[1] - places[0] if n > 1 else 1
        even = [places[0] + i * apart for i in range(n)]
        in_one_slot = all(rollout.slot is slot for rollout in rollouts)
        if not in_one_slot or places != even:
            return None
        lane = rollouts[0].lane
        written = self._written()
        B = lane.B
        parts: _Pairs3 = ([], [], [])
        into, out, later = parts
        for column in buffer.layout.columns:
            here = lane.arrays[column.key]
            there = buffer.arrays[column.key][:, begin : begin + n * B]
            if n > 1:
                step = apart * slot.layout.lane_bytes
                shape = (len(here), n, *here.shape[1:])
                strides = (here.strides[0], step, *here.strides[1:])
                here = np.lib.stride_tricks.as_strided(here, shape, strides)
                there = there.reshape(len(there), n, B, *there.shape[2:])
            if column.carry:
                into.append((there, here))
            if column.key in written and column.carry:
                later.append((there, here))
            if column.key in written and (not column.carry or self._sets_initial_state):
                out.append((there, here))
        return parts

    def _buffer(self, B: int, T: int, like: Layout) -> Lane:
        """Return the buffer for ``B`` environments, with at most ``T`` steps; pinned if the policy
        is on a GPU.
        """
        if (B, T) not in self._buffers:
            written = self._written()
            infos = self._any_info().info_specs
            columns = []
            row_bytes = 0
            for column in like.columns:
                read = column.carry and column.key not in infos
                if read or column.key in written:
                    columns.append(column)
                    row_bytes += B * math.prod(column.shape) * column.dtype.itemsize
            steps = min(T, max(1, GATHER_BYTES // row_bytes))
            layout = Layout(steps, B, tuple(columns), batch_shape=(B,))
            on_gpu = self._device is not None and self._device.type == "cuda"
            slot = Slot(layout, "pinned" if on_gpu else "heap")
            self._buffers[B, T] = slot.lanes[0]
        return self._buffers[B, T]

    def _written(self) -> set[Key]:
        """Return the keys that the policy writes.

        ``is_init`` is not among them: only resets write it.
        """
        keys = {column.key for column in self._outputs.columns}
        keys.update(self._any_info().action_specs)
        return keys - {IS_INIT}

    def _seen(self, lane: Lane, row: int) -> dict[Key, Any]:
        """Return the observations of a row, and its ``is_init`` if there is that column."""
        keys = (*self._any_info().observation_specs, IS_INIT)
        return {key: lane.rows(key)[row] for key in keys if key in lane.tensors}

    def _policy_for(
        self, shape: tuple[int, ...], obs: Callable[[], dict[Key, Any]], rng: GroupRng
    ) -> Policy:
        """Return the policy for a batch shape.

        A new one is called once to determine its columns.
        """
        if shape not in self._policies:
            spec = replace(self._any_info(), batch_shape=shape)
            policy = fit_policy(self._policy, self._setting, spec, self._device)
            coroutines = getattr(policy, "coroutines", None)
            if coroutines is not None:
                coroutines.look = self._look
            # a copy: this call must not draw from the group's
            probe = self._streams.restored(0, rng.state_dict())
            try:
                with self._context(policy, probe, first=True):
                    call_policy(policy, lambda: policy.first(obs(), probe))
            finally:
                self.settle()
            self._policies[shape] = policy
        return self._policies[shape]

    @contextmanager
    def _context(
        self, policy: Policy, rng: GroupRng, *, first: bool = False
    ) -> Iterator[None]:
        """Return the context for a call of the policy; like ``Group.context``."""
        inference = self._setting.options.execution.inference_mode
        inference &= not (first or self._grad)
        mode = torch.inference_mode() if inference else torch.no_grad()
        called = gradients_enabled(policy) if self._grad else nullcontext()
        globally = first or policy.draws_globally
        with self._streams.installed(rng, globally=globally), mode, called:
            yield

    def settle(self) -> None:
        """Make the user's random streams the global ones again."""
        self._streams.settle()

    def close(self) -> None:
        """Release the weights. May be called again."""
        self._weights.close()

    def _take_weights(self) -> None:
        if self._weights.take(self._into) is not None:
            self._epoch += 1


def _batched(
    arrays: Mapping[Key, Array], lead: tuple[int, ...]
) -> dict[Key, torch.Tensor]:
    """Return a tensor over each array ``[B, *shape]``, with these batch dimensions."""
    tensors = {}
    for key, array in arrays.items():
        shape = (*lead, *array.shape[1:])
        tensors[key] = torch.from_numpy(array).reshape(shape)
    return tensors


def check_alike(info: EnvSpec, first: EnvSpec) -> None:
    """Raise ``BadOption`` for a group that an inference server cannot act for together with the
    first one.
    """
    specs = {**info.observation_specs, **info.action_specs}
    if info.device is not None and info.device.type != "cpu":
        raise BadOption(
            f"inference='server': {info.name} steps on {info.device} itself; leave inference out"
        )
    if AGENT in info.observation_specs:
        raise BadOption(
            f"inference='server': the agents of {info.name} take turns; leave inference out"
        )
    masks = [dotted(key) for key in info.action_masks.values() if key[0] == INFO]
    if masks:
        raise BadOption(
            "inference='server' sends observations to the policy, and the action mask of"
            f" {info.name} is in {masks}: leave inference out, or make the mask a part of the"
            " observation"
        )
    objects = [dotted(key) for key, spec in specs.items() if not spec.is_tensor]
    if objects:
        raise BadOption(
            f"inference='server' needs fixed shapes, and {info.name} has Python objects in"
            f" {objects}: leave inference out, or encode them as arrays"
        )
    if (info.observations, info.actions) != (first.observations, first.actions):
        raise BadOption(
            f"inference='server' acts with one policy for all environments, and {info.name} and"
            f" {first.name} differ in observations or actions: use a collector for each kind"
        )
