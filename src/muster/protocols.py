"""The protocols of environments and policies that the loop uses.

The loop is then::

    act, step = policy.start(lane, rng), env.start(lane)
    for t in range(T):
        act(t)  # reads obs row t, writes action row t
        finished = step(t)  # reads action row t, writes obs row t + 1, reward and flags of row t
        ...  # resets

Environments and policies use the *same* rows, those of the slot that becomes the user's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from muster.keys import Key

if TYPE_CHECKING:
    import torch

    from muster.env_spec import EnvSpec
    from muster.memory.slots import Lane
    from muster.memory.specs import Array, Column
    from muster.rng import GroupRng

ALL = slice(None)  # environments of a batch
PolicyMode = Literal["eval", "as_given"]  # of a policy's modules while they act
Act = Callable[[int], None]
Step = Callable[[int], "Sequence[int] | None"]


@dataclass
class Outputs:
    """The outputs of one policy call, by batch key; leaves are ``[B, *shape]`` (``[*shape]``
    unbatched).
    """

    action: dict[Key, torch.Tensor]
    extras: dict[Key, torch.Tensor] = field(default_factory=dict)
    state: dict[Key, torch.Tensor] = field(
        default_factory=dict
    )  # recurrent state after the call
    # actions without a fixed shape, e.g. text
    objects: dict[Key, Array] = field(default_factory=dict)
    # recurrent state before the call, if the policy gives that of new episodes
    begun: dict[Key, torch.Tensor] = field(default_factory=dict)


class EnvBatch(Protocol):
    """B environments stepped together. ``muster.testing.EnvContract`` is the executable contract.

    An adapter derives from it, and has ``spec``, ``reset``, ``start``, ``objects`` and ``close``.
    What only some adapters can do is in ``muster.capabilities``.

    Attributes:
        spec: the description of the environments.
    """

    spec: EnvSpec

    def store_as(self, spec: EnvSpec) -> None:
        """Describe the environments by ``spec`` from now on; called before the first rollout.

        A collector chooses the batch dimensions and the dtypes of stored observations, and the
        shapes and dtypes of stored actions.
        """
        self.spec = spec

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        """Start new episodes in the environments ``which`` and write their first observations.

        Args:
            arrays: per observation leaf ``[rows, B, *shape]``.
            row: number of the row; only its entries ``which`` are written.
            which: environment indices, ascending.
            seeds: one per entry of ``which``; None: the environments' own generators are not
                reseeded.
        """

    def start(self, lane: Lane) -> Step:
        """Prepare to write into ``lane``.

        Returns:
            ``step(t)``: runs action row ``t``; writes observation row ``t + 1``, reward ``t``, and
            for ended episodes ``terminated`` and ``truncated`` of row ``t`` (they are False
            before). Returns the indices of environments whose episode ended, or None. Observation
            row ``t + 1`` then contains their *last* observation; ``reset`` replaces it.
        """

    def objects(self) -> Sequence[object]:
        """The environment objects of the batch: to check that no two groups share one, and for
        exact resume.
        """

    def close(self) -> None:
        """Close the environments, if the adapter owns them."""
        return


class Policy(Protocol):
    """The protocol of objects that choose actions."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def path(self) -> str:
        """Code path that computes actions, for ``stats()``."""

    @property
    def draws_globally(self) -> bool:
        """Whether it may draw from the process's global generators, besides its group's own."""

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        """Act on ``obs``: the first call, from which ``columns`` are known."""

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        """Prepare for one rollout into ``lane``.

        Returns:
            ``act(t)``: reads observation row ``t`` (and recurrent state ``t``), writes action row
            ``t``, the extras of row ``t`` (and recurrent state ``t + 1``).
        """

    def columns(self) -> Sequence[Column]:
        """Columns for extras and recurrent state; known after ``first``."""
