"""The layout of recurrent states: which dimension of each tensor counts environments.

The sizes tell if the first or the second dimension has as many entries as there are environments,
but not both. If both have, a copy of a module is called with one environment more, and the
dimension that grows is the one. A function is not called for that: a tensor with two dimensions
begins with environments, and for others ``recurrent`` has to say it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from muster.errors import BadOption, BadPolicyOutput
from muster.keys import STATE, Key, dotted
from muster.utils.integers import integer

P = TypeVar("P")
StateDims = dict[Key, int]
BATCH_DIM = "state_batch_dim"
INITIAL_STATE = "state_at_start"


def recurrent(policy: P, *, batch_dim: Any = None, initial_state: Any = None) -> P:
    """Say which dimension of a policy's recurrent state counts environments, or with which state
    episodes begin.

    The dimension is only necessary where the sizes do not tell: if a policy is a function (or a module that
    cannot be copied), and the first two of at least three dimensions have as many entries as there
    are environments; or if it is a later one.

    ::

        Collector(env, policies.recurrent(act, batch_dim=1), num_envs=2, ...)  # state of nn.GRU: [layers, B, hidden]
        Collector(env, policies.recurrent(module, initial_state="h0"), num_envs=2, ...)  # module.h0: a parameter

    Args:
        policy: a module, or a function ``f(obs, state)``.
        batch_dim: the dimension, from 0; of all tensors of the state, or a tuple, list or dict of
            dimensions like the state. Without ``num_envs`` there is no such dimension, and it is
            not used. None: the sizes tell it; with ``initial_state`` it is the first one.
        initial_state: the state with which an environment starts an episode, in place of zeros: the
            name of a module's attribute (a parameter, or a method without arguments), or, for a
            function, a function without arguments. It is a state as the policy returns it, without
            the dimension of environments. It is read whenever an episode starts, so a parameter
            can be learned. Batches then have ``is_init``, which is True at the first step of an
            episode. If the episode began with random frames, the policy's first step in it starts
            from this state, too, and ``is_init`` is False there.

    Returns:
        ``policy``, which gets attributes that say so.

    Raises:
        BadOption: a dimension is no integer of at least 0, there is no such attribute, or the
            policy takes no attributes.
    """
    if batch_dim is None and initial_state is None:
        raise BadOption(
            "policies.recurrent(batch_dim=None): expected an integer of at least 0, or initial_state"
        )
    if initial_state is not None:
        _check_initial(policy, initial_state)
        batch_dim = 0 if batch_dim is None else batch_dim
    _check(batch_dim)
    try:
        setattr(policy, BATCH_DIM, batch_dim)
        setattr(policy, INITIAL_STATE, initial_state)
    except AttributeError:
        raise BadOption(
            f"policies.recurrent: {type(policy).__name__} takes no attributes. Give the module"
            " itself, or a function that calls it"
        ) from None
    return policy


def initial_of(policy: Any) -> Callable[[], Any] | None:
    """Return the function that returns the state with which an episode starts; None: zeros."""
    given = getattr(policy, INITIAL_STATE, None)
    if given is None or callable(given):
        return given

    def read() -> Any:
        found = getattr(policy, given)
        return found() if callable(found) else found

    return read


def said_dim(policy: Any, key: Key, name: str) -> int:
    """Return the dimension of environments that ``recurrent`` has said for a part of the state."""
    return _entry_of(getattr(policy, BATCH_DIM), key, name)


def state_dims(
    policy: Any,
    state: Mapping[Key, torch.Tensor],
    lead: tuple[int, ...],
    name: str,
    call: Callable[[Any], Mapping[Key, Any]],
) -> StateDims:
    """Return the dimensions of environments that are not the first one, by key.

    Args:
        policy: the module or function.
        state: the state after its first call.
        lead: batch dimensions of the policy.
        name: name of the policy in messages.
        call: calls a copy of the policy for one environment more, and returns its state.

    Raises:
        BadPolicyOutput: no dimension fits, or the sizes do not tell.
    """
    if len(lead) != 1 or not state:
        return {}  # ``column_of`` checks that it begins with ``lead``
    (B,) = lead
    said = getattr(policy, BATCH_DIM, None)
    dims: StateDims = {}
    unclear: list[Key] = []
    for key, value in state.items():
        if said is not None:
            dims[key] = _said_dim(said, key, value, B, name)
            continue
        fits = [dim for dim in (0, 1) if value.shape[dim : dim + 1] == (B,)]
        if not fits:
            raise BadPolicyOutput(
                f"policy {name} returned {dotted(key)} with shape {tuple(value.shape)}, expected"
                f" {B} entries, one per environment, in its first or second dimension. Return the"
                " states of all environments, or say which dimension counts them:"
                " policies.recurrent(policy, batch_dim=...)"
            )
        dims[key] = fits[0]
        if (
            len(fits) > 1 and B > 1
        ):  # a single environment's states are the same memory either way
            unclear.append(key)
    if unclear:
        grown = _with_one_more(policy, call)
        for key in unclear:
            found = None if grown is None else _grown_dim(state[key], grown.get(key), B)
            if found is None and state[key].ndim == 2:
                found = 0  # [B, hidden], as of nn.GRUCell
            if found is None:
                raise BadPolicyOutput(_unclear(name, key, state[key], B))
            dims[key] = found
    return {key: dim for key, dim in dims.items() if dim}


def begins_with_environments(
    policy: Any,
    key: Key,
    value: torch.Tensor,
    lead: tuple[int, ...],
    call: Callable[[Any], Any],
) -> bool:
    """Return whether the first dimension of a state in a TensorDict counts environments, as its
    batch size says.

    It may not where the second dimension has the same size; then ``call``, as in ``state_dims``,
    shows it.
    """
    if not isinstance(policy, torch.nn.Module):
        return True
    if len(lead) != 1 or lead[0] == 1 or tuple(value.shape[1:2]) != lead:
        return True
    said = getattr(policy, BATCH_DIM, None)
    if said is not None:
        return bool(said == 0)
    copied = _copied(policy)
    if copied is None:
        return True
    with _streams_restored(copied):
        try:
            grown = call(copied).get(key)
        except Exception:  # noqa: BLE001 (the same call with one environment less did not raise)
            return False
    return grown is not None and grown.shape[0] == lead[0] + 1


def _check_initial(policy: Any, given: Any) -> None:
    is_module = isinstance(policy, torch.nn.Module)
    kind = type(policy).__name__
    if is_module and not isinstance(given, str):
        raise BadOption(
            f"policies.recurrent: initial_state of the module {kind} is the name of its attribute,"
            f" which copies of it have, too; got {given!r}"
        )
    if is_module and not hasattr(policy, given):
        raise BadOption(
            f"policies.recurrent: initial_state={given!r}, and {kind} has none"
        )
    if not is_module and not callable(given):
        raise BadOption(
            f"policies.recurrent: initial_state={given!r}: expected a function without arguments"
        )


def _said_dim(
    said: Any,
    key: Key,
    value: torch.Tensor,
    B: int,
    name: str,
) -> int:
    dim = _entry_of(said, key, name)
    if tuple(value.shape[dim : dim + 1]) != (B,):
        raise BadPolicyOutput(
            f"policy {name} returned {dotted(key)} with shape {tuple(value.shape)}, expected {B}"
            f" entries, one per environment, in dimension {dim}: that is its batch_dim"
        )
    return dim


def _entry_of(said: Any, key: Key, name: str) -> int:
    dim = said
    for part in key[len(STATE) :]:
        try:
            if isinstance(dim, (tuple, list)):
                dim = dim[int(part)]
            elif not isinstance(dim, int):
                dim = dim[part]
        except (KeyError, IndexError, ValueError):
            raise BadOption(
                f"policies.recurrent: batch_dim={said!r} has no entry for {dotted(key)}"
            ) from None
    if not isinstance(dim, int):
        raise BadOption(
            f"policies.recurrent: batch_dim={said!r} has {dim!r} for {dotted(key)}, expected an"
            " integer"
        )
    return dim


def _unclear(
    name: str,
    key: Key,
    value: torch.Tensor,
    B: int,
) -> str:
    return (
        f"policy {name} returned {dotted(key)} with shape {tuple(value.shape)} for {B}"
        " environments: the sizes do not tell whether its first or its second dimension (as in"
        " nn.GRU) counts environments. Say it with policies.recurrent(policy, batch_dim=0), or"
        " batch_dim=1"
    )


def _with_one_more(
    policy: Any,
    call: Callable[[Any], Mapping[Key, Any]],
) -> Mapping[Key, Any] | None:
    """Return the state for one environment more; None if the policy cannot be copied, or does not
    take that many.
    """
    copied = _copied(policy)
    if copied is None:
        return None
    with _streams_restored(copied):
        try:
            return call(copied)
        except Exception:  # noqa: BLE001 (the code is the user's)
            return None


def _grown_dim(value: torch.Tensor, grown: Any, B: int) -> int | None:
    """Return the one dimension that has an entry more."""
    if not torch.is_tensor(grown) or grown.ndim != value.ndim:
        return None
    differ = [dim for dim in range(value.ndim) if grown.shape[dim] != value.shape[dim]]
    if len(differ) != 1 or grown.shape[differ[0]] != B + 1:
        return None
    return differ[0]


def _copied(policy: Any) -> Any:
    """Return a copy of a module, whose calls change nothing outside; None if it is none, or cannot
    be copied.
    """
    if not isinstance(policy, torch.nn.Module):
        return None
    try:
        return copy.deepcopy(policy)
    except Exception:  # noqa: BLE001 (the code is the user's)
        return None


@contextmanager
def _streams_restored(policy: torch.nn.Module) -> Iterator[None]:
    """Restore the process's random generators, those of the policy's devices too, when the context
    exits.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    devices = {
        tensor.device for tensor in policy.parameters() if tensor.device.type == "cuda"
    }
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _check(batch_dim: Any) -> None:
    if isinstance(batch_dim, (tuple, list)):
        for part in batch_dim:
            _check(part)
    elif isinstance(batch_dim, Mapping):
        _check(list(batch_dim.values()))
    else:
        integer("batch_dim", batch_dim, 0, of="policies.recurrent")
