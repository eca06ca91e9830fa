"""The options of a collector that its workers need, and those of a pool of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from muster.envs.infos import wanted_infos
from muster.errors import BadOption
from muster.rollout.options import RolloutOptions
from muster.utils.checked import Checked, Details, Number, PositiveNumber, check_choice
from muster.utils.containers import is_several
from muster.utils.integers import integer

if TYPE_CHECKING:
    import numpy as np
    import torch

EXPLORATION = ("random", "mode", "mean", "median", "deterministic")
OnFailure = Literal["raise", "restart", "drop"]
StartMethod = Literal["forkserver", "spawn"]
# share of its deadline in which a worker closes coroutines; it reports errors in the rest
CLOSE_SHARE = 0.6
TIMEOUTS: dict[str, float | None] = {  # seconds
    "construct": 300.0,
    "reset": 60.0,
    "step": 60.0,
    "policy": 60.0,
    "weights": 60.0,
    "call": 300.0,
    "close": 5.0,
    "join": 600.0,
    "heartbeat": 15.0,
}


def check_timeouts(timeouts: Any) -> None:
    """Raise ``BadOption`` unless these are seconds by phase."""
    if not isinstance(timeouts, Mapping):
        raise BadOption(f"timeouts={timeouts!r}: expected a dict of seconds by phase")
    for phase, seconds in timeouts.items():
        if phase not in TIMEOUTS:
            raise BadOption(
                f"timeouts: there is no phase {phase!r}; expected some of {', '.join(TIMEOUTS)}"
            )
        if seconds is not None and not (
            isinstance(seconds, (int, float)) and 0 < seconds < math.inf
        ):
            raise BadOption(
                f"timeouts[{phase!r}]={seconds!r}: expected seconds, more than 0, or None for no"
                " limit"
            )


def timeout_of(timeouts: Mapping[str, float | None], phase: str) -> float | None:
    """Return the deadline of a phase in seconds (None: none), from the user's ``timeouts`` or the
    defaults.
    """
    seconds = {**TIMEOUTS, **timeouts}
    return seconds.get(phase, seconds["step"])


def _exploration(name: str, value: Any) -> str:
    """Return the name of an exploration type, also of TorchRL's enum."""
    kind = getattr(value, "name", value)
    return check_choice(
        name, kind.lower() if isinstance(kind, str) else kind, EXPLORATION
    )


def _infos(name: str, value: Any) -> Any:
    wanted_infos(value)
    return value


def _frames(name: str, value: Any) -> int | tuple[int, ...]:
    if not is_several(value):
        return integer(name, value)
    if not value:
        raise BadOption(f"{name} is an empty list: expected a number for each worker")
    return tuple(integer(f"{name}[{i}]", frames) for i, frames in enumerate(value))


def _timeouts(name: str, value: Any) -> Any:
    check_timeouts(value)
    return value


def _capture(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise BadOption(f"{name}={value!r}: expected True, False or 'auto'")
    return value


def _cpus(name: str, value: Any) -> Any:
    if not _is_list_of_cpus(value):
        raise BadOption(
            f"{name}={value!r}: expected 'auto', or a list of CPU numbers per worker"
        )
    return value


def _is_list_of_cpus(given: Any) -> bool:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    parts = [cpus if isinstance(cpus, Sequence) else () for cpus in given]
    return all(
        len(cpus) and all(type(cpu) is int and cpu >= 0 for cpu in cpus)
        for cpus in parts
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(RolloutOptions):
    """Options that workers need to make environments and policies. Extends ``RolloutOptions``.

    Attributes:
        frames_per_batch: number of environment steps in a batch, over all environments. If it is
            not a multiple of the number of environments, batches have more cells, and
            ``collector/valid`` marks exactly this number of them. Where workers or nodes fill batches
            of their own, also a list with a number for each, a multiple of its number of
            environments. None: only ``collect`` is available, and the collector cannot be iterated.
        num_envs: number of environments to make from an id or function and to step together. None:
            a single one, whose batches have no environment dimension.
        trust_policy: whether ``policy`` takes a TensorDict. None: decided by its signature.
        compile_policy: apply ``torch.compile`` to the policy. A dict is passed as keyword
            arguments.
        cudagraph_policy: wrap the policy in tensordict's ``CudaGraphModule``. A dict is passed as
            keyword arguments.
        compile_env: apply ``torch.compile`` to the ``step`` of environments that step together on
            tensors. A dict is passed as keyword arguments, such as ``{"mode":
            "max-autotune-no-cudagraphs"}``. The first steps take seconds to minutes.
        capture: record whole rollouts as one CUDA graph of all operations of policy and
            environments, and replay it. True: raise ``CaptureRefused`` if that is impossible;
            "auto": run row by row then, for a reason that ``stats().capture`` has. Only for
            environments whose tensors are on a GPU. A lane's first two rollouts run row by row; the
            second one is checked against two replays, bit for bit. False is the default until
            recorded rollouts have been in use on many GPUs. See docs/gpu.md.
        exploration_type: how heads and TensorDict modules choose actions: "random", "mode", "mean",
            "median" or "deterministic", or TorchRL's ``ExplorationType``.
        info: fields of the ``info`` of ``reset`` and ``step`` to store, as ``("info", name)`` and
            ``("next", "info", name)``. True: all that a reset and a step show. Or a list of names,
            or a dict of ``gymnasium.spaces`` by name (None: as seen). A flag ``("info", "_name")``
            tells where a field is present; elsewhere it is zero. Without spaces, one more
            environment is made from the env id or function, makes a random step, and is closed;
            environment objects are only reset. See docs/environments.md. False: none.
        timeouts: seconds after which a call of a coroutine is cancelled and is an error, by phase:
            "reset", "step", "policy" (default 60), "close" (5). None: no limit. Only for
            environments and policies whose functions are coroutine functions; see
            docs/coroutines.md.
    """

    frames_per_batch: Annotated[int | Sequence[int], _frames] | None = None
    num_envs: PositiveNumber | None = None
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    compile_env: bool | dict[str, Any] | None = None
    capture: Annotated[Literal["auto"] | bool, _capture] = False
    exploration_type: Annotated[Any, _exploration] = "random"
    info: Annotated[Any, _infos] = False
    timeouts: Annotated[Mapping[str, float | None], _timeouts] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSetting:
    """A worker's options, and what a collector derives from its other options."""

    options: WorkerOptions
    # all groups fill a batch together; False: each group fills batches of its own
    shared_frames: bool = True
    env_device: torch.device | None = None
    policy_device: torch.device | None = None
    # of stored floating-point observations; None: that of the environments
    obs_dtype: np.dtype[Any] | None = None
    # ids of modules that threads may share with the user: those that a function of an importable
    # file uses by name
    users_modules: frozenset[int] = frozenset()

    @property
    def deadlines(self) -> dict[str, float | None]:
        """Return the deadlines of coroutines, by phase."""
        seconds = {**TIMEOUTS, **self.options.timeouts}
        if (close := seconds["close"]) is not None:
            seconds["close"] = CLOSE_SHARE * close
        return seconds


@dataclass(frozen=True, repr=False)
class Restart(Details):
    """``on_failure``: restart failed workers at once.

    Attributes:
        max_restarts: maximum number of restarts of a worker within a minute. Beyond it, or after
            three restarts without a batch, the worker's error is raised. None: no limit of either
            kind.
    """

    max_restarts: Number | None = 10


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions(Checked):
    """Options that a pool needs to start workers, and to react to their failures.

    Attributes:
        num_sub_threads: number of torch's threads in each worker process. None: torch's own choice.
        on_failure: reaction to a worker that dies or hangs, or whose environment raises. "raise":
            raise the error, restart the worker with the next batch. "restart": restart it at once
            (``muster.Restart(...)`` sets how often). "drop": continue without the worker; its part
            of batches is blank.
        crash_dir: folder for crash reports, with which ``muster replay`` repeats a failure. None: a
            temporary folder.
        start_method: how worker processes start: "forkserver" (in milliseconds) or "spawn". None:
            as the system allows.
        cpu_affinity: CPUs of the workers, on Linux. "auto": the CPUs that this process may use are
            divided among the workers of a machine. Or a list of CPU numbers for each worker. None:
            the system chooses.
    """

    num_sub_threads: PositiveNumber | None = 1
    on_failure: OnFailure | Restart = "raise"
    crash_dir: Any = None
    start_method: StartMethod | None = None
    cpu_affinity: Literal["auto"] | Annotated[Sequence[Sequence[int]], _cpus] | None = (
        None
    )

    @property
    def reaction(self) -> OnFailure:
        """Return the reaction to a failed worker."""
        return "restart" if isinstance(self.on_failure, Restart) else self.on_failure

    @property
    def restart(self) -> Restart | None:
        """Return the details of ``on_failure="restart"``; None: another reaction."""
        if isinstance(self.on_failure, Restart):
            return self.on_failure
        return Restart() if self.on_failure == "restart" else None
