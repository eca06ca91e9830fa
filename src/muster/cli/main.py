"""Entry point: parses the command line, runs a command, and prints errors."""

from __future__ import annotations

import functools
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from muster.cli.cluster import ClusterCommand, NodeCommand, cluster, node
from muster.cli.collect import Collect, collect
from muster.cli.doctor import Doctor, doctor
from muster.cli.eval import Eval, evaluate
from muster.cli.export import ExportCommand, export
from muster.cli.replay import Replay, replay
from muster.cli.serve import Serve, serve
from muster.cli.tune import Tune, tune
from muster.cli.watch import WatchCommand, watch
from muster.errors import MusterError
from muster.utils.attributes import installed

COMMANDS: dict[type, Callable[[Any], int]] = {
    Collect: collect,
    Serve: serve,
    Eval: evaluate,
    Tune: tune,
    ExportCommand: export,
    WatchCommand: watch,
    ClusterCommand: cluster,
    NodeCommand: node,
    Replay: replay,
    Doctor: doctor,
}
"""What each command runs; its name is that of its class."""

EXAMPLES = """Collects reinforcement-learning experience at the speed of the environments.

examples:
  muster collect CartPole-v1 --frames 100k --out runs/a
  muster collect Pendulum-v1 --frames 1e6 --envs 16 --policy mlp --seed 3 --out runs/b
  muster collect CartPole-v1 --frames 50_000 --policy net.safetensors
  muster collect my_envs:Maze-v0 --frames 10k --policy agent.py:policy --allow-import
  muster serve random --obs float32:4 --act discrete:2 --frames 10k --address 127.0.0.1:7000
  muster eval CartPole-v1 --policy net.safetensors --episodes 20 --video best,worst
  muster tune CartPole-v1 --policy mlp --num-envs 16 64
  muster replay /tmp/muster-crash-x1/env-3.crash
  muster export runs/a --to minari --out cartpole/random-v0
  muster watch runs/a
  muster cluster
  muster doctor

Read a recording with:  python -c "import muster; print(muster.load('runs/a'))"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: that of this process).

    Returns:
        the exit code: 0; 1 if doctor found a problem, a replay failed or a node has lost its collector; 2 for a
        ``MusterError``, with one message; 130 and 143 when stopped by Ctrl-C and SIGTERM; 141 if stdout was closed.

    Raises:
        SystemExit: from the parser, for ``--help`` (0) and invalid arguments (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        print(f"muster {installed('muster-rl') or 'from a source tree'}")
        return 0
    command = _parse(arguments or ["--help"])
    try:
        return COMMANDS[type(command)](command)
    except MusterError as error:
        if getattr(command, "allow_import", False) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # perhaps from the user's own code
        print(f"muster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("muster: stopped at once", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has exited: `muster ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _parse(arguments: Sequence[str]) -> Any:
    """Parse ``arguments`` into an object of one of the ``COMMANDS``."""
    import tyro

    described: list[Any] = [
        Annotated[kind, tyro.conf.subcommand(kind.__name__.lower().removesuffix("command"), description=kind.__doc__)]
        for kind in COMMANDS
    ]
    one_of: Any = functools.reduce(operator.or_, described)
    return tyro.cli(
        one_of,
        prog="muster",
        description=EXAMPLES,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )


if __name__ == "__main__":
    sys.exit(main())
