"""What nodes on machines of ``netns`` do."""

from __future__ import annotations

import pickle
import secrets
import socket
import sys
import threading
from pathlib import Path

from muster.cluster.joining import run_node
from muster.cluster.link import LinkLost
from muster.cluster.socket_link import MAGIC, NONCE_BYTES
from tests.fakes.linked import Frame

BEAT_S = 0.2
NUMBER_BYTES = 4


def beating(link, node):
    """Send this session's own number again and again; say on standard output when it begins and how
    it ends.
    """
    number = secrets.token_hex(NUMBER_BYTES)
    over = threading.Event()

    def beat():
        try:
            while not over.wait(BEAT_S):
                link.send(number.encode())
        except LinkLost:
            pass

    print("joined", number, flush=True)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        while link.receive().message != b"bye":
            pass
        return True
    except LinkLost as lost:
        print("lost", lost, flush=True)
        return False
    finally:
        over.set()
        thread.join()


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def hostile(address, marker):
    """Without the token, send what must not be unpickled wherever a message may be."""
    host, _, port = address.rpartition(":")
    bomb = pickle.dumps(Bomb(marker))
    for first in (bomb, MAGIC + bytes(NONCE_BYTES)):
        with socket.create_connection((host, int(port)), 10.0) as connection:
            try:
                for message in (first, bomb, bomb):
                    connection.sendall(bytes(Frame(message)))
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
        print("lost", flush=True)


def main():
    """``module:function ADDRESS TOKEN_FILE`` or ``hostile ADDRESS MARKER``."""
    what, address, path = sys.argv[1:]
    if what == "hostile":
        hostile(address, path)
    else:
        said_goodbye = run_node(
            address, 0, path, target=f"tests.fakes.{what}", patience_s=60
        )
        print("end", said_goodbye, flush=True)


if __name__ == "__main__":
    main()
