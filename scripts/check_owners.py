"""Check that state has owners: few attributes in each class, which others do not assign to.

    python scripts/check_owners.py [--writes] [FOLDER]

- ``OWNERS`` says for a name, such as ``group``, which files may assign to attributes of what is called
  so: ``group.x = 1`` and ``self.group.x += 1`` are found, ``group.forget()`` is how others say what
  happened.
- A class in one of ``FOLDERS`` has at most ``MOST_ATTRIBUTES`` attributes, those of the class and of
  its instances together. Records (dataclasses) are free.
- All assignments to attributes of an object other than ``self`` and ``cls`` are at most
  ``MOST_FOREIGN_WRITES``; ``--writes`` lists them.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OWNERS = {
    "group": "rollout/",
    "lane": "memory/slots.py",
    "running": "rollout/running.py",
    "tally": "rollout/tally.py",
}
FOLDERS = ("rollout", "collectors", "workers", "cluster", "envs")
MOST_ATTRIBUTES = 15
MOST_FOREIGN_WRITES = 138  # may only be lowered


class Write(NamedTuple):
    """An assignment to an attribute.

    Attributes:
        line: line of the statement.
        owner: the object, as it is written.
        attribute: name of the attribute.
    """

    line: int
    owner: str
    attribute: str

    @property
    def is_foreign(self) -> bool:
        """Whether a method of the object would not be written so."""
        return self.owner not in ("self", "cls")

    @property
    def target(self) -> str:
        """What is assigned to, as it is written."""
        return f"{self.owner}.{self.attribute}"


def main(folder: Path, *, lists_writes: bool = False) -> int:
    """Print every problem; 1 if there is one."""
    problems = []
    foreign = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        for write in writes(tree):
            if write.is_foreign:
                foreign.append(f"{inside}:{write.line}: {write.target}")
            name = write.owner.rpartition(".")[2]
            if name in OWNERS and not inside.startswith(OWNERS[name]):
                problems.append(
                    f"{inside}:{write.line}: assigns to {write.target}, which only"
                    f" {OWNERS[name]} may: call a method that says what happened"
                )
        if inside.startswith(tuple(f"{name}/" for name in FOLDERS)):
            problems += [f"{inside}:{problem}" for problem in wide_classes(tree)]
    if lists_writes:
        print("\n".join(foreign))
    if len(foreign) > MOST_FOREIGN_WRITES:
        problems.append(
            f"{folder}: {len(foreign)} assignments to attributes of other objects, expected at"
            f" most {MOST_FOREIGN_WRITES}. Call a method of the object that says what happened,"
            " return the value, or make a record with all its fields; --writes lists all"
            " assignments"
        )
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


def writes(tree: ast.AST) -> Iterator[Write]:
    """Return every assignment to an attribute."""
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute):
                yield Write(target.lineno, ast.unparse(target.value), target.attr)


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Return everything that a statement assigns to."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        found = [node.target]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        elif isinstance(target, ast.Starred):
            found.append(target.value)
        else:
            yield target


def wide_classes(tree: ast.AST) -> Iterator[str]:
    """Return line and description of every class with too many attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or is_record(node):
            continue
        names = attributes(node)
        if len(names) > MOST_ATTRIBUTES:
            yield (
                f"{node.lineno}: {node.name} has {len(names)} attributes, expected at most"
                f" {MOST_ATTRIBUTES}: {', '.join(sorted(names))}. Find those that change"
                " together, and make them an object of its own, with the methods that change"
                " them"
            )


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass."""
    return any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes of a class and of its instances."""
    names = {write.attribute for write in writes(node) if write.owner == "self"}
    for statement in node.body:
        for target in targets(statement):
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src" / "muster")
    parser.add_argument("--writes", action="store_true", help="list foreign writes")
    options = parser.parse_args()
    sys.exit(main(options.folder, lists_writes=options.writes))
