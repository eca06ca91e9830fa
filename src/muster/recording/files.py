"""The files of a recording: what they are called, and who writes; never reached through a link."""

from __future__ import annotations

import os
import re
import stat
import weakref
from pathlib import Path
from typing import IO

from muster.errors import BadRecording
from muster.utils.whole_files import NO_LINKS, is_at, try_lock, unlock

MANIFEST = "recording.json"
LOCK = ".lock"
CHUNK = re.compile(r"chunk-(\d{6,12})\.safetensors")


def chunk_name(index: int) -> str:
    """The file name that ``CHUNK`` matches."""
    return f"chunk-{index:06d}.safetensors"


def open_regular(path: Path) -> tuple[IO[bytes], int]:
    """Open an ordinary file (no link) for reading, or raise ``BadRecording``. Returns the file and
    its size in bytes.
    """
    try:
        # A pipe put in the place of a file would block the open without O_NONBLOCK.
        fd = os.open(path, os.O_RDONLY | NO_LINKS | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        link = " It is a symbolic link: put the file itself there." if path.is_symlink() else ""
        raise BadRecording(f"{path} cannot be read: {error.strerror}.{link}") from error
    file = open(fd, "rb")  # noqa: SIM115  (the caller closes it)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise BadRecording(f"{path} is not an ordinary file, so it is not part of a recording. Remove it.")
    return file, status.st_size


class DirectoryLock:
    """Held by the one recorder of a directory; released by the kernel when its process dies."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
            self._close = weakref.finalize(self, os.close, fd)
            try:
                if not try_lock(fd):
                    holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
                    raise BadRecording(
                        f"{directory} is being recorded into by another recorder (pid {holder}). "
                        f"Choose another directory, or close that one."
                    )
            except BaseException:
                self._close()
                raise
            if is_at(self._path, fd):
                break
            self._close()  # the recorder before has removed it since it was opened
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        if self._close.alive:
            self._path.unlink(missing_ok=True)
            unlock(self._fd)
            self._close()


def is_locked(directory: Path) -> bool:
    """Whether a recorder is at work there now."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | NO_LINKS)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
