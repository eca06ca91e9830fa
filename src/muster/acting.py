"""Calling a policy: its errors as the user should see them, and its first outputs into a lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from muster.errors import MusterError, PolicyError
from muster.memory.slots import Lane
from muster.protocols import Outputs, Policy

Result = TypeVar("Result")
OBS_DTYPE_HINT = (
    "Observations have the dtype of the policy's first floating parameter, or the environment's if it has none or with "
    "obs_dtype='env': pass obs_dtype=torch.float32, or cast in the policy (bfloat16 networks have to). "
)


def call_policy(policy: Policy, call: Callable[[], Result]) -> Result:
    """What ``call`` returns; what it raises as a ``PolicyError``."""
    try:
        return call()
    except MusterError:
        raise
    except Exception as error:
        raise policy_error(policy, error) from error


def policy_error(policy: Policy, error: BaseException, t: int = 0) -> PolicyError:
    """The error that says which policy raised what, at which row."""
    hint = OBS_DTYPE_HINT if "same dtype" in str(error) else ""
    return PolicyError(
        f"policy {policy.name} raised {type(error).__name__} at row {t} of the batch: {error}. {hint}"
        f"No environment was stepped since; the next call tries again from there."
    )


def keep(outputs: Outputs) -> Outputs:
    """Outputs of a first call in memory of their own: a policy may return views on its weights."""
    action, extras, state = (
        {key: value.clone() for key, value in part.items()} for part in (outputs.action, outputs.extras, outputs.state)
    )
    return Outputs(action, extras, state, outputs.objects)


def store_outputs(outputs: Outputs, lane: Lane, t: int = 0) -> None:
    """Write the outputs of a first call into row ``t``."""
    for key, value in (*outputs.action.items(), *outputs.extras.items()):
        row = lane.tensors[key][t]
        row.copy_(value.reshape(row.shape))
    for key, array in outputs.objects.items():
        lane.arrays[key][t] = array.reshape(-1)
    for key, value in outputs.state.items():
        row = lane.tensors[key][t + 1]
        row.copy_(value.reshape(row.shape))
