"""Columns of infos: ``info=True``, ``info=["success"]`` or ``info={"success": space}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from muster.envs.checks import NUMBERS, described_value
from muster.envs.spaces import leaf_spec
from muster.envs.wrapped import WrappedEnvs
from muster.errors import BadEnvOutput, BadOption, EnvError
from muster.keys import INFO, Key, mask_of
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, ArraySpec
from muster.protocols import ALL, EnvBatch

Seen = dict[Key, "ArraySpec | None"]  # specs by path of names; None: a kind of value that is not stored
Cells = list[tuple["InfoField", Array, Array]]  # with values ``[rows, B, *shape]``, and flags of present values

OF_ADAPTERS = {"final_obs", "final_info", "final_observation", "terminal_observation"}
FLAG, FLOAT, INTEGER = (ArraySpec((), np.dtype(kind)) for kind in (bool, np.float64, np.int64))
# Fields of ``RecordEpisodeStatistics`` and SB3's ``Monitor``, which add them at the end of an episode only.
STATISTICS: Seen = {("episode", "r"): FLOAT, ("episode", "l"): INTEGER, ("episode", "t"): FLOAT}
FITTING = {"b": "b", "i": "iub", "u": "iub", "f": "iubf"}  # kinds of values by the kind of a column


def wanted_infos(info: Any) -> dict[Key, Any]:
    """The paths that the option ``info`` lists, with their spaces (None: to be inferred). Empty for True and False.

    Raises:
        BadOption: anything else than a bool, names, or spaces by name.
    """
    if isinstance(info, bool):
        return {}
    wanted: dict[Key, Any] = {}
    try:
        for name, space in info.items() if isinstance(info, Mapping) else ((name, None) for name in info):
            wanted |= _opened((name,) if isinstance(name, str) else tuple(name), space)
    except TypeError:
        wanted = {}
    names = [name for path in wanted for name in path or [""]]
    if isinstance(info, str) or not names or not all(isinstance(name, str) and name[:1] not in "_" for name in names):
        raise BadOption(
            f"info={info!r}: expected True, a list of names such as ['success', ('episode', 'r')], or a dict of "
            f"Gymnasium spaces by name; names do not begin with '_'"
        )
    for path, space in wanted.items():
        if space is not None and not (isinstance(space, spaces.Text) or leaf_spec(space).is_tensor):
            raise BadOption(f"info: {_shown(path)} has the space {space}: expected numbers, arrays, text, or Dict")
    return wanted


def _opened(path: Key, space: Any) -> dict[Key, Any]:
    if not isinstance(space, spaces.Dict):
        return {path: space}
    return {leaf: part for name, inner in space.spaces.items() for leaf, part in _opened((*path, name), inner).items()}


def with_infos(env: EnvBatch, info: Any, look: Callable[[], Seen]) -> EnvBatch:
    """``env``, which also writes its infos.

    Args:
        info: the option; not False.
        look: what infos look like; called if the option does not say it.

    Raises:
        BadOption: ``env`` has no infos, or a field was not seen that has no space.
    """
    if env.keeps_infos is None:
        raise BadOption(
            f"info: Muster reads infos of Gymnasium, EnvPool, PettingZoo, dm_env and Stable-Baselines3. {env.name} "
            f"returns no infos (TorchRL), or steps on a device. Remove the option"
        )
    if taken := [key for key in env.observation_specs if key[0] == INFO]:
        raise BadOption(f"info: {env.name} has the observation {taken[0]} already. Rename it, or remove the option")
    env.keeps_infos = True
    wanted = wanted_infos(info)
    given = {path: leaf_spec(space) for path, space in wanted.items() if space is not None}
    seen = look() if len(given) < len(wanted) or not wanted else {}
    if not wanted:
        given = {path: spec for path, spec in seen.items() if spec is not None}
        for path in seen.keys() - given.keys():
            _warn_of(env, path, "it is no number, array or text")
    for path in wanted.keys() - given.keys():
        known: Seen = {**STATISTICS, **seen}
        found = {leaf: spec for leaf, spec in known.items() if leaf[: len(path)] == path and spec is not None}
        if not found:
            raise BadOption(
                f"info: {env.name}: no number, array or text {_shown(path)} was in the infos of a reset and a random "
                f"step. Give its space: info={{{_shown(path)}: spaces.Box(...)}}"
            )
        given |= found
    if not given:
        raise BadOption(
            f"info=True: {env.name} returned no infos from a reset and a random step. Give the spaces of those that "
            f"come later, as in info={{'success': spaces.Discrete(2)}}, or remove the option"
        )
    if nested := [path for path in given for i in range(1, len(path)) if path[:i] in given]:
        raise BadOption(f"info: {env.name}: {nested[0][:-1]} is a dict, and also a value. Name one of them only")
    return cast(EnvBatch, _WithInfos(env, [InfoField(path, given[path]) for path in sorted(given)], watched=not wanted))


def look_at(env: EnvBatch, seen: Seen) -> None:
    """Add what ``env.new_infos`` are like to ``seen``.

    Raises:
        BadOption: something that was seen before is of another kind now.
    """
    found: list[tuple[Key, ArraySpec | None]] = []
    for told, _ in env.new_infos:
        for info in (told,) if isinstance(told, Mapping) else told:
            _look(info or {}, (), None, found, many=isinstance(told, Mapping))
    for path, spec in found:
        before = seen.setdefault(path, spec)
        if spec is None or before is None or str(spec) == str(before):
            continue
        if spec.shape != before.shape or not {spec.dtype.kind, before.dtype.kind} <= set("iuf"):
            raise BadOption(f"info: {env.name}: {_shown(path)} has {before} at first, and then {spec}. Give its space")
        seen[path] = ArraySpec(spec.shape, np.result_type(spec.dtype, before.dtype))


def _look(info: Mapping[Any, Any], path: Key, mask: Any, found: list[Any], *, many: bool) -> None:
    """Note names and specs; of ``many`` environments values are ``[B, ...]``, and present by the mask."""
    for name, value in info.items():
        if not isinstance(name, str) or name[:1] in "_" or name in OF_ADAPTERS or value is None:
            continue
        there = info.get(f"_{name}", mask) if many else None
        if isinstance(value, Mapping):
            _look(value, (*path, name), there, found, many=many)
            continue
        shown = [value] if not many else np.asarray(value)[... if there is None else there][:1]
        found += [((*path, name), _spec_of(each)) for each in shown if each is not None]


def _spec_of(value: Any) -> ArraySpec | None:
    if isinstance(value, str):
        return ArraySpec((), OBJECT)
    if not isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return None
    array = np.asarray(value)
    return ArraySpec(array.shape, array.dtype) if array.dtype.kind in NUMBERS else None


@dataclass(eq=False)
class InfoField:
    """One field of infos, at ``path``; ``fitting``: types of numbers that are known to fit."""

    path: Key
    spec: ArraySpec
    fitting: set[type] = field(default_factory=set)

    def stored(self) -> dict[Key, ArraySpec]:
        """Return the specs of the columns: values, and flags of present values."""
        return {(INFO, *self.path): self.spec, (INFO, *mask_of(self.path)): FLAG}

    @property
    def blank(self) -> Any:
        return 0 if self.spec.is_tensor else ""

    def fits(self, value: Any, lead: tuple[int, ...] = ()) -> bool:
        """Return whether ``value``, ``[*lead, *shape]``, can be stored."""
        if not self.spec.is_tensor:
            return isinstance(value, str)
        array = np.asarray(value)
        fits = array.shape == (*lead, *self.spec.shape) and array.dtype.kind in FITTING[self.spec.dtype.kind]
        if fits and isinstance(value, (bool, int, float, np.generic)):
            self.fitting.add(type(value))
        return fits


class _WithInfos(WrappedEnvs):
    """
    Args:
        watched: warn of fields that are not among ``fields``.
    """

    def __init__(self, inner: EnvBatch, fields: Sequence[InfoField], *, watched: bool) -> None:
        super().__init__(inner)
        specs = {key: spec for each in fields for key, spec in each.stored().items()}
        known: dict[Key, set[str]] = {}  # names, by the dict that they are in
        for path in [each.path[: i + 1] for each in fields for i in range(len(each.path)) if watched]:
            known.setdefault(path[:-1], set(OF_ADAPTERS)).update((path[-1], f"_{path[-1]}"))
        self.__dict__.update(info_specs=specs, _fields=fields, _known=known, _first={})

    def reset(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        self.inner.reset(arrays, row, which, seeds)
        waiting = list(which)
        for told, some in self.inner.new_infos:
            now = [i for i in which if some is ALL or i in some]
            self._put(self._cells(arrays), row, now, told)
            waiting = [i for i in waiting if i not in now]
        for key, first in self._first.items():
            arrays[key][row, waiting] = first[waiting]

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        cells = lane.cache.get(self)
        if cells is None:
            cells = lane.cache[self] = self._cells(lane.arrays)
        inner, arrays = self.inner, lane.arrays

        def note(t: int) -> None:
            for number, (told, some) in enumerate(inner.new_infos):
                for key in self.info_specs if number else ():  # the row has the infos of the first observations
                    self._first.setdefault(key, np.zeros_like(arrays[key][0]))[some] = arrays[key][t + 1, some]
                self._put(cells, t + 1, some, told)

        return note

    def snapshot(self) -> dict[str, Any]:
        first = {key: array.tolist() if array.dtype == OBJECT else array.copy() for key, array in self._first.items()}
        return {**self.inner.snapshot(), **({"first_infos": first} if first else {})}

    def restore(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        first = rest.pop("first_infos", {})
        self.__dict__["_first"] = {key: np.array(rows, self.info_specs[key].dtype) for key, rows in first.items()}
        self.inner.restore(rest)

    def _cells(self, arrays: Mapping[Key, Array]) -> Cells:
        return [(each, *map(arrays.__getitem__, each.stored())) for each in self._fields]

    def _put(self, cells: Cells, row: int, some: Any, told: Any) -> None:
        """Write infos of the environments ``some`` into a row; see ``EnvBatch.new_infos``."""
        if isinstance(told, Mapping):
            self._check_names(told)
            for each, values, flags in cells:
                self._put_many(each, values[row], flags[row], some, told)
            return
        for i in range(self.num_envs) if some is ALL else some:
            info = {} if told[i] is None else told[i]
            if not isinstance(info, Mapping):
                raise BadEnvOutput(
                    f"{self.name}[{i}] returned an info that is {described_value(info)}, expected a dict"
                )
            self._check_names(info)
            for each, values, flags in cells:
                value: Any = info
                for name in each.path:
                    value = self._part(value, name, each, i)
                self._put_one(each, values[row], flags[row], i, value)

    def _part(self, info: Any, name: str, each: InfoField, i: int | None) -> Any:
        if info is None or isinstance(info, Mapping):
            return None if info is None else info.get(name)
        raise self._misfit(each.path[:-1], "a dict", info, i)

    def _put_one(self, each: InfoField, values: Array, flags: Array, i: int, value: Any) -> None:
        if value is None:
            values[i], flags[i] = each.blank, False
            return
        if type(value) not in each.fitting and not each.fits(value):
            raise self._misfit(each.path, str(each.spec) if each.spec.is_tensor else "text", value, i)
        values[i], flags[i] = value, True

    def _put_many(self, each: InfoField, values: Array, flags: Array, some: Any, info: Mapping[str, Any]) -> None:
        """Write a row, ``[B, *shape]``, of what a dict of arrays has."""
        column: Any = info
        mask: Any = True  # of the dicts around it where it has none
        for name in each.path:
            mask = mask if column is None else column.get(f"_{name}", mask)
            column = self._part(column, name, each, None)
        if column is None:
            values[some], flags[some] = each.blank, False
            return
        column = np.asarray(column)
        flags[some] = mask if mask is True else mask[some]
        if column.dtype.kind in "OU":
            for i in range(self.num_envs) if some is ALL else some:
                self._put_one(each, values, flags, i, column[i] if flags[i] else None)
            return
        if not each.fits(column, (self.num_envs,)):
            raise self._misfit(each.path, f"{each.spec}, {self.num_envs} times", column, None)
        values[some] = column[some]
        if mask is not True:
            values[~flags] = each.blank

    def _check_names(self, info: Mapping[str, Any]) -> None:
        """Warn, once, of what was not seen when columns were made."""
        for path, known in self._known.items():
            part: Any = info
            for name in path:
                part = part.get(name) if isinstance(part, Mapping) else None
            if not isinstance(part, Mapping) or part.keys() <= known:
                continue
            for name in sorted(name for name in part.keys() - known if isinstance(name, str) and name[:1] not in "_"):
                _warn_of(self, (*path, name), "the first reset and step did not have it")
            known.update(part)

    def _misfit(self, path: Key, expected: str, value: Any, i: int | None) -> EnvError:
        who = self.name if i is None else f"{self.name}[{i}]"
        return EnvError(
            f"{who}: info {_shown(path)} is {described_value(value)}, expected {expected}, as in its space or when it "
            f"was first seen. Let the environment always return the same shape and kind, or give a space that holds "
            f"all its values: info={{{_shown(path)}: spaces.Box(...)}}",
            env_index=i,
        )


def _shown(path: Key) -> str:
    return repr(path[0] if len(path) == 1 else path)


def _warn_of(env: Any, path: Key, why: str) -> None:
    text = f"info {_shown(path)} is ignored: {why}. To store it, give its space: info={{{_shown(path)}: ...}}."
    env.casts.warn(f"{env.name}: {text}")
