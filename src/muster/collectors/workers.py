"""From a collector's options to its worker pool (on this machine or on nodes) and its schedule."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import numpy as np

from muster.cluster.node_pool import NodePool
from muster.cluster.nodes import Nodes
from muster.collectors.multi_options import CentralInference, PoolOptions, Restart
from muster.collectors.setup import factories_of, keywords_of, marks_valid, origins_of, worker_options
from muster.envs.build import is_environment
from muster.errors import BadOption
from muster.memory.shared import Arena
from muster.restore.pickling import dumps
from muster.weights.publish import PolicyWeights
from muster.workers.build import WorkerOptions
from muster.workers.config import PoolConfig, WorkerConfig, WorkerPlace
from muster.workers.first_ready import FirstReady
from muster.workers.inference import ServerConfig
from muster.workers.messages import GroupInfo
from muster.workers.requests import Call, LayOut
from muster.workers.schedule import Bundle
from muster.workers.supervision import Supervisor
from muster.workers.sync import Sync
from muster.workers.threads import GlobalStreams, Turns
from muster.workers.worker import Worker


def count_workers(create_env_fn: Any, num_workers: int | None) -> tuple[list[Any], int]:
    """Return the factories of all groups, and the number of workers for them."""
    factories = factories_of(create_env_fn)
    if not isinstance(create_env_fn, (list, tuple)):
        factories *= num_workers or 1
    for number, factory in enumerate(factories):
        if is_environment(factory):
            raise BadOption(
                f"create_env_fn[{number}] is an environment, which lives in this process: give an id, or a function "
                f"that makes one, for workers to call"
            )
    return factories, min(num_workers or len(factories), len(factories))


class Workers:
    """Starts the workers of a collector, and makes their schedule.

    Args:
        factories, count: see ``count_workers``.
        policy: policy that acts, or None.
        weights: weights of the policy.
        made: exit stack that ends the workers.
        alone: every bundle of groups fills batches of its own.
        nodes: nodes of the workers; None: they are on this machine.
        bundles: numbers of the groups that share a batch, if ``alone``; None: each group has its own batches.
    """

    def __init__(
        self,
        options: PoolOptions,
        factories: list[Any],
        count: int,
        policy: Any,
        weights: PolicyWeights,
        made: ExitStack,
        *,
        alone: bool,
        nodes: Nodes | None = None,
        bundles: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._options, self._weights, self._alone = options, weights, alone
        self._factories, self._policy = factories, policy
        self._count, self._nodes, self._bundles = count, nodes, bundles
        if isinstance(affinity := options.cpu_affinity, Sequence) and affinity != "auto" and len(affinity) != count:
            raise BadOption(f"cpu_affinity has CPUs for {len(affinity)} workers, and there are {count}: give all")
        self._turns = Turns() if options.in_threads and not alone else None
        if weights.lazy:
            self._materialise()
        parts = [part.tolist() for part in np.array_split(np.arange(len(factories)), count)]
        config = self._config(parts)
        if nodes is None:
            workers = Supervisor(config, weights.ticket, made)
            self.end, self._arena = workers.end, workers.arena
            infos = self._built(workers)
            self.pool = workers.pool(infos, self._place(infos))
            return
        self.end, self._arena = nodes.close, Arena.create("muster-slots")
        made.callback(self._arena.close)
        node_pool = NodePool(nodes, config, options.layout, apart=options.enough(len(factories)) is not None)
        infos = self._built(node_pool)
        self.pool = node_pool.pool(infos, self._place(infos))

    def schedule(self, lead: int) -> Sync | FirstReady:
        """Make the schedule. ``lead``: see ``FirstReady``."""
        options, infos = self._options, [counts.info for counts in self.pool.counters]
        one_slot = options.cat_dim is None and not self._alone
        parts = [list(range(len(infos)))] if one_slot else self._parts()
        limit = cast(int, options.slot_memory_limit) // len(parts)
        bundles = [Bundle(part, limit_bytes=limit, memory=self._arena) for part in parts]
        if self._alone:
            T = [0] * len(infos)
            for part in parts:
                for number in part:
                    T[number] = options.rows_per_batch(sum(infos[other].num_envs for other in part))
            weights, max_lag = self._weights, options.max_policy_lag
            return FirstReady(self.pool, bundles, T, max_lag=max_lag, publishes=lambda: weights.publishes, lead=lead)
        rows = options.rows_per_batch(self.pool.num_envs) if options.extend_buffer else 1
        streams = GlobalStreams() if options.in_threads else None
        return Sync(self.pool, bundles, [rows] * len(infos), enough=options.enough(len(infos)), streams=streams)

    def _built(self, workers: Supervisor | NodePool) -> list[GroupInfo]:
        workers.start()
        importlib.import_module("tensordict")  # for batches; takes seconds, while the workers start
        return workers.built()

    def _materialise(self) -> None:
        """Initialise lazy layers: a call in one worker determines the weights; all workers then start with these."""
        options = self._options
        with ExitStack() as made:
            probe: Supervisor | NodePool
            if self._nodes is None:
                probe = Supervisor(self._config([[0]]), None, made)
            else:
                probe = NodePool(self._nodes, self._config([[0]]), options.layout, apart=False)
                made.callback(probe.end)
            (info,) = self._built(probe)
            pool = probe.pool([info], WorkerPlace({0: 0}, info.num_envs, False, None))
            pool.call(LayOut("policy", {0: 1}))
            (weights,) = pool.call(Call(Worker.weights))
            pool.close()
        self._weights.materialise(weights)

    def _place(self, infos: Sequence[GroupInfo]) -> WorkerPlace:
        """Return the places of all groups."""
        options, sizes = self._options, [info.num_envs for info in infos]
        sharing = [sum(sizes)]
        if self._alone:
            sharing = [sum(sizes[number] for number in part) for part in self._parts()]
        masks = any([marks_valid(options, number) for number in sorted(set(sharing))])  # noqa: C419 (each may warn)
        masks |= options.enough(len(sizes)) is not None or options.on_failure == "drop"
        firsts = dict(enumerate(itertools.accumulate(sizes[:-1], initial=0)))
        return WorkerPlace(firsts, sum(sizes), masks, options.seed)

    def _parts(self) -> Sequence[Sequence[int]]:
        """Return the groups that share a slot, if not all groups share one."""
        return [[number] for number in range(len(self._factories))] if self._bundles is None else self._bundles

    def _config(self, parts: Sequence[Sequence[int]]) -> PoolConfig:
        """Return the config of a worker pool with these groups. Values for processes are pickled."""
        options, threads = self._options, self._options.in_threads
        served = options.server is not None and self._policy is not None  # else actions are random
        served &= not self._weights.lazy
        told = worker_options(options, self._policy, shared_frames=not self._alone)
        in_worker = None if threads else options.num_sub_threads
        told = dataclasses.replace(told, rollout=dataclasses.replace(told.rollout, num_threads=in_worker))
        factories, kwargs = self._factories, list(keywords_of(options.create_env_kwargs, len(self._factories)))
        origins: list[Any] = list(origins_of(factories, options))
        makes_policy = options.policy_factory is not None
        policy = dumps(options.policy_factory, "policy_factory") if makes_policy else dumps(self._policy, "policy")
        given = dumps if not threads else lambda value, what: value
        if not threads:
            indices = reversed(range(len(factories)))
            once = {id(factories[i]): dumps(factories[i], f"create_env_fn[{i}]") for i in indices}
            factories = [once[id(factory)] for factory in factories]
        options_of_worker = given(_without_torch(told) if served else told, "the options")
        workers = [
            WorkerConfig(
                index,
                groups,
                [factories[number] for number in groups],
                given([kwargs[number] for number in groups], "create_env_kwargs"),
                b"",
                makes_policy,
                options_of_worker,
                policy_turns=self._turns,
                served_by=self._count if served else None,
                threads=None if threads or served else options.num_sub_threads,
                stoppable=threads or options.enough(len(factories)) is not None,
                in_thread=threads,
            )
            for index, groups in enumerate(parts)
        ]
        if self._nodes is not None:
            origins = [dumps(origin, f"create_env_fn[{number}]") for number, origin in enumerate(origins)]
        return PoolConfig(
            workers,
            policy,
            self._count,
            self._server_config(options.server, told) if served and options.server else None,
            [origins[number] for groups in parts for number in groups],
            options.max_frames_per_traj,
            options.crash_dir,
            "restart" if isinstance(options.on_failure, Restart) else options.on_failure,
            options.timeouts,
            None if options.restart is None else options.restart.max_restarts,
            options.start_method,
            options.cpu_affinity,
        )

    def _server_config(self, server: CentralInference, told: WorkerOptions) -> ServerConfig:
        options, away = self._options, self._nodes is not None
        wait = 0.0 if self._alone and server.max_wait_s is None else server.max_wait_s
        return ServerConfig(
            dumps(told, "the options") if away else told,
            server.alternating,
            server.max_batch,
            wait,
            options.num_sub_threads,
            exclusive=away or not self._alone,
            keeps_streams=not options.in_threads,
        )


def _without_torch(told: WorkerOptions) -> WorkerOptions:
    """Return the options of workers that do not act."""
    tracks = bool(told.rollout.track_policy_version)
    return dataclasses.replace(
        told,
        env_device=None,
        policy_device=None,
        compile_policy=None,
        cudagraph_policy=None,
        rollout=dataclasses.replace(told.rollout, track_policy_version=tracks),
    )
