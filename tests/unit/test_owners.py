"""``scripts/check_owners.py``: who may assign to which attributes, and how many a class has."""

import importlib.util
from pathlib import Path

import pytest

import muster

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


MOST = check_owners.MOST_ATTRIBUTES


def class_of(instance: int, of_class: int = 0, mark: str = "") -> str:
    """A class with attributes of instances and of the class."""
    lines = [mark, "class Wide:"]
    lines += [f"    of_class_{n}: int = {n}" for n in range(of_class)]
    lines += ["    def __init__(self):", "        x = 0"]
    lines += [f"        self.a_{n} = x" for n in range(instance)]
    return "\n".join(lines) + "\n"


def check_class(folder: Path, inside: str, text: str) -> int:
    (folder / inside).parent.mkdir(parents=True)
    (folder / inside).write_text(text)
    return check_owners.main(folder)


@pytest.mark.parametrize("folder", check_owners.FOLDERS)
def test_a_wide_class_is_found(tmp_path, capsys, folder):
    assert check_class(tmp_path, f"{folder}/wide.py", class_of(MOST + 1)) == 1
    said = capsys.readouterr().out
    assert f"{folder}/wide.py:2: Wide has {MOST + 1} attributes" in said
    assert f"expected at most {MOST}: a_0, a_1, a_10" in said
    assert "make them an object of its own" in said


def test_attributes_of_the_class_and_of_instances_count_together(tmp_path):
    assert check_class(tmp_path, "workers/wide.py", class_of(MOST, 1)) == 1


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("rollout/wide.py", class_of(MOST)),
        ("rollout/wide.py", class_of(MOST - 1, 1)),
        ("rollout/wide.py", class_of(MOST + 1, mark="@dataclass(frozen=True)")),
        ("episodes/wide.py", class_of(MOST + 1)),
        ("rollouts/wide.py", class_of(MOST + 1)),
    ],
    ids=["most", "most together", "a record", "another folder", "a longer name"],
)
def test_other_classes_are_free(tmp_path, inside, text):
    assert check_class(tmp_path, inside, text) == 0


@pytest.mark.parametrize(
    "line",
    ["self.a, self.b = x", "self.a = self.b = x", "self.a: int = x; self.b += x"],
)
def test_every_kind_of_assignment_makes_an_attribute(tmp_path, line):
    text = class_of(MOST - 1) + f"        {line}\n"
    assert check_class(tmp_path, "envs/wide.py", text) == 1


def test_every_kind_of_foreign_write_is_listed(tmp_path, capsys):
    own = "self.a = cls.b = 1"
    foreign = ["a.b = 1", "a.c, (a.d, *a.e) = x", "a.f += 1", "self.a.g: int = 1"]
    (tmp_path / "some.py").write_text("\n".join([own, *foreign]))
    assert check_owners.main(tmp_path, lists_writes=True) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "some.py:2: a.b",
        "some.py:3: a.c",
        "some.py:3: a.d",
        "some.py:3: a.e",
        "some.py:4: a.f",
        "some.py:5: self.a.g",
    ]


def test_more_foreign_writes_than_today_are_refused(tmp_path, capsys):
    most = check_owners.MOST_FOREIGN_WRITES
    (tmp_path / "some.py").write_text("a.b = 1\n" * most)
    assert check_owners.main(tmp_path) == 0
    (tmp_path / "other.py").write_text("a.b = 1\n")
    assert check_owners.main(tmp_path) == 1
    assert f"{most + 1} assignments to attributes" in capsys.readouterr().out


def test_the_project_keeps_its_own_rules():
    assert check_owners.MOST_FOREIGN_WRITES < 150
    assert check_owners.main(Path(muster.__file__).parent) == 0
