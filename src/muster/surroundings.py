"""What environments and policies run in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from muster.columns import RolloutOptions
from muster.rng import GroupRng, torch_threads

if TYPE_CHECKING:
    import torch
else:
    from muster import lazy_torch as torch


@contextmanager
def surroundings(rng: GroupRng, options: RolloutOptions, *, background: bool, first: bool) -> Iterator[None]:
    """The group's generators as global ones, torch's threads, no gradients.

    Args:
        background: this thread runs beside the user's, and leaves generators and threads of the process alone.
        first: not in inference mode: a module may make things in its first call that it keeps, such as lazy
            parameters, and what is made in inference mode cannot be trained.
    """
    generators = rng.as_global() if options.own_rng and not background else nullcontext()
    if "torch" not in sys.modules:  # environments do without, and the policy acts elsewhere
        with generators:
            yield
        return
    grad = torch.inference_mode() if options.inference_mode and not first else torch.no_grad()
    threads = nullcontext() if background else torch_threads(options.num_threads)
    with generators, grad, threads:
        yield
