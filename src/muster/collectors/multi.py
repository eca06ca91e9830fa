"""Collectors whose environments run in worker processes or threads, on this machine or on nodes."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from muster.cluster.node_pool import NodePool
from muster.cluster.nodes import Nodes, nodes_transport
from muster.collectors.auto import auto_workers
from muster.collectors.base import BaseCollector
from muster.collectors.engine import Engine
from muster.collectors.multi_options import (
    CentralInference,
    MultiOptions,
    PoolOptions,
    check_cat,
    check_pool,
    of_workers,
)
from muster.collectors.schedules import FirstReadyKind, ScheduleKind, SyncKind
from muster.collectors.setup import (
    factories_of,
    keywords_of,
    marks_valid,
    origins_of,
    worker_setting,
)
from muster.collectors.signatures import takes
from muster.env_spec import EnvSpec
from muster.envs.build import is_environment
from muster.errors import BadOption
from muster.memory.shared import Arena
from muster.policies.modes import warn_of_noise
from muster.policies.sampling import check_masks
from muster.restore.pickling import MAKE_KWARGS, MAKE_OPTION, MAKE_POLICY, dumps
from muster.restore.registered import check_id, ids_of_this_process
from muster.utils.checked import base_part
from muster.utils.containers import is_several
from muster.weights.choice import one_transport
from muster.weights.names import acting_modules
from muster.weights.publish import PolicyWeights
from muster.weights.transport import Ticket
from muster.workers.config import PoolConfig, ServerConfig, WorkerConfig, WorkerPlace
from muster.workers.options import SupervisionOptions, WorkerSetting
from muster.workers.requests import Call, LayOut, Request
from muster.workers.supervision import SupervisedPool
from muster.workers.turns import Turns
from muster.workers.worker import Worker, env_attributes, execute
from muster.workers.worker_pool import WorkerPool


class MultiCollector(BaseCollector):
    """Base of ``MultiSyncCollector`` and ``MultiAsyncCollector``."""

    options: PoolOptions
    _nodes: Nodes | None = None  # None: the workers are on this machine
    _factories: list[Any]  # of the environments of all groups
    _sent: bytes  # see ``_pickled_policy``
    _kind: ScheduleKind
    _owns: list[PoolOptions]  # of each worker

    @takes(MultiOptions)
    def __init__(self, options: MultiOptions) -> None:
        super().__init__(options)

    def _connect(self, made: ExitStack) -> Engine:
        options = self.options
        self._kind = kind = self._schedule_kind()
        kind.check(options)
        check_pool(options)
        envs = options.create_env_fn
        wanted = options.num_workers
        self._factories, count = count_workers(
            envs, None if wanted == "auto" else wanted
        )
        policy = self.policy = options.policy
        if options.policy_factory is not None:
            policy = self.policy = options.factories[0]()
        if wanted == "auto":
            self._factories, count = count_workers(
                envs, auto_workers(envs, policy, options, alone=not kind.shares_batch)
            )
        self._owns = of_workers(options, count, self._others())
        transport = one_transport(options.weight_sync_schemes)
        acting = 1 if options.server is not None and policy is not None else count
        self._nodes = nodes = self._make_nodes(made)
        if nodes is not None:
            transport, acting = nodes_transport(nodes, transport), nodes.count
        warn_of_noise(acting_modules(policy), options.execution.policy_mode)
        self._sent = (
            self._pickled_policy()
        )  # first: its errors say which part cannot be sent
        self._weights = PolicyWeights.of_workers(
            policy, acting, transport, options.version_counter, only_weights=True
        )
        made.callback(self._weights.close)
        for name in options.weight_sync_schemes or ():
            self._part(name)  # raises for an unknown part of the policy
        if (
            isinstance(affinity := options.cpu_affinity, Sequence)
            and affinity != "auto"
            and len(affinity) != count
        ):
            raise BadOption(
                f"cpu_affinity has CPUs for {len(affinity)} workers, and there are {count}:"
                " give all"
            )
        if self._weights.lazy:
            self._materialise(count)
            self._sent = self._pickled_policy()
        parts = [
            part.tolist()
            for part in np.array_split(np.arange(len(self._factories)), count)
        ]
        pool, infos = self._start(
            self._config(parts, count), self._weights.ticket, made
        )
        pool.open(infos, self._place(infos))
        # For collectors that are dropped without shutdown().
        weakref.finalize(self, pool.end if nodes is None else nodes.close)
        check_cat(options, infos)
        if options.num_threads is not None:
            made.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(options.num_threads)
        if isinstance(pool, WorkerPool):
            arena = pool.arena
        else:
            arena = Arena.create("muster-slots")
            made.callback(arena.close)
        cat_dim = kind.cat_dim(options)
        stacked = cat_dim is None and kind.shares_batch
        schedule = kind.schedule(options, pool, arena, self._weights)
        return Engine(
            options, schedule, self._weights, stacked=stacked, cat_dim=cat_dim
        )

    @property
    def env(self) -> Any:
        """Not available: the environments live in worker processes or threads.

        Raises:
            BadOption: always.
        """
        raise BadOption(
            "the environments of this collector live in its workers: ask getattr_env(name) for"
            " their attributes, or cascade_execute(path, ...) to call something there"
        )

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of every environment, in the order of ``create_env_fn``.

        It must be picklable.
        """
        found = self._ask(Call(env_attributes, (attr,)))
        return [value for of_worker in found for value in of_worker]

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function by its path, such as ``"policy.reset_noise"`` or ``"env.render"``, in
        every worker.

        In a worker with several environments, ``env`` is a list: ``"env[0].render"``.

        Returns:
            a list with the result of each worker.

        Raises:
            BadOption: the path does not exist.
        """
        return self._ask(Call(execute, (attr_path, args, kwargs)))

    def _acting_on(self) -> list[torch.device]:
        count = self._weights.workers or 0
        if count != len(self._owns):
            return super()._acting_on()  # one inference server
        return [own.devices.policy or self._policys_own() for own in self._owns]

    def _sendable(self, given: Any, what: str) -> Any:
        return given if self.options.in_threads else dumps(given, what)

    def _ask(self, request: Request) -> Any:
        with self._exclusively():
            return self._engine.source.pool.call(request)

    def _before_batch(self) -> None:
        super()._before_batch()
        if self.options.update_at_each_batch:
            self.update_policy_weights_()

    def _release(self) -> None:
        self._made.close()

    # --- parts ------------------------------------------------------------------------------------

    @abstractmethod
    def _schedule_kind(self) -> ScheduleKind:
        """Return how groups share batches, and when they roll out."""

    def _make_nodes(self, made: ExitStack) -> Nodes | None:
        """Make the nodes of the workers; None: they are on this machine."""
        return None

    def _start(
        self,
        config: PoolConfig,
        ticket: Callable[[int], Ticket] | None,
        made: ExitStack,
    ) -> tuple[SupervisedPool, list[EnvSpec]]:
        """Start workers, and wait until they have made their environments."""
        pool: SupervisedPool
        if self._nodes is None:
            pool = WorkerPool(config, ticket, made)
        else:
            apart = self.options.enough(len(self._factories)) is not None
            pool = NodePool(self._nodes, config, self.options.layout, apart=apart)
        pool.start()
        importlib.import_module(
            "tensordict"
        )  # for batches; takes seconds, while the workers start
        infos = pool.built()
        for info in infos:
            check_masks(info)  # a server would find it when it acts
        return pool, infos

    def _materialise(self, count: int) -> None:
        """Initialise lazy layers: a call in one worker determines the weights; all workers then
        start with these.
        """
        with ExitStack() as made:
            pool, (info,) = self._start(self._config([[0]], count), None, made)
            made.callback(pool.end)
            pool.open([info], WorkerPlace({0: 0}, info.num_envs, False, None))
            pool.call(LayOut("policy", {0: 1}))
            (weights,) = pool.call(Call(Worker.weights))
            pool.close()
        self._weights.materialise(weights)

    def _place(self, infos: Sequence[EnvSpec]) -> WorkerPlace:
        """Return the places of all groups."""
        options = self.options
        sizes = [info.num_envs for info in infos]
        sharing = self._kind.sharing(sizes)
        masks = any([marks_valid(options, number) for number in sorted(set(sharing))])  # noqa: C419 (each may warn)
        masks |= options.enough(len(sizes)) is not None or options.on_failure == "drop"
        firsts = dict(enumerate(itertools.accumulate(sizes[:-1], initial=0)))
        return WorkerPlace(firsts, sum(sizes), masks, options.seed)

    def _config(self, parts: Sequence[Sequence[int]], count: int) -> PoolConfig:
        """Return the config of a worker pool with these groups.

        Values for processes are pickled.
        """
        options = self.options
        threads = options.in_threads
        served = (
            options.server is not None and self.policy is not None
        )  # else actions are random
        served &= not self._weights.lazy
        factories = self._factories
        kwargs = list(keywords_of(options.create_env_kwargs, len(factories)))
        owns = [options] * len(factories)
        for index, groups in enumerate(parts):
            for number in groups:
                owns[number] = self._owns[index]
        origins: list[Any] = list(origins_of(factories, options, owns))
        given = dumps if not threads else lambda value, what, remedy: value
        if not threads:
            for number, factory in enumerate(factories):
                if isinstance(factory, str):
                    check_id(factory, f"create_env_fn[{number}]")
            indices = reversed(range(len(factories)))
            once = {
                id(factories[i]): dumps(factories[i], f"create_env_fn[{i}]")
                for i in indices
            }
            factories = [once[id(factory)] for factory in factories]
        turns = Turns() if threads and not self._kind.overlaps else None
        made = {id(own): self._setting(own, served=served) for own in self._owns}
        settings = {
            own: given(
                _without_torch(setting) if served else setting,
                "the options",
                MAKE_OPTION,
            )
            for own, setting in made.items()
        }
        workers = [
            WorkerConfig(
                index,
                groups,
                [factories[number] for number in groups],
                given(
                    [kwargs[number] for number in groups],
                    "create_env_kwargs",
                    MAKE_KWARGS,
                ),
                b"",
                options.policy_factory is not None,
                settings[id(self._owns[index])],
                policy_turns=turns,
                served_by=count if served else None,
                threads=None
                if threads or served
                else self._owns[index].num_sub_threads,
                factory=index if len(options.factories) > 1 else 0,
                stoppable=threads or options.enough(len(factories)) is not None,
                in_thread=threads,
            )
            for index, groups in enumerate(parts)
        ]
        if self._nodes is not None:
            origins = [
                dumps(origin, f"create_env_fn[{number}]")
                for number, origin in enumerate(origins)
            ]
        server = None
        if served and options.server is not None:
            server = self._server_config(options.server, made[id(self._owns[0])])
        return PoolConfig(
            workers=workers,
            policy=self._sent,
            count=count,
            server=server,
            origins=[origins[number] for groups in parts for number in groups],
            max_frames_per_traj=options.max_frames_per_traj,
            episode_seeds=options.episode_seeds,
            timeouts=options.timeouts,
            supervision=base_part(SupervisionOptions, options),
            registered=None if threads else ids_of_this_process(),
        )

    def _others(self) -> Sequence[Mapping[str, Any]]:
        """Return further options of each worker, by name; empty: there are none."""
        return ()

    def _setting(self, options: PoolOptions, *, served: bool) -> WorkerSetting:
        """Return what a worker needs of its options. ``served``: a server calls the policy."""
        threads = options.in_threads
        setting = worker_setting(options, self.policy)
        users: frozenset[int] = frozenset()
        if threads or (served and self._nodes is None):
            users = frozenset(
                id(module)
                for root in acting_modules(self.policy)
                for module in root.modules()
            )
        # those of the workers, not of this process
        num_threads = None if threads else options.num_sub_threads
        return dataclasses.replace(
            setting,
            options=dataclasses.replace(setting.options, num_threads=num_threads),
            shared_frames=self._kind.shares_batch,
            users_modules=users,
        )

    def _pickled_policy(self) -> bytes:
        """The policy, or the function that makes it, for workers and nodes."""
        factory = self.options.policy_factory
        if factory is None:
            return dumps(self.policy, "policy", MAKE_POLICY)
        return dumps(self.options.factories, "policy_factory")

    def _server_config(
        self, server: CentralInference, setting: WorkerSetting
    ) -> ServerConfig:
        options = self.options
        away = self._nodes is not None
        wait = server.max_wait_s
        if wait is None and self._kind.overlaps:
            wait = 0.0
        return ServerConfig(
            dumps(setting, "the options", MAKE_OPTION) if away else setting,
            server.alternating,
            server.max_batch,
            wait,
            options.num_sub_threads,
            exclusive=away or not self._kind.overlaps,
            keeps_streams=not options.in_threads,
        )


def count_workers(create_env_fn: Any, num_workers: int | None) -> tuple[list[Any], int]:
    """Return the factories of all groups, and the number of workers for them."""
    factories = factories_of(create_env_fn)
    if not is_several(create_env_fn):
        factories *= num_workers or 1
    for number, factory in enumerate(factories):
        if is_environment(factory):
            raise BadOption(
                f"create_env_fn[{number}] is an environment, which lives in this process: give an"
                " id, or a function that makes one, for workers to call"
            )
    return factories, min(num_workers or len(factories), len(factories))


def _without_torch(setting: WorkerSetting) -> WorkerSetting:
    """Return the setting of workers that do not act."""
    options = dataclasses.replace(
        setting.options,
        compile_policy=None,
        cudagraph_policy=None,
        track_policy_version=bool(setting.options.track_policy_version),
    )
    return dataclasses.replace(
        setting, options=options, env_device=None, policy_device=None
    )


class MultiSyncCollector(MultiCollector):
    """Collects batches of exactly ``frames_per_batch`` steps in workers that all act with the same
    weights.

    ::

        with MultiSyncCollector(["CartPole-v1"] * 4, policy, num_envs=8, frames_per_batch=2048) as collector:
            for batch in collector:  # TensorDict [4, 8, 64]
                loss = learn(batch)
                collector.update_policy_weights_()

    Workers act with copies of the policy; ``update_policy_weights_()`` sends them the optimizer's
    changes. They are idle while you train. The data equals that of ``Collector`` with the same
    ``create_env_fn``, options and seed. Save or send ``batch.clone()``: ``torch.save``, ``pickle``
    and queues take all columns for each column of a view.

    Raises:
        BadOption, UnknownOption: an option is wrong. No worker was started.
        UnsupportedEnv, EnvError: making an environment failed in a worker. All workers were ended.
        WorkerDied, WorkerHung: a worker died or hangs. Also raised by iteration.
    """

    def _schedule_kind(self) -> ScheduleKind:
        return SyncKind()


class MultiAsyncCollector(MultiCollector):
    """Collects batches of ``frames_per_batch`` steps, each from one group, as they are ready, also
    while you train.

    ::

        with MultiAsyncCollector(["CartPole-v1"] * 4, policy, num_envs=8, frames_per_batch=512) as collector:
            for batch in collector:  # TensorDict [8, 64]
                replay_buffer.extend(batch)
                ...

    Every group is at most two rollouts ahead; then its worker sleeps. A rollout acts with the
    newest weights at its start, so weights in a batch can be several publications old:
    ``stats().policy_lag`` counts them, ``max_policy_lag`` limits them. Changes by ``reset()`` and
    ``set_seed()`` take effect after the rollouts that have been started.
    """

    def _schedule_kind(self) -> ScheduleKind:
        return FirstReadyKind()


class AsyncCollector(MultiAsyncCollector):
    """``MultiAsyncCollector`` with one worker, which collects while you train.

    With ``replay_buffer=`` and ``start()`` it fills the buffer until ``async_shutdown()``, except
    during ``pause()``.
    """

    def _connect(self, made: ExitStack) -> Engine:
        envs = self.options.create_env_fn
        if (is_several(envs) and len(envs) > 1) or self.options.num_workers not in (
            None,
            1,
        ):
            raise BadOption(
                "AsyncCollector has one worker: give it one id or function, or use"
                " MultiAsyncCollector"
            )
        return super()._connect(made)
