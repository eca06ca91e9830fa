"""Crash reports: files from which ``muster replay`` makes an environment fail again, in one
process.

The file is a checkpoint (``muster.restore.checkpoint``). All values that are not plain data are one
pickle in it, which is loaded only if the caller allows it.
"""

from __future__ import annotations

import datetime
import os
import platform
import secrets
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from muster.errors import (
    BadCheckpoint,
    BadCrashReport,
    BadOption,
    ImportRefused,
    described,
)
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.pickling import dumps, loads
from muster.restore.registered import (
    SentIds,
    ids_of_this_process,
    imports_foreign_code,
    is_plain_spec,
    plain_spec,
    sent_spec,
)
from muster.utils.attributes import installed
from muster.utils.whole_files import make_folder, write_whole

FORMAT = 2
MOST_FILES = 32  # per collector
MOST_ID_BYTES = 1 << 20  # limit for an id of the registry in a file
PACKAGES = ("muster-rl", "gymnasium", "numpy", "torch")
PLAIN = (str, int, float, bool, bytes, type(None))
NOTHING = type(None)


class Special(NamedTuple):
    """The seed, the random state before it, and the options of a reset."""

    seed: int | None
    state: dict[str, Any] | None
    options: dict[str, Any] | None

    @property
    def is_plain(self) -> bool:
        return all(part is None for part in self)

    @property
    def is_anchor(self) -> bool:
        """Whether the reset determines everything that follows."""
        return self.seed is not None or self.state is not None


@dataclass(frozen=True)
class EnvFactory:
    """The arguments of ``muster.envs.build.build_env`` from which a group's environments were made."""

    source: Any
    num_envs: int | None = None
    kwargs: Mapping[str, Any] | None = None
    device: Any = None


@dataclass
class CrashReport:
    """The actions and resets that led an environment to its failure.

    Attributes:
        env_ids: global numbers of the environments; one if ``alone``: replayed without the rest of
            its env batch.
        phase: "step": the last action failed; "reset": the last reset failed; else the failure came
            after both.
        kind, message: class and text of the error.
        max_frames_per_traj: option of the collector; ``resets`` has the resets at its truncations,
            too.
        actions: ``[n, B, *shape]`` per leaf; B is 1 if ``alone``.
        resets: ``[m, 3]`` int64, in order: number of the call, actions before it, environment.
        special: seeds, random states and options, by position in ``resets``.
        observation: observation before the failure, ``[B, *shape]``; or empty.
        episode: of a kept episode, which the last reset starts: its return, length and numbers;
            else empty.
        registered: ids that the environment may need, from a file. None: those of this process.
        missing, caveat: why the failure cannot be replayed, and why a replay may differ from it;
            else empty.
    """

    name: str
    factory: EnvFactory
    env_ids: list[int]
    alone: bool
    phase: str
    kind: str
    message: str
    max_frames_per_traj: int | None = None
    actions: dict[Key, Array] = field(default_factory=dict)
    resets: Array = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    special: dict[int, Special] = field(default_factory=dict)
    observation: dict[Key, Array] = field(default_factory=dict)
    episode: dict[str, Any] = field(default_factory=dict)
    registered: SentIds | None = None
    missing: str = ""
    caveat: str = ""
    versions: dict[str, str] = field(default_factory=lambda: versions())
    time: str = field(
        default_factory=lambda: (
            datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        )
    )

    def command(self, path: Path) -> str:
        """The command that replays the file ``path``; with --trust if the file contains or names
        code that runs.
        """
        source = self.factory.source
        runs_code = isinstance(source, str) and ":" in source
        if not runs_code:
            runs_code = not all(map(_is_plain, self._fields().values()))
        trust = " --trust" if runs_code else ""
        return f"muster replay {path}{trust}"

    def save(self, path: str | Path) -> None:
        """Write the file atomically, readable for its owner only."""
        from muster.restore import checkpoint  # needs torch

        checkpoint.save(path, self.state(), mode=0o600)

    def state(self) -> dict[str, Any]:
        """The content of the file.

        Fields that cannot be pickled are left out, and ``missing`` says so.
        """
        state = self._fields()
        pickled = {name: value for name, value in state.items() if not _is_plain(value)}
        for name in pickled:
            state[name] = {} if _TYPES[name] is dict else None
        try:
            state["pickle"] = dumps(pickled, "the environment") if pickled else b""
        except BadOption as error:
            state["pickle"] = b""
            state["missing"] = f"It cannot be replayed: {error}"
        return state | {"format": FORMAT}

    @staticmethod
    def load(path: str | Path, *, trust: bool = False) -> CrashReport:
        """Read a file that ``save`` has written.

        ``trust`` allows unpickling, and an environment id that imports a module. Without it such a
        file raises ``ImportRefused``. A missing or damaged file raises ``BadCrashReport``.
        """
        from muster.restore import checkpoint

        try:
            state = checkpoint.load(path)
        except BadCheckpoint as error:
            raise BadCrashReport(f"No crash report: {error}") from error
        _check(state, path)
        pickled = state.pop("pickle")
        named = state["source"] or ""
        spec = state.pop("spec")
        if (pickled or ":" in named) and not trust:
            what = f"{named!r}, which imports a module"
            if pickled:
                what = "a pickle, which can run any code"
            raise ImportRefused(
                f"{path} holds {what}. If you trust where it comes from, add --trust (trust=True)."
            )
        if spec:
            state["registered"] = _from_file(spec, path, trust=trust)
        if pickled:
            state |= loads(pickled, "the environment in the crash report")
        state["special"] = {n: Special(*entry) for n, entry in state["special"].items()}
        factory = EnvFactory(
            source=state.pop("source"),
            num_envs=state.pop("num_envs"),
            kwargs=state.pop("kwargs"),
            device=state.pop("device"),
        )
        return CrashReport(factory=factory, **state)

    def _fields(self) -> dict[str, Any]:
        """The fields of the file, of which some may be no plain data."""
        factory = self.factory
        spec, registered = _ids_for(factory.source)
        own = {name: value for name, value in vars(self).items() if name != "factory"}
        return own | {
            "source": factory.source,
            "num_envs": factory.num_envs,
            "kwargs": None if factory.kwargs is None else dict(factory.kwargs),
            "device": None if factory.device is None else str(factory.device),
            "special": {n: tuple(entry) for n, entry in self.special.items()},
            "spec": spec,
            "registered": registered,
        }


class CrashDirectory:
    """The directory of a collector's crash reports, by default a new temporary one; made for the
    first report.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._written = 0

    def save(self, crash_report: CrashReport) -> Path | None:
        """Write a crash report and return its file; None after ``MOST_FILES``, or (with a warning)
        if it fails.
        """
        if self._written >= MOST_FILES:
            return None
        self._written += 1
        try:
            self._make()
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            who = crash_report.env_ids[0] if len(crash_report.env_ids) == 1 else "all"
            # other collectors, also of other machines, may use this directory
            token = secrets.token_hex(3)
            number = f"{os.getpid()}-{token}-{self._written:02d}"
            path = cast(Path, self.path) / f"{stamp}-{number}-env-{who}.crash"
            crash_report.save(path)
        except Exception as error:  # noqa: BLE001  (an error here must not hide the failure)
            warnings.warn(
                f"No crash report was written: {described(error)}", stacklevel=2
            )
            return None
        return path

    def put(self, name: str, content: bytes) -> Path | None:
        """Write the content of a crash report's file from another machine; return its path, None if
        this fails.
        """
        try:
            self._make()
            path = cast(Path, self.path) / Path(name).name
            write_whole(path, [content], mode=0o600)
        except OSError as error:
            warnings.warn(
                f"No crash report was written: {described(error)}", stacklevel=2
            )
            return None
        return path

    def _make(self) -> None:
        if self.path is None:
            self.path = Path(tempfile.mkdtemp(prefix="muster-crash-"))
        make_folder(self.path)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for a replay."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        version = installed(name)
        if version:
            found[name] = version
    return found


_TYPES: dict[str, Any] = {  # types of the fields of a file
    "name": str,
    "phase": str,
    "kind": str,
    "message": str,
    "missing": str,
    "caveat": str,
    "time": str,
    "actions": dict,
    "special": dict,
    "observation": dict,
    "episode": dict,
    "versions": dict,
    "num_envs": (int, NOTHING),
    "max_frames_per_traj": (int, NOTHING),
    "env_ids": list,
    "alone": bool,
    "resets": np.ndarray,
    "pickle": bytes,
    "source": (str, NOTHING),
    "kwargs": (dict, NOTHING),
    "device": (str, NOTHING),
    "spec": dict,
    "registered": NOTHING,
}
_SPECIAL = (
    (int, NOTHING),
    (dict, NOTHING),
    (dict, NOTHING),
)  # a seed, a state, options
EPISODE = {"episode_return": float, "length": int, "env_id": int, "traj_id": int}


def _are_env_ids(ids: list[Any]) -> bool:
    return bool(ids) and all(type(i) is int for i in ids)


def _are_resets(resets: Array) -> bool:
    return resets.dtype.kind == "i" and resets.shape[1:] == (3,)


def _are_special(special: dict[Any, Any]) -> bool:
    for position, entry in special.items():
        if type(position) is not int or type(entry) is not tuple or len(entry) != 3:
            return False
        if not all(map(isinstance, entry, _SPECIAL)):
            return False
    return True


def _is_spec(spec: dict[str, Any]) -> bool:
    return not spec or is_plain_spec(spec)


def _is_episode(numbers: dict[str, Any]) -> bool:
    return (
        not numbers or {name: type(value) for name, value in numbers.items()} == EPISODE
    )


def _are_columns(arrays: dict[Any, Any]) -> bool:
    if any(type(key) is not tuple for key in arrays):
        return False
    return all(isinstance(array, np.ndarray) for array in arrays.values())


_PARTS: dict[str, Callable[[Any], bool]] = {  # conditions on some of these fields
    "env_ids": _are_env_ids,
    "resets": _are_resets,
    "special": _are_special,
    "spec": _is_spec,
    "episode": _is_episode,
    "actions": _are_columns,
    "observation": _are_columns,
}


def _ids_for(source: Any) -> tuple[dict[str, Any], SentIds | None]:
    """Return the id that a replay needs as plain data, if ``source`` is one of a class of
    Gymnasium's; else all ids.
    """
    spec = {}
    if isinstance(source, str) and ":" not in source:
        spec = plain_spec(source)
    if spec:
        return spec, None
    return {}, ids_of_this_process(MOST_ID_BYTES)


def _from_file(
    spec: dict[str, Any],
    path: str | Path,
    *,
    trust: bool,
) -> SentIds | None:
    """Return the id of a file, for ``installed``; None if this process has it."""
    if not trust and imports_foreign_code(spec):
        raise ImportRefused(
            f"{path} holds the id {spec['id']!r}, and making it imports {spec['entry_point']!r}. If"
            " you trust where it comes from, add --trust (trust=True)."
        )
    return sent_spec(spec)


def _check(state: Any, path: str | Path) -> None:
    """Raise ``BadCrashReport`` unless this is the content of a crash report."""
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise BadCrashReport(
            f"{path} is not a crash report of format {FORMAT}, which this version of Muster reads."
        )
    # the first files of this format had no ids
    state.setdefault("spec", {})
    state.setdefault("registered", None)
    wrong = [
        name
        for name, kind in _TYPES.items()
        if not isinstance(state.get(name, ...), kind)
    ]
    for name, fits in _PARTS.items():
        if name not in wrong and not fits(state[name]):
            wrong.append(name)
    if wrong or state.keys() != _TYPES.keys():
        raise BadCrashReport(
            f"{path} is damaged: look at {wrong or sorted(state.keys() - _TYPES.keys())}."
        )


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint restores ``value`` exactly."""
    if type(value) is dict:
        return all(map(_is_key, value)) and all(map(_is_plain, value.values()))
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufcSUmM"
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in PLAIN


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(type(part) is str for part in key)
    return type(key) in (str, int)
