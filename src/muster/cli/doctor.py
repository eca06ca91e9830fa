"""``muster doctor``: properties of this machine, and versions that are known not to work together.

Versions are read from package metadata, without imports, which could fail or be slow.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.utils.attributes import installed
from muster.utils.cpus import allowed_cpus, usable_cores
from muster.utils.private_names import numbers

CORE = (
    "muster-rl",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "safetensors",
    "rich",
    "tyro",
)
SIMULATORS = (
    "ale-py",
    "mujoco",
    "mujoco-mjx",
    "dm-control",
    "gymnasium-robotics",
    "brax",
    "gymnax",
    "jax",
)
ENVIRONMENTS = (
    "envpool",
    "pettingzoo",
    "mpe2",
    "minigrid",
    "minatar",
    "minari",
    "pillow",
    "six",
)
SYSTEMS = ("torchrl", "stable-baselines3", "tianshou", "ray", "submitit")
SMALL_SHM_BYTES = 512 << 20  # the default of Docker is 64 MiB
FEW_FILES = 1024
FILES_OF_A_WORKER = 3  # channel, progress, life
FILES_OF_OTHERS = 40  # of Python, torch, and the collector itself

Versions = Mapping[str, str]


@dataclass(frozen=True)
class Doctor:
    """Show what Muster finds on this machine; exit with 1 if versions are installed that do not
    work together.
    """


def doctor(_: Doctor) -> int:
    """Print everything. Returns 1 if there is a known-bad combination, else 0."""
    names = (*CORE, *SYSTEMS, *SIMULATORS, *ENVIRONMENTS)
    versions = {
        name: version for name in names if (version := installed(name)) is not None
    }
    absent = {"muster-rl": "from a source tree"} | dict.fromkeys(
        CORE[1:], "not installed"
    )
    print("machine")
    for name, value in machine().items():
        print(f"  {name:<12} {value}")
    print("packages")
    for name, version in (absent | versions).items():
        print(f"  {name:<20} {version}")
    problems = known_bad(versions)
    for what, fix in problems:
        print(f"BAD   {what}\n      fix: {fix}")
    for note in notes(versions):
        print(f"note  {note}")
    print(
        "no known-bad combination"
        if not problems
        else f"{len(problems)} known-bad combination(s)"
    )
    return 1 if problems else 0


def known_bad(versions: Versions) -> list[tuple[str, str]]:
    """The combinations in ``versions`` (distribution name to version) that are known to fail, and
    their fixes.
    """
    have = {name: numbers(version) for name, version in versions.items()}
    mujoco, torchrl = have.get("mujoco", ()), have.get("torchrl", ())
    rows = [
        (
            "dm-control" in have and mujoco >= (4,),
            (
                "dm-control {dm-control} with mujoco {mujoco}: AttributeError: 'MjModel' object has"
                " no attribute 'flex_vertedge'"
            ),
            "pip install 'mujoco<4'",
        ),
        (
            torchrl[:2] == (0, 14) and have.get("tensordict", ()) >= (0, 15),
            "torchrl {torchrl} with tensordict {tensordict}: torchrl 0.14 needs 0.14",
            "pip install 'tensordict>=0.14.3,<0.15'",
        ),
        (
            "gymnasium-robotics" in have and bool(mujoco),
            (
                "gymnasium-robotics {gymnasium-robotics} with mujoco {mujoco}: Fetch, Hand and"
                " FrankaKitchen fail with AssertionError at reset (with mujoco 3.17 and 4.0; mazes"
                " and Adroit work)"
            ),
            "use the maze and Adroit environments only, or pip uninstall gymnasium-robotics",
        ),
        (
            "mujoco-mjx" in have
            and bool(mujoco)
            and have["mujoco-mjx"][:1] != mujoco[:1],
            "mujoco-mjx {mujoco-mjx} with mujoco {mujoco}: they must be of one version",
            "pip install 'mujoco=={mujoco-mjx}'",
        ),
        (
            "minari" in have and "pillow" not in have,
            "minari without pillow: No module named 'PIL' when it stores episodes",
            "pip install pillow",
        ),
        (
            "gymnax" in have and "six" not in have,
            "gymnax without six: No module named 'six'",
            "pip install six",
        ),
        (
            have.get("gymnasium", (1,)) < (1,),
            "gymnasium {gymnasium}: vector environments differ before 1.0",
            "pip install 'gymnasium>=1.1'",
        ),
    ]
    return [
        (what.format_map(versions), fix.format_map(versions))
        for bad, what, fix in rows
        if bad
    ]


def notes(versions: Versions) -> list[str]:
    """Hints that are not problems."""
    found = []
    if "pettingzoo" in versions and "mpe2" not in versions:
        found.append(
            "pettingzoo.mpe has moved to a package of its own: pip install mpe2"
        )
    if (shm := _shm_bytes()) is not None and shm < SMALL_SHM_BYTES:
        found.append(
            f"/dev/shm has {_size(shm)}: Muster's workers do not use it, torch's DataLoader and Ray"
            " do; in Docker, run with --shm-size=4g"
        )
    if (files := _open_files()) is not None and files < FEW_FILES:
        found.append(
            f"only {files} open files are allowed; raise it with: ulimit -n 4096"
        )
    if usable_cores() <= 1:
        found.append(
            "one core: worker processes take turns on it; they gain where environments wait, not"
            " compute"
        )
    return found


def machine() -> dict[str, str]:
    """The resources that the processes of a collector share."""
    shm, files, memory = _shm_bytes(), _open_files(), _memory_bytes()
    return {
        "python": f"{platform.python_version()} ({platform.platform()})",
        "cores": _cores(),
        "memory": "unknown" if memory is None else _size(memory),
        "/dev/shm": "none" if shm is None else _size(shm),
        "open files": "unknown" if files is None else f"{files:,}",
        **workers(files),
    }


def workers(files: int | None) -> dict[str, str]:
    """How worker processes are started, what they share, and how many the limit of open ``files``
    allows.
    """
    if sys.platform == "win32":
        return {"workers": "threads only (backend='threads')"}
    linux = sys.platform == "linux"
    most = (
        ""
        if files is None
        else f"; open files for {max(0, files - FILES_OF_OTHERS) // FILES_OF_A_WORKER:,}"
    )
    return {
        "workers": (
            ("from a fork server, in milliseconds" if linux else "spawned, in seconds")
            + most
        ),
        "shared": "anonymous memory (memfd)" if linux else "unlinked temporary files",
    }


def _cores() -> str:
    allowed, usable = len(allowed_cpus()), usable_cores()
    limit = (
        f", of which the container's limit allows {usable:g}"
        if usable < allowed
        else ""
    )
    return f"{allowed} usable of {os.cpu_count()}{limit}"


def _memory_bytes() -> int | None:
    """Physical memory, or the limit of the container if it is lower."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def _shm_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.1f} GiB"
