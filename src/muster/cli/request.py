"""``ENV`` and ``--policy``: their checks, the objects they name, and messages of errors about them."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.errors import BadOption, EnvError, ImportRefused, MusterError, described

PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib", ".npy"}
_REFERENCE = re.compile(r"(.+\.py):(\w+)")


@contextmanager
def prepared(
    command: Any, seed: int, spaces: tuple[Any, Any] | None = None
) -> Iterator[tuple[Any, str]]:
    """Make the policy of a command, and shorten the command's errors.

    Yields the policy, and its description.

    Names are checked before any import. Imports, if allowed, search the current directory, too.
    Only the first part of errors and warnings about workers is printed, with the traceback only if
    the user's code may run.

    Args:
        command: command with ``policy`` and ``allow_import``, and with ``env`` unless ``spaces``
            are given.
        seed: seed of new weights.
        spaces: spaces of observations and actions.

    Raises:
        ImportRefused: the environment or the policy would run code.
        BadOption: there is no such environment (the message names similar ones), or no such policy.
        EnvError: the environment cannot be made, and its spaces are needed.
    """
    env = "" if spaces else command.env
    allow_import = command.allow_import
    if ":" in env and not allow_import:
        raise ImportRefused(
            f"{env}: gymnasium imports the module before the colon, and so runs the code in it. "
            f"If you trust {env.partition(':')[0]!r}, add --allow-import."
        )
    _check_policy(command.policy, allow_import=allow_import)
    if spaces is None:
        _find_env(env)
    policy = _make_policy(command.policy, lambda: spaces or spaces_of(env), seed)
    with _printed_warnings(quiet=getattr(command, "quiet", False)):
        try:
            yield policy
        except MusterError as error:
            if error.worker is None:
                raise
            if allow_import:
                print(error, file=sys.stderr)
            text = _first_part(error)
            if error.replay_command:
                text += f"\nSee it happen again with: {error.replay_command}"
            error.args = (text,)
            raise error from None  # the original has no traceback in this process


@contextmanager
def _printed_warnings(*, quiet: bool) -> Iterator[None]:
    """Context in which only the first part of warnings is printed, or no warning and no log below
    errors.
    """
    log = logging.getLogger("muster")
    level = log.level
    with warnings.catch_warnings():
        if quiet:
            warnings.showwarning = lambda *_: None
            log.setLevel(logging.ERROR)
        else:
            warnings.showwarning = lambda message, *_: print(
                f"muster: {_first_part(message)}", file=sys.stderr
            )
        try:
            yield
        finally:
            log.setLevel(level)


def obs_dtype_of(name: str) -> Any:
    """Convert ``--obs-dtype`` to the option of collectors."""
    import torch

    return {"policy": None, "env": "env"}.get(name, getattr(torch, name, None))


def _make_policy(
    policy: str, spaces: Callable[[], tuple[Any, Any]], seed: int
) -> tuple[Any, str]:
    if policy == "random":
        return None, "uniform random actions"
    if reference := _REFERENCE.fullmatch(policy):
        path, name = reference.groups()
        defined = runpy.run_path(
            path
        )  # an error in the user's file keeps its traceback
        if name not in defined:
            raise BadOption(f"--policy {policy}: {path} defines no {name!r}.")
        return defined[name], policy
    from muster.cli import mlp

    return (
        mlp.fresh(*spaces(), seed)
        if policy == "mlp"
        else mlp.from_file(Path(policy), *spaces())
    )


def _first_part(error: object) -> str:
    return str(error).partition("\n\n")[0]


def _check_policy(name: str, *, allow_import: bool) -> None:
    """Raise for policies that are invalid by name, before any slow work.

    Imports then search this directory, too.
    """
    path = Path(name)
    if allow_import and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if name in ("random", "mlp"):
        return
    reference = _REFERENCE.fullmatch(name)
    if reference and not allow_import:
        raise ImportRefused(
            f"--policy {name} runs the file {reference.group(1)}, and so all the code in it. "
            "If you trust it, add --allow-import."
        )
    if path.suffix.lower() in PICKLES:
        raise ImportRefused(
            f"--policy {name}: files of this kind hold pickles, and loading a pickle can run any"
            " code that its author put there, so Muster loads none. Where you trust it, convert it"
            f" once: safetensors.torch.save_file(net.state_dict(), {path.stem + '.safetensors'!r}),"
            " and give that file."
        )
    file = Path(reference.group(1)) if reference else path
    if not reference and path.suffix != ".safetensors":
        raise BadOption(
            f"--policy {name!r} is none of: random, mlp, FILE.safetensors, FILE.py:NAME."
        )
    if not file.is_file():
        raise BadOption(f"--policy {name}: there is no file {file}.")


def _find_env(env: str) -> None:
    """Look up an id (importing its module, if it names one) without making the environment."""
    import gymnasium

    module, _, name = env.rpartition(":")
    try:
        if module:
            _import(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(
            name, list(gymnasium.registry), n=4, cutoff=0.6
        )
        hint = f" Similar: {', '.join(near)}." if near else ""
        if module:
            hint += f" Importing {module!r} does not register it."
        elif isinstance(
            error, (gymnasium.error.NamespaceNotFound, gymnasium.error.NameNotFound)
        ):
            hint += (
                " If a package or a module in this directory registers it, name that, too:"
                f" PACKAGE:{name} --allow-import (ale_py for ALE)."
            )
        raise BadOption(f"There is no environment {name!r}.{hint}") from error


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # the module exists, but one of its imports does not
        raise BadOption(
            f"There is no module {module!r} to import (searched where Python does, and here)."
        ) from error


def spaces_of(env: str) -> tuple[Any, Any]:
    """Return the spaces of observations and actions of an id. Raises ``EnvError``."""
    import gymnasium

    make: Callable[..., Any] = gymnasium.make
    try:
        one = make(env)
    except (
        Exception
    ) as error:  # a foreign constructor can raise anything; it is the cause
        raise EnvError(f"Making {env} raised {described(error)}") from error
    try:
        return one.observation_space, one.action_space
    finally:
        one.close()
