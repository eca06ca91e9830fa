"""``muster eval``: exact, honest about what is missing, and polite."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from muster.evaluation import Evaluator
from muster.policies import categorical
from muster.testing import CountingEnv
from tests import command_line


class Signals(CountingEnv):
    """Sends Ctrl-C to its process in its 40th step; episodes of 30 steps."""

    def __init__(self) -> None:
        super().__init__(30)

    def step(self, action: Any) -> Any:
        if self.executed == 39:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Picture(CountingEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(3)
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((16, 16, 3), np.uint8)


class Plain(CountingEnv):
    """Takes ``render_mode`` and does nothing with it."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(3)


@pytest.fixture(autouse=True)
def _environments():
    made = {
        "Signals-v0": Signals,
        "Picture-v0": Picture,
        "Plain-v0": Plain,
        "Endless-v0": lambda: CountingEnv(10**9),
    }
    for name, entry_point in made.items():
        gymnasium.register(name, entry_point=entry_point)
    yield
    for name in made:
        del gymnasium.registry[name]


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    return command_line.run(capsys, "eval", *argv)


def refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    return command_line.refused(capsys, "eval", *argv)


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors", net


def test_the_table_and_the_json_are_what_the_evaluator_finds(weights, capsys):
    file, net = weights
    with Evaluator(
        "CartPole-v1", categorical(net), episodes=9, num_envs=4, seed=3
    ) as evaluator:
        expected = evaluator.evaluate()
    argv = [
        "CartPole-v1",
        "--policy",
        file,
        "--episodes",
        9,
        "--num-envs",
        4,
        "--seed",
        3,
    ]
    code, out, err = run(capsys, *argv)
    low, high = expected.confidence_interval()
    assert (code, err) == (0, "")
    assert "policy    MLP 4-8-2 tanh from net.safetensors, sha256" in out
    assert f"return    {expected.mean:,.2f} ± {expected.std:,.2f} " in out
    assert f"{low:,.2f} to {high:,.2f}" in out
    assert (
        f"episodes  9   length {expected.length_mean:,.1f}   terminated 9   seeds from 3"
        in out
    )
    assert re.search(rf"frames    {expected.frames} in [\d.]+ s\n$", out)
    code, out, err = run(capsys, *argv, "--json")
    found = json.loads(out)
    assert (code, err, found["mean"], found["complete"], found["videos"]) == (
        0,
        "",
        expected.mean,
        True,
        [],
    )
    assert [record["seed"] for record in found["records"]] == [
        record.seed for record in expected.records
    ]


def test_workers_and_numbers_of_environments_give_the_same(weights, capsys):
    argv = ["CartPole-v1", "--policy", weights[0], "--episodes", 5, "--json"]
    found = [
        json.loads(run(capsys, *argv, *more)[1])
        for more in ((), ("--num-envs", 1), ("--workers", 2, "--num-envs", 2))
    ]
    returns = [
        sorted((r["seed"], r["episode_return"]) for r in each["records"])
        for each in found
    ]
    assert returns[0] == returns[1] == returns[2]


def test_a_rule_that_favours_short_episodes_says_so(capsys):
    argv = ["CartPole-v1", "--episodes", 9, "--num-envs", 4]
    assert "BIASED" not in run(capsys, *argv)[1]
    for rule, biased in (("fair", True), ("last_even", False), ("first_done", True)):
        code, out, _ = run(capsys, *argv, "--rule", rule)
        told = (
            f"BIASED: rule {rule} favours short episodes, so the mean is biased.\n"
            in out
        )
        assert (code, told) == (0, biased)
        found = json.loads(run(capsys, *argv, "--rule", rule, "--json")[1])
        assert (found["rule"], found["biased"], found["episodes"]) == (rule, biased, 9)


def test_what_is_unfinished_is_said(capsys):
    code, out, _ = run(
        capsys, "Endless-v0", "--episodes", 2, "--num-envs", 2, "--max-frames", 80
    )
    assert code == 0
    assert "episodes  none ended" in out
    assert (
        "INCOMPLETE: stopped by max_frames; still running: env 0: 820.0 in 40, env 1: 820.0 in 40."
        in out
    )
    code, out, _ = run(
        capsys, "Endless-v0", "--episodes", 2, "--num-envs", 2, "--max-steps", 7
    )
    assert "stopped by max_T; still running: env 0: 28.0 in 7" in out
    code, out, _ = run(capsys, "Endless-v0", "--episodes", 3, "--max-episode-steps", 7)
    assert "return    28.00 ± 0.00" in out


def test_ctrl_c_ends_it_with_what_there_is(capsys):
    code, out, _ = run(capsys, "Signals-v0", "--episodes", 9, "--num-envs", 1)
    assert code == 130
    assert "INCOMPLETE: stopped by progress; still running: env 0: 10.0 in 4." in out
    assert "episodes  2 " in out


def test_videos_are_written_where_they_are_wanted(tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    code, out, err = run(
        capsys,
        "Picture-v0",
        "--episodes",
        3,
        "--video",
        "best,worst,2",
        "--out",
        tmp_path / "films",
    )
    assert (code, err) == (0, "")
    names = ["best-0-return-6.mp4", "worst-0-return-6.mp4", "episode-2-return-6.mp4"]
    assert [line for line in out.splitlines() if line.startswith("wrote")] == [
        f"wrote     {tmp_path / 'films' / name}" for name in names
    ]
    assert sorted(path.name for path in (tmp_path / "films").iterdir()) == sorted(names)


def test_videos_that_cannot_be_made_are_refused_before_or_told_after_the_result(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("imageio_ffmpeg")
    code, out, err = run(
        capsys, "Plain-v0", "--episodes", 3, "--video", "best", "--out", tmp_path
    )
    assert code == 2
    assert "return    6.00" in out
    assert "gives no pictures" in err
    (tmp_path / "file").touch()
    told = refused(
        capsys, "Plain-v0", "--video", "best", "--out", str(tmp_path / "file")
    )
    assert "used as a folder" in told or "not a folder" in told
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "pip install 'muster-rl[video]'" in refused(
        capsys, "Plain-v0", "--video", "best"
    )


def test_wrong_requests_are_refused_in_one_line(capsys):
    assert "Similar: CartPole" in refused(capsys, "CartPole-v11")
    assert "add --allow-import" in refused(capsys, "my_envs:Maze-v0")
    assert "there is no file" in refused(
        capsys, "CartPole-v1", "--policy", "net.safetensors"
    )
    assert "--episodes 0: expected at least 1" in refused(
        capsys, "CartPole-v1", "--episodes", 0
    )
    assert "--workers -1: expected at least 0" in refused(
        capsys, "CartPole-v1", "--workers", -1
    )
    assert "'longest' is none of best, worst, median" in refused(
        capsys, "CartPole-v1", "--video", "best,longest"
    )
    assert "'20' is none of" in refused(capsys, "CartPole-v1", "--video", "20")
    assert "less than one step of 8 environments" in refused(
        capsys, "CartPole-v1", "--max-frames", "7"
    )
