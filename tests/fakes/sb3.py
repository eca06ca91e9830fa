"""A fake of ``stable_baselines3.common.vec_env``, as of version 2.9.2: what of it Muster sees, written anew.

``tests/unit/test_sb3.py`` runs on the fake always and on the real package where it is installed. Both were compared
there: four values from ``step``, resets inside it, ``terminal_observation`` and ``TimeLimit.truncated``, seeds that are
used by the next reset only, copies out of ``DummyVecEnv`` (and the stack itself out of ``VecFrameStack``), what
``env_method("reset")`` returns, and that ``VecNormalize`` returns float32 whatever its space says. Left out: rendering,
Dict observations in wrappers (but for ``VecExtractDictObs``), stacking along the first axis, subprocesses.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces

PACKAGE = "stable_baselines3.common.vec_env."


class VecEnv:
    __module__ = PACKAGE + "base_vec_env"

    def __init__(self, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.num_envs, self.observation_space, self.action_space = num_envs, observation_space, action_space
        self.metadata: dict[str, Any] = {"render_modes": []}
        self._seeds: list[int | None] = [None] * num_envs
        self._options: list[dict[str, Any]] = [{}] * num_envs
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def seed(self, seed: int) -> Any:
        self._seeds = [seed + i for i in range(self.num_envs)]
        return self._seeds

    def set_options(self, options: dict[str, Any]) -> None:
        self._options = deepcopy([options] * self.num_envs)

    def step(self, actions: Any) -> Any:
        self.step_async(actions)
        return self.step_wait()


class DummyVecEnv(VecEnv):
    __module__ = PACKAGE + "dummy_vec_env"

    def __init__(self, env_fns: Any) -> None:
        self.envs = [make() for make in env_fns]
        super().__init__(len(self.envs), self.envs[0].observation_space, self.envs[0].action_space)
        self.buf: list[Any] = [None] * self.num_envs

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        rewards, dones, infos = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool), []
        for i, env in enumerate(self.envs):
            obs, rewards[i], terminated, truncated, info = env.step(self.actions[i])
            dones[i] = terminated or truncated
            info["TimeLimit.truncated"] = truncated and not terminated
            if dones[i]:
                info["terminal_observation"] = obs
                obs, self.reset_infos[i] = env.reset()
            self.buf[i] = deepcopy(obs)
            infos.append(info)
        return self._observe(), rewards, dones, deepcopy(infos)

    def reset(self) -> Any:
        for i, env in enumerate(self.envs):
            options = {"options": self._options[i]} if self._options[i] else {}
            obs, self.reset_infos[i] = env.reset(seed=self._seeds[i], **options)
            self.buf[i] = deepcopy(obs)
        self._seeds, self._options = [None] * self.num_envs, [{}] * self.num_envs
        return self._observe()

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self.envs[i], name)(*args, **kwargs) for i in indices]

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _observe(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {k: np.array([obs[k] for obs in self.buf], part.dtype) for k, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(
                np.array(column, part.dtype)
                for column, part in zip(zip(*self.buf, strict=True), space.spaces, strict=True)
            )
        return np.array(self.buf, space.dtype)


class VecEnvWrapper(VecEnv):
    __module__ = PACKAGE + "base_vec_env"

    def __init__(self, venv: VecEnv, observation_space: Any = None) -> None:
        self.venv = venv
        super().__init__(venv.num_envs, observation_space or venv.observation_space, venv.action_space)

    def seed(self, seed: int) -> Any:
        return self.venv.seed(seed)

    def set_options(self, options: dict[str, Any]) -> None:
        self.venv.set_options(options)

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(actions)

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return self.venv.env_method(name, *args, indices=indices, **kwargs)

    def close(self) -> None:
        self.venv.close()


class VecMonitor(VecEnvWrapper):
    __module__ = PACKAGE + "vec_monitor"

    def reset(self) -> Any:
        self.episode_returns = np.zeros(self.num_envs, np.float32)
        self.episode_lengths = np.zeros(self.num_envs, np.int32)
        return self.venv.reset()

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        self.episode_returns += rewards
        self.episode_lengths += 1
        for i in np.flatnonzero(dones):
            infos[i]["episode"] = {"r": self.episode_returns[i], "l": self.episode_lengths[i]}
            self.episode_returns[i] = self.episode_lengths[i] = 0
        return obs, rewards, dones, infos


class VecExtractDictObs(VecEnvWrapper):
    __module__ = PACKAGE + "vec_extract_dict_obs"

    def __init__(self, venv: VecEnv, key: str) -> None:
        self.key = key
        super().__init__(venv, venv.observation_space.spaces[key])

    def reset(self) -> Any:
        return self.venv.reset()[self.key]

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            if "terminal_observation" in info:
                info["terminal_observation"] = info["terminal_observation"][self.key]
        return obs[self.key], rewards, dones, infos


class RunningMeanStd:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: Any) -> None:
        mean, var, n = np.mean(rows, 0), np.var(rows, 0), len(rows)
        delta, total = mean - self.mean, self.count + n
        squares = self.var * self.count + var * n + np.square(delta) * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, squares / total, total


class VecNormalize(VecEnvWrapper):
    __module__ = PACKAGE + "vec_normalize"

    def __init__(self, venv: VecEnv, training: bool = True, norm_obs: bool = True, clip_obs: float = 10.0) -> None:
        super().__init__(venv)
        self.training, self.norm_obs, self.clip_obs, self.clip_reward = training, norm_obs, clip_obs, 10.0
        self.obs_rms, self.ret_rms = RunningMeanStd(self.observation_space.shape), RunningMeanStd(())
        self.returns = np.zeros(self.num_envs)

    def reset(self) -> Any:
        obs = self.venv.reset()
        self.returns = np.zeros(self.num_envs)
        if self.training and self.norm_obs:
            self.obs_rms.update(obs)
        return self.normalize_obs(obs)

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        if self.training and self.norm_obs:
            self.obs_rms.update(obs)
        if self.training:
            self.returns = self.returns * 0.99 + rewards
            self.ret_rms.update(self.returns)
        rewards = np.clip(rewards / np.sqrt(self.ret_rms.var + 1e-8), -self.clip_reward, self.clip_reward)
        for i in np.flatnonzero(dones):
            infos[i]["terminal_observation"] = self.normalize_obs(infos[i]["terminal_observation"])
        self.returns[dones] = 0
        return self.normalize_obs(obs), rewards.astype(np.float32), dones, infos

    def normalize_obs(self, obs: Any) -> Any:
        if not self.norm_obs:
            return deepcopy(obs)
        scaled = (obs - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8)
        return np.clip(scaled, -self.clip_obs, self.clip_obs).astype(np.float32)


class StackedObservations:
    __module__ = PACKAGE + "stacked_observations"

    def __init__(self, num_envs: int, n_stack: int, space: Any) -> None:
        low, high = np.tile(space.low, n_stack), np.tile(space.high, n_stack)
        self.stacked_observation_space = spaces.Box(low, high, dtype=space.dtype)
        self.stacked_obs = np.zeros((num_envs, *low.shape), space.dtype)

    def reset(self, observation: Any) -> Any:
        self.stacked_obs[...] = 0
        self.stacked_obs[..., -observation.shape[-1] :] = observation
        return self.stacked_obs

    def update(self, observations: Any, dones: Any, infos: Any) -> Any:
        shift = -observations.shape[-1]
        self.stacked_obs = np.roll(self.stacked_obs, shift, axis=-1)
        for i in np.flatnonzero(dones):
            old = infos[i]["terminal_observation"]
            infos[i]["terminal_observation"] = np.concatenate((self.stacked_obs[i, ..., :shift], old), axis=-1)
            self.stacked_obs[i] = 0
        self.stacked_obs[..., shift:] = observations
        return self.stacked_obs, infos


class VecFrameStack(VecEnvWrapper):
    __module__ = PACKAGE + "vec_frame_stack"

    def __init__(self, venv: VecEnv, n_stack: int) -> None:
        self.stacked_obs = StackedObservations(venv.num_envs, n_stack, venv.observation_space)
        super().__init__(venv, self.stacked_obs.stacked_observation_space)

    def reset(self) -> Any:
        return self.stacked_obs.reset(self.venv.reset())

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        obs, infos = self.stacked_obs.update(obs, dones, infos)
        return obs, rewards, dones, infos
