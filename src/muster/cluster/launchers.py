"""How the process of a node is started: from here, or from outside (torchrun, SLURM, by hand)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from muster.cluster.link import AGENT
from muster.cluster.rendezvous import Rendezvous, read_token
from muster.errors import BadOption
from muster.workers.channel import Channel
from muster.workers.launch import launch

NAMES = ("mp", "submitit", "submitit_delayed", "torchrun", "manual")
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


class Launcher:
    """Brings nodes to life. The threads of several nodes call it at once.

    This one starts nothing: ``run_node`` is called elsewhere, where the nodes shall be.

    Attributes:
        name: the value of the option ``launcher=``.
        advice: what to do when a node does not come; a sentence.
    """

    name = "manual"
    advice = (
        "Nodes are not started by this launcher: call muster.cluster.joining.run_node(address) on their machines, "
        "with the same token."
    )

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> Started | None:
        """Start the process of a node; it then has to call ``run_node`` (or ``join``). What was started for its
        earlier epochs has been ended before.

        Args:
            node: its number.
            epoch: which the node may ignore: it asks the rendezvous which one it is.
            rendezvous: has the address, and the token, which must not become visible to other users of the machine:
                hand it over through a pipe or a file that only this user can read (``rendezvous.write_token``), not
                as an argument or in the environment.

        Returns:
            None: nothing was started, the node comes by itself.
        """
        return None

    def close(self) -> None:
        """Free what the launcher holds; all that it has started has been ended. May be called again."""


class MpLauncher(Launcher):
    """Nodes as processes of this machine, which do not outlive this one.

    Args:
        target: what a node runs, ``"module:function"``.
        entry: the process' function of a channel.
    """

    name = "mp"
    advice = "Its standard error may say more."

    def __init__(self, target: str = AGENT, entry: str = "muster.cluster.joining:node_main") -> None:
        self._target, self._entry = target, entry

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> Started:
        told = (rendezvous.address, node, rendezvous.token, self._target)
        return Process(self._entry, f"muster-node-{node}", told)


class Process:
    """A process of this machine, which does not outlive this one (``Started``).

    Args:
        entry: its function of a channel, ``"module:function"``.
        name: for people, in ``ps``.
        told: what it receives first.
    """

    def __init__(self, entry: str, name: str, told: Any) -> None:
        self._channel, theirs = Channel.pair()
        try:
            self._child = launch(entry, theirs, name=name)
            self._channel.send(told)
        except BaseException:
            self._channel.close()
            raise

    def __str__(self) -> str:
        return f"process {self._child.pid}"

    @property
    def state(self) -> str:
        return self.ended() or "running"

    def ended(self) -> str | None:
        code = self._child.exit_code()
        return None if code is None else f"its {self} ended with exit code {code}"

    def end(self) -> None:
        self._child.kill()
        self._child.join(END_S)
        self._child.close()
        with contextlib.suppress(OSError):
            self._channel.close()


def check_backend(backend: str) -> None:
    """Raise BadOption unless nodes can be connected by it."""
    if backend in ("nccl", "ucc", "mpi"):
        raise BadOption(
            f"backend={backend!r} has not run with Muster on devices yet, so it is refused: use backend='gloo', which "
            f"carries data through the hosts' memory"
        )
    if backend != "gloo":
        raise BadOption(f"backend={backend!r} is unknown: expected 'gloo'")


def launcher_for(
    given: Any, *, slurm_kwargs: Mapping[str, Any] | None, bind: str, token: Any, workers: int
) -> Launcher:
    """The launcher for a name, or what is one; for nodes with so many workers each. See ``DistributedOptions``.

    Raises:
        BadOption: something is not as expected, or missing.
    """
    if slurm_kwargs is not None and given != "submitit":
        raise BadOption(f"slurm_kwargs are for launcher='submitit', not {given!r}: leave them out")
    if given == "mp":
        return MpLauncher()
    if given == "torchrun":
        from muster.cluster.torchrun import TorchrunLauncher

        return TorchrunLauncher()
    if given == "manual":
        if read_token(token) is None:
            raise BadOption(
                "launcher='manual' needs a token that the nodes can know, too: token=, or the path of a file with mode "
                "0600 in MUSTER_TOKEN_FILE, here and on every node"
            )
        return Launcher()
    if given in ("submitit", "submitit_delayed"):
        from muster.cluster.submitit import SubmititLauncher
        from muster.cluster.submitit_delayed import DelayedLauncher

        wanted = {"slurm_cpus_per_task": workers, **(slurm_kwargs or {})}  # SLURM's own default is one
        jobs = DelayedLauncher() if given == "submitit_delayed" else SubmititLauncher(wanted)
        jobs.check(bind)
        return jobs
    if not isinstance(given, str) and hasattr(given, "start"):
        launcher: Launcher = given
        return launcher
    raise BadOption(f"launcher={given!r}: expected one of {', '.join(NAMES)}, or a Launcher (muster.cluster.launchers)")
