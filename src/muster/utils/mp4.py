"""Videos of pictures, written with ffmpeg."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.errors import FileError
from muster.utils.attributes import optional
from muster.utils.whole_files import open_regular, written_elsewhere


def check_ffmpeg() -> Any:
    """Return ``imageio_ffmpeg.write_frames``. Raises BadOption if it is missing."""
    with optional("a video", "imageio_ffmpeg", "video"):
        from imageio_ffmpeg import write_frames
    return write_frames


def write_mp4(path: Path, frames: Iterator[NDArray[np.uint8]], fps: float) -> None:
    """Write pictures, uint8 ``[height, width, 3]`` of one size, as H.264.

    The format needs even sizes: the last row or column of pictures with an odd height or width is
    repeated.

    Raises:
        FileError: it cannot be written, for example because the disk is full.
    """
    write_frames = check_ffmpeg()
    first = _even(next(frames))
    height, width = first.shape[:2]
    with written_elsewhere(path) as made:
        writer = write_frames(str(made), (width, height), fps=fps, macro_block_size=2)
        with closing(writer) as output:
            output.send(None)
            for frame in itertools.chain([first], frames):
                try:
                    output.send(_even(frame))
                except OSError as error:
                    raise _ended_early(path, made) from error
        if not is_complete(made):  # the exit code of ffmpeg is not available
            raise _ended_early(path, made)


def _ended_early(path: Path, made: Path) -> FileError:
    return FileError(
        f"{path} cannot be written: ffmpeg ended before the video was complete. Free space on the"
        f" disk of {made.parent.parent}, where videos are made, or set TMPDIR to another folder."
    )


def is_complete(path: Path) -> bool:
    """Whether the file consists of complete boxes, and one of them is the index, which ffmpeg
    writes at the end.
    """
    kinds = set()
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            while file.tell() < size:
                box, kind = struct.unpack(">I4s", file.read(8))
                if box == 1:  # its size needs 64 bits
                    (box,) = struct.unpack(">Q", file.read(8))
                    box -= 8
                kinds.add(kind)
                end = file.seek(box - 8, os.SEEK_CUR)
                if box < 8 or end > size:
                    return False
    except (OSError, struct.error):
        return False
    return b"moov" in kinds


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = frame.shape[0] % 2
    columns = frame.shape[1] % 2
    added = ((0, rows), (0, columns), (0, 0))
    return np.ascontiguousarray(np.pad(frame, added, "edge"))
