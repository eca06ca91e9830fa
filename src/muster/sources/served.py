"""What stands in for what is elsewhere: for the policy at workers, and for the environments at the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import BadOption, MusterError
from muster.keys import Key, dotted
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.progress import ORDER, Progress
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.sources.lines import Line
from muster.sources.messages import GroupInfo


class ServedPolicy:
    """Implements ``Policy``: somebody else acts, in the very rows of the lanes. Every row is a question to the server.

    Args:
        line: to the server.
        progress: says which order is at work.
    """

    name, path, draws_globally = "policy", "server", False
    raises = (MusterError,)  # the user's policy is elsewhere

    def __init__(self, line: Line, progress: Progress) -> None:
        self.line = line
        self._progress = progress
        self._columns: Sequence[Column] = ()

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        """The server makes the first call, for row 0."""
        raise NotImplementedError

    def learn(self, columns: Sequence[Column]) -> None:
        """The server knows by now which columns there are."""
        self._columns = columns

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        ask, order = self.line.ask, int(self._progress.cells[ORDER])
        return lambda t: ask(order, t)


class Described:
    """What a policy has to know about environments that are elsewhere; as of ``EnvBatch``."""

    device = sample = None

    def __init__(self, info: GroupInfo) -> None:
        self.name, self.num_envs = info.name, info.num_envs
        self.observation_specs, self.action_specs = info.observation_specs, info.action_specs
        self.bookkeeping = info.bookkeeping


def check_alike(info: GroupInfo, first: GroupInfo) -> None:
    """Raise ``BadOption`` for a group that no server can act for together with the first one."""
    specs = {**info.observation_specs, **info.action_specs}
    if info.device is not None and info.device.type != "cpu":
        raise BadOption(f"inference='server': {info.name} steps on {info.device} itself; leave inference out")
    if objects := [dotted(key) for key, spec in specs.items() if not spec.is_tensor]:
        raise BadOption(
            f"inference='server' needs fixed shapes, and {info.name} has Python objects in {objects}: leave inference "
            f"out, or encode them as arrays"
        )
    if (info.observations, info.actions) != (first.observations, first.actions):
        raise BadOption(
            f"inference='server' acts with one policy for all environments, and {info.name} and {first.name} differ in "
            f"observations or actions: use a collector for each kind"
        )
