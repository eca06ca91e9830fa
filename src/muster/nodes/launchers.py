"""How the process of a node comes to life: started from here, or by somebody else (torchrun, SLURM, people)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from muster.nodes.link import AGENT
from muster.nodes.meeting import Meeting
from muster.sources.channel import Channel
from muster.sources.launch import Child, launch

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
            meeting: has the address, the engine (for ``run_node(engine=...)``), and the token, which must not become
                visible to other users of the machine: hand it over through a pipe or a file that only this user can
                read (``meeting.token_file()`` is one), not as an argument or in the environment.

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
            ours.send((meeting.address, node, meeting.token, self._target, meeting.engine))
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
