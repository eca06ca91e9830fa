"""``collect`` and ``rollout``: a given number of steps or episodes on demand, and extra batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from muster.collectors.calls import (
    CallResult,
    CollectCall,
    EpisodesCall,
    ExtraBatch,
    StepsCall,
    UserCall,
)
from muster.collectors.collect_arguments import CollectArguments, Collected
from muster.collectors.engine import Engine
from muster.collectors.multi_options import NEEDS_ENVS
from muster.collectors.pipeline import PipelineItem
from muster.episodes.segment import ENDED
from muster.episodes.summary import (
    CollectStats,
    stats_of_call,
    stats_of_state,
    stats_state,
)
from muster.episodes.whole import WholeEpisodes
from muster.errors import BadOption, UnsupportedEnv
from muster.keys import TRAJ_DONE
from muster.rollout.bootstrap import check_bootstrap
from muster.utils.interrupts import checkpoint, postponed
from muster.workers.requests import Call
from muster.workers.worker import running

if TYPE_CHECKING:
    from tensordict import TensorDict


class WaitingResult:
    """The result of a complete call of ``collect``, until the user has it.

    Attributes:
        item: its batch, which passes through the stages of the pipeline.
        stats: statistics of the call.
        whole: the batch has whole episodes.
    """

    def __init__(self, item: PipelineItem, stats: CollectStats, *, whole: bool) -> None:
        self.item = item
        self.stats = stats
        self.whole = whole


class UndeliveredEpisodes:
    """The episodes that ``collect(n_episode=)`` has collected and not delivered, and the open ones.

    1. ``open`` makes the store, in the first call for episodes.
    2. A call adds rollouts, and notes each (``note_rollout``): a later call can continue the open
       episodes if no other rollout was collected since (``goes_on``).
    3. ``break_off``: the open episodes do not continue with the next rollout.

    Attributes:
        has_random_actions: all of them were collected with random actions.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store: WholeEpisodes | None = None
        self._last = -1  # number of the engine's last rollout among them
        self.has_random_actions = False

    @property
    def frames(self) -> int:
        """Number of their frames."""
        return 0 if self._store is None else self._store.frames_held

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that no call will deliver, by reason."""
        return {} if self._store is None else self._store.dropped

    def open(self) -> WholeEpisodes:
        """Return the store."""
        engine = self._engine
        options = engine.options
        if self._store is None:
            # flags that the environment does not have mark the ends of episodes
            engine.views.show_hidden()
            trajectories = options.trajectories
            self._store = WholeEpisodes(
                num_envs=engine.num_envs,
                layout=options.traj_format or "cat",
                rule=None,
                on_policy_only=trajectories is not None and trajectories.on_policy_only,
                done_key=ENDED if options.traj_done_key is None else TRAJ_DONE,
            )
        return self._store

    def flush(self, envs: Sequence[int] | None = None) -> None:
        """Drop the open episodes of environments; None: of all."""
        if self._store is not None:
            self._store.flush(envs)

    def clear(self, reason: str) -> None:
        """Drop all of them, as discarded for a reason."""
        if self._store is not None:
            self._store.clear(reason)

    def goes_on(self, call: UserCall | None) -> bool:
        """Return whether no rollout was collected since the last one of theirs, or after it for the
        same call.
        """
        unkept = isinstance(call, EpisodesCall) and call.has_unkept
        return self._last == self._engine.ledger.rollouts - unkept

    def note_rollout(self) -> None:
        """Note that the engine's last rollout is one of theirs."""
        self._last = self._engine.ledger.rollouts

    def break_off(self) -> None:
        """The open episodes do not continue with the next rollout."""
        self._last = -1

    def draw_randomly(self, *, has_random_actions: bool) -> None:
        """Note whether the episodes that follow have random actions."""
        self.has_random_actions = has_random_actions

    def state_dict(self, call: UserCall | None) -> dict[str, Any]:
        """Return them as plain data. ``call``: the one under way."""
        return {
            "kept": None if self._store is None else self._store.state_dict(),
            "goes_on": self.goes_on(call),
            "random": self.has_random_actions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self._store = None
        self._last = self._engine.ledger.rollouts if state["goes_on"] else -1
        self.has_random_actions = state["random"]
        if state["kept"] is not None:
            self.open().load_state_dict(state["kept"], self._engine.place)


class OnDemand:
    """Implements ``collect`` and ``rollout`` by means of a collector's engine.

    The life of a call:

    1. It begins, or continues a call with the same arguments that an error has interrupted. One
       with other arguments is given up: what it had collected is discarded.
    2. It collects until it is complete (``call``).
    3. Its result passes through the stages of the pipeline (``result``). If one of them fails, the
       next call of ``collect``, whatever its arguments, continues there.
    4. The caller calls ``deliver`` when the user has it.

    Attributes:
        batch: batch of the last call of ``collect``.
        call: the call under way.
        result: the result that the user does not have yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._options = engine.options
        self._source = engine.source
        self.batch: TensorDict | None = None
        self.call: UserCall | None = None
        self.result: WaitingResult | None = None
        self._kept = UndeliveredEpisodes(engine)
        engine.ledger.hold(self)

    # --- of the engine's counters -----------------------------------------------------------------

    @property
    def frames_held(self) -> int:
        """Number of collected frames that are not delivered yet."""
        frames = 0 if self.call is None else self.call.frames
        if self.result is not None:
            frames += self.result.item.frames
        return frames + self._kept.frames

    @property
    def frames_ready(self) -> int:
        """Number of frames of a complete call."""
        return 0 if self.result is None else self.result.item.frames

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that no group of episodes will contain, by reason."""
        return self._kept.dropped

    def retire(self, envs: Sequence[int]) -> None:
        """Stop waiting for episodes of environments without further rows."""
        self.flush(envs)

    def flush(self, envs: Sequence[int]) -> None:
        """Drop the open episodes of environments."""
        self._kept.flush(envs)

    # --- calls ------------------------------------------------------------------------------------

    def collect(self, arguments: CollectArguments) -> Collected:
        """See ``BaseCollector.collect_batch``."""
        with postponed():
            checkpoint()
            if self.result is None:
                self.result = self._make(arguments)
            item = self.result.item
            self.batch = item.go_on()
            self._engine.ended.show_collected(item.episodes)
        return Collected(self.batch, self.result.stats)

    def deliver(self) -> None:
        """Forget the result of the last call, which the user has now."""
        self.result = None

    def rollout(self) -> TensorDict:
        """See ``BaseCollector.rollout``."""
        with postponed():
            checkpoint()
            if not isinstance(self.call, ExtraBatch):
                self.give_up_call()
                self.call = ExtraBatch(self._engine)
            batch = self.call.run()
            self._engine.ended.show(self._engine.ended.collected)
        self._engine.ledger.delivered_extra(self.call.frames)
        self.call = None
        return batch

    def give_up_call(self) -> None:
        """Discard what an interrupted call had collected."""
        if self.call is not None:
            self.call.give_up()
        self.call = None

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """Return the calls under way and the kept episodes as plain data, and a sentence on what
        cannot be saved.
        """
        if isinstance(self.call, EpisodesCall):
            self.call.settle()
        call = None
        notes = []
        if self.call is not None and self.call.can_be_saved:
            call = self.call.state_dict()
        elif self.call is not None:
            notes.append(
                "the call that an error has interrupted cannot be saved, and begins again"
            )
        state = {
            "call": call,
            "result": None if self.result is None else self._result_state(self.result),
            **self._kept.state_dict(self.call),
        }
        return state, notes

    @property
    def unsaved(self) -> int:
        """Number of frames that ``state_dict`` does not include."""
        return 0 if self.call is None or self.call.can_be_saved else self.call.frames

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.call = None
        self.result = None
        self._kept.load_state_dict(state)
        call = state["call"]
        if call is not None and "choice" in call:
            arguments = CollectArguments(**call["arguments"])
            episodes = self.call = self._episodes_call(arguments)
            episodes.load_choice(call["choice"])
        elif call is not None and "arguments" in call:
            self.call = StepsCall.from_state(self._engine, call)
        elif call is not None:
            self.call = ExtraBatch.from_state(self._engine, call)
        result = state["result"]
        if result is not None:
            item = self._engine.pipeline.resumed(
                result["item"], self._engine.place, whole=result["whole"]
            )
            self.result = WaitingResult(
                item, stats_of_state(result["stats"]), whole=result["whole"]
            )

    # --- parts ------------------------------------------------------------------------------------

    def _result_state(self, result: WaitingResult) -> dict[str, Any]:
        item = self._engine.pipeline.state_of(result.item)
        return {"item": item, "stats": stats_state(result.stats), "whole": result.whole}

    def _make(self, arguments: CollectArguments) -> WaitingResult:
        began = time.perf_counter()
        before = self._engine.ledger.discarded_steps
        call = self.call
        if not self._continues(call, arguments):
            self._check(arguments)
            call = self.call = self._begin(arguments)
        assert isinstance(call, CollectCall)
        with self._server_mode(arguments):
            result = call.run()
        return self._finish(arguments, result, began, before)

    def _finish(
        self,
        arguments: CollectArguments,
        result: CallResult,
        began: float,
        discarded_before: int,
    ) -> WaitingResult:
        engine = self._engine
        kept = self._kept
        item = engine.pipeline.begin(
            result.batch, result.first, result.frames, result.episodes
        )
        if result.whole and arguments.special:
            self._give_up_ahead()
        if result.whole and not self._keeps(arguments):
            kept.clear("surplus")
            kept.break_off()
        self.call = None
        stats = stats_of_call(
            result.episodes,
            result.frames,
            time.perf_counter() - began,
            n_discarded_steps=engine.ledger.discarded_steps - discarded_before,
            n_kept_steps=kept.frames,
            **result.native,
        )
        return WaitingResult(item, stats, whole=result.whole)

    def _continues(self, call: UserCall | None, arguments: CollectArguments) -> bool:
        """Return whether a call with these arguments continues the one under way."""
        if not isinstance(call, CollectCall) or not call.arguments.is_like(arguments):
            return False
        return (
            not isinstance(call, EpisodesCall)
            or call.is_complete
            or self._kept.goes_on(call)
        )

    def _begin(self, arguments: CollectArguments) -> CollectCall:
        """Begin a call. Discards the remains of earlier ones, unless this one keeps them."""
        self.give_up_call()
        engine = self._engine
        kwargs = dict(arguments.reset_kwargs or {})
        gone = arguments.special and self._give_up_ahead()
        if arguments.n_episode is not None:
            gone = self._prepare_store(arguments) or gone
        if arguments.reset_before_collect or (kwargs and gone):
            engine.reset(None, kwargs)
        elif gone:
            self._reset_running()
        if arguments.n_episode is None:
            return StepsCall(engine, arguments)
        self._kept.note_rollout()
        return self._episodes_call(arguments)

    def _prepare_store(self, arguments: CollectArguments) -> bool:
        """Drop kept episodes that this call does not use. Return whether open ones were dropped."""
        kept = self._kept
        store = kept.open()
        keep = self._keeps(arguments)
        is_like = arguments.random == kept.has_random_actions
        if not is_like:
            store.clear("policy_changed")
        elif arguments.special or not keep:
            store.clear("surplus")
        goes_on = keep and is_like and not arguments.special and kept.goes_on(self.call)
        kept.draw_randomly(has_random_actions=arguments.random)
        if not goes_on:
            store.flush()
            self._give_up_ahead()
        return not goes_on

    def _episodes_call(self, arguments: CollectArguments) -> EpisodesCall:
        return EpisodesCall(
            self._engine,
            arguments,
            self._kept.open(),
            keep=self._keeps(arguments),
            stored=self._kept.note_rollout,
        )

    def _give_up_ahead(self) -> bool:
        """Discard rollouts that first-ready workers have started for other calls; return whether
        there were any.
        """
        if not self._source.ahead_of_user:
            return False
        self._source.abandon("surplus")
        self._kept.break_off()
        return True

    def _reset_running(self) -> None:
        """Reset environments in the middle of an episode."""
        pool = self._engine.source.pool
        parts = [part for part in pool.call(Call(running)) if part]
        ids = [
            int(pool.counters[n].env_ids[i])
            for part in parts
            for n, which in part.items()
            for i in which
        ]
        try:
            self._engine.reset(ids, {})
        except UnsupportedEnv:  # some environments cannot be reset alone
            self._engine.reset(None, {})

    def _keeps(self, arguments: CollectArguments) -> bool:
        return (
            arguments.surplus or ("keep" if self._source.overlaps else "discard")
        ) == "keep"

    def _check(self, arguments: CollectArguments) -> None:
        options = self._options
        info = self._engine.source.pool.counters[0].info
        if arguments.bootstrap:
            columns = self._engine.layout().columns
            check_bootstrap(
                columns,
                tuple(info.carried_specs),
                reset_when_done=options.reset_when_done,
            )
        if options.joins_episodes and arguments.n_step:
            raise BadOption(
                f"{options.joins_episodes} makes batches of episodes, and n_step of steps: use"
                " collect(n_episode=...)"
            )
        if options.compact_obs and (arguments.n_episode or arguments.bootstrap):
            raise BadOption(
                "compact_obs leaves out next observations, which n_episode and bootstrap need"
            )
        if arguments.n_episode and not options.reset_when_done:
            raise BadOption(
                "reset_when_done=False has one episode of each environment in a batch: use n_step"
            )
        if arguments.n_episode and self._engine.joins_time:
            raise BadOption(f"collect(n_episode=...) {NEEDS_ENVS}")
        if arguments.n_episode and options.return_same_td:
            raise BadOption(
                "return_same_td: episodes are put together in new memory every time; leave it out"
            )

    @contextmanager
    def _server_mode(self, arguments: CollectArguments) -> Iterator[None]:
        """Let an inference server act with gradients enabled, if the call says so."""
        server = self._engine.source.pool.server
        if server is None or arguments.no_grad:
            yield
            return
        server.ask("enable_grad", True)
        try:
            yield
        finally:
            server.ask("enable_grad", False)
