"""rlpyt's collectors, based on Muster: change the import of ``CollectorCls``, keep sampler, agent
and algorithm.

::

    from muster.compat.rlpyt import CpuResetCollector  # was: from rlpyt.samplers.parallel.cpu.collectors import ...

This package does not import rlpyt: it uses arrays, spaces, environments and agents by their
methods. Names, arguments, the protocol with samplers and action servers, and recorded values are
those of rlpyt at its last commit (f04f23d). docs/rlpyt.md lists the differences.
"""

from __future__ import annotations

from muster.compat.rlpyt.collectors import (
    BaseCollector,
    BaseEvalCollector,
    CpuEvalCollector,
    CpuResetCollector,
    CpuWaitResetCollector,
    DecorrelatingStartCollector,
    GpuEvalCollector,
    GpuResetCollector,
    GpuWaitResetCollector,
    SerialEvalCollector,
)
from muster.compat.rlpyt.envs import TrajInfo
from muster.compat.rlpyt.runner import AgentInputs

__all__ = [
    "BaseCollector",
    "DecorrelatingStartCollector",
    "CpuResetCollector",
    "CpuWaitResetCollector",
    "GpuResetCollector",
    "GpuWaitResetCollector",
    "BaseEvalCollector",
    "CpuEvalCollector",
    "GpuEvalCollector",
    "SerialEvalCollector",
    "AgentInputs",
    "TrajInfo",
]
