"""What a policy is adapted to, and checks that its output fits the environment and the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    MusterError,
    PolicyError,
    described,
    text_of,
)
from muster.keys import IS_INIT, Key, dotted
from muster.memory.slots import numpy_dtype
from muster.memory.specs import ArraySpec, Column, Specs
from muster.policies.sampling import ActionMask
from muster.protocols import Outputs

# Errors of adapters that respect action masks (see ``rollout.acting``); the last: no action is
# allowed.
MASKED_RAISES = PolicyError, BadPolicyOutput, BadOption, BadEnvOutput
NO_BATCH = "Without num_envs= there is no batch dimension. If the policy expects one, pass num_envs=1."

Result = TypeVar("Result")


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


def spec_as_returned(
    action: torch.Tensor, spec: ArraySpec, lead: tuple[int, ...]
) -> ArraySpec | None:
    """Return the spec of a returned action of any shape and dtype: ``spec`` itself if the action is
    as it says; None if its first dimensions are not ``lead``.
    """
    dims = len(lead)
    if action.shape[:dims] != lead:
        return None
    shape = tuple(action.shape[dims:])
    dtype = _dtype_of_rows(action, "an action")
    if (shape, dtype) == (spec.shape, spec.dtype):
        return spec
    return ArraySpec(shape, dtype, inner=spec.inner)


def action_problem(
    action: torch.Tensor,
    spec: ArraySpec,
    lead: tuple[int, ...],
) -> str | None:
    """The end of "returned action ..." if ``action`` is wrong, else None; any width of a kind is
    accepted.
    """
    expected = (*lead, *spec.shape)
    if tuple(action.shape) != expected:
        hint = ""
        if not lead and tuple(action.shape) == (1, *expected):
            hint = f". {NO_BATCH}"
        elif _is_one_choice(spec) and action.ndim == len(lead) + 1:
            hint = (
                "; scores or one-hot vectors need an argmax, or a head such as"
                " muster.policies.categorical(net)"
            )
        return f"with shape {tuple(action.shape)}, expected {expected}{hint}"
    kind = np.empty(0, spec.dtype).dtype.kind
    is_float = action.is_floating_point()
    if is_float != (kind == "f") or action.is_complex():
        return f"with dtype {action.dtype}, expected {spec.dtype}"
    return None


def _dtype_of_rows(value: torch.Tensor, subject: str) -> np.dtype[Any]:
    """Return the dtype in which rows store a value; ``subject`` begins the error if there is none."""
    try:
        return numpy_dtype(value.dtype)
    except TypeError as error:
        raise BadPolicyOutput(
            f"{subject} has dtype {value.dtype}. Rows have the dtypes of NumPy, which lacks it:"
            " return value.float()"
        ) from error


def _is_one_choice(spec: ArraySpec) -> bool:
    return spec.shape == () and spec.high is not None and spec.dtype.kind in "iu"


def column_of(
    key: Key,
    value: torch.Tensor,
    lead: tuple[int, ...],
    policy: str,
    *,
    carry: bool = False,
) -> Column:
    """Return the column for an extra or a state, from its first value ``[B, *shape]``."""
    if tuple(value.shape[: len(lead)]) != lead:
        raise BadPolicyOutput(
            f"policy {policy} returned {dotted(key)} with shape {tuple(value.shape)}, expected it"
            f" to begin with {lead}, one entry per environment"
        )
    dtype = _dtype_of_rows(value, f"policy {policy} returned {dotted(key)}, which")
    return Column(key, tuple(value.shape[len(lead) :]), dtype, carry=carry)


def columns_of(outputs: Outputs, lead: tuple[int, ...], policy: str) -> list[Column]:
    """Return the columns for the extras and the state of a policy's first outputs."""
    columns = []
    for key, value in outputs.extras.items():
        columns.append(column_of(key, value, lead, policy))
    for key, value in outputs.state.items():
        columns.append(column_of(key, value, lead, policy, carry=True))
    return columns


def init_column() -> Column:
    """Return the column of a policy that reads where episodes begin."""
    return Column(IS_INIT, (), np.dtype(bool), carry=True, trailing=True)


def called_first(
    call: Callable[[], Result],
    obs: Mapping[Key, torch.Tensor],
    lead: tuple[int, ...],
    policy: str,
) -> Result:
    """Return the result of a policy's first call.

    An error (``PolicyError``) has the shapes of the observations.
    """
    try:
        return call()
    except MusterError:
        raise
    except Exception as error:
        if "same dtype" in text_of(error):  # the observation's dtype is the problem
            raise
        shapes = {
            dotted(key): tuple(value.shape)
            for key, value in obs.items()
            if torch.is_tensor(value)
        }
        shown = str(shapes).strip("{}").replace("'", "")
        begins = (
            f"The first dimension ({lead[0]}) counts environments."
            if lead
            else NO_BATCH
        )
        raise PolicyError(
            f"policy {policy} raised {described(error, ' at row 0 of the batch')}. It got tensors"
            f" of these shapes: {shown}. {begins} No environment was stepped since; the next call"
            " tries again from there."
        ) from error
