"""Nodes that are killed, stopped and cut off: at every kind of place; not a step is doubled or made
up, and those that nobody could count are bounded.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch

from muster import DistributedCollector, MultiSyncCollector, Restart
from muster.cluster.launchers import MpLauncher
from muster.cluster.token import write_token
from muster.errors import CollectorTimeout, WorkerDied, WorkerHung
from muster.testing import Fault, OracleEnv, check_stream
from tests.fakes import faults
from tests.fakes.fault_runs import MODES, T, alive, all_gone, deadlines, run
from tests.fakes.killers import RANDOM_KILLS, Killer
from tests.fakes.lost_nodes import NodeSignalled
from tests.fakes.node_runs import (
    ASYNC_KINDS,
    MARK,
    NODE_KINDS,
    SYNC_KINDS,
    KilledForMemory,
    MadeOnce,
    births,
    came_by_themselves,
    check_random_kills,
    direct_nodes,
    factories,
    late,
    node_pids,
    sync_nodes,
)
from tests.tools import assert_balanced
from tests.waits import descriptors_left, free_port, wait_until

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="kills processes, and looks into /proc"
    ),
]

AT = 30  # row 10 of the second rollout
KILLS = NodeSignalled(signal.SIGKILL)
HEARTBEAT_S = 2.0
FAKES = "tests.fakes.node_runs"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {kind: run(folder, None, kind) for kind in NODE_KINDS}


@pytest.fixture(autouse=True)
def nothing_is_left():
    environ = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= environ
    assert all_gone(node_pids().values()), "node processes are left"


def check(got, *, losses=1, undisturbed=None):
    """Books that are exact but for what only a lost node knew, which is bounded by the rollouts it
    was at.
    """
    rows = got.check(undisturbed=undisturbed, unseen=losses * 2 * T)
    assert set(got.stats.discarded) <= {"worker_died", "shutdown"}
    assert all(count <= got.counts[env, 2] for (env, _), count in rows.items())
    return rows


def assert_said(error, node, phase=None, why=""):
    assert type(error) is WorkerDied
    found = re.match(
        r"Worker (\d) .*is lost with its node, during (\w+): (.*)",
        str(error),
        re.DOTALL,
    )
    assert found, str(error)
    assert error.worker == int(found[1])
    assert re.search(rf"\bnode {node}\b", str(error)), str(error)
    assert phase is None or found[2] == error.phase == phase, str(error)
    assert re.search(why, found[3]), str(error)


# --- a node that is killed ------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_a_node_killed_in_the_middle_of_a_rollout_loses_that_and_nothing_else(
    tmp_path, undisturbed, kind, on_failure
):
    got = run(tmp_path, Fault(KILLS, at=AT), kind, on_failure=on_failure)
    rows = check(got, undisturbed=undisturbed[kind])
    assert rows[0, 0] == T or (
        kind in ASYNC_KINDS and not rows[0, 0]
    )  # which may not have left the node yet
    assert got.counts[0, 0] == (1 if on_failure == "drop" else 2)
    assert len(got.errors) == (on_failure == "raise")
    for error in got.errors:
        assert_said(error, 0)


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_a_node_killed_in_a_reset(tmp_path, undisturbed, kind):
    got = run(
        tmp_path, Fault(KILLS, "reset", at=2), kind
    )  # in its first rollout, which it gets in any case
    check(got, undisturbed=undisturbed[kind])
    assert_said(got.error, 0)


@pytest.mark.parametrize("on_failure", MODES)
def test_a_node_killed_while_environments_are_made_ends_the_construction(
    tmp_path, on_failure
):
    with pytest.raises(WorkerDied) as caught:
        run(tmp_path, Fault(KILLS, "construct"), sync_nodes, on_failure=on_failure)
    assert_said(caught.value, 0)
    assert caught.value.phase in (
        "construct",
        "join",
    )  # which of the two depends on whether its greeting had come
    assert all_gone(node_pids().values())


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_a_node_killed_between_batches_costs_nothing(tmp_path, on_failure, kind):
    path = tmp_path / "counts"
    with kind(
        factories(path), frames_per_batch=T, on_failure=on_failure, seed=1
    ) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        pids = node_pids()
        os.kill(pids[0], signal.SIGKILL)
        assert all_gone([pids[0]])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a worker is dropped")
            if on_failure == "raise":
                with pytest.raises(WorkerDied) as caught:
                    while collector.next() is None:
                        pass
                assert_said(caught.value, 0)
            batches += [collector.next().clone() for _ in range(2)]
        assert alive(pids[1])
        assert node_pids().get(1) == pids[1]
        stats = collector.stats()
    rows = check_stream(batches)
    truth = OracleEnv.read(path)[:, 2].sum()
    assert stats.frames == sum(rows.values())
    assert_balanced(stats)
    assert stats.executed <= truth <= stats.executed + stats.unseen
    assert rows[0, 0] == 2 * T
    assert (0, 1) in rows or on_failure == "drop"


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_a_node_that_nobody_has_missed_before_the_shutdown_is_accounted_for(
    tmp_path, kind
):
    path = tmp_path / "counts"
    fault = Fault(NodeSignalled(signal.SIGKILL, once=tmp_path / "delivered"), at=AT)
    with kind(factories(path, fault), frames_per_batch=T, seed=1) as collector:
        doomed = node_pids()[0]
        batches = [collector.next().clone()]  # two rollouts of each were requested
        (tmp_path / "delivered").touch()
        wait_until(lambda: not alive(doomed))
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert counts[0].tolist()[:3] == [1, AT + 1, AT]
    assert stats.frames == sum(check_stream(batches).values()) == T
    assert_balanced(stats, in_flight=0)
    assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen
    assert stats.unseen <= 2 * T


@pytest.mark.parametrize("what", ["setup", "weights", "start", "requests"])
@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_a_node_killed_when_something_reaches_it(tmp_path, monkeypatch, what, kind):
    """While it joins, and before its first step."""
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    launcher = MpLauncher(f"{FAKES}:dies_of_{what}")
    if what != "requests":
        with pytest.raises(WorkerDied) as caught:
            run(tmp_path, None, kind, launcher=launcher)
        assert_said(caught.value, 0)
        return
    got = run(tmp_path, None, kind, launcher=launcher, on_failure="restart")
    check(got)
    assert got.counts[0, 0] == 2


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"]).returncode != 0,
    reason="needs a mount namespace",
)
def test_a_worker_that_its_node_had_no_memory_for_says_so(tmp_path, monkeypatch):
    """The numbers are those of the node's machine, and since the collector was made."""
    events = tmp_path / "events"
    events.write_text("oom 0\noom_kill 3\n")
    monkeypatch.setenv(MARK, str(events))
    launcher = MpLauncher(f"{FAKES}:short_of_memory")
    got = run(
        tmp_path, Fault(KilledForMemory(events), at=AT), sync_nodes, launcher=launcher
    )
    assert "Probably out of memory: the kernel has killed 2 processes" in str(got.error)
    assert got.error.exitcode == -signal.SIGKILL
    got.check()


@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_a_node_killed_before_it_has_joined_says_so(tmp_path, monkeypatch, kind):
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    with pytest.raises(WorkerDied) as caught:
        run(
            tmp_path,
            None,
            kind,
            launcher=MpLauncher(entry=f"{FAKES}:dies_at_birth"),
            on_failure="restart",
        )
    assert_said(
        caught.value,
        "[01]",
        why=r"has not joined: its process \d+ ended with exit code -9\. ",
    )


@pytest.mark.parametrize("kind", SYNC_KINDS)
def test_a_node_that_does_not_join_in_time_says_so(tmp_path, kind):
    begin = time.monotonic()
    with pytest.raises(
        (WorkerDied, CollectorTimeout), match=r"has not joined at \S+ within 3 s"
    ):
        run(
            tmp_path,
            None,
            kind,
            launcher=late(tmp_path / "births", joins=0),
            timeouts={**deadlines(100.0), "join": 3.0},
        )
    assert time.monotonic() - begin < 60
    assert all_gone(node_pids().values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_a_node_killed_while_it_is_sent_weights(tmp_path, kind):
    """40 MB do not fit into any buffer: a stopped node has not got all of them."""
    path, policy = tmp_path / "counts", Wide(10_000_000)
    with kind(
        factories(path), policy, frames_per_batch=T, on_failure="restart", seed=1
    ) as collector:
        batches = [collector.next().clone() for _ in range(4)]
        pid = node_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        policy.weight.data += 1
        collector.update_policy_weights_()
        batches += [collector.next().clone() for _ in range(3)]  # of the other
        os.kill(pid, signal.SIGKILL)
        until_run(collector, batches, env=0, run=1)
        stats = collector.stats()
    check_stream(batches)
    assert_balanced(stats)


class Wide(torch.nn.Module):
    """Always the same action, with many weights."""

    def __init__(self, count):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))

    def forward(self, observation):
        return (
            torch.ones(observation.shape[:-1], dtype=torch.int64)
            + 0 * self.weight[0].long()
        )


def until_run(collector, batches, env, run, within_s=30.0):
    """Collect until an environment's batches are those of its worker's successor."""
    deadline = time.monotonic() + within_s
    while not any(
        (b["observation"][..., 0].eq(env) & b["observation"][..., 1].eq(run)).any()
        for b in batches[-1:]
    ):
        assert time.monotonic() < deadline, "it has not come back"
        batches.append(collector.next().clone())


class HangsOnNodes:
    """Makes a policy; the thread that calls it on a node does not come back."""

    def __init__(self):
        self.main = os.getpid()

    def __call__(self):
        if os.getpid() != self.main:
            threading.Event().wait()  # HERE
        return Wide(1)


def test_a_node_whose_own_thread_hangs_says_so(tmp_path):
    """It goes on to send signs of life, from another thread."""
    options = {
        "collector_kwargs": {"inference": "server"},
        "policy_factory": HangsOnNodes(),
        "policy": None,
    }
    with pytest.raises(
        WorkerHung,
        match=r"The main thread of node [01] \(\S+\) has not returned for .* its deadline",
    ) as caught:
        run(
            tmp_path,
            None,
            sync_nodes,
            timeouts={**deadlines(2.0), "join": 100.0, "heartbeat": 30.0},
            **options,
        )
    assert "in __call__" in str(caught.value)
    assert (
        float(re.search(r"returned for ([0-9.]+) s", str(caught.value))[1]) >= 2
    )  # rounded


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_node_that_cannot_be_started_again_says_so_until_it_can(tmp_path, on_failure):
    """The main process has no descriptors for its launcher. (What the other engines lose would free
    enough of them.)
    """
    path = tmp_path / "counts"
    with direct_nodes(
        factories(path), frames_per_batch=T, on_failure=on_failure, seed=1
    ) as collector:
        batches = [collector.next().clone()]
        pid = node_pids()[0]
        with descriptors_left(3):
            os.kill(pid, signal.SIGKILL)
            assert all_gone([pid])
            for turn in range(3):
                begun = time.monotonic()
                with pytest.raises(WorkerDied) as caught:
                    while True:
                        batches.append(collector.next().clone())
                assert time.monotonic() - begun < 30
                assert (
                    on_failure == "raise" and not turn
                ) or "cannot be started" in str(caught.value)
        batches += [collector.next().clone() for _ in range(2)]
        stats = collector.stats()
    assert_balanced(stats)
    assert sum(check_stream(batches).values()) == stats.frames


# --- what follows ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_streams_after_a_death_are_those_of_local_workers(tmp_path):
    """Seeds and numbers of episodes go on likewise, whether a worker, its node or a local worker
    has died.
    """
    ways = {
        "local": (faults.Signalled(signal.SIGKILL), MultiSyncCollector),
        "leaf": (faults.Signalled(signal.SIGKILL), sync_nodes),
        "node": (KILLS, sync_nodes),
    }
    got = {
        name: run(tmp_path, Fault(do, at=AT), kind, on_failure="restart")
        for name, (do, kind) in ways.items()
    }
    for name in ("leaf", "node"):
        for env in (0, 1):
            for mine, local in zip(
                got[name].rows_of(env), got["local"].rows_of(env), strict=True
            ):
                assert torch.equal(mine, local), name


def test_all_workers_of_a_node_are_lost_with_it(tmp_path, undisturbed):
    path = tmp_path / "counts"
    four = [
        EnvFactory(path, 4 * node, Fault(KILLS, at=AT) if node == 0 else None)
        for node in range(2)
    ]
    options = {
        "num_workers_per_collector": 2,
        "collector_class": "sync",
        "on_failure": "restart",
        "seed": 1,
    }
    with sync_nodes(four, frames_per_batch=2 * T, **options) as collector:
        batches = [collector.next().clone() for _ in range(4)]
        stats = collector.stats()
        assert [worker.restarts for worker in stats.workers] == [1, 1, 0, 0]
    rows = check_stream(batches)
    counts = OracleEnv.read(path)
    assert counts[:, 0].tolist() == [1] * 6
    assert sum(rows.values()) == stats.frames == 16 * T
    assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen


@pytest.mark.slow
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_workers_of_a_node_that_was_lost_before_their_first_order_come_back_together(
    tmp_path, kind
):
    """The node's server acts once all of them are there, and nobody has a request for it before."""
    four = [EnvFactory(tmp_path / "counts", 4 * node, None) for node in range(2)]
    options = {
        "num_workers_per_collector": 2,
        "collector_class": "sync",
        "collector_kwargs": {"inference": "server"},
    }
    with kind(
        four,
        Wide(1),
        frames_per_batch=2 * T,
        seed=1,
        timeouts=deadlines(30.0),
        **options,
    ) as collector:
        pid = node_pids()[0]
        os.kill(pid, signal.SIGKILL)
        assert all_gone([pid])
        with pytest.raises(WorkerDied):
            while collector.next() is not None:
                pass
        batches = [collector.next().clone() for _ in range(4)]
    check_stream(batches)


class EnvFactory:
    """Environments of the workers of a node, and of their successors, each with a number of its
    own, as they ask.
    """

    def __init__(self, path, first, fault):
        self.path, self.first, self.fault = path, first, fault

    def __call__(self):
        number = self.first
        while not faults.first_time(f"{self.path}-{number}"):
            number += 1
        return OracleEnv(
            self.path, number, 1, self.fault if number == self.first else None
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_the_other_node_goes_on_while_one_is_away(tmp_path, kind):
    """Node 0 does not come back; shutdown does not wait for it."""
    path, folder = tmp_path / "counts", tmp_path / "births"
    launcher = late(folder, joins=2)
    with kind(
        factories(path), frames_per_batch=T, launcher=launcher, on_failure="restart"
    ) as collector:
        batches = [collector.next().clone() for _ in range(4)]
        os.kill(node_pids()[0], signal.SIGKILL)
        wait_until(
            lambda: batches.append(collector.next().clone()) or len(births(folder)) == 3
        )
        batches += [collector.next().clone() for _ in range(20)]
        joining = births(folder)[-1]
        assert alive(joining)
        assert [worker.node[:1] for worker in collector.stats().workers] == ["0", "1"]
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert all_gone([joining])
    stats = collector.stats()
    rows = check_stream(batches)
    assert {
        env
        for batch in batches[-20:]
        for env in batch["observation"][..., 0].flatten().tolist()
    } == {1}
    assert_balanced(stats, in_flight=0)
    assert (
        stats.executed
        <= OracleEnv.read(path)[:, 2].sum()
        <= stats.executed + stats.unseen
    )
    assert stats.frames == sum(rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_a_node_that_dies_again_and_again_is_given_up(tmp_path, kind):
    path = tmp_path / "counts"
    fault = Fault(KILLS, at=5, runs=None)
    with kind(
        factories(path, fault), frames_per_batch=T, on_failure=Restart(max_restarts=10)
    ) as collector:
        assert_said(drain(collector, match="restart 3"), 0)
        assert OracleEnv.read(path)[0, 0] == 4  # three restarts without a batch
        collector.shutdown()
        stats, counts = collector.stats(), OracleEnv.read(path)
    assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen


def test_a_node_that_dies_before_it_has_made_its_environments_again_is_counted_too(
    tmp_path,
):
    doomed = partial(MadeOnce, tmp_path / "counts", 0, 1, Fault(KILLS, at=5))
    envs = [doomed, partial(OracleEnv, tmp_path / "counts", 1)]
    with sync_nodes(
        envs, frames_per_batch=T, on_failure=Restart(max_restarts=10)
    ) as collector:
        assert_said(drain(collector, match="restart 3"), 0, "construct")


def test_a_node_that_dies_too_often_within_a_minute_is_given_up(tmp_path):
    fault = Fault(KILLS, at=AT, runs=None)
    options = {"on_failure": Restart(max_restarts=1)}
    with sync_nodes(
        factories(tmp_path / "counts", fault), frames_per_batch=T, **options
    ) as collector:
        drain(collector, match="restart 1")


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_when_all_nodes_are_dropped_the_end_is_said(tmp_path, kind):
    path = tmp_path / "counts"
    fault = Fault(KILLS, at=AT, runs=None)
    both = [factories(path, fault)[0], factories(path, fault)[0]]
    with (
        warnings.catch_warnings(),
        kind(both, frames_per_batch=T, on_failure="drop") as collector,
    ):
        warnings.filterwarnings("ignore", "a worker is dropped")
        for _ in range(2):
            drain(collector, match="all workers have been dropped")


def drain(collector, match):
    """Collect until the error that has to come."""
    with pytest.raises(WorkerDied, match=match) as caught:
        while collector.next() is not None:
            pass
    return caught.value


# --- a node that is stopped, and wakes up ---------------------------------------------------------


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_a_node_that_is_stopped_is_replaced(tmp_path, undisturbed, kind):
    timeouts = {**deadlines(30.0), "heartbeat": HEARTBEAT_S}
    got = run(
        tmp_path, Fault(NodeSignalled(signal.SIGSTOP), at=AT), kind, timeouts=timeouts
    )
    rows = check(got)
    assert rows[0, 0] == T or (
        kind in ASYNC_KINDS and not rows[0, 0]
    )  # which may not have left the node yet
    assert_said(got.error, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, Fault(faults.holds_the_gil, at=AT)])
@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_a_node_that_wakes_up_is_not_heard_and_joins_again(tmp_path, fault, kind):
    """Nobody else can end it: what it had made meanwhile is not in any batch, and its successor
    begins after it.
    """
    path, token = tmp_path / "counts", tmp_path / "token"
    write_token(token, secrets.token_hex(16).encode())
    port = free_port()
    options = {
        "launcher": "manual",
        "tcp_port": port,
        "token": token,
        "on_failure": "restart",
        "seed": 1,
    }
    timeouts = {"heartbeat": HEARTBEAT_S}
    with came_by_themselves(f"127.0.0.1:{port}", token) as nodes:
        with kind(
            factories(path, fault), frames_per_batch=T, timeouts=timeouts, **options
        ) as collector:
            batches = [collector.next().clone()]
            wait_until(
                lambda: (
                    batches.append(collector.next().clone())
                    or OracleEnv.read(path)[0, 1] > AT
                )
            )
            worker = collector.stats().workers[0].pid
            os.kill(nodes[0].pid, signal.SIGSTOP)
            wait_until(
                lambda: (
                    batches.append(collector.next().clone()) or collector.stats().unseen
                )
            )
            before = collector.stats()
            batches += [
                collector.next().clone() for _ in range(20)
            ]  # of the other: it never stops
            os.kill(nodes[0].pid, signal.SIGCONT)
            begin = time.monotonic()
            until_run(collector, batches, env=0, run=1)
            assert time.monotonic() - begin < 10
            assert all_gone([worker])
            assert [node.poll() for node in nodes] == [None, None], "the same process"
        stats, counts = collector.stats(), OracleEnv.read(path)
        rows = check_stream(batches)
        assert before.discarded["worker_died"] + before.unseen >= T
        assert rows[0, 0] < counts[0, 2]
        assert stats.frames == sum(rows.values())
        assert_balanced(stats, in_flight=0)
        assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen
        assert [node.wait(20) for node in nodes] == [0, 0], "they heard the goodbye"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_a_short_stop_is_no_loss(tmp_path, kind):
    path = tmp_path / "counts"
    timeouts = {**deadlines(0.5), "construct": 60.0, "call": 60.0, "heartbeat": 20.0}
    with kind(factories(path), frames_per_batch=T, timeouts=timeouts) as collector:
        batches = [collector.next().clone() for _ in range(4)]
        pid, begin = node_pids()[0], time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        while (
            time.monotonic() < begin + 2.5
        ):  # of the other; nobody takes the silence for a worker that hangs
            batches.append(collector.next().clone())
        os.kill(pid, signal.SIGCONT)
        wait_until(
            lambda: (
                batches.append(collector.next().clone())
                or (batches[-1]["observation"][..., 0] == 0).all()
            )
        )
    stats, counts = collector.stats(), OracleEnv.read(path)
    rows = check_stream(batches)
    assert (stats.restarts, stats.unseen, rows[0, 1]) == (0, 0, 0)
    assert_balanced(stats, in_flight=0)
    assert stats.executed == counts[:, 2].sum()


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_random_kills_of_nodes_and_workers_lose_nothing_and_double_nothing(
    tmp_path, kind
):
    check_random_kills(
        tmp_path / "counts",
        kind,
        Killer(RANDOM_KILLS, random.Random(7), 1.5, kills_a_node_or_worker),
    )


def unequal_nodes(create_env_fn, policy=None, *, sync, frames_per_batch, **options):
    """A node with one worker of four environments, and one with three workers of two each."""
    path = create_env_fn[0].args[0]
    return DistributedCollector(
        [EnvFactory(path, 500 * node, None) for node in range(2)],
        policy,
        launcher="mp",
        sync=sync,
        frames_per_batch=200 if sync else [40, 240],
        **({"cat_results": "cat"} if sync else {}),
        num_workers_per_collector=[1, 3],
        collector_class=["single", "sync"],
        collector_kwargs=[{"num_envs": 4}, {"num_envs": 2}],
        **options,
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sync", [True, False])
def test_random_kills_of_nodes_that_differ_lose_nothing_and_double_nothing(
    tmp_path, sync
):
    check_random_kills(
        tmp_path / "counts",
        partial(unequal_nodes, sync=sync),
        Killer(RANDOM_KILLS, random.Random(5), 1.5, kills_a_node_or_worker),
    )


def kills_a_node_or_worker(collector, rng):
    worker = rng.choice(collector.stats().workers)
    nodes = list(node_pids().values())
    pid = rng.choice([worker.pid, rng.choice(nodes or [0])])
    with suppress(ProcessLookupError):  # not started again yet
        if pid and worker.state == "working":
            os.kill(pid, signal.SIGKILL)
            return True
    return False


class DiesInItsSecondRun:
    """In an environment: ends its worker, in the first rollout after its node has come back."""

    def __call__(self, honest):
        if honest[0][1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest


def test_numbers_of_episodes_go_on_where_a_worker_dies_before_its_node_has_reported_any(
    tmp_path,
):
    factories_ = factories(
        tmp_path / "counts", Fault(DiesInItsSecondRun(), at=5, runs=2)
    )
    with sync_nodes(
        factories_, frames_per_batch=T, on_failure="restart", seed=1
    ) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        os.kill(node_pids()[0], signal.SIGKILL)
        until_run(collector, batches, env=0, run=2)
    check_stream(batches)
