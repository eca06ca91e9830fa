"""Entry point: parses the command line, runs a command, and prints errors; and the two commands
that read a run.
"""

from __future__ import annotations

import errno
import functools
import io
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from muster.cli.cluster import ClusterCommand, NodeCommand, cluster, node
from muster.cli.collect import collect
from muster.cli.collect_command import Collect
from muster.cli.doctor import Doctor, doctor
from muster.cli.eval import Eval, evaluate
from muster.cli.replay import Replay, replay
from muster.cli.serve import Serve, serve
from muster.cli.tune import Tune, tune
from muster.errors import BadOption, MusterError
from muster.utils.attributes import installed
from muster.utils.whole_files import write_whole


@dataclass(frozen=True)
class ExportCommand:
    """Write the complete episodes of a recording as a Minari dataset, a LeRobot dataset or a
    Parquet file.
    """

    run: Annotated[Path, Positional]
    """Directory of the recording."""
    to: Literal["minari", "lerobot", "parquet"]
    """Format."""
    out: str
    """Minari: id of the dataset, such as cartpole/ppo-v0. LeRobot: a new directory. Parquet: a new file."""
    env: str | None = None
    """Minari: Gymnasium id of the environment, if the recording does not have it."""
    fps: float = 30.0
    """LeRobot: frames per second."""
    task: str | None = None
    """LeRobot: description of the task; the environment's id if it is not given."""


def export(command: ExportCommand) -> int:
    """Run the command; return the exit code."""
    from muster.recording import Recording, load

    recording = load(command.run)
    if not isinstance(recording, Recording):
        raise BadOption(
            f"{command.run} is a Minari dataset already; give the directory of a recording of"
            " Muster."
        )
    if command.to == "minari":
        done = recording.to_minari(command.out, env=command.env)
    elif command.to == "lerobot":
        done = recording.to_lerobot(command.out, fps=command.fps, task=command.task)
    else:
        done = recording.to_parquet(command.out)
    print(done)
    return 0


@dataclass(frozen=True)
class WatchCommand:
    """Show running or finished collections on a web page, until Ctrl-C; or write the picture of one
    with --png.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """Directories of collections with watch=True or --watch. Several are drawn into the same charts."""

    address: Annotated[str, arg(metavar="HOST:PORT")] = "127.0.0.1:0"
    """Address of the page. Port 0: any free port. Beyond loopback, viewers need the token in the printed address."""

    trust: bool = False
    """Allow films to run code of the directory: to unpickle the environment's factory, or to import its module."""

    png: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a picture of the collection instead, in the format of its name: .png, .svg, .pdf. Needs matplotlib."""


def watch(command: WatchCommand) -> int:
    """Run the command. Returns the exit code."""
    if command.png is not None:
        if len(command.runs) != 1:
            raise BadOption(f"--png draws one run, and {len(command.runs)} were given.")
        return _draw(command.runs[0], command.png)
    if not command.runs:
        raise BadOption("Give the directory of a collection: muster watch RUN")
    from muster.observing.page_server import PageAddress, PageServer
    from muster.restore.film import film_command

    page = PageAddress(command.address)
    try:
        server = PageServer(
            command.runs,
            page.socket,
            page.token,
            film=film_command(trust=command.trust),
        )
    except BaseException:
        page.close()
        raise
    with server:
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        server.serve_until(signal.SIGINT)
    return 0


def _draw(run: Path, file: Path) -> int:
    from muster.observing.plot import plot_run
    from muster.observing.snapshots import RunHistory

    figure = plot_run(RunHistory.read(run))
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=110, format=file.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise BadOption(
            f"--png {file}: the picture cannot be written: {error}"
        ) from error
    write_whole(file, [picture.getbuffer()])
    print(f"wrote {file}")
    return 0


FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # errors of standard output on a disk
COMMANDS: dict[type, Callable[[Any], int]] = {
    Collect: collect,
    Serve: serve,
    Eval: evaluate,
    Tune: tune,
    ExportCommand: export,
    WatchCommand: watch,
    ClusterCommand: cluster,
    NodeCommand: node,
    Replay: replay,
    Doctor: doctor,
}
"""What each command runs; its name is that of its class."""

EXAMPLES = """Collects reinforcement-learning experience at the speed of the environments.

examples:
  muster collect CartPole-v1 --frames 100k --out runs/a
  muster collect Pendulum-v1 --frames 1e6 --num-envs 16 --policy mlp --seed 3 --out runs/b
  muster collect CartPole-v1 --frames 50_000 --policy net.safetensors
  muster collect my_envs:Maze-v0 --frames 10k --policy agent.py:policy --allow-import
  muster serve random --obs float32:4 --act discrete:2 --frames 10k --address 127.0.0.1:7000
  muster eval CartPole-v1 --policy net.safetensors --episodes 20 --video best,worst
  muster tune CartPole-v1 --policy mlp --num-envs 16 64
  muster replay /tmp/muster-crash-x1/env-3.crash
  muster export runs/a --to minari --out cartpole/random-v0
  muster watch runs/a runs/b
  muster cluster
  muster doctor

Read a recording with:  python -c "import muster; print(muster.load('runs/a'))"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: that of this process).

    Returns:
        the exit code: 0; 1 if doctor found a problem, a replay failed or a node has lost its
            collector; 2 for a
        ``MusterError``, with one message, or if stdout is on a full disk; 130 and 143 when stopped
        by Ctrl-C and SIGTERM; 141 if stdout was closed.

    Raises:
        SystemExit: from the parser, for ``--help`` (0) and invalid arguments (2).
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # it was closed
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has exited: `muster ... | head`
        _discard_output()
        return 141
    except OSError as error:
        if error.errno not in FULL:
            raise
        _discard_output()
        print(
            f"muster: the output cannot be written: {error.strerror}.", file=sys.stderr
        )
        return 2


def _run(arguments: list[str]) -> int:
    if arguments in (["--version"], ["-V"]):
        print(f"muster {installed('muster-rl') or 'from a source tree'}")
        return 0
    command = _parse(arguments or ["--help"])
    try:
        return COMMANDS[type(command)](command)
    except MusterError as error:
        if getattr(command, "allow_import", False) and error.__cause__ is not None:
            traceback.print_exception(
                error.__cause__
            )  # perhaps from the user's own code
        print(f"muster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("muster: stopped at once", file=sys.stderr)
        return 130


def _discard_output() -> None:
    """Redirect standard output, so that what is in its buffer is no second error at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parse(arguments: Sequence[str]) -> Any:
    """Parse ``arguments`` into an object of one of the ``COMMANDS``."""
    import tyro

    described: list[Any] = [
        Annotated[
            kind,
            tyro.conf.subcommand(
                kind.__name__.lower().removesuffix("command"), description=kind.__doc__
            ),
        ]
        for kind in COMMANDS
    ]
    one_of: Any = functools.reduce(operator.or_, described)
    return tyro.cli(
        one_of,
        prog="muster",
        description=EXAMPLES,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )


if __name__ == "__main__":
    sys.exit(main())
