"""``python -m benchmarks.inference_child``: ``benchmarks.worker`` that knows the systems of central
inference.
"""

from __future__ import annotations

from typing import Any

from benchmarks import inference_systems, worker


class Worker(worker.Worker):
    """Its systems may have something to tell, and what they have made ahead of a turn does not
    count.
    """

    def run(self, system: str, seconds: float) -> dict[str, Any]:
        built = self.systems[system]
        for _ in range(1 + getattr(built, "AHEAD", 0)):
            built.rollout()
        return super().run(system, seconds)

    def tell(self, system: str) -> dict[str, Any]:
        built = self.systems[system]
        return built.told() if isinstance(built, inference_systems.Served) else {}


if __name__ == "__main__":
    worker.main(Worker())
