"""The benchmarks of many machines, tiny: that they run, and that what they compute from their
measurements is right.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from benchmarks import cluster_kills, clusters, runner, schedule_simulation
from benchmarks.cluster_peers import WEIGHTS
from benchmarks.simulated_nodes import ONE_WAY_S, Pairs, Recording, SocketLink
from benchmarks.workloads import Workload
from muster.cluster.link import Block, LinkLost, Received


def test_bytes_under_several_tensors_count_once() -> None:
    rows = torch.zeros(5, 3, dtype=torch.float32)
    batch = TensorDict(
        {
            "a": rows[:4],
            "next": {"a": rows[1:]},
            "b": torch.zeros(4, 2, dtype=torch.uint8),
        },
        [4],
    )
    assert clusters.covered(batch) == 5 * 3 * 4 + 4 * 2


def test_bytes_on_the_loopback_device_are_seen() -> None:
    before = clusters.loopback_bytes()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        with there:
            writing = threading.Thread(target=here.sendall, args=(bytes(1_000_000),))
            writing.start()
            left = 1_000_000
            while left:
                left -= len(there.recv(1 << 16))
            writing.join()
    assert clusters.loopback_bytes() - before >= 1_000_000


def _rates(*per_second: float) -> runner.Series:
    return runner.Series([runner.Slice(1, 1 / rate, 0.0) for rate in per_second])


def test_weights_cost_what_a_step_costs_more_with_them() -> None:
    series = {
        "dist-publish": _rates(2.0, 2.0),
        "dist-step": _rates(4.0, 4.0),
        "broadcast": _rates(8.0, 8.0),
    }
    figure = clusters.publish_figure({WEIGHTS.name: series}, "dist")
    assert figure.measured == pytest.approx(2.0)  # (500 - 250 ms) / 125 ms
    assert figure.met is False
    assert (
        clusters.publish_figure(
            {WEIGHTS.name: {**series, "broadcast": _rates()}}, "dist"
        ).met
        is None
    )


def test_bytes_per_frame_are_those_of_the_same_round() -> None:
    series = runner.Series([runner.Slice(10, 1.0, 0.0), runner.Slice(20, 1.0, 0.0)])
    assert clusters.per_frame([100, 200], series) == [10.0, 0.0]


def test_wall_times_are_bounded_from_above() -> None:
    bound = clusters.Bound("w", "slower", 1.2, ("fast",), ("slow",))
    results = {"w": {"fast": _rates(12.0), "slow": _rates(8.0)}}
    assert bound.figure(results).measured == pytest.approx(1.5)
    assert bound.figure(results).met is False


def test_the_ideal_takes_the_slowest_of_all_nodes_only_if_they_wait_for_each_other() -> (
    None
):
    steady = Recording(seconds=[0.1] * 4)
    assert schedule_simulation.ideal(steady, 8, sync=False) == pytest.approx(80.0)
    assert schedule_simulation.ideal(steady, 8, sync=True) == pytest.approx(
        1 / (0.1 + 2 * ONE_WAY_S)
    )
    uneven = Recording(seconds=[0.05, 0.1, 0.1, 0.2])
    assert schedule_simulation.ideal(uneven, 8, sync=True) < 7.0


def test_blocks_go_where_they_are_expected() -> None:
    ends = socket.socketpair()
    here, there = (SocketLink(end, deadline_s=10.0) for end in ends)
    memory = np.zeros(8, np.uint8)
    there.expect(7, memory[2:5])
    here.send(b"a", Block(np.array([1, 2, 3], np.uint8)), 7)
    here.send(b"b", Block(np.array([4], np.uint8)), 8)
    here.send(b"c")
    first, second, third = (there.receive() for _ in range(3))
    assert memory.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]
    assert first.message == b"a"
    assert first.tag == 7
    assert second.block is not None
    assert second.block.tolist() == [4]
    assert third == Received(b"c")
    here.close()
    with pytest.raises(LinkLost):
        there.receive()
    with pytest.raises(LinkLost, match="live once"):
        Pairs([here]).connect(0, 1, 1.0, threading.Event())
    for end in ends:
        end.close()


def test_a_node_is_found_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = {50: 40, 40: 30, 30: 20, 20: os.getpid(), 60: 0}
    monkeypatch.setattr(cluster_kills, "parent", parents.__getitem__)
    assert cluster_kills.node_of(50) == 30
    with pytest.raises(ProcessLookupError):
        cluster_kills.node_of(60)
    with pytest.raises(ProcessLookupError):
        cluster_kills.node_of(20)


@pytest.mark.slow
def test_played_nodes_are_like_real_ones(tmp_path: Path) -> None:
    tiny = Workload("tiny", "CartPole-v1", 2, 4, "")
    recorded = schedule_simulation.record(tiny)
    assert {"Start", "WorkerPlace", "LayOut"} <= recorded.answers.keys()
    assert recorded.lane
    assert all(s > 0 for s in recorded.seconds)
    path = tmp_path / "recording"
    path.write_bytes(pickle.dumps(recorded))
    script = (
        "import json, sys; from benchmarks import schedule_simulation as s; from benchmarks.workloads import Workload; "
        "s.CASES['tiny'] = Workload('tiny', 'CartPole-v1', 2, 4, ''); "
        "print(json.dumps([s.point(sys.argv[1], 'tiny', 3, 0.2, sync=sync) for sync in (False,)]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True, text=True, timeout=90, cwd=runner.ROOT, env=runner.environment(),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout.splitlines()[-1])
    assert found["unaccounted"] == 0
    assert found["lane_bytes"] == len(recorded.lane)
    assert found["batches_per_s"] > 0
    assert found["frames_per_s"] == pytest.approx(8 * found["batches_per_s"], rel=0.01)
    assert found["nodes"] == 3


def test_kills_are_summed_up() -> None:
    stats = SimpleNamespace(
        executed=100, frames=90, discarded={"worker_died": 6}, in_flight=3, unseen=5
    )
    watch = cluster_kills.Watch([0.1, 0.3], [0.1], [1.0, 3.0], [2.0, 4.0])
    found = cluster_kills.summary(SimpleNamespace(stats=lambda: stats), watch)
    assert found["unaccounted"] == 1
    assert found["longest_wait_for_others_s"] == 0.3
    assert found["joined_s"] == {"median": 2.0, "iqr": 1.0, "max": 3.0}
    found |= {"kills": 2, "longest_wait_before_kills_s": 0.1}
    lines = cluster_kills.table(found).splitlines()
    assert [line.split()[-1] for line in lines[-2:]] == ["6", "5"]
    assert lines[2].split()[-4:] == ["<=", "10", "2", "3"]
    assert lines[-3].split()[-2:] == ["0", "1"]


def test_points_are_shown_with_those_that_failed() -> None:
    point = {
        "nodes": 8,
        "batches_per_s": 1234.0,
        "of_ideal": 0.5,
        "frames_per_s": 9.0,
        "main_cores": 0.25,
    }
    point |= {"main_us_per_batch": 77.0, "unaccounted": 0}
    results = {
        "cartpole, Sync": {
            "points": [point, {"nodes": 256, "error": "not over after 150 s"}]
        }
    }
    _, first, second = schedule_simulation.table(results).splitlines()
    assert first.split() == [
        "cartpole,",
        "Sync",
        "8",
        "1,234",
        "50%",
        "9",
        "0.25",
        "77",
        "0",
    ]
    assert second.split("256")[1].strip() == "not over after 150 s"
