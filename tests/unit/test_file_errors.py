"""Files that cannot be written or read: a typed error with the path and the remedy, in time, and
nothing is changed.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from muster import (
    Collector,
    Evaluator,
    Recorder,
    Timeline,
    Watch,
    load,
    load_state,
    save_state,
)
from muster.cli.main import main
from muster.errors import BadCheckpoint, BadRecording, FileError, HookError, MusterError
from muster.observing.loggers import JsonlLogger, TensorBoardLogger
from muster.observing.profiling import ProfileConfig, RolloutProfiler
from muster.observing.snapshots import SnapshotReader
from muster.recording.chunks import MANIFEST, chunk_name
from muster.restore.crash_report import CrashDirectory, CrashReport, EnvFactory
from muster.restore.film import load_own
from muster.restore.kept_episodes import EPISODES
from muster.testing import CountingEnv
from muster.utils.mp4 import is_complete, write_mp4
from muster.utils.whole_files import explained, make_folder, open_regular, write_whole
from tests.tools import files_limited_to

STATE = {"weights": np.arange(1000.0)}
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="makes device files and file systems")


# --- what writes and reads ------------------------------------------------------------------------


def crash_report() -> CrashReport:
    with Evaluator(CountingEnv, None, episodes=1) as evaluator:
        evaluation = evaluator.evaluate()
    assert evaluation.tape is not None
    report = evaluation.tape.crash_report(
        evaluation.records[0], EnvFactory(CountingEnv, None)
    )
    report.episode = {"episode_return": 6.0, "length": 3, "env_id": 0, "traj_id": 0}
    return report


@pytest.fixture(scope="module")
def moves() -> CrashReport:
    return crash_report()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("recorded") / "run")


def recorded(path: Path) -> Path:
    with Collector(
        CountingEnv, None, frames_per_batch=12, total_frames=48, record=path
    ) as collector:
        list(collector)
    return path


def timeline(path: Path) -> None:
    spans = Timeline()
    spans.start()
    for n in range(100):
        spans.add("env", n, n + 1)
    spans.save(path)


def profile(path: Path) -> None:
    profiler = RolloutProfiler(
        ProfileConfig(
            num_rollouts=1,
            warmup_rollouts=0,
            activities=["cpu"],
            save_path=path,
            with_stack=False,  # torch may be unable to read stacks
        )
    )
    profiler.start()
    torch.ones(3).sum()
    profiler.step()


def log(logger: Any) -> None:
    with logger:
        for step in range(20):
            logger({f"metric {n}": float(n) for n in range(20)}, step)


def autosaved(folder: Path) -> None:
    from muster import Autosave

    with Collector(
        CountingEnv, None, frames_per_batch=12, autosave=Autosave(folder, every=1e-9)
    ) as collector:
        collector.next()


def watched(folder: Path) -> None:
    with Collector(
        CountingEnv, None, frames_per_batch=12, watch=Watch(folder, address=None)
    ) as collector:
        collector.next()


def film(path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    rng = np.random.default_rng(0)
    write_mp4(
        path, (rng.integers(0, 255, (96, 96, 3), np.uint8) for _ in range(40)), 30.0
    )


WRITERS: dict[str, Callable[[Path], Any]] = {  # of a file
    "state": lambda path: save_state(path, STATE),
    "timeline": timeline,
    "profile": profile,
    "jsonl": lambda path: log(JsonlLogger(path)),
    "film": film,
}
FOLDERS: dict[str, Callable[[Path], Any]] = {  # of files in a folder
    "tensorboard": lambda folder: log(TensorBoardLogger(folder)),
    "recording": recorded,
    "autosave": autosaved,
    "watch": watched,
}
WITH_RUN = (
    "parquet",
    "lerobot",
    "crash report",
    "png",
)  # they write what another test has made
OWN_FOLDERS = {
    "timeline",
    "profile",
    "jsonl",
    "parquet",
    "lerobot",
    *FOLDERS,
}  # they create the folders above


def png(run: Path, path: Path) -> None:
    if main(["watch", str(run), "--png", str(path)]):
        raise MusterError("the command printed an error")


@pytest.fixture
def write(
    request: pytest.FixtureRequest, moves: CrashReport, recording: Path
) -> Callable[[str, Path], Any]:
    def call(name: str, path: Path) -> Any:
        if name == "parquet":
            pytest.importorskip("pyarrow")
            return load(recording).to_parquet(path)
        if name == "lerobot":
            pytest.importorskip("pyarrow")
            return load(recording).to_lerobot(path, task="count")
        if name == "crash report":
            return moves.save(path)
        return {**WRITERS, **FOLDERS}[name](path)

    return call


def in_time(call: Callable[[], Any], within_s: float = 120.0) -> Any:
    """The result of a call; a call that does not end fails the test instead of stopping all of
    them.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 (raised below)
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    assert found, "it waits without an end"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# --- writing --------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # like /dev/null


def link_to_device(path: Path) -> None:
    device(path.with_name("device"))
    path.symlink_to("device")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLACES = {
    "fifo": fifo,
    "folder": folder,
    "device": device,
    "link to a device": link_to_device,
    "socket": listening,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*WRITERS, "parquet", "lerobot", "crash report"])
def test_what_is_no_ordinary_file_is_not_written_to_and_stays(
    name, place, tmp_path, write
):
    if "device" in place and not ROOT:
        pytest.skip("needs root")
    path = tmp_path / "out.mp4"
    PLACES[place](path)
    before = os.lstat(path)
    with pytest.raises(MusterError) as caught:
        in_time(lambda: write(name, path))
    assert str(path) in str(caught.value)
    assert os.path.samestat(os.lstat(path), before)
    assert os.lstat(path).st_mode == before.st_mode
    assert not [left for left in os.listdir(tmp_path) if left.endswith(".tmp")]


@pytest.mark.parametrize(
    "name", [*WRITERS, *FOLDERS, "parquet", "lerobot", "crash report"]
)
def test_a_file_in_the_place_of_a_folder_is_named(name, tmp_path, write):
    (tmp_path / "file").write_text("precious")
    path = tmp_path / "file" / "out.mp4"
    with pytest.raises(
        MusterError, match=r"file.* (Not a directory|File exists|is a file|exists)"
    ) as caught:
        in_time(lambda: write(name, path))
    assert str(tmp_path / "file") in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_or_fifo_in_the_place_of_the_folder_itself_is_named(
    name, tmp_path, write
):
    (tmp_path / "file").write_text("precious")
    os.mkfifo(tmp_path / "fifo")
    for place in ("file", "fifo"):
        with pytest.raises(MusterError) as caught:
            in_time(lambda place=place: write(name, tmp_path / place))
        assert str(tmp_path / place) in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "name", [*WRITERS, *FOLDERS, "parquet", "lerobot", "crash report"]
)
def test_a_missing_folder_is_created_or_named(name, tmp_path, write):
    path = tmp_path / "a" / "b" / "out.mp4"
    if name in OWN_FOLDERS:
        write(name, path)
        assert path.exists()
        return
    with pytest.raises(
        FileError,
        match=f"^{path} cannot be written: No such file or directory. Check the path",
    ):
        write(name, path)


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a file system without new files"
)
@pytest.mark.parametrize(
    "name", [*WRITERS, *FOLDERS, "parquet", "lerobot", "crash report"]
)
def test_where_nothing_may_be_created_the_path_is_named(name, write):
    with pytest.raises(MusterError, match="/proc/"):
        in_time(lambda: write(name, Path("/proc/muster.mp4")))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of TensorBoard's thread
@pytest.mark.parametrize(
    "name",
    ["state", "timeline", "jsonl", "tensorboard", "parquet", "lerobot", "crash report"],
)
def test_a_full_disk_is_an_error_with_path_and_remedy_and_the_call_can_be_repeated(
    name, tmp_path, write
):
    path = tmp_path / "out.mp4"
    existing = name in ("state", "timeline", "crash report")
    if existing:
        path.write_text("old")
    with files_limited_to(120), pytest.raises(FileError) as caught:
        write(name, path)
    error = caught.value
    assert str(path) in str(error) or "muster-" in str(error), (
        "or the path of a temporary file"
    )
    assert "choose another path" in str(error)
    assert error.errno in (errno.EFBIG, errno.ENOSPC)
    assert isinstance(error.__cause__, OSError)
    assert not isinstance(error.__cause__, FileError)
    if existing:
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["out.mp4"]
    if name in ("parquet", "lerobot"):
        assert not path.exists()
    write(name, path)
    assert path.exists()


def test_an_autosave_on_a_full_disk_loses_nothing(tmp_path):
    from muster import Autosave

    options: Any = {"frames_per_batch": 12, "seed": 0}
    with Collector(CountingEnv, None, **options) as collector:
        expected = [collector.next()["observation"].clone() for _ in range(3)]
    with Collector(
        CountingEnv, None, autosave=Autosave(tmp_path / "states", every=1e-9), **options
    ) as collector:
        assert torch.equal(collector.next()["observation"], expected[0])
        [state] = (tmp_path / "states").iterdir()
        before = load_state(state)["engine"]
        for _ in range(2):
            with (
                files_limited_to(100),
                pytest.raises(
                    FileError, match=rf"^{state} cannot be written: .*ulimit -f"
                ),
            ):
                collector.next()
            assert load_state(state)["engine"].keys() == before.keys()
        assert torch.equal(collector.next()["observation"], expected[1])
        assert torch.equal(collector.next()["observation"], expected[2])


def test_a_logger_on_a_full_disk_stops_the_iteration_with_the_path_and_loses_nothing(
    tmp_path,
):
    logger = JsonlLogger(tmp_path / "log")
    with (
        logger,
        Collector(
            CountingEnv, None, frames_per_batch=12, total_frames=36, logger=logger
        ) as collector,
    ):
        batches = iter(collector)
        next(batches)
        with (
            files_limited_to(logger.path.stat().st_size + 20),
            pytest.raises(HookError, match=str(logger.path)),
        ):
            next(batches)
        assert len(list(collector)) >= 1
        assert collector.stats().frames == 36


def test_crash_reports_from_elsewhere_are_written_whole_or_not_at_all(tmp_path):
    directory = CrashDirectory(tmp_path / "crashes")
    with (
        files_limited_to(5),
        pytest.warns(
            UserWarning, match=rf"No crash report .*{tmp_path}.*cannot be written"
        ),
    ):
        assert directory.put("a.crash", b"1234567890") is None
    assert list((tmp_path / "crashes").iterdir()) == []
    path = directory.put("a.crash", b"1234567890")
    assert path is not None
    assert path.read_bytes() == b"1234567890"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").touch()
    with pytest.warns(
        UserWarning,
        match=rf"No crash report .*{tmp_path / 'file'} cannot be used as a folder",
    ):
        CrashDirectory(tmp_path / "file").put("a.crash", b"1")


FULL = """
import os, sys, tempfile
from pathlib import Path
from tests.fakes.mounts import mount, own_mounts
own_mounts()
mount(sys.argv[1], "64k")
tempfile.tempdir = sys.argv[1]
from muster.errors import FileError
from tests.unit.test_file_errors import STATE, film, save_state
try:
    film(Path(sys.argv[2]))
except FileError as error:
    print("film:", error)
print(os.path.exists(sys.argv[2]), [name for name in os.listdir(sys.argv[1]) if name.startswith("muster")])
tempfile.tempdir = None
place = Path(sys.argv[1], "state")
save_state(place, STATE)
content = place.read_bytes()
rest = os.open(Path(sys.argv[1], "rest"), os.O_WRONLY | os.O_CREAT)
try:
    while os.write(rest, bytes(1024)):
        pass
except OSError:
    pass
try:
    save_state(place, {"weights": STATE["weights"] + 1})
except FileError as error:
    print("state:", error)
print(place.read_bytes() == content)
"""


@needs_root
def test_a_file_system_without_space(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "small").mkdir()
    made = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "small"), str(tmp_path / "a.mp4")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "this needs root" in made.stderr:
        pytest.skip("no mounts here")
    film_error, nothing, state_error, unchanged = made.stdout.splitlines()
    assert (
        f"{tmp_path / 'a.mp4'} cannot be written: ffmpeg ended before the video was complete."
        in film_error
    )
    assert "TMPDIR" in film_error
    assert nothing == "False []"
    place = tmp_path / "small" / "state"
    assert (
        state_error
        == f"state: {place} cannot be written: No space left on device. Free space on its disk, or "
        + ("choose another path.")
    )
    assert unchanged == "True"


def test_a_place_for_a_film_is_looked_at_before_it_is_made(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    os.mkfifo(tmp_path / "fifo.mp4")
    for place in (tmp_path / "fifo.mp4", tmp_path / "none" / "a.mp4"):
        frames = (np.zeros((16, 16, 3), np.uint8) for _ in range(20))
        with pytest.raises(FileError, match=str(place)):
            write_mp4(place, frames, 30.0)
        assert len(list(frames)) >= 19


BOX = (16).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("content", "complete"),
    [
        (b"", False),
        (BOX + b"ftyp" + bytes(8), False),
        (BOX + b"ftyp" + bytes(8) + BOX + b"moov" + bytes(8), True),
        (BOX + b"ftyp" + bytes(8) + BOX + b"moov" + bytes(7), False),
        (BOX + b"moov" + bytes(8) + BOX, False),
        (
            BOX + b"moov" + bytes(8) + bytes(4) + b"mdat",
            False,
        ),  # of unknown size: the writer did not come back to it
        (
            b"\0\0\0\1mdat"
            + (24).to_bytes(8, "big")
            + bytes(8)
            + BOX
            + b"moov"
            + bytes(8),
            True,
        ),
        (
            b"\0\0\0\1mdat"
            + (99).to_bytes(8, "big")
            + bytes(8)
            + BOX
            + b"moov"
            + bytes(8),
            False,
        ),
    ],
)
def test_a_film_that_was_cut_is_recognised(tmp_path, content, complete):
    (tmp_path / "a.mp4").write_bytes(content)
    assert is_complete(tmp_path / "a.mp4") == complete


def test_a_picture_is_written_whole_and_under_its_name(tmp_path, capsys):
    watched(tmp_path / "run")
    os.mkfifo(tmp_path / "fifo.png")
    for name, message in (
        ("fifo.png", "it is a FIFO"),
        ("none/a.png", "No such file"),
        ("a.rubbish", "rubbish"),
    ):
        assert (
            in_time(
                lambda name=name: main(
                    ["watch", str(tmp_path / "run"), "--png", str(tmp_path / name)]
                )
            )
            == 2
        )
        error = capsys.readouterr().err
        assert str(tmp_path / name) in error
        assert message in error
    with files_limited_to(1000):
        assert (
            main(["watch", str(tmp_path / "run"), "--png", str(tmp_path / "b.png")])
            == 2
        )
    assert "ulimit -f" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["fifo.png", "run"]
    assert (
        main(["watch", str(tmp_path / "run"), "--png", str(tmp_path / "picture")]) == 0
    )
    assert (tmp_path / "picture").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["cluster"]])
def test_standard_output_on_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "wb") as full:
        made = subprocess.run(
            [sys.executable, "-m", "muster", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (made.returncode, made.stderr) == (
        2,
        "muster: the output cannot be written: No space left on device.\n",
    )


# --- reading --------------------------------------------------------------------------------------


def loaded(path: Path) -> None:
    with Collector(CountingEnv, None, frames_per_batch=12) as collector:
        collector.load_state_dict(path)


READERS: dict[str, Callable[[Path], Any]] = {
    "state": load_state,
    "collector": loaded,
    "crash report": CrashReport.load,
    "episode": lambda path: load_own(path, trust=True),
    "watch": SnapshotReader,
    "recording": load,
}


@pytest.mark.parametrize(
    "place", [*PLACES, "nothing", "link to nothing", "link to itself"]
)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_read(name, place, tmp_path):
    if "device" in place and not ROOT:
        pytest.skip("needs root")
    path = tmp_path / "in"
    if place in PLACES:
        PLACES[place](path)
    elif place != "nothing":
        path.symlink_to("in" if place == "link to itself" else "nowhere")
    with pytest.raises(MusterError) as caught:
        in_time(lambda: READERS[name](path))
    targets = (path, path.with_name("nowhere"), path.with_name("device"))
    assert any(str(target) in str(caught.value) for target in targets)


@pytest.mark.parametrize("part", [MANIFEST, chunk_name(0)])
def test_a_fifo_in_a_recording_does_not_wait(part, tmp_path):
    recorded(tmp_path / "run")
    (tmp_path / "run" / part).unlink()
    os.mkfifo(tmp_path / "run" / part)
    if part == MANIFEST:  # chunks have what it says
        assert len(in_time(lambda: load(tmp_path / "run"))) == 48
        (tmp_path / "run" / chunk_name(0)).unlink()
    with pytest.raises(BadRecording, match=f"{part}.*a FIFO, not an ordinary file"):
        in_time(lambda: load(tmp_path / "run"))


def test_a_fifo_as_lock_of_a_recording_does_not_wait(tmp_path):
    recorder = Recorder(tmp_path / "run", meta={}, chunk_bytes=1)
    recorder.write(TensorDict({"x": torch.zeros(3)}, [3]))
    recorder.flush()
    (tmp_path / "run" / ".lock").unlink()
    os.mkfifo(tmp_path / "run" / ".lock")
    assert len(in_time(lambda: load(tmp_path / "run"))) == 3
    recorder.close()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(BadRecording, match="Cannot record into"):
        in_time(lambda: Recorder(tmp_path, meta={}))


def test_a_fifo_in_the_place_of_a_runs_snapshots_or_episodes_does_not_wait(tmp_path):
    watched(tmp_path / "run")
    reader = SnapshotReader(tmp_path / "run")
    reader.read()
    reader.path.unlink()
    os.mkfifo(reader.path)
    with pytest.raises(FileError, match="a FIFO"):
        in_time(reader.read)
    reader.close()
    (tmp_path / EPISODES).mkdir()
    os.mkfifo(tmp_path / EPISODES / "best.episode")
    with pytest.raises(
        MusterError, match=r"best\.episode cannot be read: it is a FIFO"
    ):
        in_time(lambda: load_own(tmp_path / EPISODES / "best.episode", trust=True))


def test_links_to_files_are_followed_when_read_and_replaced_when_written(tmp_path):
    save_state(tmp_path / "a", {"n": 1})
    (tmp_path / "link").symlink_to("a")
    assert load_state(tmp_path / "link") == {"n": 1}
    save_state(tmp_path / "link", {"n": 2})
    assert load_state(tmp_path / "a") == {"n": 1}
    assert load_state(tmp_path / "link") == {"n": 2}


# --- the error itself -----------------------------------------------------------------------------


def test_a_file_error_is_an_error_of_the_system_and_one_of_muster(tmp_path):
    with pytest.raises(OSError, match="cannot be written: it is a folder") as caught:
        write_whole(tmp_path, [b""])
    error = caught.value
    assert isinstance(error, MusterError)
    assert (error.errno, error.strerror, error.filename) == (
        errno.EISDIR,
        "it is a folder",
        str(tmp_path),
    )
    assert (
        str(error)
        == f"{tmp_path} cannot be written: it is a folder. Give the path of a file."
    )
    assert isinstance(error, IsADirectoryError), "as Python calls it"
    assert type(error).__name__ == "FileError"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.errno) == (
        type(error),
        str(error),
        errno.EISDIR,
    )
    with pytest.raises(FileNotFoundError, match="Check the path"):
        save_state(tmp_path / "a" / "b", STATE)
    assert explained("elsewhere", "read", error) is error, (
        "what was named once is not named again"
    )
    assert (
        str(explained("x", "read", OSError(errno.EPROTO, "odd")))
        == "x cannot be read: odd."
    )
    assert str(FileError()) == ""


def test_a_file_that_is_open_stays_readable_and_no_descriptor_is_left(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    before = len(os.listdir("/proc/self/fd"))
    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"content"
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(FileError):
        open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    make_folder(tmp_path / "x" / "y")
    make_folder(tmp_path / "x" / "y")
    with pytest.raises(
        FileError,
        match=r"a cannot be used as a folder: File exists\. A file has that name",
    ):
        make_folder(tmp_path / "a")


def test_a_damaged_state_is_still_told_from_one_that_cannot_be_read(tmp_path):
    (tmp_path / "a").write_bytes(b"rubbish")
    with pytest.raises(BadCheckpoint, match="damaged"):
        load_state(tmp_path / "a")
    with pytest.raises(
        BadCheckpoint,
        match=rf"{tmp_path} cannot be read: it is a folder\. Give the path of a file",
    ):
        load_state(tmp_path)
