"""Exports: what the target's own reader finds is what the complete episodes of the recording have."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path

import datasets
import gymnasium
import huggingface_hub
import imageio_ffmpeg
import minari
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrl.data.datasets.lerobot import LeRobotExperienceReplay, _LeRobotSnapshot

from muster import Collector, MultiSyncCollector
from muster.cli.main import main
from muster.errors import BadOption, BadRecording
from muster.recording import Recorder, Recording, load
from muster.recording.export import UNFINISHED
from muster.testing import (
    CountingEnv,
    Fault,
    InfoEnv,
    OracleEnv,
    SpaceEnv,
    TorchCartPole,
)
from muster.testing.oracle import EXECUTED
from tests.fakes.faults import Signalled
from tests.fakes.seeded import SeededEnv
from tests.fakes.words import Words

NAMES = dict.fromkeys(("t", "stage", "half", "place", "goal")) | InfoEnv.SPACES
BOX = spaces.Box(-1, 1, (3,), np.float32)
PICTURE = spaces.Box(0, 255, (6, 5, 3), np.uint8)
OBSERVATIONS = [
    BOX,
    spaces.Box(-1, 1, (2, 2), np.float64),
    PICTURE,
    spaces.Discrete(4),
    spaces.MultiBinary(3),
    spaces.Dict(a=BOX, pixels=PICTURE, n=spaces.Discrete(3)),
    spaces.Tuple([spaces.Discrete(3), BOX]),
]
ACTIONS = [
    spaces.Discrete(3),
    spaces.Discrete(2, start=1),
    BOX,
    spaces.MultiDiscrete([2, 3]),
    spaces.Dict(x=spaces.Discrete(2), y=BOX),
]
PAIRS = list(zip(OBSERVATIONS, itertools.cycle(ACTIONS), strict=False))


@pytest.fixture(autouse=True)
def own_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def recorded(path, env, *, batches=4, frames=10, meta=None, **options):
    """A recording of random actions."""
    collector = Collector(
        env,
        None,
        frames_per_batch=frames,
        total_frames=batches * frames,
        seed=0,
        **options,
    )
    with collector, Recorder(path, meta=meta or {}) as recorder:
        for batch in collector:
            recorder.write(batch)
    return load(path)


def whole(recording):
    """The complete episodes."""
    return [
        recording.episode(i)
        for i, episode in enumerate(recording.episodes)
        if episode.complete
    ]


def same(found, expected):
    """Compare nested dicts and tuples of arrays bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        found, expected = np.asarray(found), np.asarray(expected)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found, expected)


def as_space(data, space, name, *, is_observation):
    """A column of an episode, nested as the space; observations with the one after the last step."""
    if isinstance(space, spaces.Dict):
        names = {key: (key if is_observation else (name, key)) for key in space}
        return {
            key: as_space(data, space[key], names[key], is_observation=is_observation)
            for key in space
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            as_space(data, each, (name, str(i)), is_observation=is_observation)
            for i, each in enumerate(space)
        )
    rows = data[name]
    if is_observation:
        path = (name,) if isinstance(name, str) else name
        rows = torch.cat([rows, data[("next", *path)][-1:]])
    return rows.numpy()


class TestMinari:
    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        observation=st.sampled_from(OBSERVATIONS),
        action=st.sampled_from(ACTIONS),
        length=st.integers(1, 5),
        num_envs=st.sampled_from([None, 1, 3]),
        T=st.integers(2, 7),
        names_spaces=st.booleans(),
    )
    @pytest.mark.slow
    def test_minari_reads_what_was_recorded(
        self, tmp_path_factory, observation, action, length, num_envs, T, names_spaces
    ):
        env = partial(SpaceEnv, observation, action, length)
        folder = tmp_path_factory.mktemp("run")
        recording = recorded(
            folder / "run", env, frames=T * (num_envs or 1), num_envs=num_envs
        )
        expected = whole(recording)
        given_spaces = (
            {"observation_space": observation, "action_space": action}
            if names_spaces
            else {}
        )
        if not expected:
            with pytest.raises(BadRecording, match="no complete episode"):
                recording.to_minari(f"{folder.name}-v0", **given_spaces)
            return
        done = recording.to_minari(f"{folder.name}-v0", **given_spaces)
        dataset = minari.load_dataset(f"{folder.name}-v0")
        assert (
            (done.episodes, done.frames)
            == (dataset.total_episodes, dataset.total_steps)
            == (len(expected), sum(map(len, expected)))
        )
        assert done.left_out.get(UNFINISHED, 0) == len(recording.episodes) - len(
            expected
        )
        batches = list(load(f"minari:{folder.name}-v0"))
        for found, data, batch in zip(
            dataset.iterate_episodes(), expected, batches, strict=True
        ):
            same(
                found.observations,
                as_space(data, observation, "observation", is_observation=True),
            )
            same(found.actions, as_space(data, action, "action", is_observation=False))
            for name, key in (
                ("rewards", "reward"),
                ("terminations", "terminated"),
                ("truncations", "truncated"),
            ):
                same(getattr(found, name), data["next", key].numpy()[:, 0])
            for key, value in data.exclude(("collector", "traj_ids")).items(
                include_nested=True, leaves_only=True
            ):
                same(batch[key], value)
        for each in (
            dataset.iterate_episodes()
            if not names_spaces and observation == BOX
            else ()
        ):
            assert all(map(dataset.observation_space.contains, each.observations))

    def test_infos_have_a_row_more_and_a_mask(self, tmp_path):
        recording = recorded(tmp_path / "run", partial(InfoEnv, 3), info=NAMES)
        recording.to_minari("infos-v0")
        for found, data in zip(
            minari.load_dataset("infos-v0").iterate_episodes(),
            whole(recording),
            strict=True,
        ):
            columns = data["info"].items(include_nested=True, leaves_only=True)
            assert columns
            for key, rows in columns:
                if not torch.is_tensor(rows):
                    continue
                path = key if isinstance(key, tuple) else (key,)
                value = found.infos
                for name in path:
                    value = value[name]
                same(
                    value, torch.cat([rows, data[("next", "info", *path)][-1:]]).numpy()
                )

    def test_a_known_environment_gives_its_spaces(self, tmp_path):
        recording = recorded(
            tmp_path / "run", "CartPole-v1", frames=64, meta={"env": "CartPole-v1"}
        )
        recording.to_minari(
            "cart/random-v0", metadata={"algorithm_name": "random", "author": "us"}
        )
        dataset = minari.load_dataset("cart/random-v0")
        assert (dataset.env_spec.id, dataset.action_space) == (
            "CartPole-v1",
            spaces.Discrete(2),
        )
        assert dataset.storage.metadata["algorithm_name"] == "random"
        assert (
            load(tmp_path / "minari" / "cart" / "random-v0").meta["env"]
            == "CartPole-v1"
        )

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Dict({"observation": BOX}),
            spaces.Dict({"0": BOX, "1": BOX}),
            spaces.Tuple((BOX, BOX)),
        ],
        ids=str,
    )
    def test_spaces_that_are_given_say_how_columns_are_nested(self, tmp_path, space):
        recording = recorded(tmp_path / "run", partial(SpaceEnv, space, BOX))
        recording.to_minari("nested-v0", observation_space=space, action_space=BOX)
        dataset = minari.load_dataset("nested-v0")
        assert dataset.observation_space == space
        for found, data in zip(
            dataset.iterate_episodes(), whole(recording), strict=True
        ):
            expected = as_space(data, space, "observation", is_observation=True)
            same(found.observations, expected)

    def test_a_space_that_does_not_fit_is_refused(self, tmp_path):
        recording = recorded(tmp_path / "run", partial(CountingEnv, 3))
        with pytest.raises(BadOption, match=r"has a, and the recording has \['observ"):
            recording.to_minari(
                "other-v0",
                observation_space=spaces.Dict({"a": BOX}),
                action_space=spaces.Discrete(2),
            )

    def test_texts_come_back(self, tmp_path):
        recording = recorded(tmp_path / "run", Words)
        recording.to_minari("words-v0")
        for found, data in zip(load("minari:words-v0"), whole(recording), strict=True):
            assert list(found["word"]) == list(data["word"])
            assert list(found["next", "word"]) == list(data["next", "word"])
            assert torch.equal(found["t"], data["t"])

    def test_an_environment_of_the_program_gives_no_spec(self, tmp_path):
        name = "OfTheProgram-v0"
        gymnasium.register(name, partial(CountingEnv, 3))
        try:
            recording = recorded(tmp_path / "run", name, meta={"env": name})
            recording.to_minari("ours-v0")
            assert minari.load_dataset("ours-v0").env_spec is None
            with pytest.raises(BadOption, match="leave env out"):
                recording.to_minari("theirs-v0", env=name)
        finally:
            gymnasium.registry.pop(name)

    def test_no_dataset_is_overwritten_and_none_is_left_half_written(self, tmp_path):
        recording = recorded(tmp_path / "run", partial(CountingEnv, 3))
        recording.to_minari("counts-v0")
        with pytest.raises(BadOption, match="there is a Minari dataset"):
            recording.to_minari("counts-v0")
        with pytest.raises(BadOption, match="Minari refuses"):
            recording.to_minari("others-v0", metadata={"author": 3})
        assert list(minari.list_local_datasets()) == ["counts-v0"]
        assert not (tmp_path / "minari" / "others-v0").exists()
        with pytest.raises(BadRecording, match="Minari cannot open"):
            load("minari:others-v0")

    def test_a_recording_without_next_observations_is_refused(self, tmp_path):
        recording = recorded(
            tmp_path / "run", partial(CountingEnv, 3), compact_obs=True
        )
        with pytest.raises(BadRecording, match="compact_obs"):
            recording.to_minari("compact-v0")

    def test_episodes_whose_end_is_unknown_are_left_out(self, tmp_path):
        recording = recorded(
            tmp_path / "run", TorchCartPole(2, final_obs=False, max_steps=5), frames=24
        )
        with pytest.raises(
            BadRecording, match=r"18 left out \(the last observation is unknown\)"
        ):
            recording.to_minari("cart-v0")
        assert recording.to_parquet(tmp_path / "steps.parquet").episodes == 18

    def test_batches_of_a_dataset_are_read_by_number(self, tmp_path):
        recording = recorded(tmp_path / "run", partial(CountingEnv, 3))
        recording.to_minari("counts-v0")
        found = load("minari:counts-v0")
        assert (len(found), found.batches) == (
            sum(map(len, whole(recording))),
            len(whole(recording)),
        )
        assert [e.length for e in found.episodes] == [
            e.length for e in recording.episodes if e.complete
        ]
        assert [e.episode_return for e in found.episodes] == [
            e.episode_return for e in recording.episodes if e.complete
        ]
        assert torch.equal(
            found.batch(1)["observation"], whole(recording)[1]["observation"]
        )
        with pytest.raises(IndexError):
            found.batch(found.batches)


def columns_of(recording):
    """All columns of the complete episodes, one after another; numbers as nested lists."""
    joined = torch.cat(whole(recording))
    return {
        ".".join(key if isinstance(key, tuple) else (key,)): value
        for key, value in joined.items(True, True)
    }


def rows_of(value):
    return value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value


@pytest.mark.parametrize(("observation", "action"), PAIRS)
def test_parquet_has_a_row_per_step(tmp_path, observation, action):
    recording = recorded(
        tmp_path / "run",
        partial(SpaceEnv, observation, action, 3),
        frames=21,
        num_envs=3,
    )
    done = recording.to_parquet(tmp_path / "steps.parquet")
    table = pq.read_table(tmp_path / "steps.parquet")
    lengths = [len(data) for data in whole(recording)]
    assert done.frames == len(table) == sum(lengths)
    assert (
        table["episode"].to_pylist() == np.repeat(range(len(lengths)), lengths).tolist()
    )
    assert table["step"].to_pylist() == [t for length in lengths for t in range(length)]
    expected = columns_of(recording)
    assert set(table.column_names) == {"episode", "step", *expected}
    hf = datasets.load_dataset(
        "parquet",
        data_files=str(done.path),
        split="train",
        cache_dir=str(tmp_path / "hf"),
    )
    for name, value in expected.items():
        flat = name.startswith(("next.", "collector.")) and "observation" not in name
        flat = flat or name in ("done", "terminated", "truncated")
        wanted = (rows_of(value) if flat else value).tolist()
        assert table[name].to_pylist() == wanted
        assert hf[name][:] == wanted


def test_text_and_masks_of_infos_are_columns_of_parquet(tmp_path):
    recording = recorded(tmp_path / "run", partial(InfoEnv, 3), info=NAMES)
    recording.to_parquet(tmp_path / "steps.parquet")
    table = pq.read_table(tmp_path / "steps.parquet")
    joined = torch.cat(whole(recording))
    names = [name for name in table.column_names if name.startswith("info.")]
    assert any(table.schema.field(name).type == "string" for name in names)
    for name in names:
        rows = joined.get(tuple(name.split(".")))
        assert table[name].to_pylist() == rows.tolist()


def test_an_existing_file_is_not_overwritten(tmp_path):
    recording = recorded(tmp_path / "run", partial(CountingEnv, 3))
    (tmp_path / "mine").write_text("x")
    for write in (recording.to_parquet, recording.to_lerobot):
        with pytest.raises(BadOption, match="exists"):
            write(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "x"


class TestLeRobot:
    def snapshot(self, path, monkeypatch):
        """The dataset as TorchRL's reader finds it."""
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *_, **__: str(path)
        )
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path.parent / "hf")
        return _LeRobotSnapshot("muster/test")

    @pytest.mark.parametrize(("observation", "action"), PAIRS)
    def test_torchrl_reads_what_was_recorded(
        self, tmp_path, monkeypatch, observation, action
    ):
        recording = recorded(
            tmp_path / "run",
            partial(SpaceEnv, observation, action, 3),
            frames=21,
            num_envs=3,
        )
        done = recording.to_lerobot(tmp_path / "out", fps=10, task="count")
        found = self.snapshot(done.path, monkeypatch)
        columns = LeRobotExperienceReplay._extract_columns(found)
        joined, lengths = (
            torch.cat(whole(recording)),
            [len(data) for data in whole(recording)],
        )
        assert columns["task"] == ["count"] * sum(lengths)
        assert (
            columns["episode_index"].tolist()
            == np.repeat(range(len(lengths)), lengths).tolist()
        )
        assert columns["index"].tolist() == list(range(sum(lengths)))
        assert columns["frame_index"].tolist() == [
            t for length in lengths for t in range(length)
        ]
        assert torch.equal(columns["timestamp"], columns["frame_index"] / 10)
        assert [row["length"] for row in found.episodes] == lengths
        ends = np.cumsum(lengths).tolist()
        assert [row["dataset_to_index"] for row in found.episodes] == ends
        names = {"observation.state": "observation", "observation.image": "observation"}
        names |= {f"observation.{key}": key for key in ("a", "n")} | {
            "observation.images.pixels": "pixels"
        }
        names |= {f"observation.{i}": ("observation", str(i)) for i in range(2)}
        checked = 0
        for name, column in columns.items():
            if name in names and name not in found.video_keys:
                wanted = rows_of(joined[names[name]])
                assert torch.equal(
                    column, wanted.float() if wanted.is_floating_point() else wanted
                ), "torch's default dtype"
            elif name.startswith(("action", "next.")):
                assert torch.equal(column, rows_of(joined[tuple(name.split("."))]))
            else:
                continue
            checked += 1
        assert checked >= 4
        for name in found.video_keys:
            paths, counts = found.video_segments(name)
            frames = read_mp4(paths[0])
            expected = np.pad(
                joined[names[name]].numpy(), ((0, 0), (0, 0), (0, 1), (0, 0)), "edge"
            )
            assert counts == [len(frames)] == [sum(lengths)]
            assert frames.shape == expected.shape
        assert bool(found.video_keys) == (observation in (PICTURE, OBSERVATIONS[5]))

    def test_videos_show_the_pictures_of_their_steps(self, tmp_path):
        recording = recorded(tmp_path / "run", Painted, frames=40)
        recording.to_lerobot(tmp_path / "out")
        frames = read_mp4(
            tmp_path / "out/videos/observation.image/chunk-000/file-000.mp4"
        )
        expected = torch.cat(whole(recording))["observation"].movedim(1, 3).numpy()
        assert frames.shape == expected.shape
        assert (
            np.abs(
                frames.astype(int).mean((1, 2, 3))
                - expected.astype(int).mean((1, 2, 3))
            ).max()
            < 8
        )

    def test_statistics_are_those_of_all_frames(self, tmp_path):
        recording = recorded(
            tmp_path / "run", partial(SpaceEnv, BOX, ACTIONS[0], 3), frames=21
        )
        recording.to_lerobot(tmp_path / "out")
        stats = json.loads((tmp_path / "out/meta/stats.json").read_text())[
            "observation.state"
        ]
        rows = torch.cat(whole(recording))["observation"].double().numpy()
        for name in ("min", "max", "mean", "std"):
            assert stats[name] == pytest.approx(getattr(np, name)(rows, axis=0))
        assert stats["count"] == [len(rows)]

    def test_long_recordings_have_several_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr("muster.recording.lerobot.FILE_PICTURES", 7)
        monkeypatch.setattr("muster.recording.lerobot.FILES_PER_CHUNK", 2)
        recording = recorded(tmp_path / "run", Painted, batches=1, frames=27)
        done = recording.to_lerobot(tmp_path / "out")
        found = self.snapshot(done.path, monkeypatch)
        paths, counts = found.video_segments("observation.image")
        assert len(paths) > 3
        assert [Path(path).parent.name for path in paths[:3]] == [
            "chunk-000",
            "chunk-000",
            "chunk-001",
        ]
        assert counts == [len(read_mp4(path)) for path in paths]
        spans: dict[tuple[int, int], list[float]] = {}
        name = "videos/observation.image"
        for row in found.episodes:
            ends = spans.setdefault(
                (row[f"{name}/chunk_index"], row[f"{name}/file_index"]), [0.0]
            )
            assert row[f"{name}/from_timestamp"] == ends[-1]
            ends.append(row[f"{name}/to_timestamp"])
        assert [round(ends[-1] * found.fps) for ends in spans.values()] == counts
        assert len(list((done.path / "data").rglob("*.parquet"))) == len(paths)
        assert list(found.hf_dataset["index"]) == list(range(done.frames))


class Painted(CountingEnv):
    """Pictures that get brighter with the step."""

    def __init__(self):
        super().__init__(5)
        self.observation_space = spaces.Box(0, 255, (3, 16, 16), np.uint8)

    def reset(self, **options):
        obs, info = super().reset(**options)
        return self.paint(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.paint(obs), *rest

    def paint(self, obs):
        return np.full((3, 16, 16), 40 * int(obs[-1]) + 20, np.uint8)


def read_mp4(path):
    """The pictures of a video, ``[n, height, width, 3]``."""
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack(
        [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    )


def test_a_lost_workers_episodes_are_not_exported(tmp_path):
    counts = tmp_path / "counts"
    dies = Fault(Signalled(signal.SIGKILL), at=25)
    envs = [partial(OracleEnv, counts, 0, 1, dies), partial(OracleEnv, counts, 1)]
    options = {
        "frames_per_batch": 20,
        "total_frames": 200,
        "seed": 0,
        "on_failure": "restart",
    }
    with (
        MultiSyncCollector(envs, None, **options) as collector,
        Recorder(tmp_path / "run", meta={}) as recorder,
    ):
        for batch in collector:
            recorder.write(batch)
    recording = load(tmp_path / "run")
    done = recording.to_minari("oracle-v0")
    assert done.left_out[UNFINISHED] > 2, (
        "those that the end cut, and the one of the lost worker"
    )
    runs = set()
    for episode in minari.load_dataset("oracle-v0").iterate_episodes():
        env, run, number, step = episode.observations[:, :4].T
        assert (
            len({*zip(env.tolist(), run.tolist(), number.tolist(), strict=True)}) == 1
        )
        assert step.tolist() == list(range(len(episode.rewards) + 1))
        runs.add((int(env[0]), int(run[0])))
    assert runs >= {(0, 0), (0, 1), (1, 0)}
    assert OracleEnv.read(counts)[:, EXECUTED].sum() >= 200


def test_the_command_line_exports(tmp_path, capsys):
    assert (
        main(
            [
                "collect",
                "CartPole-v1",
                "--frames",
                "1000",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert isinstance(load(tmp_path / "run"), Recording)
    for kind, out in (
        ("minari", "cart-v0"),
        ("lerobot", tmp_path / "le"),
        ("parquet", tmp_path / "p.parquet"),
    ):
        assert (
            main(["export", str(tmp_path / "run"), "--to", kind, "--out", str(out)])
            == 0
        )
    said = capsys.readouterr().out
    assert said.count("episodes, ") == 3
    assert "left out" in said
    assert (
        main(
            [
                "export",
                str(tmp_path / "none"),
                "--to",
                "parquet",
                "--out",
                str(tmp_path / "q.parquet"),
            ]
        )
        == 2
    )
    assert minari.load_dataset("cart-v0").env_spec.id == "CartPole-v1"


# --- seeds ----------------------------------------------------------------------------------------


def test_exports_have_the_seeds_of_episodes(tmp_path):
    seeds = [5, 3, 11, 7, 2]
    recording = recorded(
        tmp_path / "in",
        SeededEnv,
        num_envs=2,
        frames=20,
        track_seeds=True,
        episode_seeds=seeds,
    )
    expected = [int(episode["observation"][0, 0]) for episode in whole(recording)]
    assert set(expected) == set(seeds)
    recording.to_minari("seeded-v0")
    found = minari.load_dataset("seeded-v0")
    stored = list(found.storage.get_episode_metadata(range(found.total_episodes)))
    assert [one["seed"] for one in stored] == expected
    recording.to_lerobot(tmp_path / "lerobot")
    table = pq.read_table(tmp_path / "lerobot" / "meta" / "episodes")
    assert table["seed"].to_pylist() == expected
    recording.to_parquet(tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet")
    number = rows["episode"].to_pylist()
    assert rows["collector.seed"].to_pylist() == [expected[i] for i in number]


def test_episodes_without_a_seed(tmp_path):
    recording = recorded(
        tmp_path / "in", SeededEnv, num_envs=2, frames=20, track_seeds=True
    )
    expected = [int(episode["observation"][0, 0]) for episode in whole(recording)]
    assert {-1, 0, 1} == set(expected)
    recording.to_minari("some-v0")
    found = minari.load_dataset("some-v0")
    stored = list(found.storage.get_episode_metadata(range(found.total_episodes)))
    assert [one.get("seed") or -1 for one in stored] == [
        seed or -1 for seed in expected
    ]
    recording.to_lerobot(tmp_path / "lerobot")
    table = pq.read_table(tmp_path / "lerobot" / "meta" / "episodes")
    assert table["seed"].to_pylist() == [
        None if seed < 0 else seed for seed in expected
    ]


def test_recordings_without_seeds_are_exported_as_before(tmp_path):
    recording = recorded(tmp_path / "in", SeededEnv, num_envs=2, frames=20)
    recording.to_lerobot(tmp_path / "lerobot")
    table = pq.read_table(tmp_path / "lerobot" / "meta" / "episodes")
    assert "seed" not in table.column_names
