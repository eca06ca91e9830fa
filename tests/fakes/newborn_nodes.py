"""A program to be killed while it makes a collector with nodes.

It is run as ``python -m tests.fakes.newborn_nodes LAUNCHER FOLDER``. It says "ready" when all is imported, and "made"
when the collector is.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

SLOW = """
import ctypes, os, pathlib
class Environment: "As in the real dm_env."
if os.getpid() != int(os.environ["MUSTER_TEST_MAIN"]):  # the fork server, which imports what the main process has
    pathlib.Path(__file__).with_name("importing").touch()
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # for ever, with the GIL, and no signal wakes it: as loading torch, but longer
"""


def main(launcher: str, folder: Path) -> None:
    from muster import DistributedCollector
    from muster.testing import OracleEnv

    if launcher == "importing":
        (folder / "dm_env.py").write_text(SLOW)
        os.environ["MUSTER_TEST_MAIN"] = str(os.getpid())
        sys.path.insert(0, str(folder))
        import dm_env  # noqa: F401  (is preloaded)

        launcher = "mp"
    os.chdir(folder)  # for the files of jobs
    warnings.filterwarnings("ignore", "There is no SLURM here")
    factories = [partial(OracleEnv, folder / "counts", number) for number in range(2)]
    print("ready", flush=True)
    with DistributedCollector(factories, None, frames_per_batch=20, launcher=launcher, sync=True) as made:
        print("made", flush=True)
        for _ in made:
            pass


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
