"""``python -m benchmarks.short_batches_child``: ``benchmarks.worker`` that knows the systems of
short batches.
"""

from benchmarks import short_batches_systems, worker

__all__ = ["short_batches_systems"]

if __name__ == "__main__":
    worker.main()
