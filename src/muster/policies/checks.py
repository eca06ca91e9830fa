"""What a policy is adapted to, and checks that its output fits the environment and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from muster.errors import BadEnvOutput, BadOption, BadPolicyOutput, PolicyError
from muster.keys import Key, dotted
from muster.memory.slots import numpy_dtype
from muster.memory.specs import ArraySpec, Column, Specs
from muster.policies.sampling import ActionMask

# Errors of adapters that respect action masks (see ``rollout.acting``); the last: no action is allowed.
MASKED_RAISES = PolicyError, BadPolicyOutput, BadOption, BadEnvOutput


@dataclass(frozen=True)
class PolicySetting:
    """The environments, devices and options of a policy. Specs are those of one environment.

    Attributes:
        device: where the policy computes; None: where the rows are.
        rows_device: where the rows are; None: on the host.
        executor: the executor may be used where it is equal to the module.
    """

    obs_specs: Specs
    action_specs: Specs
    batch_shape: tuple[int, ...]
    masks: Sequence[ActionMask] = ()
    device: torch.device | None = None
    rows_device: torch.device | None = None
    exploration_type: str = "random"
    executor: bool = True

    @property
    def deterministic(self) -> bool:
        return self.exploration_type != "random"


def action_problem(action: torch.Tensor, spec: ArraySpec, lead: tuple[int, ...]) -> str | None:
    """The end of "returned action ..." if ``action`` is wrong, else None; any width of a kind is accepted."""
    expected = (*lead, *spec.shape)
    if tuple(action.shape) != expected:
        hint = ""
        if spec.shape == () and spec.high is not None and action.ndim == len(lead) + 1 and spec.dtype.kind in "iu":
            hint = "; scores or one-hot vectors need an argmax, or a head such as muster.policies.categorical(net)"
        return f"with shape {tuple(action.shape)}, expected {expected}{hint}"
    kind = np.empty(0, spec.dtype).dtype.kind
    is_float = action.is_floating_point()
    if is_float != (kind == "f") or action.is_complex():
        return f"with dtype {action.dtype}, expected {spec.dtype}"
    return None


def column_of(key: Key, value: torch.Tensor, lead: tuple[int, ...], policy: str, *, carry: bool = False) -> Column:
    """Return the column for an extra or a state, from its first value ``[B, *shape]``."""
    if tuple(value.shape[: len(lead)]) != lead:
        raise BadPolicyOutput(
            f"policy {policy} returned {dotted(key)} with shape {tuple(value.shape)}, expected it to begin with "
            f"{lead}, one entry per environment"
        )
    dtype = numpy_dtype(value.dtype)
    return Column(key, tuple(value.shape[len(lead) :]), dtype, carry=carry)
