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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from muster.errors import BadOption, UnsupportedEnv
from muster.keys import FLAGS, REWARD, Key

if TYPE_CHECKING:
    import torch

    from muster.envs.checks import Casts
    from muster.memory.slots import Lane
    from muster.memory.specs import Array, Column, Specs
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
        num_envs: B.
        batch_shape: batch dimensions for policy and user. None: ``(B,)``, or ``()`` for one
            environment requested without ``num_envs``.
        name: name in messages.
        observation_specs: stored dtypes and shapes of the policy's input, and of other values
            carried from step to step (nested done flags, the state of a stateless environment). The
            collector may change floating dtypes before the first reset (``obs_dtype``); writing
            into rows then casts.
        own_dtype: keys of observations whose dtype must not be changed.
        bookkeeping: keys of observations that only policies on TensorDicts get: counters, flags,
            state.
        info_specs: columns of infos; written and carried as observations are, and hidden from
            policies.
        action_specs: the policy's actions.
        action_masks: key of the action mask by key of the action, for discrete actions. A mask is
            an observation or an info with an entry for each choice (those of several variables one
            after another), or for each combination of choices; 0: not allowed. Collectors refuse
            masks that do not fit (``policies.sampling.check_masks``).
        samples_allowed: ``sample`` draws actions that are allowed in the current state (TorchRL's
            ``rand_action``).
        step_specs: other results of a step, stored below ``next``, for instance rewards per agent.
        flags: the flags among done, terminated and truncated in the user's batch; Muster stores all
            three.
        reward_key: column of the reward that episode records sum up, ``[B]``. ``TEAM_REWARD`` is
            hidden from the user, for environments whose own rewards are ``step_specs``.
        reward_dtype: dtype of that column.
        executed_in_row: number of environments stepped in a row that raised; else 0.
        final_obs_certain: False: next/observation may be unknown at the end of an episode.
        device: device of the rows; None is the host. On a device ``reset`` and ``step`` get and
            write tensors (``lane.data``), and ``step`` must not synchronize: it returns None,
            resets finished environments itself, and writes terminated, truncated and ``next``
            observations of the row (``writes_next``).
        writes_next: the environment writes ``next`` observations itself.
        max_steps: limit of steps per episode, set before the first reset of environments that write
            ``next``.
        agents: names of agents that take turns. Each row is then a turn of one of them, whose
            number is in the column ``AGENT``, and each agent has its own episodes (see
            ``envs/turns.py``). Empty: agents do not take turns.
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
        repeats: observations that repeat another column of the row before, and that column; zero at
            the start of an agent's episode.
        casts: rules for values in another dtype than their space's. None: they are refused.
        keeps_infos: True: reset and step set ``new_infos``. To be set before the first reset. None:
            there are no infos.
        new_infos: infos of the last reset or step, as pairs of infos and the indices (or ``ALL``)
            of their environments. Infos are a list with a dict per environment (None: not stepped),
            or a dict of arrays as in ``gymnasium.vector``. An environment in two pairs was reset in
            the same step; the first pair is the reset's.
    """

    num_envs: int
    batch_shape: tuple[int, ...] | None = None
    name: str
    observation_specs: Specs
    own_dtype: frozenset[Key] = frozenset()
    bookkeeping: frozenset[Key] = frozenset()
    info_specs: Specs = {}  # noqa: RUF012
    action_specs: Specs
    action_masks: Mapping[Key, Key] = MappingProxyType({})
    samples_allowed: bool = False
    step_specs: Specs = {}  # noqa: RUF012 (a default, never changed)
    flags: tuple[Key, ...] = FLAGS
    reward_key: Key = REWARD
    reward_dtype: np.dtype[Any] = np.dtype(np.float32)
    executed_in_row: int = 0
    final_obs_certain: bool = True
    device: torch.device | None = None
    writes_next: bool = False
    max_steps: int | None = None
    agents: tuple[str, ...] = ()
    bypasses: bool = False
    lives_lost: Collection[int] = ()
    late: int = 0
    ready_envs: Array | None = None
    dropped: int = 0
    repeats: Mapping[Key, Key] = MappingProxyType({})
    casts: Casts | None = None
    keeps_infos: bool | None = None
    new_infos: Sequence[tuple[Any, Any]] = ()

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
        raise UnsupportedEnv(f"{self.name} steps all its environments")

    def track_lives(self, key: str) -> None:
        """Read ``info[key]`` (default True) at an end: whether the environment's episode is over,
        or only the agent's. If it is True without an end, truncate. Call this before the first
        ``start``.

        Raises:
            BadOption: this batch does not read infos.
        """
        raise BadOption(
            f"traj_done_key={key!r} is looked up in the infos of single Gymnasium environments, and"
            f" {self.name} is something else: give an env id or a function that makes one"
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


def acting_shape(env: Any, batch_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch dimensions of a policy's call in an env batch (or ``GroupInfo``) with
    ``batch_shape``.
    """
    ready = getattr(env, "ready_envs", None)
    return batch_shape if ready is None else (len(ready),)


def carried_specs(env: Any) -> Specs:
    """What an env batch (or a ``GroupInfo``) carries over from row to row."""
    return {**env.observation_specs, **env.info_specs}


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
