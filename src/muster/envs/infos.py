"""Columns of infos: ``info=True``, ``info=["success"]`` or ``info={"success": space}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from muster.envs.checks import NUMBERS, described_value
from muster.envs.spaces import action_masks, leaf_spec
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
    """Return the spaces in the option ``info`` by path (None: use the seen spec; path (): all), or raise BadOption."""
    if isinstance(info, bool):
        return {(): None} if info else {}
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
    """Wrap ``env`` so that it also writes its infos; ``look`` returns specs, for infos without a space.

    Raises:
        BadOption: ``env`` has no infos, or an info without a space was not seen.
    """
    if env.keeps_infos is None:
        raise BadOption(
            f"info: Muster reads infos of Gymnasium, EnvPool, PettingZoo, dm_env and Stable-Baselines3. {env.name} "
            f"returns none (TorchRL), steps on a device, or its agents take turns. Remove the option"
        )
    if taken := [key for key in env.observation_specs if key[0] == INFO]:
        raise BadOption(f"info: {env.name} has the observation {taken[0]} already. Rename it, or remove the option")
    env.keeps_infos = True
    wanted = wanted_infos(info)
    specs = {path: leaf_spec(space) for path, space in wanted.items() if space is not None}
    seen = look() if len(specs) < len(wanted) else {}
    for path in wanted.keys() - specs.keys():
        known: Seen = {**STATISTICS, **seen} if path else seen
        found = {leaf: spec for leaf, spec in known.items() if leaf[: len(path)] == path and spec is not None}
        if not found:
            raise BadOption(
                f"info: {env.name}: no number, array or text {_shown(path) if path else 'at all'} was in the infos of "
                f"a reset and a random step. Give the spaces of what comes later, as in "
                f"info={{{_shown(path or ('success',))}: spaces.Discrete(2)}}, or remove it"
            )
        specs |= found
    for path in [path for path, spec in seen.items() if spec is None and () in wanted]:
        _warn_of(env, path, "it is no number, array or text")
    if nested := [path for path in specs for i in range(1, len(path)) if path[:i] in specs]:
        raise BadOption(f"info: {env.name}: {nested[0][:-1]} is a dict, and also a value. Name one of them only")
    fields = [InfoField(path, specs[path]) for path in sorted(specs)]
    return cast(EnvBatch, _WithInfos(env, fields, watched=() in wanted))


def look_at(env: EnvBatch, seen: Seen) -> None:
    """Add the specs of ``env.new_infos`` to ``seen``. Raises BadOption if the kind or shape of an info changes."""
    found: list[tuple[Key, Any]] = []
    for told, _ in env.new_infos:
        if isinstance(told, Mapping):
            for path, (column, mask) in _leaves(told, many=True).items():
                there = np.ones(env.num_envs, bool) if mask is True else mask
                found += [(path, value) for value in np.asarray(column)[there][:1]]
        else:
            found += [(path, value) for info in told for path, (value, _) in _leaves(info or {}).items()]
    for path, value in found:
        spec = _spec_of(value)
        before = seen.setdefault(path, spec)
        if spec is None or before is None or str(spec) == str(before):
            continue
        if spec.shape != before.shape or not {spec.dtype.kind, before.dtype.kind} <= set("iuf"):
            raise BadOption(f"info: {env.name}: {_shown(path)} has {before} at first, and then {spec}. Give its space")
        seen[path] = ArraySpec(spec.shape, np.result_type(spec.dtype, before.dtype))


def _leaves(
    info: Mapping[Any, Any], path: Key = (), mask: Any = True, *, many: bool = False
) -> dict[Key, tuple[Any, Any]]:
    """Return values and True by path; if ``many``, values ``[B, ...]`` and masks of environments that have them."""
    found: dict[Key, tuple[Any, Any]] = {}
    for name, value in info.items():
        if value is None or not isinstance(name, str) or name[:1] in "_" or name in OF_ADAPTERS:
            continue
        there = info.get(f"_{name}", mask) if many else True
        if isinstance(value, dict):  # a check of other mappings takes ten times as long
            found.update(_leaves(value, (*path, name), there, many=many))
        else:
            leaf = (*path, name)
            found[leaf] = value, there
    return found


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
    """Writes infos. ``watched``: warn of infos that are not in ``fields``. ``begun``: infos of resets within a step."""

    def __init__(self, inner: EnvBatch, fields: Sequence[InfoField], *, watched: bool) -> None:
        super().__init__(inner)
        specs = {key: spec for each in fields for key, spec in each.stored().items()}
        known = {each.path for each in fields} if watched else None
        masks = inner.action_masks or action_masks(specs, inner.action_specs, (INFO,))
        self.__dict__.update(info_specs=specs, action_masks=masks, _fields=fields, _known=known, begun={})

    def reset(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        self.inner.reset(arrays, row, which, seeds)
        cells, waiting = self._cells(arrays), list(which)
        for told, some in self.inner.new_infos:
            now = [i for i in which if some is ALL or i in some]
            self._put(cells, row, now, told)
            waiting = [i for i in waiting if i not in now]
        for key, first in self.begun.items():
            arrays[key][row, waiting] = first[waiting]

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        cells = lane.cache.get(self)
        if cells is None:
            cells = lane.cache[self] = self._cells(lane.arrays)
        inner, arrays = self.inner, lane.arrays

        def note(t: int) -> None:
            for number, (told, some) in enumerate(inner.new_infos):
                for key in self.info_specs if number else ():  # the row has the infos of the reset, the first pair
                    self.begun.setdefault(key, np.zeros_like(arrays[key][0]))[some] = arrays[key][t + 1, some]
                self._put(cells, t + 1, some, told)

        return note

    def snapshot(self) -> dict[str, Any]:
        first = {key: array.tolist() if array.dtype == OBJECT else array.copy() for key, array in self.begun.items()}
        return {**self.inner.snapshot(), **({"first_infos": first} if first else {})}

    def restore(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        first = rest.pop("first_infos", {})
        self.__dict__["begun"] = {key: np.array(rows, self.info_specs[key].dtype) for key, rows in first.items()}
        self.inner.restore(rest)

    def _cells(self, arrays: Mapping[Key, Array]) -> Cells:
        return [(each, *map(arrays.__getitem__, each.stored())) for each in self._fields]

    def _put(self, cells: Cells, row: int, some: Any, told: Any) -> None:
        """Write infos of the environments ``some`` into a row; see ``EnvBatch.new_infos``."""
        if isinstance(told, Mapping):
            leaves = _leaves(told, many=True)
            self._warn_of_unknown(leaves)
            for each, values, flags in cells:
                self._put_many(each, values[row], flags[row], some, *leaves.get(each.path, (None, True)))
            return
        for i in range(self.num_envs) if some is ALL else some:
            info = {} if told[i] is None else told[i]
            if not isinstance(info, dict):
                raise BadEnvOutput(f"{self.name}[{i}] returned the info {described_value(info)}, expected a dict")
            if self._known is not None:
                self._warn_of_unknown(_leaves(info))
            for each, values, flags in cells:
                value: Any = info
                for name in each.path:
                    value = value.get(name) if isinstance(value, dict) else None
                self._put_one(each, values[row], flags[row], i, value)

    def _put_one(self, each: InfoField, values: Array, flags: Array, i: int, value: Any) -> None:
        if value is None:
            values[i], flags[i] = each.blank, False
            return
        if type(value) not in each.fitting and not each.fits(value):
            raise self._misfit(each, value, i)
        values[i], flags[i] = value, True

    def _put_many(self, each: InfoField, values: Array, flags: Array, some: Any, column: Any, mask: Any) -> None:
        """Write one field of a row from an array, ``[B, *shape]``."""
        if column is None:
            values[some], flags[some] = each.blank, False
            return
        column = np.asarray(column)
        if column.dtype.kind in "OU":
            for i in range(self.num_envs) if some is ALL else some:
                self._put_one(each, values, flags, i, column[i] if mask is True or mask[i] else None)
            return
        if not each.fits(column, (self.num_envs,)):
            raise self._misfit(each, column, None)
        values[some] = column[some]
        flags[some] = mask if mask is True else mask[some]
        if mask is not True:
            values[~flags] = each.blank

    def _warn_of_unknown(self, leaves: Mapping[Key, Any]) -> None:
        """Warn once of infos that were not seen when the columns were made."""
        if self._known is not None and not leaves.keys() <= self._known:
            for path in sorted(leaves.keys() - self._known):
                _warn_of(self, path, "the first reset and step did not have it")
            self._known.update(leaves)

    def _misfit(self, each: InfoField, value: Any, i: int | None) -> EnvError:
        name, expected = _shown(each.path), each.spec if each.spec.is_tensor else "text"
        return EnvError(
            f"{self.name}{'' if i is None else f'[{i}]'}: info {name} is {described_value(value)}, expected "
            f"{expected}, as in its space or when it was first seen. Let the environment always return the same shape "
            f"and kind, or give a space that holds all its values: info={{{name}: spaces.Box(...)}}",
            env_index=i,
        )


def _shown(path: Key) -> str:
    return repr(path[0] if len(path) == 1 else path)


def _warn_of(env: Any, path: Key, why: str) -> None:
    text = f"info {_shown(path)} is ignored: {why}. To store it, give its space: info={{{_shown(path)}: ...}}."
    env.casts.warn(f"{env.name}: {text}")
