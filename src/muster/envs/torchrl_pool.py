"""TorchRL's ``AsyncEnvPool``: what is not as in other batches of environments.

``is_closed`` is True while it runs. With shared memory (``exchange="shm"``) its slots have a fixed
set of keys, and no ``_reset``: environments to be reset are selected by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs import AsyncEnvPool, EnvBase, TransformedEnv

ENV_INDEX = (
    "env_index"  # where results of a pool have the numbers of their environments
)


def is_pool(env: EnvBase) -> bool:
    """Return whether an environment is a pool, below its transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return isinstance(env, AsyncEnvPool)


def shares_memory(env: EnvBase) -> bool:
    """Return whether an environment is such a pool, and whole environments of it can be reset."""
    shared: bool = getattr(env, "resolved_exchange", None) == "shm"
    return shared and all(isinstance(key, str) for key in env.done_keys)


def reset_ended(pool: Any, td: TensorDict) -> TensorDict:
    """Reset the environments that have ended, as ``EnvBase.maybe_reset`` does.

    Args:
        td: the input of the next step, with flags of the ends.

    Returns:
        the input of the next step, with the first observations of the new episodes.
    """
    flags = [td.get(key).reshape(len(td), -1).any(-1) for key in pool.done_keys]
    ended: list[int] = torch.stack(flags).any(0).nonzero().squeeze(-1).tolist()
    if not ended:
        return td
    pool.async_reset_send(TensorDict(batch_size=[len(ended)]), env_index=ended)
    results = pool.async_reset_recv(min_get=len(ended))
    begun = td.copy()
    for key, value in results.items(True, True):
        if key != ENV_INDEX:
            begun.set(key, _replaced(td.get(key), ended, value))
    return begun


def _replaced(
    old: torch.Tensor, rows: Sequence[int], new: torch.Tensor
) -> torch.Tensor:
    """Return a copy of ``old`` with other rows."""
    replaced = old.clone()
    replaced[list(rows)] = new
    return replaced
