"""Actors that are killed and stopped, over both transports: not a step is doubled or made up, and
those that nobody could count are bounded. The same as ``test_node_faults``, with Ray's processes.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from muster import MultiSyncCollector, RayCollector, Restart
from muster.errors import WorkerDied
from muster.testing import Fault, OracleEnv, check_stream
from tests.fakes.fault_runs import FRAMES, MODES, T, alive, all_gone, deadlines, run
from tests.fakes.killers import RANDOM_KILLS, Killer
from tests.fakes.lost_nodes import NodeSignalled, node_of
from tests.fakes.node_runs import check_random_kills, factories
from tests.fakes.ray_cluster import cluster, needs_ray, ray_cluster  # noqa: F401 (a fixture)
from tests.tools import assert_accounted, assert_balanced
from tests.waits import wait_until

pytestmark = [
    needs_ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        sys.platform != "linux", reason="kills processes, and looks into /proc"
    ),
    pytest.mark.usefixtures("ray_cluster"),
]

AT = 30  # row 10 of the second rollout
KILLS = NodeSignalled(signal.SIGKILL)
ROOM = {"num_cpus": 1, "memory": 2**28}


def on_ray(
    transport: str, sync: bool, create_env_fn: Any, policy: Any = None, **options: Any
) -> RayCollector:
    """Two actors of one worker each."""
    cluster()
    return RayCollector(
        create_env_fn,
        policy,
        **{"transport": transport, "sync": sync, "remote_configs": ROOM, **options},
    )


KINDS = [
    pytest.param(
        partial(on_ray, transport, sync),
        id=f"{transport}-{'sync' if sync else 'async'}",
    )
    for transport, sync in product(("ray", "direct"), (True, False))
]


def check(got, *, losses=1):
    """Accounts that are exact but for what only a lost node knew, which is bounded by the rollouts
    under way there.
    """
    rows = got.check(unseen=losses * 2 * T)
    assert set(got.stats.discarded) <= {"worker_died", "shutdown"}
    assert all(count <= got.counts[env, 2] for (env, _), count in rows.items())
    return rows


def assert_says(error, why=""):
    assert type(error) is WorkerDied
    found = re.match(
        r"Worker 0 .*is lost with its node, during \w+: (.*)", str(error), re.DOTALL
    )
    assert found, str(error)
    assert re.search(why, found[1]), str(error)


def nodes_of(collector) -> dict[int, int]:
    """The processes of the actors, by number of the worker."""
    found = {}
    for worker in collector.stats().workers:
        with suppress(
            OSError, ValueError, IndexError
        ):  # it has ended, or has not been started
            found[worker.index] = node_of(worker.pid)
    return found


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_killed_in_the_middle_of_a_rollout_loses_that_and_nothing_else(
    tmp_path, kind, on_failure
):
    got = run(tmp_path, Fault(KILLS, at=AT), kind, on_failure=on_failure)
    check(got)
    assert got.counts[0, 0] == (1 if on_failure == "drop" else 2)
    assert len(got.errors) == (on_failure == "raise")
    for error in got.errors:
        assert_says(error, "node 0 .*is lost: The actor died")


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_killed_in_a_reset(tmp_path, kind):
    got = run(tmp_path, Fault(KILLS, "reset", at=2), kind)
    check(got)
    assert_says(got.error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_killed_while_environments_are_made_ends_the_construction(
    tmp_path, kind
):
    with pytest.raises(WorkerDied) as caught:
        run(tmp_path, Fault(KILLS, "construct"), kind)
    assert_says(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_killed_between_batches_is_another_actor_afterwards(tmp_path, kind):
    path = tmp_path / "counts"
    with kind(
        factories(path), frames_per_batch=T, on_failure="restart", seed=1
    ) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        first = nodes_of(collector)
        os.kill(first[0], signal.SIGKILL)
        assert all_gone([first[0]])
        wait_until(
            lambda: (
                batches.append(collector.next().clone()) or collector.stats().restarts
            )
        )
        batches += [collector.next().clone() for _ in range(4)]
        wait_until(
            lambda: (
                batches.append(collector.next().clone())
                or nodes_of(collector).get(0, first[0]) != first[0]
            )
        )
        assert nodes_of(collector)[1] == first[1]
        assert alive(first[1])
        stats = collector.stats()
    rows = check_stream(batches)
    assert stats.frames == sum(rows.values())
    assert_balanced(stats)


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_that_is_stopped_is_replaced_and_not_heard_any_more(tmp_path, kind):
    timeouts = {**deadlines(30.0), "heartbeat": 2.0}
    got = run(
        tmp_path, Fault(NodeSignalled(signal.SIGSTOP), at=AT), kind, timeouts=timeouts
    )
    check(got)
    assert_says(got.error, "2 s")


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_that_dies_again_and_again_is_given_up(tmp_path, kind):
    path = tmp_path / "counts"
    fault = Fault(KILLS, at=5, runs=None)
    with kind(
        factories(path, fault), frames_per_batch=T, on_failure=Restart(max_restarts=10)
    ) as collector:
        with pytest.raises(WorkerDied, match="restart 3") as caught:
            while collector.next() is not None:
                pass
        assert_says(caught.value)
        collector.shutdown()
        stats, counts = collector.stats(), OracleEnv.read(path)
    assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen


class Heavy(nn.Module):
    """8 MB of weights, of which the first number is in every row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2_000_000,), value))

    def forward(self, obs: torch.Tensor) -> Any:
        return torch.zeros(obs.shape[:-1], dtype=torch.int64), {
            "weight": self.weight[0].expand(obs.shape[:-1])
        }


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_killed_while_it_is_sent_weights_gets_the_newest(tmp_path, kind):
    policy = Heavy(0.0)
    options = {
        "frames_per_batch": T,
        "on_failure": "restart",
        "seed": 1,
        "track_policy_version": True,
    }
    with kind(factories(tmp_path / "counts"), policy, **options) as collector:
        batches = [collector.next()["weight"].clone()]
        for version in range(1, 31):
            nn.init.constant_(policy.weight, float(version))
            if version in (10, 20):
                os.kill(nodes_of(collector)[version // 10 - 1], signal.SIGKILL)
            collector.update_policy_weights_(policy)
            batch = collector.next()
            assert torch.equal(
                batch["weight"], batch["collector", "policy_version"].float()
            )
            batches.append(batch["weight"].clone())
        wait_until(lambda: collector.stats().restarts == 2 or collector.next() is None)
        assert_accounted(collector)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_of_actors_and_workers_lose_nothing_and_double_nothing(
    tmp_path, kind
):
    check_random_kills(
        tmp_path / "counts",
        kind,
        Killer(RANDOM_KILLS, random.Random(7), 1.0, kills_an_actor_or_worker),
    )


def kills_an_actor_or_worker(collector, rng):
    worker = rng.choice(collector.stats().workers)
    if worker.state != "working" or not worker.pid:
        return False
    with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
        pid = rng.choice([worker.pid, node_of(worker.pid)])
        if pid > 1:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_actors_after_the_shutdown(tmp_path, kind):
    with kind(factories(tmp_path / "counts"), frames_per_batch=T, seed=1) as collector:
        collector.next()
        pids = [
            *nodes_of(collector).values(),
            *(worker.pid for worker in collector.stats().workers),
        ]
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    assert len(pids) == 4
    assert all_gone(pids)


# Each actor takes 4 seconds of CPU time to start; a fork server that imports torch, too, would take
# 3 more, so the actors' own threads act.
@pytest.mark.parametrize(("transport", "many"), [("ray", 16), ("direct", 8)])
def test_many_actors_on_two_machines_of_which_two_are_killed(tmp_path, transport, many):
    path, small = tmp_path / "counts", {"num_cpus": 0.25, "memory": 2**26}
    envs = [partial(OracleEnv, path, number) for number in range(many)]
    options = {
        "policy": lambda obs: obs[..., 5] % 5,
        "inference": "server",
        "frames_per_batch": T,
        "total_frames": many * T * 6,
        "on_failure": "restart",
        "seed": 1,
    }
    batches = []
    with on_ray(transport, False, envs, remote_configs=small, **options) as collector:
        for number, batch in enumerate(collector):
            batches.append(batch.clone())
            if number in (20, 40):
                os.kill(nodes_of(collector)[number // 10], signal.SIGKILL)
        stats = collector.stats()
    rows = check_stream(batches)
    assert len(stats.workers) == many
    assert stats.frames == sum(rows.values()) == many * T * 6
    assert_balanced(stats, in_flight=0)
    counts = OracleEnv.read(path)
    assert stats.executed <= counts[:, 2].sum() <= stats.executed + stats.unseen


@pytest.mark.parametrize("transport", ["ray", "direct"])
def test_the_rows_are_those_of_workers_of_this_machine(tmp_path, transport):
    theirs = run(tmp_path, None, MultiSyncCollector)
    mine = run(tmp_path, None, partial(on_ray, transport, True))
    mine.check()
    assert mine.stats.engine == transport
    assert theirs.stats.engine == ""
    for env in range(2):
        mine.check_rows(theirs, env, FRAMES // 2)
