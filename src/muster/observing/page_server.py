"""The web page of ``muster watch``: a server that reads the files of one or several runs.

It writes nothing, with one exception: the page of a collection is served by a child of its process,
and if this process was killed, the child appends how to the file of the run.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from muster.errors import BadOption
from muster.observing.run_process import ProcessState, RunProcess
from muster.observing.snapshots import (
    EPISODES,
    WHICH,
    RunHistory,
    SnapshotReader,
    append_exit,
)
from muster.utils.addresses import host_and_port, is_loopback, listening
from muster.utils.strangers import Strangers

TOKEN_VARIABLE = "MUSTER_WATCH_TOKEN"
_SHORTEST_TOKEN = 16
_POLL_S = 0.5  # between two looks at the file
_LOOK_S = 0.1  # until a signal is noticed
_ADMISSION_S = 10.0  # for a whole request, with its token
_TIMEOUT_S = 30.0  # of a viewer that does not read
_MOST_VIEWERS = 64
_GOODBYE_S = 3.0  # for viewers to get the last entries
_AT_ONCE = 100  # entries of a message, for which a slow viewer has _TIMEOUT_S
_UNSENT_BYTES = 128 << 10  # for a viewer; beyond that it is waited for
_FILM_S = 330.0  # for a process that makes a film, which has a limit of 300 s itself
_MOST_FILMS = 6  # that are kept
_OWN_HEADER = "X-Muster-Watch"  # pages elsewhere cannot send it
_SCRIPT = "text/javascript; charset=utf-8"
_STYLE = "text/css; charset=utf-8"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", _SCRIPT),
    "/page.css": ("page.css", _STYLE),
    "/uPlot.js": ("uPlot.iife.min.js", _SCRIPT),
    "/uPlot.css": ("uPlot.min.css", _STYLE),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_MOST_RUNS = 16  # on a page
_FILM = re.compile(r"/films/([0-9]{1,9})\.mp4")
_EPISODE = re.compile(rf"/films/([0-9]{{1,2}})/({'|'.join(WHICH)})")
_RANGE = re.compile(r"bytes=([0-9]{1,12})-([0-9]{1,12})?")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageAddress:
    """A listening socket at ``host:port``, and the URL of the page there, with its token.

    Beyond loopback the page needs a token: the environment variable ``MUSTER_WATCH_TOKEN``,
    otherwise a random one. Raises ``BadOption`` if the address is not available, or the token has
    less than 16 characters.
    """

    def __init__(self, address: str) -> None:
        host, _ = host_and_port(address)
        self.token = (
            ""
            if is_loopback(host)
            else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        )
        if self.token and len(self.token) < _SHORTEST_TOKEN:
            raise BadOption(
                f"{TOKEN_VARIABLE} has less than {_SHORTEST_TOKEN} characters. Give a longer,"
                " random one."
            )
        self.socket = listening(address, "watch")
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={self.token}" if self.token else ""
        self.url = f"http://{shown}:{self.socket.getsockname()[1]}/{query}"

    def close(self) -> None:
        """Close the socket in this process."""
        self.socket.close()


class Films:
    """Films of episodes in memory, by number, each made by a process of its own.

    ``command`` makes a film of the file whose path is appended, see ``muster.restore.film.main``.
    """

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = command
        self._free = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._films: dict[int, bytes] = {}
        self._closed = False

    def make(self, episode: Path) -> dict[str, Any]:
        """Make a film of the file of an episode.

        Returns its numbers, and ``film``, that of the film; or ``error``, a sentence.
        """
        if self._command is None:
            return {"error": "This page makes no films."}
        if not self._free.acquire(blocking=False):
            return {"error": "Another film is being made. Try again when it is ready."}
        try:
            answer, content = self._made([*self._command, str(episode)])
            if content:
                answer["film"] = max(self._films, default=0) + 1
                self._films[answer["film"]] = content
                self._films.pop(answer["film"] - _MOST_FILMS, None)
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
            _kill(process)

    def _made(self, command: list[str]) -> tuple[dict[str, Any], bytes]:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # to end what the environment has started: it may hold the pipe
                start_new_session=True,
            )
        except OSError as error:
            return {"error": f"The film cannot be made: {error.strerror}."}, b""
        self._process = process
        if self._closed:
            _kill(process)
        try:
            output, _ = process.communicate(timeout=_FILM_S)
        except subprocess.TimeoutExpired as late:
            output = late.output or b""
        _kill(process)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        line, _, content = output.partition(b"\n")
        try:
            return json.loads(line), content
        except ValueError:
            return {
                "error": (
                    "The film was not made within 300 s, or its process died"
                    f" ({process.returncode})."
                )
            }, b""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group. May be called again."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _names(directories: Sequence[Path]) -> list[str]:
    """Return short names of directories that differ."""
    resolved = [directory.resolve() for directory in directories]
    names = [directory.name for directory in resolved]
    return [
        name if names.count(name) == 1 else str(directory)
        for name, directory in zip(names, resolved, strict=True)
    ]


class _ToldToEnd(BaseException):
    """A signal has arrived; raised between two requests."""


class PageServer(ThreadingHTTPServer):
    """Serves the page of one or several runs, to at most 64 viewers at the same time.

    Raises ``BadOption`` without snapshots, and for more than 16 runs.

    A connection becomes that of a viewer when its request is complete and admitted. Until then it
    is a stranger, which no viewer waits for.

    Args:
        runs: directories, or their files.
        listening: listening socket; owned by the server.
        token: token that viewers need; empty: none.
        parent: process id of the parent, whose exit ends ``serve_forever``; None: no parent.
        film: command that makes films, see ``Films``; None: no films.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        runs: Path | Sequence[Path],
        listening: socket.socket,
        token: str = "",
        *,
        parent: int | None = None,
        film: Sequence[str] | None = None,
    ) -> None:
        self.runs = [runs] if isinstance(runs, Path) else list(runs)
        if len(self.runs) > _MOST_RUNS:
            raise BadOption(
                f"{len(self.runs)} runs: expected at most {_MOST_RUNS} on a page"
            )
        self.names = _names([run if run.is_dir() else run.parent for run in self.runs])
        self._processes = [RunProcess(RunHistory.read(run).about) for run in self.runs]
        host, port = listening.getsockname()[:2]
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()  # the base class has made one
        self.socket = listening
        self.token = token
        self.cookie = f"muster_watch_{port}"
        self.local = is_loopback(host)
        folder = resources.files("muster.observing") / "page"
        self.files = {
            path: ((folder / name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }
        self._strangers, self._places = (
            Strangers(),
            threading.BoundedSemaphore(_MOST_VIEWERS),
        )
        self._parent = parent
        # the last event of viewers
        self.goodbye = {
            "of": "watch" if parent is None else "run",
            "command": shlex.join(["muster", "watch", *map(str, self.runs)]),
        }
        self.ending = threading.Event()
        self._told_to_end: int | None = None  # the signal
        self.films = Films(film)

    def process_state(self, run: int) -> ProcessState:
        """Return the state of the process of a run."""
        return self._processes[run].state()

    def episode(self, run: int, which: str) -> Path:
        """Return the path of the file that repeats an episode of a run."""
        given = self.runs[run]
        return (
            (given if given.is_dir() else given.parent) / EPISODES / f"{which}.episode"
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        self._strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._strangers.remove(request)
        super().shutdown_request(request)

    @contextmanager
    def place(self, request: Any) -> Iterator[bool]:
        """A context for the admitted viewer of a connection: whether there was a place."""
        self._strangers.remove(request)
        has_place = self._places.acquire(blocking=False)
        try:
            yield has_place
        finally:
            if has_place:
                self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections: a viewer has closed the page."""

    def serve_until(self, *signals: int) -> int:
        """Serve until one of these signals arrives, say goodbye, and return it.

        Called in the main thread.

        A handler that raised an exception would close the connection that is being accepted just
        then, with a viewer at its other end who gets no goodbye.
        """

        def tell(number: int, _: Any) -> None:
            self._told_to_end = number

        handlers = {number: signal.signal(number, tell) for number in signals}
        try:
            with suppress(_ToldToEnd):
                self.serve_forever(_LOOK_S)
        finally:
            self.say_goodbye()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert self._told_to_end is not None
        return self._told_to_end

    def service_actions(self) -> None:
        if self._told_to_end is not None:
            raise _ToldToEnd
        self._strangers.end_late(_ADMISSION_S)
        if self._parent is not None and os.getppid() != self._parent:
            self.say_goodbye()
            for number, run in enumerate(self.runs):
                append_exit(run, self.process_state(number).entries())
            os._exit(0)

    def say_goodbye(self) -> None:
        """Let viewers know that the page ends, after the last entries of the file.

        May be called again.
        """
        if self.ending.is_set():
            return
        self.ending.set()
        self.films.close()
        deadline = time.monotonic() + _GOODBYE_S
        for _ in range(_MOST_VIEWERS):  # a place is free when its viewer has left
            if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break

    def server_close(self) -> None:
        self.say_goodbye()
        super().server_close()
        for process in self._processes:
            process.close()


class _Handler(BaseHTTPRequestHandler):
    """A request of a viewer."""

    server: PageServer
    timeout = _TIMEOUT_S
    server_version = "muster"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        # otherwise the kernel keeps megabytes for a viewer that reads nothing
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)

    def do_GET(self) -> None:
        with self._admitted() as path:
            if path is not None:
                self._get(path)

    def do_POST(self) -> None:
        with self._admitted() as path:
            if path is not None:
                self._make_film(path)

    def _get(self, path: str) -> None:
        if path == "/events":
            self._stream()
        elif path in self.server.files:
            content, kind = self.server.files[path]
            self._reply(200, content, **{"Content-Type": kind})
        elif (named := _FILM.fullmatch(path)) and (
            film := self.server.films.film(int(named[1]))
        ) is not None:
            self._reply_film(film)
        else:
            self._reply(404, b"There is no such page.\n")

    def _make_film(self, path: str) -> None:
        """Make a film of the episode that the path names."""
        named = _EPISODE.fullmatch(path)
        if _OWN_HEADER not in self.headers:
            self._reply(403, b"This is for the page of muster watch only.\n")
        elif named is None or int(named[1]) >= len(self.server.runs):
            self._reply(404, b"There is no such episode.\n")
        else:
            answer = self.server.films.make(
                self.server.episode(int(named[1]), named[2])
            )
            self._reply(
                200, json.dumps(answer).encode(), **{"Content-Type": "application/json"}
            )

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    @contextmanager
    def _admitted(self) -> Iterator[str | None]:
        """A context with the path, if the viewer may see the page and has a place; otherwise reply."""
        if (path := self._path()) is None:
            yield None
            return
        with self.server.place(self.connection) as has_place:
            if not has_place:
                self._reply(
                    503,
                    f"{_MOST_VIEWERS} viewers see this page already. Close one of them.\n".encode(),
                )
            yield path if has_place else None

    def _path(self) -> str | None:
        """Return the path, if the viewer may see the page; otherwise reply."""
        try:
            parts, host = (
                urlsplit(self.path),
                urlsplit(f"//{self.headers.get('Host', '')}").hostname or "",
            )
        except ValueError:  # for example "//["
            self._reply(400, b"There is no page at this address.\n")
            return None
        if self.server.local and not is_loopback(host):
            # a page elsewhere that found this port
            self._reply(403, b"The Host header does not name this machine.\n")
        elif (
            self.server.token
            and (given := parse_qs(parts.query).get("token"))
            and self._is_token(given[0])
        ):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._reply(303, b"", Location="/", **{"Set-Cookie": cookie})
        elif self.server.token and not self._is_token(self._cookie()):
            self._reply(
                403,
                b"This page needs the token of the address that muster watch has printed.\n",
            )
        else:
            return parts.path
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _reply(self, status: int, content: bytes, **headers: str) -> None:
        known = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(content)),
        }
        self._start(status, known | headers)
        self.wfile.write(content)

    def _reply_film(self, film: bytes) -> None:
        """Send a film, or the part of it that the viewer asks for: without parts, browsers cannot
        seek in it.
        """
        headers = {"Content-Type": "video/mp4", "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None or int(asked[1]) >= len(film):
            self._reply(200, film, **headers)
            return
        first = int(asked[1])
        last = min(int(asked[2] or len(film)), len(film) - 1)
        self._reply(
            206,
            film[first : last + 1],
            **headers,
            **{"Content-Range": f"bytes {first}-{last}/{len(film)}"},
        )

    def _stream(self) -> None:
        """Send all entries, then new ones as they appear in the file, until the viewer leaves or
        the server ends.
        """
        server = self.server
        with ExitStack() as opened:
            try:
                readers = [SnapshotReader(run) for run in server.runs]
            except BadOption:
                self._reply(404, b"There are no snapshots any more.\n")
                return
            for reader in readers:
                opened.callback(reader.close)
            self._start(200, {"Content-Type": "text/event-stream; charset=utf-8"})
            known: list[ProcessState | None] = [None] * len(readers)
            for number in range(len(readers)):
                self._send("restart", {"run": number, "name": server.names[number]})
            is_last = False
            while not is_last:
                # first: the entries before it have been written
                is_last = server.ending.is_set()
                for number, reader in enumerate(readers):
                    state = server.process_state(number)  # before the file, too
                    self._send_new(number, reader)
                    if state != known[number]:
                        shown = {
                            "state": state.state,
                            "signal": state.signal,
                            "code": state.code,
                        }
                        self._send("process", {"run": number, **shown})
                    known[number] = state
                self._send("clock", time.time())  # also detects a viewer that has left
                server.ending.wait(_POLL_S)
            self._send("goodbye", server.goodbye)

    def _send_new(self, number: int, reader: SnapshotReader) -> None:
        """Send what was appended to the file of a run."""
        restarted, entries = reader.read()
        if restarted:
            self._send("restart", {"run": number, "name": self.server.names[number]})
        for begin in range(0, len(entries), _AT_ONCE):
            self._send(
                "entries", {"run": number, "entries": entries[begin : begin + _AT_ONCE]}
            )

    def _send(self, event: str, content: Any) -> None:
        self.wfile.write(f"event: {event}\ndata: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()


def main(arguments: Sequence[str]) -> None:
    """Serve a page; the arguments are a descriptor, the run, the parent's process id, and the
    command for films.
    """
    fd, run, parent, *film = arguments
    token = os.environ.pop(TOKEN_VARIABLE, "")
    server = PageServer(
        Path(run),
        socket.socket(fileno=int(fd)),
        token,
        parent=int(parent),
        film=film or None,
    )
    told = server.serve_until(signal.SIGTERM, signal.SIGINT)
    sys.exit(0 if told == signal.SIGTERM else 130)
