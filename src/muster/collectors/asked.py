"""What ``collect`` is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from muster.episodes.rules import RuleName, check_rule
from muster.episodes.summary import CollectStats
from muster.errors import BadOption
from muster.rollout.bootstrap import Bootstrap
from muster.rollout.hooks import check_pause
from muster.utils.integers import integer

if TYPE_CHECKING:
    from tensordict import TensorDict

Surplus = Literal["discard", "keep"]


class Collected(NamedTuple):
    """What ``collect_batch`` returns.

    Attributes:
        batch: as ``collector.buffer`` shows it; yours.
        stats: of the call.
    """

    batch: TensorDict
    stats: CollectStats


@dataclass  # not frozen, which would make each one ten times as expensive
class Asked:
    """The arguments of ``BaseCollector.collect``, where they are explained. It is not changed.

    Raises:
        BadOption: not exactly one amount, or an impossible value.
    """

    n_step: int | None
    n_episode: int | None
    random: bool = False
    render: float | None = None
    no_grad: bool = True
    reset_before_collect: bool = False
    reset_kwargs: Mapping[str, Any] | None = None
    rule: RuleName | None = None
    surplus: Surplus | None = None
    bootstrap: bool | Literal["truncations"] = False

    def __post_init__(self) -> None:
        if self.n_step is not None:
            self.n_step = integer("n_step", self.n_step, of="collect")
        if self.n_episode is not None:
            self.n_episode = integer("n_episode", self.n_episode, of="collect")
        if (self.n_step is None) == (self.n_episode is None):
            given = "both" if self.n_step is not None else "neither"
            raise BadOption(f"collect takes n_step= or n_episode=, exactly one of them; {given} came")
        for name in ("random", "no_grad", "reset_before_collect"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise BadOption(f"collect({name}={getattr(self, name)!r}): expected True or False")
        if self.rule is not None:
            check_rule(self.rule)
        if self.surplus not in (None, "discard", "keep"):
            raise BadOption(f"collect(surplus={self.surplus!r}): expected 'discard' or 'keep'")
        if self.render is not None:
            check_pause(self.render)
        if self.bootstrap not in (True, False, "truncations"):
            raise BadOption(f"collect(bootstrap={self.bootstrap!r}): expected True, False or 'truncations'")
        if self.n_step is not None and (self.rule or self.surplus):
            raise BadOption("collect: rule and surplus are about episodes: give n_episode, or leave them out")
        if self.n_episode is not None and self.bootstrap:
            raise BadOption("collect(n_episode=...) has whole episodes only: bootstrap is for n_step")
        if self.bootstrap and self.random:
            raise BadOption("collect(random=True) asks no policy, so there are no values: leave bootstrap out")
        if self.reset_kwargs and not (self.reset_before_collect or self.n_episode):
            raise BadOption(
                "collect: reset_kwargs are for the resets before collecting: give reset_before_collect=True"
            )

    @property
    def special(self) -> bool:
        """What workers have begun for other calls is of no use for this one, or the other way round."""
        return bool(
            self.random or self.reset_before_collect or not self.no_grad or self.render is not None or self.values
        )

    @property
    def values(self) -> Bootstrap | None:
        """Of which next observations."""
        return "truncations" if self.bootstrap == "truncations" else "last" if self.bootstrap else None
