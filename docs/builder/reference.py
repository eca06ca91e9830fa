"""Reference pages, written into ``docs/reference`` before every build from the code: names, command line, glossary."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

import muster
from builder import parameters
from muster.cli.main import COMMANDS
from muster.collectors.multi_options import MultiOptions
from muster.collectors.options import CollectorOptions
from muster.collectors.signatures import documented

DOCS = Path(__file__).resolve().parents[1]
PAGES = DOCS / "reference"
ENTRY = re.compile(r"^    (\w[^:]*)(:.*(?:\n     .*)*)", re.MULTILINE)
GROUPS = {
    "Collectors": [
        "Collector",
        "MultiSyncCollector",
        "MultiAsyncCollector",
        "AsyncCollector",
        "DistributedCollector",
        "RPCCollector",
        "RayCollector",
    ],
    "Values of options": [
        "Trajectories",
        "Restart",
        "CentralInference",
        "Autosave",
        "Execution",
        "RayBuffer",
    ],
    "Collected data": [
        "ReplayMemory",
        "Collected",
        "CollectStats",
        "CollectorStats",
        "WorkerStats",
        "EpisodeRecord",
        "split_trajectories",
    ],
    "Evaluation and tuning": [
        "Evaluator",
        "Evaluation",
        "EvaluatedEpisode",
        "UnfinishedEpisode",
        "EvaluatorStats",
        "tune",
        "Tuning",
    ],
    "Recordings, states, logs": [
        "Recorder",
        "Recording",
        "load",
        "save_state",
        "load_state",
        "ResumeReport",
        "JsonlLogger",
        "TensorBoardLogger",
        "Timeline",
    ],
    "Modules": ["policies", "weights", "errors", "testing"],
}
OPTIONS = (CollectorOptions, MultiOptions)
MODULE = re.compile(r"~|\b(?:typing|collections\.abc)\.")
FILE = re.compile(
    r"\bdocs/([\w/]+)\.md"
)  # in docstrings, which are also read without this site
METHODS_OF_ALL = "Collector"  # its page has the methods that collectors inherit


def write(app: Sphinx) -> None:
    """Write all pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    index = [
        *_title("API"),
        "Every public name of ``muster``, made from the docstrings.",
        "",
    ]
    groups = _groups()
    for group, names in groups.items():
        index += [group, "-" * len(group), ""]
        index += [
            f":doc:`{name} <{name}>`\n    {_summary(getattr(muster, name))}\n"
            for name in names
        ]
        for name in names:
            (PAGES / f"{name}.rst").write_text(
                "\n".join(_page(name, getattr(muster, name))) + "\n", "utf-8"
            )
    inside = [
        name for names in groups.values() for name in names if name != "errors"
    ]  # which is beside this page
    index += ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name in inside)]
    (PAGES / "index.rst").write_text("\n".join(index) + "\n", "utf-8")
    (PAGES / "cli.rst").write_text("\n".join(_command_line()) + "\n", "utf-8")
    (PAGES / "glossary.md").write_text("\n".join(_glossary()) + "\n", "utf-8")


def _groups() -> dict[str, list[str]]:
    """Every public name, in the groups above; those without a group come last."""
    left = [
        name
        for name in muster.__all__
        if name != "__version__" and not any(name in g for g in GROUPS.values())
    ]
    groups = {
        group: [name for name in names if name in muster.__all__]
        for group, names in GROUPS.items()
    }
    return groups | ({"Others": left} if left else {})


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _summary(value: Any) -> str:
    paragraph = (
        inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    )
    return re.sub(r"\s*::$", ".", paragraph)


def _page(name: str, value: Any) -> Iterator[str]:
    yield from _title(name.capitalize() if isinstance(value, ModuleType) else name)
    if isinstance(value, ModuleType):
        names = list(getattr(value, "__all__", []) or _own_names(value))
        yield from [f".. automodule:: muster.{name}", "   :no-members:", ""]
        yield from (
            line
            for own in names
            for line in _directive(f"muster.{name}.{own}", getattr(value, own))
        )
    else:
        yield from _directive(f"muster.{name}", value)


def _own_names(module: ModuleType) -> list[str]:
    return [
        n
        for n, v in vars(module).items()
        if n[0] != "_" and getattr(v, "__module__", "") == module.__name__
    ]


def _directive(name: str, value: Any) -> list[str]:
    if not isinstance(value, type):
        return [
            f".. autofunction:: {name}" if callable(value) else f".. autodata:: {name}",
            "",
        ]
    inherits = name == f"muster.{METHODS_OF_ALL}" or not name.endswith("Collector")
    foreign = "Exception, BaseException, object, int, str, tuple, dict, Module, Env, Generic, ABC"
    return [
        f".. autoclass:: {name}",
        *([f"   :inherited-members: {foreign}"] if inherits else []),
        "",
    ]


# ---------------------------------------------------------------------------------------- parameters


def shorten(
    app: Any,
    what: str,
    name: str,
    value: Any,
    options: Any,
    signature: Any,
    returned: Any,
) -> Any:
    """Leave keywords out of a signature that are so many that they have a list of their own."""
    given = _signature(value)
    if given is None or len(given.parameters) < 15:
        return None
    kept = [
        p.replace(annotation=p.empty)
        for p in given.parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    shown = str(inspect.Signature([p for p in kept if p.name != "self"]))
    return f"{shown[:-1]}, *, ...)", returned


def describe(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Add the parameters that the docstring leaves to the dataclass they come from, with type and default."""
    if what not in ("class", "function") or (given := _signature(value)) is None:
        return
    written = set(_entries(inspect.cleandoc(value.__doc__ or "")))
    meanings = meanings_of(value)
    left = [
        p
        for p in given.parameters.values()
        if p.name not in written and p.name in meanings
    ]
    if what == "class" and name.endswith("Collector"):
        added = list(_grouped(left, meanings))
    else:
        added = [line for p in left for line in _fields(p, meanings[p.name])]
    # what can be raised comes last
    end = next(
        (i for i, line in enumerate(lines) if line.startswith(":raises")), len(lines)
    )
    lines[end:end] = ["", *added, ""]
    lines[:] = [FILE.sub(_as_link, line) for line in lines]
    if (
        what == "class"
        and name.endswith("Collector")
        and name != f"muster.{METHODS_OF_ALL}"
    ):
        lines += [
            "Methods and attributes that are not listed here are those of :class:`muster.Collector`.",
            "",
        ]


def _grouped(given: list[inspect.Parameter], meanings: dict[str, str]) -> Iterator[str]:
    """List the many parameters of a collector in groups, each as a term and its meaning."""
    for group in parameters.GROUPS:
        members = [p for p in given if parameters.group_of(p.name) == group]
        if not members:
            continue
        yield from [f".. rubric:: {group}", ""]
        for p in members:
            kind = ""
            if p.annotation is not p.empty:
                shown = stringify_annotation(p.annotation, "smart")
                kind = f" ({MODULE.sub('', shown)})"
            default = (
                "" if p.default is p.empty else f" Default: ``{_shown(p.default)}``."
            )
            yield f"**{p.name}**{_escaped(kind)}"
            yield f"    {meanings[p.name]}{default}"
            yield ""


def _as_link(found: re.Match[str]) -> str:
    return f":doc:`/{found[1]}`" if (DOCS / f"{found[1]}.md").exists() else found[0]


def meanings_of(value: Any) -> dict[str, str]:
    """What ``help()`` says about parameters that are fields of a dataclass of options, by name."""
    own = (
        value.__init__.__doc__
        if isinstance(value, type) and hasattr(value.__init__, "__signature__")
        else None
    )
    if own:
        return _entries(own.split("\n\n    ``muster.")[0])
    if dataclasses.is_dataclass(value):
        return _split(documented(value))
    return {
        name: text
        for options in OPTIONS
        for name, text in _split(documented(options)).items()
    }


def _entries(text: str) -> dict[str, str]:
    """The texts under ``Args:`` and ``Attributes:``, by name."""
    parts = re.findall(
        r"^(?:Args|Args passed on|Attributes):\n((?:(?:    .*)?\n?)*)",
        text,
        re.MULTILINE,
    )
    return _split(
        {entry[0]: "".join(entry) for part in parts for entry in ENTRY.findall(part)}
    )


def _split(entries: dict[str, str]) -> dict[str, str]:
    """One text for each of several names that share an entry, on one line."""
    return {
        name.strip(): " ".join(text.partition(":")[2].split())
        for names, text in entries.items()
        for name in names.split(",")
    }


def _fields(p: inspect.Parameter, meaning: str) -> Iterator[str]:
    default = "" if p.default is p.empty else f" Default: ``{_shown(p.default)}``."
    yield f":param {p.name}: {meaning}{default}"
    if p.annotation is not p.empty:
        yield f":type {p.name}: {stringify_annotation(p.annotation, 'smart')}"


def _shown(value: Any) -> str:
    return (
        value.__name__
        if inspect.isroutine(value) or isinstance(value, type)
        else repr(value)
    )


def _signature(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


# -------------------------------------------------------------------------------------- command line


def _command_line() -> Iterator[str]:
    kinds = {kind.__name__.lower().removesuffix("command"): kind for kind in COMMANDS}
    described: list[Any] = [
        Annotated[kind, tyro.conf.subcommand(name, description=kind.__doc__)]
        for name, kind in kinds.items()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(
            functools.reduce(operator.or_, described),
            prog="muster",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
        )
    parsers = next(action.choices for action in parser._actions if action.choices)
    yield from _title("Command line")
    yield "The command ``muster``, made from its parser. ``muster COMMAND --help`` shows the same."
    yield ""
    for name, command in parsers.items():
        yield from [
            f"muster {name}",
            "-" * (7 + len(name)),
            "",
            *_paragraphs(command.description or ""),
            "",
        ]
        for action in command._actions:
            if action.dest != "help":
                yield from _option(action)


def _option(action: Any) -> Iterator[str]:
    metavar = (
        action.metavar
        if isinstance(action.metavar, str)
        else " ".join(action.metavar or ())
    )
    names = [f"{flag} {metavar}".strip() for flag in action.option_strings] or [metavar]
    yield ", ".join(f"``{name}``" for name in names)
    yield f"    {_escaped(' '.join((action.help or '').split()))}"
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield _escaped(" ".join(paragraph.split()))
        yield ""


def _escaped(text: str) -> str:
    return re.sub(r"([*_|\\`])", r"\\\1", text)


# ------------------------------------------------------------------------------------------ glossary


def _glossary() -> Iterator[str]:
    text = (
        (DOCS.parent / "ARCHITECTURE.md")
        .read_text("utf-8")
        .split("## Words")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\| (?!word|---)(.+?) \| (.+) \|$", text, re.MULTILINE)
    yield "# Glossary\n"
    yield "Terms used in these pages and in error messages, from [Architecture](../architecture.md).\n"
    for word, meaning in sorted(rows, key=lambda row: row[0].lower()):
        yield f"{word}\n: {meaning}\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", write)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True}
