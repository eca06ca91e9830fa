"""What `import muster` costs: one interpreter, asked twice."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "tensordict", "gymnasium", "rich", "tyro", "torchrl")

PROGRAM = f"""
import json, sys

def loaded():
    return [name for name in {HEAVY!r} if name in sys.modules]

import muster
first = loaded()
from muster import Collector, policies
print(json.dumps([first, loaded()]))
"""


def test_importing_loads_nothing_that_is_not_used_yet() -> None:
    # -W error: whatever warns while Muster is imported is an exception here.
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    bare, with_collector = json.loads(done.stdout)
    assert bare == []
    assert set(with_collector).isdisjoint({"tensordict", "rich", "tyro", "torchrl"})
