"""Check the size budget: the longest file, function and class, the whole, and that no class name is used twice.

    python scripts/check_size.py [FOLDER]

A limit may be passed by what ``docs/decisions/size-exceptions.md`` names, up to the number it allows
and with its reason. An entry that is no longer needed is an error too.

The table of folders shows where the lines are, next to the budget that the design gives each of them. Only the
total is checked, against ``MOST_LINES``: lower it when the tree has become smaller.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "docs" / "decisions" / "size-exceptions.md"

LIMITS = {"file lines": 500, "function lines": 60, "public methods": 12, "inheritance depth": 1}

MOST_LINES = 50_442

# Lines by folder. A group of several folders has one budget; "." is the modules beside the folders.
BUDGETS = {
    (".", "utils"): 750,
    ("memory",): 800,
    ("envs",): 3_600,
    ("policies",): 2_300,
    ("rollout",): 1_800,
    ("episodes",): 1_000,
    ("observing", "testing"): 1_600,
    ("weights",): 1_000,
    ("restore",): 1_600,
    ("workers",): 4_200,
    ("cluster",): 3_000,
    ("collectors",): 2_200,
    ("evaluation", "tuning"): 1_400,
    ("recording",): 700,
    ("compat",): 3_800,
    ("cli",): 1_300,
}
OF_OTHERS = "compat"  # its classes have the names that other systems gave them

# Deriving from these is how Python spells an interface, an error, or a network: it is not reuse.
INTERFACES = {"Protocol", "ABC", "Exception", "BaseException", "Module"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Size:
    """One measured thing. ``name`` is ``path``, ``path:function`` or ``path:Class``."""

    name: str
    line: int
    kind: str
    value: int


def main(folder: Path) -> int:
    """Print what is over its limit; 1 if anything is."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))}
    sizes = [size for path, tree in trees.items() for size in measure(path, tree)]
    sizes += depths(trees)
    allowed = read_exceptions(EXCEPTIONS) if EXCEPTIONS.exists() else {}

    problems, used = [], set()
    for size in sizes:
        limit = LIMITS[size.kind]
        if size.value <= limit:
            continue
        key = (size.name, size.kind)
        if size.value <= allowed.get(key, limit):
            used.add(key)
            continue
        where, _, what = size.name.partition(":")
        problems.append(
            f"{where}:{size.line}: {what or 'file'}: {size.value} {size.kind}, limit {allowed.get(key, limit)}"
        )
    for name, kind in allowed.keys() - used:
        problems.append(f"{shown(EXCEPTIONS)}: `{name}`, {kind}: nothing needs this exception any more, remove it")

    problems += repeated_names(folder, trees)
    lines = by_folder(folder, sizes)
    if sum(lines.values()) > MOST_LINES:
        problems.append(f"{shown(folder)}: {sum(lines.values()):,} lines, limit {MOST_LINES:,}")

    print(table(lines))
    print("\n".join(sorted(problems)), end="\n" if problems else "")
    print(totals(trees, sizes))
    if problems:
        print(f"{len(problems)} over budget. Split it, or give the reason in {shown(EXCEPTIONS)}.")
    return 1 if problems else 0


def repeated_names(folder: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """A word for every class that has the name of another: one name means one thing."""
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        borrowed = borrowed_names(folder, path, trees)
        for _, node in definitions(tree):
            if isinstance(node, ast.ClassDef) and node.name not in borrowed:
                places.setdefault(node.name, []).append(f"{shown(path)}:{node.lineno}")
    return [
        f"{where[0]}: there is another class {name}, in {', '.join(where[1:])}: one name means one thing"
        for name, where in places.items()
        if len(where) > 1
    ]


def borrowed_names(folder: Path, path: Path, trees: dict[Path, ast.Module]) -> set[str]:
    """What the modules beside this one offer as another system's names: their ``__all__``."""
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


def by_folder(folder: Path, sizes: list[Size]) -> dict[tuple[str, ...], int]:
    """Lines of each group of ``BUDGETS``; a folder without a budget is a group of its own."""
    groups = {name: group for group in BUDGETS for name in group}
    lines = dict.fromkeys(BUDGETS, 0)
    for size in sizes:
        if size.kind == "file lines":
            inside = (ROOT / size.name).relative_to(folder.resolve()).parts
            name = inside[0] if len(inside) > 1 else "."
            group = groups.get(name, (name,))
            lines[group] = lines.get(group, 0) + size.value
    return lines


def table(lines: dict[tuple[str, ...], int]) -> str:
    rows = [("folder", "lines", "budget")]
    rows += [(", ".join(group), f"{count:,}", f"{BUDGETS.get(group, 0):,}") for group, count in lines.items()]
    rows.append(("all", f"{sum(lines.values()):,}", f"{sum(BUDGETS.values()):,}"))
    return "\n".join(f"{name:24}{count:>8}{budget:>8}" for name, count, budget in rows)


def measure(path: Path, tree: ast.Module) -> Iterator[Size]:
    """File, functions and classes of one module."""
    where = shown(path)
    yield Size(where, 1, "file lines", len(path.read_text("utf-8").splitlines()))
    for name, node in definitions(tree):
        if isinstance(node, ast.ClassDef):
            yield Size(f"{where}:{name}", node.lineno, "public methods", len(public_methods(node)))
        else:
            yield Size(f"{where}:{name}", node.lineno, "function lines", body_lines(node))


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Every class and function with its dotted name, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def body_lines(node: Function) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        doc = node.body[0]
        lines -= doc.end_lineno - doc.lineno + 1
    return lines


def public_methods(node: ast.ClassDef) -> set[str]:
    """Names of public methods; properties and overloads of a name already counted add nothing."""
    return {
        item.name
        for item in node.body
        if isinstance(item, Function)
        and not item.name.startswith("_")
        and not any(map(is_property, item.decorator_list))
    }


def is_property(decorator: ast.expr) -> bool:
    name = ast.unparse(decorator)
    return name.endswith(("property", ".setter", ".deleter", ".getter"))


def depths(trees: dict[Path, ast.Module]) -> list[Size]:
    """How many classes of the package, one above the other, each class is built on."""
    classes = {
        (path, node.name): node
        for path, tree in trees.items()
        for _, node in definitions(tree)
        if isinstance(node, ast.ClassDef)
    }

    def bases(path: Path, node: ast.ClassDef) -> Iterator[tuple[Path, ast.ClassDef] | str]:
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            here = classes.get((path, name))
            here = None if here is node else here  # a compat layer's class may have the name of its base
            elsewhere = [(p, c) for (p, n), c in classes.items() if n == name and c is not node]
            if OF_OTHERS not in path.parts:  # nothing is built on a compat layer
                elsewhere = [(p, c) for p, c in elsewhere if OF_OTHERS not in p.parts]
            if here is not None:
                yield path, here
            elif len(elsewhere) == 1:
                yield elsewhere[0]
            else:
                yield name

    def is_interface(path: Path, node: ast.ClassDef) -> bool:
        """Protocols and ABCs themselves, and every exception and network."""
        parents = list(bases(path, node))
        if any(name in {"Protocol", "ABC"} for name in parents):
            return True
        return any(
            (name := parent) in INTERFACES or name.endswith(("Error", "Exception", "Warning"))
            if isinstance(parent, str)
            else is_exception_or_network(*parent)
            for parent in parents
        )

    def is_exception_or_network(path: Path, node: ast.ClassDef) -> bool:
        parents = list(bases(path, node))
        return not any(name in {"Protocol", "ABC"} for name in parents) and is_interface(path, node)

    def depth(path: Path, node: ast.ClassDef) -> int:
        if is_interface(path, node):
            return 0
        inside = [parent for parent in bases(path, node) if not isinstance(parent, str)]
        return max((depth(*parent) + (not is_interface(*parent)) for parent in inside), default=0)

    return [
        Size(f"{shown(path)}:{name}", node.lineno, "inheritance depth", depth(path, node))
        for (path, name), node in classes.items()
    ]


def read_exceptions(path: Path) -> dict[tuple[str, str], int]:
    """Rows ``| `path:name` | kind | allowed | why |`` of the table."""
    allowed = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not cells[0].startswith("`") or not line.lstrip().startswith("|"):
            continue
        if len(cells) != 4 or cells[1] not in LIMITS or not cells[2].isdigit() or not cells[3]:
            raise SystemExit(
                f"{shown(path)}:{number}: expected | `path:name` | one of {', '.join(LIMITS)} | number | why |"
            )
        allowed[cells[0].strip("`"), cells[1]] = int(cells[2])
    return allowed


def totals(trees: dict[Path, ast.Module], sizes: list[Size]) -> str:
    def longest(kind: str) -> str:
        size = max((s for s in sizes if s.kind == kind), key=lambda s: s.value, default=None)
        return f"{size.value} ({size.name})" if size else "none"

    lines = sum(size.value for size in sizes if size.kind == "file lines")
    functions = sum(size.kind == "function lines" for size in sizes)
    classes = sum(size.kind == "public methods" for size in sizes)
    return (
        f"{len(trees)} files, {lines:,} lines, {classes} classes, {functions} functions; "
        f"longest file {longest('file lines')}, longest function {longest('function lines')}"
    )


def shown(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "muster"))
