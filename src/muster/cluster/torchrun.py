"""``launcher="torchrun"``: ranks that torchrun has started find the collector in rank 0.

Rank 0 writes the address of its rendezvous into torchrun's store, signed with the token, because
every process that reaches that store can write there. On one machine the token itself is in a file
that only this user can read, at a path that all ranks know. The store does not contain it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import stat
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from muster.cluster.admissions import ANSWER_S
from muster.cluster.launchers import Launcher
from muster.cluster.link import LinkLost
from muster.cluster.rendezvous import POLL_S, Rendezvous
from muster.cluster.socket_link import signature
from muster.cluster.token import read_token
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.whole_files import read_json, write_whole

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LONGEST = 1024  # bytes of the record of rank 0
_c10d: Any = torch.distributed


class TorchrunLauncher(Launcher):
    """Rank 0 of ``torchrun`` is the main process, rank r > 0 is node r - 1 and calls
    ``run_node()``.

    Raises:
        BadOption: this is not rank 0 under torchrun.
    """

    name = "torchrun"
    advice = "Ranks above 0 have to call muster.cluster.joining.run_node()."

    def __init__(self) -> None:
        if torchrun_rank() != 0:
            raise BadOption(
                f"launcher='torchrun' in rank {torchrun_rank()}: the collector lives in rank 0, the"
                " others are nodes."
            )
        self._key = _next_key()
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._token: Path | None = None

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> None:
        nodes = rendezvous.count
        ranks = int(os.environ["WORLD_SIZE"])
        if ranks != nodes + 1:
            raise BadOption(
                f"torchrun has started {ranks} ranks, but {nodes} nodes were asked for: start"
                f" {nodes + 1}, of which rank 0 is the main process."
            )
        with self._lock:
            if self._store is None:
                if is_loopback(rendezvous.host):
                    self._token = _token_path(self._key)
                    write_whole(self._token, [rendezvous.token], mode=0o600)
                self._store = _store()
                self._store.set(
                    self._key, _signed(rendezvous.token, self._key, rendezvous.address)
                )

    def close(self) -> None:
        with self._lock:
            if self._token is not None:
                self._token.unlink(missing_ok=True)
                self._token = None


def find_rendezvous(token: bytes | None, within_s: float) -> tuple[str, int, bytes]:
    """The address of rank 0's rendezvous, the number of this node, and the token, for a rank above
    0.

    Args:
        token: of this node. None: the token that rank 0 has left for this user on this machine.
        within_s: seconds for rank 0 to open a collector.

    Raises:
        BadOption: this is not a rank above 0 under torchrun.
        LinkLost: rank 0 has not opened a collector within so many seconds, or has another token.
    """
    rank = torchrun_rank()
    if rank is None:
        raise BadOption(
            "A node needs the address of its main process, 'host:port': only under torchrun it can"
            " be found."
        )
    if rank == 0:
        raise BadOption(
            "run_node() in rank 0, which is the main process: make the collector there."
        )
    key, pause = _next_key(), threading.Event()
    store = _store()
    deadline, refused = time.monotonic() + within_s, ""
    while time.monotonic() < deadline:
        if store.check([key]):
            found = token or _left_token(key)
            address = found and _verified(found, key, store.get(key))
            if found and address:
                return address, rank - 1, found
            refused = (
                " Something else has written an address, which is not signed with this node's"
                " token."
                if found
                else " Nodes on other machines than rank 0 need its token: MUSTER_TOKEN_FILE."
            )
        pause.wait(POLL_S)
    raise LinkLost(
        f"Rank 0 has not opened a collector with launcher='torchrun' within {within_s:g}"
        f" s.{refused}"
    )


def torchrun_rank() -> int | None:
    """The rank of this process; None: torchrun has not started it."""
    has_all = all(
        name in os.environ
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return int(os.environ["RANK"]) if has_all else None


def _next_key() -> str:
    """The key of the next collector of this process: nodes serve the collectors of rank 0 in their
    order. Ranks that torchrun has restarted use other keys.
    """
    run = [
        os.environ.get(name, "")
        for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    ]
    return "/".join(["muster", "rendezvous", *run, str(next(_collectors))])


def _signed(token: bytes, key: str, address: str) -> str:
    return json.dumps([address, signature(token, json.dumps([key, address]).encode())])


def _verified(token: bytes, key: str, record: bytes) -> str | None:
    """The address in a record; None: the record is not signed with this token."""
    if len(record) > LONGEST:
        return None
    with contextlib.suppress(ValueError, TypeError):
        address, signed = read_json(record)
        if hmac.compare_digest(
            str(signed), signature(token, json.dumps([key, address]).encode())
        ):
            return str(address)
    return None


def _left_token(key: str) -> bytes | None:
    """The token that rank 0 has left on this machine, if any."""
    path = _token_path(key)
    return read_token(path) if path.exists() else None


def _token_path(key: str) -> Path:
    """The file in which rank 0 leaves the token for ranks on its machine."""
    place = [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], key]
    return _own_folder() / (
        "torchrun-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]
    )


def _own_folder() -> Path:
    """A folder that only this user can read, the same for all of this user's processes on this
    machine.
    """
    above = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isdir(above) and os.stat(above).st_uid == os.getuid()):
        above = tempfile.gettempdir()
    folder = Path(above) / f"muster-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_mode & 0o077
    ):
        raise BadOption(
            f"{folder} should be a folder that only this user can read: remove it, or set TMPDIR to"
            " another place for all ranks, or give the token (MUSTER_TOKEN_FILE)."
        )
    return folder


def _store() -> TCPStore:
    """A connection to the store of torchrun (or of the user's ``init_process_group``)."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=ANSWER_S)
    store: TCPStore = _c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return store


_collectors = itertools.count()  # of this process
