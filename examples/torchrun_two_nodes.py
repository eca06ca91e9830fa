"""One program for torchrun: the first rank trains, the others collect.

On one machine, with two nodes::

    torchrun --nproc-per-node=3 examples/torchrun_two_nodes.py

On two, of which the first is 10.0.0.1 and has R = 0, the other R = 1, with a token that both know (docs/clusters.md)::

    torchrun --nnodes=2 --node-rank=R --nproc-per-node=2 --master-addr=10.0.0.1 --master-port=29500 \
        examples/torchrun_two_nodes.py --bind 10.0.0.1
"""

from __future__ import annotations

import argparse
import os

from torch import nn

from muster import DistributedCollector, policies
from muster.cluster.joining import run_node


def train(bind: str, total_frames: int) -> None:
    """Collect with all other ranks; what learns is left out."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    nodes = int(os.environ["WORLD_SIZE"]) - 1
    with DistributedCollector(
        ["CartPole-v1"] * nodes,
        policies.categorical(net),
        num_envs=8,
        frames_per_batch=512,
        total_frames=total_frames * nodes,
        sync=True,
        seed=0,
        launcher="torchrun",
        bind=bind,
    ) as collector:
        for batch in collector:
            print(f"{tuple(batch.shape)}  mean reward {batch['next', 'reward'].mean():.2f}")
            collector.update_policy_weights_()
        for worker in collector.stats().workers:
            print(f"worker {worker.index} on node {worker.node}: {worker.frames:,} frames")


def main() -> None:
    """What every rank runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bind", default="127.0.0.1", help="address of the first machine, as the others see it")
    parser.add_argument("--total-frames", type=int, default=10_240, help="of each node")
    arguments = parser.parse_args()
    if int(os.environ["RANK"]) == 0:
        train(arguments.bind, arguments.total_frames)
    else:
        run_node()


if __name__ == "__main__":
    main()
