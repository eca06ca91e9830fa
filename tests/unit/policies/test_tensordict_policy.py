"""Policies on TensorDicts: what is stored, what is refused, and the executor's exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn

from muster.errors import BadOption, BadPolicyOutput
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import ArraySpec, Column
from muster.policies.checks import PolicySetting
from muster.policies.tensordict import TensorDictPolicy
from muster.rng import GroupRng

OBS, ACTION = ("observation",), ("action",)
OBS_SPECS = {OBS: ArraySpec((4,), np.dtype(np.float32))}
T, B = 6, 5
DISCRETE = ArraySpec((), np.dtype(np.int64), np.array(0), np.array(2))
ONE_HOT = ArraySpec((3,), np.dtype(np.int64), np.zeros(3, int), np.ones(3, int))
BOX = ArraySpec((2,), np.dtype(np.float32))


def net(outputs):
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def probabilistic(distribution, spec, keys=("logits",), **options):
    layers = (
        net(3) if keys == ("logits",) else nn.Sequential(net(4), NormalParamExtractor())
    )
    options = {"distribution_class": distribution, "return_log_prob": True, **options}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(layers, ["observation"], list(keys)),
        ProbabilisticTensorDictModule(list(keys), ["action"], **options),
    ), spec


def torchrl_actor(name, **options):
    modules = pytest.importorskip("torchrl.modules")
    keys = ["logits"] if "Categorical" in name else ["loc", "scale"]
    mlp = modules.MLP(
        in_features=4, out_features=3 if len(keys) == 1 else 4, num_cells=[16]
    )
    layers = mlp if len(keys) == 1 else nn.Sequential(mlp, NormalParamExtractor())
    distribution = getattr(modules, name, None) or getattr(torch.distributions, name)
    actor = modules.ProbabilisticActor(
        TensorDictModule(layers, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )
    spec = {"Categorical": DISCRETE, "OneHotCategorical": ONE_HOT}.get(name, BOX)
    return actor, spec


def actor_critic():
    actor, spec = probabilistic(torch.distributions.Categorical, DISCRETE)
    return TensorDictSequential(
        actor, TensorDictModule(net(1), ["observation"], ["state_value"])
    ), spec


POLICIES = {
    "plain": lambda: (TensorDictModule(net(2), ["observation"], ["action"]), BOX),
    "categorical": lambda: probabilistic(torch.distributions.Categorical, DISCRETE),
    "no log prob": lambda: probabilistic(
        torch.distributions.Categorical, DISCRETE, return_log_prob=False
    ),
    "normal": lambda: probabilistic(torch.distributions.Normal, BOX, ("loc", "scale")),
    "laplace": lambda: probabilistic(
        torch.distributions.Laplace, BOX, ("loc", "scale")
    ),
    "actor critic": actor_critic,
    "torchrl categorical": lambda: torchrl_actor("Categorical"),
    "torchrl one-hot": lambda: torchrl_actor("OneHotCategorical"),
    "torchrl normal": lambda: torchrl_actor("IndependentNormal"),
    "torchrl tanh": lambda: torchrl_actor("TanhNormal"),
    "torchrl tanh bounds": lambda: torchrl_actor(
        "TanhNormal", low=-2.0, high=torch.tensor([1.0, 3.0])
    ),
    "torchrl truncated": lambda: torchrl_actor("TruncatedNormal"),
}


@pytest.fixture(autouse=True)
def _no_grad():
    """As the loop calls policies."""
    with torch.no_grad():
        yield


@pytest.fixture(params=POLICIES)
def case(request):
    torch.manual_seed(0)
    return POLICIES[request.param]()


def make(module, spec=BOX, *, batched=True, num_envs=B, **options) -> TensorDictPolicy:
    options = {"obs_specs": OBS_SPECS, "action_specs": {ACTION: spec}, **options}
    return TensorDictPolicy(
        module, PolicySetting(batch_shape=(num_envs,) if batched else (), **options)
    )


def lane_for(policy, spec, obs, *, batched=True) -> Lane:
    columns = (
        Column(OBS, (4,), np.dtype(np.float32), carry=True),
        Column(ACTION, spec.shape, spec.dtype),
    )
    lead = None if batched else ()
    lane = Slot(
        Layout(
            len(obs) - 1, obs.shape[1], (*columns, *policy.columns()), batch_shape=lead
        )
    ).lanes[0]
    lane.arrays[OBS][...] = obs
    return lane


def observations(num_envs=B):
    return np.random.default_rng(0).normal(size=(T + 1, num_envs, 4)).astype(np.float32)


def begin(policy, spec, *, batched=True, seed=0):
    """A lane and its act, after the first call; the global generator is left where the policy left
    it.
    """
    obs = observations(B if batched else 1)
    torch.manual_seed(seed)
    first = obs[0] if batched else obs[0, 0]
    with torch.no_grad():
        outputs = policy.first({OBS: torch.from_numpy(first.copy())}, GroupRng(0))
        lane = lane_for(policy, spec, obs, batched=batched)
        return lane, policy.start(lane, GroupRng(0)), outputs


def collect(policy, spec, **options):
    lane, act, _ = begin(policy, spec, **options)
    with torch.no_grad():
        for t in range(T):
            act(t)
    return {key: array.copy() for key, array in lane.arrays.items() if key != OBS}


@pytest.mark.parametrize("exploration", ["random", "deterministic"])
def test_the_executor_changes_nothing(case, exploration):
    module, spec = case
    fast = make(module, spec, exploration_type=exploration)
    slow = make(module, spec, exploration_type=exploration, executor=False)
    a, b = collect(fast, spec), collect(slow, spec)
    assert (fast.path, slow.path) == ("torch executor", "module")
    assert a.keys() == b.keys()
    for key in a:
        assert np.array_equal(a[key], b[key], equal_nan=True), key


def test_rows_are_what_the_module_returns(case):
    module, spec = case
    got = collect(make(module, spec), spec)
    obs = torch.from_numpy(observations())
    torch.manual_seed(0)
    with set_interaction_type(InteractionType.RANDOM):
        module(TensorDict({"observation": obs[0]}, [B]))  # the first call
        for t in range(T):
            out = module(TensorDict({"observation": obs[t]}, [B]))
            for key, array in got.items():
                assert np.array_equal(array[t], out[key].numpy()), key


def test_extras_become_columns():
    module, spec = actor_critic()
    policy = make(module, spec)
    begin(policy, spec)
    columns = {column.key: column.shape for column in policy.columns()}
    assert columns == {
        ("logits",): (3,),
        ("action_log_prob",): (),
        ("state_value",): (1,),
    }


def test_private_keys_and_inputs_are_not_stored():
    def policy(td):
        td["_hidden"] = td["observation"]
        td["observation"] = td["observation"] * 2
        td["action"] = td["observation"][..., :2]
        return td

    adapter = make(policy)
    got = collect(adapter, BOX)
    assert list(got) == [ACTION]
    np.testing.assert_allclose(got[ACTION], observations()[:-1, :, :2] * 2, rtol=1e-6)


class Counter(nn.Module):
    """Action and new state: how often it was called since the state was zero."""

    def forward(self, obs, count):
        count = torch.zeros_like(obs[..., :1]) if count is None else count
        return (count + 1).expand_as(obs[..., :2]).clone(), count + 1


def test_recurrent_state_goes_from_row_to_row():
    keys = ["observation", "count"]
    policy = make(TensorDictModule(Counter(), keys, ["action", ("next", "count")]))
    lane, act, outputs = begin(policy, BOX)
    assert outputs.state[("count",)].eq(1).all(), "left out at the first call"
    ((column,)) = policy.columns()
    assert (column.key, column.carry, column.shape) == (("count",), True, (1,))
    count = lane.arrays[("count",)]
    count[0] = 7
    act(0)
    act(1)
    assert lane.arrays[ACTION][:2, 0, 0].tolist() == [8, 9]
    count[2, 0] = 0  # what the loop does where an episode begins
    act(2)
    assert lane.arrays[ACTION][2, :2, 0].tolist() == [1, 10]
    assert count[3, :2, 0].tolist() == [1, 10]


def test_torchrl_lstm():
    modules = pytest.importorskip("torchrl.modules")
    lstm = modules.LSTMModule(
        input_size=4, hidden_size=8, in_key="observation", out_key="embed"
    )
    module = TensorDictSequential(
        lstm, TensorDictModule(nn.Linear(8, 2), ["embed"], ["action"])
    )
    policy = make(module)
    lane, act, outputs = begin(policy, BOX)
    carried = {column.key for column in policy.columns() if column.carry}
    assert carried == {("recurrent_state_h",), ("recurrent_state_c",), ("is_init",)}
    lane.arrays[("is_init",)][0] = True
    act(0)
    assert np.array_equal(lane.arrays[ACTION][0], outputs.action[ACTION].numpy()), (
        "a first row again"
    )
    act(1)
    before = lane.arrays[ACTION][1].copy()
    lane.arrays[("is_init",)][1, 0] = True
    act(1)
    differs = (lane.arrays[ACTION][1] != before).any(-1)
    assert differs.tolist() == [True, False, False, False, False], "is_init is read"


@pytest.mark.parametrize("executor", [True, False])
def test_weights_updated_in_place_are_followed(executor):
    module, spec = probabilistic(torch.distributions.Categorical, DISCRETE)
    policy = make(module, spec, executor=executor)
    lane, act, _ = begin(policy, spec)
    with torch.no_grad():
        module[0].module[2].weight.zero_()
        module[0].module[2].bias.copy_(torch.tensor([0.0, 200.0, 0.0]))
        act(0)
    assert (lane.arrays[ACTION][0] == 1).all()


def test_a_changed_module_is_planned_anew_or_called():
    module, spec = probabilistic(torch.distributions.Categorical, DISCRETE)
    policy = make(module, spec)
    lane, _, _ = begin(policy, spec)
    layers = module[0].module
    layers[2] = nn.Linear(16, 3)
    nn.init.zeros_(layers[2].weight)
    layers[2].bias.data = torch.tensor([0.0, 0.0, 200.0])
    state = torch.get_rng_state()
    with torch.no_grad():
        act = policy.start(lane, GroupRng(0))
        assert torch.equal(torch.get_rng_state(), state), "comparing draws nothing"
        act(0)
    assert policy.path == "torch executor"
    assert (lane.arrays[ACTION][0] == 2).all()
    module.register_forward_hook(
        lambda module, args, out: out.set("action", torch.zeros(B, dtype=torch.int64))
    )
    with torch.no_grad():
        policy.start(lane, GroupRng(0))(1)
    assert policy.path == "module"
    assert (lane.arrays[ACTION][1] == 0).all()


def test_hooks_and_unknown_networks_run_as_modules():
    module, spec = probabilistic(torch.distributions.Categorical, DISCRETE)
    module[0].register_forward_hook(lambda module, args, out: out)
    own = TensorDictModule(lambda x: x[..., :2].clone(), ["observation"], ["action"])
    for policy, action_spec in ((make(module, spec), spec), (make(own), BOX)):
        collect(policy, action_spec)
        assert policy.path == "module"


@pytest.mark.parametrize("executor", [True, False])
def test_nan_is_not_sampled(executor):
    module, spec = probabilistic(torch.distributions.Categorical, DISCRETE)
    lane, act, _ = begin(make(module, spec, executor=executor), spec)
    lane.arrays[OBS][2] = np.nan
    act(1)
    with pytest.raises((BadPolicyOutput, ValueError, RuntimeError), match="NaN|nan"):
        act(2)


def test_missing_inputs_are_named():
    with pytest.raises(BadPolicyOutput, match=r"reads \['pixels'\].*\['observation'\]"):
        make(TensorDictModule(net(2), ["pixels"], ["action"]))


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (
            TensorDictModule(net(2), ["observation"], ["act"]),
            r"did not return action.*\['act'\]",
        ),
        (lambda td: 3, "returned int, expected a TensorDict"),
        (
            TensorDictModule(net(3), ["observation"], ["action"]),
            r"shape \(5, 3\), expected \(5, 2\)",
        ),
        (
            lambda td: td.set("action", torch.ones(B, 2, dtype=torch.int64)),
            "dtype torch.int64, expected float32",
        ),
        (
            lambda td: td.update(
                {"action": torch.ones(B, 2), "done": torch.ones(B, 1)}
            ),
            "done, a name",
        ),
        (
            lambda td: td.set("action", td["observation"].mul_(2)[..., :2].clone()),
            "in place",
        ),
    ],
)
def test_wrong_outputs_are_named(module, match):
    policy = make(module)
    with pytest.raises(BadPolicyOutput, match=match):
        policy.first({OBS: torch.randn(B, 4)}, GroupRng(0))


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_outputs_that_change_are_refused(change):
    calls = []

    def policy(td):
        calls.append(1)
        td["action"] = td["observation"][..., :2].clone()
        value = torch.zeros(B, 1)
        if len(calls) > 2:
            value = {
                "missing": None,
                "shape": torch.zeros(B, 2),
                "dtype": torch.zeros(B, 1, dtype=torch.int64),
            }[change]
        return td if value is None else td.set("value", value)

    _, act, _ = begin(make(policy), BOX)
    act(0)
    with pytest.raises(
        BadPolicyOutput, match="policy policy returned value with shape .*same keys"
    ):
        act(1)


def test_unknown_exploration_types_are_refused():
    with pytest.raises(BadOption, match="'random'"):
        make(lambda td: td, exploration_type="sometimes")
