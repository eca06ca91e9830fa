"""Muster's worker processes as a vector environment of Stable-Baselines3: replaces ``SubprocVecEnv``.

::

    from muster.compat.sb3 import VecEnv  # was: from stable_baselines3.common.vec_env import SubprocVecEnv

    model = PPO("MlpPolicy", VecEnv([make_env] * 8, num_workers=2))
"""

from muster.compat.sb3.vec_env import VecEnv

__all__ = ["VecEnv"]
