"""Wrappers of batches of environments that take a reset of some environments for one of all.

Muster resets the environments whose episode has ended, and no others, by ``reset(options=
{"reset_mask": mask})`` through all wrappers. A wrapper whose ``reset`` forgets what it knows of all
environments then returns wrong values for the others.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
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
# methods that change arrays, lists and dicts
IN_PLACE = {"fill", "fill_", "zero_", "copy_", "clear", "append", "update"}
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
    """Return warnings of wrappers of the user's whose ``reset`` changes what they keep, and does not
    read the mask.
    """
    warnings = []
    for wrapper in _wrappers(env):
        reset = type(wrapper).reset
        if reset.__module__.split(".")[0] in ("gymnasium", "muster"):
            continue
        code = getattr(reset, "__code__", None)
        if code is None or MASK in code.co_consts:
            continue
        if not _changes_attributes(reset):
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


def _changes_attributes(method: Any) -> bool:
    """Return whether the source of a method changes attributes, as far as it shows; True without a
    source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(_is_attribute(_changed_by(node)) for node in ast.walk(tree))


def _changed_by(node: ast.AST) -> ast.AST | None:
    """Return what a node changes; None: nothing."""
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if node.func.attr in IN_PLACE else None


def _is_attribute(changed: ast.AST | None) -> bool:
    """Return whether this is an attribute, or an item of one."""
    while isinstance(changed, ast.Subscript):
        changed = changed.value
    return isinstance(changed, ast.Attribute)


def _wrappers(env: Any) -> Iterator[VectorWrapper[Any, Any, Any, Any, Any]]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env
