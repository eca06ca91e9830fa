"""Masks of combinations of choices, masks of parts of an action, and masks that do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

from muster import Collector, Execution, MultiSyncCollector, policies
from muster.envs.envpool import EnvPoolVectorEnv
from muster.errors import BadEnvOutput, BadOption, UnsupportedSpace
from muster.memory.specs import is_joint_mask
from muster.policies.sampling import ActionMask, masks_of
from tests.fakes.envpool import GymnasiumEnvPool
from tests.tools import assert_same, collect
from tests.unit.test_device_lanes import Run

NVEC = (3, 4)
LENGTH = 5


def allowed_at(t: int) -> Any:
    """``[3, 4]``: a third of the combinations, which are no product of masks of each variable."""
    return ((np.arange(12) + t) % 3 == 0).reshape(NVEC)


class Board(gymnasium.Env[Any, Any]):
    """Observes ``[t, 1]``. The move ``(i, j)`` must be allowed by ``allowed_at(t)``.

    Args:
        shape: shape of the mask.
        where: "obs", or "info" for ``info["action_mask"]``.
        start: first choice of both variables.
        none_at: step at which nothing is allowed.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = NVEC,
        where: str = "obs",
        start: int = 0,
        none_at: int = -1,
    ) -> None:
        self.shape, self.where, self.start, self.none_at = shape, where, start, none_at
        self.action_space = spaces.MultiDiscrete(NVEC, start=[start, start])
        box = spaces.Box(0, 100, (2,), np.float32)
        mask = spaces.MultiBinary(shape)
        self.observation_space = (
            spaces.Dict({"position": box, "action_mask": mask})
            if where == "obs"
            else box
        )
        self.t = 0

    def out(self) -> tuple[Any, dict[str, Any]]:
        mask = (
            (allowed_at(self.t) & (self.t != self.none_at))
            .reshape(self.shape)
            .astype(np.int8)
        )
        box = np.array([self.t, 1], np.float32)
        if self.where == "obs":
            return {"position": box, "action_mask": mask}, {}
        return box, {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.out()

    def step(self, action: Any) -> Any:
        assert allowed_at(self.t)[tuple(np.asarray(action) - self.start)], (
            f"{action} is not allowed at {self.t}"
        )
        self.t += 1
        obs, info = self.out()
        return obs, 1.0, self.t == LENGTH, False, info


def board(*args: Any, **options: Any) -> Callable[[], Board]:
    return lambda: Board(*args, **options)


def options_of(where: str) -> dict[str, Any]:
    return {"info": ["action_mask"]} if where == "info" else {}


def logits_net(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(2, sum(NVEC))
    nn.init.uniform_(net.weight, -scale, scale)
    return net


def expected_log_probs(
    net: nn.Module, obs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``[*lead, 3, 4]``: of the product of both variables, renormalised over what is allowed; by
    hand.
    """
    with torch.no_grad():
        rows, columns = net(obs).split(NVEC, -1)
    joint = rows.log_softmax(-1)[..., :, None] + columns.log_softmax(-1)[..., None, :]
    joint = joint.masked_fill(mask.reshape(joint.shape) == 0, -torch.inf)
    return joint - joint.flatten(-2).logsumexp(-1)[..., None, None]


def at_actions(table: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    number = action[..., 0] * NVEC[1] + action[..., 1]
    return table.flatten(-2).gather(-1, number[..., None])[..., 0]


# --- what a mask means ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvec", "shape", "joint"),
    [
        ((5, 5), (10,), False),
        ((5, 5), (2, 5), False),
        ((5, 5), (5, 5), True),
        ((5, 5), (25,), True),
        ((4,), (4,), False),
        ((4,), (2, 2), False),
        ((1, 4), (4,), True),
        ((1, 4), (5,), False),
        ((2, 2), (2, 2), True),
        ((2, 2), (1, 4), False),
        ((1, 2, 3), (1, 2, 3), True),
        ((1, 2, 3), (1, 6), False),
    ],
)
def test_a_mask_is_joint_if_its_size_or_shape_says_so(nvec, shape, joint):
    assert is_joint_mask(nvec, shape) is joint


@pytest.mark.parametrize(
    ("nvec", "shape", "message"),
    [
        (
            (5, 5),
            (11,),
            r"shape \(11,\) has 11 entries, .*2 variables with \(5, 5\).*expected 10 entries.*or 25",
        ),
        (
            (4,),
            (3,),
            r"shape \(3,\) has 3 entries, but the action has 4 choices: expected 4",
        ),
        (
            (2, 2),
            (4,),
            r"4 entries.*shape \(1, 4\) for the former, \(2, 2\) for the latter",
        ),
        ((1, 2, 3), (6,), r"6 entries.*\(1, 6\).*\(1, 2, 3\)"),
        ((256,) * 600, (3,), r"expected 153600 entries.*or the product of these"),
    ],
)
def test_a_mask_that_does_not_tell_what_it_is_is_refused_with_the_sizes(
    nvec, shape, message
):
    with pytest.raises(ValueError, match=message):
        is_joint_mask(nvec, shape)


def of_spaces(action: Any, mask: Any) -> Callable[[], Any]:
    class Given(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict(
            {"position": spaces.Box(0, 1, (2,), np.float32), "action_mask": mask}
        )
        action_space = action

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.observation_space.seed(0)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 0.0, False, False, {}

    return Given


MISFITS = {
    "size": (
        spaces.MultiDiscrete([5, 5]),
        spaces.MultiBinary(11),
        r"'?action_mask.* 11 entries.*10 entries.*25",
    ),
    "discrete": (
        spaces.Discrete(4),
        spaces.MultiBinary(5),
        r"action_mask.* 5 entries.*4 choices",
    ),
    "bits": (
        spaces.MultiBinary(3),
        spaces.MultiBinary(3),
        r"action_mask.* 3 entries.*6 entries.*8",
    ),
    "unclear": (
        spaces.MultiDiscrete([2, 2]),
        spaces.MultiBinary(4),
        r"action_mask.*\(1, 4\).*\(2, 2\)",
    ),
    "box": (
        spaces.Box(-1, 1, (2,)),
        spaces.MultiBinary(2),
        r"action_mask is an action mask.*masks are for discrete",
    ),
    "several": (
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3)),
        spaces.MultiBinary(5),
        r"\['action.a', 'action.b'\].*\['action_mask.a', 'action_mask.b'\]",
    ),
    "other name": (
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3)),
        spaces.Dict(c=spaces.MultiBinary(2)),
        r"action_mask.c is a mask of no action",
    ),
    "nested": (
        spaces.Discrete(2),
        spaces.Dict(a=spaces.MultiBinary(2)),
        "action_mask.a is a mask of no action",
    ),
    "part": (
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (2,))),
        spaces.Dict(a=spaces.MultiBinary(2), b=spaces.MultiBinary(2)),
        r"action_mask.b is an action mask",
    ),
    "text": (spaces.Discrete(2), spaces.Text(5), "no fixed shape"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_mask_that_does_not_fit_is_refused_when_the_collector_is_made(kind):
    action, mask, message = MISFITS[kind]
    make = of_spaces(action, mask)
    for policy in (None, lambda obs: 0):
        with pytest.raises(UnsupportedSpace, match=rf"Given: .*{message}"):
            Collector(make, policy, num_envs=2, frames_per_batch=4)
    with pytest.raises(UnsupportedSpace, match=message):
        MultiSyncCollector(
            [make], None, num_envs=2, frames_per_batch=4, backend="threads"
        )


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_workers_refuse_a_mask_that_does_not_fit(inference):
    head = policies.categorical(nn.Linear(2, 10))
    with pytest.raises(UnsupportedSpace, match="11 entries"):
        MultiSyncCollector(
            [of_spaces(*MISFITS["size"][:2])],
            head,
            num_envs=2,
            frames_per_batch=4,
            inference=inference,
            backend="threads",
        )


def test_a_mask_in_infos_that_does_not_fit_is_refused_where_it_is_read():
    class Odd(Board):
        def __init__(self) -> None:
            super().__init__((12,), "info")

        def out(self) -> Any:
            obs, info = super().out()
            return obs, {"action_mask": info["action_mask"][:11], "won": 1.0}

        def step(self, action: Any) -> Any:
            self.t += 1
            obs, info = self.out()
            return obs, 1.0, self.t == LENGTH, False, info

    with pytest.raises(
        UnsupportedSpace,
        match=r"Odd: the action mask info.action_mask with shape \(11,\)",
    ):
        Collector(Odd, None, num_envs=2, frames_per_batch=4, info=["action_mask"])
    assert (
        collect(Odd, None, frames_per_batch=4, info=["won"])["info", "won"].tolist()
        == [1] * 4
    )


# --- random actions and heads ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("shape", [NVEC, (12,)])
@pytest.mark.parametrize("start", [0, 2])
def test_random_actions_are_uniform_over_the_allowed_combinations(shape, where, start):
    make = board(shape, where, start)
    batch = collect(
        make, None, num_envs=3, frames_per_batch=6000, seed=0, **options_of(where)
    )
    action = batch["action"] - start
    first = action[:, ::LENGTH].reshape(-1, 2)
    counts = torch.bincount(first[:, 0] * 4 + first[:, 1], minlength=12) / len(first)
    allowed = torch.from_numpy(allowed_at(0).reshape(-1))
    assert (counts[~allowed] == 0).all()
    assert torch.allclose(counts[allowed], torch.full((4,), 0.25), atol=0.05)


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("executor", [True, False])
def test_a_categorical_head_has_the_renormalised_distribution(
    num_envs, where, executor
):
    net = logits_net()
    head = policies.categorical(net)
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "frames_per_batch": 20 * (num_envs or 1),
        "seed": 1,
        "execution": Execution(executor=executor),
        **options_of(where),
    }
    batch = collect(board(NVEC, where), head, **options)
    obs, mask = parts(batch, where)
    table = expected_log_probs(net, obs, mask)
    expected = at_actions(table, batch["action"])
    assert torch.allclose(batch["action_log_prob"], expected, atol=1e-5)
    given = {"action_mask": mask} if where == "info" else {}
    again = head.distribution(
        obs if where == "info" else batch.select("position", "action_mask"), **given
    )
    assert torch.allclose(again.log_prob(batch["action"]), expected, atol=1e-5)
    entropy = -(table.exp() * table.masked_fill(table == -torch.inf, 0)).sum((-1, -2))
    assert torch.allclose(again.entropy(), entropy, atol=1e-5)
    best = collect(
        board(NVEC, where), head, **options, exploration_type="deterministic"
    )
    obs, mask = parts(best, where)
    number = expected_log_probs(net, obs, mask).flatten(-2).argmax(-1)
    assert torch.equal(best["action"], torch.stack([number // 4, number % 4], -1))
    assert torch.equal(head.mode(obs, action_mask=mask), best["action"])


def parts(batch: Any, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    if where == "obs":
        return batch["position"], batch["action_mask"]
    return batch["observation"], batch["info", "action_mask"]


@pytest.mark.parametrize("path", ["rollouts", "called", "drawn"])
def test_a_head_draws_with_the_renormalised_probabilities(path):
    net, n = logits_net(2.0), 12_000
    head = policies.categorical(net)
    env = Board()
    obs = torch.tensor([0.0, 1.0])
    mask = torch.from_numpy(allowed_at(0))
    if path == "rollouts":
        actions = collect(lambda: env, head, frames_per_batch=n * LENGTH, seed=0)[
            "action"
        ][::LENGTH]
    else:
        head.fit(*fitted(env))
        many = {"position": obs.expand(n, 2), "action_mask": mask.expand(n, *NVEC)}
        if path == "called":
            actions, extras = head(many)
            log_prob = extras["action_log_prob"]
        else:
            flat, drawn = head.draw(
                head.restrict(net(many["position"]), many["action_mask"]),
                deterministic=False,
            )
            actions, log_prob = flat.reshape(n, 2), drawn
        assert torch.allclose(
            log_prob, head.distribution(many).log_prob(actions), atol=1e-5
        )
    found = torch.zeros(NVEC).index_put_(
        tuple(actions.T), torch.ones(len(actions)), accumulate=True
    ) / len(actions)
    expected = expected_log_probs(net, obs, mask).exp()
    assert (found[~mask] == 0).all()
    assert torch.allclose(found, expected, atol=0.02)


def fitted(env: Any) -> tuple[Any, Any]:
    from muster.envs.stacked import StackedEnvs

    batch = StackedEnvs([env])
    return batch.spec.action_specs, masks_of(batch.spec)


def test_a_head_counts_from_the_first_choice():
    net = logits_net()
    for policy in (None, policies.categorical(net)):
        batch = collect(
            board(NVEC, "obs", 2), policy, num_envs=2, frames_per_batch=40, seed=0
        )
        assert batch["action"].min() == 2
        assert at_actions(batch["action_mask"], batch["action"] - 2).all()
    table = expected_log_probs(net, batch["position"], batch["action_mask"])
    assert torch.allclose(
        batch["action_log_prob"], at_actions(table, batch["action"] - 2), atol=1e-5
    )


def test_the_best_allowed_combination_is_drawn_on_a_device():
    net = logits_net(2.0)
    head = policies.categorical(net)
    head.fit(*fitted(Board(start=2)))
    obs, mask = (
        torch.rand(50, 2),
        torch.from_numpy(np.stack([allowed_at(t) for t in range(50)])),
    )
    action, log_prob = head.draw(head.restrict(net(obs), mask), deterministic=True)
    table = expected_log_probs(net, obs, mask)
    number = table.flatten(-2).argmax(-1)
    assert torch.equal(action, torch.stack([number // 4, number % 4], -1) + 2)
    assert torch.allclose(log_prob, at_actions(table, action - 2), atol=1e-5)


def test_three_variables_and_sampled_shapes():
    nvec = (2, 3, 4)
    head = policies.categorical(nn.Linear(2, 9), nvec=nvec)
    obs, mask = torch.rand(5, 2), torch.rand(5, *nvec) < 0.4
    distribution = head.distribution(obs, action_mask=mask)
    every = torch.tensor(list(itertools.product(*map(range, nvec))))
    log_probs = torch.stack(
        [distribution.log_prob(action.expand(5, 3)) for action in every], 1
    )
    allowed = mask.reshape(5, -1)
    with torch.no_grad():
        joint = torch.zeros(5, 1)
        for part in head.net(obs).split(nvec, -1):
            joint = (joint[:, :, None] + part[:, None, :]).flatten(1)
        expected = joint.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    assert torch.allclose(log_probs.exp(), expected.exp(), atol=1e-5)
    assert distribution.sample((7,)).shape == (7, 5, 3)
    assert (log_probs.exp().sum(1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(("shape", "joint"), [((2, 2), True), ((1, 4), False)])
def test_two_variables_of_two_choices_have_the_mask_that_its_shape_says(shape, joint):
    head = policies.categorical(nn.Linear(2, 4), nvec=(2, 2))
    obs = torch.rand(200, 2)
    mask = torch.tensor([1, 0, 0, 1]).reshape(shape).expand(200, *shape)
    for action in (
        head(obs, action_mask=mask)[0],
        head.distribution(obs, action_mask=mask).sample(),
    ):
        found = {tuple(row) for row in action.tolist()}
        assert found == ({(0, 0), (1, 1)} if joint else {(0, 1)})
    head.mask = ActionMask("env", ("action",), ("action_mask",), (2, 2), (0, 0), joint)
    head.low, flat = (0, 0), mask.reshape(200, 4)  # of a bound head, it is known
    assert torch.equal(
        head.mode(obs, action_mask=flat), head.mode(obs, action_mask=mask)
    )
    drawn, log_prob = head.draw(head.restrict(head.net(obs), flat), deterministic=True)
    assert torch.equal(drawn, head.mode(obs, action_mask=mask))
    assert torch.allclose(
        log_prob, head.distribution(obs, action_mask=mask).log_prob(drawn), atol=1e-5
    )


def test_a_loss_has_finite_gradients_also_at_blank_rows():
    head = policies.categorical(nn.Linear(2, 7), nvec=NVEC)
    mask = torch.stack(
        [torch.from_numpy(allowed_at(0)), torch.zeros(NVEC, dtype=torch.bool)]
    )
    distribution = head.distribution(torch.rand(2, 2), action_mask=mask)
    (
        distribution.log_prob(torch.tensor([[0, 0], [0, 0]])) + distribution.entropy()
    ).sum().backward()
    assert head.net.weight.grad.isfinite().all()


def test_a_mask_for_a_head_that_does_not_fit_is_refused_with_the_sizes():
    head = policies.categorical(nn.Linear(2, 10), nvec=(5, 5))
    obs = torch.zeros(3, 2)
    with pytest.raises(BadOption, match=r"\(11,\) has 11 entries.*10 entries.*25"):
        head.distribution(obs, action_mask=torch.ones(3, 11))
    with pytest.raises(BadOption, match=r"\(2, 10\).*\(3, 10\)"):
        head.distribution(obs, action_mask=torch.ones(2, 10))
    with pytest.raises(BadOption, match="4 entries.*10 choices"):
        policies.deterministic(nn.Linear(2, 10)).mode(obs, action_mask=torch.ones(3, 4))
    unclear = policies.categorical(nn.Linear(2, 4), nvec=(2, 2))
    with pytest.raises(BadOption, match=r"\(1, 4\)"):
        unclear.distribution(obs, action_mask=torch.ones(3, 4))
    unclear.distribution(obs, action_mask=torch.ones(3, 1, 4)).log_prob(
        torch.zeros(3, 2)
    )


@pytest.mark.parametrize("policy", ["random", "head"])
@pytest.mark.parametrize("where", ["obs", "info"])
def test_a_mask_that_allows_nothing_names_the_environment(policy, where):
    made = policies.categorical(logits_net()) if policy == "head" else None
    make, allows_no = (
        board(NVEC, where, none_at=3),
        r"Board\[0\]: .*action_mask allows no action",
    )
    with pytest.raises(BadEnvOutput, match=allows_no):
        collect(
            make, made, num_envs=2, frames_per_batch=20, seed=0, **options_of(where)
        )


def test_random_actions_do_not_depend_on_the_size_of_batches():
    whole = collect(board(), None, num_envs=2, frames_per_batch=30, seed=3)
    assert_same(
        whole, collect(board(), None, num_envs=2, frames_per_batch=6, seed=3, batches=5)
    )


def test_random_frames_and_decorrelation_respect_joint_masks():
    head = policies.categorical(logits_net())
    options = {"max_decorrelation_steps": 7, "init_random_frames": 30, "seed": 0}
    batch = collect(
        board(), head, num_envs=3, frames_per_batch=30, batches=2, **options
    )
    assert (
        batch["action_log_prob"].isnan().any()
    )  # the environment refuses what is not allowed


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_joint_masks_reach_policies_of_worker_processes(inference):
    net = logits_net()
    head = policies.categorical(net)
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 40, "seed": 0}
    with MultiSyncCollector(
        [board()] * 2, head, inference=inference, cat_results="stack", **options
    ) as collector:
        batch = collector.rollout()
        table = expected_log_probs(net, batch["position"], batch["action_mask"])
        assert torch.allclose(
            batch["action_log_prob"], at_actions(table, batch["action"]), atol=1e-5
        )
        random = collector.collect_batch(n_step=40, random=True).batch
        assert at_actions(random["action_mask"], random["action"]).all()
    if inference == "worker":
        assert_same(batch, collect([board()] * 2, head, **options))


# --- other kinds of environments ------------------------------------------------------------------


class TorchBoards:
    """``Board`` for B environments on tensors; counts moves that were not allowed."""

    device = torch.device("cpu")

    def __init__(self, num_envs: int = 5, exact: bool = True) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self.muster_exact, self.wrong = num_envs, exact, 0
        self.single_action_space = spaces.MultiDiscrete(NVEC)
        box = spaces.Box(0, 100, (2,), np.float32)
        self.single_observation_space = spaces.Dict(
            {"position": box, "action_mask": spaces.MultiBinary(NVEC)}
        )

    def seen(self) -> dict[str, torch.Tensor]:
        number = torch.arange(12) + self.t[:, None]
        mask = (number % 3 == 0).reshape(-1, *NVEC).to(torch.int8)
        return {
            "position": torch.stack([self.t.float(), torch.ones(self.num_envs)], -1),
            "action_mask": mask,
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        self.t = (
            torch.zeros(self.num_envs, dtype=torch.long)
            if mask is None
            else self.t * ~mask
        )
        return self.seen(), {}

    def step(self, action: torch.Tensor) -> Any:
        allowed = self.seen()["action_mask"][
            torch.arange(self.num_envs), action[:, 0], action[:, 1]
        ]
        self.wrong += int((allowed == 0).sum())
        self.t = self.t + 1
        ended = self.t == LENGTH
        final = self.seen()
        self.t = self.t * ~ended
        return (
            self.seen(),
            torch.ones(self.num_envs),
            ended,
            torch.zeros_like(ended),
            {"final_obs": final},
        )

    def close(self) -> None:
        pass


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_batches_on_tensors_and_rows_on_a_device_respect_joint_masks(random, device):
    env, net = TorchBoards(), logits_net()
    run = Run(env, None if random else policies.categorical(net), 10, device)
    batch = run.batches(2)
    assert env.wrong == 0
    assert at_actions(batch["action_mask"], batch["action"]).all()
    if not random:
        table = expected_log_probs(net, batch["position"], batch["action_mask"])
        assert torch.allclose(
            batch["action_log_prob"], at_actions(table, batch["action"]), atol=1e-5
        )


def test_the_trial_of_partial_resets_takes_allowed_actions():
    env = TorchBoards(exact=False)
    env.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    Run(env, None, 10).batches(2)
    assert env.wrong == 0


class OfDmEnv:
    """``Board`` as a dm_env.Environment."""

    def __new__(cls) -> Any:
        import dm_env
        from dm_env import specs

        class Environment(dm_env.Environment):
            def __init__(self) -> None:
                self.env = Board()

            def reset(self) -> Any:
                return dm_env.restart(self.env.reset()[0])

            def step(self, action: Any) -> Any:
                obs, reward, done, _, _ = self.env.step(action)
                return (
                    dm_env.termination(reward, obs)
                    if done
                    else dm_env.transition(reward, obs)
                )

            def observation_spec(self) -> Any:
                position = specs.BoundedArray((2,), np.float32, 0, 100)
                return {
                    "position": position,
                    "action_mask": specs.BoundedArray(NVEC, np.int8, 0, 1),
                }

            def action_spec(self) -> Any:
                return specs.BoundedArray((2,), np.int64, [0, 0], [2, 3])

            def reward_spec(self) -> Any:
                return specs.Array((), np.float64)

        return Environment()


KINDS: dict[str, dict[str, Any]] = {
    "gymnasium.vector": {"env": lambda: gymnasium.vector.SyncVectorEnv([board()] * 2)},
    "same step": {
        "env": lambda: gymnasium.vector.SyncVectorEnv(
            [board()] * 2, autoreset_mode=AutoresetMode.SAME_STEP
        )
    },
    "EnvPool": {
        "env": lambda: EnvPoolVectorEnv(GymnasiumEnvPool(board(), 2, shuffled=True))
    },
    "dm_env": {"env": OfDmEnv, "num_envs": 2},
}


@pytest.mark.filterwarnings("ignore:.*seed")
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_environment_gives_the_same(kind, random):
    policy = None if random else policies.categorical(logits_net())
    options = {"policy": policy, "frames_per_batch": 20, "seed": 0}
    single = collect(env=board(), num_envs=2, **options)
    other = collect(**KINDS[kind], **options)
    assert torch.equal(single["action"], other["action"])
    assert torch.equal(single["action_mask"], other["action_mask"])


def torchrl_env(action: Any, entries: tuple[int, ...]) -> Any:
    pytest.importorskip("torchrl")
    from tensordict import TensorDict
    from torchrl.data import Binary, Composite, Unbounded
    from torchrl.envs import EnvBase

    class Masked(EnvBase):
        """The first half of the entries of the mask is allowed at even steps, the second half at
        odd ones.
        """

        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(
                observation=Unbounded((2,)), action_mask=Binary(shape=entries)
            )
            self.action_spec, self.reward_spec = action.clone(), Unbounded((1,))
            self.t = 0

        def _seen(self) -> dict[str, torch.Tensor]:
            number = torch.arange(int(np.prod(entries))).reshape(entries)
            return {
                "observation": torch.tensor([self.t, 1.0]),
                "action_mask": ((number + self.t) % 2 == 0).to(torch.int8),
            }

        def _reset(self, td: Any = None, **_: Any) -> Any:
            self.t = 0
            return TensorDict(self._seen(), ())

        def _step(self, td: Any) -> Any:
            self.t += 1
            done = torch.tensor([self.t == LENGTH])
            return TensorDict(
                {**self._seen(), "reward": torch.ones(1), "done": done}, ()
            )

        def _set_seed(self, seed: Any) -> None:
            pass

    return Masked()


def test_torchrl_environments_masks_are_respected_by_random_actions_and_heads():
    data = pytest.importorskip("torchrl.data")
    batch = collect(
        torchrl_env(data.OneHot(6), (6,)), None, frames_per_batch=60, seed=0
    )
    assert batch["action"].sum(-1).eq(1).all()
    assert (batch["action_mask"].bool() & batch["action"].bool()).any(-1).all()
    batch = collect(
        torchrl_env(data.MultiOneHot([2, 4]), (6,)), None, frames_per_batch=60, seed=0
    )
    assert [part.sum(-1).eq(1).all() for part in batch["action"].split([2, 4], -1)] == [
        True,
        True,
    ]
    assert (batch["action_mask"].bool() | ~batch["action"].bool()).all()
    batch = collect(
        torchrl_env(data.MultiOneHot(NVEC), NVEC), None, frames_per_batch=60, seed=0
    )
    index = torch.stack(
        [part.int().argmax(-1) for part in batch["action"].split(NVEC, -1)], -1
    )
    assert at_actions(batch["action_mask"], index).all()
    make = torchrl_env(data.MultiCategorical(NVEC), NVEC)
    net = logits_net()
    for policy in (None, policies.categorical(net)):
        batch = collect(make, policy, frames_per_batch=60, seed=0)
        assert at_actions(batch["action_mask"], batch["action"]).all()
    table = expected_log_probs(net, batch["observation"], batch["action_mask"])
    assert torch.allclose(
        batch["action_log_prob"], at_actions(table, batch["action"]), atol=1e-5
    )
    with pytest.raises(UnsupportedSpace, match="Masked: .*5 entries.*6 choices"):
        Collector(torchrl_env(data.OneHot(6), (5,)), None, frames_per_batch=6)


@pytest.mark.parametrize(
    ("turns", "head"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("where", ["obs", "info"])
def test_agents_have_joint_masks_of_their_own(turns, where, head):
    pytest.importorskip("pettingzoo")
    env = two_players(turns, where)
    net = logits_net()
    policy = policies.categorical(net) if head else None
    batch = collect(env, policy, frames_per_batch=60, seed=0)
    if turns:
        mask, action = batch["action_mask"], batch["action"]
        assert mask.shape == (60, *NVEC)
    else:
        mask, action = batch["player", "action_mask"], batch["player", "action"]
        assert mask.shape == (60, 2, *NVEC)
    assert at_actions(mask, action).all()
    if head:
        table = expected_log_probs(net, batch["observation"], mask)
        assert torch.allclose(
            batch["action_log_prob"], at_actions(table, action), atol=1e-5
        )


def test_policies_of_agents_that_take_turns_respect_joint_masks():
    pytest.importorskip("pettingzoo")
    policy = {"player_0": None, "player_1": policies.categorical(logits_net())}
    for exploration in ("random", "deterministic"):
        batch = collect(
            two_players(True, "obs"),
            policy,
            frames_per_batch=60,
            seed=0,
            exploration_type=exploration,
        )
        assert at_actions(batch["action_mask"], batch["action"]).all()
        assert batch["action_log_prob"].isfinite().sum() == 30


def two_players(turns: bool, where: str) -> Any:
    from pettingzoo import AECEnv, ParallelEnv

    mask_space, box = spaces.MultiBinary(NVEC), spaces.Box(0, 100, (2,), np.float32)

    class Both:
        render_mode = None

        def __init__(self) -> None:
            self.metadata = {"name": "both", "is_parallelizable": False}
            self.possible_agents = ["player_0", "player_1"]

        def observation_space(self, agent: str) -> Any:
            return (
                spaces.Dict(observation=box, action_mask=mask_space)
                if where == "obs"
                else box
            )

        def action_space(self, agent: str) -> Any:
            return spaces.MultiDiscrete(NVEC)

        def seen(self, agent: str) -> Any:
            mask = allowed_at(self.t + int(agent[-1])).astype(np.int8)
            obs = np.array([self.t, 1], np.float32)
            self.infos[agent] = {"action_mask": mask} if where == "info" else {}
            return {"observation": obs, "action_mask": mask} if where == "obs" else obs

    class Parallel(Both, ParallelEnv):
        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents, self.t, self.infos = list(self.possible_agents), 0, {}
            return {agent: self.seen(agent) for agent in self.agents}, self.infos

        def step(self, actions: Any) -> Any:
            for agent, action in actions.items():
                assert allowed_at(self.t + int(agent[-1]))[tuple(action)]
            self.t += 1
            over, agents = self.t == LENGTH, self.agents
            seen = {agent: self.seen(agent) for agent in agents}
            self.agents = [] if over else agents
            flags = dict.fromkeys(agents, over)
            return (
                seen,
                dict.fromkeys(agents, 1.0),
                flags,
                dict.fromkeys(agents, False),
                self.infos,
            )

    class Turns(Both, AECEnv):
        def reset(self, seed: Any = None, options: Any = None) -> None:
            self.agents, self.t, self.infos = list(self.possible_agents), 0, {}
            self.agent_selection = "player_0"
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
            self.terminations = dict.fromkeys(self.agents, False)
            self.truncations = dict.fromkeys(self.agents, False)
            for agent in self.agents:
                self.seen(agent)

        def observe(self, agent: str) -> Any:
            return self.seen(agent)

        def step(self, action: Any) -> None:
            agent = self.agent_selection
            if self.terminations[agent]:
                self._was_dead_step(action)
                return
            assert allowed_at(self.t + int(agent[-1]))[tuple(action)]
            self.t += 1
            if self.t == 2 * LENGTH:
                self.terminations = dict.fromkeys(self.agents, True)
            self.agent_selection = self.possible_agents[self.t % 2]

    return Turns() if turns else Parallel()


def test_a_mask_of_agents_that_does_not_fit_is_refused(monkeypatch):
    pytest.importorskip("pettingzoo")
    for turns in (False, True):
        env = two_players(turns, "obs")
        monkeypatch.setattr(
            type(env).__mro__[1],
            "action_space",
            lambda self, agent: spaces.MultiDiscrete([3, 5]),
        )
        with pytest.raises(
            UnsupportedSpace, match=r"\(3, 4\) has 12 entries.*8 entries.*15"
        ):
            Collector(env, None, frames_per_batch=4)


def test_a_team_has_a_mask_for_each_agent():
    mask = ActionMask(
        "env",
        ("team", "action"),
        ("team", "action_mask"),
        (2, 3, 2, 3),
        (0,) * 4,
        True,
        2,
    )
    rows = np.zeros((4000, 2, 2, 3), np.int8)
    rows[:, 0, 0, 1] = rows[:, 0, 1, 2] = rows[:, 1, 1, 0] = 1
    uniform = np.random.default_rng(0).random((4000, 2))
    drawn = mask.draw(rows, uniform)
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1, 1, 0), (1, 2, 1, 0)}
    assert abs((drawn[:, 0] == 0).mean() - 0.5) < 0.05
    on_device = mask.draw_on_device(torch.from_numpy(rows), torch.from_numpy(uniform))
    assert on_device.tolist() == drawn.tolist()
    rows[7, 1] = 0
    with pytest.raises(
        BadEnvOutput, match=r"env\[7\]: team.action_mask allows no action"
    ):
        mask.draw(rows, uniform)


def test_a_head_for_a_team_renormalises_for_each_agent():
    head = policies.categorical(nn.Linear(2, 10), nvec=(2, 3, 2, 3))
    head.mask = ActionMask(
        "env",
        ("team", "action"),
        ("team", "action_mask"),
        (2, 3, 2, 3),
        (0,) * 4,
        True,
        2,
    )
    head.low, head.action_shape = (0,) * 4, (2, 2)
    obs, mask = torch.rand(6, 2), torch.rand(6, 2, 2, 3) < 0.6
    mask[..., 0, 0] = True
    distribution = head.distribution(obs, action_mask=mask)
    action = distribution.sample()
    assert action.shape == (6, 2, 2)
    each = []
    for agent, logits in enumerate(head.net(obs).split(5, -1)):
        a, b = logits.split([2, 3], -1)
        joint = (
            (a[:, :, None] + b[:, None, :])
            .masked_fill(~mask[:, agent], -torch.inf)
            .flatten(1)
            .log_softmax(-1)
        )
        each.append(
            joint.gather(1, (action[:, agent, 0] * 3 + action[:, agent, 1])[:, None])[
                :, 0
            ]
        )
    expected = torch.stack(each).sum(0)
    assert torch.allclose(distribution.log_prob(action), expected, atol=1e-5)
    drawn, log_prob = head.draw(head.restrict(head.net(obs), mask), deterministic=True)
    assert torch.equal(drawn.reshape(6, 2, 2), distribution.mode)
    assert torch.allclose(log_prob, distribution.log_prob(distribution.mode), atol=1e-5)


# --- actions with several parts -------------------------------------------------------------------


class Parts(gymnasium.Env[Any, Any]):
    """Its action has a discrete part, one of two variables, and a continuous one."""

    def __init__(self, masks: str = "each") -> None:
        self.action_space = spaces.Dict(
            move=spaces.Discrete(4, start=1),
            throttle=spaces.Box(0, 1, (2,), np.float32),
            where=spaces.MultiDiscrete(NVEC),
        )
        each = {"move": spaces.MultiBinary(4), "where": spaces.MultiBinary(NVEC)}
        box = spaces.Box(0, 100, (1,), np.float32)
        self.observation_space = spaces.Dict(
            position=box, action_mask=spaces.Dict(each)
        )
        if masks == "one":
            self.action_space = spaces.Dict(
                throttle=spaces.Box(0, 1, (2,), np.float32),
                where=spaces.MultiDiscrete(NVEC),
            )
            self.observation_space = spaces.Dict(
                position=box, action_mask=spaces.MultiBinary(NVEC)
            )
        self.masks = masks

    def seen(self) -> Any:
        where = allowed_at(self.t).astype(np.int8)
        mask = {"move": np.eye(4, dtype=np.int8)[self.t % 4], "where": where}
        return {
            "position": np.zeros(1, np.float32),
            "action_mask": mask if self.masks == "each" else where,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        assert allowed_at(self.t)[tuple(action["where"])]
        assert self.masks == "one" or int(action["move"]) == 1 + self.t % 4
        self.t += 1
        return self.seen(), 1.0, self.t == LENGTH, False, {}


@pytest.mark.parametrize("masks", ["each", "one"])
def test_parts_of_an_action_have_the_masks_with_their_names(masks):
    batch = collect(lambda: Parts(masks), None, num_envs=2, frames_per_batch=40, seed=0)
    mask = batch["action_mask", "where"] if masks == "each" else batch["action_mask"]
    assert at_actions(mask, batch["action", "where"]).all()


# --- other systems --------------------------------------------------------------------------------


def test_layers_in_which_others_choose_actions_take_any_leaf_of_that_name():
    torchrl = pytest.importorskip("torchrl")
    from muster.compat.gymnasium import VectorEnv
    from muster.compat.torchrl import Collector as TorchRLCollector

    data, shape = torchrl.data, (5,)
    env = torchrl_env(data.OneHot(6), shape)
    policy = torchrl.modules.RandomPolicy(env.action_spec)
    collector = TorchRLCollector(env, policy, frames_per_batch=6, total_frames=6)
    assert next(iter(collector))["action_mask"].shape == (6, *shape)
    collector.shutdown()
    envs = VectorEnv([of_spaces(*MISFITS["size"][:2])], num_workers=1)
    assert envs.reset()[0]["action_mask"].shape == (1, 11)
    envs.close()
