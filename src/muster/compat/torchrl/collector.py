"""TorchRL's ``Collector``, implemented with Muster's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torchrl.collectors
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device
from torchrl.envs import EnvBase
from torchrl.envs.llm.transforms import PolicyVersion

from muster.collectors.background import Background
from muster.collectors.on_demand import OnDemand
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import worker_setting
from muster.compat.torchrl import batches, policies, setup
from muster.compat.torchrl.numbering import Numbering
from muster.compat.torchrl.progress import (
    NAMES,
    SharedProgress,
    Written,
    pending_frames,
)
from muster.compat.torchrl.state import TorchRLState
from muster.compat.torchrl.weights import TorchRLWeights, is_for_workers
from muster.errors import BadOption, CollectorClosed, EnvError, PolicyError
from muster.keys import IS_INIT
from muster.memory.slots import torch_dtype
from muster.policies.adapt import place
from muster.policies.random import RandomPolicy as UniformPolicy
from muster.policies.random import sampler_of
from muster.policies.tensordict import TensorDictPolicy
from muster.rollout.first_call import begin_episodes
from muster.rollout.options import Execution
from muster.utils.interrupts import postponed
from muster.utils.tracebacks import trimmed
from muster.workers.build import build_policy


class _ByBackend(type(torchrl.collectors.Collector)):  # type: ignore[misc]
    """Metaclass with which ``Collector(backend=..., num_collectors=...)`` makes collectors of this
    package.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Collector:
            from muster.compat.torchrl.multi import made_elsewhere

            if (other := made_elsewhere(args, kwargs)) is not None:
                return other
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if name not in setup.SELECTORS
            }
        return super().__call__(*args, **kwargs)


class Collector(
    TorchRLWeights,
    TorchRLState,
    torchrl.collectors.Collector,  # type: ignore[misc]
    metaclass=_ByBackend,
):
    """TorchRL 0.14's ``Collector`` with the same arguments, defaults, attributes and results;
    Muster collects.

    ``torchrl.collectors.Collector`` documents them, and docs/torchrl.md the differences. Besides
    TorchRL's environments and policies, those of ``muster.Collector`` are supported. Batches are
    views on memory that is reused only after the last tensor of the batch was dropped.

    Raises:
        TypeError: an argument is unknown, or the policy cannot be wrapped.
    """

    closed: bool
    env_device: Any
    _wrapped_policy: Any = None
    _use_buffers: bool  # all batches have the full shape
    # True while BaseCollector assembles complete trajectories, and writes them itself
    _ignore_rb = False
    _thread: Background | None = None
    _same: Any = None  # with return_same_td: the TensorDict of all batches
    _acting: Any = None
    _random_policy: Any = None
    _shown_in: SharedProgress | None = None  # of a worker: where its progress is shown

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._written = Written()
        setup.check_numbers(kwargs)
        self.replay_write_mode = kwargs.get("replay_write_mode")
        kwargs = setup.written_as_asked(torchrl.collectors.Collector, kwargs)
        setup.check_buffer(kwargs.get("replay_buffer"))
        super().__init__(*args, **kwargs)

    __init__.__signature__ = setup.signature_of(torchrl.collectors.Collector)  # type: ignore[attr-defined]

    # --- steps of TorchRL's constructor, in its order ---------------------------------------------

    def _init_env(
        self, create_env_fn: Any, create_env_kwargs: dict[str, Any] | None
    ) -> Any:
        make = setup.one_env(create_env_fn)
        env = super()._init_env(make, create_env_kwargs) if callable(make) else make
        self._env_kwargs = create_env_kwargs if isinstance(env, str) else None
        return env if isinstance(env, EnvBase) else setup.Foreign(env)

    def _init_policy(
        self, policy: Any, policy_factory: Any, env: Any, trust_policy: bool | None
    ) -> Any:
        if isinstance(env, EnvBase):
            return super()._init_policy(policy, policy_factory, env, trust_policy)
        if policy is not None and policy_factory is not None:
            raise TypeError("policy_factory cannot be used with policy argument.")
        self.trust_policy = bool(trust_policy)
        return policy if policy_factory is None else policy_factory()

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        self._tracks_version = track_policy_version
        counts = hasattr(track_policy_version, "increment_version")
        self.policy_version_tracker = track_policy_version if counts else None
        if track_policy_version is True:
            self.policy_version_tracker = PolicyVersion()

    def _maybe_setup_policy_env_transforms(self, env: Any, policy: Any) -> Any:
        return (
            super()._maybe_setup_policy_env_transforms(env, policy)
            if isinstance(env, EnvBase)
            else env
        )

    def _setup_policy_and_weights(self, policy: Any) -> None:
        self._registered = self.env
        if isinstance(self.env, setup.Foreign):
            self.env = self.env.env
        elif self.env_device is not None:
            self.env = self.env.to(self.env_device)
        self.policy, self._acts_on = place(policy, self.policy_device)
        self._wrapped_policy = policies.wrap_policy(
            self.policy, self.env, self.trust_policy
        )
        if isinstance(self.env, EnvBase):
            policies.check_is_init(self._wrapped_policy, self.env)
        if isinstance(self.policy, torch.nn.Module):
            self._policy_w_state_dict = self.policy
        self._set_up_weights(policy)

    def _apply_env_device(self) -> None:
        self.env_device = self.env_device or getattr(self.env, "device", None)

    def _setup_max_frames_per_traj(self, max_frames_per_traj: int | None) -> None:
        self.max_frames_per_traj = int(max_frames_per_traj or 0)
        self.env, self._limit = setup.limit_steps(
            self.env, self._wrapped_policy, self.max_frames_per_traj
        )

    def _setup_compact_obs(self, compact_obs: bool) -> None:
        self.compact_obs = bool(compact_obs)
        self._compact = batches.compact_keys(self.env) if self.compact_obs else []

    def _make_carrier(self) -> None:
        """Nothing to make: the engine resets the environments, and has the memory of batches."""

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        """See ``_make_carrier``."""

    def _set_truncated_keys(self) -> None:
        self._truncated = (
            batches.truncated_keys(self.env, limited=bool(self._limit))
            if self.set_truncated
            else []
        )

    def _setup_weight_sync(self, weight_updater: Any, weight_sync_schemes: Any) -> None:
        self._make_engine()
        if weight_sync_schemes is not None:
            if not isinstance(weight_sync_schemes, Mapping):
                raise BadOption(
                    f"weight_sync_schemes={weight_sync_schemes!r}: expected a dict of model ids to"
                    " schemes"
                )
            # Schemes of ours that name a transport are for workers, which this collector does not
            # have.
            weight_sync_schemes = {
                model_id: scheme
                for model_id, scheme in weight_sync_schemes.items()
                if not is_for_workers(scheme)
            }
        super()._setup_weight_sync(weight_updater, weight_sync_schemes)

    def _make_engine(self) -> None:
        self._per_step = (
            self.replay_buffer is not None
            and not self.extend_buffer
            and self.trajs_per_batch is None
        )
        self.options = self._make_options()
        with _original_errors():
            self._engine = setup.make_engine(
                self.env,
                self._wrapped_policy,
                self._acts_on,
                self._weights,
                self.options,
                buffers=self._use_buffers,
                faster=self._compiled,
            )
            self._on_demand = OnDemand(self._engine)
            self._acting = self._engine.policy
            self.n_env = self._engine.num_envs
            self.frames_per_batch = self._engine.rows
            self.requested_frames_per_batch = self.n_env * self.frames_per_batch
            self._classes = setup.classes_of(self._engine.groups[0].env)
            self._numbering = Numbering(
                self.n_env, getattr(self.env, "done_keys", ["done"]), self._traj_pool
            )

    def _make_options(self) -> CollectorOptions:
        """Return Muster's options of the engine.

        The compat layer implements all other arguments.
        """
        native = isinstance(self.env, EnvBase)
        return CollectorOptions(
            self.env,
            frames_per_batch=self.requested_frames_per_batch,
            create_env_kwargs=self._env_kwargs,
            max_frames_per_traj=self._limit,
            interruptor=None if self._per_step else self.interruptor,
            trust_policy=True if native or self.trust_policy else None,
            compile_policy=False if native else self._compile_options(),
            cudagraph_policy=self._graph_options(),
            compact_obs=self.compact_obs and not self._per_step,
            replay_buffer=self.replay_buffer if self._per_step else None,
            extend_buffer=not self._per_step,
            track_policy_version=self._tracks_version,
            storing_device=self.storing_device,
            policy_device=self.policy_device,
            exploration_type=self.exploration_type,
            # As in TorchRL, values are not checked, and all draws use torch's global generator,
            # seeded by the program.
            validate="off",
            obs_dtype="env",  # a network of another dtype fails in TorchRL, too
            # Environments and policies may keep their tensors.
            execution=Execution(inference_mode=False, own_rng=False),
            seed=None if native else int(torch.randint(1 << 31, (), device="cpu")),
            num_threads=None,
        )

    def _compiled(self, policy: Any) -> Any:
        """Return the policy compiled as in TorchRL, with ``compile_policy``."""
        return (
            policies.Compiled(policy, self.compiled_policy_kwargs)
            if self.compiled_policy
            else policy
        )

    def _compile_options(self) -> bool | dict[str, Any]:
        """Return ``compile_policy`` for Muster, which compiles at the first call."""
        options = {
            name: value
            for name, value in self.compiled_policy_kwargs.items()
            if name != "warmup"
        }
        return options or self.compiled_policy

    def _graph_options(self) -> bool | dict[str, Any]:
        """Return ``cudagraph_policy`` for Muster: False without CUDA, where TorchRL's graphs only
        call the policy.
        """
        options = dict(self.cudagraphed_policy_kwargs)
        if self.cudagraphed_policy and not torch.cuda.is_available():
            policies.check_graph(self._wrapped_policy, self.policy_device, options)
            return False
        return options or self.cudagraphed_policy

    # --- collecting -------------------------------------------------------------------------------

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames``; None if the replay buffer got the batch.

        See ``iter(collector)``.
        """
        self._check_open()
        while self._frames < self.total_frames:
            self._check_open()
            self._iter += 1
            batch = self.rollout()
            if batch is not None:
                self._count(batch.numel())
                batch = self._postproc(batch)
                if self.post_collect_hook is not None:
                    self.post_collect_hook(batch)
                if self.replay_buffer is not None:
                    self._written.give(batch.numel())
                if self.replay_buffer is not None and not self._ignore_rb:
                    batch.names = None  # as in TorchRL's buffers
                    self.replay_buffer.extend(
                        _maybe_normalize_replay_buffer_tensordict_device(
                            batch, self.replay_buffer
                        )
                    )
                    batch = None
            if self.trajs_per_batch is None:
                self._show_progress()
            yield batch

    def _iter_by_trajectories(self) -> Iterator[Any]:
        for batch in super()._iter_by_trajectories():
            self._show_progress()  # now the trajectories of the batch that have ended are written
            yield batch

    def next(self) -> Any:
        """Return the next batch; None after ``total_frames``."""
        self._check_open()
        return super().next()

    def rollout(self) -> Any:
        """Collect a batch ``[*env batch, T]`` without postprocessing; None if its steps are in the
        replay buffer.
        """
        self._check_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        with _original_errors():
            if self.reset_at_each_iter:
                self._begin_episodes(None, {})
            return (
                self._add_steps()
                if self._per_step
                else batches.mark_end(self._collect(), self._truncated)
            )

    def fake_tensordict(self) -> Any:
        """Return a batch of zeros."""
        self._check_open()
        with _original_errors():
            self._engine.act_with(self._acting)
            return self._postproc(
                batches.mark_end(self._tidy(self._engine.blank()), self._truncated)
            )

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset environments now, and start new trajectories with new ids.

        Args:
            index: index into the environment's batch dimensions; None: all environments.
            **kwargs: arguments of the environment's ``reset``.
        """
        self._check_open()
        chosen = None
        if index is None:
            self._flush_trajectory_assembly()
        else:
            mask = torch.zeros(self._batch_shape, dtype=torch.bool, device="cpu")
            try:
                mask[index] = True
            except (IndexError, TypeError, RuntimeError) as error:
                raise BadOption(
                    f"reset(index={index!r}): expected an index into the batch size"
                    f" {list(self._batch_shape)} of the environments, or None: {error}"
                ) from error
            chosen = mask.reshape(-1).nonzero().squeeze(-1).tolist()
        with _original_errors():
            replaced = self._begin_episodes(chosen, kwargs)
        if index is not None:
            self._drop_partial_trajectories(replaced)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment; torch is not seeded. TorchRL's environments are not reset.

        Returns:
            the next seed, from TorchRL's environment. Other environments are reset, and the last
            seed is returned, as in ``muster.Collector``.
        """
        if isinstance(self.env, EnvBase):
            return int(self.env.set_seed(seed, static_seed=static_seed))
        return self._engine.set_seed(seed, static=static_seed)

    def __len__(self) -> int:
        if self.total_frames == float("inf"):
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return int(-(-self.total_frames // self.requested_frames_per_batch))

    # --- progress ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return TorchRL's numbers, and the progress in frames that TorchRL 0.15 has; also after
        ``shutdown``.
        """
        return {**super().stats(), **dict(zip(NAMES, self._progress(), strict=True))}

    def show_progress_in(self, shared: SharedProgress) -> None:
        """Show the progress of this collector of a worker in the main process from now on."""
        self._shown_in = shared

    def _show_progress(self) -> None:
        if self._shown_in is not None:
            self._shown_in.write(self.worker_idx, self._progress())

    def _progress(self) -> tuple[int, ...]:
        known = self._engine.stats()
        pending = self._pending_frames()
        written = 0 if self.replay_buffer is None else self._written.count(pending)
        return known.executed, known.completed, known.episodes, pending, written

    def _pending_frames(self) -> int:
        return pending_frames(getattr(self, "_traj_assembly", None))

    def _discards_in_flight_trajectories(self) -> bool:
        """Return whether the trajectories that have not ended are dropped now, after a batch."""
        discards: bool = super()._discards_in_flight_trajectories()
        if discards:
            self._written.drop(self._pending_frames())
        return discards

    def _flush_trajectory_assembly(self) -> None:
        self._written.drop(self._pending_frames())
        super()._flush_trajectory_assembly()

    def _drop_partial_trajectories(self, traj_ids: list[int]) -> None:
        before = self._pending_frames()
        super()._drop_partial_trajectories(traj_ids)
        self._written.drop(before - self._pending_frames())

    # --- background thread, shutdown --------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in a background thread, until ``total_frames`` or
        ``async_shutdown``.
        """
        if self.replay_buffer is None:
            raise RuntimeError("Replay buffer must be defined for execution.")
        self._check_open()
        if not self.is_running():
            batches = iter(self)
            name = f"muster-{id(self):x}"
            self._thread = Background(lambda: next(batches, self) is not self, name)

    def is_running(self) -> bool:
        """Return whether the background thread runs."""
        return self._thread is not None and self._thread.is_running()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the background thread does not collect."""
        return (
            contextlib.nullcontext() if self._thread is None else self._thread.paused()
        )

    def async_shutdown(
        self, timeout: float | None = None, close_env: bool = True
    ) -> None:
        """End the background thread after its batch, and shut down.

        Raises the error of the thread.
        """
        self.shutdown(timeout=timeout, close_env=close_env)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End the background thread, and close the environment.

        Batches stay valid. May be called again.

        Args:
            timeout: timeout in seconds for the current batch of the thread.
            close_env: False: leave the environment open.
            raise_on_error: False: ignore errors of the environment and of the thread.
        """
        thread = self._thread
        error = None
        if thread is not None and not thread.here():
            thread.stop(timeout)
            self._thread = None
            error = thread.error
        if not self.closed:
            self.closed = True
            self._flush_trajectory_assembly()
            self._show_progress()
            self._receivers.close()
            try:
                self._engine.source.close(close_env=close_env)
            except Exception:
                if raise_on_error:
                    raise
        if error is not None and raise_on_error:
            raise error

    def __del__(self) -> None:
        try:
            self.shutdown(raise_on_error=False)
        except Exception:  # noqa: BLE001 (at interpreter exit, modules may be gone, contextlib as well)
            pass

    # --- parts ------------------------------------------------------------------------------------

    @property
    def _exclude_private_keys(self) -> bool:
        """TorchRL's switch: False, set before the first batch, keeps the policy's outputs that
        begin with ``_``.
        """
        return not getattr(self._acting, "keeps_private", False)

    @_exclude_private_keys.setter
    def _exclude_private_keys(self, excludes: bool) -> None:
        if isinstance(self._acting, TensorDictPolicy):
            self._acting.keeps_private = not excludes

    @property
    def _batch_shape(self) -> tuple[int, ...]:
        return self._engine.groups[0].env.spec.batch_shape

    def _begin_episodes(
        self, chosen: list[int] | None, options: dict[str, Any]
    ) -> list[int]:
        """Reset environments now, and assign new trajectory ids; returns the old ids."""
        self._engine.reset(chosen, options)
        for group in self._engine.groups:
            begin_episodes(group)
        replaced: list[int] = self._numbering.renumber(
            range(self.n_env) if chosen is None else chosen
        ).tolist()
        return replaced

    def _random(self) -> Any:
        """Return the policy of random frames: the environment's random actions, zeros in the
        policy's other columns.
        """
        if self._random_policy is None:
            group, zeros = self._engine.groups[0], self._zeros_of_policy()
            if isinstance(self.env, EnvBase):
                policy = policies.RandomWithZeros(group, zeros)
                self._random_policy = build_policy(
                    policy, worker_setting(self.options, policy), group.env, None
                )
            else:
                self._random_policy = UniformPolicy(
                    sampler_of(group.env), group.env.spec.batch_shape, unknown=0.0
                )
                self._random_policy.learn(
                    [c for c in self._acting.columns() if c.key in zeros], {}
                )
        return self._random_policy

    def _zeros_of_policy(self) -> Any:
        """Return zeros for the outputs of the policy other than its actions, ``[*batch shape,
        *shape]``.
        """
        if not self._use_buffers:
            return {}
        if not self._acting.columns():
            self._engine.act_with(self._acting)
            with torch.random.fork_rng(devices=[]):
                self._engine.source.layout("policy")
        plain = [c for c in self._acting.columns() if c.is_tensor and c.key != IS_INIT]
        return {
            c.key: torch.zeros(
                (*self._batch_shape, *c.shape), dtype=torch_dtype(c.dtype), device="cpu"
            )
            for c in plain
        }

    def _collect(self) -> Any:
        engine = self._engine
        random = self._should_use_random_frames()
        engine.act_with(self._random() if random else self._acting)
        with postponed():
            batch = engine.collect(engine.num_envs * engine.source.T[0])[0]
            rows = engine.last.results[0].rows
            if (
                rows < batch.shape[-1] and not self._use_buffers
            ):  # the interruptor has ended it
                batch = batch[..., :rows]
            batch = self._tidy(batch)
        if self.track_traj_ids:
            self._numbering.write(batch)
        if self.return_same_td and self._use_buffers:
            if self._same is None:
                self._same = batch
            else:  # processes may share its memory
                self._same.update_(
                    batch.select(*self._same.keys(True, True), strict=False)
                )
            return self._same
        return batch

    def _add_steps(self) -> None:
        """Implement ``extend_buffer=False``: add every time step to the buffer separately."""
        for _ in range(self._engine.rows):
            step = self._collect()
            self.replay_buffer.add(step[..., 0])
            self._written.give(step.numel())
            if self._count(step.numel()) or (
                self.interruptor is not None and self.interruptor.collection_stopped()
            ):
                return

    def _tidy(self, batch: Any) -> Any:
        group = self._engine.groups[0]
        batch = batches.tidy(
            batch,
            track_traj_ids=self.track_traj_ids,
            limit=self._limit,
            dropped=self._compact,
        )
        carried = {c.key for c in self._acting.columns() if c.carry} - {
            IS_INIT,
            *group.env.spec.observation_specs,
        }
        batches.add_next_states(
            batch,
            {
                key: group.carry.seen(key) if key in group.carry else None
                for key in carried
            },
        )
        batches.restore_classes(batch, self._classes)
        return batch.clear_device_() if self.storing_device is None else batch

    def _count(self, frames: int) -> bool:
        """Count frames. After the last one, close the environment and return True."""
        self._frames += frames
        if self._frames >= self.total_frames:
            self._engine.source.close()
        return bool(self._frames >= self.total_frames)

    def _check_open(self) -> None:
        if self.closed:
            raise CollectorClosed("this collector was shut down; make a new one")


@contextlib.contextmanager
def _original_errors() -> Iterator[None]:
    """Raise the original error of an environment or policy, with Muster's error, which has the
    location, as cause.
    """
    with trimmed:
        try:
            yield
        except (EnvError, PolicyError) as error:
            if error.__cause__ is None:
                raise
            original, error.__cause__ = error.__cause__, None
            raise original from error
