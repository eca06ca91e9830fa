"""What Muster promises, as ratios between two systems on one workload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """``faster`` must reach ``at_least`` times the frames per second of ``slower``."""

    workload: str
    faster: str
    slower: str
    at_least: float


def _series(faster: str, slower: str, **at_least: float) -> list[Target]:
    return [
        Target(name.replace("_", "-"), faster, slower, value)
        for name, value in at_least.items()
    ]


_LIMITS = {
    "cartpole_1": 0.85,
    "cartpole_8": 0.90,
    "cartpole_64": 0.90,
    "pendulum_8": 0.90,
    "frames_8": 0.75,
    "busy_1": 0.95,
    "busy_8": 0.95,
}

TARGETS = (
    *_series(
        "muster-random",
        "bare",
        cartpole_1=0.80,
        cartpole_8=0.88,
        cartpole_64=0.92,
        frames_8=0.70,
    ),
    *_series("muster-compact", "bare", frames_8=0.80),
    *_series("muster-heads", "bare", pendulum_8=0.70, frames_8=0.33),
    *_series("muster-plain", "limit-plain", **_LIMITS),
    *_series("muster-heads", "limit-heads", **_LIMITS),
    *_series("muster-heads", "muster-plain", cartpole_1=2.0, cartpole_8=1.6),
    *_series(
        "muster-plain", "torchrl", cartpole_1=5.0, cartpole_8=10.0, cartpole_64=15.0
    ),
    *_series(
        "muster-heads", "torchrl", cartpole_1=12.0, cartpole_8=18.0, cartpole_64=17.0
    ),
    *_series(
        "muster-plain", "tianshou", cartpole_1=4.0, cartpole_8=4.0, cartpole_64=4.0
    ),
    *_series("muster-plain", "sb3", cartpole_8=2.0),
    *_series("muster-plain", "rllib", cartpole_1=5.0, cartpole_8=5.0, cartpole_64=5.0),
    *_series(
        "muster-plain",
        "sync-vector",
        cartpole_1=1.2,
        cartpole_8=1.2,
        cartpole_64=1.2,
        pendulum_8=1.2,
    ),
    *_series(
        "muster-plain", "pufferlib", cartpole_1=1.1, cartpole_8=1.1, cartpole_64=1.1
    ),
)
