"""Atomic writes of files, without following links; and JSON from untrusted sources."""

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
    """Write ``parts`` (buffers) to the file ``path``: after a crash the file is the complete new or the old one.

    Threads and processes may write one path concurrently: a reader gets the complete file of one of them.
    ``mode``: permissions of a new file, before the umask is applied; a replaced file keeps its permissions, as far as
    ``mode`` allows them. After ``OSError`` the file is unchanged (unless only the fsync of its directory failed).
    """
    _remove_leftovers(path)
    temporary, fd = _create(path, mode)
    try:
        with open(fd, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(fd)
            if sys.platform != "win32":  # while the file is locked, and so not removed as a leftover
                os.replace(temporary, path)
        if sys.platform == "win32":  # which cannot rename open files
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextmanager
def written_elsewhere(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder, to write a file by name; copy it to ``path`` atomically."""
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        made = Path(folder, path.name)
        yield made
        with made.open("rb") as file:
            write_whole(path, iter(lambda: file.read(1 << 20), b""))


def try_lock(fd: int) -> bool:
    """Lock a file while ``fd`` is open; False if another process has locked it. ``OSError``: no locks here."""
    if sys.platform != "win32":  # no locks on Windows
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock(fd: int) -> None:
    """Unlock, also for forked children that share ``fd``."""
    if sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_at(path: Path, fd: int) -> bool:
    """Whether ``path`` still names the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def read_json(text: bytes | bytearray | str) -> Any:
    """``json.loads`` for untrusted text: raises ``ValueError`` for every invalid text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"JSON that is nested too deeply ({len(text):,} bytes)") from error


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file beside ``path``, locked while the descriptor is open."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
        fd, held = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, mode), True
        with suppress(OSError):  # without locks no leftovers are removed
            held = try_lock(fd)
        if held and is_at(temporary, fd):
            break
        os.close(fd)  # another process took it for a leftover before it was locked
        temporary.unlink(missing_ok=True)
    if sys.platform != "win32":
        with suppress(OSError):
            old = os.lstat(path).st_mode
            if stat.S_ISREG(old):
                os.fchmod(fd, stat.S_IMODE(old) & mode)
    return temporary, fd


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files for ``path`` of killed processes, which are no longer locked."""
    if sys.platform == "win32":  # without locks, leftovers cannot be recognized
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
