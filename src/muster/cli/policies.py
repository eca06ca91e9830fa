"""``--policy``: a word, a file of weights, or (if imports are allowed) a name in a Python file."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import BadOption, ImportRefused

PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib", ".npy"}
_REFERENCE = re.compile(r"(.+\.py):(\w+)")


@dataclass(frozen=True)
class Chosen:
    """A policy for ``Collector`` and a line for the recording that says what it was."""

    policy: Any
    description: str


def check_policy(name: str, *, allow_import: bool) -> None:
    """Refuse what can be refused from the name alone, before anything slow happens.

    Raises:
        ImportRefused: it would run code.
        BadOption: there is no such thing.
    """
    path = Path(name)
    if name in ("random", "mlp"):
        return
    reference = _REFERENCE.fullmatch(name)
    if reference and not allow_import:
        raise ImportRefused(
            f"--policy {name} runs the file {reference.group(1)}, and so all the code in it. "
            f"If you trust it, add --allow-import."
        )
    if path.suffix.lower() in PICKLES:
        raise ImportRefused(
            f"--policy {name}: files of this kind hold pickles, and loading a pickle can run any code that its "
            f"author put there, so Muster loads none. Where you trust it, convert it once: "
            f"safetensors.torch.save_file(net.state_dict(), {path.stem + '.safetensors'!r}), and give that file."
        )
    file = Path(reference.group(1)) if reference else path
    if not reference and path.suffix != ".safetensors":
        raise BadOption(f"--policy {name!r} is none of: random, mlp, FILE.safetensors, FILE.py:NAME.")
    if not file.is_file():
        raise BadOption(f"--policy {name}: there is no file {file}.")


def choose_policy(name: str, spaces: tuple[Any, Any] | None, seed: int) -> Chosen:
    """Make the policy that ``check_policy`` let through.

    Args:
        name: of ``--policy``.
        spaces: observation and action space of one environment; needed by ``mlp`` and weights.
        seed: of fresh weights.

    Raises:
        UnsupportedSpace: the built-in MLP does not take these spaces.
        BadWeights: the file is damaged, or its network does not fit the spaces.
    """
    if name == "random":
        return Chosen(None, "uniform random actions")
    reference = _REFERENCE.fullmatch(name)
    if reference:
        return Chosen(_from_python(Path(reference.group(1)), reference.group(2)), name)
    from muster.cli import mlp

    assert spaces is not None
    return Chosen(*(mlp.fresh(*spaces, seed) if name == "mlp" else mlp.from_file(Path(name), *spaces)))


def obs_dtype_of(name: str) -> Any:
    """``--obs-dtype`` as the option of collectors."""
    import torch

    return {"policy": None, "env": "env"}.get(name, getattr(torch, name, None))


def needs_spaces(name: str) -> bool:
    """Whether ``choose_policy`` must know the spaces."""
    return name != "random" and not _REFERENCE.fullmatch(name)


def _from_python(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadOption(f"--policy {path}:{name}: {path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # an error in the user's file keeps its traceback
    if not hasattr(module, name):
        raise BadOption(f"--policy {path}:{name}: {path} defines no {name!r}.")
    return getattr(module, name)
