"""An env batch that adds entries to the rows of another env batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.capabilities import Bypasses, CountsSteps, Wraps, capability
from muster.env_spec import EnvSpec
from muster.keys import Key
from muster.memory.slots import Lane
from muster.protocols import EnvBatch, Step


class WrappedEnvs(Wraps, CountsSteps):
    """Implements ``EnvBatch`` by delegating to ``inner``; ``spec`` describes both together.

    Derived classes write after each step (``after_step``) and reset.
    """

    def __init__(self, inner: EnvBatch, spec: EnvSpec) -> None:
        self.inner = inner
        self.spec = spec
        self._bypassing = capability(inner, Bypasses)
        self._counting = capability(inner, CountsSteps)
        self._executed: int | None = None  # None: as many as ``inner`` counts

    @property
    def bypassed(self) -> Collection[int]:
        """The environments that are not stepped."""
        return () if self._bypassing is None else self._bypassing.bypassed

    def store_as(self, spec: EnvSpec) -> None:
        super().store_as(spec)
        own = self.inner.spec
        observed = {key: spec.observation_specs[key] for key in own.observation_specs}
        self.inner.store_as(
            replace(
                own,
                batch_shape=spec.batch_shape,
                observation_specs=observed,
                action_specs=spec.action_specs,
            )
        )

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        self.inner.reset(arrays, row, which, seeds)

    def start(self, lane: Lane) -> Step:
        step = self.inner.start(lane)
        note = self.after_step(lane)

        def step_and_note(t: int) -> Sequence[int] | None:
            finished = step(t)
            try:
                note(t)
            except BaseException:  # also Ctrl-C; the step was made
                self._executed = self.spec.num_envs - len(self.bypassed)
                raise
            return finished

        return step_and_note

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        """Return a function to call with row ``t`` after its step."""
        raise NotImplementedError

    def take_executed(self) -> int:
        counted = 0 if self._counting is None else self._counting.take_executed()
        executed = counted if self._executed is None else self._executed
        self._executed = None
        return executed

    def objects(self) -> Sequence[object]:
        return self.inner.objects()

    def close(self) -> None:
        self.inner.close()
