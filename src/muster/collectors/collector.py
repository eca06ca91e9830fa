"""``Collector``: collects exact batches of experience in this process."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch

from muster.collectors.base import BaseCollector
from muster.collectors.engine import Engine
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import in_this_thread, log_rollouts, make_groups, worker_options
from muster.collectors.signatures import takes
from muster.policies.adapt import place
from muster.weights.publish import PolicyWeights
from muster.workers.build import build_policy


class Collector(BaseCollector):
    """Collects batches of exactly ``frames_per_batch`` environment steps, in this process.

    ::

        with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=2048, total_frames=51_200) as collector:
            for batch in collector:  # TensorDict [8, 256]
                loss = learn(batch)
                collector.update_policy_weights_(net)

    A batch has TorchRL's keys: ``observation`` (or the environment's own keys), ``action``, the policy's extras,
    ``done``, ``terminated``, ``truncated``, ``("next", ...)`` of these and ``reward``, and
    ``("collector", "traj_ids")``. Its shape is ``[num_envs, T]``, or ``[T]`` without ``num_envs``; if ``create_env_fn``
    is a list, the number of groups comes first. It is a view of Muster's memory, which is not reused while you hold
    any tensor of it. ``batch.reshape(-1)`` copies. Save or send ``batch.clone()``: ``torch.save``, ``pickle`` and
    queues take the whole memory of a view, which for several groups is many times the batch.

    After an error in an environment or policy, the next iteration continues with the rows collected so far.

    Raises:
        BadOption, UnknownOption: an option is wrong. No environment was made.
        UnsupportedEnv, UnsupportedSpace, EnvError: making the environments failed. All were closed again.
    """

    @takes(CollectorOptions)
    def __init__(self, options: CollectorOptions) -> None:
        super().__init__(options)

    def _connect(self, made: ExitStack) -> Engine:
        options = self.options
        made_policy = options.policy if options.policy_factory is None else options.policy_factory()
        self.policy, self._policy_device = place(made_policy, options.devices["policy_device"])
        original = made_policy if self.policy is not made_policy else None
        self._weights = PolicyWeights(self.policy, original, options.version_counter)
        groups = make_groups(options.create_env_fn, options, self.policy, self._policy_device, made)
        source, worker = in_this_thread(options, groups, self.policy, self._policy_device)
        if options.watching is not None and options.watching.films:
            log_rollouts(source.pool, worker, options.create_env_fn, options)
        stacked = isinstance(options.create_env_fn, (list, tuple))
        return Engine(options, source, self._weights, stacked=stacked, local=worker)

    def _go_into_background(self) -> None:
        """Give the background thread its own copy of the weights, which training does not change."""
        if isinstance(self.policy, torch.nn.Module) and self._weights.original is None:
            own = copy.deepcopy(self.policy)
            self._weights.original, self._weights.policy, self.policy = self.policy, own, own
            options, group = worker_options(self.options, own), self._engine.groups[0]
            self._engine.policy = build_policy(own, options, group, self._policy_device)
