"""This process' RPC agent: who it can call, and where it listens.

A process has at most one RPC agent. The collectors of a process share it; if the user has called ``init_rpc``, it is
that one.

``init_rpc`` itself cannot bring nodes back: it lets a process join by calling all that joined before, and fails when
one of them was killed. So every process keeps a list of its own, and learns from whom it wants to call where that
listens.

Security: an agent runs whatever is sent to its ports, and asks for no password. They are on loopback, unless ``bind``
says otherwise; even there, every user of the machine reaches them. A process in the same network as ``bind`` can run
code as this user: use a private network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import TensorPipeRpcBackendOptions, api

from muster.cluster.link import LinkLost
from muster.cluster.rendezvous import is_loopback
from muster.errors import BadOption

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore
    from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo
else:
    from torch.distributed import HashStore, PrefixStore
    from torch.distributed.rpc import TensorPipeAgent, WorkerInfo

OPTIONS = ("num_worker_threads", "rpc_timeout", "_transports", "_channels")
INTERFACE = "TP_SOCKET_IFNAME"  # TensorPipe's only say in where it listens
_rpc: Any = rpc  # whose types do not say what they take over from C++
_autograd: Any = autograd
MOST_PEERS = 32_000  # an id has 16 bits, and that of a broken connection cannot be used again


@dataclass(frozen=True)
class Terms:
    """What an agent is made with.

    Attributes:
        host: address of this machine at which it listens.
        options: for ``TensorPipeRpcBackendOptions``.
        devices: what this process' devices are on others: ``{name of the other: {device here: device there}}``.
    """

    host: str
    options: dict[str, Any] = field(default_factory=dict)
    devices: dict[str, dict[str, str]] = field(default_factory=dict)


class RpcAgent:
    """See the module. ``hold`` and ``release`` come in pairs, the last release ends what the first hold has made.

    Attributes:
        url: where it listens.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _current: ClassVar[RpcAgent | None] = None

    def __init__(self, agent: TensorPipeAgent, terms: Terms | None) -> None:
        self._agent: TensorPipeAgent | None = agent
        self._terms = terms  # None: the user has made it
        self._holders = 0
        self._last = max(info.id for info in agent.get_worker_infos())
        self._addresses = PrefixStore("addrs", agent.store)  # where the agent looks them up
        self.url: str = self._addresses.get(agent.get_worker_info().name).decode()

    @classmethod
    def hold(cls, name: str, terms: Terms) -> RpcAgent:
        """Use this process' agent; make it if there is none.

        Args:
            name: of this process; has no meaning if the user has made the agent.
            terms: if the user has made it, only empty options are possible.

        Raises:
            BadOption: the agent was made with other terms, or cannot listen at the host.
        """
        with cls._lock:
            one = cls._current
            if one is None and _rpc._is_current_rpc_agent_set():
                if terms.options or terms.devices:
                    raise BadOption(
                        "This process has already called torch.distributed.rpc.init_rpc, so that tensorpipe_options "
                        "and visible_devices come too late: give them to init_rpc, or leave that to the collector."
                    )
                one = cls(_rpc._get_current_rpc_agent(), None)
            elif one is None:
                one = cls(_made(name, terms), terms)
            elif one._terms not in (None, terms):
                raise BadOption(
                    f"A process has one RPC agent, and a collector that is still open has made it with {one._terms}, "
                    f"where {terms} was asked for: use the same, or close that collector first."
                )
            cls._current = one
            one._holders += 1
            return one

    def release(self) -> None:
        """Not to be called by a thread that RPC has started."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and RpcAgent._current is self:
                self._end()

    def _end(self) -> None:
        RpcAgent._current = self._agent = None  # its threads end with its last reference
        if self._terms is not None:
            api._finalize_shutdown()  # type: ignore[no-untyped-call]

    def meet(self, name: str, url: str, devices: tuple[str, ...] = ()) -> WorkerInfo:
        """Let another process be called by this name (letters, digits, "-" and "_"), which is new.

        Args:
            url: where it listens.
            devices: of this process, to which it may send.

        Raises:
            LinkLost: there have been too many, or the agent has been released.
        """
        with self._lock:
            if self._agent is None:
                raise LinkLost("The RPC agent of this process has ended.")
            if self._last >= MOST_PEERS:
                raise LinkLost(
                    f"RPC can connect to {MOST_PEERS} nodes, counted with every return; close the collector."
                )
            self._last += 1
            info = WorkerInfo(name, self._last)
            self._addresses.set(name, url)
            self._agent._update_group_membership(info, [torch.device(name) for name in devices], {}, True)
            return info

    def forget(self, info: WorkerInfo) -> None:
        """The other process cannot be called any more."""
        with self._lock:
            if self._agent is not None:
                self._agent._update_group_membership(info, [], {}, False)


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What of ``TensorPipeRpcBackendOptions`` can be chosen; raises BadOption for anything else."""
    given = dict(options or {})
    instead = {
        "init_method": "nodes are found by tcp_port and bind",
        "device_maps": "visible_devices says it",
        "devices": "visible_devices says it",
    }
    for name in given:
        if name not in OPTIONS:
            why = f"; {instead[name]}" if name in instead else ""
            raise BadOption(f"tensorpipe_options has {name!r}, where only {', '.join(OPTIONS)} can be chosen{why}.")
    try:
        TensorPipeRpcBackendOptions(**given)
    except TypeError as error:  # whose text is a page long
        raise BadOption(f"tensorpipe_options={given!r}: a value has a wrong type.") from error
    except RuntimeError as error:
        raise BadOption(f"tensorpipe_options={given!r}: {str(error).splitlines()[0]}.") from error
    return given


def default_transports() -> list[str]:
    """TensorPipe's, without its shared memory: that has a thread in every process that polls without a pause, and
    keeps 24 open files of each connection after its end. (Blocks between processes of one machine do not need it:
    they are copied from memory to memory.)
    """
    try:
        TensorPipeRpcBackendOptions(_transports=["ibv"])
    except RuntimeError:  # this PyTorch knows no InfiniBand
        return ["uv"]
    return ["ibv", "uv"]


def _made(name: str, terms: Terms) -> TensorPipeAgent:
    options = TensorPipeRpcBackendOptions(**{"_transports": default_transports(), **terms.options})
    for other, map_ in terms.devices.items():
        options.set_device_map(other, {torch.device(here): torch.device(there) for here, there in map_.items()})
    _autograd._init(0)  # calls fail without it
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = interface_of(terms.host)
    try:
        agent = TensorPipeAgent(HashStore(), name, 0, None, options, {}, [])
        api._init_rpc_states(agent)  # type: ignore[no-untyped-call]  # it listens from now on
    except RuntimeError as error:
        raise BadOption(f"RPC cannot be set up: {str(error).splitlines()[0]}") from error
    finally:
        if before is None:
            del os.environ[INTERFACE]
        else:
            os.environ[INTERFACE] = before
    url = PrefixStore("addrs", agent.store).get(name).decode()
    host = urlsplit(url).hostname or ""
    if url.startswith("uv:") and host != terms.host and not (is_loopback(host) and is_loopback(terms.host)):
        api._finalize_shutdown()  # type: ignore[no-untyped-call]
        raise BadOption(
            f"bind={terms.host!r}: RPC would listen at {url}, since the first RPC agent of a process decides that for "
            "all later ones. Use that address, or another process; or set TP_SOCKET_IFNAME to the interface that has "
            "this address before you call init_rpc."
        )
    return agent


def interface_of(host: str) -> str:
    """The network interface whose first IPv4 address this is, or that is loopback as it is.

    Raises:
        BadOption: there is none.
    """
    if is_loopback(host):
        return "lo" if sys.platform == "linux" else "lo0"
    import fcntl

    request = 0x8915 if sys.platform == "linux" else 0xC0206921  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), request, name.encode()[:15].ljust(256, b"\0"))
                found[name] = socket.inet_ntoa(answer[20:24])
    for name, address in found.items():
        if address == host:
            return name
    raise BadOption(
        f"bind={host!r} is not the first IPv4 address of a network interface of this machine, where alone torch can "
        f"listen; there are {found}."
    )


def _end_of_process() -> None:
    """An agent whose threads run while the interpreter is taken down can make it abort."""
    if (one := RpcAgent._current) is not None:
        with contextlib.suppress(RuntimeError):
            one._end()


weakref.finalize(RpcAgent, _end_of_process)  # after those of the collectors, which are made later
