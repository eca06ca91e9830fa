"""What an evaluation has found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muster.errors import BadOption
from muster.memory.specs import Array

if TYPE_CHECKING:
    from muster.evaluation.video import Tape

GRID = 100_001  # points on which Student's distribution is integrated; its quantiles are exact to 1e-6 and better


class EvaluatedEpisode(NamedTuple):
    """An episode, from its reset to its end.

    Attributes:
        env_id: number of the environment.
        episode: its number in that environment, from 0.
        seed: of its reset: ``env.reset(seed=seed)`` and the same actions repeat it. None where the environment went on
            with its own generators (only batches of environments do so after their first episode).
        begin: time step of the evaluation at which it began.
        episode_return: undiscounted sum of rewards as stored (float32), added up in float64.
        length: steps.
        terminated, truncated: how it ended.
        version: of the weights that acted.
    """

    env_id: int
    episode: int
    seed: int | None
    begin: int
    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    version: int | str


class UnfinishedEpisode(NamedTuple):
    """An episode that was wanted and going on when the evaluation was stopped.

    Attributes:
        env_id, episode, seed: see ``EvaluatedEpisode``.
        steps: so far.
        return_so_far: NaN where the environment's batches do not show the reward that returns are made of.
    """

    env_id: int
    episode: int
    seed: int | None
    steps: int
    return_so_far: float


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation, and what was left out of it. Equal if all but ``seconds`` is equal.

    Every step is somewhere: ``frames = frames_counted + steps of unfinished + discarded["uncounted"]``, and what was
    executed besides is in ``discarded``, too.

    Attributes:
        env: name of the environments.
        version: of the weights that acted.
        seed: that the episodes' seeds are derived from.
        rule: by which episodes were chosen.
        biased: that rule favours short episodes.
        complete: all episodes are there that were asked for.
        stopped_by: "episodes", "max_trajectories", "max_T", "max_frames" or "progress" (the caller's function).
        records: the episodes that count, in order of their ends (ties in order of environments).
        uncounted: finished ones that the rule left out.
        unfinished: see ``UnfinishedEpisode``.
        frames: environment steps until the evaluation was over, of all environments.
        discarded: steps by reason: "uncounted", that went into no record; "overrun", that were executed after the end,
            in the rest of a rollout; "restarted", of attempts that a failure ended.
        seconds: it took.
    """

    env: str
    version: int | str
    seed: int
    rule: str
    biased: bool
    complete: bool
    stopped_by: str
    records: tuple[EvaluatedEpisode, ...]
    uncounted: tuple[EvaluatedEpisode, ...]
    unfinished: tuple[UnfinishedEpisode, ...]
    frames: int
    discarded: dict[str, int]
    seconds: float = field(compare=False)
    tape: Tape | None = field(repr=False, compare=False, default=None)

    @property
    def returns(self) -> Array:
        """``[n]`` float64, in the order of ``records``."""
        return np.array([record.episode_return for record in self.records], np.float64)

    @property
    def lengths(self) -> Array:
        """``[n]`` int64, in the order of ``records``."""
        return np.array([record.length for record in self.records], np.int64)

    @property
    def mean(self) -> float:
        """Of the returns; NaN without episodes, as all of these."""
        return float(self.returns.mean()) if self.records else math.nan

    @property
    def std(self) -> float:
        """Of the returns as a sample (divided by n - 1); NaN for fewer than two."""
        return float(self.returns.std(ddof=1)) if len(self.records) > 1 else math.nan

    @property
    def median(self) -> float:
        """Of the returns."""
        return float(np.median(self.returns)) if self.records else math.nan

    @property
    def length_mean(self) -> float:
        """Of the lengths."""
        return float(self.lengths.mean()) if self.records else math.nan

    @property
    def frames_counted(self) -> int:
        """Steps of the episodes that count."""
        return int(self.lengths.sum())

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t interval for the mean return; infinite for fewer than two episodes.

        It holds for independent episodes, and for returns that are not normally distributed with enough of them.
        """
        if not 0 < level < 1:
            raise BadOption(f"confidence_interval({level!r}): expected a level between 0 and 1, such as 0.95")
        n = len(self.records)
        if n < 2:
            return -math.inf, math.inf
        half = student_quantile(level, n - 1) * self.std / math.sqrt(n)
        return self.mean - half, self.mean + half

    def video(self, which: str | int, folder: str | Path = "videos", *, fps: float | None = None) -> Path:
        """Repeat an episode in an environment that renders, and write an mp4 file; needs ``muster-rl[video]``.

        The environment is made again with ``render_mode="rgb_array"``, reset with the episode's seed, and gets the
        recorded actions. A warning says so if that gives another return.

        Args:
            which: "best", "worst", "median" (the episode nearest to it), or an index into ``records``.
            folder: made if it is not there.
            fps: frames per second; None: as the environment says (``metadata["render_fps"]``), or 30.

        Returns:
            the file; it has a frame for the reset and for every step.

        Raises:
            BadOption: there is no such episode, or nothing was recorded.
            UnsupportedEnv: the environments cannot be repeated one by one, or do not render.
        """
        from muster.evaluation.video import film

        index = self.index(which)
        if self.tape is None:
            raise BadOption("no actions were recorded: make the Evaluator with record_actions=True, the default")
        label = which if isinstance(which, str) else "episode"
        return film(self.tape, self.records[index], Path(folder), f"{label}-{index}", fps)

    def index(self, which: str | int) -> int:
        """The place in ``records`` of "best", "worst" or "median", the first of equals; or of an index, as it is."""
        if not self.records:
            raise BadOption(f"there is no episode {which!r}: none was finished")
        returns = self.returns
        if isinstance(which, str):
            chosen = {"best": -returns, "worst": returns, "median": abs(returns - np.median(returns))}.get(which)
            if chosen is not None:
                return int(np.argmin(chosen))
        elif not isinstance(which, bool) and -len(returns) <= which < len(returns):
            return which % len(returns)
        raise BadOption(
            f"there is no episode {which!r}: expected 'best', 'worst', 'median' or an index below {len(returns)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, with the figures; NaN and infinities are None, so that it is JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tape"}
        for name in ("records", "uncounted", "unfinished"):
            plain[name] = [{k: _finite(v) for k, v in record._asdict().items()} for record in plain[name]]
        names = ("mean", "std", "median", "length_mean", "frames_counted")
        figures = {name: _finite(getattr(self, name)) for name in names}
        interval = [_finite(end) for end in self.confidence_interval()]
        return {"episodes": len(self.records), **figures, "confidence_interval_95": interval, **plain}

    def __str__(self) -> str:
        low, high = self.confidence_interval()
        notes = [f"version {self.version}", f"rule {self.rule}" + " (biased towards short episodes)" * self.biased]
        if not self.complete:
            notes.append(f"incomplete: stopped by {self.stopped_by}, {len(self.unfinished)} unfinished")
        return (
            f"{self.env}: return {self.mean:,.2f} [{low:,.2f}, {high:,.2f}] (95%) over {len(self.records)} episodes of "
            f"{self.length_mean:,.1f} steps; {', '.join(notes)}"
        )


def student_quantile(level: float, df: int) -> float:
    """The x for which Student's t with ``df`` degrees of freedom lies in [-x, x] with probability ``level``.

    With t = sqrt(df) tan(a), the density over the angle is proportional to cos(a)^(df - 1), which is easy to integrate.
    """
    angle = np.linspace(0.0, min(math.pi / 2, 40 / math.sqrt(df)), GRID)  # there is nothing beyond
    density = np.cos(angle) ** (df - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(df) * math.tan(float(np.interp(level * area[-1], area, angle)))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
