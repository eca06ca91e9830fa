"""The tests with other versions than those of constraints.txt: ``make canary`` and ``make
pythons``.

``canary``: the core suite with the newest tensordict, gymnasium and NumPy that this Python can
install, and with the newest torch of which pip finds a CPU build. All else is borrowed from
``.venv``. ``pythons``: what can be run with each other interpreter of this machine (all but what
needs torch, where pip finds no CPU build for it), and the types for newer ones.

Both print by name what was run with which version. What fails makes the exit code 1; what cannot be
installed is reported, and does not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which mypy brings

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
NEWEST = ("tensordict", "gymnasium", "numpy")
CORE = (
    *(
        "tests/contract/test_envs.py",
        "tests/unit/policies",
        "tests/unit/test_checkpoint.py",
    ),
    *(
        "tests/unit/test_collector.py",
        "tests/unit/test_collector_properties.py",
        "tests/unit/test_collector_weights.py",
    ),
    *(
        "tests/unit/test_evaluator.py",
        "tests/unit/test_function_policies.py",
        "tests/unit/test_inference_server.py",
    ),
    *(
        "tests/unit/test_memory.py",
        "tests/unit/test_multi_collectors.py",
        "tests/unit/test_processes.py",
    ),
    *(
        "tests/unit/test_without_private_names.py",
        "tests/unit/test_recording.py",
        "tests/unit/test_resume.py",
    ),
    *(
        "tests/unit/test_rollout.py",
        "tests/unit/test_shared_memory.py",
        "tests/unit/test_snapshot.py",
    ),
    *(
        "tests/unit/test_spaces.py",
        "tests/unit/test_stacked_envs.py",
        "tests/unit/test_vector_envs.py",
    ),
    *(
        "tests/unit/test_weights.py",
        "tests/unit/test_whole_episodes.py",
        "tests/unit/test_without_torch.py",
    ),
)
# they ask for a tensordict of their own, and are tested by `make test`
NOT_CORE = "not torchrl and not tianshou"
APART = ("-n", "4", "--dist", "loadfile", "-k", NOT_CORE, "-m", "not slow")
WITHOUT_TORCH = (
    *(
        "tests/unit/test_collect_stats.py",
        "tests/unit/test_episode_rules.py",
        "tests/unit/test_mailbox.py",
    ),
    *(
        "tests/unit/test_private_names.py",
        "tests/unit/test_authenticated_link.py",
        "tests/unit/test_shared_memory.py",
    ),
    *(
        "tests/unit/test_timeline.py",
        "tests/unit/test_trajectories.py",
        "tests/unit/test_without_torch.py",
    ),
)
TOOLS = (
    "pytest>=8.2,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
)
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
TYPED = ("3.12", "3.13", "3.14")  # besides the oldest, which `make types` checks
INSTALL_S, TEST_S = 300, 1500


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("canary", "pythons"))
    parser.add_argument(
        "--limit-s",
        type=float,
        default=TEST_S,
        help="seconds for one run of tests (default: %(default)s)",
    )
    given = parser.parse_args()
    return {"canary": canary, "pythons": pythons}[given.command](given.limit_s)


# --- canary ---------------------------------------------------------------------------------------


def canary(limit_s: float) -> int:
    """The core suite with the newest versions."""
    bounds = requirements()
    tested = {name: metadata.version(name) for name in (*NEWEST, "torch")}
    python = borrowing(BUILD / "canary")
    newest, builds = torch_versions(sys.executable)
    torch = max(
        [build for build in builds if numbers(build) < (3,)],
        key=numbers,
        default=tested["torch"],
    )
    notes = []
    if numbers(torch) > numbers(tested["torch"]):
        notes += install(python, [f"torch=={torch}"])
    pinned = f"torch=={version_of(python, 'torch') or tested['torch']}"
    for name in NEWEST:
        notes += install(python, ["--upgrade", bounds[name], pinned])
    found = {name: version_of(python, name) for name in tested}
    print(
        f"canary: the newest versions that Python {sys.version.split()[0]} can install"
    )
    for name, version in found.items():
        same = (
            "as in constraints.txt"
            if version == tested[name]
            else f"constraints.txt: {tested[name]}"
        )
        more = (
            f"; {newest} has no CPU build here"
            if name == "torch" and numbers(newest) > numbers(version)
            else ""
        )
        print(f"  {name:<12} {version:<14} {same}{more}")
    for note in notes:
        print(f"  {note}")
    if found == tested:
        print("  core suite   not run again: `make test` runs it with these versions")
        return 0
    result, failed = tests(python, limit_s, CORE, *APART)
    print(f"  core suite   {result}; left out by name: tests of torchrl and tianshou")
    return int(failed)


# --- other interpreters ---------------------------------------------------------------------------


def pythons(limit_s: float) -> int:
    """What can be run with other interpreters, and the types for them."""
    mine = ".".join(map(str, sys.version_info[:2]))
    found = {
        version: path for version, path in interpreters().items() if version != mine
    }
    with ThreadPoolExecutor(2) as pool:
        ran = {
            version: pool.submit(one_python, version, path, limit_s)
            for version, path in found.items()
        }
        typed = {version: pool.submit(types, version) for version in TYPED}
    print("pythons:")
    for version in SUPPORTED:
        here = (
            "all tests (`make test-all`)" if version == mine else "not on this machine"
        )
        print(f"  {version:<6} {ran[version].result()[0] if version in ran else here}")
    for version, checked in typed.items():
        print(f"  {version:<6} types: {checked.result()[0]}")
    return int(any(each.result()[1] for each in (*ran.values(), *typed.values())))


def one_python(version: str, interpreter: str, limit_s: float) -> tuple[str, bool]:
    """What was run with an interpreter, in words, and whether it failed."""
    cache = f"pycache_prefix={BUILD / 'pycache'}"
    compiled = run(
        [interpreter, "-W", "error", "-X", cache, "-m", "compileall", "-qf", "src"]
    )
    if compiled.returncode:
        print(compiled.stdout, compiled.stderr)
        return "src does not compile", True
    bounds = {
        name: bound
        for name, bound in requirements().items()
        if name not in ("torch", "tensordict")
    }
    python = fresh(BUILD / f"python{version}", interpreter)
    if notes := install(python, [*bounds.values(), *TOOLS]):
        return f"src compiles; {'; '.join(notes)}", False
    _, builds = torch_versions(str(python))
    builds = [build for build in builds if numbers(build) < (3,)]
    if builds:
        notes = install(
            python, [f"torch=={max(builds, key=numbers)}", requirements()["tensordict"]]
        )
    chosen, options = (CORE, APART) if builds and not notes else (WITHOUT_TORCH, ())
    result, failed = tests(python, limit_s, chosen, *options)
    names = ("torch", "tensordict", "numpy", "gymnasium")
    versions = ", ".join(
        f"{name} {found}" for name in names if (found := version_of(python, name))
    )
    why = (
        "core suite"
        if chosen is CORE
        else "no CPU build of torch; the tests that need none"
    )
    return f"{why}: {result} ({versions}); src compiles", failed


def interpreters() -> dict[str, str]:
    """Interpreters of this machine by version, "3.12": in PATH, or made by pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found: dict[str, str] = {}
    for version in SUPPORTED:
        at = [
            shutil.which(f"python{version}"),
            *map(str, sorted(root.glob(f"versions/{version}.*/bin/python"))),
        ]
        for path in filter(None, at):
            said = run(
                [
                    path,
                    "-c",
                    "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])",
                ]
            )
            if (
                said.returncode == 0 and said.stdout.strip() == version
            ):  # pyenv's shims can fail
                found[version] = path
    return found


def types(version: str) -> tuple[str, bool]:
    """What mypy says for a version of Python."""
    # What the oldest version needs an "ignore" for may have a type in this one.
    options = ("--no-warn-unused-ignores", "--python-version", version)
    done = run([sys.executable, "-m", "mypy", *options], timeout=TEST_S)
    if done.returncode:
        print(done.stdout, done.stderr)
    return (done.stdout.strip().splitlines() or ["mypy printed nothing"])[
        -1
    ], done.returncode != 0


# --- environments ---------------------------------------------------------------------------------


def borrowing(at: Path) -> Path:
    """The interpreter of a new environment that has the packages of this one."""
    python = fresh(at, sys.executable, "--without-pip")
    where = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    ).stdout.strip()
    mine = run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    ).stdout.strip()
    Path(where, "borrowed.pth").write_text(f"{mine}\n")
    return python


def fresh(at: Path, interpreter: str, *options: str) -> Path:
    """The interpreter of a new environment with nothing in it."""
    shutil.rmtree(at, ignore_errors=True)
    subprocess.run(
        [interpreter, "-m", "venv", *options, str(at)], check=True, timeout=INSTALL_S
    )
    return at / "bin" / "python"


def install(python: Path, what: list[str]) -> list[str]:
    """Install; returns a sentence for what could not be, else nothing."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
    ]
    if Path(python.parent, "pip").exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    done = run([*pip, "--quiet", "--retries", "1", *what], timeout=INSTALL_S)
    if done.returncode == 0:
        return []
    names = ", ".join(each for each in what if not each.startswith("-"))
    return [
        f"not installed: {names} ({(done.stderr.strip().splitlines() or ['no answer in time'])[-1]})"
    ]


def requirements() -> dict[str, str]:
    """What Muster itself needs, by name, with the bounds of pyproject.toml."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    return {re.split(r"[^\w.-]", each)[0]: each for each in needed}


def torch_versions(python: str) -> tuple[str, list[str]]:
    """The newest torch that pip finds for an interpreter, and all that are marked as CPU builds."""
    done = run([python, "-m", "pip", "index", "versions", "torch"], timeout=INSTALL_S)
    said = re.search(r"Available versions: (.*)", done.stdout)
    versions = said[1].split(", ") if said else ["0"]
    return versions[0], [version for version in versions if version.endswith("+cpu")]


def version_of(python: Path, name: str) -> str:
    """The version of a package in an environment; empty if it has none."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return run([str(python), "-c", code]).stdout.strip()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def tests(
    python: Path, limit_s: float, files: tuple[str, ...], *options: str
) -> tuple[str, bool]:
    """Run tests, showing what pytest prints if they fail; returns its last line, and whether
    something failed.
    """
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        *files,
    ]
    done = run(
        command, timeout=limit_s, MUSTER_TESTS="quick", PYTHONPATH=str(ROOT / "src")
    )
    if done.returncode:
        print(done.stdout, done.stderr)
    if done.returncode == TIMED_OUT:
        return f"not finished within {limit_s:g} s", True
    return (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip(
        "= "
    ), done.returncode != 0


TIMED_OUT = 124


def run(
    command: list[str], timeout: float = 60, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The outcome of a command, in the repository's root; the return code is 124 if it takes too
    long.
    """
    options: dict[str, Any] = {
        "cwd": ROOT,
        "stdin": subprocess.DEVNULL,
        "env": {**os.environ, **environ},
    }
    # A session of its own, so that what it has started ends with it.
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    with subprocess.Popen(command, **pipes, **options) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
            return subprocess.CompletedProcess(command, TIMED_OUT, out, err)
    return subprocess.CompletedProcess(command, child.returncode, out, err)


if __name__ == "__main__":
    sys.exit(main())
