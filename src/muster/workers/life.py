"""The life of a worker or node: its states, its restarts, and its signs of life.

1. NEW: it was never started.
2. JOINING: a node was called, and has not made its environments. A worker skips this state.
3. RUNNING: it has a process, thread or session.
4. DEAD: it was lost, or could not be started; see ``Life.cause``. What follows is its fate
   (``muster.workers.fates``): RESTARTING, DROPPED, or the next batch starts it again.
5. RESTARTING: its pool starts it again at ``Life.restart_at``, from DEAD.
6. DROPPED: the others go on without it, for good.
7. CLOSING, CLOSED: it was asked to close its environments, and has ended.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# seconds before a restart, by number of restarts since the last complete rollout
BACK_OFF = (0.0, 0.1, 0.5, 2.0)
FRUITLESS = 3  # maximum of restarts since the last complete rollout


class WorkerState(enum.Enum):
    """The state of a worker or node; see the diagram in ARCHITECTURE.md."""

    NEW = "was never started"
    JOINING = "was called: a node that has not made its environments"
    RUNNING = "has a process or thread"
    CLOSING = "the same, and was told to end"
    DEAD = "has none; the next batch starts it again"
    RESTARTING = "has none; its pool starts it again"
    DROPPED = "has none, and the others go on without it"
    CLOSED = "has none, for good"


_STATES = WorkerState
_NEXT: dict[WorkerState, tuple[WorkerState, ...]] = {
    _STATES.NEW: (_STATES.JOINING, _STATES.RUNNING),
    _STATES.JOINING: (_STATES.RUNNING, _STATES.DEAD),
    _STATES.RUNNING: (_STATES.DEAD, _STATES.CLOSING),
    _STATES.CLOSING: (_STATES.CLOSED,),
    _STATES.DEAD: (
        _STATES.JOINING,
        _STATES.RUNNING,
        _STATES.RESTARTING,
        _STATES.DROPPED,
    ),
    _STATES.RESTARTING: (_STATES.DEAD,),
    _STATES.DROPPED: (),
    _STATES.CLOSED: (),
}
ALIVE = (_STATES.JOINING, _STATES.RUNNING, _STATES.CLOSING)


class Life:
    """The state, the restarts and the signs of life of one worker or node.

    Args:
        name: of the worker or node, for assertions.
        on_change: called after each change of the state.

    Attributes:
        state: the present state.
        starts: number of starts that have succeeded.
        cause: error with which it was lost last.
        restart_at: time (``time.monotonic``) of the next restart; None: none is planned.
    """

    def __init__(self, name: str, on_change: Callable[[], None]) -> None:
        self._name = name
        self._on_change = on_change
        self.state = WorkerState.NEW
        self.starts = 0
        self.cause: Exception | None = None
        self.restart_at: float | None = None
        self._restarts: deque[float] = deque()  # times within the last minute
        self._fruitless = 0  # number of restarts since the last complete rollout
        # time of the first of the last starts that failed; None: the last did not
        self._failing_since: float | None = None
        self._signs: Any = ()  # the last signs of life
        self._signs_since = 0.0  # time of their last change

    # --- states -----------------------------------------------------------------------------------

    def become(self, state: WorkerState) -> None:
        """Change the state."""
        self.check_next(state)
        self.state = state
        self._on_change()

    def check_next(self, state: WorkerState) -> None:
        """Check that a state may follow on the present one."""
        assert state in _NEXT[self.state], (
            f"{self._name}: {self.state.name} -> {state.name}"
        )

    def has_started(self, state: WorkerState) -> None:
        """Note that a start has succeeded so far, in this state."""
        self.starts += 1
        self.become(state)

    def is_lost(self, cause: Exception) -> None:
        """Note the error with which it was lost, or could not be started."""
        self.cause = cause

    # --- restarts ---------------------------------------------------------------------------------

    def could_start(self) -> None:
        """Note that the last start did not fail."""
        self._failing_since = None

    def could_not_start(self, cause: Exception) -> None:
        """Note that a start has failed, with this reason."""
        self._failing_since = self._failing_since or time.monotonic()
        self.is_lost(cause)

    def has_failed_for(self, seconds: float | None) -> bool:
        """Return whether every start in the last ``seconds`` (None: for ever) has failed, and there
        was one.
        """
        since = self._failing_since
        return (
            since is not None
            and seconds is not None
            and time.monotonic() - since > seconds
        )

    def may_restart(self, most: int | None) -> bool:
        """Return whether the budget of ``most`` per minute allows one more restart, and if so,
        count it.
        """
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - 60:
            self._restarts.popleft()
        spent = len(self._restarts)
        if most is not None and (spent >= most or self._fruitless >= FRUITLESS):
            return False
        self._restarts.append(now)
        self._fruitless += 1
        return True

    def has_completed(self) -> None:
        """Note a complete rollout: the restarts before it were not in vain."""
        self._fruitless = 0

    def plan_restart(self) -> None:
        """Set the time of the next restart."""
        level = min(self._fruitless, len(BACK_OFF)) - 1
        self.restart_at = time.monotonic() + BACK_OFF[level]

    def begin_restart(self) -> None:
        """Note that the planned restart begins."""
        self.restart_at = None
        self.forget_signs()

    # --- signs of life ----------------------------------------------------------------------------

    def forget_signs(self) -> None:
        """Let the deadline of the present phase begin again."""
        self._signs = ()

    def excuse(self, seconds: float) -> None:
        """Take so many seconds out of the silence: this process could not look."""
        self._signs_since += seconds

    def silent_for(self, signs: Any) -> float:
        """Return the seconds since the last change of the signs of life."""
        now = time.monotonic()
        if signs != self._signs:
            self._signs = signs
            self._signs_since = now
        return now - self._signs_since
