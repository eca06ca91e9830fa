"""Whether a node has the same Muster as the main process: the messages between them are pickled
records, which another version cannot read, or would read wrongly.

Every engine compares at the first contact, before anything is pickled, in plain records that all
versions can read. A difference is ``OtherMuster``, which no restart can remedy.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from muster.cluster.link import OtherMuster
from muster.cluster.messages import LaneRun, NodeSetup, Told
from muster.env_spec import EnvSpec
from muster.observing.stats import InferenceStats
from muster.rollout.request import RolloutRequest
from muster.weights.buffer import Manifest
from muster.workers.config import PoolConfig, WorkerConfig, WorkerPlace
from muster.workers.counters import NodeCounts
from muster.workers.failures import SentError
from muster.workers.messages import Answer, RolloutResult, Tell, WorkerStatus

Installed = Mapping[str, str]  # see ``installed``

RECORDS: tuple[Any, ...] = (
    *(NodeSetup, PoolConfig, WorkerConfig, WorkerPlace, Manifest),
    *(Tell, LaneRun, RolloutRequest),
    *(Told, EnvSpec, NodeCounts, WorkerStatus, RolloutResult, Answer, SentError),
    InferenceStats,
)  # in messages


@functools.cache
def installed() -> dict[str, str]:
    """The Muster of this process, as a record that JSON can represent.

    Returns:
        ``version``, ``path`` of the package, ``protocol`` (of records in messages), and ``host``.
    """
    names = [
        (record.__qualname__, [field.name for field in fields(record)])
        for record in RECORDS
    ]
    return {
        "version": sys.modules["muster"].__version__,
        "path": str(Path(__file__).absolute().parents[1]),
        "protocol": hashlib.sha256(repr(names).encode()).hexdigest()[:8],
        "host": platform.node(),
    }


def difference(main: Installed | None, node: Installed | None) -> str:
    """Why the Muster of a node and that of the main process do not fit, for the user; empty if they
    do.

    Args:
        main, node: what ``installed`` returns there. None: it does not say, as versions without
            this module.
    """
    if main is not None and node is not None:
        keys = ("version", "protocol")
        if all(main.get(key) == node.get(key) for key in keys):
            return ""
    if main is not None and node is not None and _place(main) == _place(node):
        return (
            f"it has {_named(node)}, and the main process has protocol {main.get('protocol')}: these"
            " files have changed since the main process has imported them. Start it again"
        )
    return (
        f"it has {_named(node)}, and the main process has {_named(main)}: their messages differ."
        " Install the same version on both; a node imports the first `muster` on its PYTHONPATH,"
        " then that of its Python environment"
    )


def check_node(number: int, node: Installed | None) -> None:
    """Raise OtherMuster if this node does not have the Muster of this process."""
    if why := difference(installed(), node):
        raise OtherMuster(f"Node {number} cannot be used: {why}.")


def _place(one: Installed) -> tuple[str | None, ...]:
    return tuple(one.get(key) for key in ("path", "host", "version"))


def _named(one: Installed | None) -> str:
    if one is None:
        return "another Muster, which does not say its version"
    protocol = one.get("protocol") or "unknown"
    return (
        f"Muster {one.get('version')} in {one.get('path')} on {one.get('host')}"
        f" (protocol {protocol})"
    )
