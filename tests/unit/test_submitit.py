"""Nodes as jobs, with submitit's executor of local processes (``tests/faults/test_slurm.py`` has a
real SLURM).
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from muster.cluster.direct import DirectCarrier
from muster.cluster.link import LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.submitit import SubmititLauncher
from muster.cluster.submitit_delayed import DelayedLauncher, submitit_delayed_launcher
from muster.errors import BadOption, MusterError
from tests.waits import wait_until

ROOT = Path(__file__).parents[2]
ECHO = "tests.fakes.link_nodes:introduced"
JOIN_S = 90.0  # a job imports torch, perhaps on a busy machine


@pytest.fixture(autouse=True)
def _jobs_find_the_tests(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )


@pytest.fixture
def carrier_of(tmp_path):
    """A carrier whose node is a job; closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(target=ECHO, **options):
            launcher = SubmititLauncher(
                folder=tmp_path, target=target, **{"cluster": "local", **options}
            )
            carrier = DirectCarrier(launcher=launcher, rendezvous=Rendezvous(1))
            stack.callback(carrier.close)
            return carrier, launcher

        yield make


def connect(carrier, epoch=0):
    return carrier.connect(0, epoch, JOIN_S, threading.Event())


def files_with(secret, folder):
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and secret in path.read_bytes()
    ]


class TestLocalJobs:
    @pytest.mark.slow
    def test_a_node_joins_and_ends(self, carrier_of):
        carrier, launcher = carrier_of()
        link = connect(carrier)
        node, pid = link.receive().message.split()
        assert node == b"0"
        link.send(b"hello")
        assert link.receive().message == b"hello"
        link.close()
        carrier.close()
        wait_until(
            lambda: not os.path.exists(f"/proc/{int(pid)}")
        )  # its keeper reaps it last
        assert not list(launcher.folder.glob("token-*"))

    def test_the_token_is_in_one_file_that_only_this_user_can_read(self, tmp_path):
        launcher = SubmititLauncher(folder=tmp_path, cluster="local", target=ECHO)
        rendezvous = Rendezvous(1)
        job = launcher.start(0, 0, rendezvous)  # it is not admitted, so it waits
        try:
            files = files_with(rendezvous.token, tmp_path)
            assert [path.name[:6] for path in files] == ["token-"]
            assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
            assert stat.S_IMODE(launcher.folder.stat().st_mode) == 0o700
        finally:
            job.end()
            rendezvous.close()
        assert not files_with(rendezvous.token, tmp_path)

    def test_a_job_that_was_just_started_can_be_ended(self, tmp_path):
        launcher = SubmititLauncher(folder=tmp_path, cluster="local", target=ECHO)
        with contextlib.closing(Rendezvous(1)) as rendezvous:
            job = launcher.start(0, 0, rendezvous)
            assert job.ended() is None
            begin = time.monotonic()
            job.end()
            job.end()
        assert time.monotonic() - begin < 15
        assert f"its process {job.job_id} ended with exit code -9; " in job.ended()
        wait_until(lambda: not os.path.exists(f"/proc/{job.job_id}"))

    @pytest.mark.slow
    def test_a_killed_node_gets_a_new_job(self, carrier_of):
        carrier, launcher = carrier_of()
        link = connect(carrier)
        first = int(link.receive().message.split()[1])
        os.kill(first, signal.SIGKILL)
        with pytest.raises(LinkLost):
            link.receive()
        link.close()
        link = connect(carrier, epoch=1)
        assert int(link.receive().message.split()[1]) != first
        link.close()
        assert len(list(launcher.folder.glob("*_log.err"))) == 2

    @pytest.mark.slow
    def test_a_node_that_fails_at_import_shows_its_standard_error(self, carrier_of):
        carrier, launcher = carrier_of(
            "no_such_module_of_a_node:serve", slurm_kwargs={"slurm_partition": "unused"}
        )
        with pytest.raises(LinkLost) as caught:
            connect(carrier)
        text = str(caught.value)
        assert "ended with exit code 1; " in text
        assert (
            "  | ModuleNotFoundError: No module named 'no_such_module_of_a_node'"
            in text
        )
        assert f"({launcher.folder}/" in text
        assert "_log.err)" in text


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"cluster": "moon"}, "cluster='moon' is unknown"),
            ({"slurm_kwargs": {"slurm_moon": 1}}, "slurm_moon"),
            (
                {"slurm_kwargs": {"nodes": 2}},
                "nodes=2, but every node is a job with one task",
            ),
            ({"slurm_kwargs": {"slurm_ntasks_per_node": 4}}, "slurm_ntasks_per_node=4"),
            ({"slurm_kwargs": {"timeout_min": "long"}}, "timeout_min"),
        ],
    )
    def test_impossible_ones_are_refused(self, tmp_path, options, text):
        with pytest.raises(BadOption, match=text):
            SubmititLauncher(folder=tmp_path, **{"cluster": "local", **options})

    def test_a_folder_that_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BadOption, match="files of jobs cannot be written there"):
            SubmititLauncher(folder=tmp_path / "file", cluster="local")

    def test_the_default_folder_is_in_the_current_directory(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        assert (
            SubmititLauncher(cluster="local").folder.parent == tmp_path / "muster-jobs"
        )

    def test_without_slurm(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BadOption, match="srun"):
            SubmititLauncher(folder=tmp_path, cluster="slurm")
        with pytest.warns(UserWarning, match="nodes are processes of this machine"):
            assert SubmititLauncher(folder=tmp_path).cluster == "local"

    def test_without_submitit(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "submitit", None)
        with pytest.raises(BadOption, match=r"pip install muster-rl\[slurm\]"):
            SubmititLauncher(folder=tmp_path)

    def test_any_address_will_do_for_local_processes(self, tmp_path):
        SubmititLauncher(folder=tmp_path, cluster="local").check("127.0.0.1")


def delayed(tmp_path, **options):
    return submitit_delayed_launcher(1, folder=tmp_path, cluster="local", **options)


def main_program(message):
    """What a main job does: with a node that says who it is, and echoes."""
    carrier = DirectCarrier(launcher=DelayedLauncher(ECHO), rendezvous=Rendezvous(1))
    with contextlib.closing(carrier), contextlib.closing(connect(carrier)) as link:
        number, pid = link.receive().message.split()
        link.send(message)
        answer = link.receive().message
        link.send(b"bye")
    return answer, int(number), int(pid)


def main_that_kills_its_node():
    """The node's job then has failed, and is submitted again."""
    carrier = DirectCarrier(launcher=DelayedLauncher(ECHO), rendezvous=Rendezvous(1))
    pids = []
    with contextlib.closing(carrier):
        for epoch in range(2):
            with contextlib.closing(connect(carrier, epoch)) as link:
                pids.append(int(link.receive().message.split()[1]))
                os.kill(pids[-1], signal.SIGKILL)
                with contextlib.suppress(LinkLost):
                    while True:
                        link.receive()
    return pids


def main_that_fails():
    raise ZeroDivisionError("of the main program")


class TestDelayed:
    @pytest.mark.slow
    def test_the_main_job_finds_its_node(self, tmp_path):
        answer, number, pid = delayed(tmp_path)(main_program)(b"hello")
        assert (answer, number) == (b"hello", 0)
        assert not os.path.exists(f"/proc/{pid}")
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not (folder / "token").exists()
        assert not (folder / "address").exists()

    @pytest.mark.slow
    def test_a_failed_node_gets_another_job(self, tmp_path):
        first, second = delayed(tmp_path)(main_that_kills_its_node)()
        assert first != second

    @pytest.mark.slow
    def test_an_error_of_the_main_program_comes_back_and_the_node_is_ended(
        self, tmp_path
    ):
        with pytest.raises(MusterError, match="ZeroDivisionError: of the main program"):
            delayed(tmp_path)(main_that_fails)()
        assert not list(tmp_path.rglob("token"))

    def test_the_launcher_is_for_main_jobs(self, monkeypatch):
        monkeypatch.delenv("MUSTER_EXCHANGE", raising=False)
        with pytest.raises(BadOption, match="@submitit_delayed_launcher"):
            DelayedLauncher()

    @pytest.mark.parametrize(
        "options", [{"framework": "carrier pigeons"}, {"num_jobs": 0}, {"restarts": -1}]
    )
    def test_impossible_options_are_refused(self, options):
        with pytest.raises(BadOption, match=next(iter(options))):
            submitit_delayed_launcher(**{"num_jobs": 1, **options})


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    folder = tmp_path / "jobs"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(BadOption, match="others can write there.*chmod go-w"):
        SubmititLauncher(folder=folder, cluster="local", target=ECHO)
    folder.chmod(0o755)
    assert (
        SubmititLauncher(folder=folder, cluster="local", target=ECHO).folder.parent
        == folder
    )
