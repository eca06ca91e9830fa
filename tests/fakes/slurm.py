"""A SLURM of one machine for tests: munged, slurmctld and slurmd of Debian's packages, as children,
on loopback.

::

    with Slurm() as slurm:
        os.environ["SLURM_CONF"] = slurm.conf  # sbatch, squeue, scancel find it by this

Needs root (slurmd starts jobs as other users) and ``apt-get install slurm-wlm munge``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "setpriv")
START_S = 60.0
END_S = 10.0

CONF = """\
ClusterName=muster
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
# No cgroups and no database: they may not be there, and nothing here needs them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
SchedulerParameters=batch_sched_delay=0
# More CPUs than there are, so that several jobs run at once; and a host that is down.
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus}
NodeName=node2 NodeHostname=elsewhere NodeAddr=127.0.0.1 Port={ports[2]} State=DOWN
PartitionName=train Nodes=node1 Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=node1 MaxTime=60 PriorityTier=2 PreemptMode=OFF
PartitionName=wide Nodes=node1,node2 MaxTime=60
"""


def missing() -> str | None:
    """Why no SLURM can be started here; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "slurmd needs root"


class Slurm:
    """Started as it is made; ended by ``close``, with all its jobs."""

    def __init__(self, cpus: int = 8) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="slurm-", dir="/tmp")
        )  # a socket's path must be short
        self.conf = str(self.folder / "slurm.conf")
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            self._start(cpus)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *command: str) -> str:
        """What a client of this SLURM prints."""
        done = subprocess.run(
            command,
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=END_S,
            check=True,
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run(
            "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"
        )

    def wait_for(self, job: str, *states: str, within_s: float = 60.0) -> str:
        """Wait until the job has one of these states, and return it."""
        until = time.monotonic() + within_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, (
                f"job {job} is {state}, not {states}\n{self.log()}"
            )
            time.sleep(0.05)  # noqa: TID251 (SLURM tells nobody)
        return state

    def stop_answering(self) -> None:
        """Until ``go_on``; jobs run on."""
        self._children[1].send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._children[1].send_signal(signal.SIGCONT)

    def log(self) -> str:
        """The end of what the daemons have written, for the message of a failed test."""
        return "\n".join(
            path.read_text(errors="replace")[-2000:]
            for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        """Cancel all jobs, then end the daemons, by their pids. May be called again."""
        if len(self._children) == 3:
            self._cancel_all()
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(END_S)
        self._children.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, cpus: int) -> None:
        host = socket.gethostname().split(".")[0]
        Path(self.conf).write_text(
            CONF.format(host=host, folder=self.folder, ports=_free_ports(3), cpus=cpus)
        )
        self.folder.chmod(0o755)  # munged wants everybody to reach its socket
        for name, mode in (("munge", 0o700), ("state", 0o700), ("spool", 0o755)):
            (self.folder / name).mkdir(mode=mode)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        munge = self.folder / "munge"
        socket_path = self.folder / "munge.socket"
        files = (
            f"--key-file={key}",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={socket_path}", *files
        )
        self._until(socket_path.exists, "munged has no socket")
        self._spawn("slurmctld", "-D")
        self._spawn("slurmd", "-D", "-N", "node1")
        self._until(self._is_idle, "the node does not come up")

    def _is_idle(self) -> bool:
        try:
            return "idle" in self.run(
                "sinfo", "--noheader", "--nodes=node1", "--format=%t"
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False  # slurmctld is not up yet

    def _spawn(self, name: str, *arguments: str) -> None:
        """As a child that ends when this process ends, however that happens."""
        command = ("setpriv", "--pdeathsig=TERM", name, *arguments)
        with (self.folder / f"{name}.log").open("wb") as log:
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
            }
            self._children.append(
                subprocess.Popen(
                    command, env=self._env(), start_new_session=True, **streams
                )
            )

    def _until(self, ready: Any, what: str) -> None:
        until = time.monotonic() + START_S
        while not ready():
            ended = [child.args for child in self._children if child.poll() is not None]
            if ended or time.monotonic() > until:
                raise AssertionError(f"{what} (ended: {ended})\n{self.log()}")
            time.sleep(0.05)  # noqa: TID251 (the daemons tell nobody)

    def _cancel_all(self) -> None:
        try:
            self.run("scancel", "--user=root")
            self._until(lambda: not self.run("squeue", "--noheader"), "jobs do not end")
        except (AssertionError, subprocess.SubprocessError):
            pass  # the daemons are ended next, and with the stop of slurmd nothing new starts

    def _env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": self.conf}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
