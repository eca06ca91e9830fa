"""Adapters from a user's policy to the protocol ``Policy``."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from muster.env_spec import EnvSpec
from muster.errors import BadOption, described
from muster.policies.agents import PerAgent
from muster.policies.checks import MASKED_RAISES, PolicySetting
from muster.policies.functions import FunctionPolicy
from muster.policies.head_policy import HeadPolicy
from muster.policies.heads import Head
from muster.policies.sampling import all_masks_of, check_masks
from muster.policies.states import BATCH_DIM
from muster.protocols import Policy
from muster.utils.attributes import kind_of, name_of
from muster.utils.event_loop import (
    CoroutineCall,
    CoroutineRunner,
    is_coroutine_function,
)

# Floating dtypes of rows. A network in another dtype (bfloat16) gets float32, and must cast its
# input itself.
STORED = {
    getattr(torch, name): np.dtype(name) for name in ("float16", "float32", "float64")
}
ACCEPTED = (
    "None, an nn.Module, a TensorDictModule, a head such as muster.policies.categorical(net), or a"
    " function"
)


def adapt(
    policy: Any,
    env: EnvSpec,
    *,
    device: torch.device | None = None,
    exploration_type: str = "random",
    executor: bool = True,
    takes_td: bool | None = None,
    timeouts: Mapping[str, float | None] = MappingProxyType({}),
) -> Policy:
    """Return the adapter for ``policy`` (see ``ACCEPTED``, but not None), which computes on
    ``device``.

    ``executor`` allows the fast executor if it is equal to the module. ``takes_td``: the policy
    takes a TensorDict; None: see ``takes_tensordict``. ``timeouts``: deadlines of coroutines, by
    phase. Raises ``BadOption`` if ``policy`` cannot be called, or a head does not fit the spaces,
    and ``UnsupportedSpace`` if an action mask does not fit.
    """
    check_masks(env)
    home = torch.empty(
        0, device=env.device
    ).device  # device of the rows, with its index
    setting = PolicySetting(
        env.observation_specs,
        env.action_specs,
        env.acting_shape,
        all_masks_of(env),
        device=None if device == home else device,
        rows_device=env.device,
        exploration_type=exploration_type,
        executor=executor,
    )
    seen = {
        key: spec
        for key, spec in env.observation_specs.items()
        if key not in env.bookkeeping
    }
    only_seen = replace(setting, obs_specs=seen or env.observation_specs)
    if isinstance(policy, Head):
        return HeadPolicy(policy, only_seen)
    if isinstance(policy, PerAgent):
        policy.bind(env.name, env.agents, setting)
        of_agents = FunctionPolicy(policy, setting)
        of_agents.raises = MASKED_RAISES
        return of_agents
    if isinstance(policy, type) or not callable(policy):
        raise BadOption(f"policy is {kind_of(policy)}, expected {ACCEPTED}")
    if is_coroutine_policy(policy):
        policy = AwaitedPolicy(policy, timeouts)
    if takes_td is None:
        takes_td = takes_tensordict(policy)
    if takes_td:
        from muster.policies.tensordict import TensorDictPolicy

        return TensorDictPolicy(policy, setting)
    return FunctionPolicy(policy, only_seen)


class AwaitedPolicy:
    """A function that calls a coroutine function and waits for its result.

    It has the same name and signature.

    ``timeouts`` are deadlines in seconds by phase, of which "policy" applies to each call.
    """

    def __init__(self, policy: Any, timeouts: Mapping[str, float | None]) -> None:
        self.__name__ = name_of(policy)
        self.__wrapped__ = _function(policy)
        self._policy = policy
        self.coroutines = CoroutineRunner()
        setattr(self, BATCH_DIM, getattr(policy, BATCH_DIM, None))
        self.coroutines.timeouts = timeouts

    def __call__(self, *args: Any) -> Any:
        call = CoroutineCall(partial(self._policy, *args))
        self.coroutines.run([call], "policy")
        return call.result()


def is_coroutine_policy(policy: Any) -> bool:
    """Return whether a call of ``policy`` returns a coroutine, for instance of a request to an
    inference server.
    """
    return is_coroutine_function(_function(policy))


def _function(policy: Any) -> Any:
    return policy.forward if isinstance(policy, torch.nn.Module) else policy


def place(policy: Any, device: torch.device | None) -> tuple[Any, torch.device | None]:
    """Return the policy on ``device`` (a copy if it was on another one), and the device on which it
    computes.
    """
    if not isinstance(policy, torch.nn.Module):
        return policy, device
    first = next(iter(policy.parameters()), None)
    if device is None or first is None or first.device == device:
        return policy, device if first is None else first.device
    try:
        copied = copy.deepcopy(policy)
    except Exception as error:
        raise BadOption(
            f"policy_device={str(device)!r}: the policy is on {first.device}, and cannot be copied:"
            f" copy.deepcopy raised {described(error)}. Move it yourself before:"
            f" policy.to({str(device)!r})"
        ) from error
    return copied.to(device), device


def observed_dtype(
    wanted: torch.dtype | Literal["env"] | None,
    policy: Any,
) -> np.dtype[Any] | None:
    """The dtype in which floating observations are stored; None: the environment's.

    ``wanted`` is the option ``obs_dtype``. If it is None, the dtype is that of the policy's first
    floating parameter.
    """
    if wanted is None and isinstance(policy, torch.nn.Module):
        floating = [p.dtype for p in policy.parameters() if p.dtype.is_floating_point]
        wanted = floating[0] if floating else None
    if wanted is None or wanted == "env":
        return None
    return STORED.get(wanted, np.dtype(np.float32))


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether it is a tensordict module, or its one argument is annotated as TensorDict or named td
    or tensordict.
    """
    if "tensordict" in sys.modules:
        from tensordict.nn import TensorDictModuleBase

        if isinstance(policy, TensorDictModuleBase):
            return True
    # the error of ``inspect`` would call its ``__repr__``, the user's code
    if not callable(policy):
        return False
    try:
        parameters = list(inspect.signature(_function(policy)).parameters.values())
    except (TypeError, ValueError):
        return False
    if not parameters:
        return False
    first, *others = parameters
    required = [p for p in others if p.default is p.empty]
    if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in required):
        return False
    if first.name in ("td", "tensordict"):
        return True
    annotation = first.annotation
    name = (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", "")
    )
    return name.rpartition(".")[2] in ("TensorDict", "TensorDictBase")
