"""Tracebacks that show the user's frames, and of Muster's only the one that the user has called."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import TracebackException
from types import TracebackType
from typing import TypeVar

from muster import errors
from muster.errors import MusterError

MUSTER = (str(Path(errors.__file__).parent),)
INSTALLED = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
Link = TypeVar("Link", BaseException, TracebackException)
_TRACEBACK = vars(BaseException)["__traceback__"]  # a subclass's may do anything


def is_muster(file: str) -> bool:
    """The source file is one of Muster's."""
    return is_below(file, MUSTER)


def is_installed(file: str) -> bool:
    """The source file is one of Python's or of an installed package."""
    return is_below(file, INSTALLED) or file.startswith("<frozen")


def is_below(file: str, folders: tuple[str, ...]) -> bool:
    """The file is in one of the folders."""
    return any(file.startswith(os.path.join(folder, "")) for folder in folders)


class _Trimmed:
    """A context for what the user has called: errors leave it without Muster's inner frames.

    Of Muster's frames the outermost stays. Frames of the user's environment, policy and hooks stay, and those of
    libraries that these have called. ``MUSTER_TRACEBACK=full`` in the environment keeps all frames.

    Errors that Muster has not raised on purpose, and in which no code of the user's is involved, keep all frames: they
    are bugs, whose place is in them. So do Ctrl-C and other exceptions that are no errors.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and issubclass(type(error), Exception) and not _keeps_all():
            trim(error)


trimmed = _Trimmed()


def trim(error: BaseException) -> None:
    """Take Muster's inner frames out of the tracebacks of an error and of those that led to it."""
    own = [file for file in map(_file, _entries(error)) if is_muster(file) or not is_installed(file)]
    if not issubclass(type(error), MusterError) and (not own or is_muster(own[-1])):
        return
    for one in _chain(error):
        entries = _entries(one)
        shown = _shown([_file(entry) for entry in entries], keep_first=one is error)
        kept = [entry for entry, show in zip(entries, shown, strict=True) if show]
        below = None
        for entry in reversed(kept):
            entry.tb_next = below
            below = entry
        _TRACEBACK.__set__(one, below)


def traceback_text(error: BaseException, *, full: bool = False) -> str:
    """The traceback of an error as Python prints it, without Muster's frames; the error is not changed.

    Args:
        full: with all frames.
    """
    found = TracebackException(type(error), error, _TRACEBACK.__get__(error))
    if not (full or _keeps_all()):
        for one in _chain(found):
            shown = _shown([frame.filename for frame in one.stack], keep_first=False)
            one.stack[:] = [frame for frame, show in zip(one.stack, shown, strict=True) if show]
    return "".join(found.format()).rstrip()


def _keeps_all() -> bool:
    return os.environ.get("MUSTER_TRACEBACK") == "full"


def _shown(files: list[str], *, keep_first: bool) -> list[bool]:
    """Which frames are shown, outermost first: no frames of Muster's, and of libraries between two of these.

    Args:
        keep_first: show the first of Muster's. Else the innermost is, where there are no others.
    """
    shown = []
    leads_to_muster = False
    for file in reversed(files):
        if is_muster(file) or not is_installed(file):
            leads_to_muster = is_muster(file)
        shown.append(not leads_to_muster)
    shown.reverse()
    first = next((i for i, file in enumerate(files) if is_muster(file)), None)
    if keep_first and first is not None:
        shown[first] = True
    elif shown and not any(shown):
        shown[-1] = True
    return shown


def _entries(error: BaseException) -> list[TracebackType]:
    """Of its traceback, outermost first."""
    found: list[TracebackType] = []
    entry = _TRACEBACK.__get__(error)
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _chain(error: Link) -> Iterator[Link]:
    """An error, and all those that led to it."""
    found: list[Link] = []
    left: list[Link | None] = [error]
    while left:
        one = left.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            left += [one.__cause__, one.__context__]
    return iter(found)
