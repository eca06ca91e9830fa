"""Programs that collect on nodes of other machines: ``python -m tests.fakes.engine_programs ENGINE
ADDRESS``.

ADDRESS is that of Ray's head, or where nodes join. The last line of standard output is a JSON
object; see ``run``. Without an engine ("workers"), the same is collected by workers of this
machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from muster import (
    DistributedCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
    policies,
)
from muster.testing import CountingEnv

NODES = 2
BATCHES = 3
ROWS = 64  # of each node in a batch
WIDTH = 20_000  # numbers of an observation: a rollout is a large block for each engine


class Wide(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observations are ``WIDTH`` numbers."""

    def __init__(self) -> None:
        super().__init__(CountingEnv(7, noise=True))
        self.observation_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)

    def observation(self, observation: Any) -> Any:
        return np.resize(observation, WIDTH)


def collector(engine: str, address: str, policy: Any) -> Any:
    options: dict[str, Any] = {"total_frames": NODES * ROWS * BATCHES, "seed": 5}
    if engine == "workers":
        return MultiSyncCollector(
            [Wide] * NODES, policy, frames_per_batch=NODES * ROWS, **options
        )
    options |= {"frames_per_batch": ROWS, "sync": True}
    if engine == "ray":
        told = {"address": address, "log_to_driver": False}
        return RayCollector(
            [Wide] * NODES,
            policy,
            ray_init_config=told,
            remote_configs={"num_cpus": 1, "memory": 2**28},
            **options,
        )
    bind, _, port = address.partition(":")
    options |= {
        "transport": engine,
        "launcher": "manual",
        "bind": bind,
        "tcp_port": int(port),
    }
    if engine == "rpc":
        return RPCCollector([Wide] * NODES, policy, trust_network=True, **options)
    return DistributedCollector([Wide] * NODES, policy, **options)


def run(engine: str, address: str) -> dict[str, Any]:
    """What was collected, as a digest of all rows, and over which engine."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 2)
    digest = hashlib.sha256()
    with collector(engine, address, policies.categorical(net)) as made:
        for batch in made:
            for key in sorted(
                batch.keys(include_nested=True, leaves_only=True), key=str
            ):
                digest.update(batch[key].contiguous().numpy().tobytes())
            net.weight.data += 0.01
            made.update_policy_weights_()
        stats = made.stats()
    return {
        "digest": digest.hexdigest(),
        "frames": stats.frames,
        "engine": stats.engine,
    }


if __name__ == "__main__":
    from tests.fakes.engine_programs import run  # as nodes import it: by its name

    print(json.dumps(run(*sys.argv[1:])), flush=True)
