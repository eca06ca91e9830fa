"""The pool of nodes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from muster.cluster.link import Block
from muster.cluster.messages import NodeSetup
from muster.cluster.node_proxy import NodeProxy
from muster.cluster.nodes import Nodes
from muster.env_spec import EnvSpec
from muster.memory.views import Order as DimOrder
from muster.observing.stats import InferenceStats
from muster.restore.crash_report import CrashDirectory
from muster.restore.pickling import dumps
from muster.utils.interrupts import allowed
from muster.workers.config import PoolConfig, WorkerPlace
from muster.workers.life import WorkerState
from muster.workers.slow_construction import listed
from muster.workers.supervision import SupervisedPool, news, unlike

LOOK_S = 0.2  # seconds between two looks for nodes that are due for a restart


class NodePool(SupervisedPool):
    """A pool of nodes, each of which has a worker pool of its own; see ``SupervisedPool``.

    Args:
        config: of all workers.
        layout: of batches that nodes write into a buffer.
        apart: see ``NodeProxy``.

    Attributes:
        nodes: over all sessions with them.
        proxies: of the nodes.
        wake_up: that of ``nodes``.
    """

    def __init__(
        self, nodes: Nodes, config: PoolConfig, layout: DimOrder, *, apart: bool
    ) -> None:
        super().__init__(config)
        self.elastic = nodes.enough is not None
        self.changes_memory = nodes.carrier.gives_memory
        self.nodes = nodes
        self.wake_up = nodes.wake_up
        crash_directory = CrashDirectory(config.supervision.crash_dir)
        policy = Block(np.frombuffer(config.policy, np.uint8))
        digest = hashlib.sha256(config.policy).digest()
        buffer = None if nodes.buffer is None else dumps(nodes.buffer, "replay_buffer")
        self.proxies: list[NodeProxy] = []
        for number in range(nodes.count):
            if (part := _part(config, nodes.of_leaf, number)) is not None:
                setup = NodeSetup(part, tuple(sys.path), digest, buffer, layout)
                proxy = NodeProxy(
                    number,
                    setup,
                    policy,
                    self,
                    nodes,
                    crash_directory,
                    apart=apart or buffer is not None,
                )
                self.proxies.append(proxy)
        self.handles = self.proxies
        self._of_node = {proxy.index: proxy for proxy in self.proxies}

    # --- as ``WorkerPool`` ------------------------------------------------------------------------

    def built(self) -> list[EnvSpec]:
        """The groups of all nodes; for nodes that are not there yet (``min_nodes``), what they are
        expected to be.
        """
        if self.elastic:
            self._wait_for_enough()
        else:
            for proxy in self.proxies:
                self.wait_for(proxy, lambda: proxy.infos is not None)  # noqa: B023
        known: dict[int, EnvSpec] = {}
        for proxy in self.proxies:
            known |= zip(proxy.groups, proxy.infos or (), strict=False)
        first = next(iter(known.values()))
        factories = [
            (factory, worker.setting)
            for worker in self.config.workers
            for factory in worker.factories
        ]
        numbered = list(zip(self.config.groups, factories, strict=True))
        of_factory: dict[Any, EnvSpec] = {}
        for number, factory in numbered:
            if number in known:
                of_factory[factory] = known[number]
        found = []
        for number, factory in numbered:
            expected = of_factory.get(factory, first)
            found.append(known.get(number, expected))
        return found

    def open(self, infos: Sequence[EnvSpec], place: WorkerPlace) -> None:
        """See ``SupervisedPool``. Absent nodes get their places when they join."""
        self._open(infos)
        if self.config.server is not None:
            self.server = NodeServers(self.proxies)
        for proxy in self.proxies:
            if proxy.absent and proxy.infos is None:
                for number in proxy.groups:
                    self.counters[number].is_absent()
        for proxy in sorted(
            self.proxies, key=lambda proxy: proxy.infos is not None
        ):  # absent nodes may join from here on
            proxy.assign(place.part(proxy.groups))
            self.wake_up.ring(proxy.index)  # it may have joined before it had a place

    @property
    def engine(self) -> str:
        return self.nodes.carrier.engine

    def end(self) -> None:
        """End the sessions; the nodes wait for the next ones. No session is started any more."""
        self.is_closed = True
        self.nodes.end_sessions()

    def hold(self) -> ExitStack:
        """A context; all requests that are submitted in it are one message to each node."""
        releases = ExitStack()
        for proxy in self.proxies:
            proxy.hold()
            releases.callback(proxy.release)
        return releases

    def _wait_for_enough(self) -> None:
        """Wait for ``min_nodes`` nodes. Raises the error of a lost node."""

        def lack(there: list[NodeProxy]) -> int:
            return (self.nodes.enough or 0) - len(there)

        while lack([proxy for proxy in self.proxies if proxy.infos is not None]) > 0:
            self._construction.look()
            self.wait(None, revives=False)
            alive = [proxy for proxy in self.proxies if proxy.alive]
            for proxy in self.proxies:
                if not proxy.alive and (not proxy.session.late or lack(alive) > 0):
                    self.raise_once(proxy)

    def missing(self) -> str:
        absent = [proxy for proxy in self.proxies if proxy.infos is None]
        joining = [proxy.index for proxy in absent if proxy.phase == "join"]
        building = [proxy.index for proxy in absent if proxy.phase != "join"]
        found = []
        if joining:
            address = self.nodes.carrier.address
            found.append(f"{listed('node', joining)} to join at {address}")
        if building:
            found.append(f"{listed('node', building)} to construct environments")
        text = " and ".join(found)
        there = len(self.proxies) - len(absent)
        lack = (self.nodes.enough or len(self.proxies)) - there
        if 0 < lack < len(absent):
            return f"{lack} of {text}"
        return text

    # --- Watch ------------------------------------------------------------------------------------

    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """See ``SupervisedPool``."""
        if revives:
            if self._returned:
                return
            self._revive_due()
        with allowed():
            self.wake_up.wait(
                0.0 if self.wake_up.unattended else self._until_due(LOOK_S, timeout)
            )
        with self.wake_up.senders() as nodes:
            for proxy in [
                self._of_node[node] for node in nodes if node in self._of_node
            ]:
                if not proxy.alive:
                    continue
                proxy.pump()
                if not proxy.session.lost:
                    self._welcome(proxy)
                elif not proxy.session.inbox:
                    self._lose(proxy)
                if any(
                    result.error is None and not result.lost
                    for result in proxy.under_way.results
                ):
                    proxy.life.has_completed()
        self._begin_stranded()

    def _welcome(self, proxy: NodeProxy) -> None:
        """Use a node that has joined late, if it has as many environments as were expected."""
        if not (
            self.elastic
            and proxy.state is WorkerState.JOINING
            and proxy.infos is not None
            and proxy.place
        ):
            return
        for number, info in zip(proxy.groups, proxy.infos, strict=True):
            counts = self.counters[number]
            if (info.num_envs, info.batch_shape) != (
                counts.info.num_envs,
                counts.info.batch_shape,
            ):
                proxy.refuse(unlike(proxy.where(), counts.info, info))
                self._lose(proxy)
                return
            counts.describe(info)
        proxy.join()
        self.add_result(news(proxy.groups[0]))

    def _lose(self, proxy: NodeProxy) -> None:
        """Handle a lost node: its requests go to its successor, to other nodes, or back to the
        schedule.
        """
        error = proxy.lose("")
        self._settle(proxy, error)

    def _may_restart(self, proxy: NodeProxy) -> bool:
        """See ``SupervisedPool``.

        A node with another Muster is not restarted: it would have the same one again. If no node is
        left, one that did not join in time is an error: it was waited for.
        """
        if proxy.session.mismatch:
            return False
        if proxy.late and self.counters and all(other.absent for other in self.proxies):
            return False
        return super()._may_restart(proxy)


class NodeServers:
    """Implements ``Servers``: there is one inference server on every node."""

    def __init__(self, proxies: Sequence[NodeProxy]) -> None:
        self._proxies = proxies

    def settle(self) -> None:
        """Does nothing: servers on nodes do not use the user's random streams."""

    def ask(self, method: str, *args: Any, group: int | None = None) -> Any:
        """The answer of the server for a group. None: asks all servers, absent ones when they join,
        and returns the first answer.
        """
        if group is not None:
            proxy = next(proxy for proxy in self._proxies if group in proxy.groups)
            return proxy.ask_server(method, args, keep=False)
        answers = [proxy.ask_server(method, args, keep=True) for proxy in self._proxies]
        return answers[0]

    def stats(self) -> InferenceStats:
        """The sum over all nodes."""
        every = [proxy.told.inference for proxy in self._proxies]
        known = [stats for stats in every if stats is not None]
        return InferenceStats(
            sum(stats.calls for stats in known),
            sum(stats.rows for stats in known),
            sum(stats.busy_s for stats in known),
        )


def _part(config: PoolConfig, of_leaf: Sequence[int], node: int) -> PoolConfig | None:
    """The config of a node's workers, without the policy; None: the node has no workers."""
    workers = [worker for worker in config.workers if of_leaf[worker.index] == node]
    if not workers:
        return None
    origins = dict(zip(config.groups, config.origins, strict=True))
    groups = [number for worker in workers for number in worker.groups]
    return replace(
        config,
        workers=workers,
        policy=b"",
        origins=[origins[number] for number in groups],
        supervision=replace(
            config.supervision, crash_dir=None
        ),  # reports are written here
    )
