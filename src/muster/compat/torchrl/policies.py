"""Policies with the inputs and outputs that TorchRL's collectors use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict.nn import CudaGraphModule
from torchrl import compile_with_warmup
from torchrl.data import Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
from torchrl.envs.utils import _make_compatible_policy
from torchrl.modules import (
    RandomPolicy,
    get_primers_from_module,
    set_exploration_modules_spec_from_env,
)

from muster.keys import FLAGS, IS_INIT, Key, next_of
from muster.memory.cells import assemble
from muster.memory.slots import torch_dtype
from muster.policies.adapt import takes_tensordict
from muster.policies.checks import spec_as_returned
from muster.policies.tensordict_program import as_key
from muster.restore.pickling import dumps, loads
from muster.rollout.group import Group

# holds outputs below "next" that are no states of the policy, until ``batches.tidy`` moves them
# back
AHEAD = "ahead"


def wrap_policy(policy: Any, env: Any, trust: bool | None) -> Any:
    """Return the policy, or, if it takes no TensorDict, a module around it with inputs named as its
    arguments.
    """
    if isinstance(policy, torch.nn.Module) and isinstance(env, EnvBase):
        set_exploration_modules_spec_from_env(policy, env)
    if trust or not isinstance(env, EnvBase) or isinstance(policy, RandomPolicy):
        return policy
    try:
        return _make_compatible_policy(
            policy=policy, observation_spec=env.observation_spec, env=env
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise TypeError(
            "Failed to wrap the policy. If the policy needs to be trusted, set trust_policy=True."
            " Scroll up for more details."
        ) from error


def check_is_init(policy: Any, env: EnvBase) -> None:
    """Check that an environment has ``is_init`` if the policy reads it, as TorchRL's first call of
    the policy does.

    Raises:
        KeyError: it has not.
    """
    reads = [as_key(key) for key in getattr(policy, "in_keys", None) or ()]
    if IS_INIT in reads and IS_INIT not in _keys_of(env):
        raise KeyError(
            'key "is_init" not found: the policy reads it, and the environment does not have it.'
            " Pass auto_register_policy_transforms=True, or append InitTracker() to the"
            " environment"
        )


def with_transforms(env: EnvBase, policy: Any) -> EnvBase:
    """Return the environment with the transforms that a recurrent policy needs and that it lacks,
    as with TorchRL's ``auto_register_policy_transforms``.
    """
    if not isinstance(policy, torch.nn.Module):
        return env
    known = _keys_of(env)
    missing: list[Any] = []
    if IS_INIT not in known:
        missing.append(InitTracker())
    found = get_primers_from_module(policy, warn=False)
    for primer in found if isinstance(found, Compose) else [found]:
        if primer is not None and not known.issuperset(_paths(primer.primers)):
            missing.append(primer)
    return TransformedEnv(env, Compose(*missing)) if missing else env


def _keys_of(env: EnvBase) -> set[Key]:
    return {*_paths(env.full_observation_spec), *_paths(env.full_state_spec)}


def _paths(spec: Any) -> list[Key]:
    return [as_key(key) for key in spec.keys(True, True)]


class Compiled:
    """Calls a policy that ``torch.compile`` compiles, in TorchRL's way: after some calls.

    Args:
        policy: policy that takes a TensorDict.
        options: keyword arguments of ``torch.compile``, and ``warmup``, the number of calls before
            (1).
    """

    def __init__(self, policy: Any, options: Mapping[str, Any]) -> None:
        self._call = compile_with_warmup(policy, **options)
        self.__name__ = getattr(policy, "__name__", type(policy).__name__)
        for name in ("in_keys", "out_keys"):
            if (keys := getattr(policy, name, None)) is not None:
                setattr(self, name, keys)

    def __call__(self, td: Any) -> Any:
        return self._call(td)


def check_graph(
    policy: Any, device: torch.device | None, options: Mapping[str, Any]
) -> None:
    """Make the CUDA graph of TorchRL's ``cudagraph_policy`` where there is no CUDA: it only calls
    the policy.

    This raises the errors of its options, and warns.
    """
    CudaGraphModule(policy, in_keys=[], out_keys=[], device=device, **options)


def take_actions_as_they_are(
    group: Group, policy: Any, device: torch.device | None, shown: bool
) -> None:
    """Call the policy once to set the specs of actions, because TorchRL stores actions of any shape
    and dtype.

    Args:
        shown: TorchRL makes this call, too: raise its errors, and keep its change of torch's random
            state.
    """
    try:
        with torch.random.fork_rng(devices=[], enabled=not shown), torch.no_grad():
            td = first_input(group, policy, device)
            out = policy(td)
    except Exception:
        if shown:
            raise
        return
    specs = dict(group.env.spec.action_specs)
    for key, spec in specs.items():
        action = (td if out is None else out).get(key, None) if spec.is_tensor else None
        if isinstance(action, torch.Tensor):
            own = spec_as_returned(action, spec, group.env.spec.batch_shape)
            specs[key] = spec if own is None else own
    group.env.store_as(replace(group.env.spec, action_specs=specs))


def _in_form_of(action: torch.Tensor, spec: Any) -> Any:
    """Return the spec of an action with the shape and dtype of actions that a policy returns.

    Random actions are then still from the environment's distribution, if the shapes have the same
    number of entries.
    """
    if action.numel() == spec.shape.numel():
        try:
            return spec.reshape(action.shape).to(action.dtype)
        except (IndexError, ValueError, RuntimeError, NotImplementedError):
            pass  # this kind of spec has no such shape
    return Unbounded(action.shape, device=spec.device, dtype=action.dtype)


class CopiedEnv:
    """Function that makes copies of an environment: TorchRL's collectors send environments to
    nodes, too.
    """

    def __init__(self, env: EnvBase) -> None:
        self._pickled = dumps(env, "create_env_fn")
        self.__name__ = type(env).__name__

    def __call__(self) -> Any:
        return loads(self._pickled, "create_env_fn")


class ActedOn:
    """Function that makes TorchRL environments for nodes, with the specs of the actions that the
    policy returns.

    Args:
        make: function that makes the environment.
        policy: function that returns the policy.
        adds_transforms: add the transforms that the policy needs; see ``with_transforms``.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        policy: Callable[[], Any],
        adds_transforms: bool = False,
    ) -> None:
        self._make = make
        self._policy = policy
        self._adds_transforms = adds_transforms
        self.__name__ = getattr(make, "__name__", type(make).__name__)

    def __call__(self, **kwargs: Any) -> Any:
        env = self._make(**kwargs)
        if not isinstance(env, EnvBase) or not takes_tensordict(
            policy := self._policy()
        ):
            return env
        if self._adds_transforms:
            env = with_transforms(env, policy)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                td = env.full_observation_spec.zero().update(env.full_done_spec.zero())
                actions = policy(td).select(*env.action_keys)
        except Exception:  # noqa: BLE001 - rollouts raise it, with its place
            return env
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        for key, action in actions.items(True, True):
            spec = env.full_action_spec[key]
            if (action.shape, action.dtype) != (spec.shape, spec.dtype):
                specs = base.full_action_spec.clone()
                specs[key] = _in_form_of(action, spec)
                base.full_action_spec = specs
                env.empty_cache()
        return env


def as_torchrl_calls(policy: Any, group: Group, device: torch.device | None) -> Any:
    """Return a policy with the inputs that TorchRL's collector provides besides observations.

    These are the policy's own outputs of the previous step, unless other keys have their names; the
    done flags, which are False because the policy never acts after the end of an episode; and the
    TensorDict's device. Outputs below ``next`` that the policy does not read are stored below
    ``next``.
    """
    if isinstance(policy, RandomPolicy):
        return policy
    spec = group.env.spec
    reads = (
        None
        if getattr(policy, "in_keys", None) is None
        else [as_key(key) for key in policy.in_keys]
    )
    flags = [key for key in spec.flags if reads is None or key in reads]
    writes = {as_key(key) for key in getattr(policy, "out_keys", None) or ()}
    own = [
        k
        for k in reads or ()
        if k in writes and k not in spec.observation_specs and next_of(k) not in writes
    ]
    foreign = not type(policy).__module__.startswith(("tensordict.", "torchrl."))
    remembers = own or any(part.startswith("_") for key in writes for part in key)
    ahead = any(key[0] == "next" and key[1:] not in (reads or ()) for key in writes)
    return (
        _Called(policy, flags, own, group, device)
        if flags or remembers or ahead or foreign
        else policy
    )


class _Called:
    def __init__(
        self,
        policy: Any,
        flags: Sequence[Key],
        own: Sequence[Key],
        group: Group,
        device: torch.device | None,
    ) -> None:
        self._policy = policy
        self._device = device
        self._lead = group.env.spec.batch_shape
        self._flags = [key[0] for key in flags]
        self._kept: dict[str, Any] = {}
        reads = [as_key(key) for key in getattr(policy, "in_keys", None) or ()]
        self._states = {next_of(key) for key in reads}
        self._fresh = {
            "next",
            AHEAD,
            *(
                key[0]
                for key in (
                    *FLAGS,
                    *group.env.spec.observation_specs,
                    *group.env.spec.action_specs,
                )
            ),
        }
        if getattr(policy, "in_keys", None) is not None:
            self.in_keys = [
                key for key in policy.in_keys if as_key(key) not in (*FLAGS, *own)
            ]
            self.out_keys = [self._stored(as_key(key)) for key in policy.out_keys]
        self.__name__ = getattr(policy, "__name__", type(policy).__name__)

    def __call__(self, td: Any) -> Any:
        td = td.copy() if self._device is None else td.to(self._device)
        fresh = {*self._fresh, *td.keys()}
        for name in self._flags:
            td.set(
                name, torch.zeros((*self._lead, 1), dtype=torch.bool, device=td.device)
            )
        for name, value in self._kept.items():
            if name not in fresh:
                td.set(name, value)
        out = self._policy(td)
        out = td if out is None else out
        self._kept = {name: out.get(name) for name in set(out.keys()) - fresh}
        out = out.exclude(*self._flags)
        below = out.get("next", None)
        for key in (
            []
            if below is None
            else [("next", *as_key(key)) for key in below.keys(True, True)]
        ):
            if self._stored(key) != key:
                out.set(self._stored(key), out.pop(key))
        return out

    def _stored(self, key: Key) -> Key:
        return key if key[0] != "next" or key in self._states else (AHEAD, *key[1:])


class RandomWithZeros:
    """Returns the environment's random actions, and zeros for the other outputs of the policy."""

    def __init__(self, group: Group, zeros: Mapping[Any, torch.Tensor]) -> None:
        env: Any = group.env.objects()[0]
        self._env = env
        self._zeros = zeros
        self._other: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}
        for key, spec in group.env.spec.action_specs.items():
            if not spec.is_tensor:
                continue
            shape = (*group.env.spec.batch_shape, *spec.shape)
            kind = torch_dtype(spec.dtype)
            own = env.full_action_spec[key]
            if (tuple(own.shape), own.dtype) != (shape, kind):
                self._other[key] = shape, kind

    def __call__(self, td: Any) -> Any:
        td = self._env.rand_action(td)
        for key, (shape, kind) in self._other.items():
            action = td.get(key).to(kind)
            if action.numel() == math.prod(shape):
                action = action.reshape(shape)
            td.set(key, action)
        for key, value in self._zeros.items():
            td.set(key, value)
        return td


def needs_trial(policy: Any, env: EnvBase, use_buffers: bool) -> bool:
    """Return whether TorchRL calls the policy once at construction, to find its outputs."""
    out_keys = list(getattr(policy, "out_keys", None) or ())
    spec = getattr(policy, "spec", None)
    if not use_buffers:
        return not out_keys
    if spec is None or any(value is None for value in spec.values(True, True)):
        return True
    declared = {as_key(key) for key in spec.keys(True, True)}
    known = {as_key(key) for key in env.fake_tensordict().keys(True, True)}
    covered = declared if declared - known else set()
    return any(as_key(key) not in covered for key in out_keys)


def first_input(group: Group, policy: Any, device: torch.device | None) -> Any:
    """Return the input of TorchRL's first call of the policy."""
    specs = group.env.spec.observation_specs
    inner = {
        key[:-1]: spec.shape[: spec.inner] for key, spec in specs.items() if spec.inner
    }
    leaves = {
        k: v if torch.is_tensor(v) else v.reshape(group.env.spec.batch_shape)
        for k, v in group.observations().items()
    }
    td = assemble(leaves, group.env.spec.batch_shape, None, inner).clone()
    for flag in group.env.spec.flags:
        td.set(
            flag,
            torch.zeros(
                (*group.env.spec.batch_shape, 1), dtype=torch.bool, device="cpu"
            ),
        )
    return td if device is None else td.to(device)
