"""The launcher for the option ``launcher=``, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.cluster.launchers import Launcher, MpLauncher
from muster.cluster.submitit import SubmititLauncher
from muster.cluster.submitit_delayed import DelayedLauncher
from muster.cluster.token import read_token
from muster.cluster.torchrun import TorchrunLauncher
from muster.errors import BadOption

NAMES = ("mp", "submitit", "submitit_delayed", "torchrun", "manual")


def launcher_for(
    given: Any,
    *,
    slurm_kwargs: Mapping[str, Any] | None,
    bind: str,
    token: Any,
    workers: int,
) -> Launcher:
    """The launcher for a name, or the given one, for nodes with so many workers each.

    See ``DistributedOptions``.

    Raises:
        BadOption: an option is wrong or missing.
    """
    if slurm_kwargs is not None and given != "submitit":
        raise BadOption(
            f"slurm_kwargs are for launcher='submitit', not {given!r}: leave them out"
        )
    if given == "mp":
        return MpLauncher()
    if given == "torchrun":
        return TorchrunLauncher()
    if given == "manual":
        if read_token(token) is None:
            raise BadOption(
                "launcher='manual' needs a token that the nodes can know, too: token=, or the path"
                " of a file with mode 0600 in MUSTER_TOKEN_FILE, here and on every node"
            )
        return Launcher()
    if given in ("submitit", "submitit_delayed"):
        # SLURM's own default is one
        wanted = {"slurm_cpus_per_task": workers, **(slurm_kwargs or {})}
        jobs = (
            DelayedLauncher()
            if given == "submitit_delayed"
            else SubmititLauncher(wanted)
        )
        jobs.check(bind)
        return jobs
    if not isinstance(given, str) and hasattr(given, "start"):
        launcher: Launcher = given
        return launcher
    raise BadOption(
        f"launcher={given!r}: expected one of {', '.join(NAMES)}, or a Launcher"
        " (muster.cluster.launchers)"
    )
