"""Makes batches for a collector, and completes those that an error has interrupted."""

from __future__ import annotations

from typing import Any

from muster.compat.rlpyt.actors import RlpytActor
from muster.compat.rlpyt.buffers import store
from muster.compat.rlpyt.runner import RlpytRunner
from muster.errors import BadPolicyOutput, MusterError, PolicyError
from muster.rollout.acting import TRIED_AGAIN

DROPPED = "The batch is dropped: all environments are reset, and the next call begins another one."


class Batches:
    """Makes batches of ``T`` rows each.

    The life of a batch:

    1. ``begin``: it is under way, and has no row.
    2. ``complete`` makes its rows, then the calls of the actor that follow, and copies it to
       rlpyt's buffers.
    3. An error of the agent leaves it under way: the next ``complete`` does what is missing. So
       does Ctrl-C after the last row. An error of an environment, or Ctrl-C within a row, drops it:
       rlpyt's buffers have no mark for an episode that was broken off.
    """

    def __init__(self, runner: RlpytRunner, actor: RlpytActor, T: int) -> None:
        self.actor = actor
        self._runner = runner
        self._lane = runner.lane(actor, T)
        self._completed: list[Any] | None = None  # records; None: no batch is under way
        self._calls = 0  # of the actor, after the rows

    @property
    def is_under_way(self) -> bool:
        """Whether an error has interrupted a batch, which the next ``complete`` completes."""
        return self._completed is not None

    def begin(self, traj_infos: list[Any]) -> None:
        """Begin a batch, with the records of the running episodes."""
        completed: list[Any] = []
        self._lane.restart()
        self._calls = 0
        self._runner.envs.record(traj_infos, completed.append)
        self._completed = completed  # at last: Ctrl-C can come before

    def complete(self, samples: Any, itr: int) -> list[Any]:
        """Complete the batch under way in ``samples``; returns the records of episodes that ended.

        Raises:
            MusterError: its message says what becomes of the batch.
        """
        completed = self._completed
        assert completed is not None
        lane = self._lane
        runner = self._runner
        try:
            self.actor.begin(itr)
            if not self._has_all_rows:
                runner.run(self.actor, lane, goes_on=True)
            with runner.group.contexts.usual:
                self._call_further(getattr(samples.agent, "bootstrap_value", None))
        except BaseException as error:
            if runner.is_lost:
                self._completed = None
                explain(error, DROPPED)
            elif issubclass(type(error), (PolicyError, BadPolicyOutput)):
                explain(error, TRIED_AGAIN)
            raise
        store(lane, samples)
        self._completed = None
        return completed

    @property
    def _has_all_rows(self) -> bool:
        return self._lane.done_steps > 0 and self._runner.group.open is None

    def _call_further(self, value: Any) -> None:
        """Make the calls of the actor for the rows in which all environments wait, and conclude."""
        lane = self._lane
        last = self.actor.last_inputs(lane)
        while lane.done_steps + self._calls < lane.T:
            self.actor.ask(last, lane.done_steps + self._calls)
            self._calls += 1
        self.actor.conclude(last, value)


def explain(error: BaseException, consequence: str) -> None:
    """Put what follows for the caller at the end of the message of one of Muster's errors."""
    if isinstance(error, MusterError):
        error.end_with(consequence)
