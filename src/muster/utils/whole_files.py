"""Files: atomic writes without following links, reads that never wait, typed errors, and JSON from
outside.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from muster.errors import FileError, file_error

if sys.platform != "win32":
    import fcntl

TEMPORARY = ".tmp"
CLOSED_IN_PROGRAMS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | CLOSED_IN_PROGRAMS
NO_WAIT = getattr(
    os, "O_NONBLOCK", 0
)  # to open a FIFO without a process at its other end
REMEDIES = {
    errno.ENOSPC: "Free space on its disk, or choose another path.",
    errno.EDQUOT: "Free space within your quota, or choose another path.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or choose another path.",
    errno.EACCES: "Change the permissions of the file or its folder, or choose another path.",
    errno.EPERM: "Change the permissions of the file or its folder, or choose another path.",
    errno.EROFS: "Choose a path on a file system that is not read-only.",
    errno.ENOENT: "Check the path, or create its folder.",
    errno.ENOTDIR: "A part of the path before its last name is a file: choose another path.",
    errno.EISDIR: "Give the path of a file.",
    errno.EINVAL: "Give the path of a file.",
    errno.EEXIST: "A file has that name: choose another path for the folder.",
    errno.EMFILE: (
        "The process has too many open files: close some, or raise the limit (ulimit -n)."
    ),
    errno.ENAMETOOLONG: "Choose a shorter path.",
}


def explained(path: str | os.PathLike[str], what: str, error: OSError) -> FileError:
    """Return the error that ``path`` cannot be ``what`` (for example "written"), with the remedy."""
    if isinstance(error, FileError):
        return error
    why = error.strerror or str(error) or type(error).__name__
    return _file_error(path, what, error.errno or 0, why)


def _file_error(
    path: str | os.PathLike[str], what: str, number: int, why: str
) -> FileError:
    remedy = REMEDIES.get(number, "")
    message = f"{os.fspath(path)} cannot be {what}: {why}. {remedy}".rstrip()
    return file_error(message, number or None, why, os.fspath(path))


@contextmanager
def file_errors(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Context in which an ``OSError`` becomes a ``FileError`` about ``path``, see ``explained``."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise explained(path, what, error) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and those above it, where they are missing. Raises ``FileError``."""
    with file_errors(path, "used as a folder"):
        Path(path).mkdir(parents=True, exist_ok=True)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise ``FileError`` if something other than a folder is at ``path``, or at the first path
    above that exists.
    """
    folder = Path(os.path.realpath(path))
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise _file_error(
            folder, "used as a folder", errno.EEXIST, os.strerror(errno.EEXIST)
        )


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> IO[bytes]:
    """Open a file for reading, without waiting for the other end of a FIFO.

    Args:
        links: follow symbolic links. False: they are an error.

    Raises:
        FileError: it cannot be read, or is a folder, FIFO, socket or device.
    """
    flags = os.O_RDONLY | NO_WAIT | (CLOSED_IN_PROGRAMS if links else NO_LINKS)
    with file_errors(path, "read"):
        fd = os.open(path, flags)
        try:
            _check_regular(path, os.fstat(fd).st_mode, "read")
            return open(fd, "rb")
        except BaseException:
            os.close(fd)
            raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise ``FileError`` if a folder, FIFO, socket or device is at ``path``, or at the end of a
    link there.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:  # nothing is there, or the write itself shows why
        return
    _check_regular(path, mode, "written")


def _check_regular(path: str | os.PathLike[str], mode: int, what: str) -> None:
    """Raise ``FileError`` for the mode of a folder, FIFO, socket or device."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise _file_error(path, what, errno.EISDIR, "it is a folder")
    kind = "a device"
    if stat.S_ISFIFO(mode):
        kind = "a FIFO"
    elif stat.S_ISSOCK(mode):
        kind = "a socket"
    raise _file_error(path, what, errno.EINVAL, f"it is {kind}, not an ordinary file")


def append_whole(
    file: FileIO, line: bytes, end: int, path: str | os.PathLike[str]
) -> None:
    """Append a line to a file of length ``end``, completely or not at all, with one write.

    Raises:
        FileError: it cannot be written, for example because the disk is full. The file is
            unchanged.
    """
    with file_errors(path, "written"):
        if file.write(line) != len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, "no space left for another line")


def write_whole(path: Path, parts: Iterable[Any], *, mode: int = 0o666) -> None:
    """Write ``parts`` (buffers) to the file ``path``: after a crash the file is the complete new or
    the old one.

    Threads and processes may write one path concurrently: a reader gets the complete file of one of
    them.

    Args:
        mode: permissions of a new file, before the umask is applied; a replaced file keeps its
            permissions, as far as ``mode`` allows them.

    Raises:
        FileError: it cannot be written. The file is unchanged (unless only the fsync of its
            directory failed).
    """
    with file_errors(path, "written"):
        _write_whole(path, parts, mode)


def _write_whole(path: Path, parts: Iterable[Any], mode: int) -> None:
    check_writable(path)
    _remove_leftovers(path)
    temporary, fd = _create(path, mode)
    try:
        with open(fd, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(fd)
            # while the file is locked, and so not removed as a leftover
            if sys.platform != "win32":
                os.replace(temporary, path)
        if sys.platform == "win32":  # which cannot rename open files
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextmanager
def written_elsewhere(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder, to write a file by name; copy it to
    ``path`` atomically.

    Raises:
        FileError: ``path`` cannot be written, or there is no folder for temporary files.
    """
    with file_errors(path, "written"):  # now, as what is written may take long to make
        os.stat(path.parent)
        check_writable(path)
    with _temporary_folder() as folder:
        made = Path(folder, path.name)
        yield made
        with open_regular(made) as file:
            write_whole(path, iter(lambda: file.read(1 << 20), b""))


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    with file_errors(
        tempfile.tempdir or "the folder for temporary files (TMPDIR)", "used"
    ):
        return tempfile.TemporaryDirectory(prefix="muster-")


def try_lock(fd: int) -> bool:
    """Lock a file while ``fd`` is open; False if another process has locked it.

    ``OSError``: no locks here.
    """
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
        raise ValueError(
            f"JSON that is nested too deeply ({len(text):,} bytes)"
        ) from error


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file beside ``path``, locked while the descriptor is open."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, mode)
        held = True
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
