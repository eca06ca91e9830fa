"""Resets by mask for Gymnasium's vectorized CartPole, which ``gymnasium.make_vec("CartPole-v1",
n)`` returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds
from gymnasium.vector import VectorEnv, VectorWrapper

# attributes that ``MaskedCartPole`` reads and writes
USED = ("state", "steps", "prev_done", "low", "high")


class MaskedCartPole(VectorWrapper[Any, Any, Any, Any, Any]):
    """``CartPoleVectorEnv`` whose ``reset`` respects ``options["reset_mask"]``.

    The environment itself ignores the mask: its step after the end of an episode is the reset. A
    reset by mask does what that step does, with the same generator, and no such step follows.
    """

    env: CartPoleVectorEnv

    def reset(
        self,
        *,
        seed: Any = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        base = self.env
        if isinstance(
            seed, (list, tuple, np.ndarray)
        ):  # one generator for all environments
            seeds = [int(each) for each in seed if each is not None]
            seed = seeds[0] if seeds else None
        if mask is None or base.state is None:
            return base.reset(seed=seed, options=given or None)
        if seed is not None:
            VectorEnv.reset(base, seed=seed)
        if given:
            base.low, base.high = maybe_parse_reset_bounds(given, -0.05, 0.05)
        shape = (len(base.state), int(np.sum(mask)))
        base.state[:, mask] = base.np_random.uniform(base.low, base.high, shape)
        base.steps[mask] = 0
        base.prev_done[mask] = False
        return base.state.T.astype(np.float32), {}


def with_masks(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Return ``env`` with ``MaskedCartPole`` inside of all its wrappers, if there is a
    ``CartPoleVectorEnv`` inside.
    """
    base = env.unwrapped
    if not isinstance(base, CartPoleVectorEnv):
        return env
    if not all(hasattr(base, name) for name in USED):
        return env
    cls = type(base)
    if (
        cls.reset is not CartPoleVectorEnv.reset
        or cls.step is not CartPoleVectorEnv.step
    ):
        return env
    if env is base:
        return MaskedCartPole(env)
    inner: Any = env
    while isinstance(inner.env, VectorWrapper):
        inner = inner.env
    if not isinstance(inner, MaskedCartPole):
        inner.env = MaskedCartPole(base)
    return env


def has_masks(env: Any) -> bool:
    """Return whether there is a ``MaskedCartPole`` inside of ``env``."""
    while isinstance(env, VectorWrapper):
        if isinstance(env, MaskedCartPole):
            return True
        env = env.env
    return False
