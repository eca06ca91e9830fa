"""Rollouts of Stable-Baselines3's on-policy algorithms in Muster's workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from muster.collectors.collector import Collector
from muster.collectors.multi import MultiSyncCollector
from muster.compat.sb3.worker_side import Trace, actor, stacked
from muster.errors import BadOption, UnsupportedEnv
from muster.memory.specs import Array
from muster.policies.heads import Head

Obs = Any  # an array [N, ...], or a dict of these


class SB3Rollout(NamedTuple):
    """``n_steps`` steps of N environments.

    Attributes:
        obs: by row, ``[N, ...]`` or a dict of these; one row more than steps.
        final_obs: by row, the observations after the step, also where the episode ended.
        actions: ``[T, N, ...]``, as the policy drew them.
        rewards, dones, truncated: ``[T, N]``. An episode that terminated is not truncated.
        starts: ``[N]``, whether an episode starts with the first row; also where a lost worker was
            restarted.
        values, log_probs: ``[T, N, 1]`` and ``[T, N]``.
        infos: by row and environment, as in SB3, without the observations.
    """

    obs: list[Obs]
    final_obs: list[Obs]
    actions: Array
    rewards: Array
    dones: Array
    truncated: Array
    starts: Array
    values: torch.Tensor
    log_probs: torch.Tensor
    infos: list[list[dict[str, Any]]]


class SB3Rollouts:
    """The collector that makes rollouts for an on-policy algorithm.

    Args:
        model: the algorithm.
        env_fns: functions that make its environments.
        num_workers: number of worker processes; 0: this process.
        options: further options of ``MultiSyncCollector``.

    Raises:
        BadOption: the algorithm collects in a way of its own, or its environments have wrappers.
        UnsupportedEnv: the environments have other spaces than those of the model.
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        num_workers: int,
        options: Mapping[str, Any],
    ) -> None:
        _check(model)
        self.n_steps = model.n_steps
        self._space = model.observation_space
        self._reached: Obs = None  # ``model._last_obs`` after the last rollout
        self._traj_ids: Array = np.full(len(env_fns), -1)  # of its last row
        policy = model.policy
        policy.set_training_mode(False)
        # the distribution of the last training step has gradients, which cannot be pickled
        with torch.no_grad():
            zeros: Any = create_empty_array(self._space, n=1, fn=np.zeros)
            policy.get_distribution(policy.obs_to_tensor(zeros)[0])
        self._actor = actor(policy)
        parts = [
            list(part)
            for part in np.array_split(np.arange(len(env_fns)), max(1, num_workers))
        ]
        factories = [
            partial(stacked, [env_fns[i] for i in part], self.n_steps) for part in parts
        ]
        common: dict[str, Any] = {
            "frames_per_batch": self.n_steps * len(env_fns),
            "layout": "time_major",
            "obs_dtype": "env",
            "seed": model.seed,
        }
        if num_workers == 0:
            self.collector: Collector | MultiSyncCollector = Collector(
                factories[0], self._actor, **common
            )
        else:
            self.collector = MultiSyncCollector(
                factories,
                self._actor,
                num_workers=num_workers,
                cat_results=1,
                **common,
                **options,
            )
        try:
            expected = model.observation_space, model.action_space
            for i, found in enumerate(self._of_envs("own_spaces")):
                if found != expected:
                    raise UnsupportedEnv(
                        f"env_fns[{i}] has the observation space {found[0]} and the action space"
                        f" {found[1]}, but the model has {expected[0]} and {expected[1]}. Wrap the"
                        " environment so that they are equal (SB3 transposes images), or pass"
                        " inference='server'."
                    )
        except BaseException:
            self.collector.shutdown()
            raise

    def collect(self, model: OnPolicyAlgorithm, last_obs: Obs) -> SB3Rollout:
        """Make a rollout with the model's present weights.

        Args:
            model: the algorithm.
            last_obs: the model's last observations. If they are not those after the last rollout,
                the model has reset its environments, and new episodes begin.
        """
        if isinstance(self.collector, MultiSyncCollector):
            self.collector.update_policy_weights_()
        if self._reached is not None and last_obs is not self._reached:
            self.collector.reset()
        batch = self.collector.next()
        traces: list[Trace] = self._of_envs("trace")
        T, done = self.n_steps, batch["next", "done"][..., 0].numpy()
        truncated = (batch["next", "truncated"] & ~batch["next", "terminated"])[
            ..., 0
        ].numpy()
        infos: list[list[dict[str, Any]]] = [[{} for _ in traces] for _ in range(T)]
        for i, (told, _) in enumerate(traces):
            for t, info in told:
                infos[t][i] = info
        traj_ids = batch["collector", "traj_ids"].numpy()
        starts, self._traj_ids = traj_ids[0] != self._traj_ids, traj_ids[-1].copy()
        actions = batch["action"]
        if isinstance(self._actor, Head):
            obs = obs_as_tensor(
                batch["observation"].flatten(0, 1).numpy(), model.device
            )
            with torch.no_grad():
                chosen = actions.flatten(0, 1).to(model.device)
                chosen = chosen.flatten(1) if chosen.ndim > 2 else chosen
                values, log_probs, _ = model.policy.evaluate_actions(obs, chosen)
        else:
            values = batch["state_value"]
            log_probs = batch["action_log_prob"]
        if isinstance(model.action_space, spaces.MultiBinary):
            actions = actions.float()  # as SB3 draws them
        after: Any = create_empty_array(self._space, n=len(traces))
        self._reached = concatenate(self._space, [last for _, last in traces], after)
        return SB3Rollout(
            [*(self._obs(batch, t) for t in range(T)), self._reached],
            [self._obs(batch["next"], t) for t in range(T)],
            actions.numpy(),
            batch["next", "reward"][..., 0].numpy(),
            done,
            truncated,
            starts,
            values.reshape(T, len(traces), 1),
            log_probs.reshape(T, len(traces)),
            infos,
        )

    def _obs(self, batch: Any, t: int) -> Obs:
        if isinstance(self._space, spaces.Dict):
            return {key: batch[key][t].numpy() for key in self._space.spaces}
        return batch["observation"][t].numpy()

    def _of_envs(self, name: str) -> list[Any]:
        """Return an attribute of all environments."""
        found = self.collector.getattr_env(name)
        return found if isinstance(found, list) else [found]


class RolloutsByMuster(OnPolicyAlgorithm):
    """Base of the class that a model has while Muster collects its rollouts."""

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
    ) -> bool:
        """Fill the buffer as SB3 does, from a rollout of Muster. See ``collect_with_muster``.

        Returns:
            False if the callback ended training.

        Raises:
            BadOption: ``n_steps`` of the model was changed.
        """
        rollouts = ROLLOUTS.get(self)
        if rollouts is None:  # a copy of the model
            return super().collect_rollouts(
                env, callback, rollout_buffer, n_rollout_steps
            )
        if n_rollout_steps != rollouts.n_steps:
            raise BadOption(
                f"collect_rollouts was called for {n_rollout_steps} steps, but when"
                f" collect_with_muster was called the model had n_steps={rollouts.n_steps}. Close"
                " the collection and call collect_with_muster again."
            )
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        rollout = rollouts.collect(self, self._last_obs)
        self._last_episode_starts = rollout.starts
        try:
            for t in range(n_rollout_steps):
                if not self._replay(rollout, t, env, callback, rollout_buffer):
                    return False
        finally:  # also if the callback ends training or raises: the environments are at the end of the rollout
            self._last_obs = rollout.obs[-1]
            self._last_episode_starts = rollout.dones[-1]
        with torch.no_grad():
            values = self.policy.predict_values(
                obs_as_tensor(rollout.obs[-1], self.device)
            )
        dones = rollout.dones[-1]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals({"values": values, "n_steps": n_rollout_steps})
        callback.on_rollout_end()
        return True

    def _replay(
        self,
        rollout: SB3Rollout,
        t: int,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
    ) -> bool:
        """Do what SB3 does after a step; return False if the callback ends training."""
        actions = rollout.actions[t]
        rewards = rollout.rewards[t]
        dones = rollout.dones[t]
        infos = rollout.infos[t]
        values = rollout.values[t]
        log_probs = rollout.log_probs[t]
        new_obs = rollout.obs[t + 1]
        for info, cut in zip(infos, rollout.truncated[t].tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        for i in np.flatnonzero(dones).tolist():
            infos[i]["terminal_observation"] = _row(rollout.final_obs[t], i)
        clipped = actions
        if isinstance(self.action_space, spaces.Box):
            clipped = np.clip(actions, self.action_space.low, self.action_space.high)
        self.num_timesteps += env.num_envs
        callback.update_locals(
            {
                "self": self,
                "env": env,
                "callback": callback,
                "rollout_buffer": rollout_buffer,
                "n_rollout_steps": len(rollout.dones),
                "n_steps": t,
                "actions": actions,
                "clipped_actions": clipped,
                "values": values,
                "log_probs": log_probs,
                "new_obs": new_obs,
                "rewards": rewards,
                "dones": dones,
                "infos": infos,
            }
        )
        if not callback.on_step():
            return False
        self._update_info_buffer(infos, dones)
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.reshape(-1, 1)
        for i in np.flatnonzero(rollout.truncated[t]).tolist():
            last = self.policy.obs_to_tensor(infos[i]["terminal_observation"])[0]
            with torch.no_grad():
                rewards[i] += (self.gamma * self.policy.predict_values(last)[0]).item()
        starts: Any = self._last_episode_starts
        rollout_buffer.add(rollout.obs[t], actions, rewards, starts, values, log_probs)
        self._last_obs = new_obs
        self._last_episode_starts = dones
        return True


ROLLOUTS: weakref.WeakKeyDictionary[OnPolicyAlgorithm, SB3Rollouts] = (
    weakref.WeakKeyDictionary()
)
"""The rollouts of models whose class is derived from ``RolloutsByMuster``."""


def _check(model: OnPolicyAlgorithm) -> None:
    """Raise ``BadOption`` if rollouts in workers cannot be those of the model."""
    name, remedy = (
        type(model).__name__,
        "Pass inference='server': then SB3 collects, and Muster's workers step.",
    )
    if type(model).collect_rollouts not in (
        OnPolicyAlgorithm.collect_rollouts,
        RolloutsByMuster.collect_rollouts,
    ):
        raise BadOption(
            f"{name} has a collect_rollouts of its own, which rollouts in workers would replace."
            f" {remedy}"
        )
    if model.use_sde:
        raise BadOption(
            "use_sde=True: gSDE draws its noise once for several steps of all environments."
            f" {remedy}"
        )
    if isinstance(model.env, VecEnvWrapper):
        wrapper = type(model.env).__name__
        raise BadOption(
            f"The model's environments are wrapped by {wrapper}, which needs the steps of all"
            f" environments in this process. {remedy} Or use wrappers of single environments."
        )


def _row(obs: Obs, i: int) -> Any:
    return (
        {key: rows[i] for key, rows in obs.items()} if isinstance(obs, dict) else obs[i]
    )
