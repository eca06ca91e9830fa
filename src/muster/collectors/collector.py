"""``Collector``: collects exact batches of experience in this process."""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress

import torch

from muster.collectors.base import BaseCollector
from muster.collectors.engine import Engine
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import (
    in_this_thread,
    log_rollouts,
    make_groups,
    worker_setting,
)
from muster.collectors.signatures import takes
from muster.policies.adapt import place
from muster.policies.modes import ActingMode, warn_of_noise
from muster.restore.pickling import MAKE_POLICY, dumps, loads
from muster.utils.containers import is_several
from muster.weights.names import acting_modules
from muster.weights.publish import PolicyWeights
from muster.workers.build import build_policy


class Collector(BaseCollector):
    """Collects batches of exactly ``frames_per_batch`` environment steps, in this process.

    ::

        with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=2048, total_frames=51_200) as collector:
            for batch in collector:  # TensorDict [8, 256]
                loss = learn(batch)
                collector.update_policy_weights_()

    A batch has TorchRL's keys: ``observation`` (or the environment's own keys), ``action``, the
    policy's extras, ``done``, ``terminated``, ``truncated``, ``("next", ...)`` of these and
    ``reward``, and ``("collector", "traj_ids")``. Its shape is ``[num_envs, T]``, or ``[T]``
    without ``num_envs``; if ``create_env_fn`` is a list, the number of groups comes first. It is a
    view of Muster's memory, which is not reused while you hold any tensor of it.
    ``batch.reshape(-1)`` copies. Save or send ``batch.clone()``: ``torch.save``, ``pickle`` and
    queues take the whole memory of a view, which for several groups is many times the batch.

    After an error in an environment or policy, the next iteration continues with the rows collected
    so far.

    Raises:
        BadOption, UnknownOption: an option is wrong. No environment was made.
        UnsupportedEnv, UnsupportedSpace, EnvError: making the environments failed. All were closed
            again.
    """

    @takes(CollectorOptions)
    def __init__(self, options: CollectorOptions) -> None:
        super().__init__(options)

    def _connect(self, made: ExitStack) -> Engine:
        options = self.options
        made_policy = options.policy
        if options.policy_factory is not None:
            made_policy = options.factories[0]()
        self.policy, self._policy_device = place(made_policy, options.devices.policy)
        original = None
        if self.policy is not made_policy:
            original = made_policy
        acting = acting_modules(self.policy)
        mode = options.execution.policy_mode
        warn_of_noise(acting, mode)
        acts_in = None
        if acting:
            acts_in = ActingMode(acting, mode)
        self._weights = PolicyWeights(
            self.policy, original, options.version_counter, acts_in
        )
        groups = make_groups(
            options.create_env_fn, options, self.policy, self._policy_device, made
        )
        source, worker = in_this_thread(
            options, groups, self.policy, self._policy_device
        )
        if options.watching is not None and options.watching.films:
            log_rollouts(source.pool, worker, options.create_env_fn, options)
        stacked = is_several(options.create_env_fn)
        return Engine(options, source, self._weights, stacked=stacked, local=worker)

    def _go_into_background(self) -> None:
        """Give the background thread its own copy of the weights, which training does not change."""
        if not isinstance(self.policy, torch.nn.Module):
            self._weights.keep_modes()  # its modules are also used by the thread that trains
        elif self._weights.original is None:
            with self._weights.in_mode():  # the copy keeps the mode
                own = self._copied()
            self._weights.act_with(own)
            self.policy = own
            setting = worker_setting(self.options, own)
            group = self._engine.groups[0]
            self._engine.go_on_with(
                build_policy(own, setting, group.env, self._policy_device)
            )

    def _copied(self) -> torch.nn.Module:
        """A copy of the policy: as Python copies it, as ``policy_factory`` makes it, or as workers
        get it.
        """
        factory = next(iter(self.options.factories), None)
        copied: torch.nn.Module | None = None
        with suppress(Exception):  # of the user's code
            copied = copy.deepcopy(self.policy)
        if copied is None and factory is None:
            copied = loads(dumps(self.policy, "policy", MAKE_POLICY), "policy")
        if copied is not None:
            return copied
        assert factory is not None
        copied = factory()
        copied.load_state_dict(self.policy.state_dict())
        for part, own in zip(copied.modules(), self.policy.modules(), strict=True):
            part.training = own.training
        return copied
