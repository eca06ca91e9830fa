"""The tables of docs/recipes/spaces.md, cell by cell."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorStack
from torch import nn

from muster import Collector, policies
from muster.errors import MusterError
from muster.testing import SpaceEnv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "spaces.md"
BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "Box": BOX,
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict(a=BOX, b=spaces.Discrete(3)),
    "Tuple": spaces.Tuple((BOX, spaces.Discrete(3))),
    "Text": spaces.Text(5),
    "Sequence": spaces.Sequence(spaces.Discrete(3)),
    "Graph": spaces.Graph(BOX, None),
    "OneOf": spaces.OneOf((BOX, BOX)),
}
OUTPUTS = {  # of the network, by head and space
    "categorical": {"Discrete": 5, "MultiDiscrete": 5, "MultiBinary": 8},
    "epsilon_greedy": {"Discrete": 5},
    "gaussian": {"Box": 3},
    "tanh_gaussian": {"Box": 6},
    "deterministic": {"Box": 3, "Discrete": 5},
}


def table(heading: str) -> dict[str, dict[str, str]]:
    """Cells by space and column."""
    text = PAGE.read_text("utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    head, _, *rows = re.findall(r"^\|(.*)\|$", text, re.M)
    names = [name.strip() for name in head.split("|")]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {
        line[0].strip("`"): dict(zip(names[1:], line[1:], strict=True))
        for line in cells
    }


def collected(observed: Any, acted: Any, policy: Any, **options: Any) -> Any:
    def make() -> SpaceEnv:
        return SpaceEnv(copy.deepcopy(observed), copy.deepcopy(acted))

    with Collector(
        make, policy, num_envs=2, frames_per_batch=8, seed=0, **options
    ) as collector:
        return collector.next()


def works(call: Any) -> str:
    try:
        call()
    except (MusterError, RuntimeError, TypeError, ValueError):
        return "no"
    return "yes"


def actions_of(name: str) -> Any:
    """Two actions of a space, as a policy returns them; None: they are objects."""
    space = copy.deepcopy(SPACES[name])
    space.seed(0)
    values = [space.sample() for _ in range(2)]
    if name == "Dict":
        return {
            key: torch.as_tensor(np.stack([v[key] for v in values])) for key in "ab"
        }
    if name == "Tuple":
        return {
            str(i): torch.as_tensor(np.stack([v[i] for v in values])) for i in range(2)
        }
    if name in ("Text", "Sequence", "Graph", "OneOf"):
        return NonTensorStack(*values)
    return torch.as_tensor(np.stack(values))


@pytest.mark.parametrize("name", SPACES)
def test_observations(name: str, tmp_path: Path) -> None:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    row = table("Observations")[name]
    space = SPACES[name]
    discrete = spaces.Discrete(2)
    batch = collected(space, discrete, None)
    if name == "Dict":
        assert row["in the batch"] == "an entry for each part, also nested"
        assert {"a", "b"} <= set(batch.keys())
    elif name == "Tuple":
        assert row["in the batch"] == 'entries `("observation", "0")`, ...'
        assert set(batch["observation"].keys()) == {"0", "1"}
    else:
        kind = "tensor" if torch.is_tensor(batch["observation"]) else "list"
        assert row["in the batch"] == kind
        assert kind == "tensor" or isinstance(batch["observation"], list)

    def recorded() -> None:
        collected(space, discrete, None, record=tmp_path / "a")

    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    found = {
        "in the batch": row["in the batch"],
        "modules and functions": works(
            lambda: collected(
                space, discrete, lambda obs: torch.zeros(2, dtype=torch.int64)
            )
        ),
        "recording": works(recorded),
        "TorchRL's `LazyTensorStorage`": works(
            lambda: collected(space, discrete, None, replay_buffer=buffer)
        ),
    }
    assert found == row


@pytest.mark.parametrize("name", SPACES)
def test_actions(name: str) -> None:
    space = SPACES[name]
    found = {"`policy=None`": works(lambda: collected(BOX, space, None))}
    for head, outputs in OUTPUTS.items():
        policy = getattr(policies, head)(nn.Linear(3, outputs.get(name, 3)))
        found[f"`{head}`"] = works(lambda policy=policy: collected(BOX, space, policy))
    actions = actions_of(name)
    found["modules and functions"] = works(
        lambda: collected(BOX, space, lambda obs: actions)
    )
    found["TensorDict modules"] = works(
        lambda: collected(BOX, space, lambda td: td.set("action", actions))
    )
    assert found == table("Actions")[name]


def test_the_tables_have_all_spaces_of_gymnasium() -> None:
    assert list(table("Observations")) == list(table("Actions")) == list(SPACES)
    public = {
        name
        for name in spaces.__all__
        if isinstance(getattr(spaces, name), type)
        and issubclass(getattr(spaces, name), spaces.Space)
    }
    assert public - {"Space"} == set(SPACES)
