"""A policy for each agent, where agents take turns.

::

    Collector(env, {"player_0": learner, "player_1": opponent}, ...)  # or {"player_0": learner, "others": opponent}
    collector.update_policy_weights_(model_id="player_0")  # what the optimizer has changed in the learner
    collector.update_policy_weights_(learner, model_id="player_1")  # the opponent becomes a copy of the learner
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from muster.errors import BadOption, BadPolicyOutput
from muster.keys import ACTION, LOG_PROB, Key
from muster.memory.specs import choices_of
from muster.policies.checks import PolicySetting
from muster.policies.functions import takes_state
from muster.policies.heads import Head
from muster.policies.inputs import unchanged_inputs
from muster.policies.sampling import ActionMask

OTHERS = "others"


def per_agent(policies: Mapping[str, Any]) -> PerAgent:
    """A policy that consists of one for each agent; a collector makes it from a dict.

    Args:
        policies: by name of the agent. A head, a module or function ``obs -> action`` or ``obs ->
            (action, extras)``, or None for uniformly random actions. ``"others"`` is the policy of
            all agents that are not named. Each gets the rows of its agents, ``[m, *shape]``, also
            without ``num_envs``. In rows of agents whose policy does not return an extra of another
            one, it is NaN, 0 or False.

    Raises:
        BadOption: no policies, or one that cannot be used so.
    """
    return PerAgent(policies)


class PerAgent(nn.Module):
    """See ``per_agent``.

    The modules among the policies are submodules, by the names of the agents.
    """

    def __init__(self, policies: Mapping[str, Any]) -> None:
        super().__init__()
        if not policies:
            raise BadOption(
                "policy is an empty dict: expected None, an nn.Module, a function, or a policy for"
                " each agent, by name"
            )
        self.policies: dict[str, Any] = {}
        for name, policy in policies.items():
            if policy is not None and (
                not callable(policy) or isinstance(policy, type)
            ):
                raise BadOption(
                    f"the policy of {name!r} is of type {type(policy).__name__}, expected a head or"
                    " callable"
                )
            if policy is not None and takes_state(policy):
                raise BadOption(
                    f"the policy of {name!r} has a state, and agents that take turns cannot"
                    " have one"
                )
            if isinstance(policy, nn.Module):
                self.add_module(name, policy)
            self.policies[name] = None if isinstance(policy, nn.Module) else policy
        self._deterministic = False
        self._of: list[str] = []  # name of the policy, by number of the agent
        self._random: ActionMask | None = None  # draws where a policy is None
        self._shape: tuple[int, ...] = ()
        self._mask: ActionMask | None = None
        # values where a policy does not return them
        self._extras: dict[str, torch.Tensor] | None = None

    def bind(
        self,
        env_name: str,
        agents: Sequence[str],
        setting: PolicySetting,
    ) -> None:
        """Assign policies to the agents of the environments; ``BadOption`` if names or policies do
        not fit them.
        """
        if list(setting.action_specs) != [ACTION]:
            raise BadOption(
                f"policy: a policy for each agent needs one action, and {env_name} has"
                f" {list(setting.action_specs)}"
            )
        unknown = [
            name for name in self.policies if name != OTHERS and name not in agents
        ]
        without = []
        if OTHERS not in self.policies:
            without = [agent for agent in agents if agent not in self.policies]
        if not agents or unknown or without:
            found = "its agents do not take turns"
            if agents:
                found = f"unknown {unknown}, without a policy {without}"
            raise BadOption(
                f"policy: {env_name} has the agents {list(agents)}; {found}. Give a policy by the"
                " name of each agent, or 'others'"
            )
        self._of = [agent if agent in self.policies else OTHERS for agent in agents]
        spec = setting.action_specs[ACTION]
        mask = next(iter(setting.masks), None)
        self._deterministic = setting.deterministic
        self._mask = mask
        self._shape = spec.shape
        for name in self.policies:
            policy = self._policy(name)
            if isinstance(policy, Head):
                policy.fit(setting.action_specs, setting.masks)
            elif policy is None:
                bounded = spec.low is not None and spec.high is not None
                if spec.dtype.kind not in "iu" or not bounded:
                    raise BadOption(
                        f"the policy of {name!r} is None, and only discrete actions are drawn so,"
                        f" not {spec}"
                    )
                self._random = mask or ActionMask(
                    env_name, ACTION, (), *choices_of(spec)
                )

    def forward(
        self,
        obs: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Act on rows ``[*batch, *shape]``; ``obs["collector"]["agent"]`` has the numbers of the
        agents.
        """
        agent = obs["collector"]["agent"]
        leaves = {key: value for key, value in obs.items() if key != "collector"}
        single = agent.ndim == 0
        if single:
            leaves = {key: value.unsqueeze(0) for key, value in leaves.items()}
            agent = agent.unsqueeze(0)
        self._check(leaves)
        outputs: dict[str, torch.Tensor] = {}
        if self._extras is None:
            self._extras = self._find_extras(leaves)
        for name in dict.fromkeys(self._of):
            own = [number for number, of in enumerate(self._of) if of == name]
            numbers = torch.tensor(own, device=agent.device)
            rows = torch.isin(agent, numbers).nonzero()[:, 0]
            if not len(rows):
                continue
            of_agent = {key: value[rows] for key, value in leaves.items()}
            action, extras = self._call(name, of_agent)
            returned = {**self._extras, **extras, "action": action}
            for key, value in returned.items():
                if key not in extras and key != "action":  # unknown
                    value = value.expand(len(rows), *value.shape)
                if key not in outputs:
                    shape = (len(agent), *value.shape[1:])
                    outputs[key] = value.new_zeros(shape)
                outputs[key][rows] = value.to(outputs[key].dtype)
        if single:
            outputs = {key: value[0] for key, value in outputs.items()}
        return outputs.pop("action"), outputs

    def _policy(self, name: str) -> Any:
        module = self._modules.get(name)
        return self.policies[name] if module is None else module

    def _call(
        self,
        name: str,
        leaves: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy = self._policy(name)
        check_unchanged: Callable[[], None] | None = None
        on_cpu = all(value.device.type == "cpu" for value in leaves.values())
        if policy is not None and on_cpu:
            # Changes would be harmless here. But the same policy may not make them elsewhere.
            keyed: dict[Key, Any] = {(key,): value for key, value in leaves.items()}
            given, check_unchanged = unchanged_inputs(keyed, f"of {name!r}")
            leaves = {key: value for (key,), value in given.items()}
        first = next(iter(leaves.values()))
        obs = first if len(leaves) == 1 else leaves
        out: Any
        if policy is None:
            out = self._draw(leaves)
        elif isinstance(policy, Head) and self._deterministic:
            action = policy.mode(obs)
            log_prob = {}
            if policy.has_log_prob:
                log_prob[LOG_PROB[0]] = policy.distribution(obs).log_prob(action)
            out = (action, log_prob)
        else:
            out = policy(obs)
        if check_unchanged is not None:
            check_unchanged()
        is_pair = isinstance(out, tuple) and len(out) == 2
        action, extras = out if is_pair else (out, {})
        if not isinstance(extras, Mapping):
            raise BadPolicyOutput(
                f"the policy of {name!r} returned {type(out).__name__}, expected (action, extras)"
            )
        rows = len(first)
        returned = {**extras, "action": action}
        tensors = {key: torch.as_tensor(value) for key, value in returned.items()}
        for key, value in tensors.items():
            if value.shape[:1] != (rows,):
                raise BadPolicyOutput(
                    f"the policy of {name!r} returned {key} with shape {tuple(value.shape)},"
                    f" expected {rows} rows"
                )
        return tensors.pop("action"), tensors

    def _draw(self, leaves: dict[str, Any]) -> torch.Tensor:
        like = next(iter(leaves.values()))
        assert self._random is not None  # bound
        shape = (len(like), len(self._random.drawn))
        uniform = torch.rand(shape, dtype=torch.float64, device=like.device)
        if self._mask is None:
            allowed = uniform.new_ones((len(like), sum(self._random.nvec)))
        else:
            allowed = leaves[self._mask.key[0]]
        drawn = self._random.draw_on_device(allowed, uniform)
        return drawn.reshape(-1, *self._shape)

    def _find_extras(self, leaves: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Call each policy once, and return the value of each extra where it is unknown."""
        found: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(self._of):
            _, extras = self._call(name, leaves)
            for key, value in extras.items():
                unknown = float("nan") if value.is_floating_point() else 0
                found[key] = torch.full_like(value[0], unknown)
        return found

    def _check(self, leaves: dict[str, Any]) -> None:
        if self._mask is None:
            return
        rows = leaves.get(self._mask.key[0])
        if rows is None:
            return
        legal = (rows != 0).flatten(1).any(-1)
        blank = not legal.all()
        if blank or len(self._mask.drawn) > 1:
            refused = self._mask.refused(rows.cpu().numpy())
            if refused is not None:
                raise refused


def heads_of(policy: Any) -> list[Head]:
    """Return the heads that a collector fits to the action space: the policy itself, or those of
    agents.
    """
    candidates = [policy]
    if isinstance(policy, PerAgent):
        candidates = list(policy.children())
    return [each for each in candidates if isinstance(each, Head)]
