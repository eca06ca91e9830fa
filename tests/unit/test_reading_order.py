"""Folders whose modules can be read one after another: none imports one that imports it, types
included.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

import muster
from muster import workers

SOURCE = Path(muster.__file__).parent

# Add a folder as soon as it is free of circles.
FREE_OF_CIRCLES = [
    "cli",
    "cluster",
    "collectors",
    "envs",
    "episodes",
    "evaluation",
    "memory",
    "observing",
    "policies",
    "recording",
    "restore",
    "rollout",
    "serving",
    "tuning",
    "utils",
    "vector",
    "weights",
    "workers",
]


def imports(folder: str) -> dict[str, set[str]]:
    """Return the modules of a folder that each of its modules imports anywhere."""
    package = f"muster.{folder}"
    modules = {path.stem: path for path in (SOURCE / folder).glob("*.py")}
    del modules["__init__"]
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module == package:
                found[name] |= {alias.name for alias in node.names} & modules.keys()
            elif node.module.startswith(f"{package}."):
                found[name].add(
                    node.module.removeprefix(f"{package}.").partition(".")[0]
                )
    return found


@pytest.mark.parametrize("folder", FREE_OF_CIRCLES)
def test_there_is_no_circle(folder: str) -> None:
    graphlib.TopologicalSorter(imports(folder)).prepare()  # raises CycleError


def test_the_list_of_the_workers_folder_is_its_reading_order() -> None:
    order = re.findall(r"^    (\w+): ", workers.__doc__ or "", re.MULTILINE)
    found = imports("workers")
    assert sorted(order) == sorted(found)
    for place, name in enumerate(order):
        assert found[name] <= set(order[:place]), name
