"""A group: an env batch, and what it carries from one rollout to the next."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from muster.episodes.agent_returns import AgentReturns
from muster.episodes.clock import AgentClock, TrajectoryClock
from muster.keys import Key
from muster.memory.specs import Array
from muster.protocols import EnvBatch
from muster.rng import GroupRng
from muster.rollout.abilities import Abilities
from muster.rollout.acting import env_error
from muster.rollout.carry import Carry
from muster.rollout.context import Contexts
from muster.rollout.on_device import OnDevice
from muster.rollout.options import RolloutOptions
from muster.rollout.progress import Phase, Progress
from muster.rollout.resets import Due, ResetListener
from muster.rollout.seeding import EpisodeSeeding

if TYPE_CHECKING:
    import torch


class Reports(NamedTuple):
    """Where a group shows what it does: the progress of its worker, and listeners to resets."""

    progress: Progress
    listeners: Sequence[ResetListener]


class OpenRollout(Protocol):
    """A rollout that has begun and is not complete; see ``muster.rollout.running.Rollout``.

    Attributes:
        absent: environments that make no step in it.
    """

    absent: Collection[int]

    @property
    def is_paused(self) -> bool:
        """Whether it goes on after its last row as if nothing had happened."""

    @property
    def stays_open(self) -> bool:
        """Whether it waits for a request for its next rows."""

    @property
    def has_unsettled(self) -> bool:
        """Whether rows are complete that no request has returned."""

    def leave(self) -> None:
        """End a rollout that stays open."""


class RandomStart:
    """The random steps before the first batch (``max_decorrelation_steps``), and their number.

    Attributes:
        most: the option.
        unreported: number of steps that no rollout has counted yet.
        is_over: the first rollout has begun, and counted them.
        is_due: environments that are reset now make random steps.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.unreported = 0
        self.is_over = False
        self.is_due = bool(most)

    def execute(self, steps: int) -> None:
        """Count executed random steps."""
        self.unreported += steps

    def end(self) -> int:
        """Begin the first rollout, and return the number of steps that it has to count."""
        steps = self.unreported
        self.unreported = 0
        self.is_over = True
        self.is_due = False
        return steps

    def load(self, unreported: int, *, is_over: bool) -> None:
        """Restore the state."""
        self.unreported = unreported
        self.is_over = is_over
        self.is_due = bool(self.most) and not is_over


class Group:
    """An env batch, and what it carries from one rollout to the next.

    Its life:

    1. It is made, and all its environments must be reset (``due``).
    2. ``begin_episodes`` executes the resets that are due, into the rows for the next step
       (``carry``). Before the first rollout, random steps may follow (``random_start``).
    3. A policy that did not act last makes its first call on these rows; the call is kept for row 0
       of the next rollout (``carry.keep_call``).
    4. A rollout begins with the carried rows, and gives back the rows for the step after it.
       Meanwhile it is ``open``. An error leaves it open: the next request for the same lane
       continues it, and any other replaces it.
    5. An error of the environments makes all of them due again (``lose``).

    What varies from one rollout to the next is not here, but in the ``RolloutRequest``.

    Args:
        env: env batch, owned by the group.
        env_ids: global numbers of the group's environments.
        total_envs: number of environments over all groups.
        rng: random streams of the group.
        number: number of the group.
        progress: progress of the worker, read by the parent process.
        shares_batch: all groups fill a batch together; False: this group fills batches of its own.

    Attributes:
        on_device: the clock on the device of the rows, and what is on its way from there; None: the
            rows are on the host.
        reports: see ``Reports``.
        sharing: indices of the environments among those of the same batch, ``[B]``, and their
            number, unless a request says otherwise.
        carry: the rows for the next step, and the policy's call on them.
        can: what the env batch can do.
        contexts: the contexts for environments and policies.
        seeding: the seeds of episodes.
        agent_returns: the returns of agents that act at the same time; None: there are none.
    """

    def __init__(
        self,
        env: EnvBatch,
        *,
        env_ids: Array,
        total_envs: int,
        rng: GroupRng,
        options: RolloutOptions,
        number: int = 0,
        progress: Progress | None = None,
        shares_batch: bool = True,
    ) -> None:
        self.env = env
        self.options = options
        self.number = number
        self.sharing = (env_ids, total_envs)
        if not shares_batch:
            self.sharing = (np.arange(env.spec.num_envs), env.spec.num_envs)
        clock: TrajectoryClock | AgentClock
        if env.spec.agents:
            clock = AgentClock(env_ids, total_envs, env.spec.agents)
        else:
            clock = TrajectoryClock(env_ids, total_envs)
        self._clock = clock
        self.agent_returns: AgentReturns | None = None
        if env.spec.agent_rewards:
            self.agent_returns = AgentReturns(env.spec.agent_rewards, env.spec.num_envs)
        self.carry = Carry(env.spec)
        self.due = Due(range(env.spec.num_envs))
        self.random_start = RandomStart(options.max_decorrelation_steps)
        self.reports = Reports(Progress() if progress is None else progress, [])
        self.open: OpenRollout | None = None
        self.contexts = Contexts(rng, options)
        self.can = Abilities(env, options)
        self.seeding = EpisodeSeeding(
            options, env.spec, clock, tells=not self.can.write_next
        )
        self.on_device: OnDevice | None = None
        if env.spec.device is not None and isinstance(clock, TrajectoryClock):
            self.on_device = OnDevice(clock, env.spec, options, self.can)

    @property
    def B(self) -> int:  # noqa: N802 (the field's name)
        """Number of environments."""
        return self.env.spec.num_envs

    @property
    def env_ids(self) -> Array:
        """Global numbers of the environments, ``[B]``."""
        return self._clock.env_ids

    @property
    def clock(self) -> TrajectoryClock | AgentClock:
        """Numbers, steps and returns of the current episodes. If they are on a device, they are
        copied from there, which waits.
        """
        if self.on_device is None:
            return self._clock
        return self.on_device.clock.on_host()

    @property
    def rng(self) -> GroupRng:
        """The random streams."""
        return self.contexts.rng

    @property
    def progress(self) -> Progress:
        """The progress of the worker."""
        return self.reports.progress

    @property
    def agent_clock(self) -> AgentClock | None:
        """The clock, if agents take turns."""
        return self._clock if isinstance(self._clock, AgentClock) else None

    @property
    def track(self) -> int:
        """The group's number on the timeline: that of its first environment."""
        return int(self.env_ids[0])

    def observations(self) -> dict[Key, torch.Tensor]:
        """Return the observations for the policy's next call, ``[*batch_shape, *shape]`` per leaf."""
        return {key: self.carry.seen(key) for key in self.env.spec.observation_specs}

    def listen(self, listener: ResetListener) -> None:
        """Tell ``listener`` of all resets from now on."""
        self.reports = Reports(self.progress, [*self.reports.listeners, listener])

    def reseed(self, rng: GroupRng, seeds: Sequence[int]) -> None:
        """Use other random streams, and reset each environment with its seed before its next step."""
        self.contexts = Contexts(rng, self.options)
        self.seeding.restart()
        self.reset(seeds=seeds)

    # --- resets -----------------------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        """The environments that are reset before the next step."""
        absent = () if self.open is None else self.open.absent
        return [i for i in self.due.which if i not in absent]

    def reset(
        self, which: Sequence[int] | None = None, seeds: Sequence[int] | None = None
    ) -> None:
        """Schedule a reset of the environments ``which`` (default all) before the next step."""
        chosen = range(self.B) if which is None else sorted(set(which))
        self.due.add(chosen, seeds)

    def lose(self) -> None:
        """Schedule a reset of all environments, whose states are unknown."""
        self.can.drop_open()
        self.due.lose()
        self.reset()

    def begin_episodes(
        self, *, early: bool = False, reports: Reports | None = None
    ) -> list[int]:
        """Execute the resets that are due, and return these environments.

        Call it in the group's context.

        Args:
            early: the rollout that begins with these episodes has not begun.
            reports: where resets are shown instead of in the group's ``reports``.
        """
        which = self.due.which
        if not which:
            return []
        reports = self.reports if reports is None else reports
        if self.due.error is not None:
            reports.progress.begin(Phase.RESET)  # the phase of the error
        undone = self.due.undone(again=self.can.has_reset_options)
        was_lost = self.due.recover()
        if (
            self.agent_clock is None or was_lost
        ):  # else the environments end the episodes of agents
            self.clock.abandon(which)
        if self.agent_returns is not None:
            self.agent_returns.abandon(which)
        self.carry.begin_anew(which)
        around: AbstractContextManager[None] = nullcontext()
        # what reset() makes of its options may be the user's
        if self.on_device is not None and not self.can.has_reset_options:
            around = self.on_device.around_resets()
        with around:
            for part, seeds in self.due.parts(undone):
                self.reset_envs(
                    self.carry, 0, part, self.seeding.seeds_of(part, seeds), reports
                )
        self.carry.discard_call()
        self.due.done(early=early)
        return which

    def reset_envs(
        self,
        data: Any,
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
        reports: Reports | None = None,
    ) -> float:
        """Reset environments into ``row`` of ``data``, and return the nanoseconds that it took."""
        progress, listeners = self.reports if reports is None else reports
        began = time.perf_counter_ns()
        phase = progress.begin(Phase.RESET)
        for listener in listeners:
            listener.before_reset(row, which, seeds)
        try:
            self.env.reset(data, row, which, seeds)
        except Exception as error:
            raised = env_error(self.env.spec.name, "reset", error)
            if raised is error:
                raise
            raise raised from error
        progress.begin(phase)
        self.seeding.note(which, seeds)
        return time.perf_counter_ns() - began

    # --- rollouts ---------------------------------------------------------------------------------

    def check_earlier(self, *, wait: bool = False) -> None:
        """Raise the error of an earlier rollout on the device that has been noticed since; ``wait``
        for all of them. The environments are reset then.
        """
        if self.on_device is None:
            return
        self.on_device.look(wait=wait)
        error = self.on_device.take_bad()
        if error is not None:
            self.lose()
            raise error

    def opened(self, rollout: OpenRollout) -> None:
        """Note the rollout that begins; an earlier one is given up."""
        self.open = rollout

    def leave(self) -> None:
        """End the open rollout if it ``stays_open``: from here on, the group is as between two
        rollouts.
        """
        if self.open is not None and self.open.stays_open:
            self.open.leave()

    @property
    def has_unsettled(self) -> bool:
        """Whether an error has left complete rows of a rollout that stays open: the next request
        returns them.
        """
        return (
            self.open is not None and self.open.stays_open and self.open.has_unsettled
        )

    @property
    def can_stay_open(self) -> bool:
        """Whether rollouts may stay open, since nothing is done only at their ends."""
        options = self.options
        return (
            self.env.spec.device is None
            and self.agent_clock is None
            and self.agent_returns is None
            and self.can.holding is None
            and self.can.starting.keeps_first_call
            and not self.seeding.is_chosen
            and not self.progress.watched
            and options.reset_when_done
            and options.on_step is None
            and options.interruptor is None
            and not options.reset_at_each_iter
            and not options.set_truncated
        )

    def closed(self) -> None:
        """Note that the open rollout is complete."""
        self.open = None

    @property
    def is_paused(self) -> bool:
        """Whether the open rollout goes on after its last row as if nothing had happened."""
        return self.open is not None and self.open.is_paused
