"""A TorchRL environment whose rows are on its device.

Observations, rewards and flags of a step stay there, and so does what follows from the flags:

- An environment that can be reset by mask without waiting (``torchrl_masks``) is reset by mask at
  every step, mostly nowhere. Nothing waits for the device, and rollouts can be recorded. Resets that
  draw random numbers draw them at every step.
- For any other, the host looks once per step whether an episode has ended, as TorchRL's own
  collector does, and lets TorchRL reset it. Random numbers are those of rows on the host.

Flags that contradict each other are noticed only where the host looks. Else an episode ends where
any of the flags says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torchrl.envs import EnvBase

from muster.envs.checks import check_next_rows
from muster.envs.masks import choose, like, where
from muster.envs.torchrl_masks import masked_reset, resets_by_mask, set_flags
from muster.envs.torchrl_one import (
    FIX,
    TERMINATED,
    TRUNCATED,
    Advance,
    OneEnv,
    name_of,
    seed_parts,
)
from muster.envs.torchrl_specs import Declared
from muster.errors import BadEnvOutput
from muster.keys import IS_INIT, REWARD, Key, next_of
from muster.memory.joint_rows import Rows, joint_rows
from muster.memory.slots import Lane, as_tensor, torch_dtype

Leaves = list[torch.Tensor]


class _Entry(NamedTuple):
    """A leaf of a step's result: its name, shape and dtype in the environment."""

    name: Any
    shape: torch.Size
    dtype: torch.dtype


class OneOnDevice(OneEnv):
    """Steps and resets one ``EnvBase`` with a batch size, all on one device.

    Args:
        device: of the environment, and of the rows.

    Attributes:
        by_mask: it is reset by mask at every step; None: this was not tried out yet.
        limit: number of steps after which an episode is truncated; None: there is none.
        steps: steps of the current episodes, ``[*lead]``; only counted if there is a limit.
    """

    def __init__(
        self, env: EnvBase, specs: Declared, name: str, device: torch.device
    ) -> None:
        super().__init__(env, specs, name, 0)
        self._on = device
        dtype = torch_dtype(specs.reward_dtype)
        self._reward_leaf = _Entry("reward", torch.Size((*specs.lead, 1)), dtype)
        self.by_mask: bool | None = None
        self.limit: int | None = None
        self.steps = torch.zeros(specs.lead, dtype=torch.int64, device=device)

    def limit_episodes(self, steps: int) -> None:
        """Truncate episodes after so many steps."""
        self.limit = steps

    def snapshot(self) -> dict[str, Any]:
        """Return what is known beside the environment's own state."""
        return {"steps": self.steps.clone(), "by_mask": self.by_mask}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a ``snapshot``."""
        self.by_mask = state["by_mask"]
        self.steps.copy_(state["steps"])

    # --- steps ------------------------------------------------------------------------------------

    def start(self, lane: Lane) -> Advance:
        specs = self.specs
        keys = list(specs.observations)
        check_next_rows(self.name, keys, lane)
        make = self._input(lane)
        after_rows = [self._rows(lane.tensors[next_of(key)]) for key in keys]
        rows = [self._rows(lane.tensors[key]) for key in keys]
        observed = [self._leaf(key) for key in keys]
        by_policy = {column.key for column in lane.layout.columns if column.by_policy}
        kept = [rows[i] if key in by_policy else None for i, key in enumerate(keys)]
        others = [self._leaf(key) for key in specs.steps]
        columns: list[tuple[Rows, int]] = [(each, 0) for each in after_rows]
        columns += [(self._rows(lane.tensors[next_of(key)]), 0) for key in specs.steps]
        columns.append((self._rows(lane.tensors[specs.reward_key]), 0))
        for key in (TERMINATED, TRUNCATED):
            columns.append((self._rows(lane.tensors[next_of(key)]), 0))
        carried = [column.key for column in lane.layout.columns if column.carry]
        recurrent = [key for key in carried if key not in specs.observations]
        begins = [self._rows(lane.tensors[key]) for key in recurrent if key == IS_INIT]
        states = [self._rows(lane.tensors[key]) for key in recurrent if key != IS_INIT]
        write = joint_rows([*columns, *((each, 1) for each in begins)])

        def advance(t: int) -> None:
            with torch.inference_mode(False), torch.no_grad():
                self.executed = False
                td, after = self._step(make, lane, t)
                self.executed = True
                self.complete(after)
                method = f"step (row {t} of the batch)"
                values: Leaves = []
                for leaf, row in zip(observed, kept, strict=True):
                    value = after.get(leaf.name, None)
                    if value is None and row is not None:
                        value = row[t + 1]  # the policy has written it
                    values.append(self._checked(leaf, value, td, after, method))
                for leaf in others:
                    value = after.get(leaf.name, None)
                    values.append(self._checked(leaf, value, td, after, method))
                values.append(self._reward(td, after, method))
                ended, cut, misfit = self._flags(after)
                late = None
                if self.limit is not None:
                    late = self._count_on(ended | cut, self.limit)
                    cut = cut | late
                done = ended | cut
                values += [ended, cut]
                # before a reset, which may write into the tensors that the step has returned
                write(t, values + [done] * len(begins))
                first = self._begun(td, after, done, late, misfit, t)
                for each, source, leaf in zip(rows, after_rows, observed, strict=True):
                    if first is None:
                        each[t + 1].copy_(source[t])
                    else:
                        value = first.get(leaf.name, None)
                        value = self._checked(leaf, value, None, first, "reset")
                        choose(done, value, source[t], each[t + 1])
                for each in states:  # recurrent states at the start of an episode
                    each[t + 1].masked_fill_(like(done, each[t + 1]), 0)

        return advance

    def _begun(
        self,
        td: Any,
        after: Any,
        done: torch.Tensor,
        late: torch.Tensor | None,
        misfit: torch.Tensor | None,
        t: int,
    ) -> Any:
        """Return what is known of new episodes where ``done``; None: there are none."""
        env = self.env
        if self.by_mask:
            with self.explained("reset"):
                return masked_reset(env, done)
        looked = [done.any()]
        if misfit is not None:
            looked.append(misfit.any())
        is_any, *is_bad = map(bool, torch.stack(looked).cpu().unbind())
        if misfit is not None and any(is_bad):
            which = misfit.reshape(-1).nonzero()[:8, 0].tolist()
            raise BadEnvOutput(
                f"{self.name}.step (row {t} of the batch): in environments {which}, done is"
                f" something else than terminated | truncated; it must be that. {FIX}"
            )
        if not is_any:
            return None
        with self.explained("reset"):
            now = env.step_mdp(td.copy().set("next", after))
            if late is not None:
                set_flags(now, env.done_keys, late)
            return env.maybe_reset(now)

    def _count_on(self, done: torch.Tensor, limit: int) -> torch.Tensor:
        """Count a step of each episode; return where the limit is reached."""
        self.steps += 1
        late = (self.steps >= limit) & ~done
        self.steps.masked_fill_(done | late, 0)
        return late

    def _flags(
        self, after: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return where episodes are terminated and where truncated, and where flags contradict each
        other (None: they cannot).
        """
        specs = self.specs
        done = self._any_of(after, specs.ends)
        if TERMINATED in specs.flags:
            ended = self._any_of(after, [TERMINATED])
        else:
            others = [key for key in specs.ends if key[-1] != "truncated"]
            ended = self._any_of(after, others) & done
        if TRUNCATED not in specs.flags:
            misfit = ended & ~done if TERMINATED in specs.flags else None
            return ended, done & ~ended, misfit
        cut = self._any_of(after, [TRUNCATED])
        misfit = (ended | cut) ^ done
        return ended, cut | (done & ~ended), misfit

    def _any_of(self, td: Any, keys: Sequence[Key]) -> torch.Tensor:
        """Return whether any of the flags is set, ``[*lead]``."""
        found: torch.Tensor | None = None
        for key in keys:
            flag = td.get(name_of(key), None)
            if flag is None:
                raise self.misfit(key, None, "step")
            flag = flag.reshape(*self.specs.lead, -1)
            flag = flag[..., 0] if flag.shape[-1] == 1 else flag.any(-1)
            found = flag if found is None else found | flag
        if found is None:
            return torch.zeros(self.specs.lead, dtype=torch.bool, device=self._on)
        return found

    def _reward(self, td: Any, after: Any, method: str) -> torch.Tensor:
        """Return the reward, or the sum of all, ``[*lead]``."""
        specs = self.specs
        if specs.reward_key == REWARD:
            value = after.get("reward", None)
            value = self._checked(self._reward_leaf, value, td, after, method)
            return value.squeeze(-1)
        total: torch.Tensor | None = None
        for key in specs.rewards:
            value = after.get(name_of(key), None)
            if not torch.is_tensor(value) or value.numel() % self.count:
                raise self.misfit(key, value, method)
            own, *others = value.reshape(*specs.lead, -1).unbind(-1)
            for other in others:
                own = own + other
            total = own if total is None else total + own
        if total is None:
            return torch.zeros(specs.lead, device=self._on)
        return total

    def _leaf(self, key: Key) -> _Entry:
        spec = {**self.specs.observations, **self.specs.steps}[key]
        shape = torch.Size((*self.specs.lead, *spec.shape))
        return _Entry(name_of(key), shape, torch_dtype(spec.dtype))

    def _checked(
        self, leaf: _Entry, value: Any, td: Any, after: Any, method: str
    ) -> torch.Tensor:
        if value is None or value.shape != leaf.shape or value.dtype != leaf.dtype:
            name, shape, dtype = leaf
            return self.fitted(name, td, after, shape, dtype, method)
        return value  # type: ignore[no-any-return]

    # --- resets -----------------------------------------------------------------------------------

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
    ) -> None:
        whole = len(which) == self.count
        mask = torch.zeros(self.count, dtype=torch.bool)
        mask[list(which)] = True
        mask = mask.reshape(self.specs.lead).to(self._on)
        with torch.inference_mode(False), torch.no_grad(), self.explained("reset"):
            if seeds is not None:
                if self.by_mask is None:
                    self.by_mask = resets_by_mask(self.env, self._on, seeds[0])
                seed_parts(self.env, list(seeds), whole=whole)
            if whole:
                td = self.env.reset(**(options or {}))
            else:
                td = masked_reset(self.env, mask, **(options or {}))
            self.steps.masked_fill_(mask, 0)
        for key in self.specs.observations:
            leaf = self._leaf(key)
            value = self._checked(leaf, td.get(leaf.name, None), None, td, "reset")
            target = as_tensor(arrays[key][row])
            target = target.reshape(*self.specs.lead, *target.shape[1:])
            target.copy_(where(mask, value.to(target.dtype), target))
