"""Nodes as SLURM jobs, which come back when SLURM ends them.

On a host that the jobs can reach, with a token in the environment (docs/clusters.md)::

    python examples/slurm_submitit.py --partition cpu --bind 10.0.0.1

With ``--local``, jobs are processes of this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from muster import CollectorStats, DistributedCollector, policies
from muster.cluster.submitit import SubmititLauncher


def main(argv: Sequence[str] | None = None) -> CollectorStats:
    """Collect, print who has contributed what, and return it; what learns is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", help="of the jobs")
    parser.add_argument("--local", action="store_true", help="processes of this machine instead of jobs")
    parser.add_argument("--bind", default="127.0.0.1", help="address of this host, as the jobs see it")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of each node")
    parser.add_argument("--total-frames", type=int, default=102_400)
    arguments = parser.parse_args(argv)

    slurm: dict[str, Any] = {"timeout_min": 60, "slurm_cpus_per_task": arguments.workers}
    if arguments.partition is not None:
        slurm["slurm_partition"] = arguments.partition
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    with DistributedCollector(
        ["CartPole-v1"] * arguments.nodes,
        policies.categorical(net),
        num_envs=8,
        frames_per_batch=1024,
        total_frames=arguments.total_frames,
        seed=0,
        collector_class="sync" if arguments.workers > 1 else "single",
        num_workers_per_collector=arguments.workers,
        launcher=SubmititLauncher(slurm, cluster="local") if arguments.local else "submitit",
        slurm_kwargs=None if arguments.local else slurm,
        bind=arguments.bind,
        update_after_each_batch=True,
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
