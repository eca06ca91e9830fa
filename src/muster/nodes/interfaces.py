"""Where torch listens: it takes the name of a network interface from the environment."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from muster.errors import BadOption
from muster.nodes.meeting import is_loopback


@contextlib.contextmanager
def listening_at(host: str, variable: str) -> Iterator[None]:
    """What torch makes in this context listens at ``host`` only.

    Args:
        host: see ``interface_of``.
        variable: of the environment, in which torch looks for an interface.

    Raises:
        BadOption: no interface has this address.
    """
    before = os.environ.get(variable)
    os.environ[variable] = interface_of(host)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def interface_of(host: str) -> str:
    """The network interface whose first IPv4 address this is, or that is loopback as it is.

    Raises:
        BadOption: there is none.
    """
    if is_loopback(host):
        return "lo" if sys.platform == "linux" else "lo0"
    found = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found[name] = _first_address(name)
    for name, address in found.items():
        if address == host:
            return name
    raise BadOption(
        f"bind={host!r} is not the first IPv4 address of a network interface of this machine, where alone torch can "
        f"listen; there are {found}."
    )


def _first_address(interface: str) -> str:
    import fcntl

    request = 0x8915 if sys.platform == "linux" else 0xC0206921  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), request, interface.encode()[:15].ljust(256, b"\0"))
    return socket.inet_ntoa(answer[20:24])
