"""``muster collect --backend``, ``muster node`` and ``muster cluster``: collecting with workers on
other machines.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from muster.cli.collect_command import JOIN_S, Collect
from muster.cli.options import check_seconds, refuse_given
from muster.cli.report import StopSignals
from muster.errors import BadOption
from muster.utils.attributes import installed
from muster.utils.texts import counted

if TYPE_CHECKING:
    from muster.collectors.base import BaseCollector

NO_TOKEN = (
    "make a token, `openssl rand -hex 32 > token; chmod 600 token`, and set MUSTER_TOKEN_FILE to"
    " the path of that file here, and of a copy where the others are."
)


@dataclass(frozen=True)
class NodeCommand:
    """Run this machine as a worker node of a collector that has the same token (MUSTER_TOKEN_FILE),
    until the collector ends.
    """

    address: Annotated[Positional[str], arg(metavar="HOST:PORT")]
    """Where muster collect --backend manual --bind HOST:PORT listens, or a DistributedCollector(launcher="manual")."""

    number: Annotated[int | None, arg(metavar="N")] = None
    """Which of its nodes to be, from 0; by default any that is missing."""

    wait: Annotated[float, arg(metavar="S")] = JOIN_S
    """Seconds for the collector to begin, and for which it may be out of reach later."""


@dataclass(frozen=True)
class ClusterCommand:
    """Show how to collect with workers on nodes (other machines), and what is installed for it."""


def node(command: NodeCommand) -> int:
    """Run the command.

    Returns 0 after the collector has ended, 1 if the connection was lost or cannot be made.
    """
    if command.number is not None and command.number < 0:
        raise BadOption(f"--number {command.number}: nodes are numbered from 0.")
    check_seconds(command, "wait")
    return _serve(
        command.address,
        command.number,
        _token("A node needs the token of its collector"),
        command.wait,
    )


def is_node(command: Collect) -> bool:
    """Whether this process is a rank of torchrun other than the first: a node.

    The first rank collects.
    """
    return command.backend == "torchrun" and (_rank() or 0) > 0


def serve_rank(command: Collect) -> int:
    """Run as that node.

    The first Ctrl-C or SIGTERM is ignored: the collector gets it too, and then stops the node.
    """
    with StopSignals("the collector ends this node first; again to stop at once."):
        return _serve(None, None, None, command.join_timeout)


def check(command: Collect) -> None:
    """Raise ``BadOption`` for options that contradict each other."""
    backend = command.backend
    nodes = command.nodes
    if backend is None:
        refuse_given(
            command,
            ("nodes", "min_nodes", "address", "bind", "join_timeout"),
            "nodes: add --backend",
        )
        return
    if command.threads:
        raise BadOption("--threads: the workers of nodes are processes; leave it out.")
    if command.address is not None and backend != "ray":
        raise BadOption(
            "--address is about --backend ray: leave it out. (--bind HOST:PORT: where others"
            " listen.)"
        )
    if command.bind is not None and backend == "ray":
        raise BadOption("--bind: Ray knows its own addresses; leave it out.")
    check_seconds(command, "join_timeout")
    if backend == "torchrun":
        _check_ranks(nodes)
    elif nodes is None or nodes < 1:
        raise BadOption(
            f"--backend {backend} needs --nodes N: how many there are, at least 1."
        )
    if command.min_nodes is not None and not command.asynchronous:
        raise BadOption(
            "--min-nodes: batches of all nodes need all of them; add --async, or leave it out."
        )
    if backend == "manual":
        if not endpoint(command.bind)[1]:
            raise BadOption(
                "--backend manual needs --bind HOST:PORT, so that nodes can be told: muster node"
                " HOST:PORT."
            )
        _token("--backend manual needs a token, by which it knows its nodes")


def _check_ranks(nodes: int | None) -> None:
    if _rank() is None:
        raise BadOption(
            "--backend torchrun is for processes of torchrun; with two nodes: torchrun"
            " --nproc-per-node=3 -m muster collect ..."
        )
    if (ranks := int(os.environ["WORLD_SIZE"])) < 2:
        raise BadOption(
            "torchrun has started one process: at least two are needed, of which the first"
            " collects."
        )
    if nodes is not None and nodes != ranks - 1:
        raise BadOption(
            f"--nodes {nodes}, but torchrun has started {ranks} processes:"
            f" {counted(ranks - 1, 'node')}."
        )


def nodes_of(command: Collect) -> int | None:
    """The number of nodes; None without any."""
    return (
        int(os.environ["WORLD_SIZE"]) - 1
        if command.backend == "torchrun"
        else command.nodes
    )


def make_collector(
    command: Collect, policy: Any, options: dict[str, Any]
) -> BaseCollector:
    """Make the collector of ``--backend``; ``options["frames_per_batch"]`` is the size of a whole
    batch.
    """
    from muster.collectors.clusters import DistributedCollector, RayCollector

    nodes, workers = nodes_of(command) or 1, command.workers or 1
    sync = not command.asynchronous
    options = options | {
        "sync": sync,
        "collector_class": "single" if workers == 1 else "sync" if sync else "async",
        "num_workers_per_collector": workers,
        "frames_per_batch": options["frames_per_batch"]
        // (nodes if sync else 1),  # per node
        "inference": inference_of(command),
        "on_failure": command.on_failure,
        "timeouts": {"join": command.join_timeout},
        "min_nodes": command.min_nodes,
    }
    envs = [command.env] * nodes
    if command.backend == "ray":
        init = {"log_to_driver": False, "logging_level": "warning"}
        init |= {} if command.address is None else {"address": command.address}
        need = {"num_cpus": workers} if workers > 1 else None
        return RayCollector(
            envs, policy, ray_init_config=init, remote_configs=need, **options
        )
    host, port = endpoint(command.bind)
    if command.backend == "manual" and not command.quiet:
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(
            f"muster: waiting for {nodes} times `muster node {at}`, with the same token.",
            file=sys.stderr,
        )
    return DistributedCollector(
        envs,
        policy,
        launcher=command.backend,
        bind=host,
        tcp_port=port or None,
        **options,
    )


def inference_of(command: Collect) -> Any:
    """Where the policy acts, as collectors take it."""
    from muster.collectors.multi_options import CentralInference

    return (
        CentralInference(alternating=True) if command.alternating else command.inference
    )


def endpoint(bind: str | None) -> tuple[str, int]:
    """Parse ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT`` into host and port (0: any); None is
    loopback.
    """
    if bind is None:
        return "127.0.0.1", 0
    host, colon, port = bind.rpartition(":")
    # no port, or a bare IPv6 address
    if not colon or port.endswith("]") or (":" in host and not host.startswith("[")):
        return bind.strip("[]"), 0
    if not port.isdecimal() or not 0 < int(port) < 1 << 16 or not host:
        raise BadOption(
            f"--bind {bind}: expected HOST or HOST:PORT, with a port from 1 to 65535."
        )
    return host.strip("[]"), int(port)


def _serve(
    address: str | None, number: int | None, token: bytes | None, wait: float
) -> int:
    from muster.cluster.joining import run_node
    from muster.cluster.link import LinkLost

    try:
        if run_node(address, number, token, within_s=wait, patience_s=wait):
            return 0
        print("muster: the connection to the collector was lost.", file=sys.stderr)
    except LinkLost as error:
        print(f"muster: {error}", file=sys.stderr)
    return 1


def _rank() -> int | None:
    from muster.cluster.torchrun import torchrun_rank

    return torchrun_rank()


def _token(needed: str = "") -> bytes | None:
    """Read the token; if there is none, return None, or raise ``BadOption`` that begins with
    ``needed``.
    """
    from muster.cluster.token import read_token

    token = read_token(None)
    if token is None and needed:
        raise BadOption(f"{needed}: {NO_TOKEN}")
    return token


def cluster(_: ClusterCommand) -> int:
    """Run the command: print what is installed and how to use it, by backend.

    Backends are not imported or started.
    """
    ray, submitit = installed("ray"), installed("submitit")
    alone = (
        ""
        if shutil.which("srun")
        else "; without SLURM, jobs are processes of this machine"
    )

    rows = [
        ("mp", "nodes are processes of this machine; engine: torch_distributed"),
        ("", "muster collect ENV --frames N --backend mp --nodes 2"),
        (
            "torchrun",
            "the first rank collects, the others are nodes; engine: torch_distributed",
        ),
        (
            "",
            "torchrun --nproc-per-node=3 -m muster collect ENV --frames N --backend torchrun",
        ),
        ("manual", "nodes are started by you, anywhere; engine: torch_distributed"),
        (
            "",
            "muster collect ENV --frames N --backend manual --nodes 2 --bind HOST:PORT",
        ),
        ("", "muster node HOST:PORT"),
        (
            "ray",
            (
                f"Ray {ray}; engine: ray, or direct (in Python)"
                if ray
                else "not installed: pip install 'muster-rl[ray]'"
            ),
        ),
        (
            "",
            "muster collect ENV --frames N --backend ray --address auto --nodes 2"
            if ray
            else "",
        ),
        (
            "slurm",
            (
                f"submitit {submitit}{alone}; engine: torch_distributed"
                if submitit
                else "not installed: pip install 'muster-rl[slurm]'"
            ),
        ),
        (
            "",
            'DistributedCollector(envs, policy, launcher="submitit", ...)'
            if submitit
            else "",
        ),
    ]
    try:
        token = (
            "found"
            if _token()
            else f"none, which is enough on one machine. For several, {NO_TOKEN}"
        )
    except BadOption as error:
        token = str(error)
    for name, text in [*rows, ("token", token)]:
        if text:
            print(f"{name:<10} {text}")
    return 0
