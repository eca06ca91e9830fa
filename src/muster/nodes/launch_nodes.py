"""Which launcher is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.errors import BadOption
from muster.nodes.launchers import Launcher, MpLauncher, WaitingLauncher
from muster.nodes.link import Carrier
from muster.nodes.meeting import Meeting, read_token
from muster.nodes.torchrun import TorchrunLauncher

NAMES = ("mp", "submitit", "submitit_delayed", "torchrun", "manual")


@dataclass(frozen=True)
class Place:
    """How nodes come to life and where they find this process; see ``DistributedCollector``."""

    launcher: Any
    slurm_kwargs: Mapping[str, Any] | None
    bind: str
    tcp_port: int | None
    token: Any

    def carrier(self, nodes: int, workers: int, make: Callable[..., Carrier], **options: Any) -> Carrier:
        """For so many nodes with so many workers each.

        Args:
            make: the carrier, called with their number, ``launcher``, ``meeting`` and the options.

        Raises:
            BadOption: something is not as expected, or missing.
        """
        if self.launcher == "manual" and read_token(self.token) is None:
            raise BadOption(
                "launcher='manual' needs a token that the nodes can know, too: token=, or the path of a file with mode "
                "0600 in MUSTER_TOKEN_FILE, here and on every node"
            )
        launcher = _launcher(self.launcher, self.slurm_kwargs, self.bind, workers)
        meeting = Meeting(nodes, bind=self.bind, tcp_port=self.tcp_port or 0, token=self.token)
        try:
            return make(nodes, launcher=launcher, meeting=meeting, **options)
        except BaseException:
            meeting.close()
            raise


def _launcher(given: Any, slurm_kwargs: Mapping[str, Any] | None, bind: str, workers: int) -> Launcher:
    """The launcher for a name, or what is one."""
    if slurm_kwargs is not None and given != "submitit":
        raise BadOption(f"slurm_kwargs are for launcher='submitit', not {given!r}: leave them out")
    if given == "mp":
        return MpLauncher()
    if given == "torchrun":
        return TorchrunLauncher()
    if given == "manual":
        return WaitingLauncher()
    if given in ("submitit", "submitit_delayed"):
        from muster.nodes.submitit import SubmititLauncher
        from muster.nodes.submitit_delayed import DelayedLauncher

        wanted = {"slurm_cpus_per_task": workers, **(slurm_kwargs or {})}  # SLURM's own default is one
        jobs = DelayedLauncher() if given == "submitit_delayed" else SubmititLauncher(wanted)
        jobs.check(bind)
        return jobs
    if not isinstance(given, str) and hasattr(given, "start"):
        launcher: Launcher = given
        return launcher
    raise BadOption(f"launcher={given!r}: expected one of {', '.join(NAMES)}, or a Launcher (muster.nodes.launchers)")
