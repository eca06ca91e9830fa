"""For tests of environments and policies, yours included: fake environments and contract suites."""

from muster.testing.contracts import EnvContract
from muster.testing.envs import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv, TorchCartPole
from muster.testing.oracle import Fault, OracleEnv, check_stream

__all__ = [
    "ChainEnv",
    "CountingEnv",
    "EnvContract",
    "Fault",
    "FaultyEnv",
    "OracleEnv",
    "SpaceEnv",
    "TorchCartPole",
    "check_stream",
]
