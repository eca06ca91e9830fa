"""Check that no class name is used twice in the package: one name means one thing.

    python scripts/check_names.py [FOLDER]

A compat layer may use a name again that the modules beside it offer as another system's
(``__all__``).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_OTHERS = "compat"  # its classes have the names that other systems gave them


def main(folder: Path) -> int:
    """Print every class name that is used twice; 1 if there is one."""
    trees = {
        path: ast.parse(path.read_text("utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }
    problems = repeated_names(folder, trees)
    for problem in sorted(problems):
        print(problem)
    return 1 if problems else 0


def repeated_names(folder: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """Return a sentence for every class that has the name of another."""
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        borrowed = borrowed_names(folder, path, trees)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in borrowed:
                places.setdefault(node.name, []).append(f"{shown(path)}:{node.lineno}")
    return [
        f"{where[0]}: there is another class {name}, in {', '.join(where[1:])}: one name means one thing"
        for name, where in places.items()
        if len(where) > 1
    ]


def borrowed_names(folder: Path, path: Path, trees: dict[Path, ast.Module]) -> set[str]:
    """Return what the modules beside this one offer as another system's names: their ``__all__``."""
    if path.relative_to(folder).parts[0] != OF_OTHERS:
        return set()
    return {
        name
        for other, tree in trees.items()
        if other.parent == path.parent
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def shown(path: Path) -> str:
    """Return the path as seen from the root of the project."""
    path = path.resolve()
    return (
        path.relative_to(ROOT).as_posix()
        if path.is_relative_to(ROOT)
        else path.as_posix()
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "muster"))
