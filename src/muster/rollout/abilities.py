"""What a group's env batch can do besides being reset and stepped; asked once, when the group is
made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from muster.capabilities import (
    Bypasses,
    CastsValues,
    CountsSteps,
    HoldsSteps,
    LimitsResets,
    ResetsWithOptions,
    RestartsAgents,
    TracksLives,
    WritesNext,
    capability,
)
from muster.errors import BadOption
from muster.keys import Key
from muster.protocols import EnvBatch
from muster.rollout.ends import Bypass
from muster.rollout.options import RolloutOptions
from muster.rollout.starting import Starting, starting_of


class Abilities:
    """What an env batch can do; without a capability, nothing is done.

    Attributes:
        lives_lost: environments that the last step ended, but whose own episode continues.
        starting: how policy and environments start in a lane.
        holding: the env batch, if it executes steps whose rows are complete later.
        casting: the env batch, if it casts values to the types of its columns.
        bypass: leaves environments out of steps.
        write_next: the env batch resets itself, and writes next observations.

    Raises:
        BadOption: the env batch does not support an option.
        UnsupportedEnv: it cannot reset single environments.
    """

    def __init__(self, env: EnvBatch, options: RolloutOptions) -> None:
        self.starting: Starting = starting_of(env)
        self.lives_lost = _lives_of(env, options.traj_done_key)
        self.holding = capability(env, HoldsSteps)
        self.casting = capability(env, CastsValues)
        self.bypass = Bypass(env)
        self._counting = capability(env, CountsSteps)
        self._restarting = capability(env, RestartsAgents)
        self._with_options = capability(env, ResetsWithOptions)
        writing = capability(env, WritesNext)
        self.write_next = writing is not None
        if writing is not None and options.max_frames_per_traj is not None:
            writing.limit_episodes(options.max_frames_per_traj)
        if options.max_decorrelation_steps:
            _check_random_start(env)

    @property
    def has_reset_options(self) -> bool:
        """Whether the next reset gets keyword arguments."""
        return self._with_options is not None and bool(self._with_options.reset_options)

    def drop_open(self) -> None:
        """Discard steps whose rows were not delivered."""
        if self.holding is not None:
            self.holding.drop_open()

    def take_executed(self) -> int:
        """Return the number of environments stepped in the row that raised."""
        return 0 if self._counting is None else self._counting.take_executed()

    def restart_agent(
        self, arrays: Mapping[Key, Any], row: int, which: Sequence[int]
    ) -> None:
        """Clear the agent's past in an observation row."""
        if self._restarting is not None:
            self._restarting.restart_agent(arrays, row, which)


def writes_next(env: EnvBatch) -> bool:
    """Return whether the env batch resets itself, and writes next observations."""
    return capability(env, WritesNext) is not None


def _lives_of(env: EnvBatch, key: str | None) -> Collection[int]:
    if key is None:
        return ()
    tracking = capability(env, TracksLives)
    if tracking is None:
        raise BadOption(
            f"traj_done_key={key!r} is looked up in the infos of single Gymnasium environments, and"
            f" {env.spec.name} is something else: give an env id or a function that makes one"
            " gymnasium.Env, with num_envs"
        )
    return tracking.track_lives(key)


def _check_random_start(env: EnvBatch) -> None:
    if writes_next(env) or env.spec.device is not None:
        raise BadOption(
            f"max_decorrelation_steps: {env.spec.name} steps all its environments at once on a"
            " device. Let it begin at random steps by itself, or leave the option out"
        )
    limiting = capability(env, LimitsResets)
    if limiting is None or capability(env, Bypasses) is not None:
        return
    if env.spec.num_envs > 1:
        limiting.check_partial_reset()
