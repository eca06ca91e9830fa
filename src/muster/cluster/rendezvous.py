"""The port at which nodes join the main process, with a token, and with the epoch in which each
node may join.

Both ends of every connection prove that they know the token (``Link``) before either acts on a
message of the other. So an offer to a node comes from a process that knows the token, belongs to
this connection alone, and cannot be repeated in another one. The connection then is the link of the
session. A process that reaches the port without the token can delay nodes that join, by more
connections than ``STRANGERS`` in every ``KEEPS_S``, and nothing else.

::

    node -> main   {"node": number or null, "muster"}        the number that it wants
    main -> node   {"count", "node": null}                   there is no offer yet: the node asks again
    main -> node   {"count", "node", "epoch", "engine",
                    "deadline_s", "groups", "muster"}        an offer, with the terms of the session
    main -> node   {"refused": why}                          the node has another Muster: it ends
    node -> main   {"accepted": true}                        afterwards the connection is the session's
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import threading
import time
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any

from muster.cluster.admissions import ANSWER_S, Admission, Admissions, Terms
from muster.cluster.link import LinkLost, OtherMuster, WrongToken
from muster.cluster.socket_link import SocketLink
from muster.cluster.token import TOKEN_BYTES, TOKEN_FILE, read_token
from muster.cluster.versions import Installed, check_node, installed
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.integers import integer
from muster.utils.strangers import Strangers

POLL_S = 0.1
STUCK_S = 5.0  # after which a node that cannot be accepted counts as lost
# after which the thread checks for closing, on systems where closing does not wake it
ACCEPT_MS = 1000
BACKLOG = 512
HIGHEST_PORT = 65535
STRANGERS = (
    128  # connections at a time that have not yet proved that they know the token
)
KEEPS_S = 0.5  # for which each of them keeps its place; nodes try again


class Rendezvous:
    """The main process' end.

    Args:
        count: of nodes.
        bind: address (or name) of this machine at which it listens.
        tcp_port: port at which it listens; 0: a free one.
        token: the secret that nodes must know. None: the contents of the file MUSTER_TOKEN_FILE, or
            MUSTER_TOKEN, else a random one, if ``bind`` is loopback.

    Attributes:
        address: "host:port".
        host: the address of ``bind``.
        token: the secret.

    Raises:
        BadOption: the port does not exist or is taken, ``bind`` is not an address of this machine,
            or other machines can reach it and there is no token.
    """

    def __init__(
        self,
        count: int,
        *,
        bind: str = "127.0.0.1",
        tcp_port: int = 0,
        token: bytes | str | os.PathLike[str] | None = None,
    ) -> None:
        if integer("tcp_port", tcp_port, 0) > HIGHEST_PORT:
            raise BadOption(
                f"tcp_port={tcp_port}: expected at most {HIGHEST_PORT}; 0 takes a free one."
            )
        self.count = count
        self.host = _resolved(bind)
        given = read_token(token)
        if given is None and not is_loopback(self.host):
            raise BadOption(
                f"bind={bind!r} can be reached from other machines, so that nodes need a token:"
                f" pass token=, or the path of a file with mode 0600 in {TOKEN_FILE}, here and on"
                " every node. (bind='127.0.0.1' needs none.)"
            )
        self.token = given or secrets.token_hex(TOKEN_BYTES).encode()
        self._admissions = Admissions()
        self._connections: set[socket.socket] = set()  # that no node has accepted
        # those of them that have not proved that they know the token
        self._strangers = Strangers(KEEPS_S)
        self._refused = 0
        self._last_refused = ""
        # since when no connection can be accepted, and why
        self._failing: tuple[float, OSError] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._listener = _listen(self.host, tcp_port)
        port = self._listener.getsockname()[1]
        self.address = (
            f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        )
        try:
            threading.Thread(
                target=self._accept, name="muster-rendezvous", daemon=True
            ).start()
        except RuntimeError:  # the system allows no more threads
            self._listener.close()
            raise

    def admit(self, node: int, epoch: int, terms: Terms | None = None) -> None:
        """Let a node join with this epoch and these terms; see ``Admissions``."""
        self._admissions.admit(Admission(node, epoch, terms or Terms()))

    def withdraw(self, node: int) -> None:
        """Refuse this node until it is admitted again."""
        self._admissions.withdraw(node)

    def joined(self, node: int, epoch: int, within_s: float) -> SocketLink | None:
        """Wait for the link to a node; see ``Admissions``."""
        return self._admissions.joined(node, epoch, within_s)

    def refused(self) -> str:
        """A sentence for the user about peers without the token; empty if there were none."""
        with self._lock:
            if not self._refused:
                return ""
            return f" {self._refused} connections were refused; the last one, {self._last_refused}"

    def stuck(self) -> str:
        """Why no connection could be accepted for ``STUCK_S``; empty if they can be."""
        with self._lock:
            if self._failing is None or time.monotonic() - self._failing[0] < STUCK_S:
                return ""
            why = self._failing[1].strerror
        return (
            f"connections to {self.address} cannot be accepted ({why}). Close files, or raise the"
            " limit (ulimit -n)"
        )

    def close(self) -> None:
        """Stop listening, and close the links of sessions that have not begun.

        May be called again.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        self._admissions.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(
                socket.SHUT_RDWR
            )  # wakes the accepting thread on Linux
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):  # wakes its thread, which closes it
                connection.shutdown(socket.SHUT_RDWR)

    # --- threads ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        poller = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it was closed
            poller.register(self._listener, select.POLLIN)
        while not self._closed:
            self._strangers.end_late(2 * ANSWER_S)
            if not poller.poll(ACCEPT_MS):
                self._failing = None
                continue
            try:
                connection, who = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # closed; or no descriptors are left: try again
                self._failing = self._failing or (time.monotonic(), error)
                threading.Event().wait(POLL_S)
                continue
            with self._lock:
                if self._closed or not self._strangers.add(connection, STRANGERS):
                    connection.close()
                    continue
                self._connections.add(connection)
            arguments = (connection, f"from {who[0]}:{who[1]}")
            try:
                threading.Thread(
                    target=self._attend,
                    args=arguments,
                    name="muster-joining",
                    daemon=True,
                ).start()
            except (
                RuntimeError
            ) as error:  # the system allows no more threads: the peer tries again
                self._failing = self._failing or (
                    time.monotonic(),
                    OSError(errno.EAGAIN, str(error)),
                )
                self._forget(connection)
                connection.close()
            else:
                self._failing = None

    def _attend(self, connection: socket.socket, where: str) -> None:
        """Serve one connection until it is the link of a session, or ends."""
        is_known = False
        try:
            link = SocketLink(connection, self.token, main=True, deadline_s=ANSWER_S)
            is_known = True
            with contextlib.ExitStack() as unused:
                unused.callback(link.close)
                if self._strangers.remove(connection) and self._offer(link):
                    unused.pop_all()
        except WrongToken:
            self._refuse(f"{where}, does not know the token of this collector.")
        except (LinkLost, ValueError, TypeError, KeyError) as error:
            if not is_known:
                self._refuse(f"{where}, is not a node: {error}")
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._strangers.remove(connection)
        with self._lock:
            self._connections.discard(connection)

    def _refuse(self, whom: str) -> None:
        with self._lock:
            self._refused += 1
            self._last_refused = whom

    def _offer(self, channel: SocketLink) -> bool:
        """Offer nodes until one is accepted; False: the offer was withdrawn meanwhile."""
        while True:
            asked = hear(channel)
            admission = self._admissions.claim(asked["node"])
            if admission is None:
                say(channel, count=self.count, node=None)
                continue
            node = admission.node
            terms = admission.terms
            try:
                if not self._fits(admission, asked.get("muster"), channel):
                    return False
                say(
                    channel,
                    count=self.count,
                    node=node,
                    epoch=admission.epoch,
                    muster=installed(),
                    **asdict(terms),
                )
                hear(channel)["accepted"]
                channel.begin_session(terms.deadline_s)
                return self._admissions.accept(admission, channel)
            finally:
                self._admissions.release(admission)

    def _fits(
        self, admission: Admission, node: Installed | None, channel: SocketLink
    ) -> bool:
        """Whether the node has the Muster of this process; it is refused otherwise."""
        try:
            check_node(admission.node, node)
        except OtherMuster as other:
            try:
                say(channel, refused=str(other))
            finally:  # afterwards: the main process ends, and with it this connection
                self._admissions.refuse(admission, str(other))
            return False
        return True


def say(channel: SocketLink, **record: Any) -> None:
    """Send a record; raises LinkLost."""
    channel.send(json.dumps(record).encode())


def hear(channel: SocketLink) -> dict[str, Any]:
    """Receive a record; raises LinkLost."""
    record: dict[str, Any] = json.loads(channel.receive().message)
    return record


def _resolved(bind: str) -> str:
    """The IP address of ``bind``."""
    try:
        host = str(socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadOption(
            f"bind={bind!r} is neither an address nor the name of a host: {error.strerror}."
        ) from error
    if ip_address(host.partition("%")[0]).is_unspecified:
        raise BadOption(
            f"bind={bind!r} is not one address; name the one that nodes can reach (`ip -brief"
            " address`)."
        )
    return host


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadOption(
            f"Nodes cannot meet at {bind}:{port}: {error.strerror or error}. `ss -ltnp 'sport ="
            f" :{port}'` shows who has the port; tcp_port=0 takes a free one, and bind= must be an"
            " address of this machine."
        ) from error
    listener.setblocking(False)
    return listener
