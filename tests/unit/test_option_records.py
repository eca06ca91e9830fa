"""Each option is declared once, in a record that the rooms read by attribute: renaming it at its
declaration fails.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster
from muster.collectors.multi_options import MultiOptions
from muster.collectors.options import CollectorOptions
from muster.collectors.signatures import passes_on
from muster.rollout.options import Execution, RolloutOptions
from muster.utils.checked import base_part
from muster.workers.options import SupervisionOptions, WorkerOptions

ROOT = Path(muster.__file__).parents[2]
RECORDS = {
    "rollout/options.py": ("Execution", "RolloutOptions"),
    "workers/options.py": ("WorkerOptions", "Restart", "SupervisionOptions"),
    "collectors/batch_options.py": ("Trajectories", "BatchOptions"),
    "collectors/options.py": ("Autosave", "Watch", "CollectorOptions"),
    "collectors/multi_options.py": ("CentralInference", "PoolOptions", "MultiOptions"),
    "collectors/cluster_options.py": ("ClusterOptions",),
    "collectors/clusters.py": (
        "JoiningOptions",
        "DistributedOptions",
        "RPCOptions",
        "RayOptions",
    ),
}


def fields(source: str, records: tuple[str, ...]) -> Iterator[ast.Name]:
    """Yield the names of the fields where these records declare them."""
    for cls in ast.parse(source).body:
        if isinstance(cls, ast.ClassDef) and cls.name in records:
            for line in cls.body:
                if isinstance(line, ast.AnnAssign) and isinstance(
                    line.target, ast.Name
                ):
                    special = line.target.id == "_" or "ClassVar" in ast.unparse(
                        line.annotation
                    )
                    if not special:
                        yield line.target


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_renaming_any_option_at_its_declaration_fails_in_mypy(tmp_path):
    pytest.importorskip("mypy")
    package = tmp_path / "src" / "muster"
    shutil.copytree(
        ROOT / "src" / "muster", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    renamed = set()
    for path, records in RECORDS.items():
        file = package / path
        source = file.read_text("utf-8")
        lines = source.splitlines()
        for name in fields(source, records):
            line = lines[name.lineno - 1]
            lines[name.lineno - 1] = f"    renamed_{line.lstrip()}"
            renamed.add(name.id)
        file.write_text("\n".join(lines) + "\n", "utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "src/muster"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    noticed = set(re.findall(r'has no attribute "(\w+)"', checked.stdout))
    noticed |= set(re.findall(r'Unexpected keyword argument "(\w+)"', checked.stdout))
    assert len(renamed) > 80
    assert not renamed - noticed, checked.stdout[-2000:] + checked.stderr


def test_names_that_are_passed_on_are_options():
    with pytest.raises(AttributeError, match="there are no options frames_per_bach"):
        passes_on(MultiOptions, names=["frames_per_batch", "frames_per_bach"])


def test_each_record_has_the_options_of_its_bases_and_their_checks():
    options = MultiOptions(
        None,
        frames_per_batch=8,
        max_frames_per_traj=-1,
        execution=Execution(executor=False),
    )
    for base in (RolloutOptions, WorkerOptions, SupervisionOptions):
        part = base_part(base, options)
        assert type(part) is base
        assert all(
            getattr(options, name) == value for name, value in vars(part).items()
        )
    assert base_part(WorkerOptions, options).max_frames_per_traj is None
    with pytest.raises(
        TypeError, match="CollectorOptions does not extend SupervisionOptions"
    ):
        base_part(SupervisionOptions, CollectorOptions(None))
