"""The options of a collector: names, defaults, meanings and checks.

Each option is declared once, in the record of the room that needs it:

    RolloutOptions      the loop                         rollout/options.py
    WorkerOptions       making environments, policies    workers/options.py
    BatchOptions        contents, destination of batches collectors/batch_options.py
    CollectorOptions    all of these, and the collector's own
    SupervisionOptions  starting workers, failures       workers/options.py
    PoolOptions         the last two, and those of pools collectors/multi_options.py

A field is checked by its type (``utils/checked.py``), before options that exclude each other are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch

from muster.collectors.batch_options import BatchOptions
from muster.collectors.replay_buffer import ReplaySink
from muster.episodes.stored import leading_dims
from muster.errors import BadOption
from muster.memory.replay import ReplayMemory
from muster.observing.loggers import as_logger
from muster.policies.adapt import STORED
from muster.policies.agents import per_agent
from muster.utils.addresses import host_and_port
from muster.utils.checked import (
    Details,
    Limit,
    Number,
    PositiveNumber,
    Seed,
    list_of_seeds,
)
from muster.utils.containers import is_several
from muster.utils.devices import device_of
from muster.utils.integers import integer
from muster.utils.whole_files import check_folder
from muster.workers.options import WorkerOptions

Device = torch.device | str | int | None
ObsDtype = torch.dtype | Literal["env"] | None
# the order of parameters in signatures and in ``help()``: what users set first comes first
SHOWN_ORDER = (
    "frames_per_batch",
    "total_frames",
    "round_up_total_frames",
    "num_envs",
    "max_frames_per_traj",
    "init_random_frames",
    "reset_at_each_iter",
    "reset_when_done",
    "set_truncated",
    "interruptor",
    "create_env_kwargs",
    "policy_factory",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
    "compile_env",
    "capture",
    "postproc",
    "split_trajs",
    "trajs_per_batch",
    "traj_format",
    "compact_obs",
    "obs_dtype",
    "replay_buffer",
    "replay_write_mode",
    "extend_buffer",
    "pre_collect_hook",
    "post_collect_hook",
    "on_step",
    "on_episode_done",
    "on_batch",
    "record",
    "track_policy_version",
    "track_traj_ids",
    "track_seeds",
    "weight_updater",
    "weight_sync_schemes",
    "weight_recv_schemes",
    "worker_idx",
    "autosave",
    "device",
    "storing_device",
    "policy_device",
    "env_device",
    "exploration_type",
    "return_same_td",
    "seed",
    "episode_seeds",
    "layout",
    "validate",
    "execution",
    "num_threads",
    "max_decorrelation_steps",
    "traj_done_key",
    "info",
    "prev_action_reward",
    "timeouts",
    "logger",
    "progress",
    "watch",
    "slot_memory_limit",
)


# options that collectors with workers also take as a list, with a value for each worker or node
PER_WORKER = (
    "policy_factory",
    "device",
    "policy_device",
    "env_device",
    "frames_per_batch",
)


# --- values of options ----------------------------------------------------------------------------


def _seconds(name: str, value: Any) -> Any:
    if not value > 0:
        raise BadOption(f"{name}={value!r}: expected seconds, more than 0")
    return value


def _folder(name: str, value: Any) -> Any:
    check_folder(value)
    return value


def _address(name: str, value: Any) -> str:
    host_and_port(value)
    return str(value)


@dataclass(frozen=True, repr=False)
class Autosave(Details):
    """Folder and interval of a collector's automatic saves.

    Attributes:
        folder: folder of the file. It is created if it does not exist.
        every: minimum time between two saves, in seconds.
    """

    folder: Annotated[str | os.PathLike[str], _folder]
    every: Annotated[float, _seconds] = 60.0


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
    address: Annotated[str, _address] | None = "127.0.0.1:0"
    films: bool | None = None
    announce: bool = True


@dataclass(frozen=True)
class Devices:
    """The devices of a collector, with ``device`` where an option has none.

    Attributes:
        storing: device of batches.
        policy: device of the policy.
        env: device of the environments' tensors.
    """

    storing: torch.device | None
    policy: torch.device | None
    env: torch.device | None


# --- checks of single options ---------------------------------------------------------------------


def _total(name: str, value: Any) -> int:
    total = integer(name, value, -1)
    if total == 0:
        raise BadOption(
            "total_frames=0: expected a positive number of steps, or -1 for an endless collector"
        )
    return total


def _obs_dtype(name: str, value: Any) -> ObsDtype:
    if value not in (None, "env", *STORED):
        raise BadOption(
            f"{name}={value!r}: expected None, 'env', or one of"
            f" {', '.join(map(str, STORED))}, which NumPy has too"
        )
    found: ObsDtype = value
    return found


def _logger(name: str, value: Any) -> Any:
    if value is not None:
        as_logger(value)
    return value


def _watch(name: str, value: Any) -> bool | str | Watch:
    if not isinstance(value, (bool, str, Watch)):
        raise BadOption(
            f"{name}={value!r}: expected True, an address host:port, or muster.Watch(...)"
        )
    return value


def _policy(name: str, value: Any) -> Any:
    return per_agent(value) if isinstance(value, dict) else value


def _factory(name: str, value: Any) -> Any:
    if is_several(value) and not value:
        raise BadOption(f"{name} is an empty list: expected a function for each worker")
    for factory in value if is_several(value) else [value]:
        if not callable(factory):
            raise BadOption(
                f"{name}={value!r}: expected a function, or a list of functions"
            )
    return value


def _device(name: str, value: Any, *, here: bool = True) -> torch.device | None:
    """Return a device; of a list, the first one. ``here``: this machine must have it."""
    if is_several(value):
        found = [_device(f"{name}[{i}]", one, here=here) for i, one in enumerate(value)]
        if not found:
            raise BadOption(
                f"{name} is an empty list: expected a device for each worker"
            )
        return found[0]
    if value is None:
        return None
    return device_of(name, value, here=here)


def half_of_memory() -> int:
    """Return half of the machine's memory in bytes: the default of ``slot_memory_limit``."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):  # not available on every system
        return 4 << 30


# --- the record -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectorOptions(BatchOptions, WorkerOptions):
    """The options of a collector, checked. Extends ``BatchOptions`` and ``WorkerOptions``.

    Attributes:
        create_env_fn: an env id, a function that makes an environment, an environment (see
            docs/environments.md), or a list of these. Each entry is a group, with its own policy
            call and random streams.
        policy: a head such as ``muster.policies.categorical(net)``, a TensorDict module, or any
            module or function ``obs -> action`` or ``obs -> (action, extras)``. None: uniformly
            random actions. Where agents take turns, a dict of policies by agent
            (``muster.policies.per_agent``).
        total_frames: total number of steps to collect, a multiple of ``frames_per_batch``. -1: no
            limit.
        round_up_total_frames: collect the next multiple of ``frames_per_batch`` if ``total_frames``
            is not one.
        init_random_frames: number of frames with uniformly random actions at the start, rounded up
            to whole batches. Columns that the policy would have filled (log-probabilities, values)
            are NaN, 0 or False there, and recurrent states 0; the first step of the policy after
            them starts from the state of a new episode. The policy is called once before, to find
            its columns. None, 0 or negative: none.
        create_env_kwargs: keyword arguments for the env id or function; a dict, or a list with a
            dict for each group.
        policy_factory: function without arguments that makes the policy; replaces ``policy``. With
            workers also a list, with a function for each worker or node. All make the same weights;
            the first one makes ``collector.policy``.
        obs_dtype: dtype of floating-point observations in batches and for the policy:
            ``torch.float16``, ``float32``, ``float64``, or "env" for the environment's. None: the
            dtype of the policy's first floating-point parameter (float32 for bfloat16, which NumPy
            lacks); without one, as for functions, the environment's. Values out of range become
            infinite. Integer observations keep their dtype.
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
        device: default for ``storing_device``, ``policy_device`` and ``env_device``. Collectors
            with workers take these, except ``storing_device``, also as a list with a device for
            each worker or node. Devices of nodes are looked for on the nodes.
        storing_device: device of batches. None: no transfer (they are on the CPU, or on the
            environments' GPU).
        policy_device: device of the policy; if it is on another one, a copy of it is used. None:
            its present device.
        env_device: device of the environments' tensors. Environments that return NumPy arrays are
            on the CPU.
        seed: seed of all environments (see ``set_seed``) and of Muster's own draws. A list has a
            seed for each environment, in the order of ``create_env_fn``. None: from the system's
            entropy.
        progress: show a bar with frames, frames per second and mean return on standard error; in a
            file or pipe, a line every 5 seconds.
        logger: receives metrics after every batch. Any object that
            ``muster.observing.loggers.as_logger`` accepts: a TensorBoard writer, a function
            ``(metrics, step)``, ... You close it. None: no logging.
        watch: write a snapshot of the statistics per second, and show them on a web page, whose
            address is printed on standard error. A text is the address ``host:port``; the default
            is a free port of this machine's loopback. ``muster.Watch(directory, address)`` also
            sets where the snapshots are. See docs/watch.md.
        slot_memory_limit: maximum size in bytes of the batches referenced at once. None: half of
            the machine's memory; for batches on a GPU, half of its free memory when the collector
            is made.
    """

    SHOWN_ORDER: ClassVar[tuple[str, ...]] = SHOWN_ORDER
    has_workers: ClassVar[bool] = False
    acts_elsewhere: ClassVar[bool] = (
        False  # environments and policies are on other machines
    )

    create_env_fn: Any = field(repr=False)
    policy: Annotated[Any, _policy] = field(default=None, repr=False)
    _: KW_ONLY
    total_frames: Annotated[int, _total] = -1
    round_up_total_frames: bool = False
    init_random_frames: Limit = None
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    policy_factory: Annotated[Callable[[], Any] | Sequence[Any], _factory] | None = None
    obs_dtype: Annotated[ObsDtype, _obs_dtype] = None
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    worker_idx: Number | None = None
    autosave: str | os.PathLike[str] | Autosave | None = None
    device: Device | Sequence[Device] = None
    storing_device: Device = None
    policy_device: Device | Sequence[Device] = None
    env_device: Device | Sequence[Device] = None
    seed: Seed | None = None
    logger: Annotated[Any, _logger] = None
    progress: bool = False
    watch: Annotated[bool | str | Watch, _watch] = False
    slot_memory_limit: PositiveNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_memory_limit is None:
            object.__setattr__(self, "slot_memory_limit", half_of_memory())
        if self.round_up_total_frames and self.total_frames > 0 and self.frames:
            batches = math.ceil(self.total_frames / self.frames)
            object.__setattr__(self, "total_frames", batches * self.frames)
        _check_total(self)
        self.watching  # noqa: B018 (checks the address)
        self.devices  # noqa: B018 (checks the devices)
        if self.replay_buffer is not None and not self.has_memory:
            ReplaySink(self.replay_buffer, extend=self.extend_buffer)
        _check_batches(self)
        _check_objects(self)

    @property
    def has_memory(self) -> bool:
        """Whether the rollouts go to a ``ReplayMemory``."""
        return isinstance(self.replay_buffer, ReplayMemory)

    @cached_property
    def devices(self) -> Devices:
        """Return the devices, which this process has; of lists, those of the first worker."""
        here = not self.acts_elsewhere
        general = _device("device", self.device, here=here)
        storing: Any = self.storing_device
        if is_several(storing):
            raise BadOption(
                f"storing_device={storing!r}: batches of all workers are on one device. Give one"
            )
        if storing is None and not is_several(self.device):
            storing = self.device
        return Devices(
            storing=_device("storing_device", storing),
            policy=_device("policy_device", self.policy_device, here=here) or general,
            env=_device("env_device", self.env_device, here=here) or general,
        )

    @property
    def factories(self) -> tuple[Callable[[], Any], ...]:
        """Return the functions that make policies: the only one, one for each worker, or none."""
        given = self.policy_factory
        if given is None:
            return ()
        return (given,) if callable(given) else tuple(given)

    @property
    def saving(self) -> Autosave | None:
        """Return ``autosave`` as ``Autosave``."""
        given = self.autosave
        if given is None or isinstance(given, Autosave):
            return given
        return Autosave(given)

    @property
    def watching(self) -> Watch | None:
        """Return ``watch`` as ``Watch``."""
        if isinstance(self.watch, str):
            return Watch(address=self.watch)
        if isinstance(self.watch, Watch):
            return self.watch
        return Watch() if self.watch else None

    @property
    def version_counter(self) -> Any:
        """Return the user's counter of policy versions, if there is one."""
        return (
            None
            if isinstance(self.track_policy_version, bool)
            else self.track_policy_version
        )

    @cached_property
    def frames(self) -> int:
        """Return the number of frames of a batch; 0: only ``collect`` is available.

        If workers have numbers of their own, that of the largest batch.
        """
        given = self.frames_per_batch
        if given is None or isinstance(given, int):
            return given or 0
        return max(given)

    @property
    def frames_of_workers(self) -> tuple[int, ...]:
        """Return the number of frames of the batches of each worker; empty: one for all."""
        given = self.frames_per_batch
        return () if given is None or isinstance(given, int) else tuple(given)

    def rows_per_batch(self, num_envs: int) -> int:
        """Return the number of time steps per batch for this number of environments, rounded up."""
        return max(1, -(-self.frames // num_envs))


def check_seeds(
    seed: int | Sequence[int], num_envs: int, *, static: bool
) -> int | tuple[int, ...]:
    """Return the argument of ``set_seed``. Raise ``BadOption`` for anything else."""
    if isinstance(seed, Iterable) and not isinstance(seed, str):
        seeds = list_of_seeds("set_seed", seed)
        if len(seeds) != num_envs:
            raise BadOption(
                f"set_seed has {len(seeds)} seeds for {num_envs} environments: give one for each,"
                " or one number"
            )
        if static:
            raise BadOption(
                "static_seed gives all environments one seed: pass a number, no list"
            )
        return seeds
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise BadOption(f"set_seed({seed!r}): expected an integer of at least 0")
    return seed


# --- options that exclude each other --------------------------------------------------------------


def _check_total(o: CollectorOptions) -> None:
    """Raise ``BadOption`` unless ``total_frames`` is a multiple of ``frames_per_batch``."""
    if o.frames_of_workers and (o.total_frames >= 0 or o.init_random_frames):
        raise BadOption(
            "frames_per_batch has a number for each worker, so the frames of the first batches are"
            " not known before: leave total_frames and init_random_frames out, or give one number"
        )
    if o.total_frames < 0:
        return
    if not o.frames_per_batch:
        raise BadOption(
            "total_frames ends an iteration, which needs frames_per_batch: give both or none"
        )
    if o.total_frames % o.frames:
        low = o.total_frames // o.frames * o.frames
        near = [n for n in (low, low + o.frames) if n]
        raise BadOption(
            f"total_frames={o.total_frames} is not a multiple of"
            f" frames_per_batch={o.frames_per_batch}; the nearest possible are"
            f" {' and '.join(map(str, near))}. Pass one of them, or round_up_total_frames=True"
        )


def _check_batches(o: CollectorOptions) -> None:
    """Checks of the contents and destination of batches."""
    buffer = o.replay_buffer is not None
    per_step = not o.extend_buffer
    waits = o.joins_episodes or "on_episode_done"
    if per_step and not buffer:
        raise BadOption("extend_buffer=False needs a replay_buffer")
    if o.replay_write_mode is not None and not buffer:
        raise BadOption(
            f"replay_write_mode={o.replay_write_mode!r} says what is written into replay_buffer, and"
            " none was given: pass replay_buffer="
        )
    if o.replay_write_mode == "rollout" and o.trajs_per_batch:
        raise BadOption(
            "replay_write_mode='rollout' writes batches, and trajs_per_batch makes episodes of"
            " them: give one of them"
        )
    whole = o.postproc, o.split_trajs, o.joins_episodes, o.set_truncated, o.compact_obs
    if per_step and any(
        (*whole, o.post_collect_hook, o.on_episode_done, o.on_batch, o.record)
    ):
        raise BadOption(
            "postproc, split_trajs, trajs_per_batch, replay_write_mode='trajectory', set_truncated,"
            " compact_obs, post_collect_hook, on_episode_done, on_batch and record need whole"
            " batches: use extend_buffer=True"
        )
    if per_step and (not o.reset_when_done or o.interruptor is not None):
        raise BadOption(
            "extend_buffer=False adds single steps, so a batch cannot end early: leave out"
            " reset_when_done=False and interruptor, or use extend_buffer=True"
        )
    if o.record is not None and not o.track_traj_ids:
        raise BadOption(
            "record: a recording finds its episodes by their ids. Leave track_traj_ids=False out"
        )
    if o.has_memory:
        _check_for_memory(o)
    elif buffer:
        _check_stored_shape(o)
    if o.return_same_td and buffer:
        raise BadOption(
            "return_same_td yields batches, which replay_buffer takes: give one of them"
        )
    if o.return_same_td and any((o.split_trajs, o.trajs_per_batch)):
        raise BadOption(
            "split_trajs and trajs_per_batch make a new TensorDict every time: leave"
            " return_same_td out"
        )
    if o.split_trajs and o.joins_episodes:
        raise BadOption(
            f"split_trajs and {o.joins_episodes}: give one; traj_format='pad' pads too"
        )
    if (
        o.trajectories is not None
        and o.trajectories.on_policy_only
        and not o.track_policy_version
    ):
        raise BadOption(
            "on_policy_only looks at the versions of whole episodes: it needs track_policy_version"
        )
    if o.max_decorrelation_steps and o.reset_at_each_iter:
        raise BadOption(
            "max_decorrelation_steps moves environments away from the beginning of their episodes,"
            " and reset_at_each_iter takes them back before the first batch: give one of them"
        )
    if o.set_truncated and (o.joins_episodes or o.on_episode_done):
        raise BadOption(
            f"set_truncated marks ends that are none, and {waits} waits for real ones: give one of"
            " them"
        )


def _check_for_memory(o: CollectorOptions) -> None:
    """Raise ``BadOption`` if options change batches, which a ``ReplayMemory`` does not get."""
    changing = {
        "postproc": o.postproc is not None,
        "split_trajs": bool(o.split_trajs),
        "trajs_per_batch": bool(o.trajs_per_batch),
        "set_truncated": bool(o.set_truncated),
        "extend_buffer=False": not o.extend_buffer,
        "replay_write_mode='trajectory'": o.replay_write_mode == "trajectory",
    }
    given = [name for name, is_given in changing.items() if is_given]
    if given:
        raise BadOption(
            "a ReplayMemory has the transitions as environments and policy have written them:"
            f" leave {', '.join(given)} out, change samples instead (memory.sample), or use"
            " TorchRL's ReplayBuffer"
        )


def _check_stored_shape(o: CollectorOptions) -> None:
    """Raise ``BadOption`` if a TorchRL buffer is for batches of more dimensions than these options
    give.
    """
    dims = leading_dims(o.replay_buffer)
    if dims < 2 or o.postproc is not None:
        return
    found = 0
    batches = ""
    remedy = "use ndim=1, with an item per frame"
    if o.joins_episodes and o.traj_format in (None, "cat"):
        found = 1
        batches = f"the episodes of {o.joins_episodes} follow one another in one"
    elif o.joins_episodes or o.split_trajs:
        found = 2
        batches = "padded trajectories have two"
        remedy = "use ndim=1, with an item per trajectory"
    elif isinstance(o.create_env_fn, str) and o.num_envs is None and not o.has_workers:
        found = 1
        batches = "the batches of one environment have one"
        remedy = "pass num_envs=1 (or more), or use ndim=1"
    if 0 < found < dims:
        raise BadOption(
            f"replay_buffer stores batches of {dims} dimensions (ndim={dims} of its storage, or its"
            f" dim_extend), and {batches}: {remedy}"
        )


def _check_objects(o: CollectorOptions) -> None:
    """Checks of the user's objects, and of the devices of this machine."""
    for name in PER_WORKER:
        if not o.has_workers and is_several(getattr(o, name)):
            raise BadOption(
                f"{name} has an entry for each worker, and a Collector has none: give one value"
            )
    if o.weight_sync_schemes is not None and not o.has_workers:
        raise BadOption(
            "weight_sync_schemes send weights to sub-collectors, and a Collector has none;"
            " weight_recv_schemes receive them from a parent"
        )
    if o.capture is True:
        between = {
            "on_step": o.on_step is not None,
            "interruptor": o.interruptor is not None,
            "cudagraph_policy": o.cudagraph_policy not in (None, False),
        }
        given = [name for name, is_given in between.items() if is_given]
        if given:
            raise BadOption(
                f"capture=True records whole rollouts, and {given[0]} needs Python between two"
                " steps. Leave one of them out, or pass capture='auto'."
            )
        if o.has_workers:
            raise BadOption(
                "capture=True is for a Collector: rows that worker processes and threads fill are"
                " in host memory, and a graph cannot write there. Step all environments of the"
                " device as one batch in a Collector, or leave it out."
            )
    if o.cudagraph_policy not in (None, False) and not torch.cuda.is_available():
        raise BadOption(
            "cudagraph_policy needs a CUDA device, and this machine or this build of torch has none"
        )
    mode = (
        o.compile_policy.get("mode") if isinstance(o.compile_policy, Mapping) else None
    )
    if mode == "reduce-overhead" and o.cudagraph_policy not in (None, False):
        raise BadOption(
            "compile_policy with mode='reduce-overhead' makes CUDA graphs itself: leave"
            " cudagraph_policy out"
        )
