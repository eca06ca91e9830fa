"""Which of the two processes of ``pytest -n 2`` runs a test file.

- The tests of nodes have the last process: Ray and gloo start threads and open files in it that
  other tests would count.
- The tests that count threads, files or memory, or that fork (``COUNTS``), have the other one.
- All other files are for whichever process has nothing else to do.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.selection import OF_NODES

COUNTS = re.compile(  # threads, files, memory; or forks this process
    r"/faults/|/test_(weight_transports|cli|inference_server|lines|loggers|memory|multi_collectors|oracle|processes"
    r"|recording|shared_memory)\.py"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``pytest -n 2``; another ``--dist`` is left alone."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Apart(LoadScopeScheduling):  # type: ignore[misc]
        """By file.

        The last process begins with the tests of nodes, the others with those that count.
        """

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            kind = (
                "nodes" if OF_NODES.search(nodeid) else "counts" if COUNTS.search(file) else "any"
            )
            return f"{kind}: {file}"

        def _assign_work_unit(self, node: Any) -> None:
            processes = list(self.assigned_work)
            if len(processes) > 1:
                first, not_here = (
                    ("nodes", "counts") if node is processes[-1] else ("counts", "nodes")
                )
                suitable = [scope for scope in self.workqueue if not scope.startswith(not_here)]
                if not suitable:
                    node.shutdown()
                    return
                best = min(suitable, key=lambda scope: not scope.startswith(first))
                self.workqueue.move_to_end(best, last=False)
            super()._assign_work_unit(node)

    return Apart(config, log)
