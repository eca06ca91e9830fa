"""Batches of JAX environments: compiled as one function, on JAX's device, with rows passed by
DLPack.

::

    env = muster.envs.jax.JaxEnvs(gymnax_or_brax_env, num_envs=1024)
    with Collector(env, policy, frames_per_batch=65_536) as collector: ...

``Collector(lambda: gymnax_or_brax_env, num_envs=1024, ...)`` does the same. Muster treats a
``JaxEnvs`` as a batch of environments on tensors; see ``muster.envs.torch_batch``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch.utils.dlpack import from_dlpack

from muster.envs.checks import the_only
from muster.envs.torch_batch import TorchEnvs
from muster.errors import UnsupportedEnv, UnsupportedSpace
from muster.protocols import EnvBatch

Reset = Callable[[Any], tuple[Any, Any]]  # key -> obs, state
# key, state, action -> obs, state, reward, terminated, truncated
Advance = Callable[[Any, Any, Any], tuple[Any, ...]]
Info = dict[str, Any]
NO_LIMIT = 2**31 - 1


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a ``JaxEnvs``, or an environment with the API of gymnax, brax or
    Playground.
    """
    if isinstance(obj, JaxEnvs):
        return True
    return _is_gymnax(obj) or _is_brax(obj)


def adapt(envs: list[Any], device: torch.device | None) -> EnvBatch:
    """Return the env batch of a ``JaxEnvs``, or of ``len(envs)`` copies of the first environment
    (all are alike).
    """
    first = envs[0]
    if not isinstance(first, JaxEnvs):
        copies = JaxEnvs(first, len(envs))
        return TorchEnvs(copies, device, single=True)
    return TorchEnvs(the_only(envs), device)


class JaxEnvs:
    """B copies of a JAX environment that step together, on tensors; finished ones are reset in the
    same step.

    Environment i has a key of its own, so its episodes do not depend on B. gymnax: uses
    ``step_env`` and ``reset_env``; an episode that ends only because of
    ``params.max_steps_in_episode`` is truncated. brax and Playground: ``info["truncation"]`` marks
    truncated episodes. The environment must not reset itself.

    Args:
        env: the environment, not vectorised.
        num_envs: B.
        params: parameters of a gymnax environment; None: its ``default_params``.
        device: a ``jax.Device``; None: JAX's default.

    Attributes:
        state: states of the environments, with B as the first dimension.

    Raises:
        UnsupportedEnv: the environment has neither API, or resets itself.
        UnsupportedSpace: actions are neither Discrete nor Box, or observations are not arrays.
    """

    muster_exact = True  # masks are respected, and every last observation is returned

    def __init__(
        self,
        env: Any,
        num_envs: int,
        params: Any = None,
        device: Any = None,
    ) -> None:
        self.num_envs = num_envs
        self.spec = SimpleNamespace(id=type(env).__name__)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        if _is_gymnax(env):
            one_reset, one_step, self.single_action_space = _gymnax(env, params)
        elif _is_brax(env):
            one_reset, one_step, self.single_action_space = _brax(env)
        else:
            raise UnsupportedEnv(
                f"{type(env).__name__} is no JAX environment as Muster knows them: expected"
                " gymnax's reset_env, step_env, default_params and action_space, or brax's reset,"
                " step, observation_size and action_size"
            )
        if device is None:
            device = jax.devices()[0]
        self._home = device
        if device.platform == "cpu":
            self.device = torch.device("cpu")
        else:
            number = device.local_hardware_id or 0
            self.device = torch.device("cuda", number)
        with jax.default_device(device):
            key = jax.random.PRNGKey(0)
            obs, state = jax.eval_shape(one_reset, key)
        kept = getattr(state, "info", ())
        if any(str(key).endswith(RESETTING) for key in kept):
            raise UnsupportedEnv(
                f"{self.spec.id} resets itself, which hides the last observations: pass it without"
                " AutoResetWrapper (brax.envs.create(..., auto_reset=False))"
            )
        self.single_observation_space = _space_of(obs)
        begin, begin_some, advance = _compiled(one_reset, one_step)
        self._begin = begin
        self._begin_some = begin_some
        self._advance = advance
        self._keys: Any = None
        self._obs: Any = None
        self.state: Any = None

    def _set(self, now: tuple[Any, Any, Any]) -> None:
        """Set observations, states and keys."""
        obs, state, keys = now
        self._obs = obs
        self.state = state
        self._keys = keys

    def reset(
        self,
        *,
        seed: Any = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        """Start new episodes.

        Args:
            seed: an int s gives environment i the key of ``s + i``; a list has a seed for each.
                None: keep the keys.
            options: ``reset_mask`` (bool ``[B]``): environments to reset; default all.
        """
        mask = None
        if options is not None:
            mask = options.get("reset_mask")
        with jax.default_device(self._home):
            if seed is not None or self._keys is None:
                self._keys = self._keys_from(seed)
            if mask is None or self.state is None:
                now = self._begin(self._keys)
            else:
                before = (self._obs, self.state, self._keys)
                now = self._begin_some(before, _to_jax(mask))
            self._set(now)
        return _to_torch(self._obs), {}

    def step(
        self,
        action: Any,
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Info]:
        """Step all environments; ``info["final_obs"]`` has the observations before resets."""
        with jax.default_device(self._home):
            chosen = _to_jax(action)
            now, last = self._advance(self.state, self._keys, chosen)
            self._obs, self.state, self._keys = now
        final, reward, terminated, truncated = map(_to_torch, last)
        info = {"final_obs": final}
        obs = _to_torch(self._obs)
        return obs, reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return copies of all arrays as NumPy arrays, for exact resume."""
        now = (self._obs, self.state, self._keys)
        copies = [np.array(leaf) for leaf in jax.tree.leaves(now)]
        return {"leaves": copies}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``get_state``."""
        self._set((None, None, None))
        if not state["leaves"]:
            return
        leaves = [jax.device_put(leaf, self._home) for leaf in state["leaves"]]
        keys = jax.ShapeDtypeStruct((self.num_envs, 2), jnp.uint32)
        shapes = jax.eval_shape(self._begin, keys)
        structure = jax.tree.structure(shapes)
        self._set(jax.tree.unflatten(structure, leaves))

    def close(self) -> None:
        """Nothing to do."""

    def _keys_from(self, seed: Any) -> Any:
        if seed is None:
            (word,) = np.random.SeedSequence().generate_state(1)
            seed = int(word)
        if isinstance(seed, int):
            seeds = np.arange(seed, seed + self.num_envs)
        else:
            seeds = np.asarray(seed)
        words = jnp.asarray(seeds % 2**32, jnp.uint32)
        return jax.vmap(jax.random.PRNGKey)(words)


def _compiled(reset: Reset, step: Advance) -> tuple[Any, Any, Any]:
    """Compile ``begin(keys)``, ``begin_some(now, mask)`` and ``advance(state, keys, action)`` for
    all environments.
    """

    def begin(key: Any) -> Any:
        key, for_reset = jax.random.split(key)
        obs, state = reset(for_reset)
        return obs, state, key

    def begin_some(now: Any, where: Any) -> Any:
        _, _, keys = now
        return _select(where, begin(keys), now)

    def advance(state: Any, key: Any, action: Any) -> Any:
        key, for_step, for_reset = jax.random.split(key, 3)
        results = step(for_step, state, action)
        obs, state, reward, terminated, truncated = results
        first_obs, first_state = reset(for_reset)
        fresh = (first_obs, first_state, key)
        stepped = (obs, state, key)
        done = terminated | truncated
        now = _select(done, fresh, stepped)
        reward = jnp.asarray(reward, jnp.float32)
        return now, (obs, reward, terminated, truncated)

    return (
        jax.jit(jax.vmap(begin)),
        jax.jit(jax.vmap(begin_some)),
        jax.jit(jax.vmap(advance)),
    )


def _select(where: Any, new: Any, old: Any) -> Any:
    """Select ``new`` or ``old``, in the dtypes of ``old``; a reset may return others (Python
    numbers, for instance).
    """

    def chosen(a: Any, b: Any) -> Any:
        dtype = jnp.asarray(b).dtype
        return jnp.where(where, a, b).astype(dtype)

    return jax.tree.map(chosen, new, old)


# --- the two APIs ---------------------------------------------------------------------------------

RESETTING = ("first_obs", "first_pipeline_state", "first_data", "first_state")


def _has(obj: Any, *names: str) -> bool:
    if isinstance(obj, type):
        return False
    return all(hasattr(obj, name) for name in names)


def _is_gymnax(obj: Any) -> bool:
    return _has(obj, "step_env", "reset_env", "default_params", "action_space")


def _is_brax(obj: Any) -> bool:
    return _has(obj, "reset", "step", "observation_size", "action_size")


def _gymnax(env: Any, params: Any) -> tuple[Reset, Advance, spaces.Space[Any]]:
    if params is None:
        params = env.default_params
    new = hasattr(env, "is_truncated")  # gymnax 1.0: done no longer includes the limit
    has_limit = hasattr(params, "max_steps_in_episode")
    limited = has_limit and hasattr(env, "is_terminal")
    unlimited = params
    if limited:
        unlimited = dataclasses.replace(
            params,
            max_steps_in_episode=NO_LIMIT,
        )

    def reset(key: Any) -> tuple[Any, Any]:
        obs, state = env.reset_env(key, params)
        return obs, state

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        results = env.step_env(key, state, action, params)
        obs, state, reward, done, _ = results
        done = jnp.asarray(done, bool)
        if new:
            flag = env.is_truncated(state, params)
            truncated = jnp.asarray(flag, bool)
            return obs, state, reward, done, truncated
        by_itself: Any = True
        if limited:
            flag = env.is_terminal(state, unlimited)
            by_itself = jnp.asarray(flag, bool)
        truncated = done & jnp.logical_not(by_itself)
        return obs, state, reward, done & by_itself, truncated

    space = env.action_space(params)
    return reset, step, _action_space(space)


def _brax(env: Any) -> tuple[Reset, Advance, spaces.Space[Any]]:
    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        state = env.step(state, action)
        done = jnp.asarray(state.done, bool)
        flag = state.info.get("truncation", False)
        truncated = done & jnp.asarray(flag, bool)
        terminated = done & ~truncated
        return state.obs, state, state.reward, terminated, truncated

    size = int(env.action_size)
    space = spaces.Box(-1.0, 1.0, (size,))
    return reset, step, space


def _action_space(space: Any) -> spaces.Space[Any]:
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    has_bounds = hasattr(space, "low") and hasattr(space, "high")
    if not has_bounds:
        raise UnsupportedSpace(f"{space} is neither Discrete nor Box")
    low = np.asarray(space.low, np.float32)
    high = np.asarray(space.high, np.float32)
    return spaces.Box(
        np.broadcast_to(low, space.shape),
        np.broadcast_to(high, space.shape),
    )


def _space_of(obs: Any) -> spaces.Space[Any]:
    """Return the widest space for these shapes and dtypes: observations leave the bounds of
    gymnax's own spaces.
    """
    if isinstance(obs, Mapping):
        parts = {}
        for key, part in obs.items():
            parts[str(key)] = _space_of(part)
        return spaces.Dict(parts)
    dtype = getattr(obs, "dtype", None)
    if dtype is None or np.dtype(dtype).kind not in "biuf":
        raise UnsupportedSpace(
            f"observations are {type(obs).__name__} {dtype or ''}, expected arrays or dicts of them"
        )
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, obs.shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, obs.shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, obs.shape, dtype.type)


# --- tensors --------------------------------------------------------------------------------------


def _to_torch(tree: Any) -> Any:
    """Return tensors over JAX's memory; do not write to them."""
    if isinstance(tree, Mapping):
        tensors = {}
        for key, part in tree.items():
            tensors[key] = _to_torch(part)
        return tensors
    return from_dlpack(tree)


def _to_jax(tensor: torch.Tensor) -> Any:
    """Return an array over the tensor's memory; int64 is copied to int32, JAX's default."""
    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32)
    return jnp.from_dlpack(tensor)
