"""Private names of other packages, and the versions with which Muster may use them.

A private name can change in any release. Muster uses one only if the public alternative costs time
in every step or does not exist, only after ``usable`` has returned True, and with a public
fallback. A test compares this with docs/decisions/0018-private-names.md, which lists every name.
"""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from typing import Any

from muster.errors import BadOption

VARIABLE = "MUSTER_PRIVATE_NAMES"
"""Set to ``never``, no private name is used (those of torchrl excepted, which have no public way)."""

# The first version with which the names were checked, and the first with which they must be checked
# again.
CHECKED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "cloudpickle": ((3, 0), (4,)),
    "gymnasium": ((1, 1), (2,)),
    "ray": ((2, 52), (3,)),
    "tensordict": ((0, 14), (1,)),
    "torch": ((2, 6), (3,)),
    "torchrl": ((0, 14), (0, 15)),
}


def usable(package: str, *owners: tuple[Any, tuple[str, ...]]) -> bool:
    """Whether private names of a package may be used: its version is ``CHECKED``, and owners have
    the attributes.
    """
    if os.environ.get(VARIABLE) == "never" or not _is_checked(package):
        return False
    return all(hasattr(owner, name) for owner, names in owners for name in names)


def require(package: str, extra: str) -> None:
    """Raise ``BadOption`` unless the package has a checked version; for adapters without a public
    fallback.
    """
    if not _is_checked(package):
        first, end = (".".join(map(str, version)) for version in CHECKED[package])
        raise BadOption(
            f"{package} {_version(package)} is installed. This adapter uses private names of"
            f" {package}, which were checked with {package}>={first},<{end} only. Install such a"
            f" version: pip install 'muster-rl[{extra}]'"
        )


@cache
def _is_checked(package: str) -> bool:
    first, end = CHECKED[package]
    return first <= numbers(_version(package)) < end


def _version(package: str) -> str:
    return str(importlib.import_module(package).__version__)


def numbers(version: str) -> tuple[int, ...]:
    """Convert ``2.13.0+cpu`` to (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@cache
def tensordict_maker() -> Any:
    """Return a constructor of TensorDicts for tensors that fit: ``maker(entries, batch_size=,
    names=, device=)``.

    The private constructor skips TensorDict's checks, which take most of the time for a batch of
    few steps.
    """
    from tensordict import TensorDict

    return (
        TensorDict._new_unsafe
        if usable("tensordict", (TensorDict, ("_new_unsafe",)))
        else TensorDict
    )
