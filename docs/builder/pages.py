"""Pages that lie at the root of the repository, links that GitHub and Sphinx read differently, and ``llms.txt``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import muster

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
SHOWN = {
    "architecture": "ARCHITECTURE.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
}
OTHERS_NAMES = {
    "torchrl",
    "sb3",
    "cleanrl",
    "tianshou",
    "prt_rl",
    "rlpyt",
    "changelog",
}  # `Collector` may be theirs
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
DECISIONS = "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show a page of the root, and lead its links and those to it to pages of the site."""
    path = DOCS / f"{docname}.md"
    if docname in SHOWN:
        path = ROOT / SHOWN[docname]
        app.env.note_dependency(path)
        source[0] = path.read_text("utf-8")
    if path.suffix == ".md" and path.exists():
        source[0] = LINK.sub(
            lambda link: _target(path.parent, docname, link[0]), source[0]
        )
    if docname == "decisions/README":
        source[0] += DECISIONS


def _target(folder: Path, docname: str, link: str) -> str:
    file = (folder / link).resolve()
    shown = {
        (ROOT / name).resolve(): DOCS / f"{page}.md" for page, name in SHOWN.items()
    }
    shown[ROOT / "README.md"] = DOCS / "index.md"
    return os.path.relpath(shown.get(file, file), (DOCS / docname).parent)


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Make a link of every public name that stands in the text as code."""
    docname = app.env.docname
    if docname in OTHERS_NAMES or docname.startswith("decisions/"):
        return
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().removeprefix("muster.").split("(")[0]
        first = name.split(".")[0]
        if first not in muster.__all__ or isinstance(
            literal.parent, (nodes.reference, nodes.title, pending_xref)
        ):
            continue
        ref = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=f"muster.{name}",
            refwarn=False,
            refdoc=docname,
        )
        ref["py:module"] = ref["py:class"] = None
        literal.replace_self(ref)
        ref += literal


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt``: every page with its title, its first sentence, and the address of its source."""
    if error is not None or app.builder.name != "html":
        return
    env: BuildEnvironment = app.env
    lines = [f"# Muster\n\n> {_first_paragraph(env, app.config.root_doc)}\n"]
    for toctree in env.get_doctree(app.config.root_doc).findall(_is_toctree):
        lines.append(f"\n## {toctree['caption']}\n")
        lines += [
            line for _, docname in toctree["entries"] for line in _entries(env, docname)
        ]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _entries(env: BuildEnvironment, docname: str) -> list[str]:
    suffix = Path(env.doc2path(docname)).suffix
    text = _first_paragraph(env, docname)
    own = f"- [{env.titles[docname].astext()}](_sources/{docname}{suffix}.txt): {text}"
    return [
        own,
        *(
            line
            for child in env.toctree_includes.get(docname, ())
            for line in _entries(env, child)
        ),
    ]


def _first_paragraph(env: BuildEnvironment, docname: str) -> str:
    found = next(env.get_doctree(docname).findall(nodes.paragraph), None)
    return " ".join(found.astext().split()) if found else ""


def _is_toctree(node: nodes.Node) -> bool:
    return node.tagname == "toctree"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", read)
    app.connect("doctree-read", link_names)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True}
