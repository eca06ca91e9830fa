"""Environments whose step is a Warp kernel: ``examples/warp_env.py``. Needs ``pip install warp-lang``,
which is not a requirement of the tests (150 MB).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from muster import Collector
from muster.testing import EnvContract

pytest.importorskip("warp")

from examples import warp_env
from examples.warp_env import WarpPendulum


class TestWarpPendulum(EnvContract):
    num_envs = None
    steps = 40

    def make_env(self) -> Any:
        return WarpPendulum(3, "cpu", length=15)


def test_the_kernel_moves_pendulums_as_gymnasium_does():
    B, T = 4, 120
    with Collector(
        WarpPendulum(B, "cpu", length=100), None, frames_per_batch=B * T, seed=0
    ) as collector:
        batch = collector.next()
    env: Any = gymnasium.make("Pendulum-v1").unwrapped
    after = batch["next"]
    for b in range(B):
        for t in range(0, T, 7):
            cos, sin, velocity = batch["observation"][b, t].tolist()
            env.reset()
            env.state = np.array([np.arctan2(sin, cos), velocity])
            obs, reward, *_ = env.step(batch["action"][b, t].numpy())
            np.testing.assert_allclose(after["observation"][b, t], obs, atol=1e-4)
            assert after["reward"][b, t].item() == pytest.approx(
                float(reward), abs=2e-3
            )
    ends = (torch.arange(T) == 99).expand(B, -1)
    assert torch.equal(after["truncated"][..., 0], ends)
    assert not after["terminated"].any()


def test_the_example_runs(capsys):
    assert -17 < warp_env.main(["--device", "cpu", "--envs", "16"]) < 0
    assert "32 episodes" in capsys.readouterr().out
