"""PPO with an LSTM on CartPole-v1 without velocities; Muster keeps the states. ``python examples/ppo_lstm.py``.

The observation is the cart's position and the pole's angle, so one observation does not say where things move. Clipped
objective: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7 and 9. Sequences start from the
state that the batch has for their first step, the "stored state" of Kapturowski et al., "Recurrent Experience Replay in
Distributed Reinforcement Learning" (2019); after the end of an episode the state is zero.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TransformObservation
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from muster import Collector, Evaluator

NUM_ENVS, T, CHUNK = 8, 128, 32  # sequences of CHUNK steps are trained
LEARNING_RATE, EPOCHS, MINIBATCHES = 2e-3, 4, 4  # the rate falls to zero over the run
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.98, 0.95, 0.2, 0.005, 0.5, 0.5


def make_env() -> gymnasium.Env[Any, Any]:
    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return TransformObservation(gymnasium.make("CartPole-v1"), lambda obs: obs[[0, 2]], box)


class Agent(nn.Module):
    """A policy with the state ``[B, 128]``: hidden state and cell state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.Linear(2, 64), nn.LSTMCell(64, 64)
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def step(self, obs: Tensor, state: Tensor | None) -> Tensor:
        """Return the state after an observation."""
        hidden = None if state is None else state.chunk(2, -1)
        return torch.cat(self.cell(torch.tanh(self.encoder(obs)), hidden), -1)

    def distribution(self, state: Tensor) -> Categorical:
        return Categorical(logits=self.actor(state.chunk(2, -1)[0]))

    def value(self, state: Tensor) -> Tensor:
        value: Tensor = self.critic(state.chunk(2, -1)[0]).squeeze(-1)
        return value

    def forward(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        state = self.step(obs, state)
        distribution = self.distribution(state)
        action = distribution.sample() if self.training else distribution.mode
        return action, {"action_log_prob": distribution.log_prob(action)}, state


@torch.no_grad()
def advantages(batch: TensorDict, agent: Agent) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al., 2016, eq. 16) and value targets, ``[B, T]``."""
    flat = batch.flatten()
    state = agent.step(flat["observation"], flat["recurrent_state"])
    value = agent.value(state).reshape(batch.shape)
    next_value = agent.value(agent.step(flat["next", "observation"], state)).reshape(batch.shape)
    bootstrap, going_on = ~batch["next", "terminated"][..., 0], ~batch["next", "done"][..., 0]
    reward = (1 - GAMMA) * batch["next", "reward"][..., 0]  # values are at most 1: the LSTM is also the actor's
    delta = reward + GAMMA * next_value * bootstrap - value
    advantage, last = torch.empty_like(delta), torch.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        last = delta[:, t] + GAMMA * LAMBDA * going_on[:, t] * last
        advantage[:, t] = last
    return advantage, advantage + value


def unroll(rows: TensorDict, agent: Agent) -> Tensor:
    """Return the states after each step of sequences ``[n, T]``, ``[n, T, 128]``."""
    state, going_on, states = rows["recurrent_state"][:, 0], ~rows["next", "done"], []
    for t in range(rows.shape[1]):
        states.append(agent.step(rows["observation"][:, t], state))
        state = states[-1] * going_on[:, t]
    return torch.stack(states, 1)


def update(batch: TensorDict, agent: Agent, optimizer: torch.optim.Optimizer) -> None:
    """Make some epochs on sequences of CHUNK steps."""
    advantage, target = advantages(batch, agent)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    sequences = batch.reshape(-1, CHUNK)
    advantage, target = advantage.reshape(-1, CHUNK), target.reshape(-1, CHUNK)
    for _ in range(EPOCHS):
        for i in torch.randperm(len(sequences)).chunk(MINIBATCHES):
            rows = sequences[i]
            after = unroll(rows, agent)
            distribution = agent.distribution(after)
            ratio = (distribution.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
            gain = torch.min(advantage[i] * ratio, advantage[i] * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            error = (agent.value(after) - target[i]).square().mean()
            loss = VALUE * error - gain - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the mean return of the most probable actions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=102_400)
    parser.add_argument("--eval-episodes", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
    frames, returns, started = NUM_ENVS * T, list[float](), time.perf_counter()
    updates = max(1, args.total_frames // frames)
    options = {"num_envs": NUM_ENVS, "frames_per_batch": frames, "total_frames": updates * frames}
    with Collector(make_env, agent, seed=args.seed, **options) as collector:
        for number, batch in enumerate(collector, 1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (number - 1) / updates)
            update(batch, agent, optimizer)
            collector.update_policy_weights_()
            returns += [episode.episode_return for episode in collector.episodes]
            if number % 4 == 0 or number == updates:
                print(
                    f"{number * frames:8,} frames  {len(returns):5} episodes  mean return {fmean(returns[-20:]):6.1f}  "
                    f"{time.perf_counter() - started:5.1f} s",
                    flush=True,
                )
    with Evaluator(make_env, agent, episodes=args.eval_episodes, num_envs=4) as evaluator:
        score = evaluator.evaluate().mean
    print(f"evaluation: mean return {score:.1f} over {args.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
