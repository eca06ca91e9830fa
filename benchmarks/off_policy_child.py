"""``python -m benchmarks.off_policy_child``: ``benchmarks.worker`` that knows the off-policy systems
and the size of their memories.
"""

from __future__ import annotations

from typing import Any

from benchmarks import off_policy_systems, worker

__all__ = ["off_policy_systems"]


class Worker(worker.Worker):
    """Has one more command: ``{"do": "size", "system": s} -> {"bytes": per transition}``."""

    def size(self, system: str) -> dict[str, Any]:
        built: Any = self.systems[system]
        return {"bytes": built.bytes_per_transition()}


if __name__ == "__main__":
    worker.main(Worker())
