"""Tianshou's vector environments as an env batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from tianshou.data import Batch
from tianshou.data.batch import alloc_by_keys_diff
from tianshou.env import DummyVectorEnv
from tianshou.env.venv_wrappers import VectorEnvWrapper
from tianshou.env.worker import DummyEnvWorker

from muster.capabilities import Bypasses, CountsSteps, DrawsActions
from muster.env_spec import EnvSpec
from muster.errors import BadEnvOutput, described, shown
from muster.keys import OBSERVATION, REWARD, TERMINATED, TRUNCATED, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, ArraySpec
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng

PLAIN = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        np.float64,
        np.float32,
        np.int64,
        np.bool_,
    }
)

NUMBERS = "biufc"  # kinds of dtypes
REAL = "biuf"  # those whose values NumPy casts to one another


class Actions(NamedTuple):
    """The next actions of the environments ``ids`` (ascending): ``act`` of the policy, ``mapped``
    for the environments.

    ``policy`` is stored with ``act``, ``dist`` is its distribution, ``state`` is the policy's state
    after it. ``has_rows``: each array of ``policy`` has a row for each environment; else one row is
    stored for all.
    """

    ids: Array
    act: Array
    mapped: Array
    policy: Any
    dist: Any = None
    state: Any = None
    has_rows: bool = True


class Row(NamedTuple):
    """One time step: the parts of the transitions of the environments ``ids`` (ascending) that the
    lane does not have.

    ``rew`` is ``[R]`` or ``[R, agents]``; ``infos`` is None if they have ``env_id`` only;
    ``actions`` are those chosen in this row, which may be of other transitions than those that
    arrived.
    """

    ids: Array
    act: Array
    policy: Any
    rew: Array
    infos: Sequence[dict[str, Any]] | None
    actions: Actions


class VectorEnvs(EnvBatch, Bypasses, CountsSteps, DrawsActions):
    """A Tianshou vector environment; implements ``EnvBatch``.

    Observations that are not numeric arrays are objects.

    Environments that end are reset at once, as in Tianshou, but only after their step is complete
    (``on_row``). Numeric observations keep the dtype and shape of ``obs``. Everything that the
    vector environment returns is copied before it is called again: it may reuse its memory.

    Attributes:
        ready: environments for the next actions, ascending.
        infos: the last info of each environment.
        rows: time steps since the list was last emptied.
        reset_kwargs: keyword arguments for resets.
        failure: error of the vector environment, or of ``on_row``, as it was raised. After an error
            in a reset or in ``on_row`` the row is complete, and ``check`` raises the error before
            the next one.
        unreset: environments that the failure has left without a reset which they need: all after
            an error in a reset, which leaves their states unknown. None after ``StopIteration`` in
            a reset, with which vector environments say that they have no more episodes.
    """

    bypassed = ()  # see ``ready``

    def __init__(self, venv: Any, obs: Array) -> None:
        B = len(venv)
        self.venv = venv
        numbers = obs.dtype.kind in NUMBERS
        self._leaf = (
            ArraySpec(obs.shape[1:], obs.dtype) if numbers else ArraySpec((), OBJECT)
        )
        self.spec = EnvSpec(
            type(venv).__name__,
            B,
            (B,),
            {OBSERVATION: self._leaf},
            {},
            reward_dtype=np.dtype(np.float64),
        )
        self._actions: Actions  # for the next step
        self.infos: list[dict[str, Any]] = [{}] * B
        self._begun: list[int] = []  # see ``pop_begun``
        self.rows: list[Row] = []
        self.reset_kwargs: dict[str, Any] = {}
        self._render_s: float | None = None
        self._on_row: Callable[[Lane, int], object] | None = None
        self.failure: Exception | None = None
        self.unreset: list[int] = []
        self._repeats = (
            not self._leaf.is_tensor
        )  # observations of environments without a result
        self._sent: Any = (
            None  # the actions under way, and the policy's entries for them
        )
        # last observations of environments that are to be reset
        self._finished: dict[int, Any] = {}
        self._obs_ahead: dict[
            int, Any
        ] = {}  # observations that the next ``reset`` writes
        # of one environment; None: not known yet
        self._reward_shape: tuple[int, ...] | None = None
        self._all = self.ready = np.arange(self.spec.num_envs)

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        raise NotImplementedError(
            "Tianshou's collectors ask the environments' action spaces themselves"
        )

    def takes(self, obs: Array) -> bool:
        """Whether ``obs`` can be stored like the constructor's: same dtype and shape, or objects
        both.
        """
        if obs.dtype.kind not in NUMBERS:
            return not self._leaf.is_tensor
        return obs.dtype == self._leaf.dtype and obs.shape[1:] == self._leaf.shape

    def begin(self, obs: Array, infos: Sequence[dict[str, Any]]) -> None:
        """Set the results of a reset of all environments, which the next ``reset`` writes instead
        of resetting.

        Raises:
            BadEnvOutput: an info cannot be stored.
        """
        self.infos = [self._kept_info(i, info) for i, info in enumerate(infos)]
        self._begun = list(range(self.spec.num_envs))
        self._reward_shape = None
        self._finished = {}
        self._obs_ahead = dict(enumerate(_one_by_one(obs)))

    def configure(self, reset_kwargs: dict[str, Any], render: float | None) -> None:
        """Set the options of a call of ``collect``.

        Args:
            reset_kwargs: keyword arguments for resets.
            render: seconds to wait after each step, after rendering it, before any reset; None or
                0: do not render.
        """
        self.reset_kwargs = reset_kwargs
        self._render_s = render

    def begin_rows(self, on_row: Callable[[Lane, int], object] | None) -> None:
        """Forget the rows and the failure of earlier steps.

        Args:
            on_row: called with the lane and each complete row, before any reset. Its error becomes
                ``failure``.
        """
        self.rows.clear()
        self._on_row = on_row
        self.failure = None
        self.unreset = []

    def act(self, actions: Actions) -> None:
        """Set the actions of the next step."""
        self._actions = actions

    def pop_begun(self) -> list[int]:
        """Return the environments that began an episode since the last call."""
        begun = self._begun
        self._begun = []
        return begun

    def raise_failure(self) -> None:
        """Raise the failure, if there is one, and forget it: its traceback refers to the lane."""
        try:
            self.check()
        finally:
            self.failure = None

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def forget(self, which: Sequence[int]) -> None:
        """Have the next ``reset`` reset these environments, even if it was done ahead."""
        for i in which:
            self._obs_ahead.pop(i, None)

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        self._reset_finished()
        if unknown := [i for i in which if i not in self._obs_ahead]:
            self._reset_ahead(unknown)
        for i in which:
            self._write(arrays[OBSERVATION], row, i, self._obs_ahead.pop(i))

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        advance = self._direct() or self._by_vector
        on_row = self._on_row
        rewards, terminated, truncated = (
            arrays[REWARD],
            arrays[next_of(TERMINATED)],
            arrays[next_of(TRUNCATED)],
        )
        observations = arrays[OBSERVATION]

        def step(t: int) -> Sequence[int] | None:
            actions = self._actions
            self._keep(actions)
            ids, rew, finished, flags = advance(actions, observations, t + 1)
            partial = len(ids) < self.spec.num_envs
            if partial:
                rewards[t], others = 0, np.delete(self._all, ids)
                observations[t + 1, others] = (
                    observations[t, others] if self._repeats else 0
                )
            if rew.ndim == 1:
                rewards[t, ids if partial else slice(None)] = rew
            infos = [self.infos[i] for i in ids.tolist()]
            bare = all(len(info) == 1 and "env_id" in info for info in infos)
            self.rows.append(
                Row(ids, *self._chosen(ids), rew, None if bare else infos, actions)
            )
            # with pending steps Tianshou cannot render
            if self._render_s and not getattr(self.venv, "waiting_id", ()):
                self._render(self._render_s)
            if finished:
                terminated[t, finished], truncated[t, finished] = flags
                self._finished = dict(
                    zip(finished, observations[t + 1, finished], strict=True)
                )
            self.executed_in_row = 0
            if on_row is not None:
                try:
                    on_row(lane, t)
                except Exception as error:  # noqa: BLE001 (raised by ``check``)
                    self.failure = error
            return finished or None

        return step

    def bypass(self, which: Collection[int]) -> None:
        self._reset_finished()  # also those that need no further step
        self.ready = np.delete(self._all, list(which)) if which else self._all

    def objects(self) -> Sequence[object]:
        return [self.venv]

    # --- parts ------------------------------------------------------------------------------------

    def _by_vector(
        self, actions: Actions, observations: Array, row: int
    ) -> tuple[Array, Array, list[int], Any]:
        """Step the vector environment.

        Returns:
            environments with a result, their rewards, ended environments, and their terminated and
            truncated flags.
        """
        try:
            obs, rew, terminated, truncated, infos = self.venv.step(
                actions.mapped, actions.ids
            )
        except Exception as error:
            self._failed("step", error)
            raise
        self.executed_in_row = len(actions.ids)
        ids, order = self._arrived(actions, infos)
        terminated, truncated = (
            np.asarray(terminated, bool)[order],
            np.asarray(truncated, bool)[order],
        )
        self._take(ids, np.asarray(listed(infos), object)[order])
        self._write_all(observations, row, ids, obs[order])
        local = np.flatnonzero(terminated | truncated)
        return (
            ids,
            self._rewards(np.array(rew)[order], ids),
            ids[local].tolist(),
            (terminated[local], truncated[local]),
        )

    def _arrived(self, actions: Actions, infos: Any) -> tuple[Array, Any]:
        """Return the environments with a result, ascending, and their indices in the results."""
        return actions.ids, slice(None)

    def _keep(self, actions: Actions) -> None:
        """Copy actions and entries before the step, in which environments may change their actions."""
        self._sent = copied(actions.act), copied(actions.policy)

    def _chosen(self, ids: Array) -> tuple[Array, Any]:
        """Return the actions of these environments, and the policy's entries for them, which
        nothing else refers to.
        """
        act, policy = self._sent
        return act, policy

    def _direct(self) -> Any:
        """A function that steps the environments of a ``DummyVectorEnv`` one by one, as it does;
        None for others.
        """
        venv = self.venv
        infos = self.infos
        shape = self._leaf.shape
        dtype = self._leaf.dtype if self._leaf.is_tensor else None
        if (
            getattr(type(venv), "step", None) is not DummyVectorEnv.step
            or venv.is_async
            or venv.is_closed
        ):
            return None
        if any(type(worker) is not DummyEnvWorker for worker in venv.workers):
            return None
        steps = [worker.env.step for worker in venv.workers]

        def advance(
            actions: Actions, observations: Array, row: int
        ) -> tuple[Array, Array, list[int], Any]:
            after, rewards, finished, flags = (
                observations[row],
                [],
                list[int](),
                (list[bool](), list[bool]()),
            )
            mapped = actions.mapped
            i = 0
            got: Any = ...  # nothing yet
            try:
                for k, i in enumerate(actions.ids.tolist()):
                    got = ...
                    got = steps[i](mapped[k])
                    self.executed_in_row = k + 1
                    obs, reward, terminated, truncated, info = got
                    info["env_id"] = i
                    infos[i] = (
                        {"env_id": i} if len(info) == 1 else self._kept_info(i, info)
                    )
                    rewards.append(reward)
                    if (
                        type(obs) is np.ndarray
                        and obs.dtype is dtype
                        and obs.shape == shape
                    ):
                        after[i] = obs
                    else:
                        self._write(observations, row, i, obs)
                    if terminated or truncated:
                        finished.append(i)
                        flags[0].append(_flag("terminated", terminated))
                        flags[1].append(_flag("truncated", truncated))
            except Exception as error:
                if got is ...:
                    self._failed("step", error, i)
                    raise
                if type(error) is BadEnvOutput:
                    raise
                raise BadEnvOutput(
                    f"environment {i} of {self.spec.name} returned {_shown(got)} from step, expected"
                    " (observation, reward, terminated, truncated, info), with an info that is a"
                    f" dictionary: {described(error)}"
                ) from error
            rew = self._rewards(rewards, actions.ids)
            return actions.ids, rew, finished, flags

        return advance

    def _render(self, seconds: float) -> None:
        try:
            self.venv.render()
        except Exception as error:
            self._failed("render", error)
            raise
        if not np.isclose(seconds, 0):
            time.sleep(seconds)  # noqa: TID251 (the purpose of ``collect(render=)``)

    def _reset_finished(self) -> None:
        """Reset the environments that ended in the last row, and keep their first observations.

        After an error, or if there is a failure already, they have their last observations until
        the next reset.
        """
        if not self._finished:
            return
        finished, self._finished = self._finished, {}
        which = list(finished)
        if self.failure is not None:
            self.unreset = which
        else:
            try:
                self._reset_ahead(which)
                return
            except Exception as error:  # noqa: BLE001 (raised by ``check``)
                self.failure = error
                self.unreset = (
                    [] if isinstance(error, StopIteration) else self._all.tolist()
                )
        self._obs_ahead.update(finished)
        self._begun += which

    def _reset_ahead(self, which: Sequence[int]) -> None:
        """Reset environments, and keep their first observations for a later ``reset``, which may
        not come.
        """
        try:
            obs, infos = self.venv.reset(env_id=np.asarray(which), **self.reset_kwargs)
        except Exception as error:
            self._failed("reset", error)
            raise
        self._take(which, infos)
        self._obs_ahead.update(zip(which, _one_by_one(copied(obs)), strict=True))
        self._begun += which

    def _take(self, which: Sequence[int] | Array, infos: Any) -> None:
        for i, info in zip(which, listed(infos), strict=True):
            self.infos[i] = self._kept_info(i, info)

    def _kept_info(self, env: int, info: Any) -> Any:
        """Return a copy of an info; see ``copied``."""
        if type(info) is not dict:
            return copied(info)
        kept = {}
        for key, value in info.items():
            if not isinstance(key, str):
                raise BadEnvOutput(
                    f"an info of environment {env} of {self.spec.name} has the key {_shown(key)}:"
                    " Tianshou's Batch takes strings only, in nested dictionaries, too"
                )
            kind = type(value)
            if kind in PLAIN:
                kept[key] = value
            elif kind is dict:
                kept[key] = self._kept_info(env, value)
            elif kind is list:
                kept[key] = [self._kept_info(env, part) for part in value]
            else:
                kept[key] = copied(value)
        return kept

    def _rewards(self, values: Any, ids: Array) -> Array:
        """Return the rewards of these environments as one array, of the shape that the first rewards
        have had.
        """
        try:
            rew = np.array(values)
        except ValueError:  # of several shapes
            raise self._bad_reward(values, ids) from None
        if rew.dtype.kind not in REAL:
            raise self._bad_reward(values, ids)
        if self._reward_shape is None:
            self._reward_shape = rew.shape[1:]
        if rew.shape[1:] == self._reward_shape:
            return rew
        if math.prod(rew.shape[1:]) != math.prod(self._reward_shape):
            raise self._bad_reward(values, ids)
        # such as a number in an array, which a buffer stores as a number
        return rew.reshape(len(rew), *self._reward_shape)

    def _bad_reward(self, values: Any, ids: Array) -> BadEnvOutput:
        """Return the error for the first reward that is no number, or of another shape."""
        stacked_dtype = getattr(values, "dtype", np.dtype(object))
        if stacked_dtype.kind not in REAL + "O":
            return BadEnvOutput(
                f"the environments of {self.spec.name} returned rewards of dtype {stacked_dtype},"
                " expected numbers"
            )
        shape = self._reward_shape
        if shape is None:
            shape = np.shape(values[0])
        env, value = next(
            (i, value)
            for i, value in zip(ids, values, strict=True)
            if np.asarray(value).dtype.kind not in REAL or np.shape(value) != shape
        )
        expected = f"numbers of shape {shape}, as before" if shape else "a number"
        return BadEnvOutput(
            f"environment {env} of {self.spec.name} returned the reward {_shown(value)}, expected"
            f" {expected}"
        )

    def _write_all(self, observations: Array, row: int, ids: Array, obs: Any) -> None:
        # objects may be views of the venv's memory
        is_numeric = self._leaf.is_tensor and isinstance(obs, np.ndarray)
        if (
            is_numeric
            and obs.dtype == self._leaf.dtype
            and obs.shape[1:] == self._leaf.shape
        ):
            observations[row, ids] = obs
            return
        for i, one in zip(ids, _one_by_one(obs), strict=True):
            self._write(observations, row, i, one)

    def _write(self, observations: Array, row: int, env: int, obs: Any) -> None:
        if not self._leaf.is_tensor:
            observations[row, env] = copied(obs)
            return
        value = np.asarray(obs)
        if value.shape != self._leaf.shape or not np.can_cast(
            value.dtype, self._leaf.dtype, "same_kind"
        ):
            raise BadEnvOutput(
                f"environment {env} of {self.spec.name} observed {value.dtype} {value.shape}, and"
                f" after the last reset of all environments it was {self._leaf.dtype}"
                f" {self._leaf.shape}. Give one dtype and shape always"
            )
        observations[row, env] = value

    def _failed(self, method: str, error: Exception, env: int | None = None) -> None:
        """Keep an error as the failure, and note its place in it."""
        who = (
            self.spec.name if env is None else f"Environment {env} of {self.spec.name}"
        )
        noted(error, f"{who} raised this in {method}.")
        self.failure = error


class AsyncVectorEnvs(VectorEnvs):
    """A vector environment with ``wait_num`` or ``timeout``: a step's result may arrive many rows
    after its action.

    Until then the environment's observation is repeated. The row of arrival has the complete step:
    observation, action, result. ``arrived`` and ``ended`` count results and ended episodes.
    """

    def __init__(self, venv: Any, obs: Array) -> None:
        super().__init__(venv, obs)
        self._repeats = True
        self.arrived = self.ended = 0
        self._sent = Batch()  # ``[N, ...]``

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        super().reset(arrays, row, which, seeds)
        self.ready = np.union1d(self.ready, which)

    def bypass(self, which: Collection[int]) -> None:
        """Do nothing: only environments with pending steps are left out."""

    def _direct(self) -> None:
        """Return None: also if all environments are waited for."""

    def _keep(self, actions: Actions) -> None:
        sent = Batch(act=unshared(actions.act), policy=unshared(actions.policy))
        alloc_by_keys_diff(self._sent, sent, self.spec.num_envs, stack=False)
        if (
            type(actions.act) is np.ndarray
            and self._sent.act.dtype != actions.act.dtype
        ):
            self._sent.act = self._sent.act.astype(
                np.result_type(self._sent.act, actions.act)
            )
        self._sent[actions.ids] = sent

    def _by_vector(
        self, actions: Actions, observations: Array, row: int
    ) -> tuple[Array, Array, list[int], Any]:
        result = ids, _, finished, _ = super()._by_vector(actions, observations, row)
        self.ready, self.arrived, self.ended = (
            ids,
            self.arrived + len(ids),
            self.ended + len(finished),
        )
        return result

    def _arrived(self, actions: Actions, infos: Any) -> tuple[Array, Any]:
        ids = np.array([int(info["env_id"]) for info in infos])
        order = np.argsort(ids)
        return ids[order], order

    def _chosen(self, ids: Array) -> tuple[Array, Any]:
        sent = self._sent[ids]
        return sent.act, sent.policy

    def _reset_ahead(self, which: Sequence[int]) -> None:
        if not set(which).isdisjoint(self.venv.waiting_id):
            drain(self.venv)
        super()._reset_ahead(which)


def is_closed(venv: Any) -> bool:
    """Whether a vector environment, or the one that it wraps, says that it is closed."""
    while isinstance(venv, VectorEnvWrapper):
        venv = venv.venv
    return bool(getattr(venv, "is_closed", False))


def drain(venv: Any) -> None:
    """Wait for all pending steps of a vector environment, and discard their results."""
    while venv.waiting_id:
        venv.step(None, venv.waiting_id)


def _one_by_one(obs: Any) -> Any:
    return (
        obs.astype(object)
        if isinstance(obs, np.ndarray) and obs.dtype.kind not in NUMBERS
        else obs
    )


def listed(infos: Any) -> Any:
    """Return one dictionary per environment; EnvPool returns one dictionary of arrays."""
    return Batch(infos).to_list_of_dicts() if isinstance(infos, dict) else infos


def batch_of(**values: Any) -> Any:
    """Make a ``Batch`` of arrays, tensors and Batches, without its checks."""
    batch = Batch()
    batch.__dict__.update(values)
    return batch


def stacked(obs: Array) -> Any:
    """Convert observations to the form of policies and buffers: dictionaries become one Batch."""
    return obs if obs.dtype != OBJECT else Batch(obs=obs).obs


def copied(tree: Any) -> Any:
    """Return a copy that shares no memory with objects that an environment or a policy may change
    later.

    Objects that cannot be copied are returned as they are.
    """
    kind = type(tree)
    if kind in PLAIN:
        return tree
    if kind is np.ndarray:
        made = tree.copy()
        if made.dtype == OBJECT:
            cells = made.reshape(-1)
            for i, value in enumerate(cells):
                cells[i] = copied(value)
        return made
    if kind is dict:
        return {key: copied(value) for key, value in tree.items()}
    if kind is list:
        return [copied(value) for value in tree]
    if kind is Batch:
        return batch_of(**{key: copied(value) for key, value in tree.__dict__.items()})
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    try:
        return deepcopy(tree)
    except Exception:  # noqa: BLE001 (locks, handles of simulators, tensors within a graph)
        return tree


def unshared(tree: Any) -> Any:
    """Return a tree of arrays as it is, except for arrays of objects: these are copied, with the
    objects.
    """
    if type(tree) is np.ndarray:
        return copied(tree) if tree.dtype == OBJECT else tree
    if type(tree) is Batch:  # ``isinstance`` takes a microsecond
        return batch_of(
            **{key: unshared(value) for key, value in tree.__dict__.items()}
        )
    return tree


def _flag(name: str, value: Any) -> bool:
    """Convert a flag; numbers and None are some."""
    if value is not None and value not in (0, 1):
        raise ValueError(f"{name} is {_shown(value)}, not True or False")
    return bool(value)


def _shown(value: Any) -> str:
    """The beginning of the ``repr`` of something that an environment has returned."""
    text = shown(lambda: repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def noted(error: Exception, note: str) -> None:
    """Add a note to an error of the user's code, which is raised as it is; only once, if it is
    raised again.
    """
    with suppress(Exception):  # its class may do anything
        if note not in getattr(error, "__notes__", ()):
            add_note: Any = vars(BaseException)[
                "add_note"
            ]  # Tianshou needs Python 3.11
            add_note(error, note)
