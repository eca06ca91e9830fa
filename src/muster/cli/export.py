"""``muster export``: writes a recording in the format of another system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class ExportCommand:
    """Write the complete episodes of a recording as a Minari dataset, a LeRobot dataset or a Parquet file."""

    run: Annotated[Path, tyro.conf.Positional]
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
    from muster.errors import BadOption
    from muster.recording import Recording, load

    recording = load(command.run)
    if not isinstance(recording, Recording):
        raise BadOption(f"{command.run} is a Minari dataset already; give the directory of a recording of Muster.")
    if command.to == "minari":
        done = recording.to_minari(command.out, env=command.env)
    elif command.to == "lerobot":
        done = recording.to_lerobot(command.out, fps=command.fps, task=command.task)
    else:
        done = recording.to_parquet(command.out)
    print(done)
    return 0
