"""The main loop of a worker: makes its environments, then fills lanes and answers requests, one
after another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.env_spec import EnvSpec
from muster.errors import BadOption
from muster.keys import TERMINATED, TRUNCATED, next_of
from muster.memory.shared import Arena
from muster.memory.slots import Lane, Layout, Slot
from muster.policies.random import random_policy
from muster.protocols import EnvBatch, Policy
from muster.restore.action_log import Anchors
from muster.restore.pickling import unpickled
from muster.restore.registered import installed
from muster.rng import GroupRng
from muster.rollout.first_call import begin_early
from muster.rollout.group import Group
from muster.rollout.options import RolloutOptions
from muster.rollout.progress import ALL_ORDERS, ORDER, PHASE, STOP, Phase, Progress
from muster.rollout.request import RolloutRequest
from muster.utils.forks import end_on_return
from muster.weights.transport import Ticket
from muster.workers.build import (
    build_envs,
    build_policy,
    made_policy,
    make_group,
    on_this_machine,
)
from muster.workers.channel import Channel, StatusPage
from muster.workers.config import WorkerConfig, WorkerPlace
from muster.workers.effects import run_request
from muster.workers.failures import SentError, env_index_of, pack
from muster.workers.gaps import Gaps
from muster.workers.mailbox import MailboxClient, ServedPolicy
from muster.workers.messages import (
    BIRTH,
    CLOSED,
    Answer,
    RolloutResult,
    Tell,
    seal_objects,
)
from muster.workers.options import WorkerSetting
from muster.workers.requests import Request
from muster.workers.turns import OneAtATime
from muster.workers.worker import Worker, objects_of

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


class Terminated(BaseException):
    """SIGTERM was received."""


class Ending:
    """How a worker ends: by ``close``, or by SIGTERM.

    SIGTERM interrupts the present operation, except while a message is sent, or while the
    environments are closed.

    Attributes:
        is_requested: the worker is to end.
        terminated: SIGTERM was received.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.terminated = False
        self._is_closing = False
        self._is_sending = False

    def request(self) -> None:
        """End after the present message."""
        self.is_requested = True

    def terminate(self, *_: object) -> None:
        """Handle SIGTERM."""
        self.is_requested = True
        self.terminated = True
        if not (self._is_closing or self._is_sending):
            raise Terminated

    def begin_to_close(self) -> None:
        """Note that the environments are closed from now on."""
        self._is_closing = True

    def begin_to_send(self) -> None:
        """Note that a message is sent from now on."""
        self._is_sending = True

    def end_sending(self) -> None:
        """Note that all of a message was sent."""
        self._is_sending = False
        if self.terminated and not self._is_closing:
            raise Terminated


class WorkerLanes:
    """The lanes of a worker in its slots.

    Args:
        arena: memory of all slots.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # by group and offset: on the device, and shared
        self._lanes: dict[tuple[int, int], tuple[Lane, Lane]] = {}
        self._layouts: dict[int, Layout] = {}  # layouts of ``_lanes``
        self._at: dict[int, int] = {}  # number of the last request, by id of the lane

    def of(
        self, request: RolloutRequest, layouts: dict[int, Layout], group: Group
    ) -> tuple[Lane, Lane]:
        """Return the lane of a request, in the memory of its group's device and in shared memory.

        The lane is cleared, unless the request continues a rollout after an error.

        Args:
            layouts: layouts of all groups; see ``Worker.laid_out``.
        """
        if self._layouts is not layouts:
            self._layouts = layouts
            self._lanes.clear()
        at = (request.group, request.offset)
        if at not in self._lanes:
            device = group.env.spec.device
            self._lanes[at] = self._made(request, layouts[request.group], device)
        lane, shared = self._lanes[at]
        if self._at.get(id(lane)) != request.number:
            lane.restart()
            self._at[id(lane)] = request.number
        return lane, shared

    def _made(
        self, request: RolloutRequest, layout: Layout, device: torch.device | None
    ) -> tuple[Lane, Lane]:
        begin = request.lane * layout.lane_bytes
        slot = self._arena.view(request.offset, request.nbytes)
        shared = Lane(layout, slot[begin : begin + layout.lane_bytes])
        if device is None or device.type == "cpu":
            return shared, shared
        return Slot(layout, device).lanes[0], shared


def main(channel: Channel) -> None:
    """Run a worker process; the target of ``launch``."""
    try:
        config, (fd, arena, *fds) = channel.receive()
    except EOFError:  # the parent has given up this start, or has exited
        return
    status_page = StatusPage.attach(fd)
    status_page.arm()
    worker = WorkerMain(
        channel, config, Progress(status_page.cells), Arena.attach(arena), fds
    )
    if worker.mailbox is not None and hasattr(os, "SCHED_BATCH"):
        # a woken worker must not preempt the inference server while it answers the others
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGTERM, worker.ending.terminate)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, (signal.SIGTERM,)),
        after_in_parent=partial(
            signal.pthread_sigmask, signal.SIG_UNBLOCK, (signal.SIGTERM,)
        ),
        after_in_child=partial(_leave_to_user, worker, status_page),
    )
    try:
        worker.serve()
    except (
        EOFError,
        Terminated,
    ):  # the parent has exited; or SIGTERM before there was anything to close
        pass
    if worker.ending.terminated:  # the exit code shows the signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _leave_to_user(worker: WorkerMain, status_page: StatusPage) -> None:
    """Detach a fork that an environment or policy has made: it may do anything except act as the
    worker.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # deliver one that arrived since the fork
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    worker.channel.close()
    worker.arena.isolate()
    status_page.disarm()
    end_on_return(f"worker {worker.config.index}")


class WorkerMain:
    """Executes the messages of the parent, in a process or thread of its own.

    ``fds`` are descriptors of the inference server's mailbox, or of the ticket for the weights.
    """

    def __init__(
        self,
        channel: Any,
        config: WorkerConfig,
        progress: Progress,
        arena: Arena,
        fds: list[int],
    ) -> None:
        self.channel = channel
        self.config = config
        self.arena = arena
        self.progress = progress
        self.made = ExitStack()
        self.mailbox: MailboxClient | None = None
        self._ticket_fds: list[int] = []
        if (workers := config.served_by) is not None:
            self.mailbox = MailboxClient(
                config.index, workers, fds, lambda: progress.cells[STOP] >= ALL_ORDERS
            )
            self.made.callback(self.mailbox.close)
        else:
            self._ticket_fds = fds
        self.built: list[EnvBatch] = []
        self.worker: Worker
        self._anchors: dict[int, Anchors] = {}  # by group
        self._lanes = WorkerLanes(arena)
        self._gaps = Gaps()
        self.ending = Ending()

    def serve(self) -> None:
        """Make the environments, then execute messages until ``close``; EOFError if the parent
        exits.
        """
        self.progress.begin(Phase.CONSTRUCT)
        if self.config.cpus:
            os.sched_setaffinity(
                0, self.config.cpus
            )  # of this thread, and of all that it starts
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        try:
            if not self._answer(BIRTH, self._construct):
                return
            while not self.ending.is_requested:
                self.progress.begin(Phase.IDLE)
                message, _ = self.channel.receive()
                if isinstance(message, RolloutRequest):
                    self.follow(message)
                else:
                    carry_out(self, message)
            # inside ``try``: SIGTERM before this line must not skip ``_close``
            self.ending.begin_to_close()
        except Terminated:
            self.ending.begin_to_close()
        finally:
            self._close_ticket()
        self._close()

    def answer(self, number: int, function: Callable[[], Any]) -> None:
        """Call a function, and send its return value or error as an answer."""
        self.progress.begin(Phase.CALL)
        self._answer(number, function)

    def call(self, request: Request) -> Any:
        return run_request(self.worker, request)

    def close(self) -> None:
        self.ending.request()

    def _send(self, message: RolloutResult | Answer) -> None:
        """Send a message to the parent; SIGTERM takes effect after all of it is sent."""
        self.ending.begin_to_send()
        self.channel.send(message)
        self.ending.end_sending()

    def _answer(self, number: int, function: Callable[[], Any]) -> bool:
        try:
            result = function()
        except (EOFError, Terminated):
            raise
        except BaseException as error:  # noqa: BLE001 (raised in the parent)
            self._send_failure(number, error)
            return False
        try:
            value = self.channel.sealed(result, "a result")
        except BadOption as error:
            self._send_failure(number, error)
            return False
        self._send(Answer(number, value))
        return True

    def _send_failure(self, number: int, error: BaseException) -> None:
        phase = Phase(self.progress.cells[PHASE]).name.lower()
        self._send(Answer(number, failure=self._pack(error, phase)))

    def _pack(self, error: BaseException, phase: str, **where: Any) -> SentError:
        config = self.config
        known = {
            "worker": config.index,
            "pid": os.getpid(),
            "generation": config.generation,
            "node": config.node,
        }
        return pack(error, phase=phase, **known, **where)

    def _construct(self) -> list[EnvSpec]:
        config = self.config
        served = config.served_by is not None
        with installed(config.registered):
            self.setting: WorkerSetting = on_this_machine(
                unpickled(config.setting, "the options")
            )
            self._policy = None
            if not served:
                self._policy = made_policy(config, config.policy, self.setting)
            numbered = zip(config.groups, config.factories, strict=True)
            factories = [
                unpickled(factory, f"create_env_fn[{number}]")
                for number, factory in numbered
            ]
        self.built = build_envs(
            factories,
            unpickled(config.kwargs, "create_env_kwargs"),
            self.setting,
            self.made,
        )
        if config.place is not None:
            self.progress.begin(Phase.CALL)
            self.configure(config.place)
        return [env.spec for env in self.built]

    def _close(self) -> None:
        if not self.ending.terminated:  # else keep the phase that was interrupted
            self.progress.begin(Phase.CLOSE)
        try:
            if hasattr(self, "worker"):
                self.worker.profile(None)
            self.made.close()
        except BaseException as error:  # noqa: BLE001 (raised in the parent)
            self._send(Answer(CLOSED, failure=self._pack(error, "close")))
        else:
            self._send(Answer(CLOSED))

    # --- making the groups ------------------------------------------------------------------------

    def configure(self, place: WorkerPlace) -> None:
        """Make the groups at their place, and apply all settings in it; nothing if that is done."""
        # done with the place in the config; this message was first sent to a predecessor
        if hasattr(self, "worker"):
            return
        self._make_groups(place)
        self.worker.seed(place.seed, place.static)
        if self.config.ticket is not None:
            phase = self.progress.begin(Phase.WEIGHTS)
            self._subscribe(self.config.ticket)
            self.progress.begin(phase)
        if place.columns is not None:
            self.worker.layouts(place.columns)

    def _make_groups(self, place: WorkerPlace) -> None:
        config = self.config
        policy = None
        device = None
        if self.mailbox is None:
            from muster.policies import adapt

            policy, device = adapt.place(self._policy, self.setting.policy_device)
        options: RolloutOptions = self.setting.options
        if config.stoppable:
            stop = _Stop(self.progress.cells, options.interruptor)
            options = replace(options, interruptor=stop)
        groups: list[Group] = []
        for number, env in zip(config.groups, self.built, strict=True):
            rng = GroupRng(
                place.seed, number, device or env.spec.device, config.generation
            )
            first = place.firsts[number]
            shared = self.setting.shared_frames
            group = make_group(
                env,
                number,
                first,
                place.total,
                options,
                rng,
                shared=shared,
                progress=self.progress,
            )
            self._anchors[number] = Anchors(env)
            group.listen(self._anchors[number])
            if place.episodes is not None:
                group.clock.begin_at(place.episodes[number])
            if place.marks_resumed:
                group.carry.mark_resumed()
            groups.append(group)
        kinds = {
            (env.spec.batch_shape, str(env.spec.action_specs)) for env in self.built
        }
        if len(kinds) > 1:
            raise BadOption(
                f"the groups {list(config.groups)} of worker {config.index} differ in number of"
                " environments or in actions, and one policy acts for all of them: leave"
                " num_workers out, so that each has its own"
            )
        self._policy = policy
        random = random_policy(groups[-1].env)
        policies = {"policy": self._acting(groups[0], device), "random": random}
        self.worker = Worker(
            groups,
            policies,
            policy,
            device=device,
            index=config.index,
            generation=config.generation,
            marks_valid=place.marks_valid,
        )

    def _acting(self, group: Group, device: torch.device | None) -> Policy:
        if self.mailbox is not None:
            return ServedPolicy(self.mailbox, self.progress)
        policy = build_policy(self._policy, self.setting, group.env, device)
        if (turns := self.config.policy_turns) is None:
            return policy
        return OneAtATime(policy, turns, self.progress)

    # --- rollouts ---------------------------------------------------------------------------------

    def follow(self, request: RolloutRequest) -> None:
        """Make a rollout, and send its result."""
        if self._gaps.follows_one(request):
            result = RolloutResult(request.number, request.group, lost=True)
        else:
            group = self.worker.group(request.group)
            lane, shared = self._lanes.of(request, self.worker.laid_out, group)
            begin = lane.done_steps
            if lane.layout.object_columns and not self.config.in_thread:
                request = replace(request, seal=self.channel.sealed)
            result = self._completed(self.worker.run(request, lane), lane, begin)
            if lane is not shared and result.error is None:
                for key, tensor in lane.tensors.items():
                    shared.tensors[key].copy_(tensor)
        if self.mailbox is not None:
            self.mailbox.finished(result.number)
        if self.ending.terminated:
            if result.phase:  # the phase that SIGTERM interrupted
                self.progress.begin(Phase[result.phase.upper()])
            result = replace(result, lost=True, unfinished=True)
        self._send(result)
        if result.error is None and not result.lost:
            self._begin_early(self.worker.group(result.group))

    def _completed(
        self, result: RolloutResult, lane: Lane, begin: int
    ) -> RolloutResult:
        """Return a result with the data that the parent needs, about the rows from ``begin`` on."""
        group = self.worker.group(result.group)
        clock = np.stack([group.clock.episode, group.clock.steps])
        error = result.error
        if error is not None:
            self._gaps.begin_with(result.number)
            error = self._explain(error, result.phase, group, lane)
        completed = replace(
            result,
            clock=clock,
            error=error,
            anchors=self._anchors[result.group].take(begin, group.pending),
        )
        return self._with_objects(completed, lane)

    def _with_objects(self, result: RolloutResult, lane: Lane) -> RolloutResult:
        """Return a result with the Python objects of its rows, if it is complete."""
        if result.error is not None or not lane.layout.object_columns:
            return result
        # the end of the rollout has found that all can be pickled (``RolloutRequest.seal``)
        return seal_objects(result, objects_of(lane), self.channel.sealed)

    def _begin_early(self, group: Group) -> None:
        """Reset environments that wait for the next rollout.

        That rollout raises the error, SystemExit included.
        """
        try:
            begin_early(group)
        except (EOFError, Terminated):
            raise
        except BaseException as error:  # noqa: BLE001 (raised by the next rollout)
            group.due.postpone(error)

    def _explain(
        self, error: BaseException, phase: str, group: Group, lane: Lane
    ) -> Any:
        """Pack an error with the place where it happened."""
        row = lane.done_steps
        clock = group.clock
        where: dict[str, Any] = {"env_ids": tuple(clock.env_ids.tolist()), "row": row}
        index = env_index_of(error, phase)
        if (index is None or index >= group.B) and group.B == 1:
            index = 0
        if index is not None and index < group.B:
            terminated = lane.arrays[next_of(TERMINATED)][:row, index]
            truncated = lane.arrays[next_of(TRUNCATED)][:row, index]
            ended = np.flatnonzero(terminated | truncated)
            if len(ended):
                steps = row - 1 - int(ended[-1])
            else:
                steps = int(clock.steps[index]) + row
            where |= {
                "env_index": index,
                "episode": int(clock.episode[index]) + len(ended),
                "step": steps,
            }
            where["env_ids"] = (int(clock.env_ids[index]),)
            where["seed"] = self._anchors[group.number].seeds[index]
        return self._pack(error, phase, **where)

    # --- weights ----------------------------------------------------------------------------------

    def _subscribe(self, ticket: Ticket) -> None:
        from muster.weights.names import named_tensors

        subscriber, into = ticket.open(self._ticket_fds), named_tensors(self._policy)
        self.made.callback(subscriber.close)  # the descriptors would outlive a thread
        self._close_ticket()

        def newest() -> int | str:
            subscriber.take(into)
            return subscriber.version or 0

        self.worker.subscribe(newest)

    def _close_ticket(self) -> None:
        while self._ticket_fds:
            os.close(self._ticket_fds.pop())


def carry_out(main: Any, message: Tell, *received: Any) -> None:
    """Make the call of a message in the main loop of a worker or node, with what was received with
    the message.
    """
    args = *message.args, *received
    if message.number:
        main.answer(message.number, lambda: message.method(main, *args))
    else:
        message.method(main, *args)


class _Stop:
    """An interruptor that ends a rollout early for the parent or for the user's interruptor."""

    def __init__(self, cells: Any, other: Any) -> None:
        self._cells = cells
        self._other = other

    def collection_stopped(self) -> bool:
        stopped = self._cells[STOP] >= self._cells[ORDER]
        return bool(
            stopped or (self._other is not None and self._other.collection_stopped())
        )
