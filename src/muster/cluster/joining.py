"""The node's end of the rendezvous: it joins, serves a session, and joins again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from muster.cluster.admissions import ANSWER_S
from muster.cluster.link import AGENT, Link, LinkLost, WrongToken
from muster.cluster.rendezvous import POLL_S, hear, say
from muster.cluster.socket_link import SocketLink
from muster.cluster.token import read_token
from muster.cluster.torchrun import find_rendezvous
from muster.cluster.versions import difference, installed
from muster.errors import BadOption, VersionMismatch
from muster.utils.addresses import host_and_port
from muster.utils.attributes import named
from muster.workers.channel import Channel
from muster.workers.launch import fork_server_here

if TYPE_CHECKING:
    from muster.cluster.distributed_link import DistributedLink


def run_node(
    address: str | None = None,
    node: int | None = None,
    token: bytes | str | PathLike[str] | None = None,
    *,
    target: str = AGENT,
    within_s: float = 600.0,
    patience_s: float = 600.0,
) -> bool:
    """Run a node until the main process ends the collection or exits.

    After a lost link, the node joins again.

    Args:
        address: "host:port" of the main process. None: the address that rank 0 of torchrun has
            published.
        node: number of this node. None: any free number (under torchrun: the rank less 1).
        token: bytes, or the path of a file. None: the environment variable MUSTER_TOKEN_FILE or
            MUSTER_TOKEN.
        target: the function that serves a session, ``"module:function"``.
        within_s: seconds for the main process to listen.
        patience_s: seconds for which the main process may be unreachable later.

    Returns:
        True if the main process ended the collection, False if it exited without that.

    Raises:
        WrongToken: this node has another token than the main process.
        LinkLost: the main process was unreachable for too long.
        VersionMismatch: this node has another Muster than the main process.
        BadOption: the token or the address is missing, or the engine of the main process is refused
            here.
    """
    secret = read_token(token)
    if address is None:
        address, number, secret = find_rendezvous(secret, within_s)
        node = number if node is None else node
    if secret is None:
        raise BadOption(
            "A node needs the token of its main process: token=, or MUSTER_TOKEN_FILE (a file's"
            " path)."
        )
    serve: Callable[[Link, int], bool] = named(target)
    member = Member(address, secret, node, within_s=within_s, patience_s=patience_s)
    while (membership := member.join()) is not None:
        with contextlib.suppress(LinkLost), ENDS[membership.engine](membership) as link:
            if serve(link, membership.node):
                return True
    return False


def node_main(channel: Channel) -> None:
    """The process of a node that ``MpLauncher`` has started."""
    fork_server_here()  # while there is one thread
    (address, node, token, target), _ = channel.receive()
    run_node(address, node, token, target=target)


@dataclass(frozen=True)
class Membership:
    """A session that the node has joined.

    The caller closes ``channel``, which goes to the main process.

    Attributes:
        groups: of ``distributed_link.Groups``, if the engine has any.
    """

    node: int
    epoch: int
    deadline_s: float
    channel: SocketLink
    engine: str
    groups: Mapping[str, Any] | None


def _over_channel(membership: Membership) -> contextlib.closing[SocketLink]:
    return contextlib.closing(membership.channel)


def _over_groups(membership: Membership) -> contextlib.closing[DistributedLink]:
    from muster.cluster.distributed_link import DistributedLink, Groups

    assert membership.groups is not None
    return contextlib.closing(
        DistributedLink(membership.channel, Groups(**membership.groups), main=False)
    )


def _over_rpc(membership: Membership) -> contextlib.AbstractContextManager[Link]:
    from muster.cluster.rpc_nodes import joined

    return joined(membership.channel, membership.deadline_s)


ENDS: dict[str, Callable[[Membership], contextlib.AbstractContextManager[Link]]] = {
    "direct": _over_channel,
    "torch_distributed": _over_groups,
    "rpc": _over_rpc,
}  # by engine: a context with the node's end of the link


class Member:
    """Joins sessions, one after another.

    Args:
        address, token: of the main process.
        node: number of this node; None: any free number.
        within_s: seconds for the main process to listen.
        patience_s: seconds for which a main process that was reached once may be unreachable (a
            network that is cut). If its machine refuses the connection, it has ended.

    Raises:
        BadOption: the address is not "host:port".
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        node: int | None = None,
        *,
        within_s: float = 600.0,
        patience_s: float = 600.0,
    ) -> None:
        self._endpoint, self._token = host_and_port(address), token
        self._node = node
        self._within_s = within_s
        self._patience_s = patience_s
        self._met = False

    def join(self) -> Membership | None:
        """Wait until the main process admits this node to a session.

        Returns:
            None: the main process has ended.

        Raises:
            WrongToken: the process that listens there does not know the token.
            BadOption: the main process has no node of this number.
            VersionMismatch: the main process has another Muster.
            LinkLost: it was unreachable for too long.
        """
        reached = time.monotonic()
        pause = threading.Event()
        while True:
            try:
                connection = socket.create_connection(self._endpoint, timeout=1.0)
                channel = SocketLink(
                    connection, self._token, main=False, deadline_s=ANSWER_S
                )
                with contextlib.ExitStack() as failed:
                    failed.callback(channel.close)
                    self._met, reached = True, time.monotonic()
                    while (found := self._ask(channel)) is None:
                        reached = time.monotonic()
                    failed.pop_all()
                    return found
            except WrongToken:
                raise
            except ConnectionRefusedError:
                if self._met:
                    return None
            except (
                LinkLost,
                OSError,
            ):  # it has just ended, the network was cut, or another program listens there
                pass
            limit = self._patience_s if self._met else self._within_s
            if time.monotonic() - reached > limit:
                host, port = self._endpoint
                raise LinkLost(
                    f"The main process at {host}:{port} could not be reached for {limit:g} s."
                )
            pause.wait(POLL_S)

    def _ask(self, channel: SocketLink) -> Membership | None:
        say(channel, node=self._node, muster=installed())
        told = hear(channel)
        if refused := told.get("refused"):
            raise VersionMismatch(refused)
        if self._node is not None and self._node >= told["count"]:
            raise BadOption(
                f"node={self._node}: the main process expects {told['count']} nodes, numbered"
                " from 0."
            )
        if told["node"] is None:
            return None
        if why := difference(told.get("muster"), installed()):
            raise VersionMismatch(f"This node cannot be used: {why}.")
        say(channel, accepted=True)
        channel.begin_session(told["deadline_s"])
        return Membership(
            told["node"],
            told["epoch"],
            told["deadline_s"],
            channel,
            told["engine"],
            told["groups"],
        )
