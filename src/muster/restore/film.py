"""Films of episodes: an episode is repeated from its seed and actions in an environment that
renders.

``python -c`` with ``film_command`` makes one film in a process of its own, see ``main``.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from muster.envs.build import is_environment
from muster.envs.checks import call
from muster.errors import (
    BadCrashReport,
    BadOption,
    ImportRefused,
    MusterError,
    UnsupportedEnv,
    described,
)
from muster.memory.specs import Array
from muster.restore.crash_report import CrashReport, EnvFactory
from muster.restore.player import Player
from muster.utils.mp4 import check_ffmpeg, write_mp4
from muster.utils.programs import program
from muster.utils.whole_files import make_folder, open_regular

FPS = 30.0  # default for environments without render_fps
LIMIT_S = 300  # to make a film
LIMIT_BYTES = 256 << 20  # of a film


def film(
    moves: CrashReport,
    path: Path,
    fps: float | None = None,
) -> tuple[list[float], float]:
    """Write a video of the episode that the last reset of the moves starts: a picture of the reset
    and of every step.

    Returns the rewards of the repeated episode, and the pictures per second: ``fps``, or those of
    the environment. Raises ``MusterError`` if the episode cannot be repeated, or its environment
    renders no pictures.
    """
    if moves.missing:
        raise BadCrashReport(moves.missing)
    check_ffmpeg()
    with closing(Player(replace(moves, factory=_rendering(moves)))) as player:
        own_fps = _frames_per_second(player)
        order = player.moves()
        fps = own_fps if fps is None else fps
        rewards: list[float] = []
        start = max(n for n, move in enumerate(order) if move[0] == "reset")
        for move in order[:start]:
            player.make(move)
        make_folder(path.parent)
        write_mp4(path, _pictures(player, order[start:], rewards), fps)
    return rewards, fps


def is_same(rewards: Sequence[float], episode_return: float, length: int) -> bool:
    """Whether a repeated episode with these rewards has this return and length."""
    if len(rewards) != length:
        return False
    return math.isclose(sum(rewards), episode_return, rel_tol=1e-9, abs_tol=1e-9)


def _rendering(moves: CrashReport) -> EnvFactory:
    """Return a factory of one environment that renders pictures, if its function can make one."""
    source = moves.factory.source
    kwargs = moves.factory.kwargs or {}
    if is_environment(source):
        raise BadOption(
            f"{moves.name}: an environment object cannot be made again for a video: give an id, or"
            " a function"
        )
    if isinstance(source, str) or _takes_render_mode(source):
        kwargs = {**kwargs, "render_mode": "rgb_array"}
    return EnvFactory(source, None, kwargs, moves.factory.device)


def _frames_per_second(player: Player) -> float:
    mode = getattr(player.env, "render_mode", None)
    if mode != "rgb_array":
        raise UnsupportedEnv(
            f"{player.crash_report.name} has render_mode={mode!r} and so gives no pictures:"
            " create_env_fn has to take render_mode= and to pass it on"
        )
    metadata = getattr(player.env, "metadata", {})
    return float(metadata.get("render_fps") or FPS)


def _pictures(
    player: Player,
    moves: Sequence[tuple[str, int]],
    rewards: list[float],
) -> Iterator[Array]:
    """Make a reset, then steps, until the episode ends; yield the picture after each, and append
    its reward.
    """
    for move in moves:
        player.make(move)
        yield _picture(player)
        if move[0] == "step":
            reward, terminated, truncated = (
                column.item() for column in player.outcome()
            )
            rewards.append(reward)
            if terminated or truncated:
                return


def load_own(path: str | Path, *, trust: bool) -> CrashReport:
    """Read a kept episode, from a file that stays open meanwhile, so that what is checked is what
    is read.

    ``trust`` allows a file to run code, if it belongs to this user and no other user may write it.
    Otherwise such a file raises ``ImportRefused``. A missing or damaged file raises
    ``BadCrashReport``.
    """
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            shared = bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
            own = about.st_uid == os.geteuid() and not shared
            kept = CrashReport.load(f"/dev/fd/{file.fileno()}", trust=trust and own)
        if not kept.episode:
            raise BadCrashReport(f"{path} is a crash report.")
    except ImportRefused as error:
        how = "If you trust the directory, restart muster watch with --trust."
        if trust:
            how = "Its file belongs to another user, or others may write it."
        raise ImportRefused(
            f"To repeat this episode, code of the run's directory has to run. {how}"
        ) from error
    except OSError as error:
        raise BadCrashReport(
            f"The episode {path} cannot be read: {error.strerror or error}."
        ) from error
    except BadCrashReport as error:
        raise BadCrashReport(f"No episode: {error}") from error
    return kept


def film_command(*, trust: bool) -> list[str]:
    """Return the command that makes a film; the path of the file is to be appended.

    ``trust``: see ``load_own``.
    """
    return program("muster.restore.film", "trust" if trust else "")


def film_of_kept(kept: CrashReport, path: Path) -> dict[str, Any]:
    """Film a kept episode.

    Returns its numbers and the film's; ``note`` says how it differs from the recorded one.
    """
    rewards, fps = film(kept, path)
    note = ""
    if not is_same(rewards, kept.episode["episode_return"], kept.episode["length"]):
        note = (
            "This film is not the recorded episode: repeated from its seed and actions, it has"
            f" return {sum(rewards):g} in {len(rewards)} steps. {kept.name} also depends on"
            " something else."
        )
    return {**kept.episode, "frames": len(rewards) + 1, "fps": fps, "note": note}


def main(arguments: Sequence[str]) -> None:
    """Write a line of JSON and a film to standard output; the line alone, with ``error``, if there
    is none.
    """
    trust, path = arguments
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # environments print
    os.nice(10)  # the collection goes first
    signal.alarm(LIMIT_S)  # also ends it if the page is gone
    content = b""
    try:
        with tempfile.TemporaryDirectory(prefix="muster-film-") as folder:
            made = Path(folder, "film.mp4")
            answer = film_of_kept(load_own(path, trust=bool(trust)), made)
            content = made.read_bytes()
        if len(content) > LIMIT_BYTES:
            answer = {"error": f"The film has more than {LIMIT_BYTES:,} bytes."}
            content = b""
    except MusterError as error:
        answer = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 (the environment's own; the page shows it)
        answer = {"error": described(error)}
    output.write(json.dumps(answer).encode() + b"\n" + content)
    output.close()


def _picture(player: Player) -> Array:
    name = player.crash_report.name
    picture = np.asarray(call(player.env, "render", name))
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise UnsupportedEnv(
            f"{name}.render() returned {picture.dtype} {list(picture.shape)}, "
            "expected uint8 [height, width, 3]"
        )
    return picture


def _takes_render_mode(source: Any) -> bool:
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(
            source
        ).parameters
    except (TypeError, ValueError):
        return False
    return any(
        p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters.values()
    )
