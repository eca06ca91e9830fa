"""The user's functions that look on while experience is collected, and what those see that are called at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from muster.errors import BadOption, HookError, described
from muster.keys import (
    DONE,
    FLAGS,
    IS_INIT,
    NEXT_OBS_VALID,
    POLICY_VERSION,
    RESUMED,
    STEP_COUNT,
    TERMINATED,
    TRAJ_DONE,
    TRAJ_IDS,
    TRUNCATED,
    VALID,
    Key,
    dotted,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array

if TYPE_CHECKING:
    from muster.rollout.group import Group
    from muster.rollout.marks import Final
    from muster.rollout.resets import Waiting

Watch = Callable[[Lane, int], object]
Value = TypeVar("Value")
Result = TypeVar("Result")

LATER = {DONE, next_of(DONE), TRAJ_IDS, STEP_COUNT, next_of(STEP_COUNT), VALID}  # filled when a rollout is complete
FIXED = {*FLAGS, *map(next_of, FLAGS), TRAJ_DONE, IS_INIT, NEXT_OBS_VALID, POLICY_VERSION, RESUMED}


class StepView:
    """What ``on_step`` gets: one time step of a group of environments, to be used during the call only.

    ``step["observation"]``, ``step["action"]``, ``step["next", "reward"]`` are rows of the batch's columns: views
    ``[B, *shape]`` (of NumPy; tensors where environments step on a device), flags and rewards ``[B]``. What is written
    into them is in the batch, and in the returns of episodes; a reward or an action also in the ``prev_reward`` or
    ``prev_action`` of the next row. Flags, these two and Muster's own columns can only be read.

    Attributes:
        t: row of the rollout.
        env_ids: ``[B]``, global numbers of the environments.
    """

    def __init__(self, lane: Lane, t: int, env_ids: Array, waiting: Waiting, repeats: Mapping[Key, Key]) -> None:
        self.t, self.env_ids, self._lane, self._waiting, self._repeats = t, env_ids, lane, waiting, repeats

    def keys(self) -> list[Key]:
        """Of all columns that can be looked at."""
        return [key for key in self._lane.data if key not in LATER]

    @property
    def valid(self) -> Array:
        """``[B]`` bool: environments that made a step; others wait for the next rollout, and their cells are blank."""
        valid = np.ones(self._lane.B, bool)
        valid[[i for i, t in self._waiting.since.items() if t < self.t]] = False
        valid[list(self._waiting.absent)] = False
        return valid

    @property
    def finished(self) -> Array:
        """``[n]``, ascending: environments whose episode ended with this step, by their places in the row."""
        ended = self[next_of(TERMINATED)] | self[next_of(TRUNCATED)]
        return np.flatnonzero(np.asarray(ended if isinstance(ended, np.ndarray) else ended.cpu()) & self.valid)

    def __getitem__(self, key: str | Key) -> Any:
        key = (key,) if isinstance(key, str) else key
        if key in LATER:
            raise BadOption(f"step[{key!r}] is made when the rollout is complete; step.finished says who has ended")
        if key not in self._lane.data:
            raise BadOption(f"step[{key!r}]: there is no such column; there are {', '.join(map(dotted, self.keys()))}")
        row = self._lane.data[key][self.t]
        if not self._is_fixed(key):
            return row
        if not isinstance(row, np.ndarray):
            return row.clone()
        row.flags.writeable = False
        return row

    def __setitem__(self, key: str | Key, value: Any) -> None:
        row = self[key]
        if self._is_fixed(key if isinstance(key, tuple) else (key,)):
            raise BadOption(f"step[{key!r}]: that can only be read; it says what happened in the environment")
        row[...] = value

    def _is_fixed(self, key: Key) -> bool:
        return key in FIXED or (key[1:] if key[0] == "next" else key) in self._repeats


def watching(group: Group, on_step: Callable[[StepView], object]) -> Watch:
    """A ``Group.watch`` that calls ``on_step``."""
    env_ids, waiting, repeats = group.clock.env_ids, group.waiting, group.env.repeats

    def watch(lane: Lane, t: int) -> None:
        step = StepView(lane, t, env_ids, waiting, repeats)
        try:
            call_hook("on_step", on_step, step, "The row is complete, and the next call goes on after it.")
        finally:
            if repeats:
                _repeat(step, lane, repeats, group.finals)

    return watch


def _repeat(step: StepView, lane: Lane, repeats: Mapping[Key, Key], finals: Sequence[Final]) -> None:
    """Show what a hook has written in the observations after the row: where no episode begins, and in last ones."""
    t, data, stepped = step.t, lane.data, np.flatnonzero(step.valid)
    going_on = np.setdiff1d(stepped, step.finished)
    for key, source in repeats.items():
        row = data[source][t]
        data[key][t + 1, going_on] = row[going_on]
        if next_of(key) in data:
            data[next_of(key)][t, stepped] = row[stepped]
        for final in finals:
            if final.t == t:
                final.leaves[key][...] = row[list(final.envs)]


def check_pause(seconds: Any) -> None:
    """Raise ``BadOption`` unless it is a time that ``rendering`` can wait."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise BadOption(f"render={seconds!r}: expected seconds to wait after every step, at least 0")


def rendering(group: Group, seconds: float) -> Watch:
    """A ``Group.watch`` that does what the group's own does, lets every environment render, and waits ``seconds``.

    Raises:
        BadOption: ``seconds`` is no number, or below 0.
    """
    check_pause(seconds)
    env, before, pause = group.env, group.watch, Event()

    def render(objects: Sequence[Any]) -> None:
        for each in objects:
            each.render()

    def watch(lane: Lane, t: int) -> None:
        if before is not None:
            before(lane, t)
        call_hook("render", render, env.objects(), f"Can {env.name} render? Gymnasium: render_mode='human'.")
        pause.wait(seconds)

    return watch


def call_hook(name: str, function: Callable[[Value], Result], value: Value, advice: str) -> Result:
    """Call a function of the user's.

    Raises:
        HookError: whatever it raised is the cause.
    """
    try:
        return function(value)
    except Exception as error:
        raise HookError(f"{name} raised {described(error)}. {advice}") from error
