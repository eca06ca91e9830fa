"""An env batch that adds entries to the rows of another env batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from muster.env_spec import EnvSpec
from muster.memory.slots import Lane
from muster.protocols import EnvBatch, Step


class WrappedEnvs:
    """Implements ``EnvBatch`` by delegating to ``inner``, whose attributes are read and set.

    Derived classes write after each step (``after_step``) and reset; ``bypassed`` environments are
    not stepped.
    """

    inner: EnvBatch
    spec: EnvSpec
    bypassed: Sequence[int]

    def __init__(self, inner: EnvBatch, spec: EnvSpec) -> None:
        self.__dict__.update(inner=inner, spec=spec, bypassed=[])  # bypasses ``__setattr__``

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def store_as(self, spec: EnvSpec) -> None:
        self.__dict__["spec"] = spec

    def bypass(self, which: Collection[int]) -> None:
        self.__dict__["bypassed"] = list(which)
        self.inner.bypass(which)

    def start(self, lane: Lane) -> Step:
        step, note = self.inner.start(lane), self.after_step(lane)

        def step_and_note(t: int) -> Sequence[int] | None:
            finished = step(t)
            try:
                note(t)
            except BaseException:  # also Ctrl-C; the step was made
                self.executed_in_row = self.spec.num_envs - len(self.bypassed)
                raise
            return finished

        return step_and_note

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        """Return a function to call with row ``t`` after its step."""
        raise NotImplementedError


def innermost(env: Any) -> EnvBatch:
    """Return the env batch inside all ``WrappedEnvs``."""
    while isinstance(env, WrappedEnvs):
        env = env.inner
    inner: EnvBatch = env
    return inner
