"""The public names with their parameters: to add or remove one is a decision, not an accident."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import muster
from tests.public_api import FILE, describe


def test_public_names_parameters_and_defaults():
    """After a decision to change one: ``python -m tests.public_api``, and a line in CHANGELOG.md."""
    assert describe() == FILE.read_text().splitlines()


@pytest.mark.parametrize("name", muster.__all__)
def test_name_resolves(name):
    assert getattr(muster, name) is not None


def test_dir_shows_the_public_names():
    assert set(muster.__all__) <= set(dir(muster))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = muster.no_such_name


BLOCKED = [
    *(
        "ray",
        "torchrl",
        "tianshou",
        "submitit",
        "jax",
        "envpool",
        "pettingzoo",
        "dm_env",
        "stable_baselines3",
    ),
    *("ale_py", "imageio_ffmpeg", "tensorboard", "rich", "tyro", "minari", "pyarrow"),
]

WITHOUT_EXTRAS = f"""
import importlib, json, pkgutil, sys, warnings
sys.modules.update(dict.fromkeys({BLOCKED!r}))
import muster

packages = ["muster", *(m.name for m in pkgutil.walk_packages(muster.__path__, "muster.") if m.ispkg)]
told = dict(absent={{}}, shown=[], refused={{}})
for name in packages:
    try:
        module = importlib.import_module(name)
        exec(f"from {{name}} import *", {{}})
    except ImportError as error:
        told["absent"][name] = error.name.partition(".")[0]
        continue
    assert all(hasattr(module, public) for public in [*getattr(module, "__all__", ()), *dir(module)]), name
    assert not hasattr(module, "no_such_name"), name
    told["shown"].append(name)

warnings.simplefilter("ignore", DeprecationWarning)
for factory in (
    lambda: muster.weights.RayWeightUpdater(None, []),
    lambda: muster.RayBuffer(list),
    lambda: muster.RayCollector("CartPole-v1", None, frames_per_batch=8, num_collectors=1),
    lambda: muster.TensorBoardLogger("unused"),
):
    try:
        factory()
    except muster.errors.BadOption as error:
        told["refused"][str(error)] = type(error.__cause__).__name__
print(json.dumps(told))
"""


def test_without_extras_every_public_name_is_there_and_says_what_it_needs_when_it_is_used():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # What stands in for another library says which one is missing, as that library's own import
    # would.
    assert told["absent"] == {
        "muster.compat.sb3": "stable_baselines3",
        "muster.compat.tianshou": "tianshou",
        "muster.compat.torchrl": "torchrl",
        "muster.compat.torchrl.collectors": "torchrl",
    }
    assert {
        "muster",
        "muster.weights",
        "muster.policies",
        "muster.compat.rlpyt",
    } <= set(told["shown"])
    assert len(told["refused"]) == 4
    assert all("pip install 'muster-rl[" in message for message in told["refused"]), (
        told["refused"]
    )
    assert set(told["refused"].values()) == {"ModuleNotFoundError"}
