"""What all tests run under."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples in every run, and no clock that fails a test on a busy machine.
settings.register_profile(
    "muster",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("muster")
