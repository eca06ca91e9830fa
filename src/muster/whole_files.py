"""Files that are whole or absent, and never reached through a link."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def write_whole(path: Path, parts: Iterable[Any], *, mode: int = 0o666) -> None:
    """Make the file ``path`` of ``parts`` (buffers): after a crash it is there completely, or as it was before.

    Raises:
        OSError: nothing was changed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, mode)
    try:
        with open(fd, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    if os.name == "posix":
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
