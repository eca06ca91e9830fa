"""Whether a TorchRL environment can be reset by mask at every step, without waiting for its device.

TorchRL resets only after it has looked whether an episode has ended, which waits for the device. An
environment need not be looked at if ``_reset`` with a mask waits for nothing, and changes nothing
where the mask is False. No attribute says this, so it is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchrl.envs import EnvBase

from muster.envs.masks import like
from muster.utils.private_names import tensordict_maker

RESET = "_reset"  # TorchRL's key of a mask
STEPS = 3
# functions whose result the host must see
WAITING = {
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "allclose",
    "argwhere",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "tolist",
    "unique",
    "unique_consecutive",
}
FLAGS = (torch.bool, torch.uint8)


def resets_by_mask(env: EnvBase, device: torch.device, seed: int) -> bool:
    """Try out ``env`` from ``seed`` on; it must be seeded and reset afterwards.

    First a reset of one environment, which ends where something waits. Then three steps with random
    actions, which must give the same with resets of no environment between them.
    """
    if not has_one_mask(env):  # flags of agents decide
        return False
    nowhere = torch.zeros(env.batch_size, dtype=torch.bool, device=device)
    first = nowhere.clone()
    first.view(-1)[0] = True

    def reset(mask: torch.Tensor) -> None:
        with _NoWaits():
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
    if has_one_mask(env):
        given = tensordict_maker()(
            {RESET: mask.unsqueeze(-1)}, batch_size=env.batch_size, device=env.device
        )
    else:
        given = env.full_done_spec.zero()
        set_flags(given, env.done_keys, mask)
        env.any_done(given)  # writes masks for all agents
        given = given.select(*env.reset_keys, strict=False)
    return env._reset(given, **options)


def has_one_mask(env: EnvBase) -> bool:
    """Return whether an environment is reset by one mask; else its agents have masks of their own."""
    return list(env.reset_keys) == [RESET]


def set_flags(td: Any, keys: Iterable[Any], mask: torch.Tensor) -> None:
    """Set all flags where the mask is."""
    for key in keys:
        flag = td.get(key)
        td.set(key, flag | like(mask, flag))


class _Waits(Exception):
    """A function would make the host wait for a device."""


class _NoWaits(TorchFunctionMode):
    """Raises ``_Waits``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in WAITING or _looks_at_mask(name, args):
            raise _Waits(name)
        result = func(*args, **(kwargs or {}))
        if _is_copy_to_host(args, result):
            raise _Waits(name)
        return result


def _looks_at_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether the host has to know where a mask is; to fill with a number, it need not."""
    if name == "where":
        return len(args) == 1
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    masks = [part for part in parts if torch.is_tensor(part) and part.dtype in FLAGS]
    fills = name == "__setitem__" and not torch.is_tensor(args[2])
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
