"""Workers of a collector, made from its options: started, told their places, and put under supervision."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import numpy as np

from muster.cluster.node import Nodes
from muster.cluster.wire import NodeSetup
from muster.collectors.multi_options import MultiOptions
from muster.collectors.setup import keywords_of, makers_of, marks_valid, worker_options
from muster.envs.build import is_environment
from muster.errors import BadOption
from muster.memory.shared import Arena
from muster.restore.crash_report import CrashDirectory, Maker
from muster.restore.pickling import dumps
from muster.weights.publish import PolicyWeights
from muster.workers.build import WorkerOptions
from muster.workers.channel import WakeUp
from muster.workers.config import Columns, WorkerConfig, WorkerPlace
from muster.workers.crash_notes import CrashNotes
from muster.workers.first_ready import FirstReady
from muster.workers.inference import InferenceServer, ServerConfig
from muster.workers.launch import in_process
from muster.workers.messages import GroupInfo
from muster.workers.pool import WorkerPool
from muster.workers.proxy import WorkerHost, WorkerProxy
from muster.workers.requests import LayOut, Weights
from muster.workers.schedule import Bundle
from muster.workers.supervision import Supervisor
from muster.workers.sync import Sync
from muster.workers.threads import GlobalStreams, Turns, in_thread


def count_workers(create_env_fn: Any, num_workers: int | None) -> tuple[list[Any], int]:
    """The makers of all groups, and how many workers there are for them."""
    makers = makers_of(create_env_fn)
    if not isinstance(create_env_fn, (list, tuple)):
        makers *= num_workers or 1
    for number, maker in enumerate(makers):
        if is_environment(maker):
            raise BadOption(
                f"create_env_fn[{number}] is an environment, which lives in this process: give an id, or a function "
                f"that makes one, for workers to call"
            )
    return makers, min(num_workers or len(makers), len(makers))


class Workers:
    """Starts the workers of a collector, and makes the schedule that they work by.

    Args:
        makers, count: see ``count_workers``.
        policy: that acts, or None.
        weights: of the policy.
        made: ends the workers if anything fails later.
        alone: every bundle of groups fills batches of its own.
        nodes: where workers are; None: on this machine.
        bundles: numbers of the groups that share a batch, where ``alone``; None: each has its own.
    """

    def __init__(
        self,
        options: MultiOptions,
        makers: list[Any],
        count: int,
        policy: Any,
        weights: PolicyWeights,
        made: ExitStack,
        *,
        alone: bool,
        nodes: Nodes | None = None,
        bundles: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._nodes, self._bundles = nodes, bundles
        self._options, self._makers, self._policy, self._weights, self._alone = options, makers, policy, weights, alone
        self.arena = Arena.create("muster-slots")
        made.callback(self.arena.close)
        self._notes = CrashNotes(CrashDirectory(options.crash_dir))
        self._supervisor = Supervisor(
            on_failure=options.on_failure,
            timeouts=options.timeouts,
            max_restarts=options.max_restarts,
            notes=self._notes,
        )
        self._prepare_threads(made)
        self._server: InferenceServer | None = None
        self._served = options.inference == "server" and policy is not None  # else actions are drawn at random
        self._prepare(count)
        if weights.lazy:
            self._materialise(made)
            self._prepare(count)
        if self._served and nodes is None:
            *_, pickled, told = self._payloads
            config = self._server_config(range(count), told, exclusive=not alone)
            self._server = self._supervisor.server = InferenceServer(config, pickled, weights.ticket(0), count)
            made.callback(self._server.close)
        parts = [part.tolist() for part in np.array_split(np.arange(len(makers)), count)]
        self._handles = [self._handle(index, part, count) for index, part in enumerate(parts)]
        self._supervisor.handles = self._handles
        made.callback(self.end)
        infos = self._start()
        self.pool = WorkerPool(self._handles, infos, self._supervisor)
        self.pool.elastic = self._supervisor.elastic = self._is_elastic
        for number, account in enumerate(self.pool.accounts):
            account.late = self.pool.handle(number).absent
        self._supervisor.accounts = self.pool.accounts
        if self._server is not None:
            self._server.open(self._handles, dict(enumerate(infos)))
            self.pool.server = self._server
        elif self._served:
            self.pool.server = nodes
        self._assign()

    def end(self) -> None:
        """Kill what is left of them, and end the server."""
        for handle in self._handles:
            handle.end()
        if self._server is not None:
            self._server.close()

    def schedule(self) -> Sync | FirstReady:
        """Who works when."""
        options, infos = self._options, [account.info for account in self.pool.accounts]
        one_slot = options.cat_dim is None and not self._alone
        parts = [list(range(len(infos)))] if one_slot else self._parts()
        limit = cast(int, options.slot_memory_limit) // len(parts)
        bundles = [Bundle(part, limit_bytes=limit, memory=self.arena) for part in parts]
        if self._alone:
            T = [0] * len(infos)
            for part in parts:
                for number in part:
                    T[number] = options.rows_per_batch(sum(infos[other].num_envs for other in part))
            weights, max_lag = self._weights, options.max_policy_lag
            return FirstReady(self.pool, bundles, T, max_lag=max_lag, publishes=lambda: weights.publishes)
        rows = options.rows_per_batch(self.pool.num_envs) if options.extend_buffer else 1
        streams = GlobalStreams() if options.backend == "threads" else None
        return Sync(self.pool, bundles, [rows] * len(infos), enough=options.enough(len(infos)), streams=streams)

    def _materialise(self, made: ExitStack) -> None:
        """Lazy layers: a worker's first call shows what weights there are; all workers then begin with these."""
        probe = self._handle(0, [0], 1)
        self._supervisor.handles = [probe]
        made.callback(probe.end)
        probe.start()
        (info,) = self._supervisor.built(probe)
        probe.assign(WorkerPlace([0], info.num_envs, False, None))
        probe.call(LayOut(Columns("policy", [1])))
        self._weights.materialise(probe.call(Weights()))
        probe.close()
        if self._nodes is not None:
            self._nodes.end_sessions()  # what they were told first has changed

    @property
    def _is_elastic(self) -> bool:
        """Nodes may come later, and go."""
        return self._nodes is not None and self._nodes.enough is not None

    def _start(self) -> list[GroupInfo]:
        """Let workers make their environments."""
        for handle in self._handles:
            handle.start()
        importlib.import_module("tensordict")  # for batches; it takes seconds, and workers are busy meanwhile
        if self._is_elastic:
            return self._infos_of_enough()
        infos: list[GroupInfo] = [info for handle in self._handles for info in self._supervisor.built(handle)]
        return infos

    def _infos_of_enough(self) -> list[GroupInfo]:
        """As soon as enough nodes are there; the groups of all others are taken to be like one of theirs."""
        nodes, makers = self._nodes, self._makers
        assert nodes is not None

        def lack(missing: list[WorkerProxy]) -> int:
            away = {nodes.of_leaf[handle.index] for handle in missing}
            return (nodes.enough or 0) - (len(nodes.nodes) - len(away))

        self._supervisor.wait_for_enough(lack)
        known: dict[int, GroupInfo] = {}
        for handle in self._handles:
            known |= zip(handle.groups, handle.infos or (), strict=False)
        first = next(iter(known.values()))
        alike = {id(makers[number]): info for number, info in known.items()}
        return [known.get(number) or alike.get(id(maker), first) for number, maker in enumerate(makers)]

    def _assign(self) -> None:
        """Tell workers where they stand among all."""
        options, pool = self._options, self.pool
        sharing = [pool.num_envs]
        if self._alone:
            sharing = [sum(pool.accounts[n].info.num_envs for n in part) for part in self._parts()]
        masks = any([marks_valid(options, number) for number in sorted(set(sharing))])  # noqa: C419 (each may warn)
        masks |= options.enough(len(pool.accounts)) is not None or options.on_failure == "drop"
        kwargs = keywords_of(options.create_env_kwargs, len(self._makers))
        device = options.devices["env_device"]
        origins = [Maker(m, options.num_envs, k, device) for m, k in zip(self._makers, kwargs, strict=True)]
        infos, ids = zip(*((account.info, account.env_ids) for account in pool.accounts), strict=True)
        self._notes.open(origins, infos, ids, options.max_frames_per_traj)
        self._notes.seeded(range(len(infos)), options.seed)
        for handle in sorted(self._handles, key=lambda handle: not handle.absent):  # they may come from here on
            firsts = [int(pool.accounts[number].env_ids[0]) for number in handle.groups]
            handle.assign(WorkerPlace(firsts, pool.num_envs, masks, options.seed))

    def _in_worker(self, rollout: Any) -> Any:
        threads = self._options.num_sub_threads if self._options.backend == "processes" else None
        return dataclasses.replace(rollout, num_threads=threads)

    def _handle(self, index: int, groups: list[int], count: int) -> WorkerProxy:
        options = self._options
        makers, kwargs, policy, told = self._payloads
        threads = options.backend == "threads"
        served = self._served and not self._weights.lazy
        kwargs = [kwargs[number] for number in groups]
        given = dumps if not threads else lambda value, what: value
        config = WorkerConfig(
            index,
            groups,
            [makers[number] for number in groups],
            given(kwargs, "create_env_kwargs"),
            policy if self._nodes is None else b"",  # a node has it already
            options.policy_factory is not None,
            given(_without_torch(told) if served else told, "the options"),
            policy_turns=self._policy_turns,
            served_by=count if served else None,
            threads=None if threads or served else options.num_sub_threads,
            stoppable=threads or options.enough(len(self._makers)) is not None,
            in_thread=threads,
        )
        takes_weights = not (served or self._weights.lazy or self._nodes is not None)
        host = WorkerHost(
            self._starter(index),
            self.arena,
            partial(self._weights.ticket, index) if takes_weights else None,
            self._supervisor.timeout("close"),
            server=self._server,
            remote=self._nodes is not None,
            elastic=self._is_elastic,
            where=str if self._nodes is None else partial(self._nodes.where, index),
        )
        return WorkerProxy(config, host, self._supervisor)

    def _starter(self, index: int) -> Callable[[str, bool], tuple[Any, Any, Any]]:
        if self._nodes is not None:
            return self._nodes.launch(index)
        if self._wake_up is not None:
            return in_thread(self._wake_up)
        return in_process(self._options.start_method, light=self._server is not None)

    @property
    def _max_wait_s(self) -> float | None:
        wait = self._options.max_wait_s
        return 0.0 if self._alone and wait is None else wait

    def _parts(self) -> Sequence[Sequence[int]]:
        """Groups that share a slot, where not all do."""
        return [[number] for number in range(len(self._makers))] if self._bundles is None else self._bundles

    def _prepare(self, count: int) -> None:
        """What workers and nodes will be told first."""
        self._payloads = self._pickle()
        options, (_, _, policy, told), nodes = self._options, self._payloads, self._nodes
        if nodes is None:
            return
        setup = NodeSetup(
            0,
            count,
            tuple(sys.path),
            options.start_method,
            self._server_config((), dumps(told, "the options")) if self._served else None,
            hashlib.sha256(policy).digest(),
            None if nodes.buffer is None else dumps(nodes.buffer, "replay_buffer"),
            options.layout,
        )
        nodes.prepare([setup.of(number, nodes.leaves(number)) for number in range(len(nodes.nodes))], policy)

    def _server_config(self, workers: Sequence[int], told: Any, *, exclusive: bool = True) -> ServerConfig:
        options = self._options
        return ServerConfig(
            workers,
            told,
            options.policy_factory is not None,
            options.alternating,
            options.max_batch,
            self._max_wait_s,
            options.num_sub_threads,
            self._supervisor.timeout("policy"),
            exclusive,
            keeps_streams=not self._wake_up,
        )

    def _prepare_threads(self, made: ExitStack) -> None:
        if self._nodes is not None:
            self._wake_up = None
            self._supervisor.wake_up = self._nodes.wake_up
            self._policy_turns = None
            return
        self._wake_up = self._supervisor.wake_up = WakeUp() if self._options.backend == "threads" else None
        self._policy_turns = Turns() if self._wake_up is not None and not self._alone else None
        if self._wake_up is not None:
            made.callback(self._wake_up.close)

    def _pickle(self) -> tuple[list[Any], list[Any], bytes, WorkerOptions]:
        """Makers and keywords by group, the policy, and the options. Makers go to threads as they are."""
        options = self._options
        makers = list(self._makers)
        if self._wake_up is None:
            indices = reversed(range(len(makers)))
            once = {id(makers[i]): dumps(makers[i], f"create_env_fn[{i}]") for i in indices}
            makers = [once[id(maker)] for maker in makers]
        kwargs = list(keywords_of(options.create_env_kwargs, len(makers)))
        factory = options.policy_factory
        policy = dumps(self._policy, "policy") if factory is None else dumps(factory, "policy_factory")
        told = worker_options(options, self._policy, shared_frames=not self._alone)
        return makers, kwargs, policy, dataclasses.replace(told, rollout=self._in_worker(told.rollout))


def _without_torch(told: WorkerOptions) -> WorkerOptions:
    """What workers need to know that do not act."""
    tracks = bool(told.rollout.track_policy_version)
    return dataclasses.replace(
        told,
        env_device=None,
        policy_device=None,
        compile_policy=None,
        cudagraph_policy=None,
        rollout=dataclasses.replace(told.rollout, track_policy_version=tracks),
    )
