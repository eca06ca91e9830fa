"""What runs between ``next()`` and the batch, in this process: which functions, and how many calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import muster
from muster import Collector

ROOT = Path(muster.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
BATCHES = 64


def head() -> Any:
    layers = [torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)]
    return muster.policies.categorical(torch.nn.Sequential(*layers))


def profiled(policy: Any, on_call: Callable[[FrameType], None]) -> None:
    """Batches of one step, after some others, with every call of a Python function."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            on_call(frame)

    with Collector("CartPole-v1", policy, frames_per_batch=1, seed=0) as collector:
        batches = iter(collector)
        for _ in range(32):
            next(batches)
        sys.setprofile(profile)
        try:
            for _ in range(BATCHES):
                next(batches)
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("policy", [head, lambda: None], ids=["head", "random"])
def test_a_batch_of_one_step_makes_at_most_150_calls(policy):
    calls = []
    profiled(policy(), lambda frame: calls.append(frame.f_code))
    assert len(calls) / BATCHES <= 150


def place(code: CodeType) -> tuple[str, str] | None:
    """File and name of a function of Muster's; None: it is another one."""
    path = Path(code.co_filename)
    return (path.relative_to(ROOT).as_posix(), code.co_name) if path.is_relative_to(ROOT) else None


def leads_somewhere(code: CodeType) -> bool:
    """It acts, steps, or makes a ``TensorDict``."""
    here = place(code)
    if here is None:
        return code.co_filename.endswith("tensordict/_td.py")
    return here[0].startswith(("policies/", "envs/")) and here[1].startswith(("act", "step"))


def test_the_control_path_is_the_one_of_the_architecture_page():
    path: dict[tuple[str, str], None] = {}

    def note(frame: FrameType) -> None:
        if not leads_somewhere(frame.f_code):
            return
        below, callers = frame.f_back, []
        while below is not None:
            if (here := place(below.f_code)) is not None and not here[0].startswith(("policies/", "envs/")):
                callers.append(here)
            below = below.f_back
        path.update(dict.fromkeys(reversed(callers)))

    profiled(head(), note)
    section = ARCHITECTURE.read_text().partition("### The control path")[2].partition("\n\nA batch of one step")[0]
    listed = re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", section, re.MULTILINE)
    assert list(path) == [(file, name.rpartition(".")[2]) for name, file in listed]
    assert len(path) <= 10
    assert len({file for file, _ in path}) <= 6
