"""Films of the newest, best and worst episode of a watched run, repeated from seed and actions."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from muster import Collector, MultiSyncCollector, Watch
from muster.errors import BadCrashReport, ImportRefused, MusterError, UnsupportedEnv
from muster.observing.page_server import Films, PageAddress, PageServer
from muster.observing.snapshots import (
    EPISODES,
    NAME,
    WHICH,
    SnapshotFile,
    SnapshotReader,
)
from muster.restore import checkpoint, kept_episodes
from muster.restore.crash_report import EPISODE, CrashReport, EnvFactory
from muster.restore.film import film, film_command, film_of_kept, load_own
from muster.restore.player import Player
from muster.testing import CountingEnv
from tests.waits import wait_until


class WalkEnv(gym.Env):
    """The reward is the action times a number drawn at the reset; the episode ends at a drawn
    length.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self, render_mode: str | None = None, secret: float = 0.0, size: int = 16
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = spaces.Discrete(5)
        self.render_mode, self.secret, self.size = render_mode, secret, size

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.scale, self.length, self.t = (
            self.np_random.random(),
            int(self.np_random.integers(2, 9)),
            0,
        )
        self.secret *= 2  # not part of the random state
        return np.array([self.scale, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(self.scale * action + self.secret + self.np_random.random())
        return (
            np.array([self.scale, self.t], np.float32),
            reward,
            self.t >= self.length,
            False,
            {},
        )

    def render(self) -> Any:
        return np.full((self.size, self.size, 3), 20 * self.t, np.uint8)


def repeated(kept: CrashReport) -> tuple[float, int]:
    """Return and length of the last episode of the moves, played in a new environment."""
    with closing(Player(kept)) as player:
        total, length = 0.0, 0
        for move in player.moves():
            player.make(move)
            if move[0] == "reset":
                total, length = 0.0, 0
            else:
                total, length = total + player.outcome()[0].item(), length + 1
    return total, length


def loaded(directory: Any, which: str) -> CrashReport:
    return load_own(directory / EPISODES / f"{which}.episode", trust=True)


def numbers(kept: CrashReport) -> tuple[float, int]:
    return kept.episode["episode_return"], kept.episode["length"]


def collected(make: Any, directory: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Collect, and return the records of all episodes."""
    records: list[Any] = []
    cls = MultiSyncCollector if "num_workers" in options else Collector
    given = {"seed": 3, "watch": Watch(directory, None, films=True)} | options
    with cls(make, None, **given) as collector:
        for _ in collector:
            records += collector.episodes
    return collector, records


CASES = {
    "short batches": {"num_envs": 3, "frames_per_batch": 3, "total_frames": 600},
    "long batches": {"num_envs": 3, "frames_per_batch": 300, "total_frames": 600},
    "one environment": {"frames_per_batch": 7, "total_frames": 210},
    "limit": {
        "num_envs": 2,
        "frames_per_batch": 10,
        "total_frames": 200,
        "max_frames_per_traj": 4,
    },
    "waiting": {
        "num_envs": 2,
        "frames_per_batch": 20,
        "total_frames": 400,
        "reset_when_done": False,
    },
}


@pytest.mark.parametrize("joined", [1, 50, 8192])
@pytest.mark.parametrize("case", CASES)
def test_the_best_and_worst_episodes_are_kept_and_give_their_returns_again(
    tmp_path: Any, case: str, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.restore.crash_notes.MOST_STEPS", joined)
    _, records = collected(WalkEnv, tmp_path, **CASES[case])
    by_return = sorted(records, key=lambda record: record.episode_return)
    for which, record in (("best", by_return[-1]), ("worst", by_return[0])):
        kept = loaded(tmp_path, which)
        assert kept.episode == {name: getattr(record, name) for name in EPISODE}
        total, length = repeated(kept)
        assert length == record.length
        assert total == pytest.approx(record.episode_return, rel=1e-9)
    kept = loaded(tmp_path, "newest")
    assert kept.episode["traj_id"] in [record.traj_id for record in records]
    assert repeated(kept) == pytest.approx(numbers(kept), rel=1e-9)


def test_episodes_of_worker_processes_are_kept(tmp_path: Any) -> None:
    _, records = collected(
        [WalkEnv] * 2, tmp_path, num_workers=2, frames_per_batch=40, total_frames=400
    )
    best = max(records, key=lambda record: record.episode_return)
    kept = loaded(tmp_path, "best")
    assert kept.episode == {name: getattr(best, name) for name in EPISODE}
    assert repeated(kept) == pytest.approx((best.episode_return, best.length), rel=1e-9)


def test_seeds_resets_and_errors_in_between_are_repeated(tmp_path: Any) -> None:
    records: list[Any] = []
    options = {
        "num_envs": 2,
        "frames_per_batch": 4,
        "seed": 3,
        "watch": Watch(tmp_path, None, films=True),
    }
    with Collector(WalkEnv, None, **options) as collector:
        batches = iter(collector)
        for n in range(90):
            next(batches)
            records += collector.episodes
            if n % 9 == 4:
                collector.reset(np.array([n % 2]))
            if n % 9 == 7:
                collector.set_seed(n)
            if n == 50:
                state = collector.state_dict()
            if n == 60:
                collector.load_state_dict(state)
    for which in ("best", "worst"):
        kept = loaded(tmp_path, which)
        assert repeated(kept) == pytest.approx(numbers(kept), rel=1e-9)
        assert numbers(kept)[0] == {"best": max, "worst": min}[which](
            r.episode_return for r in records
        )


def test_an_episode_that_a_loaded_state_has_begun_is_not_repeated_from_another_start(
    tmp_path: Any,
) -> None:
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 2, "seed": 3}
    with Collector(WalkEnv, None, **options) as begun:
        batches = iter(begun)
        while not len(begun.episodes):
            next(batches)
        next(batches)
        state = begun.state_dict()
    with Collector(
        WalkEnv, None, **options, watch=Watch(tmp_path, None, films=True)
    ) as collector:
        collector.next()
        collector.load_state_dict(state)
        while not len(collector.episodes):
            collector.next()
    missing = [entry["missing"] for entry in entries(tmp_path).values()]
    assert missing
    assert all("cannot be replayed" in why for why in missing)


def test_environments_that_are_made_together_are_collected_and_not_repeated(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.restore.crash_notes.MOST_STEPS", 8)
    make = lambda: gym.vector.SyncVectorEnv([WalkEnv] * 3)  # noqa: E731
    _, records = collected(make, tmp_path, frames_per_batch=60, total_frames=600)
    assert records
    assert "made together" in first(tmp_path)["no_film"]


def entries(directory: Any) -> dict[str, Any]:
    """The newest line of each episode in the snapshots."""
    with closing(SnapshotReader(directory)) as reader:
        return {e["which"]: e for e in reader.read()[1] if e["kind"] == "episode"}


def first(directory: Any) -> dict[str, Any]:
    return dict(json.loads((directory / NAME).read_text().splitlines()[0]))


def test_what_cannot_be_repeated_is_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 40}
    collected(WalkEnv(), tmp_path / "object", **options)
    assert "environment object" in first(tmp_path / "object")["no_film"]
    lock = threading.Lock()
    collected(lambda: lock and WalkEnv(), tmp_path / "lock", **options)
    assert "cannot be pickled" in entries(tmp_path / "lock")["best"]["missing"]
    assert not (tmp_path / "lock" / EPISODES).exists()
    monkeypatch.setattr(kept_episodes, "LIMIT_BYTES", 30)
    collected(WalkEnv, tmp_path / "long", **options)
    assert "more than 30 bytes" in entries(tmp_path / "long")["best"]["missing"]
    collected("CartPole-v1", tmp_path / "vector", **options)
    assert first(tmp_path / "vector")["no_film"] == ""


def test_the_film_of_an_episode_has_a_picture_of_the_reset_and_of_every_step(
    tmp_path: Any,
) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    collected(WalkEnv, tmp_path, num_envs=2, frames_per_batch=8, total_frames=200)
    for which in WHICH:
        kept = loaded(tmp_path, which)
        made = film_of_kept(kept, tmp_path / f"{which}.mp4")
        length = kept.episode["length"]
        assert made == {**kept.episode, "frames": length + 1, "fps": 10.0, "note": ""}
        frames = list(imageio_ffmpeg.read_frames(str(tmp_path / f"{which}.mp4")))[1:]
        brightness = [np.frombuffer(frame, np.uint8).mean() for frame in frames]
        np.testing.assert_allclose(brightness, 20.0 * np.arange(length + 1), atol=4)


def test_a_film_that_differs_says_so(tmp_path: Any) -> None:
    pytest.importorskip("imageio_ffmpeg")
    collected(
        partial(WalkEnv, secret=1.0), tmp_path, frames_per_batch=50, total_frames=200
    )
    made = film_of_kept(loaded(tmp_path, "best"), tmp_path / "a.mp4")
    assert "is not the recorded episode" in made["note"]


def test_an_environment_without_pictures_is_refused(tmp_path: Any) -> None:
    pytest.importorskip("imageio_ffmpeg")
    collected(partial(CountingEnv, 3), tmp_path, frames_per_batch=12, total_frames=24)
    with pytest.raises(UnsupportedEnv, match="gives no pictures"):
        film(loaded(tmp_path, "best"), tmp_path / "a.mp4")


def test_files_that_run_code_need_trust_and_damaged_ones_are_refused(
    tmp_path: Any,
) -> None:
    collected(WalkEnv, tmp_path, frames_per_batch=20, total_frames=40)
    path = tmp_path / EPISODES / "best.episode"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ImportRefused):
        load_own(path, trust=False)
    whole = path.read_bytes()
    for content in (
        whole[:-5],
        b"",
        whole.replace(b"episode_return", b"episode_retorn"),
    ):
        path.write_bytes(content)
        with pytest.raises(MusterError):
            load_own(path, trust=True)
    with pytest.raises(BadCrashReport):
        load_own(tmp_path / "none", trust=True)
    CrashReport("x", EnvFactory("CartPole-v1"), [0], True, "step", "EnvError", "").save(
        path
    )
    with pytest.raises(BadCrashReport, match="No episode: .* is a crash report"):
        load_own(path, trust=True)
    checkpoint.save(path, checkpoint.load(path) | {"episode": {"length": "3"}})
    with pytest.raises(BadCrashReport, match=r"damaged: look at \['episode'\]"):
        load_own(path, trust=True)


# --- the server -----------------------------------------------------------------------------------


@contextmanager
def served(run: Any, command: list[str] | None) -> Any:
    page = PageAddress("127.0.0.1:0")
    with PageServer(run, page.socket, film=command) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(60)


def answer(port: int, method: str, path: str, **headers: str) -> tuple[int, Any, bytes]:
    with closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=200)
    ) as connection:
        connection.request(
            method,
            path,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        got = connection.getresponse()
        return got.status, got, got.read()


def test_a_viewer_can_ask_for_the_film_of_an_episode_and_for_nothing_else(
    tmp_path: Any,
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    collected(
        "CartPole-v1", tmp_path, frames_per_batch=50, total_frames=100
    )  # an id: no code in the file
    with served(tmp_path, film_command(trust=False)) as port:
        own = {"X_Muster_Watch": "1"}
        assert answer(port, "POST", "/films/0/best")[0] == 403, (
            "a page elsewhere can send this"
        )
        for path in (
            "/films/",
            "/films/best",
            "/films/0/other",
            "/films/1/best",
            "/films/0/best/",
            "/",
        ):
            assert answer(port, "POST", path, **own)[0] == 404
        assert (
            answer(port, "POST", "/films/0/best", **own, Host="evil.example")[0] == 403
        )
        assert answer(port, "GET", "/films/1.mp4")[0] == 404
        status, _, content = answer(port, "POST", "/films/0/best", **own)
        made = json.loads(content)
        assert (status, made["note"], made["film"]) == (200, "", 1), made
        assert made["frames"] == made["length"] + 1
        _, _, whole = answer(port, "GET", "/films/1.mp4")
        assert whole[4:8] == b"ftyp"
        status, got, part = answer(port, "GET", "/films/1.mp4", Range="bytes=4-7")
        assert (status, part, got.getheader("Content-Range")) == (
            206,
            b"ftyp",
            f"bytes 4-7/{len(whole)}",
        )
        assert answer(port, "GET", "/films/1.mp4", Range="bytes=8-")[2] == whole[8:]
        assert answer(port, "GET", "/films/2.mp4")[0] == 404
        (tmp_path / EPISODES / "worst.episode").write_bytes(b"rubbish")
        assert (
            "No episode"
            in json.loads(answer(port, "POST", "/films/0/worst", **own)[2])["error"]
        )
        assert answer(port, "GET", "/episodes/best.episode")[0] == 404


def test_code_of_the_directory_runs_only_if_it_is_trusted_and_only_the_users_own(
    tmp_path: Any,
) -> None:
    pytest.importorskip("imageio_ffmpeg")

    def make(render_mode: str | None = None) -> WalkEnv:
        (tmp_path / "ran").touch()
        return WalkEnv(render_mode)

    collected(make, tmp_path / "run", frames_per_batch=20, total_frames=40)
    (tmp_path / "ran").unlink()
    path = tmp_path / "run" / EPISODES / "best.episode"
    with pytest.raises(ImportRefused, match="restart muster watch with --trust"):
        load_own(path, trust=False)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ImportRefused, match="others may write it"):
            load_own(path, trust=True)
    path.chmod(0o600)
    made = film_of_kept(load_own(path, trust=True), tmp_path / "a.mp4")
    assert made["frames"] == made["length"] + 1
    assert (tmp_path / "ran").exists()


def test_one_film_at_a_time_and_none_after_the_end(tmp_path: Any) -> None:
    films = Films(
        [
            sys.executable,
            "-c",
            "import sys; sys.stdin.read(); import signal; signal.pause()",
        ]
    )
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(films.make(tmp_path / "best.episode"))
    )
    thread.start()
    wait_until(lambda: films._process is not None)
    assert "Another film" in films.make(tmp_path / "worst.episode")["error"]
    films.close()
    thread.join(60)
    assert f"died ({-signal.SIGKILL})" in answers[0]["error"]
    assert "makes no films" in Films(None).make(tmp_path / "best.episode")["error"]


def test_a_small_file_keeps_the_newest_line_of_each_episode(tmp_path: Any) -> None:
    from tests.unit.test_watch import line

    known = {"episode_return": 1.0, "env_id": 0, "missing": ""}
    file = SnapshotFile(tmp_path, {"env": "a"}, limit_bytes=20_000)
    with closing(file):
        for n in range(60):
            file.append("episode", which=WHICH[n % 3], length=n, **known)
            file.append(
                "snapshot",
                **{k: v for k, v in line(n).items() if k not in ("kind", "time")},
            )
        file.append("episode", which="other", length=1, **known)
    assert os.stat(tmp_path / NAME).st_size < 25_000
    assert {which: entry["length"] for which, entry in entries(tmp_path).items()} == {
        "newest": 57, "best": 58, "worst": 59,
    }  # fmt: skip
