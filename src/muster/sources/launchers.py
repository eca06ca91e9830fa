"""How workers come to be: as processes, or as threads of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.memory.shared import Arena
from muster.sources.channel import Channel
from muster.sources.launch import Child, launch
from muster.sources.ledger import Ledger
from muster.sources.messages import Payload
from muster.sources.threads import Doorbell, LocalChannel, LocalLedger, ThreadChild
from muster.weights.transport import Ticket

if TYPE_CHECKING:
    from muster.sources.inference import InferenceServer


@dataclass
class Setup:
    """What is the same for all incarnations of a worker.

    Attributes:
        payload, groups: see ``Start``.
        ticket: makes a subscription to the weights.
        threads: of torch.
        launch: starts a process or thread called so; gives it, the parent's end of a channel to it, and its ledger.
            Told whether it may take time to make later starts quicker.
        in_thread: it is a thread.
        close_s: seconds for closing; None is for ever.
        stoppable: ``stop`` may be called.
        server: acts for it; None: it acts by itself, or a server elsewhere does.
        remote: it is on a node, with memory of its own.
        where: that node, for people.
    """

    payload: Payload
    groups: Sequence[int]
    arena: Arena
    ticket: Callable[[], Ticket]
    threads: int | None
    launch: Callable[[str, bool], tuple[Child, Any, Any]]
    in_thread: bool
    close_s: float | None
    stoppable: bool
    server: InferenceServer | None = None
    remote: bool = False
    where: Callable[[], str] = str


def in_process(method: str | None, *, light: bool = False) -> Callable[[str, bool], tuple[Child, Any, Any]]:
    """Launches workers as processes; ``light`` ones have not imported torch."""

    def start(name: str, preload: bool) -> tuple[Child, Channel, Ledger]:
        ours, theirs = Channel.pair()
        ledger = Ledger.create()
        try:
            target = "muster.sources.server:main"
            return launch(target, theirs, name=name, method=method, preload=preload, light=light), ours, ledger
        except BaseException:
            ours.close()
            theirs.close()
            ledger.close()
            raise

    return start


def in_thread(doorbell: Doorbell) -> Callable[[str, bool], tuple[Child, Any, Any]]:
    """Launches workers as threads, who ring when they have something to say."""

    def start(name: str, preload: bool) -> tuple[Child, LocalChannel, LocalLedger]:
        channel, ledger = LocalChannel(doorbell), LocalLedger()
        return ThreadChild(name, channel.other, ledger), channel, ledger

    return start
