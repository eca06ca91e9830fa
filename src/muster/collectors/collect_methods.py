"""The methods for collecting on demand, and for what was collected."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muster.collectors.collect_arguments import CollectArguments, Collected
from muster.collectors.signatures import takes
from muster.episodes.record import Episodes
from muster.episodes.summary import CollectStats
from muster.observing.plot import plot_stats
from muster.observing.stats import CollectorStats

if TYPE_CHECKING:
    from muster.collectors.background import Background
    from muster.collectors.engine import Engine
    from muster.collectors.observers import Observers
    from muster.collectors.on_demand import OnDemand
    from muster.collectors.options import CollectorOptions


class CollectMethods:
    """Mixin of collectors: ``collect``, and what was collected, as data and as numbers."""

    options: CollectorOptions
    _on_demand: OnDemand
    _engine: Engine
    _observers: Observers
    _background: Background | None

    @takes(CollectArguments)
    def collect(self, arguments: CollectArguments) -> CollectStats:
        """Collect a number of steps or episodes into ``buffer``.

        The next call continues from there.

        Args:
            n_step: number of steps over all environments. Makes a batch ``[B, T]`` as in iteration;
                ``collector/valid`` marks exactly this number if ``B`` does not divide it. Where
                workers do not wait for each other, joins the rollouts of those that are ready,
                which can have more steps.
            n_episode: number of complete episodes. Makes a batch ``[frames]`` of them, in the order
                of their ends (with ``traj_format="pad"`` one per row). Resets environments in the
                middle of an episode first.
            random: take uniformly random actions. The policy's other columns are NaN, 0 or False,
                and its recurrent states start again afterwards. A policy that has never acted is
                called once, to find its columns.
            render: call the environments' ``render`` after every step, and then wait this number of
                seconds.
            no_grad: False: call your module or function with gradients enabled; the batch has none.
            reset_before_collect: reset all environments first.
            reset_kwargs: arguments of the environments' own reset before collecting, without a
                seed: see ``set_seed``.
            rule: which episodes count: "per_env" (default), "last_even", "fair", or "first_done",
                which favours short ones. See docs/collect.md.
            surplus: use of the other collected steps. "discard": count them as discarded. "keep":
                keep them for the next call, whichever weights acted in them. Default: "keep" where
                workers do not wait for each other, else "discard".
            bootstrap: add the policy's values of the observations after the last rows, as
                ``stats.last_value_est`` and ``("next", "state_value")``. "truncations": also after
                truncated episodes, in the latter. The policy must return ``state_value``. Random
                streams and recurrent states are the same without it.

        Raises:
            BadOption: both or neither of ``n_step`` and ``n_episode``, or an impossible
                combination. Nothing was done.
            MusterError: an error while collecting; the same call continues from there. After an
                error of a hook or of the buffer, the next call delivers the collected batch, and
                does nothing else.
        """
        return self._collect(arguments).stats

    @takes(CollectArguments)
    def collect_batch(self, arguments: CollectArguments) -> Collected:
        """Call ``collect`` and return its batch, too: ``batch, stats =
        collector.collect_batch(n_step=64)``.
        """
        return self._collect(arguments)

    @property
    def buffer(self) -> Any:
        """The replay buffer.

        Without one, the batch of the last ``collect``; None before the first.
        """
        given = self.options.replay_buffer
        return self._on_demand.batch if given is None else given

    @property
    def episodes(self) -> Episodes:
        """Records (``EpisodeRecord``) of the episodes that ended in the last batch: a sequence."""
        return self._engine.shown_episodes

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
        """Draw returns over frames with the 95 % interval of a running mean, the split of time, and
        the policy lag.

        Needs matplotlib: ``pip install 'muster-rl[plot]'``. Episodes of before ``load_state_dict``
        are not shown.

        Returns:
            a ``matplotlib.figure.Figure``, which notebooks show; ``savefig(path)`` writes it.

        Raises:
            BadOption: matplotlib is not installed.
        """
        return plot_stats(self.stats(), self._engine.curve.points)

    def _collect(self, arguments: CollectArguments) -> Collected:
        with self._exclusively():
            made = self._on_demand.collect(arguments)
            self._observers.wrote()  # after an error here, the next call returns this result
            self._on_demand.result = None
            return made

    if TYPE_CHECKING:

        def _exclusively(self) -> AbstractContextManager[None]: ...
