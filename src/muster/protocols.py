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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from muster.errors import BadOption, UnsupportedEnv
from muster.keys import Key

if TYPE_CHECKING:
    import torch

    from muster.env_spec import EnvSpec
    from muster.envs.checks import Casts
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
    state: dict[Key, torch.Tensor] = field(default_factory=dict)  # recurrent state after the call
    # actions without a fixed shape, e.g. text
    objects: dict[Key, Array] = field(default_factory=dict)


class EnvBatch(Protocol):
    """B environments stepped together. ``muster.testing.EnvContract`` is the executable contract.

    Subclass it to inherit the defaults below.

    Attributes:
        spec: the description of the environments.
        executed_in_row: number of environments stepped in a row that raised; else 0.
        writes_next: the environment writes ``next`` observations itself.
        max_steps: limit of steps per episode, set before the first reset of environments that write
            ``next``.
        reset_options: keyword arguments for the environments' own reset, passed once, at the next
            reset. Setting them raises ``BadOption`` for a seed (see ``check_reset_kwargs``).
        bypasses: the batch can leave environments out of a step; see ``bypass``.
        late: number of steps to make before the next row can be complete, where agents take turns.
        lives_lost: environments that the last step ended, but whose own episode continues; see
            ``track_lives``.
        ready_envs: the environments that act next, where not all act at the same time
            (``ReadyFirst``); their number is constant. None: all act.
        dropped: number of steps that resets discarded before they were in a row; the group sets it
            to 0.
        casts: rules for values in another dtype than their space's. None: they are refused.
        keeps_infos: True: reset and step set ``new_infos``. To be set before the first reset. None:
            there are no infos.
        new_infos: infos of the last reset or step, as pairs of infos and the indices (or ``ALL``)
            of their environments. Infos are a list with a dict per environment (None: not stepped),
            or a dict of arrays as in ``gymnasium.vector``. An environment in two pairs was reset in
            the same step; the first pair is the reset's.
    """

    spec: EnvSpec
    executed_in_row: int = 0
    writes_next: bool = False
    max_steps: int | None = None
    bypasses: bool = False
    lives_lost: Collection[int] = ()
    late: int = 0
    ready_envs: Array | None = None
    dropped: int = 0
    casts: Casts | None = None
    keeps_infos: bool | None = None
    new_infos: Sequence[tuple[Any, Any]] = ()

    def store_as(self, spec: EnvSpec) -> None:
        """Describe the environments by ``spec`` from now on; called before the first reset.

        A collector chooses the batch dimensions and the dtypes of stored observations.
        """
        self.spec = spec

    @property
    def reset_options(self) -> dict[str, Any] | None:
        """See the attributes of this class."""
        return self.__dict__.get("reset_options")

    @reset_options.setter
    def reset_options(self, options: dict[str, Any] | None) -> None:
        check_reset_kwargs(options)
        self.__dict__["reset_options"] = options

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Draw random actions, ``[*shape, *leaf shape]`` per leaf; tensors on a device."""

    def reset(
        self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        """Start new episodes in the environments ``which`` and write their first observations.

        Args:
            arrays: per observation leaf ``[rows, B, *shape]``.
            row: number of the row; only its entries ``which`` are written.
            which: environment indices, ascending.
            seeds: one per entry of ``which``; None: the environments' own generators are not
                reseeded.
        """

    def check_partial_reset(self) -> None:
        """Raise ``UnsupportedEnv`` if single environments cannot be reset by the caller."""
        return

    def start(self, lane: Lane) -> Step:
        """Prepare to write into ``lane``.

        Returns:
            ``step(t)``: runs action row ``t``; writes observation row ``t + 1``, reward ``t``, and
            for ended episodes ``terminated`` and ``truncated`` of row ``t`` (they are False
            before). Returns the indices of environments whose episode ended, or None. Observation
            row ``t + 1`` then contains their *last* observation; ``reset`` replaces it.
        """

    def bypass(self, which: Collection[int]) -> None:
        """Leave these environments, and no others, out of all following steps; only if
        ``bypasses``.

        For them a step writes zeros into ``lane`` (the last observations, if those are objects).
        """
        raise UnsupportedEnv(f"{self.spec.name} steps all its environments")

    def track_lives(self, key: str) -> None:
        """Read ``info[key]`` (default True) at an end: whether the environment's episode is over,
        or only the agent's. If it is True without an end, truncate. Call this before the first
        ``start``.

        Raises:
            BadOption: this batch does not read infos.
        """
        raise BadOption(
            f"traj_done_key={key!r} is looked up in the infos of single Gymnasium environments, and"
            f" {self.spec.name} is something else: give an env id or a function that makes one"
            " gymnasium.Env, with num_envs"
        )

    def restart_agent(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int]) -> None:
        """Clear the agent's past in an observation row: its episode ended, and the environment's
        did not.
        """
        return

    def drop_open(self) -> None:
        """Discard turns whose rows were not delivered (``agents``): the environments failed and
        will be reset.
        """
        return

    def objects(self) -> Sequence[object]:
        """The environment objects of the batch: to check that no two groups share one, and for
        exact resume.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return the adapter's own state, without that of the environments, as plain data."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a ``snapshot``."""
        return

    def look_again(self) -> None:
        """Refresh references into the environments, whose inner objects a restore may have
        replaced.
        """
        return

    def close(self) -> None:
        """Close the environments, if the adapter owns them."""
        return


def check_reset_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """Raise ``BadOption`` for a seed among the keyword arguments of resets: seeds of environments
    are Muster's.
    """
    if kwargs and "seed" in kwargs:
        seed = kwargs["seed"]
        raise BadOption(
            f"seed={seed!r} was given as an argument of the environments' reset, which gets its"
            f" seeds from the collector. Call collector.set_seed({seed!r}) instead: environment i"
            f" is then reset with seed {seed!r} + i (static_seed=True: all with the same)"
        )


class ReadyFirst(Protocol):
    """An ``EnvBatch`` whose environments act when they are ready, and not all at the same time
    (``ready_envs``).
    """

    def start_ready(
        self, lane: Lane, prepare: Callable[[Lane], Act], written: Collection[Key]
    ) -> Step:
        """Prepare to write into ``lane``, in place of ``EnvBatch.start``.

        Args:
            prepare: prepares the policy to act in a lane with one column for each of
                ``ready_envs``.
            written: keys of the policy's columns.

        Returns:
            ``step(t)``, as ``start`` does. It also writes action row ``t``, and what else the
            policy writes.
        """


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
