"""Recordings: batches on disk. A crash loses at most the last chunk; reading copies nothing.

::

    with Recorder("runs/a", meta={"env": "CartPole-v1", "seed": 0}) as recorder:
        for batch in collector:
            recorder.write(batch)

    recording = load("runs/a")
    for batch in recording: ...                    # memory-mapped, equal to the collector's
    longest = max(range(len(recording.episodes)), key=lambda i: recording.episodes[i].length)
    recording.episode(longest)                     # TensorDict [length]
"""

from __future__ import annotations

from muster.recording.episodes import Episode, Piece
from muster.recording.reader import Recording, load
from muster.recording.writer import Recorder

__all__ = ["Recorder", "Recording", "load", "Episode", "Piece"]
