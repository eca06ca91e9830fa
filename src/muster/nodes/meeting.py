"""Where nodes find the main process: a TCPStore, a token, and the epoch in which every node may join.

The store holds addresses and numbers only. Whoever reaches its port can read and change them, and so keep nodes from
joining; whoever wants to be heard as a node must know the token (``seal``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from muster.errors import BadOption
from muster.nodes.link import LinkLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

TOKEN_BYTES = 32
SHORTEST_TOKEN = 16  # bytes; what people make up is to be no shorter
TOKEN_FILE, TOKEN = "MUSTER_TOKEN_FILE", "MUSTER_TOKEN"
ANSWER_S = 5.0  # within which a store that can be reached answers
POLL_S = 0.1
BACKLOG = 512
BOARD = "muster/board"

_c10d: Any = torch.distributed  # whose types do not say that it has stores
_T = TypeVar("_T")


class Meeting:
    """The main process' end.

    Args:
        count: of nodes.
        bind: address (or name) of this machine at which nodes find it; nothing listens anywhere else.
        tcp_port: 0 takes a free one.
        token: the secret that nodes must know. None: from the file that MUSTER_TOKEN_FILE names, or from
            MUSTER_TOKEN, else a random one, if ``bind`` is loopback.

    Attributes:
        address: "host:port".
        host: the address that ``bind`` stands for.

    Raises:
        BadOption: the port is taken, ``bind`` is no address of this machine, or others can reach it and no token was
            given.
    """

    def __init__(
        self,
        count: int,
        *,
        bind: str = "127.0.0.1",
        tcp_port: int = 0,
        token: bytes | str | os.PathLike[str] | None = None,
    ) -> None:
        if not torch_has_distributed():
            raise BadOption("This PyTorch was built without torch.distributed; use backend='ray', or workers here.")
        self.count, self.host = count, _resolved(bind)
        given = read_token(token)
        if given is None and not is_loopback(self.host):
            raise BadOption(
                f"bind={bind!r} can be reached from other machines, so that nodes need a token: pass token=, or the "
                f"path of a file with mode 0600 in {TOKEN_FILE}, here and on every node. (bind='127.0.0.1' needs none.)"
            )
        self.token = given or secrets.token_hex(TOKEN_BYTES).encode()
        self._board: dict[str, Any] = {"run": secrets.token_hex(16), "epochs": [None] * count, "settings": {}}
        self._folder: Path | None = None
        self._lock = threading.Lock()
        listener = _listen(self.host, tcp_port)
        self._endpoint = self.host, listener.getsockname()[1]
        self.address = "[{}]:{}".format(*self._endpoint) if ":" in self.host else "{}:{}".format(*self._endpoint)
        self._server: TCPStore | None = _c10d.TCPStore(
            *self._endpoint,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # without it, the store would listen on all addresses
            use_libuv=True,
            timeout=timedelta(seconds=ANSWER_S),
        )
        self._write()

    def tell(self, **settings: str | float) -> None:
        """Have nodes learn this with their invitations; it is not secret."""
        with self._lock:
            self._board["settings"].update(settings)
            self._write()

    def invite(self, node: int, epoch: int) -> None:
        """Let a node join with this epoch, and no other any more."""
        self._put(node, epoch)

    def withdraw(self, node: int) -> None:
        """Let nobody join as this node until the next invitation."""
        self._put(node, None)

    def joined(self, client: TCPStore, node: int, epoch: int) -> bool:
        """Whether somebody has accepted the invitation."""
        return bool(client.check([_key(self._board["run"], node, epoch) + "/joined"]))

    def group_store(self, client: TCPStore, node: int, epoch: int) -> Store:
        """For the process group of this session alone."""
        store: Store = _c10d.PrefixStore(_key(self._board["run"], node, epoch), client)
        return store

    def client(self) -> TCPStore:
        """A connection of one's own: one that waits keeps its other users waiting."""
        return open_store(*self._endpoint)

    def token_file(self) -> Path:
        """A file with the token that only this user can read; removed by ``close``."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="muster-token-"))  # mode 0700
                write_token(self._folder / "token", self.token)
            return self._folder / "token"

    def close(self) -> None:
        """Stop listening. May be called again."""
        with self._lock:
            self._server = None
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _put(self, node: int, epoch: int | None) -> None:
        with self._lock:
            self._board["epochs"][node] = epoch
            self._write()

    def _write(self) -> None:
        if self._server is not None:
            self._server.set(BOARD, json.dumps(self._board))


@dataclass(frozen=True)
class Invitation:
    """To join as one node for one session.

    Attributes:
        run: a name of the meeting.
        store: for the process group of this session alone.
        host: of the main process.
        settings: that the main process has told.
    """

    run: str
    node: int
    epoch: int
    store: Store
    host: str
    settings: dict[str, Any]


class Guest:
    """A node's end.

    Args:
        address: "host:port".
        node: its number; None: any that nobody has.
        within_s: seconds until the main process must listen there.
        patience_s: how long a main process that listened once may be out of reach (a network that is cut). One whose
            machine says that nobody listens any more has ended.
    """

    def __init__(
        self, address: str, node: int | None = None, *, within_s: float = 600.0, patience_s: float = 600.0
    ) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal():
            raise BadOption(f"address={address!r} should be 'host:port'; the main process' Meeting.address is.")
        self._endpoint = host.strip("[]"), int(port)
        self._node, self._within_s, self._patience_s = node, within_s, patience_s
        self._name = secrets.token_hex(16)
        self._seen: set[str] = set()  # invitations that this or another process has accepted
        self._met = False

    def next(self) -> Invitation | None:
        """Wait for an invitation that nobody has accepted, and accept it.

        Returns:
            None: the main process has ended.

        Raises:
            LinkLost: it was out of reach for too long.
        """
        begin = reached = time.monotonic()
        client: TCPStore | None = None
        pause = threading.Event()
        while True:
            state = _reach(self._endpoint)
            if state == "open":
                self._met, reached = True, time.monotonic()
                try:
                    client = client or _within(ANSWER_S, lambda: open_store(*self._endpoint))
                    if found := _within(ANSWER_S, lambda c=client: self._look(c)):  # type: ignore[misc]
                        self._seen.add(_key(found.run, found.node, found.epoch))
                        return found
                except (RuntimeError, TimeoutError):  # it has just ended, or the network was just cut
                    client = None
            elif state == "refused" and self._met:
                return None
            else:
                client = None
            now = time.monotonic()
            limit = self._patience_s if self._met else self._within_s
            if now - (reached if self._met else begin) > limit:
                host, port = self._endpoint
                raise LinkLost(f"The main process at {host}:{port} could not be reached for {limit:g} s.")
            pause.wait(POLL_S)

    def _look(self, client: TCPStore) -> Invitation | None:
        if not client.check([BOARD]):
            return None
        board = json.loads(client.get(BOARD))
        epochs = board["epochs"]
        if self._node is not None and self._node >= len(epochs):
            raise BadOption(f"node={self._node}: the main process expects {len(epochs)} nodes, numbered from 0.")
        for node in range(len(epochs)) if self._node is None else (self._node,):
            epoch = epochs[node]
            key = _key(board["run"], node, epoch)
            if epoch is None or key in self._seen:
                continue
            # Not a counter: where the answer to this is lost, it is asked again.
            if client.compare_set(key + "/claim", "", self._name).decode() == self._name:
                client.set(key + "/joined", "1")
                return Invitation(
                    board["run"], node, epoch, _c10d.PrefixStore(key, client), self._endpoint[0], board["settings"]
                )
            self._seen.add(key)
        return None


def read_token(given: bytes | str | os.PathLike[str] | None) -> bytes | None:
    """The secret: bytes as they are, else the contents of a file; None: as the environment says, or None. White space
    around it does not count.

    Raises:
        BadOption: the file is missing or others may read it, or the secret is short.
    """
    if given is None:
        if path := os.environ.get(TOKEN_FILE):
            given = path
        elif text := os.environ.get(TOKEN):
            given = text.encode()
        else:
            return None
    token = given.strip() if isinstance(given, bytes) else _read_secret(Path(given))
    if len(token) < SHORTEST_TOKEN:
        raise BadOption(
            f"The token has {len(token)} bytes; at least {SHORTEST_TOKEN} are needed: `openssl rand -hex 32`."
        )
    return token


def write_token(path: Path, token: bytes) -> None:
    """Into a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach it."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def local_address(host: str) -> str:
    """The address of this machine from which ``host`` is reached."""
    family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(remote)
        return str(probe.getsockname()[0])


def torch_has_distributed() -> bool:
    """Whether there are stores and gloo."""
    return bool(_c10d.is_available() and _c10d.is_gloo_available())


def _read_secret(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        text = path.read_bytes().strip()
    except OSError as error:
        raise BadOption(
            f"The token file {path} cannot be read: {error.strerror}. (A token itself is given as bytes.)"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadOption(
            f"The token file {path} has mode {stat.S_IMODE(mode):04o}, so that others may read it: `chmod 600 {path}`."
        )
    return text


def _resolved(bind: str) -> str:
    """The one address of this machine that is meant."""
    try:
        host = str(socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadOption(f"bind={bind!r} is no address, nor a name that has one: {error.strerror}.") from error
    if ip_address(host.partition("%")[0]).is_unspecified:
        raise BadOption(f"bind={bind!r} is not one address; name the one that nodes can reach (`ip -brief address`).")
    return host


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not held up by connections that have ended
        listener.bind((bind, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise BadOption(
            f"Nodes cannot meet at {bind}:{port}: {why}. `ss -ltnp 'sport = :{port}'` shows who has the port; "
            "tcp_port=0 takes a free one, and bind= must be an address of this machine."
        ) from error
    return listener


def open_store(host: str, port: int) -> TCPStore:
    """A connection to the store that somebody keeps there."""
    timeout = timedelta(seconds=ANSWER_S)
    store: TCPStore = _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store


def wait_for(store: Store, key: str, within_s: float, every_s: float, late: str) -> Any:
    """What somebody else writes there, as JSON; raises LinkLost with the text ``late`` if it does not come."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise LinkLost(late)
        pause.wait(every_s)
    return json.loads(store.get(key))


def _reach(endpoint: tuple[str, int]) -> str:
    """Whether it is "open", "refused" or "silent". (A TCPStore retries, and prints its stack, before it says that.)"""
    try:
        socket.create_connection(endpoint, timeout=1.0).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "open"


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a call of the store. Where the network is cut it waits far longer than its own timeout, in a
    thread that is then left behind.
    """
    results: list[Any] = []

    def run() -> None:
        try:
            results.extend((call(), None))
        except BaseException as error:  # noqa: BLE001 (raised below)
            results.extend((None, error))

    thread = threading.Thread(target=run, name="muster-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    if results[1] is not None:
        raise results[1]
    return results[0]  # type: ignore[no-any-return]


def _key(run: str, node: int, epoch: int | None) -> str:
    return f"muster/{run}/{node}/{epoch}"
