"""Machines of one's own: network namespaces around a switch, whose cables can be pulled out and
made longer.

::

    with network(3) as (main, node, stranger):
        with main.entered():              # what this thread, and threads that it starts, does with sockets
            server = Server(main.address)
        client = node.start([sys.executable, "-c", "..."])
        node.unplug()                     # packets vanish, without a word to either side
        node.plug_in()
        node.cable(delay_s=0.05)          # each way

Linux, as root, with iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL, ETH_P_IP = 263, 15, 4, 3, 0x800
VNET_HDR_BYTES = 10
SYN, ACK = 0x02, 0x10  # flags of TCP
END_S = 5.0

_numbers = itertools.count()


def missing() -> str | None:
    """Why there can be no such machines here; None: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not all(map(shutil.which, ("ip", "nsenter"))):
        return "iproute2 and util-linux are not installed"
    name = f"muster-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "x", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
    return None


class Host:
    """A machine with one address, 10.77.0.x."""

    def __init__(self, network: str, number: int) -> None:
        self.name, self.address = f"{network}-{number}", f"10.77.0.{number + 1}"
        self._switch, self._port = f"{network}-switch", f"port{number}"
        self._processes: list[subprocess.Popen[str]] = []
        _ip("netns", "add", self.name)
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            self.name,
            "type",
            "veth",
            "peer",
            "name",
            self._port,
            "netns",
            self._switch,
        )
        self._own("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._own("link", "set", "lo", "up")
        self._own("link", "set", "eth0", "up")
        self._at_switch("link", "set", self._port, "up")
        self.plug_in()

    def plug_in(self) -> None:
        self._at_switch("link", "set", self._port, "master", "bridge")

    def unplug(self) -> None:
        """What was sent and has not arrived is lost, unless it is sent again."""
        self._at_switch("link", "set", self._port, "nomaster")

    def cable(
        self, *, delay_s: float = 0.0, loss: float = 0.0, opened: str | None = None
    ) -> None:
        """Give this machine another cable; no more unplugging.

        Args:
            delay_s: for which each packet travels, to this machine and from it.
            loss: part of the packets that are lost.
            opened: a firewall drops each TCP connection to another port than these, in both
                directions: "22,80-90". None: there is no firewall.
        """
        one, other = f"{self._port}a", f"{self._port}b"
        self._at_switch("link", "set", self._port, "nomaster")
        self._at_switch("link", "add", one, "type", "veth", "peer", "name", other)
        self._at_switch("link", "set", other, "master", "bridge")
        for name in (one, other):
            self._at_switch("link", "set", name, "up")
        self._at_switch("link", "set", self._port, "promisc", "on")
        self._at_switch("link", "set", one, "promisc", "on")
        what = [str(delay_s), str(loss), "0-65535" if opened is None else opened]
        relay = self.start(
            [sys.executable, __file__, self._port, one, *what],
            switch=True,
            stdout=subprocess.PIPE,
        )
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"

    def give_route(self) -> None:
        """Let this machine believe that it reaches the rest of the world through its cable."""
        self._own("route", "add", "default", "dev", "eth0")

    def give_out_ports(self, first: int, last: int) -> None:
        """Let sockets of this machine that are bound to no port in particular get one of these."""
        command = ["sysctl", "-q", "-w", f"net.ipv4.ip_local_port_range={first} {last}"]
        assert self.start(command).wait(END_S) == 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is on this machine, and so are threads that it starts meanwhile."""
        with (
            open("/proc/thread-self/ns/net") as home,
            open(f"/run/netns/{self.name}") as there,
        ):
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def start(
        self, command: Sequence[str], switch: bool = False, **options: Any
    ) -> subprocess.Popen[str]:
        """A process of this machine, which ends with it."""
        space = self._switch if switch else self.name
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{space}", *command], text=True, **options
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(END_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        _ip("netns", "del", self.name)

    def _own(self, *arguments: str) -> None:
        _ip("-n", self.name, *arguments)

    def _at_switch(self, *arguments: str) -> None:
        _ip("-n", self._switch, *arguments)


@contextlib.contextmanager
def network(count: int) -> Iterator[tuple[Host, ...]]:
    """So many machines at one switch."""
    name = f"muster-{os.getpid()}-{next(_numbers)}"
    with contextlib.ExitStack() as stack:
        _ip("netns", "add", f"{name}-switch")
        stack.callback(_ip, "netns", "del", f"{name}-switch")
        _ip("-n", f"{name}-switch", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{name}-switch", "link", "set", "bridge", "up")
        hosts = []
        for number in range(count):
            hosts.append(Host(name, number))
            stack.callback(hosts[-1].end)
        yield tuple(hosts)


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens for TCP; this one: on the machine that this
    thread is on.
    """
    where = "thread-self" if pid == os.getpid() else pid
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(link))
    found = set()
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/{where}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                found.add((_address(bytes.fromhex(host), size), int(port, 16)))
    return found


def _address(words: bytes, size: int) -> str:
    """The kernel writes words of four bytes in the machine's order."""
    swapped = b"".join(
        words[i : i + 4][::-1] if sys.byteorder == "little" else words[i : i + 4]
        for i in range(0, size, 4)
    )
    return socket.inet_ntop(socket.AF_INET if size == 4 else socket.AF_INET6, swapped)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=10
    )


def _relay(one: str, other: str, seconds: float, loss: float, opened: str) -> None:
    """Carry frames between two interfaces, late. (The kernel's own means for that, netem, is often
    not there.)
    """
    ports = set[int]()
    for part in opened.split(","):
        first, _, last = part.partition("-")
        ports.update(range(int(first), int(last or first) + 1))
    passing = {None, *ports}
    ends = []
    for name in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        end.setsockopt(
            SOL_PACKET, PACKET_VNET_HDR, 1
        )  # frames whose checksums and sizes are left to the hardware
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        end.bind((name, ETH_P_ALL))
        ends.append(end)
    print("ready", flush=True)
    rng = random.Random(0)
    late: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        left = max(0.0, late[0][0] - time.monotonic()) if late else None
        for end in select.select(ends, [], [], left)[0]:
            frame, sender = end.recvfrom(1 << 17)
            if (
                sender[2] == PACKET_OUTGOING
                or rng.random() < loss
                or _connects_to(frame) not in passing
            ):
                continue
            heapq.heappush(
                late,
                (time.monotonic() + seconds, next(numbers), 1 - ends.index(end), frame),
            )
        while late and late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):
                ends[to].send(frame)


def _connects_to(frame: bytes) -> int | None:
    """The port of the TCP connection that this frame wants to open; None: it does not."""
    packet = frame[VNET_HDR_BYTES:]
    kind = int.from_bytes(packet[12:14], "big")
    if kind != ETH_P_IP or packet[23] != socket.IPPROTO_TCP:
        return None
    segment = packet[14 + 4 * (packet[14] & 15) :]
    opens = segment[13] & (SYN | ACK) == SYN
    return int.from_bytes(segment[2:4], "big") if opens else None


if __name__ == "__main__":
    _relay(
        sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    )
