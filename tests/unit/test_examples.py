"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import coroutine_envs, ppo_cartpole, self_play, truncation
from tests.fakes.ray_cluster import cluster, environment, needs_ray

EXAMPLES = Path(ppo_cartpole.__file__).parent


def program(*command: str, cwd: Path, **environ: str) -> str:
    """What it says."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_the_bootstrap_from_next_observation_finds_the_true_value():
    found = truncation.main()

    assert found["right"] == pytest.approx(found["truth"], abs=1e-3)
    # Solved by hand: of 5 steps at the wall one is cut, and loses all that follows or goes on from the start.
    assert found["as_terminated"] == pytest.approx(0.9**5 / (1 - 0.9 * 4 / 5), abs=1e-3)
    assert found["from_reset"] == pytest.approx(0.9**5 / (1 - 0.9 * 4 / 5 - 0.9 / 5 * 0.9**5), abs=1e-3)


def test_a_server_with_random_delays_is_asked_for_all_environments_at_once(capsys):
    reward = coroutine_envs.main(["--num-envs", "20", "--delay", "0.002"])

    assert reward > -2  # goals are up to 5 away
    assert "400 steps of 20 remote environments" in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_learns_from_20_thousand_frames(capsys):
    score = ppo_cartpole.main(["--seed", "1", "--total-frames", "20480", "--eval-episodes", "10"])

    assert score > 150  # uniform random actions: 22
    assert "20,480 frames" in capsys.readouterr().out


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of torch's threads, which an example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_self_play_runs():
    shares = self_play.main(["--batches", "2", "--episodes", "64", "--eval-episodes", "20"])

    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_self_play_learns_not_to_lose():
    shares = self_play.main(["--eval-episodes", "200"])

    assert shares["lost"] < 0.1  # random moves against random moves: 0.43
    assert shares["won"] > 0.6


@pytest.mark.slow
def test_torchrun_starts_two_nodes_of_one_program(tmp_path):
    torchrun = str(Path(sys.executable).with_name("torchrun"))

    said = program(
        torchrun,
        "--nproc-per-node=3",
        str(EXAMPLES / "torchrun_two_nodes.py"),
        "--total-frames",
        "1024",
        cwd=tmp_path,
    )

    assert said.count("(2, 8, 64)  mean reward 1.00\n") == 2
    assert [line.split()[-2:] for line in said.splitlines()[2:]] == [["1,024", "frames"]] * 2


@needs_ray
@pytest.mark.slow
def test_actors_of_a_cluster_share_the_work(tmp_path):
    ray = cluster()
    command = (sys.executable, str(EXAMPLES / "ray_cluster.py"), "--address", "auto", "--total-frames", "10240")

    said = program(*command, cwd=tmp_path, RAY_ADDRESS=ray.address, **environment(ray.folder))

    assert frames_of(said) == 10_240
    assert said.count("on node 0 (") == said.count("on node 1 (") == 1


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
@pytest.mark.slow
def test_nodes_are_jobs_of_submitit(tmp_path):
    said = program(
        sys.executable, str(EXAMPLES / "slurm_submitit.py"), "--local", "--total-frames", "10240", cwd=tmp_path
    )

    assert frames_of(said) == 10_240
    assert said.count(" 0 restarts") == 2


def frames_of(said: str) -> int:
    return sum(int(line.split()[-4].replace(",", "")) for line in said.splitlines() if line.startswith("worker "))
