"""``python -m benchmarks.ray_views``: batches of 58 MB from one actor of Ray, copied out of its store
and with ``zero_copy``, each in turns with an actor that returns the same images after the same time,
without Muster.

The bare result is not copied: it is a view of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import ray

import muster
from benchmarks.cluster_peers import SLOW_FRAMES
from benchmarks.engines import HERE, Figures, in_turns, parser, run, started
from benchmarks.nets import PlainPolicy
from benchmarks.ray_store import FRAMES, images

ROLLOUT_S = 0.3  # of the collectors, on two cores
TURN = 3  # batches


class Bare:
    """An actor."""

    def __init__(self) -> None:
        self._batch = images(FRAMES)

    def rollout(self) -> Any:
        time.sleep(ROLLOUT_S)  # noqa: TID251 (a rollout)
        return self._batch


def collector(zero_copy: bool, options: Mapping[str, Any]) -> Any:
    """One node that has all environments."""
    workload = SLOW_FRAMES
    return muster.RayCollector(
        [workload.make],
        PlainPolicy(workload.make()).eval(),
        num_envs=workload.B,
        frames_per_batch=workload.B * workload.T,
        sync=True,
        seed=0,
        zero_copy=zero_copy,
        **options,
    )


def bare_calls() -> Callable[[], Any]:
    """Return what gets the next result of an actor."""
    actor = ray.remote(num_cpus=0)(Bare).remote()

    def call() -> Any:
        return ray.get(actor.rollout.remote())

    return call


def measured(quick: bool, rounds: int) -> Iterator[tuple[str, Figures]]:
    """Yield each way, and its figures."""
    turn = 1 if quick else TURN
    with started("ray") as options:
        bare = bare_calls()
        for name, zero_copy in {"copied": False, "zero_copy": True}.items():
            with ExitStack() as made:
                one = made.enter_context(collector(zero_copy, options[HERE]))
                yield name, in_turns({"bare": bare, name: one.next}, rounds, turn)


def main() -> None:
    arguments = parser("ray_views", __doc__).parse_args()
    run("ray_views", measured, arguments)


if __name__ == "__main__":
    main()
