"""``python -m muster.cluster.tied_job FIFO ...`` becomes ``python ...`` and ends with the process that holds the FIFO.

The kernel kills it when nobody can write the FIFO any more: no thread has to run for that. It is tied before it loads
anything that takes time, so this module imports little.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from muster.workers.keeper import signal_on_change


def main() -> NoReturn:
    """See the module."""
    path, *arguments = sys.argv[1:]
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_inheritable(fd, True)
    signal_on_change(fd, os.getpid(), signal.SIGKILL)
    try:
        if not os.read(fd, 1):  # it was gone before the kernel was told to look
            sys.exit(1)
    except BlockingIOError:  # it is there, and says nothing
        pass
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
