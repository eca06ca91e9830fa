"""Muster's worker processes as a vector environment of Gymnasium: replaces ``SyncVectorEnv`` and
``AsyncVectorEnv``.

::

    from muster.compat.gymnasium import VectorEnv  # was: from gymnasium.vector import SyncVectorEnv

    envs = VectorEnv([make_env] * 8, num_workers=2)
"""

from muster.compat.gymnasium.vector_env import VectorEnv

__all__ = ["VectorEnv"]
