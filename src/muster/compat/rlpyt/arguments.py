"""Checks of the arguments of collectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.envs.checks import described_value
from muster.errors import BadOption


def check_envs(collector: str, envs: Any) -> None:
    """Raise ``BadOption`` unless ``envs`` is a list of different environments."""
    if not hasattr(envs, "__len__") or not hasattr(envs, "__getitem__"):
        raise BadOption(
            f"{collector}(envs={described_value(envs)}): expected a list of environments"
        )
    if len(envs) == 0:
        raise BadOption(
            f"{collector}(envs={envs!r}): expected at least one environment"
        )
    for i, env in enumerate(envs):
        is_class = isinstance(env, type)
        if is_class or not (hasattr(env, "reset") and hasattr(env, "step")):
            raise BadOption(
                f"{collector}: envs[{i}] is {described_value(env)}, expected an environment, which"
                " has the methods reset and step"
            )
    if len({id(env) for env in envs}) < len(envs):
        raise BadOption(
            f"{collector}: the same environment is in envs more than once: make one for each place"
        )


def check_record_class(collector: str, record_class: Any) -> None:
    """Raise ``BadOption`` unless new records can be made by a call of ``record_class``."""
    if not callable(record_class):
        raise BadOption(
            f"{collector}(TrajInfoCls={described_value(record_class)}): expected the class of the"
            " records, such as TrajInfo"
        )


def check_records(traj_infos: Any, B: int) -> None:
    """Raise ``BadOption`` unless ``traj_infos`` is a list of a record for each environment."""
    if not isinstance(traj_infos, list) or len(traj_infos) != B:
        size = f" of {len(traj_infos)}" if isinstance(traj_infos, list) else ""
        raise BadOption(
            f"collect_batch(traj_infos=...) is a {type(traj_infos).__name__}{size}, expected the list"
            f" of {B} records that the last call or start_envs() has returned"
        )


def ranks_of(collector: str, env_ranks: Sequence[int] | None, B: int) -> Any:
    """Return the ranks of B environments, by default from 0 on; or ``BadOption``."""
    if env_ranks is None:
        return np.arange(B)
    ranks = np.asarray(env_ranks)
    is_fine = ranks.shape == (B,) and ranks.dtype.kind in "iu" and (ranks >= 0).all()
    if not is_fine or len(set(ranks.tolist())) < B:
        raise BadOption(
            f"{collector}(env_ranks={env_ranks!r}): expected {B} different integers of at least 0,"
            " one for each environment"
        )
    return ranks.astype(np.int64)
