"""The messages between a proxy and its worker or node, and the records in them; the data itself
stays in the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from muster.episodes.record import Episodes
from muster.keys import Key
from muster.memory.specs import Array
from muster.observing.stats import CaptureStats
from muster.restore.pickling import Sealed, opened
from muster.rollout.marks import Final
from muster.rollout.request import Seal
from muster.rollout.tally import Timing

if TYPE_CHECKING:
    from muster.workers.failures import SentError


@dataclass
class RolloutResult:
    """The result of a rollout request. Counts are of this request alone.

    Attributes:
        frames, rows: number of valid steps, and of time steps with valid steps; 0 unless the
            rollout is complete.
        executed: number of environment steps.
        discarded: number of environment steps that are in no batch, by reason.
        finals, steps_before: see ``RolloutOutcome``.
        clock: episode numbers, and steps since the starts of these episodes, ``[2, B]``, or
            ``[2, B * agents]`` where agents take turns.
        objects: columns of Python objects by key, of a complete rollout from a worker in a process
            or thread of its own; in transit from a process a ``Sealed``, like ``finals`` and
            ``values`` beside it.
        values: values of next observations, if the request has ``bootstrap``.
        error: error that interrupted the rollout (in transit, a ``SentError``); the same request
            continues the rollout.
        phase: phase that the error interrupted.
        paused: the rollout goes on after its last row as if nothing had happened: Ctrl-C was
            raised between two rows.
        left_out: some environments made no steps in some rows.
        lost: the rollout was not completed, and has to be requested again.
        dropped: the group is dropped.
        warnings: texts of warnings since the last result, to be issued in the user's process.
        unfinished: a signal has terminated the worker; the request is still under way.
        capture: statistics of the group's graphs; None: its rollouts are not recorded.
    """

    number: int
    group: int
    frames: int = 0
    rows: int = 0
    done_steps: int = 0
    executed: int = 0
    discarded: Mapping[str, int] = field(default_factory=dict)
    version: int | str = 0
    timing: Timing = field(default_factory=Timing)
    episodes: Episodes | None = None
    finals: Sequence[Final] = ()
    clock: Array | None = None
    objects: Any = field(default_factory=dict)
    values: Any = None
    spans: Sequence[Any] = ()
    anchors: Any = None
    path: str = ""
    error: Any = None
    phase: str = ""
    paused: bool = False
    left_out: bool = False
    lost: bool = False
    dropped: bool = False
    warnings: Sequence[str] = ()
    unfinished: bool = False
    capture: CaptureStats | None = None
    steps_before: Array | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without field names, in about half of the time."""
        return RolloutResult, tuple(vars(self).values())


def seal_objects(
    result: RolloutResult, objects: Mapping[Key, Array], seal: Seal
) -> RolloutResult:
    """Return a result with columns of Python objects, for its way to another process.

    Raises ``BadOption`` if ``seal`` does; see ``Channel.sealed``.
    """
    return replace(
        result,
        objects=seal(objects, "the objects of rows"),
        finals=seal(result.finals, "the last observations"),
        values=seal(result.values, "the observations to be valued"),
    )


def open_objects(result: RolloutResult) -> RolloutResult:
    """Return a result with what ``seal_objects`` has sealed.

    Raises ``BadOption`` if it cannot be unpickled here.
    """
    if not isinstance(result.objects, Sealed):
        return result
    return replace(
        result,
        objects=opened(result.objects, "an object of a row"),
        finals=opened(result.finals, "an object of a last observation"),
        values=opened(result.values, "an object of an observation"),
    )


@dataclass(frozen=True)
class WorkerStatus:
    """The process of a worker; see ``WorkerStats``."""

    pid: int
    state: str
    phase: str
    restarts: int


# numbers of a worker's first and last answers: its groups are made; its environments are closed
BIRTH = 0
CLOSED = -1


@dataclass(frozen=True)
class Tell:
    """A call of a method of the main loop of a worker (``WorkerMain``) or node (``NodeMain``).

    Attributes:
        number: number of the answer; 0: no answer.
        urgent: a node makes the call also while it waits for workers.
    """

    method: Callable[..., Any]
    args: tuple[Any, ...] = ()
    number: int = 0
    urgent: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to the ``Tell`` with this number: a failure, or a value, which is a ``Sealed`` in
    transit.
    """

    number: int
    value: Any = None
    failure: SentError | None = None
