"""For tests of environments and policies, yours included: fake environments and contract suites."""

from muster.testing.contracts import EnvContract
from muster.testing.envs import CountingEnv, FaultyEnv, SpaceEnv

__all__ = ["CountingEnv", "EnvContract", "FaultyEnv", "SpaceEnv"]
