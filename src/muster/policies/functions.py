"""Policies that are callables on the observation: ``f(obs) -> action`` or ``(action, extras)``, or
with a state.

A policy has a state if its second parameter is called ``state`` (or ``hidden``, ``carry``):
``f(obs, state) -> (action, state)`` or ``(action, extras, state)``. ``state`` is None in the first
call, later a tensor or a tuple or dict of them as the policy returned it, zero for environments at
the start of an episode. Its first or second dimension (as in ``nn.GRU``) counts environments, or
the one that ``recurrent`` names. Columns of a batch always begin with environments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from muster.errors import BadOption, BadPolicyOutput
from muster.keys import (
    ACTION,
    IS_INIT,
    OBSERVATION,
    POLICY_VERSION,
    RESERVED,
    STATE,
    Key,
    dotted,
    nested,
)
from muster.memory.objects import copied_cells
from muster.memory.slots import Lane, as_tensor
from muster.memory.specs import Column
from muster.policies.checks import (
    PolicySetting,
    action_problem,
    called_first,
    columns_of,
    init_column,
)
from muster.policies.executor import Program, plan
from muster.policies.inputs import InputRows, unchanged_inputs
from muster.policies.states import StateDims, initial_of, said_dim, state_dims
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.utils.attributes import name_of
from muster.utils.devices import moved

STATE_NAMES = frozenset({"state", "hidden", "carry"})
Leaves = dict[Key, Any]


class FunctionPolicy:
    """Implements ``Policy`` for a module or function on the observation.

    ``fn`` gets a tensor ``[B, *shape]`` (``[*shape]`` unbatched), or a dict of them if the
    observation is a dict, and returns tensors, arrays or plain numbers. The extra
    ``policy_version``, an integer or one for each environment, is the version that acted: it is
    stored as ``collector/policy_version``, in place of Muster's version.
    """

    raises: tuple[type[Exception], ...]  # set for ``PerAgent``; see ``rollout.acting``

    def __init__(self, fn: Callable[..., Any], setting: PolicySetting) -> None:
        self.fn = fn
        self.name = name_of(fn)
        self.coroutines = getattr(fn, "coroutines", None)
        self.takes_state = takes_state(fn)
        self._slow_path = "module" if self.coroutines is None else "coroutine"
        self.path = self._slow_path
        obs_specs = self._obs_specs = setting.obs_specs
        action_specs = self._action_specs = setting.action_specs
        observed = {key[0] for key in obs_specs}
        if self.takes_state and STATE[0] in observed:
            raise BadOption(
                f"the observation has the key {STATE[0]!r}, where a batch keeps the state of a"
                " policy"
            )
        self._taken = RESERVED | observed
        if self.takes_state:
            self._taken |= set(STATE)
        self._object_keys = [
            key for key, spec in obs_specs.items() if not spec.is_tensor
        ]
        self._lead = setting.batch_shape
        self._device = setting.device
        self._on_device = setting.rows_device is not None
        self._columns: list[Column] = []
        one = list(obs_specs) == [OBSERVATION] and list(action_specs) == [ACTION]
        every = (*obs_specs.values(), *action_specs.values())
        tensors = all(spec.is_tensor for spec in every)
        self._plain = one and tensors and not self.takes_state and self._device is None
        self._executor = setting.executor
        self._program: Program | None = None
        self._state_shape: Any = (
            None  # the state's nesting, with keys in place of tensors
        )
        self._state_dims: StateDims = {}  # dimensions of environments that are not the first one
        self._initial = initial_of(fn) if self.takes_state else None

    @property
    def sets_initial_state(self) -> bool:
        """Whether it writes the state with which episodes start."""
        return self._initial is not None

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        obs = {key: obs[key] for key in self._obs_specs}
        given, check_unchanged = unchanged_inputs(obs, self.name)
        begun = self._begun()
        start = dict(begun)
        if self._lead:
            for key, value in begun.items():
                start[key] = value.movedim(0, said_dim(self.fn, key, self.name))

        def call() -> tuple[Leaves, Leaves, Leaves]:
            return self._call(given, start or None)

        action, extras, state = called_first(call, obs, self._lead, self.name)
        check_unchanged()
        states = {key: self._tensor(key, value) for key, value in state.items()}
        self._state_dims = state_dims(
            self.fn, states, self._lead, self.name, lambda fn: self._state_of(fn, given)
        )
        for key, dim in self._state_dims.items():
            states[key] = states[key].movedim(dim, 0)
        outputs = Outputs(
            action={key: self._action(key, action[key]) for key in self._action_specs},
            extras={key: self._tensor(key, value) for key, value in extras.items()},
            state=states,
            begun=begun,
        )
        if begun:
            self._check_begun(begun, outputs.state)
        self._columns = columns_of(outputs, self._lead, self.name)
        if begun:
            self._columns.append(init_column())
        if self._plain:
            self._plan(obs[OBSERVATION])
        return outputs

    @property
    def draws_globally(self) -> bool:
        return not self.path.endswith("executor") and self.coroutines is None

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        if self._program is not None and not self._program.current():
            self._plan(lane.rows(OBSERVATION)[lane.acts_from])
        program, act = lane.cache.get(self, (None, None))
        if act is None or program is not self._program:
            act = self._make_act(lane)
            lane.cache[self] = self._program, act
        return act  # type: ignore[no-any-return]

    def _plan(self, obs: torch.Tensor) -> None:
        self._program = None
        self.path = self._slow_path
        if self._executor and self._plain and isinstance(self.fn, torch.nn.Module):
            self._program = plan(self.fn, obs, numpy_ok=not self._on_device)
        if self._program is not None:
            self.path = f"{self._program.kind} executor"

    def _make_act(self, lane: Lane) -> Act:
        if self._program is not None and self._program.kind == "numpy":
            return _make_numpy_act(self._program, lane)
        if self._plain:
            return self._make_plain_act(lane)
        tensor_keys = [key for key, spec in self._obs_specs.items() if spec.is_tensor]
        inputs = InputRows(lane, tensor_keys, self.name)
        rows: dict[Key, Any] = {}
        for key, spec in self._obs_specs.items():
            rows[key] = inputs.rows(key) if spec.is_tensor else lane.np_rows(key)
        action_rows = {key: lane.rows(key) for key in self._action_specs}
        extra_rows = []
        state_rows = []
        begins = lane.rows(IS_INIT) if self._initial is not None else []
        for column in self._columns:
            key = column.key
            if key == IS_INIT:
                continue
            if column.carry:
                dim = self._state_dims.get(key, 0)
                state_rows.append((key, lane.rows(key), dim))
            else:
                extra_rows.append((key, lane.rows(key)))
        keys = {column.key for column in self._columns} - {IS_INIT}
        on_host = not self._on_device

        def begin_episodes(t: int) -> None:
            begin = begins[t]
            if on_host and not begin.any():
                return
            leaves, _ = self._initial_leaves()
            for key, row, _ in state_rows:
                old = row[t]
                new = leaves[key].to(old.device, old.dtype).expand(old.shape)
                inner = (1,) * (old.ndim - len(self._lead))
                where = begin.reshape(*self._lead, *inner)
                old.copy_(torch.where(where, new, old))

        def act(t: int) -> None:
            if begins:
                begin_episodes(t)
            state: Leaves = {}
            for key, row, dim in state_rows:
                old = _as_returned(row[t], dim)
                # a clone, since fn may change it; contiguous, for cuDNN
                state[key] = old.clone(memory_format=torch.contiguous_format)
            obs = {key: row[t] for key, row in rows.items()}
            action, extra, new_state = self._call(obs, state or None)
            for key, row in action_rows.items():
                row[t].copy_(self._action(key, action[key]))
            returned = extra.keys() | new_state.keys()
            if returned != keys:
                self._refuse_keys(keys, returned)
            for key, row in extra_rows:
                self._store(key, row[t], extra[key])
            for key, row, dim in state_rows:
                self._store(key, _as_returned(row[t + 1], dim), new_state[key])

        if self._device is not None:  # a copy is moved to it
            return act
        return inputs.watched(act)

    def _make_plain_act(self, lane: Lane) -> Act:
        """The fastest ``act``, for one tensor as input, and one action and perhaps extras as
        output.
        """
        inputs = InputRows(lane, [OBSERVATION], self.name)
        fn = self._program or self.fn
        rows = inputs.rows(OBSERVATION)
        check = self._action
        store = self._store
        action_rows = lane.rows(ACTION)
        extra_rows = []
        for column in self._columns:
            key = column.key
            extra = lane.rows(key)
            stored = lane.tensors[key]
            extra_rows.append((key, key[-1], extra, extra[0].shape, stored.dtype))
        keys = {c.key for c in self._columns}
        several = bool(self._columns)
        shape = action_rows[0].shape
        dtype = action_rows[0].dtype

        def act(t: int) -> None:
            action = fn(rows[t])
            if several or isinstance(action, tuple):
                extras = (
                    action[1]
                    if isinstance(action, tuple) and len(action) == 2
                    else None
                )
                if not isinstance(extras, dict) or len(extras) != len(extra_rows):
                    _, checked, _ = self._split(action)
                    extras = {key[-1]: value for key, value in checked.items()}
                    if extras.keys() != {key[-1] for key in keys}:
                        self._refuse_keys(keys, {(name,) for name in extras})
                action = action[0]
                for key, name, row, extra_shape, extra_dtype in extra_rows:
                    if name not in extras:
                        self._refuse_keys(keys, {(other,) for other in extras})
                    value = extras[name]
                    if (
                        value.__class__ is torch.Tensor
                        and value.shape == extra_shape
                        and value.dtype is extra_dtype
                    ):
                        row[t].copy_(value)
                    else:
                        store(key, row[t], value)
            if (
                action.__class__ is not torch.Tensor
                or action.shape != shape
                or action.dtype is not dtype
            ):
                action = check(ACTION, action)
            action_rows[t].copy_(action)

        if self._program is not None:  # it writes into no input
            return act
        return inputs.watched(act)

    def _initial_leaves(self) -> tuple[Leaves, Any]:
        """Return the state with which an environment starts an episode, and its nesting."""
        assert self._initial is not None
        leaves: Leaves = {}
        shape = _take_apart(self._initial(), STATE, leaves)
        tensors = {key: self._tensor(key, value) for key, value in leaves.items()}
        return tensors, shape

    def _begun(self) -> Leaves:
        """Return the state with which all environments start an episode, ``[*lead, *shape]``;
        empty: zeros.
        """
        if self._initial is None:
            return {}
        leaves, self._state_shape = self._initial_leaves()
        begun = {}
        for key, value in leaves.items():
            begun[key] = value.expand(*self._lead, *value.shape)
        return begun

    def _check_begun(self, begun: Leaves, state: Leaves) -> None:
        """Raise ``BadPolicyOutput`` unless the first state is like the one that it returned."""
        for key in begun.keys() | state.keys():
            kinds = [
                None if each is None else (tuple(each.shape), each.is_floating_point())
                for each in (begun.get(key), state.get(key))
            ]
            if kinds[0] != kinds[1]:
                shapes = [None if kind is None else kind[0] for kind in kinds]
                raise BadPolicyOutput(
                    f"policy {self.name}: initial_state has {dotted(key)} with shape {shapes[0]}"
                    f" for all environments, and the policy returned shape {shapes[1]} (None: it"
                    " has none). Let initial_state return a state as the policy does, without the"
                    " dimension of environments"
                )

    def _call(self, obs: Leaves, state: Leaves | None) -> tuple[Leaves, Leaves, Leaves]:
        """Call the function: action leaves, extras, state leaves.

        ``obs`` and ``state`` belong to the call.
        """
        for key in self._object_keys:
            obs[key] = copied_cells(obs[key])
        if self._device is not None:
            device = self._device
            obs = {
                key: moved(value, device) if torch.is_tensor(value) else value
                for key, value in obs.items()
            }
            if state:
                state = {key: value.to(device) for key, value in state.items()}
        parts = nested(
            obs
        )  # the environment's nesting; entries of tuples are keyed by position
        argument = parts["observation"] if list(parts) == ["observation"] else parts
        if not self.takes_state:
            return self._split(self.fn(argument))
        given = None if state is None else _restore(self._state_shape, state)
        return self._split(self.fn(argument, given))

    def _split(self, out: Any) -> tuple[Leaves, Leaves, Leaves]:
        parts = out if isinstance(out, tuple) else (out,)
        state: Leaves = {}
        if self.takes_state:
            if len(parts) not in (2, 3):
                raise BadPolicyOutput(
                    f"policy {self.name} takes a state, so it must return (action, state) or"
                    f" (action, extras, state); it returned {_kind(out)}"
                )
            self._state_shape = _take_apart(parts[-1], STATE, state)
            parts = parts[:-1]
        named = parts[1] if len(parts) == 2 else {}
        if len(parts) > 2 or not isinstance(named, Mapping):
            raise BadPolicyOutput(
                f"policy {self.name} returned {_kind(out)}, expected an action, or (action, extras)"
                " with extras a dict of names to tensors"
            )
        extras: Leaves = {}
        for name, value in named.items():
            if not isinstance(name, str) or name in self._taken:
                raise BadPolicyOutput(
                    f"policy {self.name} returned an extra called {name!r}, which the batch uses"
                )
            key = POLICY_VERSION if name == POLICY_VERSION[-1] else (name,)
            extras[key] = value
        return self._action_leaves(parts[0]), extras, state

    def _action_leaves(self, action: Any) -> Leaves:
        leaves: Leaves = {}
        for key in self._action_specs:
            value = action
            for part in key[1:]:
                is_sequence = isinstance(value, (tuple, list))
                try:
                    value = value[int(part) if is_sequence else part]
                except (KeyError, IndexError, TypeError):
                    raise BadPolicyOutput(
                        f"policy {self.name} returned {_kind(action)}, expected {dotted(key)} in"
                        f" it: actions have the parts {[dotted(k) for k in self._action_specs]}"
                    ) from None
            leaves[key] = value
        return leaves

    def _action(self, key: Key, value: Any) -> torch.Tensor:
        """Return the action as a tensor.

        Raises ``BadPolicyOutput`` for a wrong shape or kind of number.
        """
        spec = self._action_specs[key]
        tensor = self._tensor(key, value)
        problem = action_problem(tensor, spec, self._lead)
        if problem:
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)} {problem}"
            )
        return tensor

    def _state_of(self, fn: Callable[..., Any], obs: Mapping[Key, Any]) -> Leaves:
        """Return the state after a call of ``fn``, a copy of the policy, for one environment more
        than there are.
        """
        more: Leaves = {}
        for key, value in obs.items():
            if torch.is_tensor(value):
                more[key] = torch.cat([value, value[:1]])
            else:
                more[key] = np.append(value, value[:1])
        own = self.fn
        shape = self._state_shape
        self.fn = fn
        try:
            _, _, state = self._call(more, None)
            return {key: self._tensor(key, value) for key, value in state.items()}
        finally:
            self.fn = own
            self._state_shape = shape

    def _store(
        self,
        key: Key,
        row: torch.Tensor,
        value: Any,
    ) -> None:
        tensor = self._tensor(key, value)
        into_integers = tensor.is_floating_point() and not row.is_floating_point()
        if tensor.shape != row.shape or into_integers:
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)} with shape {tuple(tensor.shape)} and"
                f" dtype {tensor.dtype}, at its first call it was {tuple(row.shape)} and"
                f" {row.dtype}"
            )
        row.copy_(tensor)

    def _tensor(self, key: Key, value: Any) -> torch.Tensor:
        """Return ``value`` as a tensor without gradients.

        Raises ``BadPolicyOutput`` if it cannot be converted.
        """
        if key == POLICY_VERSION:
            return self._version(value)
        if torch.is_tensor(value):
            return value.detach()
        try:
            tensor = torch.from_numpy(np.array(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadPolicyOutput(
                f"policy {self.name} returned {dotted(key)} as {_kind(value)}, expected a tensor,"
                " array or number"
            ) from error
        of_numpy = isinstance(value, (np.ndarray, np.generic))
        if not of_numpy and tensor.dtype is torch.float64:
            return tensor.to(torch.get_default_dtype())
        return tensor

    def _version(self, value: Any) -> torch.Tensor:
        version = value.detach() if torch.is_tensor(value) else np.asarray(value)
        kind = str(version.dtype).removeprefix("torch.")
        if version.shape not in ((), self._lead) or not kind.startswith("int"):
            raise BadPolicyOutput(
                f"policy {self.name} returned the policy_version {_kind(value)} of shape"
                f" {tuple(version.shape)} and dtype {version.dtype}, expected an integer, or"
                f" integers of shape {self._lead}"
            )
        return as_tensor(version).to(torch.int64).expand(self._lead)

    def _refuse_keys(self, expected: Any, got: Any) -> NoReturn:
        raise BadPolicyOutput(
            f"policy {self.name} returned the extras {sorted(map(dotted, got))}, at its first call"
            f" they were {sorted(map(dotted, expected))}; return the same ones at every call"
        )


def _make_numpy_act(program: Program, lane: Lane) -> Act:
    rows = lane.np_rows(OBSERVATION)
    actions = lane.np_rows(ACTION)
    copyto = np.copyto

    def act(t: int) -> None:
        copyto(actions[t], program(rows[t]))

    return act


def takes_state(fn: Callable[..., Any]) -> bool:
    """Return whether the second parameter of a policy is its state."""
    function = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return len(names) >= 2 and names[1] in STATE_NAMES


def _as_returned(row: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a view of a row of states, ``[B, *shape]``, in which ``dim`` is the dimension of
    environments.
    """
    if not dim:
        return row
    return row.movedim(0, dim)


def _take_apart(state: Any, key: Key, out: Leaves) -> Any:
    """Put the tensors of a nested state into ``out``; returns the nesting with keys in place of
    tensors.
    """
    if isinstance(state, Mapping):
        named = {}
        for name, value in state.items():
            named[name] = _take_apart(value, (*key, str(name)), out)
        return named
    if isinstance(state, (tuple, list)):
        parts = []
        for i, value in enumerate(state):
            parts.append(_take_apart(value, (*key, str(i)), out))
        return type(state)(parts)
    out[key] = state
    return _Place(key)


class _Place:
    def __init__(self, key: Key) -> None:
        self.key = key


def _restore(shape: Any, leaves: Leaves) -> Any:
    if isinstance(shape, Mapping):
        return {name: _restore(part, leaves) for name, part in shape.items()}
    if isinstance(shape, (tuple, list)):
        return type(shape)(_restore(part, leaves) for part in shape)
    return leaves[shape.key]


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__}"
