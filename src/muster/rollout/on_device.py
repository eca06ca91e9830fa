"""Rollouts whose rows are on a device: what has to be known on the host, and the completion of all
others there.

After the last step of a rollout, everything about it is computed on the device by ``TensorClock``:
``done``, ids, step counts, and the records of the episodes that ended. The host gets a ``Packet``,
which is on its way when the rollout returns. Nothing waits for the device, unless an option needs
the host; ``needs_of_group`` and ``needs_of_request`` say which.

Rewards are checked on the device, too. A bad one is noticed when its packet has arrived: then the
next rollout raises ``BadEnvOutput`` before it begins. The batch has been delivered, with all its
frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from muster.env_spec import EnvSpec
from muster.episodes.clock import TrajectoryClock
from muster.episodes.packet import BadReward, Packet
from muster.episodes.record import PendingEpisodes
from muster.episodes.tensor_clock import ClockRows, EndedRows, TensorClock
from muster.errors import BadEnvOutput
from muster.keys import (
    DONE,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    next_of,
)
from muster.memory.arrivals import Arrival, arrival_from
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.rollout.abilities import Abilities
from muster.rollout.options import RolloutOptions
from muster.rollout.request import RolloutRequest, Watch

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


def needs_of_group(spec: EnvSpec, options: RolloutOptions, can: Abilities) -> list[str]:
    """Return the reasons why the host has to wait for each rollout of these environments."""
    reasons = {
        "environments that Muster resets one by one": not can.write_next,
        "environments whose agents take turns": bool(spec.agents),
        "rewards of several agents": bool(spec.agent_rewards),
        "info": bool(spec.info_specs),
        "environments that step some of themselves": can.holding is not None,
        "reset_when_done=False": not options.reset_when_done,
        "interruptor": options.interruptor is not None,
        "compact_obs": options.compact_obs,
        "on_step": options.on_step is not None,
        "validate='full'": options.validate == "full",
        "max_decorrelation_steps": bool(options.max_decorrelation_steps),
        "traj_done_key": options.traj_done_key is not None,
        "track_seeds": options.track_seeds,
        "episode_seeds": options.episode_seeds is not None,
    }
    return [reason for reason, applies in reasons.items() if applies]


def needs_of_request(request: RolloutRequest, watch: Watch | None) -> list[str]:
    """Return the reasons why the host has to wait for this rollout."""
    reasons = {
        "a rule on episodes (n_episode)": request.rule is not None,
        "frames_per_batch that environments cannot share equally": request.limit
        is not None,
        "bootstrap": request.bootstrap is not None,
        "rendering": request.pause is not None,
        "environments that are left out": bool(request.absent),
        "random steps before the first batch": request.is_random_start,
        "a function that is called after every step": watch is not None,
    }
    return [reason for reason, applies in reasons.items() if applies]


class DeviceRows(NamedTuple):
    """The columns of a lane that its clock uses, and the memory for records; made once per lane."""

    clock: ClockRows
    ended: EndedRows


def device_rows(lane: Lane, spec: EnvSpec) -> DeviceRows:
    """Return the columns of a lane on a device, and memory for the records of its episodes."""
    tensors = lane.tensors
    counted: Mapping[Key, torch.Tensor] = {}
    if STEP_COUNT not in spec.carried_specs:  # else they are the environment's
        counted = tensors
    with torch.inference_mode(False):
        clock = ClockRows(
            reward=tensors[spec.reward_key],
            terminated=tensors[next_of(TERMINATED)],
            truncated=tensors[next_of(TRUNCATED)],
            done=tensors[next_of(DONE)],
            ids=tensors[TRAJ_IDS],
            counts=counted.get(STEP_COUNT),
            next_counts=counted.get(next_of(STEP_COUNT)),
        )
        return DeviceRows(clock, EndedRows(lane.T, lane.B, clock.ids.device))


class _Unfetched(NamedTuple):
    """A packet, the memory that it is in until it is fetched, and the number of its rollout."""

    packet: Packet
    ended: EndedRows
    number: int


class OnDevice:
    """The clock of a group on a device, and the packets that no call has fetched yet.

    Args:
        arriving: returns the end of the copies from the device that were started so far.

    Attributes:
        needs: see ``needs_of_group``.
        clock: the clock on tensors.
        around_resets: makes what is entered while environments are reset before a rollout, but for
            resets with options.
    """

    def __init__(
        self,
        clock: TrajectoryClock,
        spec: EnvSpec,
        options: RolloutOptions,
        can: Abilities,
        arriving: Callable[[torch.device], Arrival] = arrival_from,
    ) -> None:
        assert spec.device is not None
        self.needs: Sequence[str] = needs_of_group(spec, options, can)
        self.clock = TensorClock(clock, spec.device)
        self._name = spec.name
        self._B = spec.num_envs
        self._total_envs = clock.total_envs
        self._checked = options.validate != "off"
        self._arriving = partial(arriving, spec.device)
        self._sent: deque[_Unfetched] = deque()
        self._number = 0  # of rollouts
        self._bad: tuple[int, BadReward] | None = None
        self._computed: DeviceRows | None = None
        self._steps_before: Array | None = None  # the rollout
        self.around_resets: Callable[[], AbstractContextManager[None]] = nullcontext

    def watch_resets(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Set ``around_resets``."""
        self.around_resets = around

    def begin(self) -> None:
        """A rollout begins: what was computed for an earlier one is not used any more."""
        self._computed = None
        self._steps_before = None

    def prepare(self, rows: DeviceRows) -> None:
        """Let the clock continue on the device, with memory whose records are fetched."""
        steps = self.clock.on_device()
        if steps is not None:
            self._steps_before = steps
        while any(sent.ended is rows.ended for sent in self._sent):
            self._fetch()

    def compute(self, rows: DeviceRows) -> None:
        """Complete the columns of a lane. These are operations of the device only, always the same;
        ``prepare`` comes before them, ``send`` after.
        """
        self.clock.advance(rows.clock, rows.ended, checked=self._checked)

    def note_computed(self, rows: DeviceRows) -> None:
        """A recorded rollout has done what ``prepare`` and ``compute`` do."""
        self._computed = rows

    def complete(self, rows: DeviceRows) -> Array | None:
        """Complete the columns of a lane, unless a recorded rollout has done it.

        Returns:
            see ``TensorClock.on_device``.
        """
        if self._computed is not rows:
            self.prepare(rows)
            self.compute(rows)
        self._computed = None
        return self._steps_before

    def send(self, rows: DeviceRows) -> PendingEpisodes:
        """Return the records of the lane that was completed, which are on their way."""
        packet = Packet(rows.ended, self._total_envs, self._arriving())
        self._sent.append(_Unfetched(packet, rows.ended, self._number))
        self._number += 1
        return packet.pending()

    def look(self, *, wait: bool = False) -> None:
        """Fetch the packets whose number has arrived (``wait``: all of them).

        Raises:
            BadEnvOutput: a reward of an earlier rollout was not finite.
        """
        while self._sent and (wait or self._sent[0].packet.has_number):
            self._fetch()

    def take_bad(self) -> BadEnvOutput | None:
        """Return the error about the first bad reward of a packet that was fetched, once."""
        if self._bad is None:
            return None
        number, bad = self._bad
        self._bad = None
        t, b = divmod(bad.cell, self._B)
        ago = self._number - number
        which = "the last rollout" if ago == 1 else f"the rollout {ago} before this one"
        return BadEnvOutput(
            f"{self._name}[{b}].step (row {t} of {which}): reward is {bad.value}. Rows on a device"
            " are checked while the next ones are made, so that batch was delivered with this"
            " reward, and so were those after it: do not learn from them. The environments are"
            " reset. validate='full' checks each batch before it is delivered."
        )

    def _fetch(self) -> None:
        sent = self._sent.popleft()
        bad = sent.packet.fetch()
        if bad is not None and self._bad is None:
            self._bad = (sent.number, bad)


class Completion:
    """The completion of a lane's rows as a part of a recorded rollout.

    ``begin``, then a call, which makes operations of the device only, then ``end``.
    """

    def __init__(self, on_device: OnDevice, rows: DeviceRows) -> None:
        self._on_device = on_device
        self._rows = rows

    def begin(self) -> None:
        """Let the clock continue on the device, with memory whose records are fetched."""
        self._on_device.look()
        self._on_device.prepare(self._rows)

    def __call__(self) -> None:
        self._on_device.compute(self._rows)

    def end(self) -> None:
        """The rollout that finishes next is complete."""
        self._on_device.note_computed(self._rows)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it changes besides the lane, by name."""
        found = {**self._on_device.clock.tensors, **self._rows.ended.tensors}
        return {f"clock.{name}": tensor for name, tensor in found.items()}
