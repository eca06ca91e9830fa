"""The base of all collectors: iteration, background thread, state, closing."""

from __future__ import annotations

import inspect
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from muster.capabilities import check_reset_kwargs
from muster.collectors import resume
from muster.collectors.background import Background
from muster.collectors.batch_views import final_observations
from muster.collectors.collect_methods import CollectMethods
from muster.collectors.engine import Engine
from muster.collectors.observers import Observers
from muster.collectors.on_demand import OnDemand
from muster.collectors.options import CollectorOptions
from muster.collectors.signatures import takes
from muster.collectors.weight_methods import WeightMethods
from muster.errors import BadOption, CollectorBusy, CollectorClosed, CollectorTimeout, described
from muster.observing.profiling import ProfileConfig
from muster.policies.agents import heads_of
from muster.policies.sampling import all_masks_of
from muster.utils.attributes import resolve
from muster.utils.forks import Owner
from muster.utils.tracebacks import trimmed
from muster.weights.publish import PolicyWeights
from muster.weights.receive import Receivers
from muster.workers.requests import Profile

if TYPE_CHECKING:
    from tensordict import TensorDict


class NoWorkerIndex(BadOption, RuntimeError):
    """``worker_idx`` was read, but never set."""


class NoReplayBuffer(BadOption, RuntimeError):
    """``start()`` was called without a replay buffer."""


class BaseCollector(CollectMethods, WeightMethods, ABC):
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
            raise BadOption("policy_factory cannot be used with policy: give one of them")
        self.options = options
        self._closed = False
        self._background: Background | None = None
        self._iterator: weakref.ref[Generator[Any, None, None]] | None = None
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
        live = self._iterator() if self._iterator is not None else None
        if self.is_running() or (
            live is not None and inspect.getgeneratorstate(live) != inspect.GEN_CLOSED
        ):
            raise CollectorBusy(
                "this collector is being iterated already. Use one `for` loop at a time; drop the"
                " first iterator (`del it`) to begin another, or end the background thread with"
                " `async_shutdown()`."
            )
        after = self._observers.wrote if self._observers.need_batches else None
        batches = self._engine.iterate(self._check_open, self._before_batch, after)
        self._iterator = weakref.ref(batches)
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

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all environments and Muster's own draws, and reset all environments before the next
        batch.

        Args:
            seed: seed of environment 0; environment i gets ``seed + i``.
            static_seed: all environments get ``seed``.

        Returns:
            the seed of the last environment.
        """
        with self._exclusively():
            return self._engine.set_seed(seed, static=static_seed)

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

        Raises:
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
        self._background = Background(lambda: next(batches, self) is not self, name)

    def is_running(self) -> bool:
        """Return whether the background thread runs."""
        return self._background is not None and self._background.is_running()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which the background thread does not collect.

        Entering waits for the end of its batch.
        """
        return self._exclusively()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the background thread after its current batch, and shut down.

        Raises the error of the thread.

        Raises:
            CollectorTimeout: the thread did not end within ``timeout`` seconds; nothing was closed.
        """
        if not self._is_forked():
            self._stop_background(timeout)
        self.shutdown(close_env=close_env)

    # --- observing --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = ", ".join(
            sorted({counts.info.name for counts in self._engine.source.pool.counters})
        )
        state = "closed" if self._closed else f"{self._engine.frames:,} frames"
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
        root = self if model_id.split(".")[0].split("[")[0] in ("policy", "env") else self.policy
        try:
            return resolve(root, model_id)
        except BadOption as error:
            raise BadOption(f"model_id={model_id!r} is not known here: {error}") from error

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment, or a list of them if there are several
        environments.
        """
        self._raise_from_background()
        env = self.env
        return [getattr(one, attr) for one in env] if isinstance(env, list) else getattr(env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        self._raise_from_background()
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer."""
        self._raise_from_background()
        if self.options.replay_buffer is None:
            raise BadOption(f"getattr_rb({attr!r}): this collector has no replay buffer")
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
        return final_observations(self._engine.finals)

    def fake_tensordict(self) -> TensorDict:
        """Return zeros of the shape of a batch.

        Nothing is collected; the policy is called once to find its outputs.
        """
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
            return resume.state_of(self)

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
            return resume.load(self, state_dict, trust=trust, strict=strict)

    # --- the end ----------------------------------------------------------------------------------

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments. Batches and ``stats()`` stay valid. May be called again.

        If the disk was full, a repeated call writes what ``record=`` could not.

        Args:
            timeout: seconds to wait for the current batch of the background thread; None: no limit.
            close_env: False: leave the environments open.
            raise_on_error: False: ignore errors of the environments' ``close`` and of the
                background thread.

        Raises:
            CollectorTimeout: the background thread did not end in time; nothing was closed.
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
            self._end(close_env=close_env, raise_on_error=False)
            if raise_on_error:
                raise
        else:
            self._end(close_env=close_env, raise_on_error=raise_on_error)

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
            self._observers.error = described(error)
        self.shutdown(raise_on_error=error is None)

    # --- parts ------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        options = self.options
        self._on_demand = OnDemand(self._engine)
        self._groups = self._engine.groups
        self.timeline = self._engine.timeline
        self._fit_heads()
        self._receivers = Receivers(self._weights, self, options.worker_idx)
        if options.weight_recv_schemes:
            self._receivers.register(options.weight_recv_schemes)
        self._updater = options.weight_updater
        if self._updater is not None and not hasattr(self._updater, "push_weights"):
            self._updater = self._updater()
        if hasattr(self._updater, "register_collector"):
            self._updater.register_collector(self)
        self._saving, self._saved_at = options.saving, time.monotonic()
        if options.seed is not None:
            self.set_seed(options.seed)
        self._observers = Observers(self, options, self._engine)

    def _fit_heads(self) -> None:
        """Fit the user's heads, of which copies may act: their distributions need the action space."""
        info = self._engine.source.pool.counters[0].info
        original = self._weights.original
        for head in heads_of(self.policy if original is None else original):
            head.fit(info.action_specs, all_masks_of(info))

    def _before_batch(self) -> None:
        """Run before each batch, when the user is done with the previous one."""
        self._on_demand.give_up_call()
        if self._saving is not None and time.monotonic() - self._saved_at >= self._saving.every:
            resume.autosave(self, self._saving.folder)
            self._saved_at = time.monotonic()

    def _go_into_background(self) -> None:
        """Prepare for collecting in a background thread."""

    def _exclusively(self) -> AbstractContextManager[None]:
        """Return a context in which the background thread does not collect.

        Raises if the collector is closed.
        """
        self._check_open()
        return trimmed if self._background is None else self._while_paused(self._background)

    @contextmanager
    def _while_paused(self, background: Background) -> Iterator[None]:
        with trimmed, background.paused():
            self._raise_from_background()  # the batch that ended just now may have failed
            yield

    def _stop_background(self, timeout: float | None) -> None:
        if self._background is None:
            return
        self._background.stop(timeout)
        self._raise_from_background()

    def _raise_from_background(self) -> None:
        """Raise the background thread's error in the user's thread, once."""
        if (
            self._background is not None
            and not self._background.here()
            and self._background.error is not None
        ):
            error, self._background.error = self._background.error, None
            raise error

    def _end(self, *, close_env: bool, raise_on_error: bool) -> None:
        self._closed = True
        if self._background is not None and self._background.ended_by:
            self._observers.error = self._background.ended_by
        self._observers.close()
        self.disable_profile()
        self._receivers.close()
        try:
            self._engine.source.close(close_env=close_env)
        except Exception:
            if raise_on_error:
                raise
        finally:
            self._engine.is_closed = True
            self._release()
            self._engine.pipeline.close()

    def _release(self) -> None:
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
        owners = self._engine.source.pool.owner, self._background and self._background.owner
        return [owner for owner in owners if owner]

    def _check_open(self) -> None:
        if not self._closed and self._background is None and self._engine.source.pool.owner is None:
            return
        for owner in self._owners():
            owner.check()
        self._raise_from_background()
        if self._closed:
            raise CollectorClosed("this collector was shut down; make a new one")
