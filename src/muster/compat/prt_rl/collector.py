"""prt_rl's collector: its names and dictionaries, with Muster's loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from muster.compat.base import GroupRunner, borrowed
from muster.compat.prt_rl.actors import HeadActor, PrtRlActor, Tensors
from muster.compat.prt_rl.envs import PrtEnvs, Side, side_of
from muster.episodes.rules import Fair, PerEnv, Rule
from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    HookError,
    PolicyError,
    described,
)
from muster.keys import DONE, OBSERVATION, REWARD, next_of
from muster.memory.slots import Lane, torch_dtype
from muster.observing.metrics import MetricsTracker
from muster.policies.heads import Head
from muster.rng import GroupRng
from muster.utils.attributes import kind_of
from muster.utils.integers import integer
from muster.utils.tracebacks import trimmed

ROWS = 128  # of memory, if the number of steps is not known before
TERMINATED, TRUNCATED = next_of(("terminated",)), next_of(("truncated",))


class Collector:
    """Collects experience from all environments at once, as dictionaries of tensors.

    ::

        collector = Collector(env, flatten=False)
        experience = collector.collect_experience(policy, num_steps=2048)
        experience["state"]  # (T, N, ...)

    An environment whose episode is over is reset, and collecting continues. Do not collect
    trajectories if episodes never end. The caller owns the returned tensors.

    After an error in a step or reset, or of the policy, the next call resets all environments. What
    the call had collected before is the error's attribute ``experience``: for
    ``collect_experience`` its complete steps, for ``collect_trajectory`` its whole trajectories.
    It is ``{}`` if there are none. If only the extra call for ``"last_value_est"`` fails,
    ``experience`` has all steps, and the next call continues after them.

    Args:
        env: with prt_rl's interface (``get_num_envs``, ``get_parameters``, ``reset``,
            ``reset_index``, ``step``), or a Gymnasium environment or vector environment. The
            collector does not close it.
        logger: a logger of prt_rl (``should_log``, ``log_scalar``) or any that
            ``muster.observing.loggers.as_logger`` accepts; gets every episode that ends. None: no
            logging.
        flatten: ``collect_experience`` returns ``(T * N, ...)``, ordered by time step; else ``(T,
            N, ...)``.

    Raises:
        UnsupportedEnv: another kind of environment, or ``get_num_envs`` returns no number.
        BadOption: another kind of logger.
    """

    def __init__(self, env: Any, logger: Any = None, flatten: bool = True) -> None:
        self.env = env
        self.logger = logger
        self.flatten = flatten
        self._side = side_of(env)
        self.metric = MetricsTracker(self._side.env.spec.num_envs, logger)
        self._runner: GroupRunner | None = None
        self._actor: PrtRlActor | HeadActor | None = None
        self._lane: Lane | None = None  # of the rollout that was started last
        self._failure: HookError | None = None

    @trimmed
    def collect_experience(
        self, policy: Any, num_steps: int = 1, bootstrap: bool = True
    ) -> Tensors:
        """Collect ``T = ceil(num_steps / N)`` steps in each of N environments, from their present
        state.

        Args:
            policy: has ``act(state, deterministic=False) -> (action, dict)``; or one of Muster's
                heads.
            num_steps: steps over all environments.
            bootstrap: add ``"last_value_est"`` if the policy returns a ``"value"``, which has to be
                one number for each environment.

        Returns:
            ``"state"``, ``"action"``, ``"next_state"`` (at the end of an episode, its last state),
            ``"reward"`` float32 and ``"done"`` bool, both ``(..., 1)``; all entries of the policy's
            dict; ``"last_value_est"`` ``(N, 1)``: the policy's value of the last next state, 0
            where the episode ended.

        Raises:
            BadOption: ``num_steps`` is less than 1.
            EnvError, BadEnvOutput, PolicyError, BadPolicyOutput: see ``muster.errors``; what was
                collected is the attribute ``experience``.
            HookError: the logger raised; the experience is its attribute ``experience``.
        """
        num_steps = integer("num_steps", num_steps)
        bootstrap = bool(bootstrap)
        T = -(-num_steps // self._side.env.spec.num_envs)
        parts: list[Tensors] = []
        values = None
        try:
            actor = self._roll(policy, T, parts, bootstraps=bootstrap)
            (rows,) = parts
            if bootstrap and isinstance(actor, PrtRlActor) and "value" in rows:
                values = actor.last_value(rows["next_state"][-1], rows["done"][-1])
        except BaseException as error:
            vars(error)["experience"] = self._arranged(parts)
            raise
        found = self._arranged(parts)
        if values is not None:
            found["last_value_est"] = values
        return self._logged(found)

    @trimmed
    def collect_trajectory(
        self,
        policy: Any,
        num_trajectories: int | None = None,
        min_num_steps: int | None = None,
    ) -> Tensors:
        """Reset all environments, and collect whole trajectories, concatenated in the order of
        their ends.

        Args:
            policy: see ``collect_experience``.
            num_trajectories: total number n (1 if neither is given): ``n // N`` from each of N
                environments, and the rest from the first environments to end one more; if ``n <
                N``, one from each of the first n.
            min_num_steps: instead, collect trajectories until they have this number of steps
                together.

        Returns:
            the entries of ``collect_experience``, ``(B, ...)`` with the steps of all trajectories
            as B for every ``flatten``, without ``"last_value_est"``.

        Raises:
            BadOption: both numbers are given, or one is less than 1.
            Other errors: see ``collect_experience``.
        """
        if num_trajectories is not None and min_num_steps is not None:
            raise BadOption(
                f"num_trajectories={num_trajectories} and min_num_steps={min_num_steps} were given:"
                " give one of them"
            )
        if min_num_steps is None:
            num_trajectories = integer(
                "num_trajectories", 1 if num_trajectories is None else num_trajectories
            )
        else:
            min_num_steps = integer("min_num_steps", min_num_steps)
        self._begin_episodes()
        chosen = Selection(
            self._side.env.spec.num_envs, num_trajectories, min_num_steps or 0
        )
        parts: list[Tensors] = []
        try:
            while not chosen.complete:
                self._roll(policy, ROWS, parts, chosen)
                chosen.leave()
        except BaseException as error:
            vars(error)["experience"] = chosen.taken_from(parts)
            raise
        return self._logged(chosen.taken_from(parts))

    def get_metric_tracker(self) -> MetricsTracker:
        """Return statistics of all steps and episodes so far, including those that no call
        returned.
        """
        return self.metric

    def _roll(
        self,
        policy: Any,
        T: int,
        parts: list[Tensors],
        chosen: Selection | None = None,
        *,
        bootstraps: bool = False,
    ) -> PrtRlActor | HeadActor:
        """Collect ``T`` steps, or fewer if ``chosen`` is complete, and append them to ``parts``:
        ``(n, N, ...)`` each. After an error these are the complete ones.
        """
        if self._actor is None or self._actor.policy is not policy:
            self._actor = _actor_of(policy, self._side)
        self._lane = None
        try:
            actor = self._fill(self._actor, T, chosen, bootstraps)
        except PolicyError as error:
            cause = error.__cause__ or error
            before = sum(len(part["done"]) for part in parts)
            raised = self._policy_error(self._actor.name, cause, before)
            self._give_up(parts)
            raise raised from cause
        except BaseException:
            self._give_up(parts)
            raise
        self._keep(actor, parts)
        return actor

    def _fill(
        self,
        actor: PrtRlActor | HeadActor,
        T: int,
        chosen: Selection | None,
        bootstraps: bool,
    ) -> PrtRlActor | HeadActor:
        runner = self._started()
        if not actor.begin(bootstraps=bootstraps):
            runner.prime(actor.adapted)
        self._lane = lane = runner.lane(actor.adapted, T)
        if chosen is not None:
            chosen.enter(lane)
        try:
            runner.run(actor.adapted, lane, rule=chosen or LastRow(lane))
        except BadPolicyOutput:
            if (
                actor.unused is None
                or lane.done_steps
                or (chosen is not None and chosen.before)
            ):
                raise
            # for outputs of another kind
            self._actor = PrtRlActor(actor.policy, self._side, actor.unused)
            return self._fill(self._actor, T, chosen, bootstraps)
        return actor

    def _give_up(self, parts: list[Tensors]) -> None:
        """Append the complete rows after an error, and let the next call reset all environments."""
        if self._runner is not None and self._actor is not None:
            # only the call in which it was returned may use it
            self._actor.unused = None
            # the error at hand came first, and bad values in rows before it are taken back
            with suppress(BadEnvOutput, BadPolicyOutput):
                self._runner.end_early()
            self._runner.end_early()
            self._keep(self._actor, parts)
        self._begin_episodes()

    def _policy_error(
        self, name: str, error: BaseException, before: int
    ) -> PolicyError:
        """Return the error to raise for one of the policy.

        The loop's own says that the next call tries again from there, which is not so here.

        Args:
            before: number of rows in earlier lanes of the call.
        """
        side = self._side
        t = before + (0 if self._lane is None else self._lane.done_steps)
        (spec,) = side.env.spec.observation_specs.values()
        shape = side.env.spec.num_envs, *spec.shape
        zeros = torch.zeros(shape, dtype=torch_dtype(spec.dtype), device="cpu")
        state = side.show(zeros)
        return PolicyError(
            f"policy {name} raised {described(error, f' at row {t} of the call')}. It got states of"
            f" shape {tuple(state.shape)} and dtype {state.dtype}. The next call resets all"
            " environments; what is complete is the attribute experience of this error."
        )

    def _started(self) -> GroupRunner:
        if self._runner is None:
            env = self._side.env
            if isinstance(env, PrtEnvs):
                env.look()
            # for Muster's heads
            self._runner = GroupRunner(
                env, borrowed(), rng=GroupRng(torch.initial_seed())
            )
        return self._runner

    def _begin_episodes(self) -> None:
        if self._runner is not None:
            self._runner.group.reset()
        if isinstance(self._side.env, PrtEnvs):
            self._side.env.reset_all_next()
        self.metric.abandon()

    def _keep(self, actor: PrtRlActor | HeadActor, parts: list[Tensors]) -> None:
        """Count the complete rows of the present lane, and append them."""
        lane = self._lane
        if lane is None or not lane.done_steps:
            return
        self._count(lane)
        parts.append(self._experience(actor, lane))

    def _arranged(self, parts: list[Tensors]) -> Tensors:
        """Return the rows of a call, the only part, as ``flatten`` says; ``{}``: there are none."""
        (found,) = parts or [{}]
        if not self.flatten:
            return dict(found)
        return {name: tensor.flatten(0, 1) for name, tensor in found.items()}

    def _experience(self, actor: PrtRlActor | HeadActor, lane: Lane) -> Tensors:
        """Return copies of all columns of a lane, ``(n, N, ...)`` each."""
        side = self._side
        n = lane.done_steps
        state, next_state = (
            side.show(lane.tensors[key][:n])
            for key in (OBSERVATION, next_of(OBSERVATION))
        )
        returned = actor.results(lane)
        return {
            "state": state,
            "action": returned.pop("action"),
            "next_state": next_state,
            "reward": side.rewards(lane)[:n].to(state.device, copy=True),
            "done": lane.tensors[next_of(DONE)][:n]
            .unsqueeze(-1)
            .to(state.device, copy=True),
            **returned,
        }

    def _count(self, lane: Lane) -> None:
        """Update the tracker with the executed steps; an error of its logger is raised later."""
        n = lane.done_steps
        reward = lane.arrays[REWARD][:n]  # the sum over several agents
        try:
            self.metric.update_rows(
                reward, lane.arrays[TERMINATED][:n] | lane.arrays[TRUNCATED][:n]
            )
        except HookError as error:
            self._failure = self._failure or error

    def _logged(self, found: Tensors) -> Tensors:
        failure, self._failure = self._failure, None
        if failure is None:
            return found
        vars(failure)["experience"] = found
        raise failure


def _actor_of(policy: Any, side: Side) -> PrtRlActor | HeadActor:
    if isinstance(policy, Head):
        return HeadActor(policy, side)
    if isinstance(policy, type) or not callable(getattr(policy, "act", None)):
        raise BadOption(
            f"policy is {kind_of(policy)}, expected an object with act(state,"
            " deterministic=False) -> (action, dict), or a head such as"
            " muster.policies.categorical(net)"
        )
    return PrtRlActor(policy, side)


class Segment(NamedTuple):
    """A whole trajectory: rows ``begin`` to ``end`` of one environment, counted from the first row
    of the call.
    """

    env: int
    begin: int
    end: int


class Selection:
    """Chooses whole trajectories; all environments continue until the last one is complete.

    Implements ``Rule``.

    Either ``trajectories``: the same number from each environment, the rest from the first to end
    one more (one from each of the first environments, if there are more environments); or, in the
    order of ends, until ``min_steps``.
    """

    def __init__(
        self, num_envs: int, trajectories: int | None, min_steps: int = 0
    ) -> None:
        self._rule: Rule | None = None
        if trajectories is not None:
            self._rule = (PerEnv if trajectories < num_envs else Fair)(
                trajectories, num_envs
            )
        self.biased = self._rule is None or self._rule.biased
        self._missing = min_steps
        self._begun = [0] * num_envs
        self._lane: Lane
        self.before = 0  # rows of earlier lanes
        self.segments: list[Segment] = []

    def enter(self, lane: Lane) -> None:
        """Continue in a lane."""
        self._lane = lane

    def leave(self) -> None:
        """Count the rows of the lane, which may be filled again."""
        self.before += self._lane.done_steps

    def taken_from(self, parts: Sequence[Tensors]) -> Tensors:
        """Return the chosen trajectories from the rows of all lanes, one after another; ``{}``: none
        is whole.
        """
        count = sum(len(part["done"]) for part in parts)
        # after an error, rows can have been taken back
        whole = [s for s in self.segments if s.end <= count]
        if not whole:
            return {}
        rows = torch.cat([torch.arange(s.begin, s.end, device="cpu") for s in whole])
        envs = torch.cat(
            [torch.full((s.end - s.begin,), s.env, device="cpu") for s in whole]
        )
        return {
            name: torch.cat([part[name] for part in parts])[rows, envs]
            for name in parts[0]
        }

    def ended(self, which: Sequence[int]) -> list[int]:
        end = self.before + self._lane.done_steps
        for i in (
            counted := self._first_of(which, end)
            if self._rule is None
            else self._rule.ended(which)
        ):
            self.segments.append(Segment(i, self._begun[i], end))
        for i in which:
            self._begun[i] = end
        return counted

    def awaits(self, env_id: int) -> bool:
        return not self.complete

    @property
    def complete(self) -> bool:
        return self._missing <= 0 if self._rule is None else self._rule.complete

    def _first_of(self, which: Sequence[int], end: int) -> list[int]:
        counted = []
        for i in which:
            if self._missing > 0:
                counted.append(i)
                self._missing -= end - self._begun[i]
        return counted


class LastRow:
    """Defers resets after the last row of a lane to the next call, as prt_rl does.

    Implements ``Rule``.
    """

    biased = False

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def ended(self, which: Sequence[int]) -> list[int]:
        return list(which)

    def awaits(self, env_id: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self._lane.done_steps == self._lane.T
