"""What workers cost, and that they give it back: descriptors, threads, processes, shared memory,
processor time.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn

from muster import MultiAsyncCollector, MultiSyncCollector, Restart
from muster.policies import categorical
from muster.testing import CountingEnv, OracleEnv, TorchCartPole
from muster.workers.channel import WakeUp
from muster.workers.threads import WorkerThread
from tests.fakes.fault_runs import KINDS, alive, all_gone
from tests.waits import open_files, wait_until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
CYCLES = 8
ROOT = Path(__file__).parents[2]


def descriptors():
    """What they lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the one that looked
            pass
    return sorted(found)


def descendants(root=None):
    """Living processes below this one."""
    parents = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            state, parent = (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            )
        except OSError:
            continue
        if state not in "ZX":
            parents[pid] = int(parent)
    below, level = set(), {root or os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        below |= level
    return below


def names():
    """In /dev/shm, but for semaphores: Muster makes none, and other tests may run beside these."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def resources():
    gc.collect()
    return {
        "descriptors": len(descriptors()),
        "threads": len(threading.enumerate()),
        "processes": len(descendants()),
        "names": len(names()),
    }


def more_than(before, but=()):
    """What grew and does not shrink within a minute: what ends takes its time on a busy machine.

    Less is no leak: what earlier tests left (a hung thread) may end meanwhile.
    """
    deadline, pause = time.monotonic() + 60.0, threading.Event()
    while grown := {
        what: (before[what], count)
        for what, count in resources().items()
        if count > before[what] and what not in but
    }:
        if time.monotonic() > deadline:
            break
        pause.wait(0.05)
    return grown


served = pytest.mark.parametrize("inference", ["worker", "server"])


def policy():
    return categorical(nn.Linear(2, 2))


@served
@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_collectors_that_were_shut_down(kind, backend, inference):
    def cycle():
        options = {"frames_per_batch": 20, "backend": backend, "inference": inference}
        with kind([CountingEnv] * 2, policy(), **options) as collector:
            assert collector.next() is not None

    cycle()  # imports, and the fork server
    before = resources()
    for _ in range(CYCLES):
        cycle()
    assert not more_than(before)


@served
def test_nothing_is_left_of_workers_that_were_restarted(inference):
    options = {
        "frames_per_batch": 20,
        "on_failure": Restart(max_restarts=None),
        "inference": inference,
    }
    with MultiSyncCollector([CountingEnv] * 2, policy(), **options) as c:
        c.next()
        before = resources()
        for turn in range(CYCLES):
            os.kill(c.stats().workers[turn % 2].pid, 9)
            for _ in range(3):  # with batches in between there is no back-off
                c.next()
        assert not more_than(before)
        assert c.stats().restarts == CYCLES


@pytest.mark.parametrize(
    "options", [{}, {"inference": "server", "backend": "threads"}], ids=["", "served"]
)
def test_nothing_is_left_of_collectors_that_could_not_be_made(options):
    def fail():
        raise ValueError("no")

    def cycle():
        with pytest.raises(RuntimeError, match="no"):
            MultiSyncCollector(
                [CountingEnv, fail], policy(), frames_per_batch=20, **options
            )

    cycle()
    before = resources()
    for _ in range(CYCLES):
        cycle()
    assert not more_than(before)


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_batches_stay_valid_when_their_collector_is_gone(backend):
    with MultiSyncCollector(
        [CountingEnv] * 2, None, frames_per_batch=20, backend=backend
    ) as collector:
        batch = collector.next()
        copy = batch.clone()
    del collector
    assert (batch == copy).all()


def test_no_socket_listens():
    before = sockets_of({os.getpid(), *descendants()})  # what other tests have left
    with MultiAsyncCollector([CountingEnv] * 2, None, frames_per_batch=20) as collector:
        collector.next()
        ours = {os.getpid(), *descendants()}
        assert len(ours) >= 4
        sockets = sockets_of(ours) - before
        listening = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    listening.add(f"socket:[{fields[9]}]")
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[3], 16) & 0x10000:  # it accepts connections
                listening.add(f"socket:[{fields[6]}]")
        assert sockets
        assert not sockets & listening


def sockets_of(pids):
    return {link for pid in pids for link in links(pid) if link.startswith("socket:[")}


def links(pid):
    try:
        return [
            os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
        ]
    except OSError:
        return []


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_sleep_while_nobody_asks(kind, backend):
    with kind(
        [CountingEnv] * 2, None, frames_per_batch=2000, backend=backend
    ) as collector:
        collector.next()
        pids = descendants() | {os.getpid()}
        wait_until(
            lambda: used_in_a_second(pids) <= 0.05
        )  # those that are ahead make what they may; others end


def used_in_a_second(pids):
    before = processor_time(pids)
    select.select([], [], [], 1.0)
    return processor_time(pids) - before


def processor_time(pids):
    """Seconds, of all of them."""
    ticks = 0
    for pid in pids:
        if alive(pid):
            ticks += sum(
                map(
                    int,
                    Path(f"/proc/{pid}/stat")
                    .read_text()
                    .rpartition(")")[2]
                    .split()[11:13],
                )
            )
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_message_that_cannot_be_sent_to_a_thread_leaves_no_descriptor():
    wake_up, limit = WakeUp(), resource.getrlimit(resource.RLIMIT_NOFILE)
    thread = WorkerThread("worker", wake_up)
    os.close(lowest := os.dup(wake_up.fileno()))
    before = open_files()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (lowest + 1, limit[1])
    )  # room for one copy
    try:
        with pytest.raises(OSError, match="open files"):
            thread.send("message", [wake_up.fileno()] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert open_files() <= before
    thread.close()
    assert thread.join(60)
    wake_up.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_frames(kind):
    with kind(
        partial(TorchCartPole, 128), None, num_workers=2, frames_per_batch=64 * 1024
    ) as collector:
        assert collector.stats().executed == 0
        pids = {os.getpid(), *(worker.pid for worker in collector.stats().workers)}
        frames, seen = 0, []
        for batch in collector:
            frames += batch.numel()
            if frames > 200_000 + 250_000 * len(seen):
                seen.append(anonymous_bytes(pids))
            if len(seen) == 3:
                break
        # What grows with frames grows twice; what this process keeps for another reason does so
        # once.
        grown = [
            [late[pid] - early[pid] for early, late in pairwise(seen)] for pid in pids
        ]
        assert max(map(min, grown)) < 2 << 20, grown


def anonymous_bytes(pids):
    """Private memory by process."""
    found = {}
    for pid in pids:
        line = next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )
        found[pid] = int(line.split()[1]) * 1024
    return found


SMALL_SHM = """
mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$0" -c '
import os
import resource
from functools import partial
import numpy as np
from gymnasium import spaces
from muster import MultiSyncCollector
from muster.testing import SpaceEnv
image = spaces.Box(0, 255, (1 << 18,), np.uint8)
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 2 << 20
with MultiSyncCollector([partial(SpaceEnv, image, spaces.Discrete(2))] * 2, None, num_envs=8, frames_per_batch=64) as c:
    assert c.next()["observation"].nbytes == 16 << 20
    assert os.listdir("/dev/shm") == []
print("done")
'
"""


@pytest.mark.slow
def test_a_small_dev_shm_is_enough():
    """As in a container: 2 MiB, and batches of 32 MiB."""
    if subprocess.run(
        ["unshare", "-m", "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not make a mount namespace")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    got = subprocess.run(
        ["unshare", "-m", "sh", "-c", SMALL_SHM, sys.executable],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert (got.stdout, got.returncode) == ("done\n", 0), got.stderr


def test_workers_that_were_killed_leave_no_zombie(tmp_path):
    factories = [partial(OracleEnv, tmp_path / "counts", number) for number in range(2)]
    with MultiSyncCollector(
        factories, None, frames_per_batch=20, on_failure="restart"
    ) as collector:
        collector.next()
        first = [worker.pid for worker in collector.stats().workers]
        os.kill(first[0], 9)
        collector.next()
        assert all_gone(first[:1])
        assert not Path(f"/proc/{first[0]}").exists()


def test_a_wake_up_that_is_gone_does_not_ring_at_other_files():
    """A thread can end long after its collector, when the number is that of somebody else's file."""
    bell = WakeUp()
    bell.ring()
    assert select.select([bell], [], [], 0)[0]
    bell.close()
    pipes = [os.pipe() for _ in range(8)]
    bell.ring()
    assert not select.select([read for read, _ in pipes], [], [], 0)[0]
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)
