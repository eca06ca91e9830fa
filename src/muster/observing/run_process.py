"""The process of a run, as another process of the same machine sees it: whether it runs, and how it
has exited.

Nothing is installed in the observed process, no signal handler either: the kernel tells its exit
status. While its parent has not reaped it, ``/proc`` has the status; after that, from Linux 6.15
on, a descriptor of the process that was opened before. Older kernels may not tell it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, with the first version of its record
_WITH_EXIT = 1 << 3
_RECORD = struct.Struct("Q52xi")  # the mask; the status of wait()
_STATE, _STATUS, _STARTED = 0, 49, 19  # fields of /proc/PID/stat behind the name


class ProcessState(NamedTuple):
    """What is known about the process of a run.

    Attributes:
        state: "alive", "stopped" (by SIGSTOP or Ctrl-Z), "exited", or "unknown": it is on another
            machine, in another container, or the run does not say.
        signal: name of the signal that ended it; empty: none, or not known.
        code: exit code; None: a signal ended it, or not known.
    """

    state: str
    signal: str = ""
    code: int | None = None

    def entries(self) -> dict[str, Any]:
        """Return how the process has exited as entries of the last line of a run; empty: not known."""
        if self.signal:
            return {"signal": self.signal}
        return {} if self.code is None else {"code": self.code}


def identity() -> dict[str, Any]:
    """Return what identifies this process to others on this machine, as entries of a run's first
    line.
    """
    own: dict[str, Any] = {"pid": os.getpid()}
    with suppress(OSError, ValueError, IndexError):
        own |= {"started": int(_stat(os.getpid())[_STARTED]), "machine": _machine()}
    return own


class RunProcess:
    """Observes the process that ``about``, the first line of a run, identifies."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        pid = about.get("pid")
        self._pid = pid if isinstance(pid, int) else 0
        self._fd = -1
        self._exit: ProcessState | None = None
        self._is_known = False
        with suppress(OSError, ValueError, IndexError):
            here = self._pid > 0 and about.get("machine") == _machine()
            self._is_known = here and isinstance(about.get("started"), int)
        if not self._is_known:
            return
        with suppress(
            OSError, AttributeError, OverflowError
        ):  # it has exited; no Linux
            self._fd = os.pidfd_open(self._pid)
        # after the descriptor was opened: since then the number cannot be another process's
        if not self._is_same(about["started"]):
            self._exit = ProcessState("exited")

    def state(self) -> ProcessState:
        """Return the present state. May be called from several threads."""
        if not self._is_known:
            return ProcessState("unknown")
        if self._exit is not None:
            return self._exit
        found = self._found()
        if found.state == "exited" and (found.signal or found.code is not None):
            self._exit = found
        return found

    def close(self) -> None:
        """Release the descriptor. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_same(self, started: int) -> bool:
        try:
            return int(_stat(self._pid)[_STARTED]) == started
        except (OSError, ValueError, IndexError):
            return False

    def _found(self) -> ProcessState:
        has_exited = self._fd >= 0 and bool(select.select([self._fd], [], [], 0)[0])
        try:
            fields = _stat(self._pid)
        except OSError:
            fields = []
        if not has_exited and fields and fields[_STATE] not in "ZX":
            return ProcessState("stopped" if fields[_STATE] in "tT" else "alive")
        if fields and fields[_STATE] in "ZX":
            return _exited(int(fields[_STATUS]))
        with suppress(OSError):
            record = bytearray(64)
            _RECORD.pack_into(record, 0, _WITH_EXIT, 0)
            fcntl.ioctl(self._fd, _GET_INFO, record)
            mask, status = _RECORD.unpack_from(record)
            if mask & _WITH_EXIT:
                return _exited(status)
        return ProcessState("exited")


def _exited(status: int) -> ProcessState:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return ProcessState("exited", code=code)
    try:
        return ProcessState("exited", signal.Signals(-code).name)
    except ValueError:  # a real-time signal
        return ProcessState("exited", f"signal {-code}")


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` behind the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    """Return what is equal where process numbers mean the same: the boot and the namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
