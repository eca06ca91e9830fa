"""``record=``: what a collector yields, returns or writes is on disk."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

import muster
from muster import Collector, MultiSyncCollector, Recorder, load
from muster.errors import BadOption, BadRecording
from muster.testing import CountingEnv
from tests.tools import files_limited_to

ENV = partial(CountingEnv, 3)
OPTIONS = {"frames_per_batch": 12, "total_frames": 36, "seed": 0}


def same(recording, batches):
    recorded = list(recording)
    assert len(recorded) == len(batches)
    for one, other in zip(recorded, batches, strict=True):
        assert one.names == other.names
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(
            torch.equal(value, other[key]) for key, value in one.items(True, True)
        )


@pytest.mark.parametrize(
    "make",
    [
        partial(Collector, ENV, None),
        partial(Collector, ENV, None, num_envs=3, trajs_per_batch=2),
        partial(MultiSyncCollector, [ENV] * 2, None, backend="threads"),
        partial(MultiSyncCollector, [ENV] * 2, None),
    ],
    ids=["one", "episodes", "threads", "processes"],
)
def test_a_recording_has_the_batches_that_were_yielded(tmp_path, make):
    with make(record=tmp_path / "run", **OPTIONS) as collector:
        batches = [batch.clone() for batch in collector]
        assert load(tmp_path / "run").lost is not None, "it goes on until shutdown"
    recording = load(tmp_path / "run")
    same(recording, batches)
    assert recording.lost is None
    assert recording.meta == {"seed": 0}
    assert any(episode.complete for episode in recording.episodes)


def test_collect_and_the_changes_of_hooks_are_recorded(tmp_path):
    def brighten(batch):
        batch["next", "reward"].add_(1)

    with Collector(
        "CartPole-v1", None, record=tmp_path / "run", on_batch=brighten, seed=3
    ) as collector:
        batches = [collector.collect_batch(n_step=8).batch.clone() for _ in range(3)]
        collector.collect(n_episode=1)
    recording = load(tmp_path / "run")
    assert recording.meta == {"env": "CartPole-v1", "seed": 3}
    assert recording.batch(0)["next", "reward"].unique().tolist() == [2.0]
    assert recording.batches == 4
    assert torch.equal(recording.batch(2)["observation"], batches[2]["observation"])


def test_what_goes_into_a_replay_buffer_is_recorded(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with Collector(
        ENV, None, replay_buffer=buffer, record=tmp_path / "run", **OPTIONS
    ) as collector:
        assert list(collector) == [None] * 3
    recorded = torch.cat(list(load(tmp_path / "run")))
    assert torch.equal(recorded["observation"], buffer[:]["observation"])


def test_a_recorder_of_the_user_stays_open(tmp_path):
    with Recorder(tmp_path / "run", meta={"mine": 1}) as recorder:
        for _ in range(2):
            with Collector(ENV, None, record=recorder, **OPTIONS) as collector:
                list(collector)
    assert len(load(tmp_path / "run")) == 72
    assert load(tmp_path / "run").meta == {"mine": 1}


def test_a_directory_with_a_recording_is_refused_and_nothing_stays_open(tmp_path):
    with Collector(ENV, None, record=tmp_path / "run", **OPTIONS):
        pass
    with pytest.raises(BadRecording, match="holds a recording"):
        Collector(ENV, None, record=tmp_path / "run", **OPTIONS)
    with pytest.raises(BadOption, match="extend_buffer=True"):
        Collector(
            ENV,
            None,
            record=tmp_path / "a",
            replay_buffer=set(),
            extend_buffer=False,
            **OPTIONS,
        )
    with pytest.raises(BadOption, match="one directory"):
        muster.tune(ENV, None, record=tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_full_disk_loses_no_batch(tmp_path):
    with Collector(
        ENV, None, record=Recorder(tmp_path / "run", meta={}, chunk_bytes=1), **OPTIONS
    ) as collector:
        batches = iter(collector)
        first = next(batches).clone()
        with files_limited_to(10), pytest.raises(BadRecording):
            next(batches)
        rest = [batch.clone() for batch in collector]
        collector.options.record.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    same(load(tmp_path / "run"), [first, *rest])
    assert len(rest) == 2


def test_after_a_state_was_loaded_the_first_episode_is_incomplete(tmp_path):
    with Collector(
        ENV, None, record=tmp_path / "a", **{**OPTIONS, "frames_per_batch": 4}
    ) as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()
        next(batches)
        with pytest.raises(BadRecording, match="could come again"):
            collector.load_state_dict(state)
        list(batches)
    with Collector(
        ENV, None, record=tmp_path / "b", **{**OPTIONS, "frames_per_batch": 4}
    ) as collector:
        collector.load_state_dict(state)
        list(collector)
    whole, rest = load(tmp_path / "a"), load(tmp_path / "b")
    assert (len(whole), len(rest)) == (36, 32)
    assert not rest.episodes[0].complete
    assert torch.equal(
        torch.cat(list(whole))["observation"][4:], torch.cat(list(rest))["observation"]
    )
