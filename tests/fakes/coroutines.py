"""Environments whose methods are coroutines: any Gymnasium environment behind a wait of changing
length, and faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from muster.testing import CountingEnv


class Awaited:
    """``env``, which lets other coroutines run a changing number of times before it returns.

    Attributes:
        log: what has happened to it: "cancelled" and "closed".
    """

    made = 0

    def __init__(self, env: Any) -> None:
        self.env, self.observation_space, self.action_space = (
            env,
            env.observation_space,
            env.action_space,
        )
        self.turns, Awaited.made = Awaited.made % 4, Awaited.made + 1
        self.log: list[str] = []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await self._wait()
        return self.env.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        await self._wait()
        return self.env.step(action)

    async def close(self) -> None:
        await self._wait()
        self.log.append("closed")
        self.env.close()

    async def _wait(self) -> None:
        self.turns = (self.turns * 3 + 1) % 5
        for _ in range(self.turns):
            await asyncio.sleep(0)


class FaultyEnv(Awaited):
    """Counts, and at step ``at`` of its life (-1: in ``reset``) does ``fault``, a coroutine
    function of itself.
    """

    def __init__(
        self,
        fault: Callable[[FaultyEnv], Any] | None = None,
        at: int = 2,
        length: int = 10**6,
    ) -> None:
        super().__init__(CountingEnv(length))
        self.fault, self.at = fault, at

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.at == -1:
            await self._fail()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        if self.env.executed == self.at:
            await self._fail()
        return await super().step(action)

    async def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            try:
                await fault(self)
            except asyncio.CancelledError:
                self.log.append("cancelled")
                raise


async def hang(env: FaultyEnv) -> None:
    await asyncio.Event().wait()


async def stop_the_loop(env: FaultyEnv) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.Event().wait()


async def stop_the_loop_slowly(env: FaultyEnv) -> None:
    """The loop goes on for half a second, with a task that cleans up."""

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)

    env.cleaning = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    await stop_the_loop(env)


async def refuse_to_end(env: FaultyEnv) -> None:
    """Ignores its cancellation; the second one ends it."""
    try:
        await hang(env)
    except asyncio.CancelledError:
        env.log.append("ignored")
    await hang(env)


async def block(env: FaultyEnv) -> None:
    """Blocks the event loop, until the test sets ``RELEASED``."""
    RELEASED.wait(60)


async def fail(env: FaultyEnv) -> None:
    raise ConnectionError("the simulator is gone")


async def leave(env: FaultyEnv) -> None:
    raise SystemExit(3)


async def press(env: FaultyEnv) -> None:
    """Ctrl-C while it waits."""
    os.kill(os.getpid(), signal.SIGINT)
    await hang(env)


async def die(env: FaultyEnv) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


RELEASED = threading.Event()
MEETINGS: list[asyncio.Event] = []
