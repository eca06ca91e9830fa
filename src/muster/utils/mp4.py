"""Videos of pictures, written with ffmpeg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.utils.attributes import optional
from muster.utils.whole_files import written_elsewhere


def check_ffmpeg() -> Any:
    """Return ``imageio_ffmpeg.write_frames``. Raises BadOption if it is missing."""
    with optional("a video", "imageio_ffmpeg", "video"):
        from imageio_ffmpeg import write_frames
    return write_frames


def write_mp4(path: Path, frames: Iterator[NDArray[np.uint8]], fps: float) -> None:
    """Write pictures, uint8 ``[height, width, 3]`` of one size, as H.264.

    The format needs even sizes: the last row or column of pictures with an odd height or width is repeated.
    """
    write_frames, first = check_ffmpeg(), _even(next(frames))
    height, width = first.shape[:2]
    with (
        written_elsewhere(path) as made,
        closing(write_frames(str(made), (width, height), fps=fps, macro_block_size=2)) as output,
    ):
        output.send(None)
        output.send(first)
        for frame in frames:
            output.send(_even(frame))


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows, columns = frame.shape[0] % 2, frame.shape[1] % 2
    return np.ascontiguousarray(np.pad(frame, ((0, rows), (0, columns), (0, 0)), "edge"))
