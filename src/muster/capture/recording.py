"""Rollouts of a group as recorded graphs: when one is recorded, trusted, replayed and given up.

The life of a lane's graph, for one policy:

1. The first rollout that fills the lane runs row by row.
2. The second one, too, and is a *trial* around it. Before it, the state is saved: tensors of
   environments and policy, generators, the lane. It must not change anything that only Python can
   (``compare``). A further rollout runs row by row after it; it is the warming up as well.
3. The state is set back, and the same steps are recorded (``Graph``), with the completion of the
   rows, if that is done on the device (``Completion``), and with the copies into the held tensors
   (``HeldState``) as the last operations. The graph is replayed twice in a row and must give
   the same bits as the two rollouts: all columns of the lane, all tensors, all generators.
4. Then everything is set to what it was after the first of the two rollouts, which is the one that
   counts: nothing of the trial is visible, whether it has succeeded or not.
5. From then on, rollouts of the lane are replays, if they make all rows, with nothing to do between
   two rows, the same functions of policy and environments, and an unchanged Python state. All other
   rollouts run row by row. What resets and loads of saved states leave between them is taken over
   (``replacing``).
6. The graph is in ``lane.cache``: it goes when the lane goes, or when the lanes' views are made
   again. ``MOST_GRAPHS`` bounds their number.

A reason that cannot pass (``refuse``) ends this: all rollouts run row by row. With ``capture=True``
it is raised as ``CaptureRefused``, after the rollout that showed it, whose rows are complete.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from muster.capabilities import MayWait, capability
from muster.capture.graph import Graph, GraphPool, default_generator
from muster.capture.held import HeldState, Unlike
from muster.capture.left import Left
from muster.capture.modes import difference, modes
from muster.capture.state import Changes, Contents, Survey, compare, same_bits
from muster.capture.walk import survey
from muster.errors import BadOption, CaptureRefused, described
from muster.keys import dotted
from muster.memory.slots import Lane
from muster.observing.stats import CaptureStats
from muster.protocols import Act, EnvBatch, Policy, Step
from muster.rng import global_streams
from muster.rollout.context import runs_beside_user
from muster.rollout.on_device import Completion
from muster.rollout.running import Prepared, Rollout

Capture = Literal["auto"] | bool
MOST_GRAPHS = 8  # of a group
MOST_POLICIES = 4  # whose state is held
MOST_TRIES = 3  # for a reason that may pass: attributes that the first rollouts make, new functions
FILLED = "filled once"  # in place of a graph, in ``lane.cache``
PAYS = 4  # replays that make up for a recording
BESIDE = (
    "a background thread shares the process's random generators with your thread, which could not"
    " use them during a recording. start() makes batches in your thread until rollouts are recorded,"
    " and those of this policy were not"
)
MOST_SURVEYED = 16  # times around resets before anything is recorded
UNUSED = 4 * MOST_GRAPHS  # replays of others after which a graph makes room

_log = logging.getLogger("muster.capture")


class _Unequal(Exception):
    """A trial has shown that the graph cannot be used."""


@dataclass(eq=False)
class RecordedRollout:
    """A graph of a lane, and what it was recorded with."""

    graph: Graph
    held: HeldState
    act: Act
    step: Step
    completes: bool  # the rows, too
    modes: dict[str, Any]  # of torch
    used: int  # number of the group's replays when it was replayed last


class GraphRecorder:
    """Records the rollouts of one group, and replays them; see the life of a graph above.

    Args:
        env: env batch of the group.
        pool: makes the graphs; None: no rollout can be recorded.
        device: device of rows and environments.
        mode: True: a reason against recording is raised.
        lose: called if a trial may have left environments in another state, which Python cannot
            see: they must be reset.
    """

    def __init__(
        self,
        env: EnvBatch,
        pool: GraphPool | None,
        device: torch.device,
        mode: Capture,
        lose: Callable[[], None],
    ) -> None:
        self._env = env
        self._waiting = capability(env, MayWait)
        self._pool = pool
        self._device = device
        self._mode = mode
        self._lose = lose
        self._held: dict[Policy, HeldState] = {}
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left = Left()
        self._surveyed = 0  # times around resets since something was recorded
        self._refused = ""
        self._tries = 0
        self._unlike = 0  # rollouts since the last replay that could not begin with one
        self._replays = 0
        self._recorded = 0

    def stats(self) -> CaptureStats:
        """Return what has happened so far."""
        state: Literal["waiting", "replaying", "refused"] = "waiting"
        if self._refused:
            state = "refused"
        elif self._replays:
            state = "replaying"
        nbytes = 0 if self._pool is None else self._pool.nbytes
        return CaptureStats(
            state, self._refused, len(self._graphs), self._replays, nbytes
        )

    def run(
        self, running: Rollout, prepared: Prepared, by_rows: Callable[[], None]
    ) -> None:
        """Fill the rest of the lane, by a replay or by ``by_rows``.

        Raises:
            CaptureRefused: see ``refuse``.
        """
        lane = running.lane
        key = (self, prepared.policy)
        found = lane.cache.get(key)
        if self._refused or not self._is_whole(running):
            if running.request.rule is None:
                by_rows()
            else:
                with self.replacing():  # the host resets environments between two rows
                    by_rows()
            lane.cache.setdefault(key, FILLED)
            return
        if isinstance(found, RecordedRollout):
            if found.completes != (running.completion is not None):
                by_rows()  # options of this request need the host
                return
            try:
                stale = self._staleness(found, prepared)
            except Unlike as error:
                by_rows()
                self._note_unlike(str(error))
                return
            if not stale:
                self._replay(found, running)
                return
            lane.cache[key] = FILLED
            self._release(found)
            self._note_try(stale)
        if found is None or self._refused or not self._has_room():
            by_rows()
            lane.cache[key] = FILLED
        elif runs_beside_user() and prepared.policy in self._held:
            by_rows()  # other lanes have its graphs
        elif hindrance := self._present_hindrance():
            by_rows()
            self._give_up(running, prepared, hindrance)
        else:
            self._try(running, prepared, by_rows)

    @contextmanager
    def replacing(self, *, loaded: bool = False) -> Iterator[None]:
        """Environments are reset meanwhile, or a state is ``loaded``: what they leave is theirs.

        If this cannot be known, what they have replaced makes a graph be recorded again.
        """
        before = self._survey_envs()
        yield
        if before is not None:
            after = self._survey_envs()
            if after is not None:
                self._left.note(before, after, loaded=loaded)

    def _survey_envs(self) -> Survey | None:
        """Return the present state of the environments; None: it is not known, or of no use."""
        if self._refused:
            return None
        for held in self._held.values():
            if held.found.has_its_entries:
                return held.found
        if not self._held:
            self._surveyed += 1
            if self._surveyed > MOST_SURVEYED:
                return None
        try:
            return survey(self._env_roots(), self._device)
        except Exception:  # noqa: BLE001 (of objects that cannot be looked at; a trial says which)
            self._left.forget()
            return None

    def _present_hindrance(self) -> str:
        """Return why no rollout can be recorded that was not known before the first one."""
        if runs_beside_user():
            return BESIDE
        return "" if self._waiting is None else self._waiting.why_waiting

    def _staleness(self, found: RecordedRollout, prepared: Prepared) -> str:
        """Return why a graph cannot be replayed now; "" if it can."""
        policy = prepared.policy
        if found.act is not prepared.act or found.step is not prepared.step:
            return (
                f"{policy.name} or {self._env.spec.name} computes by another function"
            )
        changed = difference(found.modes, modes(self._device))
        if changed:
            return changed
        if found.held is not self._held.get(policy):
            return "the state has other memory"
        stale = found.held.take_in(self._roots(policy), self._left)
        if stale:
            del self._held[policy]
        return stale

    def _is_whole(self, running: Rollout) -> bool:
        """Whether a rollout makes all rows that are left without anything between two rows."""
        lane = running.lane
        request = running.request
        return (
            lane.done_steps == lane.acts_from == 0
            and lane.acts_until == lane.T
            and not request.grad
            and request.rule is None
            and running.next_call(0) >= lane.T
        )

    def _replay(self, found: RecordedRollout, running: Rollout) -> None:
        lane = running.lane
        completion = running.completion
        if completion is not None:
            completion.begin()
        found.graph.replay()
        if completion is not None:
            completion.end()
        self._replays += 1
        self._unlike = 0
        found.used = self._replays
        lane.complete(lane.T)
        running.tally.execute(lane.T * lane.B, 0.0, 0.0)

    def _has_room(self) -> bool:
        """Whether another graph may be recorded; releases one that is not used any more."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._graphs, key=lambda found: found.used)
        if oldest.used + UNUSED > self._replays:
            return False
        self._release(oldest)
        return True

    def _release(self, found: RecordedRollout) -> None:
        self._graphs.discard(found)
        found.graph.release()

    def _note_try(self, reason: str) -> None:
        """Count a graph that could not be replayed; too many of them are a reason to refuse."""
        self._tries += 1
        if self._tries > MOST_TRIES and self._replays < PAYS * self._tries:
            self.refuse(f"{reason}, again and again")

    def _note_unlike(self, reason: str) -> None:
        """Count a rollout that ran row by row for what was there before it."""
        self._unlike += 1
        if self._unlike > MOST_TRIES:
            self.refuse(f"{reason} before each rollout, and not after it")

    def refuse(self, reason: str, *, is_news: bool = True) -> None:
        """Record nothing from now on, and log the reason with "auto" if it ``is_news``."""
        self._refused = reason
        for found in list(self._graphs):
            self._release(found)
        self._held.clear()
        self._left.forget()
        if is_news and self._mode == "auto":
            _log.warning("capture: rollouts run row by row: %s", reason)

    # --- recording --------------------------------------------------------------------------------

    def _roots(self, policy: Policy) -> Mapping[str, Any]:
        return {**self._env_roots(), "policy": policy}

    def _env_roots(self) -> dict[str, Any]:
        roots: dict[str, Any] = {}
        objects = self._env.objects()
        for number, env in enumerate(objects):
            roots["env" if len(objects) == 1 else f"env[{number}]"] = env
        roots["adapter"] = self._env
        return roots

    def _try(
        self, running: Rollout, prepared: Prepared, by_rows: Callable[[], None]
    ) -> None:
        """Run a rollout row by row, and record it if it can be repeated by a graph."""
        lane = running.lane
        completion = running.completion
        try:
            trial = Trial(self._roots(prepared.policy), self._device, lane, completion)
        except Exception as error:  # noqa: BLE001 (of objects that cannot be looked at or copied)
            by_rows()
            self._give_up(running, prepared, described(error))
            return
        by_rows()
        if lane.done_steps < lane.T or lane.stopped:
            return
        problem = trial.look()
        settles = trial.settles
        if not problem:
            assert self._pool is not None
            held = self._held.get(prepared.policy)
            try:
                found = trial.record(self._pool.graph(), prepared, held, self._left)
            except _Unequal as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001 (of the user's code, or of the device)
                problem = described(error)
            else:
                self._held.pop(prepared.policy, None)
                while len(self._held) >= MOST_POLICIES:
                    del self._held[next(iter(self._held))]
                self._held[prepared.policy] = found.held
                self._surveyed = 0
                lane.cache[self, prepared.policy] = found
                self._graphs.add(found)
                return
        if problem and trial.may_have_moved:
            hidden = ", ".join(sorted(set(trial.opaque.values()))[:4])
            problem += (
                f". Python cannot see the state of {hidden}: all environments are reset before the"
                " next rollout"
            )
            self._lose()
        if settles and self._tries < MOST_TRIES:
            self._tries += 1
            return
        self._give_up(running, prepared, problem)

    def _give_up(self, running: Rollout, prepared: Prepared, problem: str) -> None:
        """Record nothing from now on, after a rollout whose rows are complete.

        Raises:
            CaptureRefused: with ``capture=True``.
        """
        self.refuse(problem)
        if self._mode is True:
            running.pause(prepared)
            raise CaptureRefused(
                f"{self._env.spec.name}: capture=True, but a rollout cannot be recorded as a graph:"
                f" {problem}. The rows are not lost: the next call returns them, and all further"
                " rollouts run row by row. Change this, or pass capture='auto' or leave it out."
            )


class Trial:
    """One rollout row by row, and the recording of the same.

    ``look`` comes after the rollout, then ``record``.

    Args:
        completion: completes the rows on the device; None: the host does.

    Attributes:
        settles: what ``look`` has found may pass after the first rollouts.
        may_have_moved: Python's code of the environments was executed again, and they have state
            that cannot be set back.
        opaque: types of objects that cannot be looked into, by path.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        device: torch.device,
        lane: Lane,
        completion: Completion | None,
    ) -> None:
        self._completion = completion
        if completion is not None:
            completion.begin()
        self._roots = roots
        self._device = device
        self._lane = lane
        self._before = survey(roots, device)
        self._generators = [
            default_generator(device),
            *self._before.generators.values(),
        ]
        self._start = self._contents(self._before.tensors)
        assert isinstance(lane.block, torch.Tensor)
        self._block: torch.Tensor = lane.block
        self._block_before = lane.block.clone()
        self._streams = _host_streams(device)
        self._after: Survey | None = None
        self._changes = Changes()
        self.settles = False
        self.may_have_moved = False
        self.opaque = self._before.opaque

    def look(self) -> str:
        """Return why the rollout that was just made cannot be recorded; "" if nothing says so."""
        try:
            after = survey(self._roots, self._device)
        except Exception as error:  # noqa: BLE001 (see ``GraphRecorder``)
            return described(error)
        changes = compare(self._before, after)
        self.settles = changes.settles
        if changes.problem:
            return changes.problem
        if _host_streams(self._device) != self._streams:
            return "environments or policy draw random numbers on the host"
        self._after = after
        self._changes = changes
        return ""

    def record(
        self, graph: Graph, prepared: Prepared, held: HeldState | None, left: Left
    ) -> RecordedRollout:
        """Record the rollout, and compare two replays with it and the one after it.

        Afterwards, the state is that after the rollout, whatever happens.

        Raises:
            _Unequal: the graph does something else.
            Exception: recording has failed.
        """
        after = self._after
        assert after is not None
        counted = self._contents(after.tensors)
        block = self._block.clone()
        tensors = after.tensors
        try:
            if held is None or not self._is_held_by(held, left):
                held = HeldState(
                    self._roots, self._device, self._changes, self._block, left
                )
            if self._completion is not None:
                self._completion()
            first = self._contents(after.tensors), self._block.clone()
            found = self._record(graph, prepared, held, first)
            tensors = held.tensors
        except BaseException:
            after.set_back()
            with suppress(Exception):  # of a graph that was not recorded to its end
                graph.release()
            raise
        finally:
            counted.load(self._with_clock(tensors), besides=self._block)
            self._block.copy_(block)
        return found

    def _record(
        self,
        graph: Graph,
        prepared: Prepared,
        held: HeldState,
        first: tuple[Contents, torch.Tensor],
    ) -> RecordedRollout:
        lane = self._lane
        completion = self._completion
        act = prepared.act
        step = prepared.step

        def by_rows() -> None:
            for t in range(lane.T):
                act(t)
                step(t)
            if completion is not None:
                completion()

        # a second rollout, after the first one
        self._next_rollout()
        held.copy_back(held.look())
        held.set_back()
        self.may_have_moved = bool(self.opaque)
        graph.warm_up(by_rows)
        now = held.look()
        self._check_values(held, now)
        second = self._contents(_of(held, now)), self._block.clone()
        # both, recorded
        held.set_back()
        self._start.load(self._with_clock(held.tensors))
        self._block.copy_(self._block_before)

        def recorded() -> None:
            by_rows()
            now = held.look()
            self._check_values(held, now)
            held.copy_back(now)

        try:
            graph.record(recorded, self._generators[1:])
        finally:
            held.set_back()
            self._start.load(self._with_clock(held.tensors))
            self._block.copy_(self._block_before)
        for number, (contents, block) in enumerate((first, second), 1):
            if number == 2:
                self._next_rollout()
            graph.replay()
            self._compare(held, contents, block, number)
        return RecordedRollout(
            graph, held, act, step, completion is not None, modes(self._device), 0
        )

    def _is_held_by(self, held: HeldState, left: Left) -> bool:
        """Make the tensors of another graph the present state; return whether they can be."""
        try:
            return not held.take_in(self._roots, left)
        except Unlike:
            return False

    def _contents(self, tensors: Mapping[str, torch.Tensor]) -> Contents:
        """Return the contents of tensors, of generators, and of the clock."""
        return Contents(self._with_clock(tensors), self._generators)

    def _with_clock(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return tensors, and those of the clock that completes rows."""
        if self._completion is None:
            return tensors
        return {**tensors, **self._completion.tensors}

    def _next_rollout(self) -> None:
        """Write the rows for the next step into row 0, as at the beginning of a rollout."""
        lane = self._lane
        for column in lane.layout.columns:
            if column.carry:
                rows = lane.tensors[column.key]
                rows[0].copy_(rows[lane.T])

    def _check_values(self, held: HeldState, now: Survey) -> None:
        problem = compare(held.found, now).problem or held.unlike(now)
        if problem:
            held.set_back()
            raise _Unequal(problem)

    def _compare(
        self, held: HeldState, contents: Contents, block: torch.Tensor, number: int
    ) -> None:
        lane = self._lane
        differing = [
            dotted(column.key)
            for column in lane.layout.tensor_columns
            if not same_bits(
                _part(lane, column.key, self._block), _part(lane, column.key, block)
            )
        ]
        differing += contents.differences(self._with_clock(held.tensors))
        if differing:
            raise _Unequal(
                f"replay {number} of the recorded rollout differs from a rollout row by row in"
                f" {', '.join(differing[:6])}"
            )


def _of(held: HeldState, now: Survey) -> dict[str, torch.Tensor]:
    """Return the present tensors at the paths of the held ones."""
    return {path: now.tensors[path] for path in held.tensors}


def _part(lane: Lane, key: Any, block: torch.Tensor) -> torch.Tensor:
    start = lane.layout.offsets[key]
    return block[start : start + lane.tensors[key].nbytes]


def _host_streams(device: torch.device) -> dict[str, Any]:
    """Return the states of the process's generators in host memory; the default one of ``device``
    is recorded.
    """
    states = global_streams()
    if device.type == "cpu":
        states.pop("torch", None)
    return states


def hindrance(env: EnvBatch, kinds: Mapping[str, Any], between: str = "") -> str:
    """Return why no rollout of an env batch can be recorded; "" if nothing says so.

    Args:
        kinds: the kinds of graphs, by type of device.
        between: see ``recorder_for``.
    """
    if between:
        return f"{between} needs Python between two steps"
    device = env.spec.device
    if device is None:
        return (
            f"the rows of {env.spec.name} are in host memory. Only environments whose tensors and"
            " rows are on a device can be recorded"
        )
    if device.type not in kinds:
        return f"there are no graphs of operations on {device}"
    objects = [
        key
        for key, spec in {**env.spec.observation_specs, **env.spec.action_specs}.items()
        if not spec.is_tensor
    ]
    if objects:
        return f"{dotted(objects[0])} are Python objects"
    return ""


def recorder_for(
    env: EnvBatch,
    mode: Capture,
    lose: Callable[[], None],
    kinds: Mapping[str, Callable[[torch.device], GraphPool]],
    between: str = "",
) -> GraphRecorder:
    """Return the recorder of a group.

    Args:
        between: an option that is called between two steps; "": there is none.

    Raises:
        BadOption: ``capture=True``, and no rollout can be recorded.
    """
    reason = hindrance(env, kinds, between)
    device = env.spec.device or torch.device("cpu")
    if not reason:
        return GraphRecorder(env, kinds[device.type](device), device, mode, lose)
    if mode is True:
        raise BadOption(
            f"capture=True: {reason}. Pass capture='auto', or leave it out."
        )
    recorder = GraphRecorder(env, None, device, mode, lose)
    recorder.refuse(reason, is_news=False)
    return recorder
