"""Which process of ``pytest -n`` runs a test file.

Tests wait half of their time, for deadlines and for processes that end. So ``make test`` runs more
processes than CI has cores. They are split in halves:

- The tests of nodes have the second half: Ray and gloo start threads and open files in a process
  that other tests would count. Those of Ray begin in the last process, and others help when they
  have run their own: each process that connects starts a cluster.
- The tests that count threads, files or memory, or that fork (``COUNTS``), have the first half. When
  none of them and nothing else is left, its processes help with the tests of nodes.
- All other files are for whichever process has nothing else to do.

Files with many tests come first, so that no process is left alone with one at the end.
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
RAY = re.compile(
    r"/test_(ray_\w+|cli_cluster|node_networks|sync_schemes|torchrl_(cluster\w*|node_collectors))\.py"
    r"|contract/test_elastic\.py|[\[-]ray\b"
)


def kind_of(test: str) -> str:
    """What decides about the processes of a test: "ray", "nodes", "counts" or "any"."""
    if OF_NODES.search(test):
        return "ray" if RAY.search(test) else "nodes"
    return "counts" if COUNTS.search(test.partition("::")[0]) else "any"


def kinds_for(
    number: int, processes: int, *, counting: bool = True, alone: bool = False
) -> list[str]:
    """The kinds of tests that a process may run, the first ones first.

    Args:
        number: of the process; one that replaces a crashed one has a number beyond the others.
        processes: how many there are.
        counting: whether tests that count are left.
        alone: all other processes have ended: pytest-xdist ends those that have nothing to do.
    """
    if processes == 1 or number >= processes or alone:
        return ["counts", "nodes", "ray", "any"]
    if number < processes // 2:
        return ["counts", "any"] if counting else ["any", "nodes", "ray"]
    if number < processes - 1:
        return ["nodes", "ray", "any"]
    return ["ray", "nodes", "any"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``pytest -n``; another ``--dist`` is left alone."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Apart(LoadScopeScheduling):  # type: ignore[misc]
        """By file, and of some files by test: the variants that run on nodes are apart."""

        def _split_scope(self, nodeid: str) -> str:
            return f"{kind_of(nodeid)}: {nodeid.partition('::')[0]}"

        def _assign_work_unit(self, node: Any) -> None:
            number = int(node.gateway.id.removeprefix("gw"))
            counting = any(scope.startswith("counts:") for scope in self.workqueue)
            alone = all(other is node or other.shutting_down for other in self.nodes)
            kinds = kinds_for(number, self.numnodes, counting=counting, alone=alone)
            best: tuple[int, int, str] | None = None
            for scope, tests in self.workqueue.items():
                kind = scope.partition(":")[0]
                if kind in kinds:
                    found = (kinds.index(kind), -len(tests), scope)
                    best = found if best is None else min(best, found)
            if best is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(best[2], last=False)
            super()._assign_work_unit(node)

        # --- after a process has crashed, where pytest-xdist 3.8 runs the test again, or stands still

        def remove_node(self, node: Any) -> str | None:
            """What a crashed process has left is for the others, but for the test that it was at."""
            units = self.assigned_work.pop(node)
            left = [
                (unit, test)
                for unit in units.values()
                for test, has_run in unit.items()
                if not has_run
            ]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            for scope, unit in units.items():
                if not all(unit.values()):
                    self.workqueue[scope] = unit
            for other in self.nodes:
                self._reschedule(other)
            return str(crashed)

        def _reschedule(self, node: Any) -> None:
            """A process begins a test when it knows the next one, or that there is none."""
            if node not in self.registered_collections:
                return  # it has just begun, and comes here when it knows all tests
            super()._reschedule(node)
            while (
                self.workqueue
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            ):
                super()._reschedule(node)
            if not self.workqueue and not node.shutting_down:
                node.shutdown()

    return Apart(config, log)
