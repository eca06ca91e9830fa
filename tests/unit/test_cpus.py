"""Which CPUs workers run on."""

from __future__ import annotations

import os

import pytest
import torch

from muster import MultiSyncCollector
from muster.errors import BadOption
from muster.testing import CountingEnv
from muster.utils.cpus import allowed_cpus, pinned

pytestmark = [
    pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity"), reason="the system chooses the CPUs"
    )
]


@pytest.mark.parametrize(
    ("allowed", "workers", "expected"),
    [
        ([0, 1, 2, 3], 1, [(0, 1, 2, 3)]),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([1, 4, 6], 2, [(1,), (4, 6)]),
        ([1, 4], 2, [(1,), (4,)]),
        ([1, 4], 5, [(1,), (4,), (1,), (4,), (1,)]),
    ],
)
def test_cpus_are_divided_among_workers_and_shared_if_there_are_too_few(
    monkeypatch, allowed, workers, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*allowed})
    assert pinned("auto", range(workers)) == expected


def test_workers_of_a_node_get_what_is_given_for_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert pinned([[0], [1], [2, 3], [3]], [2, 3]) == [(2, 3), (3,)]
    with pytest.raises(
        BadOption,
        match=r"cpu_affinity\[1\]=\[7\]: CPU 7 is not allowed, only \[0, 1, 2, 3\]",
    ):
        pinned([[0], [7]], [0, 1])


class PinnedEnv(CountingEnv):
    """Its observation is a number for the CPUs on which it was made and is stepped."""

    def __init__(self):
        super().__init__()
        self.made_on = os.sched_getaffinity(0)

    def step(self, action):
        obs, *rest = super().step(action)
        assert os.sched_getaffinity(0) == self.made_on
        obs[...] = sum(1 << cpu for cpu in self.made_on)
        return obs, *rest


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_environments_are_made_and_stepped_on_the_cpus_of_their_worker(backend):
    before = os.sched_getaffinity(0)
    given = {
        "frames_per_batch": 6,
        "total_frames": 6,
        "backend": backend,
        "cpu_affinity": "auto",
    }
    with MultiSyncCollector([PinnedEnv] * 3, None, **given) as collector:
        (batch,) = collector
        cpus = batch["next", "observation"].flatten(1)[:, 0].to(torch.int64).tolist()
    assert cpus == [
        sum(1 << cpu for cpu in of_worker) for of_worker in pinned("auto", range(3))
    ]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "wrong", ["all", 3, [0, 1], [[0], []], [["0"], [0]], [[True], [0]], [[-1], [0]]]
)
def test_other_values_are_refused(wrong):
    with pytest.raises(
        BadOption,
        match="cpu_affinity=.*: expected 'auto', or a list of CPU numbers per worker",
    ):
        MultiSyncCollector(
            [CountingEnv] * 2, None, frames_per_batch=4, cpu_affinity=wrong
        )


def test_every_worker_needs_its_cpus_and_only_those_of_this_process():
    with pytest.raises(BadOption, match="has CPUs for 1 workers, and there are 2"):
        MultiSyncCollector(
            [CountingEnv] * 2, None, frames_per_batch=4, cpu_affinity=[[0]]
        )
    missing = max(allowed_cpus()) + 1
    with pytest.raises(BadOption, match=f"CPU {missing} is not allowed"):
        MultiSyncCollector(
            [CountingEnv], None, frames_per_batch=4, cpu_affinity=[[missing]]
        )
