"""Policies that read and write a TensorDict: tensordict's modules, TorchRL's actors, and plain
functions.

Recurrent state follows TorchRL's convention: an input ``k`` for which ``("next", k)`` is returned
is read from row ``t`` and written to row ``t + 1``. At the start of an episode it is the
environment's value if the environment declares ``k`` (TorchRL's ``TensorDictPrimer``), else zero,
and missing in the policy's first call. A module that reads ``is_init`` gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import InteractionType, set_interaction_type

from muster.errors import BadOption, BadPolicyOutput
from muster.keys import IS_INIT, RESERVED, Key, dotted, next_of
from muster.memory.cells import assemble, is_uneven, take
from muster.memory.objects import copied_cells
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, ArraySpec, Column
from muster.policies.checks import (
    PolicySetting,
    action_problem,
    called_first,
    columns_of,
    init_column,
    spec_as_returned,
)
from muster.policies.inputs import InputRows, unchanged_inputs
from muster.policies.states import begins_with_environments
from muster.policies.tensordict_program import TensorDictProgram, Values, as_key, fuse
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.utils.devices import moved

Rows = Sequence[torch.Tensor]


class TensorDictPolicy:
    """Implements ``Policy`` for a callable that takes a TensorDict with ``batch_size``
    ``batch_shape``.

    The module gets the same object at every step of a rollout, without the previous outputs, and
    must return all actions. Every output is stored, except overwritten inputs and keys with a part
    that begins with ``_``. Modules draw from torch's global generator, which has the group's own
    state during a rollout.

    A module with a true attribute ``returns_any_actions`` may return actions of any shape and
    dtype, which are stored as they are: ``own_actions`` describes them.

    Attributes:
        keeps_private: also store keys with such a part. Counts at the first call.
        own_actions: of such a module, the specs of actions that are not as the environments'
            specs. Known after the first call.

    Raises:
        BadOption: an unknown exploration type.
        BadPolicyOutput: the module reads keys that are neither observations nor its own state.
    """

    keeps_private = False

    def __init__(self, module: Any, setting: PolicySetting) -> None:
        self.module = module
        self.path = "module"
        self.coroutines = getattr(module, "coroutines", None)
        self.name = getattr(module, "__name__", "policy")
        if isinstance(module, torch.nn.Module):
            self.name = type(module).__name__
        obs_specs = setting.obs_specs
        self._action_specs = setting.action_specs
        self._takes_any_actions = bool(getattr(module, "returns_any_actions", False))
        self.own_actions: dict[Key, ArraySpec] = {}
        self._lead = setting.batch_shape
        self._obs_keys = list(obs_specs)
        self._object_keys = [
            key for key, spec in obs_specs.items() if not spec.is_tensor
        ]
        self._inner: dict[Key, tuple[int, ...]] = {}
        for key, spec in obs_specs.items():
            if spec.inner:
                self._inner[key[:-1]] = spec.shape[: spec.inner]
        self._device = setting.device
        self._home = setting.device or setting.rows_device
        try:
            self._interaction = InteractionType(setting.exploration_type)
        except ValueError:
            known = [str(t.value) for t in InteractionType]
            raise BadOption(
                f"exploration_type={setting.exploration_type!r}, expected one of {known}"
            ) from None
        self._state_keys, self._wants_init = self._read_keys()
        self._copied_keys = {
            *self._object_keys,
            *self._state_keys,
        }  # handed out as copies
        stateless = (
            not self._state_keys and not self._wants_init and not self._object_keys
        )
        self._executor = setting.executor and self._home is None and stateless
        self._program: TensorDictProgram | None = None
        self._columns: list[Column] = []
        # of stored outputs, from the first call
        self._kinds: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._object_outputs: list[Key] = []

    @torch.no_grad()
    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        given, check_unchanged = unchanged_inputs(obs, self.name)
        inputs: dict[Key, Any] = {}
        for key in self._obs_keys:
            if key in self._object_keys:
                cells = np.reshape(obs[key], self._lead)
                inputs[key] = copied_cells(cells)
            else:
                inputs[key] = self._move(given[key])
        if self._wants_init:
            if IS_INIT in obs:
                begins = obs[IS_INIT].reshape(self._lead)
            else:
                begins = torch.ones(self._lead, dtype=torch.bool, device="cpu")
            inputs[IS_INIT] = begins.unsqueeze(-1).to(self._home, copy=True)
        carrier = self._carrier(inputs)
        before = torch.get_rng_state()
        shown = {key: obs[key] for key in self._obs_keys}
        out = called_first(lambda: self._call(carrier), shown, self._lead, self.name)
        check_unchanged()
        outputs = self._outputs(out, inputs)
        self._check_states(outputs.state, inputs)
        self._object_outputs = list(outputs.objects)
        self._columns = self._columns_of(outputs)
        every = {**outputs.action, **outputs.extras}
        for key, value in outputs.state.items():
            every[next_of(key)] = value
        self._kinds = {key: (value.shape, value.dtype) for key, value in every.items()}
        if self._executor and not self._object_outputs:
            self._fuse(inputs, every, before)
        return outputs

    @property
    def draws_globally(self) -> bool:
        return self.coroutines is None  # also with the executor

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        if self not in lane.cache:
            lane.cache[self] = self._views(lane)
        read: InputRows
        read, inputs, outputs, kept = lane.cache[self]
        if self._program is not None and not self._program.current():
            newest = {}
            for key, rows in inputs.items():
                newest[key] = rows[lane.done_steps].clone()
            self._replan(newest)
        if self._program is not None:
            return self._act_program(inputs, outputs)
        if kept:  # the same function, as recorded rollouts require
            act, begin = kept
            begin()
            return act  # type: ignore[no-any-return]
        objects = {key: lane.arrays[key] for key in self._object_outputs}
        act, begin = self._act_module(inputs, outputs, objects)
        begin()
        if self._device is None:  # else a copy is moved to it
            act = read.watched(act)
        if lane.mirrored:
            kept += [act, begin]
        return act

    def _columns_of(self, outputs: Outputs) -> list[Column]:
        columns = columns_of(outputs, self._lead, self.name)
        for key, cells in outputs.objects.items():
            if key not in self._action_specs:
                columns.append(Column(key, (), OBJECT, ragged=_is_ragged(cells)))
        if self._wants_init:
            columns.append(init_column())
        return columns

    # --- one step ---------------------------------------------------------------------------------

    def _act_program(
        self,
        inputs: dict[Key, Rows],
        outputs: list[tuple[Key, Rows]],
    ) -> Act:
        program = self._program
        interaction = set_interaction_type(self._interaction)
        assert program is not None
        values: Values = {}
        sources = list(inputs.items())

        def act(t: int) -> None:
            for key, rows in sources:
                values[key] = rows[t]
            with interaction:
                program(values)
            for key, rows in outputs:
                rows[t].copy_(values[key])

        return act

    def _act_module(
        self,
        inputs: dict[Key, Rows],
        outputs: list[tuple[Key, Rows]],
        objects: dict[Key, Array],
    ) -> tuple[Act, Callable[[], None]]:
        """Return ``act``, and the function to call before each rollout."""
        carrier: Any = None
        written = [_name(key) for key, _ in outputs]
        kinds = [self._kinds[key] for key, _ in outputs]
        take_row = {}
        sources = []
        for key, rows in inputs.items():
            take_row[key] = self._copy if key in self._copied_keys else self._move
            sources.append((_name(key), rows, take_row[key]))

        def begin() -> None:
            nonlocal carrier
            # With objects, a TensorDict may be a lazy stack, which cannot be reused.
            if not self._object_keys and not objects:
                carrier = self._carrier({})

        def act(t: int) -> None:
            if carrier is None:
                given = {key: take_row[key](rows[t]) for key, rows in inputs.items()}
                out = self._call(self._carrier(given))
            else:
                for name, rows, row_of in sources:
                    carrier.set(name, row_of(rows[t]))
                out = self._call(carrier)
            for name, kind, (key, rows) in zip(written, kinds, outputs, strict=True):
                value = out.get(name, None)
                if value is None or (value.shape, value.dtype) != kind:
                    self._refuse_change(key, value, kind)
                rows[t].copy_(value)
                # else an output that is missing in the next step would not be noticed
                if out is carrier:
                    out.del_(name)
            for key, array in objects.items():
                cells = self._cells(out, key)
                if cells is None:
                    raise BadPolicyOutput(
                        f"policy {self.name} returned {dotted(key)} at its first call, now it"
                        " did not"
                    )
                array[t] = cells

        return act, begin

    def _call(self, carrier: Any) -> Any:
        with set_interaction_type(self._interaction):
            out = self.module(carrier)
        return carrier if out is None else out

    # --- what the module reads and writes ---------------------------------------------------------

    def _read_keys(self) -> tuple[list[Key], bool]:
        """The keys of the module's recurrent state, and whether it reads ``is_init``."""
        in_keys = getattr(self.module, "in_keys", None) or self._obs_keys
        out_keys = getattr(self.module, "out_keys", None) or ()
        reads = [as_key(key) for key in in_keys]
        writes = {as_key(key) for key in out_keys}
        state = [key for key in dict.fromkeys(reads) if next_of(key) in writes]
        known = {*self._obs_keys, *state, IS_INIT}
        missing = [
            dotted(key) for key in reads if key not in known and not _is_private(key)
        ]
        if missing:
            raise BadPolicyOutput(
                f"policy {self.name} reads {missing}, which is not available: the observation keys"
                f" are {[dotted(key) for key in self._obs_keys]}. Change in_keys, or return"
                " ('next', key) as well if it is a recurrent state."
            )
        return state, IS_INIT in reads and IS_INIT not in self._obs_keys

    def _outputs(self, out: Any, inputs: Values) -> Outputs:
        if not isinstance(out, TensorDictBase):
            raise BadPolicyOutput(
                f"policy {self.name} returned {type(out).__name__}, expected a TensorDict"
            )
        keys = [as_key(key) for key in out.keys(True, True, is_leaf=is_leaf_nontensor)]
        leaves = {key: self._value(out, key) for key in keys if key not in inputs}
        outputs = Outputs({}, {}, {})
        for key, spec in self._action_specs.items():
            if key not in leaves:
                got = sorted(map(dotted, leaves))
                raise BadPolicyOutput(
                    f"policy {self.name} did not return {dotted(key)}, only {got}. Name the action"
                    " so in out_keys."
                )
            value = leaves.pop(key)
            if spec.is_tensor:
                outputs.action[key] = self._action(key, value, spec)
            else:
                outputs.objects[key] = self._required_cells(out, key)
        for key in self._state_keys:
            if next_of(key) not in leaves:
                raise BadPolicyOutput(
                    f"policy {self.name} did not return its recurrent state {dotted(next_of(key))}"
                )
            outputs.state[key] = leaves.pop(next_of(key))
        for key, value in leaves.items():
            private = _is_private(key) and not self.keeps_private
            if private or key in inputs or key in self._state_keys:
                continue
            if key[0] in RESERVED - {"action"}:
                raise BadPolicyOutput(
                    f"policy {self.name} returned {dotted(key)}, a name that the batch uses itself"
                )
            if isinstance(value, torch.Tensor):
                outputs.extras[key] = value
            else:
                outputs.objects[key] = self._required_cells(out, key)
        return outputs

    def _check_states(self, state: Values, inputs: Values) -> None:
        """Raise ``BadPolicyOutput`` for a state whose second dimension counts environments, as that
        of nn.GRU.
        """

        def state_of(module: Any) -> Values:
            """Return the states after a call of a copy of the module, for one environment more than
            there are.
            """
            more = {}
            for key, value in inputs.items():
                more[key] = torch.cat([value, value[:1]])
            own = self.module
            lead = self._lead
            self.module = module
            self._lead = (lead[0] + 1,)
            try:
                out = self._call(self._carrier(more))
            finally:
                self.module = own
                self._lead = lead
            return {key: out.get(next_of(key)) for key in state}

        for key, value in state.items():
            if not begins_with_environments(
                self.module, key, value, self._lead, state_of
            ):
                raise BadPolicyOutput(
                    f"policy {self.name} returned {dotted(next_of(key))} with shape"
                    f" {tuple(value.shape)}, in which the first dimension does not count"
                    " environments. States in a TensorDict begin with its batch size: use"
                    " torchrl.modules.GRUModule or LSTMModule, or move the dimension (nn.GRU:"
                    " h.movedim(1, 0)). If it does, say it with policies.recurrent(policy,"
                    " batch_dim=0)"
                )

    def _value(self, out: Any, key: Key) -> Any:
        """The output, a tensor or any other object; None if its shape differs between environments
        or parts.
        """
        return None if is_uneven(out, key) else out.get(key)

    def _cells(self, out: Any, key: Key) -> Array | None:
        """Return copies of the objects of an output, ``[B]``; None if it is missing."""
        try:
            cells = take(out, key, self._lead)
        except TypeError as error:
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)}, which is {error}"
            ) from error
        return None if cells is None else cells.reshape(-1)

    def _required_cells(self, out: Any, key: Key) -> Array:
        cells = self._cells(out, key)
        assert cells is not None
        return cells

    def _action(
        self,
        key: Key,
        action: Any,
        spec: ArraySpec,
    ) -> torch.Tensor:
        if not torch.is_tensor(action):
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)} as {type(action).__name__}, expected"
                f" {spec}"
            )
        problem = action_problem(action, spec, self._lead)
        own: ArraySpec | None = None
        if self._takes_any_actions:
            own = spec_as_returned(action, spec, self._lead)
        if own is not None:
            if own is not spec:
                self.own_actions[key] = own
        elif problem:
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)} {problem}"
            )
        return action

    def _refuse_change(
        self,
        key: Key,
        value: torch.Tensor | None,
        kind: tuple[torch.Size, torch.dtype],
    ) -> None:
        got = "it is missing"
        if value is not None:
            got = f"it has shape {tuple(value.shape)} and dtype {value.dtype}"
        shape, dtype = kind
        raise BadPolicyOutput(
            f"policy {self.name} returned {dotted(key)} with shape {tuple(shape)} and dtype"
            f" {dtype} at its first call, now {got}. Return the same keys, shapes and dtypes at"
            " every call."
        )

    def _views(
        self,
        lane: Lane,
    ) -> tuple[InputRows, dict[Key, Rows], list[tuple[Key, Rows]], list[Any]]:
        """The rows that are read, by key, the rows that are written, by the key of the module's
        output, and a list for the functions that are kept.
        """
        shown = [key for key in self._obs_keys if key not in self._copied_keys]
        copied = self._copied_keys
        shown = [key for key in self._obs_keys if key not in copied]
        flags = [IS_INIT] if self._wants_init else []
        read = InputRows(lane, [*shown, *flags], self.name)
        inputs: dict[Key, Any] = {key: read.rows(key) for key in shown}
        inputs |= {key: lane.rows(key) for key in self._state_keys}
        for key in self._object_keys:
            inputs[key] = [row.reshape(self._lead) for row in lane.arrays[key]]
        if self._wants_init:
            inputs[IS_INIT] = [row.unsqueeze(-1) for row in read.rows(IS_INIT)]
        carried = {next_of(key): key for key in self._state_keys}
        outputs: list[tuple[Key, Any]] = []
        for key, (shape, dtype) in self._kinds.items():
            rows = lane.rows(carried.get(key, key))
            floats = rows[0].is_floating_point()
            if rows[0].shape != shape or floats != dtype.is_floating_point:
                raise BadPolicyOutput(
                    f"policy {self.name} returned {dotted(key)} with shape {tuple(shape)} and dtype"
                    f" {dtype}, expected shape {tuple(rows[0].shape)} and dtype {rows[0].dtype}"
                )
            outputs.append((key, rows[1:] if key in carried else rows))
        return read, inputs, outputs, []

    # --- executor ---------------------------------------------------------------------------------

    def _replan(self, inputs: Values) -> None:
        """Compare with a changed module again.

        The state of the generator is restored afterwards.
        """
        before = torch.get_rng_state()
        outputs = self._outputs(self._call(self._carrier(inputs)), inputs)
        self._fuse(inputs, {**outputs.action, **outputs.extras}, before)
        torch.set_rng_state(before)

    def _fuse(
        self,
        inputs: Values,
        expected: Values,
        before: torch.Tensor,
    ) -> None:
        """Use the executor if it computes ``expected``, the module's output, from the generator
        state ``before``.
        """
        after = torch.get_rng_state()
        expected = {key: value.clone() for key, value in expected.items()}
        self._program = None
        self.path = "module"
        with set_interaction_type(self._interaction):
            program = fuse(self.module, dict(inputs), self._interaction)
            if program is None:
                torch.set_rng_state(after)
                return
            torch.set_rng_state(before)
            values = dict(inputs)
            program(values)
        same = True
        for key, value in expected.items():
            same = same and key in values and _same(values[key], value)
        if same and torch.equal(torch.get_rng_state(), after):
            self._program = program
            self.path = "torch executor"
        torch.set_rng_state(after)

    def _carrier(self, inputs: Mapping[Key, Any]) -> Any:
        if self._object_keys:
            return assemble(inputs, self._lead, self._device, self._inner)
        carrier = TensorDict({}, batch_size=self._lead, device=self._device)
        for path, shape in self._inner.items():
            lead = (*self._lead, *shape)
            carrier.set(path, TensorDict({}, batch_size=lead, device=self._device))
        for key, value in inputs.items():
            carrier.set(key, value)
        return carrier

    def _copy(self, row: Any) -> Any:
        own = row.clone() if torch.is_tensor(row) else copied_cells(row)
        return self._move(own)

    def _move(self, value: Any) -> Any:
        if self._device is None or not torch.is_tensor(value):
            return value
        return moved(value, self._device)


def _name(key: Key) -> Any:
    """Return a key as tensordict spells it."""
    return key[0] if len(key) == 1 else key


def _is_private(key: Key) -> bool:
    return any(part.startswith("_") for part in key)


def _is_ragged(cells: Array) -> bool:
    return isinstance(cells.flat[0], (torch.Tensor, TensorDictBase))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
