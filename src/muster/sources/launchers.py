"""How workers come to be: as processes, or as threads of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.sources.channel import Channel
from muster.sources.launch import Child, launch
from muster.sources.ledger import Ledger
from muster.sources.threads import Doorbell, LocalChannel, LocalLedger, ThreadChild


def in_process(method: str | None, *, light: bool = False) -> Callable[[str, bool], tuple[Child, Any, Any]]:
    """Launches workers as processes; ``light`` ones have not imported torch."""

    def start(name: str, preload: bool) -> tuple[Child, Channel, Ledger]:
        ours, theirs = Channel.pair()
        ledger = Ledger.create()
        try:
            target = "muster.sources.main:main"
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
