"""rlpyt's collectors, collecting with Muster: change the import of ``CollectorCls``, keep sampler, agent and algorithm.

::

    from muster.compat.rlpyt import CpuResetCollector  # was: from rlpyt.samplers.parallel.cpu.collectors import ...

Nothing here imports rlpyt: its arrays, spaces, environments and agents are known by what they do. Names, arguments,
the protocol with samplers and action servers, and recorded values are those of rlpyt at its last commit (f04f23d).
docs/rlpyt.md lists what differs.
"""

from __future__ import annotations

from muster.compat.rlpyt.collectors import (
    BaseCollector,
    CpuResetCollector,
    CpuWaitResetCollector,
    DecorrelatingStartCollector,
    GpuResetCollector,
    GpuWaitResetCollector,
)
from muster.compat.rlpyt.evaluation import BaseEvalCollector, CpuEvalCollector, GpuEvalCollector, SerialEvalCollector
from muster.compat.rlpyt.sampling import AgentInputs
from muster.compat.rlpyt.traj_info import TrajInfo

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
