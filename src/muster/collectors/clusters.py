"""Collectors with workers on other machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch.distributed import rpc

from muster.cluster.carrier import Carrier
from muster.cluster.nodes import Nodes
from muster.collectors.base import BaseCollector
from muster.collectors.cluster_options import ClusterOptions, over_nodes
from muster.collectors.engine import Engine
from muster.collectors.multi import MultiCollector
from muster.collectors.references import accept_remote_rref_udf_invocation
from muster.collectors.replay_buffer import ReplaySink
from muster.collectors.schedules import FirstReadyKind, ScheduleKind, SyncKind
from muster.collectors.signatures import takes
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.attributes import optional
from muster.utils.checked import PositiveNumber, one_of
from muster.utils.texts import first_line
from muster.workers.first_ready import LEAD
from muster.workers.options import timeout_of

if TYPE_CHECKING:
    from muster.cluster.launchers import Launcher
    from muster.cluster.rendezvous import Rendezvous


class ClusterCollector(MultiCollector):
    """Base of collectors with nodes: places workers on nodes, and publishes weights to nodes."""

    options: ClusterOptions
    _lead = LEAD  # number of batches of a bundle that may be undelivered

    def __init__(self, options: ClusterOptions) -> None:
        placed = over_nodes(options)
        self._placed = placed
        self._of_leaf = placed.of_leaf
        # batches since ``_before_batch`` last published, by node
        self._since = [0] * (self._of_leaf[-1] + 1)
        self._longest = (
            0 if options.update_after_each_batch else options.max_weight_update_interval
        )
        BaseCollector.__init__(self, placed.options)

    def _acting_on(self) -> list[torch.device]:
        first = [self._of_leaf.index(node) for node in range(len(self._since))]
        owns = [self._owns[leaf] for leaf in first]
        return [own.devices.policy or self._policys_own() for own in owns]

    def _others(self) -> list[dict[str, Any]]:
        return self._placed.others

    def _make_nodes(self, made: ExitStack) -> Nodes:
        heartbeat, join_s = (
            timeout_of(self.options.timeouts, phase) for phase in ("heartbeat", "join")
        )
        if heartbeat is None:
            raise BadOption(
                "timeouts['heartbeat'] is None: a node that is gone would be waited for for ever"
            )
        carrier = self.options.carrier(
            len(self._since), max(Counter(self._of_leaf).values()), heartbeat
        )
        nodes = Nodes(
            carrier,
            self._of_leaf,
            join_s,
            buffer=self._buffer_of_nodes(),
            enough=self.options.min_nodes,
        )
        made.callback(nodes.close)
        return nodes

    def _schedule_kind(self) -> ScheduleKind:
        if self.options.sync:
            return SyncKind()
        return FirstReadyKind(self._placed.shared, lead=self._lead)

    def _buffer_of_nodes(self) -> ReplaySink | None:
        """Return a sink through which nodes write into the replay buffer; None: batches pass
        through this process.
        """
        return None

    def _connect(self, made: ExitStack) -> Engine:
        engine = super()._connect(made)
        if self._nodes is not None and self._nodes.buffer is not None:
            engine.pipeline.leave_to_nodes()
        return engine

    def pause(self) -> AbstractContextManager[None]:
        """See ``Collector.pause``. Where nodes write into the replay buffer, they write nothing
        inside the context: entering waits for what they have begun.
        """
        return self._settled(super().pause())

    @contextmanager
    def _settled(self, paused: AbstractContextManager[None]) -> Iterator[None]:
        with paused:
            if self._nodes is not None and self._nodes.buffer is not None:
                self._engine.source.settle()
            yield

    def _before_batch(self) -> None:
        super()._before_batch()
        if self._longest < 0:
            return
        nodes = {self._of_leaf[group] for group in self._engine.last.contributors}
        for node in nodes:
            self._since[node] += 1
        if due := sorted(node for node in nodes if self._since[node] > self._longest):
            for node in due:
                self._since[node] = 0
            self.update_policy_weights_(worker_ids=due)


@dataclass(frozen=True, kw_only=True)
class JoiningOptions(ClusterOptions):
    """Checked options of collectors whose nodes join at an address of this process.

    Attributes:
        launcher: how nodes are started. "mp": as processes of this machine. "submitit": as SLURM
            jobs. "submitit_delayed": as jobs of ``submitit_delayed_launcher``. "torchrun": by
            torchrun; all other ranks call ``run_node()``. "manual": by you, with ``muster node``.
            Or a ``Launcher`` (``muster.cluster.launchers``).
        slurm_kwargs: parameters of the SLURM jobs, for ``launcher="submitit"``.
        tcp_port: port on which this process listens for nodes. None: any free port.
        bind: address on which this process listens for nodes. Addresses other than loopback need a
            token.
        token: secret that nodes must know: bytes, or the path of a file with mode 0600. None: the
            token from the environment variable MUSTER_TOKEN_FILE or MUSTER_TOKEN, or else a random
            one.
    """

    backend: str = "gloo"
    launcher: Any = "submitit"
    slurm_kwargs: Mapping[str, Any] | None = None
    tcp_port: int | None = None
    bind: str = "127.0.0.1"
    token: Any = None

    def joining(self, nodes: int, workers: int) -> tuple[Launcher, Rendezvous]:
        """Return what starts so many nodes, with so many workers each, and where they join."""
        from muster.cluster.launcher_choice import launcher_for
        from muster.cluster.rendezvous import Rendezvous

        launcher = launcher_for(
            self.launcher,
            slurm_kwargs=self.slurm_kwargs,
            bind=self.bind,
            token=self.token,
            workers=workers,
        )
        return launcher, Rendezvous(
            nodes, bind=self.bind, tcp_port=self.tcp_port or 0, token=self.token
        )


@dataclass(frozen=True, kw_only=True)
class DistributedOptions(JoiningOptions):
    """Checked options of ``DistributedCollector``.

    Attributes:
        transport: what carries rollouts, weights and policies. "torch_distributed": process groups
            of torch.distributed, which belong to Muster; the default group is neither used nor
            made. "direct": the TCP connection through which a node has joined.
        backend: of the process groups. "gloo": through the hosts' memory. "nccl", "ucc": through
            buffers on the current GPU, or of UCC, of each process. A backend that this PyTorch does
            not have is refused, and so is "mpi", whose ranks are fixed by mpirun.
    """

    transport: Annotated[
        Literal["torch_distributed", "direct"], one_of("torch_distributed", "direct")
    ] = "torch_distributed"

    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Carrier:
        from muster.cluster.direct import DirectCarrier, check_backend
        from muster.cluster.distributed import TorchCarrier
        from muster.cluster.process_groups import check_backend as check_groups

        if self.transport == "direct":
            check_backend(self.backend)
            return DirectCarrier(*self.joining(nodes, workers), deadline_s)
        check_groups(self.backend)
        return TorchCarrier(
            *self.joining(nodes, workers), deadline_s, backend=self.backend
        )


class DistributedCollector(ClusterCollector):
    """Collects on nodes whose rollouts and weights go through process groups of torch.distributed.

    ::

        with DistributedCollector(["CartPole-v1"] * 2, policy, num_envs=8, frames_per_batch=512, launcher="mp") as c:
            for batch in c:  # from the first node that is ready
                ...

    Raises:
        BadOption: an option is wrong.
        WorkerDied: a node did not join, or was lost.
    """

    @takes(DistributedOptions)
    def __init__(self, options: DistributedOptions) -> None:
        super().__init__(options)


@dataclass(frozen=True, kw_only=True)
class RPCOptions(JoiningOptions):
    """Checked options of ``RPCCollector``.

    Attributes:
        transport: what carries requests, rollouts and weights. "rpc": torch RPC. "direct": Muster's
            own connections, as with ``DistributedCollector``.
        visible_devices: one device per node: the number of a GPU, "cuda:1", "cpu" or None. Where
            this process has a GPU, calls carry tensors between its current one and that of the
            node. Batches go through the hosts' memory.
        backend: "gloo", as in TorchRL, where a process group goes with RPC. None is made here;
            others are refused.
        tensorpipe_options: keyword arguments of
            ``torch.distributed.rpc.TensorPipeRpcBackendOptions``, for the agents of this process
            and of all nodes. If you have called ``init_rpc``, your agent has its own.
        trust_network: let torch RPC listen at a ``bind`` that other machines can reach. Every
            process that reaches it can run code in this process and in the nodes.
    """

    transport: Annotated[Literal["rpc", "direct"], one_of("rpc", "direct")] = "rpc"
    visible_devices: Sequence[Any] | None = None
    tensorpipe_options: Mapping[str, Any] | None = None
    trust_network: bool = False

    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Carrier:
        from muster.cluster.direct import DirectCarrier, check_backend

        devices = _checked_devices(self.visible_devices, nodes)
        _check_tensorpipe(dict(self.tensorpipe_options or {}))
        check_backend(self.backend)
        if self.transport == "direct":
            return DirectCarrier(*self.joining(nodes, workers), deadline_s)
        if not (torch.distributed.is_available() and rpc.is_available()):
            raise BadOption(
                "transport='rpc': this PyTorch was built without RPC. Pass transport='direct'"
            )
        from muster.cluster.rpc_agent import check_torch, users_agent
        from muster.cluster.rpc_nodes import RpcCarrier, UsersCarrier

        check_torch()
        if users_agent() is not None:
            return UsersCarrier(deadline_s=deadline_s)
        _check_trust(self.bind, self.trust_network)
        return RpcCarrier(
            *self.joining(nodes, workers),
            devices=devices,
            options=self.tensorpipe_options,
            trust_network=self.trust_network,
            deadline_s=deadline_s,
        )


@accept_remote_rref_udf_invocation
class RPCCollector(ClusterCollector):
    """Collects on nodes with torch RPC, through Muster's agents, or your agent if you have called
    ``init_rpc``.

    With your agent, its other workers are the nodes, in turn; ``launcher``, ``bind``, ``tcp_port``
    and ``token`` are not used. Otherwise nodes join as those of ``DistributedCollector``.

    Other workers of an RPC group can call its methods with a reference to it, as they can with
    TorchRL's: ``rpc.rpc_sync(reference.owner(), RPCCollector.next, args=(reference,))``.

    Raises:
        BadOption: an option is wrong, or other machines could run code in this process (see
            ``trust_network``).
        WorkerDied: a node did not join, or was lost.
    """

    @takes(RPCOptions)
    def __init__(self, options: RPCOptions) -> None:
        super().__init__(options)


def _check_trust(bind: str, trust_network: bool) -> None:
    if not (trust_network or is_loopback(bind)):
        raise BadOption(
            f"bind={bind!r} can be reached from other machines, and torch RPC runs any function for"
            " every process that reaches it, without a token. On a network where you trust all,"
            " pass trust_network=True; otherwise use DistributedCollector or RayCollector, which"
            " authenticate, or transport='direct'"
        )


def _checked_devices(devices: Sequence[Any] | None, count: int) -> list[str | None]:
    """Return the GPU of each node, such as "cuda:1"; None: it has none."""
    if devices is not None and len(devices) != count:
        raise BadOption(
            f"visible_devices has {len(devices)} devices for {count} nodes: name one for each"
        )
    checked: list[str | None] = []
    for device in devices or ():
        try:
            one = (
                torch.device("cuda", device)
                if isinstance(device, int)
                else torch.device(device or "cpu")
            )
        except (RuntimeError, TypeError) as error:
            raise BadOption(
                f"visible_devices has {device!r}, which is not a device: {error}"
            ) from error
        if one.type not in ("cpu", "cuda"):
            raise BadOption(
                f"visible_devices has {device!r}: expected 'cpu', 'cuda:0', ... or the number of"
                " a GPU"
            )
        checked.append(f"cuda:{one.index or 0}" if one.type == "cuda" else None)
    return checked


def _check_tensorpipe(options: dict[str, Any]) -> None:
    instead = {
        "init_method": "nodes are found by tcp_port and bind",
        "device_maps": "visible_devices makes them; batches go through the hosts' memory",
        "devices": "visible_devices names them; batches go through the hosts' memory",
    }
    for name in options.keys() & instead.keys():
        raise BadOption(
            f"tensorpipe_options has {name!r}: leave it out, {instead[name]}"
        )
    if not (torch.distributed.is_available() and rpc.is_available()):
        return  # the class does not exist in this PyTorch
    known = (
        signature(rpc.TensorPipeRpcBackendOptions).parameters.keys() - instead.keys()
    )
    if unknown := sorted(options.keys() - known):
        raise BadOption(
            f"tensorpipe_options has {', '.join(unknown)}: expected {', '.join(sorted(known))}"
        )
    try:
        rpc.TensorPipeRpcBackendOptions(**options)
    except TypeError as error:  # its message is a page long
        raise BadOption(
            f"tensorpipe_options={options!r}: a value has a wrong type"
        ) from error
    except RuntimeError as error:
        raise BadOption(
            f"tensorpipe_options={options!r}: {first_line(error)}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class RayOptions(ClusterOptions):
    """Checked options of ``RayCollector``.

    Attributes:
        create_env_fn: a list with one entry per actor, or one entry for all; see
            ``muster.Collector`` for entries.
        num_collectors: number of actors. None: one per entry of ``create_env_fn``.
        transport: what carries requests, rollouts and weights. "ray": calls of the actors, and
            Ray's object store; no port besides Ray's is used. "direct": one TCP connection of each
            actor to this process, with a random token, unencrypted; small batches take less of this
            process' time.
        zero_copy: batches lie in Ray's object store, where a rollout is one batch, instead of being
            copied out of it. They can be written and kept like others, within
            ``slot_memory_limit``, but take room in the store of this machine while you hold them,
            and are valid only until you leave the cluster (``ray.shutdown()``). Needs batches of
            one node: ``sync=False``, or one actor.
        ray_init_config: arguments of ``ray.init``, if Ray is not initialized. ``{"address":
            "auto"}`` joins a cluster.
        remote_configs: options of the Ray actors: a dict for all, or a list with one dict per
            actor. None: one CPU and 2 GiB of memory, and 0.2 of a GPU if the cluster has any.
        replay_buffer: see ``muster.Collector``. Actors write directly into a ``RayBuffer`` or
            TorchRL's ``RayReplayBuffer``. With ``trajs_per_batch``,
            ``replay_write_mode="trajectory"``, ``split_trajs``, ``postproc``,
            ``extend_buffer=False`` or a hook on batches or episodes, the batches pass through this
            process.
    """

    num_collectors: PositiveNumber | None = None
    transport: Annotated[Literal["ray", "direct"], one_of("ray", "direct")] = "ray"
    zero_copy: bool = False
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Any = None

    @property
    def num_nodes(self) -> int | None:
        return self.num_collectors

    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Carrier:
        if self.zero_copy:
            self._check_zero_copy(nodes)
        with optional("RayCollector", "ray", "ray"):
            from muster.cluster.ray_nodes import Actors, ray_carrier

        actors = Actors(
            count=nodes,
            ray_init_config=self.ray_init_config,
            remote_configs=self.remote_configs,
        )
        return ray_carrier(self.transport, actors, deadline_s, zero_copy=self.zero_copy)

    def _check_zero_copy(self, nodes: int) -> None:
        if self.transport != "ray":
            raise BadOption(
                f"zero_copy=True with transport={self.transport!r}: only Ray's object store has"
                " memory in which batches can stay. Leave one of them out"
            )
        if self.return_same_td:
            raise BadOption(
                "zero_copy=True with return_same_td=True: each batch is in other memory of Ray's"
                " object store. Leave one of them out"
            )
        if self.sync and nodes > 1:
            raise BadOption(
                f"zero_copy=True with sync=True: a batch has rollouts of {nodes} actors, which are"
                " copied into one memory. Pass sync=False for batches of one actor, or leave"
                " zero_copy out"
            )


class RayCollector(ClusterCollector):
    """Collects on nodes that are Ray actors.

    Raises:
        BadOption: an option is wrong, or Ray is not installed.
        WorkerDied: an actor could not be placed, or was lost.
    """

    options: RayOptions

    @takes(RayOptions)
    def __init__(self, options: RayOptions) -> None:
        super().__init__(options)

    def _buffer_of_nodes(self) -> ReplaySink | None:
        options = self.options
        names = {cls.__name__ for cls in type(options.replay_buffer).__mro__}
        looks = (
            *(
                options.joins_episodes,
                options.split_trajs,
                options.postproc,
                options.on_batch,
                options.record,
            ),
            *(
                options.on_episode_done,
                options.post_collect_hook,
                not options.extend_buffer,
            ),
        )
        if names.isdisjoint(("RayBuffer", "RayReplayBuffer")) or any(looks):
            return None
        from muster.cluster.ray_buffer import for_nodes

        return ReplaySink(for_nodes(options.replay_buffer))
