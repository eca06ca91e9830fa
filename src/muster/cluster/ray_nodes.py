"""Nodes as Ray actors: Ray finds a machine for each, and starts it there.

With the engine "ray", the actor is the node, and calls of it are the link (``ray_link.py``). With
the engine "direct", the actor joins like any other node (``joining.py``), and its link is its
connection to this process. It gets the token as an argument, through Ray: a process that can read
it can run code in the cluster anyway.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions

from muster.cluster.carrier import JOIN_POLL_S, Carrier
from muster.cluster.direct import DirectCarrier
from muster.cluster.joining import run_node
from muster.cluster.launchers import Launcher, StartedNodes
from muster.cluster.link import AGENT, ExplainedLink, Link, LinkLost, NotJoined
from muster.cluster.ray_link import THREADS, MainEnd, StoredBlocks
from muster.cluster.ray_runtime import (
    LOST,
    Lease,
    RayConnection,
    actor_class,
    arrived,
    call,
    first_line,
    listens,
    search_path,
)
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.token import TOKEN_BYTES
from muster.cluster.versions import check_node
from muster.errors import BadOption
from muster.utils.attributes import named

Endpoint = tuple[str, int]  # address and port

DEFAULT_CONFIG = {"num_cpus": 1, "memory": 2 * 1024**3}
DEFAULT_GPUS = 0.2
OURS = {  # options of an actor that Muster sets
    "concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls", "max_restarts",
    "max_task_retries", "name", "num_returns",
}  # fmt: skip
NODE_LABEL = "ray.io/node-id"  # Ray's own label
NODE_DIED = "its node has died"  # in Ray's error
BACK_S = 2.0  # between two looks whether a machine that was taken for dead is back
WHY_S = 1.0  # for Ray to report the end of an actor whose connection has ended


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Which actors are the nodes; see ``RayCollector`` for the options.

    Attributes:
        count: of nodes.
        target: the function that a node runs, "module:function".
    """

    count: int
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    target: str = AGENT

    def places(self, cls: str, threads: int = 1) -> ActorPlaces:
        """Start or join Ray, for actors with such an object; see ``ActorPlaces``."""
        configs = _per_node(self.remote_configs, self.count)
        return ActorPlaces(configs, self.ray_init_config, cls, threads)


def ray_carrier(
    transport: str,
    actors: Actors,
    deadline_s: float = 15.0,
    *,
    zero_copy: bool = False,
) -> Carrier:
    """Return the carrier for ``RayCollector(transport=...)``: "ray" or "direct".

    Args:
        zero_copy: see ``RayCollector``; for "ray".
    """
    if transport == "direct":
        return RayDirectCarrier(actors, deadline_s)
    return RayCarrier(actors, deadline_s, zero_copy=zero_copy)


class RayCarrier(Carrier):
    """Nodes as actors of a Ray cluster, one per node and session; see ``RayCollector`` for the
    options.

    Ray is started or joined here (see ``ray_runtime.Lease``) and left by ``close``, unless the user
    did it before. Nodes are spread over the machines (``scheduling_strategy="SPREAD"``), unless
    ``remote_configs`` say otherwise.

    Args:
        actors: the nodes.
        deadline_s: seconds without a message after which a link is lost.
        zero_copy: see ``gives_memory``.
    """

    engine = "ray"
    name = "ray"

    def __init__(
        self, actors: Actors, deadline_s: float, *, zero_copy: bool = False
    ) -> None:
        self.gives_memory = zero_copy
        self._places = actors.places("ray_link:ActorMain", THREADS)
        self._target = actors.target
        self._deadline_s = deadline_s
        self._blocks = StoredBlocks()
        self._started = StartedNodes()

    @property
    def address(self) -> str:
        return f"the Ray cluster {ray.get_runtime_context().gcs_address}"

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        deadline = time.monotonic() + within_s
        self._started.end(node)
        actor = NodeActor(
            self._places, node, (node, self._target, self._deadline_s), ()
        )
        self._started.add(node, actor)
        try:
            self._wait(actor, node, deadline, within_s, given_up)
            end = MainEnd(
                actor.actor.handle, self._blocks, self._deadline_s, actor.ended
            )
            return ExplainedLink(end, actor.lost)
        except BaseException:
            self._started.end(node)
            raise

    def close(self) -> None:
        for node in self._started.close():
            self._started.end(node)
        self._places.close()

    def _wait(
        self,
        actor: NodeActor,
        node: int,
        deadline: float,
        within_s: float,
        given_up: threading.Event,
    ) -> None:
        """Wait until the actor runs."""
        while True:
            if reason := actor.ended(JOIN_POLL_S):
                raise LinkLost(f"Node {node} has not joined: {reason}.")
            if actor.is_running:
                return
            if given_up.is_set():
                raise LinkLost(f"Node {node} was given up before it had joined.")
            if time.monotonic() > deadline:
                raise NotJoined(
                    f"Node {node} has not joined {self.address} within {within_s:g} s. Its {actor}"
                    f" is {actor.state}."
                )


class RayDirectCarrier(DirectCarrier):
    """Nodes as actors of a Ray cluster, as ``RayCarrier``, which join at the address that this
    process has there.
    """

    name = "ray"

    def __init__(self, actors: Actors, deadline_s: float) -> None:
        launcher = RayLauncher(actors)
        try:
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            rendezvous = Rendezvous(
                actors.count,
                bind=address,
                token=secrets.token_hex(TOKEN_BYTES).encode(),
            )
            super().__init__(launcher, rendezvous, deadline_s)
        except BaseException:
            launcher.close()
            raise

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        link = self._joined(node, epoch, within_s, given_up)
        actor = self._started.get(node)
        if not isinstance(actor, NodeActor):  # it was ended meanwhile
            return link
        actor.ended()  # from now on it is known where it runs
        return ExplainedLink(link, actor.lost)


class RayLauncher(Launcher):
    """Starts nodes as actors, which join at the rendezvous."""

    name = "ray"
    advice = ""

    def __init__(self, actors: Actors) -> None:
        self._places = actors.places("ray_nodes:JoiningActor")
        self._target = actors.target

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> NodeActor:
        return NodeActor(
            self._places,
            node,
            (self._target,),
            (rendezvous.address, node, rendezvous.token),
        )

    def close(self) -> None:
        self._places.close()


class ActorPlaces:
    """Makes the actors of nodes, each with its options, on machines that are there.

    Args:
        configs: options of the actor of each node; None: the default.
        ray_init_config: see ``Lease``.
        cls: "module:class" in this folder, of the object in the actor.
        threads: of an actor, in which its methods run.

    Attributes:
        configs: completed.
        used: Ray nodes on which actors have run.
    """

    def __init__(
        self,
        configs: Sequence[dict[str, Any] | None],
        ray_init_config: Mapping[str, Any] | None,
        cls: str,
        threads: int = 1,
    ) -> None:
        self.used: set[str] = set()
        self._threads = threads
        self._lease = Lease(ray_init_config)
        try:
            self._class = actor_class(f"muster.cluster.{cls}")
            self.configs = [_complete(config) for config in configs]
            for node, config in enumerate(self.configs):
                try:
                    self._class.options(**config)
                except (ValueError, TypeError) as error:
                    why = f"{first_line(error)} Ray's own options are expected"
                    raise BadOption(f"remote_configs of node {node}: {why}") from error
        except BaseException:
            self._lease.close()
            raise

    def actor(self, node: int, args: Sequence[Any]) -> tuple[Any, list[Endpoint]]:
        """Make an actor, not on machines that are dead, which Ray notices only after 15 s or more.

        Returns:
            the actor, and where the machines that it avoids would listen.
        """
        alive = [one for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
        endpoints = {
            one["NodeID"]: (one["NodeManagerAddress"], one["NodeManagerPort"])
            for one in alive
        }
        dead = [
            name
            for name in self.used & endpoints.keys()
            if not listens(*endpoints[name])
        ]
        config = self.configs[node]
        if dead:
            selector = {NODE_LABEL: f"!in({','.join(dead)})"} | config.get(
                "label_selector", {}
            )
            config = config | {"label_selector": selector}
        cls = self._class.options(max_concurrency=self._threads, **config)
        return cls.remote(search_path(), *args), [endpoints[name] for name in dead]

    def close(self) -> None:
        """Leave Ray. May be called again."""
        self._lease.close()


class NodeActor:
    """An actor that is a node, or waits for a machine; implements ``Started``.

    Args:
        args: of the object in the actor.
        serving: arguments of its method ``serve``.

    Attributes:
        actor: Ray's handle of it.
    """

    def __init__(
        self,
        places: ActorPlaces,
        node: int,
        args: Sequence[Any],
        serving: Sequence[Any],
    ) -> None:
        self._places = places
        self._node = node
        self._args = args
        self._serving_args = serving
        self._where = ""
        self._begin()

    def _begin(self) -> None:
        try:
            self._connection = RayConnection()
            self.actor, self._avoided = self._places.actor(self._node, self._args)
            self._look_at = time.monotonic() + BACK_S
            self._hello = self.actor.where.remote()
            self._serving = call(self.actor, "serve", *self._serving_args)
        except LOST as error:
            raise LinkLost(
                f"Node {self._node} could not be started: {first_line(error)}"
            ) from error

    def __str__(self) -> str:
        return "Ray actor"

    @property
    def state(self) -> str:
        return (
            f"on {self._where}"
            if self._where
            else _lack(self._places.configs[self._node])
        )

    @property
    def is_running(self) -> bool:
        """Whether ``ended`` has found it on a machine."""
        return bool(self._where)

    def ended(self, within_s: float = 0.0) -> str | None:
        try:
            self._connection.check()
            if not self._where and arrived(self._hello, within_s):
                host, ray_node, pid, there = ray.get(self._hello)
                check_node(self._node, there)
                self._places.used.add(ray_node)
                self._where = f"{host}, Ray node {ray_node[:8]}, process {pid}"
            if not self._where:
                self._use_machines_that_are_back()
                return None
            if not arrived(self._serving, within_s):
                return None
            ray.get(self._serving)
            return "its agent has ended"
        except exceptions.RayTaskError as error:
            return f"its agent failed: {first_line(error).rstrip('.')}"
        except LOST as error:
            if self._where or NODE_DIED not in str(error):
                return first_line(error).rstrip(".")
            self._begin()
            return None

    def _use_machines_that_are_back(self) -> None:
        """Make another actor if a machine that this one avoids is back: its network was cut."""
        if not self._avoided or time.monotonic() < self._look_at:
            return
        if any(listens(*endpoint) for endpoint in self._avoided):
            ray.kill(self.actor, no_restart=True)
            self._begin()
        else:
            self._look_at = time.monotonic() + BACK_S

    def lost(self, why: LinkLost) -> LinkLost:
        """The error of its lost link, with Ray's report on the actor, if that comes soon."""
        ended = self.ended(WHY_S)
        return LinkLost(f"node {self._node} ({self._where}) is lost: {ended or why}")

    def end(self) -> None:
        with contextlib.suppress(*LOST):
            self._connection.check()
            ray.kill(self.actor, no_restart=True)


class JoiningActor:
    """The object in the actor of a node that joins at the rendezvous."""

    def __init__(self, target: str) -> None:
        named(target)  # raises at once if it does not exist
        self._target = target

    def serve(self, address: str, node: int, token: bytes) -> bool:
        """Run the node; see ``run_node``."""
        return run_node(address, node, token, target=self._target)


def _lack(config: Mapping[str, Any]) -> str:
    """The resources that a node requests, and those of the cluster."""
    wanted = {
        name: value for name, value in config.items() if name != "scheduling_strategy"
    }
    machines = [
        f"{one['NodeManagerAddress']} has "
        + ", ".join(f"{n} {v:g}" for n, v in _plain(one["Resources"]).items())
        for one in ray.nodes()  # type: ignore[no-untyped-call]
        if one["Alive"]
    ]
    free = _plain(ray.available_resources())  # type: ignore[no-untyped-call]
    return (
        f"not started: it asks for {wanted}; of the machines {'; '.join(machines)}; free in all:"
        f" {free}. Add a machine, or ask for less with remote_configs"
    )


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without the resources that only name machines."""
    return {
        name: round(value, 3)
        for name, value in resources.items()
        if not name.startswith("node:")
    }


def _per_node(
    configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, count: int
) -> list[dict[str, Any] | None]:
    if configs is None:
        return [None] * count
    if isinstance(configs, Mapping):
        return [dict(configs)] * count
    if len(configs) != count:
        raise BadOption(
            f"remote_configs has {len(configs)} entries for {count} nodes: give one each, or one"
            " dict for all"
        )
    return [dict(config) for config in configs]


def _complete(config: dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        config = dict(DEFAULT_CONFIG)
        if ray.cluster_resources().get("GPU", 0) > 0:  # type: ignore[no-untyped-call]
            config["num_gpus"] = DEFAULT_GPUS
    if ours := OURS & config.keys():
        raise BadOption(
            f"remote_configs has {', '.join(sorted(ours))}, which Muster sets itself: leave it out"
        )
    if config.get("enable_tensor_transport"):
        raise BadOption(
            "remote_configs has enable_tensor_transport=True: Ray Direct Transport (gloo, nccl,"
            " cuda_ipc) moves tensors between actors of a group, and this process, to which batches"
            " go, is in none. Leave it out: batches go through Ray's object store"
        )
    return {"scheduling_strategy": "SPREAD"} | config
