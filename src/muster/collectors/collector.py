"""``Collector``: environments and a policy in, exact batches of experience out."""

from __future__ import annotations

import dataclasses
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from typing_extensions import Self, Unpack

from muster.collectors.options import CollectorKeywords, CollectorOptions
from muster.envs.build import build_env
from muster.errors import BadOption, CollectorBusy, CollectorClosed
from muster.group import Group, RolloutOptions
from muster.memory.slots import Slot
from muster.memory.views import BatchView
from muster.policies.adapt import adapt, place
from muster.protocols import Policy
from muster.rng import GroupRng
from muster.sources.in_process import Filled, InProcess
from muster.stats import CollectorStats, EpisodeWindow
from muster.trajectories import EpisodeRecord
from muster.weights.local import LocalWeights

if TYPE_CHECKING:
    from tensordict import TensorDict


class Collector:
    """Collects batches of exactly ``frames_per_batch`` environment steps, in this process.

    ::

        with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=2048, total_frames=51_200) as collector:
            for batch in collector:  # TensorDict [8, 256]
                loss = learn(batch)
                collector.update_policy_weights_(net)

    A batch has TorchRL's keys: ``observation`` (or the environment's own), ``action``, the policy's extras,
    ``done``, ``terminated``, ``truncated``, ``("next", ...)`` of these and ``reward``, and
    ``("collector", "traj_ids")``. Its shape is ``[num_envs, T]``, ``[T]`` without ``num_envs``, with the number
    of groups in front where ``create_env_fn`` is a list. It is a view on Muster's memory that is yours for as
    long as you hold any tensor of it; ``batch.reshape(-1)`` copies.

    After an error in an environment or policy the next iteration goes on with the rows collected so far.

    Args:
        create_env_fn: an env id, a function that makes an environment, an environment (``gymnasium.Env`` or
            ``gymnasium.vector.VectorEnv``), or a list of these: one group each, with a policy call and random
            streams of its own.
        policy: None for uniform random actions; a head such as ``muster.policies.categorical(net)``; a
            TensorDict module; any module or function ``obs -> action`` or ``obs -> (action, extras)``.
        **options: see ``CollectorOptions``; ``frames_per_batch`` is required.

    Raises:
        BadOption, UnknownOption: before any environment is made.
        UnsupportedEnv, UnsupportedSpace, EnvError: while making them; what was made is closed again.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[CollectorKeywords]) -> None:
        self.options = CollectorOptions.parse(dict(options))
        self._closed = False
        self._iterator: weakref.ref[Generator[TensorDict, None, None]] | None = None
        placed, self._policy_device = place(policy, self.options.devices["policy_device"])
        self._weights = LocalWeights(placed, policy if placed is not policy else None)
        with ExitStack() as made:  # closes what was made, if anything below fails
            self._groups = self._make_groups(create_env_fn, made)
            self._set_up(placed, stacked=isinstance(create_env_fn, (list, tuple)))
            made.pop_all()

    # --- collecting -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDict]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDict]:
        """Batches until ``total_frames``; after a ``break``, another iterator goes on where this one stopped.

        Raises:
            CollectorClosed: after ``shutdown``.
            CollectorBusy: while another iterator is still in use.
        """
        self._check_open()
        live = self._iterator() if self._iterator is not None else None
        if live is not None and inspect.getgeneratorstate(live) != inspect.GEN_CLOSED:
            raise CollectorBusy(
                "this collector is being iterated already. Use one `for` loop at a time; drop the first iterator "
                "(`del it`) to begin another."
            )
        batches = self._batches()
        self._iterator = weakref.ref(batches)
        return batches

    def rollout(self) -> TensorDict:
        """One more batch, now; it does not count towards ``total_frames``."""
        self._check_open()
        return self._collect()

    def __len__(self) -> int:
        """Batches over the collector's life.

        Raises:
            TypeError: for an endless collector.
        """
        if self.options.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return math.ceil(self.options.total_frames / self.options.frames_per_batch)

    def reset(self, index: Sequence[int] | int | None = None) -> None:
        """Begin new episodes with the next batch, in all environments or those of ``index`` (global numbers).

        The running ones are cut without a flag; their last batch ends as a batch does.
        """
        self._check_open()
        chosen = range(self._num_envs) if index is None else np.atleast_1d(np.asarray(index)).tolist()
        for i in chosen:
            if not 0 <= i < self._num_envs:
                raise BadOption(f"reset(index={index}): environments are numbered 0 to {self._num_envs - 1}")
        for group in self._groups:
            first = int(group.clock.env_ids[0])
            inside = [i - first for i in chosen if first <= i < first + group.B]
            if inside:
                group.reset(inside)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all environments and Muster's own draws, and begin new episodes with the next batch.

        Args:
            seed: environment i gets ``seed + i``.
            static_seed: all get ``seed``.

        Returns:
            the seed of the last environment.
        """
        self._check_open()
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise BadOption(f"set_seed({seed!r}): expected an integer of at least 0")
        for number, group in enumerate(self._groups):
            group.rng = GroupRng(seed, number, self._policy_device)
            group.reset(seeds=[seed if static_seed else seed + int(i) for i in group.clock.env_ids])
        return seed if static_seed else seed + self._num_envs - 1

    # --- weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None, model_id: str = "policy"
    ) -> None:
        """Let the next batch be collected with new weights.

        Args:
            policy_or_weights: the policy, its network, a copy of either, a TensorDict or dict of tensors; None
                where the optimizer works on the collector's own policy (which then only counts a version).
            weights, policy: the same by keyword; give one of the three.
            model_id: only ``"policy"`` here.

        Raises:
            BadWeights: what was given does not fit or is not finite; nothing was changed.
            BadOption: more than one of the three, or another model.
        """
        given = [source for source in (policy_or_weights, weights, policy) if source is not None]
        if len(given) > 1:
            raise BadOption("give the weights once: as the argument, weights= or policy=")
        if model_id != "policy":
            raise BadOption(f"model_id={model_id!r}: this collector has one model, 'policy'")
        self._check_open()
        self._weights.publish(given[0] if given else None)

    @property
    def policy_version(self) -> int:
        """Number of weight updates so far."""
        return self._weights.version

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def episodes(self) -> Sequence[EpisodeRecord]:
        """The episodes that ended in the last batch."""
        return self._episodes

    def stats(self) -> CollectorStats:
        """A snapshot; cheap, also after ``shutdown``."""
        env, policy, copy, total = (
            sum(getattr(group.timing, part) for group in self._groups) / 1e9
            for part in ("env", "policy", "copy", "total")
        )
        discarded: Counter[str] = Counter()
        for group in self._groups:
            discarded.update(group.discarded)
        return CollectorStats(
            frames=self._frames,
            executed=sum(group.executed for group in self._groups),
            discarded=dict(discarded),
            in_flight=self._source.in_flight,
            batches=self._batches_done,
            episodes=self._window.count,
            return_mean=self._window.return_mean,
            length_mean=self._window.length_mean,
            frames_per_s=self._frames / total if total else 0.0,
            env_s=env,
            policy_s=policy,
            copy_s=copy,
            rest_s=max(0.0, total - env - policy - copy),
            policy_path=self._acting.path,
            policy_version=self._weights.version,
            slots=self._source.slots(),
        )

    def __repr__(self) -> str:
        names = ", ".join(sorted({group.env.name for group in self._groups}))
        state = "closed" if self._closed else f"{self._frames:,} frames"
        return f"Collector({names} x {self._num_envs}, frames_per_batch={self.options.frames_per_batch}, {state})"

    # --- the end ----------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environments. Batches stay valid; ``stats()`` still works. May be called again.

        Args:
            timeout: without effect in this process.
            close_env: False leaves the environments open.
            raise_on_error: False hides an error of an environment's ``close``.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._source.close(close_env=close_env)
        except Exception:
            if raise_on_error:
                raise

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(raise_on_error=error is None)

    # --- parts ------------------------------------------------------------------------------------

    def _make_groups(self, create_env_fn: Any, made: ExitStack) -> list[Group]:
        options = self.options
        makers = list(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else [create_env_fn]
        if not makers:
            raise BadOption("create_env_fn is an empty list: expected at least one environment")
        built = []
        for maker in makers:
            built.append(build_env(maker, options.num_envs))
            made.callback(built[-1].env.close)
        objects = [id(env) for b in built for env in b.env.objects()]
        if len(set(objects)) < len(objects):
            raise BadOption("create_env_fn has the same environment object twice; give functions that make one")
        self._num_envs = sum(b.env.num_envs for b in built)
        self._T = options.rows_per_batch(self._num_envs)
        rollout = RolloutOptions(**{f.name: getattr(options, f.name) for f in dataclasses.fields(RolloutOptions)})
        groups, first = [], 0
        for number, b in enumerate(built):
            ids = np.arange(first, first + b.env.num_envs)
            rng = GroupRng(options.seed, number, self._policy_device)
            groups.append(
                Group(b.env, batched=b.batched, env_ids=ids, total_envs=self._num_envs, rng=rng, options=rollout)
            )
            first += b.env.num_envs
        return groups

    def _set_up(self, policy: Any, *, stacked: bool) -> None:
        options, first = self.options, self._groups[0]
        adapted: Callable[[Any], Policy] = lambda p: adapt(  # noqa: E731
            p,
            first.env,
            batched=first.batched,
            device=self._policy_device,
            exploration_type=options.exploration_type,
            executor=options.executor,
        )
        self._policy = adapted(policy)
        self._random = adapted(None)
        self._acting = self._random if options.init_random_frames else self._policy
        self._storing = options.devices["storing_device"]
        moved = self._storing is not None and self._storing.type != "cpu"
        self._source = InProcess(
            self._groups,
            T=self._T,
            limit_bytes=cast(int, options.slot_memory_limit),
            memory="pinned" if moved and torch.cuda.is_available() else "heap",
        )
        self._stacked = stacked
        self._view: BatchView | None = None
        self._same: tuple[Slot, torch.Tensor, TensorDict] | None = None
        self._window = EpisodeWindow()
        self._episodes: Sequence[EpisodeRecord] = ()
        self._frames = self._counted = self._batches_done = 0
        if options.seed is not None:
            self.set_seed(options.seed)

    def _batches(self) -> Generator[TensorDict, None, None]:
        total = self.options.total_frames
        while total < 0 or self._counted < total:
            self._check_open()
            batch = self._collect()
            self._counted += self.options.frames_per_batch
            yield batch
            del batch  # the user's alone while the next one is collected

    def _collect(self) -> TensorDict:
        wanted = self.options.init_random_frames or 0
        self._acting = self._random if self._frames < wanted else self._policy
        filled = self._source.collect(self._acting, self._same[0] if self._same else None)
        batch = self._deliver(filled)
        self._frames += self.options.frames_per_batch
        self._batches_done += 1
        self._episodes = filled.episodes
        self._window.add(filled.episodes)
        return batch

    def _deliver(self, filled: Filled) -> TensorDict:
        layout = filled.slot.layout
        if self._view is None or self._view.layout is not filled.ring.layout:
            self._view = BatchView(
                filled.ring.layout, stacked=self._stacked, order=self.options.layout, device=self._storing
            )
            self._same = None if self._same and self._same[0].layout is not layout else self._same
        if self._same:
            return self._refresh(filled)
        memory = filled.ring.lend(filled.slot)
        if self._storing is not None and self._storing.type != "cpu":
            memory = memory.to(self._storing)  # one transfer for all columns; the slot is free afterwards
        batch = self._view.tensordict(memory, filled.slot)
        if self.options.return_same_td:
            self._same = (filled.slot, memory, batch)
        return batch

    def _refresh(self, filled: Filled) -> TensorDict:
        """``return_same_td``: the slot was filled again in place; only copies of it need to be renewed."""
        assert self._same is not None and self._view is not None
        slot, memory, batch = self._same
        if memory.device.type != "cpu":
            memory.copy_(torch.from_numpy(slot.block))
        self._view.refresh_objects(batch, slot)
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise CollectorClosed("this collector was shut down; make a new one")
