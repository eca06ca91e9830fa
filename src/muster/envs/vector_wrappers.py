"""Wrappers of batches of environments that take a reset of some environments for one of all.

Muster resets the environments whose episode has ended, and no others, by ``reset(options=
{"reset_mask": mask})`` through all wrappers. A wrapper whose ``reset`` forgets what it knows of all
environments then returns wrong values for the others.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from typing import Any

from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import (
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)

from muster.errors import UnsupportedEnv

MASK = "reset_mask"
SAME_STEP = "build the batch with autoreset_mode=AutoresetMode.SAME_STEP"
# Gymnasium's, and what to do instead
FORGETFUL: dict[type, str] = {
    NormalizeReward: (
        "it forgets the running returns of all environments. Wrap the single environments"
        f" (gymnasium.wrappers.NormalizeReward), {SAME_STEP}, or divide in the training program"
        " (muster.policies.RewardScaler)"
    ),
    NormalizeObservation: (
        "it refuses that. Wrap the single environments (gymnasium.wrappers.NormalizeObservation), or"
        " let the policy normalise (muster.policies.RunningNorm)"
    ),
}


def check_masked_resets(env: VectorEnv[Any, Any, Any], name: str) -> None:
    """Raise ``UnsupportedEnv`` if one of Gymnasium's wrappers is known to forget all environments
    at a reset of some.
    """
    for wrapper in _wrappers(env):
        reset = type(wrapper).reset
        for kind, why in FORGETFUL.items():
            if isinstance(wrapper, kind) and reset is kind.reset:  # type: ignore[attr-defined]
                raise UnsupportedEnv(
                    f"{name}: when Muster resets an environment whose episode has ended, the"
                    f" wrapper {kind.__name__} gets reset(options={{'{MASK}': mask}}), and {why}"
                )


def unknown_resets(env: VectorEnv[Any, Any, Any], name: str) -> list[str]:
    """Return warnings of wrappers of the user's whose ``reset`` sets attributes, and does not read the
    mask.
    """
    warnings = []
    for wrapper in _wrappers(env):
        reset = type(wrapper).reset
        if reset.__module__.split(".")[0] in ("gymnasium", "muster"):
            continue
        code = getattr(reset, "__code__", None)
        if code is None or MASK in code.co_consts:
            continue
        if all(step.opname != "STORE_ATTR" for step in dis.get_instructions(code)):
            continue
        warnings.append(
            f"{name}: {type(wrapper).__name__}.reset() does not read options['{MASK}'], with which"
            " Muster resets environments whose episode has ended, and no others. If it forgets"
            " something of the others, what it returns for them is wrong: let it respect the mask,"
            f" or {SAME_STEP}"
        )
    return warnings


def forgets_statistics(env: VectorEnv[Any, Any, Any]) -> bool:
    """Return whether the infos of episodes are those of Gymnasium's wrapper of batches. It does not
    see the mask, which the batch below has taken out of the options, and forgets all episodes.
    """
    return any(
        isinstance(wrapper, RecordEpisodeStatistics) for wrapper in _wrappers(env)
    )


def _wrappers(env: Any) -> Iterator[VectorWrapper[Any, Any, Any, Any, Any]]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env
