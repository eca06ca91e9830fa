"""Fake environments and contract suites, for tests of environments and policies, also yours."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from muster.testing.envs import ChainEnv, CountingEnv, FaultyEnv, InfoEnv, SpaceEnv
from muster.testing.oracle import Fault, OracleEnv, check_stream
from muster.testing.torch_envs import TorchCartPole, TorchGridWorld, TorchPendulum

if TYPE_CHECKING:
    from muster.testing.contracts import EnvContract

__all__ = [
    "ChainEnv",
    "CountingEnv",
    "EnvContract",
    "Fault",
    "FaultyEnv",
    "InfoEnv",
    "OracleEnv",
    "SpaceEnv",
    "TorchCartPole",
    "TorchGridWorld",
    "TorchPendulum",
    "check_stream",
]


def __getattr__(name: str) -> Any:
    if (
        name == "EnvContract"
    ):  # needs torch; workers with environments of this module do not
        return importlib.import_module("muster.testing.contracts").EnvContract
    raise AttributeError(f"module 'muster.testing' has no attribute {name!r}")
