"""Both ends of a link, with a stranger between them who sees, changes, repeats or drops what they
send.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass

from muster.cluster.link import LinkLost
from muster.cluster.socket_link import SocketLink

TOKEN = b"0123456789abcdef"
HEADER = struct.Struct("<QQQ")  # length of the message, tag, length of the block


@dataclass(frozen=True)
class Frame:
    message: bytes
    tag: int = 0
    block: bytes = b""

    def __bytes__(self):
        return (
            HEADER.pack(len(self.message), self.tag, len(self.block))
            + self.message
            + self.block
        )


def read_exactly(end, size):
    return end.recv(size, socket.MSG_WAITALL) if size else b""


def read_frame(end):
    length, tag, size = HEADER.unpack(read_exactly(end, HEADER.size))
    return Frame(read_exactly(end, length), tag, read_exactly(end, size))


@dataclass
class Linked:
    """The ends (or the errors of ``Link``), the stranger's sockets to them, and the frames of their
    handshake.
    """

    main: SocketLink | LinkLost
    node: SocketLink | LinkLost
    to_main: socket.socket
    to_node: socket.socket
    handshake: list[Frame]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in (self.main, self.node, self.to_main, self.to_node):
            if not isinstance(end, LinkLost):
                end.close()


def linked(main_token=TOKEN, node_token=TOKEN, deadline_s=20.0):
    """The stranger passes on the handshake, and nothing after it."""
    (near, to_main), (to_node, far) = socket.socketpair(), socket.socketpair()
    ends = {}

    def make(name, end, token):
        try:
            ends[name] = SocketLink(
                end, token, main=name == "main", deadline_s=deadline_s
            )
        except LinkLost as error:
            ends[name] = error

    making = [
        threading.Thread(target=make, args=arguments)
        for arguments in (("main", near, main_token), ("node", far, node_token))
    ]
    for thread in making:
        thread.start()
    seen = []
    for _ in range(2):
        seen += [read_frame(to_main), read_frame(to_node)]
        to_node.sendall(bytes(seen[-2]))
        to_main.sendall(bytes(seen[-1]))
    for thread in making:
        thread.join(deadline_s)
    return Linked(ends["main"], ends["node"], to_main, to_node, seen)
