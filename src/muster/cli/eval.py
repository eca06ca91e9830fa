"""``muster eval``: evaluates a policy on an exact number of episodes, with a confidence interval."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from muster.cli.options import (
    NUM_ENVS,
    AllowImport,
    Count,
    Env,
    ObsDtype,
    Policy,
    check_numbers,
)
from muster.cli.report import StopSignals, symbols
from muster.cli.request import obs_dtype_of, prepared
from muster.episodes.rules import RuleName
from muster.errors import BadOption
from muster.observing.progress import progress
from muster.utils.whole_files import make_folder

if TYPE_CHECKING:
    from muster.evaluation import Evaluation

KINDS = ("best", "worst", "median")


@dataclass(frozen=True)
class Eval:
    """Evaluate a policy in a Gymnasium environment, on an exact number of episodes."""

    env: Env
    policy: Policy = "random"

    episodes: Annotated[int, arg(metavar="N")] = 20
    """Exact number of complete episodes."""

    rule: RuleName = "per_env"
    """Which episodes count. per_env: a fixed number from each environment (does not favour short episodes); fair: the
    same number from each, the rest from the first that end one more; last_even: the first to start; first_done: the
    first to end."""

    num_envs: Annotated[int, NUM_ENVS] = 8
    """Number of environments that are stepped together; with --workers, in each worker."""

    workers: Annotated[int, arg(metavar="N")] = 0
    """Number of worker processes. Default: evaluate in process."""

    sampled: bool = False
    """Sample actions as in training; otherwise the policy acts deterministically."""

    obs_dtype: ObsDtype = "policy"

    seed: Annotated[int, arg(metavar="S")] = 0
    """Episode i is reset with seed S + i."""

    max_frames: Annotated[Count | None, arg(metavar="N")] = None
    """Stop after this number of environment steps over all environments; running episodes are reported."""

    max_steps: Annotated[Count | None, arg(metavar="N")] = None
    """Stop after this number of time steps of each environment."""

    max_episode_steps: Annotated[Count | None, arg(metavar="N")] = None
    """Truncate episodes after this number of steps, for environments whose episodes may never end."""

    video: Annotated[str | None, arg(metavar="WHICH")] = None
    """Episodes to make videos of: best, worst, median or indices, separated by commas. Needs muster-rl[video]."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("videos")
    """Folder for videos."""

    json: bool = False
    """Print everything as JSON instead of the table."""

    allow_import: AllowImport = False

    quiet: bool = False
    """Print the result and errors only."""


def evaluate(command: Eval) -> int:
    """Run the command. Returns the exit code."""
    check_numbers(command, episodes=1, num_envs=1, workers=0, seed=0)
    wanted = _videos(command)
    if wanted:
        from muster.utils.mp4 import check_ffmpeg

        check_ffmpeg()  # raises now, not at the end, as the next one
        make_folder(command.out)
    with (
        prepared(command, command.seed) as (policy, description),
        StopSignals(quiet=command.quiet) as stop,
    ):
        evaluation = _evaluate(command, policy, stop)
        files: list[Path] = []
        try:
            files += (
                evaluation.video(which, command.out)
                for which in wanted
                if evaluation.records
            )
        finally:  # also if a video fails
            if command.json:
                about = {"policy": description, "videos": list(map(str, files))}
                print(json.dumps({**evaluation.as_dict(), **about}))
            else:
                print(table(evaluation, description, files))
    return stop.exit_code


def _evaluate(command: Eval, policy: Any, stop: StopSignals) -> Evaluation:
    from muster.evaluation import Evaluator

    with (
        Evaluator(
            command.env,
            policy,
            episodes=command.episodes,
            rule=command.rule,
            num_envs=command.num_envs,
            num_workers=command.workers,
            seed=command.seed,
            exploration_type="random" if command.sampled else "deterministic",
            max_frames=command.max_frames,
            max_T=command.max_steps,
            max_frames_per_traj=command.max_episode_steps,
            record_actions=command.video is not None,
            obs_dtype=obs_dtype_of(command.obs_dtype),
        ) as evaluator,
        progress("eval", command.episodes, quiet=command.quiet or command.json) as show,
    ):

        def go_on(episodes: int, frames: int) -> bool:
            show(
                episodes,
                f"{episodes:,}/{command.episodes:,} episodes  {frames:,} frames",
            )
            return stop.received is None

        return evaluator.evaluate(progress=go_on)


def _videos(command: Eval) -> list[str | int]:
    words = [] if command.video is None else command.video.split(",")
    for word in words:
        if word not in KINDS and not (
            word.isdecimal() and int(word) < command.episodes
        ):
            raise BadOption(
                f"--video {command.video}: {word!r} is none of {', '.join(KINDS)}, and no number"
                f" below {command.episodes}, the number of episodes."
            )
    return [word if word in KINDS else int(word) for word in words]


def table(evaluation: Evaluation, policy: str, files: list[Path]) -> str:
    """The text that is printed at the end."""
    plus_minus, _ = symbols()
    done, low_high = evaluation, evaluation.confidence_interval()
    lines = [f"policy    {policy}"]
    if done.records:
        returns = done.returns
        lines += [
            (
                f"return    {done.mean:,.2f} {plus_minus} {done.std:,.2f}   95% interval of the"
                f" mean (Student's t): {low_high[0]:,.2f} to {low_high[1]:,.2f}"
            ),
            (
                f"          median {done.median:,.2f}   from {returns.min():,.2f} to"
                f" {returns.max():,.2f}"
            ),
            (
                f"episodes  {len(done.records):,}   length {done.length_mean:,.1f}   terminated"
                f" {sum(record.terminated for record in done.records):,}   seeds from {done.seed}"
            ),
        ]
    else:
        lines.append("episodes  none ended")
    if not done.complete:
        going = ", ".join(
            f"env {u.env_id}: {u.return_so_far:,.1f} in {u.steps:,}"
            for u in done.unfinished[:8]
        )
        more = (
            f", and {len(done.unfinished) - 8} more" if len(done.unfinished) > 8 else ""
        )
        lines.append(
            f"INCOMPLETE: stopped by {done.stopped_by}; still running: {going or 'none'}{more}."
            " Long episodes are missing, so the mean is biased."
        )
    if done.biased:
        lines.append(
            f"BIASED: rule {done.rule} favours short episodes, so the mean is biased."
        )
    left_out = "".join(
        f"  {reason} {steps:,}" for reason, steps in done.discarded.items()
    )
    lines.append(f"frames    {done.frames:,} in {done.seconds:,.1f} s{left_out}")
    return "\n".join([*lines, *(f"wrote     {file}" for file in files)])
