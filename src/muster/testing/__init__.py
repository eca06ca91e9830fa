"""For tests of environments and policies, yours included: fake environments and contract suites."""

from muster.testing.contracts import EnvContract
from muster.testing.envs import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv, TorchCartPole

__all__ = ["ChainEnv", "CountingEnv", "EnvContract", "FaultyEnv", "SpaceEnv", "TorchCartPole"]
