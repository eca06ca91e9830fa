"""rlpyt's collectors, collecting with Muster: change the import of ``CollectorCls``, keep sampler, agent and algorithm.

::

    from muster.compat.rlpyt import CpuResetCollector  # was: from rlpyt.samplers.parallel.cpu.collectors import ...

Nothing here imports rlpyt: its arrays, spaces, environments and agents are known by what they do. Names, arguments and
the protocol with samplers and action servers are those of rlpyt at its last commit (f04f23d), and so are the recorded
values, with these exceptions:

- After a batch that waited for its end (``WaitReset``) the next one begins with the reset observation. rlpyt's begins
  with the last observation of the episode before.
- Where the agent's episode begins it is shown zeros as its previous action and reward, by all collectors; in rlpyt by
  the action server only. ``samples.prev_action`` and ``prev_reward`` say the same where they have memory of their own.
  As rlpyt's samplers make them they are the memory of ``action`` and ``reward``, one row later; only the first row is
  free then, and the others are what was done before, across ends as well.
- A lost life (``done`` without ``traj_done``) also resets the agent if it waits for the end of the batch.
- ``traj_done`` without ``done`` is recorded as ``done``: what follows is another episode.
- ``env_info`` is zero where an environment said or did nothing; in rlpyt it is what an earlier batch left there.
- ``env_info`` and ``agent_info`` that have no buffer, observations of another shape, rewards that are not finite:
  errors. rlpyt drops the first, broadcasts the second, and takes the third.
- Episodes that an evaluation does not finish are in ``unfinished_infos`` and counted in the log. They are still not
  reported, which favours short ones: that is how rlpyt's samplers count.
- Environments are reset after all of them have been stepped, and random first steps are made by all of them in turn:
  the generators of the process are drawn from in another order than by rlpyt. Zero, and not ``null_value()``, is what
  is shown before the first action.
- Whoever waits for an action server looks whether its parent process lives, and gives up after ``max_wait_s``.
- ``collect_batch`` of the Gpu collectors returns what is acted on next as well; rlpyt's returns None.
- The collectors take the double buffers of the asynchronous samplers themselves; there are no ``Db`` classes.
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
