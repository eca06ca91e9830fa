"""Private names of other packages: each is listed in a decision, and Muster works without them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "muster"
DECISION = ROOT / "docs" / "decisions" / "0018-private-names.md"

# Private names of Muster's own that one of its files uses on objects of another.
FRIENDS = {"_actor", "_engine", "_exclusively", "_on_demand", "_primed", "_weights"}
# Private names in texts that are keys, prefixes or fields of Muster's own.
TEXTS = {"_max", "_mean", "_min", "_on_", "_out", "_sources", "_std"}


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and name.isidentifier()
        and not name.endswith("__")
        and name.strip("_") != ""
    )


def definitions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_self(node.value)
        ):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads, and parts of f-strings."""
    yield node
    for name, value in ast.iter_fields(node):
        if (
            name == "body"
            and isinstance(node, ast.If)
            and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            continue
        if name in ("annotation", "returns") or (
            name == "values" and isinstance(node, ast.JoinedStr)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from executed(child)


def foreign(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private names in a file that are not Muster's: attributes, imports, and texts that name
    attributes.

    Args:
        tree: of the file.
        ours: names that any file of Muster defines.
    """
    here, found = set(definitions(tree)), set[str]()
    for node in executed(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            known = node.attr in (
                ours | TEXTS if _is_self(node.value) else here | FRIENDS
            )
            found |= set() if known else {node.attr}
        elif isinstance(node, ast.Import):
            found |= {
                part
                for name in node.names
                for part in name.name.split(".")
                if is_private(part)
            }
        elif isinstance(node, ast.ImportFrom) and not f"{node.module}.".startswith(
            "muster."
        ):
            parts = [
                *(node.module or "").split("."),
                *(name.name for name in node.names),
            ]
            found |= {part for part in parts if is_private(part)}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and is_private(node.value)
        ):
            found |= {node.value} - here - TEXTS
    return found


def used() -> dict[str, set[str]]:
    """Files by the foreign private names in them."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    ours = {name for tree in trees.values() for name in definitions(tree)}
    names: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in foreign(tree, ours):
            names.setdefault(name, set()).add(path.relative_to(SOURCE).as_posix())
    return names


def listed() -> dict[str, set[str]]:
    """The same from the decision's tables, whose first columns are names and files."""
    names: dict[str, set[str]] = {}
    for line in DECISION.read_text().splitlines():
        cells = line.split("|")
        if len(cells) > 3:
            for name in re.findall(r"`(?:[\w.]*\.)?(_\w+)`", cells[1]):
                names.setdefault(name, set()).update(
                    re.findall(r"`([\w/]+\.py)`", cells[2])
                )
    return names


def test_every_private_name_of_another_package_is_listed_with_its_files() -> None:
    found, said = used(), listed()
    assert sorted(found.keys() - said.keys()) == [], (
        "new: prefer a public name, else add it to the decision"
    )
    assert sorted(said.keys() - found.keys()) == [], (
        "not used any more: take it out of the decision"
    )
    assert {
        name: files ^ said[name] for name, files in found.items() if files != said[name]
    } == {}


def test_the_scan_sees_imports_attributes_and_texts() -> None:
    code = """
from ray._private import services
import _signal
class Ours:
    def __init__(self): self._own = other._own
    def call(self, env): return self._own, self._inherited, env._env, getattr(env, "_hidden")
    def more(self): return vector._envs[0], f._friend()
"""
    assert foreign(ast.parse(code), {"_own", "_envs"}) == {
        *("_private", "_signal", "_inherited", "_env", "_hidden", "_envs", "_friend")
    }
