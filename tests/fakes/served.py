"""What workers run that only ask a server; light to import, as they are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from muster.errors import PolicyError
from muster.testing import OracleEnv
from muster.workers.mailbox import MailboxClient


class Known(OracleEnv):
    """Says in a file which process it lives in."""

    def __init__(self, path, *args):
        super().__init__(path, *args)
        Path(f"{path}.{self.number}").write_text(str(os.getpid()))


def pid_of(path, number):
    return int(Path(f"{path}.{number}").read_text())


def asks(channel):
    """Ask ``count`` questions, after ``late_s`` each; say at the end which were refused."""
    (number, workers, count, late_s), fds = channel.receive()
    client = MailboxClient(number, workers, fds, lambda: False)
    late, refused = threading.Event(), []
    for row in range(count):
        if late_s:
            late.wait(late_s)
        try:
            client.ask(number + 1, row)
        except PolicyError:
            refused.append(row)
    client.finished(number + 1)
    channel.send(refused)
    client.close()
