"""Every code block of the documentation runs.

Python blocks of one file run in order, in one namespace, in an empty folder. Two HTML comments,
which a reader of the rendered page does not see, stand on lines of their own before a block::

    <!-- run-before
    my_ppo_loss = lambda batch: 0.0
    -->

runs that code first; ``<!-- not-run: needs a GPU -->`` leaves out the next block, for the given
reason. ``<!-- run-rows -->`` before a table runs the code in its last column, row by row.

Shell blocks: a ``make`` target must be one that ``.ci/run`` runs; ``muster`` commands run, in an
empty folder.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REPOSITORY = "https://github.com/muster-rl/muster/"
RAW = "https://raw.githubusercontent.com/muster-rl/muster/main/"
WORKFLOWS = REPOSITORY + "actions/workflows/"
BADGES = ("https://img.shields.io/pypi/", "https://pypi.org/project/muster-rl/")
SITE = "https://muster-rl.github.io/muster/"  # also in pyproject.toml
SHELL = {"sh", "bash", "shell", "console"}

# A fenced block, a table, or one of the two other comments. Fences may be indented (lists).
PART = re.compile(
    r"^<!-- run-before\n(?P<before>.*?)^-->$"
    r"|^<!-- not-run:(?P<reason>.*?)-->$"
    r"|^<!-- run-rows -->\n+\|[^\n]*\n\|[-| ]*\n(?P<rows>(?:\|[^\n]*\n)+)"
    r"|^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """Some lines of a page."""

    page: Path
    line: int  # of the first line of code
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """What is to run, in order."""
    found: list[Block] = []
    skip = False
    text = page.read_text("utf-8")
    for part in PART.finditer(text):
        if part["reason"] is not None:
            assert part["reason"].strip(), f"{page.name}: not-run needs a reason"
            skip = True
            continue
        if part["rows"] is not None:
            found += _cells(
                page, text.count("\n", 0, part.start("rows")) + 1, part["rows"]
            )
            continue
        group = "before" if part["before"] is not None else "code"
        language = "python" if group == "before" else part["language"]
        line = text.count("\n", 0, part.start(group)) + 1
        if group == "before" or not skip:
            indent = part["indent"] or ""
            code = "".join(
                row.removeprefix(indent)
                for row in part[group].splitlines(keepends=True)
            )
            found.append(Block(page, line, language, code))
        skip = skip and group == "before"
    return found


def _cells(page: Path, line: int, rows: str) -> list[Block]:
    """The code in the last column of a table; code that is in one cell is one block."""
    last = [
        re.split(r"(?<!\\)\|", row)[-2].replace("\\|", "|") for row in rows.splitlines()
    ]
    code = ["\n".join(re.findall(r"`([^`]+)`", cell)) + "\n" for cell in last]
    assert all(code), f"{page.name}:{line}: a row without code"
    return [
        Block(page, line + number, "python", lines) for number, lines in enumerate(code)
    ]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, without comments and prompts."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [
        words
        for line in lines
        if (words := shlex.split(line.removeprefix("$ "), comments=True))
    ]


PYTHON = {page: [b for b in blocks(page) if b.language == "python"] for page in PAGES}
COMMANDS = [
    (block, words)
    for page in PAGES
    for block in blocks(page)
    if block.language in SHELL
    for words in commands(block)
]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page, found in PYTHON.items() if found], ids=name
)
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in PYTHON[page]:
        padded = (
            "\n" * (block.line - 1) + block.code
        )  # so that a traceback points into the page
        exec(compile(padded, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    ("block", "words"),
    [pytest.param(b, w, id=f"{b} {shlex.join(w)}") for b, w in COMMANDS],
)
def test_shell_commands_are_run_by_ci(
    block: Block, words: list[str], tmp_path: Path
) -> None:
    match words:
        case ["make", target, *_]:
            assert re.search(
                rf"^make {target}\b",
                (ROOT / ".ci" / "run").read_text("utf-8"),
                re.MULTILINE,
            ), f"{block}: .ci/run does not run `make {target}`"
        case ["muster", *arguments]:
            program = Path(sys.executable).with_name("muster")
            done = subprocess.run(
                [program, *arguments],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, f"{block}: {shlex.join(words)}\n{done.stdout}"
        case _:
            pytest.fail(
                f"{block}: nothing runs `{shlex.join(words)}`; mark the block with <!-- not-run: reason -->"
            )


def test_the_readmes_addresses_are_absolute_and_lead_to_files_of_the_repository() -> (
    None
):
    """PyPI shows the same page, where an address without a host leads nowhere."""
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / "README.md").read_text("utf-8"), flags=re.S | re.M
    )
    targets = re.findall(r"\]\(([^)]+)|(?:src|srcset)=\"([^\"]+)", text)
    addresses = [link or source for link, source in targets]
    assert len(addresses) > 20
    lost = []
    for address in addresses:
        path, _, anchor = address.partition("#")
        if not path:
            continue
        file = _file_behind(path)
        if file is None or not file.is_file():
            lost.append(address)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            if anchor not in {
                re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings
            }:
                lost.append(address)
    assert lost == []


def _file_behind(address: str) -> Path | None:
    for start in (REPOSITORY + "blob/main/", RAW):
        if address.startswith(start):
            return ROOT / address.removeprefix(start)
    if address.startswith(WORKFLOWS):
        name = address.removeprefix(WORKFLOWS).removesuffix("/badge.svg")
        return ROOT / ".github" / "workflows" / name
    if address.startswith(BADGES):
        return ROOT / "pyproject.toml"
    if address.startswith(SITE):
        page = address.removeprefix(SITE).removesuffix(".html") or "index"
        return ROOT / "docs" / f"{page}.md"
    return None


def test_the_home_page_shows_the_readmes_program() -> None:
    def first_program(page: Path) -> str:
        found = re.search(
            r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M
        )
        assert found is not None
        return found[1]

    assert first_program(ROOT / "docs" / "index.md") == first_program(
        ROOT / "README.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    assert [
        t for t in targets if "://" not in t and not (page.parent / t).exists()
    ] == []


def test_the_readme_has_the_blocks_this_file_is_for() -> None:
    readme = ROOT / "README.md"
    assert any("Collector" in block.code for block in PYTHON[readme])
    assert [words for block, words in COMMANDS if block.page == readme][:2] == [
        ["make", "demo"],
        ["make", "test"],
    ]
