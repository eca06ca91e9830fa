"""Short tracebacks: the user's frames, and of Muster's only the one that the user called."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType

from muster import errors
from muster.errors import MusterError

MUSTER = os.path.join(Path(errors.__file__).parent, "")
_TESTING = os.path.join(MUSTER, "testing", "")
_INSTALLED = [
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
]
_INSTALLED += [*site.getsitepackages(), site.getusersitepackages()]
INSTALLED = tuple(os.path.join(folder, "") for folder in _INSTALLED)
# a subclass's may do anything
_CAUSE = vars(BaseException)["__cause__"]
_CONTEXT = vars(BaseException)["__context__"]
_TRACEBACK = vars(BaseException)["__traceback__"]


class _Trimmed(ContextDecorator):
    """Context manager and decorator for public methods: errors leave it without Muster's inner
    frames.

    An error that was raised neither by Muster on purpose nor by the user's code is a bug, and keeps
    all frames. So do Ctrl-C and other exceptions that are not errors.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and issubclass(type(error), Exception):
            every = [_file(entry) for entry in _entries(error)]
            files = [
                file for file in every if is_muster(file) or not is_installed(file)
            ]
            of_user = bool(files) and not is_muster(files[-1])
            if of_user or issubclass(type(error), MusterError):
                trim(error)


trimmed = _Trimmed()


def trim(error: BaseException) -> None:
    """Remove Muster's inner frames from the tracebacks of an error, its causes and its contexts.

    Muster's outermost frame stays. Frames of the user's environment, policy and hooks stay, with
    those of the libraries that they called. ``MUSTER_TRACEBACK=full`` in the environment keeps all
    frames.
    """
    if os.environ.get("MUSTER_TRACEBACK") == "full":
        return
    chain: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or any(one is other for other in chain):
            continue
        chain.append(one)
        left += [_CAUSE.__get__(one), _CONTEXT.__get__(one)]
    for one in chain:
        shown = None
        for entry in reversed(_shown(_entries(one), keep_first=one is error)):
            entry.tb_next = shown
            shown = entry
        _TRACEBACK.__set__(one, shown)


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it."""
    lines = traceback.format_exception(type(error), error, _TRACEBACK.__get__(error))
    return "".join(lines).rstrip()


def is_muster(file: str) -> bool:
    """Return whether the source file is one of Muster's.

    Environments of ``muster.testing`` count as the user's.
    """
    return file.startswith(MUSTER) and not file.startswith(_TESTING)


def is_installed(file: str) -> bool:
    """Return whether the source file is one of Python's or of an installed package."""
    return file.startswith(("<frozen", *INSTALLED))


def _shown(entries: list[TracebackType], *, keep_first: bool) -> list[TracebackType]:
    """Return the entries without frames of Muster, and without library frames between two of these.

    Args:
        keep_first: keep the outermost frame of Muster. The innermost entry is kept if there is no
            other.
    """
    shown = []
    leads_to_muster = False
    for entry in reversed(entries):
        file = _file(entry)
        if is_muster(file) or not is_installed(file):
            leads_to_muster = is_muster(file)
        if not leads_to_muster:
            shown.append(entry)
    first = next((entry for entry in entries if is_muster(_file(entry))), None)
    if keep_first and first is not None:
        shown = [entry for entry in entries if entry is first or entry in shown][::-1]
    return shown[::-1] or entries[-1:]


def _entries(error: BaseException) -> list[TracebackType]:
    """Return the entries of the traceback of an error, outermost first."""
    found: list[TracebackType] = []
    entry = _TRACEBACK.__get__(error)
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename
