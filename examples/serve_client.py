"""A client of ``muster serve`` in plain Python: plays a corridor, and needs neither Muster nor torch.

Start ``muster serve random --obs float32:2 --act discrete:2 --frames 2000 --address 127.0.0.1:7000``, then
``python examples/serve_client.py 127.0.0.1:7000``. Copy ``Client`` into your program; docs/serve.md has the protocol.
"""

import json
import os
import socket
import struct
import sys


class Client:
    """A connection to a policy server. ``reset`` and ``step`` take the bytes of an observation."""

    def __init__(self, address: str, token: str = "") -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host.strip("[]"), int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")
        self.spaces = self.ask({"type": "hello", "protocol": 1, "token": token})[0]

    def ask(self, about: dict, values: bytes = b"", answered: bool = True) -> tuple[dict, bytes]:
        """Send a message, and return the server's answer."""
        text = json.dumps(about).encode()
        self.socket.sendall(struct.pack("<II", len(text), len(values)) + text + values)
        if not answered:
            return {}, b""
        sizes = struct.unpack("<II", self.file.read(8).ljust(8, b"\0"))
        answer, values = json.loads(self.file.read(sizes[0]) or '{"type": "close"}'), self.file.read(sizes[1])
        if answer["type"] in ("error", "close"):
            self.file.close()
            self.socket.close()
            raise ConnectionError(answer.get("message", "the server has closed"))
        return answer, values

    def reset(self, obs: bytes) -> bytes:
        """Begin an episode, and return the first action."""
        return self.ask({"type": "reset"}, obs)[1]

    def step(self, obs: bytes, reward: float, terminated: bool, truncated: bool) -> bytes | None:
        """Send the result of the last action, and return the next one. None: begin another episode."""
        about = {"type": "step", "reward": reward, "terminated": terminated, "truncated": truncated}
        answer, action = self.ask(about, obs, answered=not (terminated or truncated))
        return action if answer.get("type") == "action" else None


if __name__ == "__main__":
    client, steps = Client(sys.argv[1], os.environ.get("MUSTER_SERVE_TOKEN", "")), 0
    try:
        while True:  # a corridor of 5 places; action 1 goes on, 0 goes back
            place, action = 0, client.reset(struct.pack("<2f", 5, 0))
            while action is not None:
                place, steps = max(0, place + (1 if struct.unpack("<q", action)[0] else -1)), steps + 1
                action = client.step(struct.pack("<2f", 5, place), float(place == 5), place == 5, False)
    except ConnectionError as error:
        print(f"{steps} steps; {error}")
