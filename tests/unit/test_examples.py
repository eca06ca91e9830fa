"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from benchmarks import curves
from examples import (
    appo_vtrace,
    coroutine_envs,
    dqn_atari,
    dqn_cartpole,
    kill_and_resume,
    offline_minari,
    ppo_atari,
    ppo_cartpole,
    ppo_lstm,
    ppo_on_gpu,
    ray_cluster,
    sac,
    self_play,
    slow_simulator,
    td3,
    truncation,
)
from muster import Collector, policies
from muster.testing import TorchCartPole
from tests.fakes.ray_cluster import cluster, environment, needs_ray
from tests.tools import assert_balanced
from tests.unit.test_device_lanes import Waits

EXAMPLES = Path(ppo_cartpole.__file__).parent


def program(*command: str, cwd: Path, **environ: str) -> str:
    """What it says."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_the_bootstrap_from_next_observation_finds_the_true_value():
    found = truncation.main()

    assert found["right"] == pytest.approx(found["truth"], abs=1e-3)
    # Solved by hand: of 5 steps at the wall one is cut, and loses all that follows or goes on from
    # the start.
    assert found["as_terminated"] == pytest.approx(0.9**5 / (1 - 0.9 * 4 / 5), abs=1e-3)
    assert found["from_reset"] == pytest.approx(
        0.9**5 / (1 - 0.9 * 4 / 5 - 0.9 / 5 * 0.9**5), abs=1e-3
    )


def test_a_server_with_random_delays_is_asked_for_all_environments_at_once(capsys):
    reward = coroutine_envs.main(["--num-envs", "20", "--delay", "0.002"])

    assert reward > -2  # goals are up to 5 away
    assert "400 steps of 20 remote environments" in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_learns_from_20_thousand_frames(capsys):
    score = ppo_cartpole.main(
        ["--seed", "1", "--total-frames", "20480", "--eval-episodes", "10"]
    )

    assert score > 150  # uniform random actions: 22
    assert "20,480 frames" in capsys.readouterr().out


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of torch's threads, which an example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def last_row(said: str) -> tuple[int, float]:
    """Frames and mean return of the last line that ``benchmarks.curves`` reads."""
    rows = curves.ROW.findall(said)
    assert rows, said
    return int(rows[-1][0].replace(",", "")), float(rows[-1][1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("example", "frames"),
    [
        (dqn_cartpole, 2048),
        (ppo_lstm, 1024),
        (sac, 1056),
        (td3, 1056),
        (appo_vtrace, 1024),
    ],
)
def test_algorithms_run_and_print_the_rows_of_a_curve(example, frames, capsys):
    options = ["--learning-starts", "1000"] if example in (sac, td3) else []
    score = example.main(
        ["--total-frames", str(frames), "--eval-episodes", "1", *options]
    )

    found, mean = last_row(capsys.readouterr().out)
    assert found == frames // 1024 * 1024
    assert (
        (score < 0) == (mean < 0) == (example in (sac, td3))
    )  # Pendulum's rewards are negative


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_ppo_on_tensors_solves_cart_pole(capsys):
    options = ["--device", "cpu", "--envs", "256", "--total-frames", "500_000"]
    score = ppo_on_gpu.main(options)

    frames, mean = last_row(capsys.readouterr().out)
    assert score > 475
    assert mean >= 475
    assert frames < 400_000, "it ends when it is solved"


@pytest.mark.usefixtures("threads")
def test_ppo_on_tensors_prints_the_rows_of_a_curve(capsys):
    frames = 3 * 32 * ppo_on_gpu.T
    options = ["--device", "cpu", "--envs", "32", "--total-frames", str(frames)]
    score = ppo_on_gpu.main([*options, "--eval-episodes", "2"])

    found, mean = last_row(capsys.readouterr().out)
    assert found == frames
    assert 10 < mean < 100
    assert 8 <= score <= 500


def test_no_update_on_tensors_waits_for_the_device():
    learner = ppo_on_gpu.Learner("cpu")
    actor = policies.categorical(learner.net)
    env = TorchCartPole(8)
    with Collector(
        env, actor, frames_per_batch=64, layout="time_major", seed=0
    ) as collector:
        batch = collector.next()
    before = [parameter.clone() for parameter in learner.parameters]
    with Waits() as seen:
        learner.update(batch, 0.0)
    assert seen.calls > 1000  # it has been looking
    assert not seen.found
    pairs = zip(before, learner.parameters, strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)


def test_advantages_on_tensors_are_those_of_the_definition():
    gamma, lam = ppo_on_gpu.GAMMA, ppo_on_gpu.LAMBDA
    learner = ppo_on_gpu.Learner("cpu")
    make = lambda: TorchCartPole(5, max_steps=16)  # noqa: E731
    with Collector(
        make, None, frames_per_batch=150, layout="time_major", seed=0
    ) as collector:
        batch = collector.next()
    advantage, target = learner.advantages(batch)

    after = batch["next"]
    assert after["terminated"].any()
    assert (after["truncated"] & ~after["terminated"]).any()
    with torch.no_grad():
        value = learner.critic(batch["observation"])[..., 0].tolist()
        following = learner.critic(after["observation"])[..., 0].tolist()
    for b in range(5):
        total = 0.0
        for t in reversed(range(30)):
            bootstrap = 0 if after["terminated"][t, b] else following[t][b]
            delta = 1 + gamma * bootstrap - value[t][b]
            total = delta + (0 if after["done"][t, b] else gamma * lam * total)
            assert advantage[t, b].item() == pytest.approx(total, abs=1e-4)
            assert target[t, b].item() == pytest.approx(total + value[t][b], abs=1e-4)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("example", [sac, td3])
def test_a_gradient_step_follows_each_step_after_the_warm_up(example, monkeypatch):
    learners = []

    class Learner(example.Learner):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            learners.append(self)

    monkeypatch.setattr(example, "Learner", Learner)
    example.main(
        ["--total-frames", "60", "--learning-starts", "50", "--eval-episodes", "1"]
    )

    assert [learner.updates for learner in learners] == [10]


def test_dqn_learns_after_every_second_step(monkeypatch):
    learn, sizes = dqn_cartpole.update, []

    def update(*networks, rows):
        sizes.append(len(rows))
        learn(*networks, rows)

    monkeypatch.setattr(
        dqn_cartpole, "update", lambda *given: update(*given[:3], rows=given[3])
    )
    dqn_cartpole.train(0, dqn_cartpole.LEARNING_STARTS + 10)

    assert sizes == [dqn_cartpole.BATCH_SIZE] * 5


def test_sac_begins_with_cleanrls_distribution_and_stays_within_its_bounds():
    torch.manual_seed(0)
    net = sac.Learner(17, 6).actor.net

    mean, log_std = net(torch.randn(256, 17)).detach().chunk(2, -1)
    _, extreme = net(1e4 * torch.randn(256, 17)).detach().chunk(2, -1)

    assert mean.shape == (256, 6)
    assert log_std.exp().mean() == pytest.approx(0.22, abs=0.05)
    assert extreme.min() == pytest.approx(-5)
    assert extreme.max() == pytest.approx(2)


def test_sac_delays_the_policy_and_makes_up_for_it():
    torch.manual_seed(0)
    learner = sac.Learner(3, 1)
    rows = TensorDict(
        {
            "observation": torch.randn(8, 3),
            "action": torch.rand(8, 1),
            "next": {
                "observation": torch.randn(8, 3),
                "reward": torch.ones(8, 1),
                "terminated": torch.zeros(8, 1, dtype=torch.bool),
            },
        },
        (8,),
    )
    with Collector(
        "Pendulum-v1", learner.actor, frames_per_batch=1
    ):  # gives the bounds of actions
        steps = []
        for _ in range(4):
            learner.update(rows)
            found = learner.actor_optimizer.state.get(learner.actor.net[0].weight, {})
            steps.append(int(found.get("step", 0)))

    assert steps == [0, 2, 2, 4]


@pytest.mark.usefixtures("threads")
def test_dqn_on_atari_learns_from_frames_that_are_stored_once():
    memory = dqn_atari.main(
        ["--total-frames", "256", "--learning-starts", "250", "--buffer-size", "256"]
    )

    rows = memory.newest(256)
    assert rows["observation"].shape == (256, 4, 84, 84)
    assert torch.equal(rows["observation"][1:, :3], rows["observation"][:-1, 1:])
    assert torch.equal(rows["observation"][1:], rows["next", "observation"][:-1])
    assert memory.nbytes < 0.5 * 256 * 4 * 84 * 84


@pytest.mark.usefixtures("threads")
def test_ppo_on_atari_runs():
    played = ppo_atari.main(
        ["--total-frames", "64", "--steps", "16", "--num-envs", "2"]
    )

    assert math.isnan(played), "no game of Pong ends after 32 steps"


def test_values_of_last_observations_only_are_evaluated_for_atari():
    agent = ppo_atari.Agent(6)
    pictures = torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    done = torch.zeros(2, 3, 1, dtype=torch.bool)
    done[0, 1] = True
    value = torch.randn(2, 3)
    batch = TensorDict(
        {
            "state_value": value,
            "next": {
                "observation": pictures,
                "reward": torch.full((2, 3, 1), 5.0),
                "done": done,
                "terminated": done,
            },
        },
        (2, 3),
    )

    with torch.no_grad():
        at_the_end = agent.evaluate(pictures[:, 2])[1]
    found = ppo_atari.advantages(batch, agent)

    last = 1 + ppo_atari.GAMMA * at_the_end - value[:, 2]
    decay = ppo_atari.GAMMA * ppo_atari.LAMBDA
    assert torch.allclose(found[:, 2], last)
    assert torch.allclose(found[0, 1], 1 - value[0, 1])
    assert torch.allclose(
        found[1, 1], 1 + ppo_atari.GAMMA * value[1, 2] - value[1, 1] + decay * last[1]
    )


def test_an_lstm_unrolls_to_the_states_with_which_muster_has_acted():
    torch.manual_seed(0)
    agent = ppo_lstm.Agent()
    with Collector(
        ppo_lstm.make_env, agent, num_envs=4, frames_per_batch=4 * 64, seed=0
    ) as collector:
        batch = collector.rollout()
    assert batch["next", "done"].any()

    rows = batch.reshape(-1, 32)
    with torch.no_grad():
        log_prob = agent.distribution(ppo_lstm.unroll(rows, agent)).log_prob(
            rows["action"]
        )

    assert torch.allclose(log_prob, rows["action_log_prob"], atol=1e-5)


def test_vtrace_of_the_policy_that_acted_is_the_return():
    torch.manual_seed(0)
    with Collector(
        "CartPole-v1", policies.categorical(appo_vtrace.mlp(2, 1.0)), num_envs=3, frames_per_batch=90, seed=0,
        max_frames_per_traj=13,
    ) as collector:  # fmt: skip
        batch = collector.rollout()
    ends = {
        name: batch["next", name][..., 0]
        for name in ("terminated", "truncated", "done")
    }
    assert all(flags.any() for flags in ends.values())
    value, next_value = torch.randn(2, 3, 30)
    value[:, 1:] = torch.where(
        ends["done"][:, :-1], value[:, 1:], next_value[:, :-1]
    )  # one value per observation

    target, advantage = appo_vtrace.vtrace(
        batch, batch["action_log_prob"], value, next_value
    )

    expected = torch.empty(3, 30)
    for t in reversed(range(30)):
        cut = ends["truncated"][:, t] if t < 29 else torch.ones(3, dtype=torch.bool)
        following = torch.where(cut, next_value[:, t], expected[:, min(t + 1, 29)])
        expected[:, t] = 1 + appo_vtrace.GAMMA * following * ~ends["terminated"][:, t]
    assert torch.allclose(target, expected, atol=1e-4)
    assert torch.allclose(advantage, expected - value, atol=1e-4)


def test_vtrace_clips_the_weight_of_probable_actions_and_reduces_that_of_improbable_ones():
    flags = {
        name: torch.zeros(1, 2, 1, dtype=torch.bool) for name in ("terminated", "done")
    }
    batch = TensorDict(
        {
            "action_log_prob": torch.zeros(1, 2),
            "next": {"reward": torch.ones(1, 2, 1), **flags},
        },
        (1, 2),
    )
    zero = torch.zeros(1, 2)

    target, _ = appo_vtrace.vtrace(
        batch, torch.tensor([[3.0, -(2.0**0.5)]]), zero, zero
    )

    rho = math.exp(-(2.0**0.5))
    assert target[0].tolist() == pytest.approx([1 + appo_vtrace.GAMMA * rho, rho])


def test_a_simulator_that_crashes_loses_no_count(capsys):
    stats = slow_simulator.main(
        ["--total-frames", "1600", "--workers", "2", "--delay", "0", "--no-replay"]
    )

    assert stats.frames == 1600
    assert stats.restarts > 0
    assert_balanced(stats, in_flight=0)
    assert f"{stats.restarts} crash reports" in capsys.readouterr().out


@pytest.mark.usefixtures("threads")
@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(capsys):
    assert kill_and_resume.main(["--updates", "6", "--kills", "1", "--seed", "0"])

    assert "resumed after update" in capsys.readouterr().out


@pytest.mark.usefixtures("threads")
def test_a_student_of_a_minari_dataset_is_better_than_its_teacher(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    found = offline_minari.main(
        ["--total-frames", "8192", "--keep", "--eval-episodes", "8"]
    )

    assert found["student"] > found["teacher"]
    assert (tmp_path / "cartpole" / "teacher-v0").is_dir()


def test_curves_read_what_cleanrl_prints():
    said = "global_step=88, episodic_return=21.0\nglobal_step=1399, episodic_return=[-1506.2]\nSPS: 20\n"

    assert curves.EPISODE.findall(said) == [("88", "21.0"), ("1399", "-1506.2")]


def test_the_table_of_curves_is_that_of_the_results():
    results = curves.read()

    assert curves.table(results) in curves.PAGE.read_text("utf-8")
    for name in results:
        for runs in results[name]["runs"].values():
            frames = [run["rows"][-1][0] for run in runs]
            assert max(frames) < 1.02 * min(frames), (
                "the same for all seeds, but for batches of whole episodes"
            )


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 150, path.name
        assert path.name in curves.PAGE.read_text("utf-8"), (
            f"docs/examples.md does not list {path.name}"
        )


@pytest.mark.usefixtures("threads")
def test_self_play_runs():
    shares = self_play.main(
        ["--total-frames", "300", "--episodes", "64", "--eval-episodes", "20"]
    )

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
    assert [line.split()[-2:] for line in said.splitlines()[2:]] == [
        ["1,024", "frames"]
    ] * 2


@needs_ray
@pytest.mark.slow
def test_actors_of_a_cluster_share_the_work(tmp_path):
    ray = cluster()
    command = (
        sys.executable,
        str(EXAMPLES / "ray_cluster.py"),
        "--address",
        "auto",
        "--total-frames",
        "10240",
    )

    said = program(
        *command, cwd=tmp_path, RAY_ADDRESS=ray.address, **environment(ray.folder)
    )

    assert frames_of(said) == 10_240
    assert said.count("on node 0 (") == said.count("on node 1 (") == 1


def test_the_manifest_for_kubernetes_asks_for_what_it_provides():
    """Its fields were checked with the schema of KubeRay of August 2026."""
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())["spec"]
    ray = spec["rayClusterSpec"]
    (group,) = ray["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    interpreter, file, *arguments = spec["entrypoint"].split()
    asked = dict(zip(arguments[::2], arguments[1::2], strict=True))

    assert (interpreter, file) == (
        "python",
        f"examples/{ray_cluster.__name__.rpartition('.')[2]}.py",
    )
    assert (
        f"ray=={ray['rayVersion']}\n"
        in (EXAMPLES.parent / "constraints.txt").read_text()
    )
    assert ray["authOptions"] == {"mode": "token"}
    assert int(asked["--nodes"]) == group["replicas"] == group["minReplicas"]
    assert asked["--workers"] == container["resources"]["requests"]["cpu"]
    with pytest.raises(SystemExit, match="0"):  # it knows the arguments
        ray_cluster.main([*arguments, "--help"])


@pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="submitit is not installed"
)
@pytest.mark.slow
def test_nodes_are_jobs_of_submitit(tmp_path):
    said = program(
        sys.executable,
        str(EXAMPLES / "slurm_submitit.py"),
        "--local",
        "--total-frames",
        "10240",
        cwd=tmp_path,
    )

    assert frames_of(said) == 10_240
    assert said.count(" 0 restarts") == 2


def frames_of(said: str) -> int:
    return sum(
        int(line.split()[-4].replace(",", ""))
        for line in said.splitlines()
        if line.startswith("worker ")
    )
