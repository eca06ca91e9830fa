"""Tianshou's collectors, collecting with Muster: change the import, keep policy, environments, buffer and trainer.

::

    from muster.compat.tianshou import Collector  # was: from tianshou.data import Collector

Names, arguments, and what is in the buffer afterwards are those of Tianshou 2.0.1: the same seeds give the same bits.
``no_grad`` and ``is_closed``, which that version has dropped, are there again. These are different:

- Gradients are off while a policy acts, unless ``no_grad=False``.
- ``n_step`` and ``n_episode`` are not taken together; the first to be reached would decide.
- ``returns`` and ``lens`` are those of whole episodes. Tianshou reads them off the buffer, which may hold less than the
  episode, or the beginning of an abandoned one besides.
- The state of a policy that is a plain tensor begins anew with the episode; in Tianshou it goes on.
- Keys that an ``on_step_hook`` adds are stored in buffers of several environments, too; there they are dropped. A
  ``CachedReplayBuffer`` refuses them.
- ``EpisodeRolloutHookMerged`` merges. Tianshou's raises as soon as a hook returns something.
- ``collect_time`` of a collector is counted, and by a clock that nobody sets.
- Observations keep the dtype of the first reset in ``obs_next`` as well, and one of another kind is an error.
- ``AsyncCollector`` takes policies without state or ``policy`` entry, ``random=True``, and actions of several
  dimensions; Tianshou's raises.
- What environments and policies raise comes as ``EnvError`` and ``PolicyError``. The steps before are in the buffer;
  after the former the environments begin anew.
- Unless somebody looks at every step (a hook, statistics of one's own), steps are added to the buffer many at once,
  not before ``collect`` returns; to a buffer with an ``add`` of its own, row by row.
"""

from __future__ import annotations

from muster.compat.tianshou.async_collector import AsyncCollector
from muster.compat.tianshou.collector import Collector
from muster.compat.tianshou.steps import EpisodeRolloutHookMerged

__all__ = ["Collector", "AsyncCollector", "EpisodeRolloutHookMerged"]
