"""Muster's compat layer of prt_rl against what prt_rl 0.6.3 returned: recorded, and live where it
is installed.

Two things are not the same on purpose: ``last_value_est`` where the last step ended an episode, and
what the tracker says of an episode that began after a cut.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.compat.prt_rl import Collector
from tests.fakes.prt_rl_parts import CASES, run

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("prt_rl_recorded.json").read_text("utf-8")
)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], case: str) -> None:
    """Raise where they are not the same and should be."""
    cut = False
    for mine, other, (kind, _) in zip(ours, theirs, CASES[case][-1], strict=True):
        cut = cut or kind == "trajectory"
        if "last_value_est" in other["values"]:
            N = len(other["values"]["last_value_est"])
            over = torch.tensor(other["values"]["done"]).reshape(-1, N, 1)[-1]
            values = torch.tensor(other["values"]["last_value_est"]).masked_fill(
                over, 0
            )
            other["values"]["last_value_est"] = values.tolist()
        if cut:
            del mine["last"], other["last"]
        assert mine == other


def test_every_case_was_recorded() -> None:
    assert RECORDED.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_compat_returns_what_prt_rl_returned(case: str) -> None:
    same(run(Collector, case), RECORDED[case], case)


@pytest.mark.skipif(
    importlib.util.find_spec("prt_rl") is None, reason="prt_rl is not installed"
)
def test_the_compat_returns_what_prt_rl_returns_today() -> None:
    theirs = importlib.import_module("prt_rl.common.collectors").Collector
    for case in CASES:
        same(run(Collector, case), run(theirs, case), case)
