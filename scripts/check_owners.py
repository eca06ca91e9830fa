"""Check that what has an owner is changed by its owner only.

    python scripts/check_owners.py [FOLDER]

``OWNERS`` says for a name, such as ``group``, which files may assign to attributes of what is called
so: ``group.x = 1`` and ``self.group.x += 1`` are found, ``group.forget()`` is how others say what
happened.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWNERS = {
    "group": "rollout/",
    "lane": "memory/slots.py",
    "running": "rollout/running.py",
    "tally": "rollout/tally.py",
}


def main(folder: Path) -> int:
    """Print every assignment by another file; 1 if there is one."""
    problems = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).as_posix()
        for line, name, target in assignments(ast.parse(path.read_text("utf-8"))):
            if not inside.startswith(OWNERS[name]):
                problems.append(
                    f"{inside}:{line}: assigns to {target}, which only {OWNERS[name]} may: call a"
                    " method that says what happened"
                )
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


def assignments(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Return line, name and target of every assignment to an attribute of something owned."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        while targets:
            target = targets.pop()
            if isinstance(target, (ast.Tuple, ast.List)):
                targets += target.elts
            elif isinstance(target, ast.Attribute):
                name = ast.unparse(target.value).rpartition(".")[2]
                if name in OWNERS:
                    yield node.lineno, name, ast.unparse(target)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "muster"))
