"""Which batches go into which of TorchRL's buffers; the others are refused before anything is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from muster import Collector, MultiAsyncCollector
from muster.collectors.replay_buffer import ReplaySink
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.tools import assert_accounted, counting, lengths

data = pytest.importorskip("torchrl.data")
ROOM = 200

STORAGES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: data.LazyTensorStorage(ROOM),
    "tensors 2": lambda: data.LazyTensorStorage(ROOM, ndim=2),
    "tensors 3": lambda: data.LazyTensorStorage(ROOM, ndim=3),
    "memmap": lambda: data.LazyMemmapStorage(ROOM),
    "memmap 2": lambda: data.LazyMemmapStorage(ROOM, ndim=2),
    "list": lambda: data.ListStorage(ROOM),
    "stack": lambda: data.LazyStackStorage(ROOM),
}
PER_ITEM = ("list", "stack")  # items may differ in shape
OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"create": counting(3), "num_envs": None},
    "environments": {},
    "groups": {"create": [counting(3), counting(3)]},
    "compact": {"compact_obs": True},
    "uneven": {"frames_per_batch": 9, "total_frames": 45},
    "cat": {"trajs_per_batch": 2},
    "pad": {"trajs_per_batch": 2, "traj_format": "pad"},
    "split": {"split_trajs": True},
}
DIMS = {"one": 1, "groups": 3, "cat": 1}  # of a batch, 2 otherwise
PADDED = ("pad", "split")
PAIRS = [(storage, of) for storage in STORAGES for of in OPTIONS]


def buffer_of(storage: str) -> Any:
    return data.ReplayBuffer(
        storage=STORAGES[storage](), batch_size=4, collate_fn=lambda items: items
    )


def collector_of(name: str, buffer: Any, **more: Any) -> Collector:
    options = {
        "num_envs": 2,
        "frames_per_batch": 8,
        "total_frames": 40,
        "seed": 0,
        **OPTIONS[name],
        **more,
    }
    return Collector(
        options.pop("create", lengths(2, 5)), None, replay_buffer=buffer, **options
    )


def rows_of(buffer: Any) -> list[Any]:
    """All items of a one-dimensional buffer, and their rows, in the order of writing."""
    items = buffer[list(range(len(buffer)))] if len(buffer) else []
    return [
        row
        for item in items
        for row in (item.reshape(-1).unbind(0) if item.ndim else [item])
    ]


@pytest.mark.filterwarnings("ignore:.*cannot be shared")
@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
@pytest.mark.parametrize(
    ("storage", "name"), PAIRS, ids=[f"{storage}, {name}" for storage, name in PAIRS]
)
def test_a_batch_goes_into_a_buffer_or_is_refused_before_anything_is_written(
    storage, name, layout
):
    buffer, dims = buffer_of(storage), int(storage[-1]) if storage[-1].isdigit() else 1
    too_flat = dims > DIMS.get(name, 2)
    if too_flat and name in ("cat", *PADDED):  # the options say so
        with pytest.raises(
            BadOption,
            match=rf"batches of {dims} dimensions \(ndim={dims} .* use ndim=1",
        ):
            collector_of(name, buffer, layout=layout)
        assert len(buffer) == 0
        return
    if too_flat:
        with (
            collector_of(name, buffer, layout=layout) as c,
            pytest.raises(
                BadOption,
                match=rf"stores batches \[.*, T\] \(ndim={dims} .*, and this one is .* Use ndim=",
            ),
        ):
            c.next()
        assert len(buffer) == buffer.write_count == 0
        return
    # Padded lines of other lengths: the longest of a batch for an item each, their number for an
    # item per cell.
    differs = (dims == 1 or name == "split") and storage not in PER_ITEM
    with collector_of(name, buffer, layout=layout) as c:
        if name not in PADDED or not differs:
            list(c)
            assert c.stats().in_flight <= 20
            assert_accounted(c)
            assert buffer.write_count > 0
            return
        written = _until_refused(c, buffer)
        assert_accounted(c)
    assert len(buffer) == written
    assert (
        buffer.write_count * (1 if dims == 1 else len(buffer) // buffer.write_count)
        == written
    )


def _until_refused(collector: Collector, buffer: Any) -> int:
    """Collect until a batch is refused, twice. Return the number of items before."""
    for _ in range(20):
        items = len(buffer)
        try:
            collector.next()
        except BadOption:
            with pytest.raises(
                BadOption,
                match=r"allocated .*ListStorage or a LazyStackStorage.*pad all",
            ) as caught:
                collector.next()
            assert caught.value.__cause__ is None
            return items
    raise AssertionError("all batches had one shape")


def test_what_a_buffer_refuses_is_in_the_state_and_goes_into_another_buffer():
    with collector_of("split", buffer_of("list"), total_frames=-1) as c:
        for _ in range(8):
            c.next()
        expected = [
            (row["observation"].tolist(), bool(row["collector", "mask"]))
            for row in rows_of(c.buffer)
        ]
    small, other = buffer_of("tensors"), buffer_of("list")
    with collector_of("split", small, total_frames=-1) as c:
        _until_refused(c, small)
        state = c.state_dict()
    with collector_of("split", other, total_frames=-1) as c:
        assert c.load_state_dict(state).exact
        for _ in range(3):
            c.next()
        found = [
            (row["observation"].tolist(), bool(row["collector", "mask"]))
            for row in rows_of(other)
        ]
    before = sum(len(item) for item in small[:])
    assert len(found) > before > 0
    assert found == expected[before : before + len(found)]


def test_an_episode_that_collect_asks_for_is_refused_by_a_buffer_for_environments():
    buffer = buffer_of("tensors 2")
    with collector_of("environments", buffer, total_frames=-1) as c:
        c.collect(n_step=6)
        assert len(buffer) == 6
        with pytest.raises(
            BadOption,
            match=r"this one is \[\d\]\. Use ndim=1, or .*neither .* nor collect\(n_episode",
        ):
            c.collect(n_episode=1)
        assert len(buffer) == 6
        assert_accounted(c)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("CartPole-v1", {}, "batches of one environment have one: pass num_envs=1"),
        (
            "CartPole-v1",
            {"trajs_per_batch": 2, "num_envs": 2},
            "follow one another in one: use ndim=1",
        ),
        (
            counting(3),
            {"trajs_per_batch": 2, "traj_format": "cat"},
            "follow one another in one: use ndim=1",
        ),
    ],
)
def test_options_that_contradict_a_storage_are_refused(env, options, message):
    with pytest.raises(
        BadOption,
        match=rf"replay_buffer stores batches of 2 dimensions \(ndim=2 .*{message}",
    ):
        Collector(
            env,
            None,
            frames_per_batch=8,
            replay_buffer=buffer_of("tensors 2"),
            **options,
        )


def test_a_postproc_may_give_what_the_options_do_not():
    buffer = buffer_of("tensors 2")
    options: Any = {
        "num_envs": None,
        "create": "CartPole-v1",
        "postproc": lambda batch: batch.unsqueeze(0),
    }
    with collector_of("environments", buffer, **options) as c:
        list(c)
    assert buffer.storage.shape == (40, 1)


def test_groups_of_other_sizes_are_refused_by_a_buffer_for_environments():
    envs = [lambda: CountingEnv(3), lambda: CountingEnv(3)]
    buffer = buffer_of("tensors 2")
    kwargs: Any = {"backend": "threads", "frames_per_batch": 8, "replay_buffer": buffer}
    with MultiAsyncCollector(envs, None, num_envs=2, **kwargs) as c:
        c.next()
    assert buffer.storage.shape == (4, 2)
    kwargs["frames_per_batch"] = 9
    with (
        Collector(
            envs[0], None, num_envs=3, frames_per_batch=9, replay_buffer=buffer
        ) as c,
        pytest.raises(
            BadOption,
            match=r"for batches \[2, any\], and this one is \[3, 3\]\. Use a buffer for each",
        ),
    ):
        c.next()
    assert len(buffer) == 8


def test_the_shape_of_three_dimensions_is_told_in_the_order_of_batches():
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(ROOM, ndim=3), batch_size=4
    )
    sink = ReplaySink(buffer)
    for size in ((2, 3, 5), (2, 3, 4)):
        sink.write(TensorDict({"a": torch.ones(size)}, size))
    for size in ((3, 2, 5), (2, 4, 5)):
        with pytest.raises(
            BadOption, match=r"for batches \[2, 3, any\], and this one is"
        ):
            sink.write(TensorDict({"a": torch.ones(size)}, size))
    assert len(buffer) == 2 * 3 * 9


def test_a_buffer_that_grows_along_environments_needs_one_length():
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(ROOM, ndim=2), batch_size=4, dim_extend=0
    )
    sink = ReplaySink(buffer)
    sink.write(TensorDict({"a": torch.ones(2, 5)}, [2, 5]))
    sink.write(TensorDict({"a": torch.ones(3, 5)}, [3, 5]))
    with pytest.raises(
        BadOption, match=r"for batches \[any, 5\], and this one is \[2, 4\]"
    ):
        sink.write(TensorDict({"a": torch.ones(2, 4)}, [2, 4]))
    with pytest.raises(
        BadOption, match=r"\[environments, T\] \(ndim=2 .*, and this one is \[5\]"
    ):
        sink.write(TensorDict({"a": torch.ones(5)}, [5]))


def test_another_kind_of_environment_is_refused_by_name_of_the_column():
    buffer = buffer_of("tensors")
    with collector_of("environments", buffer) as c:
        list(c)
    with (
        Collector(
            "CartPole-v1", None, num_envs=2, frames_per_batch=8, replay_buffer=buffer
        ) as c,
        pytest.raises(
            BadOption,
            match=r"'observation' with shape \[2\] per item, and in this batch it has \[4\]",
        ),
    ):
        c.next()
    assert len(buffer) == buffer.write_count == 40


class Elsewhere:
    """Like a handle of a buffer in another process: nothing of the storage can be looked at."""

    dim_extend = property(lambda self: self._buffer.dim_extend)

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def extend(self, batch: Any) -> Any:
        return self._buffer.extend(batch)

    def __len__(self) -> int:
        return len(self._buffer)


@pytest.fixture(params=["elsewhere", "transformed"])
def uncertain(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Makes a buffer of which it is not known what it does with a batch of another shape."""

    def make(storage: str) -> Any:
        buffer = buffer_of(storage)
        if request.param == "elsewhere":
            return Elsewhere(buffer)
        buffer.append_transform(
            pytest.importorskip("torchrl.envs").RewardScaling(0.0, 1.0)
        )
        return buffer

    return make


def test_errors_of_buffers_that_cannot_be_looked_at_are_explained(uncertain):
    flat = uncertain("tensors 2")
    with (
        collector_of("one", flat) as c,
        pytest.raises(BadOption, match="stores batches .environments, T.") as caught,
    ):
        c.next()
    assert isinstance(caught.value.__cause__, ValueError), "TorchRL's own error"
    with (
        collector_of("split", uncertain("tensors")) as c,
        pytest.raises(BadOption, match="allocated its items"),
    ):
        list(c)


def test_lists_that_cannot_be_looked_at_take_all_shapes(uncertain):
    buffer = uncertain("list")
    with collector_of("split", buffer) as c:
        list(c)
    assert len(buffer) > 10


@pytest.mark.parametrize("first", ["batches", "steps"])
@pytest.mark.parametrize("storage", ["tensors", "memmap", "tensors 2", "memmap 2"])
def test_valid_says_in_all_items_or_in_none_which_are_transitions(storage, first):
    buffer = buffer_of(storage)
    calls = {"batches": lambda c: c.next(), "steps": lambda c: c.collect(n_step=7)}
    other = next(name for name in calls if name != first)
    with collector_of("environments", buffer, total_frames=-1) as c:
        for name in (first, other, first):
            calls[name](c)
        written = c.stats().written
    keys = buffer.storage._storage.keys(True, True)
    if storage.endswith("2"):
        items = buffer[:]
        assert items["collector", "valid"].sum() == written
        assert (items["collector", "traj_ids"][items["collector", "valid"]] >= 0).all()
    else:
        assert ("collector", "valid") not in keys
        assert len(buffer) == written


def test_a_batch_without_a_column_of_earlier_ones_is_refused():
    buffer = buffer_of("tensors")
    sink = ReplaySink(buffer)
    both = TensorDict({"a": torch.ones(4), "b": torch.ones(4)}, [4])
    sink.write(both)
    with pytest.raises(BadOption, match=r"has the columns 'b' of earlier batches"):
        sink.write(both.exclude("b"))
    assert len(buffer) == buffer.write_count == 4
    sink.write(both.clone().set("c", torch.ones(4)))
    assert len(buffer) == 8
    items = ReplaySink(buffer_of("list"))
    items.write(both)
    items.write(both.exclude("b"))


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("first", ["time steps", "transitions"])
def test_time_steps_and_transitions_are_not_added_to_one_storage(envs, first):
    buffer = buffer_of("tensors")
    options: dict[str, Any] = {
        "num_envs": envs,
        "frames_per_batch": 3 * envs,
        "total_frames": -1,
        "extend_buffer": False,
        "create": counting(3),
    }
    calls = {
        "time steps": lambda c: c.next(),
        "transitions": lambda c: c.collect(n_step=2 * envs),
    }
    other = next(name for name in calls if name != first)
    with collector_of("environments", buffer, **options) as c:
        calls[first](c)
        count = len(buffer)
        with pytest.raises(BadOption, match="has allocated its items for time steps"):
            calls[other](c)
        assert len(buffer) == buffer.write_count == count
        assert_accounted(c)
