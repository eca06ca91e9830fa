"""Nodes as SLURM jobs (``launcher="submitit"``), or as processes of this machine where there is no
SLURM.

Only this user can read the jobs' folder. Jobs get the path of a file with the token, not the token:
the files that submitit pickles, the output of ``scontrol`` and the environment of a job contain no
secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.cluster.launchers import Launcher, Process
from muster.cluster.link import AGENT, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.token import write_token
from muster.errors import BadOption
from muster.restore.pickling import dumps, loads
from muster.utils.addresses import is_loopback
from muster.workers.channel import Channel
from muster.workers.launch import fork_server_here

FOLDER = "muster-jobs"  # in the current directory
DEFAULT_SLURM_CONF: dict[str, Any] = {"timeout_min": 60}
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
GONE = "unknown to SLURM by now"
COMMAND_S = 60.0  # for squeue, scancel, sinfo
# between two calls of squeue for all jobs of a launcher
POLL_S = 2.0
SLOWEST_POLL_S = 30.0
END_S = 5.0
TAIL_BYTES = 4096
TAIL_LINES = 15


class SubmititLauncher(Launcher):
    """One job per node and epoch, with one task.

    Args:
        slurm_kwargs: of ``submitit.AutoExecutor.update_parameters``, over ``DEFAULT_SLURM_CONF``:
            "timeout_min", "slurm_partition", "slurm_cpus_per_task" (SLURM's default is 1: ask for
            as many as the node has workers), "slurm_gpus_per_node", "slurm_mem", ... SLURM does not
            requeue the jobs: a lost node gets a new job.
        folder: for the jobs' files and logs, on a file system that all hosts share. Each run has a
            folder of its own in it. None: "muster-jobs" in the current directory.
        cluster: "slurm", "local" (processes of this machine), or None: SLURM where ``srun`` is
            installed.
        target: the function that a node runs, ``"module:function"``.

    Raises:
        BadOption: submitit or SLURM is missing, or a parameter is unknown.
    """

    name = "submitit"
    advice = "`squeue --me` shows whether its job still waits; slurm_kwargs says what it asks for."

    def __init__(
        self,
        slurm_kwargs: dict[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        cluster: str | None = None,
        *,
        target: str = AGENT,
    ) -> None:
        self._target = target
        self._jobs = Jobs(slurm_kwargs, private_folder(folder), cluster)
        self.cluster = self._jobs.cluster
        self._hosts: list[str] | None = None

    @property
    def folder(self) -> Path:
        """The folder of this launcher's jobs, with their files and logs."""
        return self._jobs.folder

    def check(self, host: str) -> None:
        """Refuse an address that the jobs' hosts cannot reach.

        Raises:
            BadOption: the address is loopback, and SLURM may start jobs on other hosts.
        """
        if self._hosts is None:
            self._hosts = self._jobs.hosts()
        check_host(host, self.name, self._hosts)

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> Job | LocalJob:
        """Submit the job of a node.

        Raises:
            BadOption: see ``check``.
            LinkLost: SLURM refuses the job; with its message.
        """
        self.check(rendezvous.host)
        token = self.folder / f"token-{secrets.token_hex(8)}"
        write_token(token, rendezvous.token)
        try:
            arguments = (rendezvous.address, node, str(token), self._target)
            return self._jobs.submit(
                f"muster-node-{node}", node_job, *arguments, secret=token
            )
        except BaseException:
            token.unlink(missing_ok=True)
            raise


class Jobs:
    """Submits jobs with the same parameters, with files in a folder of ``private_folder``.

    Threads may share it.
    """

    def __init__(
        self, parameters: dict[str, Any] | None, folder: Path, cluster: str | None
    ) -> None:
        self.folder = folder
        self.parameters = _complete(parameters)
        self._executor = _executor(self.parameters, folder, cluster)
        self.cluster: str = self._executor.cluster
        self._lock = threading.Lock()
        self._queue = Queue()

    def submit(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        secret: Path | None = None,
        more: dict[str, Any] | None = None,
    ) -> Job | LocalJob:
        """Submit a job.

        Args:
            secret: a file to remove when the job has been ended.
            more: parameters of this job only.

        Raises:
            LinkLost: SLURM refuses the job; with its message.
        """
        if self.cluster == "local":
            return LocalJob(self.folder, name, (function, args), secret)
        with self._lock:  # submitit's executors are not made for several threads
            self._executor.update_parameters(
                **{
                    "slurm_dependency": None,
                    **self.parameters,
                    **(more or {}),
                    "name": name,
                }
            )
            try:
                job = self._executor.submit(function, *args)
            except (RuntimeError, OSError) as error:
                why = (str(error).strip().splitlines() or ["no reason was given"])[-1]
                raise LinkLost(
                    f"The job {name} could not be submitted: {why}"
                ) from error
        self._queue.add(job.job_id)
        return Job(job, self._queue, secret)

    def hosts(self) -> list[str]:
        """The hosts on which SLURM may start these jobs; empty for local processes, or if SLURM
        does not answer.
        """
        if self.cluster != "slurm":
            return []
        options = {"slurm_partition": "--partition=", "slurm_nodelist": "--nodes="}
        limits = [
            option + self.parameters[name]
            for name, option in options.items()
            if self.parameters.get(name)
        ]
        done = _command("sinfo", "--noheader", "--Node", "--format=%n %P", *limits)
        rows = (
            []
            if done is None or done.returncode
            else [line.split() for line in done.stdout.splitlines()]
        )
        named = bool(self.parameters.get("slurm_partition"))
        # *: the default one
        return sorted(
            {host for host, partition in rows if named or partition.endswith("*")}
        )


class Job:
    """A job of SLURM; implements ``Started``. ``secret`` is a file to remove at its end."""

    def __init__(self, job: Any, queue: Queue, secret: Path | None) -> None:
        self.job_id: str = job.job_id
        self._job = job
        self._queue = queue
        self._secret = secret

    @property
    def state(self) -> str:
        """The last known state, in SLURM's words."""
        return self._queue.state(self.job_id)

    def __str__(self) -> str:
        return f"SLURM job {self.job_id}"

    def ended(self) -> str | None:
        state = self.state
        return (
            f"its {self} has ended: {state}; {_tail(self._job.paths.stderr)}"
            if _is_final(state)
            else None
        )

    def end(self) -> None:
        self._queue.cancel(self.job_id)
        if self._secret is not None:
            self._secret.unlink(missing_ok=True)

    def has_result(self) -> bool:
        """Whether its function has returned or raised.

        True before SLURM reports that the job has ended.
        """
        return bool(self._job.paths.result_pickle.exists())

    def result(self) -> Any:
        """The return value of the function of a job that has ended.

        Raises:
            RuntimeError: with the traceback of the job.
        """
        if not self.has_result():
            raise RuntimeError(
                self.ended()
            )  # it was killed; submitit would wait for a result
        return self._job.result()


class LocalJob(Process):
    """A job as a process of this machine, where there is no SLURM; as ``Job`` otherwise."""

    def __init__(
        self,
        folder: Path,
        name: str,
        call: tuple[Callable[..., Any], Any],
        secret: Path | None,
    ) -> None:
        self._secret = secret
        self._outcome = b""
        log = folder / f"{name}-{secrets.token_hex(4)}_log"
        self._errors = log.with_suffix(".err")
        super().__init__(
            "muster.cluster.submitit:local_job", name, (dumps(call, name), log)
        )
        self.job_id = str(self._child.pid)

    def ended(self) -> str | None:
        why = super().ended()
        return None if why is None else f"{why}; {_tail(self._errors)}"

    def end(self) -> None:
        super().end()
        if self._secret is not None:
            self._secret.unlink(missing_ok=True)

    def has_result(self) -> bool:
        if not self._outcome and self._channel.poll():
            with contextlib.suppress(EOFError):
                self._outcome = self._channel.receive()[0]
        return bool(self._outcome)

    def result(self) -> Any:
        if not self.has_result():
            raise RuntimeError(self.ended())
        value, why = loads(self._outcome, "result of a job")
        self.end()
        if why:
            raise RuntimeError(why)
        return value


def local_job(channel: Channel) -> None:
    """The process of a ``LocalJob``."""
    fork_server_here()  # while there is one thread
    (call, log), _ = channel.receive()
    for number, ending in ((1, ".out"), (2, ".err")):
        with log.with_suffix(ending).open("ab") as file:
            os.dup2(file.fileno(), number)
    function, args = loads(call, "job")
    outcome = None, ""
    try:
        outcome = function(*args), ""
    except BaseException:
        outcome = None, traceback.format_exc()
        raise
    finally:
        channel.send(dumps(outcome, "result of a job"))


class Queue:
    """The states of jobs: one ``squeue`` for all of them, less often the longer ago the last job
    was submitted.

    Threads call SLURM, because a controller that is busy or unreachable takes minutes to answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}
        self._added = self._asked = time.monotonic()
        self._asking = self._cancelling = threading.Thread()

    def add(self, job: str) -> None:
        with self._lock:
            self._states[job] = "PENDING"
            self._added = time.monotonic()

    def state(self, job: str) -> str:
        """The last known state: "RUNNING", "FAILED (NonZeroExitCode)", ..., or ``GONE``."""
        with self._lock:
            now = time.monotonic()
            pause = min(SLOWEST_POLL_S, POLL_S + 0.1 * (now - self._added))
            is_due = not _is_final(self._states[job]) and now >= self._asked + pause
            if is_due and not self._asking.is_alive():
                jobs = [
                    job for job, state in self._states.items() if not _is_final(state)
                ]
                self._asking = threading.Thread(
                    target=self._ask, args=(jobs,), name="muster-squeue", daemon=True
                )
                self._asking.start()
            return self._states[job]

    def cancel(self, job: str) -> None:
        """Cancel a job. Waits for SLURM's answer, unless SLURM has not answered the call before."""
        with self._lock:
            is_silent = self._cancelling.is_alive()
            command = ("scancel", "--quiet", job)
            self._cancelling = threading.Thread(
                target=_command, args=command, name="muster-scancel", daemon=True
            )
            self._cancelling.start()
            self._cancelling.join(0.0 if is_silent else END_S)

    def _ask(self, jobs: list[str]) -> None:
        """Call ``squeue``; ``sacct`` needs a database that small clusters lack."""
        done = _command(
            "squeue",
            "--noheader",
            "--states=all",
            "--format=%i|%T|%r",
            f"--jobs={','.join(jobs)}",
        )
        with self._lock:
            self._asked = time.monotonic()
            if done is None or (
                done.returncode and "Invalid job id" not in done.stderr
            ):
                return  # SLURM's controller does not answer: keep the known states
            rows = [line.strip().split("|", 2) for line in done.stdout.splitlines()]
            states = {
                job: state if reason == "None" else f"{state} ({reason})"
                for job, state, reason in rows
            }
            self._states.update({job: states.get(job, GONE) for job in jobs})


def node_job(address: str, node: int, token: str, target: str) -> bool:
    """The function of a node's job; see ``run_node``.

    Args:
        token: path of the file with the token.
    """
    die_when_told()
    from muster.cluster.joining import run_node

    return run_node(address, node, token, target=target)


def die_when_told() -> None:
    """In a node's job: end at SIGTERM, which submitit ignores; otherwise the job would run until
    SLURM's SIGKILL.

    The signal that submitit requests before the time limit is of no use to a node. It is ignored,
    so that it does not end the node's workers, which get it too.
    """
    from submitit import JobEnvironment

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(getattr(signal, "SIG" + JobEnvironment.USR_SIG), signal.SIG_IGN)


def private_folder(parent: str | os.PathLike[str] | None) -> Path:
    """A new folder with mode 0700 in ``parent``, which is created if it does not exist."""
    try:
        where = Path(FOLDER if parent is None else parent).expanduser().absolute()
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = where.stat()
        if found.st_uid != os.getuid() or (
            found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        ):
            raise BadOption(
                f"folder={str(where)!r}: others can write there, and so put other files in the"
                f" place of those that jobs run: `chmod go-w {where}`, or give a folder of your"
                " own."
            )
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=where))
    except OSError as error:
        raise BadOption(
            f"folder={str(parent)!r}: the files of jobs cannot be written there: {error}."
        ) from error


def _complete(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters with defaults.

    Raises BadOption for parameters with which a job has several tasks.
    """
    complete = {**DEFAULT_SLURM_CONF, **(parameters or {})}
    for name in ("nodes", "tasks_per_node", "slurm_nodes", "slurm_ntasks_per_node"):
        if complete.get(name, 1) != 1:
            raise BadOption(
                f"slurm_kwargs: {name}={complete[name]}, but every node is a job with one task;"
                " leave it out."
            )
    more = complete.get("slurm_additional_parameters") or {}
    if "requeue" not in more:
        complete["slurm_additional_parameters"] = {"no_requeue": True, **more}
    return complete


def _executor(parameters: dict[str, Any], folder: Path, cluster: str | None) -> Any:
    if cluster not in (None, "slurm", "local"):
        raise BadOption(
            f"cluster={cluster!r} is unknown; there are 'slurm' and 'local'."
        )
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise BadOption(
            "launcher='submitit' needs submitit: `pip install muster-rl[slurm]`."
        ) from error
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster)
        executor.update_parameters(**parameters)
    except (RuntimeError, NameError, ValueError, TypeError, AssertionError) as error:
        raise BadOption(
            f"submitit refuses slurm_kwargs={parameters} with cluster={cluster!r}: {error}"
        ) from error
    if cluster is None and executor.cluster == "local":
        warnings.warn(
            "There is no SLURM here (no `srun`), so that nodes are processes of this machine; "
            "cluster='local' says that this is meant.",
            stacklevel=4,
        )
    return executor


def check_host(host: str, launcher: str, hosts: list[str]) -> None:
    """See ``SubmititLauncher.check``; ``hosts``: where jobs may run."""
    here = socket.gethostname()
    others = sorted(set(hosts) - {here, here.split(".")[0]})
    if others and is_loopback(host):
        some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise BadOption(
            f"launcher={launcher!r}: SLURM starts jobs on other hosts too ({some}), which cannot"
            f" reach {host}: pass bind=<address of this host>, and a token in a file with mode 0600"
            " (token=, or MUSTER_TOKEN_FILE)."
        )


def _command(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command; None if it failed to start or did not end in time."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
    return None


def _is_final(state: str) -> bool:
    return state == GONE or state.split(" ")[0] in ENDED


def _tail(path: Path) -> str:
    """The end of a job's standard error, for the user."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if not lines:
        return f"it wrote nothing to its standard error ({path})"
    return "\n".join(
        [
            "its standard error ends with",
            *(f"  | {line}" for line in lines[-TAIL_LINES:]),
            f"({path})",
        ]
    )
