"""Whole collections over each engine between two machines with a firewall, in a network that is
slow and loses packets.

The machines are network namespaces; see ``tests/fakes/netns.py``. The firewall lets through only
the connections that docs/clusters.md names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.cluster.token import write_token
from tests.fakes.engine_programs import BATCHES, NODES, ROWS, run
from tests.fakes.netns import Host, missing, network
from tests.fakes.ray_cluster import environment, needs_ray
from tests.waits import wait_until

WHY_NOT = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

ROOT = Path(__file__).parents[2]
LONGEST_S = 300.0  # of a program, on a busy machine
SLOW = {"delay_s": 0.01, "loss": 0.005}
JOIN_PORT = 29600
FREE_PORTS = 20000, 20199
RAY_PORT = 6379
RAY_PORTS = {
    "node-manager-port": 10011,
    "object-manager-port": 10012,
    "runtime-env-agent-port": 10013,
    "dashboard-agent-grpc-port": 10014,
    "dashboard-agent-listen-port": 10015,
    "metrics-export-port": 10016,
    "min-worker-port": 10100,
    "max-worker-port": 10199,
}
RAY_OPTIONS = [f"--{name}={port}" for name, port in RAY_PORTS.items()]
RAY = f"""#!/usr/bin/env bash
exec {sys.executable} -m tests.fakes.ray_command "$@" {" ".join(RAY_OPTIONS)}
"""
STARTED = "Ray runtime started"  # what Ray's command says
RAY_OPENED = f"{RAY_PORT},10011-10016,10100-10199"


class Machines:
    """The machine of the main process, one of nodes, and the programs on them.

    Attributes:
        folder: of everything that they write; its path is short, since sockets are in it.
    """

    def __init__(self, hosts: tuple[Host, ...], folder: Path) -> None:
        self.main, self.other = hosts
        self.folder = folder
        write_token(folder / "muster-token", secrets.token_hex(32).encode())
        (folder / "token").write_text(secrets.token_hex(32))
        self.env = {**os.environ, **environment(folder)}
        self.env |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TMPDIR": str(folder),
        }
        self.env |= {"MUSTER_TOKEN_FILE": str(folder / "muster-token")}

    def starts(self, host: Host, name: str, *command: str) -> subprocess.Popen[str]:
        """Start a program of Python, which writes to a file of this name."""
        with open(self.folder / name, "w") as file:
            return host.start(
                [sys.executable, "-u", *command],
                env=self.env,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def starts_ray(self, host: Host, name: str, *command: str) -> None:
        """The same with Ray's command, until Ray runs."""
        process = self.starts(host, name, *command)
        wait_until(
            lambda: STARTED in self.said(name) or process.poll() is not None, LONGEST_S
        )
        assert process.poll() is None, self.said(name)

    def starts_raylets(self, main_cpus: int = 1) -> str:
        """Start a raylet on each machine, the head on that of the main process; the head's address.

        Args:
            main_cpus: of the main process' machine, for actors.
        """
        usual = [
            "-m",
            "tests.fakes.ray_command",
            "start",
            "--object-store-memory=200000000",
            "--block",
            *RAY_OPTIONS,
        ]
        head = [
            f"--num-cpus={main_cpus}",
            "--head",
            f"--port={RAY_PORT}",
            "--include-dashboard=false",
            f"--node-ip-address={self.main.address}",
        ]
        address = f"{self.main.address}:{RAY_PORT}"
        other = [
            "--num-cpus=1",
            f"--address={address}",
            f"--node-ip-address={self.other.address}",
        ]
        self.starts_ray(self.main, "head", *usual, *head)
        self.starts_ray(self.other, "raylet", *usual, *other)
        return address

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def collects(self, engine: str, address: str) -> dict[str, Any]:
        """Collect on the machine of the main process, and return what it reports."""
        process = self.starts(
            self.main, "collects", "-m", "tests.fakes.engine_programs", engine, address
        )
        status = process.wait(LONGEST_S)
        said = self.said("collects")
        assert status == 0, said
        report: dict[str, Any] = json.loads(said.splitlines()[-1])
        return report


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    folder = Path(tempfile.mkdtemp(prefix="muster-", dir="/tmp"))
    try:
        with network(2) as hosts:
            yield Machines(hosts, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


def check(report: dict[str, Any], engine: str) -> None:
    """The rows are those of workers of one machine, bit by bit."""
    assert report["engine"] == engine
    assert report["frames"] == NODES * ROWS * BATCHES
    assert report["digest"] == run("workers", "")["digest"]


@needs_ray
def test_ray_needs_no_port_but_its_own(machines):
    machines.other.cable(**SLOW, opened=RAY_OPENED)
    address = machines.starts_raylets()
    check(
        machines.collects("ray", address), "ray"
    )  # each machine has the CPU for one node


SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do
    if [[ $1 == -w ]]; then machine=$2; shift; fi
    shift
done
exec nsenter --net="/run/netns/$(< "{folder}/$machine")" "$@"
"""


@needs_ray
def test_the_script_for_slurm_runs_ray_on_all_machines(machines):
    """With commands in place of SLURM's, which run what is asked for on these machines."""
    main, other = machines.main, machines.other
    commands = machines.folder / "bin"
    commands.mkdir()
    for host in (main, other):
        host.give_route()  # without, Ray takes loopback for the address of the machine
        (machines.folder / host.address).write_text(host.name)
    for name, does in (
        ("srun", SRUN.replace("{folder}", str(machines.folder))),
        (
            "scontrol",
            f"#!/usr/bin/env bash\necho {main.address}; echo {other.address}\n",
        ),
        ("ray", RAY),
    ):
        (commands / name).write_text(does)
        (commands / name).chmod(0o700)
    machines.env |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "all",
        "SLURM_JOB_NUM_NODES": "2",
    }
    machines.env |= {
        "SLURM_CPUS_PER_TASK": "2",
        "PROGRAM": str(ROOT / "examples/ray_cluster.py"),
    }
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    machines.env["PATH"] = os.pathsep.join(path)
    command = ["bash", str(ROOT / "examples/ray_slurm.sh"), "--total-frames", "20480"]
    with open(machines.folder / "job", "w") as file:
        job = main.start(
            command,
            env=machines.env,
            cwd=machines.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    status = job.wait(LONGEST_S)
    said = machines.said("job")
    assert status == 0, said
    assert re.search(r"worker 0 on node 0 .*\n.*worker 1 on node 1 ", said), said
    assert not list(machines.folder.glob("ray-token-*"))


@pytest.mark.parametrize("engine", ["direct", "torch_distributed", "rpc"])
def test_other_engines_need_the_port_where_nodes_join_and_some_need_free_ones(
    machines, engine
):
    main, other = machines.main, machines.other
    opened = str(JOIN_PORT)
    if engine != "direct":
        opened += f",{FREE_PORTS[0]}-{FREE_PORTS[1]}"
        main.give_out_ports(*FREE_PORTS)
        other.give_out_ports(*FREE_PORTS)
    other.cable(**SLOW, opened=opened)
    address = f"{main.address}:{JOIN_PORT}"
    for node in range(NODES):
        machines.starts(other, f"node-{node}", "-m", "muster", "node", address)
    check(machines.collects(engine, address), engine)
