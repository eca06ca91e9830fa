"""The methods for collecting on demand, with their arguments, and for what was collected."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from muster.collectors.signatures import takes
from muster.episodes.record import Episodes
from muster.episodes.rules import RuleName, check_rule
from muster.episodes.summary import CollectStats
from muster.errors import BadOption
from muster.observing.plot import plot_stats
from muster.observing.stats import CollectorStats
from muster.rollout.bootstrap import Bootstrap
from muster.rollout.hooks import check_pause
from muster.utils.integers import integer

if TYPE_CHECKING:
    from tensordict import TensorDict

    from muster.collectors.background import Background
    from muster.collectors.engine import Engine
    from muster.collectors.observers import Observers
    from muster.collectors.on_demand import OnDemand
    from muster.collectors.options import CollectorOptions

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
class Asked:
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
        """Whether rollouts started ahead for this call are of no use to other calls, and the reverse."""
        return bool(
            self.random or self.reset_before_collect or not self.no_grad or self.render is not None or self.values
        )

    @property
    def values(self) -> Bootstrap | None:
        """Return which next observations need values."""
        return "truncations" if self.bootstrap == "truncations" else "last" if self.bootstrap else None


class CollectMethods:
    """Mixin of collectors: ``collect``, and what was collected, as data and as numbers."""

    options: CollectorOptions
    _on_demand: OnDemand
    _engine: Engine
    _observers: Observers
    _background: Background | None

    @takes(Asked)
    def collect(self, asked: Asked) -> CollectStats:
        """Collect a number of steps or episodes into ``buffer``. The next call continues from there.

        Args:
            n_step: number of steps over all environments. Makes a batch ``[B, T]`` as in iteration; ``collector/valid``
                marks exactly this number if ``B`` does not divide it. Where workers do not wait for each other, joins
                the rollouts of those that are ready, which can have more steps.
            n_episode: number of complete episodes. Makes a batch ``[frames]`` of them, in the order of their ends (with
                ``traj_format="pad"`` one per row). Resets environments in the middle of an episode first.
            random: take uniformly random actions. The policy's other columns are NaN, 0 or False, and its recurrent
                states start again afterwards. A policy that has never acted is called once, to find its columns.
            render: call the environments' ``render`` after every step, and then wait this number of seconds.
            no_grad: False: call your module or function with gradients enabled; the batch has none.
            reset_before_collect: reset all environments first.
            reset_kwargs: arguments of the environments' own reset before collecting.
            rule: which episodes count: "per_env" (default), "last_even", "fair", or "first_done", which favours short
                ones. See docs/collect.md.
            surplus: use of the other collected steps. "discard": count them as discarded. "keep": keep them for the
                next call, whichever weights acted in them. Default: "keep" where workers do not wait for each other,
                else "discard".
            bootstrap: add the policy's values of the observations after the last rows, as ``stats.last_value_est`` and
                ``("next", "state_value")``. "truncations": also after truncated episodes, in the latter. The policy
                must return ``state_value``. Random streams and recurrent states are the same without it.

        Raises:
            BadOption: both or neither of ``n_step`` and ``n_episode``, or an impossible combination. Nothing was done.
            MusterError: an error while collecting; the same call continues from there. After an error of a hook or
                of the buffer, the next call delivers the collected batch, and does nothing else.
        """
        return self._collect(asked).stats

    @takes(Asked)
    def collect_batch(self, asked: Asked) -> Collected:
        """Call ``collect`` and return its batch, too: ``batch, stats = collector.collect_batch(n_step=64)``."""
        return self._collect(asked)

    @property
    def buffer(self) -> Any:
        """The replay buffer. Without one, the batch of the last ``collect``; None before the first."""
        given = self.options.replay_buffer
        return self._on_demand.batch if given is None else given

    @property
    def episodes(self) -> Episodes:
        """Records (``EpisodeRecord``) of the episodes that ended in the last batch: a sequence."""
        return self._engine.episodes

    def stats(self) -> CollectorStats:
        """Return a snapshot of all counters. It is cheap, and available after ``shutdown``."""
        stats = self._engine.stats()
        ended_by = "" if self._background is None else self._background.ended_by
        return replace(stats, ended_by=ended_by) if ended_by else stats

    @property
    def watch_url(self) -> str | None:
        """Address of the page of ``watch=``, with its token; None: there is no page."""
        return None if self._observers.watched is None else self._observers.watched.url

    def plot(self) -> Any:
        """Draw returns over frames with the 95 % interval of a running mean, the split of time, and the policy lag.

        Needs matplotlib: ``pip install 'muster-rl[plot]'``. Episodes of before ``load_state_dict`` are not shown.

        Returns:
            a ``matplotlib.figure.Figure``, which notebooks show; ``savefig(path)`` writes it.

        Raises:
            BadOption: matplotlib is not installed.
        """
        return plot_stats(self.stats(), self._engine.curve.points)

    def _collect(self, asked: Asked) -> Collected:
        with self._exclusively():
            if (made := self._on_demand.unreported) is None:
                made = self._on_demand.unreported = self._on_demand.collect(asked)
                self._observers.wrote()  # after an error here, the next call reports this result
            self._on_demand.unreported = None
            return made

    if TYPE_CHECKING:

        def _exclusively(self) -> AbstractContextManager[None]: ...
