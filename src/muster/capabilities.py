"""What only some env batches can do: a small protocol for each capability.

An env batch declares a capability by deriving its class from the protocol. Who needs one asks for
it once, when a group or a lane is made::

    bypassing = capability(env, Bypasses)  # None: the batch steps all its environments

Wrappers are looked through: the outermost layer with the capability answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muster.errors import BadOption
from muster.keys import Key
from muster.protocols import Act, EnvBatch, Step
from muster.rng import GroupRng

if TYPE_CHECKING:
    from muster.envs.checks import Casts
    from muster.memory.slots import Lane
    from muster.memory.specs import Array
    from muster.utils.event_loop import CoroutineRunner

Able = TypeVar("Able")


class Wraps(EnvBatch, Protocol):
    """An env batch around another one, ``inner``, whose capabilities it has, too."""

    inner: EnvBatch


def capability(env: EnvBatch, kind: type[Able]) -> Able | None:
    """Return the outermost layer of ``env`` with this capability; None: there is none."""
    layer: Any = env
    while kind not in type(layer).__mro__:
        if Wraps not in type(layer).__mro__:
            return None
        layer = layer.inner
    found: Able = layer
    return found


class Bypasses(Protocol):
    """Can leave environments out of steps.

    Attributes:
        bypassed: environments that are left out.
    """

    bypassed: Collection[int]

    def bypass(self, which: Collection[int]) -> None:
        """Leave these environments, and no others, out of all following steps.

        For them a step writes zeros into the lane (the last observations, if those are objects).
        Their action masks then allow every action (``rollout/starting.py``), as policies act for
        them, too.
        """


class TracksLives(Protocol):
    """Knows where the agent's episode ends, and the environment's does not."""

    def track_lives(self, key: str) -> Collection[int]:
        """Read ``info[key]`` (default True) at an end: whether the environment's episode is over,
        or only the agent's. If it is True without an end, truncate. Call this before the first
        ``start``.

        Returns:
            a collection that always holds the environments which the last step ended, but whose own
            episode continues.
        """


class RestartsAgents(Protocol):
    """Shows the agent's past in observations."""

    def restart_agent(
        self, arrays: Mapping[Key, Any], row: int, which: Sequence[int]
    ) -> None:
        """Clear the agent's past in an observation row: its episode ended, and the environment's
        did not.
        """


class KeepsState(Protocol):
    """Has state of its own besides that of the environments."""

    def snapshot(self) -> dict[str, Any]:
        """Return the adapter's own state, without that of the environments, as plain data."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a ``snapshot``."""


class RefersToParts(Protocol):
    """Holds references to inner objects of the environments, which a restore may replace."""

    def look_again(self) -> None:
        """Refresh the references."""


class HoldsSteps(Protocol):
    """Executes steps whose rows are complete later: agents take turns, or environments run ahead.

    Attributes:
        late: number of steps to make before the next row can be complete.
    """

    late: int

    def drop_open(self) -> None:
        """Discard steps whose rows were not delivered: the environments failed and will be reset."""

    def take_dropped(self) -> int:
        """Return the number of steps since the last call that resets discarded before they were in
        a row, and that nothing else counts.
        """


class WritesNext(Protocol):
    """Resets finished environments itself, and writes terminated, truncated and ``next``
    observations of each row; ``step`` returns None.
    """

    def limit_episodes(self, steps: int) -> None:
        """Truncate episodes after so many steps; called before the first reset.

        Raises:
            BadOption: the environments cannot be reset then.
        """


class MayWait(Protocol):
    """Its rows are on a device, and its steps may have to wait for it."""

    @property
    def why_waiting(self) -> str:
        """Why every step waits; "" if none does. It is known after the first reset."""


class ActsWhenReady(Protocol):
    """Its environments act when they are ready, and not all at the same time.

    Attributes:
        ready_envs: the environments that act next; their number is ``EnvSpec.ready``.
    """

    ready_envs: Array

    def start_ready(
        self,
        lane: Lane,
        prepare: Callable[[Lane], Act],
        written: Collection[Key],
        *,
        acted_last: bool,
    ) -> Step:
        """Prepare to write into ``lane``, in place of ``EnvBatch.start``.

        Args:
            prepare: prepares the policy to act in a lane with one column for each of
                ``ready_envs``.
            written: keys of the policy's columns.
            acted_last: it is the policy of the last rollout. Another one acts in its first step of
                each environment as at the start of an episode: ``is_init`` is True for it.

        Returns:
            ``step(t)``, as ``start`` does. It also writes action row ``t``, and what else the
            policy writes.
        """


class LimitsResets(Protocol):
    """May be unable to reset single environments."""

    def check_partial_reset(self) -> None:
        """Raise ``UnsupportedEnv`` if single environments cannot be reset by the caller."""


class CompilesSteps(Protocol):
    """Can step its environments by a compiled function."""

    def compile_step(self, options: Mapping[str, Any]) -> None:
        """Apply ``torch.compile`` with these keyword arguments to the environments' ``step``."""


class ResetsWithOptions(Protocol):
    """Passes keyword arguments to the environments' own reset.

    Attributes:
        reset_options: keyword arguments for the next reset; None: none.
    """

    reset_options: dict[str, Any] | None = None

    def pass_options(self, options: dict[str, Any] | None) -> None:
        """Pass keyword arguments to the next reset, and only to that one.

        Raises:
            BadOption: there is a seed among them.
        """
        check_reset_kwargs(options)
        self.reset_options = options

    def take_options(self) -> dict[str, Any]:
        """Return the keyword arguments for this reset; later ones have none."""
        options = self.reset_options or {}
        self.reset_options = None
        return dict(options)


class DrawsActions(Protocol):
    """Has random actions of its own; those of other env batches are drawn from the specs."""

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Draw random actions, ``[*shape, *leaf shape]`` per leaf; tensors on a device."""


class CountsSteps(Protocol):
    """Knows how many environments were stepped in a row that raised; otherwise it counts as none.

    Attributes:
        executed_in_row: this number; 0 while no row is incomplete.
    """

    executed_in_row: int = 0

    def take_executed(self) -> int:
        """Return the number, once."""
        executed = self.executed_in_row
        self.executed_in_row = 0
        return executed


class TellsInfos(Protocol):
    """Its environments return infos.

    Attributes:
        new_infos: infos of the last reset or step, as pairs of infos and the indices (or ``ALL``)
            of their environments. Infos are a list with a dict per environment (None: not stepped),
            or a dict of arrays as in ``gymnasium.vector``. An environment in two pairs was reset in
            the same step; the first pair is the reset's.
    """

    new_infos: Sequence[tuple[Any, Any]]

    def keep_infos(self) -> None:
        """Set ``new_infos`` in every reset and step; called before the first reset."""


class CastsValues(Protocol):
    """Casts values in another dtype than their space's by rules.

    Attributes:
        casts: the rules.
    """

    casts: Casts


class AwaitsCoroutines(Protocol):
    """Its environments are coroutines.

    Attributes:
        coroutines: runs them.
    """

    coroutines: CoroutineRunner


def check_reset_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """Raise ``BadOption`` for a seed among the keyword arguments of resets: seeds of environments
    are Muster's.
    """
    if kwargs and "seed" in kwargs:
        seed = kwargs["seed"]
        raise BadOption(
            f"seed={seed!r} was given as an argument of the environments' reset, which gets its"
            f" seeds from the collector. Call collector.set_seed({seed!r}) instead: environment i"
            f" is then reset with seed {seed!r} + i (static_seed=True: all with the same)"
        )


def pass_options(env: EnvBatch, options: dict[str, Any] | None) -> None:
    """Pass keyword arguments to the next reset of an env batch.

    Raises:
        BadOption: there is a seed among them, or its resets take none.
    """
    with_options = capability(env, ResetsWithOptions)
    if with_options is not None:
        with_options.pass_options(options)
    elif options:
        raise BadOption(
            f"{env.spec.name}.reset takes no keyword arguments, not {sorted(options)}. Leave them"
            " out"
        )
