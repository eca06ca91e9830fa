"""The options of a collector: names, defaults, meanings and checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

from muster.collectors.contradictions import check_contradictions
from muster.collectors.replay_buffer import ReplaySink
from muster.envs.infos import wanted_infos
from muster.episodes.rules import StreamRule, check_stream_rule
from muster.errors import BadOption
from muster.memory.views import Order
from muster.observing.loggers import as_logger
from muster.policies.adapt import STORED
from muster.policies.agents import per_agent
from muster.policies.modes import PolicyMode
from muster.recording.writer import Recorder
from muster.rollout.columns import Validate
from muster.utils.addresses import host_and_port
from muster.utils.integers import integer
from muster.utils.whole_files import check_folder
from muster.workers.config import check_timeouts

Device = torch.device | str | int | None
ObsDtype = torch.dtype | Literal["env"] | None
TrajFormat = Literal["cat", "pad"]
EXPLORATION = ("random", "mode", "mean", "median", "deterministic")


class Details:
    """Base of the dataclasses that are values of an option; its repr shows only values that are not
    the default.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Trajectories(Details):
    """Selection of the complete episodes that ``trajs_per_batch`` yields.

    Attributes:
        per_batch: number of episodes in a batch.
        rule: order in which episodes are delivered. "first_begun": in the order of their first
            steps, so that long ones are not delayed. "per_env": the same number from each
            environment. "first_done": in the order of their ends, which is biased towards short
            episodes.
        on_policy_only: drop episodes in which several policy versions acted, and count them. The
            remaining episodes are biased towards short ones. Needs ``track_policy_version``.
    """

    per_batch: int
    rule: StreamRule = "first_begun"
    on_policy_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_batch", integer("trajs_per_batch", self.per_batch))
        check_stream_rule("rule", self.rule)
        check_bool("on_policy_only", self.on_policy_only)


@dataclass(frozen=True, repr=False)
class Autosave(Details):
    """Folder and interval of a collector's automatic saves.

    Attributes:
        folder: folder of the file. It is created if it does not exist.
        every: minimum time between two saves, in seconds.
    """

    folder: str | os.PathLike[str]
    every: float = 60.0

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise BadOption(f"every={self.every!r}: expected seconds, more than 0")
        check_folder(self.folder)


@dataclass(frozen=True, repr=False)
class Watch(Details):
    """Directory of the snapshots of a collection, and address of the page that shows them.

    Attributes:
        directory: directory of the snapshots, without those of another collection. It is created if
            it does not exist. None: that of ``record``, or a new one in ``runs``.
        address: ``host:port`` of the page; port 0 is any free port. Beyond loopback, viewers need
            the token in the printed address. None: no page; ``muster watch DIRECTORY`` shows it.
        films: keep the actions of the newest, best and worst episode, from which viewers can make
            films. None: if there are workers, whose actions are kept for crash reports anyway;
            without workers it costs a few percent of the time of CartPole's steps.
        announce: print the page's address to standard error. ``watch_url`` of the collector has it,
            too.
    """

    directory: str | os.PathLike[str] | None = None
    address: str | None = "127.0.0.1:0"
    films: bool | None = None
    announce: bool = True

    def __post_init__(self) -> None:
        check_bool("announce", self.announce)
        if self.films is not None:
            check_bool("films", self.films)
        if self.address is not None:
            host_and_port(self.address)


@dataclass(frozen=True, repr=False, kw_only=True)
class Execution(Details):
    """How policies are called, and which random generators they use.

    Attributes:
        executor: run common networks without module dispatch where the outputs are equal.
        policy_mode: mode of the policy's modules while they act. "eval": evaluation mode, in which
            dropout is off and the statistics of batch normalisation do not change. "as_given": the
            modes that the modules have when the collector is made, e.g. for ``NoisyLinear``, which
            explores in training mode only. The modules of your policy have their own modes again
            after each rollout. See docs/guide.md.
        inference_mode: call the policy in ``torch.inference_mode`` (from its second call on), which
            is faster than ``no_grad``. Use False for a policy that keeps tensors for a later
            backward pass.
        own_rng: environments and policies draw from generators of their group. False: they draw
            from the process's generators, which you seed, and results depend on all other draws
            from these.
    """

    executor: bool = True
    inference_mode: bool = True
    own_rng: bool = True
    policy_mode: PolicyMode = "eval"

    def __post_init__(self) -> None:
        for name in ("executor", "inference_mode", "own_rng"):
            check_bool(name, getattr(self, name))
        check_choice("policy_mode", self.policy_mode, ("eval", "as_given"))


@dataclass(frozen=True)
class CollectorOptions:
    """The options of a collector, checked.

    Attributes:
        create_env_fn: an env id, a function that makes an environment, an environment (see
            docs/environments.md), or a list of these. Each entry is a group, with its own policy
            call and random streams.
        policy: a head such as ``muster.policies.categorical(net)``, a TensorDict module, or any
            module or function ``obs -> action`` or ``obs -> (action, extras)``. None: uniformly
            random actions. Where agents take turns, a dict of policies by agent
            (``muster.policies.per_agent``).
        frames_per_batch: number of environment steps in a batch, over all environments. If it is
            not a multiple of the number of environments, batches have more cells, and
            ``collector/valid`` marks exactly this number of them. None: only ``collect`` is
            available, and the collector cannot be iterated.
        total_frames: total number of steps to collect, a multiple of ``frames_per_batch``. -1: no
            limit.
        num_envs: number of environments to make from an id or function and to step together. None:
            a single one, whose batches have no environment dimension.
        max_frames_per_traj: truncate episodes after this number of steps, and add ``step_count``.
            None, 0 or negative: no limit.
        init_random_frames: number of frames with uniformly random actions at the start, rounded up
            to whole batches. In them the policy's other columns are NaN, 0 or False, and recurrent
            states are those of a new episode. The policy is called once before, to find its
            columns. None, 0 or negative: none.
        reset_at_each_iter: reset all environments before every batch.
        reset_when_done: False: after the end of an episode the environment's other rows of the
            batch are blank, with repeated flags, id -1 and ``collector/valid`` False; the next
            batch starts with a new episode. Meanwhile single environments pause (workers reset them
            while you train). Environments that can only be stepped together are stepped on, and
            ``stats().discarded["after_done"]`` counts these steps.
        set_truncated: mark the last step of every batch as truncated, unless the episode ended
            there, in all flags ``truncated`` of the environment, including nested ones (of agents).
        interruptor: an object whose method ``collection_stopped()`` is called after every step;
            True ends the batch. Its other rows are blank, with id -1 and ``collector/valid`` False.
        create_env_kwargs: keyword arguments for the env id or function; a dict, or a list with a
            dict for each group.
        policy_factory: function without arguments that makes the policy; replaces ``policy``.
        trust_policy: whether ``policy`` takes a TensorDict. None: decided by its signature.
        compile_policy: apply ``torch.compile`` to the policy. A dict is passed as keyword
            arguments.
        cudagraph_policy: wrap the policy in tensordict's ``CudaGraphModule``. A dict is passed as
            keyword arguments.
        postproc: function of a batch; its return value is yielded in place of the batch, unless it
            is None.
        split_trajs: yield one trajectory per row, ``[n, T_max]``, zero-padded, with
            ``collector/mask``; pad ids are -1.
        trajs_per_batch: yield this number of complete episodes at a time, joined over batches,
            instead of batches. ``muster.Trajectories(n, ...)`` also sets their order.
        traj_format: format of complete episodes. "cat": one after another, ``[sum of lengths]``.
            "pad": one per row, ``[n, T_max]``, with ``collector/mask``. None: "cat".
        compact_obs: omit ``next`` observations; ``Collector.final_observations`` returns those that
            no row contains.
        obs_dtype: dtype of floating-point observations in batches and for the policy:
            ``torch.float16``, ``float32``, ``float64``, or "env" for the environment's. None: the
            dtype of the policy's first floating-point parameter (float32 for bfloat16, which NumPy
            lacks); without one, as for functions, the environment's. Values out of range become
            infinite. Integer observations keep their dtype.
        replay_buffer: object with ``extend`` or ``add``; gets all batches, and iteration yields
            None. TorchRL's buffers get one item per frame (``[environments, T]`` for a storage with
            ``ndim=2``), others whole batches.
        extend_buffer: False: add every time step separately with ``add``, as soon as it is
            collected.
        pre_collect_hook, post_collect_hook: functions called before and after (with the batch)
            every collection.
        on_step: function called with a ``muster.rollout.hooks.StepView`` after every time step of a
            group. Each worker process calls a copy of it. Values that it writes are in the batch.
        on_episode_done: function called with every complete episode, ``[L]``, in order of their
            ends. Where batches are whole episodes it may return new columns, a dict of arrays ``[L,
            ...]``.
        on_batch: function called with every batch right before it is yielded, returned or written.
            See docs/hooks.md.
        record: directory to which a ``muster.Recorder`` writes every batch after ``on_batch``,
            until ``shutdown``; or a recorder of yours, which you close. Read it with
            ``muster.load``.
        track_policy_version: add ``collector/policy_version``, the version that chose the action.
            An object with ``version`` and ``increment_version()`` (TorchRL's ``PolicyVersion``)
            replaces Muster's version counter.
        weight_updater: an object with ``push_weights`` (TorchRL's ``WeightUpdaterBase``), or a
            function that makes one.
        weight_sync_schemes: how weights reach the workers, by model id: "shared", "none" or a
            scheme object (docs/workers.md). None: the system's default. Only for collectors with
            workers.
        weight_recv_schemes: schemes by model id that receive weights from a parent; see
            ``register_scheme_receiver``.
        worker_idx: index of this collector among its parent's.
        autosave: folder to which the ``state_dict`` is saved between batches;
            ``load_state_dict(path)`` restores it. ``muster.Autosave(folder, every=60.0)`` also sets
            the interval in seconds. None: no saves.
        device: default for ``storing_device``, ``policy_device`` and ``env_device``.
        storing_device: device of batches. None: no transfer (they are on the CPU, or on the
            environments' GPU).
        policy_device: device of the policy; if it is on another one, a copy of it is used. None:
            its present device.
        env_device: device of the environments' tensors. Environments that return NumPy arrays are
            on the CPU.
        exploration_type: how heads and TensorDict modules choose actions: "random", "mode", "mean",
            "median" or "deterministic", or TorchRL's ``ExplorationType``.
        return_same_td: yield the same ``TensorDict`` every time, with its values overwritten.
        seed: seed of all environments (see ``set_seed``) and of Muster's own draws. None: from the
            system's entropy.
        layout: order of dimensions: "batch_major" for ``[B, T]``, "time_major" for ``[T, B]``.
            Neither copies.
        validate: checks of every step. "off": shapes and dtypes. "fast": also finite rewards, and
            actions in range. "full": also that observations and actions lie in their spaces and
            have the dtypes of these.
        execution: how policies are called, in which mode, and which random generators they use; see
            ``muster.Execution``.
        num_threads: number of torch's threads while collecting; your setting is restored between
            batches. 1 is fastest for small networks. None: your setting.
        max_decorrelation_steps: maximum number of random steps (at least 1) in each environment
            before the first batch, so that not all start an episode together.
            ``stats().discarded["decorrelation"]`` counts them; they are no frames, but part of the
            episodes' returns and lengths. Not available for environments on a device. 0: none.
        traj_done_key: key in ``info``, e.g. "traj_done", of a flag that is False where only an
            agent's episode ends (a life is lost). Then ``done`` does not reset the environment:
            recurrent states start again; trajectory, ``step_count`` and episode record continue.
            True without an end truncates. Adds ``("next", "traj_done")``. Only for single Gymnasium
            environments.
        info: fields of the ``info`` of ``reset`` and ``step`` to store, as ``("info", name)`` and
            ``("next", "info", name)``. True: all that a reset and a step show. Or a list of names,
            or a dict of ``gymnasium.spaces`` by name (None: as seen). A flag ``("info", "_name")``
            tells where a field is present; elsewhere it is zero. Without spaces, one more
            environment is made from the env id or function, makes a random step, and is closed;
            environment objects are only reset. See docs/environments.md. False: none.
        prev_action_reward: add the observations ``prev_action`` and ``prev_reward``, zero at the
            start of an agent's episode. Modules and heads then get a dict of all observations.
        progress: show a bar with frames, frames per second and mean return on standard error; in a
            file or pipe, a line every 5 seconds.
        timeouts: seconds after which a call of a coroutine is cancelled and is an error, by phase:
            "reset", "step", "policy" (default 60), "close" (5). None: no limit. Only for
            environments and policies whose functions are coroutine functions; see
            docs/coroutines.md.
        logger: receives metrics after every batch. Any object that
            ``muster.observing.loggers.as_logger`` accepts: a TensorBoard writer, a function
            ``(metrics, step)``, ... You close it. None: no logging.
        watch: write a snapshot of the statistics per second, and show them on a web page, whose
            address is printed on standard error. A text is the address ``host:port``; the default
            is a free port of this machine's loopback. ``muster.Watch(directory, address)`` also
            sets where the snapshots are. See docs/watch.md.
        slot_memory_limit: maximum size in bytes of the batches referenced at once. None: half of
            the machine's memory.
    """

    create_env_fn: Any = field(repr=False)
    policy: Any = field(default=None, repr=False)
    _: KW_ONLY
    frames_per_batch: int | None = None
    total_frames: int = -1
    num_envs: int | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    interruptor: Any = None
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    policy_factory: Callable[[], Any] | None = None
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool | None = None
    trajs_per_batch: int | Trajectories | None = None
    traj_format: TrajFormat | None = None
    compact_obs: bool = False
    obs_dtype: ObsDtype = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    on_step: Callable[[Any], Any] | None = None
    on_episode_done: Callable[[Any], Any] | None = None
    on_batch: Callable[[Any], Any] | None = None
    record: str | os.PathLike[str] | Recorder | None = None
    track_policy_version: Any = False
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    worker_idx: int | None = None
    autosave: str | os.PathLike[str] | Autosave | None = None
    device: Device = None
    storing_device: Device = None
    policy_device: Device = None
    env_device: Device = None
    exploration_type: Any = "random"
    return_same_td: bool = False
    seed: int | None = None
    layout: Order = "batch_major"
    validate: Validate = "fast"
    execution: Execution = field(default_factory=Execution)
    num_threads: int | None = 1
    max_decorrelation_steps: int = 0
    traj_done_key: str | None = None
    info: Any = False
    prev_action_reward: bool = False
    timeouts: Mapping[str, float | None] = field(default_factory=dict)
    logger: Any = None
    progress: bool = False
    watch: bool | str | Watch = False
    slot_memory_limit: int | None = None
    devices: dict[str, torch.device | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name, None)
            allowed = (value is None and "None" in f.type) or (
                isinstance(value, str) and repr(value) in f.type
            )
            if f.name in _INTEGERS and not allowed:
                object.__setattr__(self, f.name, integer(f.name, value, _INTEGERS[f.name]))
            if f.type == "bool" or (f.type == "bool | None" and value is not None):
                check_bool(f.name, value)
            if value is not None and str(f.type).startswith("Callable") and not callable(value):
                raise BadOption(f"{f.name}={value!r}: expected a function")
        for name in ("max_frames_per_traj", "init_random_frames"):
            if (getattr(self, name) or 0) <= 0:
                object.__setattr__(self, name, None)
        if self.total_frames == 0:
            raise BadOption(
                "total_frames=0: expected a positive number of steps, or -1 for an endless"
                " collector"
            )
        if self.total_frames > 0 and not self.frames_per_batch:
            raise BadOption(
                "total_frames ends an iteration, which needs frames_per_batch: give both or none"
            )
        if self.total_frames > 0 and self.total_frames % self.frames:
            low = self.total_frames // self.frames * self.frames
            near = [n for n in (low, low + self.frames) if n]
            raise BadOption(
                f"total_frames={self.total_frames} is not a multiple of"
                f" frames_per_batch={self.frames_per_batch}; the nearest possible are"
                f" {' and '.join(map(str, near))}"
            )
        if isinstance(self.policy, dict):
            object.__setattr__(self, "policy", per_agent(self.policy))
        if self.traj_done_key is not None and not (
            isinstance(self.traj_done_key, str) and self.traj_done_key
        ):
            raise BadOption(
                f"traj_done_key={self.traj_done_key!r}: expected the name of an entry of info, or"
                " None"
            )
        if not isinstance(self.execution, Execution):
            raise BadOption(f"execution={self.execution!r}: expected muster.Execution(...)")
        wanted_infos(self.info)
        check_timeouts(self.timeouts)
        if self.logger is not None:
            as_logger(self.logger)
        if not isinstance(self.watch, (bool, str, Watch)):
            raise BadOption(
                f"watch={self.watch!r}: expected True, an address host:port, or muster.Watch(...)"
            )
        self.watching  # noqa: B018 (checks the address)
        if self.replay_buffer is not None:
            ReplaySink(self.replay_buffer, extend=self.extend_buffer)
        check_contradictions(self)
        check_choice("layout", self.layout, ("batch_major", "time_major"))
        check_choice("traj_format", self.traj_format or "cat", ("cat", "pad"))
        check_choice("validate", self.validate, ("off", "fast", "full"))
        if self.obs_dtype not in (None, "env", *STORED):
            raise BadOption(
                f"obs_dtype={self.obs_dtype!r}: expected None, 'env', or one of"
                f" {', '.join(map(str, STORED))}, which NumPy has too"
            )
        exploration = getattr(self.exploration_type, "name", self.exploration_type)
        exploration = exploration.lower() if isinstance(exploration, str) else exploration
        check_choice("exploration_type", exploration, EXPLORATION)
        object.__setattr__(self, "exploration_type", exploration)
        general, names = (
            _device("device", self.device),
            (
                "storing_device",
                "policy_device",
                "env_device",
            ),
        )
        devices = {name: _device(name, getattr(self, name)) or general for name in names}
        object.__setattr__(self, "devices", devices)
        if self.slot_memory_limit is None:
            object.__setattr__(self, "slot_memory_limit", _half_of_memory())

    @property
    def trajectories(self) -> Trajectories | None:
        """Return ``trajs_per_batch`` as ``Trajectories``."""
        given = self.trajs_per_batch
        return given if given is None or isinstance(given, Trajectories) else Trajectories(given)

    @property
    def saving(self) -> Autosave | None:
        """Return ``autosave`` as ``Autosave``."""
        given = self.autosave
        return given if given is None or isinstance(given, Autosave) else Autosave(given)

    @property
    def watching(self) -> Watch | None:
        """Return ``watch`` as ``Watch``."""
        if isinstance(self.watch, str):
            return Watch(address=self.watch)
        return self.watch if isinstance(self.watch, Watch) else Watch() if self.watch else None

    @property
    def version_counter(self) -> Any:
        """Return the user's counter of policy versions, if there is one."""
        return None if isinstance(self.track_policy_version, bool) else self.track_policy_version

    @property
    def frames(self) -> int:
        """Return the number of frames of a batch; 0: only ``collect`` is available."""
        return self.frames_per_batch or 0

    def rows_per_batch(self, num_envs: int) -> int:
        """Return the number of time steps per batch for this number of environments, rounded up."""
        return max(1, -(-self.frames // num_envs))


_INTEGERS = {  # option: least valid value; None: any integer
    "frames_per_batch": 1,
    "total_frames": -1,
    "num_envs": 1,
    "num_threads": 1,
    "slot_memory_limit": 1,
    "seed": 0,
    "worker_idx": 0,
    "max_decorrelation_steps": 0,
    "num_workers": 1,
    "num_sub_threads": 1,
    "max_policy_lag": 0,
    "max_weight_update_interval": -1,
    "min_nodes": 1,
    "num_collectors": 1,
    "max_frames_per_traj": None,
    "init_random_frames": None,
}


def check_bool(name: str, value: Any) -> None:
    """Raise ``BadOption`` unless the value is a truth value."""
    if not isinstance(value, bool):
        raise BadOption(f"{name}={value!r}: expected True or False")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``BadOption`` unless the value is one of the choices."""
    if value not in choices:
        raise BadOption(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def _device(name: str, value: Device) -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise BadOption(
            f"{name}={value!r}: not a torch device ({str(error).splitlines()[0]})"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"{name}={value!r}: this machine or this build of torch has no CUDA device")
    # tensors name the index, and the two are compared
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):  # not available on every system
        return 4 << 30
