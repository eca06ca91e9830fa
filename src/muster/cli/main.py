"""Entry point: which command, and how errors look."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

from muster.cli.cluster import Cluster, Node, cluster, node
from muster.cli.collect import Collect, collect
from muster.cli.doctor import Doctor, doctor
from muster.cli.eval import Eval, evaluate
from muster.cli.replay import Replay, replay
from muster.cli.tune import Tune, tune
from muster.errors import MusterError

EXAMPLES = """Collects reinforcement-learning experience at the speed of the environments.

examples:
  muster collect CartPole-v1 --frames 100k --out runs/a
  muster collect Pendulum-v1 --frames 1e6 --envs 16 --policy mlp --seed 3 --out runs/b
  muster collect CartPole-v1 --frames 50_000 --policy net.safetensors
  muster collect my_envs:Maze-v0 --frames 10k --policy agent.py:policy --allow-import
  muster eval CartPole-v1 --policy net.safetensors --episodes 20 --video best,worst
  muster tune CartPole-v1 --policy mlp --num-envs 16 64
  muster replay /tmp/muster-crash-x1/env-3.capsule
  muster cluster
  muster doctor

Read a recording with:  python -c "import muster; print(muster.load('runs/a'))"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: the process's own).

    Returns:
        the exit code: 0; 1 if doctor found something, a replay failed or a node has lost its collector; 2 for a wrong
        request, told in one message; 130 and 143 when stopped by Ctrl-C and SIGTERM.

    Raises:
        SystemExit: from the parser, for ``--help`` (0) and arguments it does not understand (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        from muster.cli.doctor import installed

        print(f"muster {installed('muster-rl') or 'from a source tree'}")
        return 0
    command = _parse(arguments or ["--help"])
    try:
        if isinstance(command, Replay):
            return replay(command)
        if isinstance(command, Eval):
            return evaluate(command)
        if isinstance(command, Tune):
            return tune(command)
        if isinstance(command, (Node, Cluster)):
            return node(command) if isinstance(command, Node) else cluster(command)
        return collect(command) if isinstance(command, Collect) else doctor(command)
    except MusterError as error:
        if isinstance(command, (Collect, Eval, Tune)) and command.allow_import and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # perhaps from the user's own code
        print(f"muster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("muster: stopped at once", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone: `muster ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _parse(arguments: Sequence[str]) -> Collect | Eval | Doctor | Replay | Tune | Node | Cluster:
    import tyro

    command = (
        Annotated[Collect, tyro.conf.subcommand("collect", description=Collect.__doc__)]
        | Annotated[Eval, tyro.conf.subcommand("eval", description=Eval.__doc__)]
        | Annotated[Tune, tyro.conf.subcommand("tune", description=Tune.__doc__)]
        | Annotated[Cluster, tyro.conf.subcommand("cluster", description=Cluster.__doc__)]
        | Annotated[Node, tyro.conf.subcommand("node", description=Node.__doc__)]
        | Annotated[Replay, tyro.conf.subcommand("replay", description=Replay.__doc__)]
        | Annotated[Doctor, tyro.conf.subcommand("doctor", description=Doctor.__doc__)]
    )
    parsed: Collect | Eval | Doctor | Replay | Tune | Node | Cluster = tyro.cli(
        command,
        prog="muster",
        description=EXAMPLES,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )
    return parsed


if __name__ == "__main__":
    sys.exit(main())
