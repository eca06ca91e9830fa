"""``ENV`` and ``--policy``: what they may be, what they are; and how errors about them are told."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.errors import BadOption, EnvError, ImportRefused, MusterError, described

PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib", ".npy"}
_REFERENCE = re.compile(r"(.+\.py):(\w+)")


def admit(env: str, policy: str, *, allow_import: bool) -> None:
    """Refuse an id and a ``--policy`` that can be refused by name; imports, if allowed, find what is in this directory.

    Raises:
        ImportRefused: it would run code.
        BadOption: there is no such environment (the message names similar ones), or no such policy.
    """
    if ":" in env and not allow_import:
        raise ImportRefused(
            f"{env}: gymnasium imports the module before the colon, and so runs the code in it. "
            f"If you trust {env.partition(':')[0]!r}, add --allow-import."
        )
    _check_policy(policy, allow_import=allow_import)
    if allow_import and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _find_env(env)


def policy_for(env: str, policy: str, seed: int) -> tuple[Any, str]:
    """What a ``--policy`` names that ``admit`` has let through.

    Args:
        env: is made where its spaces are needed.
        policy: of ``--policy``.
        seed: of fresh weights.

    Returns:
        a policy for ``Collector``, and a line for the recording that says what it was.

    Raises:
        EnvError: the environment cannot be made.
        UnsupportedSpace: the built-in MLP does not take its spaces.
        BadWeights: the file is damaged, or its network does not fit the spaces.
    """
    if policy == "random":
        return None, "uniform random actions"
    if reference := _REFERENCE.fullmatch(policy):
        return _from_python(Path(reference.group(1)), reference.group(2)), policy
    from muster.cli import mlp

    spaces = _spaces(env)
    return mlp.fresh(*spaces, seed) if policy == "mlp" else mlp.from_file(Path(policy), *spaces)


def obs_dtype_of(name: str) -> Any:
    """``--obs-dtype`` as the option of collectors."""
    import torch

    return {"policy": None, "env": "env"}.get(name, getattr(torch, name, None))


@contextmanager
def in_short(env: str, *, allow_import: bool) -> Iterator[None]:
    """Say the first part of errors and warnings about workers; the traceback only where code of the user's may run."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"muster: {_first_part(message)}", file=sys.stderr)
        try:
            yield
        except MusterError as error:
            if error.worker is None:
                raise
            if allow_import:
                print(error, file=sys.stderr)
            hint = (
                "" if error.crash_report is None else f"\nSee it happen again with: muster replay {error.crash_report}"
            )
            trust = " --trust" if hint and ":" in env else ""
            error.args = (f"{_first_part(error)}{hint}{trust}",)
            raise error from None  # the original has no traceback in this process


def _first_part(error: object) -> str:
    return str(error).partition("\n\n")[0]


def _check_policy(name: str, *, allow_import: bool) -> None:
    """Refuse what can be refused from the name alone, before anything slow happens."""
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


def _find_env(env: str) -> None:
    """Look an id up (importing its module, if it names one) without making the environment."""
    import gymnasium

    module, _, name = env.rpartition(":")
    try:
        if module:
            _import(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=4, cutoff=0.6)
        hint = f" Similar: {', '.join(near)}." if near else ""
        if isinstance(error, gymnasium.error.NamespaceNotFound):
            hint += (
                f" If an installed package has it, name the package: muster collect PACKAGE:{name} --allow-import "
                f"(ale_py for ALE)."
            )
        raise BadOption(f"There is no environment {name!r}.{hint}") from error


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # the module is there, and something that it imports is not
        raise BadOption(f"There is no module {module!r} to import (searched where Python does, and here).") from error


def _spaces(env: str) -> tuple[Any, Any]:
    """Observation and action space of an environment."""
    import gymnasium

    make: Callable[..., Any] = gymnasium.make
    try:
        one = make(env)
    except Exception as error:  # whatever a foreign constructor raises; it is the cause
        raise EnvError(f"Making {env} raised {described(error)}") from error
    try:
        return one.observation_space, one.action_space
    finally:
        one.close()


def _from_python(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadOption(f"--policy {path}:{name}: {path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # an error in the user's file keeps its traceback
    if not hasattr(module, name):
        raise BadOption(f"--policy {path}:{name}: {path} defines no {name!r}.")
    return getattr(module, name)
