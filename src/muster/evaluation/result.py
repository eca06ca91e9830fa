"""The results of evaluations."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.errors import BadOption
from muster.evaluation.episodes import EvaluatedEpisode, UnfinishedEpisode
from muster.memory.specs import Array
from muster.observing.plot import plot_returns, png_of
from muster.utils.texts import counted

if TYPE_CHECKING:
    from muster.evaluation.video import Tape

# number of points for integrating Student's distribution; the quantiles are exact to 1e-6 or better
GRID = 100_001


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The episodes of one evaluation, and the steps that no episode has.

    Comparison ignores ``seconds`` and ``tape``.

    Every step is counted: ``frames = frames_counted + steps of unfinished +
    discarded["uncounted"]``. ``discarded`` also has the steps executed beyond ``frames``.

    Attributes:
        env: name of the environments.
        version: version of the weights that acted.
        seed: number from which the episodes' seeds are derived.
        rule: rule that chose the episodes.
        biased: the rule favours short episodes.
        complete: all requested episodes are complete.
        stopped_by: "episodes", "max_trajectories", "max_T", "max_frames" or "progress" (the
            caller's function).
        records: the episodes that count, in order of their ends (ties in order of environments).
        uncounted: complete episodes that the rule left out.
        unfinished: see ``UnfinishedEpisode``.
        started: number of episodes that made a step. It is more than ``len(records)`` for rules by
            which episodes compete, at a limit, and for batches of environments that reset
            themselves, or cannot be left out of a step.
        frames: number of environment steps of all environments up to the end of the evaluation.
        discarded: number of steps by reason: "uncounted": in no record; "overrun": executed after
            the end, by environments on a device, in the rest of a rollout; "restarted": of attempts
            that a failure ended.
        seconds: duration in seconds.
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
    started: int
    frames: int
    discarded: dict[str, int]
    seconds: float = field(compare=False)
    tape: Tape | None = field(repr=False, compare=False, default=None)

    @property
    def returns(self) -> Array:
        """Returns, ``[n]`` float64, in the order of ``records``."""
        return np.array([record.episode_return for record in self.records], np.float64)

    @property
    def lengths(self) -> Array:
        """Numbers of steps, ``[n]`` int64, in the order of ``records``."""
        return np.array([record.length for record in self.records], np.int64)

    @property
    def mean(self) -> float:
        """Mean of the returns.

        Without episodes this, ``std``, ``median`` and ``length_mean`` are NaN.
        """
        return float(self.returns.mean()) if self.records else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the returns as a sample (divisor n - 1); NaN for fewer than two."""
        return float(self.returns.std(ddof=1)) if len(self.records) > 1 else math.nan

    @property
    def median(self) -> float:
        """Median of the returns."""
        return float(np.median(self.returns)) if self.records else math.nan

    @property
    def length_mean(self) -> float:
        """Mean of the lengths."""
        return float(self.lengths.mean()) if self.records else math.nan

    @property
    def frames_counted(self) -> int:
        """Number of steps of the episodes that count."""
        return int(self.lengths.sum())

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return Student's t interval for the mean return; infinite for fewer than two episodes.

        It is valid for independent episodes; if returns are not normally distributed, only for many
        of them.
        """
        if not 0 < level < 1:
            raise BadOption(
                f"confidence_interval({level!r}): expected a level between 0 and 1, such as 0.95"
            )
        n = len(self.records)
        if n < 2:
            return -math.inf, math.inf
        half = student_quantile(level, n - 1) * self.std / math.sqrt(n)
        return self.mean - half, self.mean + half

    def plot(self) -> Any:
        """Draw the returns with the 95 % interval of their mean, and each return over the length of
        its episode.

        Needs matplotlib: ``pip install 'muster-rl[plot]'``.

        Returns:
            a ``matplotlib.figure.Figure``, which notebooks show; ``savefig(path)`` writes it.

        Raises:
            BadOption: matplotlib is not installed.
        """
        truncated = np.array([record.truncated for record in self.records], bool)
        return plot_returns(
            self.returns, self.lengths, truncated, self.confidence_interval(), str(self)
        )

    def _repr_png_(self) -> bytes | None:
        return png_of(self.plot)

    def video(
        self,
        which: str | int,
        folder: str | Path = "videos",
        *,
        fps: float | None = None,
    ) -> Path:
        """Repeat an episode in an environment that renders, and write an mp4 file.

        Needs ``muster-rl[video]``.

        The environment is made with ``render_mode="rgb_array"``, reset with the episode's seed, and
        stepped with the recorded actions. A warning reports a different return.

        Args:
            which: "best", "worst", "median" (the episode nearest to it), or an index into
                ``records``.
            folder: folder of the file; created if necessary.
            fps: frames per second. None: the environment's ``metadata["render_fps"]``, or 30.

        Returns:
            the path of the file, which has a frame for the reset and for every step.

        Raises:
            BadOption: there is no such episode, or no actions were recorded.
            UnsupportedEnv: the environments cannot be repeated individually, or do not render.
        """
        from muster.evaluation.video import film

        index = self.index(which)
        if self.tape is None:
            raise BadOption(
                "no actions were recorded: make the Evaluator with record_actions=True, the default"
            )
        label = which if isinstance(which, str) else "episode"
        return film(
            self.tape, self.records[index], Path(folder), f"{label}-{index}", fps
        )

    def index(self, which: str | int) -> int:
        """Return the index in ``records`` of "best", "worst" or "median" (the first of equals), or
        of an index.
        """
        if not self.records:
            raise BadOption(f"there is no episode {which!r}: none was finished")
        returns = self.returns
        if isinstance(which, str):
            chosen = {
                "best": -returns,
                "worst": returns,
                "median": abs(returns - np.median(returns)),
            }.get(which)
            if chosen is not None:
                return int(np.argmin(chosen))
        elif not isinstance(which, bool) and -len(returns) <= which < len(returns):
            return which % len(returns)
        raise BadOption(
            f"there is no episode {which!r}: expected 'best', 'worst', 'median' or an index below"
            f" {len(returns)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON, with all figures; NaN and infinite values
        become None.
        """
        plain = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "tape"
        }
        for name in ("records", "uncounted", "unfinished"):
            plain[name] = [
                {k: _finite(v) for k, v in record._asdict().items()}
                for record in plain[name]
            ]
        names = ("mean", "std", "median", "length_mean", "frames_counted")
        figures = {name: _finite(getattr(self, name)) for name in names}
        interval = [_finite(end) for end in self.confidence_interval()]
        return {
            "episodes": len(self.records),
            **figures,
            "confidence_interval_95": interval,
            **plain,
        }

    def __repr__(self) -> str:
        return f"Evaluation({self})"

    def __str__(self) -> str:
        low, high = self.confidence_interval()
        notes = [
            f"version {self.version}",
            f"rule {self.rule}" + " (biased towards short episodes)" * self.biased,
        ]
        if (more := self.started - len(self.records) - len(self.unfinished)) > 0:
            notes.append(f"{more} more started")
        if not self.complete:
            notes.append(
                f"incomplete: stopped by {self.stopped_by}, {len(self.unfinished)} unfinished"
            )
        return (
            f"{self.env}: return {self.mean:,.2f} [{low:,.2f}, {high:,.2f}] (95%) over "
            f"{counted(len(self.records), 'episode')} of "
            f"{self.length_mean:,.1f} steps; {', '.join(notes)}"
        )


@dataclass(frozen=True)
class EvaluatorStats:
    """A snapshot of an evaluator.

    Attributes:
        evaluations: number of completed evaluations.
        episodes: number of episodes that counted in them.
        frames: number of all executed environment steps.
        seconds: duration of the completed evaluations.
        restarts: number of evaluations repeated after a failure.
        skipped: number of triggers skipped with ``when_busy="skip"``.
        waiting: number of triggers whose evaluation is not complete.
        version: version of the last evaluation's weights; None before the first.
        mean: mean return of the last evaluation; None before the first.
    """

    evaluations: int = 0
    episodes: int = 0
    frames: int = 0
    seconds: float = 0.0
    restarts: int = 0
    skipped: int = 0
    waiting: int = 0
    version: int | str | None = None
    mean: float | None = None


def student_quantile(level: float, df: int) -> float:
    """Return the x for which Student's t with ``df`` degrees of freedom lies in [-x, x] with
    probability ``level``.

    With t = sqrt(df) tan(a), the density of the angle a is proportional to cos(a)^(df - 1), which
    is easy to integrate.
    """
    angle = np.linspace(
        0.0, min(math.pi / 2, 40 / math.sqrt(df)), GRID
    )  # the rest is negligible
    density = np.cos(angle) ** (df - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(df) * math.tan(float(np.interp(level * area[-1], area, angle)))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
