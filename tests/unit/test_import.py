"""What `import muster` costs, and what adapters of other packages do: one interpreter, asked three
times.
"""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "tensordict", "gymnasium", "rich", "tyro", "torchrl")
ADAPTERS = {"dm_env": "dm_env", "envpool": "envpool", "sb3": "stable_baselines3"}

PROGRAM = f"""
import importlib, json, sys

def loaded():
    return [name for name in {HEAVY!r} if name in sys.modules]

import muster
first = loaded()
from muster import Collector, policies
second = loaded()
took = [importlib.import_module("muster.envs." + name).takes(3) for name in {list(ADAPTERS)!r}]
print(json.dumps([first, second, took, [name for name in {list(ADAPTERS.values())!r} if name in sys.modules]]))
"""


def test_importing_loads_nothing_that_is_not_used_yet() -> None:
    # -W error: whatever warns while Muster is imported is an exception here.
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    bare, with_collector, took, packages = json.loads(done.stdout)
    assert bare == []
    assert (took, packages) == ([False] * len(ADAPTERS), []), (
        "nobody imports a package to see whether it is its own"
    )
    assert set(with_collector).isdisjoint({"tensordict", "rich", "tyro", "torchrl"})
