"""The methods of collectors that collect when asked, and what these take and return."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
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

    from muster.collectors.on_demand import OnDemand
    from muster.collectors.options import CollectorOptions

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


class CollectMethods:
    """See the module."""

    options: CollectorOptions
    _on_demand: OnDemand

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        *,
        random: bool = False,
        render: float | None = None,
        no_grad: bool = True,
        reset_before_collect: bool = False,
        reset_kwargs: Mapping[str, Any] | None = None,
        rule: RuleName | None = None,
        surplus: Surplus | None = None,
        bootstrap: bool | Literal["truncations"] = False,
    ) -> CollectStats:
        """Collect so many steps or episodes now, into ``buffer``; the next call goes on from there.

        Args:
            n_step: over all environments: a batch ``[B, T]`` as in iteration, where ``collector/valid`` marks exactly
                so many if ``B`` does not divide it. Where workers do not wait for each other, rollouts of those that
                are ready, side by side; there can be more steps than asked.
            n_episode: complete ones: a batch ``[frames]``, one after another in the order of their ends (with
                ``traj_format="pad"`` one per line). Environments in the middle of an episode are reset first.
            random: uniformly random actions. The policy's other columns are NaN, integers 0, flags False; its
                recurrent states begin again after it. It is called once, to see its columns, if it never acted.
            render: call the environments' ``render`` after every step, and wait so many seconds then.
            no_grad: False calls your module or function with gradients enabled; the batch has none.
            reset_before_collect: begin new episodes in all environments.
            reset_kwargs: for the environments' own reset then.
            rule: which episodes count: "per_env" (default), "last_even", "fair", or "first_done", which favours short
                ones; docs/collect.md compares them.
            surplus: what becomes of other steps that were made: "discard" counts them as discarded, "keep" holds them
                for the next call, with whatever weights have acted. Default: "keep" where workers do not wait for each
                other, else "discard".
            bootstrap: what the policy says of the observations after the last rows, as ``stats.last_value_est`` and
                ``("next", "state_value")``; "truncations": there also after truncated episodes. The policy has to give
                ``state_value``. Random streams and recurrent states are as without it.

        Raises:
            BadOption: not exactly one amount, or an impossible combination; nothing was done.
            MusterError: what went wrong meanwhile; the same call goes on from there. If a hook of yours or the buffer
                failed, the next call delivers what was collected, and does nothing else.
        """
        asked = Asked(
            n_step, n_episode, random, render, no_grad, reset_before_collect, reset_kwargs, rule, surplus, bootstrap
        )
        return self._collect(asked).stats

    def collect_batch(self, n_step: int | None = None, n_episode: int | None = None, **others: Any) -> Collected:
        """``collect``, and what it has collected: ``batch, stats = collector.collect_batch(n_step=64)``."""
        return self._collect(Asked(n_step, n_episode, **others))

    @property
    def buffer(self) -> Any:
        """The replay buffer; without one the batch of the last ``collect``, None before."""
        given = self.options.replay_buffer
        return self._on_demand.batch if given is None else given

    def _collect(self, asked: Asked) -> Collected:
        self._check_open()
        with self._exclusively():
            if (made := self._on_demand.unreported) is None:
                made = self._on_demand.unreported = self._on_demand.collect(asked)
                self._log()  # if that fails, the next call reports this one
            self._on_demand.unreported = None
            return made

    def _check_open(self) -> None:
        raise NotImplementedError

    def _exclusively(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _log(self) -> None:
        raise NotImplementedError
