"""Errors of policies and environments as the user sees them, and storing a policy's first outputs
in a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from muster.errors import (
    BadOption,
    BadPolicyOutput,
    EnvError,
    MusterError,
    PolicyError,
    described,
    text_of,
)
from muster.memory.slots import Lane
from muster.protocols import Outputs, Policy

Result = TypeVar("Result")
# errors of policy adapters
OWN: tuple[type[Exception], ...] = (PolicyError, BadPolicyOutput, BadOption)
# what follows from an error of the policy
TRIED_AGAIN = "No environment was stepped since; the next call tries again from there."
OBS_DTYPE_HINT = (
    "Observations have the dtype of the policy's first floating parameter, or the environment's if"
    " it has none or with obs_dtype='env': pass obs_dtype=torch.float32, or cast in the policy"
    " (bfloat16 networks have to). "
)


def call_policy(policy: Policy, call: Callable[[], Result], t: int = 0) -> Result:
    """Return the result of ``call`` for row ``t``; its errors are raised as ``PolicyError``, except
    those of the adapter.
    """
    try:
        return call()
    except Exception as error:
        if is_own(policy, error):
            raise
        raise policy_error(policy, error, t) from error


def is_own(policy: Policy, error: BaseException) -> bool:
    """Return whether the policy's adapter raised the error: its type is in ``policy.raises``
    (default ``OWN``).
    """
    return issubclass(type(error), getattr(policy, "raises", OWN))


def policy_error(policy: Policy, error: BaseException, t: int = 0) -> PolicyError:
    """Return the error that names the policy, its error and the row.

    ``error`` can be of any type: a policy that uses Muster can also raise Muster's errors.
    """
    hint = OBS_DTYPE_HINT if "same dtype" in text_of(error) else ""
    where = f" at row {t} of the batch"
    return PolicyError(
        f"policy {policy.name} raised {described(error, where)}."
    ).end_with(f"{hint}{TRIED_AGAIN}")


def env_error(name: str, method: str, error: BaseException) -> BaseException:
    """Return the error to raise for an environment's error: the adapter's own, with its details, or
    an ``EnvError``.
    """
    is_ours = issubclass(type(error), MusterError)
    of_policy = issubclass(type(error), (PolicyError, BadPolicyOutput))
    if is_ours and not of_policy:
        return error
    return EnvError(f"{name}.{method} raised {described(error)}")


def keep(outputs: Outputs) -> Outputs:
    """Copy the outputs of a first call: a policy may return views of its weights.

    The adapter has copied objects.
    """
    return Outputs(
        action={key: value.clone() for key, value in outputs.action.items()},
        extras={key: value.clone() for key, value in outputs.extras.items()},
        state={key: value.clone() for key, value in outputs.state.items()},
        objects=outputs.objects,
        begun={key: value.clone() for key, value in outputs.begun.items()},
    )


def store_outputs(outputs: Outputs, lane: Lane, t: int = 0) -> None:
    """Write the outputs of a first call into row ``t``."""
    for key, value in (*outputs.action.items(), *outputs.extras.items()):
        row = lane.tensors[key][t]
        row.copy_(value.reshape(row.shape))
    for key, array in outputs.objects.items():
        lane.arrays[key][t] = array.reshape(-1)
    for key, value in outputs.begun.items():
        row = lane.tensors[key][t]
        row.copy_(value.reshape(row.shape))
    for key, value in outputs.state.items():
        row = lane.tensors[key][t + 1]
        row.copy_(value.reshape(row.shape))
