from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import SlotsExhausted
from muster.memory import shared
from muster.memory.shared import Arena
from tests.waits import open_files, wait_until

PAGE = resource.getpagesize()
linux = pytest.mark.skipif(sys.platform != "linux", reason="as Linux does it")


@pytest.fixture
def arena():
    made = Arena.create("test")
    yield made
    made.close()


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_two_mappings_of_one_range_show_the_same_bytes(arena):
    offset = arena.allocate(100)
    arena.view(offset, 100)[:] = np.arange(100)
    other = Arena.attach(os.dup(arena.fd))
    seen = other.view(offset, 100)
    assert seen.dtype == np.uint8
    assert seen.tolist() == list(range(100))
    seen[3] = 77
    assert arena.view(offset, 100)[3] == 77
    other.close()


def test_a_process_that_has_the_descriptor_sees_and_writes_the_same_bytes(arena):
    arena.allocate(PAGE)
    offset = arena.allocate(8)
    arena.view(offset, 8)[:] = 5
    code = (
        "import sys; from muster.memory.shared import Arena; fd, offset = map(int, sys.argv[1:]);"
        "view = Arena.attach(fd).view(offset, 8); assert (view == 5).all(); view[:] = 6"
    )
    command = [sys.executable, "-c", code, str(arena.fd), str(offset)]
    subprocess.run(
        command,
        pass_fds=[arena.fd],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    assert arena.view(offset, 8).tolist() == [6] * 8


def test_ranges_begin_at_pages_and_a_view_stays_valid_when_the_arena_grows(arena):
    first = arena.allocate(PAGE + 1)
    view = arena.view(first, PAGE + 1)
    view[-1] = 9
    second = arena.allocate(50 * PAGE)
    arena.view(second, 50 * PAGE)[:] = 1
    assert (first, second) == (0, 2 * PAGE)
    assert view[-1] == 9
    assert view.sum() == 9


def test_arrays_outlive_the_arena():
    arena = Arena.create("test")
    view = arena.view(arena.allocate(16), 16)
    arena.close()
    arena.close()
    del arena
    gc.collect()
    view[:] = 3
    assert view.sum() == 48


@linux
def test_an_arena_costs_one_descriptor_however_many_views_there_are_and_none_afterwards():
    before = open_files()
    arena = Arena.create("test")
    views = [arena.view(arena.allocate(PAGE), PAGE) for _ in range(50)]
    assert open_files() <= before + 1
    assert not os.get_inheritable(arena.fd)
    del arena
    gc.collect()
    wait_until(lambda: open_files() <= before)
    assert not any(view.any() for view in views)


@linux
def test_a_mapping_ends_with_the_last_array_that_looks_at_it():
    arena = Arena.create("looked-at")  # not the name of other tests
    offset = arena.allocate(PAGE)
    view = arena.view(offset, PAGE)[10:20].view(np.int16)

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:looked-at" in line for line in maps)

    assert mappings() == 1
    del view
    assert mappings() == 0
    arena.close()


@linux
def test_released_memory_goes_back_to_the_system_and_the_range_is_used_again(arena):
    kept = arena.allocate(10 * PAGE)
    offset = arena.allocate(100 * PAGE)
    arena.view(kept, 10 * PAGE)[:] = 1
    arena.view(offset, 100 * PAGE)[:] = 1
    assert resident(arena) == 110 * PAGE
    arena.release(offset, 100 * PAGE)
    assert resident(arena) == 10 * PAGE
    assert arena.allocate(99 * PAGE) == 110 * PAGE
    assert arena.allocate(100 * PAGE - 5) == offset
    assert resident(arena) == 209 * PAGE
    assert not arena.view(offset, 100 * PAGE).any()
    assert arena.view(kept, 10 * PAGE).all()


@linux
def test_allocated_memory_is_there_before_it_is_written(arena):
    arena.allocate(64 * PAGE)
    assert resident(arena) == 64 * PAGE


def test_only_what_was_allocated_can_be_released_and_only_once(arena):
    offset = arena.allocate(PAGE)
    with pytest.raises(ValueError, match=f"no range of {2 * PAGE} bytes at 0"):
        arena.release(offset, 2 * PAGE)
    arena.release(offset, PAGE)
    with pytest.raises(ValueError, match="no range"):
        arena.release(offset, PAGE)


def test_a_view_outside_of_the_arena_is_an_error_and_not_a_bus_error(arena):
    offset = arena.allocate(PAGE)
    for start, nbytes in ((offset, PAGE + 1), (PAGE, 1), (-PAGE, PAGE)):
        with pytest.raises(ValueError, match="lie outside of arena 'test'"):
            arena.view(start, nbytes)


@linux
def test_nobody_can_shrink_the_memory_under_a_mapping(arena):
    arena.allocate(2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)


def test_only_the_creator_allocates(arena):
    other = Arena.attach(os.dup(arena.fd))
    with pytest.raises(ValueError, match="did not create"):
        other.allocate(1)
    other.close()


def test_more_than_there_is_says_how_much_was_wanted_and_leaves_the_arena_usable(arena):
    arena.allocate(PAGE)
    with pytest.raises(
        SlotsExhausted,
        match=f"4,503,.* more bytes .* {PAGE:,} in use: about .* available",
    ):
        arena.allocate(1 << 52)
    assert arena.allocate(PAGE) == PAGE


@linux
def test_a_system_that_refuses_says_so_and_the_arena_stays_usable(arena):
    offset = arena.allocate(PAGE)
    arena.release(offset, PAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = 16 * PAGE
    resource.setrlimit(resource.RLIMIT_FSIZE, (big, hard))
    try:
        with pytest.raises(
            SlotsExhausted, match=f"{2 * big:,} more bytes .*File too large"
        ):
            arena.allocate(2 * big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert arena.allocate(PAGE) == offset


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 500000\nshmem 100000\n")
    files = {
        f"/sys/fs/cgroup/{name}": str(tmp_path / name)
        for name in ("memory.max", "memory.stat")
    }
    real = shared.Path
    monkeypatch.setattr(shared, "Path", lambda path: real(files.get(path, path)))
    assert shared._room() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert shared._room() > 1_000_000


@linux
def test_no_name_is_ever_in_dev_shm(arena):
    def names():  # but for semaphores, of which other tests make some meanwhile
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}

    before = names()
    arena.view(arena.allocate(PAGE), PAGE)[:] = 1
    assert names() <= before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PAGE)), max_size=30))
def test_ranges_in_use_never_overlap_and_keep_their_bytes(moves):
    arena = Arena.create("test")
    live: list[tuple[int, int, int]] = []
    for mark, (release, nbytes) in enumerate(moves, start=1):
        if release and live:
            offset, size, _ = live.pop(nbytes % len(live))
            arena.release(offset, size)
        else:
            offset = arena.allocate(nbytes)
            view = arena.view(offset, nbytes)
            assert not view.any()
            view[:] = mark
            live.append((offset, nbytes, mark))
    for offset, nbytes, mark in live:
        assert (arena.view(offset, nbytes) == mark).all()
    arena.close()


def test_releasing_after_the_arena_was_closed_is_nothing():
    arena = Arena.create("test")
    offset = arena.allocate(1)
    arena.close()
    arena.release(offset, 1)
