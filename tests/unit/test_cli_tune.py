"""``muster tune``: what it prints runs, and wrong requests are refused in one message."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from torch import nn

from muster.cli import mlp
from muster.cli.request import spaces_of
from muster.cli.tune import Tune, program
from muster.tuning import Candidate, Setup, Tuning
from tests.command_line import refused, run


def code_of(out: str) -> str:
    """The program at the end of the output."""
    return out[out.index("from muster import") :]


def collector_of(code: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["collector"]


def test_table_and_a_program_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "CartPole-v1",
        "--seconds",
        "0.5",
        "--num-envs",
        "2",  # few enough setups for one table, also on a busy machine, where threads are tried
        "--frames-per-batch",
        "64",
        "--policy",
        "mlp",
    ]
    code, out, err = run(capsys, "tune", *argv)
    assert (code, err) == (0, "")
    for word in (
        "cores",
        "where it runs",
        "in process",
        "processes, server",
        "frames/s",
        " best ",
        " finalist ",
    ):
        assert word in out, word
    assert "fresh MLP 4-64-64-2 tanh" in out
    with collector_of(code_of(out)) as collector:
        assert collector.rollout().numel() == 64


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "CartPole-v1",
        "--seconds",
        "0.5",
        "--num-envs",
        "4",
        "--frames-per-batch",
        "1k",
        "--json",
    ]
    code, out, err = run(capsys, "tune", *argv)
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)  # no NaN, no Infinity
    final = [c["rate"] for c in found["candidates"] if c["final"]]
    assert len(final) == 3
    assert final == sorted(final, reverse=True)
    assert {
        c["setup"]["groups"] * c["setup"]["num_envs"] for c in found["candidates"]
    } == {4}
    assert 0 < found["cpu_share"] <= 1
    with collector_of(found["program"]) as collector:
        assert collector.rollout().numel() == 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["CartPole-v1", "--seconds", "0"], "--seconds 0: expected more than 0"),
        (["CartPole-v1", "--seconds", "nan"], "--seconds nan"),
        (["CartPole-v1", "--num-envs", "8", "0"], "--num-envs 0: expected at least 1"),
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
    assert message in refused(capsys, "tune", *argv)


def found(setup: Setup) -> Tuning:
    return Tuning((Candidate(setup, 1000.0, final=True),), 1.0, 2.0)


def test_the_program_makes_the_policy_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    save_file(net.state_dict(), "net.safetensors")
    Path("agent.py").write_text(
        "def policy(obs):\n    return obs[..., 0].long() * 0 + 1\n"
    )
    tuning = found(Setup(num_envs=2, T=4))
    for policy in ("random", "mlp", "net.safetensors", "agent.py:policy"):
        code = program(Tune("CartPole-v1", policy=policy), tuning)
        with collector_of(code) as collector:
            batch = collector.rollout()
        assert batch.shape == (2, 4)
        assert ("action_log_prob" in batch) == (policy in ("mlp", "net.safetensors"))
        if policy == "net.safetensors":
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    collector.policy.parameters(), net.parameters(), strict=True
                )
            )
        if policy == "agent.py:policy":
            assert (batch["action"] == 1).all()


@pytest.mark.parametrize("dtype", ["env", "float64"])
def test_the_program_has_the_dtype_of_observations(dtype: str) -> None:
    with collector_of(
        program(Tune("CartPole-v1", obs_dtype=dtype), found(Setup(num_envs=2, T=4)))
    ) as collector:
        stored = collector.rollout()["observation"].dtype
    assert stored == {"env": torch.float32, "float64": torch.float64}[dtype]


def test_environments_are_quoted_in_the_program() -> None:
    code = program(
        Tune("my'env:Maze-v0"), found(Setup(num_envs=2, groups=3, workers=3))
    )
    assert code.endswith(
        """MultiSyncCollector(["my'env:Maze-v0"] * 3, None, num_envs=2, frames_per_batch=768)"""
    )


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_program_makes_the_same_network_from_public_names_only(
    env: str, tmp_path: Path
) -> None:
    tuning = found(Setup(num_envs=2, T=4))
    found_spaces = spaces_of(env)
    head, _ = mlp.fresh(*found_spaces, seed=3)
    of_head, of_net = head.state_dict(), head.net.state_dict()  # type: ignore[union-attr, operator]
    spread = {name: value + 1 for name, value in of_head.items() if name == "log_std"}
    without = {name: value for name, value in of_head.items() if name != "log_std"}
    files = [without | spread, without, of_net | spread, of_net]
    for number, policy in enumerate(["mlp", *files]):
        file = "mlp"
        if policy != "mlp":
            file = str(tmp_path / f"{number}.safetensors")
            save_file({name: value.clone() for name, value in policy.items()}, file)  # type: ignore[union-attr]
        code = program(Tune(env, policy=file), tuning)
        assert "muster.cli" not in code
        expected, _ = (
            mlp.fresh(*found_spaces, 0)
            if policy == "mlp"
            else mlp.from_file(Path(file), *found_spaces)
        )
        with collector_of(code) as collector:
            assert collector.rollout().shape == (2, 4)
            made = collector.policy.state_dict()
        assert made.keys() == expected.state_dict().keys()
        assert all(
            torch.equal(made[name], value)
            for name, value in expected.state_dict().items()
        )


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 5), np.uint8),
        spaces.Box(0, 1, (2, 3), np.float32),
        spaces.Box(0, 1, (), np.float32),
        spaces.Box(0, 1, (3,), np.float64),
    ],
    ids=str,
)
def test_the_source_of_a_network_makes_it(space: spaces.Box) -> None:
    head, _ = mlp.fresh(space, spaces.Discrete(2), seed=0)
    names = {"nn": nn, "Float": mlp.Float, "OrderedDict": OrderedDict}
    made = eval(mlp.source(head.net), names)  # type: ignore[arg-type]
    made.load_state_dict(head.net.state_dict())  # type: ignore[union-attr, operator]
    observed = torch.from_numpy(np.stack([[space.sample() for _ in range(3)]] * 2))
    assert torch.equal(made(observed), head.net(observed))  # type: ignore[operator]
