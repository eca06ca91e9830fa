"""The main program and its nodes as SLURM jobs that a login node submits
(``launcher="submitit_delayed"``).

::

    login node:  main()  ->  job of the main program, and one job per node
    main job:    DistributedCollector(launcher="submitit_delayed")  ->  writes its address into the jobs' folder
    node jobs:   wait for the address, then join

The folder has mode 0700, and must be on a file system that all hosts share. It also contains a file
with the token.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from muster.cluster.launchers import Launcher
from muster.cluster.link import AGENT, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.submitit import (
    Job,
    Jobs,
    LocalJob,
    check_host,
    die_when_told,
    node_job,
    private_folder,
)
from muster.cluster.token import TOKEN_BYTES, TOKEN_FILE, write_token
from muster.errors import BadOption, MusterError
from muster.utils.whole_files import write_whole

EXCHANGE = "MUSTER_EXCHANGE"  # the folder, in the environment of the main job
FRAMEWORKS = ("distributed", "rpc")
POLL_S = 0.5
# files in the folder
ADDRESS = "address"
HOSTS = "hosts"

_R = TypeVar("_R")
_Decorator = Callable[[Callable[..., _R]], Callable[..., _R]]
_Call = tuple[
    Callable[..., Any], Any, Any
]  # a function, its arguments and keyword arguments


class DelayedLauncher(Launcher):
    """Starts nothing: the nodes' jobs have been submitted before.

    Writes the address into a file for them.

    Args:
        target: the function that a node runs, ``"module:function"``.

    Raises:
        BadOption: this process is not a main job.
    """

    name = "submitit_delayed"
    advice = "`squeue --me` shows whether its job still waits."

    def __init__(self, target: str = AGENT) -> None:
        folder = os.environ.get(EXCHANGE)
        if not folder:
            raise BadOption(
                "launcher='submitit_delayed' works in the main job of a"
                f" @submitit_delayed_launcher(num_jobs=...) only ({EXCHANGE} is not set);"
                " launcher='submitit' submits the nodes' jobs from here."
            )
        self._folder = Path(folder)
        self._target = target
        self._lock = threading.Lock()
        self._published = ""

    def check(self, host: str) -> None:
        """As in ``SubmititLauncher``."""
        hosts = json.loads((self._folder / HOSTS).read_bytes())
        check_host(host, self.name, hosts)

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> None:
        """Write the address of the rendezvous."""
        with self._lock:
            if self._published != rendezvous.address:
                self.check(rendezvous.host)
                record = json.dumps([rendezvous.address, self._target])
                write_whole(self._folder / ADDRESS, [record.encode()], mode=0o600)
                self._published = rendezvous.address

    def close(self) -> None:
        """Remove the address: nodes that have not joined keep waiting."""
        with self._lock:
            if self._published:
                (self._folder / ADDRESS).unlink(missing_ok=True)
                self._published = ""


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | str | None = None,
    submitit_main_conf: dict[str, Any] | None = None,
    submitit_collection_conf: dict[str, Any] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    restarts: int = 3,
) -> _Decorator[_R]:
    """Decorate a main program that makes a collector with ``launcher="submitit_delayed"``.

    Calling it submits a job that runs it and ``num_jobs`` jobs for its nodes, waits for its result,
    and ends the nodes.

    ::

        @submitit_delayed_launcher(num_jobs=4, submitit_main_conf={"timeout_min": 240, "slurm_partition": "cpu"})
        def main():
            with DistributedCollector(
                [make_env] * 4, policy, frames_per_batch=512, total_frames=10_240_000, launcher="submitit_delayed",
                bind=socket.gethostname(),  # if this is how others reach it
            ) as collector:
                for batch in collector:
                    train(batch)

        main()  # on the login node

    Args:
        num_jobs: nodes; as many as the collector has.
        framework: "distributed" or "rpc"; TorchRL's argument, without effect.
        backend: the same.
        tcpport: the same.
        submitit_main_conf: of the main job; see ``slurm_kwargs`` of ``SubmititLauncher``.
        submitit_collection_conf: of the nodes' jobs, which SLURM starts after the main job.
        folder: see ``SubmititLauncher``.
        cluster: see ``SubmititLauncher``.
        restarts: how often the job of a node is submitted again after it has failed.

    Raises:
        BadOption: an option is wrong (at once), or submitit is missing (when the program is
            called).
        MusterError: the main job failed; with its traceback.
    """
    if framework not in FRAMEWORKS:
        raise BadOption(f"framework={framework!r} is unknown; there are {FRAMEWORKS}.")
    if num_jobs < 1 or restarts < 0:
        raise BadOption(
            f"num_jobs={num_jobs} should be at least 1, and restarts={restarts} at least 0."
        )

    def decorate(main: Callable[..., _R]) -> Callable[..., _R]:
        @functools.wraps(main)
        def submit(*args: Any, **kwargs: Any) -> _R:
            where = private_folder(folder)
            mains = Jobs(submitit_main_conf, where, cluster)
            nodes = Jobs(submitit_collection_conf, where, cluster)
            node_jobs = NodeJobs(nodes, where, num_jobs, restarts)
            result: _R = _run(where, mains, nodes, node_jobs, (main, args, kwargs))
            return result

        return submit

    return decorate


class NodeJobs:
    """The jobs of the nodes, which are submitted again when they have failed.

    Args:
        jobs: submits them.
        count: of nodes.
        restarts: how often the job of each node is submitted again.
    """

    def __init__(self, jobs: Jobs, folder: Path, count: int, restarts: int) -> None:
        self._jobs = jobs
        self._folder = folder
        self._left = [restarts] * count
        self._submitted: list[Job | LocalJob] = []

    def submit(self, after: str) -> None:
        """Submit all, to start after this job."""
        more = {"slurm_dependency": f"after:{after}", **self._jobs.parameters}
        for node in range(len(self._left)):
            self._submitted.append(self._submit(node, more))

    def restart_failed(self) -> None:
        """Submit those again that have ended before the main job, while restarts are left."""
        for node, job in enumerate(self._submitted):
            if not self._left[node] or job.ended() is None:
                continue
            if _done(self._folder, node).exists():
                continue
            self._left[node] -= 1
            job.end()  # frees its resources here
            with contextlib.suppress(LinkLost):  # SLURM may take it the next time
                self._submitted[node] = self._submit(node, {})

    def end(self) -> None:
        """End all."""
        for job in self._submitted:
            job.end()

    def _submit(self, node: int, more: dict[str, Any]) -> Job | LocalJob:
        name = f"muster-node-{node}"
        folder = str(self._folder)
        return self._jobs.submit(name, delayed_node_job, folder, node, more=more)


def _run(
    folder: Path, mains: Jobs, nodes: Jobs, node_jobs: NodeJobs, call: _Call
) -> Any:
    """Call a decorated program, on the login node."""
    token = folder / "token"
    job: Job | LocalJob | None = None
    write_token(token, secrets.token_hex(TOKEN_BYTES).encode())
    try:
        hosts = json.dumps(nodes.hosts())
        write_whole(folder / HOSTS, [hosts.encode()], mode=0o600)
        job = mains.submit("muster-main", main_job, str(folder), *call)
        node_jobs.submit(after=job.job_id)
        pause = threading.Event()
        while not job.has_result() and job.ended() is None:
            node_jobs.restart_failed()
            pause.wait(POLL_S)
        return job.result()
    except (RuntimeError, LinkLost) as error:  # LinkLost: it could not be submitted
        raise MusterError(
            f"The main program failed in {job or 'no job'}: {error}"
        ) from error
    finally:
        if job is not None and not job.has_result():
            job.end()
        node_jobs.end()
        token.unlink(missing_ok=True)
        (folder / ADDRESS).unlink(missing_ok=True)


def main_job(folder: str, main: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function of the main job: calls ``main`` with the folder in the environment."""
    os.environ[EXCHANGE] = folder
    os.environ[TOKEN_FILE] = str(Path(folder) / "token")
    return main(*args, **kwargs)


def delayed_node_job(folder: str, node: int) -> None:
    """The function of a node's job.

    It waits for the address until it is ended, at the latest with the main job.
    """
    die_when_told()
    here = Path(folder)
    pause = threading.Event()
    while not (here / ADDRESS).exists():
        pause.wait(POLL_S)
    address, target = json.loads((here / ADDRESS).read_bytes())
    if node_job(address, node, str(here / "token"), target):
        _done(here, node).touch()


def _done(folder: Path, node: int) -> Path:
    return folder / f"node-{node}-done"
