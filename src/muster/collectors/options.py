"""Every option of a collector: one place for names, defaults, meaning and what is impossible."""

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
from muster.rollout.columns import Validate
from muster.utils.integers import integer

Device = torch.device | str | int | None
ObsDtype = torch.dtype | Literal["env"] | None
TrajFormat = Literal["cat", "pad"]
EXPLORATION = ("random", "mode", "mean", "median", "deterministic")


class Details:
    """Base of the dataclasses that are values of an option; shows what is not the default."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Trajectories(Details):
    """Which complete episodes ``trajs_per_batch`` yields.

    Attributes:
        per_batch: number of episodes in a batch.
        rule: which episodes come first: "first_begun" in the order of their beginnings, so that the long ones are not
            late; "per_env" the same number from each environment; "first_done" in the order of their ends, biased
            towards short ones.
        on_policy_only: drop (and count) episodes in which several policy versions acted. What is left is biased
            towards short ones. Needs ``track_policy_version``.
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
    """Where and how often a collector saves its state.

    Attributes:
        folder: of the file. It is made if it does not exist.
        every: seconds between two saves, at least.
    """

    folder: str | os.PathLike[str]
    every: float = 60.0

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise BadOption(f"every={self.every!r}: expected seconds, more than 0")


@dataclass(frozen=True)
class CollectorOptions:
    """Checked options of a collector.

    Attributes:
        create_env_fn: an env id, a function that makes an environment, an environment (docs/environments.md lists
            what is taken), or a list of these: one group each, with a policy call and random streams of its own.
        policy: None for uniform random actions; a head such as ``muster.policies.categorical(net)``; a
            TensorDict module; any module or function ``obs -> action`` or ``obs -> (action, extras)``.
        frames_per_batch: environment steps in each batch, over all environments. Where their number does not divide
            it, batches have more cells and ``collector/valid`` marks exactly so many. None: ``collect`` says how much,
            and there is no iterating.
        total_frames: steps over the collector's life; a multiple of ``frames_per_batch``. -1: endless.
        num_envs: environments to make from an id or factory and to step together. None: one, and batches
            without a dimension for it.
        max_frames_per_traj: truncate an episode after so many steps, and add ``step_count``. None, 0 or
            negative: no limit.
        init_random_frames: uniform random actions for so many frames, rounded up to whole batches. These have the
            policy's other columns, too: NaN, integers 0, flags False; recurrent states are those of a new episode.
            The policy is called once before, to see its columns. None, 0 or negative: none.
        reset_at_each_iter: reset all environments before every batch.
        reset_when_done: False ends an environment's part of a batch with its episode: what follows is blank, with
            the flags repeated, id -1 and ``collector/valid`` False; the next batch begins with new episodes. Single
            environments are left alone meanwhile, and workers reset them while you train; batches of environments are
            stepped on, and ``stats().discarded["after_done"]`` counts that.
        set_truncated: mark the last step of every batch as truncated (unless the episode ended there), in all flags
            ``truncated`` that the environment has, also those below the root (of agents).
        interruptor: an object whose ``collection_stopped()`` is asked after every step; True ends the batch there. The
            rest of it is blank, with id -1 and ``collector/valid`` False; without ``use_buffers`` it is left out.
        create_env_kwargs: keywords for the env id or function; a list has one dict per entry of ``create_env_fn``.
        policy_factory: makes the policy, instead of ``policy``.
        trust_policy: True: ``policy`` takes a TensorDict; False: it does not; None: by its signature.
        compile_policy: ``torch.compile`` the policy; a dict has its keywords.
        cudagraph_policy: wrap the policy in tensordict's ``CudaGraphModule``; a dict has its keywords.
        postproc: called with every batch; what it returns is yielded (the batch itself if that is None).
        split_trajs: one trajectory per row, ``[n, T_max]``, zero-padded, with ``collector/mask``; pad ids are -1.
        trajs_per_batch: yield so many complete episodes at a time, joined over batches, instead of the batches.
            ``muster.Trajectories(n, ...)`` says which ones.
        traj_format: of episodes: "cat" one after another, ``[sum of lengths]``, or "pad" ``[n, T_max]`` with
            ``collector/mask``. Default "cat".
        compact_obs: leave out ``next`` observations; ``Collector.final_observations`` has those that no row shows.
        obs_dtype: in which floating observations are stored, and given to the policy. None: the dtype of the policy's
            first floating parameter (float32 for bfloat16, which NumPy lacks); the environment's if it has none, as
            functions have none. "env": the environment's. ``torch.float16``, ``float32`` or ``float64``: that one.
            What is beyond its range becomes infinite. Integers stay what they are.
        use_buffers: False also allows observations whose shape changes, in lazily stacked batches. None: as needed.
        replay_buffer: anything with ``extend`` or ``add``; batches go there, and iteration yields None. TorchRL's
            buffers get one item per frame (``[environments, T]`` with a storage of ``ndim=2``), others the batch.
        extend_buffer: False adds every time step by itself as soon as it is made.
        local_init_rb: accepted for TorchRL's sake; in this process a buffer is always initialised here.
        pre_collect_hook, post_collect_hook: called before and after (with the batch) every collection.
        on_step: called with a ``muster.rollout.hooks.StepView`` after every time step, where the environments are (in
            every worker process a copy of it); what it writes there is in the batch.
        on_episode_done: called with every whole episode, ``[L]``, in order of their ends; may return columns for it, a
            dict of arrays ``[L, ...]``, where batches are whole episodes.
        on_batch: called with every batch right before it is yielded, returned or written. docs/hooks.md has examples.
        track_policy_version: add ``collector/policy_version``, the version that chose the action. An object with
            ``version`` and ``increment_version()`` (TorchRL's ``PolicyVersion``) does the counting.
        weight_updater: an object with ``push_weights`` (TorchRL's ``WeightUpdaterBase``), or a function that makes it.
        weight_sync_schemes: only for collectors with sub-collectors.
        weight_recv_schemes: by model id; where a parent's weights come from, see ``register_scheme_receiver``.
        worker_idx: number of this collector among its parent's.
        no_cuda_sync: accepted for TorchRL's sake; Muster waits for a GPU only where it copies to the host.
        autosave: folder for ``state_dict``, written between batches; ``load_state_dict(path)`` goes on from there.
            ``muster.Autosave(folder, every=60.0)`` says how often, in seconds.
        device: fills in for the three devices below.
        storing_device: of the batches; None leaves them where they are (the CPU).
        policy_device: of the policy; another one than its own makes a copy of it. None: where it is.
        env_device: of the environments' tensors; environments that return NumPy arrays live on the CPU.
        exploration_type: how policies sample: "random", "mode", "mean", "median" or "deterministic", or
            TorchRL's ``ExplorationType``.
        return_same_td: yield the same ``TensorDict`` every time, with new values.
        seed: as by ``set_seed``; also of all of Muster's own draws. None: from the system's entropy.
        layout: "batch_major" for ``[B, T]``, "time_major" for ``[T, B]``; neither copies.
        validate: "fast" checks shapes, dtypes, finite rewards and actions in range; "full" also that
            observations and actions lie in their spaces, and are not in other dtypes than these; "off" only shapes and
            dtypes.
        executor: run common networks without module dispatch where that gives equal outputs.
        num_threads: torch's threads while collecting; your own setting is back between batches. One is fastest
            for small networks. None: your setting.
        inference_mode: call the policy in ``torch.inference_mode`` (from its second call on), which is faster than
            ``no_grad``. False if it keeps tensors of its own for a later backward pass.
        own_rng: environments and policies draw from generators of the group's own. False: from the process's, as you
            seed them, so that results depend on whatever else draws from these.
        max_decorrelation_steps: before the first batch, 1 to so many random steps in each environment, so that they are
            not all at the beginning of an episode. They are no frames, but ``stats().discarded["decorrelation"]``; the
            episode that goes on has them in its return and length. Not on devices.
        traj_done_key: of infos: "traj_done" where a lost life ends an agent's episode. Where the entry is False,
            ``done`` does not reset the environment: recurrent states start again; trajectory, ``step_count`` and
            episode record go on. True without an end truncates. Adds ``("next", "traj_done")``. For single Gymnasium
            environments.
        info: columns ``("info", name)`` and ``("next", "info", name)`` of what ``reset`` and ``step`` return besides.
            True: all fields that a reset and a step show; a list of names, or a dict of ``gymnasium.spaces`` by name
            (None: as seen). A flag ``("info", "_name")`` says where a field is present; elsewhere it is zero. Without
            spaces, the env id or function is called once more, for an environment that makes one random step and is
            closed; environment objects are only reset. docs/environments.md has the details.
        prev_action_reward: add the observations ``prev_action`` and ``prev_reward``, zero where an agent's episode
            begins. Modules and heads get a dict of all observations then.
        logger: gets numbers after every batch; whatever ``muster.observing.loggers.as_logger`` takes: TensorBoard's
            writer, a function ``(metrics, step)``, ... You close it.
        slot_memory_limit: bytes of batches that may be referenced at once. None: half the machine's memory.
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
    use_buffers: bool | None = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    local_init_rb: bool | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    on_step: Callable[[Any], Any] | None = None
    on_episode_done: Callable[[Any], Any] | None = None
    on_batch: Callable[[Any], Any] | None = None
    track_policy_version: Any = False
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    worker_idx: int | None = None
    no_cuda_sync: bool = False
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
    executor: bool = True
    num_threads: int | None = 1
    inference_mode: bool = True
    own_rng: bool = True
    max_decorrelation_steps: int = 0
    traj_done_key: str | None = None
    info: Any = False
    prev_action_reward: bool = False
    logger: Any = None
    slot_memory_limit: int | None = None
    devices: dict[str, torch.device | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name, None)
            allowed = (value is None and "None" in f.type) or (isinstance(value, str) and f'"{value}"' in f.type)
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
            raise BadOption("total_frames=0: expected a positive number of steps, or -1 for an endless collector")
        if self.total_frames > 0 and not self.frames_per_batch:
            raise BadOption("total_frames ends an iteration, which needs frames_per_batch: give both or none")
        if self.total_frames > 0 and self.total_frames % self.frames:
            low = self.total_frames // self.frames * self.frames
            near = [n for n in (low, low + self.frames) if n]
            raise BadOption(
                f"total_frames={self.total_frames} is not a multiple of frames_per_batch={self.frames_per_batch}; "
                f"the nearest possible are {' and '.join(map(str, near))}"
            )
        if self.traj_done_key is not None and not (isinstance(self.traj_done_key, str) and self.traj_done_key):
            raise BadOption(f"traj_done_key={self.traj_done_key!r}: expected the name of an entry of info, or None")
        wanted_infos(self.info)
        if self.logger is not None:
            as_logger(self.logger)
        if self.replay_buffer is not None:
            ReplaySink(self.replay_buffer, extend=self.extend_buffer)
        check_contradictions(self)
        check_choice("layout", self.layout, ("batch_major", "time_major"))
        check_choice("traj_format", self.traj_format or "cat", ("cat", "pad"))
        check_choice("validate", self.validate, ("off", "fast", "full"))
        if self.obs_dtype not in (None, "env", *STORED):
            raise BadOption(
                f"obs_dtype={self.obs_dtype!r}: expected None, 'env', or one of {', '.join(map(str, STORED))}, which "
                f"NumPy has too"
            )
        exploration = getattr(self.exploration_type, "name", self.exploration_type)
        exploration = exploration.lower() if isinstance(exploration, str) else exploration
        check_choice("exploration_type", exploration, EXPLORATION)
        object.__setattr__(self, "exploration_type", exploration)
        object.__setattr__(self, "devices", self._resolve_devices())
        if self.slot_memory_limit is None:
            object.__setattr__(self, "slot_memory_limit", _half_of_memory())

    @property
    def trajectories(self) -> Trajectories | None:
        """Of ``trajs_per_batch``."""
        given = self.trajs_per_batch
        return given if given is None or isinstance(given, Trajectories) else Trajectories(given)

    @property
    def saving(self) -> Autosave | None:
        """Of ``autosave``."""
        given = self.autosave
        return given if given is None or isinstance(given, Autosave) else Autosave(given)

    @property
    def version_counter(self) -> Any:
        """The object that counts policy versions, if one was given."""
        return None if isinstance(self.track_policy_version, bool) else self.track_policy_version

    @property
    def frames(self) -> int:
        """Of a batch; 0 if ``collect`` says how many."""
        return self.frames_per_batch or 0

    def rows_per_batch(self, num_envs: int) -> int:
        """Time steps per batch for so many environments, rounded up."""
        return max(1, -(-self.frames // num_envs))

    def _resolve_devices(self) -> dict[str, torch.device | None]:
        general = _device("device", self.device)
        names = ("storing_device", "policy_device", "env_device")
        return {name: _device(name, getattr(self, name)) or general for name in names}


_INTEGERS = {  # and the least value that makes sense
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
        raise BadOption(f"{name}={value!r}: not a torch device ({str(error).splitlines()[0]})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"{name}={value!r}: this machine or this build of torch has no CUDA device")
    return device


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):  # not on every system
        return 4 << 30
