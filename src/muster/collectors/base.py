"""The base of all collectors: iteration, background thread, state, closing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from muster.capabilities import check_reset_kwargs
from muster.collectors import resume
from muster.collectors.background import Background
from muster.collectors.batch_views import final_observations
from muster.collectors.collect_arguments import CollectArguments, Collected
from muster.collectors.engine import Engine
from muster.collectors.observers import Observers
from muster.collectors.on_demand import OnDemand
from muster.collectors.options import CollectorOptions
from muster.collectors.resume import Autosaver, CollectorParts
from muster.collectors.signatures import takes
from muster.collectors.use import CollectorUse
from muster.episodes.record import Episodes
from muster.episodes.summary import CollectStats
from muster.errors import (
    BadOption,
    CollectorBusy,
    CollectorClosed,
    CollectorTimeout,
    described,
)
from muster.observing.own_metrics import numbers_of
from muster.observing.plot import plot_stats
from muster.observing.profiling import ProfileConfig
from muster.observing.stats import CollectorStats
from muster.policies.agents import heads_of
from muster.policies.sampling import all_masks_of
from muster.rollout.context import as_beside_user
from muster.rollout.group import Group
from muster.utils.attributes import resolve
from muster.utils.forks import Owner
from muster.utils.integers import integer
from muster.utils.tracebacks import trimmed
from muster.weights.names import tensors_in
from muster.weights.publish import PolicyWeights
from muster.weights.receive import Receivers, only_source
from muster.workers.requests import Call, Profile
from muster.workers.worker import on_environments

if TYPE_CHECKING:
    from tensordict import TensorDict


# of the policy, with ``capture``, before a background thread begins
MOST_BEFORE_RECORDED = 6


class NoWorkerIndex(BadOption, RuntimeError):
    """``worker_idx`` was read, but never set."""


class NoReplayBuffer(BadOption, RuntimeError):
    """``start()`` was called without a replay buffer."""


def made_updater(given: Any) -> Any:
    """Return a weight updater: ``given``, or what ``given`` makes, a class or a function."""
    if given is None or (
        hasattr(given, "push_weights") and not isinstance(given, type)
    ):
        return given
    return given()


class BaseCollector(ABC):
    """Base of all collectors.

    Subclasses choose where environments run and how rollouts become batches.

    Attributes:
        options: options with all defaults filled in.
        policy: policy that acts in this process, or whose copies act elsewhere.
        timeline: see ``muster.Timeline``.
    """

    options: CollectorOptions
    policy: Any
    _weights: PolicyWeights
    _engine: Engine

    def __init__(self, options: CollectorOptions) -> None:
        if options.policy is not None and options.policy_factory is not None:
            raise BadOption(
                "policy_factory cannot be used with policy: give one of them"
            )
        self.options = options
        self._closed = False
        self._background: Background | None = None
        self._use = CollectorUse()
        self.profile_config: ProfileConfig | None = None
        with ExitStack() as made:  # closes everything made so far if a line below fails
            self._engine = self._connect(made)
            made.callback(self._engine.pipeline.close)
            self._set_up()
            self._made = made.pop_all()

    @abstractmethod
    def _connect(self, made: ExitStack) -> Engine:
        """Make environments, ``policy`` and ``_weights``; ``made`` closes them after an error."""

    # --- collecting -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.iterator()

    def iterator(self) -> Iterator[Any]:
        """Return an iterator over batches until ``total_frames``.

        After a ``break``, the next iterator continues there.

        Yields None for batches written to a replay buffer.

        Raises:
            CollectorClosed: after ``shutdown``.
            CollectorBusy: while another iterator is still in use.
        """
        self._check_open()
        self._check_amount()
        if self.is_running() or self._use.is_iterated:
            raise CollectorBusy(
                "this collector is being iterated already. Use one `for` loop at a time; drop the"
                " first iterator (`del it`) to begin another, or end the background thread with"
                " `async_shutdown()`."
            )
        after = self._observers.wrote if self._observers.need_batches else None
        batches = self._engine.iterate(
            self._use, self._check_open, self._before_batch, after
        )
        self._use.begin_iterating(batches)
        return batches

    def next(self) -> Any:
        """Return the next batch, or None after the last one."""
        return next(self.iterator(), None)

    def rollout(self) -> TensorDict:
        """Collect an extra batch without postproc and buffer; it does not count towards
        ``total_frames``.
        """
        self._check_amount()
        with self._exclusively():
            return self._on_demand.rollout()

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
            random: take uniformly random actions. Columns that the policy would have filled
                (log-probabilities, values) are NaN, 0 or False, and its recurrent states start
                again afterwards. A policy that has never acted is called once, to find its columns.
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
        return self._engine.ended.shown

    def stats(self) -> CollectorStats:
        """Return a snapshot of all counters. It is cheap, and available after ``shutdown``."""
        stats = self._engine.stats()
        ended_by = "" if self._background is None else self._background.ended_by
        return replace(stats, ended_by=ended_by) if ended_by else stats

    @property
    def watch_url(self) -> str | None:
        """Address of the page of ``watch=``, with its token; None: there is no page."""
        return None if self._observers.watched is None else self._observers.watched.url

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics of your own, such as a loss: to ``logger=``, and as charts of the page of
        ``watch=``.

        ``collector.log({"loss": loss, "entropy": entropy})``. Without ``logger`` and ``watch``
        nothing happens. The page draws means per second over delivered frames. It shows the first
        64 names.

        Args:
            metrics: numbers by name, also 0-dimensional tensors and arrays. Numbers that are not
                finite are counted on the page, and given to the logger as they are.
            step: step for the logger. None: the number of frames delivered so far, as for the
                collector's own metrics.

        Raises:
            BadOption: a name is no text, or a value is no single number. Nothing was logged.
            CollectorClosed: after ``shutdown``.
            HookError: the logger raised. The page has the metrics.
        """
        if self._closed:
            raise CollectorClosed("this collector was shut down; log before it")
        for owner in self._owners():
            owner.check()
        at = None if step is None else integer("step", step, 0, of="log")
        self._observers.log(numbers_of(metrics), at)

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
        return plot_stats(BaseCollector.stats(self), self._engine.ended.curve.points)

    def __len__(self) -> int:
        """Return the number of batches up to ``total_frames``.

        Raises:
            TypeError: for an endless collector.
        """
        if self.options.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return math.ceil(self.options.total_frames / self.options.frames)

    def reset(self, index: Sequence[int] | int | None = None, **kwargs: Any) -> None:
        """Reset all environments, or those in ``index`` (global numbers), before the next batch.

        Their episodes are cut without a flag, as an episode is at the end of a batch.

        Args:
            index: numbers of environments, or a bool array over all of them; None: all.
            **kwargs: arguments of the environments' own reset, used once (Gymnasium:
                ``options={...}``). Seeds are set by ``set_seed``.

        Raises:
            BadOption: a seed, or an environment that does not exist. Nothing was done.
        """
        check_reset_kwargs(kwargs)
        with self._exclusively():
            self._engine.reset(index, kwargs)

    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """Seed all environments and Muster's own draws, and reset all environments before the next
        batch.

        With ``episode_seeds``, environments start at the beginning of this list again, and ``seed``
        seeds only Muster's own draws.

        Args:
            seed: seed of environment 0; environment i gets ``seed + i``. Or a list with the seed of
                each environment.
            static_seed: all environments get ``seed``.

        Returns:
            the seed of the last environment.
        """
        with self._exclusively():
            return self._engine.set_seed(seed, static=static_seed)

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """Replace ``post_collect_hook`` from the next batch on; None: there is none.

        Raises:
            BadOption: it is no function, or contradicts other options. Nothing was done.
        """
        with self._exclusively():
            self._engine.set_post_collect_hook(hook)
            self.options = self._engine.options

    # --- in the background ------------------------------------------------------------------------

    def start(self) -> None:
        """Collect in a background thread, into the replay buffer, until ``total_frames`` or
        ``async_shutdown``.

        The thread acts with a copy of the policy, so training does not change weights in the middle
        of a batch: ``update_policy_weights_()`` copies new ones for the next. Environments and
        policies that draw from the process's global generators then share these with your thread.

        An error ends the thread. A ``RuntimeWarning`` reports it at once, ``stats().ended_by``
        shows it, and the next method that collects or changes something raises it once, at the
        latest ``shutdown()``. ``is_running()``, ``stats()`` and the properties never raise it.
        After that ``start()`` continues.

        The thread keeps the collector alive: one that no variable refers to any more, as after a
        notebook cell that is run again, goes on until the program ends. Call ``shutdown()`` before.

        With ``capture`` the first batches are collected before ``start()`` returns, until rollouts
        are recorded: after ``init_random_frames``, mostly three.

        Raises:
            CaptureRefused: ``capture=True``, and rollouts cannot be recorded.
            BadOption: there is no replay buffer. The error is a ``RuntimeError``, too.
        """
        self._check_open()
        if self.options.replay_buffer is None:
            raise NoReplayBuffer(
                "start() collects into a replay buffer, and none was given: pass replay_buffer="
            )
        if self.is_running():
            return
        self._go_into_background()
        batches = self.iterator()
        name = f"muster-{id(self):x}"

        def collect() -> bool:
            return next(batches, self) is not self

        if self.options.capture:
            with as_beside_user():
                self._record_first(collect)
        self._background = Background(collect, name)

    def _record_first(self, collect: Callable[[], bool]) -> None:
        """Collect until rollouts are replays of recorded ones, which they cannot become in the
        background thread, or cannot be recorded.
        """
        tries = 0
        while tries < MOST_BEFORE_RECORDED:
            replays = self._replays()
            if replays is None or not collect():
                return
            if self._engine.acting == "policy":  # the random rollouts are over
                tries += 1
                now = self._replays()
                if now is None or now > replays:
                    return

    def _replays(self) -> int | None:
        """Return the number of rollouts that were replays; None: rollouts are not recorded."""
        stats = self._engine.last.capture
        if stats is None:
            return 0
        return None if stats.state == "refused" else stats.replays

    def is_running(self) -> bool:
        """Return whether the background thread runs."""
        return self._background is not None and self._background.is_running()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread collects: not the background thread, and no thread
        of yours that calls ``next()`` or another method that collects or changes something.

        Entering waits for the end of the batch that another thread collects. Meanwhile these threads
        wait until the context ends; your own one may collect inside.

        Raises:
            CollectorTimeout: entering has waited for ten minutes.
        """
        return self._exclusively()

    def async_shutdown(
        self, timeout: float | None = None, close_env: bool = True
    ) -> None:
        """End the background thread after its current batch, and shut down.

        Raises the error of the thread.

        Raises:
            CollectorTimeout: the thread did not end within ``timeout`` seconds; nothing was closed.
        """
        if not self._is_forked():
            self._stop_background(timeout)
        self.shutdown(close_env=close_env)

    # --- weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish new weights for the next batch. May be called from any thread.

        Without arguments it publishes the policy that the collector was made with, all its
        parameters and buffers: this is what you need after an optimizer step. A module that is a
        part of this policy stands for all of it. Weights from elsewhere (a copy, a ``state_dict``,
        a TensorDict) must cover all of it, or name their part with ``model_id``. Buffers that are
        not in the ``state_dict`` are never published.

        Args:
            policy_or_weights: the policy, a part of it, a copy of the policy, a TensorDict, or a
                dict of tensors, which may be nested. None: the policy that the collector was made
                with.
            weights, policy: the same as keywords. Only one of the three may be used.
            worker_ids: the workers that get the weights; the others keep theirs. A number, or the
                ``torch.device`` of the workers' policies, or a list of these. None: all. Passed on
                to the ``weight_updater``, if there is one.
            model_id: the model that the weights are for, see ``get_model``; other models keep
                theirs. None: "policy". Weights from elsewhere that a model was given stay in
                workers until the whole policy is published without arguments, or the model itself.
            weights_dict: weights by model id, published together as one version.

        Raises:
            BadWeights: the weights do not fit, are those of a part only (the message names the
                others), or are not finite. Nothing was changed.
            BadOption: contradicting arguments, an unknown model, or no such worker.
            TypeError: ``worker_ids`` without workers or a ``weight_updater``.
        """
        given = only_source(policy_or_weights, weights, policy)
        self._check_open()
        if (
            worker_ids is not None
            and self._updater is None
            and self._weights.workers is None
        ):
            raise TypeError(
                "worker_ids were given, but this collector has no workers and no weight_updater:"
                " leave them out"
            )
        if weights_dict is not None and (given is not None or model_id is not None):
            raise BadOption(
                "weights_dict has the weights of all models: give nothing else with it"
            )
        if self._updater is not None:
            if weights_dict is not None or model_id not in (None, "policy"):
                raise BadOption(
                    "the weight_updater knows one policy: leave model_id and weights_dict out"
                )
            self._updater.push_weights(given, worker_ids)
            # its changes are in the policy
            given = None
            weights_dict = {}
        parts = {model_id or "policy": given} if weights_dict is None else weights_dict
        with trimmed:
            sources = [(source, self._part(name)) for name, source in parts.items()]
            if self._weights.workers is None:
                self._weights.publish_all(sources)
            else:
                self._weights.publish_all(
                    sources or [(None, None)], workers=self._workers_of(worker_ids)
                )

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Use the weights that the registered schemes have received, or, without schemes, the given
        weights.

        Args:
            policy_or_weights, weights, policy: see ``update_policy_weights_``. None: those of the
                policy that the collector was made with.

        Raises:
            BadOption: weights were given although schemes are registered, or twice.
            BadWeights: the weights do not fit.
        """
        given = only_source(policy_or_weights, weights, policy)
        self._check_open()
        self._receivers.receive_or_publish(given)

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, Any],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Receive weights from a parent collector.

        Args:
            weight_recv_schemes: TorchRL's ``WeightSyncScheme``, or an object with its receiving
                methods, by model id. A scheme may receive in a thread of its own; the next batch
                uses its weights.
            synchronize_weights: wait for the parent's first weights.
        """
        self._check_open()
        self._receivers.register(weight_recv_schemes, synchronize=synchronize_weights)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the ``weight_updater``, if there is one."""
        self._raise_from_background()
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        """The receiving schemes under the name used by TorchRL's senders through
        ``cascade_execute``.
        """
        return self._receivers.schemes

    @property
    def policy_version(self) -> int | str:
        """The number of weight publications, or the version of ``track_policy_version``'s object."""
        return self._weights.version

    def get_policy_version(self) -> int | str | None:
        """Return ``policy_version``; None without ``track_policy_version``."""
        return self._weights.version if self.options.track_policy_version else None

    def increment_version(self) -> None:
        """Increment the version, for weights that were changed in another way."""
        self._check_open()
        self._weights.publish_all([])

    # --- observing --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = ", ".join(
            sorted({counts.info.name for counts in self._engine.source.pool.counters})
        )
        state = "closed" if self._closed else f"{self._engine.ledger.frames:,} frames"
        per_batch = self.options.frames_per_batch
        return (
            f"{type(self).__name__}({names} x {self._engine.num_envs},"
            f" frames_per_batch={per_batch}, {state})"
        )

    # --- models and attributes by name ------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The environment object, or a list if there are several."""
        objects = [env for group in self._groups for env in group.env.objects()]
        return objects[0] if len(objects) == 1 else objects

    @property
    def worker_idx(self) -> int:
        """Index of this collector among its parent's.

        Raises:
            BadOption: it was not set. The error is a ``RuntimeError``, too.
        """
        if self.options.worker_idx is None:
            raise NoWorkerIndex(
                "worker_idx was not set: pass worker_idx= when this collector is one of several"
            )
        return self.options.worker_idx

    def get_model(self, model_id: str) -> Any:
        """Return a model by id: "policy", a part of it ("policy.module[0]", "actor") or of the
        environment ("env...").

        Raises:
            BadOption: the model does not exist.
        """
        if model_id == "policy":
            return self.policy
        root = (
            self
            if model_id.split(".")[0].split("[")[0] in ("policy", "env")
            else self.policy
        )
        try:
            return resolve(root, model_id)
        except BadOption as error:
            raise BadOption(
                f"model_id={model_id!r} is not known here: {error}"
            ) from error

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment, or a list of them if there are several
        environments.
        """
        self._raise_from_background()
        env = self.env
        return (
            [getattr(one, attr) for one in env]
            if isinstance(env, list)
            else getattr(env, attr)
        )

    def map_envs(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(env, *args, **kwargs)`` for every environment, where it is: in this
        process, in every worker, on every node.

        It takes effect before the next rollout. Observations are not read again: if the function
        changes the state, call ``reset()`` afterwards.

        Args:
            function: for processes and nodes it must be picklable, as lambdas are, and its results,
                too.

        Returns:
            the results in the order of environment numbers. An object that steps several
            environments together has one. Environments of dropped workers have none.

        Raises:
            BadOption: ``function`` is no function, or it, an argument or a result cannot be
                pickled.
        """
        if not callable(function):
            raise BadOption(
                f"map_envs({function!r}): expected a function of an environment"
            )
        with self._exclusively():
            call = Call(
                on_environments, (self._sendable((function, args, kwargs), "map_envs"),)
            )
            found = self._engine.source.pool.call(call)
        return [result for of_worker in found for result in of_worker]

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        self._raise_from_background()
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer."""
        self._raise_from_background()
        if self.options.replay_buffer is None:
            raise BadOption(
                f"getattr_rb({attr!r}): this collector has no replay buffer"
            )
        return getattr(self.options.replay_buffer, attr)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function by its path from this collector, such as
        ``"policy.module[0].reset_parameters"``.

        Only attributes and subscripts with a literal are followed; nothing is evaluated.

        Raises:
            BadOption: the path does not exist, or is not callable.
        """
        self._raise_from_background()
        found = resolve(self, attr_path)
        if not callable(found):
            raise BadOption(
                f"cascade_execute({attr_path!r}): that is {type(found).__name__}, which cannot be"
                " called"
            )
        return found(*args, **kwargs)

    # --- special batches, profiling ---------------------------------------------------------------

    def final_observations(self) -> TensorDict:
        """Return the observations of the last batch that ``compact_obs`` omits and none of its rows
        contains, ``[n]``.

        ``env`` and ``row`` are their places: the last step of every episode that ended, and the
        batch's last row.
        """
        self._raise_from_background()
        return final_observations(self._engine.last.finals)

    def fake_tensordict(self) -> TensorDict:
        """Return zeros of the shape of a batch.

        Nothing is collected; the policy is called once to find its outputs.

        Raises:
            BadOption: batches differ in size (``frames_per_batch`` is a list).
        """
        if self.options.frames_of_workers:
            raise BadOption(
                "fake_tensordict: frames_per_batch is a list, so batches differ in size"
            )
        with self._exclusively():
            return self._engine.blank()

    @takes(ProfileConfig)
    def enable_profile(self, config: ProfileConfig) -> None:
        """Profile the next rollouts with ``torch.profiler``.

        ``collector.timeline`` is Muster's own record of where time is spent, at almost no cost.
        """
        self._check_open()
        self.disable_profile()
        self.profile_config = config
        self._engine.source.pool.call(Profile(config))

    def disable_profile(self) -> None:
        """End profiling, and write the recorded profile."""
        self._raise_from_background()
        if self.profile_config is not None:
            self._engine.source.pool.call(Profile(None))
        self.profile_config = None

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue exactly from here, as plain data for
        ``muster.save_state``.

        Contains ``policy_state_dict`` and ``env_state_dict`` (one entry per environment object) and
        Muster's own state. The report of ``load_state_dict`` lists what was restored.
        """
        with self._exclusively():
            return resume.state_of(self._parts())

    def load_state_dict(
        self, state_dict: Any, *, trust: bool = False, strict: bool = True
    ) -> resume.ResumeReport:
        """Restore the state from ``state_dict()``, also in another process, and continue from
        there.

        Args:
            state_dict: the state, or the path of a file written by ``muster.save_state`` or
                ``autosave``. The collector must have been made in the same way.
            trust: unpickle environments. Use it only for states that you have written: a pickle can
                run any code.
            strict: False: weights of the policy that the state does not have keep their values, and
                weights that the policy does not have are ignored; the report names both.

        Returns:
            a report of what was restored. Environments that were not restored start new episodes,
            whose first row has ``("collector", "resumed")`` set.

        Raises:
            BadCheckpoint: the state is damaged, or from a different collector. Nothing was changed.
            BadRecording: ``record=`` has batches already, and some of them could come again.
                Nothing was changed.
        """
        with self._exclusively():
            if self._engine.pipeline.recorder is not None:
                self._engine.pipeline.recorder.resume()
            return resume.load(
                self._parts(),
                state_dict,
                trust=trust,
                strict=strict,
                close=self._close_quietly,
            )

    # --- the end ----------------------------------------------------------------------------------

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Close the environments. Batches and ``stats()`` stay valid. May be called again, and from
        any thread: the batch that another one collects is completed first.

        If the disk was full, a repeated call writes what ``record=`` could not.

        Args:
            timeout: seconds to wait for the current batch of the background thread, or of another
                one of yours; None: no limit for the former, ten minutes for the latter.
            close_env: False: leave the environments open.
            raise_on_error: False: ignore errors of the environments' ``close`` and of the
                background thread.

        Raises:
            CollectorTimeout: the other thread did not end its batch in time; nothing was closed.
            BadRecording: the disk is full or fails: free some space, then call this again.
        """
        if self._closed:
            self._engine.pipeline.close()
            return
        if self._is_forked():  # a fork must not end its parent's workers
            self._closed = True
            return
        try:
            self._stop_background(timeout)
        except CollectorTimeout:
            raise
        except BaseException:
            self._end(timeout, close_env=close_env, raise_on_error=False)
            if raise_on_error:
                raise
        else:
            self._end(timeout, close_env=close_env, raise_on_error=raise_on_error)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._observers.collection_ended(described(error))
        self.shutdown(raise_on_error=error is None)

    # --- parts ------------------------------------------------------------------------------------

    def _sendable(self, given: Any, what: str) -> Any:
        """Return what workers get for ``given``; see ``unpickled``."""
        return given

    def _set_up(self) -> None:
        options = self.options
        self._on_demand = OnDemand(self._engine)
        self.timeline = self._engine.time.timeline
        self._fit_heads()
        self._receivers = Receivers(self._weights, self, options.worker_idx)
        if options.weight_recv_schemes:
            self._receivers.register(options.weight_recv_schemes)
        self._updater = made_updater(options.weight_updater)
        if hasattr(self._updater, "register_collector"):
            self._updater.register_collector(self)
        self._autosaver = None if options.saving is None else Autosaver(options.saving)
        if options.seed is not None:
            self.set_seed(options.seed)
        self._observers = Observers(self, options, self._engine)

    def _collect(self, arguments: CollectArguments) -> Collected:
        with self._exclusively():
            made = self._on_demand.collect(arguments)
            self._observers.wrote()  # after an error here, the next call returns this result
            self._on_demand.deliver()
            return made

    def _workers_of(self, worker_ids: Any) -> list[int] | None:
        """The numbers of workers that were given by number and by the device of their policies;
        None: all.
        """
        if worker_ids is None:
            return None
        several = isinstance(worker_ids, Collection) and not isinstance(worker_ids, str)
        numbers: list[int] = []
        for worker in worker_ids if several else [worker_ids]:
            if isinstance(worker, torch.device):
                numbers += self._workers_on(worker)
            elif isinstance(worker, Integral) and not isinstance(worker, bool):
                numbers.append(int(worker))
            else:
                raise BadOption(
                    f"worker_ids has {worker!r}: expected numbers of workers, or devices"
                )
        return list(dict.fromkeys(numbers))

    def _workers_on(self, device: torch.device) -> list[int]:
        """The workers whose policies are on a device."""
        acting_on = self._acting_on()
        found = [
            number
            for number, acts_on in enumerate(acting_on)
            if device.type == acts_on.type
            and device.index in (None, acts_on.index or 0)
        ]
        if not found:
            known = ", ".join(sorted({str(acts_on) for acts_on in acting_on}))
            raise BadOption(
                f"worker_ids={device!r}: the policies of all workers are on {known}"
            )
        return found

    def _acting_on(self) -> list[torch.device]:
        """Return the device of the policy of each worker that takes weights."""
        return [self.options.devices.policy or self._policys_own()] * (
            self._weights.workers or 0
        )

    def _policys_own(self) -> torch.device:
        """Return the device on which the user's policy is."""
        tensors = (
            tensors_in(self.policy) if isinstance(self.policy, torch.nn.Module) else ()
        )
        first = next(iter(tensors), None)
        return torch.device("cpu") if first is None else first.device

    def _part(self, model_id: str) -> torch.nn.Module | None:
        model = None if model_id == "policy" else self.get_model(model_id)
        if model is not None and not isinstance(model, torch.nn.Module):
            raise BadOption(
                f"model_id={model_id!r} is {type(model).__name__}, which has no weights"
            )
        return model

    def _fit_heads(self) -> None:
        """Fit the user's heads, of which copies may act: their distributions need the action space."""
        info = self._engine.source.pool.counters[0].info
        original = self._weights.original
        for head in heads_of(self.policy if original is None else original):
            head.fit(info.action_specs, all_masks_of(info))

    def _before_batch(self) -> None:
        """Run before each batch, when the user is done with the previous one."""
        if self._on_demand.call is not None:
            self._on_demand.give_up_call()
        if self._autosaver is not None:
            self._autosaver.save_if_due(self._parts)

    def _parts(self) -> CollectorParts:
        """Return the parts that have state."""
        return CollectorParts(
            type(self).__name__,
            self.policy,
            self._engine,
            self._weights,
            self._on_demand,
        )

    def _close_quietly(self) -> None:
        self.shutdown(raise_on_error=False)

    @property
    def _groups(self) -> list[Group]:
        """The groups in this process."""
        return self._engine.groups

    def _go_into_background(self) -> None:  # noqa: B027 (nothing to do by default)
        """Prepare for collecting in a background thread."""

    def _exclusively(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread collects.

        Raises if the collector is closed.
        """
        self._check_open()
        if self._background is None:
            return self._use
        return self._while_paused(self._background)

    @contextmanager
    def _while_paused(self, background: Background) -> Iterator[None]:
        # in this order: the background thread is in its turn until the end of its batch
        with trimmed, background.paused(), self._use:
            self._raise_from_background()  # the batch that ended just now may have failed
            yield

    def _stop_background(self, timeout: float | None) -> None:
        if self._background is None:
            return
        self._background.stop(timeout)
        self._raise_from_background()

    def _raise_from_background(self) -> None:
        """Raise the background thread's error in the user's thread, once."""
        if self._background is not None and not self._background.here():
            self._background.raise_error()

    def _end(
        self, timeout: float | None, *, close_env: bool, raise_on_error: bool
    ) -> None:
        with self._use.within(timeout):
            if not self._closed:
                self._close(close_env=close_env, raise_on_error=raise_on_error)

    def _close(self, *, close_env: bool, raise_on_error: bool) -> None:
        self._closed = True
        if self._background is not None and self._background.ended_by:
            self._observers.collection_ended(self._background.ended_by)
        self._observers.close()
        self.disable_profile()
        self._receivers.close()
        try:
            self._engine.source.close(close_env=close_env)
        except Exception:
            if raise_on_error:
                raise
        finally:
            self._engine.ledger.close()
            self._release()
            self._engine.pipeline.close()

    def _release(self) -> None:  # noqa: B027 (nothing to do by default)
        """Release resources besides environments."""

    def _check_amount(self) -> None:
        if not self.options.frames_per_batch:
            raise BadOption(
                "frames_per_batch is not set: pass it to the constructor, or call"
                " collect(n_step=...)"
            )

    def _is_forked(self) -> bool:
        """Return whether this is a fork of the process that has the workers or the background
        thread.
        """
        return not all(owner.is_here() for owner in self._owners())

    def _owners(self) -> list[Owner]:
        """Return the owners of the workers and of the background thread, which no fork has."""
        owners = (
            self._engine.source.pool.owner,
            self._background and self._background.owner,
        )
        return [owner for owner in owners if owner]

    def _check_open(self) -> None:
        if (
            not self._closed
            and self._background is None
            and self._engine.source.pool.owner is None
        ):
            return
        for owner in self._owners():
            owner.check()
        self._raise_from_background()
        if self._closed:
            raise CollectorClosed("this collector was shut down; make a new one")
