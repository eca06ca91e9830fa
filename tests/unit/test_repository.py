"""What runs on the code host: workflows, the package's metadata, results of benchmarks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return found


def commands() -> list[str]:
    return [
        step["run"]
        for path in WORKFLOWS
        for job in jobs(path).values()
        for step in job["steps"]
        if "run" in step
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_the_hash_of_a_commit(path):
    """A tag can be moved; the comment says which one it was."""
    lines = [line for line in path.read_text("utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(
            r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line
        ), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends(path):
    parsed = yaml.safe_load(path.read_text("utf-8"))
    assert parsed["permissions"] == {"contents": "read"}
    for job in parsed["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_one_action_has_one_version():
    used = {
        use.partition("@")[0]: set()
        for path in WORKFLOWS
        for use in re.findall(r"uses: (\S+)", path.read_text("utf-8"))
    }
    for path in WORKFLOWS:
        for use in re.findall(r"uses: (\S+)", path.read_text("utf-8")):
            name, _, commit = use.partition("@")
            used[name].add(commit)
    assert {name: len(commits) for name, commits in used.items()} == dict.fromkeys(
        used, 1
    )


def test_pull_requests_run_parts_of_ci_run():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["rest"]["strategy"][
        "matrix"
    ]["target"]
    targets = {
        *(
            name
            for run in commands()
            for name in re.findall(r"\bmake (?:-k )?([a-z][\w-]*)", run)
        ),
        *matrix,
    }
    assert {
        "check",
        "test",
        "test-rest",
        "recipes",
        "docs",
        "docs-test",
        "dist",
    } <= targets
    for name in targets:
        assert re.search(rf"^[\w\s-]*\b{name}\b[^:\n]*:", makefile, re.M), name
        assert re.search(rf"^make {name}\b", script, re.M), name


def test_the_versions_of_python_and_torch_are_those_of_the_project():
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"][
        "matrix"
    ]
    run = {*matrix["python"], *(one["python"] for one in matrix["include"])}
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(classified) <= run
    torch = re.search(
        r"^torch==\S+", (ROOT / "constraints.txt").read_text("utf-8"), re.M
    )
    assert torch is not None
    for path in WORKFLOWS:
        for found in re.findall(r"torch==[\d.]+", path.read_text("utf-8")):
            assert found == torch[0]


def test_all_has_every_extra_for_users():
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("muster-rl[").removesuffix("]").split(","))
    ours = {"all", "bench", "dev", "docs", "recipes", "release", "site", "test"}
    assert named == extras.keys() - ours - {"envpool", "jax"}


def test_results_of_benchmarks_are_named_alike_and_used():
    texts = [
        path.read_text("utf-8")
        for folder in ("docs", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py")
    ]
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert re.fullmatch(r"[a-z][a-z0-9_]*\.json", path.name), path.name
        assert any(path.stem in text for text in texts), f"nothing mentions {path.name}"
