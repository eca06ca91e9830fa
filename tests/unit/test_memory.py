"""Slots, their views, and who owns the memory when."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import SlotsExhausted
from muster.memory.slots import ALIGNMENT, KEPT_FREE, Layout, Slot, SlotRing, SlotState
from muster.memory.specs import Column
from muster.memory.views import BatchView
from muster.testing import CountingEnv, SpaceEnv
from tests.tools import assert_same, column, counting, same
from tests.waits import without_gc

OBS = Column(("observation",), (3,), np.dtype(np.float32), carry=True)
FLAG = Column(("next", "done"), (), np.dtype(bool), trailing=True)
PIXELS = Column(("pixels",), (5, 7), np.dtype(np.uint8))
WORDS = Column(("words",), (), np.dtype(object))
COLUMNS = (OBS, FLAG, PIXELS)


def layout(**changes: Any) -> Layout:
    return Layout(**{"T": 4, "B": 2, "columns": COLUMNS, **changes})


def ring(limit: int = 1 << 20, **changes: Any) -> SlotRing:
    return SlotRing(layout(**changes), limit_bytes=limit)


def counts(slots: SlotRing) -> tuple[int, int, int]:
    return tuple(
        slots.count(state)
        for state in (SlotState.FREE, SlotState.FILLING, SlotState.LENT)
    )


# --- layouts and lanes ----------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from("?bBhHiIlLefd"),
            st.lists(st.integers(0, 3), max_size=3),
            st.booleans(),
        ),
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_columns_of_any_kind_are_aligned_disjoint_and_zero(kinds, T, B, lanes):
    columns = tuple(
        Column((str(i),), tuple(s), np.dtype(d), carry=c)
        for i, (d, s, c) in enumerate(kinds)
    )
    slot = Slot(Layout(T, B, columns, lanes))
    arrays = [array for lane in slot.lanes for array in lane.arrays.values()]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays if array.size)
    assert not any(array.any() for array in arrays)
    cells = [array.reshape(-1).view(np.uint8) for array in arrays]
    for n, part in enumerate(cells):
        part[...] = n + 1
    assert all((part == n + 1).all() for n, part in enumerate(cells))


def test_lane_tensors_and_rows_are_the_same_memory():
    lane = Slot(layout()).lanes[0]
    lane.rows(("observation",))[1][0, 2] = 7.0
    assert lane.arrays["observation",][1, 0, 2] == 7.0
    lane.np_rows(("observation",))[1][1, 0] = 8.0
    assert lane.tensors["observation",][1, 1, 0] == 8.0


def test_unbatched_rows_have_no_environment_dimension_and_numpy_rows_are_never_scalars():
    lane = Slot(layout(B=1, batch_shape=())).lanes[0]
    assert lane.rows(("observation",))[0].shape == (3,)
    assert lane.rows(("next", "done"))[0].shape == ()
    assert lane.np_rows(("observation",))[0].shape == (3,)
    lane.np_rows(("next", "done"))[2][0] = True
    assert lane.arrays["next", "done"][:, 0].tolist() == [False, False, True, False]


def test_long_lanes_make_their_row_views_when_used(monkeypatch):
    monkeypatch.setattr("muster.memory.slots.MAX_ROW_VIEWS", 2)
    lane = Slot(layout()).lanes[0]
    rows = lane.rows(("observation",))
    assert torch.is_tensor(rows)
    rows[3].fill_(1.0)
    lane.np_rows(("observation",))[4][...] = 2.0
    assert lane.arrays["observation",][:, 0, 0].tolist() == [0, 0, 0, 1, 2]


# --- slot states ----------------------------------------------------------------------------------


def test_a_slot_goes_from_filling_to_lent_to_free():
    slots = ring()
    assert counts(slots) == (0, 0, 0)
    slot = slots.take()
    assert counts(slots) == (0, 1, 0)
    memory = slots.lend(slot)
    assert counts(slots) == (0, 0, 1)
    del memory
    assert counts(slots) == (1, 0, 0)
    assert slots.take() is slot


def test_a_slot_given_back_unlent_is_free_again_and_begins_at_row_zero():
    slots = ring()
    slot = slots.take()
    slot.lanes[0].done_steps = 3
    slots.give_back(slot)
    assert counts(slots) == (1, 0, 0)
    assert slots.take().lanes[0].done_steps == 0


HELD = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[..., :1],
    "array": lambda tensor: tensor.numpy(),
    "detached": lambda tensor: tensor.detach(),
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("key", [c.key for c in COLUMNS])
def test_a_small_slot_is_lent_while_any_part_of_its_batch_is_used(key, how):
    slots, view = ring(), BatchView(layout(), stacked=False)
    assert slots.lends_parts

    def batch(value: int) -> Any:
        slot = slots.take()
        slot.block[...] = value
        view.arrange(slot)
        return view.tensordict(slots.lend_parts(slot), slot)

    held = [HELD[how](batch(value).get(key)) for value in range(5)]
    assert counts(slots) == (0, 0, 5)
    for value in range(5, 10):
        batch(value)
    assert counts(slots) == (1, 0, 5)
    for value, part in enumerate(held):
        assert set(np.asarray(part).tobytes()) == {value}
    del held[1:], part
    taken = [slots.take() for _ in range(3)]
    assert len({id(slot) for slot in taken}) == 3
    assert slots.count(SlotState.LENT) == 1
    held.clear()
    assert slots.count(SlotState.LENT) == 0


def python_calls(action: Any) -> list[str]:
    """Return the names of the functions in Python that an action calls."""
    calls = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    action()
    sys.setprofile(None)
    return calls


@pytest.mark.parametrize("parts", [False, True])
def test_no_code_runs_when_a_batch_goes_away(parts):
    """A Ctrl-C that comes in the call that drops it, such as a backward pass, would be lost there."""
    slots, view = ring(), BatchView(layout(), stacked=False)
    slot = slots.take()
    if parts:
        view.arrange(slot)
    memory = slots.lend_parts(slot) if parts else slots.lend(slot)
    batch = [view.tensordict(memory, slot)]
    del memory
    assert counts(slots) == (0, 0, 1)
    column = [batch[0]["observation"]]
    assert not python_calls(batch.clear)
    assert counts(slots) == (0, 0, 1)
    assert not python_calls(column.clear)
    assert counts(slots) == (1, 0, 0)


@pytest.mark.parametrize("n", [5, 40, 200])
def test_slots_that_are_used_stay_lent_whoever_looks(n):
    slots = ring()
    held = {i: slots.lend(slots.take()) for i in range(n)}
    for i, memory in held.items():
        memory.fill_(i)
    del memory
    for i in range(0, n, 3):
        del held[i]
    taken = [slots.take() for _ in range(n - len(held))]
    assert slots.count(SlotState.LENT) == len(held)
    assert len({id(slot) for slot in taken}) == len(taken)
    for slot in taken:
        slot.block[...] = 255
    assert all((memory == i).all() for i, memory in held.items())


@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_memory_of_batches_that_were_held_is_given_back(size):
    """At once, but for that of the newest ones; and with the next batch."""
    slots = SlotRing(
        layout(columns=(Column(("x",), (size,), np.dtype(np.uint8)),)),
        limit_bytes=1 << 40,
    )
    held = [slots.lend(slots.take()) for _ in range(100)]
    assert len(slots.slots) == 100
    held.clear()
    assert len(slots.slots) * size <= max(64 << 10, 8 << 24)
    filling = slots.take()
    assert len(slots.slots) == KEPT_FREE
    assert filling in slots.slots


def test_parts_that_are_held_count():
    slots, view = ring(100 * layout().nbytes), BatchView(layout(), stacked=False)
    held = []
    with pytest.raises(SlotsExhausted, match="100 batches"):
        for _ in range(200):
            slot = slots.take()
            view.arrange(slot)
            held.append(view.tensordict(slots.lend_parts(slot), slot)["observation"])
    assert counts(slots) == (0, 0, 100)
    del held[::2]
    assert counts(slots) == (KEPT_FREE, 0, 50)


def test_a_slot_lives_as_long_as_its_batch():
    """Its end frees memory that is shared with workers."""
    slots = ring()
    memory = slots.lend(slots.take())
    (slot,) = (weakref.ref(slot) for slot in slots.slots)
    part = memory[3:7].view(2, 2).numpy()
    del slots, memory
    assert slot() is not None
    del part
    assert slot() is None


def test_several_threads_may_count_slots_of_which_parts_are_used():
    slots, view = ring(), BatchView(layout(), stacked=False)
    slot = slots.take()
    view.arrange(slot)
    held = view.tensordict(slots.lend_parts(slot), slot)["observation"]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = [
                threads.submit(
                    lambda: {slots.count(SlotState.LENT) for _ in range(3000)}
                )
                for _ in range(3)
            ]
    finally:
        sys.setswitchinterval(interval)
    assert [each.result() for each in found] == [{1}] * 3
    del held
    assert counts(slots) == (1, 0, 0)


def test_parts_that_the_user_drops_late_do_not_exhaust_the_ring():
    slots, view = ring(2 * layout().nbytes), BatchView(layout(), stacked=False)
    used = []
    for _ in range(2):
        slot = slots.take()
        view.arrange(slot)
        used.append(view.tensordict(slots.lend_parts(slot), slot)["observation"])
    with pytest.raises(SlotsExhausted, match="2 batches"):
        slots.take()
    used.pop(0)
    assert slots.take().state is SlotState.FILLING


def test_a_full_ring_says_how_to_go_on_and_goes_on():
    size = layout().nbytes
    slots = ring(2 * size)
    lent = [slots.lend(slots.take()) for _ in range(2)]
    with pytest.raises(
        SlotsExhausted,
        match=rf"2 batches of {size:,} bytes.*slot_memory_limit={2 * size:,}",
    ):
        slots.take()
    assert issubclass(SlotsExhausted, MemoryError)
    lent.pop()
    assert slots.take().state is SlotState.FILLING


def test_a_batch_in_a_reference_cycle_does_not_exhaust_the_ring():
    slots = ring(layout().nbytes)
    cycle: dict[str, Any] = {"memory": slots.lend(slots.take())}
    cycle["self"] = cycle
    with without_gc():
        del cycle
        assert counts(slots) == (0, 0, 1)
        assert slots.take().state is SlotState.FILLING


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_pinned_memory_without_cuda_is_refused():
    with pytest.raises(RuntimeError, match="pin"):
        SlotRing(layout(), limit_bytes=1 << 20, memory="pinned").take()


# --- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "B", "batched", "stacked", "order", "shape", "names"),
    [
        (1, 1, False, False, "batch_major", (4,), ["time"]),
        (1, 2, True, False, "batch_major", (2, 4), [None, "time"]),
        (3, 2, True, True, "batch_major", (3, 2, 4), [None, None, "time"]),
        (3, 1, False, True, "batch_major", (3, 4), [None, "time"]),
        (1, 1, False, False, "time_major", (4,), ["time"]),
        (1, 2, True, False, "time_major", (4, 2), ["time", None]),
        (3, 2, True, True, "time_major", (4, 3, 2), ["time", None, None]),
        (1, 2, True, True, "batch_major", (1, 2, 4), [None, None, "time"]),
    ],
)
def test_a_batch_is_a_view_in_every_arrangement(
    lanes, B, batched, stacked, order, shape, names
):
    arranged = layout(
        lanes=lanes, B=B, batch_shape=None if batched else (), columns=(*COLUMNS, WORDS)
    )
    slots = SlotRing(arranged, limit_bytes=1 << 20)
    slot = slots.take()
    for w, lane in enumerate(slot.lanes):
        for t in range(4):
            for b in range(B):
                lane.arrays["observation",][t, b] = [w, b, t]
                lane.arrays["words",][t, b] = f"{w}{b}{t}"
    batch = BatchView(arranged, stacked=stacked, order=order).tensordict(
        slots.lend(slot), slot
    )

    assert tuple(batch.batch_size) == shape
    assert batch.names == names
    assert batch.device is None
    assert batch["observation"].shape == (*shape, 3)
    assert batch["next", "done"].shape == (*shape, 1)
    time = names.index("time")
    words = np.array(list(batch["words"]))
    for index in np.ndindex(*shape):
        rest = [n for d, n in enumerate(index) if d != time]
        w = rest[0] if stacked else 0
        b = rest[-1] if batched else 0
        assert batch["observation"][index].tolist() == [w, b, index[time]]
        assert words[index] == f"{w}{b}{index[time]}"
    assert batch["observation"].untyped_storage().data_ptr() == slot.block.ctypes.data
    batch["pixels"].fill_(9)
    assert all((lane.arrays["pixels",] == 9).all() for lane in slot.lanes)


# --- batches of a collector -----------------------------------------------------------------------


def test_a_column_is_pickled_without_the_others():
    with Collector(CountingEnv, None, num_envs=2, frames_per_batch=2000) as collector:
        batch = collector.rollout()
        assert (
            batch["next", "done"].untyped_storage().nbytes()
            == batch["next", "done"].numel()
            == 2000
        )


SAVED = {
    "one environment": (Collector, CountingEnv, {"num_envs": None}),
    "one group": (Collector, CountingEnv, {}),
    "one group, time first": (Collector, CountingEnv, {"layout": "time_major"}),
    "several groups": (Collector, [CountingEnv] * 4, {}),
    "several groups, time first": (
        Collector,
        [CountingEnv] * 4,
        {"layout": "time_major"},
    ),
    "whole episodes": (Collector, [CountingEnv] * 4, {"trajs_per_batch": 32}),
    "threads": (
        MultiSyncCollector,
        [CountingEnv] * 4,
        {"backend": "threads", "num_workers": 2},
    ),
    "each thread": (MultiAsyncCollector, [CountingEnv] * 2, {"backend": "threads"}),
}
ONE_GROUP = [name for name in SAVED if name.startswith(("one", "each"))]
ENTRY_BYTES = 900  # of a tensor in a file of torch.save, besides its numbers


def numbers(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in batch.values(True, True))


def storages(batch: Any) -> int:
    """Bytes of all storages."""
    found = [leaf.untyped_storage() for leaf in batch.values(True, True)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def saved(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


def collected(name: str) -> Any:
    cls, envs, options = SAVED[name]
    with cls(
        envs, None, frames_per_batch=2048, **{"num_envs": 8, **options}
    ) as collector:
        return collector.next()


@pytest.mark.parametrize("name", SAVED)
def test_a_copy_of_a_batch_is_saved_with_its_numbers_and_nothing_else(name, tmp_path):
    batch = collected(name)
    size, entries = numbers(batch), ENTRY_BYTES * len(list(batch.keys(True, True)))
    assert storages(batch.clone()) == storages(copy.deepcopy(batch)) == size
    assert size < saved(batch.clone()) < size + entries
    assert size < len(pickle.dumps(batch.clone())) < size + entries
    part, column = batch[..., :3], batch["next", "observation"]
    assert saved(part.clone()) < numbers(part) + entries
    assert (
        saved(column.clone()) < column.numel() * column.element_size() + 2 * ENTRY_BYTES
    )
    batch.memmap(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.memmap")) == size
    assert_same(pickle.loads(pickle.dumps(batch.clone())), batch)


@pytest.mark.parametrize("name", ONE_GROUP)
def test_a_batch_of_one_group_is_saved_without_a_copy(name):
    batch = collected(name)
    size, entries = numbers(batch), ENTRY_BYTES * len(list(batch.keys(True, True)))
    assert storages(batch) == size
    assert size < saved(batch) < size + entries
    assert size < len(pickle.dumps(batch)) < size + entries
    ForkingPickler.dumps(batch)  # moves it into shared memory, as a queue does
    assert storages(batch) == size


HOLDS = {
    "batch": lambda batch: batch,
    "row": lambda batch: batch[0],
    "slice": lambda batch: batch[:, 1:3],
    "transpose": lambda batch: batch.transpose(0, 1),
    "leaf": lambda batch: batch["next", "observation"],
    "strided": lambda batch: batch["observation"][:, ::2, 1],
    "numpy": lambda batch: batch["observation"].numpy()[..., 0],
    "detached": lambda batch: batch["next", "reward"].detach().squeeze(-1).T,
    "dlpack": lambda batch: torch.from_dlpack(batch["observation"]),
    "unbound": lambda batch: batch.unbind(0)[1]["next"],
}


def copy_of(held: Any) -> Any:
    return held.copy() if isinstance(held, np.ndarray) else held.clone()


def unchanged(held: Any, copy: Any) -> bool:
    if isinstance(held, np.ndarray):
        return np.array_equal(held, copy)
    if torch.is_tensor(held):
        return torch.equal(held, copy)
    return all(same(held[key], copy[key]) for key in copy.keys(True, True))


@given(
    st.lists(st.tuples(st.sampled_from([*HOLDS, None]), st.integers(0, 6)), max_size=16)
)
def test_what_is_kept_stays_as_it_was_and_what_is_dropped_is_used_again(plan):
    """Keep any part of some batches for some time: nothing kept ever changes, nothing dropped is
    lost.
    """
    held: list[tuple[int, Any, Any]] = []
    with Collector(
        counting(4, noise=True), None, num_envs=2, frames_per_batch=10, seed=0
    ) as collector:
        for n, (how, time) in enumerate(plan):
            batch = collector.rollout()
            if how is not None:
                part = HOLDS[how](batch)
                held.append((n + time, part, copy_of(part)))
                del part
            del batch
            assert all(unchanged(part, copy) for _, part, copy in held)
            held = [entry for entry in held if entry[0] > n]
            slots = collector.stats().slots
            assert slots["lent"] == len(held)
            assert slots["filling"] == 0
            assert slots["free"] <= KEPT_FREE


def test_return_same_td_gives_one_object_with_new_values():
    with Collector(
        CountingEnv, None, frames_per_batch=2, total_frames=6, return_same_td=True
    ) as collector:
        seen, rewards = set(), []
        for batch in collector:
            seen.add((id(batch), batch["observation"].data_ptr()))
            rewards.append(column(batch, "next", "reward"))
        assert len(seen) == 1
        assert rewards == [[1, 2], [3, 1], [2, 3]]


def test_what_is_added_to_the_same_batch_is_not_in_the_next_one():
    """``collect`` marks valid cells, and the user may change what the batch consists of."""
    options = {"num_envs": 3, "frames_per_batch": 6, "return_same_td": True}
    with (
        Collector(CountingEnv, None, **options) as collector,
        Collector(CountingEnv, None, **options) as plain,
    ):
        batch = collector.collect_batch(n_step=4).batch
        assert batch["collector", "valid"].sum() == 4
        batch["advantage"] = torch.ones(3, 2)
        batch["next", "reward"] = torch.full((3, 2, 1), 7.0)
        batch.names = [None, None]
        del batch["action"]
        plain.next()
        for _ in range(2):
            assert collector.next() is batch
            expected = plain.next()
            assert set(batch.keys(True, True)) == set(expected.keys(True, True))
            assert batch.names == expected.names
            assert (batch.exclude("action") == expected.exclude("action")).all()
        collector.collect(n_step=5)
        assert batch["collector", "valid"].sum() == 5, "and not the 4 of before"


def test_return_same_td_with_python_objects():
    env = SpaceEnv(spaces.Text(8), spaces.Discrete(2), length=100)
    with Collector(env, None, frames_per_batch=2, return_same_td=True) as collector:
        first = collector.rollout()
        assert list(first["observation"]) == env.observations[:2]
        assert collector.rollout() is first
        assert list(first["observation"]) == env.observations[2:4]


def test_memory_is_freed_without_the_cycle_collector():
    slots = ring()
    taken = slots.take()
    slot = weakref.ref(taken)
    with without_gc():
        memory = slots.lend(taken)
        del slots, taken
        assert slot() is not None
        del memory
        assert slot() is None


def test_several_batch_dimensions_are_the_environments_in_order():
    arranged = layout(B=6, batch_shape=(2, 3))
    ring_ = SlotRing(arranged, limit_bytes=1 << 20)
    slot = ring_.take()
    lane = slot.lanes[0]
    for c in arranged.tensor_columns:
        array = lane.arrays[c.key]
        array.reshape(-1)[...] = np.arange(array.size) % 127
        assert torch.equal(
            lane.rows(c.key)[1].reshape(6, -1), lane.tensors[c.key][1].reshape(6, -1)
        )
    batch = BatchView(arranged, stacked=False).tensordict(ring_.lend(slot), slot)
    assert batch.shape == (2, 3, 4)
    for c in arranged.tensor_columns:
        seen = batch.get(c.key)
        for b, t in itertools.product(range(6), range(4)):
            expected = torch.as_tensor(lane.arrays[c.key][t, b])
            assert torch.equal(
                seen[b // 3, b % 3, t].reshape(expected.shape), expected
            ), c.key


def test_a_batch_on_a_device_is_the_memory_of_its_slot():
    on_device = SlotRing(layout(), limit_bytes=1 << 20, memory=torch.device("cpu"))
    slot = on_device.take()
    memory = on_device.lend(slot)
    part = memory[3:5]
    assert counts(on_device) == (0, 0, 1)
    slot.block.fill_(7)
    assert (memory == 7).all()
    del memory
    other = on_device.take()
    assert other is not slot
    del part
    assert counts(on_device) == (1, 1, 0)
    assert on_device.take() is slot


def test_a_batch_on_a_device_is_a_copy_where_there_is_no_room_for_another_slot():
    one = layout()
    on_device = SlotRing(one, limit_bytes=one.nbytes, memory=torch.device("cpu"))
    slot = on_device.take()
    memory = on_device.lend(slot)
    assert counts(on_device) == (1, 0, 0)
    slot.block.fill_(7)
    assert not memory.any(), "the next rollout does not change it"


# --- memory of another owner ----------------------------------------------------------------------


class TestAdoptedMemory:
    def filled(self, slot: Slot, value: int) -> np.ndarray:
        """Memory of another owner, in which all columns of a slot have this value."""
        other = Slot(slot.layout)
        for lane in other.lanes:
            for array in lane.arrays.values():
                array[...] = value
        memory: np.ndarray = other.block.copy()
        return memory

    def test_is_that_of_the_batch_until_the_last_tensor_of_it(self):
        slots = ring(lanes=2)
        slot = slots.take()
        own = slot.block
        memory = self.filled(slot, 1)
        alive = weakref.ref(memory)
        slot.adopt(memory)
        assert np.shares_memory(slot.lanes[1].arrays[OBS.key], memory)
        assert slot.lanes[1].tensors[OBS.key].eq(1).all()
        slot.complete()
        batch = BatchView(slot.layout, stacked=True).tensordict(slots.lend(slot), slot)
        del memory
        assert batch["observation"].shape == (2, 2, 4, 3)
        assert batch["observation"].eq(1).all()
        assert batch["pixels"].eq(1).all()
        assert not own.any()
        part = batch["observation"][1, 1, 2:]
        del batch
        assert counts(slots) == (0, 0, 1)
        assert alive() is not None
        part += 1
        assert part.eq(2).all()
        del part
        assert counts(slots) == (1, 0, 0)
        assert alive() is None
        assert slot.block is own
        assert all(np.shares_memory(lane.arrays[OBS.key], own) for lane in slot.lanes)

    def test_is_let_go_by_a_slot_without_a_batch(self):
        slots = ring()
        slot = slots.take()
        memory = self.filled(slot, 1)
        alive = weakref.ref(memory)
        slot.adopt(memory)
        del memory
        slots.give_back(slot)
        assert alive() is None
        assert slots.take() is slot
        slot.lanes[0].arrays[PIXELS.key][...] = 3
        assert slot.lanes[0].tensors[PIXELS.key].eq(3).all()

    def test_views_of_the_lane_are_made_again(self):
        slots = ring()
        slot = slots.take()
        (lane,) = slot.lanes
        lane.cache["policy"] = lane.rows(OBS.key)
        assert lane.tensors[OBS.key].eq(0).all()
        slot.adopt(self.filled(slot, 5))
        assert not lane.cache
        assert lane.tensors[OBS.key].eq(5).all()
        assert lane.data[OBS.key] is lane.arrays[OBS.key]

    def test_of_another_size_is_refused(self):
        slot = ring().take()
        before = slot.block
        with pytest.raises(ValueError, match="cannot adopt 3 bytes"):
            slot.adopt(np.zeros(3, np.uint8))
        assert slot.block is before
        assert not slot.adopts
