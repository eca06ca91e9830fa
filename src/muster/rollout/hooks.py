"""The user's hooks, which are called during collection, and the view of a step that ``on_step``
gets.
"""

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
    SEED,
    STEP_COUNT,
    TERMINATED,
    TRAJ_DONE,
    TRAJ_IDS,
    TRUNCATED,
    VALID,
    Key,
    dotted,
    key_of,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array

if TYPE_CHECKING:
    from muster.protocols import EnvBatch
    from muster.rollout.ends import Waiting
    from muster.rollout.marks import Final, NextObservations
    from muster.rollout.request import Watch

Value = TypeVar("Value")
Result = TypeVar("Result")

# written at the end of a rollout
LATER = {DONE, next_of(DONE), TRAJ_IDS, STEP_COUNT, next_of(STEP_COUNT), VALID}
FIXED = {
    *FLAGS,
    *map(next_of, FLAGS),
    TRAJ_DONE,
    IS_INIT,
    NEXT_OBS_VALID,
    POLICY_VERSION,
    RESUMED,
    SEED,
}


class StepView:
    """The argument of ``on_step``: one time step of a group of environments, valid during the call
    only.

    ``step["observation"]``, ``step["action"]``, ``step["next", "reward"]`` are rows of the batch's
    columns: views ``[B, *shape]`` (NumPy arrays, or tensors if environments step on a device),
    flags and rewards ``[B]``. Values written into them are in the batch and in the returns of
    episodes; written rewards and actions are also in ``prev_reward`` and ``prev_action`` of the
    next row. Flags, these two and Muster's own columns are read-only.

    Attributes:
        t: row of the rollout.
        env_ids: global numbers of the environments, ``[B]``.
    """

    def __init__(
        self,
        lane: Lane,
        t: int,
        env_ids: Array,
        waiting: Waiting,
        repeats: Mapping[Key, Key],
    ) -> None:
        self.t = t
        self.env_ids = env_ids
        self._lane = lane
        self._waiting = waiting
        self._repeats = repeats

    def keys(self) -> list[Key]:
        """Return the keys of all readable columns."""
        return [key for key in self._lane.data if key not in LATER]

    @property
    def valid(self) -> Array:
        """``[B]`` bool: environments that made a step.

        Others wait; the batch has blank cells for them.
        """
        valid = np.ones(self._lane.B, bool)
        valid[[i for i, t in self._waiting.since.items() if t < self.t]] = False
        valid[list(self._waiting.absent)] = False
        return valid

    @property
    def finished(self) -> Array:
        """``[n]``, ascending: indices in the row of the environments whose episode ended with this
        step.
        """
        ended = self[next_of(TERMINATED)] | self[next_of(TRUNCATED)]
        if not isinstance(ended, np.ndarray):
            ended = ended.cpu()
        return np.flatnonzero(np.asarray(ended) & self.valid)

    def __getitem__(self, key: str | Key) -> Any:
        key = key_of(key)
        if key in LATER:
            raise BadOption(
                f"step[{key!r}] is made when the rollout is complete; step.finished says who has"
                " ended"
            )
        if key not in self._lane.data:
            raise BadOption(
                f"step[{key!r}]: there is no such column; there are"
                f" {', '.join(map(dotted, self.keys()))}"
            )
        row = self._lane.data[key][self.t]
        if not self._is_fixed(key):
            return row
        if not isinstance(row, np.ndarray):
            return row.clone()
        row.flags.writeable = False
        return row

    def __setitem__(self, key: str | Key, value: Any) -> None:
        row = self[key]
        path = key_of(key)
        if self._is_fixed(path):
            raise BadOption(
                f"step[{key!r}]: that can only be read; it says what happened in the environment"
            )
        row[...] = value

    def _is_fixed(self, key: Key) -> bool:
        if key in FIXED:
            return True
        path = key[1:] if key[0] == "next" else key
        return path in self._repeats


class RowHooks:
    """The functions that are called after each row of a rollout.

    Args:
        watches: called with the lane and its row, which is complete.
        own: the one of them that the caller of ``rollout`` gave; None: it gave none.
        stopped: returns whether the collection was stopped; None: it cannot be.

    Attributes:
        are_any: something has to be called.
    """

    def __init__(
        self,
        watches: Sequence[Watch] = (),
        own: Watch | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.watches = watches
        self.own = own
        self._stopped = stopped
        self.are_any = bool(watches) or stopped is not None

    def call(self, lane: Lane, t: int) -> None:
        """Call all of them for row ``t``, and stop the lane if the collection was stopped."""
        for watch in self.watches:
            watch(lane, t)
        if self._stopped is not None and not lane.stopped and self._stopped():
            lane.stop()


NO_HOOKS = RowHooks()


def watching(
    on_step: Callable[[StepView], object],
    env_ids: Array,
    waiting: Waiting,
    repeats: Mapping[Key, Key],
    next_obs: NextObservations,
) -> Watch:
    """Return a ``Watch`` of one rollout that calls ``on_step``.

    Args:
        env_ids: global numbers of the environments.
        waiting: environments that make no steps.
        repeats: see ``EnvSpec``.
        next_obs: has the observations that are in no row.
    """

    def watch(lane: Lane, t: int) -> None:
        step = StepView(lane, t, env_ids, waiting, repeats)
        try:
            call_hook(
                "on_step",
                on_step,
                step,
                "The row is complete, and the next call goes on after it.",
            )
        finally:
            if repeats:
                _repeat(step, lane, repeats, next_obs.finals)

    return watch


def _repeat(
    step: StepView,
    lane: Lane,
    repeats: Mapping[Key, Key],
    finals: Sequence[Final],
) -> None:
    """Copy values written by a hook into the next observations, except the first ones of an
    episode.
    """
    t = step.t
    data = lane.data
    stepped = np.flatnonzero(step.valid)
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
    """Raise ``BadOption`` unless ``seconds`` is a number of at least 0."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds >= 0:
        raise BadOption(
            f"render={seconds!r}: expected seconds to wait after every step, at least 0"
        )


def rendering(env: EnvBatch, seconds: float) -> Watch:
    """Return a ``Watch`` that renders every environment, and waits ``seconds`` (``check_pause``)."""
    pause = Event()

    def render(objects: Sequence[Any]) -> None:
        for each in objects:
            each.render()

    def watch(lane: Lane, t: int) -> None:
        call_hook(
            "render",
            render,
            env.objects(),
            f"Can {env.spec.name} render? Gymnasium: render_mode='human'.",
        )
        pause.wait(seconds)

    return watch


def call_hook(
    name: str, function: Callable[[Value], Result], value: Value, advice: str
) -> Result:
    """Call a function of the user.

    Raises:
        HookError: the function raised an error; that is the cause.
    """
    try:
        return function(value)
    except Exception as error:
        raise HookError(f"{name} raised {described(error)}. {advice}") from error
