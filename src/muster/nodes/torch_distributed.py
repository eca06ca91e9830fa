"""Nodes over torch.distributed: how the main process gets them to join, and what they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

from muster.attributes import named
from muster.errors import BadOption, MusterError
from muster.nodes.gloo import check_backend, join_group, why
from muster.nodes.launchers import Launcher, Started, torchrun_address
from muster.nodes.link import AGENT, Link, LinkLost
from muster.nodes.meeting import Guest, Invitation, Meeting, local_address, read_token
from muster.nodes.seal import WrongToken, seal
from muster.sources.channel import Channel
from muster.sources.launch import fork_server_here

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

JOIN_POLL_S = 0.02
ENGINES = {"rpc": "muster.nodes.torch_rpc:join_rpc"}  # other ones: a function of an invitation and a deadline


class DistributedCarrier:
    """Nodes over torch.distributed.

    Args:
        count: of nodes.
        backend: what blocks go through; messages always go through gloo.
        launcher: how nodes come to life.
        meeting: where they find this process; closed by ``close``.
        deadline_s: seconds without anything after which a link is lost.

    Attributes:
        meeting: as above.
        deadline_s: as above.

    Raises:
        BadOption: this PyTorch has not got the backend.
    """

    name = "torch.distributed"

    def __init__(
        self, count: int, *, launcher: Launcher, meeting: Meeting, backend: str = "gloo", deadline_s: float = 15.0
    ) -> None:
        check_backend(backend)
        if meeting.count != count:
            raise BadOption(f"{count} nodes, but the meeting is for {meeting.count}.")
        self._backend, self._launcher, self.meeting, self.deadline_s = backend, launcher, meeting, deadline_s
        self._started: dict[int, Started] = {}
        self._lock = threading.Lock()
        self._closed = False
        meeting.tell(backend=backend, deadline_s=deadline_s)

    def connect(self, node: int, epoch: int, within_s: float, given_up: threading.Event) -> Link:
        """As in ``Carrier``."""
        deadline = time.monotonic() + within_s
        self._end(node)
        self.meeting.invite(node, epoch)
        try:
            self._start(node, epoch)
            client = self.meeting.client()
            self._wait(client, node, epoch, deadline, within_s, given_up)
            store = self.meeting.group_store(client, node, epoch)
            link = self.meet(store, node, epoch)
            return seal(link, self.meeting.token, main=True, node=node, epoch=epoch)
        except BaseException as error:
            self.meeting.withdraw(node)
            self._end(node)
            if isinstance(error, MusterError) or not isinstance(error, RuntimeError):
                raise
            raise LinkLost(f"Node {node} has not joined: {why(error)}") from error  # of the store or of the group

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._started)
        for node in nodes:
            self._end(node)
        self._launcher.close()
        self.meeting.close()

    def meet(self, store: Store, node: int, epoch: int) -> Link:
        """A link to a node that does the same at its end; ``store`` is this session's alone. Other engines override it.

        Raises:
            RuntimeError: the node does not come within the deadline.
        """
        return join_group(store, 0, self.meeting.host, self._backend, self.deadline_s)

    def _start(self, node: int, epoch: int) -> None:
        started = self._launcher.start(node, epoch, self.meeting)
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

    def _wait(
        self, client: TCPStore, node: int, epoch: int, deadline: float, within_s: float, given_up: threading.Event
    ) -> None:
        with self._lock:
            started = self._started.get(node)
        while not self.meeting.joined(client, node, epoch):
            if given_up.is_set():
                raise LinkLost(f"Node {node} was given up before it had joined.")
            if started is not None and (reason := started.ended()):
                raise LinkLost(f"Node {node} has not joined: {reason}. {self._launcher.advice}")
            if time.monotonic() > deadline:
                state = "" if started is None else f" Its {started} is {started.state}."
                raise LinkLost(
                    f"Node {node} has not joined at {self.meeting.address} within {within_s:g} s.{state} "
                    f"{self._launcher.advice}"
                )
            given_up.wait(JOIN_POLL_S)


def run_node(
    address: str | None = None,
    node: int | None = None,
    token: bytes | str | PathLike[str] | None = None,
    *,
    target: str = AGENT,
    within_s: float = 600.0,
    patience_s: float = 600.0,
) -> bool:
    """Be a node, until the main process says goodbye or is gone. After a lost link, it joins again.

    Args:
        address: "host:port" of the main process; None: under torchrun.
        node: its number; None: any that is free (under torchrun: the rank less 1).
        token: bytes, or the path of a file; None: as MUSTER_TOKEN_FILE or MUSTER_TOKEN say.
        target: the function that serves, ``"module:function"``.
        within_s: seconds until the main process must listen.
        patience_s: seconds for which it may be out of reach later.

    Returns:
        Whether it said goodbye.

    Raises:
        WrongToken: this node has another token than the main process.
        LinkLost: the main process could not be reached for too long.
        BadOption: there is no token, or no address.
    """
    secret = read_token(token)
    if address is None:
        address, number, published = torchrun_address(within_s)
        node = number if node is None else node
        secret = secret or published
    if secret is None:
        raise BadOption("A node needs the token of its main process: token=, or MUSTER_TOKEN_FILE (a file's path).")
    serve: Callable[[Link, int], bool] = named(target)
    guest = Guest(address, node, within_s=within_s, patience_s=patience_s)
    while (invitation := guest.next()) is not None:
        try:
            link = join(invitation, secret)
        except WrongToken:
            raise
        except (LinkLost, RuntimeError):  # the main process has given this session up: there will be another
            continue
        try:
            if serve(link, invitation.node):
                return True
        finally:
            link.close()
    return False


def join(invitation: Invitation, token: bytes) -> Link:
    """The node's end of the session that it was invited to.

    Raises:
        WrongToken: the main process has another.
        LinkLost: it is gone.
    """
    settings = invitation.settings
    deadline_s = float(settings["deadline_s"])
    if engine := settings.get("engine"):
        link = named(ENGINES[engine])(invitation, deadline_s)
    else:
        backend = str(settings["backend"])
        check_backend(backend)
        link = join_group(invitation.store, 1, local_address(invitation.host), backend, deadline_s)
    return seal(link, token, main=False, node=invitation.node, epoch=invitation.epoch)


def node_main(channel: Channel) -> None:
    """The process of a node that ``MpLauncher`` has started."""
    fork_server_here()  # while there is one thread
    (address, node, token, target), _ = channel.receive()
    run_node(address, node, token, target=target)
