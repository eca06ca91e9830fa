"""Nodes of ``DistributedCollector``: how the main process gets them to join, and what they run.

A session runs over the connection through which its node has joined. No process group of torch is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from os import PathLike

from muster.cluster.launchers import Launcher, Started
from muster.cluster.link import AGENT, Link, LinkLost
from muster.cluster.rendezvous import DISTRIBUTED, RPC, Member, Rendezvous, read_token
from muster.cluster.torchrun import find_rendezvous
from muster.errors import BadOption
from muster.utils.attributes import named
from muster.workers.channel import Channel
from muster.workers.launch import fork_server_here

JOIN_POLL_S = 0.02


class DistributedCarrier:
    """Nodes in the place of TorchRL's over torch.distributed.

    Args:
        launcher: how nodes come to life.
        rendezvous: where they find this process; closed by ``close``.
        deadline_s: seconds without anything after which a link is lost.
    """

    name = "torch.distributed"
    engine = DISTRIBUTED

    def __init__(self, count: int, *, launcher: Launcher, rendezvous: Rendezvous, deadline_s: float = 15.0) -> None:
        if rendezvous.count != count:
            raise BadOption(f"{count} nodes, but the rendezvous is for {rendezvous.count}.")
        self._launcher, self.rendezvous, self.deadline_s = launcher, rendezvous, deadline_s
        self._started: dict[int, Started] = {}
        self._lock = threading.Lock()
        self._closed = False
        rendezvous.engine = self.engine
        rendezvous.deadline_s = deadline_s

    def connect(self, node: int, epoch: int, within_s: float, given_up: threading.Event) -> Link:
        """As in ``Carrier``."""
        deadline = time.monotonic() + within_s
        self._end(node)
        self.rendezvous.admit(node, epoch)
        try:
            self._start(node, epoch)
            channel = self._wait(node, epoch, deadline, within_s, given_up)
            return self.meet(channel, node, epoch)
        except BaseException:
            self.rendezvous.withdraw(node)
            self._end(node)
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._started)
        for node in nodes:
            self._end(node)
        self._launcher.close()
        self.rendezvous.close()

    def meet(self, channel: Link, node: int, epoch: int) -> Link:
        """The link to a node that does the same at its end, through a channel of this session alone, which is closed by
        this or with the link. Other engines override it. Raises LinkLost.
        """
        return channel

    def _start(self, node: int, epoch: int) -> None:
        started = self._launcher.start(node, epoch, self.rendezvous)
        with self._lock:
            if started is not None:
                self._started[node] = started
            closed = self._closed
        if closed:  # meanwhile
            self._end(node)
            raise LinkLost(f"Node {node} was given up: the collector is closed.")

    def _end(self, node: int) -> None:
        with self._lock:
            started = self._started.pop(node, None)
        if started is not None:
            started.end()

    def _wait(self, node: int, epoch: int, deadline: float, within_s: float, given_up: threading.Event) -> Link:
        """For the node to join; the channel to it."""
        with self._lock:
            started = self._started.get(node)
        while (channel := self.rendezvous.joined(node, epoch, JOIN_POLL_S)) is None:
            if given_up.is_set():
                raise LinkLost(f"Node {node} was given up before it had joined.")
            if started is not None and (reason := started.ended()):
                raise LinkLost(f"Node {node} has not joined: {reason}. {self._launcher.advice}".rstrip())
            if time.monotonic() > deadline:
                state = "" if started is None else f" Its {started} is {started.state}."
                raise LinkLost(
                    f"Node {node} has not joined at {self.rendezvous.address} within {within_s:g} s.{state} "
                    f"{self._launcher.advice}{self.rendezvous.refused()}".rstrip()
                )
        return channel


def run_node(
    address: str | None = None,
    node: int | None = None,
    token: bytes | str | PathLike[str] | None = None,
    *,
    engine: str = DISTRIBUTED,
    target: str = AGENT,
    within_s: float = 600.0,
    patience_s: float = 600.0,
) -> bool:
    """Be a node, until the main process says goodbye or is gone. After a lost link, it joins again.

    Args:
        address: "host:port" of the main process; None: under torchrun.
        node: its number; None: any that is free (under torchrun: the rank less 1).
        token: bytes, or the path of a file; None: as MUSTER_TOKEN_FILE or MUSTER_TOKEN say.
        engine: how it is connected: "distributed", or "rpc", for an ``RPCCollector`` only: every process that reaches
            the node can then run code in it. The main process has no say in this.
        target: the function that serves, ``"module:function"``.
        within_s: seconds until the main process must listen.
        patience_s: seconds for which it may be out of reach later.

    Returns:
        Whether it said goodbye.

    Raises:
        WrongToken: this node has another token than the main process.
        LinkLost: the main process could not be reached for too long.
        BadOption: there is no token, no address, or the main process wants another engine.
    """
    secret = read_token(token)
    if address is None:
        address, number, secret = find_rendezvous(secret, within_s)
        node = number if node is None else node
    if secret is None:
        raise BadOption("A node needs the token of its main process: token=, or MUSTER_TOKEN_FILE (a file's path).")
    serve: Callable[[Link, int], bool] = named(target)
    member = Member(address, secret, node, engine=engine, within_s=within_s, patience_s=patience_s)
    while (membership := member.join()) is not None:
        link = membership.channel
        try:
            if engine == RPC:
                from muster.cluster.torch_rpc import join_rpc

                link = join_rpc(membership)
        except LinkLost:  # the main process has given this session up: there will be another
            continue
        try:
            if serve(link, membership.node):
                return True
        finally:
            link.close()
    return False


def node_main(channel: Channel) -> None:
    """The process of a node that ``MpLauncher`` has started."""
    fork_server_here()  # while there is one thread
    (address, node, token, target, engine), _ = channel.receive()
    run_node(address, node, token, target=target, engine=engine)
