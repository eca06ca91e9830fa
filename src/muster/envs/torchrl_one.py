"""Steps and resets one TorchRL environment in its columns of a lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase, ParallelEnv, SerialEnv

from muster.envs.torchrl_pool import reset_ended, shares_memory
from muster.envs.torchrl_specs import Declared, Nesting
from muster.errors import BadEnvOutput, EnvError, described, text_of
from muster.keys import (
    FLAGS,
    NEXT_OBS_VALID,
    RESERVED,
    REWARD,
    Key,
    dotted,
    key_of,
    nested,
    next_of,
)
from muster.memory.cells import assemble, stacked_objects, take
from muster.memory.objects import copied_cells
from muster.memory.slots import MAX_ROW_VIEWS, Lane, torch_dtype
from muster.memory.specs import Specs
from muster.utils.private_names import tensordict_maker

Advance = Callable[[int], "list[int] | None"]
DONE, TERMINATED, TRUNCATED = FLAGS
FIX = "Fix the environment, or correct its specs (torchrl.envs.check_env_specs finds what differs)."


class OneEnv:
    """Steps and resets one ``EnvBase``, whose first column in the group is ``offset``, and writes
    the results.

    ``executed``: the step has returned; the caller of ``advance`` resets it. ``choosing``: the
    environment chooses actions itself (``rand_action``). ``step`` is called instead of
    ``env._step``.
    """

    def __init__(
        self,
        env: EnvBase,
        specs: Declared,
        name: str,
        offset: int,
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self.env = env
        self.specs = specs
        self.name = name
        self._call: Callable[[Any], Any] = step or env._step
        self.count = int(np.prod(specs.lead))
        self.columns = slice(offset, offset + self.count)
        self.executed = False
        self.choosing = False
        self._device = env.device
        self._corrected: Specs = {
            **specs.done,
            **specs.rewards,
        }  # EnvBase.step reshapes these
        self._own_step = type(env).step is not EnvBase.step or "step" in env.__dict__
        self._native = bool(env.__dict__.get("_torchrl_native_autoreset", False))
        # the last step's TensorDict and result; None: it failed, or a reset followed
        self._stepped: tuple[Any, Any] | None = None
        # result of the last reset, or of the last step if the environment resets itself
        self._current: Any = None
        self._fresh: list[int] = []  # columns that the environment has reset itself

    def start(self, lane: Lane) -> Advance:
        """Return ``advance(t)``, which steps row t and returns the columns whose episodes ended, or
        None.
        """
        specs = self.specs
        make = self._input(lane)
        carried = {column.key for column in lane.layout.columns if column.by_policy}
        plain: list[tuple[Any, Any, int, bool, torch.dtype]] = []
        objects: list[tuple[Key, Any, int]] = []
        for key, spec in specs.observations.items():
            if spec.is_tensor:
                rows = self._rows(lane.tensors[key])
                dtype = torch_dtype(spec.dtype)
                plain.append((name_of(key), rows, 1, key in carried, dtype))
            else:
                objects.append((key, self._rows(lane.arrays[key]), 1))
        for key, spec in specs.steps.items():
            if spec.is_tensor:
                rows = self._rows(lane.tensors[next_of(key)])
                dtype = torch_dtype(spec.dtype)
                plain.append((name_of(key), rows, 0, False, dtype))
            else:
                objects.append((key, self._rows(lane.arrays[next_of(key)]), 0))
        team = lane.arrays[specs.reward_key][:, self.columns]
        if specs.reward_key == REWARD:
            rewards = lane.tensors[REWARD]
            rows = [row.unsqueeze(-1) for row in self._rows(rewards)]
            plain.append(("reward", rows, 0, False, rewards.dtype))
        flag_keys = dict.fromkeys((*specs.ends, *specs.flags))
        flags = [name_of(key) for key in flag_keys]

        def advance(t: int) -> list[int] | None:
            self.executed = False
            self._stepped = None
            td, after = self._step(make, lane, t)
            self.executed = True
            for name, rows, later, by_policy, dtype in plain:
                value = after.get(name, None)
                row = rows[t + later]
                if value is None or value.shape != row.shape or value.dtype != dtype:
                    if value is None and by_policy:
                        continue
                    where = f"step (row {t} of the batch)"
                    value = self.fitted(name, td, after, row.shape, dtype, where)
                row.copy_(value)
            for key, rows, later in objects:
                self._write_cells(
                    key, rows[t + later], after, td, f"step (row {t} of the batch)"
                )
            if specs.reward_key != REWARD:
                self._write_team_reward(team[t], after, t)
            finished = None
            for name in flags:
                flag = after.get(name, None)
                if flag is None or flag.any():
                    finished = self._end(lane, t, after)
                    break
            self._stepped = td, after
            return finished

        return advance

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
    ) -> None:
        """Start new episodes in the columns ``which`` (of the group) and write their first
        observations.
        """
        rows = np.asarray(which) - self.columns.start
        with self.explained("reset"):
            if seeds is not None:
                seed_parts(self.env, list(seeds), whole=len(rows) == self.count)
            td = self._reset(rows, options or {}, reseeded=seeds is not None)
        self._current = td
        self._stepped = None
        for key, spec in self.specs.observations.items():
            target = arrays[key][row][self.columns]
            if not spec.is_tensor:
                cells = self._cells(td, key, "reset")
                if cells is None:
                    raise BadEnvOutput(
                        f"{self.name}.reset: {dotted(key)} is missing. {FIX}"
                    )
                for i in rows:
                    target[i] = cells.reshape(-1)[i]
                continue
            shape = torch.Size((*self.specs.lead, *spec.shape))
            dtype = torch_dtype(spec.dtype)
            value = td.get(name_of(key), None)
            if value is None or value.shape != shape or value.dtype != dtype:
                value = self.fitted(name_of(key), None, td, shape, dtype, "reset")
            values = self._by_env(value).reshape(target.shape)
            target[rows] = values[rows]

    def now(self) -> Any:
        """Return the input of the next step, without the action."""
        if self._stepped is None or self._native:
            return self._current
        td, after = self._stepped
        self.complete(after)
        return self.env.step_mdp(td.copy().set("next", after))

    def rand_action(self) -> Any:
        with self.explained("rand_action"):
            return self.env.rand_action(self.now().copy())

    # --- a step -----------------------------------------------------------------------------------

    def _step(
        self,
        make: Callable[[int], Any],
        lane: Lane,
        t: int,
    ) -> tuple[Any, Any]:
        env = self.env
        with self.explained(f"step (row {t} of the batch)"):
            td = make(t)
            if self.choosing:
                td = env.rand_action(td)
                self.write_actions(td, lane, t)
            if self._native:
                td, self._current = env.step_and_maybe_reset(td)
                after = td.get("next")
            elif self._own_step:
                td = env.step(td)
                after = td.get("next")
            else:
                after = self._call(td)
        return td, after

    def write_actions(
        self,
        td: Any,
        lane: Lane,
        t: int,
    ) -> None:
        for key, spec in self.specs.actions.items():
            if spec.is_tensor:
                row = self._rows(lane.tensors[key])[t]
                row.copy_(td.get(name_of(key)))
            else:
                row = self._rows(lane.arrays[key])[t]
                row[...] = self._cells(td, key, "rand_action")

    def complete(self, after: Any) -> None:
        """Add missing done flags, and give all of them the shapes of their specs, as
        ``EnvBase.step`` does.
        """
        try:
            self.env._complete_done(self.env.full_done_spec, after)
        except Exception as error:
            raise BadEnvOutput(f"{self.name}.step: {text_of(error)} {FIX}") from error

    def _end(
        self,
        lane: Lane,
        t: int,
        after: Any,
    ) -> list[int] | None:
        specs = self.specs
        self.complete(after)
        done = self._any(after, specs.ends)
        if TERMINATED in specs.flags:
            ended = self._any(after, [TERMINATED])
        else:
            others = [key for key in specs.ends if key[-1] != "truncated"]
            ended = self._any(after, others) & done
        if TRUNCATED in specs.flags:
            cut = self._any(after, [TRUNCATED])
        else:
            cut = done & ~ended
        if ((ended | cut) != done).any():
            raise BadEnvOutput(
                f"{self.name}.step (row {t} of the batch): done is {done.tolist()}, but terminated"
                f" is {ended.tolist()} and truncated is {cut.tolist()}; done must be terminated |"
                f" truncated. {FIX}"
            )
        lane.arrays[next_of(TERMINATED)][t, self.columns] = ended
        lane.arrays[next_of(TRUNCATED)][t, self.columns] = cut
        if not done.any():
            return None
        finished: list[int] = (np.flatnonzero(done) + self.columns.start).tolist()
        # the environment returned the next episode's observation instead of the last one
        if self._native:
            lane.arrays[NEXT_OBS_VALID][t, finished] = False
            self._fresh = finished
        return finished

    def _any(self, td: Any, keys: Sequence[Key]) -> Any:
        """Return whether any of the flags is set, ``[count]``."""
        found = np.zeros(self.count, bool)
        for key in keys:
            flag = td.get(name_of(key), None)
            if flag is None:
                raise self.misfit(key, None, "step")
            found |= self._by_env(flag).any(1)
        return found

    def _by_env(self, value: torch.Tensor) -> Any:
        """Return an array ``[count, ...]`` of a tensor ``[*lead, ...]``."""
        array = value.detach().cpu().numpy()
        return array.reshape(self.count, -1)

    def _write_team_reward(
        self,
        row: Any,
        after: Any,
        t: int,
    ) -> None:
        """Write the sum of all rewards, ``[count]``."""
        for i, key in enumerate(self.specs.rewards):
            if self._corrected[key].is_tensor:
                value = after.get(name_of(key), None)
            else:
                value = take(after, key, self.specs.lead)
            if torch.is_tensor(value) and value.numel() % self.count == 0:
                total = self._by_env(value).sum(1)
            elif isinstance(value, np.ndarray):
                total = np.array([_total(cell) for cell in value.reshape(-1)])
            else:
                raise self.misfit(key, value, f"step (row {t} of the batch)")
            row[:] = total if i == 0 else row + total

    def _write_cells(
        self,
        key: Key,
        row: Any,
        after: Any,
        td: Any,
        method: str,
    ) -> None:
        cells = self._cells(after, key, method)
        if cells is None and key in self.specs.state_only:
            cells = self._cells(td, key, method)
        if cells is None:
            raise BadEnvOutput(f"{self.name}.{method}: {dotted(key)} is missing. {FIX}")
        row[...] = cells

    def _cells(
        self,
        td: Any,
        key: Key,
        method: str,
    ) -> Any:
        """Return copies of the objects of a leaf; None if it is missing."""
        try:
            return take(td, key, self.specs.lead)
        except TypeError as error:
            raise BadEnvOutput(
                f"{self.name}.{method}: {dotted(key)} is {error}. {FIX}"
            ) from error

    def fitted(
        self,
        name: Any,
        td: Any,
        after: Any,
        shape: torch.Size,
        dtype: torch.dtype,
        method: str,
    ) -> torch.Tensor:
        """Return a value that did not fit its column, corrected as by ``EnvBase.step``; raise if it
        still does not fit.

        Completes done flags, reshapes them and rewards, and keeps state that is not returned.
        """
        key = key_of(name)
        if key in self.specs.done:
            self.complete(after)
        value = after.get(name, None)
        if value is None and td is not None and key in self.specs.state_only:
            value = td.get(name)
        fits = torch.is_tensor(value) and value.dtype == dtype
        corrected = key in self._corrected and fits and value.numel() == shape.numel()
        if corrected and value.shape != shape:
            value = value.reshape(shape)
        if not fits or value.shape != shape:
            raise self.misfit(key, value, method)
        return value  # type: ignore[no-any-return]

    def misfit(
        self,
        key: Key,
        value: Any,
        method: str,
    ) -> BadEnvOutput:
        got = "missing" if value is None else type(value).__name__
        if torch.is_tensor(value):
            got = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
        spec = self.specs.observations.get(key) or self._corrected[key]
        batch = f" for each of {self.specs.lead}" if self.specs.lead else ""
        return BadEnvOutput(
            f"{self.name}.{method}: {dotted(key)} is {got}, but its spec says {spec}{batch}. {FIX}"
        )

    # --- a reset ----------------------------------------------------------------------------------

    def _reset(
        self,
        rows: Any,
        options: dict[str, Any],
        *,
        reseeded: bool,
    ) -> Any:
        env = self.env
        whole = len(rows) == self.count
        td = self.now()
        stepped = self._stepped is not None
        self._stepped = None
        fresh = self._fresh
        self._fresh = []
        rows = np.setdiff1d(rows, np.asarray(fresh, int) - self.columns.start)
        if stepped and not reseeded and not len(rows):
            return td
        if td is None or (whole and (reseeded or not stepped)):
            return env.reset(**options)
        ended = self._any(td, self.specs.ends)
        wanted = np.zeros(self.count, bool)
        wanted[rows] = True
        if whole and not ended.any():
            return env.reset(**options)
        td = td.copy()
        cut = wanted & ~ended
        for key in env.done_keys:  # maybe_reset uses these flags
            flag = td.get(key)
            inner = (1,) * (flag.ndim - len(self.specs.lead))
            shaped = torch.from_numpy(cut.reshape(*self.specs.lead, *inner))
            td.set(key, flag | shaped.to(flag.device))
        if not options and shares_memory(env):
            return reset_ended(env, td)
        if not options:
            return env.maybe_reset(td)
        if env.any_done(td):
            return env.reset(td, select_reset_only=True, **options)
        return td

    @contextmanager
    def explained(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self.failed(method, error) from error

    def failed(self, method: str, error: Exception) -> EnvError:
        return EnvError(f"{self.name}.{method} raised {described(error)}")

    # --- TensorDicts of rows ----------------------------------------------------------------------

    def _rows(self, column: Any) -> Any:
        """Return this environment's rows of a column ``[R, B, *shape]``, each ``[*lead, *shape]``."""
        mine = column[:, self.columns]
        count = len(mine)
        mine = mine.reshape(count, *self.specs.lead, *mine.shape[2:])
        if not torch.is_tensor(mine):  # objects; a row with one object is an array, too
            rows = [mine[t : t + 1] for t in range(count)]
            return [row.reshape(self.specs.lead) for row in rows]
        if count > MAX_ROW_VIEWS:
            return mine
        return mine.unbind(0)

    def _input(self, lane: Lane) -> Callable[[int], Any]:
        """Return ``make(t)``, the environment's input at row t.

        It is a copy: environments may keep or change it.
        """
        specs = self.specs
        leaves: dict[Key, tuple[Any, int]] = {}
        for column in lane.layout.columns:
            key = column.key
            observed = specs.observations.get(key)
            mine = observed is not None or key in specs.actions
            reserved = key[0] in RESERVED - {"action"}
            if not mine and (column.host or reserved):
                continue
            source: Any = lane.tensors[key] if column.is_tensor else lane.arrays[key]
            rows = self._rows(source.unsqueeze(-1) if column.trailing else source)
            if observed is not None and column.dtype != observed.dtype:
                rows = _InOwnDtype(rows, torch_dtype(observed.dtype))
            leaves[key] = (rows, 0)
            if column.by_policy:
                leaves[next_of(key)] = (rows, 1)
        no = torch.zeros((*specs.lead, 1), dtype=torch.bool, device=self._device)
        flags = dict.fromkeys(specs.flags, no)
        if any(column.ragged for column in lane.layout.columns):
            inner = {
                path: node.shape for path, node in specs.nodes.items() if node.shape
            }

            def gather(t: int) -> Any:
                given = {}
                for key, (rows, later) in leaves.items():
                    value = rows[t + later]
                    given[key] = (
                        value if torch.is_tensor(value) else copied_cells(value)
                    )
                td = assemble({**given, **flags}, specs.lead, None, inner).clone()
                return td if self._device is None else td.to(self._device)

            return gather
        tree = nested(leaves)
        nodes = {**specs.nodes, ("next",): Nesting()}
        make_td = tensordict_maker()

        def make(part: dict[str, Any], path: Key, t: int) -> Any:
            out: dict[str, Any] = {}
            for name, value in part.items():
                if type(value) is dict:
                    out[name] = make(value, (*path, name), t)
                else:
                    rows, later = value
                    out[name] = self._entry(rows[t + later])
            node = nodes.get(path)
            if not path:
                for (name,), flag in flags.items():
                    out[name] = flag.clone()
            lead = specs.lead if node is None else (*specs.lead, *node.shape)
            td = make_td(out, batch_size=torch.Size(lead), device=self._device)
            if node is None or node.kind is None:
                return td
            return node.kind.from_tensordict(td)

        return lambda t: make(tree, (), t)

    def _entry(self, value: Any) -> Any:
        if torch.is_tensor(value) and self._device is None:
            return value.clone()
        if torch.is_tensor(value):
            return value.to(self._device, copy=True)
        return stacked_objects(copied_cells(value))


class _InOwnDtype:
    """Rows of an observation in the environment's dtype, from a column of another dtype."""

    def __init__(self, rows: Any, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype

    def __getitem__(self, t: int) -> torch.Tensor:
        return self._rows[t].to(self._dtype)  # type: ignore[no-any-return]


def name_of(key: Key) -> Any:
    """Return the key as TorchRL names it."""
    return key[0] if len(key) == 1 else key


def _total(cell: Any) -> float:
    if torch.is_tensor(cell):
        return float(cell.sum())
    total = 0.0
    for td in cell.unbind(0):
        for leaf in td.values(True, True):
            total += float(leaf.sum())
    return total


def seed_parts(env: EnvBase, seeds: list[int], *, whole: bool) -> None:
    """Seed the parts of a ``SerialEnv`` or ``ParallelEnv`` one by one if ``whole``: TorchRL would
    chain hashes.

    Any other environment gets the first seed.
    """
    base = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    if isinstance(base, BatchedEnvBase) and whole and len(seeds) == base.num_workers:
        if base.is_closed:
            base.start()
        if isinstance(base, SerialEnv):
            for part, value in zip(base._envs, seeds, strict=True):
                part.set_seed(value)
            return
        if isinstance(base, ParallelEnv):
            for channel, value in zip(base.parent_channels, seeds, strict=True):
                channel.send(("seed", (value, True)))
            for channel in base.parent_channels:
                channel.recv()
            return
    env.set_seed(seeds[0])
