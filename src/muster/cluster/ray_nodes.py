"""Nodes as Ray actors: the carrier, and the main process' end of their links.

Messages go to a node as calls of its actor, and come from it as answers to one call that is always waiting there.
Blocks go through Ray's object store: what the main process sends is put there once for all nodes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions

from muster.cluster.link import AGENT, Block, LinkLost, Received, allowed_s
from muster.cluster.ray_actor import WAITING, WAITS, Departed, ExpectedBlocks
from muster.cluster.ray_runtime import Lease, actor_class, arrived, call, first_line, listens, search_path
from muster.errors import BadOption
from muster.memory.specs import Array

DEFAULT_CONFIG = {"num_cpus": 1, "memory": 2 * 1024**3}
DEFAULT_GPUS = 0.2
OURS = {  # options of an actor that are no user's business
    "concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls", "max_restarts",
    "max_task_retries", "name", "num_returns",
}  # fmt: skip
STEP_S = 0.2  # between looks at whether somebody has given up
NODE_LABEL = "ray.io/node-id"  # that Ray gives to its nodes
NODE_DIED = "its node has died"  # says Ray
GRACE_S = 5.0  # for nodes that have been told to end
LOST = (exceptions.RayError, ValueError, RuntimeError)  # the latter two: of a Ray that was shut down


@dataclass
class _Life:
    """A node in one session: its actor, the call of ``serve``, and the Ray node on which they are."""

    actor: Any
    serving: Any = None
    ray_node: str = ""


class RayCarrier:
    """Nodes as actors of a Ray cluster, one per node and session.

    Ray is started or joined here (see ``ray_runtime.Lease``) and left by ``close``, unless the user did it before.
    Unless ``remote_configs`` say otherwise, a node takes 1 CPU and 2 GiB ("memory" as Ray counts it), and 0.2 of a GPU
    where the cluster has any; nodes are spread over the machines (``scheduling_strategy="SPREAD"``).

    Args:
        count: of nodes.
        ray_init_config: keywords of ``ray.init``.
        remote_configs: options of a Ray actor, for all nodes or a list with those of each.
        deadline_s: silence after which a link is lost.
        target: "module:function" that runs in the node.

    Attributes:
        hosts: by node, where it runs: host, Ray node and process.

    Raises:
        BadOption: these options are none that Ray takes, or there is no such cluster.
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
        configs = _per_node(remote_configs, count)
        self.hosts: dict[int, str] = {}
        self._deadline_s, self._target = deadline_s, target
        self._lock = threading.Lock()
        self._lives: dict[int, _Life] = {}
        self._used: set[str] = set()  # Ray nodes
        self._lease = Lease(ray_init_config)
        try:
            self._class = actor_class("muster.cluster.ray_actor:NodeActor", WAITS)
            self._configs = [_complete(config) for config in configs]
            for node, config in enumerate(self._configs):
                _check_options(self._class, config, node)
        except BaseException:
            self._lease.close()
            raise

    def connect(self, node: int, epoch: int, within_s: float, given_up: threading.Event) -> RayLink:
        """See ``link.Carrier``. The actor of the epoch before is killed: nothing that it still sends is read."""
        deadline = time.monotonic() + within_s
        try:
            self._end([node], 0.0)
            life = None
            while life is None:
                life = self._start(node, deadline, given_up)
            if not life.ray_node:
                raise LinkLost(self._absent(node, within_s))
            with self._lock:
                life.serving = call(life.actor, "serve", group="serve")
                self._used.add(life.ray_node)
            return RayLink(life.actor, f"node {node} ({self.hosts[node]})", self._deadline_s)
        except BaseException as error:
            with contextlib.suppress(*LOST):
                self._end([node], 0.0)
            if isinstance(error, LOST):
                raise LinkLost(f"Node {node} could not be started: {first_line(error)}") from error
            raise

    def _start(self, node: int, deadline: float, given_up: threading.Event) -> _Life | None:
        """Make an actor and wait for it. None: its machine died; without ``ray_node``: it did not come in time."""
        life = _Life(self._elsewhere(node).remote(search_path(), node, self._target, self._deadline_s))
        with self._lock:
            self._lives[node] = life
        hello = call(life.actor, "hello")
        while not arrived(hello, STEP_S):
            if given_up.is_set():
                raise LinkLost(f"Node {node} was given up before it had joined")
            if time.monotonic() > deadline:
                return life
        try:
            host, life.ray_node, pid = ray.get(hello)
        except exceptions.ActorDiedError as error:
            if NODE_DIED in str(error):
                return None
            raise
        self.hosts[node] = f"{host}, Ray node {life.ray_node[:8]}, process {pid}"
        return life

    def _elsewhere(self, node: int) -> Any:
        """The class of the actor, kept off machines that are dead: it takes Ray a while to notice, 15 s or more."""
        listed = {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}  # type: ignore[no-untyped-call]
        dead = [one for one in self._used & listed.keys() if not _is_up(listed[one])]
        config = self._configs[node]
        if dead:
            config = config | {
                "label_selector": {NODE_LABEL: f"!in({','.join(dead)})"} | config.get("label_selector", {})
            }
        return self._class.options(**config)

    def close(self) -> None:
        """See ``link.Carrier``."""
        with contextlib.suppress(*LOST):
            self._end(list(self._lives), GRACE_S)
        self._lease.close()

    def _end(self, nodes: Sequence[int], grace_s: float) -> None:
        """Kill the actors of nodes; not before they have ended by themselves, if they do within ``grace_s``."""
        with self._lock:
            ending = [self._lives.pop(node) for node in nodes if node in self._lives]
        if not ending or not ray.is_initialized():
            return
        serving = [life.serving for life in ending if life.serving is not None]
        if serving and grace_s > 0:
            ray.wait(serving, num_returns=len(serving), timeout=grace_s)
        for life in ending:
            ray.kill(life.actor, no_restart=True)

    def _absent(self, node: int, within_s: float) -> str:
        wanted = {name: value for name, value in self._configs[node].items() if name != "scheduling_strategy"}
        machines = [
            f"{one['NodeManagerAddress']} has " + ", ".join(f"{n} {v:g}" for n, v in _plain(one["Resources"]).items())
            for one in ray.nodes()  # type: ignore[no-untyped-call]
            if one["Alive"]
        ]
        free = _plain(ray.available_resources())  # type: ignore[no-untyped-call]
        return (
            f"Node {node} was not started by Ray within {within_s:g} s. It asks for {wanted}; of the machines "
            f"{'; '.join(machines)}; free in all: {free}. Add a machine, or ask for less "
            f"with remote_configs"
        )


class RayLink:
    """The main process' end."""

    def __init__(self, actor: Any, name: str, deadline_s: float) -> None:
        self._actor, self._name, self._deadline_s = actor, name, deadline_s
        self._lock = threading.Lock()
        self._sent = 0
        self._unanswered: deque[tuple[float, Any]] = deque()  # by when a message must have been taken, and the call
        self._asked = call(actor, "depart", group="depart")
        self._inbox: deque[Departed] = deque()
        self._expected = ExpectedBlocks()
        self._closed = ""  # why
        self._last = ""  # why nothing comes after what is in the inbox

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        try:
            self._check()
            while len(self._unanswered) >= WAITING:
                deadline, answer = self._unanswered.popleft()
                self._wait(answer, deadline, "has not taken anything")
                self._check(ray.get(answer))
            ref, nbytes = None, len(message)
            if block is not None:
                ref, nbytes = block.form("ray", ray.put), nbytes + block.array.nbytes
            with self._lock:
                self._check(self._last)
                answer = call(self._actor, "arrive", self._sent, message, tag, ref, group="arrive")
                self._sent += 1
            self._unanswered.append((time.monotonic() + allowed_s(self._deadline_s, nbytes), answer))
        except LOST as error:
            raise self._lost(error) from error

    def expect(self, tag: int, memory: Array) -> None:
        self._expected.expect(tag, memory)

    def receive(self) -> Received:
        try:
            deadline = time.monotonic() + self._deadline_s
            while not self._inbox:
                self._check(self._last)
                self._wait(self._asked, deadline, "has said nothing")
                messages, self._last = ray.get(self._asked)
                if not self._last:
                    self._asked = call(self._actor, "depart", group="depart")
                self._inbox.extend(messages)
            self._check()
            message, tag, ref, size = self._inbox.popleft()
            if ref is None:
                return Received(message, tag)
            self._wait(ref, time.monotonic() + allowed_s(self._deadline_s, size), "has sent a block that does not come")
            view: Any = ray.get(ref)
            memory = self._expected.put(tag, view)
            self._check()
            return Received(message, tag, view.copy() if memory is None else memory)
        except LOST as error:
            raise self._lost(error) from error

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, self._closed or "it was closed here"
            if first:
                with contextlib.suppress(*LOST):
                    call(self._actor, "end", self._sent)
        self._expected.close()

    def _check(self, why: str = "") -> None:
        if self._closed or why:
            raise LinkLost(f"the link to {self._name} is closed: {self._closed or why}")

    def _lost(self, error: Exception) -> LinkLost:
        return LinkLost(f"{self._name} is lost: {first_line(error)}")

    def _wait(self, ref: Any, deadline: float, silent: str) -> None:
        """Until what is asked for is here, or will not come."""
        while not arrived(ref, STEP_S):
            self._check()
            if time.monotonic() > deadline:
                raise LinkLost(f"{self._name} {silent} for {self._deadline_s:g} s")


def _is_up(ray_node: Mapping[str, Any]) -> bool:
    return listens(ray_node["NodeManagerAddress"], ray_node["NodeManagerPort"])


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


def _check_options(cls: Any, config: Mapping[str, Any], node: int) -> None:
    try:
        cls.options(**config)
    except (ValueError, TypeError) as error:
        raise BadOption(f"remote_configs of node {node}: {first_line(error)} Ray's own options are expected") from error
