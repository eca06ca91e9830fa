"""A replay buffer in a Ray actor, with a real one of TorchRL's in it."""

from __future__ import annotations

import os
import signal

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from muster.collectors.replay_buffer import ReplaySink
from muster.errors import BadOption, CollectorTimeout, WorkerDied
from tests.fakes.ray_cluster import cluster, leave, needs_ray, ray_cluster  # noqa: F401 (a fixture)

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
torchrl_data = pytest.importorskip("torchrl.data")


def batch(start=0):
    rows = torch.arange(start, start + 100)
    return TensorDict(
        {
            "obs": rows[:, None].expand(100, 3000).float(),
            ("next", "done"): rows % 7 == 0,
        },
        [100],
    )


class Listed:
    """A buffer that keeps what it gets, and can be asked about it."""

    size_limit = 3

    def __init__(self):
        self.rows = []

    def add(self, row):
        if len(self.rows) == self.size_limit:
            raise IndexError("full")
        self.rows.append(row)

    def __len__(self):
        return len(self.rows)

    def pid(self):
        return os.getpid()


@pytest.fixture
def made():
    """Make a RayBuffer, which is closed in the end."""
    handles = []

    def make(*args, **options):
        from muster.cluster.ray_buffer import RayBuffer

        handles.append(RayBuffer(*args, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close()


def torchrl_buffer():
    return torchrl_data.TensorDictReplayBuffer(
        storage=torchrl_data.LazyTensorStorage(1000), batch_size=32
    )


class TestRayBuffer:
    def test_holds_what_is_written(self, made):
        buffer = made(torchrl_buffer)
        assert len(buffer) == 0
        assert buffer.extend(batch()).tolist() == list(range(100))
        buffer.extend(batch(100))
        assert len(buffer) == buffer.write_count == 200
        sample = buffer.sample()
        assert sample.batch_size == (32,)
        number = sample["obs"][:, 0]
        assert (sample["obs"] == number[:, None]).all()
        assert (sample["next", "done"] == (number % 7 == 0)).all()
        sample["obs"].zero_()  # it is ours

    def test_can_be_written_through_pickled_handles_everywhere(self, made):
        import ray

        buffer = made(torchrl_buffer)
        cloudpickle.loads(cloudpickle.dumps(buffer)).extend(batch())

        @ray.remote(num_cpus=1)
        def write(data):
            handle = cloudpickle.loads(data)
            handle.extend(batch(100))
            return len(handle)

        assert ray.get(write.remote(cloudpickle.dumps(buffer)), timeout=60) == 200

    def test_takes_an_object_and_passes_on_attributes_and_errors(self, made):
        buffer = made(Listed())
        assert buffer.size_limit == 3
        for n in range(3):
            buffer.add(n)
        with pytest.raises(IndexError, match="full"):
            buffer.add(3)
        assert buffer.rows == [0, 1, 2]
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            buffer.nothing  # noqa: B018
        with pytest.raises(AttributeError, match="_private"):
            buffer._private  # noqa: B018

    def test_refuses_a_batch_of_another_shape_before_it_is_counted(self, made):
        def grid():
            return torchrl_data.ReplayBuffer(
                storage=torchrl_data.LazyTensorStorage(100, ndim=2), batch_size=4
            )

        def of(*size):
            return TensorDict({"obs": torch.ones(size)}, size)

        buffer = made(grid)
        buffer.extend(of(2, 5))
        for size, message in (
            ((5,), "this one is .5.. Use ndim=1"),
            ((3, 5), r"for batches \[2, any\]"),
        ):
            with pytest.raises(BadOption, match=message):
                buffer.extend(of(*size))
        with pytest.raises(BadOption, match="this one is .5."):
            ReplaySink(buffer).write(of(5))
        assert len(buffer) == 10
        buffer.extend(of(2, 1))
        assert len(buffer) == buffer.write_count * 2 == 12

    def test_death_is_told(self, made):
        buffer = made(Listed)
        os.kill(buffer.pid(), signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match="replay buffer .* cannot be reached: The actor died"
        ):
            len(buffer)

    @pytest.mark.parametrize("joins_again", [False, True])
    def test_ray_that_the_user_has_shut_down_is_not_started_again(
        self, made, joins_again
    ):
        import ray

        buffer = made(Listed)
        assert len(buffer) == 0
        leave()
        if joins_again:  # another session of Ray, which does not know the actor
            cluster()
        with pytest.raises(
            WorkerDied, match="cannot be reached: Ray was shut down in this process"
        ):
            len(buffer)
        buffer.close()
        assert ray.is_initialized() == joins_again

    def test_closing_ends_it(self, made):
        buffer = made(Listed)
        buffer.close()
        buffer.close()
        with pytest.raises(WorkerDied, match="was closed"):
            len(buffer)

    def test_what_cannot_be_made(self, made):
        with pytest.raises(WorkerDied, match="ZeroDivisionError: division by zero"):
            made(lambda: 1 / 0)
        with pytest.raises(WorkerDied, match="made a int: expected an object with"):
            made(lambda: 3)
        with pytest.raises(CollectorTimeout, match="within 1 s"):
            made(Listed, timeout_s=1.0, remote_config={"num_cpus": 1000})
        with pytest.raises(BadOption, match="num_cpu "):
            made(Listed, remote_config={"num_cpu": 1})

    def test_torchrls_own_gives_a_client_for_nodes(self):
        from functools import partial

        from muster.cluster.ray_buffer import for_nodes

        storage = partial(torchrl_data.LazyTensorStorage, 1000)
        buffer = torchrl_data.RayReplayBuffer(
            storage=storage, batch_size=32, remote_config={"num_cpus": 0}
        )
        try:
            cloudpickle.loads(cloudpickle.dumps(for_nodes(buffer))).extend(batch())
            assert len(buffer) == 100
        finally:
            buffer.close()


def test_the_benchmark_of_the_object_store_has_all_pieces():
    from benchmarks.ray_store import PLACES, measure

    times = measure(rounds=2, frames=16)
    assert tuple(times) == PLACES
    for pieces in times.values():
        assert {len(each) for each in pieces.values()} == {2}
        for parts in zip(
            *(pieces[name] for name in ("put", "transfer", "get", "copy", "store")),
            strict=True,
        ):
            assert sum(parts[:-1]) == pytest.approx(parts[-1])
