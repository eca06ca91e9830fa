"""Batches into replay buffers: TorchRL's, and plain objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muster import Collector
from muster.collectors.replay_buffer import ReplaySink
from muster.errors import BadOption
from tests.tools import assert_same, counting


class Adds:
    """A buffer with ``add`` only."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def add(self, item: Any) -> None:
        self.items.append(item)


class AddsAndExtends(Adds):
    def extend(self, batch: Any) -> None:
        self.items.append(("extend", batch))


def collector(**options: Any) -> Collector:
    return Collector([counting(2), counting(3)], None, frames_per_batch=10, seed=0, **options)


@pytest.fixture
def batch() -> Any:
    with collector() as c:
        yield c.rollout()


@pytest.fixture(scope="module")
def data() -> Any:
    return pytest.importorskip("torchrl.data")


# --- plain objects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
@pytest.mark.parametrize(("buffer", "options"), [(Adds, {}), (AddsAndExtends, {"extend": False})])
def test_add_gets_transitions_by_environment_and_time(buffer, options, layout):
    buffer = buffer()
    with collector(layout=layout) as c:
        ReplaySink(buffer, **options).write(c.rollout())
        assert c.stats().slots["lent"] == 0, "transitions are copies"
    assert all(item.shape == () for item in buffer.items)
    observations = [[2, 0], [2, 1], [2, 0], [2, 1], [2, 0], [3, 0], [3, 1], [3, 2], [3, 0], [3, 1]]
    assert [item["observation"].tolist() for item in buffer.items] == observations
    assert [item["next", "reward"].item() for item in buffer.items] == [1, 2, 1, 2, 1, 1, 2, 3, 1, 2]


def test_a_list_is_a_buffer(batch):
    buffer: list[Any] = []
    ReplaySink(buffer).write(batch)
    assert [item.shape for item in buffer] == [(5,), (5,)]


@pytest.mark.parametrize(
    ("buffer", "options", "message"),
    [
        (object(), {}, r"replay_buffer is a object: expected .*extend\(batch\) or add\(transition\)"),
        (None, {}, "a NoneType"),
        (Adds, {}, "the class Adds: expected an object"),
        ([], {"extend": False}, "extend_buffer=False needs replay_buffer.add, which list"),
    ],
)
def test_what_is_no_buffer_is_refused_at_once(buffer, options, message):
    with pytest.raises(BadOption, match=message):
        ReplaySink(buffer, **options)


# --- TorchRL's -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize(
    ("storage", "options"),
    [
        ("LazyTensorStorage", {}),
        ("LazyMemmapStorage", {}),
        ("LazyTensorStorage", {"ndim": 2}),
        ("ListStorage", {}),
    ],
)
def test_torchrls_storages(data, tmp_path, make, storage, options):
    if storage == "LazyMemmapStorage":
        options = {**options, "scratch_dir": str(tmp_path)}
    buffer = getattr(data, make)(storage=getattr(data, storage)(100, **options), batch_size=4)
    with collector() as c:
        batch = c.rollout()
        expected, keys = batch.clone(), set(batch.keys(True, True))
        ReplaySink(buffer).write(batch)
        assert set(batch.keys(True, True)) == keys, "the batch has no more columns than before"
        del batch
        assert c.stats().slots["lent"] == 0
        assert len(buffer) == 10
        if not options.get("ndim"):
            stored = buffer[:]
            stored = torch.stack(list(stored)) if isinstance(stored, list) else stored
            assert_same(stored, expected.reshape(-1), ignore=("index",))
        sample = buffer.sample()
        assert sample.shape == (4,)
        follows = sample["next", "observation"][..., 1] == sample["observation"][..., 1] + 1
        assert follows.all()


def test_torchrls_prioritized_buffer(data):
    try:
        buffer = data.TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=data.LazyTensorStorage(100), batch_size=4
        )
    except RuntimeError as error:
        pytest.skip(f"this TorchRL has no prioritized sampler: {error}")
    with Collector(counting(3), None, frames_per_batch=6) as c:
        ReplaySink(buffer).write(c.rollout())
    assert len(buffer) == 6
    assert "index" in buffer.sample().keys()  # noqa: SIM118
