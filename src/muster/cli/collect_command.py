"""Arguments of ``muster collect``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from muster.cli.options import NUM_ENVS, AllowImport, Count, Env, ObsDtype, Policy

Backend = Literal["ray", "torchrun", "manual", "mp"]
JOIN_S = 600.0


@dataclass(frozen=True)
class Collect:
    """Collect experience from a Gymnasium environment, and record it with --out."""

    env: Env
    frames: Count
    """Exact number of environment steps over all environments: 51200, 51_200, 100k, 1e6."""

    round_up: bool = False
    """Collect up to a whole number of batches more, if --frames is not a multiple of the batch size."""

    num_envs: Annotated[int, NUM_ENVS] = 8
    """Number of environments that are stepped together; with --workers, in each worker."""

    workers: Annotated[int | None, arg(metavar="N")] = None
    """Number of worker processes (with --backend, on each node), with B environments each. Default: no workers."""

    backend: Backend | None = None
    """Collect on other machines, or in local processes (mp). `muster cluster` lists backends and nodes."""

    nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend: number of nodes. Default under torchrun: all ranks but the first."""

    min_nodes: Annotated[int | None, arg(metavar="N")] = None
    """With --backend and --async: start when this number of nodes has joined; the others may join later."""

    address: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """With --backend ray: address of the cluster; auto: the cluster of this machine; local: start one."""

    bind: Annotated[str | None, arg(metavar="HOST[:PORT]")] = None
    """With other backends: address of this machine at which nodes join. Default: loopback."""

    join_timeout: Annotated[float, arg(metavar="S")] = JOIN_S
    """With --backend: seconds to wait for nodes to join, and to join again."""

    asynchronous: Annotated[bool, arg(name="async")] = False
    """With workers: yield the batch of each worker when it is ready, without waiting for the slowest."""

    threads: bool = False
    """With --workers: use threads instead of processes, for environments that mostly wait."""

    inference: Literal["worker", "server"] = "worker"
    """With workers: run the policy in each worker, or once for all workers, in this process or on the node."""

    alternating: bool = False
    """With --inference server: half of the workers step during the policy call for the other half."""

    on_failure: Literal["raise", "restart", "drop"] = "raise"
    """With workers: the reaction if a worker dies or hangs, or its environment raises."""

    policy: Policy = "random"
    obs_dtype: ObsDtype = "policy"

    seed: Annotated[int, arg(metavar="S")] = 0
    """Same seed, same data. Environment i gets seed + i."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Directory for the recording; must not contain a recording."""

    frames_per_batch: Annotated[Count | None, arg(metavar="N")] = None
    """Frames per batch. Default: a divisor of --frames near 2048."""

    watch: bool = False
    """Show the collection on a local web page, whose address is printed. `muster watch DIR` shows it afterwards."""

    watch_address: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """With --watch: address of the page. Beyond loopback, viewers need the token in the printed address."""

    allow_import: AllowImport = False

    quiet: bool = False
    """Print errors only: also no warnings, and not the address of --watch."""
