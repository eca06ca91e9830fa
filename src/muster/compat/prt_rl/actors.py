"""Adapters of prt_rl's policies for Muster's loop, and of their outputs for the user."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

from muster.compat.prt_rl.envs import PrtEnvs, Side
from muster.errors import BadOption, BadPolicyOutput, PolicyError, described
from muster.keys import ACTION, LOG_PROB, OBSERVATION, Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.policies.adapt import adapt
from muster.policies.checks import column_of
from muster.policies.heads import Head
from muster.protocols import Act, Outputs, Policy
from muster.rng import GroupRng

Tensors = dict[str, torch.Tensor]
NOTHING = torch.empty(0, 0, device="cpu")
TAKEN = frozenset({"state", "next_state", "reward", "done", "last_value_est"})
CONTINUES = (
    "The experience without 'last_value_est' is the attribute experience of this error, and the"
    " next call continues after it."
)


class PrtRlActor:
    """A policy with ``act(state, deterministic=False) -> (action, dict)``; implements ``Policy``.

    If the caller has gradients enabled, outputs keep their graph, which prt_rl's ``PolicyGradient``
    needs. ``unused``: a result of another kind than those before, with which a new actor must
    start.
    """

    path = "prt_rl policy"
    draws_globally = True

    def __init__(self, policy: Any, side: Side, unused: Any = None) -> None:
        self.policy, self.name, self._side, self.unused = (
            policy,
            type(policy).__name__,
            side,
            unused,
        )
        self._like: Tensors = {}  # outputs of a first call, by name, the action first
        self._graphs: dict[str, list[torch.Tensor]] = {}
        self._grad = False
        self._bootstraps = False

    @property
    def adapted(self) -> Policy:
        return self

    def begin(self, *, bootstraps: bool) -> bool:
        """Start a rollout; returns whether the policy's outputs are known.

        Args:
            bootstraps: ``last_value`` is called after it.
        """
        self._grad = torch.is_grad_enabled()
        self._bootstraps = bootstraps
        self._graphs = {name: [] for name in self._graphs}
        self._check_value(self._like)
        return bool(self._like)

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        got, self.unused = self.unused, None
        returned = self._named(
            self._ask(self._side.show(obs[OBSERVATION])) if got is None else got
        )
        self._check_entries(returned)
        self._check_action(returned["action"])
        self._check_value(returned)
        self._like = {name: value.detach() for name, value in returned.items()}
        self._graphs = {
            name: [_with_graph(value)]
            for name, value in returned.items()
            if value.requires_grad
        }
        return Outputs(
            {self._action_key: self._like["action"]},
            {
                self._key(name): value
                for name, value in self._like.items()
                if name != "action"
            },
        )

    def columns(self) -> Sequence[Column]:
        lead = (self._side.env.spec.num_envs,)
        return [
            column_of(self._key(name), like, lead, self.name)
            for name, like in self._like.items()
        ][1:]

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        if self not in lane.cache:
            like = self._like.items()
            places = [
                (name, self._rows(lane, name).unbind(0), value.shape, value.dtype)
                for name, value in like
            ]
            lane.cache[self] = places, lane.rows(OBSERVATION)
        (places, states), graphs, show = lane.cache[self], self._graphs, self._side.show

        def act(t: int) -> None:
            got = self._ask(show(states[t]))
            returned = self._named(got)
            if len(returned) != len(places):
                self._refuse(got, returned, t)
            for name, rows, shape, dtype in places:
                value = returned.get(name, NOTHING)
                if (
                    value.shape != shape
                    or value.dtype is not dtype
                    or (value.requires_grad and name not in graphs)
                ):
                    self._refuse(got, returned, t)
                rows[t].copy_(value)
            for name, graph in graphs.items():
                graph.append(_with_graph(returned[name]))

        return act

    def results(self, lane: Lane) -> Tensors:
        """Return the outputs of all complete rows, ``[n, N, ...]``, on the device of the policy's
        outputs.
        """
        n = lane.done_steps
        found = {}
        for name, like in self._like.items():
            if name in self._graphs:  # has one row more if the step after it failed
                found[name] = torch.stack(self._graphs[name][:n])
            else:
                rows = self._rows(lane, name)[:n]
                found[name] = rows.to(like.device, like.dtype, copy=True)
        return found

    def last_value(self, state: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """``"value"`` of ``state`` ``[N, ...]``, 0 where ``done``: ``[N, 1]``.

        Restores RNG and recurrent state.

        Raises:
            PolicyError, BadPolicyOutput: of this call. Nothing was stepped.
        """
        like = self._like["value"]
        if done.all():
            return torch.zeros_like(like).reshape(len(done), 1)
        with undisturbed(self.policy, like.device):
            try:
                got = self.policy.act(state.clone())
            except Exception as error:
                raise PolicyError(
                    f"policy {self.name} raised {described(error)} when it was asked for the value"
                    f" of the last states. {CONTINUES}"
                ) from error
        returned = self._named(got)
        value = returned.get("value", NOTHING)
        if value.shape != like.shape or value.dtype is not like.dtype:
            raise BadPolicyOutput(
                f"policy {self.name} returned {_kinds(returned)} for the last states, and"
                f" {_kinds(self._like)} before. {CONTINUES}"
            )
        return value.reshape(len(done), 1).masked_fill(done.to(value.device), 0)

    def _ask(self, state: torch.Tensor) -> Any:
        if not self._grad:
            return self.policy.act(state, deterministic=False)
        with torch.enable_grad():
            return self.policy.act(state, deterministic=False)

    def _named(self, got: Any) -> Tensors:
        if (
            not isinstance(got, tuple)
            or len(got) != 2
            or not isinstance(got[1], dict)
            or "action" in got[1]
        ):
            raise BadPolicyOutput(
                f"policy {self.name} returned {type(got).__name__}, expected (action, dict), the"
                " dict without 'action'"
            )
        returned = {"action": got[0], **got[1]}
        for name, value in returned.items():
            if not isinstance(value, torch.Tensor):
                raise BadPolicyOutput(
                    f"policy {self.name} returned {name!r} as {type(value).__name__}, not a tensor"
                )
        return returned

    def _refuse(self, got: Any, returned: Tensors, t: int) -> NoReturn:
        self.unused = got
        raise BadPolicyOutput(
            f"policy {self.name} returned {_kinds(returned)} at row {t}, and {_kinds(self._like)}"
            " at the row before"
        )

    def _check_entries(self, returned: Tensors) -> None:
        for name, value in returned.items():
            if not isinstance(name, str):
                raise BadPolicyOutput(
                    f"policy {self.name} returned the key {name!r}, expected texts: they are keys of"
                    " the experience"
                )
            if value.layout is not torch.strided:
                raise BadPolicyOutput(
                    f"policy {self.name} returned {name!r} as a sparse tensor: return"
                    " value.to_dense()"
                )
        if taken := sorted(TAKEN.intersection(returned)):
            raise BadPolicyOutput(
                f"policy {self.name} returned {taken}, which the experience has already"
            )

    def _check_value(self, returned: Tensors) -> None:
        value = returned.get("value")
        num_envs = self._side.env.spec.num_envs
        if self._bootstraps and value is not None and value.numel() != num_envs:
            raise BadPolicyOutput(
                f"policy {self.name} returned a value of shape {tuple(value.shape)}, expected"
                f" {(num_envs, 1)}: 'last_value_est' is one number for each environment. Pass"
                " bootstrap=False to collect without it"
            )

    def _check_action(self, action: torch.Tensor) -> None:
        env = self._side.env
        if isinstance(env, PrtEnvs):
            env.accept(
                column_of(ACTION, action, (env.spec.num_envs,), self.name),
                action.device,
            )
            return
        (spec,) = env.spec.action_specs.values()
        expected = [
            (env.spec.num_envs, *shape)
            for shape in ([spec.shape] if spec.shape else [(1,), ()])
        ]
        if tuple(action.shape) not in expected or action.is_floating_point() != (
            spec.dtype.kind == "f"
        ):
            raise BadPolicyOutput(
                f"policy {self.name} returned an action of shape {tuple(action.shape)}, dtype"
                f" {action.dtype}, expected {expected[0]} and {spec.dtype}"
            )

    @property
    def _action_key(self) -> Key:
        (key,) = self._side.env.spec.action_specs
        return key

    def _key(self, name: str) -> Key:
        return self._action_key if name == "action" else ("policy", name)

    def _rows(self, lane: Lane, name: str) -> torch.Tensor:
        return lane.tensors[self._key(name)].reshape(lane.T, *self._like[name].shape)


class HeadActor:
    """One of Muster's heads as a policy, with Muster's own sampling."""

    def __init__(self, head: Head, side: Side) -> None:
        if isinstance(side.env, PrtEnvs):
            raise BadOption(
                f"{head.name} needs to know the action space: give the Gymnasium environments"
                " themselves (or prt_rl's GymnasiumWrapper), or a policy with act(state)"
            )
        self.policy = head
        self.name = head.name
        self._env = side.env
        self.unused = None
        self._begun = False
        self.adapted: Policy = adapt(head, side.env.spec)

    def begin(self, *, bootstraps: bool) -> bool:
        """Start a rollout; returns whether the policy's outputs are known. There is no value."""
        begun, self._begun = self._begun, True
        return begun

    def results(self, lane: Lane) -> Tensors:
        """Return ``"action"`` and ``"log_prob"`` of all rows, like those of a prt_rl policy."""
        (key,), n = self._env.spec.action_specs, lane.done_steps
        found = {
            name: lane.tensors[k][:n]
            for name, k in (("action", key), ("log_prob", LOG_PROB))
            if k in lane.tensors
        }
        return {
            name: rows.unsqueeze(-1) if rows.ndim == 2 else rows
            for name, rows in found.items()
        }


def _with_graph(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares the graph of ``value``, whose memory the policy may use again."""
    with torch.enable_grad():
        return value.clone()


def _kinds(tensors: Tensors) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


@contextmanager
def undisturbed(policy: Any, device: torch.device) -> Iterator[None]:
    """Restore the process's generators (those of ``device``, too) and the state of ``policy``
    afterwards.

    The state is the attributes of the policy and of all its modules, and the contents of tensors,
    arrays, generators, lists and dicts in them. Parameters are not restored, because ``act`` does
    not change them.
    """
    parts = list(policy.modules()) if isinstance(policy, torch.nn.Module) else [policy]
    with ExitStack() as undo:
        for part in parts:
            _keep(getattr(part, "__dict__", None), undo)
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        undo.enter_context(
            torch.random.fork_rng([device] if device.type == "cuda" else [])
        )
        yield


def _keep(value: Any, undo: ExitStack) -> None:
    """Register callbacks in ``undo`` that restore the present contents of ``value``; they run in
    reverse order.
    """
    if isinstance(value, torch.nn.Parameter):
        return
    if isinstance(value, torch.Tensor):
        undo.callback(_refill, value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        undo.callback(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        undo.callback(
            setattr,
            value.bit_generator,
            "state",
            copy.deepcopy(value.bit_generator.state),
        )
    elif isinstance(value, dict):
        undo.callback(value.update, dict(value))
        undo.callback(value.clear)
    elif isinstance(value, (list, deque)):
        undo.callback(value.extend, list(value))
        undo.callback(value.clear)
    if isinstance(value, (dict, list, deque, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _keep(item, undo)


def _refill(tensor: torch.Tensor, content: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        tensor.data.copy_(
            content
        )  # data: autograd must not see a change, as there is none
