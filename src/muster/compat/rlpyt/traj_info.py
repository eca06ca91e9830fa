"""The record of an episode."""

from __future__ import annotations

from typing import Any


class TrajInfo(dict[str, Any]):
    """Statistics of one episode, as entries and attributes. All are logged, except names that begin with ``_``.

    A subclass can add more::

        class MyTrajInfo(TrajInfo):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.Lives = 0

            def step(self, observation, action, reward, done, agent_info, env_info):
                super().step(observation, action, reward, done, agent_info, env_info)
                self.Lives += done

    Attributes:
        Length: number of steps.
        Return: sum of rewards.
        NonzeroRewards: number of rewards that are not zero.
        DiscountedReturn: by ``_discount``, which samplers set on the class (``traj_info_kwargs=dict(discount=0.99)``).
    """

    _discount = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.Length = 0
        self.Return = 0
        self.NonzeroRewards = 0
        self.DiscountedReturn = 0
        self._cur_discount = 1.0

    def step(self, observation: Any, action: Any, reward: Any, done: Any, agent_info: Any, env_info: Any) -> None:
        """Add a step: called after every step, with the agent's observation and action, and their results."""
        self["Length"] += 1  # as entries, which is faster
        self["Return"] += reward
        self["NonzeroRewards"] += int(reward != 0)
        self["DiscountedReturn"] += self["_cur_discount"] * reward
        self["_cur_discount"] *= self._discount

    def terminate(self, observation: Any) -> TrajInfo:
        """Return the record of the episode; called with its last observation."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]
