"""The mode in which a policy acts: evaluation mode, and the user's modules are as before."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector, Evaluator, Execution, MultiSyncCollector, policies
from muster.errors import BadOption, EnvError, PolicyError
from muster.policies.modes import ActingMode
from muster.testing import CountingEnv
from muster.weights.names import acting_modules
from tests.fakes.actors import Moody
from tests.fakes.buffers import Extends
from tests.tools import assert_same, counting
from tests.warned import warnings_are_errors

AS_GIVEN: dict[str, Any] = {"execution": Execution(policy_mode="as_given")}
THREADS: dict[str, Any] = {"backend": "threads"}
WHERE: dict[str, tuple[Any, dict[str, Any]]] = {
    "here": (Collector, {}),
    "processes": (MultiSyncCollector, {}),
    "threads": (MultiSyncCollector, THREADS),
    "server": (MultiSyncCollector, {"inference": "server", **THREADS}),
}


def collector(where: str, policy: Any, env: Any = None, **options: Any) -> Any:
    cls, own = WHERE[where]
    return cls(
        [env or counting(5)] * 2,
        policy,
        **{"num_envs": 4, "frames_per_batch": 64, "seed": 0, **own, **options},
    )


def state_of(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def changed(policy: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, tensor in policy.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]


class Showing(nn.Module):
    """Shows the modes of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.frozen, self.calls = nn.Linear(2, 2), nn.Dropout().eval(), 0

    def train(self, mode: bool = True) -> Any:
        self.calls += 1
        return super().train(mode)

    def forward(self, obs: torch.Tensor) -> Any:
        modes = torch.tensor([self.training, self.net.training, self.frozen.training])
        return (obs[..., 1] > 1).long(), {"modes": modes.expand(*obs.shape[:-1], 3)}


def shown(batch: Any) -> list[list[bool]]:
    found: list[list[bool]] = batch["modes"].reshape(-1, 3).unique(dim=0).tolist()
    return found


# --- where it acts --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_modes_of_every_module(where: str) -> None:
    policy = Showing().train()
    policy.frozen.eval()
    calls = policy.calls
    with collector(where, policy, counting(5)) as c:
        assert shown(c.next()) == [[False, False, False]]
        assert (policy.training, policy.net.training, policy.frozen.training) == (
            True,
            True,
            False,
        )
        policy.eval()  # does not matter: they act in evaluation mode in any case
        assert shown(c.next()) == [[False, False, False]]
        assert not policy.training
    with collector(where, policy.train(), counting(5), **AS_GIVEN) as c:
        policy.frozen.eval()
        expected = [[True, True, True]]
        assert shown(c.next()) == expected
        policy.eval()
        assert shown(c.next()) == expected, "the modes when the collector was made"
        assert (policy.training, policy.net.training, policy.frozen.training) == (
            False,
            False,
            False,
        )
    assert policy.calls == calls + 3, "only the user calls train()"


def test_batch_normalisation_and_dropout_act_alike_here_and_in_workers() -> None:
    batches = {}
    for where in WHERE:
        policy = policies.gaussian(
            nn.Sequential(
                nn.BatchNorm1d(2), nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)
            )
        )
        torch.manual_seed(0)
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
        before = state_of(policy)
        with collector(where, policy, partial(Pushing, 5)) as c:
            c.next()
            policy(
                torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
            )  # as in training
            assert changed(policy, before) == [
                f"net.0.{n}"
                for n in ("running_mean", "running_var", "num_batches_tracked")
            ]
            before = state_of(policy)
            c.update_policy_weights_(policy.net)
            batches[where] = c.next()
        assert not changed(policy, before)
        assert all(module.training for module in policy.modules())
        rows = batches[where].reshape(-1)
        expected = copy.deepcopy(policy).eval().distribution(rows["observation"])
        torch.testing.assert_close(
            expected.log_prob(rows["action"]), rows["action_log_prob"]
        )
    for where in ("processes", "threads"):
        assert_same(batches["here"], batches[where])


class Pushing(CountingEnv):
    """Takes one number."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))


def test_batch_normalisation_acts_in_a_single_environment() -> None:
    """In training mode it refuses a single row."""
    policy = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with Collector(
        counting(5), policies.categorical(policy), num_envs=1, frames_per_batch=8
    ) as c:
        assert c.next().shape == (1, 8)
    with (
        Collector(
            counting(5),
            policies.categorical(policy),
            num_envs=1,
            frames_per_batch=8,
            **AS_GIVEN,
        ) as c,
        pytest.raises(PolicyError, match="Expected more than 1 value"),
    ):
        c.next()


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(2)], ids=["dropout", "normalisation"]
)
def test_a_resumed_collection_acts_in_the_same_mode_from_its_first_call_on(
    layer: nn.Module,
) -> None:
    def make() -> Collector:
        torch.manual_seed(0)
        net = nn.Sequential(
            copy.deepcopy(layer), nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)
        )
        return Collector(
            counting(5),
            policies.categorical(net),
            num_envs=1,
            frames_per_batch=64,
            seed=0,
        )

    with make() as first, make() as second:
        first.next()
        policy = second.policy
        assert second.load_state_dict(first.state_dict()).exact
        assert all(module.training for module in policy.modules())
        assert_same(first.next(), second.next())
        assert first.stats().policy_path == second.stats().policy_path


def test_dropout_needs_no_module_calls() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))
    for options, path in (({}, "numpy executor"), (AS_GIVEN, "module")):
        with Collector(
            counting(5),
            policies.categorical(net),
            num_envs=2,
            frames_per_batch=8,
            **options,
        ) as c:
            c.next()
            assert c.stats().policy_path == path
    assert net.training


# --- the user's modules ---------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["environment", "policy", "Ctrl-C"])
def test_the_modes_are_the_users_again_after_an_error(fails: str) -> None:
    class Failing(Moody):
        calls = 0

        def forward(self, obs: torch.Tensor) -> Any:
            Failing.calls += 1
            if fails != "environment" and Failing.calls == 4:
                raise KeyboardInterrupt if fails == "Ctrl-C" else ValueError("no")
            return super().forward(obs)

    policy = Failing()
    modes = policy.modes()
    env = partial(Raising, 5) if fails == "environment" else counting(5, noise=True)
    expected = {
        "environment": EnvError,
        "policy": PolicyError,
        "Ctrl-C": KeyboardInterrupt,
    }[fails]
    with Collector(env, policy, num_envs=2, frames_per_batch=16) as c:
        with pytest.raises(expected):
            c.next()
        assert policy.modes() == modes
        c.next()
        assert policy.modes() == modes


class Raising(CountingEnv):
    """Raises once; observes three numbers."""

    raised = False

    def __init__(self, length: int) -> None:
        super().__init__(length, noise=True)

    def step(self, action: Any) -> Any:
        if self.executed == 3 and not Raising.raised:
            Raising.raised = True
            raise ValueError("once")
        return super().step(action)


def test_hooks_of_the_user_run_in_the_users_modes() -> None:
    policy = Moody()
    modes, seen = policy.modes(), []
    hooks = {
        name: lambda *_: seen.append(policy.modes())
        for name in ("pre_collect_hook", "post_collect_hook", "on_batch")
    }
    with Collector(
        counting(5, noise=True), policy, num_envs=2, frames_per_batch=16, **hooks
    ) as c:
        c.fake_tensordict()
        c.next()
        c.collect(n_step=8, bootstrap=False)
    assert len(seen) > 3
    assert all(each == modes for each in seen)


def test_every_call_of_the_policy_is_in_evaluation_mode() -> None:
    calls: list[bool] = []

    class Noting(Moody):
        def forward(self, obs: torch.Tensor) -> Any:
            calls.append(self.norm.training)
            action, extras = super().forward(obs)
            return action, {**extras, "state_value": extras["seen"].sum(-1)}

    policy = Noting()
    before = state_of(policy)
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 16, "seed": 0}
    with Collector(counting(5, noise=True), policy, **options) as c:
        c.fake_tensordict()
        c.rollout()
        c.next()
        c.collect(n_step=8, bootstrap=True)
        c.collect(n_step=8, no_grad=False)
        c.collect(n_episode=2)
    with Collector(
        counting(5, noise=True), policy, init_random_frames=16, **options
    ) as c:
        c.next()
        c.next()
    assert calls
    assert not any(calls)
    assert not changed(policy, before)


@pytest.mark.parametrize("mode", ["eval", "as_given"])
def test_in_the_background_the_copy_has_the_mode(mode: Any) -> None:
    policy, buffer = Showing(), Extends()
    policy.frozen.eval()
    options: dict[str, Any] = {
        "replay_buffer": buffer,
        "execution": Execution(policy_mode=mode),
    }
    with Collector(
        counting(5), policy, num_envs=2, frames_per_batch=16, **options
    ) as c:
        c.start()
        for training in (False, True):
            policy.train(training)
            buffer.until(len(buffer.batches) + 2)
            assert (policy.training, policy.net.training) == (training, training)
        c.async_shutdown()
    expected = [[False] * 3] if mode == "eval" else [[True, True, False]]
    assert all(shown(batch) == expected for batch in buffer.batches)


def test_in_the_background_a_function_acts_in_the_modes_of_the_thread_that_trains() -> (
    None
):
    """Its modules are not copied: changing their mode would change that of the training."""
    policy, buffer = Showing(), Extends()
    with Collector(
        counting(5),
        lambda obs: policy(obs),
        num_envs=2,
        frames_per_batch=16,
        replay_buffer=buffer,
    ) as c:
        assert shown(c.rollout()) == [[False] * 3]
        c.start()
        buffer.until(2)
        assert policy.training
        c.async_shutdown()
    assert shown(buffer.batches[-1]) == [[True, True, False]]


# --- modules that are no submodules ---------------------------------------------------------------


def test_functions_of_agents_too() -> None:
    drop = nn.Dropout()
    assert drop in acting_modules(policies.per_agent({"others": lambda obs: drop(obs)}))
    assert drop in acting_modules(lambda obs: drop(obs))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["function", "TensorDictModule"])
def test_functions_act_with_their_modules_in_evaluation_mode(
    where: str, kind: str
) -> None:
    drop = nn.Dropout(0.5)

    def see(obs: Any) -> Any:
        return (obs[..., 1] > 1).long(), {"seen": drop(torch.ones(*obs.shape[:-1], 8))}

    policy: Any = see
    if kind == "TensorDictModule":
        policy = TensorDictModule(
            lambda obs: (see(obs)[0], see(obs)[1]["seen"]),
            ["observation"],
            ["action", "seen"],
        )
    with collector(where, policy) as c:
        assert c.next()["seen"].unique().tolist() == [1.0]
    assert drop.training


LIVE = Moody()


def live(obs: torch.Tensor) -> Any:
    return LIVE(obs)


def living() -> nn.Module:
    return LIVE


@pytest.mark.parametrize("where", ["here", "threads", "server"])
@pytest.mark.parametrize(
    "policy",
    [{"policy": live}, {"policy_factory": living}],
    ids=["function", "factory"],
)
def test_modules_that_threads_share_with_the_user_keep_their_mode(
    where: str, policy: dict[str, Any]
) -> None:
    """What an importable function reaches by name is the user's own, not a copy."""
    LIVE.train()
    LIVE.frozen.eval()
    modes = LIVE.modes()
    with collector(
        where, env=counting(5, noise=True), **{"policy": None, **policy}
    ) as c:
        c.next()
        assert LIVE.modes() == modes
    assert LIVE.modes() == modes


# --- options --------------------------------------------------------------------------------------


class NoisyLinear(nn.Linear):
    """Draws noise in training mode, as those of TorchRL and Tianshou."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out + torch.randn_like(out) if self.training else out


@pytest.mark.parametrize("where", ["here", "threads"])
def test_layers_that_explore_in_training_mode_only_are_announced(where: str) -> None:
    policy = policies.deterministic(NoisyLinear(2, 2))
    nn.init.zeros_(policy.net.weight)
    nn.init.constant_(policy.net.bias, 0.5)
    with pytest.warns(
        UserWarning, match=r"class NoisyLinear.*Execution\(policy_mode='as_given'\)"
    ):
        collector(where, policy).shutdown()
    with warnings_are_errors():
        with collector(where, policy, **AS_GIVEN) as noisy:
            assert noisy.next()["action"].unique().tolist() == [0, 1]
        policy.eval()
        with collector(where, policy) as plain:
            assert plain.next()["action"].unique().tolist() == [0]
        with Evaluator(counting(5), policy.train(), episodes=2) as evaluator:
            evaluator.evaluate()
        assert policy.training


class OnlyEvaluated(nn.Module):
    """Fails in training mode."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("this is no training")
        return (obs[..., 1] > 1).long()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("made", ["policy", "policy_factory"])
def test_an_evaluation_is_in_evaluation_mode_whatever_is_passed(
    made: str, num_workers: int
) -> None:
    policy = OnlyEvaluated()
    given = (
        {"policy": policy} if made == "policy" else {"policy_factory": OnlyEvaluated}
    )
    for options in ({}, AS_GIVEN):
        with Evaluator(
            counting(5), episodes=2, num_workers=num_workers, **given, **options
        ) as evaluator:
            assert len(evaluator.evaluate().records) == 2
    assert policy.training


@pytest.mark.parametrize("wrong", ["train", None, True])
def test_other_modes_are_refused(wrong: Any) -> None:
    with pytest.raises(
        BadOption, match=f"policy_mode={wrong!r}: expected one of 'eval', 'as_given'"
    ):
        Execution(policy_mode=wrong)


def test_modes_of_scripted_and_compiled_modules() -> None:
    for module in (
        torch.compile(nn.Sequential(nn.Dropout(0.9)), backend="eager"),
        nn.Sequential(nn.Dropout(0.9)),
    ):
        mode = ActingMode([module], "eval")
        mode.leave()
        mode.enter()
        assert not any(part.training for part in module.modules())
        assert torch.equal(module(torch.ones(100)), torch.ones(100))
        mode.leave()
        assert all(part.training for part in module.modules())
        assert not torch.equal(module(torch.ones(100)), torch.ones(100))


def test_modules_that_are_replaced_between_batches_act_in_evaluation_mode() -> None:
    """What was looked at before the first batch is looked at again when it has changed."""
    policy = Showing().train()
    with collector("here", policy, counting(5)) as c:
        c.next()
        policy.net = nn.Linear(2, 2)
        assert shown(c.next()) == [[False, False, False]]
        assert policy.net.training
        policy.net.inner = nn.Dropout()
        policy.frozen.train()
        inner = policy.net.inner
        seen = []
        policy.register_forward_pre_hook(lambda *_: seen.append(inner.training))
        assert shown(c.next()) == [[False, False, False]]
        assert not any(seen)
        assert inner.training
        assert policy.frozen.training
        del policy.net.inner
        policy.frozen.eval()
        c.next()
        assert inner.training
        assert not policy.frozen.training
