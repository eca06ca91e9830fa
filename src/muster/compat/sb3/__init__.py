"""Stable-Baselines3 with Muster's worker processes.

``collect_with_muster`` lets an algorithm collect with them::

    from muster.compat.sb3 import collect_with_muster

    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8))
    collect_with_muster(model, "CartPole-v1", num_workers=2)  # this line is new

``VecEnv`` replaces ``SubprocVecEnv``::

    from muster.compat.sb3 import VecEnv  # was: from stable_baselines3.common.vec_env import SubprocVecEnv

    model = PPO("MlpPolicy", VecEnv([make_env] * 8, num_workers=2))
"""

from muster.compat.sb3.collection import SB3Collection, collect_with_muster
from muster.compat.sb3.vec_env import VecEnv

__all__ = ["SB3Collection", "VecEnv", "collect_with_muster"]
