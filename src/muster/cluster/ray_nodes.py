"""Nodes as Ray actors: Ray finds a machine for each, and starts it there.

The actor then joins like any other node, and its link is its connection to this process. It gets the token as an
argument, through Ray: a process that can read it can run code in the cluster anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import exceptions

from muster.cluster.carrier import Carrier
from muster.cluster.joining import run_node
from muster.cluster.launchers import Launcher
from muster.cluster.link import AGENT, Link, LinkLost
from muster.cluster.ray_runtime import Lease, actor_class, arrived, call, first_line, listens, search_path
from muster.cluster.rendezvous import TOKEN_BYTES, Rendezvous
from muster.errors import BadOption
from muster.utils.attributes import named

DEFAULT_CONFIG = {"num_cpus": 1, "memory": 2 * 1024**3}
DEFAULT_GPUS = 0.2
OURS = {  # options of an actor that Muster sets
    "concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls", "max_restarts",
    "max_task_retries", "name", "num_returns",
}  # fmt: skip
NODE_LABEL = "ray.io/node-id"  # Ray's own label
NODE_DIED = "its node has died"  # in Ray's error
WHY_S = 1.0  # for Ray to report the end of an actor whose connection has ended
LOST = (exceptions.RayError, ValueError, RuntimeError)  # the latter two: of a Ray that was shut down


class RayCarrier(Carrier):
    """Nodes as actors of a Ray cluster, one per node and session; see ``RayCollector`` for the options.

    Ray is started or joined here (see ``ray_runtime.Lease``) and left by ``close``, unless the user did it before.
    Nodes find this process at the address that it has in the cluster. They are spread over the machines
    (``scheduling_strategy="SPREAD"``), unless ``remote_configs`` say otherwise.
    """

    name = "ray"

    def __init__(
        self,
        count: int,
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        deadline_s: float = 15.0,
        target: str = AGENT,
    ) -> None:
        launcher = RayLauncher(_per_node(remote_configs, count), ray_init_config, target)
        try:
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            rendezvous = Rendezvous(count, bind=address, token=secrets.token_hex(TOKEN_BYTES).encode())
            super().__init__(launcher, rendezvous, deadline_s)
        except BaseException:
            launcher.close()
            raise

    def connect(self, node: int, epoch: int, within_s: float, given_up: threading.Event) -> Link:
        link = super().connect(node, epoch, within_s, given_up)
        actor = self._started.get(node)
        if isinstance(actor, NodeActor):  # else it was ended meanwhile
            actor.ended()  # from now on it is known where it runs
            link.explain = actor.lost
        return link


class RayLauncher(Launcher):
    """Starts nodes as actors.

    Attributes:
        configs: options of the actor of each node.
        used: Ray nodes on which actors have run.
    """

    name = "ray"
    advice = ""

    def __init__(
        self, configs: Sequence[dict[str, Any] | None], ray_init_config: Mapping[str, Any] | None, target: str
    ) -> None:
        self._target = target
        self.used: set[str] = set()
        self._lease = Lease(ray_init_config)
        try:
            self._class = actor_class("muster.cluster.ray_nodes:ActorMain")
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

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> NodeActor:
        return NodeActor(self, node, rendezvous)

    def close(self) -> None:
        self._lease.close()

    def actor(self, node: int) -> Any:
        """A new actor, not on machines that are dead, which Ray notices only after 15 s or more."""
        listed = {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}  # type: ignore[no-untyped-call]
        dead = [
            name
            for name in self.used & listed.keys()
            if not listens(listed[name]["NodeManagerAddress"], listed[name]["NodeManagerPort"])
        ]
        config = self.configs[node]
        if dead:
            config = config | {
                "label_selector": {NODE_LABEL: f"!in({','.join(dead)})"} | config.get("label_selector", {})
            }
        return self._class.options(**config).remote(search_path(), self._target)


class NodeActor:
    """An actor that is a node, or waits for a machine; implements ``Started``."""

    def __init__(self, launcher: RayLauncher, node: int, rendezvous: Rendezvous) -> None:
        self._launcher, self._node, self._rendezvous = launcher, node, rendezvous
        self._where = ""
        self._begin()

    def _begin(self) -> None:
        try:
            self._actor = self._launcher.actor(self._node)
            self._hello = call(self._actor, "hello")
            self._serving = call(self._actor, "serve", self._rendezvous.address, self._node, self._rendezvous.token)
        except LOST as error:
            raise LinkLost(f"Node {self._node} could not be started: {first_line(error)}") from error

    def __str__(self) -> str:
        return "Ray actor"

    @property
    def state(self) -> str:
        return f"on {self._where}" if self._where else _lack(self._launcher.configs[self._node])

    def ended(self, within_s: float = 0.0) -> str | None:
        try:
            if not self._where and arrived(self._hello, within_s):
                host, ray_node, pid = ray.get(self._hello)
                self._launcher.used.add(ray_node)
                self._where = f"{host}, Ray node {ray_node[:8]}, process {pid}"
            if not self._where or not arrived(self._serving, within_s):
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

    def lost(self, why: LinkLost) -> LinkLost:
        """The error of its lost link, with Ray's report on the actor, if that comes soon."""
        ended = self.ended(WHY_S)
        return LinkLost(f"node {self._node} ({self._where}) is lost: {ended or why}")

    def end(self) -> None:
        with contextlib.suppress(*LOST):
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)


class ActorMain:
    """The object in the actor's process."""

    def __init__(self, target: str) -> None:
        named(target)  # raises at once if it does not exist
        self._target = target

    def hello(self) -> tuple[str, str, int]:
        """Host, id of the Ray node, and process."""
        return socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid()

    def serve(self, address: str, node: int, token: bytes) -> bool:
        """Run the node; see ``run_node``."""
        return run_node(address, node, token, target=self._target)


def _lack(config: Mapping[str, Any]) -> str:
    """The resources that a node requests, and those of the cluster."""
    wanted = {name: value for name, value in config.items() if name != "scheduling_strategy"}
    machines = [
        f"{one['NodeManagerAddress']} has " + ", ".join(f"{n} {v:g}" for n, v in _plain(one["Resources"]).items())
        for one in ray.nodes()  # type: ignore[no-untyped-call]
        if one["Alive"]
    ]
    free = _plain(ray.available_resources())  # type: ignore[no-untyped-call]
    return (
        f"not started: it asks for {wanted}; of the machines {'; '.join(machines)}; free in all: {free}. Add a "
        f"machine, or ask for less with remote_configs"
    )


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without the resources that only name machines."""
    return {name: round(value, 3) for name, value in resources.items() if not name.startswith("node:")}


def _per_node(
    configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, count: int
) -> list[dict[str, Any] | None]:
    if configs is None:
        return [None] * count
    if isinstance(configs, Mapping):
        return [dict(configs)] * count
    if len(configs) != count:
        raise BadOption(
            f"remote_configs has {len(configs)} entries for {count} nodes: give one each, or one dict for all"
        )
    return [dict(config) for config in configs]


def _complete(config: dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        config = dict(DEFAULT_CONFIG)
        if ray.cluster_resources().get("GPU", 0) > 0:  # type: ignore[no-untyped-call]
            config["num_gpus"] = DEFAULT_GPUS
    if ours := OURS & config.keys():
        raise BadOption(f"remote_configs has {', '.join(sorted(ours))}, which Muster sets itself: leave it out")
    return {"scheduling_strategy": "SPREAD"} | config
