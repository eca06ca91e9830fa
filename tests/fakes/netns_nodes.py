"""What nodes on machines of ``netns`` do."""

from __future__ import annotations

import pickle
import secrets
import sys
import threading
from pathlib import Path

from muster.nodes.gloo import join_group
from muster.nodes.link import LinkLost
from muster.nodes.meeting import Guest, local_address
from muster.nodes.torch_distributed import run_node

BEAT_S = 0.2
NUMBER_BYTES = 4


def beating(link, node):
    """Send this session's own number again and again; say on standard output when it begins and how it ends."""
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
    """Join without the token, and send what must not be unpickled wherever a message may be."""
    invitation = Guest(address, 0, within_s=60).next()
    link = join_group(invitation.store, 1, local_address(invitation.host), "gloo", 10.0)
    bomb = pickle.dumps(Bomb(marker))
    try:
        for _ in range(3):
            link.send(bomb)
        link.receive()
        link.receive()
    except LinkLost as lost:
        print("lost", lost, flush=True)


def main():
    """``beating ADDRESS TOKEN_FILE [FUNCTION]`` or ``hostile ADDRESS MARKER``."""
    what, address, path = sys.argv[1:4]
    if what == "hostile":
        hostile(address, path)
    else:
        print("end", run_node(address, 0, path, target=f"tests.fakes.{what}", patience_s=60), flush=True)


if __name__ == "__main__":
    main()
