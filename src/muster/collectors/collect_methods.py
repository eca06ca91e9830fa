"""The methods of collectors that collect when asked."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from muster.collectors.asked import Asked, Collected, Surplus
from muster.collectors.on_demand import OnDemand
from muster.collectors.options import CollectorOptions
from muster.episodes.rules import RuleName
from muster.episodes.summary import CollectStats


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
