"""Nodes over torch RPC: they join as those of torch.distributed, and blocks of bytes travel as RPC's tensors.

::

    block    deliver(session, tag, block), a function that is called in the other process
    message  the connection through which the node has joined, authenticated as for torch.distributed

A message follows its block. So RPC decides nothing but how bytes travel: order, liveness and closing are those of the
connection.

RPC has no password: see ``rpc_agent``. The token keeps nodes of others out of the collector. It does not protect a
process whose RPC ports others can reach. So a node has such ports only if its own command line (or the launcher that
has started it) asks for RPC.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from muster.cluster.launchers import Launcher
from muster.cluster.link import Block, Link, LinkLost, Received, allowed_s
from muster.cluster.rendezvous import RPC, Membership, Rendezvous, hear, local_address, say
from muster.cluster.torch_distributed import DistributedCarrier
from muster.errors import BadOption
from muster.memory.specs import Array
from muster.utils.private_names import VARIABLE, usable

if TYPE_CHECKING:
    from torch._C._distributed_rpc import WorkerInfo

    from muster.cluster.rpc_agent import RpcAgent

MAIN_DEVICE = "cuda:0"  # where blocks of nodes with a visible device arrive
ROOM_BYTES = 1 << 26  # of blocks whose messages were not received yet
BEAT_S = 1.0
BEAT = (1 << 64) - 1  # tag of a message that says only that a block is still on its way

_EMPTY = Block(np.empty(0, np.uint8))
_CLOSED = "The link was closed here."
_GONE = "The other end has closed the link, or is gone."
_open: dict[str, RpcLink] = {}  # by session; this process' ends


class RpcLink:
    """One end of a session.

    Args:
        channel: to the other end, for this session alone; is closed by ``close``.
        session: a name that no other session has, known to both ends.
        deadline_s: seconds for which nothing may come.
        device: blocks are sent from there, and arrive on the device that it stands for at the other end. None: the CPU.
    """

    def __init__(self, channel: Link, session: str, deadline_s: float, device: str | None = None) -> None:
        self._channel, self._session, self._deadline_s, self._device = channel, session, deadline_s, device
        self._agent: RpcAgent
        self._peer: WorkerInfo | None = None
        self._changed = threading.Condition()  # held while expected memory is written
        self._delivered: dict[int, Array] = {}  # blocks whose messages were not received yet
        self._waiting: dict[int, Future[bool]] = {}  # by tag, the answers to deliveries for which there is no room
        self._expected: dict[int, Array] = {}
        self._cause = ""  # why it is lost
        _open[session] = self

    def begin(self, agent: RpcAgent, peer: WorkerInfo) -> None:
        """The other end can be called from now on."""
        self._agent, self._peer = agent, peer

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        if block is None:
            self._tell(message)
            return
        tensor = block.form("torch", as_tensor)
        if self._device is not None:
            tensor = tensor.to(self._device)
        within_s = allowed_s(self._deadline_s, block.array.size)
        try:
            accepted = self._deliver(tag, tensor, within_s)
        except RuntimeError as error:
            late = "timeout" in str(error)
            raise self._lost(f"The other end has not read for {within_s:g} s." if late else _GONE) from None
        if not accepted:
            raise self._lost(_GONE)
        self._tell(message, tag)

    def expect(self, tag: int, memory: Array) -> None:
        """As in ``Link``; does nothing once the link is lost."""
        with self._changed:
            if not self._cause:
                self._expected[tag] = memory

    def receive(self) -> Received:
        try:
            got = self._channel.receive()
            while got.tag == BEAT:
                got = self._channel.receive()
        except LinkLost as lost:
            raise self._lost(str(lost)) from None
        return Received(got.message, got.tag, self._take(got.tag)) if got.tag else got

    def close(self) -> None:
        self._lost(_CLOSED)
        with self._changed:
            peer, self._peer = self._peer, None
        if peer is not None:
            self._agent.forget(peer)

    def take_in(self, tag: int, tensor: torch.Tensor) -> Future[bool]:
        """Keep a block until its message is received. The result is set when there is room for more: True; or when
        the link is lost: False.
        """
        answer: Future[bool] = Future()
        with self._changed:
            is_lost, is_full = bool(self._cause), self._is_full()
            if not is_lost:
                self._delivered[tag] = tensor.cpu().numpy()
                if is_full:
                    self._waiting[tag] = answer
                    return answer
        answer.set_result(not is_lost)
        return answer

    def _deliver(self, tag: int, tensor: torch.Tensor, within_s: float) -> bool:
        """Call the other end, and wait until it has room for more; whether it will have. Meanwhile it is sent beats."""
        with self._changed:
            peer = self._peer
            if self._cause or peer is None:
                raise self._lost(_CLOSED)
        deadline = time.monotonic() + within_s + BEAT_S  # RPC keeps its own, a bit earlier
        future = rpc.rpc_async(peer, deliver, args=(self._session, tag, tensor), timeout=within_s)
        future.add_done_callback(self._wake)
        while not self._is_answered(future):
            if time.monotonic() > deadline:
                raise RuntimeError("timeout")
            self._tell(b"", BEAT)
        return bool(future.wait())

    def _is_answered(self, future: Future[bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._cause, BEAT_S)
            return future.done()

    def _wake(self, _: Future[bool]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tell(self, message: bytes, tag: int = 0) -> None:
        try:
            self._channel.send(message, _EMPTY if tag else None, tag)
        except LinkLost as lost:
            raise self._lost(str(lost)) from None

    def _take(self, tag: int) -> Array:
        with self._changed:
            block, memory = self._delivered.pop(tag, None), self._expected.pop(tag, None)
            cause = self._cause
            if block is None:
                cause = cause or f"Block {tag} has not come with its message."
            elif memory is not None and memory.size != block.size:
                cause = cause or f"Block {tag} has {block.size} bytes where {memory.size} were expected."
            elif memory is not None and not cause:
                memory[:] = block
                block = memory
            answered = [] if self._is_full() else list(self._waiting.values())
            if answered:
                self._waiting.clear()
        for answer in answered:
            answer.set_result(True)
        if block is None or cause:
            raise self._lost(cause)
        return block

    def _is_full(self) -> bool:
        sizes = (block.size for tag, block in self._delivered.items() if tag not in self._waiting)
        return sum(sizes) >= ROOM_BYTES

    def _lost(self, cause: str) -> LinkLost:
        """Close everything; the error to raise. ``cause`` is why, unless the link was lost before."""
        with self._changed:
            self._cause = self._cause or cause
            self._expected.clear()
            self._delivered.clear()
            refused = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        _open.pop(self._session, None)
        self._channel.close()
        for answer in refused:
            answer.set_result(False)
        return LinkLost(self._cause)


@async_execution  # type: ignore[untyped-decorator]
def deliver(session: str, tag: int, block: torch.Tensor) -> Future[bool]:
    """Called by the other end. (What it raised would be printed here.)"""
    link = _open.get(session)
    if link is not None:
        return link.take_in(tag, block)
    answer: Future[bool] = Future()
    answer.set_result(False)
    return answer


def as_tensor(array: Array) -> torch.Tensor:
    """The same memory, also of an array that may not be written (which torch would warn of)."""
    if not array.flags.writeable:
        same: Any = (ctypes.c_ubyte * array.size).from_address(array.ctypes.data)
        array = np.frombuffer(same, np.uint8)
    return torch.from_numpy(array)


class RpcCarrier(DistributedCarrier):
    """Nodes over torch RPC. The collectors of a process share its RPC agent, which may be the user's.

    Args:
        count: of nodes.
        launcher: how they come to life.
        rendezvous: where they find this process; closed by ``close``.
        deadline_s: seconds without anything after which a link is lost.
        tensorpipe_options: for ``TensorPipeRpcBackendOptions``, here and in the nodes.
        visible_devices: for each node the CUDA device from which its blocks travel, to this process' first one (1,
            "cuda:1"); or None or "cpu": from the CPU to the CPU.

    Raises:
        BadOption: this PyTorch has no RPC, or an option has an impossible value.
    """

    name = "torch RPC"
    engine = RPC

    def __init__(
        self,
        count: int,
        *,
        launcher: Launcher,
        rendezvous: Rendezvous,
        deadline_s: float = 15.0,
        tensorpipe_options: Mapping[str, Any] | None = None,
        visible_devices: Sequence[int | str | torch.device | None] | None = None,
    ) -> None:
        check_rpc()
        from muster.cluster.rpc_agent import RpcAgent, Terms, check_options

        super().__init__(count, launcher=launcher, rendezvous=rendezvous, deadline_s=deadline_s)
        self._options = check_options(tensorpipe_options)
        self._devices = check_devices(visible_devices, count)
        self._agent: RpcAgent | None = RpcAgent.hold("muster-main", Terms(rendezvous.host, self._options))
        self._closing = threading.Lock()

    def meet(self, channel: Link, node: int, epoch: int) -> Link:
        """Tell the node where this process listens, and learn where it does."""
        session, device = secrets.token_hex(16), self._devices[node]
        link = RpcLink(channel, session, self.deadline_s)
        try:
            if (agent := self._agent) is None:
                raise LinkLost("The collector is closed.")
            say(channel, url=agent.url, session=session, options=self._options, device=device)
            name = f"muster-node-{node}-{epoch}-{session}"
            link.begin(agent, agent.meet(name, hear(channel)["url"], () if device is None else (MAIN_DEVICE,)))
        except LinkLost as error:
            link.close()
            raise LinkLost(f"Node {node} has not joined: {error}") from error
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        super().close()
        with self._closing:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.release()


_node_agent: RpcAgent | None = None  # of this process, while it is a node: one for each session


def join_rpc(membership: Membership) -> Link:
    """The node's end of a session.

    Raises:
        LinkLost: the main process has given it up.
        BadOption: this PyTorch has no RPC, or RPC cannot listen at this machine's address.
    """
    global _node_agent
    channel, link = membership.channel, None
    try:
        check_rpc()
        from muster.cluster.rpc_agent import RpcAgent, Terms

        card = hear(channel)
        session, device = card["session"], card["device"]
        main = f"muster-main-{session}"
        if _node_agent is not None:
            _node_agent.release()
            _node_agent = None
        devices = {} if device is None else {main: {device: MAIN_DEVICE}}
        terms = Terms(local_address(membership.host), card["options"], devices)
        _node_agent = RpcAgent.hold(f"muster-node-{membership.node}-{membership.epoch}", terms)
        link = RpcLink(channel, session, float(membership.settings["deadline_s"]), device)
        link.begin(_node_agent, _node_agent.meet(main, card["url"]))
        say(channel, url=_node_agent.url)
    except BaseException:
        (link or channel).close()
        raise
    return link


def check_rpc() -> None:
    """Raise BadOption unless this PyTorch has RPC, with the private names that it is used by."""
    if not (dist.is_available() and dist.rpc.is_available()):
        raise BadOption(
            "RPCCollector: this PyTorch was built without torch.distributed.rpc. DistributedCollector does the same "
            "over torch.distributed, RayCollector over Ray."
        )
    from torch.distributed import autograd, rpc

    agent = ("_update_group_membership",)
    states = ("_init_rpc_states", "_finalize_shutdown")
    current = ("_get_current_rpc_agent", "_is_current_rpc_agent_set")
    owners = (getattr(rpc, "TensorPipeAgent", None), agent), (rpc.api, states), (rpc, current), (autograd, ("_init",))
    if not usable("torch", *owners):
        raise BadOption(
            f"RPCCollector: nodes can join and return only through private names of torch, which torch "
            f"{torch.__version__} does not have, or {VARIABLE}=never forbids. DistributedCollector does the same over "
            f"torch.distributed, RayCollector over Ray."
        )


def check_devices(devices: Sequence[int | str | torch.device | None] | None, count: int) -> list[str | None]:
    """The CUDA device of each node from which its blocks travel; None: they travel from the CPU.

    Raises:
        BadOption: there are not as many as nodes, one is none, or this process has no CUDA device to receive on.
    """
    if devices is None:
        return [None] * count
    if len(devices) != count:
        raise BadOption(f"visible_devices has {len(devices)} devices for {count} nodes: name one for each.")
    found: list[str | None] = []
    for device in devices:
        if device is None:
            found.append(None)
            continue
        try:
            one = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BadOption(f"visible_devices has {device!r}, which is no device: {error}") from error
        if one.type not in ("cpu", "cuda"):
            raise BadOption(f"visible_devices has {device!r}; RPC takes 'cpu', 'cuda:0', ... or the number of a GPU.")
        found.append(None if one.type == "cpu" else f"cuda:{one.index or 0}")
    if any(found) and not torch.cuda.is_available():
        raise BadOption(
            f"visible_devices={devices!r}: this process has no CUDA device on which their data could arrive; "
            "leave visible_devices out."
        )
    return found
