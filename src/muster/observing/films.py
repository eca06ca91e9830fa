"""Makes films of a run's episodes for its page, each in a process of its own, on the request of a viewer."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 330.0  # for a process, which has a limit of 300 s itself
_MOST = 6  # films that are kept
_BUSY = "Another film is being made. Try again when it is ready."


class Films:
    """Films in memory, by number.

    Args:
        command: makes a film of the file whose path is appended, see ``muster.restore.film.main``; None: no films.
        folder: directory of the files.
    """

    def __init__(self, command: Sequence[str] | None, folder: Path) -> None:
        self._command, self._folder = command, folder
        self._free = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._films: OrderedDict[int, bytes] = OrderedDict()
        self._count = 0
        self._closed = False

    def make(self, which: str) -> dict[str, Any]:
        """Make a film of the episode ``which``, and wait for it.

        Returns:
            its numbers, and ``film``, its number; or ``error``, a sentence.
        """
        if self._command is None:
            return {"error": "This page makes no films."}
        if not self._free.acquire(blocking=False):
            return {"error": _BUSY}
        try:
            answer, content = self._made(self._command, self._folder / f"{which}.episode")
            if content:
                self._count += 1
                self._films[self._count] = content
                while len(self._films) > _MOST:
                    self._films.popitem(last=False)
                answer["film"] = self._count
            return answer
        finally:
            self._free.release()

    def film(self, number: int) -> bytes | None:
        """Return a film; None: there is no such one, or not any more."""
        return self._films.get(number)

    def close(self) -> None:
        """Kill the process that makes a film. May be called again."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _made(self, command: Sequence[str], path: Path) -> tuple[dict[str, Any], bytes]:
        try:
            process = subprocess.Popen(
                [*command, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            return {"error": f"The film cannot be made: {error.strerror}."}, b""
        self._process = process
        if self._closed:
            process.kill()
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        self._process = None
        line, _, content = output.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            return {"error": f"The film was not made within 300 s, or its process died ({process.returncode})."}, b""
        return answer, content
