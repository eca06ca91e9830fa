"""A worker: groups of environments, the policies that act in them, and the operations on both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.capabilities import AwaitsCoroutines, RefersToParts, capability
from muster.episodes.record import NO_EPISODES, Episodes
from muster.errors import BadOption, EnvError, MusterError, described
from muster.keys import Key
from muster.memory.slots import Lane, Layout
from muster.memory.specs import Array, ArraySpec
from muster.observing.profiling import ProfileConfig, RolloutProfiler
from muster.policies.random import RandomPolicy
from muster.protocols import Policy
from muster.restore.pickling import unpickled
from muster.rng import GroupRng, seeds_of
from muster.rollout.bootstrap import BootstrapRows, rollout_and_values
from muster.rollout.carry import FirstCall
from muster.rollout.columns import lane_columns
from muster.rollout.first_call import begin_episodes, prime, probe
from muster.rollout.group import Group
from muster.rollout.loop import FurtherRows, rollout
from muster.rollout.progress import Phase, Progress
from muster.rollout.request import RolloutOutcome, RolloutRequest
from muster.rollout.tally import Tally, Timing
from muster.utils.attributes import resolve
from muster.workers import group_state
from muster.workers.mailbox import ServedPolicy
from muster.workers.messages import RolloutResult

if TYPE_CHECKING:
    import torch

    from muster.capture.recording import GraphRecorder
    from muster.workers.requests import LayOut
else:
    from muster.utils import lazy_torch as torch


class Worker:
    """Groups and their policies. Every method runs in the thread of its caller.

    Args:
        groups: groups of the worker, which owns them.
        policies: policies "policy" and "random", by name.
        model: policy object of the user, for ``execute``.
        device: device of the policy.
        progress: progress cells that all groups share.
        index: number of the worker.
        generation: number of earlier starts of the worker.
        marks_valid: rollouts have the column ``collector/valid``.
        recorders: record whole rollouts, by group.

    Attributes:
        laid_out: layouts for which requests are made, by group; a new dict when lanes have to be
            made again.
        acting: policy that acted last, or was called for its columns since then.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        policies: dict[str, Policy],
        model: Any = None,
        *,
        device: torch.device | None = None,
        index: int = 0,
        generation: int = 0,
        marks_valid: bool = False,
        recorders: Mapping[int, GraphRecorder] | None = None,
    ) -> None:
        self._recorders = recorders or {}
        self.groups = list(groups)
        self.policies = policies
        self.policy = model
        self.index = index
        self._generation = generation
        self.laid_out: dict[int, Layout] = {}
        self.acting: Policy | None = None
        # policy that was called; its objects then
        self._known: tuple[Policy, Mapping[Key, Array]] | None = None
        self._version: int | str = 0  # of the policy, when it acted last
        self._newest: Callable[[], int | str] | None = None
        self._log: Callable[[RolloutResult, Lane, int], None] | None = None
        self._device = device
        self._marks_valid = marks_valid
        self._profiler: RolloutProfiler | None = None
        for group in self.groups:
            if group.env.spec.ready is not None and isinstance(
                policies["policy"], ServedPolicy
            ):
                raise BadOption(
                    f"inference='server': {group.env.spec.name} is asynchronous, and calls the"
                    " policy itself for the environments that are ready. Leave inference out, or"
                    " leave batch_size of EnvPool out"
                )
        parts: list[Any] = [*policies.values()]
        parts += [capability(group.env, AwaitsCoroutines) for group in self.groups]
        for part in parts:
            if (coroutines := getattr(part, "coroutines", None)) is not None:
                coroutines.look = self.progress.look

    @property
    def progress(self) -> Progress:
        """The progress cells that all groups share."""
        return self.groups[0].reports.progress

    def subscribe(self, newest: Callable[[], int | str]) -> None:
        """Call ``newest`` before each rollout: it takes the newest weights, and returns their
        version. Without it, the policy always has the newest weights, and each request has the
        version.
        """
        self._newest = newest

    @property
    def is_watched(self) -> bool:
        """Whether rollouts are logged or profiled, one by one."""
        return self._log is not None or self._profiler is not None

    def log_rollouts(self, log: Callable[[RolloutResult, Lane, int], None]) -> None:
        """Call ``log`` with the result of each rollout, its lane, and the first row of this request."""
        self._log = log

    # --- rollouts ---------------------------------------------------------------------------------

    def prepared(self, name: str) -> bool:
        """Return whether ``laid_out`` is still valid for rollouts of this policy."""
        for group in self.groups:
            if group.carry.resumed:
                return False
        return self.policies[name] is self.acting

    def layouts(self, columns: LayOut) -> list[Layout]:
        """Return the layouts of the next rollouts, one for each group.

        A policy that did not act last makes its first call here, and the next rollout continues
        from that call. Rollouts of "random" have the columns of "policy".
        """
        served = self.policies["policy"]
        if isinstance(served, ServedPolicy) and columns.served is not None:
            served.learn(columns.served.columns)
            self._store_actions_as(columns.served.actions)
        policy = self._adopt(columns.policy, columns.version, grad=columns.grad)
        made = [
            Layout(
                columns.T[group.number],
                group.B,
                lane_columns(
                    group.env.spec,
                    policy.columns(),
                    group.options,
                    marks_valid=self._marks_valid,
                    resumed=group.carry.resumed is not None,
                ),
                batch_shape=group.env.spec.batch_shape,
            )
            for group in self.groups
        ]
        if made != list(self.laid_out.values()):
            self.laid_out = {
                group.number: layout
                for group, layout in zip(self.groups, made, strict=True)
            }
        return made

    def observe(self) -> dict[int, tuple[dict[Key, Array], dict[str, Any]]]:
        """Return the current observations and the state of the random streams by group, for the
        server's first call.
        """
        for group in self.groups:
            if group.open is None:
                begin_episodes(group)
        found = {}
        for group in self.groups:
            keys = group.env.spec.observation_specs
            obs = {key: np.array(group.carry[key][0]) for key in keys}
            found[group.number] = (obs, group.rng.state_dict())
        return found

    def _adopt(self, name: str, version: int | str | None, *, grad: bool) -> Policy:
        """Let a policy that did not act last make its first calls, with the newest weights."""
        policy = self.policies[name]
        if policy is not self.acting:
            self._version = self._version_for(version)
            phase = self.progress.begin(Phase.POLICY)
            for group in self.groups:
                # after an error, a rollout may be continued: the resets that are due belong to it
                is_open = group.open is not None
                if isinstance(policy, ServedPolicy):
                    if not is_open:
                        begin_episodes(group)  # the server makes the first call
                else:
                    with _gradients(policy, enabled=grad):
                        if is_open:
                            outputs = probe(group, policy)
                        else:
                            outputs = prime(group, policy, self._version)
                    if name == "policy":
                        self._known = policy, outputs.objects
            if name != "policy" and isinstance(policy, RandomPolicy):
                self._show_columns(policy, grad=grad)
            self.progress.begin(phase)
        elif isinstance(policy, RandomPolicy):
            served = self.policies["policy"]
            if isinstance(served, ServedPolicy):
                # ``load`` adopts "random" before the server's columns are known
                policy.learn(served.columns(), {})
        self.acting = policy
        return policy

    def go_on_with(self, copied: Policy) -> None:
        """Replace "policy" by a copy of it, which goes on where it is: with the recurrent states of
        running episodes, and with the call that it has made for the next rollout.
        """
        before = self.policies["policy"]
        # else the copy makes its first call before its next rollout
        if self.acting is before:
            for group in self.groups:
                outputs = probe(group, copied)
                self._known = copied, outputs.objects
                call = group.carry.call_of(before)
                if call is not None:
                    own = FirstCall(copied, call.outputs, call.version)
                    group.carry.keep_call(own)
            self.acting = copied
        self.policies["policy"] = copied

    def _version_for(self, version: int | str | None) -> int | str:
        """Return the version of the policy that acts now; ``version``: that of a request."""
        if self._newest is not None:
            return self._newest()
        return self._version if version is None else version

    def _show_columns(self, random: RandomPolicy, *, grad: bool) -> None:
        """Set the columns of random rollouts to those of "policy", which is called once if it was
        not called before.
        """
        policy = self.policies["policy"]
        if isinstance(policy, ServedPolicy):
            random.learn(policy.columns(), {})
            return
        if self._known is None or self._known[0] is not policy:
            with _gradients(policy, enabled=grad):
                self._known = policy, probe(self.groups[0], policy).objects
        random.learn(policy.columns(), self._known[1])

    def _store_actions_as(self, own: Mapping[Key, ArraySpec]) -> None:
        """Store actions with these specs, which a server's policy returns."""
        for group in self.groups:
            spec = group.env.spec
            every = {**spec.action_specs, **own}
            if every != spec.action_specs:
                group.env.store_as(replace(spec, action_specs=every))

    def run(self, request: RolloutRequest, lane: Lane) -> RolloutResult:
        """Make the rollout of a request. An error is returned in the result."""
        group = self.groups[request.group - self.groups[0].number]
        policy = self.policies[request.policy]
        tally = Tally(spans=request.spans)
        if not request.open_rows:
            group.leave()
        begin = lane.done_steps
        progress = group.reports.progress
        if progress.watched:
            progress.take_up(request.number)
        outcome = NO_OUTCOME
        values: BootstrapRows | None = None
        error: BaseException | None = None
        phase = ""
        recorder = self._recorders.get(group.number)
        try:
            if self._newest is not None:
                progress.begin(Phase.WEIGHTS)
                self._version = self._newest()
            elif request.version is not None:
                self._version = request.version
            # reset since the first call of the policy, which made the random steps
            if group.random_start.is_due and group.due.which:
                begin_episodes(group)
            if request.rule is not None or request.version != self._version:
                # a rollout that has begun keeps its rule, which counts episodes
                rule = None if begin else copy.deepcopy(request.rule)
                request = replace(request, version=self._version, rule=rule)
            if request.bootstrap is None and not request.grad:
                outcome = rollout(
                    group, policy, request, lane, tally, recorder=recorder
                )
            else:
                outcome, values = self._run_specially(
                    group, policy, request, lane, tally
                )
        except BaseException as raised:  # noqa: BLE001 (raised to the user by the schedule)
            error = raised
            phase = phase_ended_by(raised, progress)
        else:
            if self._profiler is not None:
                self._profiler.step()
        result = self._result(request, lane, tally, outcome, values, error, phase)
        # its traceback refers to this frame, and this to the lane: slots would wait for the cycle
        # collector
        error = None
        if self._log is not None:
            lane.bring_to_host()
            self._log(result, lane, begin)
        return result

    def run_further_rows(
        self, further: FurtherRows, request: RolloutRequest, tally: Tally
    ) -> RolloutResult | Episodes:
        """Make further rows of an open rollout of the first group, which is not ``is_watched``.

        Returns:
            the episodes that ended in the rows, if they are complete and there is nothing else to
            tell but ``tally``; else the result.
        """
        outcome = NO_OUTCOME
        error: BaseException | None = None
        phase = ""
        if request.version is not None:
            self._version = request.version
        try:
            outcome = further(request, tally)
        except BaseException as raised:  # noqa: BLE001 (raised to the user by the engine)
            error = raised
            phase = phase_ended_by(raised, self.progress)
        else:
            casting = self.groups[0].can.casting
            has_warnings = casting is not None and casting.casts.pending
            follows = outcome.steps_before is None and not outcome.finals
            if follows and not has_warnings and not tally.discarded:
                return outcome.episodes
        result = self._result(request, further.lane, tally, outcome, None, error, phase)
        error = None  # see ``run``
        return result

    def _result(
        self,
        request: RolloutRequest,
        lane: Lane,
        tally: Tally,
        outcome: RolloutOutcome,
        values: BootstrapRows | None,
        error: BaseException | None,
        phase: str,
    ) -> RolloutResult:
        """Return the result of a request that is complete, or that an error has interrupted."""
        group = self.groups[request.group - self.groups[0].number]
        casting = group.can.casting
        recorder = self._recorders.get(group.number)
        warnings: Sequence[str] = ()
        if casting is not None and casting.casts.pending:
            warnings = casting.casts.take_warnings()
        return RolloutResult(
            request.number,
            group.number,
            frames=outcome.frames,
            rows=outcome.rows,
            done_steps=lane.done_steps,
            executed=tally.executed,
            discarded=tally.discarded,
            version=self._version,
            timing=Timing(tally.env_ns, tally.policy_ns, tally.copy_ns, tally.total_ns),
            episodes=outcome.episodes if error is None else None,
            finals=outcome.finals,
            values=values,
            spans=() if tally.spans is None else tally.spans.kept,
            path=self.policies[request.policy].path,
            error=error,
            phase=phase,
            paused=error is not None and group.is_paused,
            left_out=outcome.left_out,
            warnings=warnings,
            capture=None if recorder is None else recorder.stats(),
            steps_before=outcome.steps_before,
        )

    def _run_specially(
        self,
        group: Group,
        policy: Policy,
        request: RolloutRequest,
        lane: Lane,
        tally: Tally,
    ) -> tuple[RolloutOutcome, BootstrapRows | None]:
        """Make a rollout with gradients enabled, or one whose result includes values of next
        observations.
        """
        with _gradients(policy, enabled=request.grad):
            if request.bootstrap is None:
                return rollout(group, policy, request, lane, tally), None
            valued_by = None if isinstance(policy, ServedPolicy) else policy
            return rollout_and_values(
                group,
                policy,
                request,
                lane,
                request.bootstrap,
                tally,
                valued_by,
                self._recorders.get(group.number),
            )

    def group(self, number: int) -> Group:
        return self.groups[number - self.groups[0].number]

    # --- other operations on groups ---------------------------------------------------------------

    def seed(self, seed: int | Sequence[int] | None, static: bool) -> None:
        """See ``Collector.set_seed``.

        A restarted worker derives other random streams and episodes from the seed.
        """
        if seed is None:
            return
        for group in self.groups:
            ids = [0] * group.B if static else group.env_ids.tolist()
            device = self._device or group.env.spec.device
            rng = GroupRng(seed, group.number, device, self._generation)
            group.reseed(rng, seeds_of(seed, ids, self._generation))

    def state(self) -> list[dict[str, Any]]:
        """Return the number and the state of every group and of its environments as plain
        data.
        """
        from muster.restore import snapshot  # needs torch

        names = {id(policy): name for name, policy in self.policies.items()}
        acting = names.get(id(self.acting))
        return [
            {
                "number": group.number,
                "group": group_state.take(group, acting),
                "envs": [snapshot.take(env) for env in group.env.objects()],
            }
            for group in self.groups
        ]

    def load(
        self, states: Mapping[int, Mapping[str, Any]], cut: str | None, trust: bool
    ) -> list[dict[int, str]]:
        """Restore states that were taken by ``state``.

        Args:
            states: state of each group, by number.
            cut: reason why no environment is restored; None: restore them.
            trust: unpickle environments.

        Returns:
            for every group, the environments that start new episodes (global numbers), each with
            the reason.
        """
        from muster.restore import snapshot

        acting = None
        for group in self.groups:
            acting = acting or states[group.number]["group"]["acting"]
        if acting is None:
            self.acting = None
        else:
            self._adopt(acting, None, grad=False)
        failed = []
        for group in self.groups:
            state = states[group.number]
            if state["envs"] is None:
                clock = state["group"]["clock"]
                failed.append(group_state.begin_after_dropped(group, clock))
                continue
            objects = zip(group.env.objects(), state["envs"], strict=True)
            recorder = self._recorders.get(group.number)
            with nullcontext() if recorder is None else recorder.replacing(loaded=True):
                reasons = [
                    cut or snapshot.restore(env, taken, trust) for env, taken in objects
                ]
            failed.append(group_state.load(group, state["group"], reasons, self.acting))
        for group in self.groups:
            referring = capability(group.env, RefersToParts)
            if referring is not None:
                referring.look_again()
        self.laid_out = {}
        return failed

    # --- queries ----------------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The environment object, or the list of them."""
        objects = [env for group in self.groups for env in group.env.objects()]
        return objects[0] if len(objects) == 1 else objects

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the current weights of the policy, on the CPU."""
        from muster.weights.names import named_tensors

        return {
            name: tensor.cpu() for name, tensor in named_tensors(self.policy).items()
        }

    def profile(self, config: ProfileConfig | None) -> None:
        """Profile the next rollouts; None ends profiling."""
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None
        if config is not None and config.includes(self.index):
            self._profiler = RolloutProfiler(config, self.index)
            self._profiler.start()

    def close(self) -> None:
        """Close all environments, even if one of them raises."""
        self.profile(None)
        with ExitStack() as closing:
            for group in self.groups:
                closing.callback(_close, group)


def _close(group: Group) -> None:
    """Close the environments of a group.

    Raises ``EnvError`` whatever they raise.
    """
    try:
        group.env.close()
    except MusterError:
        raise
    except Exception as error:
        raise EnvError(
            f"{group.env.spec.name}.close raised {described(error)}"
        ) from error


NO_OUTCOME = RolloutOutcome(0, 0, NO_EPISODES)


def _gradients(policy: Policy, *, enabled: bool) -> AbstractContextManager[None]:
    """Return a context in which the user's modules and functions run with gradients enabled or not;
    their outputs are always detached.
    """
    if not enabled or isinstance(policy, ServedPolicy):
        return nullcontext()
    from muster.policies.gradients import gradients_enabled

    return gradients_enabled(policy)


def phase_ended_by(error: BaseException, progress: Progress) -> str:
    """Return the phase that an error interrupted and set phase IDLE.

    A ``MusterError`` gets the attribute ``phase``.
    """
    phase = Phase(progress.begin(Phase.IDLE))
    if phase is not Phase.IDLE and issubclass(type(error), MusterError):
        vars(error)["phase"] = phase.name.lower()
    return phase.name.lower()


def execute(
    worker: Worker, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call the attribute of a worker at a path such as "env.unwrapped.set_gravity"."""
    found = resolve(worker, path)
    if not callable(found):
        raise BadOption(
            f"cascade_execute({path!r}): that is {type(found).__name__}, which cannot be called"
        )
    return found(*args, **kwargs)


def env_attributes(worker: Worker, name: str) -> list[Any]:
    """Return an attribute of every environment object."""
    return [
        getattr(env, name) for group in worker.groups for env in group.env.objects()
    ]


def on_environments(worker: Worker, sent: Any) -> list[Any]:
    """Return the results of a function for every environment object.

    Args:
        sent: the function and its further arguments, by place and by name; pickled for processes.
    """
    function, args, kwargs = unpickled(sent, "map_envs")
    envs = [env for group in worker.groups for env in group.env.objects()]
    return [function(env, *args, **kwargs) for env in envs]


def running(worker: Worker) -> dict[int, list[int]]:
    """Return the environments in the middle of an episode, by group."""
    found = {}
    for group in worker.groups:
        begun = group.clock.steps.reshape(group.B, -1).any(1)
        moving = np.flatnonzero(begun).tolist()
        found[group.number] = [i for i in moving if i not in group.pending]
    return found


def objects_of(lane: Lane) -> dict[Key, Array]:
    """Return the columns of Python objects, which do not lie in memory shared with other processes."""
    return {
        column.key: lane.arrays[column.key] for column in lane.layout.object_columns
    }
