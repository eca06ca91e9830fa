"""Columns of infos: ``info=True``, ``info=["success"]`` or ``info={"success": space}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from muster.capabilities import CastsValues, KeepsState, TellsInfos, capability
from muster.envs.checks import NUMBERS, described_value
from muster.envs.spaces import action_masks, leaf_spec
from muster.envs.wrapped import WrappedEnvs
from muster.errors import BadEnvOutput, BadOption, EnvError
from muster.keys import INFO, Key, mask_of
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, ArraySpec
from muster.protocols import ALL, EnvBatch

Seen = dict[Key, "ArraySpec | NotStored"]  # by path of names
# with values ``[rows, B, *shape]``, and flags of present values
Cells = list[tuple["InfoField", Array, Array]]

OF_ADAPTERS = {"final_obs", "final_info", "final_observation", "terminal_observation"}
FLAG = ArraySpec((), np.dtype(bool))
FLOAT = ArraySpec((), np.dtype(np.float64))
INTEGER = ArraySpec((), np.dtype(np.int64))
# Fields of ``RecordEpisodeStatistics`` and SB3's ``Monitor``, which add them at the end of an
# episode only.
STATISTICS: Seen = {
    ("episode", "r"): FLOAT,
    ("episode", "l"): INTEGER,
    ("episode", "t"): FLOAT,
}
FITTING = {
    "b": "b",
    "i": "iub",
    "u": "iub",
    "f": "iubf",
}  # kinds of values by the kind of a column


@dataclass(frozen=True)
class NotStored:
    """Why a field that was seen has no column: the end of "it ...".

    ``changes``: an error also for ``info=True``.
    """

    why: str
    changes: bool = False


NO_VALUE = NotStored("is neither a number, an array nor a text")


def wanted_infos(info: Any) -> dict[Key, Any]:
    """Return the spaces in the option ``info`` by path (None: use the seen spec; path (): all), or
    raise BadOption.
    """
    if isinstance(info, bool):
        return {(): None} if info else {}
    wanted: dict[Key, Any] = {}
    try:
        named = (
            info.items()
            if isinstance(info, Mapping)
            else [(name, None) for name in info]
        )
        for name, space in named:
            path = (name,) if isinstance(name, str) else tuple(name)
            wanted |= _opened(path, space)
    except TypeError:
        wanted = {}
    names = [name for path in wanted for name in path or [""]]
    valid = all(isinstance(name, str) and name[:1] not in "_" for name in names)
    if isinstance(info, str) or not names or not valid:
        raise BadOption(
            f"info={info!r}: expected True, a list of names such as ['success', ('episode', 'r')],"
            " or a dict of Gymnasium spaces by name; names do not begin with '_'"
        )
    for path, space in wanted.items():
        if (
            space is None
            or isinstance(space, spaces.Text)
            or leaf_spec(space).is_tensor
        ):
            continue
        raise BadOption(
            f"info: {_shown(path)} has the space {space}: expected numbers, arrays, text, or Dict"
        )
    return wanted


def _opened(path: Key, space: Any) -> dict[Key, Any]:
    if not isinstance(space, spaces.Dict):
        return {path: space}
    leaves: dict[Key, Any] = {}
    for name, inner in space.spaces.items():
        leaves |= _opened((*path, name), inner)
    return leaves


def with_infos(env: EnvBatch, info: Any, look: Callable[[], Seen]) -> EnvBatch:
    """Wrap ``env`` so that it also writes its infos; ``look`` returns specs, for infos without a
    space.

    Raises:
        BadOption: ``env`` has no infos, or an info without a space was not seen.
    """
    telling = capability(env, TellsInfos)
    if telling is None:
        raise BadOption(
            "info: Muster reads infos of Gymnasium, EnvPool, PettingZoo, dm_env and"
            f" Stable-Baselines3. {env.spec.name} returns none (TorchRL), steps on a device, or its"
            " agents take turns. Remove the option"
        )
    taken = [key for key in env.spec.observation_specs if key[0] == INFO]
    if taken:
        raise BadOption(
            f"info: {env.spec.name} has the observation {taken[0]} already. Rename it, or remove"
            " the option"
        )
    telling.keep_infos()
    wanted = wanted_infos(info)
    specs = {
        path: leaf_spec(space) for path, space in wanted.items() if space is not None
    }
    seen = look() if len(specs) < len(wanted) else {}
    for path in wanted.keys() - specs.keys():
        specs |= _found_below(path, seen, env.spec.name)
    if () in wanted:
        for path, spec in seen.items():
            if isinstance(spec, NotStored):
                _warn_of(env, path, f"it {spec.why}")
    for path in specs:
        above = [path[:i] for i in range(1, len(path))]
        if any(dict_path in specs for dict_path in above):
            raise BadOption(
                f"info: {env.spec.name}: {path[:-1]} is a dict, and also a value. Name one of"
                " them only"
            )
    fields = [InfoField(path, specs[path]) for path in sorted(specs)]
    return _WithInfos(env, telling, fields, watched=() in wanted)


def _found_below(path: Key, seen: Seen, who: str) -> dict[Key, ArraySpec]:
    """Return the specs of the seen fields at or below ``path``, or raise ``BadOption``."""
    known: Seen = {**STATISTICS, **seen} if path else seen
    depth = len(path)
    within = {leaf: spec for leaf, spec in known.items() if leaf[:depth] == path}
    found = {leaf: spec for leaf, spec in within.items() if isinstance(spec, ArraySpec)}
    for leaf, spec in within.items():
        if isinstance(spec, NotStored) and (spec.changes or (path and not found)):
            raise BadOption(
                f"info: {who}: {_shown(leaf)} {spec.why}. Leave it out, let the environment"
                " always return a number, array or text, or give the space of its values:"
                f" info={{{_shown(leaf)}: spaces.Box(...)}}"
            )
    if not found:
        name = _shown(path) if path else "at all"
        example = _shown(path or ("success",))
        raise BadOption(
            f"info: {who}: no number, array or text {name} was in the infos of a reset and a"
            " random step. Give the spaces of what comes later, as in"
            f" info={{{example}: spaces.Discrete(2)}}, or remove it"
        )
    return found


def look_at(env: EnvBatch, seen: Seen) -> None:
    """Add what ``TellsInfos.new_infos`` shows to ``seen``.

    Raises ``BadEnvOutput`` if there are no dicts of infos.
    """
    telling = capability(env, TellsInfos)
    if telling is None:
        return
    found: list[tuple[Key, ArraySpec | NotStored]] = []
    for told, _ in telling.new_infos:
        if isinstance(told, Mapping):
            found += _seen_in_batch(told, env.spec.num_envs)
            continue
        for i in range(env.spec.num_envs):
            leaves = _leaves(_info_of(env, told, i))
            for path, (value, _) in leaves.items():
                found.append((path, _spec_of(value)))
    for path, spec in found:
        if path in seen:
            seen[path] = _joined(seen[path], spec)
        else:
            seen[path] = spec


def _seen_in_batch(
    told: Mapping[Any, Any],
    num_envs: int,
) -> list[tuple[Key, ArraySpec | NotStored]]:
    """Return the specs of the first present value of each field of a batch's infos."""
    found: list[tuple[Key, ArraySpec | NotStored]] = []
    for path, (column, mask) in _leaves(told, many=True).items():
        rows = _rows_of(column, mask, num_envs)
        if isinstance(rows, str):
            found.append((path, NotStored(rows)))
            continue
        values, there = rows
        present = values if there is True else values[there]
        found += [(path, _spec_of(value)) for value in present[:1]]
    return found


def _joined(
    before: ArraySpec | NotStored,
    spec: ArraySpec | NotStored,
) -> ArraySpec | NotStored:
    """Return the spec of values of both; the first one, if one of them is not stored."""
    if isinstance(before, NotStored) or isinstance(spec, NotStored):
        return before
    if str(spec) == str(before):
        return before
    numbers = {spec.dtype.kind, before.dtype.kind} <= set("iuf")
    if spec.shape != before.shape or not numbers:
        return NotStored(f"has {before} at first, and then {spec}", changes=True)
    return ArraySpec(spec.shape, np.result_type(spec.dtype, before.dtype))


def _info_of(env: Any, told: Any, i: int) -> dict[Any, Any]:
    """Return the info of environment ``i`` in a list of infos, ``{}`` for None; ``BadEnvOutput`` if
    it is no dict.
    """
    is_list = isinstance(told, (list, tuple))
    if isinstance(told, np.ndarray):
        is_list = told.ndim > 0
    if not is_list or len(told) != env.spec.num_envs:
        raise BadEnvOutput(
            f"{env.spec.name} returned the infos {described_value(told)}, expected a dict of"
            f" arrays, or a list with a dict for each of {env.spec.num_envs} environments"
        )
    info = {} if told[i] is None else told[i]
    if not isinstance(info, dict):
        raise BadEnvOutput(
            f"{env.spec.name}[{i}] returned the info {described_value(info)}, expected a dict"
        )
    return info


def _rows_of(
    column: Any,
    mask: Any,
    num_envs: int,
) -> tuple[Array, Array | Literal[True]] | str:
    """Return the values ``[B, ...]`` of a batch's field and the mask of environments that have one
    (True: all).

    If they are not such arrays, return the problem, as the end of "it ...".
    """
    try:
        values = np.asarray(column)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # rows of different lengths, for instance
        values = np.empty(())
    if values.shape[:1] != (num_envs,):
        return f"is {described_value(column)}, expected a value for each of {num_envs} environments"
    if mask is True:
        return values, True
    flags = np.asarray(mask)
    if flags.shape != (num_envs,) or flags.dtype.kind != "b":
        return (
            f"has the mask {described_value(mask)}, expected a bool for each of {num_envs}"
            " environments"
        )
    return values, flags


def _leaves(
    info: Mapping[Any, Any],
    path: Key = (),
    mask: Any = True,
    *,
    many: bool = False,
) -> dict[Key, tuple[Any, Any]]:
    """Return values and True by path; if ``many``, values ``[B, ...]`` and masks of environments
    that have them.
    """
    found: dict[Key, tuple[Any, Any]] = {}
    for name, value in info.items():
        if value is None or not isinstance(name, str):
            continue
        if name[:1] in "_" or name in OF_ADAPTERS:
            continue
        own = info.get(f"_{name}") if many else True
        there = mask if own is None else own
        if isinstance(value, dict):  # a check of other mappings takes ten times as long
            found.update(_leaves(value, (*path, name), there, many=many))
        else:
            leaf = (*path, name)
            found[leaf] = value, there
    return found


def _spec_of(value: Any) -> ArraySpec | NotStored:
    if isinstance(value, str):
        return ArraySpec((), OBJECT)
    if not isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return NO_VALUE
    array = np.asarray(value)
    if array.dtype.kind not in NUMBERS:
        return NO_VALUE
    return ArraySpec(array.shape, array.dtype)


@dataclass(eq=False)
class InfoField:
    """One field of infos, at ``path``; ``fitting``: types of numbers that are known to fit."""

    path: Key
    spec: ArraySpec
    fitting: set[type] = field(default_factory=set)

    def stored(self) -> dict[Key, ArraySpec]:
        """Return the specs of the columns: values, and flags of present values."""
        values = (INFO, *self.path)
        flags = (INFO, *mask_of(self.path))
        return {values: self.spec, flags: FLAG}

    @property
    def blank(self) -> Any:
        return 0 if self.spec.is_tensor else ""

    def fits(self, value: Any, lead: tuple[int, ...] = ()) -> bool:
        """Return whether ``value``, ``[*lead, *shape]``, can be stored."""
        if not self.spec.is_tensor:
            return isinstance(value, str)
        try:
            array = np.asarray(value)
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ):  # rows of different lengths, for instance
            return False
        shape = (*lead, *self.spec.shape)
        kinds = FITTING[self.spec.dtype.kind]
        fits = array.shape == shape and array.dtype.kind in kinds
        if fits and isinstance(value, (bool, int, float, np.generic)):
            self.fitting.add(type(value))
        return fits


class _WithInfos(WrappedEnvs, KeepsState):
    """Writes infos.

    ``watched``: warn of infos that are not in ``fields``. ``begun``: infos of resets within a step.
    """

    def __init__(
        self,
        inner: EnvBatch,
        telling: TellsInfos,
        fields: Sequence[InfoField],
        *,
        watched: bool,
    ) -> None:
        specs: dict[Key, ArraySpec] = {}
        for each in fields:
            specs |= each.stored()
        own = inner.spec
        masks = own.action_masks or action_masks(specs, own.action_specs, (INFO,))
        super().__init__(inner, replace(own, info_specs=specs, action_masks=masks))
        self._telling = telling
        self._keeping = capability(inner, KeepsState)
        self._fields = fields
        self._known = {each.path for each in fields} if watched else None
        self.begun: dict[Key, Array] = {}

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        self.inner.reset(arrays, row, which, seeds)
        cells = self._cells(arrays)
        waiting = list(which)
        for told, some in self._telling.new_infos:
            now = [i for i in which if some is ALL or i in some]
            self._put(cells, row, now, told)
            waiting = [i for i in waiting if i not in now]
        for key, first in self.begun.items():
            arrays[key][row, waiting] = first[waiting]

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        cells = lane.cache.get(self)
        if cells is None:
            cells = lane.cache[self] = self._cells(lane.arrays)
        telling = self._telling
        arrays = lane.arrays

        def note(t: int) -> None:
            row = t + 1
            for number, (told, some) in enumerate(telling.new_infos):
                if number > 0:  # the row has the infos of the reset, the first pair
                    self._keep_begun(arrays, row, some)
                self._put(cells, row, some, told)

        return note

    def snapshot(self) -> dict[str, Any]:
        first: dict[Key, Any] = {}
        for key, array in self.begun.items():
            first[key] = array.tolist() if array.dtype == OBJECT else array.copy()
        state = {} if self._keeping is None else dict(self._keeping.snapshot())
        if first:
            state["first_infos"] = first
        return state

    def restore(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self.begun = {}
        for key, rows in rest.pop("first_infos", {}).items():
            dtype = self.spec.info_specs[key].dtype
            self.begun[key] = np.array(rows, dtype)
        if self._keeping is not None:
            self._keeping.restore(rest)

    def _keep_begun(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        some: Any,
    ) -> None:
        """Keep the infos of resets within a step, which ``row`` has until the step's are written."""
        for key in self.spec.info_specs:
            array = arrays[key]
            first = self.begun.setdefault(key, np.zeros_like(array[0]))
            first[some] = array[row, some]

    def _cells(self, arrays: Mapping[Key, Array]) -> Cells:
        cells: Cells = []
        for each in self._fields:
            values, flags = each.stored()
            cells.append((each, arrays[values], arrays[flags]))
        return cells

    def _put(
        self,
        cells: Cells,
        row: int,
        some: Any,
        told: Any,
    ) -> None:
        """Write infos of the environments ``some`` into a row; see ``TellsInfos``."""
        if isinstance(told, Mapping):
            leaves = _leaves(told, many=True)
            self._warn_of_unknown(leaves)
            for each, values, flags in cells:
                column, mask = leaves.get(each.path, (None, True))
                self._put_many(each, values[row], flags[row], some, column, mask)
            return
        for i in range(self.spec.num_envs) if some is ALL else some:
            info = _info_of(self, told, i)
            if self._known is not None:
                self._warn_of_unknown(_leaves(info))
            for each, values, flags in cells:
                value: Any = info
                for name in each.path:
                    value = value.get(name) if isinstance(value, dict) else None
                self._put_one(each, values[row], flags[row], i, value)

    def _put_one(
        self,
        each: InfoField,
        values: Array,
        flags: Array,
        i: int,
        value: Any,
    ) -> None:
        if value is None:
            values[i] = each.blank
            flags[i] = False
            return
        if type(value) not in each.fitting and not each.fits(value):
            raise self._misfit(each, value, i)
        values[i] = value
        flags[i] = True

    def _put_many(
        self,
        each: InfoField,
        values: Array,
        flags: Array,
        some: Any,
        column: Any,
        mask: Any,
    ) -> None:
        """Write one field of a row from an array, ``[B, *shape]``."""
        if column is None:
            values[some] = each.blank
            flags[some] = False
            return
        rows = _rows_of(column, mask, self.spec.num_envs)
        if isinstance(rows, str):
            raise EnvError(
                f"{self.spec.name}: info {_shown(each.path)} {rows}. Let the environment return"
                " arrays, or do not ask for it"
            )
        column, mask = rows
        if column.dtype.kind in "OU":
            for i in range(self.spec.num_envs) if some is ALL else some:
                present = mask is True or mask[i]
                self._put_one(each, values, flags, i, column[i] if present else None)
            return
        if not each.fits(column, (self.spec.num_envs,)):
            raise self._misfit(each, column, None)
        values[some] = column[some]
        flags[some] = mask if mask is True else mask[some]
        if mask is not True:
            values[~flags] = each.blank

    def _warn_of_unknown(self, leaves: Mapping[Key, Any]) -> None:
        """Warn once of infos that were not seen when the columns were made."""
        if self._known is None or leaves.keys() <= self._known:
            return
        for path in sorted(leaves.keys() - self._known):
            _warn_of(self, path, "the first reset and step did not have it")
        self._known.update(leaves)

    def _misfit(
        self,
        each: InfoField,
        value: Any,
        i: int | None,
    ) -> EnvError:
        name = _shown(each.path)
        expected = each.spec if each.spec.is_tensor else "text"
        who = self.spec.name if i is None else f"{self.spec.name}[{i}]"
        return EnvError(
            f"{who}: info {name} is {described_value(value)}, expected {expected}, as in its"
            " space or when it was first seen. Let the environment always return the same shape"
            " and kind, or give a space that holds all its values:"
            f" info={{{name}: spaces.Box(...)}}",
            env_index=i,
        )


def _shown(path: Key) -> str:
    return repr(path[0] if len(path) == 1 else path)


def _warn_of(env: Any, path: Key, why: str) -> None:
    text = (
        f"info {_shown(path)} is ignored: {why}. To store it, give its space:"
        f" info={{{_shown(path)}: ...}}."
    )
    casting = capability(env, CastsValues)
    if casting is not None:
        casting.casts.warn(f"{env.spec.name}: {text}")
