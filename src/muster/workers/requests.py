"""The requests to workers, other than for rollouts: records, which name no behaviour.

What a request does is decided where its effect is: in the worker, on the place of the worker's
successors, on crash reports, and on the inference server. See ``muster.workers.effects``, which has
a function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.keys import Key
from muster.memory.specs import ArraySpec, Column
from muster.restore.pickling import dumps, loads


class Request:
    """A request to a worker, other than for a rollout."""


@dataclass(frozen=True)
class Call(Request):
    """Call a method of ``Worker``, or a function with a worker as its first argument."""

    method: Callable[..., Any]
    args: Sequence[Any] = ()


@dataclass(frozen=True)
class ServedOutputs:
    """What the policy of an inference server writes.

    Attributes:
        columns: columns besides actions.
        actions: specs of actions that are not as the environments' specs.
    """

    columns: Sequence[Column] = ()
    actions: Mapping[Key, ArraySpec] = field(default_factory=dict)


@dataclass(frozen=True)
class LayOut(Request):
    """Prepare the next rollouts; the answer has their layouts by group."""

    policy: str  # "policy" or "random"
    T: Mapping[int, int]  # number of time steps, by group
    # of the weights; None: the worker sets it when it takes the weights
    version: int | str | None = None
    served: ServedOutputs | None = None  # None: there is no inference server
    grad: bool = False  # the policy makes its first call with gradients enabled


@dataclass(frozen=True)
class Seed(Request):
    """See ``Worker.seed``."""

    seed: int | Sequence[int] | None  # a list has one for each environment
    static: bool


@dataclass(frozen=True)
class Reset(Request):
    """Reset environments, by group, before the next step."""

    which: Mapping[int, Sequence[int]]
    options: dict[str, Any] | None = None
    # do not reset; raise ``UnsupportedEnv`` if a group cannot reset only some environments
    check: bool = False


@dataclass(frozen=True)
class Profile(Request):
    """See ``Worker.profile``.

    Pickling raises ``BadOption`` if the user's function cannot be pickled.
    """

    config: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _profile, (dumps(self.config, "on_trace_ready"),)


def _profile(config: bytes) -> Profile:
    return Profile(loads(config, "on_trace_ready"))


@dataclass(frozen=True)
class TakeState(Request):
    """See ``Worker.state``."""


@dataclass(frozen=True)
class LoadState(Request):
    """See ``Worker.load``."""

    states: Mapping[int, Mapping[str, Any]]
    cut: str | None
    trust: bool


@dataclass(frozen=True)
class MarkResumed(Request):
    """Add the column of resumed episodes to all groups, because one of them has it after a load."""


# An absent node is not sent these: it gets their effect with its ``WorkerPlace`` when it joins.
NOT_FOR_ABSENT = (Seed, Reset, Profile)
