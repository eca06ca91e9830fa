"""``python -m benchmarks.workers_child``: ``benchmarks.worker`` that also knows the systems of
several workers.
"""

from benchmarks import worker, workers_systems

__all__ = ["workers_systems"]

if __name__ == "__main__":
    worker.main()
