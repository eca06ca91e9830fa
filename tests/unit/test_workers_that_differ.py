"""Workers and nodes that differ: policies, devices, environments, numbers of environments."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from muster import (
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.errors import BadOption, WorkerDied
from tests.fakes.telling import Telling, made_with, telling
from tests.tools import assert_accounted

PROCESSES: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 16}
THREADS: dict[str, Any] = {**PROCESSES, "backend": "threads"}
FACTORIES = [telling(7), telling(9)]


def numbers(batch: Any) -> list[float]:
    return sorted(batch["number"].unique().tolist())


@pytest.mark.parametrize("options", [PROCESSES, THREADS], ids=["processes", "threads"])
def test_each_worker_makes_its_own_policy(options: dict[str, Any]) -> None:
    with MultiSyncCollector([made_with] * 2, policy_factory=FACTORIES, **options) as c:
        batch = c.next()
        assert batch["number"][0].unique().tolist() == [7]
        assert batch["number"][1].unique().tolist() == [9]
        assert c.policy.number == 7
        with torch.no_grad():
            c.policy.weight.fill_(3.0)
        c.update_policy_weights_()
        batch = c.next()
        assert batch["weight"].unique().tolist() == [3.0]
        assert numbers(batch) == [7, 9]


def test_workers_that_do_not_wait_for_each_other() -> None:
    with MultiAsyncCollector([made_with] * 2, policy_factory=FACTORIES, **THREADS) as c:
        seen: set[float] = set()
        batches = iter(c)
        while len(seen) < 2:
            batch = next(batches)
            worker = int(batch["collector", "traj_ids"][0, 0]) % 4 // 2
            assert numbers(batch) == [7 + 2 * worker]
            seen |= set(numbers(batch))


def test_a_restarted_worker_makes_its_own_policy_again() -> None:
    with MultiSyncCollector(
        [made_with] * 2, policy_factory=FACTORIES, **PROCESSES
    ) as c:
        c.next()
        os.kill(c.stats().workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="Worker 1"):
            c.next()
        assert c.next()["number"][1].unique().tolist() == [9]


def test_workers_on_different_devices() -> None:
    with MultiSyncCollector(
        [made_with] * 2,
        policy_factory=telling(1),
        policy_device=["cpu", "meta"],
        **PROCESSES,
    ) as c:
        assert c.cascade_execute("policy.where") == ["cpu", "meta"]
        c.update_policy_weights_(worker_ids=[torch.device("cpu")])
        with pytest.raises(BadOption, match="are on cpu, meta"):
            c.update_policy_weights_(worker_ids=[torch.device("mps")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_factory": []}, "policy_factory is an empty list"),
        (
            {"policy_factory": [telling(1), 3]},
            "expected a function, or a list of functions",
        ),
        (
            {"policy_factory": [telling(1)] * 3},
            "policy_factory has 3 entries for 2 workers",
        ),
        ({"policy_device": ["cpu"]}, "policy_device has 1 entries for 2 workers"),
        ({"env_device": []}, "env_device is an empty list"),
        ({"device": ["cpu", "nowhere"]}, r"device\[1\]='nowhere': not a torch device"),
        ({"storing_device": ["cpu", "cpu"]}, "storing_device="),
        (
            {"policy_factory": FACTORIES, "inference": "server"},
            "calls one policy for all workers, and policy_factory differs",
        ),
    ],
    ids=str,
)
def test_lists_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        MultiSyncCollector([made_with] * 2, **PROCESSES, **options)


@pytest.mark.parametrize(
    "name", ["policy_factory", "device", "policy_device", "env_device"]
)
def test_a_collector_without_workers_takes_one_value(name: str) -> None:
    value: Any = FACTORIES if name == "policy_factory" else ["cpu", "cpu"]
    with pytest.raises(
        BadOption, match=f"{name} has an entry for each worker, and a Collector"
    ):
        Collector(made_with, None, **PROCESSES, **{name: value})


# --- nodes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_differ_in_everything() -> None:
    """One worker with one policy here, two with another there; other environments, and of these
    another number.
    """
    with DistributedCollector(
        [made_with, made_with],
        frames_per_batch=24,
        launcher="mp",
        num_workers_per_collector=[1, 2],
        collector_class=["single", "sync"],
        collector_kwargs=[
            {
                "num_envs": 4,
                "policy_factory": telling(1),
                "create_env_kwargs": {"length": 2},
                "policy_device": "cpu",
                "num_sub_threads": 1,
            },
            {
                "num_envs": 2,
                "policy_factory": telling(2),
                "create_env_kwargs": {"length": 5},
                "num_sub_threads": 2,
            },
        ],
    ) as c:
        assert isinstance(c.policy, Telling)
        assert c.map_envs(getattr, "length") == [2] * 4 + [5] * 4
        shapes: dict[float, Any] = {}
        batches = iter(c)
        while len(shapes) < 2:
            batch = next(batches)
            (number,) = numbers(batch)
            shapes[number] = tuple(batch.shape)
            lengths = {record.length for record in c.episodes}
            assert lengths <= {2.0 if number == 1 else 5}
        assert shapes == {1: (4, 6), 2: (2, 2, 6)}
        with torch.no_grad():
            c.policy.weight.fill_(5.0)
        c.update_policy_weights_()
        newest: set[float] = set()
        while len(newest) < 2:
            batch = next(batches)
            if batch["weight"].unique().tolist() == [5.0]:
                newest |= set(numbers(batch))
        assert_accounted(c)


@pytest.mark.slow
def test_frames_of_a_joint_batch_are_shared_in_proportion_to_the_environments() -> None:
    with DistributedCollector(
        [made_with, made_with],
        frames_per_batch=20,
        launcher="mp",
        sync=True,
        cat_results="cat",
        num_workers_per_collector=[1, 3],
        collector_class=["single", "sync"],
        collector_kwargs=[{"num_envs": 4}, {"num_envs": 2}],
        policy_factory=FACTORIES,
        policy_device=["cpu", None],
    ) as c:
        batch = c.next()
        assert batch.shape == (10, 4)
        assert batch["number"][:, 0].tolist() == [7] * 4 + [9] * 6
        assert_accounted(c)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_devices_of_nodes_are_looked_for_on_the_nodes() -> None:
    with pytest.raises(
        BadOption, match=r"policy_device='cuda:0': the machine of this worker"
    ):
        DistributedCollector(
            [made_with] * 2,
            telling(1)(),
            launcher="mp",
            policy_device=["cpu", "cuda:0"],
            frames_per_batch=8,
            num_envs=2,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_factory": FACTORIES * 2}, "policy_factory has 4 entries for 2 nodes"),
        ({"policy_device": ["cpu"]}, "policy_device has 1 entries for 2 nodes"),
        (
            {"collector_kwargs": [{"policy_factory": telling(1)}, {}]},
            "has a policy_factory for some nodes",
        ),
        (
            {"collector_kwargs": [{"inference": "server"}, {}]},
            r"collector_kwargs\[1\] differs from collector_kwargs\[0\] in inference: only",
        ),
        (
            {"collector_kwargs": [{}, {"num_env": 2}]},
            "unknown option 'num_env'; did you mean",
        ),
    ],
    ids=str,
)
def test_lists_of_nodes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        DistributedCollector(
            [made_with] * 2, launcher="mp", frames_per_batch=8, **options
        )


# --- frames as given ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [PROCESSES, THREADS], ids=["processes", "threads"])
def test_workers_that_fill_batches_of_different_sizes(options: dict[str, Any]) -> None:
    given = {**options, "frames_per_batch": [8, 20]}
    with MultiAsyncCollector([made_with] * 3, None, num_workers=2, **given) as c:
        shapes: dict[int, Any] = {}
        batches = iter(c)
        while len(shapes) < 3:
            batch = next(batches)
            shapes[int(batch["collector", "traj_ids"][0, 0]) % 6 // 2] = tuple(
                batch.shape
            )
            assert ("collector", "valid") not in batch.keys(True)
            assert_accounted(c)
        assert shapes == {0: (2, 4), 1: (2, 4), 2: (2, 10)}
        with pytest.raises(TypeError, match="endless"):
            len(c)
        with pytest.raises(BadOption, match="batches differ in size"):
            c.fake_tensordict()


@pytest.mark.slow
def test_nodes_that_fill_batches_of_different_sizes() -> None:
    with DistributedCollector(
        [made_with] * 2,
        frames_per_batch=[8, 48],
        launcher="mp",
        num_workers_per_collector=[1, 3],
        collector_class=["single", "sync"],
        num_envs=2,
    ) as c:
        shapes: set[Any] = set()
        batches = iter(c)
        while len(shapes) < 2:
            shapes.add(tuple(next(batches).shape))
        assert shapes == {(2, 4), (3, 2, 8)}
        assert_accounted(c)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            MultiSyncCollector,
            {},
            r"frames_per_batch=\[8, 20\]: all workers share a batch",
        ),
        (Collector, {}, "frames_per_batch has an entry for each worker"),
        (
            MultiAsyncCollector,
            {"total_frames": 28},
            "leave total_frames and init_random_frames",
        ),
        (
            MultiAsyncCollector,
            {"init_random_frames": 8},
            "leave total_frames and init_random",
        ),
        (
            MultiAsyncCollector,
            {"frames_per_batch": [8, 9]},
            "worker 1 has 9 frames for 2 env",
        ),
        (
            MultiAsyncCollector,
            {"frames_per_batch": [8]},
            "frames_per_batch has 1 entries for 2",
        ),
        (
            MultiAsyncCollector,
            {"frames_per_batch": []},
            "frames_per_batch is an empty list",
        ),
        (
            MultiAsyncCollector,
            {"frames_per_batch": [8, 0]},
            r"frames_per_batch\[1\]=0: expected",
        ),
    ],
    ids=str,
)
def test_frames_that_do_not_fit(
    cls: Any, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"num_envs": 2, "frames_per_batch": [8, 20], **options}
    with pytest.raises(BadOption, match=message):
        cls([made_with] * 2, None, **given)
