"""The columns that a rollout stores: those of the environment, those of the policy, and Muster's
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from muster.env_spec import EnvSpec
from muster.errors import BadOption
from muster.keys import (
    FLAGS,
    NEXT_OBS_VALID,
    POLICY_VERSION,
    RESUMED,
    SEED,
    STEP_COUNT,
    TEAM_REWARD,
    TRAJ_DONE,
    TRAJ_IDS,
    TRUNCATED,
    VALID,
    Key,
    dotted,
    next_of,
)
from muster.memory.specs import OBJECT, ArraySpec, Column, Role
from muster.rollout.options import RolloutOptions

FLAG = np.dtype(bool)
INTEGER = np.dtype(np.int64)


def _column(key: Key, spec: ArraySpec, role: Role | None = None) -> Column:
    return Column(
        key, spec.shape, spec.dtype, ragged=spec.ragged, inner=spec.inner, role=role
    )


def lane_columns(
    env_spec: EnvSpec,
    policy: Sequence[Column],
    options: RolloutOptions,
    *,
    marks_valid: bool = False,
    resumed: bool = False,
) -> tuple[Column, ...]:
    """Return the columns of a lane.

    Args:
        policy: columns of the policy's extras and recurrent state.
        marks_valid: add ``collector/valid``.
        resumed: add ``collector/resumed``.
    """
    by_policy = {column.key for column in policy}
    if env_spec.agents and any(column.carry for column in policy):
        raise BadOption(
            f"the policy has a recurrent state, and the agents of {env_spec.name} take turns: the"
            " state of one agent would go to the next. Use a policy without a state, or put what"
            " it has to remember into the observation"
        )
    columns = []
    for key, spec in env_spec.carried_specs.items():
        column = _column(key, spec)
        columns.append(
            replace(column, carry=True, by_policy=key in by_policy, role="observation")
        )
        if not options.compact_obs:
            columns.append(replace(column, key=next_of(key)))
    for key, spec in env_spec.action_specs.items():
        columns.append(_column(key, spec, "action"))
    for key, spec in env_spec.step_specs.items():
        role: Role | None = "reward" if key in env_spec.rewards else None
        column = _column(next_of(key), spec, role)
        columns.append(replace(column, ended_by=env_spec.reward_ends.get(key)))
    visible = set(env_spec.flags)
    if options.max_frames_per_traj:
        visible.add(TRUNCATED)
    for flag in FLAGS:
        for key in (flag, next_of(flag)):
            hidden = flag not in visible
            columns.append(
                Column(key, (), FLAG, trailing=True, host=True, hidden=hidden)
            )
    if options.traj_done_key is not None:
        columns.append(Column(TRAJ_DONE, (), FLAG, trailing=True, host=True))
    columns.append(
        Column(
            env_spec.reward_key,
            (),
            env_spec.reward_dtype,
            trailing=True,
            host=True,
            hidden=env_spec.reward_key == TEAM_REWARD,
            role="reward",
        )
    )
    columns.append(
        Column(TRAJ_IDS, (), INTEGER, host=True, hidden=not options.track_traj_ids)
    )
    if options.max_frames_per_traj:
        for key in (STEP_COUNT, next_of(STEP_COUNT)):
            columns.append(Column(key, (), INTEGER, trailing=True, host=True))
    if not env_spec.final_obs_certain:
        columns.append(Column(NEXT_OBS_VALID, (), FLAG))
    if marks_valid:
        columns.append(Column(VALID, (), FLAG, host=True))
    text = isinstance(getattr(options.track_policy_version, "version", None), str)
    if text and POLICY_VERSION in by_policy:
        raise BadOption(
            "The policy returns the extra 'policy_version', an integer, and the versions of"
            " track_policy_version are texts. Pass track_policy_version=False, or return no"
            " policy_version."
        )
    if options.track_policy_version and POLICY_VERSION not in by_policy:
        dtype = OBJECT if text else INTEGER
        columns.append(Column(POLICY_VERSION, (), dtype, host=True))
    if options.track_seeds:
        columns.append(Column(SEED, (), INTEGER, host=True))
    if resumed:
        columns.append(Column(RESUMED, (), FLAG, host=True))
    own = [column for column in policy if column.key not in env_spec.observation_specs]
    made = (*columns, *own)
    _check_distinct(made, env_spec.name)
    return made


def _check_distinct(columns: Sequence[Column], name: str) -> None:
    """Raise ``BadOption`` if two columns have the same key, or the key of one names what another is
    in: one would have the values of the other.
    """
    keys: set[Key] = set()
    for column in columns:
        if column.key in keys:
            raise BadOption(
                f"{name} and its policy have two values for {dotted(column.key)} of a batch: an"
                " observation, an info, an output of the policy or an option. Rename one of them"
            )
        keys.add(column.key)
    for key in keys:
        for depth in range(1, len(key)):
            if key[:depth] in keys:
                raise BadOption(
                    f"{name} and its policy have values for {dotted(key[:depth])} and for"
                    f" {dotted(key)} of a batch, which is a part of it. Rename one of them"
                )
