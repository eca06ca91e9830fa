"""What TorchRL 0.15 has added, in the compat layer with any TorchRL: ``replay_write_mode``, pools of
asynchronous environments.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

import torchrl
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, SerialEnv
from torchrl.testing.mocking_classes import CountingEnv

import muster
import muster.compat.torchrl.collectors as ours
import muster.compat.torchrl.collectors.distributed as on_nodes
from muster.errors import BadOption
from tests.tools import assert_same
from tests.waits import wait_until


def ended_after(steps: int) -> CountingEnv:
    """Observes its step; its episodes have ``steps + 1``."""
    return CountingEnv(max_steps=steps)


def one(td: Any) -> Any:
    return td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int8))


def stored(rb: Any) -> list[int]:
    """The observations in a buffer, in order."""
    return [int(step) for step in rb[:]["observation"].flatten()] if len(rb) else []


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(100))


@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_trajectories_are_written_when_they_are_complete(batched: bool) -> None:
    rb = buffer()
    make = partial(ended_after, 5)
    env = SerialEnv(2, make) if batched else make()
    told: dict[str, Any] = {"frames_per_batch": 8 if batched else 4, "total_frames": -1}
    collector = ours.Collector(
        env, one, replay_buffer=rb, replay_write_mode="trajectory", **told
    )
    try:
        assert collector.replay_write_mode == "trajectory"
        written = []
        for _ in range(3):
            assert collector.next() is None
            written.append(stored(rb))
    finally:
        collector.shutdown()
    episode = [0, 1, 2, 3, 4, 5]
    count = 2 if batched else 1
    assert written == [[], episode * count, episode * 2 * count]


def test_rollouts_are_written_at_once() -> None:
    rb = buffer()
    collector = ours.Collector(
        ended_after(5),
        one,
        frames_per_batch=4,
        total_frames=8,
        replay_buffer=rb,
        replay_write_mode="rollout",
    )
    assert list(collector) == [None, None]
    collector.shutdown()
    assert stored(rb) == [0, 1, 2, 3, 4, 5, 0, 1]


# --- progress in frames ---------------------------------------------------------------------------


def progress(collector: Any) -> list[int]:
    """Steps, frames and number of ended episodes, frames of open ones, frames in the buffer."""
    found = collector.stats()
    names = ("stepped_frames", "completed_frames", "completed_trajectories")
    return [found[name] for name in (*names, "pending_frames", "written_frames")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replay_write_mode": "trajectory"}, [[4, 0, 0, 4, 0], [8, 6, 1, 2, 6]]),
        ({"replay_write_mode": "rollout"}, [[4, 0, 0, 0, 4], [8, 6, 1, 0, 8]]),
        ({"extend_buffer": False}, [[4, 0, 0, 0, 4], [8, 6, 1, 0, 8]]),
        (
            {
                "replay_write_mode": "trajectory",
                "set_truncated": True,
                "max_frames_per_traj": 9,
            },
            [[4, 0, 0, 0, 4], [8, 6, 1, 0, 8]],
        ),
        (
            {"replay_write_mode": "trajectory", "reset_at_each_iter": True},
            [[4, 0, 0, 0, 0], [8, 0, 0, 0, 0]],
        ),
    ],
    ids=str,
)
def test_progress_of_what_is_written(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    rb = buffer()
    collector = ours.Collector(
        ended_after(5),
        one,
        frames_per_batch=4,
        total_frames=8,
        replay_buffer=rb,
        **options,
    )
    found = []
    for _ in collector:
        found.append(progress(collector))
        assert found[-1][-1] == len(rb)
    assert found == expected
    collector.shutdown()
    assert progress(collector) == [*expected[-1][:3], 0, expected[-1][-1]]


def test_progress_without_a_buffer_and_after_a_reset() -> None:
    options: dict[str, Any] = {"trajs_per_batch": 2, "traj_format": "cat"}
    collector = ours.Collector(
        ended_after(5), one, frames_per_batch=8, total_frames=-1, **options
    )
    collector.next()
    assert progress(collector) == [16, 12, 2, 4, 0]
    collector.reset()
    assert progress(collector) == [16, 12, 2, 0, 0]
    collector.shutdown()

    rb = buffer()
    env = SerialEnv(2, partial(ended_after, 5))
    options = {"replay_buffer": rb, "replay_write_mode": "trajectory"}
    collector = ours.Collector(env, one, frames_per_batch=8, total_frames=-1, **options)
    collector.next()
    assert progress(collector) == [8, 0, 0, 8, 0]
    collector.reset(torch.tensor([True, False]))
    assert progress(collector) == [8, 0, 0, 4, 0], "the other one goes on"
    collector.next()
    assert progress(collector) == [16, 6, 1, 6, 6]
    assert len(rb) == 6
    collector.shutdown()


def test_nodes_write_complete_trajectories() -> None:
    rb = buffer()
    told: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 24, "launcher": "mp"}
    with on_nodes.DistributedCollector(
        [partial(ended_after, 5)] * 2,
        one,
        sync=True,
        replay_buffer=rb,
        replay_write_mode="trajectory",
        **told,
    ) as collector:
        assert list(collector) == [None] * 3
        assert progress(collector) == [24, 24, 4, 0, 24]
    assert stored(rb) == [0, 1, 2, 3, 4, 5] * 4


@pytest.mark.slow
def test_workers_write_complete_trajectories() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(200), shared=True)
    collector = ours.MultiSyncCollector(
        [partial(ended_after, 5)] * 2,
        one,
        frames_per_batch=8,
        total_frames=24,
        replay_buffer=rb,
        replay_write_mode="trajectory",
    )
    try:
        assert collector.replay_write_mode == "trajectory"
        found = []
        for _ in collector:
            found.append(progress(collector))
        assert found == [[8, 0, 0, 8, 0], [16, 12, 2, 4, 12], [24, 24, 4, 0, 24]]
        assert stored(rb) == [0, 1, 2, 3, 4, 5] * 4
        both = collector.stats("both")
        assert both["worker_1/written_frames"] * 2 == both["written_frames"] == 24
    finally:
        collector.shutdown()


@pytest.mark.parametrize("name", ["Collector", "MultiSyncCollector", "AsyncCollector"])
def test_signatures_have_the_argument_or_any(name: str) -> None:
    parameters = inspect.signature(getattr(ours, name)).parameters
    takes_any = any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
    assert takes_any or "replay_write_mode" in parameters


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replay_write_mode": "trajectory"}, "none was given: pass replay_buffer="),
        ({"replay_write_mode": "all", "replay_buffer": 1}, "'rollout' or 'trajectory'"),
        (
            {"replay_write_mode": "rollout", "replay_buffer": 1, "trajs_per_batch": 2},
            "give one of them",
        ),
    ],
)
@pytest.mark.parametrize("name", ["Collector", "MultiSyncCollector"])
def test_what_contradicts_it_is_refused(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadOption, match=said):
        getattr(ours, name)(
            [partial(ended_after, 5)], one, frames_per_batch=4, **options
        )


def test_a_backend_of_a_context_that_no_collector_has_is_said_to_be_of_the_context() -> (
    None
):
    with torchrl.service_backend("thread"):
        with pytest.raises(
            ValueError, match="enclosing torchrl.service_backend context"
        ) as caught:
            ours.Collector(ended_after(5), one, frames_per_batch=4)
        assert "backend='thread'" in str(caught.value)
    with pytest.raises(ValueError, match=r"backend='thread'.*'submitit'\]\.$"):
        ours.Collector(ended_after(5), one, backend="thread", frames_per_batch=4)


# --- AsyncEnvPool ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls", [ours.Collector, muster.Collector], ids=["compat", "native"]
)
def test_a_pool_of_asynchronous_environments_is_a_batch_of_them(cls: Any) -> None:
    """TorchRL's own ``Collector`` does not take one."""
    batches = []
    for made in (SerialEnv, partial(AsyncEnvPool, backend="threading")):
        envs = [partial(ended_after, 2), partial(ended_after, 4)]
        env = made(2, envs) if made is SerialEnv else made(envs)
        collector = cls(env, one, frames_per_batch=16, total_frames=32)
        batches.append(list(collector))
        collector.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        env.reset()
    serial, pooled = batches
    assert len(serial) == len(pooled) == 2
    for expected, batch in zip(serial, pooled, strict=True):
        names = {*batch.keys(True, True)} & {*expected.keys(True, True)}
        assert {"observation", ("next", "done"), ("collector", "traj_ids")} <= names
        assert_same(batch.select(*names), expected.select(*names))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["queue", "shm"])
def test_a_pool_of_processes(exchange: Any) -> None:
    envs = [partial(ended_after, 2), partial(ended_after, 4)]
    pool = AsyncEnvPool(envs, backend="multiprocessing", exchange=exchange)
    collector = ours.Collector(pool, one, frames_per_batch=12, total_frames=12)
    (batch,) = collector
    assert pool.resolved_exchange == exchange
    collector.shutdown()
    wait_until(lambda: not any(process.is_alive() for process in pool.threads))
    rows = [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    assert batch["observation"].squeeze(-1).tolist() == rows
    after = [[1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 1]]
    assert batch["next", "observation"].squeeze(-1).tolist() == after
    ended = batch["next", "done"].squeeze(-1).nonzero().tolist()
    assert ended == [[0, 2], [0, 5], [1, 4]]
    assert not batch["done"].any()
