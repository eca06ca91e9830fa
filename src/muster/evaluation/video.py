"""Recorded actions of an evaluation, and videos, for which episodes are repeated in an environment that renders."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muster.envs.build import is_environment
from muster.errors import BadOption, UnsupportedEnv
from muster.evaluation.result import EvaluatedEpisode
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.crash_report import CrashReport, EnvFactory, Special
from muster.restore.player import Player
from muster.utils.mp4 import check_ffmpeg, write_mp4

FPS = 30.0  # default for environments without render_fps


@dataclass
class Tape:
    """Actions of all environments by rollout, ``[T, B, *shape]`` per leaf, and the factory of each group."""

    name: str
    factories: list[tuple[Any, Mapping[str, Any] | None]]
    per_group: int
    rollouts: list[dict[Key, Array]] = field(default_factory=list)

    def factory(self, env_id: int) -> tuple[Any, Mapping[str, Any] | None]:
        return self.factories[env_id // self.per_group]

    def actions(self, episode: EvaluatedEpisode) -> dict[Key, Array]:
        """Return the actions of one episode, ``[length, 1, *shape]`` per leaf."""
        T = len(next(iter(self.rollouts[0].values())))
        first, last = episode.begin // T, (episode.begin + episode.length - 1) // T
        begin, env = episode.begin - first * T, episode.env_id
        parts = self.rollouts[first : last + 1]
        joined = {key: np.concatenate([part[key][:, env : env + 1] for part in parts]) for key in parts[0]}
        return {key: array[begin : begin + episode.length] for key, array in joined.items()}

    def crash_report(self, episode: EvaluatedEpisode, factory: EnvFactory) -> CrashReport:
        """Return the episode in the format of ``muster.restore.player``, to play in an environment of ``factory``."""
        return CrashReport(
            name=self.name,
            factory=factory,
            env_ids=[episode.env_id],
            alone=True,
            phase="close",
            kind="",
            message="",
            actions=self.actions(episode),
            resets=np.zeros((1, 3), np.int64),
            special={0: Special(episode.seed, None, None)},
        )


def film(tape: Tape, episode: EvaluatedEpisode, folder: Path, name: str, fps: float | None) -> Path:
    """Write a video, see ``Evaluation.video``. The file name is ``name`` followed by the return."""
    if episode.seed is None:
        raise UnsupportedEnv(
            f"{tape.name}: this episode had no seed of its own, so it cannot be repeated: environments that are made "
            f"together reset themselves. Evaluate single Gymnasium environments (num_envs=) for videos."
        )
    check_ffmpeg()
    player = Player(tape.crash_report(episode, _rendering(tape, episode.env_id)))
    with closing(player):
        if (mode := getattr(player.env, "render_mode", None)) != "rgb_array":
            raise UnsupportedEnv(
                f"{tape.name} has render_mode={mode!r} and so gives no pictures: create_env_fn has to take "
                f"render_mode= and to pass it on"
            )
        if fps is None:
            fps = float(getattr(player.env, "metadata", {}).get("render_fps") or FPS)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-return-{episode.episode_return:g}.mp4"
        write_mp4(path, _frames(player, tape, episode), fps)
    return path


def _frames(player: Player, tape: Tape, episode: EvaluatedEpisode) -> Iterator[Array]:
    """Yield the picture after the reset and after every step."""
    player.make(("reset", 0))
    yield _picture(player, tape)
    total, steps, ended = 0.0, 0, False
    while steps < episode.length and not ended:
        player.make(("step", steps))
        yield _picture(player, tape)
        reward, terminated, truncated = (column.item() for column in player.outcome())
        total, steps, ended = total + reward, steps + 1, terminated or truncated
    if steps < episode.length or not math.isclose(total, episode.episode_return, rel_tol=1e-9, abs_tol=1e-9):
        warnings.warn(
            f"{tape.name} is not determined by its seed and actions: the episode with return "
            f"{episode.episode_return:g} in {episode.length} steps gave {total:g} in {steps} when it was repeated for "
            f"the video, which shows that.",
            stacklevel=2,
        )


def _picture(player: Player, tape: Tape) -> Array:
    picture = np.asarray(player.env.render())
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise UnsupportedEnv(
            f"{tape.name}.render() returned {picture.dtype} {list(picture.shape)}, expected uint8 [height, width, 3]"
        )
    return picture


def _rendering(tape: Tape, env_id: int) -> EnvFactory:
    source, given = tape.factory(env_id)
    kwargs: Mapping[str, Any] = given or {}
    if is_environment(source):
        raise BadOption("an environment object cannot be made again for a video: give an id, or a function")
    if isinstance(source, str) or _takes_render_mode(source):
        kwargs = {**kwargs, "render_mode": "rgb_array"}
    return EnvFactory(source, None, kwargs)


def _takes_render_mode(source: Any) -> bool:
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)
