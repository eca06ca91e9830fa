"""prt_rl's collector, collecting with Muster: change one import, keep environments, policies, loggers and agents.

::

    from muster.compat.prt_rl import Collector  # was: from prt_rl.common.collectors import Collector

Nothing here imports prt_rl: environments, policies and loggers are known by what they do. Names, arguments, keys,
shapes and values are those of prt_rl 0.6.3, with these exceptions, where it does not do what its documentation says, or
nobody could want what it does:

- With ``GymnasiumWrapper(num_envs > 1)`` an episode has no first step from state to state without a reward.
- ``last_value_est`` is 0 where the last step ended an episode, and asking for it changes neither random generators nor
  what a policy remembers.
- ``num_trajectories < num_envs``: one from each of the first environments, and not from the first ones to end.
- The tracker forgets episodes that ``collect_trajectory`` cut. It logs every episode, also of those that end together.
- States of Gymnasium's ``Discrete`` spaces are ``(..., 1)``, as ``EnvParams.observation_shape`` has it.
- Keys, shapes or dtypes that change from step to step, rewards that are not finite, a policy that overwrites ``state``
  or writes into its input: errors.
"""

from __future__ import annotations

from muster.compat.prt_rl.collector import Collector
from muster.observing.metrics import MetricsTracker

__all__ = ["Collector", "MetricsTracker"]
