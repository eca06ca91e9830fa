"""Addresses of sockets, as text."""

from __future__ import annotations

import ipaddress
import socket

from muster.errors import BadOption


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[host]:port``.

    Raises ``BadOption`` for other texts.
    """
    host, colon, port = address.rpartition(":")
    is_port = port.isdecimal() and int(port) < 1 << 16
    if not colon or not host or not is_port:
        raise BadOption(
            f"address={address!r}: expected 'host:port', such as 127.0.0.1:8000"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(address: str, option: str) -> socket.socket:
    """Return a socket that listens at ``host:port``.

    Raises ``BadOption``, which names the option, if it cannot.
    """
    host, port = host_and_port(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise BadOption(
            f"{option}: cannot listen at {address}: {error.strerror or error}. Port 0 takes a free"
            " one."
        ) from error
