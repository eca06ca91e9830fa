"""A policy in several threads, where what it draws comes from the process's generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.protocols import Act, Outputs, Policy
from muster.rng import GroupRng


class OneAtATime:
    """Implements ``Policy``: one thread acts at a time, with its group's streams in the place of the global ones.

    Policies that draw from the group's own generator do not need that.

    Args:
        lock: common to all threads.
    """

    def __init__(self, policy: Policy, lock: Any) -> None:
        self.inner, self._lock = policy, lock
        self.name, self.draws_globally = policy.name, False

    @property
    def path(self) -> str:
        return self.inner.path

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        with self._lock, rng.as_global():
            return self.inner.first(obs, rng)

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        act = self.inner.start(lane, rng)
        if not self.inner.draws_globally:
            return act

        def act_alone(t: int) -> None:
            with self._lock, rng.as_global():
                act(t)

        return act_alone

    def columns(self) -> Sequence[Column]:
        return self.inner.columns()
