"""Crash reports: files from which ``muster replay`` makes an environment fail again, in one process.

It is a zip file of NumPy arrays (``np.load`` reads it), one of which is a JSON text. Pickles are in it only for
what is not plain data, and are loaded only where that is allowed.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import os
import platform
import secrets
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from muster.errors import BadCrashReport, BadOption, ImportRefused, described
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.pickling import dumps, loads
from muster.utils.whole_files import read_json, write_whole

FORMAT = 1
MOST_FILES = 32  # that one collector writes
PACKAGES = ("muster-rl", "gymnasium", "numpy", "torch")
SCALARS = (str, int, float, bool, type(None))
NOTHING = type(None)


class Special(NamedTuple):
    """What a reset had besides an environment: a seed, the random state before it, options."""

    seed: int | None
    state: dict[str, Any] | None
    options: dict[str, Any] | None

    @property
    def is_plain(self) -> bool:
        """Whether it had nothing."""
        return all(part is None for part in self)

    @property
    def is_anchor(self) -> bool:
        """Whether all that follows is determined by it."""
        return self.seed is not None or self.state is not None


@dataclass(frozen=True)
class Maker:
    """What a group's environments were made from: arguments of ``muster.envs.build.build_env``."""

    source: Any
    num_envs: int | None = None
    kwargs: Mapping[str, Any] | None = None
    device: Any = None


@dataclass
class CrashReport:
    """All that is known of how an environment got to where it failed.

    Attributes:
        name: of the environment.
        maker: its origin.
        env_ids: global numbers of those in the crash report.
        alone: it is one environment of a batch, in an environment batch of its own.
        phase: what failed: a "step", which is then the last action; a "reset", the last one; else what follows them.
        kind, message: class and text of the error.
        max_frames_per_traj: of the collector; the resets at its truncations are among the others.
        actions: ``[n, B, *shape]`` per leaf; B is 1 if ``alone``.
        resets: ``[m, 3]`` int64, in order: number of the call, actions before it, environment.
        special: by position in ``resets``.
        observation: before the failure, ``[B, *shape]``; or empty.
        missing: why it cannot be replayed; empty if it can.
        caveat: why the replay may go another way; empty if nothing is known.
        versions, time: of the programs, and of the failure.
    """

    name: str
    maker: Maker
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
    missing: str = ""
    caveat: str = ""
    versions: dict[str, str] = field(default_factory=lambda: installed())
    time: str = field(default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds"))

    @property
    def needs_trust(self) -> bool:
        """Whether loading it will run code that the file brings or names."""
        return bool(self._not_plain()) or (isinstance(self.maker.source, str) and ":" in self.maker.source)

    def command(self, path: Path) -> str:
        """That replays the file it was saved into."""
        return f"muster replay {path}" + " --trust" * self.needs_trust

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all, readable for its owner only.

        Raises:
            OSError: it cannot be written.
        """
        header, arrays = self._header(), {"resets": self.resets}
        try:
            pickled = dumps(parts, "the environment") if (parts := self._not_plain()) else b""
        except BadOption as error:
            pickled, header["missing"] = b"", f"It cannot be replayed: {error}"
        header["pickled"] = bool(pickled)
        arrays |= {"pickle": np.frombuffer(pickled, np.uint8)}
        for part in ("actions", "observation"):
            stored = {key: a for key, a in getattr(self, part).items() if a.dtype != object}
            header[part] = [list(key) for key in stored]
            arrays |= {f"{part}{n}": array for n, array in enumerate(stored.values())}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        write_whole(Path(path), [file.getbuffer()], mode=0o600)

    @staticmethod
    def load(path: str | Path, *, trust: bool = False) -> CrashReport:
        """Read what ``save`` has written.

        Args:
            trust: unpickle what is pickled, and let the environment's id import a module.

        Raises:
            BadCrashReport: the file is missing, damaged, or something else.
            ImportRefused: it needs ``trust``.
        """
        arrays, header = _read(Path(path))
        try:
            _check(header)
            pickled = arrays["pickle"].tobytes()
            named = header["source"] or ""
            if (pickled or ":" in named) and not trust:
                what = "a pickle, which can run any code" if pickled else f"{named!r}, which imports a module"
                raise ImportRefused(f"{path} holds {what}. If you trust where it comes from, add --trust (trust=True).")
            parts = loads(pickled, "the environment in the crash report") if pickled else {}
            special = {
                int(n): Special(seed, state, options or parts.get(f"options {n}"))
                for n, (seed, state, options) in header["special"].items()
            }
            maker = header["maker"]
            return CrashReport(
                **header["plain"],
                maker=Maker(
                    parts.get("source", named or None),
                    maker["num_envs"],
                    parts.get("kwargs", maker["kwargs"]),
                    maker["device"],
                ),
                missing=header["missing"],
                actions=_by_key(header, arrays, "actions") | parts.get("actions", {}),
                observation=_by_key(header, arrays, "observation") | parts.get("observation", {}),
                resets=arrays["resets"].astype(np.int64, casting="safe").reshape(-1, 3),
                special=special,
            )
        except BadOption:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise BadCrashReport(f"{path} is damaged: {described(error)}.") from error

    def _header(self) -> dict[str, Any]:
        plain = ("name", "env_ids", "alone", "phase", "kind", "message", "max_frames_per_traj", "caveat", "versions")
        maker, pickled = self.maker, self._not_plain()
        return {
            "format": FORMAT,
            "plain": {name: getattr(self, name) for name in (*plain, "time")},
            "missing": self.missing,
            "source": None if "source" in pickled else maker.source,
            "maker": {
                "num_envs": maker.num_envs,
                "kwargs": None if "kwargs" in pickled or maker.kwargs is None else dict(maker.kwargs),
                "device": None if maker.device is None else str(maker.device),
            },
            "special": {
                n: (seed, _plain_state(state), None if f"options {n}" in pickled else options)
                for n, (seed, state, options) in self.special.items()
            },
        }

    def _not_plain(self) -> dict[str, Any]:
        """What has to be pickled, by name."""
        found: dict[str, Any] = {}
        if not isinstance(self.maker.source, str):
            found["source"] = self.maker.source
        if self.maker.kwargs is not None and not _is_plain(dict(self.maker.kwargs)):
            found["kwargs"] = dict(self.maker.kwargs)
        found |= {f"options {n}": s[2] for n, s in self.special.items() if not _is_plain(s[2])}
        for part in ("actions", "observation"):
            objects = {key: array for key, array in getattr(self, part).items() if array.dtype == object}
            found |= {part: objects} if objects else {}
        return found


class CrashDirectory:
    """Where a collector puts its crash reports; made when the first one comes.

    Args:
        path: None: a new one for temporary files.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._written = 0

    def save(self, crash_report: CrashReport) -> Path | None:
        """Write a crash report; returns its file. None (and a warning, the first time) where that is not possible: the
        failure itself is what the user must hear of. No more than ``MOST_FILES`` are written.
        """
        if self._written >= MOST_FILES:
            return None
        self._written += 1
        try:
            self._make()
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            who = crash_report.env_ids[0] if len(crash_report.env_ids) == 1 else "all"
            token = secrets.token_hex(3)  # other collectors, perhaps of other machines, may write here, too
            path = cast(Path, self.path) / f"{stamp}-{os.getpid()}-{token}-{self._written:02d}-env-{who}.crash"
            crash_report.save(path)
        except Exception as error:  # noqa: BLE001  (nothing that happens here may hide the failure)
            warnings.warn(f"No crash report was written: {described(error)}", stacklevel=2)
            return None
        return path

    def put(self, name: str, content: bytes) -> Path | None:
        """Keep the file of a crash report that was written on another machine; as ``save``."""
        try:
            self._make()
            path = cast(Path, self.path) / Path(name).name
            path.write_bytes(content)
        except OSError as error:
            warnings.warn(f"No crash report was written: {described(error)}", stacklevel=2)
            return None
        return path

    def _make(self) -> None:
        if self.path is None:
            self.path = Path(tempfile.mkdtemp(prefix="muster-crash-"))
        self.path.mkdir(parents=True, exist_ok=True)


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that matter for a replay."""
    versions = {"python": platform.python_version()}
    versions |= {name: version for name in PACKAGES if (version := _version(name))}
    return versions


@functools.cache
def _version(package: str) -> str:
    """Looked up in files, and wanted while others wait."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # from a source tree
        return ""


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as file:
            packed = [entry.filename for entry in file.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:  # a small file could fill the memory
            raise ValueError(f"{packed[0]} is compressed")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = read_json(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise BadCrashReport(f"{path} has format {header['format']}, and this version of Muster reads {FORMAT}.")
        return arrays, header
    except BadCrashReport:
        raise
    except OSError as error:
        raise BadCrashReport(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # zipfile and numpy raise nearly anything on damaged files
        raise BadCrashReport(f"{path} is no crash report, or damaged: {described(error)}.") from error


_PLAIN: dict[str, type | tuple[type, ...]] = {  # types of a header's fields
    **dict.fromkeys(("name", "phase", "kind", "message", "caveat", "time"), str),
    **{"env_ids": list, "alone": bool, "max_frames_per_traj": (int, NOTHING), "versions": dict},
}
_MAKER: dict[str, type | tuple[type, ...]] = {
    "num_envs": (int, NOTHING),
    "kwargs": (dict, NOTHING),
    "device": (str, NOTHING),
}
_SPECIAL = ((int, NOTHING), (dict, NOTHING), (dict, NOTHING))  # a seed, a state, options


def _check(header: Mapping[str, Any]) -> None:
    """Raise ``TypeError``, or ``LookupError``, unless the fields are of the types that ``save`` writes."""
    told = [(name, header["plain"][name], kind) for name, kind in _PLAIN.items()]
    told += [("env_ids", number, int) for number in header["plain"]["env_ids"]]
    told += [(name, header["maker"][name], kind) for name, kind in _MAKER.items()]
    told += [("missing", header["missing"], str), ("source", header["source"], (str, NOTHING))]
    told += [
        (n, part, kind) for n, entry in header["special"].items() for part, kind in zip(entry, _SPECIAL, strict=True)
    ]
    for name, value, kind in told:
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {type(value).__name__}")
    if not header["plain"]["env_ids"]:
        raise ValueError("no environment")


def _by_key(header: Mapping[str, Any], arrays: Mapping[str, Array], part: str) -> dict[Key, Array]:
    return {tuple(key): arrays[f"{part}{n}"] for n, key in enumerate(header[part])}


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if type(value) is list else type(value) in SCALARS


def _plain_state(state: Any) -> Any:
    """The state of a bit generator as JSON can have it."""
    if isinstance(state, dict):
        return {key: _plain_state(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tolist()  # NumPy takes lists, too
    return int(state) if isinstance(state, np.integer) else state
