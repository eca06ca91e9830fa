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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from muster.keys import Key
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
    """B environments stepped together. ``muster.testing.EnvContract`` is the executable contract."""

    num_envs: int
    name: str  # for messages
    observation_specs: Specs
    action_specs: Specs
    executed_in_row: int  # environments stepped in a row that an error cut short; else 0
    final_obs_certain: bool  # False: next/observation may be unknown where an episode ends

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Random actions, ``[*shape, *leaf shape]`` per leaf."""

    def reset(self, arrays: Mapping[Key, Array], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Start new episodes in the environments ``which`` and write their first observations.

        Args:
            arrays: per observation leaf ``[rows, B, *shape]``.
            row: the row to write, in the entries ``which`` only.
            which: environment indices, ascending.
            seeds: one per entry of ``which``; None lets the environments' own generators run on.
        """

    def start(self, lane: Lane) -> Step:
        """Prepare to write into ``lane``.

        Returns:
            ``step(t)``: runs action row ``t``; writes observation row ``t + 1``, reward ``t``, and where an
            episode ended ``terminated`` and ``truncated`` of row ``t`` (they are False before). Returns the
            indices of environments whose episode ended, or None. Observation row ``t + 1`` then holds
            their *last* observation; ``reset`` replaces it.
        """

    def objects(self) -> Sequence[object]:
        """The environment objects behind it, to see that no two groups share one."""

    def close(self) -> None: ...


class Policy(Protocol):
    """Something that chooses actions."""

    name: str  # for messages
    path: str  # how it computes them, for ``stats()``

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
