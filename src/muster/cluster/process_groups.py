"""Process groups of torch.distributed between two processes: one for each direction of a link.

The groups are objects of Muster's own. The default group (``init_process_group``) is neither used
nor made, so that the program may have one, before or later. Both ends exchange the groups'
addresses over their authenticated connection (``LinkStore``): no store listens at a port. Then each
direction carries a number that only a process with the session's key can make, so that a process
that has taken a group's connection is found before the first block.

gloo, on which most of this file depends (measured with torch 2.13):

- A call that waits cannot be ended from Python, and a wait with a deadline closes the group when
  the deadline passes.
- When the other process ends, or the group is closed, gloo raises an error in waits for transfers
  that have not begun, but not in the wait for the transfer that is under way, which lasts until its
  deadline. So nothing waits for a block: the receiver waits for the mark that follows the block,
  the sender for the receiver's acknowledgement.
- ``abort`` waits one millisecond for a number that never comes. On return the connection is closed,
  and gloo neither reads nor writes memory that was given to it.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from muster.cluster.link import LinkLost
from muster.cluster.rendezvous import hear, say
from muster.cluster.socket_link import SocketLink
from muster.errors import BadOption
from muster.memory.specs import Array
from muster.utils.private_names import usable
from muster.utils.texts import first_line

BACKENDS = ("gloo", "nccl", "ucc", "mpi")
SET_UP_S = 30.0  # for the other end to import torch and to connect
# tags of gloo's transfers; nothing is sent with the last one
BLOCK, ACKNOWLEDGEMENT, MARK, NEVER = range(4)
AT_ONCE_S = 5.0  # for a transfer that has ended at the other end
SHORTEST_POLL_S = 1e-4
LONGEST_POLL_S = 5e-3
_c10d: Any = torch.distributed
# some builds of torch have no process groups
_Store: Any = getattr(torch.distributed, "Store", object)


def check_backend(backend: str) -> None:
    """Raise BadOption unless process groups with this backend can be made in this process."""
    if backend not in BACKENDS:
        raise BadOption(
            f"backend={backend!r} is unknown: expected one of {', '.join(map(repr, BACKENDS))}"
        )
    if reason := _unavailable(backend):
        raise BadOption(
            f"backend={backend!r} is not available: {reason}. Take backend='gloo', which carries"
            " data through the hosts' memory, or transport='direct', which does without"
            " torch.distributed."
        )


def _unavailable(backend: str) -> str:
    """Why a backend cannot be used here, in torch's words where it has any; empty if it can be."""
    torch_here = f"torch {torch.__version__} says"
    if not _c10d.is_available():
        return f"{torch_here}: torch.distributed is not available"
    is_built = getattr(_c10d, f"is_{backend}_available")
    if not is_built():
        name = "Gloo" if backend == "gloo" else backend.upper()
        return f"{torch_here}: Distributed package doesn't have {name} built in"
    if backend == "nccl" and not torch.cuda.is_available():
        return f"{torch_here}: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    if backend == "mpi":
        return (
            "mpirun fixes MPI's ranks when it starts them, so that a node can neither join later"
            " nor come back"
        )
    return ""


class LinkStore(_Store):  # type: ignore[misc]
    """The store of a pair of groups: exchanges keys over an authenticated connection, while the
    groups are made.

    Afterwards (``end``) it has the keys that it has, for backends that look at them later.
    """

    def __init__(self, channel: SocketLink) -> None:
        super().__init__()
        self._channel: SocketLink | None = channel
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = data
        if self._channel is not None:
            say(self._channel, key=key, value=data.hex())

    def get(self, key: str) -> bytes:
        while key not in self._known:
            if self._channel is None:
                raise LinkLost(
                    f"The process group asks for {key!r}, which neither end has set."
                )
            self._take(hear(self._channel))
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._known for key in keys)

    def end(self) -> None:
        """Wait until the other end has come as far."""
        channel = self._channel
        assert channel is not None
        say(channel, ready=True)
        while not (record := hear(channel)).get("ready"):
            self._take(record)
        self._channel = None

    def _take(self, record: dict[str, Any]) -> None:
        if "failed" in record:
            raise LinkLost(f"The other end has no process group: {record['failed']}")
        self._known[record["key"]] = bytes.fromhex(record["value"])


class Way(ABC):
    """One direction between two ends.

    One thread sends or receives; any thread may call ``abort``.
    """

    @abstractmethod
    def send(self, array: Array, within_s: float) -> None:
        """Send bytes. On return they may be overwritten.

        Raises:
            TimeoutError: it took too long.
            ConnectionError: the way is closed, or the other process has ended.
        """

    @abstractmethod
    def receive(self, memory: Array, within_s: float) -> None:
        """Receive exactly as many bytes as ``memory`` has. Raises as ``send``."""

    @abstractmethod
    def abort(self) -> None:
        """Close the way.

        When this returns, memory that was given to it is not used any more. May be called again.
        """


class GlooWay(Way):
    """A direction over gloo: straight from the sender's memory into the receiver's.

    Args:
        store: for the groups' addresses.
        rank: 0 in the main process, 1 in the node.
        device: listens at a free port of the link's address; None: of the host's.
    """

    def __init__(self, store: Any, rank: int, device: Any) -> None:
        if device is None:
            group = _c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=SET_UP_S))
        else:
            options = _c10d.ProcessGroupGloo._Options()
            options._devices = [device]
            options._timeout = timedelta(seconds=SET_UP_S)
            options._threads = 1  # for collectives, of which there are none
            group = _c10d.ProcessGroupGloo(store, rank, 2, options)
        self.group: Any = group
        self._peer = 1 - rank
        self._one = torch.zeros(1, dtype=torch.uint8)
        # The transfers of the newest block: gloo uses an acknowledgement until it is sent. Nor are
        # they freed with the frames of a thread, which may be when the program ends
        # (``distributed_link._end_all``).
        self._works: list[Any] = []

    def send(self, array: Array, within_s: float) -> None:
        with _gloos_errors():
            block = self._begin_send(tensor_over(array), BLOCK)
            mark = self._begin_send(self._one, MARK)
            acknowledgement = self._begin_receive(self._byte(), ACKNOWLEDGEMENT)
            self._works = [block, mark, acknowledgement]
            acknowledgement.wait(_seconds(within_s))
            block.wait(_seconds(AT_ONCE_S))
            mark.wait(_seconds(AT_ONCE_S))

    def receive(self, memory: Array, within_s: float) -> None:
        with _gloos_errors():
            block = self._begin_receive(tensor_over(memory), BLOCK)
            mark = self._begin_receive(self._byte(), MARK)
            self._works = [block, mark]
            mark.wait(_seconds(within_s))
            block.wait(_seconds(AT_ONCE_S))
            acknowledgement = self._begin_send(self._one, ACKNOWLEDGEMENT)
            self._works.append(acknowledgement)

    def abort(self) -> None:
        # that the deadline has passed, or that the group was closed before
        with contextlib.suppress(RuntimeError):
            never = self._begin_receive(self._byte(), NEVER)
            never.wait(timedelta(milliseconds=1))

    def _begin_send(self, tensor: torch.Tensor, tag: int) -> Any:
        return self.group.send([tensor], self._peer, tag)

    def _begin_receive(self, tensor: torch.Tensor, tag: int) -> Any:
        return self.group.recv([tensor], self._peer, tag)

    def _byte(self) -> torch.Tensor:
        """Return memory for a mark or an acknowledgement."""
        return torch.empty_like(self._one)


class BufferedWay(Way):
    """A direction over a backend whose works can be asked whether they are complete: nccl, ucc.

    A block is copied into a buffer on the device, broadcast in the group of two, and copied out of
    the other end's buffer. Memory of the caller is never given to the backend.

    Args:
        group: of two processes.
        root: the rank that sends.
        device: of the buffers.
    """

    def __init__(self, group: Any, root: int, device: torch.device) -> None:
        self.group = group
        self._root = root
        self._device = device
        self._over = threading.Event()
        self._writing = threading.Lock()  # held while the caller's memory is used

    def send(self, array: Array, within_s: float) -> None:
        self._broadcast(tensor_over(array).to(self._device, copy=True), within_s)

    def receive(self, memory: Array, within_s: float) -> None:
        buffer = torch.empty(memory.size, dtype=torch.uint8, device=self._device)
        self._broadcast(buffer, within_s)
        with self._writing:
            if self._over.is_set():
                raise ConnectionError
            tensor_over(memory).copy_(buffer)

    def abort(self) -> None:
        with self._writing:
            if self._over.is_set():
                return
            self._over.set()
        with contextlib.suppress(RuntimeError):
            self.group.abort()

    def _broadcast(self, buffer: torch.Tensor, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        pause = SHORTEST_POLL_S
        try:
            work = self.group.broadcast(buffer, self._root)
            while not work.is_completed():
                if self._over.wait(pause):
                    raise ConnectionError
                if time.monotonic() > deadline:
                    raise TimeoutError
                pause = min(2 * pause, LONGEST_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(reason_of(error)) from error


def two_ways(channel: SocketLink, backend: str, *, main: bool) -> tuple[Way, Way]:
    """Make the ways to the other end of a connection, and from it.

    Both ends call this at the same time.

    Nothing else may use the connection meanwhile, whose deadline should be ``SET_UP_S``.

    Raises:
        LinkLost: the groups could not be made, at one end or the other. The text says why.
    """
    host = channel.host
    store = LinkStore(channel)
    made: list[Way] = []
    try:
        make = _maker(host, backend, 0 if main else 1)
        for root, prefix in enumerate(("down", "up")):
            made.append(make(_c10d.PrefixStore(prefix, store), root))
        for root, way in enumerate(made):
            _prove(channel, way, root, sends=main == (root == 0))
        store.end()
    except Exception as error:
        for way in made:
            way.abort()
        reason = reason_of(error)
        with contextlib.suppress(LinkLost):
            say(channel, failed=reason)
        raise LinkLost(
            f"torch.distributed ({backend}) has not connected {host} with the other end: {reason}"
            " Each end listens at a free port of the address of its connection, and firewalls have"
            " to let these through. (transport='direct' needs only the port at which nodes join.)"
        ) from error
    down, up = made
    return (down, up) if main else (up, down)


def _maker(host: str, backend: str, rank: int) -> Callable[[Any, int], Way]:
    """Return a function that makes the way from the process of rank ``root``; it takes a store and
    ``root``.
    """
    check_backend(backend)
    timeout = timedelta(seconds=SET_UP_S)
    if backend == "gloo":
        device = _device(host)
        return lambda store, root: GlooWay(store, rank, device)
    if backend == "nccl":
        gpu = torch.device("cuda", torch.cuda.current_device())
        return lambda store, root: BufferedWay(
            _c10d.ProcessGroupNCCL(store, rank, 2, timeout), root, gpu
        )
    cpu = torch.device("cpu")
    return lambda store, root: BufferedWay(
        _c10d.ProcessGroupUCC(store, rank, 2, timeout), root, cpu
    )


def _device(host: str) -> Any:
    """Gloo's thread and port at an address; None: gloo makes them, at the address of the host's
    name.
    """
    gloo = _c10d.ProcessGroupGloo
    names = ("_devices", "_threads", "_timeout")
    if usable("torch", (gloo, ("_Options", "create_device"))) and usable(
        "torch", (gloo._Options, names)
    ):
        return gloo.create_device(hostname=host)
    return None


def _prove(channel: SocketLink, way: Way, root: int, *, sends: bool) -> None:
    """Send or receive what only the other end of the connection can know."""
    proof = np.frombuffer(channel.derived(b"process group %d" % root), np.uint8)
    if sends:
        way.send(proof, SET_UP_S)
        return
    received = np.empty_like(proof)
    way.receive(received, SET_UP_S)
    if not hmac.compare_digest(received.tobytes(), proof.tobytes()):
        raise LinkLost("Another process has taken the connection of the process group.")


def tensor_over(array: Array) -> torch.Tensor:
    """A tensor over the memory of an array, which may be read-only: a tensor that is sent is not
    written.
    """
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the tensor could be written
        return torch.from_numpy(array)


def reason_of(error: BaseException) -> str:
    """What an error of torch says, as a sentence, without the place in its source and its stack."""
    text = re.sub(r"^\[[^\]]*\] ", "", first_line(error))
    return text if text.endswith((".", "!")) else f"{text}."


@contextlib.contextmanager
def _gloos_errors() -> Iterator[None]:
    """A context in which gloo's errors become errors of sockets."""
    try:
        yield
    except RuntimeError as error:
        if "Timed out waiting" in str(error):
            raise TimeoutError from error
        raise ConnectionError(reason_of(error)) from error


def _seconds(number: float) -> timedelta:
    """At least a millisecond: zero is no deadline for torch."""
    return timedelta(milliseconds=max(1, round(1000 * number)))
