"""``track_traj_ids=False``: everything that needs ids has them, and no batch shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from muster import Collector
from muster.errors import BadOption
from tests.fakes.buffers import Adds, Extends
from tests.tools import assert_same, counting

IDS = ("collector", "traj_ids")


def two(run: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """What ``run`` returns for a collector without ids, and for one with them."""
    given = {"num_envs": 2, "frames_per_batch": 16, "seed": 0, **options}
    found = []
    for tracks in (False, True):
        with Collector(counting(3), None, track_traj_ids=tracks, **given) as c:
            found.append(run(c))
    return found[0], found[1]


def next_two(c: Any) -> list[Any]:
    return [c.next().clone(), c.next().clone()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_trajs": True},
        {"trajs_per_batch": 3},
        {"trajs_per_batch": 3, "traj_format": "pad"},
        {"reset_when_done": False},
        {"layout": "time_major"},
        {"on_episode_done": lambda episode: None},
        {"return_same_td": True},
    ],
    ids=lambda options: "-".join(options) or "no options",
)
def test_batches_are_the_same_without_them(options: dict[str, Any]) -> None:
    without, expected = two(next_two, **options)
    for found, other in zip(without, expected, strict=True):
        assert IDS in other.keys(True)
        assert IDS not in found.keys(True)
        assert_same(found, other.exclude(IDS))


def test_episodes_on_demand() -> None:
    found, expected = two(lambda c: c.collect_batch(n_episode=3))
    assert IDS not in found.batch.keys(True)
    assert_same(found.batch, expected.batch.exclude(IDS))
    assert found.stats.lens.tolist() == expected.stats.lens.tolist() == [3, 3, 3]


def test_steps_on_demand() -> None:
    found, expected = two(lambda c: c.collect_batch(n_step=8).batch)
    assert_same(found, expected.exclude(IDS))


@pytest.mark.parametrize("options", [{}, {"extend_buffer": False}], ids=str)
def test_replay_buffers(options: dict[str, Any]) -> None:
    def written(c: Any) -> Any:
        c.next()
        buffer = c.buffer
        return buffer.rows[-1] if options else buffer.batches[-1]

    found = written_by(False, written, options)
    expected = written_by(True, written, options)
    assert_same(found, expected.exclude(IDS))


def written_by(tracks: bool, written: Any, options: dict[str, Any]) -> Any:
    buffer: Any = Adds() if options else Extends()
    with Collector(
        counting(3),
        None,
        num_envs=2,
        frames_per_batch=16,
        seed=0,
        replay_buffer=buffer,
        track_traj_ids=tracks,
        **options,
    ) as c:
        return written(c)


def test_hooks_on_episodes_get_none() -> None:
    episodes: list[Any] = []
    two(next_two, on_episode_done=episodes.append)
    assert {IDS in episode.keys(True) for episode in episodes} == {False, True}


def test_a_recording_needs_them(tmp_path: Any) -> None:
    with pytest.raises(
        BadOption, match="record: a recording finds its episodes by their ids"
    ):
        Collector(
            counting(3),
            None,
            frames_per_batch=4,
            track_traj_ids=False,
            record=tmp_path / "a",
        )
