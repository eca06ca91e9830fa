"""Files appear whole or not at all, whoever else writes to the same path, and whatever becomes of
the others.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from muster.utils.whole_files import (
    TEMPORARY,
    read_json,
    write_whole,
    written_elsewhere,
)

forked = multiprocessing.get_context("fork")


def save_again_and_again(path: Path, content: bytes, times: int, failed: Any) -> None:
    for _ in range(times):
        try:
            write_whole(path, [content, content])
        except OSError:
            failed.value += 1


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_several_writers_of_one_path_never_fail_and_readers_see_one_of_their_files(
    tmp_path, kind
):
    path, failed = tmp_path / "state", forked.Value("i", 0)
    contents = [bytes([n]) * 200_000 for n in range(3)]
    start = forked.Process if kind == "processes" else threading.Thread
    writers: list[Any] = [
        start(target=save_again_and_again, args=(path, c, 60, failed)) for c in contents
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_bytes())
    for writer in writers:
        writer.join()
    assert failed.value == 0
    assert seen <= {content * 2 for content in contents}
    assert os.listdir(tmp_path) == ["state"]


def killed_in_the_middle(path: Path) -> None:
    """Leave what a process leaves that is killed while it writes."""

    def parts() -> Any:
        yield b"half"
        os.kill(os.getpid(), signal.SIGKILL)

    process = forked.Process(target=write_whole, args=(path, parts()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_what_killed_writers_leave_does_not_pile_up(tmp_path):
    path = tmp_path / "state"
    write_whole(path, [b"old"])
    for _ in range(3):
        killed_in_the_middle(path)
        assert path.read_bytes() == b"old"
        assert (
            len(os.listdir(tmp_path)) == 2
        )  # the next one removes what the one before has left
    write_whole(path, [b"new"])
    assert os.listdir(tmp_path) == ["state"]


def test_what_others_are_writing_and_other_files_are_left_alone(tmp_path):
    path = tmp_path / "state"
    others = [
        "state.tmp",
        "state.old.tmp",
        "states.0123456789ab.tmp",
        "state.0123456789ab.tmp.bak",
    ]
    for name in others:
        (tmp_path / name).touch()
    reached: list[Any] = []

    def parts() -> Any:
        reached.append(sorted(set(os.listdir(tmp_path)) - set(others)))
        write_whole(path, [b"inner"])
        reached.append(sorted(set(os.listdir(tmp_path)) - set(others)))
        yield b"outer"

    write_whole(path, parts())
    (temporary,) = reached[0]
    assert temporary.startswith("state.")
    assert temporary.endswith(TEMPORARY)
    assert reached[1] == ["state", temporary]
    assert path.read_bytes() == b"outer"
    assert sorted(os.listdir(tmp_path)) == sorted(["state", *others])


def test_a_writer_that_fails_changes_and_leaves_nothing(tmp_path):
    path = tmp_path / "state"
    write_whole(path, [b"old"])

    def parts() -> Any:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, parts())
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["state"])
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "state", [b""])


def test_permissions_are_kept_and_never_wider_than_asked_for(tmp_path):
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    umask = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", [b""])
        write_whole(tmp_path / "secret", [b""], mode=0o600)
        for name in ("kept", "narrowed"):
            (tmp_path / name).touch()
        (tmp_path / "kept").chmod(0o664)
        (tmp_path / "narrowed").chmod(0o644)
        write_whole(tmp_path / "kept", [b""])
        write_whole(tmp_path / "narrowed", [b""], mode=0o600)
    finally:
        os.umask(umask)
    modes = {
        name: oct(mode(tmp_path / name))
        for name in ("new", "secret", "kept", "narrowed")
    }
    assert modes == {
        "new": "0o640",
        "secret": "0o600",
        "kept": "0o664",
        "narrowed": "0o600",
    }


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "victim").chmod(0o600)
    (tmp_path / "state").symlink_to(tmp_path / "victim")
    (tmp_path / "state.0123456789ab.tmp").symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "state", [b"new"])
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert not (tmp_path / "state").is_symlink()
    assert (tmp_path / "state").read_bytes() == b"new"


def test_what_another_program_writes_by_name_appears_whole(tmp_path):
    path = tmp_path / "trace.json.gz"
    with written_elsewhere(path) as made:
        assert made.name == path.name  # programs choose a format by it
        with gzip.open(made, "wb") as file:
            file.write(b"x" * 3_000_000)
        assert not os.listdir(tmp_path)
    assert gzip.decompress(path.read_bytes()) == b"x" * 3_000_000
    assert not made.parent.exists()
    with pytest.raises(ZeroDivisionError), written_elsewhere(path) as made:
        made.write_bytes(b"half")
        _ = 1 / 0
    assert gzip.decompress(path.read_bytes()) == b"x" * 3_000_000
    assert not made.parent.exists()


def test_json_is_read_or_refused_with_a_value_error():
    assert read_json(json.dumps({"a": [1, 2.5, None]}).encode()) == {
        "a": [1, 2.5, None]
    }
    deep = b"[" * 100_000 + b"]" * 100_000
    for text in (
        b"",
        b"{",
        b"\xff",
        b"9" * 5000,
        deep,
        deep.decode(),
        b'{"a": ' * 100_000,
        "\ud800",
    ):
        with pytest.raises(ValueError, match="."):
            read_json(text)
