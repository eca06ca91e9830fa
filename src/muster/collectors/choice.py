"""Which of the episodes that are kept a call of ``collect`` delivers."""

from __future__ import annotations

from collections.abc import Sequence

from muster.episodes.rules import Rule, RuleName, make_rule
from muster.episodes.whole import WholeEpisodes


class Choice:
    """The episodes that a rule has chosen, by their numbers in the store."""

    def __init__(self, name: RuleName, n: int) -> None:
        self._name, self._n = name, n
        self.rule: Rule
        self.envs: list[int]
        self.numbers: list[int]

    def begin(self, envs: list[int], store: WholeEpisodes) -> None:
        """From the beginning, with these environments, and what is held of them."""
        self.rule, self.numbers = make_rule(self._name, self._n, len(envs)), []
        self.envs, self._store, self._place = envs, store, {env: place for place, env in enumerate(envs)}
        self.take([[number] for number in store.held])
        store.new_ends()

    def take(self, steps: Sequence[Sequence[int]]) -> None:
        """Episodes ended, time step by time step."""
        num_envs = self._store.num_envs
        for step in steps:
            numbers = {self._place[n % num_envs]: n for n in step if n % num_envs in self._place}
            if not self.rule.complete:
                self.numbers += [numbers[place] for place in self.rule.ended(sorted(numbers))]
