"""``muster replay``: what made an environment fail, once more, in this process and under the debugger."""

from __future__ import annotations

import bdb
import faulthandler
import itertools
import pdb
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from muster.errors import BadCapsule, MusterError

if TYPE_CHECKING:
    import numpy as np

    from muster.sources.capsule import Capsule

FAILED = 1
BY_DEATH = ("WorkerDied", "WorkerHung")  # errors that end the process, or never come


@dataclass(frozen=True)
class Replay:
    """Replay a crash capsule: play its actions, and stop under pdb where the environment failed."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A file that a collector wrote when an environment raised, hung, or ended its worker."""

    trust: bool = False
    """Allow the file to run code: to unpickle the environment's factory, or to import its module."""

    no_pdb: bool = False
    """Print the traceback instead; so it is, too, where the input is no terminal."""


def replay(command: Replay) -> int:
    """Run the command.

    Returns:
        the exit code: 1 if the environment failed, 0 if it did not.

    Raises:
        BadCapsule, ImportRefused: nothing was run.
    """
    from muster.sources.capsule import Capsule

    capsule = Capsule.load(command.file, trust=command.trust)
    _say(_about(capsule))
    if capsule.missing:
        raise BadCapsule(f"{command.file}: {capsule.missing}")
    _say(_differences(capsule))
    interactive = not command.no_pdb and sys.stdin.isatty()
    try:
        player = Player(capsule)
    except MusterError as error:
        return _failed(error, interactive, "making the environment")
    with closing(player):
        return _play(player, interactive)


def _play(player: Player, interactive: bool) -> int:
    capsule, moves = player.capsule, player.moves()
    last = moves.pop() if capsule.phase in ("step", "reset") and moves else None
    for done, move in enumerate(_shown(moves)):
        try:
            player.make(move)
        except BaseException as error:  # noqa: BLE001  (as below)
            return _failed(error, interactive, f"{_name(move)} {done + 1} of {len(moves)}, earlier than recorded")
    _say(player.verdict())
    if last is None:
        _say(f"All actions are played. What failed came after them, in the phase {capsule.phase!r}.")
        return 0
    doing = f"env.{last[0]}()" if last[0] == "reset" else f"env.step({player.action(last[1])!r})"
    if capsule.kind in BY_DEATH:
        _say(f"Now {doing}, in which the worker {'hung' if capsule.kind == 'WorkerHung' else 'died'}.")
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    try:
        if interactive and capsule.kind in BY_DEATH:
            _stop_before(lambda: player.make(last), player.env, None if last[0] == "reset" else player.action(last[1]))
        else:
            player.make(last)
    except BaseException as error:  # noqa: BLE001  (whatever the environment raises is what was asked for)
        if isinstance(error, bdb.BdbQuit) or isinstance(error.__cause__, bdb.BdbQuit):
            return FAILED
        return _failed(error, interactive, doing)
    _say(f"{doing} did not fail this time.")
    return 0


class Player:
    """An environment, and all that was done to it.

    Args:
        capsule: with nothing ``missing``.

    Attributes:
        env: the environment, or the list of them.

    Raises:
        EnvError: the environment cannot be made.
    """

    def __init__(self, capsule: Capsule) -> None:
        import torch

        from muster.columns import RolloutOptions, lane_columns
        from muster.envs.build import build_env
        from muster.memory.slots import Layout, Slot

        maker = capsule.maker
        device = None if maker.device is None else torch.device(maker.device)
        built = build_env(maker.source, None if capsule.alone else maker.num_envs, maker.kwargs, device)
        self.capsule, self.batch = capsule, built.env
        self.batch.max_steps = capsule.max_frames_per_traj
        layout = Layout(1, self.batch.num_envs, lane_columns(self.batch, (), RolloutOptions()), 1, built.batch_shape)
        self._lane = Slot(layout, self.batch.device or "heap").lanes[0]
        objects = list(self.batch.objects())
        self.env: Any = objects[0] if len(objects) == 1 else objects

    def moves(self) -> list[tuple[str, int]]:
        """What was done, in order: ("reset", its first row in ``resets``) and ("step", row of ``actions``)."""
        import numpy as np

        resets = self.capsule.resets
        _, first = np.unique(resets[:, 0], return_index=True)
        at = [(int(resets[n, 1]), ("reset", int(n))) for n in first]
        steps = len(next(iter(self.capsule.actions.values()), ()))
        order = sorted([*at, *((row, ("step", row)) for row in range(steps))], key=lambda entry: entry[0])
        return [move for _, move in order]  # sorted() keeps resets before the step of the same row

    def make(self, move: tuple[str, int]) -> None:
        """Make a move.

        Raises:
            MusterError: as in a rollout; the environment's own exception is the cause.
        """
        import torch

        with torch.no_grad():
            (self._reset if move[0] == "reset" else self._step)(move[1])

    def observation(self) -> dict[Any, np.ndarray[Any, Any]]:
        """The newest, ``[B, *shape]`` per leaf."""
        return {key: _host(self._lane.data[key][0]) for key in self.batch.observation_specs}

    def action(self, row: int) -> Any:
        """Of a step, as the environment gets it."""
        leaves = {key: array[row] for key, array in self.capsule.actions.items()}
        codec = getattr(self.batch, "actions", None)
        if not self.capsule.alone or codec is None:
            return leaves
        value = codec.build([leaves[key][0] for key in codec.specs])
        return value.item() if codec.single and not codec.specs[next(iter(leaves))].shape else value

    def verdict(self) -> str:
        """Whether the replay has got to where the recording was before it failed."""
        expected, got = self.capsule.observation, self.observation()
        if not expected:
            return ""
        if all(key in got and same_bits(got[key], value) for key, value in expected.items()):
            return "The observation before the failure is bit for bit the recorded one."
        return (
            "The observation before the failure is NOT the recorded one: this environment is not determined by "
            f"its seed and actions alone. {self.capsule.caveat}"
        ).rstrip()

    def close(self) -> None:
        """Close the environment."""
        self.batch.close()

    def _reset(self, n: int) -> None:
        from muster.sources.capsule import Special
        from muster.sources.history import set_random_state

        resets = self.capsule.resets
        rows = list(itertools.takewhile(lambda i: resets[i, 0] == resets[n, 0], range(n, len(resets))))
        which = [int(resets[i, 2]) for i in rows]
        special = [self.capsule.special.get(i, Special(None, None, None)) for i in rows]
        for i, state in zip(which, (entry.state for entry in special), strict=True):
            if state is not None:
                try:
                    set_random_state(self.batch.objects()[i], state)
                except (LookupError, TypeError, ValueError) as error:
                    raise BadCapsule(f"the random state in the capsule is damaged: {error}") from error
        seeds = [entry.seed for entry in special if entry.seed is not None]
        self.batch.reset_options = special[0].options
        self.batch.reset(self._lane.data, 0, which, seeds if len(seeds) == len(which) else None)

    def _step(self, row: int) -> None:
        import torch

        from muster.keys import FLAGS, next_of

        data = self._lane.data
        for flag in FLAGS:  # which environments only set
            for key in (flag, next_of(flag)):
                data[key][...] = self._lane.arrays[key][...] = False
        for key, array in self.capsule.actions.items():
            data[key][0] = torch.as_tensor(array[row]) if torch.is_tensor(data[key]) else array[row]
        self.batch.start(self._lane)(0)
        for key in self.batch.observation_specs:
            data[key][0] = data[key][1]


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are equal to the last bit."""
    if a.dtype == object:
        return bool(a.tolist() == b.tolist())
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def _host(value: Any) -> Any:
    return value.cpu().numpy() if hasattr(value, "cpu") else value


def _stop_before(step: Callable[[], None], env: Any, action: Any) -> None:
    """The place where pdb stops: ``env`` and ``action`` are at hand; c runs the step, s goes into it, q leaves."""
    pdb.Pdb(nosigint=True).set_trace()  # so that Ctrl-C ends a hang
    step()


def _failed(error: BaseException, interactive: bool, doing: str) -> int:
    """Show an error at the innermost frame, the environment's."""
    original = error.__cause__ if isinstance(error, MusterError) and error.__cause__ is not None else error
    traceback.print_exception(type(original), original, original.__traceback__)
    if original is not error:
        _say(f"muster: {error}")
    _say(f"Failed again in {doing}." if not isinstance(error, KeyboardInterrupt) else f"Interrupted in {doing}.")
    frames: TracebackType | None = original.__traceback__
    if interactive and frames is not None:
        pdb.post_mortem(frames)
    return FAILED


def _about(capsule: Capsule) -> str:
    who = f"environment {capsule.env_ids[0]}" if len(capsule.env_ids) == 1 else f"{len(capsule.env_ids)} environments"
    rows = len(next(iter(capsule.actions.values()), ()))
    first = capsule.message.split("\n\n")[0]
    return (
        f"{capsule.name}, {who}, {capsule.time}\n{capsule.kind} in {capsule.phase}: {first}\n"
        f"{rows:,} actions and {len(capsule.resets):,} resets. {capsule.caveat}"
    ).rstrip()


def _differences(capsule: Capsule) -> str:
    from muster.sources.capsule import installed

    here = installed()
    other = [f"{k} {v} (here {here.get(k, 'none')})" for k, v in capsule.versions.items() if here.get(k) != v]
    return f"Recorded with other versions: {', '.join(other)}." if other else ""


def _name(move: tuple[str, int]) -> str:
    return "action" if move[0] == "step" else "reset"


def _shown(moves: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The moves, with a line of progress on terminals."""
    shown = time.monotonic()
    visible = sys.stderr.isatty()
    for done, move in enumerate(moves):
        yield move
        if visible and time.monotonic() - shown > 0.25:
            shown = time.monotonic()
            print(f"\r{done + 1:,} of {len(moves):,} \033[K", end="", file=sys.stderr, flush=True)
    if visible:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    if text:
        print(text, flush=True)
