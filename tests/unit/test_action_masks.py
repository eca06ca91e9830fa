"""Action masks: random actions and heads choose among the allowed actions, with the probabilities
of masked logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from muster import Collector, Evaluator, MultiSyncCollector, policies
from muster.envs.envpool import EnvPoolVectorEnv
from muster.errors import BadEnvOutput, BadOption
from tests.fakes.envpool import GymnasiumEnvPool
from tests.tools import assert_same, collect

SPACES = {
    "discrete": spaces.Discrete(5),
    "from 3": spaces.Discrete(5, start=3),
    "several": spaces.MultiDiscrete([3, 2, 4]),
    "many": spaces.Discrete(40),
}


def size_of(space: Any) -> int:
    return (
        int(space.nvec.sum())
        if isinstance(space, spaces.MultiDiscrete)
        else int(space.n)
    )


class Masked(gymnasium.Env[Any, Any]):
    """The observation is ``[t, t % 3]``.

    The mask of step t allows the choices i with ``(i + t) % 3 < 2``.

    Args:
        where: "obs", or "info" for ``info["action_mask"]``.
        none_at: step at which the mask allows nothing.
    """

    def __init__(
        self, space: str = "discrete", where: str = "obs", none_at: int = -1
    ) -> None:
        self.action_space, self.where, self.none_at = SPACES[space], where, none_at
        self.n = size_of(self.action_space)
        box = spaces.Box(0, 100, (2,), np.float32)
        mask = spaces.Box(0, 1, (self.n,), np.int8)
        self.observation_space = (
            spaces.Dict({"position": box, "action_mask": mask})
            if where == "obs"
            else box
        )
        self.t = 0

    def mask(self) -> Any:
        allowed = (np.arange(self.n) + self.t) % 3 < 2
        return (allowed & (self.t != self.none_at)).astype(np.int8)

    def out(self) -> tuple[Any, dict[str, Any]]:
        box = np.array([self.t, self.t % 3], np.float32)
        if self.where == "obs":
            return {"position": box, "action_mask": self.mask()}, {}
        return box, {"action_mask": self.mask()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.out()

    def step(self, action: Any) -> Any:
        index = np.atleast_1d(action) - getattr(self.action_space, "start", 0)
        parts = np.split(
            self.mask(), np.cumsum(getattr(self.action_space, "nvec", [self.n]))[:-1]
        )
        assert all(part[i] for part, i in zip(parts, index, strict=True)), (
            f"{action} is not allowed at {self.t}"
        )
        self.t += 1
        obs, info = self.out()
        return obs, 1.0, self.t == 7, False, info


def masked(*args: Any) -> Any:
    return lambda: Masked(*args)


def options_of(where: str) -> dict[str, Any]:
    return {"info": ["action_mask"]} if where == "info" else {}


def mask_of(batch: Any, where: str) -> torch.Tensor:
    return batch["action_mask"] if where == "obs" else batch["info", "action_mask"]


def observed(batch: Any, where: str) -> torch.Tensor:
    return batch["position"] if where == "obs" else batch["observation"]


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("space", SPACES)
def test_random_actions_are_uniform_over_what_is_allowed(space, where):
    batch = collect(
        masked(space, where),
        None,
        num_envs=2,
        frames_per_batch=4200,
        seed=0,
        **options_of(where),
    )
    n, action = size_of(SPACES[space]), batch["action"]
    assert torch.equal(
        mask_of(batch, where)[0, 0], torch.tensor(np.arange(n) % 3 < 2).to(torch.int8)
    )
    first = action[:, ::7].reshape(-1, *action.shape[2:])  # at step 0
    if space == "several":
        counts = torch.cat(
            [torch.bincount(first[:, i], minlength=k) for i, k in enumerate((3, 2, 4))]
        )

        # concatenated choices 0 1 2 | 3 4 | 5 6 7 8 with (i % 3) < 2
        allowed = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 0.0])
        expected = torch.cat([part / part.sum() for part in allowed.split([3, 2, 4])])
    else:
        counts = torch.bincount(first - int(SPACES[space].start), minlength=n)
        expected = torch.tensor(np.arange(n) % 3 < 2).float()
        expected /= expected.sum()
    assert (counts[expected == 0] == 0).all()
    assert torch.allclose(counts / len(first), expected, atol=0.08)


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("space", SPACES)
def test_a_categorical_head_has_the_distribution_of_masked_logits(
    space, num_envs, where
):
    torch.manual_seed(0)
    n = size_of(SPACES[space])
    net = nn.Linear(2, n)
    options = {
        "frames_per_batch": 21 * (num_envs or 1),
        "num_envs": num_envs,
        "seed": 1,
        **options_of(where),
    }
    head = policies.categorical(net)
    batch = collect(masked(space, where), head, **options)
    with torch.no_grad():
        logits = net(observed(batch, where)).masked_fill(
            mask_of(batch, where) == 0, -torch.inf
        )
        sizes = list(getattr(SPACES[space], "nvec", [n]))
        index = batch["action"] - int(
            getattr(SPACES[space], "start", 0) if space != "several" else 0
        )
        index = index if space == "several" else index.unsqueeze(-1)
        parts = [
            torch.distributions.Categorical(logits=part).log_prob(i)
            for part, i in zip(logits.split(sizes, -1), index.unbind(-1), strict=True)
        ]
        expected = torch.stack(parts).sum(0)
        assert torch.allclose(batch["action_log_prob"], expected, atol=1e-5)
        # The learner computes the same from what is in the batch.
        if where == "obs":
            again = head.distribution(batch.select("position", "action_mask"))
        else:
            again = head.distribution(
                batch["observation"], action_mask=batch["info", "action_mask"]
            )
        assert torch.allclose(again.log_prob(batch["action"]), expected, atol=1e-5)
        assert again.entropy().isfinite().all()
        mode = collect(masked(space, where), head, **options, exploration_type="mode")
        given = {"action_mask": mask_of(mode, where)}
        assert torch.equal(
            mode["action"],
            head.mode(observed(mode, where), **given).to(mode["action"].dtype),
        )


def test_a_head_draws_with_the_masked_probabilities():
    class Constant(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return torch.tensor([2.0, 1.0, 5.0, 0.0, 0.5]).expand(*obs.shape[:-1], 5)

    batch = collect(
        masked(),
        policies.categorical(Constant()),
        num_envs=4,
        frames_per_batch=14_000,
        seed=0,
    )
    first = batch["action"][:, ::7].reshape(-1)
    expected = torch.tensor([2.0, 1.0, -torch.inf, 0.0, 0.5]).softmax(0)
    assert torch.allclose(
        torch.bincount(first, minlength=5) / len(first), expected, atol=0.04
    )


def test_a_loss_over_masked_actions_has_finite_gradients_also_at_blank_rows():
    head = policies.categorical(nn.Linear(2, 5))
    obs = {
        "position": torch.randn(4, 2),
        "action_mask": torch.tensor([[1, 0, 1, 0, 0]] * 3 + [[0] * 5]),
    }
    distribution = head.distribution(obs)
    (
        distribution.log_prob(torch.tensor([0, 2, 0, 0])) + distribution.entropy()
    ).sum().backward()
    assert head.net.weight.grad.isfinite().all()
    action, extras = head(obs)
    assert (action[:3] % 2 == 0).all()
    assert torch.allclose(extras["action_log_prob"], distribution.log_prob(action))


def test_the_greedy_head_chooses_among_what_is_allowed():
    head = policies.deterministic(nn.Linear(2, 5))
    batch = collect(masked(), head, num_envs=2, frames_per_batch=28, seed=0)
    values = head.net(batch["position"]).masked_fill(
        batch["action_mask"] == 0, -torch.inf
    )
    assert torch.equal(batch["action"], values.argmax(-1))


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("where", ["obs", "info"])
def test_epsilon_greedy_explores_among_what_is_allowed(where, num_envs):
    head = policies.epsilon_greedy(nn.Linear(2, 5), 0.4)
    batch = collect(
        masked("discrete", where),
        head,
        num_envs=num_envs,
        frames_per_batch=2_100,
        seed=0,
        **options_of(where),
    )
    mask, obs = batch.get("action_mask"), batch.get("position")
    if where == "info":
        mask, obs = batch["info", "action_mask"], batch["observation"]
    assert mask.gather(-1, batch["action"].unsqueeze(-1)).all()
    distribution = head.distribution(obs, action_mask=mask)
    torch.testing.assert_close(
        batch["action_log_prob"], distribution.log_prob(batch["action"])
    )
    best = head.mode(obs, action_mask=mask)
    other = 0.4 * (1 - 1 / mask.sum(-1))  # the probability of another one
    found = (batch["action"] != best).float()
    error = float((other * (1 - other)).sum().sqrt())
    assert abs(float((found - other).sum())) < 5 * error


@pytest.mark.parametrize("policy", ["random", "head", "greedy", "epsilon"])
@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_mask_that_allows_nothing_is_an_error_that_names_the_environment(
    policy, where, num_envs
):
    net = nn.Linear(2, 5)
    made = {
        "random": None,
        "head": policies.categorical(net),
        "greedy": policies.deterministic(net),
        "epsilon": policies.epsilon_greedy(net, 1.0),
    }[policy]
    source = masked("discrete", where, 4)
    options = options_of(where)
    with Collector(
        source, made, num_envs=num_envs, frames_per_batch=28, seed=0, **options
    ) as collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"Masked\[0\]: .*action_mask allows no action.*reset\(\)",
        ):
            collector.rollout()
        collector.reset()
        with pytest.raises(BadEnvOutput, match="allows no action"):
            collector.rollout()


def test_a_last_observation_may_allow_nothing():
    batch = collect(masked("discrete", "obs", 7), None, frames_per_batch=14, seed=0)
    assert not batch["next", "action_mask"][6].any()


def test_random_frames_at_the_start_and_decorrelation_respect_masks():
    head = policies.categorical(nn.Linear(2, 5))
    for where in ("obs", "info"):
        options = {"max_decorrelation_steps": 5, **options_of(where)}
        with Collector(
            masked("discrete", where),
            head,
            num_envs=3,
            frames_per_batch=60,
            init_random_frames=60,
            seed=0,
            **options,
        ) as collector:
            batches = [collector.rollout().clone() for _ in range(2)]
        assert batches[0]["action_log_prob"].isnan().all()
        assert batches[1]["action_log_prob"].isfinite().all()


class Uneven(Masked):
    """Episodes of 3, 4, 5, 6 steps, and again; those of another environment have other lengths."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.episode = seed % 4
        self.episode += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, self.t >= 3 + self.episode % 4, truncated, info


def uneven(where: str) -> Any:
    return lambda: Uneven("discrete", where)


ACTING: dict[str, Any] = {
    "random": lambda: None,
    "head": lambda: policies.categorical(nn.Linear(2, 5)),
    "greedy": lambda: policies.deterministic(nn.Linear(2, 5)),
    "epsilon": lambda: policies.epsilon_greedy(nn.Linear(2, 5), 0.5),
}
UNEVEN: dict[str, Any] = {
    "no resets": lambda c: [c.next() for _ in range(4)],
    "episodes": lambda c: [
        c.collect_batch(n_episode=n, rule=rule)[0]
        for rule in ("per_env", "fair", "first_done", "last_even")
        for n in (1, 3, 7)
    ],
}


@pytest.mark.parametrize("acting", ACTING)
@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("how", UNEVEN)
def test_environments_that_wait_for_others_have_no_mask_that_counts(acting, where, how):
    """Policies act for them, too, and may choose anything."""
    with Collector(
        uneven(where),
        ACTING[acting](),
        num_envs=3,
        frames_per_batch=30,
        reset_when_done=how != "no resets",
        init_random_frames=30 if how == "no resets" else None,
        seed=0,
        **options_of(where),
    ) as collector:
        batches = [batch.clone() for batch in UNEVEN[how](collector)]
    waited = 0
    for batch in batches:
        made = torch.ones(batch.shape, dtype=torch.bool)
        if how == "no resets":
            made = batch["collector", "valid"]
        mask = mask_of(batch, where)
        step = observed(batch, where)[..., :1]
        allowed = (torch.arange(5) + step) % 3 < 2
        assert torch.equal(mask[made].bool(), allowed[made])
        assert allowed[made].gather(1, batch["action"][made][:, None]).all()
        assert not mask[~made].any(), "blank, as all columns there"
        ends = batch["next", "done"][..., 0] & made
        after = mask_of(batch["next"], where)[ends].bool()
        last = step[ends] + 1
        assert torch.equal(after, (torch.arange(5) + last) % 3 < 2)
        waited += int((~made).sum())
    assert waited > 3 or how == "episodes"


@pytest.mark.parametrize("where", ["obs", "info"])
def test_evaluations_and_workers_with_masks(where):
    head = policies.categorical(nn.Linear(2, 5))
    options = options_of(where)
    with Evaluator(uneven(where), head, episodes=7, num_envs=3, **options) as evaluator:
        assert len(evaluator.evaluate().records) == 7
    with MultiSyncCollector(
        [partial(Uneven, "discrete", where)] * 2,
        head,
        num_envs=2,
        frames_per_batch=40,
        reset_when_done=False,
        seed=0,
        backend="threads",
        **options,
    ) as collector:
        batch = collector.next()
    assert not batch["collector", "valid"].all()


def test_random_actions_do_not_depend_on_the_size_of_batches():
    with Collector(
        masked(), None, num_envs=2, frames_per_batch=28, seed=3
    ) as collector:
        expected = collector.rollout()["action"].clone()
    with Collector(masked(), None, num_envs=2, frames_per_batch=4, seed=3) as collector:
        parts = [collector.rollout()["action"].clone() for _ in range(7)]
    assert torch.equal(torch.cat(parts, 1), expected)


class OfDmEnv:
    """``Masked`` as a dm_env.Environment."""

    def __new__(cls) -> Any:
        import dm_env
        from dm_env import specs

        class Environment(dm_env.Environment):
            def __init__(self) -> None:
                self.env = Masked()

            def reset(self) -> Any:
                return dm_env.restart(self.env.reset()[0])

            def step(self, action: Any) -> Any:
                obs, reward, done, _, _ = self.env.step(int(action))
                return (
                    dm_env.termination(reward, obs)
                    if done
                    else dm_env.transition(reward, obs)
                )

            def observation_spec(self) -> Any:
                position = specs.BoundedArray((2,), np.float32, 0, 100)
                return {
                    "position": position,
                    "action_mask": specs.BoundedArray((5,), np.int8, 0, 1),
                }

            def action_spec(self) -> Any:
                return specs.DiscreteArray(5, dtype=np.int64)

            def reward_spec(self) -> Any:
                return specs.Array((), np.float64)

        return Environment()


KINDS: dict[str, dict[str, Any]] = {
    "gymnasium.vector": {"env": lambda: gymnasium.vector.SyncVectorEnv([masked()] * 2)},
    "EnvPool": {
        "env": lambda: EnvPoolVectorEnv(GymnasiumEnvPool(masked(), 2, shuffled=True))
    },
    "dm_env": {"env": OfDmEnv, "num_envs": 2},
}


@pytest.mark.filterwarnings("ignore:.*seed")
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_environment_gives_the_same(kind, random):
    policy = None if random else policies.categorical(nn.Linear(2, 5))
    options = {"policy": policy, "frames_per_batch": 28, "seed": 0}
    single = collect(env=masked(), num_envs=2, **options)
    assert_same(single, collect(**KINDS[kind], **options))


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_masks_reach_policies_of_worker_processes(inference):
    head = policies.categorical(nn.Linear(2, 5))
    with Collector(
        [masked()] * 2, head, num_envs=2, frames_per_batch=56, seed=0
    ) as collector:
        expected = collector.rollout().clone()
    with MultiSyncCollector(
        [masked()] * 2,
        head,
        num_envs=2,
        frames_per_batch=56,
        seed=0,
        inference=inference,
        cat_results="stack",
    ) as collector:
        batch = collector.rollout()
        allowed = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1))
        assert allowed.all()
        if inference == "worker":
            assert_same(batch, expected)
        again = head.distribution(batch.select("position", "action_mask"))
        assert torch.allclose(
            batch["action_log_prob"], again.log_prob(batch["action"]), atol=1e-5
        )


def test_a_server_cannot_see_masks_in_infos():
    head = policies.categorical(nn.Linear(2, 5))
    with pytest.raises(BadOption, match="action mask of Masked is in"):
        MultiSyncCollector(
            [masked("discrete", "info")],
            head,
            num_envs=2,
            frames_per_batch=8,
            inference="server",
            backend="threads",
            info=["action_mask"],
        )


def test_masks_are_for_discrete_actions():
    head = policies.gaussian(nn.Linear(2, 1))
    with pytest.raises(BadOption, match="action masks are for discrete actions"):
        head.distribution(torch.zeros(2), action_mask=torch.ones(1))


def test_taxi_has_its_mask_in_the_info():
    batch = collect(
        "Taxi-v4", None, num_envs=2, frames_per_batch=200, seed=0, info=["action_mask"]
    )
    assert batch["info", "action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert not batch["info", "action_mask"].all()


# --- other systems --------------------------------------------------------------------------------


def test_torchrls_masked_categorical_reads_the_mask_from_the_batch():
    modules = pytest.importorskip("torchrl.modules")
    from tensordict.nn import TensorDictModule, TensorDictSequential

    net, n = nn.Linear(2, 5), ("logits", "mask")
    actor = TensorDictSequential(
        TensorDictModule(net, in_keys=["position"], out_keys=["logits"]),
        TensorDictModule(
            lambda mask: mask.bool(), in_keys=["action_mask"], out_keys=["mask"]
        ),
        modules.ProbabilisticActor(
            TensorDictModule(lambda *both: both, in_keys=[*n], out_keys=[*n]),
            in_keys=[*n],
            distribution_class=modules.MaskedCategorical,
            return_log_prob=True,
        ),
    )
    batch = collect(masked(), actor, num_envs=2, frames_per_batch=56, seed=0)
    head = policies.categorical(net)
    again = head.distribution(batch.select("position", "action_mask"))
    assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert torch.allclose(
        batch["action_log_prob"], again.log_prob(batch["action"]), atol=1e-5
    )


def test_tianshous_policies_get_the_mask_as_obs_mask():
    pytest.importorskip("tianshou")
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.env import DummyVectorEnv

    from muster.compat.tianshou import Collector as TianshouCollector

    class Named(Masked):
        """Tianshou's names of the parts of an observation."""

        def __init__(self) -> None:
            super().__init__()
            box, mask = self.observation_space["position"], spaces.Box(0, 1, (5,), bool)
            self.observation_space = spaces.Dict({"obs": box, "mask": mask})

        def out(self) -> Any:
            return {
                "obs": np.array([self.t, 0], np.float32),
                "mask": self.mask().astype(bool),
            }, {}

    class Values(nn.Module):
        def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
            obs = getattr(obs, "obs", obs)
            return torch.arange(5.0).flip(0).expand(len(obs), 5), state

    policy = DiscreteQLearningPolicy(
        model=Values(),
        action_space=SPACES["discrete"],
        observation_space=Named().observation_space,
    )
    collector = TianshouCollector(policy, DummyVectorEnv([Named] * 2))
    collector.reset()
    result = collector.collect(n_step=28)
    assert result.n_collected_steps == 28  # the environment refuses what is not allowed
