"""Seeds for TorchRL environments. TorchRL seeds a batch by a chain of hashes; Muster gives each its own seed."""

from __future__ import annotations

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase, ParallelEnv, SerialEnv


def seed(env: EnvBase, seeds: list[int], *, whole: bool) -> None:
    """Seed the environments of ``env``, one by one where it is made of several.

    Another batch of environments has one generator, which gets the first seed.
    """
    base = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    if isinstance(base, BatchedEnvBase) and whole and len(seeds) == base.num_workers:
        if base.is_closed:
            base.start()
        if isinstance(base, SerialEnv):
            for part, value in zip(base._envs, seeds, strict=True):
                part.set_seed(value)
            return
        if isinstance(base, ParallelEnv):
            for channel, value in zip(base.parent_channels, seeds, strict=True):
                channel.send(("seed", (value, True)))
            for channel in base.parent_channels:
                channel.recv()
            return
    env.set_seed(seeds[0])
