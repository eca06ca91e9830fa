"""``replay_write_mode``: batches or complete episodes in the replay buffer, and the numbers of both."""

from __future__ import annotations

from typing import Any

import pytest

from muster import Collector, ReplayMemory, load_state, save_state
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.fakes.buffers import Adds, Extends
from tests.tools import assert_accounted, column, counting


def lengths(batch: Any) -> list[int]:
    """Of the episodes in a batch of them."""
    found = []
    for step, done in zip(
        column(batch, "next", "reward"), column(batch, "next", "done"), strict=True
    ):
        if done:
            found.append(int(step))
    return found


def progress(c: Collector) -> tuple[int, int, int, int]:
    """The numbers of frames that are stepped, in ended episodes, pending, and in the buffer."""
    stats = c.stats()
    return stats.executed, stats.completed, stats.in_flight, stats.written


def test_complete_episodes_are_written_as_soon_as_they_end():
    buffer = Extends()
    envs = [counting(3), counting(5)]
    with Collector(
        envs,
        None,
        frames_per_batch=8,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
    ) as c:
        written = []
        for _ in range(3):  # four steps of each environment
            assert c.next() is None
            assert_accounted(c)
            written.append([lengths(batch) for batch in buffer.batches])
    assert written[0] == [[3]]
    assert written[1] == [[3], [5, 3]], "in the order of their ends"
    assert written[2] == [[3], [5, 3], [3, 5, 3]]
    assert column(buffer.batches[1], "next", "reward") == [1, 2, 3, 4, 5, 1, 2, 3]
    assert buffer.batches[1].names == ["time"]


def test_iteration_goes_on_while_no_episode_has_ended():
    buffer = Extends()
    with Collector(
        counting(10),
        None,
        frames_per_batch=4,
        total_frames=12,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
    ) as c:
        pending, written = [], []
        for nothing in c:
            assert nothing is None
            stats = c.stats()
            pending.append(stats.in_flight)
            written.append(stats.frames)
            assert_accounted(c)
        assert (pending, written) == ([4, 8, 2], [0, 0, 10])
        assert c.stats().executed == 12
    assert c.stats().discarded == {"shutdown": 2}
    assert [lengths(batch) for batch in buffer.batches] == [[10]]


def test_progress_is_counted_from_the_step_to_the_buffer():
    buffer = Extends()
    envs = [counting(3), counting(5)]
    with Collector(
        envs,
        None,
        frames_per_batch=8,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
    ) as c:
        assert progress(c) == (0, 0, 0, 0)
        c.next()
        assert progress(c) == (8, 3, 5, 3)
        c.next()
        assert progress(c) == (16, 11, 5, 11)
        state = c.state_dict()
    with Collector(
        envs,
        None,
        frames_per_batch=8,
        replay_buffer=Extends(),
        replay_write_mode="trajectory",
    ) as c:
        c.load_state_dict(state)
        assert progress(c) == (16, 11, 5, 11)


def test_progress_of_steps_that_are_added_one_by_one():
    buffer = Adds(room=3)
    with Collector(
        counting(5), None, replay_buffer=buffer, extend_buffer=False, frames_per_batch=6
    ) as c:
        with pytest.raises(OSError, match="full"):
            c.next()
        assert progress(c) == (4, 0, 1, 3)
        buffer.room = None
        c.next()
        assert progress(c) == (6, 5, 0, 6)


def test_progress_of_rows_in_a_replay_memory():
    memory = ReplayMemory(100)
    with Collector(counting(3), None, frames_per_batch=4, replay_buffer=memory) as c:
        c.next()
        assert progress(c) == (4, 3, 0, 4)
        assert len(memory) == 4
    told = {"replay_buffer": ReplayMemory(100), "replay_write_mode": "trajectory"}
    with pytest.raises(BadOption, match="leave replay_write_mode='trajectory' out"):
        Collector(counting(3), None, frames_per_batch=4, **told)


def test_batches_that_the_user_gets_are_not_written():
    with Collector(counting(3), None, frames_per_batch=4) as c:
        c.next()
        assert progress(c) == (4, 3, 0, 0)


def test_rollouts_are_written_as_they_are():
    buffer = Extends()
    with Collector(
        counting(3),
        None,
        frames_per_batch=4,
        replay_buffer=buffer,
        replay_write_mode="rollout",
    ) as c:
        c.next()
    assert column(buffer.batches[0], "next", "reward") == [1, 2, 3, 1]


def test_transitions_of_complete_episodes_are_added_in_order():
    buffer = Adds()
    with Collector(
        counting(3),
        None,
        num_envs=2,
        frames_per_batch=8,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
    ) as c:
        c.next()
    assert [int(row["next", "reward"]) for row in buffer.rows] == [1, 2, 3, 1, 2, 3]


def test_hooks_see_complete_episodes():
    seen: list[list[int]] = []
    episodes: list[int] = []
    with Collector(
        counting(3),
        None,
        frames_per_batch=4,
        replay_buffer=Extends(),
        replay_write_mode="trajectory",
        on_batch=lambda batch: seen.append(lengths(batch)),
        on_episode_done=lambda episode: episodes.append(len(episode)),
    ) as c:
        for _ in range(3):
            c.next()
        assert c.stats().episodes == 4
    assert seen == [[3], [3], [3, 3]]
    assert episodes == [3, 3, 3, 3]


def test_unfinished_episodes_are_in_the_state(tmp_path):
    def made(buffer: Extends) -> Collector:
        return Collector(
            counting(6),
            None,
            frames_per_batch=4,
            replay_buffer=buffer,
            replay_write_mode="trajectory",
        )

    first, second = Extends(), Extends()
    with made(first) as c:
        c.next()
        save_state(tmp_path / "state", c.state_dict())
    with made(second) as c:
        c.load_state_dict(load_state(tmp_path / "state"))
        c.next()
    assert first.batches == []
    assert column(second.batches[0], "next", "reward") == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_buffer_loses_no_episode():
    buffer = Extends(refuses=1)
    with Collector(
        counting(3),
        None,
        frames_per_batch=4,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
    ) as c:
        with pytest.raises(OSError, match="full"):
            c.next()
        assert_accounted(c)
        c.next()
        c.next()
        assert_accounted(c)
    assert [lengths(batch) for batch in buffer.batches] == [[3], [3]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replay_buffer": None}, "none was given: pass replay_buffer="),
        ({"replay_write_mode": "episode"}, "replay_write_mode='episode'"),
        (
            {"replay_write_mode": "rollout", "trajs_per_batch": 2},
            "'rollout' writes batches",
        ),
        (
            {"extend_buffer": False},
            "replay_write_mode='trajectory'.*use extend_buffer=True",
        ),
        ({"set_truncated": True}, "replay_write_mode='trajectory' waits for real ones"),
        (
            {"split_trajs": True},
            "split_trajs and replay_write_mode='trajectory': give one",
        ),
        (
            {"num_envs": 3},
            "the episodes of replay_write_mode='trajectory' would have holes",
        ),
    ],
)
def test_what_contradicts_it_is_refused(options: dict[str, Any], said: str) -> None:
    told = {
        "replay_buffer": Adds() if "extend_buffer" in options else Extends(),
        "replay_write_mode": "trajectory",
        "frames_per_batch": 4,
        **options,
    }
    with pytest.raises(BadOption, match=said):
        Collector(counting(3), None, **told)


def test_steps_are_not_collected_by_number():
    with (
        Collector(
            counting(3),
            None,
            frames_per_batch=4,
            replay_buffer=Extends(),
            replay_write_mode="trajectory",
        ) as c,
        pytest.raises(BadOption, match="'trajectory' makes batches of episodes"),
    ):
        c.collect(n_step=4)


def test_an_environment_without_ends_is_named(monkeypatch):
    monkeypatch.setattr("muster.episodes.whole.ENDLESS", 10)
    with Collector(
        CountingEnv,
        None,
        create_env_kwargs={"length": 100},
        frames_per_batch=8,
        replay_buffer=Extends(),
        replay_write_mode="trajectory",
    ) as c:
        c.next()
        with pytest.raises(
            BadOption, match="replay_write_mode='trajectory' waits for that"
        ):
            c.next()


@pytest.mark.parametrize("n_step", [4, 7])
@pytest.mark.parametrize("kind", ["buffer", "memory", "row by row"])
def test_what_the_buffer_has_not_got_is_not_counted_as_written(kind, n_step):
    buffer: Any = Extends() if kind == "buffer" else ReplayMemory(100)
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 2 if kind == "row by row" else 8,
        "replay_buffer": buffer,
    }
    with Collector(counting(3), None, **options) as c:
        c.next()
        c.next()
        c.rollout()
        c.collect(n_step=n_step)
        c.next()
        c.rollout()
        stats = c.stats()
        assert stats.written == 3 * options["frames_per_batch"] + n_step
        assert stats.frames == stats.written + 2 * options["frames_per_batch"]
        if kind != "buffer":
            assert len(buffer) == stats.written
        state = c.state_dict()
    options["replay_buffer"] = Extends() if kind == "buffer" else ReplayMemory(100)
    with Collector(counting(3), None, **options) as c:
        c.load_state_dict(state)
        assert c.stats().written == stats.written
        c.next()
        assert c.stats().written == stats.written + options["frames_per_batch"]
