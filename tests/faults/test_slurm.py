"""Nodes as jobs of a real SLURM, which is started here: on one machine, on loopback."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from muster.cluster.direct import DirectCarrier
from muster.cluster.link import LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.submitit import GONE, Queue, SubmititLauncher
from muster.cluster.submitit_delayed import submitit_delayed_launcher
from muster.collectors.clusters import DistributedCollector
from muster.errors import BadOption, MusterError
from tests.fakes.slurm import Slurm, missing
from tests.tools import assert_accounted, counting
from tests.unit.test_submitit import (
    ECHO,
    JOIN_S,
    ROOT,
    connect,
    main_program,
    main_that_kills_its_node,
)
from tests.waits import wait_until

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as running:
        yield running


@pytest.fixture(autouse=True)
def _here(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )


@pytest.fixture
def launcher_of(tmp_path):
    return lambda target=ECHO, **kwargs: SubmititLauncher(
        kwargs, tmp_path, target=target
    )


@pytest.fixture
def carrier_of(launcher_of):
    with contextlib.ExitStack() as stack:

        def make(target=ECHO, **kwargs):
            launcher = launcher_of(target, **kwargs)
            # The nodes of these tests send no beats, and only the end of a job is to end a link.
            carrier = DirectCarrier(
                launcher=launcher, rendezvous=Rendezvous(1), deadline_s=100
            )
            stack.callback(carrier.close)
            return carrier, launcher

        yield make


@pytest.fixture
def rendezvous():
    """That admits nobody: a node that comes waits."""
    with contextlib.closing(Rendezvous(1)) as made:
        yield made


def job_of(launcher, number=0):
    """The id of a launcher's job, in the order in which they were submitted."""
    return sorted(
        int(path.name.split("_")[0]) for path in launcher.folder.glob("*_submitted.pkl")
    )[number]


def reason(job, within_s=JOIN_S):
    """What it has ended of."""
    wait_until(lambda: job.ended() is not None, within_s)
    return job.ended()


def test_a_cancelled_job_is_replaced_by_a_new_one(slurm, carrier_of):
    carrier, launcher = carrier_of()
    link = connect(carrier)
    pid = int(link.receive().message.split()[1])
    first = str(job_of(launcher))
    assert slurm.state(first) == "RUNNING"
    slurm.run("scancel", first)
    begin = time.monotonic()
    with pytest.raises(LinkLost):
        link.receive()
    link.close()
    slurm.wait_for(first, "CANCELLED")
    assert (
        time.monotonic() - begin < 15
    )  # it does not wait for the SIGKILL of SLURM after 30 s
    assert not os.path.exists(f"/proc/{pid}")

    link = connect(carrier, epoch=1)
    assert int(link.receive().message.split()[1]) != pid
    second = str(job_of(launcher, 1))
    assert slurm.state(second) == "RUNNING"
    link.close()
    carrier.close()
    slurm.wait_for(second, "CANCELLED", "COMPLETED")
    assert not list(launcher.folder.glob("token-*"))


def test_a_collector_goes_on_while_the_job_of_a_node_is_replaced(
    slurm, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # jobs' files go to "muster-jobs" in it
    options = {
        "num_envs": 2,
        "frames_per_batch": 32,
        "total_frames": -1,
        "on_failure": "restart",
    }
    with DistributedCollector(
        [counting(5)] * 2,
        launcher="submitit",
        slurm_kwargs={"timeout_min": 5},
        **options,
    ) as c:
        batches = iter(c)
        for _ in range(10):
            next(batches)
        job, leaf = (
            slurm.run("squeue", "--noheader", "--name=muster-node-0", "--format=%i"),
            c.stats().workers[0].pid,
        )
        assert c.stats().workers[0].frames > 0
        slurm.run("scancel", job)
        until = time.monotonic() + JOIN_S
        while c.stats().restarts == 0:
            assert time.monotonic() < until
            next(batches)
        before = [worker.frames for worker in c.stats().workers]
        while c.stats().workers[0].frames <= before[0]:
            assert time.monotonic() < until
            next(batches)
        assert c.stats().workers[1].frames > before[1]
        assert c.stats().workers[1].restarts == 0
        assert_accounted(c)
        assert not os.path.exists(f"/proc/{leaf}")
        assert slurm.state(job) == "CANCELLED"
    _no_jobs(slurm)


def test_a_cancelled_job_says_so(slurm, launcher_of, rendezvous):
    job = launcher_of().start(0, 0, rendezvous)
    assert job.ended() is None
    slurm.wait_for(job.job_id, "RUNNING")
    slurm.run("scancel", job.job_id)
    why = reason(job)
    assert f"its SLURM job {job.job_id} has ended: CANCELLED" in why
    assert "_log.err)" in why
    job.end()
    assert job.ended() == why


def test_a_node_that_fails_at_import_shows_its_standard_error(carrier_of):
    carrier, launcher = carrier_of("no_such_module_of_a_node:serve")
    with pytest.raises(LinkLost) as caught:
        connect(carrier)
    text = str(caught.value)
    assert "has ended: FAILED (NonZeroExitCode)" in text
    assert "  | ModuleNotFoundError: No module named 'no_such_module_of_a_node'" in text
    assert f"({launcher.folder}/{job_of(launcher)}_0_log.err)" in text


def test_a_preempted_job_is_not_requeued(slurm, launcher_of, rendezvous, tmp_path):
    launcher = launcher_of()
    job = launcher.start(0, 0, rendezvous)
    slurm.wait_for(job.job_id, "RUNNING")
    script = tmp_path / "urgent.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --output={tmp_path}/urgent.log\nsleep 60\n"
    )
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--exclusive", str(script)
    )
    try:
        assert f"{job.job_id} has ended: PREEMPTED" in reason(job)
        again = launcher.start(0, 1, rendezvous)
        assert again.job_id != job.job_id
        assert again.ended() is None
        again.end()
    finally:
        slurm.run("scancel", urgent)


def test_a_job_that_waits_has_not_ended(slurm, launcher_of, rendezvous):
    launcher = launcher_of(slurm_additional_parameters={"hold": True})
    job = launcher.start(0, 0, rendezvous)
    slurm.wait_for(job.job_id, "PENDING")
    wait_until(
        lambda: job.state != "PENDING", 30
    )  # as it was submitted; SLURM has not been asked
    assert job.state == "PENDING (JobHeldUser)"
    assert job.ended() is None
    job.end()
    assert "CANCELLED" in reason(job)
    assert not list(launcher.folder.glob("token-*"))


def test_what_sbatch_refuses_is_said(launcher_of, rendezvous):
    launcher = launcher_of(slurm_partition="nowhere")
    with pytest.raises(
        LinkLost, match="muster-node-0 could not be submitted: .*[Ii]nvalid partition"
    ):
        launcher.start(0, 0, rendezvous)
    assert not list(launcher.folder.glob("token-*"))


def test_parameters_are_those_of_submitit(slurm, launcher_of, rendezvous):
    launcher = launcher_of(
        timeout_min=7, slurm_cpus_per_task=3, slurm_partition="train"
    )
    job = launcher.start(0, 0, rendezvous)
    asked = slurm.run(
        "squeue",
        "--noheader",
        "--states=all",
        "--format=%j %l %C %P",
        f"--jobs={job.job_id}",
    )
    assert asked == "muster-node-0 7:00 3 train"
    job.end()


def test_loopback_is_refused_where_jobs_may_run_elsewhere(launcher_of):
    launcher_of().check("127.0.0.1")
    launcher_of(slurm_partition="wide", slurm_nodelist="node1").check("127.0.0.1")
    wide = launcher_of(slurm_partition="wide")
    with pytest.raises(
        BadOption,
        match=r"other hosts too \(elsewhere\), which cannot reach 127.0.0.1: pass bind=",
    ):
        wide.check("127.0.0.1")
    with (
        contextlib.closing(Rendezvous(1)) as here,
        pytest.raises(BadOption, match="elsewhere"),
    ):
        wide.start(0, 0, here)
    wide.check("10.1.2.3")


def test_a_squeue_that_fails_changes_nothing(
    launcher_of, rendezvous, monkeypatch, tmp_path
):
    (tmp_path / "no.conf").write_text("nonsense\n")
    job = launcher_of().start(0, 0, rendezvous)
    with monkeypatch.context() as broken:
        broken.setenv("SLURM_CONF", str(tmp_path / "no.conf"))
        begin = time.monotonic()
        while time.monotonic() - begin < 4:  # long enough for it to be asked
            assert job.ended() is None
            threading.Event().wait(0.05)
    job.end()
    assert "CANCELLED" in reason(job)


def test_a_slurm_that_does_not_answer_keeps_nobody_waiting(
    slurm, launcher_of, rendezvous
):
    job = launcher_of().start(0, 0, rendezvous)
    slurm.wait_for(job.job_id, "RUNNING")
    slurm.stop_answering()
    try:
        begin = time.monotonic()
        job.end()
        job.end()
        assert time.monotonic() - begin < 8
        assert job.ended() is None
    finally:
        slurm.go_on()
    assert "CANCELLED" in reason(job)


def test_a_job_that_slurm_has_forgotten_has_ended():
    queue = Queue()
    queue.add("987654")
    wait_until(lambda: queue.state("987654") != "PENDING", 30)
    assert queue.state("987654") == GONE


def test_the_main_job_and_its_nodes(slurm, tmp_path):
    delayed = submitit_delayed_launcher(1, folder=tmp_path)
    answer, number, pid = delayed(main_program)(b"hello")
    assert (answer, number) == (b"hello", 0)
    _no_jobs(slurm)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_failed_node_of_a_main_job_gets_another_job(slurm, tmp_path):
    first, second = submitit_delayed_launcher(1, folder=tmp_path)(
        main_that_kills_its_node
    )()
    assert first != second
    _no_jobs(slurm)


def test_a_main_job_that_cannot_be_submitted(slurm, tmp_path):
    delayed = submitit_delayed_launcher(
        1, folder=tmp_path, submitit_main_conf={"slurm_partition": "nowhere"}
    )
    with pytest.raises(
        MusterError, match="muster-main could not be submitted: .*[Ii]nvalid partition"
    ):
        delayed(main_program)(b"")
    _no_jobs(slurm)
    assert not list(Path(tmp_path).rglob("token"))


def _no_jobs(slurm, within_s=30.0):
    wait_until(lambda: not slurm.run("squeue", "--noheader"), within_s)
