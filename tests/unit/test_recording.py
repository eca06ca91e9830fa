"""Recordings: bit-exact, never silently wrong, and whole up to the last chunk whatever happened."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import signal
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from muster.collectors import Collector
from muster.errors import BadOption, BadRecording, UnsupportedSpace
from muster.recording import Recorder, load
from muster.recording.chunks import chunk_name
from muster.testing import CountingEnv
from muster.utils.tensor_files import seal
from tests.fakes.words import Words
from tests.tools import files_limited_to
from tests.waits import open_files

INTS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
VERSION_1, VERSION_2 = (
    Path(__file__).parents[1] / "fakes" / f"recording_{n}" for n in (1, 2)
)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class CountingEnvs:
    """B environments whose observation is [episode length so far, step]; the oracle for pairing."""

    def __init__(self, B: int, lengths: list[int]) -> None:
        self.B, self.lengths = B, lengths
        self.t = [0] * B
        self.nth = [0] * B
        self.ids = list(range(B))
        self.next_id = B
        self.truth: dict[int, dict[str, Any]] = {
            i: {"env": i, "length": 0, "obs": []} for i in range(B)
        }

    def length(self, env: int) -> int:
        return self.lengths[(env + self.nth[env]) % len(self.lengths)]

    def batch(self, T: int, **extra: Any) -> TensorDict:
        """The next [B, T], strided over time-major memory as the collector's batches are."""
        obs, ids, reward = (
            torch.zeros(T, self.B, 2),
            torch.zeros(T, self.B, dtype=torch.int64),
            torch.zeros(T, self.B),
        )
        terminated, truncated = (
            torch.zeros(T, self.B, dtype=torch.bool),
            torch.zeros(T, self.B, dtype=torch.bool),
        )
        for t in range(T):
            for b in range(self.B):
                row = torch.tensor([self.length(b), self.t[b]], dtype=torch.float32)
                obs[t, b], ids[t, b], reward[t, b] = row, self.ids[b], self.t[b] + 0.5
                truth = self.truth[self.ids[b]]
                truth["length"] += 1
                truth["obs"].append(row.tolist())
                self.t[b] += 1
                if self.t[b] == self.length(b):
                    (terminated if self.ids[b] % 2 else truncated)[t, b] = True
                    truth["ended"] = "terminated" if self.ids[b] % 2 else "truncated"
                    self.t[b], self.ids[b] = 0, self.next_id
                    self.nth[b] += 1
                    self.truth[self.next_id] = {"env": b, "length": 0, "obs": []}
                    self.next_id += 1
        flag = lambda x: x.t().unsqueeze(-1)  # noqa: E731
        return TensorDict(
            {
                "observation": obs.transpose(0, 1),
                "next": {
                    "reward": flag(reward),
                    "done": flag(terminated | truncated),
                    "terminated": flag(terminated),
                    "truncated": flag(truncated),
                },
                "collector": {"traj_ids": ids.t()},
                **extra,
            },
            batch_size=[self.B, T],
            names=[None, "time"],
        )


def same(a: TensorDict, b: TensorDict) -> bool:
    """Bit for bit: keys, sizes, names, dtypes, values (nan payloads too), objects."""
    leaves = [dict(_leaves(td)) for td in (a, b)]
    if (
        a.batch_size != b.batch_size
        or a.names != b.names
        or leaves[0].keys() != leaves[1].keys()
    ):
        return False
    return all(_equal(value, leaves[1][key]) for key, value in leaves[0].items())


def _leaves(td: TensorDict) -> Iterator[tuple[Any, Any]]:
    for key in td.keys(True, True, is_leaf=lambda cls: not issubclass(cls, TensorDict)):
        yield key, td.get(key)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a.tolist() == b.tolist())
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def record(path: Path, batches: list[TensorDict], chunk_bytes: int = 1) -> Path:
    with Recorder(
        path, meta={"env": "Counting-v0", "seed": 3}, chunk_bytes=chunk_bytes
    ) as recorder:
        for batch in batches:
            recorder.write(batch)
    return path


@pytest.fixture
def batches():
    envs = CountingEnvs(3, [4, 7, 2, 9])
    return [envs.batch(5) for _ in range(6)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished recording of 4 batches in 4 chunks, to be copied and damaged."""
    envs = CountingEnvs(2, [3, 5])
    batches = [envs.batch(4, text=texts(2, 4, str(i))) for i in range(4)]
    return record(tmp_path_factory.mktemp("small") / "r", batches), batches


@pytest.fixture
def path(small, tmp_path):
    """A copy of ``small``."""
    return copied(small, tmp_path / "r")


def texts(B: int, T: int, tag: str) -> NonTensorStack:
    return NonTensorStack.from_list(
        [[f"{tag}:{b},{t} ü\n" for t in range(T)] for b in range(B)]
    )


# ------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("chunk_bytes", [1, 700, 1 << 20])
def test_what_is_read_is_what_was_written(tmp_path, batches, chunk_bytes):
    recording = load(record(tmp_path / "r", batches, chunk_bytes))
    assert len(recording) == 90
    assert recording.batches == 6
    assert recording.lost is None
    assert recording.meta == {"env": "Counting-v0", "seed": 3}
    assert all(same(a, b) for a, b in zip(batches, recording, strict=True))
    assert same(recording.batch(-1), batches[-1])
    recording.verify()
    with pytest.raises(IndexError):
        recording.batch(6)


def test_every_dtype_and_every_bit_pattern(tmp_path):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(
        0, 256, (3, 5, 4, 8), dtype=torch.uint8, generator=generator
    )  # has nans and infinities
    leaves = {
        str(d): bits.view(d) if d != torch.bool else bits > 100 for d in INTS + FLOATS
    }
    leaves |= {
        "empty": torch.zeros(3, 5, 0),
        "odd": torch.ones(3, 5, 3, dtype=torch.bool),
        "grad": torch.ones(3, 5),
    }
    leaves["grad"].requires_grad_()
    batch = TensorDict(
        {**leaves, "a/b": bits, "a": {"b": bits + 1, "~": bits + 2}},
        [3, 5],
        names=[None, "time"],
    )
    read = load(record(tmp_path / "r", [batch, batch])).batch(1)
    assert same(read, batch.detach())


@pytest.mark.parametrize("size", [[7], [2, 7], [2, 3, 7]])
@pytest.mark.parametrize("time_first", [False, True])
def test_every_batch_shape_and_memory_order(tmp_path, size, time_first):
    names = [None] * (len(size) - 1) + ["time"]
    x = torch.arange(7 * 6 * 2.0)[: 2 * torch.Size(size).numel()].reshape(
        *reversed(size), 2
    )
    x = x.permute(
        *reversed(range(len(size))), len(size)
    )  # strided, as a view on time-major memory is
    batch = TensorDict({"x": x}, size, names=names)
    if time_first:
        batch = batch.permute(len(size) - 1, *range(len(size) - 1))
    read = load(record(tmp_path / "r", [batch])).batch(0)
    assert same(read, batch)
    assert read["x"].stride() == batch["x"].stride()  # no transposition on the way


def test_objects_come_back_with_their_types(tmp_path):
    values = [["a\n\u2028", 1], [2.5, None], [True, [1, ["x"]]], [{"k": [1]}, "\ud800"]]
    rows = lazy_stack([lazy_stack([NonTensorData(v) for v in row]) for row in values])
    batch = TensorDict(
        {"o": rows, "const": NonTensorData("c", batch_size=[4, 2])}, [4, 2]
    )
    read = load(record(tmp_path / "r", [batch, batch], 1 << 20)).batch(1)
    assert read.get("o").tolist() == values
    assert [[type(v) for v in row] for row in read.get("o").tolist()] == [
        [type(v) for v in row] for row in values
    ]
    assert read.get("const").tolist() == [["c", "c"]] * 4
    assert read[2, 1].get("o").tolist() == [1, ["x"]]


@pytest.mark.parametrize(
    "value", [(1, 2), {1: 2}, range(3), b"x", {"a": {3}}, 1j], ids=repr
)
def test_objects_that_json_would_change_are_refused(tmp_path, value):
    batch = TensorDict(
        {
            "x": torch.zeros(2),
            "o": lazy_stack([NonTensorData(value), NonTensorData("s")]),
        },
        [2],
    )
    with Recorder(tmp_path / "r", meta={}) as recorder:
        with pytest.raises(UnsupportedSpace, match="o holds"):
            recorder.write(batch)
        recorder.write(batch.exclude("o"))
    assert len(load(tmp_path / "r")) == 2
    with pytest.raises(BadOption, match="meta may hold"):
        Recorder(tmp_path / "s", meta={"x": [value]})


def test_tensors_that_cannot_be_stored_are_refused(tmp_path):
    with (
        Recorder(tmp_path / "r", meta={}) as recorder,
        pytest.raises(UnsupportedSpace, match="complex128"),
    ):
        recorder.write(TensorDict({"x": torch.zeros(2, dtype=torch.complex128)}, [2]))


def test_chunks_are_valid_safetensors(small):
    from safetensors.torch import load_file

    path, batches = small
    tensors = load_file(path / chunk_name(2))
    assert torch.equal(
        tensors["next/reward"][0].transpose(0, 1), batches[2]["next", "reward"]
    )


def test_batches_that_are_read_have_memory_of_their_own(tmp_path, batches):
    record(tmp_path / "r", batches[:3], chunk_bytes=1 << 20)
    recording = load(tmp_path / "r")
    kept = recording.batch(2)
    for i in (0, 1, 1, 0, 2):  # one chunk has them all
        batch = recording.batch(i)
        assert same(batch, batches[i])
        batch["next", "reward"].fill_(7.0)
    assert same(kept, batches[2])
    assert [
        same(a, b) for a, b in zip(load(tmp_path / "r"), batches[:3], strict=True)
    ] == [True] * 3


def test_the_batch_may_be_changed_after_write(tmp_path, batches):
    with Recorder(tmp_path / "r", meta={}) as recorder:
        copy = batches[0].clone()
        recorder.write(copy)
        copy.zero_()
    assert same(load(tmp_path / "r").batch(0), batches[0])


def test_reading_holds_no_descriptors(small):
    recording = load(small[0])
    before = open_files()
    held = list(recording)
    assert open_files() <= before
    assert len(held) == 4


def test_a_batch_of_another_length_gets_its_own_chunk_and_other_keys_are_refused(
    tmp_path,
):
    envs = CountingEnvs(2, [3])
    parts = [envs.batch(4), envs.batch(4), envs.batch(2), envs.batch(4)]
    with Recorder(tmp_path / "r", meta={}) as recorder:
        for batch in parts:
            recorder.write(batch)
        with pytest.raises(BadRecording, match="observation is missing"):
            recorder.write(parts[0].exclude("observation"))
        with pytest.raises(BadRecording, match="extra is new"):
            recorder.write(parts[0].clone().set("extra", torch.zeros(2, 4)))
        with pytest.raises(BadRecording, match=r"observation is .*float64"):
            recorder.write(
                parts[0]
                .clone()
                .set("observation", torch.zeros(2, 4, 2, dtype=torch.float64))
            )
    recording = load(tmp_path / "r")
    assert all(same(a, b) for a, b in zip(parts, recording, strict=True))
    assert len(list((tmp_path / "r").glob("chunk-*"))) == 3
    with pytest.raises(BadRecording, match="closed"):
        recorder.write(parts[0])


def test_the_manifest_describes_the_recording(small):
    manifest = json.loads((small[0] / "recording.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("muster-recording", 2)
    assert manifest["meta"] == {"env": "Counting-v0", "seed": 3}
    assert manifest["keys"]["observation"] == {"dtype": "float32", "shape": [2]}
    assert manifest["keys"]["next.done"] == {"dtype": "bool", "shape": [1]}
    assert (
        manifest["frames_per_batch"],
        manifest["batch_size"],
        manifest["frames"],
    ) == (
        8,
        [2, 4],
        32,
    )
    assert sorted(os.listdir(small[0])) == [
        *(chunk_name(i) for i in range(4)),
        "recording.json",
    ]
    assert "Counting-v0" in repr(load(small[0]))


# ------------------------------------------------------------------------------------------ episodes


@pytest.mark.parametrize(
    ("B", "T", "chunk_bytes"),
    [(1, 3, 1), (3, 5, 1), (3, 5, 500), (2, 11, 1 << 20), (4, 1, 300)],
)
def test_episodes_equal_what_the_environments_did(tmp_path, B, T, chunk_bytes):
    envs = CountingEnvs(B, [4, 7, 1, 9])
    recording = load(
        record(tmp_path / "r", [envs.batch(T) for _ in range(9)], chunk_bytes)
    )
    truth = {i: e for i, e in envs.truth.items() if e["length"]}
    assert {e.traj_id for e in recording.episodes} == set(truth)
    for i, episode in enumerate(recording.episodes):
        real = truth[episode.traj_id]
        assert (episode.env, episode.length) == (real["env"], real["length"])
        assert episode.episode_return == sum(t + 0.5 for t in range(real["length"]))
        assert episode.terminated == (real.get("ended") == "terminated")
        assert episode.truncated == (real.get("ended") == "truncated")
        assert episode.complete == ("ended" in real)
        rows = recording.episode(i)
        assert rows.batch_size == (real["length"],)
        assert rows.names == ["time"]
        assert rows["observation"].tolist() == real["obs"]
        first_batch, row = episode.start
        assert (
            recording.batch(first_batch)["observation"][episode.env, row].tolist()
            == real["obs"][0]
        )
        last_batch, row = episode.end
        assert (
            recording.batch(last_batch)["observation"][episode.env, row].tolist()
            == real["obs"][-1]
        )
    assert [e.start for e in recording.episodes] == sorted(
        e.start for e in recording.episodes
    )


@pytest.mark.parametrize("shape", ["unbatched", "stacked", "time_major"])
def test_episodes_of_other_batch_shapes(tmp_path, shape):
    envs = CountingEnvs(1 if shape == "unbatched" else 4, [3, 5])
    parts = [envs.batch(4) for _ in range(3)]
    if shape == "unbatched":
        parts = [part[0] for part in parts]
    elif shape == "stacked":
        parts = [part.reshape(2, 2, 4) for part in parts]
        for part in parts:
            part.names = [None, None, "time"]
    else:
        parts = [part.transpose(0, 1) for part in parts]
    recording = load(record(tmp_path / "r", parts))
    for i, episode in enumerate(recording.episodes):
        assert episode.env == envs.truth[episode.traj_id]["env"]
        assert (
            recording.episode(i)["observation"].tolist()
            == envs.truth[episode.traj_id]["obs"]
        )


def test_episodes_that_began_before_the_recording_are_incomplete(tmp_path):
    envs = CountingEnvs(1, [4])
    envs.batch(2)
    with Recorder(tmp_path / "r", meta={}, fresh=False) as recorder:
        recorder.write(envs.batch(9))
    assert [(e.length, e.complete) for e in load(tmp_path / "r").episodes] == [
        (2, False),
        (4, True),
        (3, False),
    ]


def test_episodes_with_a_hole_are_incomplete(tmp_path):
    envs = CountingEnvs(1, [5])
    record(
        tmp_path / "r", [envs.batch(2) for _ in range(8)]
    )  # episode 1 is rows 5 to 9, in batches 2, 3, 4
    (tmp_path / "r" / chunk_name(3)).unlink()
    with pytest.raises(BadRecording, match=r"chunk-000003.* missing.*skip_damaged"):
        load(tmp_path / "r")
    recording = load(tmp_path / "r", skip_damaged=True)
    assert recording.lost is not None
    assert chunk_name(3) in recording.lost
    assert [(e.length, e.complete) for e in recording.episodes] == [
        (5, True),
        (3, False),
        (5, True),
        (1, False),
    ]


def test_interleaved_workers_keep_their_episodes_apart(tmp_path):
    """First-ready collection: batches of several workers in any order, told apart by traj_ids
    alone.
    """
    a, b = CountingEnvs(1, [5]), CountingEnvs(1, [3])
    b.ids, b.next_id, b.truth = [100], 101, {100: {"env": 0, "length": 0, "obs": []}}
    record(tmp_path / "r", [env.batch(2) for env in (a, b, b, a, a, b, a)])
    recording = load(tmp_path / "r")
    truth = a.truth | b.truth
    for i, episode in enumerate(recording.episodes):
        assert (
            recording.episode(i)["observation"].tolist()
            == truth[episode.traj_id]["obs"]
        )
        assert episode.complete == ("ended" in truth[episode.traj_id])


def test_an_episode_has_the_number_of_its_first_environment(tmp_path):
    """As when a worker is lost, and another one continues in its place."""
    envs = CountingEnvs(2, [5, 7])
    first, second = envs.batch(3), envs.batch(3)
    recording = load(record(tmp_path / "r", [first, second.flip(0)]))
    assert [(e.env, e.pieces[-1].env) for e in recording.episodes[:2]] == [
        (0, 1),
        (1, 0),
    ]
    assert (
        recording.episode(0)["observation"].tolist()
        == envs.truth[recording.episodes[0].traj_id]["obs"]
    )


PADDED: dict[str, dict[str, Any]] = {
    "no resets": {"reset_when_done": False},
    "split": {"split_trajs": True},
    "split, no resets": {"split_trajs": True, "reset_when_done": False},
    "episodes": {"trajs_per_batch": 3, "traj_format": "pad"},
}


@pytest.mark.parametrize("how", PADDED)
def test_padding_is_no_episode(tmp_path, how):
    lengths = iter([3, 5, 7] * 20)
    with Collector(
        lambda: CountingEnv(next(lengths)),
        None,
        num_envs=3,
        frames_per_batch=30,
        total_frames=120,
        record=tmp_path / "r",
        **PADDED[how],
    ) as collector:
        for _ in collector:
            pass
    episodes = load(tmp_path / "r").episodes
    assert all(episode.traj_id >= 0 for episode in episodes)
    complete = [episode for episode in episodes if episode.complete]
    assert {episode.length for episode in complete} == {3, 5, 7}
    assert all(
        episode.episode_return == episode.length * (episode.length + 1) / 2
        for episode in complete
    )
    assert len(complete) >= 3


def test_is_init_tells_beginnings_where_the_recording_cannot(tmp_path):
    envs = CountingEnvs(1, [3])
    batch = envs.batch(6)
    batch["collector", "is_init"] = batch["observation"][..., 1:] == 0
    with Recorder(tmp_path / "r", meta={}, fresh=False) as recorder:
        recorder.write(batch)
    assert [e.complete for e in load(tmp_path / "r").episodes] == [True, True]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_what_a_collector_delivers_comes_back(tmp_path, num_envs):
    records, batches = [], []
    with (
        Collector(
            partial(Words, 5),
            None,
            num_envs=num_envs,
            frames_per_batch=12,
            total_frames=60,
            seed=0,
        ) as collector,
        Recorder(tmp_path / "r", meta={}, chunk_bytes=2000) as recorder,
    ):
        for batch in collector:
            recorder.write(batch)
            batches.append(batch)
            records += list(collector.episodes)
    recording = load(tmp_path / "r")
    assert recording.lost is None
    assert all(same(a, b) for a, b in zip(batches, recording, strict=True))
    table = {
        e.traj_id: (e.env, e.episode_return, e.length, e.terminated)
        for e in recording.episodes
        if e.complete
    }
    assert table == {
        r.traj_id: (r.env_id, r.episode_return, r.length, r.terminated) for r in records
    }
    words = recording.episode(1).get("word").tolist()
    assert words == [f"at {n}" for n in range(5)]


def test_without_ids_there_is_no_table(tmp_path):
    recording = load(record(tmp_path / "r", [TensorDict({"x": torch.zeros(3)}, [3])]))
    with pytest.raises(BadRecording, match="traj_ids"):
        _ = recording.episodes


# ------------------------------------------------------------------------------------------ damage


def check_nothing_is_wrong(path: Path, batches: list[TensorDict]) -> str:
    """Read what can be read; every row must be right, or an error (or note) must have said why not."""
    try:
        recording = load(path)
        read = list(recording)
    except BadRecording as error:
        return str(error)
    assert all(same(a, b) for a, b in zip(read, batches, strict=False))
    if len(read) < len(batches):
        assert recording.lost
    return recording.lost or ""


def copied(small: tuple[Path, list[TensorDict]], tmp: Path) -> Path:
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.copytree(small[0], tmp)
    return tmp


def test_a_cut_at_any_byte_of_the_last_chunk_loses_only_that(tmp_path):
    parts = [TensorDict({"x": torch.arange(3) + i}, [3]) for i in range(2)]
    path = record(tmp_path / "r", parts)
    last = path / chunk_name(1)
    whole = last.read_bytes()
    for cut in reversed(range(len(whole))):
        os.truncate(last, cut)
        recording = load(path)
        assert recording.lost is not None
        assert f"{last} was cut" in recording.lost
        assert recording.batches == 1
    assert same(recording.batch(0), parts[0])


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_anywhere_is_noticed(small, tmp_path_factory, data):
    path = copied(small, tmp_path_factory.getbasetemp() / "cut")
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    file.write_bytes(
        file.read_bytes()[: data.draw(st.integers(0, file.stat().st_size - 1))]
    )
    assert file.name in check_nothing_is_wrong(path, small[1])


@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(small, tmp_path_factory, data):
    path = copied(small, tmp_path_factory.getbasetemp() / "flip")
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    changed = bytes(content) != file.read_bytes()
    file.write_bytes(content)
    said = check_nothing_is_wrong(path, small[1])
    assert (file.name in said) == changed


def test_damage_in_the_middle_can_be_left_out(path, small):
    content = bytearray((path / chunk_name(1)).read_bytes())
    content[-3] ^= 4
    (path / chunk_name(1)).write_bytes(content)
    recording = load(path)
    assert same(recording.batch(2), small[1][2])  # every undamaged chunk is readable
    with pytest.raises(BadRecording, match=r"chunk-000001.*checksum.*skip_damaged"):
        recording.batch(1)
    with pytest.raises(BadRecording, match="chunk-000001"):
        recording.verify()
    rest = load(path, skip_damaged=True)
    assert [
        same(a, b) for a, b in zip(rest, [small[1][i] for i in (0, 2, 3)], strict=True)
    ] == [True] * 3
    assert rest.lost is not None
    assert "chunk-000001" in rest.lost


def test_chunks_swapped_or_of_another_recording_are_noticed(path, small, tmp_path):
    (path / chunk_name(1)).rename(path / "x")
    (path / chunk_name(2)).rename(path / chunk_name(1))
    (path / "x").rename(path / chunk_name(2))
    with pytest.raises(BadRecording, match="chunk 2 under another name"):
        load(path)
    other = record(tmp_path / "other", small[1])
    shutil.copy(other / chunk_name(2), path / chunk_name(2))
    shutil.copy(small[0] / chunk_name(1), path / chunk_name(1))
    with pytest.raises(BadRecording, match="another recording"):
        load(path)


def test_missing_last_chunks_and_a_missing_manifest_are_noticed(path, small):
    (path / chunk_name(3)).unlink()
    assert "last 1 of 4 chunks" in (load(path).lost or "")
    (path / "recording.json").unlink()
    recording = load(path)
    assert "recording.json" in (recording.lost or "")
    assert recording.meta == {"env": "Counting-v0", "seed": 3}
    assert [same(a, b) for a, b in zip(recording, small[1][:3], strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_no_recording(tmp_path, what):
    path = tmp_path / "r"
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("x")
    with pytest.raises(BadRecording, match=str(path)):
        load(path)


def test_a_recording_of_version_2_is_read_as_it_was_written():
    """By the first commit that wrote it, with what ``small`` has."""
    envs = CountingEnvs(2, [3, 5])
    written = [envs.batch(4, text=texts(2, 4, str(i))) for i in range(3)]
    recording = load(VERSION_2)
    assert [same(a, b) for a, b in zip(recording, written, strict=True)] == [True] * 3
    assert recording.lost is None
    assert [episode.length for episode in recording.episodes[:2]] == [3, 5]
    recording.verify()


def test_another_version_is_refused_with_the_way_out(path):
    manifest = json.loads((path / "recording.json").read_text()) | {"version": 99}
    (path / "recording.json").write_bytes(seal(manifest))
    with pytest.raises(BadRecording, match="version 99"):
        load(path)
    with pytest.raises(
        BadRecording,
        match=r"version 1; this Muster reads .* version 2\. Read it with the version",
    ):
        load(VERSION_1)


@pytest.mark.parametrize(
    ("part", "lie"),
    [
        ("about", {"batches": 2}),
        ("about", {"batches": 10**15}),
        ("about", {"batches": -1}),
        ("about", {"batches": True}),
        ("about", {"batches": 0}),
        ("about", {"batch_size": [4, 2]}),
        ("about", {"batch_size": [10**12, 4]}),
        ("about", {"batch_size": []}),
        ("about", {"batch_size": [0, 5]}),
        ("about", {"order": [0, 0]}),
        ("about", {"names": ["time"]}),
        ("about", {"names": [{}, "time"]}),
        ("about", {"names": ["time", "time"]}),
        ("about", {"objects": ["observation"]}),
        ("about", {"manifest": {}}),
        ("about", {"first_batch": 7}),
        (
            "leaf",
            {"dtype": "F32", "shape": [1, 4, 2, 10**15], "data_offsets": [64, 128]},
        ),
        ("leaf", {"dtype": "F32", "shape": [1, 4, 2, 2], "data_offsets": [-64, 0]}),
        ("leaf", {"dtype": "F32", "shape": [1, 4, 2, 2], "data_offsets": [0, 64]}),
        (
            "leaf",
            {
                "dtype": "F32",
                "shape": [1, 4, 2, 2],
                "data_offsets": [10**18, 10**18 + 64],
            },
        ),
        ("leaf", {"dtype": "O", "shape": [1, 4, 2, 2], "data_offsets": [64, 128]}),
        ("leaf", {"shape": [1, 4, 2, 2]}),
    ],
    ids=str,
)
def test_headers_that_lie_are_refused(path, part, lie):
    def change(
        header: dict[str, Any], about: dict[str, Any], crcs: dict[str, str]
    ) -> None:
        about.update(lie) if part == "about" else header.update({"observation": lie})

    rewrite(path / chunk_name(1), change)
    with pytest.raises(BadRecording, match="chunk-000001"):
        load(path)


DEEP = b"[" * 100_000 + b"]" * 100_000
UNREADABLE = [DEEP, b"9" * 5000, b'"\xff"', b"{", b"nothing"]


def sealed(rest: bytes) -> bytes:
    """A text with a right checksum, whatever it is: what an attacker can make."""
    return b'{"crc32": "%08x",' % zlib.crc32(rest) + rest


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_sealed_manifest_that_is_no_json_is_as_if_damaged(path, small, what):
    (path / "recording.json").write_bytes(sealed(b'"x": ' + what + b"}"))
    assert "recording.json is damaged" in check_nothing_is_wrong(path, small[1])


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_sealed_header_that_is_no_json_is_refused(path, what):
    quoted = json.dumps(sealed(b'"x": ' + what).decode("latin1")).encode()
    for text in (
        b'{"x": ' + what + b"}",
        b'{"__metadata__": {"muster": ' + quoted + b"}}",
    ):
        (path / chunk_name(1)).write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(BadRecording, match="chunk-000001"):
            load(path)


@pytest.mark.parametrize(
    "depth", range(50, 800, 50)
)  # beyond it depends on the caller's own depth
def test_a_manifest_of_any_depth_is_refused_for_its_format(path, depth):
    what = b"[" * depth + b"]" * depth
    (path / "recording.json").write_bytes(sealed(b'"format": ' + what + b"}"))
    with pytest.raises(BadRecording, match=r"recording\.json is"):
        load(path)


def test_objects_that_are_no_json_are_refused(tmp_path):
    for what in UNREADABLE:
        deep = TensorDict(
            {"o": NonTensorStack(NonTensorData("x" * len(what)), NonTensorData(""))},
            [2],
        )
        path = record(tmp_path / f"r{UNREADABLE.index(what)}", [deep])
        content = (path / chunk_name(0)).read_bytes()
        length = int.from_bytes(content[:8], "little")
        data = content[8 + length :]
        text = what + b"\n" * (len(data) - len(what))
        (path / chunk_name(0)).write_bytes(content[: 8 + length] + text)
        crc = zlib.crc32(text, zlib.crc32(f"torch.uint8 [{len(text)}]".encode()))
        rewrite(
            path / chunk_name(0),
            lambda _, about, crcs, crc=crc: crcs.update(o=f"{crc:08x}"),
        )
        recording = load(path)
        with pytest.raises(BadRecording, match="objects are not what the header says"):
            recording.batch(0)


@pytest.mark.parametrize("key", ["collector/traj_ids", "next/reward", "next/done"])
def test_a_table_of_episodes_needs_numbers(path, tmp_path, key):
    first = key.split("/")

    def objects(batch: TensorDict) -> TensorDict:
        size = list(batch.batch_size)
        return batch.clone().set(
            tuple(first), lazy_stack([NonTensorStack(*["x"] * size[1])] * size[0])
        )

    def nothing(batch: TensorDict) -> TensorDict:
        return batch.clone().set(tuple(first), torch.zeros(*batch.batch_size, 0))

    for number, change in enumerate((objects, nothing)):
        other = record(tmp_path / f"o{number}", [change(batch) for batch in load(path)])
        with pytest.raises(BadRecording, match=f"no table of episodes.*{first[1]}"):
            _ = load(other).episodes


def test_more_frames_than_bytes_are_refused(tmp_path):
    path = record(tmp_path / "r", [TensorDict({"x": torch.zeros(3, 0)}, [3])])

    def claim(
        header: dict[str, Any], about: dict[str, Any], crcs: dict[str, str]
    ) -> None:
        about["batches"] = 10**15
        header["x"]["shape"] = [10**15, 3, 0]

    rewrite(path / chunk_name(0), claim)
    recording = load(path)
    assert len(recording) == 0
    assert "more frames than bytes" in (recording.lost or "")


def rewrite(path: Path, change: Any) -> None:
    """A chunk with a changed header and a right checksum: what an attacker can make."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    muster = json.loads(header["__metadata__"]["muster"])
    change(header, muster["about"], muster["tensors"])
    del muster["crc32"]
    header["__metadata__"] = {"muster": seal(muster).decode()}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


# ------------------------------------------------------------------------------------------ links and paths


def test_links_are_not_followed(path, tmp_path):
    (path / chunk_name(3)).rename(tmp_path / "elsewhere")
    (path / chunk_name(3)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRecording, match="symbolic link"):
        load(path)
    (path / chunk_name(3)).unlink()
    os.mkfifo(path / chunk_name(3))
    with pytest.raises(BadRecording, match="not an ordinary file"):
        load(path)


def test_the_writer_follows_no_links_and_keys_are_no_paths(tmp_path, batches):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = tmp_path / "r"
    target.mkdir()
    links = ["recording.json.0123456789ab.tmp", chunk_name(0) + ".0123456789ab.tmp"]
    for name in links:
        (target / name).symlink_to(victim)
    evil = batches[0].clone().set(("../../../x", "/etc/y\x00"), torch.zeros(3, 5))
    record(target, [evil])
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["r", "victim"]
    assert sorted({*os.listdir(target)} - {*links}) == [chunk_name(0), "recording.json"]
    assert same(load(target).batch(0), evil)
    for name in ("recording.json", chunk_name(0), ".lock"):
        other = tmp_path / f"s{name}"
        other.mkdir()
        (other / name).symlink_to(victim)
        with pytest.raises(BadRecording, match="already holds|Cannot record"):
            Recorder(other, meta={})
    assert victim.read_text() == "precious"


def test_nothing_is_overwritten(path):
    for _ in range(2):
        with pytest.raises(BadRecording, match="already holds a recording"):
            Recorder(path, meta={})
        (path / "recording.json").unlink(
            missing_ok=True
        )  # chunks alone are a recording, too
    assert load(path).batches == 4


def test_two_recorders_in_one_directory(tmp_path, batches):
    with Recorder(tmp_path / "r", meta={}, chunk_bytes=1) as recorder:
        recorder.write(batches[0])
        with pytest.raises(BadRecording, match=f"another recorder.*pid {os.getpid()}"):
            Recorder(tmp_path / "r", meta={})
        running = load(tmp_path / "r")
        assert running.batches == 1
        assert "still being recorded" in (running.lost or "")
        recorder.write(batches[1])
    assert [
        same(a, b) for a, b in zip(load(tmp_path / "r"), batches[:2], strict=True)
    ] == [
        True,
        True,
    ]


# ------------------------------------------------------------------------------------------ full disk, kill -9


def numbered(i: int, objects: bool) -> TensorDict:
    """400 bytes that say which batch it is."""
    batch = TensorDict({"i": torch.full((50,), i)}, [50])
    if objects:
        batch["name"] = NonTensorStack(*[NonTensorData(f"batch {i}")] * 50)
    return batch


def numbers(path: Path) -> list[int]:
    recording = load(path)
    assert all(batch["i"].unique().numel() == 1 for batch in recording)
    if "name" in (recording.batch(0).keys() if recording.batches else ()):
        assert [b["name"][0] for b in recording] == [
            f"batch {int(b['i'][0])}" for b in recording
        ]
    return [int(batch["i"][0]) for batch in recording]


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("again", [True, False])
def test_a_write_that_raises_has_not_taken_its_batch_and_may_be_repeated(
    tmp_path, per_chunk, again, objects
):
    recorder = Recorder(tmp_path / "r", meta={}, chunk_bytes=400 * per_chunk)
    expected: list[int] = []
    causes: list[int | None] = []
    for i in range(12):
        full = i in (2, 3, 4, 8)
        before = recorder.frames + recorder.pending_frames
        with files_limited_to(10 if full else resource.RLIM_INFINITY):
            try:
                recorder.write(numbered(i, objects))
            except BadRecording as error:
                assert full
                causes.append(getattr(error.__cause__, "errno", None))
                assert not list((tmp_path / "r").glob("chunk*.tmp"))
                assert recorder.frames + recorder.pending_frames == before
                raised = True
            else:
                assert recorder.frames + recorder.pending_frames == before + 50
                raised = False
        if raised and again:
            recorder.write(numbered(i, objects))
        if again or not raised:
            expected.append(i)
    recorder.close()
    assert numbers(tmp_path / "r") == expected
    assert load(tmp_path / "r").lost is None
    assert not again or expected == list(range(12))
    assert set(causes) == {errno.EFBIG}


def test_after_a_first_batch_that_cannot_be_written_another_one_may_come(tmp_path):
    recorder = Recorder(tmp_path / "r", meta={}, chunk_bytes=1)
    with files_limited_to(10), pytest.raises(BadRecording, match="chunk-000000"):
        recorder.write(numbered(0, objects=False))
    recorder.write(numbered(0, objects=True))
    recorder.close()
    assert load(tmp_path / "r").manifest["keys"].keys() == {"i", "name"}
    assert numbers(tmp_path / "r") == [0]


def test_an_interrupted_write_has_not_taken_its_batch(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "r", meta={}, chunk_bytes=800)
    recorder.write(numbered(0, objects=True))
    fsync, calls = os.fsync, 0

    def interrupted(fd: int) -> None:
        nonlocal calls
        calls += 1
        fsync(fd)
        if calls == 2:  # of the directory, after the chunk is in its place
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.write(numbered(1, objects=True))
    assert recorder.pending_frames == 50
    assert not list((tmp_path / "r").glob("chunk*"))
    for i in (1, 2):
        recorder.write(numbered(i, objects=True))
    recorder.close()
    assert numbers(tmp_path / "r") == [0, 1, 2]


def test_a_full_disk_to_the_end_is_told(tmp_path, batches):
    def fill_up() -> None:
        with (
            ExitStack() as limit,
            Recorder(tmp_path / "r", meta={}, chunk_bytes=1) as recorder,
        ):
            recorder.write(batches[0])
            limit.enter_context(files_limited_to(1000))
            recorder.write(batches[1])

    with pytest.raises(
        BadRecording, match=r"15 frames in 1 chunks are on disk.*was not recorded"
    ):
        fill_up()
    recording = load(tmp_path / "r")
    assert same(recording.batch(0), batches[0])
    assert recording.batches == 1
    assert recording.lost is None  # of what write() took
    with pytest.raises(BadRecording, match="already holds"):
        Recorder(
            tmp_path / "r", meta={}
        )  # and not "another recorder": the lock was let go of


def test_a_disk_that_is_full_at_the_end_is_told_by_close(tmp_path, batches):
    recorder = Recorder(tmp_path / "r", meta={})
    recorder.write(batches[0])
    with (
        files_limited_to(1000),
        pytest.raises(BadRecording, match="0 frames in 0 chunks are on disk"),
    ):
        recorder.close()
    assert recorder.pending_frames == 15
    assert "open" in repr(recorder)
    with pytest.raises(BadRecording, match="another recorder"):
        Recorder(tmp_path / "r", meta={})
    recorder.close()
    assert same(load(tmp_path / "r").batch(0), batches[0])
    assert load(tmp_path / "r").lost is None


def test_a_manifest_that_does_not_fit_at_the_end_is_written_by_the_next_close(tmp_path):
    recorder = Recorder(tmp_path / "r", meta={"long": "x" * 3000})
    recorder.write(numbered(0, objects=False))
    recorder.flush()
    with (
        files_limited_to(2900),
        pytest.raises(BadRecording, match=r"recording\.json.*50 frames in 1 chunks"),
    ):
        recorder.close()
    recorder.close()
    assert numbers(tmp_path / "r") == [0]
    assert load(tmp_path / "r").lost is None


def test_a_recorder_that_is_thrown_away_lets_go_of_its_directory(tmp_path, batches):
    recorder = Recorder(tmp_path / "r", meta={})
    recorder.write(batches[0])
    with pytest.raises(BadRecording, match="another recorder"):
        Recorder(tmp_path / "r", meta={})
    del recorder
    gc.collect()
    with pytest.raises(BadRecording, match="already holds"):
        Recorder(tmp_path / "r", meta={})
    assert "not closed" in (load(tmp_path / "r").lost or "")


def record_until_killed(path: Path, when: str) -> None:
    """In a forked child: SIGKILL before or after the rename of the third chunk."""
    rename, chunks = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal chunks
        chunks += "chunk" in str(target)
        if chunks == 3 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if chunks == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    recorder = Recorder(path, meta={"killed": True}, chunk_bytes=1)
    for i in range(9):
        recorder.write(TensorDict({"x": torch.full((4,), i)}, [4]))


@pytest.mark.parametrize(("when", "kept"), [("before", 2), ("after", 3)])
def test_kill_9_keeps_every_whole_chunk(tmp_path, when, kept):
    pid = os.fork()
    if pid == 0:
        try:
            record_until_killed(tmp_path / "r", when)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    recording = load(tmp_path / "r")
    assert [batch["x"].tolist() for batch in recording] == [
        [i] * 4 for i in range(kept)
    ]
    assert "not closed" in (recording.lost or "")
    assert ("being written" in (recording.lost or "")) == (when == "before")
    with pytest.raises(BadRecording, match="already holds"):
        Recorder(tmp_path / "r", meta={})


def test_nothing_written_yet(tmp_path):
    Recorder(tmp_path / "r", meta={"a": 1}).close()
    recording = load(tmp_path / "r")
    assert (len(recording), recording.batches, list(recording), recording.episodes) == (
        0,
        0,
        [],
        (),
    )
    assert recording.lost is None
    assert recording.meta == {"a": 1}


def test_slow_environments_do_not_keep_frames_in_memory(tmp_path, batches):
    recorder = Recorder(tmp_path / "r", meta={}, max_age_s=0)
    recorder.write(batches[0])
    assert (recorder.frames, recorder.pending_frames) == (15, 0)
    recorder.close()
