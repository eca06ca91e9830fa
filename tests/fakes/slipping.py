"""Environments that go wrong once in their life, and a recurrent policy whose values tell how long
it remembers.
"""

from __future__ import annotations

from typing import Any, Literal

from tests.fakes.patterned import PatternEnv, Patterns


class SlippingEnv(PatternEnv):
    """A ``PatternEnv`` that goes wrong once.

    Args:
        fault: the step, or reset, counted over the environment's life; 0 is the first.
        does: what it does then.
    """

    def __init__(
        self,
        patterns: Patterns,
        fault: int,
        does: Literal["raise", "nan", "raise in reset"],
    ) -> None:
        super().__init__(patterns, fault if does == "raise" else -1)
        self.does, self.at, self.resets = does, fault, 0

    def reset(self, **options: Any) -> Any:
        self.resets += 1
        if self.does == "raise in reset" and self.resets == self.at + 1:
            raise ValueError("the table is not there")
        return super().reset(**options)

    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        return (
            observation,
            float("nan") if self.does == "nan" and self.made == self.at + 1 else reward,
            *rest,
        )


def counts_time(observation: Any, state: Any) -> Any:
    """Adds up what it has seen of time since its episode began, from 1 on, and says so as the
    value.
    """
    import torch  # here, because workers of a server need none

    total = observation[..., 2:3] + 1 + (0 if state is None else state)
    return (
        torch.zeros(observation.shape[:-1], dtype=torch.int64),
        {"state_value": total.clone()},
        total,
    )
