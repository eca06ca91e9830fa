"""``muster watch``: shows a running or finished collection on a local web page, or writes its picture."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True)
class WatchCommand:
    """Show a running or finished collection on a web page, until Ctrl-C; or write its picture with --png."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Directory of a collection with watch=True or --watch."""

    address: Annotated[str, arg(metavar="HOST:PORT")] = LOOPBACK
    """Address of the page. Port 0: any free port. Beyond loopback, viewers need the token in the printed address."""

    trust: bool = False
    """Allow films to run code of the directory: to unpickle the environment's factory, or to import its module."""

    png: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a picture of the collection instead, in the format of its name: .png, .svg, .pdf. Needs matplotlib."""


def watch(command: WatchCommand) -> int:
    """Run the command. Returns the exit code."""
    return _serve(command) if command.png is None else _draw(command.run, command.png)


def _serve(command: WatchCommand) -> int:
    from muster.observing.page_server import PageAddress, PageServer
    from muster.restore.film import film_command

    page = PageAddress(command.address)
    try:
        server = PageServer(command.run, page.socket, page.token, film=film_command(trust=command.trust))
    except BaseException:
        page.close()
        raise
    with server, suppress(KeyboardInterrupt):
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def _draw(run: Path, file: Path) -> int:
    from muster.errors import BadOption
    from muster.observing.plot import plot_run
    from muster.observing.snapshots import RunHistory

    figure = plot_run(RunHistory.read(run))
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise BadOption(f"--png {file}: the picture cannot be written: {error}") from error
    print(f"wrote {file}")
    return 0
