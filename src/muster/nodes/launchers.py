"""How the process of a node comes to life: started from here, or by somebody else (torchrun, SLURM, people)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muster.errors import BadOption
from muster.nodes.link import AGENT
from muster.nodes.meeting import POLL_S, Meeting, is_loopback, open_store, read_token, wait_for
from muster.sources.channel import Channel
from muster.sources.launch import Child, launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

END_S = 5.0


class Started(Protocol):
    """A node's process that was started from here; or a job that will become one. ``str`` of it says which."""

    @property
    def state(self) -> str:
        """For people: "running", or what it waits for."""

    def ended(self) -> str | None:
        """Why it has ended, for people; None while it runs or may still come to run. Does not wait."""

    def end(self) -> None:
        """End it, by force if need be, and whatever it has started. May be called again."""


class Launcher(Protocol):
    """Brings nodes to life. The threads of several nodes call it at once.

    Attributes:
        name: the value of the option ``launcher=``.
        advice: what to do when a node does not come; a sentence.
    """

    name: str
    advice: str

    def start(self, node: int, epoch: int, meeting: Meeting) -> Started | None:
        """Start the process of a node; it then has to call ``run_node`` (or ``join``). What was started for its
        earlier epochs has been ended before.

        Args:
            node: its number.
            epoch: which the node may ignore: it asks the meeting which one it is.
            meeting: has the address and the token, which must not become visible to other users of the machine
                (``meeting.token_file()`` is a file that only this user can read).

        Returns:
            None: nothing was started, the node comes by itself.
        """

    def close(self) -> None:
        """Free what the launcher holds; all that it has started has been ended. May be called again."""


class MpLauncher:
    """Nodes as processes of this machine, which do not outlive this one.

    Args:
        target: what a node runs, ``"module:function"``.
        entry: the process' function of a channel.
    """

    name = "mp"
    advice = "Its standard error may say more."

    def __init__(self, target: str = AGENT, entry: str = "muster.nodes.torch_distributed:node_main") -> None:
        self._target, self._entry = target, entry

    def start(self, node: int, epoch: int, meeting: Meeting) -> Started:
        ours, theirs = Channel.pair()
        try:
            child = launch(self._entry, theirs, name=f"muster-node-{node}")
            ours.send((meeting.address, node, meeting.token, self._target))
        except BaseException:
            ours.close()
            raise
        return _Process(child, ours)

    def close(self) -> None:
        pass


@dataclass
class _Process:
    child: Child
    channel: Channel

    def __str__(self) -> str:
        return f"process {self.child.pid}"

    @property
    def state(self) -> str:
        return self.ended() or "running"

    def ended(self) -> str | None:
        code = self.child.exit_code()
        if code is None:
            return None
        return f"its {self} ended with exit code {code}"

    def end(self) -> None:
        self.child.kill()
        self.child.join(END_S)
        self.child.close()
        with contextlib.suppress(OSError):
            self.channel.close()


class WaitingLauncher:
    """Starts nothing: somebody else runs ``muster.nodes.torch_distributed.run_node`` where the nodes shall be.

    Args:
        name: "manual", "torchrun" or "submitit_delayed".
        advice: see ``Launcher``.
    """

    def __init__(self, name: str = "manual", advice: str = "") -> None:
        self.name = name
        self.advice = advice or (
            "Nodes are not started by this launcher: call muster.nodes.torch_distributed.run_node(address) on their "
            "machines, with the same token."
        )

    def start(self, node: int, epoch: int, meeting: Meeting) -> None:
        return None

    def close(self) -> None:
        pass


class TorchrunLauncher(WaitingLauncher):
    """Rank 0 of ``torchrun`` is the main process, rank r > 0 is node r - 1 and calls ``run_node()``.

    Raises:
        BadOption: this is not rank 0 under torchrun.
    """

    def __init__(self) -> None:
        super().__init__("torchrun", "Ranks above 0 have to call muster.nodes.torch_distributed.run_node().")
        if torchrun_rank() != 0:
            raise BadOption(
                f"launcher='torchrun' in rank {torchrun_rank()}: the collector lives in rank 0, the others are nodes."
            )
        self._key = f"muster/meeting/{next(_collectors)}"
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    def start(self, node: int, epoch: int, meeting: Meeting) -> None:
        with self._lock:
            if self._store is None:
                self._check(meeting)
                # The store can be read by whoever reaches it: of the token, it holds only where it is.
                path = str(meeting.token_file()) if is_loopback(meeting.host) else None
                self._store = _torchrun_store()
                self._store.set(self._key, json.dumps([meeting.address, path]))

    def _check(self, meeting: Meeting) -> None:
        ranks = int(os.environ["WORLD_SIZE"])
        if ranks != meeting.count + 1:
            raise BadOption(
                f"torchrun has started {ranks} ranks, but {meeting.count} nodes were asked for: "
                f"start {meeting.count + 1}, of which rank 0 is the main process."
            )


def torchrun_address(within_s: float) -> tuple[str, int, bytes | None]:
    """What a rank above 0 learns from rank 0: the address of its meeting, the number of this node, and the token if
    it lies in a file of this machine.

    Raises:
        BadOption: this is not a rank above 0 under torchrun.
        LinkLost: rank 0 has not opened a collector within so many seconds.
    """
    rank = torchrun_rank()
    if rank is None:
        raise BadOption(
            "A node needs the address of its main process, 'host:port': only under torchrun it can be found."
        )
    if rank == 0:
        raise BadOption("run_node() in rank 0, which is the main process: make the collector there.")
    key = f"muster/meeting/{next(_collectors)}"
    store = _torchrun_store()
    late = f"Rank 0 has not opened a collector with launcher='torchrun' within {within_s:g} s."
    address, path = wait_for(store, key, within_s, POLL_S, late)
    return address, rank - 1, read_token(path) if path else None


def torchrun_rank() -> int | None:
    """Of this process; None: it is not one of torchrun's."""
    has_all = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return int(os.environ["RANK"]) if has_all else None


def _torchrun_store() -> TCPStore:
    """A connection to the store that torchrun (or the user's ``init_process_group``) keeps."""
    return open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


_collectors = itertools.count()  # of this process: the first collector of rank 0 is the first that nodes serve
