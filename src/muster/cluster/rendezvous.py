"""The port at which nodes join the main process, with a token, and with the epoch in which each
node may join.

Both ends of every connection prove that they know the token (``Link``) before either acts on a
message of the other. So an offer to a node comes from a process that knows the token, belongs to
this connection alone, and cannot be repeated in another one. The connection then is the link of the
session. A process that reaches the port without the token can delay nodes that join, by more
connections than ``STRANGERS`` in every ``KEEPS_S``, and nothing else.

::

    node -> main   {"node": number or null}                  the number that it wants
    main -> node   {"count", "deadline_s", "engine", "groups",
                    "node", "epoch"}                         an offer; "node" is null if there is none yet
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
import stat
import threading
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from muster.cluster.link import LinkLost, WrongToken
from muster.cluster.socket_link import SocketLink
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.integers import integer
from muster.utils.strangers import Strangers

TOKEN_BYTES = 32
SHORTEST_TOKEN = 16  # bytes
LONGEST_TOKEN = 4096
TOKEN_FILE = "MUSTER_TOKEN_FILE"
TOKEN = "MUSTER_TOKEN"
ANSWER_S = 5.0  # for an answer of the other end
PAUSE_S = 1.0  # after which a node without an offer is told so
POLL_S = 0.1
STUCK_S = 5.0  # after which a node that cannot be accepted counts as lost
# after which the thread checks for closing, on systems where closing does not wake it
ACCEPT_MS = 1000
BACKLOG = 512
HIGHEST_PORT = 65535
STRANGERS = 128  # connections at a time that have not yet proved that they know the token
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
        deadline_s: of the links of sessions, at both ends; set by the carrier.
        engine: of the carrier, which sets it.
        groups: of the sessions' process groups, see ``distributed_link.Groups``; None: they have
            none. Set by the carrier.

    Raises:
        BadOption: the port does not exist or is taken, ``bind`` is not an address of this machine,
            or other machines can reach it and there is no token.
    """

    deadline_s = ANSWER_S
    engine = "direct"
    groups: Mapping[str, Any] | None = None

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
        self.count, self.host = count, _resolved(bind)
        given = read_token(token)
        if given is None and not is_loopback(self.host):
            raise BadOption(
                f"bind={bind!r} can be reached from other machines, so that nodes need a token:"
                f" pass token=, or the path of a file with mode 0600 in {TOKEN_FILE}, here and on"
                " every node. (bind='127.0.0.1' needs none.)"
            )
        self.token = given or secrets.token_hex(TOKEN_BYTES).encode()
        self._open: dict[int, int] = {}  # by node, the epoch in which it may join
        # offers that a node has not accepted yet
        self._offered: set[tuple[int, int] | None] = set()
        # by node and epoch, until ``joined`` takes it
        self._joined: dict[tuple[int, int], SocketLink] = {}
        self._connections: set[socket.socket] = set()  # that no node has accepted
        # those of them that have not proved that they know the token
        self._strangers = Strangers(KEEPS_S)
        self._refused = 0
        self._last_refused = ""
        # since when no connection can be accepted, and why
        self._failing: tuple[float, OSError] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._listener = _listen(self.host, tcp_port)
        port = self._listener.getsockname()[1]
        self.address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        try:
            threading.Thread(target=self._accept, name="muster-rendezvous", daemon=True).start()
        except RuntimeError:  # the system allows no more threads
            self._listener.close()
            raise

    def admit(self, node: int, epoch: int) -> None:
        """Let a node join with this epoch, and with no other epoch."""
        with self._changed:
            self._open[node] = epoch
            self._changed.notify_all()

    def withdraw(self, node: int) -> None:
        """Refuse this node until it is admitted again."""
        with self._changed:
            self._open.pop(node, None)
            unused = [self._joined.pop(key) for key in list(self._joined) if key[0] == node]
        for channel in unused:
            channel.close()

    def joined(self, node: int, epoch: int, within_s: float) -> SocketLink | None:
        """The link to a node that has joined, which the caller closes; None: it has not joined in
        this time.
        """
        with self._changed:
            self._changed.wait_for(lambda: (node, epoch) in self._joined or self._closed, within_s)
            return self._joined.pop((node, epoch), None)

    def refused(self) -> str:
        """A sentence for the user about peers without the token; empty if there were none."""
        with self._changed:
            if not self._refused:
                return ""
            return f" {self._refused} connections were refused; the last one, {self._last_refused}"

    def stuck(self) -> str:
        """Why no connection could be accepted for ``STUCK_S``; empty if they can be."""
        with self._changed:
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
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connections, links = list(self._connections), list(self._joined.values())
            self._joined.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread on Linux
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):  # wakes its thread, which closes it
                connection.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.close()

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
            with self._changed:
                if self._closed or not self._strangers.add(connection, STRANGERS):
                    connection.close()
                    continue
                self._connections.add(connection)
            arguments = (connection, f"from {who[0]}:{who[1]}")
            try:
                threading.Thread(
                    target=self._attend, args=arguments, name="muster-joining", daemon=True
                ).start()
            except RuntimeError as error:  # the system allows no more threads: the peer tries again
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
                self._refuse(f"{where}, is no node: {error}")
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._strangers.remove(connection)
        with self._changed:
            self._connections.discard(connection)

    def _refuse(self, whom: str) -> None:
        with self._changed:
            self._refused, self._last_refused = self._refused + 1, whom

    def _offer(self, channel: SocketLink) -> bool:
        """Offer free numbers until one is accepted; False: the offer was withdrawn meanwhile."""
        while True:
            found = self._claim(hear(channel)["node"])
            told = {
                "count": self.count,
                "deadline_s": self.deadline_s,
                "engine": self.engine,
                "groups": self.groups,
            }
            node, epoch = found or (None, None)
            try:
                say(channel, **told, node=node, epoch=epoch)
                if found is None:
                    continue
                hear(channel)["accepted"]
                with self._changed:
                    channel.deadline_s = self.deadline_s
                    is_open = self._open.get(found[0]) == found[1] and not self._closed
                    if is_open:  # it was not withdrawn meanwhile
                        del self._open[found[0]]
                        self._joined[found] = channel
                    return is_open
            finally:
                with self._changed:
                    self._offered.discard(found)
                    self._changed.notify_all()

    def _claim(self, wanted: int | None) -> tuple[int, int] | None:
        """A node that may join and is not offered to another connection, with its epoch; None:
        there is none.
        """

        def find() -> tuple[int, int] | None:
            free = sorted(item for item in self._open.items() if item not in self._offered)
            return next((item for item in free if wanted in (None, item[0])), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._closed, PAUSE_S)
            found = find()
            if found is not None:
                self._offered.add(found)
            return found


def say(channel: SocketLink, **record: Any) -> None:
    """Send a record; raises LinkLost."""
    channel.send(json.dumps(record).encode())


def hear(channel: SocketLink) -> dict[str, Any]:
    """Receive a record; raises LinkLost."""
    record: dict[str, Any] = json.loads(channel.receive().message)
    return record


def read_token(given: bytes | str | os.PathLike[str] | None) -> bytes | None:
    """The secret, without white space around it.

    Args:
        given: bytes, or the path of a file. None: MUSTER_TOKEN_FILE or MUSTER_TOKEN of the
            environment.

    Returns:
        None if it is not given and not in the environment.

    Raises:
        BadOption: the file is missing or other users may read it, or the secret is too short or too
            long.
    """
    if given is None:
        if path := os.environ.get(TOKEN_FILE):
            given = path
        elif text := os.environ.get(TOKEN):
            given = text.encode()
        else:
            return None
    token = given.strip() if isinstance(given, bytes) else _read_secret(Path(given))
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
        raise BadOption(
            f"The token has {len(token)} bytes; {SHORTEST_TOKEN} to {LONGEST_TOKEN} are needed:"
            " `openssl rand -hex 32`."
        )
    return token


def write_token(path: Path, token: bytes) -> None:
    """Write a token into a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token)


def _read_secret(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # a pipe may have no end
            text = file.read(LONGEST_TOKEN + 1).strip() if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise BadOption(
            f"The token file {path} cannot be read: {error.strerror}. (A token itself is given as"
            " bytes.)"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadOption(
            f"The token file {path} has mode {stat.S_IMODE(mode):04o}, so that others may read it:"
            f" `chmod 600 {path}`."
        )
    return text


def _resolved(bind: str) -> str:
    """The IP address of ``bind``."""
    try:
        host = str(socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadOption(
            f"bind={bind!r} is no address, nor a name that has one: {error.strerror}."
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
