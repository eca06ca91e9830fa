"""Stable-Baselines3's ``VecEnv`` as a ``gymnasium.vector.VectorEnv``.

This module does not import ``stable_baselines3``: it recognizes classes by their names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from muster.envs.checks import the_only
from muster.envs.own_memory import with_own_memory
from muster.envs.spaces import observation_codec
from muster.envs.vector import VectorEnvBatch
from muster.errors import BadOption, UnsupportedEnv
from muster.memory.specs import Array
from muster.protocols import EnvBatch

PACKAGE = "stable_baselines3.common.vec_env."


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a ``VecEnv`` of ``stable_baselines3``, wrapped or not."""
    return _derives(obj, "base_vec_env.VecEnv")


def adapt(envs: list[Any], device: Any) -> EnvBatch:
    """Return the env batch of one ``VecEnv``; ``device`` has no effect."""
    return VectorEnvBatch(Sb3VectorEnv(the_only(envs)))


class Sb3VectorEnv(VectorEnv[Any, Any, Any]):
    """A ``VecEnv`` behind Gymnasium's interface, in SAME_STEP mode::

        env = Sb3VectorEnv(VecNormalize(DummyVecEnv([make] * 8)))
        obs, reward, terminated, truncated, info = env.step(actions)  # info["final_obs"][i] if i is done

    SB3 has one flag: ``done`` is ``truncated`` if ``TimeLimit.truncated`` is set in the info, else
    ``terminated``. SB3 does not set it if an episode also terminated. Last observations are SB3's
    ``terminal_observation``, normalized and stacked by its wrappers. Returned arrays are those of
    SB3, not copies.

    Args:
        env: environments, owned (and closed) by this object.

    Attributes:
        muster_exact: all classes are SB3's own, whose last observations are reliable.
    """

    muster_infos = itemgetter(
        "infos"
    )  # from the info of ``reset`` and ``step``: a list of dicts

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs = env.num_envs
        # classes that do not call the constructor of their base have none
        metadata = getattr(env, "metadata", None) or {}
        self.metadata = {**metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = _observation_space(env)
        self.single_action_space = env.action_space
        self.observation_space = batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        unknown = [
            layer for layer in _layers(env) if _name(type(layer)) not in RESET_ROWS
        ]
        self._strange = unknown[0] if unknown else None
        self.muster_exact = self._strange is None
        base = _layers(env)[-1]
        if _name(type(base)) == "dummy_vec_env.DummyVecEnv":
            with_own_memory(base)

    def reset(
        self,
        *,
        seed: Any = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: an int s seeds environment i with ``s + i``; a list has one seed per environment
                (None: the environment is not reseeded).
            options: ``reset_mask``, ``[B]`` bool: environments to reset; only their rows of the
                returned observations are valid. Other options are passed to the environments.

        Raises:
            UnsupportedEnv: ``reset_mask`` or a list of seeds is given, and one of the classes is
                not SB3's own.
        """
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if mask is None and not isinstance(seed, (list, tuple, np.ndarray)):
            if seed is not None:
                self.env.seed(int(seed))
            if given:
                self.env.set_options(given)
            return self.env.reset(), {"infos": self._reset_infos()}
        if np.ndim(seed) != 0:
            seeds = list(seed)
        elif seed is None:
            seeds = [None] * self.num_envs
        else:
            seeds = [seed + i for i in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise BadOption(
                f"reset() got {len(seeds)} seeds for {self.num_envs} environments; give one for"
                " each"
            )
        chosen = np.ones(self.num_envs, bool) if mask is None else mask
        extra = {"options": given} if given else {}
        return self._reset_rows(np.flatnonzero(chosen), seeds, extra)

    def step(
        self,
        actions: Any,
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        if isinstance(self.single_action_space, (spaces.Dict, spaces.Tuple)):
            actions = list(iterate(self.action_space, actions))
        obs, reward, done, infos = self.env.step(actions)
        done = np.asarray(done, bool)
        limited = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        cut = done & limited
        if not done.any():
            return obs, reward, done, cut, {"infos": infos}
        final = np.empty(self.num_envs, object)
        for i in np.flatnonzero(done):
            final[i] = infos[i].get("terminal_observation")
        told = list(infos)
        for number, first in enumerate(self._reset_infos()):
            if done[number]:
                told[number] = first
        ends = {
            "final_obs": final,
            "_final_obs": done,
            "final_info": infos,
            "infos": told,
        }
        return obs, reward, done & ~cut, cut, ends

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _reset_infos(self) -> list[dict[str, Any]]:
        """Return the infos of the last reset of each environment, which SB3 keeps."""
        base = _layers(self.env)[-1]
        return list(getattr(base, "reset_infos", [{}] * self.num_envs))

    def _reset_rows(
        self,
        rows: Array,
        seeds: list[Any],
        extra: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments ``rows``, one by one, and their state in each wrapper; SB3 has no
        method for this.
        """
        if self._strange is not None:
            raise UnsupportedEnv(
                f"{type(self.env).__name__}: environments {rows.tolist()} are to be reset alone"
                " (max_frames_per_traj, reset(index)), but a VecEnv resets all at once, and Muster"
                f" does not know what {type(self._strange).__name__} keeps between steps. Let the"
                " environments end their episodes themselves (gymnasium.wrappers.TimeLimit), or"
                " wrap the single environments instead of the VecEnv."
            )
        *wrappers, base = _layers(self.env)
        first = []
        told: list[Any] = [None] * self.num_envs
        for i in rows.tolist():
            returned = base.env_method(
                "reset",
                indices=[i],
                seed=seeds[i],
                **extra,
            )
            ((obs, info),) = returned
            first.append(obs)
            told[i] = info
        codec = observation_codec(base.observation_space)
        leaves_of = [codec.flatten(obs) for obs in first]
        columns = zip(*leaves_of, strict=True)
        obs = codec.build([np.stack(column) for column in columns])
        for wrapper in reversed(wrappers):
            reset_rows = RESET_ROWS[_name(type(wrapper))]
            obs = reset_rows(wrapper, obs, rows)
        codec = observation_codec(self.single_observation_space)
        leaves = []
        for leaf in codec.flatten(obs):
            shape = (self.num_envs, *leaf.shape[1:])
            whole = np.zeros(shape, leaf.dtype)
            whole[rows] = leaf
            leaves.append(whole)
        return codec.build(leaves), {"infos": told}


def _name(cls: type) -> str:
    """Return ``module.Class`` for a class of SB3's package; empty for other classes."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not name.startswith(PACKAGE):
        return ""
    return name[len(PACKAGE) :]


def _derives(obj: Any, name: str) -> bool:
    return any(_name(cls) == name for cls in type(obj).__mro__)


def _layers(env: Any) -> list[Any]:
    if _derives(env, "base_vec_env.VecEnvWrapper"):
        return [env, *_layers(env.venv)]
    return [env]


def _observation_space(env: Any) -> Any:
    """Return the space of the observations; ``VecNormalize`` declares the dtype and bounds of its
    inputs instead.
    """
    for layer in _layers(env):
        if _name(type(layer)) == "vec_normalize.VecNormalize" and layer.norm_obs:
            space = layer.observation_space
            clip = float(layer.clip_obs)
            if not isinstance(space, spaces.Dict):
                return spaces.Box(-clip, clip, space.shape, np.float32)
            parts = dict(space.spaces)
            for key in layer.norm_obs_keys:
                parts[key] = spaces.Box(-clip, clip, space[key].shape, np.float32)
            return spaces.Dict(parts)
        reset_rows = RESET_ROWS.get(_name(type(layer)))
        if reset_rows not in (_keep, _recount):
            break
    return env.observation_space


# Process the first observations ``obs`` (leaves [len(rows), *shape]) of environments ``rows`` as
# the wrapper does.


def _keep(wrapper: Any, obs: Any, rows: Array) -> Any:
    return obs


def _recount(wrapper: Any, obs: Any, rows: Array) -> Any:
    wrapper.episode_returns[rows] = 0
    wrapper.episode_lengths[rows] = 0
    return obs


def _normalize(wrapper: Any, obs: Any, rows: Array) -> Any:
    wrapper.returns[rows] = 0
    # first observations update the statistics, as in its own reset
    if wrapper.training and wrapper.norm_obs:
        if isinstance(wrapper.obs_rms, dict):
            for key, statistics in wrapper.obs_rms.items():
                statistics.update(obs[key])
        else:
            wrapper.obs_rms.update(obs)
    return wrapper.normalize_obs(obs)


def _stack(wrapper: Any, obs: Any, rows: Array) -> Any:
    return _restack(wrapper.stacked_obs, obs, rows)


def _restack(stack: Any, obs: Any, rows: Array) -> Any:
    if isinstance(obs, dict):
        stacks = stack.sub_stacked_observations
        return {key: _restack(stacks[key], part, rows) for key, part in obs.items()}
    some = copy.copy(stack)
    some.stacked_obs = stack.stacked_obs[rows]
    first = some.reset(obs)
    stack.stacked_obs = stack.stacked_obs.copy()  # the caller has the old array
    stack.stacked_obs[rows] = first
    return first


def _transpose(wrapper: Any, obs: Any, rows: Array) -> Any:
    return wrapper.transpose_observations(obs)


def _extract(wrapper: Any, obs: Any, rows: Array) -> Any:
    return obs[wrapper.key]


RESET_ROWS: dict[str, Callable[[Any, Any, Array], Any]] = {
    "dummy_vec_env.DummyVecEnv": _keep,
    "subproc_vec_env.SubprocVecEnv": _keep,
    "vec_check_nan.VecCheckNan": _keep,
    "vec_video_recorder.VecVideoRecorder": _keep,
    "vec_monitor.VecMonitor": _recount,
    "vec_normalize.VecNormalize": _normalize,
    "vec_frame_stack.VecFrameStack": _stack,
    "vec_transpose.VecTransposeImage": _transpose,
    "vec_extract_dict_obs.VecExtractDictObs": _extract,
}
