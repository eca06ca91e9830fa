"""``muster replay``: replays the failure of an environment in this process, under the debugger."""

from __future__ import annotations

import bdb
import faulthandler
import pdb
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from muster.errors import BadCrashReport, MusterError

if TYPE_CHECKING:
    from muster.restore.crash_report import CrashReport
    from muster.restore.player import Player

FAILED = 1
BY_DEATH = (
    "WorkerDied",
    "WorkerHung",
)  # failures that end or hang the process instead of raising


@dataclass(frozen=True)
class Replay:
    """Replay a crash report: play its actions, and stop under pdb where the environment failed."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The crash report: a file that a collector wrote when an environment raised, hung, or ended its worker."""

    trust: bool = False
    """Allow the file to run code: to unpickle the environment's factory, or to import its module."""

    no_pdb: bool = False
    """Print the traceback instead of starting pdb. Default where the input is no terminal."""


def replay(command: Replay) -> int:
    """Run the command. Returns 1 if the environment failed, 0 if it did not."""
    from muster.restore.crash_report import CrashReport
    from muster.restore.player import Player

    crash_report = CrashReport.load(command.file, trust=command.trust)
    _say(_about(crash_report))
    if crash_report.missing:
        raise BadCrashReport(f"{command.file}: {crash_report.missing}")
    _say(_differences(crash_report))
    interactive = not command.no_pdb and sys.stdin.isatty()
    try:
        player = Player(crash_report)
    except MusterError as error:
        return _failed(error, interactive, "making the environment")
    with closing(player):
        return _play(player, interactive)


def _play(player: Player, interactive: bool) -> int:
    from rich.console import Console
    from rich.progress import track

    crash_report, moves = player.crash_report, player.moves()
    last = moves.pop() if crash_report.phase in ("step", "reset") and moves else None
    console, silent = Console(stderr=True), not sys.stderr.isatty()
    for done, move in enumerate(
        track(moves, "replay", console=console, transient=True, disable=silent)
    ):
        try:
            player.make(move)
        except BaseException as error:  # noqa: BLE001  (as below)
            what = "action" if move[0] == "step" else "reset"
            return _failed(
                error,
                interactive,
                f"{what} {done + 1} of {len(moves)}, earlier than recorded",
            )
    _say(player.verdict())
    if last is None:
        _say(
            "All actions are played. What failed came after them, in the phase"
            f" {crash_report.phase!r}."
        )
        return 0
    doing = (
        f"env.{last[0]}()"
        if last[0] == "reset"
        else f"env.step({player.action(last[1])!r})"
    )
    if crash_report.kind in BY_DEATH:
        _say(
            f"Now {doing}, in which the worker"
            f" {'hung' if crash_report.kind == 'WorkerHung' else 'died'}."
        )
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    try:
        if interactive and crash_report.kind in BY_DEATH:
            _stop_before(
                lambda: player.make(last),
                player.env,
                None if last[0] == "reset" else player.action(last[1]),
            )
        else:
            player.make(last)
    except BaseException as error:  # noqa: BLE001  (an exception of the environment is the expected result)
        if isinstance(error, bdb.BdbQuit) or isinstance(error.__cause__, bdb.BdbQuit):
            return FAILED
        return _failed(error, interactive, doing)
    _say(f"{doing} did not fail this time.")
    return 0


def _stop_before(step: Callable[[], None], env: Any, action: Any) -> None:
    """Stop under pdb with ``env`` and ``action`` as variables: c runs the step, s steps into it, q
    quits.
    """
    pdb.Pdb(nosigint=True).set_trace()  # so that Ctrl-C ends a hang
    step()


def _failed(error: BaseException, interactive: bool, doing: str) -> int:
    """Print an error, and if ``interactive`` start pdb at its innermost frame, the environment's."""
    original = (
        error.__cause__
        if isinstance(error, MusterError) and error.__cause__ is not None
        else error
    )
    traceback.print_exception(type(original), original, original.__traceback__)
    if original is not error:
        _say(f"muster: {error}")
    _say(
        f"Failed again in {doing}."
        if not isinstance(error, KeyboardInterrupt)
        else f"Interrupted in {doing}."
    )
    frames: TracebackType | None = original.__traceback__
    if interactive and frames is not None:
        pdb.post_mortem(frames)
    return FAILED


def _about(crash_report: CrashReport) -> str:
    who = (
        f"environment {crash_report.env_ids[0]}"
        if len(crash_report.env_ids) == 1
        else f"{len(crash_report.env_ids)} environments"
    )
    rows = len(next(iter(crash_report.actions.values()), ()))
    first = crash_report.message.split("\n\n")[0]
    return (
        f"{crash_report.name}, {who}, {crash_report.time}\n"
        f"{crash_report.kind} in {crash_report.phase}: {first}\n"
        f"{rows:,} actions and {len(crash_report.resets):,} resets. {crash_report.caveat}"
    ).rstrip()


def _differences(crash_report: CrashReport) -> str:
    from muster.restore.crash_report import versions

    here = versions()
    other = [
        f"{k} {v} (here {here.get(k, 'none')})"
        for k, v in crash_report.versions.items()
        if here.get(k) != v
    ]
    return f"Recorded with other versions: {', '.join(other)}." if other else ""


def _say(text: str) -> None:
    if text:
        print(text, flush=True)
