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
from muster.episodes.summary import CollectStats, stats_of_call, stats_of_state, stats_state
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
        # episodes of ``collect(n_episode=...)``, after its first call
        self._kept: WholeEpisodes | None = None
        self._random = False  # these have random actions
        self._seen = -1  # number of the engine's last rollout among them
        engine.ledger.hold(self)

    # --- of the engine's counters -----------------------------------------------------------------

    @property
    def frames_held(self) -> int:
        """Number of collected frames that are not delivered yet."""
        frames = 0 if self.call is None else self.call.frames
        if self.result is not None:
            frames += self.result.item.frames
        return frames if self._kept is None else frames + self._kept.frames_held

    @property
    def frames_ready(self) -> int:
        """Number of frames of a complete call."""
        return 0 if self.result is None else self.result.item.frames

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that no group of episodes will contain, by reason."""
        return {} if self._kept is None else self._kept.dropped

    def retire(self, envs: Sequence[int]) -> None:
        """Stop waiting for episodes of environments without further rows."""
        self.flush(envs)

    def flush(self, envs: Sequence[int]) -> None:
        """Drop the open episodes of environments."""
        if self._kept is not None:
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
            notes.append("the call that an error has interrupted cannot be saved, and begins again")
        kept = self._kept
        state = {
            "call": call,
            "result": None if self.result is None else self._result_state(self.result),
            "kept": None if kept is None else kept.state_dict(),
            "goes_on": self._goes_on,
            "random": self._random,
        }
        return state, notes

    @property
    def unsaved(self) -> int:
        """Number of frames that ``state_dict`` does not include."""
        return 0 if self.call is None or self.call.can_be_saved else self.call.frames

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.call = self.result = self._kept = None
        self._seen = self._engine.ledger.rollouts if state["goes_on"] else -1
        self._random = state["random"]
        if state["kept"] is not None:
            self._store().load_state_dict(state["kept"], self._engine.place)
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
        self, arguments: CollectArguments, result: CallResult, began: float, discarded_before: int
    ) -> WaitingResult:
        engine = self._engine
        kept = self._kept
        item = engine.pipeline.begin(result.batch, result.first, result.frames, result.episodes)
        if result.whole and arguments.special:
            self._give_up_ahead()
        if result.whole and kept is not None and not self._keeps(arguments):
            kept.clear("surplus")
            self._seen = -1  # episodes that continue from there are not complete
        self.call = None
        stats = stats_of_call(
            result.episodes,
            result.frames,
            time.perf_counter() - began,
            n_discarded_steps=engine.ledger.discarded_steps - discarded_before,
            n_kept_steps=0 if kept is None else kept.frames_held,
            **result.native,
        )
        return WaitingResult(item, stats, whole=result.whole)

    def _continues(self, call: UserCall | None, arguments: CollectArguments) -> bool:
        """Return whether a call with these arguments continues the one under way."""
        if not isinstance(call, CollectCall) or not call.arguments.is_like(arguments):
            return False
        return not isinstance(call, EpisodesCall) or call.is_complete or self._goes_on

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
        self._seen = engine.ledger.rollouts
        return self._episodes_call(arguments)

    def _prepare_store(self, arguments: CollectArguments) -> bool:
        """Drop kept episodes that this call does not use. Return whether open ones were dropped."""
        store, keep = self._store(), self._keeps(arguments)
        if arguments.random != self._random:
            store.clear("policy_changed")
        elif arguments.special or not keep:
            store.clear("surplus")
        goes_on = (
            keep and self._goes_on and arguments.random == self._random and not arguments.special
        )
        self._random = arguments.random
        if not goes_on:
            store.flush()
            self._give_up_ahead()
        return not goes_on

    def _episodes_call(self, arguments: CollectArguments) -> EpisodesCall:
        return EpisodesCall(
            self._engine,
            arguments,
            self._store(),
            keep=self._keeps(arguments),
            stored=self._note_stored,
        )

    def _note_stored(self) -> None:
        self._seen = self._engine.ledger.rollouts

    def _give_up_ahead(self) -> bool:
        """Discard rollouts that first-ready workers have started for other calls; return whether
        there were any.
        """
        if not self._source.ahead_of_user:
            return False
        self._source.abandon("surplus")
        self._seen = -1
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
        return (arguments.surplus or ("keep" if self._source.overlaps else "discard")) == "keep"

    @property
    def _goes_on(self) -> bool:
        """Whether no rollout was collected since the last one in the store, or after it for the
        same call.
        """
        call = self.call
        unkept = isinstance(call, EpisodesCall) and call.has_unkept
        return self._seen == self._engine.ledger.rollouts - unkept

    def _store(self) -> WholeEpisodes:
        engine = self._engine
        options = self._options
        if self._kept is None:
            # flags that the environment does not have mark the ends of episodes
            engine.views.show_hidden()
            self._kept = WholeEpisodes(
                num_envs=engine.num_envs,
                layout=options.traj_format or "cat",
                rule=None,
                on_policy_only=options.trajectories is not None
                and options.trajectories.on_policy_only,
                done_key=ENDED if options.traj_done_key is None else TRAJ_DONE,
            )
        return self._kept

    def _check(self, arguments: CollectArguments) -> None:
        options = self._options
        info = self._engine.source.pool.counters[0].info
        if arguments.bootstrap:
            columns = self._engine.layout().columns
            check_bootstrap(
                columns, tuple(info.carried_specs), reset_when_done=options.reset_when_done
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
