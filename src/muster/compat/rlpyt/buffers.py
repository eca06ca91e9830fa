"""rlpyt's buffers for batches: what they have to be, and how a batch is copied into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from muster.compat.rlpyt.actors import AGENT_INFO
from muster.compat.rlpyt.envs import ENV_INFO
from muster.compat.rlpyt.trees import Fit, fit, leaves
from muster.envs.previous import PREV_ACTION, PREV_REWARD
from muster.errors import BadOption
from muster.keys import ACTION, DONE, OBSERVATION, REWARD, Key, dotted, next_of
from muster.memory.slots import Lane

NEEDED = ("env", "observation"), ("env", "reward"), ("env", "done"), ("agent", "action")
OPTIONAL = (
    ("env", "prev_reward"),
    ("env", "env_info"),
    ("agent", "prev_action"),
    ("agent", "agent_info"),
)
# numbers, without dimensions of their own
SCALARS = (("env", "reward"), ("env", "done"), ("env", "prev_reward"))
FLOATS = ("env", "reward"), ("env", "prev_reward")
BOOTSTRAP = ("agent", "bootstrap_value")


class Kind(NamedTuple):
    """Shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


class Buffers:
    """Checks the memory for batches before a step is made, since a batch that cannot be copied is
    lost.

    Args:
        T: rows of a batch.
        B: number of environments.
    """

    def __init__(self, T: int, B: int) -> None:
        self._T = T
        self._B = B
        self._kinds: dict[Key, Kind] | None = None  # of the first ones
        self._known: list[Any] = []  # the last two, which were checked

    def check(self, samples: Any) -> None:
        """Raise ``BadOption`` if a batch cannot be copied into ``samples``.

        All that are given have the shapes and dtypes of the first.
        """
        if any(samples is known for known in self._known):
            return
        kinds: dict[Key, Kind] = {}
        for key, leaf in self._leaves(samples):
            self._check_leaf(key, leaf)
            kinds[key] = Kind(leaf.shape, leaf.dtype)
        _check_previous(kinds)
        if self._kinds is None:
            self._kinds = kinds
        for key in kinds.keys() | self._kinds.keys():
            if kinds.get(key) != self._kinds.get(key):
                raise BadOption(
                    f"samples_np.{dotted(key)} is {kinds.get(key)}, and {self._kinds.get(key)} in"
                    " the buffers that start_envs() has found: call it again for other buffers"
                )
        self._known = [*self._known[-1:], samples]

    def _leaves(self, samples: Any) -> Iterator[tuple[Key, Any]]:
        for side, name in (*NEEDED, *OPTIONAL, BOOTSTRAP):
            tree = getattr(getattr(samples, side, None), name, None)
            if tree is None and (side, name) in NEEDED:
                raise BadOption(
                    f"samples_np has no {side}.{name}, which every batch is written to"
                )
            yield from leaves(tree, (side, name)).items()

    def _check_leaf(self, key: Key, leaf: Any) -> None:
        name = f"samples_np.{dotted(key)}"
        if not isinstance(leaf, np.ndarray):
            raise BadOption(
                f"{name} is a {type(leaf).__name__}, expected a NumPy array (rlpyt's numpify_buffer"
                " makes them of tensors)"
            )
        if key[:2] == BOOTSTRAP:
            if key != BOOTSTRAP or leaf.shape not in ((1, self._B), (self._B,)):
                raise BadOption(
                    f"{name} is {leaf.shape}, expected (1, {self._B}): one value for each"
                    " environment"
                )
        elif leaf.shape[:2] != (self._T, self._B):
            raise BadOption(
                f"{name} is {leaf.shape}, expected ({self._T}, {self._B}, ...):"
                f" batch_T={self._T} rows for {self._B} environments. A worker gets its own part"
                " of the sampler's buffer."
            )
        if key[:2] in SCALARS and (key not in SCALARS or leaf.ndim != 2):
            raise BadOption(
                f"{name} is {leaf.shape}, expected ({self._T}, {self._B}): one number for each step"
            )
        if key in (*FLOATS, BOOTSTRAP) and leaf.dtype.kind != "f":
            raise BadOption(
                f"{name} is {leaf.dtype}, expected a float: other dtypes cut rewards and values off"
            )
        if not leaf.flags.writeable:
            raise BadOption(
                f"{name} is read-only, and every batch is written to it: allocate writable memory"
            )


def _check_previous(kinds: dict[Key, Kind]) -> None:
    """Raise ``BadOption`` if the buffer of previous actions, if there is one, cannot hold all that
    the buffer of actions holds.
    """
    previous = {key[2:]: kind for key, kind in kinds.items() if key[1] == PREV_ACTION}
    actions = {key[2:]: kind for key, kind in kinds.items() if key[1] == "action"}
    if not previous:
        return
    for key in previous.keys() | actions.keys():
        before = previous.get(key)
        action = actions.get(key)
        if (
            before is None
            or action is None
            or before.shape != action.shape
            or fit(action.dtype, before.dtype) is not Fit.ALWAYS
        ):
            raise BadOption(
                f"samples_np.{dotted(('agent', PREV_ACTION, *key))} is {before}, and"
                f" {dotted(('agent', 'action', *key))} is {action}: the actions are copied there"
            )


def store(lane: Lane, samples: Any) -> None:
    """Copy a batch into rlpyt's buffers.

    If ``prev_action`` and ``action`` (or the rewards) share memory, as in rlpyt's samplers, only
    the first row is written, and the others are the actions of the row before, even if the agent
    got other inputs.
    """
    env = samples.env
    agent = samples.agent
    _copy(lane, env.observation, OBSERVATION)
    _copy(lane, env.reward, REWARD)
    _copy(lane, env.done, next_of(DONE))
    _copy(lane, getattr(env, "env_info", None), ENV_INFO)
    _copy(lane, agent.action, ACTION)
    _copy(lane, getattr(agent, "agent_info", None), AGENT_INFO)
    _copy(lane, getattr(env, "prev_reward", None), PREV_REWARD, shares_with=env.reward)
    _copy(
        lane,
        getattr(agent, "prev_action", None),
        (PREV_ACTION,),
        shares_with=agent.action,
    )


def _copy(lane: Lane, buffer: Any, root: Key, shares_with: Any = None) -> None:
    others = leaves(shares_with, root) if shares_with is not None else {}
    for key, leaf in leaves(buffer, root).items():
        rows = 1 if key in others and np.may_share_memory(leaf, others[key]) else lane.T
        leaf[:rows] = lane.arrays[key][:rows]
