"""``muster tune``: what it prints runs, and wrong requests are refused in one message."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from muster.cli.main import main
from muster.cli.tune import Tune, as_json, costs_in_words, program, time_of
from muster.collectors.tuning import Candidate, Tuning
from muster.tuning.model import Costs, Setup

COSTS = Costs(step_s=12e-6, step_cpu_s=11e-6, step_sd_s=2e-6, step_tail_s=31e-6, reset_s=20e-6, cores=2.0)


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    code = main(["tune", *(str(arg) for arg in argv)])
    out, err = capsys.readouterr()
    return code, out, err


def code_of(out: str) -> str:
    """The program at the end of the output."""
    return out[out.index("from muster import") :]


def collector_of(code: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["collector"]


def test_table_and_a_program_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["CartPole-v1", "--seconds", "0.5", "--num-envs", "2", "4", "--frames-per-batch", "64", "--policy", "mlp"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for word in ("env ", "reset ", "policy ", "muster ", "machine ", "predicted", "measured", "ratio", " best "):
        assert word in out, word
    assert "fresh MLP 4-64-64-2 tanh" in out
    with collector_of(code_of(out)) as collector:
        assert collector.rollout().numel() == 64


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["CartPole-v1", "--seconds", "0.5", "--num-envs", "4", "--frames-per-batch", "1k", "--json"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert found["best"]["measured"] == max(c["measured"] for c in found["candidates"] if c["measured"])
    assert {c["setup"]["groups"] * c["setup"]["num_envs"] for c in found["candidates"]} == {4}
    assert found["costs"]["policy_s"] == [0.0, 0.0]
    with collector_of(found["program"]) as collector:
        assert collector.rollout().numel() == 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["CartPole-v1", "--seconds", "0"], "--seconds 0: expected more than 0"),
        (["CartPole-v1", "--seconds", "nan"], "--seconds nan"),
        (["CartPole-v1", "--num-envs", "8", "0"], "--num-envs 0: at least one environment"),
        (["CartPol-v1"], "There is no environment 'CartPol-v1'. Similar: "),
        (["json:CartPole-v1"], "json:CartPole-v1: gymnasium imports the module"),
        (["CartPole-v1", "--policy", "agent.pt"], "files of this kind hold pickles"),
        (["CartPole-v1", "--policy", "agent.py:policy"], "add --allow-import"),
        (["FrozenLake-v1", "--policy", "mlp"], "takes Box observations"),
    ],
)
def test_wrong_requests_are_refused_in_one_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("muster: ")
    assert message in err
    assert err.count("\n") == 1


def found(setup: Setup) -> Tuning:
    best = Candidate(setup, 1000.0, 900.0)
    return Tuning(COSTS, (best,), best)


def test_the_program_makes_the_policy_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    save_file(net.state_dict(), "net.safetensors")
    Path("agent.py").write_text("def policy(obs):\n    return obs[..., 0].long() * 0 + 1\n")
    tuning = found(Setup(num_envs=2, T=4))
    for policy in ("random", "mlp", "net.safetensors", "agent.py:policy"):
        code = program(Tune("CartPole-v1", policy=policy), tuning)
        with collector_of(code) as collector:
            batch = collector.rollout()
        assert batch.shape == (2, 4)
        assert ("action_log_prob" in batch) == (policy in ("mlp", "net.safetensors"))
        if policy == "net.safetensors":
            assert all(torch.equal(a, b) for a, b in zip(collector.policy.parameters(), net.parameters(), strict=True))
        if policy == "agent.py:policy":
            assert (batch["action"] == 1).all()


@pytest.mark.parametrize("dtype", ["env", "float64"])
def test_the_program_has_the_dtype_of_observations(dtype: str) -> None:
    with collector_of(program(Tune("CartPole-v1", obs_dtype=dtype), found(Setup(num_envs=2, T=4)))) as collector:
        stored = collector.rollout()["observation"].dtype
    assert stored == {"env": torch.float32, "float64": torch.float64}[dtype]


def test_json_has_no_infinite_numbers() -> None:
    shown = json.loads(as_json(found(Setup(num_envs=1)), "code"), parse_constant=pytest.fail)
    assert (shown["costs"]["episode_length"], shown["costs"]["cores"], shown["program"]) == (None, 2.0, "code")


def test_environments_are_quoted_in_the_program() -> None:
    code = program(Tune("my'env:Maze-v0"), found(Setup(num_envs=2, groups=3, workers=3)))
    assert code.endswith("""MultiSyncCollector(["my'env:Maze-v0"] * 3, None, num_envs=2, frames_per_batch=768)""")


def test_costs_in_words() -> None:
    words = costs_in_words(COSTS, "a policy").splitlines()
    assert words[0] == "env       12 us per step (11 us computing, deviation 2 us, slowest hundredth 31 us)"
    assert words[1] == "reset     20 us, no episode ended; 0.0 MB per environment"
    assert words[2].endswith("(a policy)")
    assert "2 cores" in words[4]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ns"), (12.34e-9, "12 ns"), (1.234e-5, "12.3 us"), (0.25, "250 ms"), (3.0, "3 s")]
)
def test_times(seconds: float, text: str) -> None:
    assert time_of(seconds) == text
    assert math.isfinite(seconds)
