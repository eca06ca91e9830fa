"""B single Gymnasium environments as one env batch, which writes directly into the rows of a slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from muster.capabilities import (
    Bypasses,
    CastsValues,
    CountsSteps,
    DrawsActions,
    ResetsWithOptions,
    TellsInfos,
    TracksLives,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.checks import FIX, Casts
from muster.envs.spaces import SpaceCodec, action_codec, action_masks, observation_codec
from muster.errors import (
    BadEnvOutput,
    EnvError,
    UnsupportedEnv,
    described,
    shown,
    text_of,
)
from muster.keys import REWARD, Key, dotted, next_of
from muster.memory.objects import copied_cells
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import ALL, EnvBatch, Step
from muster.rng import GroupRng

Arrays = Mapping[Key, Array]
RowStep = Callable[
    ..., "Sequence[int] | None"
]  # a ``Step`` that can continue within a row
FlagRecorder = Callable[[int, int, Any, Any, "list[int] | None"], "list[int] | None"]
TERMINATED = next_of(("terminated",))
TRUNCATED = next_of(("truncated",))
BLANK = object()  # instead of the observation of a bypassed environment


class StackedEnvs(
    EnvBatch,
    Bypasses,
    CastsValues,
    CountsSteps,
    DrawsActions,
    ResetsWithOptions,
    TellsInfos,
    TracksLives,
):
    """Implements ``EnvBatch`` for B ``gymnasium.Env``, or objects with their methods and spaces:
    owns them, steps them one after another. Their spaces are equal.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self.envs = list(envs)
        first = self.envs[0]
        name = checks.env_name(first)
        checks.check_distinct(self.envs, name)
        for i, env in enumerate(self.envs):
            for kind in ("observation_space", "action_space"):
                if getattr(env, kind) != getattr(first, kind):
                    raise UnsupportedEnv(
                        f"{name}: environments of one group need equal spaces, but {kind} of"
                        f" env {i} is {getattr(env, kind)} and that of env 0 is"
                        f" {getattr(first, kind)}"
                    )
        self.observations: SpaceCodec = observation_codec(first.observation_space)
        self.actions: SpaceCodec = action_codec(first.action_space)
        self.spec = EnvSpec(
            name,
            len(self.envs),
            (len(self.envs),),
            self.observations.specs,
            self.actions.specs,
            action_masks=action_masks(self.observations.specs, self.actions.specs),
            single=True,
            replays_alone=True,
            seeds_episodes=True,
        )
        self.casts: Casts = Casts(name)
        (key, spec), *_ = self.observations.specs.items()
        plain = self.observations.single and spec.is_tensor
        self._plain = (plain, key, spec.shape, spec.dtype)
        self._lives_lost: set[int] = set()
        self.bypassed: frozenset[int] = frozenset()
        self._lives_key: str | None = None
        self._keeps_infos = False
        self._told: list[Any] = [None] * self.spec.num_envs
        self.new_infos = [(self._told, ALL)]
        self._steps: list[
            Callable[[Any], Any]
        ] = []  # functions that step the environments

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        return self.actions.sample(rng, shape)

    def reset(
        self,
        arrays: Arrays,
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        plain, key, shape, dtype = self._plain
        options = self.take_options()
        for n, i in enumerate(which):
            who = f"{self.spec.name}[{i}]"
            seed = None if seeds is None else seeds[n]
            given = checks.seed_argument(self.envs[i], seed, self.spec.name, self.casts)
            given |= checks.kept_info(options)
            got = checks.call(self.envs[i], "reset", who, index=i, **given)
            obs, info = checks.reset_pair(got, who)
            if self._keeps_infos:
                self._told[i] = checks.kept_info(info)
            if (
                plain
                and type(obs) is np.ndarray
                and obs.shape == shape
                and obs.dtype == dtype
            ):
                arrays[key][row, i] = obs
            else:
                self._write(arrays, (row, i), obs, "reset")

    def start(self, lane: Lane) -> Step:
        step = lane.cache.get(self)
        if step is None:
            step = lane.cache[self] = self._make_step(lane)
        return step

    def bypass(self, which: Collection[int]) -> None:
        if self.bypassed != frozenset(which):
            self.bypassed = frozenset(which)
            self._fill_steps()

    def keep_infos(self) -> None:
        self._keeps_infos = True

    def track_lives(self, key: str) -> set[int]:
        self._lives_key = key
        return self._lives_lost

    def objects(self) -> Sequence[object]:
        return self.envs

    def close(self) -> None:
        checks.close_envs(enumerate(self.envs), self.spec.name)

    def _make_step(self, lane: Lane) -> Step:
        self._fill_steps()  # inner objects of environments may have been replaced
        obs_spec = next(iter(self.spec.observation_specs.values()))
        act_spec = next(iter(self.spec.action_specs.values()))
        plain, _, _, dtype = self._plain
        vector = plain and len(obs_spec.shape) == 1 and obs_spec.dtype == dtype
        integer = (
            self.actions.single and act_spec.dtype == np.int64 and not act_spec.shape
        )
        if vector and integer and not self.casts.any:
            return self._make_plain_step(lane, obs_spec.shape[0])
        return self._make_general_step(lane)

    def _make_general_step(self, lane: Lane) -> RowStep:
        """Make the step for all kinds of observations and actions, with casts where necessary."""
        steps = self._steps
        actions = self.action_rows(lane)
        put = self._observation_writer(lane)
        B = self.spec.num_envs
        record = self._flag_recorder(lane)
        rewards: Any = _flat(lane.arrays[REWARD])

        def step(
            t: int,
            b: int = 0,
            finished: list[int] | None = None,
            first: Any = ...,
        ) -> Sequence[int] | None:
            nonlocal rewards
            while True:  # no call of itself: a cycle would keep the lane's memory
                # index of the transition; its next observation is at k + B
                k = t * B + b
                got: Any = ...  # nothing yet
                try:
                    todo = zip(steps, actions(t))  # noqa: B905 (strict costs 0.3 us per step)
                    if first is not ...:
                        todo = zip(
                            [partial(_given, first), *steps[b + 1 :]],
                            actions(t)[b:],
                            strict=True,
                        )
                    for env_step, action in todo:
                        got = env_step(action)
                        obs, reward, terminated, truncated, _ = got
                        put(k + B, obs)
                        rewards[k] = reward
                        if terminated is not False or truncated is not False:
                            finished = record(
                                t, k - t * B, terminated, truncated, finished
                            )
                        # before the next number: a signal can come in between
                        got = ...
                        k += 1
                except BaseException as error:  # noqa: BLE001 (raised again, explained)
                    self._explain(
                        error, got, t, k - t * B, again=isinstance(rewards, _Rewards)
                    )
                    rewards = _Rewards(lane.arrays[REWARD], self.casts)
                    b = k - t * B
                    first = got
                else:
                    return finished

        return step

    def _make_plain_step(self, lane: Lane, width: int) -> Step:
        """Make the step for vector observations and integer actions, without a call or object per
        transition.

        A memoryview rejects other dtypes and shapes, and returns plain ints, the fastest index for
        environments. Once a cast is necessary, the general step is used instead.
        """
        steps = self._steps
        B = self.spec.num_envs
        (obs_key,) = self.spec.observation_specs
        (act_key,) = self.spec.action_specs
        observations = _flat(lane.arrays[obs_key])
        actions = _flat(lane.arrays[act_key])
        rewards = _flat(lane.arrays[REWARD])
        record = self._flag_recorder(lane)
        instead: list[RowStep] = []

        def step(t: int) -> Sequence[int] | None:
            if instead:
                return instead[0](t)
            finished: list[int] | None = None
            k = t * B
            at = (k + B) * width
            got: Any = ...  # nothing yet
            try:
                for env_step in steps:
                    got = env_step(actions[k])
                    obs, reward, terminated, truncated, _ = got
                    observations[at : at + width] = obs
                    rewards[k] = reward
                    if terminated is not False or truncated is not False:
                        finished = record(t, k - t * B, terminated, truncated, finished)
                    got = ...  # before the next number: a signal can come in between
                    k += 1
                    at += width
            except BaseException as error:  # noqa: BLE001 (raised again, explained)
                self._explain(error, got, t, k - t * B)
                instead.append(self._make_general_step(lane))
                return instead[0](t, k - t * B, finished, got)
            return finished

        return step

    def _fill_steps(self) -> None:
        """Set the functions that step the environments; in place, since steps of lanes refer to the
        list.
        """
        spec = next(iter(self.observations.specs.values()))
        array = self.observations.single and spec.is_tensor and spec.shape
        shown_as = np.zeros(spec.shape, spec.dtype) if array else BLANK
        blank: Any = (shown_as, 0.0, False, False, {})
        steps: list[Callable[[Any], Any]] = [env.step for env in self.envs]
        if self._keeps_infos:
            steps = [_keeping_info(step, i, self._told) for i, step in enumerate(steps)]
            for i in self.bypassed:
                self._told[i] = None
        key = self._lives_key
        if key is not None:
            for i, step in enumerate(steps):
                who = f"{self.spec.name}[{i}]"
                steps[i] = _counting_lives(step, who, key, i, self._lives_lost)
        for i in self.bypassed:
            steps[i] = lambda _: blank
        self._steps[:] = steps

    def _observation_writer(self, lane: Lane) -> Callable[[int, Any], None]:
        """Return ``put(k, obs)``, which writes an observation into entry ``k`` of the ``(T + 1) *
        B``.
        """
        arrays = {}
        for key, spec in self.spec.observation_specs.items():
            rows = lane.arrays[key]
            arrays[key] = rows.reshape(rows.shape[0] * rows.shape[1], *spec.shape)
        key, spec = next(iter(self.observations.specs.items()))
        if not (self.observations.single and spec.is_tensor and spec.shape):

            def put_any(k: int, obs: Any) -> None:
                if obs is BLANK:
                    self._blank(arrays, k)
                else:
                    self._write(arrays, (k,), obs, "step")

            return put_any
        cells = arrays[key]
        shape = spec.shape
        dtype = spec.dtype

        def put(k: int, obs: Any) -> None:
            if obs.shape != shape or obs.dtype != dtype:
                self._write({key: cells}, (k,), obs, "step")
            else:
                cells[k] = obs

        return put

    def _blank(self, arrays: Arrays, k: int) -> None:
        for key, spec in self.spec.observation_specs.items():
            array = arrays[key]
            array[k] = 0 if spec.is_tensor else array[k - self.spec.num_envs]

    def _write(
        self,
        arrays: Arrays,
        at: tuple[int, ...],
        obs: Any,
        method: str,
    ) -> None:
        """Write one observation into entry ``at`` of the arrays, checking every leaf."""
        try:
            codec = self.observations
            leaves = [obs] if codec.single else codec.flatten(obs)
            for (key, spec), leaf in zip(codec.specs.items(), leaves, strict=True):
                if not spec.is_tensor:
                    leaf = checks.stored_copy(leaf, dotted(key))
                elif problem := self.casts.problem(leaf, spec, dotted(key)):
                    raise BadEnvOutput(
                        f"{dotted(key)} is {problem}, but its space says {spec}"
                    )
                arrays[key][at] = leaf
        except BadEnvOutput as error:
            raise BadEnvOutput(
                f"{self.spec.name}[{at[-1]}].{method}: {error}. {FIX}"
            ) from None

    def action_rows(self, lane: Lane) -> Callable[[int], Sequence[Any]]:
        """Return ``actions(t)``, which copies the actions of row t: environments may keep or change
        them.
        """
        keys = list(self.spec.action_specs)
        specs = list(self.spec.action_specs.values())
        if self.actions.single:
            rows = lane.arrays[keys[0]]
            if specs[0].dtype.kind in "iu" and not specs[0].shape:
                return lambda t: rows[t].tolist()
            if specs[0].is_tensor:
                return lambda t: rows[t].copy()
            return lambda t: copied_cells(rows[t])  # type: ignore[return-value]
        copiers: list[Callable[[Any], Array]] = [
            np.ndarray.copy if spec.is_tensor else copied_cells for spec in specs
        ]
        columns = [lane.arrays[key] for key in keys]

        def composite(t: int) -> list[Any]:
            copies = [
                copy(column[t]) for copy, column in zip(copiers, columns, strict=True)
            ]
            envs = range(self.spec.num_envs)
            return [self.actions.build([leaf[b] for leaf in copies]) for b in envs]

        return composite

    def _flag_recorder(self, lane: Lane) -> FlagRecorder:
        terminated_rows = lane.arrays[TERMINATED]
        truncated_rows = lane.arrays[TRUNCATED]

        def record(
            t: int,
            b: int,
            terminated: Any,
            truncated: Any,
            finished: list[int] | None,
        ) -> list[int] | None:
            ended = checks.as_flag(terminated, "terminated", self.spec.name)
            cut = checks.as_flag(truncated, "truncated", self.spec.name)
            if not (ended or cut):
                return finished
            terminated_rows[t, b] = ended
            truncated_rows[t, b] = cut
            if finished is None:
                return [b]
            finished.append(b)
            return finished

        return record

    def _explain(
        self,
        error: BaseException,
        got: Any,
        t: int,
        b: int,
        *,
        again: bool = False,
    ) -> None:
        """Raise an error that explains the failure in env ``b`` at row ``t``.

        Return without an error if the returned values can be cast, and that was not tried yet
        (``again``).
        """
        skipped = sum(i < b for i in self.bypassed)
        self.executed_in_row = b + (got is not ...) - skipped
        if not issubclass(type(error), Exception):  # Ctrl-C
            raise error
        who = f"{self.spec.name}[{b}].step (row {t} of the batch)"
        if got is ... and checks.is_explained(error, self.envs[b]):
            raise error
        if got is ...:
            raise EnvError(f"{who} raised {described(error)}", env_index=b) from error
        if type(got) is _Refused:
            raise got.error from None
        checks.step_values(got, who)
        scratch = {
            key: np.empty((self.spec.num_envs, *spec.shape), spec.dtype)
            for key, spec in self.spec.observation_specs.items()
        }
        self._write(scratch, (b,), got[0], f"step (row {t} of the batch)")
        problem = self.casts.reward_problem(got[1])
        if problem:
            raise BadEnvOutput(f"{who}: {problem}. {FIX}") from error
        checks.as_flag(got[2], "terminated", who)
        checks.as_flag(got[3], "truncated", who)
        if again or not self.casts.any:
            returned = shown(lambda: repr(got))
            raise BadEnvOutput(
                f"{who} returned {returned}, which could not be stored: {text_of(error)}"
            ) from error
        self.executed_in_row = 0


class _Refused:
    """Replaces the result of a step that has an invalid info or flag, for ``track_lives``."""

    def __init__(self, error: BadEnvOutput) -> None:
        self.error = error


def _keeping_info(
    step: Callable[[Any], Any],
    i: int,
    told: list[Any],
) -> Callable[[Any], Any]:
    """Return a ``step`` that keeps the info of environment ``i`` in ``told``."""

    def keeping(action: Any) -> Any:
        got = step(action)
        # None: the caller reports the problem.
        complete = isinstance(got, tuple) and len(got) == 5
        told[i] = checks.kept_info(got[4]) if complete else None
        return got

    return keeping


def _counting_lives(
    step: Callable[[Any], Any],
    who: str,
    key: str,
    i: int,
    lost: set[int],
) -> Callable[[Any], Any]:
    """Return a ``step`` that keeps ``i`` in ``lost`` if the environment continues after the agent's
    episode ended.
    """

    def counting(action: Any) -> Any:
        got = step(action)
        if not isinstance(got, tuple) or len(got) != 5:
            return got  # the caller reports the problem
        obs, reward, terminated, truncated, info = got
        if not isinstance(info, dict):
            problem = f"{who}.step returned an info that is {type(info).__name__}, expected a dict. {FIX}"
            return _Refused(BadEnvOutput(problem))
        try:
            terminal = checks.as_flag(terminated, "terminated", who)
            ended = terminal or checks.as_flag(truncated, "truncated", who)
            over = checks.as_flag(info.get(key, ended), f"info[{key!r}]", who)
        except BadEnvOutput as error:
            return _Refused(error)
        if ended and not over:
            lost.add(i)
        else:
            lost.discard(i)
        if over and not ended:
            return obs, reward, terminated, True, info
        return got

    return counting


class _Rewards:
    """The flat rewards of a lane, for environments whose rewards have shape ``(1,)``."""

    def __init__(self, array: Array, casts: Casts) -> None:
        self._flat = array.reshape(-1)
        self._casts = casts

    def __setitem__(self, k: int, reward: Any) -> None:
        if problem := self._casts.reward_problem(reward):
            raise BadEnvOutput(problem)
        self._flat[k] = checks.number(reward)


def _given(result: Any, _: Any) -> Any:
    """Return the result of a step that was made already."""
    return result


def _flat(array: Array) -> Any:
    return memoryview(array.reshape(-1))  # type: ignore[arg-type]
