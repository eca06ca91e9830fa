"""Files that are whole or absent, and never reached through a link; and JSON from untrusted sources."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

TEMPORARY = ".tmp"
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def write_whole(path: Path, parts: Iterable[Any], *, mode: int = 0o666) -> None:
    """Make the file ``path`` of ``parts`` (buffers): after a crash it is there completely, or as it was before.

    Any number of threads and processes may write one path at the same time: a reader sees one of their files, whole.
    ``mode`` are the permissions of a new file, less the umask; those of a file that is replaced are kept, without what
    ``mode`` does not allow. ``OSError``: the file is as before (unless only the directory's own fsync failed).
    """
    _remove_leftovers(path)
    temporary, fd = _create(path, mode)
    try:
        with open(fd, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(fd)
            if sys.platform != "win32":  # while the file is locked: it is not taken for a leftover
                os.replace(temporary, path)
        if sys.platform == "win32":  # where no open file can be renamed
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextmanager
def written_elsewhere(path: Path) -> Iterator[Path]:
    """A path of the same name in a folder of its own, for what writes files by name; then copied to ``path``, whole."""
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        made = Path(folder, path.name)
        yield made
        with made.open("rb") as file:
            write_whole(path, iter(lambda: file.read(1 << 20), b""))


def try_lock(fd: int) -> bool:
    """Lock a file for as long as ``fd`` is open; False if another process has. ``OSError``: no locks here."""
    if sys.platform != "win32":  # there nothing is held
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock(fd: int) -> None:
    """Let go, also on behalf of forked children that share ``fd``."""
    if sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_at(path: Path, fd: int) -> bool:
    """Whether the file that is open as ``fd`` is still the one called ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def read_json(text: bytes | bytearray | str) -> Any:
    """``json.loads`` for a text that may hold anything: ``ValueError`` for whatever is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"JSON that is nested too deeply ({len(text):,} bytes)") from error


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """A file of our own beside ``path``, held for as long as the descriptor is open."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
        fd, held = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, mode), True
        with suppress(OSError):  # without locks no file is taken for a leftover
            held = try_lock(fd)
        if held and is_at(temporary, fd):
            break
        os.close(fd)  # it was taken for a leftover before it was held
        temporary.unlink(missing_ok=True)
    if sys.platform != "win32":
        with suppress(OSError):
            old = os.lstat(path).st_mode
            if stat.S_ISREG(old):
                os.fchmod(fd, stat.S_IMODE(old) & mode)
    return temporary, fd


def _remove_leftovers(path: Path) -> None:
    """Temporary files for ``path`` of processes that were killed: they are not locked any more."""
    if sys.platform == "win32":  # where it cannot be told whether one is locked
        return
    like = re.compile(re.escape(path.name) + r"\.[0-9a-f]{12}" + re.escape(TEMPORARY))
    with suppress(OSError):
        for name in filter(like.fullmatch, os.listdir(path.parent)):
            leftover = path.with_name(name)
            with suppress(OSError):
                fd = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK | NO_LINKS)
                try:
                    if try_lock(fd) and is_at(leftover, fd):
                        leftover.unlink()
                finally:
                    os.close(fd)


def _sync_directory(directory: Path) -> None:
    if os.name == "posix":
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
