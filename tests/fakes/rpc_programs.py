"""Programs with RPC agents, each a process of its own: ``rpc_programs.main()`` with the arguments
``NAME ...``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import rpc

from muster import Restart, RPCCollector
from muster.errors import BadOption, WorkerDied
from muster.testing import CountingEnv
from tests.fakes.lost_nodes import node_of
from tests.fakes.netns import listening

OPTIONS: dict[str, Any] = {"frames_per_batch": 20, "launcher": "mp", "seed": 0}
WITHIN_S = 100.0
released = threading.Event()


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


# --- agents of Muster's ---------------------------------------------------------------------------


def sleeps(seconds: float) -> None:
    """A function that RPC calls."""
    threading.Event().wait(seconds)


def threads_of_agent() -> int:
    """A function that RPC calls: the threads that execute calls in this process."""
    agent: Any = rpc._get_current_rpc_agent()
    return int(agent._get_backend_options().num_worker_threads)


def ends(how: str) -> None:
    """Ends without a shutdown, while nodes are at work."""
    collector = RPCCollector([CountingEnv] * 2, None, sync=False, **OPTIONS)
    batches = iter(collector)
    next(batches)
    if how == "called":  # a function that another process has called is at work here
        own = rpc.get_worker_info()
        rpc.rpc_async(own, sleeps, (1000.0,), timeout=0)
    if how == "stopped":
        for worker in collector.stats().workers:
            os.kill(node_of(worker.pid), signal.SIGSTOP)
    say(engine=collector.stats().engine)
    if how == "error":
        raise ValueError("of the program")
    if how == "fork":
        child = os.fork()
        if not child:
            sys.exit(7)
        say(status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        next(batches)
        collector.shutdown()


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("PPid")))


def own_agents(port: str) -> None:
    """Two collectors share an agent; afterwards the process can have another one, which is the
    user's.
    """
    options = OPTIONS | {"tensorpipe_options": {"num_worker_threads": 3}}
    with RPCCollector([CountingEnv], None, **options) as one:
        one.next()
        agent: Any = rpc._get_current_rpc_agent()
        names = sorted(info.name for info in agent.get_worker_infos())
        with RPCCollector([CountingEnv], None, **options) as two:
            two.next()
            same = (
                rpc._get_current_rpc_agent().get_worker_info()
                == agent.get_worker_info()
            )
            members = len(agent.get_worker_infos())
            node = next(
                info
                for info in agent.get_worker_infos()
                if info.name.endswith("-node-0")
            )
            threads = [threads_of_agent(), rpc.rpc_sync(node, threads_of_agent)]
        try:
            RPCCollector(
                [CountingEnv],
                None,
                **OPTIONS,
                tensorpipe_options={"num_worker_threads": 2},
            )
        except BadOption as error:
            refused = str(error)
        one.next()
        left = len(agent.get_worker_infos())
    del agent
    is_set = rpc._is_current_rpc_agent_set()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    rpc.init_rpc("mine", rank=0, world_size=1)
    try:
        RPCCollector([CountingEnv], None, **OPTIONS)
    except BadOption as error:
        alone = str(error)
    works = int(rpc.rpc_sync("mine", torch.add, (torch.ones(()), 1)))
    rpc.shutdown()
    with RPCCollector([CountingEnv], None, **OPTIONS) as again:
        again.next()
    say(
        names=names,
        same=same,
        members=members,
        left=left,
        threads=threads,
        refused=refused,
        is_set=is_set,
    )
    say(alone=alone, works=works, engine=again.stats().engine)


def trusts(host: str) -> None:
    """Agents at an address that other machines can reach; then at loopback, where they cannot be
    any more.
    """
    options = OPTIONS | {
        "token": b"0123456789abcdef",
        "bind": host,
        "trust_network": True,
    }
    with RPCCollector([CountingEnv] * 2, None, **options) as collector:
        collector.next()
        node_pids = {node_of(worker.pid) for worker in collector.stats().workers}
        own = listening(os.getpid())
        nodes = [address for pid in node_pids for address in listening(pid)]
    say(
        own=sorted({address for address, _ in own}),
        nodes=[address for address, _ in nodes],
    )
    try:
        RPCCollector([CountingEnv], None, **OPTIONS)
    except BadOption as error:
        say(refused=str(error), left=len(listening(os.getpid())))


# --- the user's agent -----------------------------------------------------------------------------


class Shown(nn.Module):
    """Its weight is in every row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> Any:
        return torch.zeros(obs.shape[:-1], dtype=torch.int64), {
            "weight": self.weight.expand(obs.shape[:-1])
        }


def release() -> None:
    """A function that RPC calls: let this worker go on."""
    released.set()


def pid() -> int:
    """A function that RPC calls."""
    return os.getpid()


def member(port: str, rank: str, world: str, what: str) -> None:
    """A worker of the user's group; rank 0 has the collector."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    rpc.init_rpc(f"COLLECTOR_NODE_{rank}", rank=int(rank), world_size=int(world))
    if rank != "0":
        released.wait()
        rpc.shutdown(graceful=False)
        return
    others = [f"COLLECTOR_NODE_{number}" for number in range(1, int(world))]
    pids = {rpc.rpc_sync(name, pid): name for name in others}
    try:
        globals()[f"of_group_{what}"](pids)
    finally:
        for name in others:
            rpc.rpc_async(name, release, timeout=10)
        threading.Event().wait(1.0)
        rpc.shutdown(graceful=False)


def where(collector: Any) -> list[int]:
    """The processes of nodes, which are the parents of their workers' keepers."""
    found = []
    for worker in collector.stats().workers:
        above = worker.pid
        while above > 1 and above not in KNOWN:
            above = _parent(above)
        found.append(above)
    return found


KNOWN: set[int] = set()


def of_group_collects(pids: dict[int, str]) -> None:
    KNOWN.update(pids)
    policy = Shown()
    with RPCCollector(
        [CountingEnv] * 3, policy, sync=True, frames_per_batch=20, seed=0
    ) as collector:
        first = collector.next()["weight"].unique().tolist()
        nn.init.constant_(policy.weight, 3.0)
        collector.update_policy_weights_()
        second = collector.next()["weight"].unique().tolist()
        places = [pids[place] for place in where(collector)]
        reference = rpc.RRef(collector)
        other = next(iter(pids.values()))
        shape = rpc.rpc_sync(other, calls_back, (reference,))
        engine = collector.stats().engine
    still = rpc.rpc_sync(other, torch.add, (torch.ones(()), 1)).item()
    threads = rpc.rpc_sync(other, nodes_there)
    say(
        first=first,
        second=second,
        places=places,
        engine=engine,
        still=still,
        shape=shape,
        threads=threads,
    )


def nodes_there() -> list[str]:
    """A function that RPC calls: the threads of nodes in this process, after some time to end."""
    for thread in threading.enumerate():
        if thread.name.startswith("muster-node"):
            thread.join(10.0)
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("muster-node")
    ]


def calls_back(reference: Any) -> list[Any]:
    """A function that RPC calls: use the collector of another process."""
    batch = rpc.rpc_sync(reference.owner(), RPCCollector.next, args=(reference,))
    stats = rpc.rpc_sync(reference.owner(), RPCCollector.stats, args=(reference,))
    return [*batch.shape, stats.batches]


def of_group_loses_a_worker(pids: dict[int, str]) -> None:
    """A node goes on in the next worker; when no worker is left, it is refused."""
    KNOWN.update(pids)
    options = {"frames_per_batch": 20, "seed": 0, "on_failure": Restart(max_restarts=3)}
    with RPCCollector([CountingEnv] * 2, None, sync=False, **options) as collector:
        collector.next()
        before = where(collector)
        os.kill(before[0], signal.SIGKILL)
        while collector.stats().restarts < 1 or where(collector)[0] in (
            before[0],
            0,
            1,
        ):
            collector.next()
        after = where(collector)
        os.kill(after[0], signal.SIGKILL)
        try:
            while True:
                collector.next()
        except WorkerDied as error:
            died = str(error)
    say(
        before=[pids[place] for place in before],
        after=[pids[place] for place in after],
        died=died,
    )


def seed(port: str, rank: str, world: str) -> None:
    """The manual set-up of the seed: all wait for each other in ``rpc.shutdown()``, with the
    collector still there.
    """
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    distributed.init_process_group(
        backend="gloo", rank=int(rank), world_size=int(world)
    )
    rpc.init_rpc(
        f"COLLECTOR_NODE_{rank}",
        rank=int(rank),
        world_size=int(world),
        backend=rpc.BackendType.TENSORPIPE,
    )
    if rank == "0":
        collector = RPCCollector(
            [CountingEnv] * 2, None, sync=True, frames_per_batch=20, total_frames=80
        )
        say(
            frames=[batch.numel() for batch in collector],
            engine=collector.stats().engine,
        )
    rpc.shutdown()
    distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)
