"""The options of a collector that rollouts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from muster.errors import BadOption
from muster.protocols import PolicyMode
from muster.utils.checked import (
    Checked,
    Details,
    Limit,
    Number,
    PositiveNumber,
    list_of_seeds,
)

Validate = Literal["off", "fast", "full"]


def _interruptor(name: str, value: Any) -> Any:
    if value is not None and not callable(getattr(value, "collection_stopped", None)):
        raise BadOption(
            f"{name}={value!r}: expected an object with a method collection_stopped()"
        )
    return value


def _version_counter(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and not hasattr(value, "increment_version"):
        raise BadOption(f"{name}={value!r}: expected True, False or a PolicyVersion")
    return value


def _entry_of_info(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadOption(
            f"{name}={value!r}: expected the name of an entry of info, or None"
        )
    return value


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


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(Checked):
    """Options that rollouts need. They do not vary from one rollout to the next.

    Attributes:
        max_frames_per_traj: truncate episodes after this number of steps, and add ``step_count``.
            None, 0 or negative: no limit.
        reset_at_each_iter: reset all environments before every batch.
        reset_when_done: False: do not start a new episode within the batch; the remaining rows are
            padding (``collector/valid`` False, ``traj_ids`` -1, repeated flags). The next batch
            starts with a new episode. Single environments are not stepped in the padding (workers
            reset them while you train). Environments that can only be stepped together are stepped,
            and ``stats().discarded["after_done"]`` counts these steps.
        set_truncated: mark the last step of every batch as truncated, unless the episode ended
            there, in all flags ``truncated`` of the environment, including nested ones (of agents).
        interruptor: an object whose method ``collection_stopped()`` is called after every step;
            True ends the batch. The remaining rows are padding (``collector/valid`` False,
            ``traj_ids`` -1).
        compact_obs: omit ``next`` observations; ``Collector.final_observations`` returns those that
            no row contains.
        on_step: function called with a ``muster.rollout.hooks.StepView`` after every time step of a
            group. Each worker process calls a copy of it. Values that it writes are in the batch.
        track_policy_version: add ``collector/policy_version``, the version that chose the action.
            An object with ``version`` and ``increment_version()`` (TorchRL's ``PolicyVersion``)
            replaces Muster's version counter.
        validate: checks of every step. "off": shapes and dtypes. "fast": also finite rewards, and
            actions in range. "full": also that observations and actions lie in their spaces and
            have the dtypes of these. Where environments step on a device, "fast" checks rewards
            only, without waiting for them: a bad one raises in the next call, after its batch was
            delivered. "full" checks before that, and waits.
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
        prev_action_reward: add the observations ``prev_action`` and ``prev_reward``, zero at the
            start of an agent's episode. Modules and heads then get a dict of all observations.
        track_traj_ids: False: batches have no ``collector/traj_ids``. Episodes, their records and
            ``split_trajs`` are the same.
        track_seeds: add ``collector/seed``, the seed with which the environment was reset at the
            start of the row's episode; -1: without a seed. Exports of recordings have the seeds of
            episodes then. Only for environments that Muster resets.
        episode_seeds: seeds chosen by hand, such as ``range(10)`` for scenarios 0 to 9: every
            episode is reset with a seed from this list. Episode k of environment i (both from 0)
            has entry ``i + k * (number of environments)``; the list starts over at its end. The
            seeds are the same on any number of workers. Only for environments that Muster resets
            one by one. None: only the first episode of each environment has a seed.
    """

    max_frames_per_traj: Limit = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    interruptor: Annotated[Any, _interruptor] = None
    compact_obs: bool = False
    on_step: Callable[[Any], Any] | None = None
    track_policy_version: Annotated[Any, _version_counter] = False
    validate: Validate = "fast"
    execution: Execution = field(default_factory=Execution)
    num_threads: PositiveNumber | None = 1
    max_decorrelation_steps: Number = 0
    traj_done_key: Annotated[str, _entry_of_info] | None = None
    prev_action_reward: bool = False
    track_traj_ids: bool = True
    track_seeds: bool = False
    episode_seeds: Annotated[Sequence[int], list_of_seeds] | None = None
