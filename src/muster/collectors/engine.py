"""What collects behind a ``Collector``: groups, source, delivery and outlet, and the counting."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from muster.collectors.delivery import Delivery
from muster.collectors.options import CollectorOptions
from muster.collectors.outlet import Outlet
from muster.collectors.setup import build_policy
from muster.errors import BadOption
from muster.group import Group
from muster.profiling import RolloutProfiler
from muster.rng import GroupRng
from muster.sources.in_process import InProcess
from muster.stats import CollectorStats, EpisodeWindow
from muster.timeline import Timeline
from muster.trajectories import EpisodeRecord
from muster.weights.local import LocalWeights

if TYPE_CHECKING:
    from tensordict import TensorDict

OWN_TRACK = -1  # of the timeline: what is not in a group


class Engine:
    """Collects batches and sends them where the options say.

    Args:
        groups: owned by the engine.
        policy: as the user gave it, on its device.
        weights: of the policy.
        stacked: batches have a leading dimension for the groups.

    Attributes:
        frames, batches: delivered.
        counted: frames of batches that count towards ``total_frames``.
        episodes: that ended in the last batch.
    """

    def __init__(
        self,
        options: CollectorOptions,
        groups: Sequence[Group],
        policy: Any,
        device: torch.device | None,
        weights: LocalWeights,
        *,
        stacked: bool,
    ) -> None:
        self.options, self.groups, self.device, self.weights = options, list(groups), device, weights
        self.num_envs = sum(group.B for group in groups)
        self.rows = options.rows_per_batch(self.num_envs)
        self.act_with(policy)
        self.random = build_policy(None, options, groups[0], device)
        self.acting = self.random if options.init_random_frames else self.policy
        self.outlet = Outlet(options, self.num_envs)
        self.delivery = Delivery(options, stacked=stacked, hidden=self.outlet.needs_flags)
        self.source = InProcess(
            self.groups,
            T=self.rows if options.extend_buffer else 1,
            limit_bytes=cast(int, options.slot_memory_limit),
            memory=self._memory(),
        )
        self.timeline = Timeline()
        self.timeline.tracks[OWN_TRACK] = "collector"
        self.profiler: RolloutProfiler | None = None
        self.window = EpisodeWindow()
        self.episodes: Sequence[EpisodeRecord] = ()
        self.frames = self.counted = self.batches = 0
        self._ended_at = 0
        self._in_batch = False

    def act_with(self, policy: Any) -> None:
        """Let another policy act from the next batch on."""
        self.policy = build_policy(policy, self.options, self.groups[0], self.device)

    def put_batch(self) -> None:
        """One batch through hooks into the outlet."""
        limit = self.options.frames_per_batch
        if self.options.total_frames > 0:
            limit = min(limit, self.options.total_frames - self.counted)
        if self.options.pre_collect_hook is not None:
            self.options.pre_collect_hook()
        if not self.options.extend_buffer:
            self._put_steps(limit)
            return
        before = self.frames
        batch, hidden = self.collect(limit)
        self.counted += self.frames - before
        if self.options.post_collect_hook is not None:
            self.options.post_collect_hook(batch)
        self.outlet.put(batch, hidden)

    def rollout(self) -> TensorDict:
        """See ``Collector.rollout``."""
        limit = self.options.frames_per_batch
        if not self.options.extend_buffer:
            steps = list(self._steps(limit))
            joined: TensorDict = torch.cat(steps, steps[0].names.index("time"))
            return joined
        batch, hidden = self.collect(limit)
        if self.outlet.episodes is not None:
            self.outlet.episodes.skip(batch)
        return batch.exclude(*hidden) if hidden else batch

    def collect(self, limit: int, *, closes: bool = True) -> tuple[TensorDict, list[Any]]:
        """One rollout of every group.

        Args:
            limit: valid steps, at most.
            closes: it ends a batch.

        Returns:
            the batch, and the keys in it that are for the outlet only.
        """
        began, spans = time.perf_counter_ns(), self.timeline if self.timeline.running else None
        if spans is not None and self._ended_at:
            spans.add("wait", self._ended_at, began, OWN_TRACK)
        if not self._in_batch:
            self.acting = self.random if self.frames < (self.options.init_random_frames or 0) else self.policy
        self._in_batch = not closes
        with self.weights.acting() as version:
            for group in self.groups:
                group.version, group.spans, group.closes_batch = version, spans, closes
                group.frame_limit = limit if limit < self.num_envs * self.source.T else None
            filled = self.source.collect(self.acting, self.delivery.reused)
        batch = self.delivery.batch(filled)
        self.frames += filled.frames
        self.batches += closes
        self.episodes = filled.episodes
        self.window.add(filled.episodes)
        if self.profiler is not None:
            self.profiler.step()
        self._ended_at = time.perf_counter_ns()
        if spans is not None:
            spans.add("collect", began, self._ended_at, OWN_TRACK)
        return batch, self.delivery.hidden_keys(filled.ring.layout)

    def blank(self) -> TensorDict:
        """A batch of zeros."""
        with self.weights.acting() as version:
            for group in self.groups:
                group.version = version
            layout = dataclasses.replace(self.source.layout(self.policy), T=self.rows)
            return self.delivery.blank(layout, self.groups[0].env.device)

    def reset(self, index: Sequence[int] | int | None, kwargs: dict[str, Any]) -> None:
        """See ``Collector.reset``."""
        given = np.arange(self.num_envs) if index is None else np.atleast_1d(np.asarray(index))
        if given.dtype == bool and given.shape == (self.num_envs,):
            given = np.flatnonzero(given)
        chosen = given.tolist()
        for i in chosen:
            if type(i) is not int or not 0 <= i < self.num_envs:
                raise BadOption(f"reset(index={index}): environments are numbered 0 to {self.num_envs - 1}")
        parts = []
        for group in self.groups:
            first = int(group.clock.env_ids[0])
            inside = [i - first for i in chosen if first <= i < first + group.B]
            if len(set(inside)) < group.B and inside:
                group.env.check_partial_reset()
            parts.append((group, inside))
        for group, inside in parts:
            if inside:
                group.reset(inside)
                group.env.reset_options = kwargs or None
        if self.outlet.episodes is not None:
            self.outlet.episodes.flush(chosen)

    def set_seed(self, seed: int, *, static: bool) -> int:
        """See ``Collector.set_seed``."""
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise BadOption(f"set_seed({seed!r}): expected an integer of at least 0")
        for number, group in enumerate(self.groups):
            group.rng = GroupRng(seed, number, self.device or group.env.device)
            group.reset(seeds=[seed if static else seed + int(i) for i in group.clock.env_ids])
        if self.outlet.episodes is not None:
            self.outlet.episodes.flush()
        return seed if static else seed + self.num_envs - 1

    def stats(self) -> CollectorStats:
        env, policy, copied, total = (
            sum(getattr(group.timing, part) for group in self.groups) / 1e9
            for part in ("env", "policy", "copy", "total")
        )
        discarded: Counter[str] = Counter()
        for group in self.groups:
            discarded.update(group.discarded)
        held, dropped = self.outlet.frames_held, self.outlet.dropped
        discarded.update(dropped)
        frames = self.frames - held - sum(dropped.values())
        return CollectorStats(
            frames=frames,
            executed=sum(group.executed for group in self.groups),
            discarded=dict(discarded),
            in_flight=self.source.in_flight + held,
            batches=self.batches,
            episodes=self.window.count,
            return_mean=self.window.return_mean,
            length_mean=self.window.length_mean,
            frames_per_s=frames / total if total else 0.0,
            env_s=env,
            policy_s=policy,
            copy_s=copied,
            rest_s=max(0.0, total - env - policy - copied),
            policy_path=self.acting.path,
            policy_version=self.weights.version,
            slots=self.source.slots(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, and who acts, as plain data."""
        acting = {id(self.random): "random", id(self.policy): "policy"}.get(id(self.source.policy))
        counted = {"frames": self.frames, "counted": self.counted, "batches": self.batches}
        return {**counted, "window": self.window.state_dict(), "acting": acting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Policy and environments may be used once for it: load their state afterwards."""
        self.source.abandon("loaded")
        self.source.adopt({"random": self.random, "policy": self.policy}.get(state["acting"]))
        self.frames, self.counted, self.batches = state["frames"], state["counted"], state["batches"]
        self.window.load_state_dict(state["window"])
        self.episodes, self._in_batch = (), False

    def _put_steps(self, limit: int) -> None:
        """``extend_buffer=False``: every time step is a rollout of its own, and in the buffer before the next one."""
        assert self.outlet.sink is not None
        before = self.frames
        for step in self._steps(limit):
            self.counted, before = self.counted + self.frames - before, self.frames
            self.outlet.sink.write_frame(step.squeeze(step.names.index("time")))
        self.outlet.ready.append(None)

    def _steps(self, limit: int) -> Iterator[TensorDict]:
        for begin in range(0, limit, self.num_envs):
            end = begin + self.num_envs
            yield self.collect(min(limit - begin, self.num_envs), closes=end >= limit)[0]

    def _memory(self) -> Any:
        """Where slots lie."""
        device, storing = self.groups[0].env.device, self.options.devices["storing_device"]
        if device is not None and device.type != "cpu":
            return device
        return "pinned" if storing is not None and storing.type == "cuda" else "heap"
