"""Collecting with workers on nodes, from the command line."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.cli.cluster import endpoint
from muster.cli.main import main
from muster.errors import BadOption
from muster.recording import load
from tests.command_line import refused, run
from tests.fakes.ray_cluster import cluster, environment, needs_ray
from tests.waits import free_port, without_delays

COLLECT = (
    "collect",
    "CartPole-v1",
    "--frames",
    "1600",
    "--num-envs",
    "4",
    "--seed",
    "5",
)
BIN = Path(sys.executable).parent
LIMIT_S = 110


@contextmanager
def process(*argv: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A program that does not outlive the test."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(
        [BIN / argv[0], *argv[1:]], env=os.environ | environ, **pipes
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def end_of(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = started.communicate(timeout=LIMIT_S)
    return started.returncode, out, without_delays(err)


def token(path: Path) -> str:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of two local workers, which two nodes have to equal."""
    path = tmp_path_factory.mktemp("local") / "a"
    assert main([*COLLECT, "--workers", "2", "--out", str(path), "--quiet"]) == 0
    return path


def assert_same(recording: Path, expected: Path) -> None:
    ours, theirs = load(recording), load(expected)
    assert (len(ours), ours.batches) == (len(theirs), theirs.batches)
    for number in range(ours.batches):
        assert (ours.batch(number) == theirs.batch(number)).all()


# ------------------------------------------------------------------------------------------ collecting


@pytest.mark.slow
def test_nodes_record_what_local_workers_record(
    expected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys, *COLLECT, "--backend", "mp", "--nodes", 2, "--out", tmp_path / "a"
    )
    assert (code, err) == (0, "")
    assert_same(tmp_path / "a", expected)
    assert (
        load(tmp_path / "a").meta["nodes"],
        load(tmp_path / "a").meta["backend"],
    ) == (2, "mp")
    assert re.search(
        r"^workers   2 on 2 nodes: 0 \(\S+\) 50%, 1 \(\S+\) 50%$", out, re.MULTILINE
    ), out


@pytest.mark.slow
def test_workers_of_a_node_share_its_batches_or_have_their_own(
    expected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_node = ("--backend", "mp", "--nodes", 1, "--workers", 2, "--quiet")
    assert run(capsys, *COLLECT, *one_node, "--out", tmp_path / "a") == (0, "", "")
    assert_same(tmp_path / "a", expected)
    alone = ("--async", "--frames-per-batch", 80, "--out", tmp_path / "b")
    assert run(capsys, *COLLECT, *one_node, *alone) == (0, "", "")
    assert [load(tmp_path / "b").batch(n).shape for n in (0, 19)] == [(4, 20), (4, 20)]


@pytest.mark.slow
def test_ranks_of_torchrun_are_nodes_of_the_first(
    expected: Path, tmp_path: Path
) -> None:
    argv = [*COLLECT, "--backend", "torchrun", "--out", str(tmp_path / "a")]
    with process("torchrun", "--nproc-per-node=3", "-m", "muster", *argv) as torchrun:
        code, out, err = end_of(torchrun)
    assert code == 0, err
    assert_same(tmp_path / "a", expected)
    assert out.count("workers   2 on 2 nodes") == 1


@pytest.mark.slow
def test_ctrl_c_under_torchrun_ends_with_a_summary() -> None:
    argv = ("collect", "CartPole-v1", "--frames", "100M", "--backend", "torchrun")
    with process("torchrun", "--nproc-per-node=2", "-m", "muster", *argv) as torchrun:
        assert torchrun.stdout is not None
        assert "frames/s" in torchrun.stdout.readline()
        torchrun.send_signal(signal.SIGINT)
        _, out, err = end_of(torchrun)
    assert re.search(
        r"^stopped after [\d,]+ of 100,000,000 frames$", out, re.MULTILINE
    ), err
    assert "on 1 node: 0 (" in out
    assert "was lost" not in err
    assert err.count("stopping after this batch") == 1


@pytest.mark.slow
def test_nodes_that_somebody_starts(expected: Path, tmp_path: Path) -> None:
    where, environ = (
        f"127.0.0.1:{free_port()}",
        {"MUSTER_TOKEN_FILE": token(tmp_path / "token")},
    )
    argv = [
        *COLLECT,
        "--backend",
        "manual",
        "--bind",
        where,
        "--nodes",
        "2",
        "--out",
        str(tmp_path / "a"),
    ]
    with (
        process("muster", "node", where, **environ) as one,
        process("muster", "node", where, "--number", "1", **environ) as other,
        process("muster", *argv, **environ) as collecting,
    ):
        code, out, err = end_of(collecting)
        assert (code, err) == (
            0,
            f"muster: waiting for 2 times `muster node {where}`, with the same token.\n",
        )
        assert [end_of(node) for node in (one, other)] == [(0, "", "")] * 2
    assert_same(tmp_path / "a", expected)
    assert "workers   2 on 2 nodes" in out


@pytest.mark.slow
def test_a_node_says_that_its_collector_is_gone(tmp_path: Path) -> None:
    where, environ = (
        f"127.0.0.1:{free_port()}",
        {"MUSTER_TOKEN_FILE": token(tmp_path / "token")},
    )
    argv = (
        "collect",
        "CartPole-v1",
        "--frames",
        "100M",
        "--backend",
        "manual",
        "--bind",
        where,
        "--nodes",
        "1",
    )
    with (
        process("muster", "node", where, **environ) as node,
        process("muster", *argv, **environ) as collecting,
    ):
        assert collecting.stdout is not None
        assert "frames/s" in collecting.stdout.readline()
        collecting.kill()
        assert end_of(node) == (
            1,
            "",
            "muster: the connection to the collector was lost.\n",
        )


@pytest.mark.slow
def test_a_node_with_another_token_is_not_let_in(tmp_path: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    argv = (
        *COLLECT,
        "--backend",
        "manual",
        "--bind",
        where,
        "--nodes",
        "1",
        "--join-timeout",
        "30",
    )
    with (
        process(
            "muster", "node", where, MUSTER_TOKEN_FILE=token(tmp_path / "wrong")
        ) as node,
        process(
            "muster", *argv, MUSTER_TOKEN_FILE=token(tmp_path / "token")
        ) as collecting,
    ):
        code, _, err = end_of(node)
        assert (code, "token" in err) == (1, True), err
        code, out, err = end_of(collecting)
    assert (code, out) == (2, "")
    assert "token" in err


@needs_ray
@pytest.mark.slow
def test_actors_of_a_ray_cluster_are_nodes(expected: Path, tmp_path: Path) -> None:
    argv = (
        *COLLECT,
        "--backend",
        "ray",
        "--address",
        "auto",
        "--nodes",
        "2",
        "--out",
        str(tmp_path / "a"),
    )
    ray = cluster()
    with process(
        "muster", *argv, **environment(ray.folder), RAY_ADDRESS=ray.address
    ) as collecting:
        code, out, err = end_of(collecting)
    assert code == 0, err
    assert_same(tmp_path / "a", expected)
    assert "workers   2 on 2 nodes" in out
    assert "\nengine    ray\n" in out


@needs_ray
@pytest.mark.slow
def test_an_actor_has_a_cpu_for_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    cluster()  # of two machines with 4 CPUs each
    capsys.readouterr()  # what Ray has said to that
    argv = ("--backend", "ray", "--nodes", 1, "--workers", 5, "--join-timeout", 2)
    err = refused(capsys, *COLLECT, *argv)
    assert re.search(
        r"has not joined .* within 2 s. Its Ray actor is not started: it asks for \{'num_cpus': 5",
        err,
    ), err


# ------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nodes", "2"], "--nodes is about nodes: add --backend"),
        (["--address", "auto"], "--address is about nodes"),
        (["--bind", "h"], "--bind is about nodes"),
        (["--join-timeout", "3"], "--join-timeout is about nodes"),
        (["--backend", "mp"], "--backend mp needs --nodes N"),
        (["--backend", "ray", "--nodes", "0"], "--backend ray needs --nodes N"),
        (
            ["--backend", "mp", "--nodes", "2", "--threads"],
            "--threads: the workers of nodes are processes",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--address", "auto"],
            "--address is about --backend ray",
        ),
        (
            ["--backend", "ray", "--nodes", "2", "--bind", "h"],
            "--bind: Ray knows its own addresses",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--join-timeout", "0"],
            "--join-timeout 0: expected more than 0",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--join-timeout", "inf"],
            "--join-timeout inf: expected more than 0",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--workers", "0"],
            "--workers 0: expected at least 1",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--min-nodes", "1"],
            "--min-nodes: batches of all nodes need all of them",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--min-nodes", "3", "--async"],
            "min_nodes=3, but there are 2 nodes",
        ),
        (["--min-nodes", "1"], "--min-nodes is about nodes: add --backend"),
        (["--backend", "torchrun"], "--backend torchrun is for processes of torchrun"),
        (
            ["--backend", "manual", "--nodes", "2"],
            "--backend manual needs --bind HOST:PORT",
        ),
        (
            ["--backend", "manual", "--nodes", "2", "--bind", "127.0.0.1:4"],
            "--backend manual needs a token",
        ),
        (
            ["--backend", "mp", "--nodes", "2", "--bind", "h:p"],
            "--bind h:p: expected HOST or HOST:PORT",
        ),
        (
            ["--backend", "mp", "--nodes", "3"],
            "--nodes 3 x --num-envs 8; the nearest are 792 or 816",
        ),
        (
            ["--backend", "mp", "--nodes", "3", "--workers", "2"],
            "--nodes 3 x --workers 2 x --num-envs 8; the nearest are",
        ),
        (
            ["--backend", "mp", "--nodes", "3", "--async", "--frames-per-batch", "81"],
            "of --num-envs 8; the nearest are 80",
        ),
    ],
)
def test_options_of_nodes_have_to_fit(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert said in refused(capsys, "collect", "CartPole-v1", "--frames", "800", *argv)


@pytest.mark.parametrize(
    ("ranks", "argv", "said"),
    [
        ("1", [], "at least two are needed"),
        ("4", ["--nodes", "4"], "--nodes 4, but torchrun has started 4 processes: 3"),
    ],
)
def test_torchrun_and_nodes_have_to_agree(
    ranks: str,
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert said in refused(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "800",
        "--backend",
        "torchrun",
        *argv,
    )


def test_other_hosts_need_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    err = refused(
        capsys, *COLLECT, "--backend", "mp", "--nodes", "2", "--bind", "192.0.2.1"
    )
    assert "need a token" in err


def test_a_node_needs_a_token_and_an_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUSTER_TOKEN", raising=False)
    monkeypatch.delenv("MUSTER_TOKEN_FILE", raising=False)
    assert "openssl rand -hex 32" in refused(capsys, "node", "127.0.0.1:4")
    monkeypatch.setenv("MUSTER_TOKEN_FILE", token(tmp_path / "token"))
    assert "'host:port'" in refused(capsys, "node", "somewhere")
    assert "--number -1: nodes are numbered from 0" in refused(
        capsys, "node", "127.0.0.1:4", "--number", -1
    )
    assert "--wait 0: expected more" in refused(
        capsys, "node", "127.0.0.1:4", "--wait", 0
    )
    code, out, err = run(capsys, "node", f"127.0.0.1:{free_port()}", "--wait", 0.2)
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"muster: The main process at 127\.0\.0\.1:\d+ could not be reached for 0\.2 s\.\n",
        err,
    ), err


@pytest.mark.parametrize(
    ("bind", "found"),
    [
        (None, ("127.0.0.1", 0)),
        ("host", ("host", 0)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("fe80::1", ("fe80::1", 0)),
        ("[fe80::1]", ("fe80::1", 0)),
        ("[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_endpoints(bind: str | None, found: tuple[str, int]) -> None:
    assert endpoint(bind) == found


@pytest.mark.parametrize(
    "bind", ["host:", ":80", "host:0", "host:65536", "host:-1", "host:http"]
)
def test_no_endpoints(bind: str) -> None:
    with pytest.raises(BadOption, match="expected HOST or HOST:PORT"):
        endpoint(bind)


def test_cluster_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_TOKEN_FILE", token(tmp_path / "token"))
    code, out, err = run(capsys, "cluster")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert names == ["mp", "torchrun", "manual", "ray", "slurm", "token"]
    assert out.endswith("token      found\n")
    os.chmod(tmp_path / "token", 0o644)
    assert "others may read it" in run(capsys, "cluster")[1]
