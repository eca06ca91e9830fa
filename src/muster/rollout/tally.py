"""The counts and times of one rollout request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """Nanoseconds by kind of work; those of environment and policy are extrapolated from timed
    steps.
    """

    env: float = 0.0
    policy: float = 0.0
    copy: float = 0.0
    total: float = 0.0


class Spans:
    """The spans of one rollout, for the timeline."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int, int, int]] = []

    def add(self, name: str, begin_ns: int, end_ns: int, track: int = 0) -> None:
        """Add a span; ``track`` is the number of the group's first environment."""
        self.kept.append((name, begin_ns, end_ns, track))


class Tally:
    """Counts and times of one request, also if an error cuts its rollout short.

    A rollout that continues after an error has another request, and so another tally.

    Attributes:
        executed: number of environment steps.
        discarded: number of environment steps that are in no batch, by reason.
        spans: spans for the timeline; None: none are recorded.
        env_ns, policy_ns, copy_ns, total_ns: see ``Timing``.
    """

    def __init__(self, *, spans: bool = False) -> None:
        self.executed = 0
        self.discarded: dict[str, int] = {}
        self.spans = Spans() if spans else None
        self.env_ns = 0.0
        self.policy_ns = 0.0
        self.copy_ns = 0.0
        self.total_ns = 0.0

    def execute(self, steps: int, env_ns: float = 0.0, policy_ns: float = 0.0) -> None:
        """Count executed steps, and the time that environments and policy took for them."""
        self.executed += steps
        self.env_ns += env_ns
        self.policy_ns += policy_ns

    def discard(self, reason: str, steps: int) -> None:
        """Count steps that are in no batch."""
        if steps:
            self.discarded[reason] = self.discarded.get(reason, 0) + steps

    def add_reset(self, env_ns: float) -> None:
        """Add the time of a reset."""
        self.env_ns += env_ns

    def add_rollout(self, copy_ns: float, total_ns: float) -> None:
        """Add the time in which columns were completed, and that of the whole rollout."""
        self.copy_ns += copy_ns
        self.total_ns += total_ns
