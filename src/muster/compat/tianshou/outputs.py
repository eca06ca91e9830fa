"""Checks of what a policy has returned: each part has a row for each environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tianshou.data import Batch
from torch.distributions import Distribution

from muster.errors import BadPolicyOutput


def check_result(policy: str, result: Any) -> None:
    """Raise ``BadPolicyOutput`` unless the result of the policy of this name is a Batch with
    actions.
    """
    if getattr(result, "act", None) is not None and hasattr(result, "get"):
        return
    given = type(result).__name__
    if isinstance(result, Batch):
        given = f"a Batch with {sorted(result.get_keys())}"
    raise BadPolicyOutput(
        f"{policy} returned {given}, expected a Batch(act=...) with an action for each environment"
    )


def check_actions(policy: str, what: str, actions: Any, number: int) -> None:
    """Raise ``BadPolicyOutput`` unless there are so many actions.

    Args:
        what: where they come from.
    """
    try:
        found = len(actions)
    except TypeError:
        raise BadPolicyOutput(
            f"{policy} {what} {type(actions).__name__} without rows for {number} environments:"
            " return an array with one action for each row of batch.obs"
        ) from None
    if found != number:
        raise BadPolicyOutput(
            f"{policy} {what} {found} actions for {number} environments: return one for each row of"
            " batch.obs"
        )


def check_state(policy: str, state: Any, number: int) -> None:
    """Raise ``BadPolicyOutput`` unless each array of a policy's state has so many rows."""
    if has_rows(state, number):
        return
    for name, leaf in _leaves(state, "state"):
        if not has_rows(leaf, number):
            raise _bad_rows(policy, name, leaf, number)


def check_entry(policy: str, entry: Any, number: int) -> bool:
    """Return whether each array of a policy's entry has so many rows.

    If it has one row, Tianshou's buffers store this row for all environments; so they do with a
    distribution. Raises ``BadPolicyOutput`` for anything else.
    """
    if has_rows(entry, number):
        return True
    for name, leaf in _leaves(entry, "policy"):
        for_all = isinstance(leaf, Distribution) or has_rows(leaf, 1)
        if not for_all and not has_rows(leaf, number):
            raise _bad_rows(policy, name, leaf, number)
    return False


def has_rows(tree: Any, number: int) -> bool:
    """Whether each array and tensor of a tree has so many rows; there may be None instead of one."""
    if type(tree) is Batch:
        for value in tree.__dict__.values():  # noqa: SIM110 (half the time, in every row)
            if not has_rows(value, number):
                return False
        return True
    if tree is None:
        return True
    shape: tuple[int, ...] = getattr(tree, "shape", ())
    return len(shape) > 0 and shape[0] == number


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves with their names."""
    if type(tree) is not Batch:
        yield name, tree
        return
    for key, value in tree.__dict__.items():
        yield from _leaves(value, f"{name}.{key}")


def _bad_rows(policy: str, name: str, leaf: Any, number: int) -> BadPolicyOutput:
    shape = getattr(leaf, "shape", None)
    found = type(leaf).__name__
    if shape is not None:
        found = f"{found} of shape {tuple(shape)}"
    return BadPolicyOutput(
        f"{policy} returned {name}={found} for {number} environments: return an array or a tensor with"
        f" {number} rows, one for each row of batch.obs"
    )
