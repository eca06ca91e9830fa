"""The seams: what the loop needs of environments and policies, and nothing more.

The loop is then::

    act, step = policy.start(lane, rng), env.start(lane)
    for t in range(T):
        act(t)  # reads obs row t, writes action row t
        finished = step(t)  # reads action row t, writes obs row t + 1, reward and flags of row t
        ...  # resets

Environments and policies see the *same* rows, those of the slot that the user will get.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from muster.errors import BadOption, UnsupportedEnv
from muster.keys import FLAGS, REWARD, Key

if TYPE_CHECKING:
    import torch

    from muster.envs.checks import Casts
    from muster.memory.slots import Lane
    from muster.memory.specs import Array, Column, Specs
    from muster.rng import GroupRng

Act = Callable[[int], None]
Step = Callable[[int], "Sequence[int] | None"]


@dataclass
class Outputs:
    """What one policy call returned, by batch key; leaves are ``[B, *shape]`` (``[*shape]`` unbatched)."""

    action: dict[Key, torch.Tensor]
    extras: dict[Key, torch.Tensor] = field(default_factory=dict)
    state: dict[Key, torch.Tensor] = field(default_factory=dict)  # recurrent state after the call
    objects: dict[Key, Array] = field(default_factory=dict)  # actions without a fixed shape, e.g. text


class EnvBatch(Protocol):
    """B environments stepped together. ``muster.testing.EnvContract`` is the executable contract.

    Derive from it for the defaults below.

    Attributes:
        num_envs: B.
        batch_shape: B as policy and user see it. None: ``(B,)``, or ``()`` for one environment asked for without
            ``num_envs``.
        name: for messages.
        observation_specs: what the policy sees, and what is carried over from step to step besides (nested done
            flags, the state of a stateless environment), as it is stored. The collector may change floating dtypes
            before the first reset (``obs_dtype``); writing into rows then casts.
        own_dtype: those of them whose dtype must not be changed.
        bookkeeping: those of them that only policies on TensorDicts see: counters, flags, state.
        action_specs: what it chooses.
        step_specs: what else a step gives, stored below ``next``: rewards per agent, for instance.
        flags: those of done, terminated and truncated that the user sees; Muster keeps all three.
        reward_key: where ``step`` writes the reward that episode records add up, ``[B]``. ``TEAM_REWARD`` is hidden
            from the user, for environments whose own rewards are ``step_specs``.
        reward_dtype: of that column.
        executed_in_row: environments stepped in a row that an error cut short; else 0.
        final_obs_certain: False: next/observation may be unknown where an episode ends.
        device: where rows lie; None is the host. On a device ``reset`` and ``step`` get and write tensors
            (``lane.data``), and ``step`` must not wait for the device: it returns None, has reset what ended by
            itself, and has written terminated, truncated and ``next`` observations of the row (``writes_next``).
        writes_next: the environment writes ``next`` observations itself.
        max_steps: given before the first reset to environments that write ``next``: truncate there.
        reset_options: passed on at the next reset, once; whatever the environment's own reset takes by keyword.
        bypasses: it can leave environments out of a step; see ``bypass``.
        lives_lost: of those that the last step ended, environments whose own episode goes on; see ``track_lives``.
        repeats: observations that show another column of the row before, and which; zero where an agent's episode
            begins.
        casts: decides about values in another dtype than the spaces say. None: they are refused.
    """

    num_envs: int
    batch_shape: tuple[int, ...] | None = None
    name: str
    observation_specs: Specs
    own_dtype: frozenset[Key] = frozenset()
    bookkeeping: frozenset[Key] = frozenset()
    action_specs: Specs
    step_specs: Specs = {}  # noqa: RUF012 (a default, never changed)
    flags: tuple[Key, ...] = FLAGS
    reward_key: Key = REWARD
    reward_dtype: np.dtype[Any] = np.dtype(np.float32)
    executed_in_row: int = 0
    final_obs_certain: bool = True
    device: torch.device | None = None
    writes_next: bool = False
    max_steps: int | None = None
    reset_options: dict[str, Any] | None = None
    bypasses: bool = False
    lives_lost: Collection[int] = ()
    repeats: Mapping[Key, Key] = MappingProxyType({})
    casts: Casts | None = None

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Random actions, ``[*shape, *leaf shape]`` per leaf; on a device tensors."""

    def reset(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Start new episodes in the environments ``which`` and write their first observations.

        Args:
            arrays: per observation leaf ``[rows, B, *shape]``.
            row: the row to write, in the entries ``which`` only.
            which: environment indices, ascending.
            seeds: one per entry of ``which``; None lets the environments' own generators run on.
        """

    def check_partial_reset(self) -> None:
        """Raise ``UnsupportedEnv`` where single environments cannot be reset from outside."""
        return

    def start(self, lane: Lane) -> Step:
        """Prepare to write into ``lane``.

        Returns:
            ``step(t)``: runs action row ``t``; writes observation row ``t + 1``, reward ``t``, and where an
            episode ended ``terminated`` and ``truncated`` of row ``t`` (they are False before). Returns the
            indices of environments whose episode ended, or None. Observation row ``t + 1`` then holds
            their *last* observation; ``reset`` replaces it.
        """

    def bypass(self, which: Collection[int]) -> None:
        """From the next step on leave out these environments, and no others; only if ``bypasses``.

        In their place a step writes zeros into ``lane`` (where observations are objects, the last ones).
        """
        raise UnsupportedEnv(f"{self.name} steps all its environments")

    def track_lives(self, key: str) -> None:
        """Let ``info[key]`` (default True) say at an end whether the environment's episode is over, or only the
        agent's, and where it is True without an end, truncate. To be called before the first ``start``.

        Raises:
            BadOption: this batch does not look at infos.
        """
        raise BadOption(
            f"traj_done_key={key!r} is looked up in the infos of single Gymnasium environments, and {self.name} is "
            f"something else: give an env id or a function that makes one gymnasium.Env, with num_envs"
        )

    def restart_agent(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int]) -> None:
        """Take the agent's past out of an observation row: its episode ended, and the environment's did not."""
        return

    def objects(self) -> Sequence[object]:
        """The environment objects behind it: to see that no two groups share one, and for exact resume."""

    def snapshot(self) -> dict[str, Any]:
        """What the adapter itself carries from step to step besides the environments, as plain data."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a ``snapshot``."""
        return

    def look_again(self) -> None:
        """The environments were restored, and may hold other objects inside than before."""
        return

    def close(self) -> None:
        """Close the environments, where they are the adapter's own."""
        return


class Policy(Protocol):
    """Something that chooses actions."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def path(self) -> str:
        """How it computes actions, for ``stats()``."""

    @property
    def draws_globally(self) -> bool:
        """It may draw from the process's global generators, and not only from its group's own."""

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        """Act on ``obs``: the first real call, which shows what columns the policy's outputs need."""

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        """Prepare for one rollout into ``lane``.

        Returns:
            ``act(t)``: reads observation row ``t`` (and recurrent state ``t``), writes action row ``t``, the
            extras of row ``t`` (and recurrent state ``t + 1``).
        """

    def columns(self) -> Sequence[Column]:
        """Columns for extras and recurrent state; known after ``first``."""
