"""The values of a whole rollout, checked at once: rewards finite, actions and observations in their spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from muster.columns import Validate
from muster.envs.checks import values_problem
from muster.keys import NEXT_OBS_VALID, Key, dotted, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch

if TYPE_CHECKING:
    pass
else:
    pass


def first_bad_value(
    lane: Lane, env: EnvBatch, mode: Validate, late: Array | None = None
) -> tuple[int, str, bool] | None:
    """The first row with a value that cannot be right.

    On a device, columns other than the reward are copied to the host for it, in mode ``"full"`` only.

    Args:
        late: cells that are no transitions, ``[n, B]``; never the first ones.

    Returns:
        the row, what is wrong, and whether the policy did it; None if all is well or ``mode`` is ``"off"``.
    """
    if mode == "off":
        return None
    n = lane.done_steps
    reward = lane.arrays[env.reward_key][:n]
    if not np.isfinite(reward).all():
        t, b = (int(i) for i in np.argwhere(~np.isfinite(reward))[0])
        return t, f"{env.name}[{b}].step (row {t} of the batch): reward is {reward[t, b]}", False
    for key, spec in env.action_specs.items():
        if not spec.is_tensor or (lane.mirrored and mode != "full"):
            continue
        actions = _without(_host(lane, key)[:n], late)
        if mode == "full" or spec.dtype.kind in "iu":
            if problem := values_problem(actions, spec):
                (t, b, *_), what = problem
                return t, f"{dotted(key)} for env {b} (row {t} of the batch): {what}", True
        elif spec.dtype.kind == "f" and not np.isfinite(actions).all():
            t, b = (int(i) for i in np.argwhere(~np.isfinite(actions))[0][:2])
            return t, f"{dotted(key)} for env {b} (row {t}) is not finite", True
    for key, spec in env.observation_specs.items() if mode == "full" else ():
        # A bad observation shows after the step that gave it, and again before the next one.
        shown = [_without(_host(lane, key)[:n], late)]
        if next_of(key) in lane.data:
            shown.append(_without(_host(lane, next_of(key))[:n], late))
        if len(shown) == 2 and NEXT_OBS_VALID in lane.data:  # NaN or 0 where it is unknown
            known = _host(lane, NEXT_OBS_VALID)[:n].reshape(n, -1, *[1] * len(spec.shape))
            shown[1] = np.where(known, shown[1], shown[0])
        found = [values_problem(array, spec) for array in shown]
        if any(found):
            (t, b, *_), what = min((f for f in found if f), key=lambda f: f[0][0])
            return t, f"{env.name}[{b}] (row {t} of the batch): {dotted(key)} {what}", False
    return None


def _without(values: Array, late: Array | None) -> Array:
    """``[n, B, ...]``, with the first row's values in the place of those that do not count."""
    if late is None or not late.any():
        return values
    return np.where(late.reshape(*late.shape, *[1] * (values.ndim - 2)), values[:1], values)


def _host(lane: Lane, key: Key) -> Array:
    value = lane.data[key]
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()
