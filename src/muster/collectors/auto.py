"""``num_workers="auto"``: as many workers as pay here, found out in a second or two."""

from __future__ import annotations

import dataclasses
from typing import Any

from muster.collectors.multi_options import MultiOptions
from muster.collectors.setup import keywords_of, makers_of, worker_options
from muster.tuning.measure import Subject, measure
from muster.tuning.model import Costs, Setup, fewest, worker_numbers

SECONDS = 1.0  # for measuring


def auto_workers(create_env_fn: Any, policy: Any, options: MultiOptions, *, alone: bool) -> int:
    """The fewest workers that are about as fast as any number of them.

    Makes one environment in this process, steps it, and closes it. The user's random streams, and those of the groups,
    stay as they are.

    Args:
        create_env_fn: see ``MultiSyncCollector``; of a list, the first entry is looked at.
        policy: that acts, or None.
        alone: every group fills batches of its own.
    """
    makers = makers_of(create_env_fn)
    told = worker_options(options, policy, num_envs=None if options.num_envs is None else 1)
    rollout = dataclasses.replace(told.rollout, num_threads=options.num_sub_threads, on_step=None)
    told = dataclasses.replace(told, rollout=rollout)
    kwargs = keywords_of(options.create_env_kwargs, len(makers))[0]
    costs = measure(Subject(makers[0], kwargs, policy, told), SECONDS)
    groups = len(makers) if isinstance(create_env_fn, (list, tuple)) else None
    return choose_workers(costs, options, groups, alone=alone)


def choose_workers(costs: Costs, options: MultiOptions, groups: int | None, *, alone: bool) -> int:
    """What follows from the costs.

    Args:
        groups: that there are; None: as many as workers.
    """
    B = costs.env_batch if costs.env_batch > 1 else options.num_envs or 1
    most = groups or (1 << 10 if alone else max(1, options.frames_per_batch // B))  # with a step for each environment
    setups = []
    for workers in worker_numbers(costs, most):
        n = groups or workers
        setup = Setup(
            num_envs=B,
            groups=n,
            T=options.rows_per_batch(B if alone else n * B),
            workers=workers,
            backend=options.backend,
            inference=options.inference,
            alternating=options.alternating,
            asynchronous=alone,
        )
        setups.append(setup)
    return fewest(costs, setups).workers
