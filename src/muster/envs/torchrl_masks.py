"""Whether a TorchRL environment can be reset by mask at every step, without waiting for its device.

TorchRL resets only after it has looked whether an episode has ended, which waits for the device. An
environment need not be looked at if ``_reset`` with a mask waits for nothing, and changes nothing
where the mask is False. No attribute says this, so it is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.envs import EnvBase

from muster.utils.private_names import tensordict_maker

RESET = "_reset"  # TorchRL's key of a mask
STEPS = 3
# operations whose result the host must see
WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
}
BY_INDEX = {"index", "index_put", "index_put_"}
FLAGS = (torch.bool, torch.uint8)


def resets_by_mask(env: EnvBase, device: torch.device, seed: int) -> bool:
    """Try out ``env`` from ``seed`` on; it must be seeded and reset afterwards.

    First a reset of one environment, which ends where something waits. Then three steps with random
    actions, which must give the same with resets of no environment between them.
    """
    if list(env.reset_keys) != [RESET]:  # flags of agents decide
        return False
    nowhere = torch.zeros(env.batch_size, dtype=torch.bool, device=device)
    first = nowhere.clone()
    first.view(-1)[0] = True

    def reset(mask: torch.Tensor) -> None:
        with _NoWaits():  # type: ignore[no-untyped-call]
            masked_reset(env, mask)

    devices = [device] if device.type == "cuda" else []
    # an error of the environment itself is raised in the rollout, too
    with torch.random.fork_rng(devices=devices), suppress(Exception):
        env.set_seed(seed)
        env.reset()
        reset(first)
        actions = [env.full_action_spec.rand() for _ in range(STEPS)]
        alone = _last_of(env, seed, actions, lambda: None)
        between = _last_of(env, seed, actions, lambda: reset(nowhere))
        return _have_same_values(alone, between)
    return False


def masked_reset(env: EnvBase, mask: torch.Tensor, **options: Any) -> Any:
    """Reset where the mask is, ``[*batch_size]``, and return what ``env._reset`` does."""
    make = tensordict_maker()
    given = make(
        {RESET: mask.unsqueeze(-1)}, batch_size=env.batch_size, device=env.device
    )
    return env._reset(given, **options)


class _Waits(Exception):
    """An operation would make the host wait for a device."""


class _NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ``_Waits``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or (name in BY_INDEX and _has_unknown_size(args)):
            raise _Waits(name)
        result = func(*args, **(kwargs or {}))
        if _is_copy_to_host(args, result):
            raise _Waits(name)
        return result


def _has_unknown_size(args: Sequence[Any]) -> bool:
    """Whether an operation with indices has to know where a mask is; one that fills with a number
    need not.
    """
    masks = [index for index in args[1] if index is not None and index.dtype in FLAGS]
    fills = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    return bool(masks) and not (fills and len(masks) == 1)


def _is_copy_to_host(args: Sequence[Any], result: Any) -> bool:
    if not torch.is_tensor(result) or result.device.type != "cpu":
        return False
    return any(torch.is_tensor(each) and each.device.type != "cpu" for each in args)


def _last_of(
    env: EnvBase, seed: int, actions: Sequence[Any], between: Callable[[], None]
) -> Any:
    """Return what is known after some steps, from ``seed`` on."""
    env.set_seed(seed)
    td = env.reset()
    for action in actions:
        between()
        td = env.step_mdp(env.step(td.update(action)))
    return td


def _have_same_values(a: Any, b: Any) -> bool:
    for key in a.keys(True, True):
        x = a.get(key)
        y = b.get(key)
        if not ((x == y) | ((x != x) & (y != y))).all():
            return False
    return True
