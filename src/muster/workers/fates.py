"""What becomes of a rollout that failed, and of the requests of a worker or node that was lost."""

from __future__ import annotations

import enum
from collections.abc import Callable

from muster.errors import BadEnvOutput, EnvError
from muster.workers.options import OnFailure


class Fate(enum.Enum):
    """What becomes of a failed rollout, and of its worker."""

    RAISED = "The worker goes on. The result has the error, which the schedule raises."
    RESENT = "The worker is restarted at once. Its successor gets the requests."
    HANDED_OUT = (
        "The node is called again. Its requests return as lost, for other nodes."
    )
    DROPPED = "The others go on without the worker. Its requests return without rows."
    RETURNED = (
        "The requests return as lost, with the error. The next batch starts the worker."
    )


def decide_fate(
    error: Exception | None,
    on_failure: OnFailure,
    *,
    worker_ends: bool,
    is_elastic: bool,
    may_restart: Callable[[], bool],
) -> Fate:
    """Return what becomes of a rollout that failed with ``error``, or of the requests of a worker
    that was lost with it. Nothing else decides that.

    Args:
        error: None: the policy's error was raised for another worker; the rollout is lost with it.
        worker_ends: the worker was lost, or ends; False: it could go on after the error.
        is_elastic: nodes may join late and leave.
        may_restart: returns whether the worker may be restarted at once, and counts the restart.
    """
    if not worker_ends:
        is_of_env = isinstance(error, (EnvError, BadEnvOutput))
        if on_failure == "raise" or not is_of_env:
            return Fate.RAISED
    if on_failure == "drop":
        return Fate.DROPPED
    if on_failure == "restart" and may_restart():
        return Fate.HANDED_OUT if is_elastic else Fate.RESENT
    return Fate.RETURNED
