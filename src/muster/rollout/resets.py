"""Scheduled resets, environments that wait for the next batch, and random steps before the first
batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from typing_extensions import Self

from muster.errors import BadOption
from muster.keys import Key
from muster.memory.objects import copied
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array
from muster.policies.random import RandomPolicy
from muster.policies.sampling import masks_of
from muster.protocols import Act, EnvBatch
from muster.rng import GroupRng
from muster.rollout.columns import RolloutOptions, lane_columns
from muster.rollout.progress import ACTING, KNOWN, STEPPING, Phase, Progress

if TYPE_CHECKING:
    from muster.rollout.group import Group

FIRST_STREAM = 1 << 20  # first stream for random steps; see ``GroupRng.stream``


def check_resets(env: EnvBatch, options: RolloutOptions) -> None:
    """Raise ``BadOption`` if the env batch does not support an option, ``UnsupportedEnv`` if it
    lacks single resets.
    """
    if options.traj_done_key is not None:
        env.track_lives(options.traj_done_key)
    if options.max_decorrelation_steps and (env.writes_next or env.spec.device is not None):
        raise BadOption(
            f"max_decorrelation_steps: {env.spec.name} steps all its environments at once on a"
            " device."
            " Let it begin at random steps by itself, or leave the option out"
        )
    if options.max_decorrelation_steps and not env.bypasses and env.spec.num_envs > 1:
        env.check_partial_reset()


class Due:
    """Environments that must be reset before the next step.

    Attributes:
        which: indices of the environments, ascending.
        seeds: seeds by environment; not every environment has one.
        error: error of an early reset that has not been raised yet.
        begun: environments that were reset early and have not been stepped since.
    """

    def __init__(self, which: Sequence[int], seeds: Mapping[int, int] | None = None) -> None:
        self.which = list(which)
        self.seeds = dict(seeds or {})
        self.error: BaseException | None = None
        self.begun: set[int] = set()

    def add(self, which: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        """Add the environments ``which``."""
        self.which = sorted({*self.which, *which})
        self.seeds.update(zip(which, seeds, strict=True) if seeds is not None else ())

    def parts(self, which: Sequence[int]) -> list[tuple[list[int], list[int] | None]]:
        """Split ``which`` into environments with seeds, and those without (None); omits empty
        parts.
        """
        seeded = [i for i in which if i in self.seeds]
        others = [i for i in which if i not in self.seeds]
        parts = (seeded, [self.seeds[i] for i in seeded]), (others, None)
        return [(part, seeds) for part, seeds in parts if part]

    def undone(self, *, again: bool) -> list[int]:
        """Return the environments that still need a reset; not those reset early, unless they have
        a seed or ``again``.

        Raises:
            BaseException: ``error``, once.
        """
        if (error := self.error) is not None:
            self.error = None
            raise error
        return [i for i in self.which if again or i in self.seeds or i not in self.begun]

    def leave_out(self, which: Collection[int]) -> Self:
        """Remove these environments, and return them with their seeds, for ``done``."""
        due = [i for i in self.which if i in which]
        held = type(self)(due, {i: self.seeds.pop(i) for i in due if i in self.seeds})
        self.which = [i for i in self.which if i not in which]
        return held

    def done(self, held: Self | None = None, *, early: bool = False) -> None:
        """Replace the environments, which were reset (``early``: before their rollout), by
        ``held``.
        """
        self.begun = {*self.begun, *self.which} if early else set()
        self.which, self.seeds = (held.which, held.seeds) if held else ([], {})


class Waiting:
    """Environments that ended in this rollout and wait for the next one (``reset_when_done=False``,
    or a rule).

    They are bypassed if the env batch supports that; else they are reset and stepped, and these
    steps are discarded.

    Attributes:
        since: row at which each environment ended.
        absent: environments that are bypassed from the first row on.
        idle: no environment has waited in this rollout, and none is bypassed.
    """

    def __init__(self, env: EnvBatch) -> None:
        self._env = env
        self.since: dict[int, int] = {}
        self.absent: Collection[int] = ()
        self.idle = False
        # next observations of environments that continue
        self._kept: dict[int, dict[Key, Any]] = {}

    def begin(self, absent: Collection[int] = ()) -> None:
        """Start a rollout in which only the ``absent`` environments are bypassed; empty: the same
        as before.
        """
        self.since, self._kept, self.absent = {}, {}, absent or self.absent
        self._bypass()
        self.idle = not self.absent

    def add(self, lane: Lane, t: int, which: Sequence[int], going_on: Collection[int] = ()) -> bool:
        """Add environments whose agent's episode ended at row ``t``; those in ``going_on`` continue
        without a reset.

        Returns:
            whether all environments wait.
        """
        self.idle = False
        new = [i for i in which if i not in self.since]
        self.since.update(dict.fromkeys(new, t))
        if self._env.bypasses:
            specs = self._env.spec.carried_specs
            for i in new:
                if i in going_on:
                    self._kept[i] = {key: copied(lane.arrays[key][t + 1, i]) for key in specs}
            for key, spec in specs.items():
                if spec.is_tensor:
                    lane.arrays[key][t + 1, new] = 0
            self._bypass()
        return len(self.since) + len(self.absent) == lane.B

    def resume(self, carry: Mapping[Key, Any]) -> list[int]:
        """Write next observations of environments that continue into the carried rows; return these
        environments.
        """
        for i, leaves in self._kept.items():
            for key, value in leaves.items():
                carry[key][0, i] = value
        return list(self._kept)

    def take_back(self, lane: Lane) -> None:
        """Remove the entries of incomplete rows: those from ``lane.done_steps`` on."""
        self.since = {i: t for i, t in self.since.items() if t < lane.done_steps}
        self._kept = {i: leaves for i, leaves in self._kept.items() if i in self.since}
        self._bypass()

    @property
    def bypassed(self) -> Collection[int]:
        """The environments that need no steps; the env batch bypasses them if it can."""
        return {*self.since, *self.absent}

    def late(self, n: int) -> Array | None:
        """Return a mask of the cells without a transition, ``[n, B]``; None if no environment
        waits.
        """
        if not self.since and not self.absent:
            return None
        late = np.zeros((n, self._env.spec.num_envs), bool)
        for i, t in self.since.items():
            late[t + 1 :, i] = True
        late[:, list(self.absent)] = True
        return late

    def made(self, begin: int, end: int) -> int:
        """Return the number of environment steps in rows ``begin`` to ``end`` (exclusive)."""
        steps = (end - begin) * (self._env.spec.num_envs - len(self.absent))
        if self.since and self._env.bypasses:
            steps -= sum(max(0, end - max(begin, t + 1)) for t in self.since.values())
        return steps

    def _bypass(self) -> None:
        if self._env.bypasses:
            self._env.bypass(self.bypassed)


def decorrelate(group: Group, which: Sequence[int]) -> None:
    """Make 1 to ``max_decorrelation_steps`` random steps in each environment of ``which``, after a
    reset.

    Episodes that end are not recorded, and their environments are reset. Episodes that continue
    keep their steps and rewards. Environments with fewer steps join later: they are bypassed until
    then or, if the env batch cannot bypass, reset again when they join. Call this within
    ``group.context()``.
    """
    env = group.env
    options = group.options
    track = group.progress
    rng = group.rng.stream(FIRST_STREAM)
    steps = np.zeros(group.B, np.int64)
    steps[which] = 1 + rng.integers(options.max_decorrelation_steps, size=group.B)[which]
    lane = Slot(
        Layout(1, group.B, lane_columns(env.spec, (), options), batch_shape=env.spec.batch_shape)
    ).lanes[0]
    before_reset, spans, limit, phase = (
        group.before_reset,
        group.spans,
        group.frame_limit,
        track.begin(Phase.RESET),
    )
    rule = group.rule
    watch = group.watch
    group.options = replace(
        options,
        interruptor=None,
        set_truncated=False,
        reset_when_done=True,
        reset_at_each_iter=False,
    )
    group.before_reset = group.spans = group.frame_limit = group.rule = group.watch = None
    group.progress, group.started = Progress(), True
    made = 0
    try:
        for left in range(most := int(steps.max()), 0, -1):
            if not env.bypasses and left < most:
                group.reset(np.flatnonzero(steps == left).tolist())
            made += _step(
                group, lane, np.flatnonzero(steps < left).tolist() if env.bypasses else []
            )
            track.cells[KNOWN] = made
            track.cells[STEPPING] -= 1  # a change shows that the worker is alive
    finally:
        group.executed -= made
        group.unreported += made
        group.before_reset, group.spans, group.frame_limit = before_reset, spans, limit
        group.options, group.progress, group.started = options, track, False
        group.rule, group.watch = rule, watch
        group.waiting.absent = ()
        group.lost_track(range(group.B))
    track.cells[STEPPING] = track.cells[ACTING]
    track.begin(phase)


def _step(group: Group, lane: Lane, absent: list[int]) -> int:
    """Make one random step of all environments but ``absent``, and return their number."""
    from muster.rollout.loop import fill  # here, since it imports the group

    lane.done_steps, lane.stopped, group.waiting.absent = 0, False, absent
    streams = cast(GroupRng, _Streams(group.rng))
    fill(
        group,
        _DrawingFrom(
            streams,
            group.env.sample,
            group.env.spec.batch_shape,
            masks=masks_of(group.env.spec),
        ),
        lane,
    )
    group.leave(lane)
    return group.waiting.made(0, 1)


class _DrawingFrom(RandomPolicy):
    """A random policy that draws from these streams, not from its group's."""

    def __init__(self, streams: GroupRng, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams = streams

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        return super().start(lane, self._streams)


class _Streams:
    """The streams of a ``GroupRng`` after ``FIRST_STREAM``."""

    def __init__(self, rng: GroupRng) -> None:
        self._rng = rng

    def stream(self, number: int) -> np.random.Generator:
        return self._rng.stream(FIRST_STREAM + 1 + number)
