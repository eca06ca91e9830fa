"""Collections on nodes in which a node goes wrong, and what has to hold for all of them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster import DistributedCollector, Restart, RPCCollector
from muster.cluster import joining, node_main
from muster.cluster.distributed import TorchCarrier
from muster.cluster.launchers import MpLauncher
from muster.cluster.link import Link, Received
from muster.cluster.node_main import NodeMain
from muster.testing import OracleEnv, check_stream
from muster.workers.channel import Channel
from tests.fakes import faults
from tests.fakes.fault_runs import alive
from tests.fakes.killers import Killer
from tests.fakes.lost_nodes import NAME, NodeSignalled, status
from tests.fakes.mounts import mount, own_mounts
from tests.tools import assert_balanced

ROOT = Path(__file__).parents[2]
MARK, JOINS = "MUSTER_TEST_MARK", "MUSTER_TEST_JOINS"  # environment variables of nodes


@contextmanager
def all_blocks_in_groups() -> Iterator[None]:
    """Collectors that are made meanwhile send small blocks, too, through process groups of
    torch.distributed.
    """
    defaults: Any = TorchCarrier.__init__.__kwdefaults__
    before = defaults["large"]
    defaults["large"] = 1
    try:
        yield
    finally:
        defaults["large"] = before


def sync_nodes(
    create_env_fn: Any, policy: Any = None, **options: Any
) -> DistributedCollector:
    """Two nodes of one worker each; a batch has the rollouts of both."""
    with all_blocks_in_groups():
        return DistributedCollector(
            create_env_fn, policy, **{"launcher": "mp", "sync": True, **options}
        )


def async_nodes(
    create_env_fn: Any, policy: Any = None, **options: Any
) -> DistributedCollector:
    """The same; a batch has the rollout of one."""
    with all_blocks_in_groups():
        return DistributedCollector(
            create_env_fn, policy, **{"launcher": "mp", "sync": False, **options}
        )


def rpc_sync_nodes(
    create_env_fn: Any, policy: Any = None, **options: Any
) -> RPCCollector:
    """The same over torch RPC; a batch has the rollouts of both."""
    return RPCCollector(
        create_env_fn, policy, **{"launcher": "mp", "sync": True, **options}
    )


def rpc_async_nodes(
    create_env_fn: Any, policy: Any = None, **options: Any
) -> RPCCollector:
    """The same; a batch has the rollout of one."""
    return RPCCollector(
        create_env_fn, policy, **{"launcher": "mp", "sync": False, **options}
    )


def direct_nodes(
    create_env_fn: Any, policy: Any = None, **options: Any
) -> DistributedCollector:
    """As ``sync_nodes``, with the engine "direct"."""
    given = {"launcher": "mp", "sync": True, "transport": "direct", **options}
    return DistributedCollector(create_env_fn, policy, **given)


HAS_RPC = torch.distributed.rpc.is_available()
SYNC_KINDS = [sync_nodes, rpc_sync_nodes] if HAS_RPC else [sync_nodes]
ASYNC_KINDS = [async_nodes, rpc_async_nodes] if HAS_RPC else [async_nodes]
NODE_KINDS = [*SYNC_KINDS, *ASYNC_KINDS, direct_nodes]


def factories(path: Path, fault: Any = None) -> list[Any]:
    """Environments of two nodes, of which number 0 goes wrong."""
    return [partial(OracleEnv, path, 0, 1, fault), partial(OracleEnv, path, 1)]


def check_random_kills(path: Path, kind: Any, killer: Killer) -> None:
    """Kills of two nodes of ``kind`` and their workers lose nothing and double nothing; ``path`` is
    of the counts.
    """
    options = {"on_failure": Restart(max_restarts=None), "seed": 1}
    with kind(factories(path), frames_per_batch=200, **options) as collector:
        rows = check_stream(killer.until_done(collector))
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert killer.done == killer.kills
    assert stats.frames == sum(rows.values())
    assert_balanced(stats, in_flight=0)
    # A worker that is killed after a step and before its reward is stored has made one that nobody
    # can know of.
    assert (
        stats.executed
        <= counts[:, 2].sum()
        <= stats.executed + stats.unseen + killer.kills
    )
    assert all(count <= counts[env, 2] for (env, _), count in rows.items())


class MadeOnce(OracleEnv):
    """Kills its node while it is made, except for the first time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.run:
            NodeSignalled(signal.SIGKILL)(None)


# --- processes ------------------------------------------------------------------------------------


def node_pids() -> dict[int, int]:
    """The node processes of this one, by number of the node."""
    found = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            (name, parent), me = status(pid), os.getpid()
            above = [
                parent,
                status(parent)[1],
            ]  # its keeper, and the fork server, whose parent is this process
            if (
                name.startswith(NAME)
                and alive(pid)
                and me in (*above, status(above[-1])[1])
            ):
                found[int(name.removeprefix(NAME))] = pid
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return found


# --- what nodes run -------------------------------------------------------------------------------


def dies_at_birth(channel: Channel) -> None:
    """Node 0, or whichever is first, is killed before it has joined, once."""
    if faults.first_time(os.environ[MARK]):
        os.kill(os.getpid(), signal.SIGKILL)
    joining.node_main(channel)


def late(births: Path, joins: int) -> MpLauncher:
    """Nodes of which only the first few ever join; ``births`` will have a file for each, named
    after its pid.
    """
    births.mkdir()
    os.environ |= {MARK: str(births), JOINS: str(joins)}
    return MpLauncher(entry=f"{__name__}:joins_or_waits")


def births(folder: Path) -> list[int]:
    """The pids of late nodes, by age."""
    return [
        int(file.name)
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    ]


def joins_or_waits(channel: Channel) -> None:
    """See ``late``."""
    folder = Path(os.environ[MARK])
    folder.joinpath(str(os.getpid())).touch()
    if births(folder).index(os.getpid()) >= int(os.environ[JOINS]):
        signal.pause()
    joining.node_main(channel)


class Cut:
    """A node's link, on which the node is killed right when a message of some kind arrives."""

    def __init__(self, link: Link, kind: Any, at: int) -> None:
        self.link, self.kind, self.left = link, kind, at
        self.send, self.expect, self.close = link.send, link.expect, link.close

    def receive(self) -> Received:
        received = self.link.receive()
        if pickle.loads(received.message).method is self.kind:
            if not self.left and faults.first_time(os.environ[MARK]):
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return received


def serve_until(kind: Any, at: int, link: Link, node: int) -> bool:
    cut: Any = Cut(link, kind, at) if node == 0 else link
    return node_main.serve(cut, node)


dies_of_setup = partial(serve_until, NodeMain.set_up, 0)
dies_of_weights = partial(serve_until, NodeMain.take_weights, 0)
dies_of_start = partial(serve_until, NodeMain.start, 0)
dies_of_requests = partial(serve_until, NodeMain.follow, 2)


def has_events(path: Path) -> None:
    """This process, and those below it, find the events of their control group in that file.

    Needs ``own_mounts``.
    """
    above = "/sys/fs/cgroup"
    mount(above)
    Path(above, "memory.events").symlink_to(path)


def short_of_memory(link: Link, node: int) -> bool:
    """This node finds the events of its control group in the file of ``MARK``."""
    own_mounts()
    has_events(Path(os.environ[MARK]))
    return node_main.serve(link, node)


class KilledForMemory:
    """In an environment: what the kernel does, and writes into the events of the control group."""

    def __init__(self, events: Path) -> None:
        self.events = events

    def __call__(self, _: object) -> None:
        self.events.write_text("oom 1\noom_kill 5\n")
        os.kill(os.getpid(), signal.SIGKILL)


# --- nodes that come by themselves ----------------------------------------------------------------


@contextmanager
def came_by_themselves(
    address: str, token: Path, count: int = 2
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Node processes that nobody but this test can end or start again."""
    code = "import sys; from muster.cluster.joining import run_node; a = sys.argv; run_node(a[1], int(a[2]), a[3])"
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(number), str(token)],
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        for number in range(count)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait(10)
