"""``python -m benchmarks.pools_child``: ``benchmarks.worker`` that knows the systems with EnvPool."""

from benchmarks import pools_systems, worker

__all__ = ["pools_systems"]

if __name__ == "__main__":
    worker.main()
