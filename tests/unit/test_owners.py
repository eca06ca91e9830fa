"""``scripts/check_owners.py``: who may assign to the attributes of groups, lanes and rollouts."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_owners.py"
SPEC = importlib.util.spec_from_file_location("check_owners", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
check_owners = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_owners)


@pytest.mark.parametrize(
    "line",
    [
        "group.rule = None",
        "self.group.rule = None",
        "worker.group.rows += 1",
        "a, group.rule = 1, 2",
        "[a, (b, group.rule)] = x",
        "group.rule: int = 1",
        "a = group.rule = 3",
    ],
)
def test_an_assignment_from_outside_is_found(tmp_path, capsys, line):
    (tmp_path / "workers.py").write_text(
        f"def change(self, group, worker, x):\n    {line}\n"
    )
    assert check_owners.main(tmp_path) == 1
    assert "workers.py:2: assigns to" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["group.rule()", "group.rows[0] = 1", "x = group.rule", "group = 1"]
)
def test_reading_calling_and_writing_into_memory_are_free(tmp_path, line):
    (tmp_path / "workers.py").write_text(f"def change(group):\n    {line}\n")
    assert check_owners.main(tmp_path) == 0


def test_the_owner_may(tmp_path):
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "group.py").write_text(
        "def change(group):\n    group.rule = 1\n"
    )
    assert check_owners.main(tmp_path) == 0
