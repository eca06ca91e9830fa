"""What a worker process does: makes its environments, then follows orders and calls, one after another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.envs.build import BuiltEnv
from muster.errors import BadOption
from muster.group import Group
from muster.keys import TERMINATED, TRUNCATED, Key, next_of
from muster.memory.shared import Arena
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array, Column
from muster.policies.random import RandomPolicy
from muster.progress import ALL_ORDERS, ORDER, PHASE, STOP, Phase, Progress
from muster.protocols import Policy
from muster.sources.build import WorkerOptions, build_envs, build_policy, make_group, restarted_rng, restarted_seeds
from muster.sources.channel import Channel
from muster.sources.failures import Failure, pack
from muster.sources.history import Anchors
from muster.sources.ledger import Ledger
from muster.sources.lines import Line
from muster.sources.messages import Assignment, GroupInfo, Order, Payload, Report, Start
from muster.sources.pickling import loads
from muster.sources.served import ServedPolicy
from muster.sources.worker import Worker, describe, objects_of
from muster.weights.transport import Subscriber, Ticket

if TYPE_CHECKING:
    import torch
else:
    from muster import lazy_torch as torch


class Terminated(BaseException):
    """SIGTERM came."""


def main(channel: Channel) -> None:
    """The target of ``launch``."""
    start, (fd, arena, *line) = channel.receive()
    ledger = Ledger.attach(fd)
    ledger.arm()
    server = Server(channel, start, Progress(ledger.cells), Arena.attach(arena), line)
    if server.line is not None and hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # whom the inference server wakes up does not push it aside while it answers the others
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGTERM, server.terminate)
    try:
        server.serve()
    except (EOFError, Terminated):  # the parent is gone; or there is nothing to close yet
        pass
    if server.terminated:  # by that signal, and seen to be
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


class Server:
    """Follows orders, in a process or thread of its own."""

    def __init__(self, channel: Any, start: Start, progress: Progress, arena: Arena, line: list[int]) -> None:
        self.channel, self.start, self.arena, self.progress = channel, start, arena, progress
        self.made = ExitStack()
        self.line: Line | None = None
        if (workers := start.payload.served_by) is not None:
            self.line = Line(start.index, workers, line, lambda: progress.cells[STOP] >= ALL_ORDERS)
            self.made.callback(self.line.close)
        self.built: list[BuiltEnv] = []
        self.worker: Worker
        self._layouts: dict[int, Layout] = {}
        self._anchors: dict[int, Anchors] = {}  # by group
        self._lanes: dict[tuple[int, int], tuple[Lane, Lane]] = {}  # by group and offset: on the device, and shared
        self._at: dict[int, int] = {}  # order that a lane was last used for
        self._failed: set[int] = set()  # orders that are not complete
        self.ending = self.terminated = self._closing = self._sending = False

    def serve(self) -> None:
        """Until the parent says that it is enough, or is gone."""
        self.progress.begin(Phase.CONSTRUCT)
        if self.start.threads is not None:
            torch.set_num_threads(self.start.threads)
        try:
            if not self._answer(self._construct):
                return
            while not self.ending:
                self._attend()
            self._closing = True  # in here: SIGTERM between the last message and this must not skip the closing
        except Terminated:
            self._closing = True
        self._close()

    def _attend(self) -> None:
        """To the next message."""
        self.progress.begin(Phase.IDLE)
        (kind, *content), fds = self.channel.receive()
        if kind == "order":
            report = self._follow(*content)
            if self.line is not None:
                self.line.finished(report.number)
            report.lost |= self.terminated
            if self.terminated and report.phase:  # it is seen to have ended there
                self.progress.begin(Phase[report.phase.upper()])
            self._send("unfinished" if self.terminated else "report", report)
            if report.error is None and not report.lost:
                self.worker.group(report.group).begin(early=True)
        elif kind == "call":
            method, args = content
            self.progress.begin(Phase.CALL)
            self._answer(getattr(self, method, None) or getattr(self.worker, method), *args)
        elif kind == "subscribe":
            self.progress.begin(Phase.WEIGHTS)
            self._answer(self._subscribe, *content, fds)
        else:
            self.ending = True

    def terminate(self, *_: object) -> None:
        """Stop whatever is going on, and end; environments are closed."""
        self.ending = self.terminated = True
        if not (self._closing or self._sending):
            raise Terminated

    def _send(self, kind: str, content: Any) -> None:
        """Say something to the parent, all of it, whatever comes meanwhile."""
        self._sending = True
        self.channel.send((kind, content))
        self._sending = False
        if self.terminated and not self._closing:
            raise Terminated

    def _answer(self, function: Callable[..., Any], *args: Any) -> bool:
        try:
            result = function(*args)
        except (EOFError, Terminated):
            raise
        except BaseException as error:  # noqa: BLE001 (the parent's to raise)
            self._send("failed", self._pack(error, Phase(self.progress.cells[PHASE]).name.lower()))
            return False
        self._send("reply", result)
        return True

    def _pack(self, error: BaseException, phase: str, **where: Any) -> Failure:
        start = self.start
        return pack(error, phase=phase, worker=start.index, pid=os.getpid(), incarnation=start.incarnation, **where)

    # --- calls of the parent that a Worker does not know ------------------------------------------

    def _construct(self) -> list[GroupInfo]:
        told, groups = self.start.payload, self.start.groups
        self.options: WorkerOptions = _unpickled(told.options, "the options")
        self._policy = None if told.served_by is not None else made_policy(told)
        makers = [_unpickled(m, f"create_env_fn[{number}]") for number, m in zip(groups, told.makers, strict=True)]
        self.built = build_envs(makers, _unpickled(told.kwargs, "create_env_kwargs"), self.options, self.made)
        return [describe(b.env, b.batch_shape) for b in self.built]

    def _close(self) -> None:
        """Close the environments, and say so."""
        if not self.terminated:  # else it is known in what it was interrupted
            self.progress.begin(Phase.CLOSE)
        try:
            if hasattr(self, "worker"):
                self.worker.profile(None, 0)
            self.made.close()
        except BaseException as error:  # noqa: BLE001 (the parent's to raise)
            self._send("closed", self._pack(error, "close"))
        else:
            self._send("closed", None)

    def assign(self, told: Assignment) -> None:
        """Make groups of the environments."""
        policy, device = self._place_policy()
        rollout = replace(self.options.rollout, marks_valid=told.marks_valid)
        if self.start.stoppable:
            rollout = replace(rollout, interruptor=_Stop(self.progress.cells, rollout.interruptor))
        groups: list[Group] = []
        for place_, (b, first) in enumerate(zip(self.built, told.firsts, strict=True)):
            number = self.start.groups[place_]
            rng = restarted_rng(told.seed, number, self.start.incarnation, device or b.env.device)
            shared = self.options.shared_frames
            group = make_group(b, number, first, told.total, rollout, rng, shared=shared)
            if self.start.in_thread:
                group.in_background = lambda: True
            self._anchors[number] = Anchors(b.env)
            group.before_reset, group.lost_track = self._anchors[number].before_reset, self._anchors[number].lose
            if told.episodes is not None:
                group.clock.episode[:] = told.episodes[place_]
            groups.append(group)
        kinds = {(b.batch_shape, str(b.env.action_specs)) for b in self.built}
        if len(kinds) > 1:
            raise BadOption(
                f"the groups {list(self.start.groups)} of worker {self.start.index} differ in number of environments "
                f"or in actions, and one policy acts for all of them: leave num_workers out, so that each has its own"
            )
        self._policy = policy
        policies = {"policy": self._acting(groups[0], device), "random": RandomPolicy(b.env.sample, b.batch_shape)}
        self.worker = Worker(groups, policies, policy, device=device, progress=self.progress)
        self.set_seed(told.seed, told.static)

    def _place_policy(self) -> tuple[Any, torch.device | None]:
        """The policy and where it computes."""
        if self.line is not None:
            return None, None
        from muster.policies.adapt import place

        return place(self._policy, self.options.policy_device)

    def _acting(self, group: Group, device: torch.device | None) -> Policy:
        """The policy as the loop calls it."""
        if self.line is not None:
            return ServedPolicy(self.line, self.progress)
        policy = build_policy(self._policy, self.options, group, device)
        if (lock := self.start.payload.policy_lock) is None:
            return policy
        from muster.sources.locked import OneAtATime

        return OneAtATime(policy, lock)

    def observe(self) -> dict[int, tuple[dict[Key, Array], dict[str, Any]]]:
        """What a server needs to act for the first time: by group, observations and the state of random streams."""
        for group in self.worker.groups:
            group.begin()
        return {
            group.number: (
                {key: np.array(group.carry[key][0]) for key in group.env.observation_specs},
                group.rng.state_dict(),
            )
            for group in self.worker.groups
        }

    def set_seed(self, seed: int | None, static: bool) -> None:
        """Seed the environments of this incarnation."""
        if seed is None:
            return
        if not self.start.incarnation:
            self.worker.seed(seed, static)
            return
        for group in self.worker.groups:
            ids = [0] * group.B if static else group.clock.env_ids.tolist()
            group.rng = restarted_rng(seed, group.number, self.start.incarnation, group.rng.device)
            group.reset(seeds=restarted_seeds(seed, ids, self.start.incarnation))

    def lay_out(
        self, policy: str, T: Sequence[int], version: int | str | None, columns: Sequence[Column] = ()
    ) -> list[Layout]:
        """See ``Worker.layouts``; orders that follow are about these.

        Args:
            columns: that a server writes.
        """
        served = self.worker.policies["policy"]
        if isinstance(served, ServedPolicy):
            served.learn(columns)
        made = self.worker.layouts(policy, T, version)
        layouts = dict(zip(self.start.groups, made, strict=True))
        if layouts != self._layouts:
            self._layouts = layouts
            self._lanes.clear()
        return made

    def profile(self, config: Any, index: int) -> None:
        """Profile the next rollouts; None ends it. The number is this worker's own."""
        self.worker.profile(None if config is None else _unpickled(config, "on_trace_ready"), self.start.index)

    def forget(self) -> None:
        """Environments were restored, and may hold other objects inside."""
        self._lanes.clear()

    # --- rollouts ---------------------------------------------------------------------------------

    def _follow(self, order: Order, offset: int, nbytes: int) -> Report:
        self._failed.discard(order.number)
        if order.after in self._failed:  # to be ordered again, after the one before it
            self._failed.add(order.number)
            return Report(order.number, order.group, lost=True)
        lane, shared = self._lane(order, offset, nbytes)
        if self._at.get(id(lane)) != order.number:  # else it goes on after an error
            lane.done_steps, lane.stopped = 0, False
            self._at[id(lane)] = order.number
        begin = lane.done_steps
        report = self.worker.run(order, lane)
        group = self.worker.group(order.group)
        report.clock = np.stack([group.clock.episode, group.clock.steps])
        if report.error is not None:
            self._failed.add(order.number)
            report.error = self._explain(report.error, report.phase, group, lane)
        elif lane is not shared:
            for key, tensor in lane.tensors.items():
                shared.tensors[key].copy_(tensor)
        report.objects = objects_of(lane)
        report.anchors = self._anchors[order.group].take(begin, group.pending)
        return report

    def _lane(self, order: Order, offset: int, nbytes: int) -> tuple[Lane, Lane]:
        layout = self._layouts[order.group]
        place_ = (order.group, offset)
        if place_ not in self._lanes:
            begin = order.lane * layout.lane_bytes
            block = self.arena.view(offset, nbytes)[begin : begin + layout.lane_bytes]
            shared = lane = Lane(layout, block)
            device = self.worker.group(order.group).env.device
            if device is not None and device.type != "cpu":
                lane = Slot(layout, device).lanes[0]
            self._lanes[place_] = lane, shared
        return self._lanes[place_]

    def _explain(self, error: BaseException, phase: str, group: Group, lane: Lane) -> Any:
        """The error with what is known of where it happened."""
        row, clock = lane.done_steps, group.clock
        where: dict[str, Any] = {"env_ids": tuple(clock.env_ids.tolist()), "row": row}
        index = getattr(error, "env_index", None)
        if index is None and group.B == 1:
            index = 0
        if index is not None:
            ended = (lane.arrays[next_of(TERMINATED)] | lane.arrays[next_of(TRUNCATED)])[:row, index].nonzero()[0]
            steps = row - 1 - int(ended[-1]) if len(ended) else int(clock.steps[index]) + row
            where |= {"env_index": index, "episode": int(clock.episode[index]) + len(ended), "step": steps}
            where["env_ids"] = (int(clock.env_ids[index]),)
            where["seed"] = self._anchors[group.number].where(index, row, clock)["seed"]
        return self._pack(error, phase, **where)

    # --- weights ----------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the policy, as it is."""
        from muster.weights.names import named_tensors

        return {name: tensor.cpu() for name, tensor in named_tensors(self._policy).items()}

    def _subscribe(self, ticket: Ticket, fds: list[int]) -> None:
        from muster.weights.names import named_tensors

        subscriber, into = ticket.open(fds), named_tensors(self._policy)
        self.made.callback(subscriber.close)  # a thread's descriptors outlive it otherwise
        while fds:
            os.close(fds.pop())
        self.worker.newest = lambda: _taken(subscriber, into)


def made_policy(told: Payload) -> Any:
    """The policy that a worker or server acts with."""
    policy = loads(told.policy, "policy_factory" if told.is_factory else "policy")
    return policy() if told.is_factory else policy


def _unpickled(given: Any, what: str) -> Any:
    return loads(given, what) if isinstance(given, bytes) else given


def _taken(subscriber: Subscriber, into: Mapping[str, torch.Tensor]) -> int | str:
    """Take over the newest weights; their version."""
    subscriber.take(into)
    return subscriber.version or 0


class _Stop:
    """Ends a rollout early, for the parent or the user's own interruptor."""

    def __init__(self, cells: Any, other: Any) -> None:
        self._cells, self._other = cells, other

    def collection_stopped(self) -> bool:
        stopped = self._cells[STOP] >= self._cells[ORDER]
        return bool(stopped or (self._other is not None and self._other.collection_stopped()))
