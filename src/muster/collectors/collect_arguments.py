"""The arguments of ``collect`` and what it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from muster.capabilities import check_reset_kwargs
from muster.episodes.rules import RuleName, check_rule
from muster.episodes.summary import CollectStats
from muster.errors import BadOption
from muster.rollout.hooks import check_pause
from muster.rollout.request import Bootstrap
from muster.utils.integers import integer

if TYPE_CHECKING:
    from tensordict import TensorDict

Surplus = Literal["discard", "keep"]


class Collected(NamedTuple):
    """The result of ``collect_batch``.

    Attributes:
        batch: the collected batch, as in ``collector.buffer``. It stays valid.
        stats: statistics of the call.
    """

    batch: TensorDict
    stats: CollectStats


@dataclass  # not frozen: a frozen dataclass takes ten times as long to make
class CollectArguments:
    """The arguments of ``BaseCollector.collect``, which documents them; never changed.

    Raises:
        BadOption: both or neither of ``n_step`` and ``n_episode``, or an impossible value.
    """

    n_step: int | None = None
    n_episode: int | None = None
    _: KW_ONLY
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
            raise BadOption(
                f"collect takes n_step= or n_episode=, exactly one of them; {given} came"
            )
        for name in ("random", "no_grad", "reset_before_collect"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise BadOption(
                    f"collect({name}={getattr(self, name)!r}): expected True or False"
                )
        if self.rule is not None:
            check_rule(self.rule)
        if self.surplus not in (None, "discard", "keep"):
            raise BadOption(
                f"collect(surplus={self.surplus!r}): expected 'discard' or 'keep'"
            )
        if self.render is not None:
            check_pause(self.render)
        if self.bootstrap not in (True, False, "truncations"):
            raise BadOption(
                f"collect(bootstrap={self.bootstrap!r}): expected True, False or 'truncations'"
            )
        if self.n_step is not None and (self.rule or self.surplus):
            raise BadOption(
                "collect: rule and surplus are about episodes: give n_episode, or leave them out"
            )
        if self.n_episode is not None and self.bootstrap:
            raise BadOption(
                "collect(n_episode=...) has whole episodes only: bootstrap is for n_step"
            )
        if self.bootstrap and self.random:
            raise BadOption(
                "collect(random=True) asks no policy, so there are no values: leave bootstrap out"
            )
        check_reset_kwargs(self.reset_kwargs)
        if self.reset_kwargs and not (self.reset_before_collect or self.n_episode):
            raise BadOption(
                "collect: reset_kwargs are for the resets before collecting: give"
                " reset_before_collect=True"
            )

    @property
    def special(self) -> bool:
        """Whether rollouts started ahead for this call are of no use to other calls, and the
        reverse.
        """
        return bool(
            self.random
            or self.reset_before_collect
            or not self.no_grad
            or self.render is not None
            or self.values
        )

    @property
    def values(self) -> Bootstrap | None:
        """Return which next observations need values."""
        return (
            "truncations"
            if self.bootstrap == "truncations"
            else "last"
            if self.bootstrap
            else None
        )

    def is_like(self, other: CollectArguments) -> bool:
        """Return whether a call with these arguments continues one with the others."""
        try:
            return bool(self == other)
        except (ValueError, RuntimeError):  # arrays among ``reset_kwargs``
            return False

    def state_dict(self) -> dict[str, Any] | None:
        """Return the arguments as plain data; None: ``reset_kwargs`` are none."""
        state = asdict(self) | {
            "reset_kwargs": None
            if self.reset_kwargs is None
            else dict(self.reset_kwargs)
        }
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return None
        return state
