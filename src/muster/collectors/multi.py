"""Collectors whose environments run in worker processes or threads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from muster.cluster.nodes import Nodes, nodes_transport
from muster.collectors.auto import auto_workers
from muster.collectors.base import BaseCollector
from muster.collectors.contradictions import check_cat, check_multi
from muster.collectors.engine import Engine
from muster.collectors.multi_options import MultiOptions, PoolOptions
from muster.collectors.signatures import takes
from muster.collectors.workers import Workers, count_workers
from muster.errors import BadOption
from muster.weights.choice import one_transport
from muster.weights.publish import PolicyWeights
from muster.workers.first_ready import LEAD
from muster.workers.requests import Call, Request
from muster.workers.worker import env_attributes, execute


class MultiCollector(BaseCollector):
    """Base of ``MultiSyncCollector`` and ``MultiAsyncCollector``."""

    options: PoolOptions
    _alone: bool  # every group fills batches of its own
    _lead = LEAD  # of these batches, how many may be undelivered per group

    @takes(MultiOptions)
    def __init__(self, options: MultiOptions) -> None:
        super().__init__(options)

    def _connect(self, made: ExitStack) -> Engine:
        options = self.options
        check_multi(options, alone=self._alone)
        envs, wanted = options.create_env_fn, options.num_workers
        factories, count = count_workers(envs, None if wanted == "auto" else wanted)
        policy = self.policy = options.policy if options.policy_factory is None else options.policy_factory()
        if wanted == "auto":
            factories, count = count_workers(envs, auto_workers(envs, policy, options, alone=self._alone))
        transport = one_transport(options.weight_sync_schemes)
        acting = 1 if options.server is not None and policy is not None else count
        nodes, bundles = self._place(made)
        if nodes is not None:
            transport, acting = nodes_transport(nodes, transport), nodes.count
        self._weights = PolicyWeights.of_workers(policy, acting, transport, options.version_counter)
        made.callback(self._weights.close)
        for name in options.weight_sync_schemes or ():
            self._part(name)  # raises for an unknown part of the policy
        workers = Workers(
            options, factories, count, policy, self._weights, made, alone=self._alone, nodes=nodes, bundles=bundles
        )
        weakref.finalize(self, workers.end)  # for collectors that are dropped without shutdown()
        check_cat(options, [counts.info for counts in workers.pool.counters])
        if options.num_threads is not None:
            made.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(options.num_threads)
        cat_dim = None if self._alone else options.cat_dim
        stacked = cat_dim is None and not self._alone
        engine = Engine(options, workers.schedule(self._lead), self._weights, stacked=stacked, cat_dim=cat_dim)
        return engine

    def _place(self, made: ExitStack) -> tuple[Nodes | None, Sequence[Sequence[int]] | None]:
        """Return the nodes of the workers, and the groups that share batches; see ``Workers``."""
        return None, None

    @property
    def env(self) -> Any:
        """Not available: the environments live in worker processes or threads.

        Raises:
            BadOption: always.
        """
        raise BadOption(
            "the environments of this collector live in its workers: ask getattr_env(name) for their attributes, or "
            "cascade_execute(path, ...) to call something there"
        )

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of every environment, in the order of ``create_env_fn``. It must be picklable."""
        found = self._ask(Call(env_attributes, (attr,)))
        return [value for of_worker in found for value in of_worker]

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function by its path, such as ``"policy.reset_noise"`` or ``"env.render"``, in every worker.

        In a worker with several environments, ``env`` is a list: ``"env[0].render"``.

        Returns:
            a list with the result of each worker.

        Raises:
            BadOption: the path does not exist.
        """
        return self._ask(Call(execute, (attr_path, args, kwargs)))

    def _ask(self, request: Request) -> Any:
        with self._exclusively():
            return self._engine.source.pool.call(request)

    def _before_batch(self) -> None:
        super()._before_batch()
        if self.options.update_at_each_batch:
            self.update_policy_weights_()

    def _release(self) -> None:
        self._made.close()


class MultiSyncCollector(MultiCollector):
    """Collects batches of exactly ``frames_per_batch`` steps in workers that all act with the same weights.

    ::

        with MultiSyncCollector(["CartPole-v1"] * 4, policy, num_envs=8, frames_per_batch=2048) as collector:
            for batch in collector:  # TensorDict [4, 8, 64]
                loss = learn(batch)
                collector.update_policy_weights_()

    Workers act with copies of the policy; ``update_policy_weights_()`` sends them the optimizer's changes. They are
    idle while you train. The data equals that of ``Collector`` with the same ``create_env_fn``, options and seed.

    Raises:
        BadOption, UnknownOption: an option is wrong. No worker was started.
        UnsupportedEnv, EnvError: making an environment failed in a worker. All workers were ended.
        WorkerDied, WorkerHung: a worker died or hangs. Also raised by iteration.
    """

    _alone = False


class MultiAsyncCollector(MultiCollector):
    """Collects batches of ``frames_per_batch`` steps, each from one group, as they are ready, also while you train.

    ::

        with MultiAsyncCollector(["CartPole-v1"] * 4, policy, num_envs=8, frames_per_batch=512) as collector:
            for batch in collector:  # TensorDict [8, 64]
                replay_buffer.extend(batch)
                ...

    Every group is at most two rollouts ahead; then its worker sleeps. A rollout acts with the newest weights at its
    start, so weights in a batch can be several publications old: ``stats().policy_lag`` counts them, ``max_policy_lag``
    limits them. Changes by ``reset()`` and ``set_seed()`` take effect after the rollouts that have been started.
    """

    _alone = True


class AsyncCollector(MultiAsyncCollector):
    """``MultiAsyncCollector`` with one worker, which collects while you train.

    With ``replay_buffer=`` and ``start()`` it fills the buffer until ``async_shutdown()``, except during ``pause()``.
    """

    def _connect(self, made: ExitStack) -> Engine:
        envs = self.options.create_env_fn
        if (isinstance(envs, (list, tuple)) and len(envs) > 1) or self.options.num_workers not in (None, 1):
            raise BadOption("AsyncCollector has one worker: give it one id or function, or use MultiAsyncCollector")
        return super()._connect(made)
