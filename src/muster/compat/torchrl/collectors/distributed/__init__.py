"""TorchRL 0.14's collectors for many machines: the names of ``torchrl.collectors.distributed``.

::

    from muster.compat.torchrl.collectors.distributed import RayCollector  # was: torchrl.collectors.distributed

docs/torchrl.md describes the differences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchrl.collectors.distributed import RayEvalWorker
from torchrl.envs import EnvBase

import muster.collectors.clusters as clusters
from muster.cluster.submitit import DEFAULT_SLURM_CONF
from muster.cluster.submitit_delayed import submitit_delayed_launcher
from muster.collectors.base import made_updater
from muster.collectors.batch_options import Trajectories
from muster.collectors.references import accept_remote_rref_udf_invocation
from muster.collectors.signatures import OF_TORCHRL, passes_on
from muster.compat.torchrl.node_collectors import (
    CollectorActor,
    Given,
    NodeCollector,
    SettableHook,
    Views,
    calls_of,
    on_nodes,
    stats_of_node,
    stats_of_nodes,
)
from muster.compat.torchrl.policies import ActedOn, CopiedEnv, check_graph
from muster.compat.torchrl.services import (
    ServedModule,
    connect_learner,
    is_service,
    served_options,
    update_service,
)
from muster.compat.torchrl.updaters import DistributedWeightUpdater, RPCWeightUpdater
from muster.compat.torchrl.weight_names import flattened
from muster.errors import BadOption
from muster.keys import MASK, POLICY_VERSION, TRAJ_IDS
from muster.observing.stats import CollectorStats
from muster.rollout.options import Execution
from muster.utils.attributes import resolve
from muster.utils.integers import integer

if TYPE_CHECKING:
    from muster.compat.torchrl.learner_weights import LearnerWeights

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "RayEvalWorker",
    "submitit_delayed_launcher",
]

# an option of TorchRL's collectors, which nodes get in collector_kwargs
AUTO_REGISTER = "auto_register_policy_transforms"
# arguments that are attributes of TorchRL's collectors, as they were given
AS_GIVEN = (
    *("backend", "launcher", "num_workers_per_collector", "replay_buffer"),
    *("slurm_kwargs", "tcp_port", "trust_policy", "update_after_each_batch"),
)
# arguments of which these have a list, with one per node
PER_NODE = (
    *("device", "storing_device", "env_device", "policy_device"),
    *("collector_kwargs", "policy_factory"),
)
# replay buffers of Muster's that RayCollector takes, besides TorchRL's on Ray
REACHABLE = frozenset({"RayBuffer", "ReplayMemory"})


@dataclass(frozen=True, kw_only=True)
class WithoutEffect:
    """Arguments of TorchRL's collectors that have no effect here.

    Attributes:
        local_init_rb, no_cuda_sync, use_buffers: no effect.
    """

    local_init_rb: bool | None = None
    no_cuda_sync: bool | None = False
    use_buffers: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ShownAsInTorchRL:
    """Arguments whose defaults are written in another way in TorchRL, where -1 means None.

    Attributes:
        init_random_frames, max_frames_per_traj, split_trajs: as in ``muster.Collector``.
    """

    init_random_frames: int | None = -1
    max_frames_per_traj: int | None = -1
    split_trajs: bool | None = False


class _OverNodes:
    """Mixin: TorchRL's arguments and public attributes.

    A policy beside a ``policy_factory`` stays in this process, and nodes get its weights.
    """

    _kept_policy: Any = None  # that policy
    _joins = False  # TorchRL concatenates the batches of the nodes; else it stacks them
    _lead = 1  # as TorchRL, which requests a node's next batch when it delivers the one before

    def _init_as_torchrl(
        self,
        create_env_fn: Any,
        policy: Any,
        frames_per_batch: int,
        options: dict[str, Any],
    ) -> None:
        self._pre_hook = SettableHook(options.get("pre_collect_hook"))
        options = {**options, "pre_collect_hook": self._pre_hook}
        made_by_nodes = policy is not None and options.get("policy_factory") is not None
        options, adds_transforms = _without_transforms(options)
        told = _translated(create_env_fn, frames_per_batch, options, joins=self._joins)
        several = isinstance(create_env_fn, (list, tuple))
        make_policy = told.get("policy_factory") or (lambda: policy)
        given = [
            CopiedEnv(make) if isinstance(make, EnvBase) else make
            for make in (create_env_fn if several else [create_env_fn])
        ]
        # a service has no policy here that would show the form of actions
        shown = not isinstance(policy, ServedModule)
        makers = [make_policy] * len(given)
        if isinstance(make_policy, (list, tuple)):
            makers = list(make_policy)[: len(given)]
            makers += makers[:1] * (
                len(given) - len(makers)
            )  # Muster refuses such a list
        envs = [
            ActedOn(make, maker, adds_transforms) if shown and callable(make) else make
            for make, maker in zip(given, makers, strict=True)
        ]
        super().__init__(  # type: ignore[call-arg]
            envs if several else envs[0], None if made_by_nodes else policy, **told
        )
        self._show(create_env_fn, frames_per_batch, options)
        if made_by_nodes:
            self._kept_policy = policy
            self.update_policy_weights_()

    def _show(
        self, create_env_fn: Any, frames_per_batch: int, options: dict[str, Any]
    ) -> None:
        """Set public attributes of TorchRL's collectors to the given arguments; ``PER_NODE`` are lists
        with one per node.
        """
        nodes = _nodes(create_env_fn, options)
        self.num_workers = self.num_collectors = nodes
        self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
        self.total_frames = options.get("total_frames", -1)
        # TorchRL's trainers do not optimize before
        self.init_random_frames = max(0, options.get("init_random_frames") or 0)
        self.postproc = options.get("postproc")
        self.split_trajs = bool(options.get("split_trajs"))
        self.verbose = bool(options.get("verbose"))
        self.trajs_per_batch = options.get("trajs_per_batch")
        self.trajs_per_write = options.get("trajs_per_write")
        self.traj_format = options.get("traj_format") or "padded"
        parameters = inspect.signature(type(self)).parameters
        for name in parameters.keys() & AS_GIVEN:
            setattr(self, name, options.get(name, parameters[name].default))
        for name in PER_NODE:
            given = options.get(name)
            setattr(
                self,
                name,
                list(given) if isinstance(given, (list, tuple)) else [given] * nodes,
            )

    def update_policy_weights_(
        self, policy_or_weights: Any = None, **options: Any
    ) -> None:
        """Publish weights as ``muster.Collector.update_policy_weights_``.

        Dicts may be nested, as TensorDicts are.
        """
        if (
            policy_or_weights is None
            and not {"weights", "policy", "weights_dict"} & options.keys()
        ):
            policy_or_weights = self._kept_policy
        if options.get("weights") is not None:
            options["weights"] = flattened(options["weights"])
        if options.get("weights_dict") is not None:
            options["weights_dict"] = {
                name: flattened(own) for name, own in options["weights_dict"].items()
            }
        super().update_policy_weights_(flattened(policy_or_weights), **options)  # type: ignore[misc]

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Use weights as ``muster.Collector.receive_weights``.

        Dicts may be nested, as TensorDicts are.
        """
        super().receive_weights(  # type: ignore[misc]
            flattened(policy_or_weights), weights=flattened(weights), policy=policy
        )

    # --- hooks, the weight updater, numbers -------------------------------------------------------

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Function that is called before each batch; None: there is none. Can be set."""
        return self._pre_hook.function

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._pre_hook.replace(hook)

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """Function that is called with each batch; None: there is none. Can be set.

        Raises:
            BadOption: no batch passes through this process, so the hook would not be called.
        """
        hook: Callable[[Any], Any] | None = self.options.post_collect_hook  # type: ignore[attr-defined]
        return hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self.set_post_collect_hook(hook)  # type: ignore[attr-defined]

    @property
    def weight_updater(self) -> Any:
        """The weight updater; None: there is none. Can be set, to an updater or its class."""
        return self._updater

    @weight_updater.setter
    def weight_updater(self, updater: Any) -> None:
        updater = made_updater(updater)
        if hasattr(updater, "register_collector"):
            updater.register_collector(self)
        self._updater = updater

    @property
    def collected_frames(self) -> int:
        """Number of frames that were delivered."""
        return self.muster_stats().frames

    def muster_stats(self) -> CollectorStats:
        """Return the numbers of ``muster.Collector.stats``."""
        stats: CollectorStats = super().stats()  # type: ignore[misc]
        return stats

    def stats(
        self, workers: Views = "aggregate", *, timeout: float | None = 10.0
    ) -> dict[str, Any]:
        """Return a snapshot of the numbers, with TorchRL's names; also after ``shutdown``.

        Args:
            workers: "aggregate": of all nodes together. "per_worker": of each node, as
                ``"worker_0/frames"``. "both": both.
            timeout: no effect: nodes send their numbers with their results.
        """
        known = self.muster_stats()
        shared: dict[str, Any] = {
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "stepped_frames": known.executed,
            "completed_frames": known.completed,
            "completed_trajectories": known.episodes,
            "pending_frames": known.in_flight,
            "written_frames": known.written,
        }
        if self.total_frames is not None and self.total_frames >= 0:
            shared["total_frames"] = self.total_frames
            shared["completed"] = known.frames >= self.total_frames
        return stats_of_nodes(known, self._leaves, workers, shared)

    # --- calls ------------------------------------------------------------------------------------

    def get_distant_attr(self, attr: str) -> Any:
        """Return the attribute of this collector at a path, such as "policy.module[0].weight".

        Raises:
            BadOption: the path does not exist.
        """
        return resolve(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of this collector once for each entry of the lists.

        Raises:
            BadOption: the path does not exist or cannot be called, or the lists have different
                lengths.
        """
        method = resolve(self, method_name)
        if not callable(method):
            raise BadOption(
                f"{method_name!r} is {type(method).__name__}, which cannot be called"
            )
        return [
            method(*args, **kwargs)
            for args, kwargs in calls_of(list_of_args, list_of_kwargs)
        ]

    @property
    def _leaves(self) -> dict[int, list[int]]:
        """The numbers of the workers of each node."""
        leaves: dict[int, list[int]] = {}
        for leaf, node in enumerate(self._of_leaf):  # type: ignore[attr-defined]
            leaves.setdefault(node, []).append(leaf)
        return leaves


class DistributedCollector(_OverNodes, clusters.DistributedCollector):  # type: ignore[misc]
    """``muster.DistributedCollector`` with TorchRL's ``frames_per_batch``: with ``sync=True``, the
    sum over all nodes.

    Args:
        update_interval: publish the policy's weights to a node after this number of its batches.
            None: no effect.
        **options: TorchRL's arguments, and those of ``muster.DistributedCollector``.

    Raises:
        BadOption: an option is wrong; or a list has different values of an option that all nodes
            share.
    """

    @passes_on(clusters.DistributedOptions, WithoutEffect, ShownAsInTorchRL)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        update_interval: int | None = None,
        **options: Any,
    ) -> None:
        self._init_as_torchrl(
            create_env_fn,
            policy,
            frames_per_batch,
            _published_every(update_interval, options),
        )
        self.update_interval = update_interval


class DistributedSyncCollector(DistributedCollector):
    """TorchRL's older name of ``DistributedCollector(sync=True)``; by default it publishes after
    every batch.
    """

    @passes_on(clusters.DistributedOptions, WithoutEffect, ShownAsInTorchRL)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        update_interval: int = 1,
        **options: Any,
    ) -> None:
        if "sync" in options:
            raise TypeError(
                "DistributedSyncCollector has no argument 'sync': use DistributedCollector"
            )
        if options.get("max_weight_update_interval", -1) > -1:
            raise BadOption(
                "max_weight_update_interval is for first-ready batches: give update_interval"
                " instead"
            )
        super().__init__(
            create_env_fn, policy, update_interval=update_interval, sync=True, **options
        )


@accept_remote_rref_udf_invocation
class RPCCollector(_OverNodes, clusters.RPCCollector):  # type: ignore[misc]
    """``muster.RPCCollector`` with TorchRL's batches: with ``sync=True``, ``frames_per_batch`` over
    all nodes, joined.

    ``DistributedCollector`` and ``muster.RPCCollector`` document the arguments.
    """

    _joins = True

    @passes_on(clusters.RPCOptions, WithoutEffect, ShownAsInTorchRL)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        **options: Any,
    ) -> None:
        self._init_as_torchrl(create_env_fn, policy, frames_per_batch, options)


class RayCollector(_OverNodes, clusters.RayCollector):  # type: ignore[misc]
    """``muster.RayCollector`` with TorchRL's ``frames_per_batch``: with ``sync=True``, the sum over
    all actors.

    Args:
        use_env_creator: no effect (an argument of TorchRL); environment factories are pickled
            unchanged.
        no_cuda_sync: no effect (an argument of TorchRL).
        **options: TorchRL's arguments, and those of ``muster.RayCollector``. If only
            ``collector_kwargs`` or ``remote_configs`` is a list, its length is the number of
            actors.

    Raises:
        TypeError: the actors cannot write into the replay buffer.
    """

    _service: Any = None  # the InferenceServer that has the policy
    _learner_scheme: Any = None  # over which a learner sends weights
    _learner: LearnerWeights | None = None  # of a policy that no service has

    @passes_on(clusters.RayOptions, WithoutEffect, ShownAsInTorchRL)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        use_env_creator: bool = False,
        no_cuda_sync: bool | None = None,
        **options: Any,
    ) -> None:
        del use_env_creator, no_cuda_sync
        _check_reachable(options.get("replay_buffer"))
        lists = [options.get(name) for name in ("collector_kwargs", "remote_configs")]
        counts = [len(given) for given in lists if isinstance(given, list)]
        if (
            options.get("num_collectors") is None
            and counts
            and not isinstance(create_env_fn, list)
        ):
            options["num_collectors"] = max(counts)
        self._service = policy if is_service(policy) else None
        if self._service is not None:
            options = served_options(self._service, options)
            policy = ServedModule(policy)
        self._init_as_torchrl(create_env_fn, policy, frames_per_batch, options)

    def update_policy_weights_(
        self, policy_or_weights: Any = None, **options: Any
    ) -> None:
        """Publish weights as ``muster.Collector.update_policy_weights_``.

        If the policy is an ``InferenceServer``, it gets the weights.

        Raises:
            BadOption: the learner of ``learner_backend="ray"`` publishes the weights.
        """
        if self._learner_scheme is not None:
            raise BadOption(
                "update_policy_weights_: the learner of learner_backend='ray' publishes the weights"
                " of this policy. Leave the call out"
            )
        if self._service is None:
            super().update_policy_weights_(policy_or_weights, **options)
            return
        self._check_open()
        by_model = options.get("weights_dict") or {}
        given = [policy_or_weights, options.get("weights"), options.get("policy")]
        given.append(by_model.get(options.get("model_id") or "policy"))
        update_service(
            self._service, next((one for one in given if one is not None), None)
        )

    def _learner_weight_sync(self, *, new_generation: bool = False) -> Any:
        """Return the scheme over which the learner of ``learner_backend="ray"`` sends weights.

        TorchRL's trainers call this. From then on, each batch has the newest weights that the
        learner has sent before it.

        Args:
            new_generation: there are other learners than at the last call, which connect again.

        Raises:
            BadOption: the policy has no weights, or an option publishes others.
            WorkerDied: the actor that is to receive the weights has ended.
            CollectorTimeout: it does not answer.
        """
        self._check_open()
        if self._learner_scheme is None or new_generation:
            if self._service is not None:
                target = self._service._actor
            else:
                target = self._receiving_learner().actor
            self._learner_scheme = connect_learner(target)
        return self._learner_scheme

    def _receiving_learner(self) -> LearnerWeights:
        """Return what receives the weights of the policy, made by the first call."""
        if self._learner is None:
            if self.options.update_at_each_batch or self._longest >= 0:
                raise BadOption(
                    "learner_backend='ray' publishes the weights of this policy. Leave"
                    " update_after_each_batch and max_weight_update_interval out"
                )
            from muster.compat.torchrl.learner_weights import LearnerWeights

            kept = self._kept_policy
            self._learner = LearnerWeights(self.policy if kept is None else kept)
        return self._learner

    def _before_batch(self) -> None:
        super()._before_batch()
        if self._learner is not None and (new := self._learner.take()) is not None:
            self._weights.publish_all([(new.weights, None)], version=new.version)

    def _release(self) -> None:
        if self._learner is not None:
            self._learner.close()
        super()._release()

    # --- the collectors of the actors -------------------------------------------------------------

    @property
    def remote_collectors(self) -> list[CollectorActor]:
        """The collectors of the actors, whose methods are called as those of Ray's actors:
        ``ray.get(collector.remote_collectors[0].get_distant_attr.remote("env.spec"))``.

        Empty after ``stop_remote_collectors`` and ``shutdown``.
        """
        return (
            []
            if self._closed
            else [CollectorActor(NodeCollector(self, i)) for i in self._leaves]
        )

    def local_policy(self) -> Any:
        """Return the policy of this process."""
        kept = self._kept_policy if self._service is None else self._service
        return self.policy if kept is None else kept

    def stop_remote_collectors(self) -> None:
        """Shut down, without raising errors of actors."""
        self.shutdown(raise_on_error=False)

    def add_collectors(self, *args: Any, **kwargs: Any) -> None:
        """Not available: the number of actors is fixed.

        Raises:
            BadOption: always.
        """
        raise BadOption(
            f"add_collectors: this collector has {self.num_collectors} actors, which were placed"
            " when it was made. Pass num_collectors= for more; with min_nodes= it begins before all"
            " of them are placed"
        )

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a function by its path from the collector of each actor, such as "env.render",
        "policy.reset_noise" or "reset".

        Args:
            method_name: the path.
            list_of_args, list_of_kwargs: one entry per actor.

        Raises:
            BadOption: the path does not exist, or a list has not one entry per actor.
        """
        calls = calls_of(list_of_args, list_of_kwargs, self.num_collectors)
        return self.on_nodes(method_name, dict(enumerate(calls)))

    def get_distant_attr(self, attr: str) -> list[Any]:
        """Return the attribute at a path from the collector of each actor, such as "worker_idx" or
        "policy.module[0].weight".
        """
        return self.on_nodes(attr, dict.fromkeys(self._leaves))

    def on_nodes(self, path: str, calls: Mapping[int, Given | None]) -> list[Any]:
        """Follow a path from the collectors of some actors.

        Args:
            path: see ``map_fn``.
            calls: the arguments by number of the actor; None: return what is at the path.
        """
        self._check_open()
        return on_nodes(self, path, calls, self._leaves, self._ask)

    def env_ids_of(self, node: int) -> list[int]:
        """Return the global numbers of the environments of an actor."""
        workers = self.muster_stats().workers
        return [env for leaf in self._leaves[node] for env in workers[leaf].env_ids]

    def stats_of(self, node: int) -> dict[str, Any]:
        """Return the numbers of an actor."""
        workers = self.muster_stats().workers
        return stats_of_node([workers[leaf] for leaf in self._leaves[node]])

    def shutdown(  # type: ignore[override]
        self, timeout: float | None = None, shutdown_ray: bool = False, **options: Any
    ) -> None:
        """Shut down as ``muster.RayCollector.shutdown``, which documents ``options``.

        Args:
            timeout: seconds to wait for the current batch of the background thread; None: no limit.
            shutdown_ray: also disconnect this process from Ray, which ends a cluster that it
                started.
        """
        super().shutdown(timeout, **options)
        if shutdown_ray:
            import ray

            ray.shutdown()

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """End the background thread after its current batch, and shut down.

        Raises the error of the thread.
        """
        super().async_shutdown()
        if shutdown_ray:
            self.shutdown(shutdown_ray=True)


def _check_reachable(replay_buffer: Any) -> None:
    """Check that actors can write into a replay buffer, as TorchRL does.

    Raises:
        TypeError: only this process can.
    """
    serves = getattr(replay_buffer, "service_backend", None) == "ray"
    ours = {cls.__name__ for cls in type(replay_buffer).__mro__} & REACHABLE
    if replay_buffer is None or serves or ours:
        return
    raise TypeError(
        f"replay_buffer is a {type(replay_buffer).__name__} of this process, which cannot be"
        " shared with distant Ray actors: use ReplayBuffer(..., service_backend='ray') or"
        " muster.RayBuffer. muster.RayCollector takes any buffer: its batches then pass through"
        " this process"
    )


def _without_transforms(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options without ``auto_register_policy_transforms`` of ``collector_kwargs``, and
    whether it is True.

    Raises:
        BadOption: it differs between nodes.
    """
    of_nodes = options.get("collector_kwargs")
    if of_nodes is None:
        return dict(options), False
    several = isinstance(of_nodes, (list, tuple))
    rest = [dict(given or {}) for given in (of_nodes if several else [of_nodes])]
    asked = [given.pop(AUTO_REGISTER, None) for given in rest]
    kept = rest if several else rest[0]
    adds = _one(AUTO_REGISTER, asked if several else asked[0])
    return {**options, "collector_kwargs": kept}, bool(adds)


def _translated(
    create_env_fn: Any, frames_per_batch: int, options: dict[str, Any], *, joins: bool
) -> dict[str, Any]:
    """Return Muster's options for TorchRL's.

    Args:
        joins: TorchRL concatenates the batches of the nodes, with ``sync=True``.
    """
    told = _with_effect(options)
    for name in ("device", "env_device", "policy_device", "policy_factory"):
        if name in told:
            told[name] = _without_repeats(told[name])
    if "storing_device" in told:
        told["storing_device"] = _one("storing_device", told["storing_device"])
    of_nodes = told.get("collector_kwargs")
    several = isinstance(of_nodes, (list, tuple))
    every = [
        _with_effect(given)
        for given in (of_nodes if isinstance(of_nodes, (list, tuple)) else [of_nodes])
    ]
    if isinstance(told.get("tcp_port"), str):
        told["tcp_port"] = int(told["tcp_port"])
    frames = integer("frames_per_batch", frames_per_batch)
    if (total := told.get("total_frames", -1)) > 0:
        told["total_frames"] = (
            -(-total // frames) * frames
        )  # TorchRL's last batch is complete, too
    nodes = _nodes(create_env_fn, told)
    if told.get("sync"):
        if frames % nodes:
            raise BadOption(
                f"frames_per_batch={frames} cannot be shared equally by {nodes} nodes: use a"
                " multiple"
            )
        frames //= nodes
    for given in (told, *every):
        _name_trajectories(given, nodes if told.get("sync") else 1)
    acting = {**told, **(every[0] if every else {})}  # as Muster reads them
    shape: dict[str, Any] = {}
    if acting.get("track_policy_version") and acting.get("replay_buffer") is None:
        shape["postproc"] = partial(
            _with_versions, bool(acting.get("compact_obs")), acting.get("postproc")
        )
        acting |= shape
    if acting.get("trajs_per_batch") is not None:
        shape |= _padded(acting)
    elif acting.get("replay_write_mode") == "trajectory":
        pass  # flat, as TorchRL's
    elif (
        told.get("sync")
        and not acting.get("split_trajs")
        and acting.get("extend_buffer", True)
    ):
        shape |= _joined(acting, nodes, joins=joins)
    told |= shape
    every = [
        {name: value for name, value in given.items() if name not in shape}
        for given in every
    ]
    if of_nodes is not None:
        told["collector_kwargs"] = every if several else every[0]
    as_torchrl = {"obs_dtype": "env", "execution": Execution(policy_mode="as_given")}
    return {**as_torchrl, **told, "frames_per_batch": frames}


def _name_trajectories(options: dict[str, Any], share: int) -> None:
    """Replace TorchRL's ``trajs_per_batch`` and ``traj_format`` by Muster's.

    Args:
        options: options, which are changed.
        share: number of nodes that share a batch. In TorchRL each has that number of trajectories,
            those first done.
    """
    count = options.get("trajs_per_batch")
    if count is not None and not isinstance(count, Trajectories):
        options["trajs_per_batch"] = Trajectories(
            integer("trajs_per_batch", count) * share, rule="first_done"
        )
    if options.get("traj_format") == "padded":
        options["traj_format"] = "pad"


def _padded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the layout of whole trajectories: padded, as TorchRL's, but for replay
    buffers.
    """
    if options.get("replay_buffer") is not None:
        return {"traj_format": "cat"}
    if (options.get("traj_format") or "pad") != "pad":
        return {}
    return {
        "traj_format": "pad",
        "postproc": partial(_zero_padding, options.get("postproc")),
    }


def _zero_padding(postproc: Any, batch: Any) -> Any:
    """Set the trajectory ids of padding to zero, as TorchRL pads all columns, and call the user's
    ``postproc``.
    """
    batch.get(TRAJ_IDS).masked_fill_(~batch.get(MASK), 0)
    return _processed(postproc, batch)


def _with_versions(is_compact: bool, postproc: Any, batch: Any) -> Any:
    """Add TorchRL's columns of the policy version, and call the user's ``postproc``.

    Args:
        is_compact: with ``compact_obs``, which omits the one below ``next``.
    """
    version = batch.get(POLICY_VERSION)
    batch.set("policy_version", version)
    if not is_compact:
        batch.set(("next", "policy_version"), version.clone())
    return _processed(postproc, batch)


def _joined(options: Mapping[str, Any], nodes: int, *, joins: bool) -> dict[str, Any]:
    """Return the options for the shape of batches of all nodes."""
    if options.get("cat_results") is not None or options.get("layout") == "time_major":
        return {}
    if joins:
        if options.get("return_same_td"):
            raise BadOption(
                "return_same_td yields the same memory every time, and RPCCollector(sync=True)"
                " copies the batches of its nodes into one: leave it out, or give"
                " cat_results='stack', which does not copy"
            )
        return {"postproc": partial(_one_after_another, options.get("postproc"))}
    of_node = options.get("num_workers_per_collector", 1)
    alike = {*of_node} if isinstance(of_node, (list, tuple)) else {of_node}
    if len(alike) > 1 or alike == {1}:
        return {}
    return {"postproc": partial(_one_row_per_node, nodes, options.get("postproc"))}


def _one_after_another(postproc: Any, batch: Any) -> Any:
    """Join the rows of all workers, and call the user's ``postproc``."""
    names = batch.names[1:]
    joined = batch.flatten(0, 1)
    joined.names = names
    return _processed(postproc, joined)


def _one_row_per_node(nodes: int, postproc: Any, batch: Any) -> Any:
    """Join the rows of a node's workers, one after another, and call the user's ``postproc``."""
    if batch.ndim == 2 and batch.shape[0] > nodes:
        batch = batch.reshape(nodes, -1)
        batch.names = [None, "time"]
    return _processed(postproc, batch)


def _processed(postproc: Any, batch: Any) -> Any:
    processed = None if postproc is None else postproc(batch)
    return batch if processed is None else processed


def _with_effect(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options without those that have no effect: here, or on this machine, as in
    TorchRL.
    """
    acting = {
        name: value for name, value in (options or {}).items() if name not in OF_TORCHRL
    }
    compiling = acting.get("compile_policy")
    if isinstance(compiling, Mapping):
        acting["compile_policy"] = {
            name: value for name, value in compiling.items() if name != "warmup"
        } or True
    graphs = acting.get("cudagraph_policy")
    if graphs not in (None, False) and not torch.cuda.is_available():
        check_graph(_nothing, None, graphs if isinstance(graphs, Mapping) else {})
        acting["cudagraph_policy"] = None
    return acting


def _nothing(td: Any) -> Any:
    return td


def _nodes(create_env_fn: Any, options: dict[str, Any]) -> int:
    several = len(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else 1
    return options.get("num_collectors") or several


def _one(name: str, given: Any) -> Any:
    """Return the value that all nodes share; ``given`` is this value, or a list with one per node."""
    found = _without_repeats(given)
    if isinstance(found, (list, tuple)):
        raise BadOption(
            f"{name}={given!r}: all nodes share one here; expected it, or a list with equal entries"
        )
    return found


def _without_repeats(given: Any) -> Any:
    """Return the value of a list with equal entries; anything else unchanged."""
    if not isinstance(given, (list, tuple)) or not given:
        return given
    if any(other != given[0] for other in given):
        return given
    return given[0]


def _published_every(batches: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with ``update_interval`` as Muster's ``max_weight_update_interval``."""
    if batches is None:
        return options
    batches = integer("update_interval", batches)
    if (
        options.get("update_after_each_batch")
        or options.get("max_weight_update_interval", -1) > -1
    ):
        raise BadOption(
            "update_interval, update_after_each_batch and max_weight_update_interval all say when"
            " to publish: give one"
        )
    return {**options, "max_weight_update_interval": batches - 1}
