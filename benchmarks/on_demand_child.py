"""``python -m benchmarks.on_demand_child``: ``benchmarks.worker`` that knows the systems of
``collect``.
"""

from benchmarks import on_demand_systems, worker

__all__ = ["on_demand_systems"]

if __name__ == "__main__":
    worker.main()
