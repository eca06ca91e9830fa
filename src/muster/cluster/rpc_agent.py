"""The agent of torch RPC: through it, this process calls others and is called by them.

A process has one.

The group of our agents is a star: the main process knows its nodes, and a node knows the main
process. Addresses travel over the authenticated connection through which a node joins, so that no
store has to be reached. A node that was lost and joins again keeps its name and gets another
number, by which RPC addresses it: calls for the lost one fail.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import itertools
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, autograd, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import TensorPipeAgent, WorkerInfo  # type: ignore[attr-defined]

from muster.cluster.link import LinkLost
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from muster.utils.private_names import usable
from muster.utils.texts import first_line
from muster.workers.launch import check_descriptors

# of TensorPipe; its own ones keep a processor busy, and listen at 17 ports
DEFAULTS: Mapping[str, Any] = {
    "num_worker_threads": 4,
    "_transports": ["uv"],
    "_channels": ["cma", "basic"],
}
PRIVATE = (  # of torch.distributed.rpc
    *(
        "_cleanup_python_rpc_handler",
        "_destroy_rref_context",
        "_get_current_rpc_agent",
        "_is_current_rpc_agent_set",
    ),
    *("_reset_current_rpc_agent", "_set_and_start_rpc_agent"),
)
core: Any = rpc  # for its private names
HIGHEST_NUMBER = 32767  # of an agent in a group
DESCRIPTORS = 16  # an agent opens 10, and more for each process that it knows
SHUTDOWN_S = 5.0  # for functions that others have called here
INTERFACE = "TP_SOCKET_IFNAME"  # read by TensorPipe
_SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, on Linux

# by the name of the other agent: its device for each device of this one
Maps = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Settings:
    """How an agent is made.

    Attributes:
        host: address of this machine at which the agent listens.
        options: of ``TensorPipeRpcBackendOptions``, beside ``DEFAULTS``.
        maps: which device of another process a tensor is sent to.
    """

    host: str
    options: Mapping[str, Any] = field(default_factory=dict)
    maps: Maps = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"bind={self.host!r}, tensorpipe_options={dict(self.options)} and device maps"
            f" {dict(self.maps)}"
        )


class OwnAgent:
    """An agent that Muster has made, which is the current one of this process.

    Args:
        name: in its group.
        number: in its group.

    Attributes:
        info: its name and number.
        address: where it listens, in TensorPipe's words.

    Raises:
        BadOption: TensorPipe refuses the settings, or would listen at another address than
            ``host``; or this process has too few descriptors, for which TensorPipe would abort it.
    """

    def __init__(self, name: str, number: int, settings: Settings) -> None:
        check_descriptors("the agent of torch RPC", DESCRIPTORS)
        self.settings = settings
        self.numbers = itertools.count(number + 1)  # for those that join
        self._members = threading.Lock()
        self._reverse: dict[str, dict[torch.device, torch.device]] = {}
        store = HashStore()
        self._addresses = PrefixStore("addrs", store)
        self._maps = {there: _devices(own) for there, own in settings.maps.items()}
        self._devices = sorted(
            {own for map_ in self._maps.values() for own in map_}, key=str
        )
        try:
            options = rpc.TensorPipeRpcBackendOptions(
                **{**DEFAULTS, **settings.options},
                device_maps=self._maps,  # type: ignore[arg-type]
            )
            if self._devices:
                torch.cuda.init()  # type: ignore[no-untyped-call]
            with _listening_at(settings.host):
                self._agent = TensorPipeAgent(
                    store, name, number, None, options, {}, self._devices
                )
                core._set_and_start_rpc_agent(self._agent)
        except (RuntimeError, ValueError, TypeError) as error:
            if core._is_current_rpc_agent_set():  # it was made, but cannot listen
                core._reset_current_rpc_agent()
            raise BadOption(
                f"torch RPC refuses {settings}: {first_line(error)}"
            ) from error
        self.info = self._agent.get_worker_info()
        self.address = bytes(self._addresses.get(name)).decode()
        try:
            self._check_address()
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(
            RuntimeError
        ):  # it can be initialized once in a process, and was
            autograd._init(number)  # type: ignore[attr-defined]

    def _check_address(self) -> None:
        host = self.address.rpartition("/")[2].rpartition(":")[0].strip("[]")
        wanted = self.settings.host
        if (
            "uv" in self.address
            and host != wanted
            and not (is_loopback(host) and is_loopback(wanted))
        ):
            raise BadOption(
                f"torch RPC listens at {host}, not at {wanted}: it takes the first address of an"
                " interface, and the same interface for as long as the process runs. Give"
                f" bind={host!r}, or start a new process"
            )

    @property
    def card(self) -> tuple[str, int, str]:
        """What others need to know to call it: the arguments of ``admit``."""
        return self.info.name, self.info.id, self.address

    def admit(self, name: str, number: int, address: str) -> WorkerInfo:
        """Let an agent join the group of this one; an earlier one of this name leaves.

        Args:
            address: where it listens.
        """
        if name == self.info.name:
            return self.info
        member = WorkerInfo(name, number)
        with self._members:
            for known in self._agent.get_worker_infos():
                if known.name == name:
                    self._change(known, joins=False)
            self._addresses.set(name, address)
            if name in self._maps:
                self._reverse[name] = self._maps[
                    name
                ]  # the other one has the inverse map
            self._change(member, joins=True)
        return member

    def dismiss(self, member: WorkerInfo) -> None:
        """Let an agent leave the group."""
        with self._members:
            if member.id != self.info.id and member.id in {
                known.id for known in self._agent.get_worker_infos()
            }:
                self._reverse.pop(member.name, None)
                self._change(member, joins=False)

    def _change(self, member: WorkerInfo, *, joins: bool) -> None:
        self._agent._update_group_membership(
            member, self._devices, self._reverse, joins
        )

    def next_number(self) -> int:
        """Raises LinkLost if all are used."""
        number = next(self.numbers)
        if number > HIGHEST_NUMBER:
            raise LinkLost(
                f"torch RPC has only {HIGHEST_NUMBER} numbers for nodes that join. Start a new"
                " process."
            )
        return number

    def close(self) -> None:
        """Stop listening. The process can have another agent afterwards.

        Functions that other processes have called here may go on for ``SHUTDOWN_S``. If they take
        longer, the agent is never freed, because that would wait for them, even when the process
        ends.
        """
        if _shut_down(self._agent):
            core._destroy_rref_context(True)
            core._cleanup_python_rpc_handler()
        else:
            _keep(self._agent)
        core._reset_current_rpc_agent()

    def end(self) -> None:
        """Stop listening because this process ends; other threads may still use the agent."""
        if not _shut_down(self._agent):
            _keep(self._agent)
            core._reset_current_rpc_agent()

    def forget(self) -> None:
        """Forget the agent in a fork, which has none of its threads."""
        _keep(self._agent)
        core._reset_current_rpc_agent()


_lock = threading.Lock()
_shared: OwnAgent | None = None
_users = 0


class AgentLease:
    """The use of Muster's agent in this process, which is made for the first user and ends with the
    last.

    Args:
        joins: if there is an agent, use it, whatever its settings are.

    Raises:
        BadOption: the agent of this process is the user's, or has other settings.
    """

    def __init__(
        self, name: str, number: int, settings: Settings, *, joins: bool = False
    ) -> None:
        global _shared, _users
        with _lock:
            if _shared is None:
                if users_agent() is not None:
                    raise BadOption(
                        "this process has an RPC agent of its own (init_rpc), and torch allows one:"
                        " make it after the collector's, or run the node in another process"
                    )
                _shared = OwnAgent(name, number, settings)
                _at_exit()
            elif settings != _shared.settings and not joins:
                raise BadOption(
                    "another RPCCollector of this process has an RPC agent with"
                    f" {_shared.settings}, this one wants {settings}, and a process has one agent:"
                    " shut that collector down, or give both the same options (without"
                    " visible_devices of GPUs)"
                )
            self.agent = _shared
            _users += 1
            self._ended = False

    def close(self) -> None:
        """End the use. May be called again."""
        global _shared, _users
        with _lock:
            if self._ended or self.agent is not _shared:
                return
            self._ended = True
            _users -= 1
            if not _users:
                _shared = None
                self.agent.close()


def check_torch() -> None:
    """Raise BadOption if this PyTorch was not checked: RPC has no public names for what is needed
    here.
    """
    if not usable(
        "torch",
        (rpc, PRIVATE),
        (TensorPipeAgent, ("_update_group_membership",)),
        (autograd, ("_init",)),
    ):
        raise BadOption(
            "transport='rpc' needs private names of torch that were not checked with this version"
            f" ({torch.__version__}), or must not be used (MUSTER_PRIVATE_NAMES): pass"
            " transport='direct'"
        )


def users_agent() -> Any:
    """The agent that the user has made with ``init_rpc``, or None."""
    if _shared is not None or not core._is_current_rpc_agent_set():
        return None
    return core._get_current_rpc_agent()


_is_registered = False


def _at_exit() -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_end)
        os.register_at_fork(after_in_child=_forget)


def _end() -> None:
    global _shared
    agent, _shared = _shared, None
    if agent is not None:
        agent.end()


def _forget() -> None:
    global _shared, _users, _lock
    _lock = threading.Lock()
    agent, _shared, _users = _shared, None, 0
    if agent is not None:
        agent.forget()


def _shut_down(agent: Any) -> bool:
    """Shut an agent down; False if functions that others have called here do not end."""
    done = threading.Event()

    def shut_down() -> None:
        with contextlib.suppress(RuntimeError):
            agent.shutdown()
        done.set()

    try:
        threading.Thread(
            target=shut_down, name="muster-rpc-shutdown", daemon=True
        ).start()
    except RuntimeError:  # the system allows no more threads, or the interpreter ends
        shut_down()
    return done.wait(SHUTDOWN_S)


def _keep(agent: Any) -> None:
    """Never free an agent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


def _devices(map_: Mapping[str, str]) -> dict[torch.device, torch.device]:
    return {torch.device(own): torch.device(there) for own, there in map_.items()}


@contextlib.contextmanager
def _listening_at(host: str) -> Iterator[None]:
    """A context in which TensorPipe listens at the interface with this address."""
    found, before = _interface(host), os.environ.get(INTERFACE)
    if found is not None:
        os.environ[INTERFACE] = found
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)
        if before is not None:
            os.environ[INTERFACE] = before


def _interface(host: str) -> str | None:
    """The name of the interface with this address; None: TensorPipe is left to find one.

    Raises:
        BadOption: there is none.
    """
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(host):
        return next((name for name in names if name in ("lo", "lo0")), None)
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    raise BadOption(
        f"{host} is not the first IPv4 address of an interface of this machine, and torch RPC"
        " listens at no other: see `ip -4 -brief address`"
    )
