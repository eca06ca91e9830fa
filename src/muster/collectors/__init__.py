"""What the user holds."""

from muster.collectors.collector import Collector
from muster.collectors.options import CollectorOptions

__all__ = ["Collector", "CollectorOptions"]
