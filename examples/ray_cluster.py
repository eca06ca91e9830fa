"""Nodes as actors of a Ray cluster, of which some may die: ``python examples/ray_cluster.py --address auto``.

Without ``--address`` Ray is started here, on loopback. docs/clusters.md has the steps for several machines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import nn

from muster import CollectorStats, RayCollector, policies


def main(argv: Sequence[str] | None = None) -> CollectorStats:
    """Collect, print who has contributed what, and return it; what learns is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="auto: the cluster of this machine; local: start one")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of each node")
    parser.add_argument("--total-frames", type=int, default=102_400)
    arguments = parser.parse_args(argv)

    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    with RayCollector(
        ["CartPole-v1"],
        policies.categorical(net),
        num_collectors=arguments.nodes,
        num_envs=8,
        frames_per_batch=1024,
        total_frames=arguments.total_frames,
        seed=0,
        collector_class="sync" if arguments.workers > 1 else "single",
        num_workers_per_collector=arguments.workers,
        ray_init_config={"address": arguments.address},
        remote_configs={"num_cpus": arguments.workers},
        max_weight_update_interval=4,
        on_failure="restart",
    ) as collector:
        for batch in collector:  # of one node, whichever is ready
            net[0].weight.data *= 1 + 1e-6 * batch["next", "reward"].mean()  # train
        stats = collector.stats()
    for worker in stats.workers:
        print(f"worker {worker.index} on node {worker.node}: {worker.frames:,} frames, {worker.restarts} restarts")
    return stats


if __name__ == "__main__":
    main()
