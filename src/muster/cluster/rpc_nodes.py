"""Carriers of the engine "rpc": nodes that join with an agent of Muster's, or workers of the user's
agent.

With Muster's own agents, nodes are started and join at the rendezvous as with the engine "direct".
Over the authenticated connection both ends say where their agents listen, and then close it::

    main -> node   {"session", "main", "node", "trust_network", "options", "device"}
    node -> main   {"agent"}, or {"refused": why}
    main -> node   {"reached": true}   the main process has called the node
    node -> main   {"reached": true}, or {"refused": why}

With the user's agent (``init_rpc``), its other workers are the nodes: a call starts a thread in
them. No token is needed, since RPC runs any function there anyway.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc import WorkerInfo  # type: ignore[attr-defined]

from muster.cluster.carrier import JOIN_POLL_S, Carrier
from muster.cluster.direct import DirectCarrier
from muster.cluster.launchers import Launcher
from muster.cluster.link import AGENT, Link, LinkLost, NotJoined, OtherMuster
from muster.cluster.rendezvous import Rendezvous, hear, say
from muster.cluster.rpc_agent import AgentLease, Settings, users_agent
from muster.cluster.rpc_link import RpcEnd
from muster.cluster.socket_link import SocketLink
from muster.cluster.versions import Installed, check_node, difference, installed
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.attributes import named
from muster.utils.texts import first_line

CALL_S = 10.0  # for the first call of an agent
FLUSH_S = 2.0  # for the last messages of a node to be read
LONGEST_S = 1e6  # of a call, for RPC

_carriers = itertools.count()


class RpcCarrier(DirectCarrier):
    """Nodes that join at the rendezvous, each with an RPC agent of Muster's.

    Args:
        launcher: starts the nodes; closed by ``close``.
        rendezvous: where they join; closed by ``close``. The agent listens at its address, too.
        devices: of each node, such as "cuda:1", for tensors that calls carry to and from this
            process' current GPU; None: calls carry tensors in the hosts' memory.
        options: of ``TensorPipeRpcBackendOptions``, for the agents of this process and of all
            nodes.
        trust_network: agents may listen at addresses that other machines can reach.
        deadline_s: seconds without a message after which a link is lost.
    """

    engine = "rpc"

    def __init__(
        self,
        launcher: Launcher,
        rendezvous: Rendezvous,
        *,
        devices: Sequence[str | None] | None = None,
        options: Mapping[str, Any] | None = None,
        trust_network: bool = False,
        deadline_s: float = 15.0,
    ) -> None:
        super().__init__(launcher, rendezvous, deadline_s)
        self._options = dict(options or {})
        self._trust = trust_network
        self._name = f"muster-{secrets.token_hex(4)}"
        self._number = next(_carriers)
        self._members: dict[int, WorkerInfo] = {}
        self._members_lock = threading.Lock()
        self._maps = self._device_maps(devices or ())
        try:
            self._lease = AgentLease(
                self._name, 0, Settings(rendezvous.host, self._options, self._maps)
            )
        except BaseException:
            super().close()
            raise
        self._agent = self._lease.agent

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> RpcEnd:
        channel = self._joined(node, epoch, within_s, given_up)
        with contextlib.closing(channel):
            try:
                return self._met(channel, node)
            except LinkLost as lost:
                self._end(node)
                raise LinkLost(f"Node {node} has not joined: {lost}") from None
            except BaseException:
                self._end(node)
                raise

    def close(self) -> None:
        super().close()
        self._lease.close()

    def _end(self, node: int) -> None:
        super()._end(node)
        with self._members_lock:
            member = self._members.pop(node, None)
        if member is not None:
            self._agent.dismiss(member)

    def _met(self, channel: SocketLink, node: int) -> RpcEnd:
        """Exchange addresses with a node, and call each other."""
        session, agent = secrets.token_hex(8), self._agent
        name, number = self._name_of(node), agent.next_number()
        say(
            channel,
            session=session,
            main=agent.card,
            node=[name, number],
            trust_network=self._trust,
            options=self._options,
            device=next(iter(self._maps.get(name, {}).items()), None),
        )
        told = _heard(channel)
        member = agent.admit(*told["agent"])
        with self._members_lock:
            self._members[node] = member
        link = RpcEnd(member, session, main=True, deadline_s=self._deadline_s)
        try:
            link.check(CALL_S, f"its agent at {told['agent'][2]} does not answer")
            say(channel, reached=True)
            _heard(channel)
        except BaseException:
            link.close()
            raise
        return link

    def _name_of(self, node: int) -> str:
        return f"{self._name}-{self._number}-node-{node}"

    def _device_maps(self, devices: Sequence[str | None]) -> dict[str, dict[str, str]]:
        """This process' current GPU for the GPU of each node, if there is one here."""
        if not torch.cuda.is_available():
            return {}
        here = f"cuda:{torch.cuda.current_device()}"
        return {
            self._name_of(node): {here: name}
            for node, name in enumerate(devices)
            if name
        }


class UsersCarrier(Carrier):
    """Nodes that are threads in the other workers of the user's RPC agent, in turn.

    A node that was lost goes on in its worker, or in the next one if that does not answer: torch
    RPC has no way back for a worker that has ended.

    Args:
        deadline_s: seconds without a message after which a link is lost.
        target: the function that a node runs, "module:function".
    """

    engine = "rpc"
    name = "torch.distributed"

    def __init__(self, *, deadline_s: float = 15.0, target: str = AGENT) -> None:
        self._agent = users_agent()
        self._deadline_s = deadline_s
        self._target = target
        self._closed = False
        own = self._agent.get_worker_info()
        others = [info for info in self._agent.get_worker_infos() if info.id != own.id]
        self._others = sorted(others, key=lambda info: info.id)
        if not others:
            raise BadOption(
                f"The RPC agent of this process, {own.name!r}, has no other workers, which would be"
                " the nodes. Start some (init_rpc with a world_size of at least 2), or leave"
                " init_rpc out, and Muster makes an agent"
            )

    @property
    def address(self) -> str:
        return f"the RPC group of {self._agent.get_worker_info().name!r}"

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> RpcEnd:
        deadline = time.monotonic() + within_s
        failures = []
        for place in range(len(self._others)):
            worker = self._others[(node + place) % len(self._others)]
            try:
                return self._start(worker, node, deadline - time.monotonic(), given_up)
            except OtherMuster:
                raise
            except LinkLost as lost:
                failures.append(f"{worker.name}: {lost}")
                if given_up.is_set() or self._closed or time.monotonic() > deadline:
                    break
        late = NotJoined if time.monotonic() > deadline else LinkLost
        raise late(
            f"Node {node} has not joined {self.address}: {'; '.join(failures)}. A worker that has"
            " ended cannot come back: torch RPC has no way back for its name. Start the program"
            " again, or leave init_rpc out: Muster's own agents let nodes join again"
        )

    def close(self) -> None:
        """Links are closed before, which ends the nodes."""
        self._closed = True

    def _start(
        self, worker: WorkerInfo, node: int, within_s: float, given_up: threading.Event
    ) -> RpcEnd:
        session = secrets.token_hex(8)
        link = RpcEnd(worker, session, main=True, deadline_s=self._deadline_s)
        try:
            own = self._agent.get_worker_info().name
            args = (
                *(own, session, node, self._deadline_s, self._target),
                installed(),
            )
            started = rpc.rpc_async(
                worker, start, args, timeout=min(max(within_s, 0.01), LONGEST_S)
            )
            while not started.done():
                if given_up.wait(JOIN_POLL_S) or self._closed:
                    raise LinkLost("it was given up before it had joined")
            refused, there = started.wait()
            check_node(node, there)
            if refused:
                raise LinkLost(refused)
            return link
        except BaseException as error:
            link.close()
            if isinstance(error, RuntimeError):  # RPC's
                raise LinkLost(first_line(error)) from error
            raise


def start(
    main: str,
    session: str,
    node: int,
    deadline_s: float,
    target: str,
    muster: Installed,
) -> tuple[str, Installed]:
    """Start a node in a thread of this process.

    Called by the main process, through the user's agent.

    Args:
        muster: that of the main process.

    Returns:
        Why it was not started, or ""; and the Muster of this process.
    """
    if why := difference(muster, installed()):
        return why, installed()
    try:
        link = RpcEnd(
            rpc.get_worker_info(main), session, main=False, deadline_s=deadline_s
        )
        threading.Thread(
            target=_serve,
            args=(named(target), link, node),
            name=f"muster-node-{node}",
            daemon=True,
        ).start()
    except Exception as error:  # noqa: BLE001 (RPC would print it)
        return f"{type(error).__name__}: {error}", installed()
    return "", installed()


def _serve(function: Callable[[Link, int], bool], link: RpcEnd, node: int) -> None:
    with contextlib.closing(link):
        function(link, node)


@contextlib.contextmanager
def joined(channel: SocketLink, deadline_s: float) -> Iterator[Link]:
    """A context with the node's end of a session, and with an agent in this process, which ends
    with it.

    Args:
        channel: the connection through which the node has joined; closed here.
        deadline_s: seconds without a message after which the link is lost.

    Raises:
        BadOption: this process must not have such an agent.
        LinkLost: the agents do not reach each other.
    """
    with contextlib.ExitStack() as opened:
        opened.callback(channel.close)
        told = hear(channel)
        try:
            lease = _lease(told, channel.host)
        except BadOption as refused:
            say(channel, refused=str(refused))
            raise
        opened.callback(lease.close)
        agent = lease.agent
        main = agent.admit(*told["main"])
        opened.callback(agent.dismiss, main)
        link = RpcEnd(main, told["session"], main=False, deadline_s=deadline_s)
        opened.callback(link.flush, FLUSH_S)
        opened.callback(link.close)
        say(channel, agent=agent.card)
        hear(channel)
        try:
            link.check(
                CALL_S,
                f"the agent of the main process at {told['main'][2]} does not answer",
            )
        except LinkLost as lost:
            say(channel, refused=str(lost))
            raise
        say(channel, reached=True)
        channel.close()
        yield link


def _lease(told: Mapping[str, Any], host: str) -> AgentLease:
    """The agent of a node, at this address of its machine."""
    if not (is_loopback(host) or told["trust_network"]):
        raise BadOption(
            f"the node would open a port at {host} through which any process can run code in it."
            " The main process allows that with RPCCollector(trust_network=True)"
        )
    maps = {}
    if told["device"] is not None:
        there, here = told["device"]
        if torch.device(here).index >= torch.cuda.device_count():
            raise BadOption(
                f"visible_devices names {here}, but this machine has {torch.cuda.device_count()}"
                " GPUs"
            )
        maps = {told["main"][0]: {here: there}}
    name, number = told["node"]
    return AgentLease(name, number, Settings(host, told["options"], maps), joins=True)


def _heard(channel: SocketLink) -> dict[str, Any]:
    """Receive a record of a node."""
    told = hear(channel)
    if refused := told.get("refused"):
        raise LinkLost(refused)
    return told
