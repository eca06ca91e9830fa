"""Where parts of batches cannot be joined, nothing was taken out: frames are in flight, and the
next call goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from muster import Collector, MultiAsyncCollector, MultiSyncCollector, Trajectories
from muster.episodes import whole as episodes_module
from muster.episodes.whole import WholeEpisodes
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.fakes.memory import out_of_memory
from tests.fakes.patterned import PatternEnv
from tests.tools import assert_accounted, assert_same, column, counting

LENGTHS = [[3], [1, 4], [2, 6], [5]]
MORE = 100  # than there are places where memory is needed


def survives(make: Callable[[], Any], calls: list[Callable[[Any], Any]]) -> None:
    """Every one of these calls gives the same if memory is short at some place, and is called again
    then.
    """
    with make() as c:
        expected = [call(c) for call in calls]
        expected = [batch.clone() for batch in expected]
    for at in range(1, MORE):
        with make() as c:
            missed = 0
            with out_of_memory(at) as times:
                made = []
                for call in calls:
                    try:
                        made.append(call(c))
                    except MemoryError:
                        missed += 1
                        assert_accounted(c)
                        made.append(call(c))
                    assert_accounted(c)
            for batch, wanted in zip(made, expected, strict=True):
                assert_same(batch, wanted, ignore=("action",))
            if len(times) < at:
                assert at > 2, "memory was short at some place"
                return
    pytest.fail(f"more than {MORE} places")


def alone(**options: Any) -> Collector:
    return Collector(
        partial(PatternEnv, LENGTHS), None, **{"num_envs": 4, "seed": 0, **options}
    )


def together(**options: Any) -> MultiSyncCollector:
    common = {"num_envs": 2, "frames_per_batch": 16, "seed": 0, "backend": "threads"}
    return MultiSyncCollector(
        [partial(PatternEnv, LENGTHS)] * 2, None, **common | options
    )


def following(c: Any) -> Any:
    return c.next()


@pytest.mark.parametrize("rule", ["first_begun", "per_env", "first_done"])
def test_groups_of_episodes(rule):
    survives(
        partial(alone, frames_per_batch=28, trajs_per_batch=Trajectories(4, rule=rule)),
        [following] * 3,
    )


def test_trajectories_that_are_split():
    survives(
        partial(alone, frames_per_batch=28, split_trajs=True, total_frames=84),
        [following] * 3,
    )


def test_the_last_batch_comes_after_an_error_without_another_one():
    with alone(frames_per_batch=28, total_frames=28, split_trajs=True) as c:
        with out_of_memory(1), pytest.raises(MemoryError):
            c.next()
        assert (c.stats().frames, c.stats().in_flight) == (0, 28)
        assert c.next() is not None
        assert c.stats().executed == c.stats().frames == 28
        assert c.next() is None


def test_rollouts_that_are_concatenated():
    for cat_results in ("cat", -1):
        survives(
            partial(together, cat_results=cat_results),
            [following, lambda c: c.rollout()],
        )


@pytest.mark.parametrize("surplus", ["keep", "discard"])
def test_a_number_of_episodes(surplus):
    def some(c: Any) -> Any:
        return c.collect_batch(n_episode=7, surplus=surplus)[0]

    survives(alone, [some] * 2)


def test_episodes_for_a_hook():
    def make(seen: list[Any]) -> Collector:
        return alone(
            frames_per_batch=28,
            on_episode_done=lambda episode: seen.append(len(episode)),
        )

    expected: list[int] = []
    with make(expected) as c:
        for _ in range(3):
            c.next()
    for at in range(1, 12):
        seen: list[int] = []
        with make(seen) as c, out_of_memory(at):
            for _ in range(3):
                try:
                    c.next()
                except MemoryError:
                    assert_accounted(c)
                    c.next()
                assert_accounted(c)
        assert seen == expected, at


@pytest.mark.parametrize("then", ["steps", "next", "reset", "episodes"])
def test_rollouts_of_workers_that_do_not_wait_for_each_other(then):
    options = {"num_envs": 2, "frames_per_batch": 8, "seed": 0, "backend": "threads"}
    with MultiAsyncCollector([counting(5)] * 2, None, **options) as c:
        with out_of_memory(1), pytest.raises(MemoryError):
            c.collect(n_step=24)
        stats = c.stats()
        assert stats.frames == 0
        assert stats.in_flight >= 24
        assert_accounted(c)
        if then == "next":
            assert c.next().shape == (2, 4)
        elif then == "reset":
            c.reset()
        elif then == "episodes":
            assert c.collect(n_episode=2).n_collected_episodes == 2
            assert c.stats().discarded["interrupted"] == 24
        assert_accounted(c)
        assert c.collect(n_step=24).n_collected_steps == 24
        assert_accounted(c)


def test_a_batch_that_nobody_asks_for_again_is_discarded():
    with together(cat_results="cat") as c:
        with out_of_memory(1), pytest.raises(MemoryError):
            c.next()
        assert c.stats().in_flight == 16
        assert c.collect(n_step=4).n_collected_steps == 4
        stats = c.stats()
        assert (stats.frames, dict(stats.discarded), stats.in_flight) == (
            4,
            {"interrupted": 16},
            0,
        )
        assert_accounted(c)


def test_single_steps_of_a_rollout_that_failed_are_not_delivered():
    class Adds:
        def add(self, item: Any) -> None: ...

    options = {"frames_per_batch": 4, "extend_buffer": False, "replay_buffer": Adds()}
    with Collector(counting(3), None, **options) as c:
        with out_of_memory(1), pytest.raises(MemoryError):
            c.rollout()
        assert c.stats().frames == 0
        assert_accounted(c)


# --- what can never be joined ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cat_results": -1, "trajs_per_batch": 2},
            "trajs_per_batch needs the rows of each environment",
        ),
        ({"cat_results": 1, "trajs_per_batch": 2}, "trajs_per_batch needs the rows"),
        (
            {"cat_results": "cat", "num_envs": None, "trajs_per_batch": 2},
            "leave cat_results out",
        ),
        (
            {"cat_results": "cat", "layout": "time_major", "trajs_per_batch": 2},
            "trajs_per_batch needs the rows",
        ),
        (
            {"cat_results": -1, "on_episode_done": print},
            "on_episode_done needs the rows",
        ),
        (
            {"cat_results": 2},
            "the rollouts to concatenate have 2 dimensions. Give one from -2 to 1",
        ),
        ({"cat_results": -3}, "have 2 dimensions"),
    ],
)
def test_what_cannot_be_concatenated_is_refused_at_once(options, message):
    with pytest.raises(BadOption, match=message):
        together(**options)


def test_groups_whose_rollouts_do_not_fit_are_refused_at_once():
    class Wide(CountingEnv):
        def __init__(self) -> None:
            super().__init__(3, noise=True)

    options = {
        "num_envs": 2,
        "frames_per_batch": 16,
        "backend": "threads",
        "cat_results": "cat",
    }
    with pytest.raises(
        BadOption, match="differ in number of environments or in spaces"
    ):
        MultiSyncCollector([counting(3), Wide], None, **options)


@pytest.mark.parametrize(
    "options", [{"cat_results": -1}, {"cat_results": "cat", "num_envs": None}], ids=str
)
def test_episodes_of_batches_along_time_are_refused_before_anything_is_collected(
    options,
):
    with together(**options) as c:
        with pytest.raises(
            BadOption,
            match=r"collect\(n_episode=...\) needs the rows of each environment",
        ):
            c.collect(n_episode=2)
        assert c.stats().executed == 0
        batch, stats = c.collect_batch(n_step=7)
        assert stats.n_collected_steps == 7 == int(batch["collector", "valid"].sum())
        assert_accounted(c)


def test_valid_steps_of_batches_along_time_are_the_first_of_every_environment():
    with together(cat_results=-1) as c:
        batch = c.collect_batch(n_step=6)[
            0
        ]  # four environments: the first two of them make two steps
    assert batch["collector", "valid"].long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
def test_episodes_are_put_together_where_environments_are_concatenated(layout):
    dim = 0 if layout == "batch_major" else 1
    with together(
        cat_results=dim, layout=layout, trajs_per_batch=2, frames_per_batch=24
    ) as c:
        assert len(c.next()["next", "done"]) >= 2
        assert_accounted(c)


# --- ends that never come -------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "ENDLESS", 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reset_at_each_iter": True},
            "reset_at_each_iter=True cuts its episodes at the end of every batch: leave it",
        ),
        ({}, "Episodes need an end: give the collector max_frames_per_traj="),
    ],
    ids=str,
)
def test_groups_of_episodes_that_never_end_are_not_waited_for(
    impatient, options, message
):
    length = 9 if options else 10**6
    with Collector(
        counting(length),
        None,
        num_envs=2,
        frames_per_batch=8,
        trajs_per_batch=2,
        **options,
    ) as c:
        for _ in range(2):
            with pytest.raises(BadOption, match=message):
                c.next()
            assert_accounted(c)
        assert c.stats().frames == 0


def test_a_number_of_episodes_that_never_end_is_not_waited_for(impatient):
    with Collector(counting(10**6), None, num_envs=2) as c:
        for executed in (128, 256):
            with pytest.raises(
                BadOption,
                match=r"Episodes need an end: give the collector max_frames_per_traj=",
            ):
                c.collect(n_episode=2)
            assert c.stats().in_flight == c.stats().executed == executed
        assert_accounted(c)
    with Collector(
        counting(9), None, num_envs=2, frames_per_batch=8, reset_at_each_iter=True
    ) as c:
        assert c.collect(n_episode=2).lens.tolist() == [9, 9], (
            "a call is one batch, whatever its length"
        )


def test_long_episodes_that_were_reported_come_when_they_end(impatient):
    with Collector(
        counting(100), None, num_envs=2, frames_per_batch=8, trajs_per_batch=2
    ) as c:
        with pytest.raises(
            BadOption, match=r"environment 0 has made 64 steps, .* Nothing was lost"
        ):
            c.next()
        assert c.stats().in_flight == 128
        assert len(c.next()) == 200
        assert_accounted(c)


def test_first_done_waits_for_any(impatient):
    lengths = [[2], [10**6]]
    options = {"num_envs": 2, "frames_per_batch": 8, "trajs_per_batch": 2, "seed": 0}
    first_done = options | {"trajs_per_batch": Trajectories(2, rule="first_done")}
    with Collector(partial(PatternEnv, lengths), None, **first_done) as c:
        for _ in range(40):
            assert len(c.next()) == 4
    with (
        Collector(partial(PatternEnv, lengths), None, **options) as c,
        pytest.raises(BadOption, match="environment 1 has made"),
    ):
        c.next()


def test_environments_that_give_no_rows_are_not_waited_for(impatient):
    store = WholeEpisodes(num_envs=2, rule=None)
    with Collector(counting(3), None, num_envs=2, frames_per_batch=12) as c:
        for _ in range(20):
            store.add(c.rollout()[:1], [0])
            store.check_ends("nobody", resets=False)
    assert column(store.take(store.held[:1]).batch, "next", "reward") == [1, 2, 3]
    assert torch.is_tensor(store.state_dict()["time"])
