"""Writing for people who may not be there."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any


class Unfailing(io.TextIOBase):
    """A stream over another one, for what a run must not fail for: text that cannot be written is
    dropped.

    The other one may be closed or full, its reader may be gone, it may be None (a program without
    standard error), or have no method but ``write``, as objects that pass text on to a logger.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (OSError, ValueError, AttributeError):
            return False
