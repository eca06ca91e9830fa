"""The keys of a batch: TorchRL's names as nested tuples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Key = tuple[str, ...]

OBSERVATION: Key = ("observation",)
ACTION: Key = ("action",)
REWARD: Key = ("next", "reward")
DONE: Key = ("done",)
TERMINATED: Key = ("terminated",)
TRUNCATED: Key = ("truncated",)
ACTION_MASK: Key = ("action_mask",)
LOG_PROB: Key = ("action_log_prob",)
STATE: Key = ("recurrent_state",)
STEP_COUNT: Key = ("step_count",)
TRAJ_IDS: Key = ("collector", "traj_ids")
NEXT_OBS_VALID: Key = ("collector", "next_obs_valid")
VALID: Key = ("collector", "valid")
MASK: Key = ("collector", "mask")  # of padded trajectories: False is padding
POLICY_VERSION: Key = ("collector", "policy_version")
SEED: Key = ("collector", "seed")  # of the reset of the row's episode; -1: it had none
AGENT: Key = ("collector", "agent")  # who acted, where agents take turns
RESUMED: Key = ("collector", "resumed")
# hidden: sum of several rewards, for episode records
TEAM_REWARD: Key = ("collector", "team_reward")
IS_INIT: Key = ("is_init",)
# with ``collect(bootstrap=)``: values of next observations
NEXT_VALUE: Key = ("next", "state_value")
INFO = "info"  # the first name of columns of infos
# the environment's own episode is over, not only the agent's
TRAJ_DONE: Key = ("next", "traj_done")

FLAGS = (DONE, TERMINATED, TRUNCATED)
RESERVED = frozenset(
    {"action", "next", "collector", "done", "terminated", "truncated", "step_count"}
)


def key_of(name: str | Key) -> Key:
    """Return the key of a name as TensorDict has it, which is a text at the top."""
    return name if isinstance(name, tuple) else (name,)


def next_of(key: Key) -> Key:
    """The key of the same quantity after the step."""
    return ("next", *key)


def is_below(key: Key, above: Collection[Key]) -> bool:
    """Return whether a key is one of ``above``, or in the nested part that one of them names."""
    return any(key[: len(prefix)] == prefix for prefix in above)


def mask_of(key: Key) -> Key:
    """``("info", "success")`` as ``("info", "_success")``: the flags that are True where a field is
    present.
    """
    return (*key[:-1], f"_{key[-1]}")


def nested(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """Convert ``{("a", "b"): x}`` to ``{"a": {"b": x}}``."""
    root: dict[str, Any] = {}
    for key, value in leaves.items():
        node = root
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return root


def dotted(key: Key) -> str:
    """Convert ``("next", "reward")`` to ``next.reward``, for messages and file formats."""
    return ".".join(key)
