"""A main process on a machine of ``netns``, in a program of its own: for engines of which a process
has one agent or one connection, whose threads stay on the machine where it was made.

``python -m tests.fakes.netns_mains ENGINE ADDRESS TOKEN_FILE DEADLINE_S``

The first line of standard output is where nodes join. Lines of standard input ask for something;
sessions are numbered by their epochs:

=============  ===============================================  ====================================
asked for      what it does                                     lines of standard output
=============  ===============================================  ====================================
``connect 0``  waits for the node, then sends beats and         ``joined 0``, ``came 0 MESSAGE``,
               receives                                         ``lost 0 WHY``
``send 0``     sends a message                                  ``sent 0`` or ``refused 0``
``close 0``    closes the link                                  ``closed 0``
=============  ===============================================  ====================================
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from muster.cluster.link import Link, LinkLost

BEAT_S = 0.2
JOIN_S = 90.0
TARGET = "tests.fakes.netns_nodes:beating"


def carrier_of(engine: str, address: str, token: str, deadline_s: float) -> Any:
    """The carrier of one node; ``address`` is that of this machine, or of Ray's head."""
    if engine == "ray":
        from muster.cluster.ray_nodes import Actors, ray_carrier

        actors = Actors(
            count=1,
            ray_init_config={"address": address, "log_to_driver": False},
            remote_configs={"num_cpus": 1},
            target=TARGET,
        )
        return ray_carrier("ray", actors, deadline_s)
    from muster.cluster.launchers import Launcher
    from muster.cluster.rendezvous import Rendezvous
    from muster.cluster.rpc_nodes import RpcCarrier

    rendezvous = Rendezvous(1, bind=address, token=token)
    return RpcCarrier(Launcher(), rendezvous, trust_network=True, deadline_s=deadline_s)


class Main:
    def __init__(self, carrier: Any) -> None:
        self.carrier = carrier
        self.links: dict[int, Link] = {}
        self._printing = threading.Lock()

    def say(self, *words: Any) -> None:
        with self._printing:
            print(*words, flush=True)

    def connect(self, epoch: int) -> None:
        threading.Thread(target=self._session, args=(epoch,), daemon=True).start()

    def send(self, epoch: int) -> None:
        try:
            self.links[epoch].send(b"anybody?")
            self.say("sent", epoch)
        except LinkLost:
            self.say("refused", epoch)

    def close(self, epoch: int) -> None:
        self.links[epoch].close()
        self.say("closed", epoch)

    def _session(self, epoch: int) -> None:
        link = self.carrier.connect(0, epoch, JOIN_S, threading.Event())
        self.links[epoch] = link
        self.say("joined", epoch)
        threading.Thread(target=self._beat, args=(link,), daemon=True).start()
        try:
            while True:
                self.say("came", epoch, link.receive().message.decode())
        except LinkLost as lost:
            self.say("lost", epoch, lost)

    def _beat(self, link: Link) -> None:
        pause = threading.Event()
        with contextlib.suppress(LinkLost):
            while not pause.wait(BEAT_S):
                link.send(b"beat")


def main() -> None:
    engine, address, token, deadline_s = sys.argv[1:]
    running = Main(carrier_of(engine, address, token, float(deadline_s)))
    try:
        running.say("listens", running.carrier.address)
        for line in sys.stdin:
            what, epoch = line.split()
            getattr(running, what)(int(epoch))
    finally:
        for link in running.links.values():
            link.close()
        running.carrier.close()


if __name__ == "__main__":
    main()
