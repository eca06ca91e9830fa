"""Weights into a collector: forms, parts, schemes, updaters, and the version that is stamped on
rows.
"""

from __future__ import annotations

import copy
import queue
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector, MultiSyncCollector, policies
from muster.errors import BadOption, BadWeights
from muster.testing import CountingEnv
from tests.fakes.buffers import Extends
from tests.tools import column, counting, joined

PATIENCE = 60.0
VERSION = ("collector", "policy_version")


class Actor(nn.Module):
    """Acts 1 where its weight is positive, and shows its weight."""

    def __init__(self, value: float = -1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, obs: torch.Tensor) -> Any:
        weight = self.weight[0].expand(obs.shape[:-1])
        return (weight > 0).long(), {"weight": weight}


class Two(nn.Module):
    """An actor, and a critic of the same shape."""

    def __init__(self, actor: float = -1.0, critic: float = 0.0) -> None:
        super().__init__()
        self.actor, self.critic = Actor(actor), Actor(critic)

    def forward(self, obs: torch.Tensor) -> Any:
        action, extras = self.actor(obs)
        return action, {**extras, "value": self.critic(obs)[1]["weight"]}


def collector(policy: Any, env: Any = None, **options: Any) -> Collector:
    return Collector(env or counting(3), policy, **{"frames_per_batch": 4, **options})


def shown(c: Collector, key: str = "weight") -> list[float]:
    values: list[float] = c.rollout()[key].unique().tolist()
    return values


# --- forms ----------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "module": lambda: Actor(2.0),
    "state_dict": lambda: Actor(2.0).state_dict(),
    "tensordict": lambda: TensorDict.from_module(Actor(2.0)),
    "data": lambda: TensorDict.from_module(Actor(2.0)).data,
    "dict": lambda: {"weight": torch.full((2,), 2.0)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "method", [Collector.update_policy_weights_, Collector.receive_weights]
)
@pytest.mark.parametrize("keyword", [None, "weights", "policy"])
def test_every_form_by_position_and_by_keyword(form, method, keyword):
    with collector(Actor()) as c:
        weights = FORMS[form]()
        if keyword is None:
            method(c, weights)
        else:
            method(c, **{keyword: weights})
        assert shown(c) == [2.0]
        assert c.policy_version == 1


def test_none_mirrors_the_policy_that_the_collector_was_made_with():
    policy = Actor()
    with collector(policy, policy_device="cpu") as c:
        policy.weight.data.fill_(2.0)
        c.receive_weights()
        assert shown(c) == [2.0]
        assert c.policy_version == 1


def test_a_copy_on_another_device_follows_when_it_is_told():
    policy = Actor()
    with collector(policy, policy_device="meta") as c:
        assert c.policy is not policy
        assert c.get_model("policy").weight.device.type == "meta"
        c.update_policy_weights_()
        assert c.policy_version == 1


@pytest.mark.parametrize(
    "method", [Collector.update_policy_weights_, Collector.receive_weights]
)
def test_weights_are_given_once(method):
    with collector(Actor()) as c:
        for keywords in ({"weights": Actor()}, {"policy": Actor()}):
            with pytest.raises(BadOption, match="once"):
                method(c, Actor(), **keywords)
        with pytest.raises(BadOption, match="once"):
            method(c, weights=Actor(), policy=Actor())
        assert c.policy_version == 0


# --- parts and several models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "second",
    [
        {"weight": torch.ones(3)},
        {"weight": torch.full((2,), torch.nan)},
        {"bias": torch.ones(2)},
        3,
    ],
    ids=["shape", "nan", "name", "type"],
)
def test_of_several_models_all_are_taken_or_none(second):
    with collector(Two()) as c:
        with pytest.raises(BadWeights):
            c.update_policy_weights_(
                weights_dict={"actor": Actor(2.0), "critic": second}
            )
        batch = c.rollout()
        assert (batch["weight"][0], batch["value"][0]) == (-1.0, 0.0)
        assert c.policy_version == 0


def test_the_whole_policy_and_parts_may_be_named_together():
    with collector(Two()) as c:
        c.update_policy_weights_(weights_dict={"policy": Two(5.0, 6.0)})
        assert (shown(c), shown(c, "value")) == ([5.0], [6.0])


def test_what_contradicts_weights_dict_is_refused():
    with collector(Two()) as c:
        for args, keywords in (
            ((Two(),), {}),
            ((), {"model_id": "actor"}),
            ((), {"policy": Two()}),
        ):
            with pytest.raises(BadOption, match="weights_dict"):
                c.update_policy_weights_(
                    *args, weights_dict={"actor": Actor()}, **keywords
                )
        with pytest.raises(TypeError, match="worker_ids"):
            c.update_policy_weights_(weights_dict={"actor": Actor()}, worker_ids=0)
        assert c.policy_version == 0


@pytest.mark.parametrize(
    "unknown", ["value_net", "actor.nothing", "actor[0]", "policy.actor()", "__class__"]
)
def test_unknown_models_are_refused(unknown):
    with collector(Two()) as c:
        with pytest.raises(BadOption, match="is not known here"):
            c.update_policy_weights_(Actor(), model_id=unknown)
        with pytest.raises(BadOption, match="is not known here"):
            c.update_policy_weights_(
                weights_dict={"actor": Actor(2.0), unknown: Actor()}
            )
        assert shown(c) == [-1.0]


def test_what_has_no_weights_is_no_model():
    with collector(Two()) as c, pytest.raises(BadOption, match="which has no weights"):
        c.update_policy_weights_(Actor(), model_id="policy.training")


@pytest.mark.parametrize(
    "method", [Collector.update_policy_weights_, Collector.receive_weights]
)
def test_a_part_of_the_weights_is_refused_in_every_entry(method):
    policy = Two(1.0, 4.0)
    with collector(policy) as c:
        for given in (
            {"actor": {"weight": torch.ones(2)}},
            TensorDict({"actor": {"weight": torch.ones(2)}}),
        ):
            for keywords in ({}, {"weights": given}):
                with pytest.raises(
                    BadWeights, match=r"missing \['critic.weight'\], unknown nothing"
                ):
                    method(c, *([] if keywords else [given]), **keywords)
        with pytest.raises(BadWeights, match=r"missing \['critic.weight'\]"):
            c.update_policy_weights_(weights_dict={"policy": {"actor": Actor(2.0)}})
        assert (shown(c), shown(c, "value")) == ([1.0], [4.0])
        assert c.policy_version == 0


NESTED: dict[str, Any] = {
    "to_dict": lambda: TensorDict.from_module(Two(2.0, 3.0)).data.to_dict(),
    "modules": lambda: dict(Two(2.0, 3.0).named_children()),
    "tuples": lambda: {
        ("actor", "weight"): torch.full((2,), 2.0),
        ("critic", "weight"): torch.full((2,), 3.0),
    },
}


@pytest.mark.parametrize("form", NESTED)
@pytest.mark.parametrize(
    "method", [Collector.update_policy_weights_, Collector.receive_weights]
)
@pytest.mark.parametrize("keyword", [None, "weights", "policy"])
def test_nested_dicts(form, method, keyword):
    with collector(Two()) as c:
        weights = NESTED[form]()
        method(
            c,
            *([weights] if keyword is None else []),
            **({} if keyword is None else {keyword: weights}),
        )
        assert (shown(c), shown(c, "value"), c.policy_version) == ([2.0], [3.0], 1)
        c.update_policy_weights_(weights_dict={"policy": NESTED[form]()})
        assert c.policy_version == 2


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_model_without_weights_is_taken_from_the_policy(cls):
    policy = Two(1.0, 4.0)
    options = {"backend": "threads"} if cls is MultiSyncCollector else {}
    with cls([counting(3)], policy, frames_per_batch=4, **options) as c:
        policy.actor.weight.data.fill_(2.0)
        policy.critic.weight.data.fill_(5.0)
        c.update_policy_weights_(model_id="critic")
        c.update_policy_weights_(weights_dict={"policy.critic": None})
        expected = ([1.0], [5.0]) if options else ([2.0], [5.0])
        assert (shown(c), shown(c, "value"), c.policy_version) == (*expected, 2)
        c.update_policy_weights_(weights_dict={"actor": policy.actor})
        assert (shown(c), shown(c, "value")) == ([2.0], [5.0])


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_diverged_policy_is_refused_without_arguments_too(cls):
    policy = Two(1.0, 4.0)
    options = {"backend": "threads"} if cls is MultiSyncCollector else {}
    with cls([counting(3)], policy, frames_per_batch=4, **options) as c:
        policy.critic.weight.data[0] = torch.nan
        for arguments in ((), (policy,), (policy.actor,)):
            with pytest.raises(
                BadWeights, match="critic.weight is not finite: training has diverged"
            ):
                c.update_policy_weights_(*arguments)
        assert c.policy_version == 0


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("inference", ["worker", "server"])
def test_the_own_parameters_of_a_head_that_a_function_makes_arrive(backend, inference):
    """README's idiom, with ``policy_factory``: the network stands for the head."""
    with MultiSyncCollector(
        ["Pendulum-v1"] * 2,
        policy_factory=partial(policies.gaussian, nn.Linear(3, 1)),
        num_envs=2,
        frames_per_batch=64,
        seed=0,
        backend=backend,
        inference=inference,
    ) as c:
        assert c.next()["action"].std() > 0.5
        head = c.policy
        with torch.no_grad():
            head.log_std.fill_(-9.0)
            head.net.weight.zero_()
            head.net.bias.fill_(0.5)
        c.update_policy_weights_(head.net)
        torch.testing.assert_close(
            c.next()["action"], torch.full((2, 2, 16, 1), 0.5), atol=0.01, rtol=0
        )
        with pytest.raises(
            BadWeights,
            match=r"those of net, which is only a part of the policy: missing \['log_std'\]",
        ):
            c.update_policy_weights_(copy.deepcopy(head.net))


def test_a_part_stands_for_all_in_the_background():
    buffer, head = Extends(), policies.gaussian(nn.Linear(3, 1))
    options: dict[str, Any] = {
        "replay_buffer": buffer,
        "track_policy_version": True,
        "seed": 0,
    }
    with Collector(
        "Pendulum-v1", head, num_envs=2, frames_per_batch=16, **options
    ) as c:
        c.start()
        buffer.until(1)
        with torch.no_grad():
            head.log_std.fill_(-9.0)
            head.net.weight.zero_()
            head.net.bias.fill_(0.5)
        c.update_policy_weights_(head.net)
        buffer.until_true(lambda: bool((buffer.batches[-1][VERSION] == 1).all()))
        c.async_shutdown()
    torch.testing.assert_close(
        buffer.batches[-1]["action"], torch.full((2, 8, 1), 0.5), atol=0.01, rtol=0
    )


# --- versions -------------------------------------------------------------------------------------


def test_what_was_acted_before_the_update_keeps_its_version():
    """``fake_tensordict`` makes the policy's first call; the first row's action is of the version
    that made it.
    """
    with collector(Actor(0.0), track_policy_version=True) as c:
        assert c.fake_tensordict()[VERSION].shape == (4,)
        c.update_policy_weights_(Actor(1.0))
        batch = c.rollout()
        assert torch.equal(batch[VERSION], batch["weight"].long())
        assert batch[VERSION][1:].tolist() == [1, 1, 1]
        assert c.rollout()[VERSION].tolist() == [1] * 4


def test_versions_of_random_frames_and_of_the_first_rows_after_them():
    options = {"track_policy_version": True, "init_random_frames": 4}
    with collector(Actor(0.0), **options) as c:
        assert c.rollout()[VERSION].tolist() == [0] * 4
        c.update_policy_weights_(Actor(1.0))
        batch = c.rollout()
        assert batch[VERSION].tolist() == [1] * 4
        assert batch["weight"].tolist() == [1.0] * 4


def test_after_an_error_each_row_keeps_the_version_that_acted():
    class Failing(Actor):
        calls = 0

        def forward(self, obs: torch.Tensor) -> Any:
            Failing.calls += 1
            if Failing.calls == 3:
                raise ValueError("no")
            return super().forward(obs)

    with collector(Failing(0.0), track_policy_version=True) as c:
        with pytest.raises(RuntimeError, match="no"):
            c.rollout()
        c.update_policy_weights_(Actor(1.0).state_dict())
        batch = c.rollout()
        assert batch[VERSION].tolist() == [0, 0, 1, 1]
        assert batch["weight"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_without_tracking_there_is_no_column_but_a_count():
    with collector(Actor()) as c:
        c.increment_version()
        assert VERSION not in c.rollout().keys(True)
        assert (c.policy_version, c.get_policy_version()) == (1, None)
        assert c.stats().policy_version == 1


def test_increment_version_counts_weights_that_were_changed_in_another_way():
    policy = Actor(0.0)
    with collector(policy, track_policy_version=True) as c:
        policy.weight.data.fill_(1.0)
        c.increment_version()
        batch = c.rollout()
        assert (batch[VERSION].tolist(), batch["weight"].tolist()) == (
            [1] * 4,
            [1.0] * 4,
        )


def policy_version(kind: str) -> Any:
    return pytest.importorskip("torchrl.envs.llm.transforms").PolicyVersion(
        version_type=kind
    )


def test_torchrls_policy_version_counts():
    tracker = policy_version("int")
    with collector(Actor(), track_policy_version=tracker) as c:
        assert c.rollout()[VERSION].tolist() == [0] * 4
        c.update_policy_weights_(Actor(1.0))
        assert c.policy_version == c.get_policy_version() == tracker.version == 1
        tracker.increment_version()
        assert c.rollout()[VERSION].tolist() == [2] * 4


def test_torchrls_policy_version_as_uuid():
    tracker = policy_version("uuid")
    with collector(Actor(), num_envs=2, track_policy_version=tracker) as c:
        first = tracker.version
        batch = c.rollout()
        assert batch.shape == (2, 2)
        assert batch[VERSION] == [[first, first], [first, first]]
        c.update_policy_weights_(Actor(1.0))
        second = tracker.version
        assert second != first
        assert c.get_policy_version() == second
        assert c.rollout()[VERSION] == [[second, second], [second, second]]
        assert c.fake_tensordict().shape == (2, 2)


@pytest.mark.parametrize("tracked", ["yes", 3, object()])
def test_other_trackers_are_refused(tracked):
    with pytest.raises(BadOption, match="track_policy_version"):
        collector(Actor(), track_policy_version=tracked)


# --- in the middle of a rollout -------------------------------------------------------------------


class Publishing(CountingEnv):
    """Publishes in the middle of a rollout, as another thread would."""

    publish: Any = None

    def step(self, action: int) -> Any:
        if self.executed == 1:
            self.publish()
        return super().step(action)


def test_what_is_published_after_a_rollout_is_newer_than_what_waited_for_its_end():
    env = Publishing(3)
    with collector(Actor(0.0), env=env, track_policy_version=True) as c:
        env.publish = lambda: c.update_policy_weights_(Actor(1.0))
        assert shown(c) == [0.0]
        c.update_policy_weights_(Actor(2.0))
        batch = c.rollout()
        assert batch["weight"].unique().tolist() == [2.0]
        assert batch[VERSION].unique().tolist() == [2]


def test_parts_that_are_published_one_after_another_in_a_rollout_are_all_taken():
    env = Publishing(3)

    def publish() -> None:
        c.update_policy_weights_(Two(7.0, 8.0))
        c.update_policy_weights_(Actor(1.0), model_id="actor")
        c.update_policy_weights_(Actor(2.0), model_id="critic")
        c.update_policy_weights_(Actor(3.0), model_id="actor")

    env.publish = publish
    with collector(Two(), env=env) as c:
        batch = c.rollout()
        assert (
            batch["weight"].unique().tolist(),
            batch["value"].unique().tolist(),
        ) == (
            [-1.0],
            [0.0],
        )
        batch = c.rollout()
        assert (
            batch["weight"].unique().tolist(),
            batch["value"].unique().tolist(),
        ) == (
            [3.0],
            [2.0],
        )
        assert c.policy_version == 4


# --- updaters -------------------------------------------------------------------------------------


class Updater:
    """Puts weights where it thinks right."""

    def __init__(self, target: nn.Module) -> None:
        self.target = target
        self.pushed: list[Any] = []
        self.initialised: list[Any] = []

    def push_weights(self, weights: Any, worker_ids: Any) -> None:
        self.pushed.append((weights, worker_ids))
        if weights is not None:
            self.target.load_state_dict(weights)

    def init(self, *args: Any, **kwargs: Any) -> None:
        self.initialised.append((args, kwargs))


@pytest.mark.parametrize("made", [False, True])
def test_an_updater_gets_everything(made):
    policy = Actor()
    updater = Updater(policy)
    with collector(
        policy,
        weight_updater=(lambda: updater) if made else updater,
        track_policy_version=True,
    ) as c:
        c.init_updater(1, a=2)
        weights = Actor(2.0).state_dict()
        c.update_policy_weights_(weights)
        c.update_policy_weights_(worker_ids=[3])
        assert updater.pushed == [(weights, None), (None, [3])]
        assert updater.initialised == [((1,), {"a": 2})]
        for keywords in (
            {"weights_dict": {"policy": weights}},
            {"weights": weights, "model_id": "actor"},
        ):
            with pytest.raises(BadOption, match="knows one policy"):
                c.update_policy_weights_(**keywords)
        batch = c.rollout()
        assert batch["weight"].unique().tolist() == [2.0]
        assert batch[VERSION].unique().tolist() == [2]


def test_without_an_updater_there_is_nothing_to_initialise():
    with collector(Actor()) as c:
        assert c.init_updater(1, a=2) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("getter", [False, True])
def test_torchrls_updater_updates_the_policy(getter):
    updaters = pytest.importorskip("torchrl.collectors.weight_update")
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)

    def act(obs: torch.Tensor) -> torch.Tensor:
        return (net(obs)[..., 0] > 0).long()

    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["score"])
    whole = TensorDictModule(
        lambda s: (s[..., 0] > 0).long(), in_keys=["score"], out_keys=["action"]
    )
    module = pytest.importorskip("tensordict.nn").TensorDictSequential(policy, whole)
    trained = copy.deepcopy(module)
    nn.init.ones_(trained[0].module.weight)
    weights = TensorDict.from_module(trained).data
    updater = updaters.VanillaWeightUpdater(
        weight_getter=(lambda: weights) if getter else None,
        policy_weights=TensorDict.from_module(module).data,
    )
    with collector(module, weight_updater=updater) as c:
        assert updater.collector is c
        assert column(c.rollout(), "action") == [0] * 4
        c.update_policy_weights_(None if getter else weights)
        assert column(c.rollout(), "action") == [1] * 4
        assert c.policy_version == 1
    assert act(torch.ones(2)) == 1


# --- schemes of a parent --------------------------------------------------------------------------


class ThreadQueue(queue.Queue):  # type: ignore[type-arg]
    """What a scheme needs of a multiprocessing queue, between threads."""

    def close(self) -> None:
        """Nothing to close."""

    def join_thread(self) -> None:
        """Nothing to join."""


def pair(kind: str, model: nn.Module, model_id: str = "policy") -> tuple[Any, Any]:
    """A sender for one worker, and the receiving end as a worker would unpickle it."""
    schemes = pytest.importorskip("torchrl.weight_update")
    sender = getattr(schemes, kind)()
    context = SimpleNamespace(Queue=ThreadQueue)
    weights = TensorDict.from_module(model)
    sender.init_on_sender(
        model_id=model_id,
        weights=weights,
        devices=[torch.device("cpu")],
        num_workers=1,
        ctx=context,
    )
    receiver = type(sender).__new__(type(sender))
    receiver.__setstate__(sender.__getstate__())
    sender.connect()
    return sender, receiver


SCHEMES = ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"]


@pytest.mark.parametrize("kind", SCHEMES)
def test_torchrls_schemes_bring_weights(kind):
    parent = Actor(1.0)
    sender, receiver = pair(kind, parent)
    policy = Actor(-1.0)
    with collector(
        policy,
        worker_idx=0,
        weight_recv_schemes={"policy": receiver},
        track_policy_version=True,
    ) as c:
        batch = c.rollout()
        assert batch["weight"].unique().tolist() == [1.0], "the parent's first weights"
        first = c.policy_version
        sender.send(
            TensorDict.from_module(Actor(2.0))
        )  # waits for the receiving thread
        batch = c.rollout()
        assert batch["weight"].unique().tolist() == [2.0]
        assert batch[VERSION].unique().tolist() == [first + 1]
        assert c._receiver_schemes == {"policy": receiver}
        assert (
            c.cascade_execute(
                "_receiver_schemes['policy']._get_weights_buffer_from_model", policy
            )
            is not None
        )
        with pytest.raises(BadOption, match="through schemes"):
            c.receive_weights(Actor())
    sender.shutdown()
    assert policy.weight.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_scheme_never_changes_weights_in_the_middle_of_a_rollout(kind):
    sender, receiver = pair(kind, Actor(1.0))
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(CountingEnv):
        def step(self, action: int) -> Any:
            if self.executed == 1:
                reached.set()
                assert go_on.wait(PATIENCE)
            return super().step(action)

    def send() -> None:
        assert reached.wait(PATIENCE)
        sender.send(TensorDict.from_module(Actor(2.0)))
        go_on.set()

    options: Any = {
        "worker_idx": 0,
        "weight_recv_schemes": {"policy": receiver},
        "track_policy_version": True,
    }
    with Collector(Waiting, Actor(-1.0), frames_per_batch=4, **options) as c:
        version = c.policy_version
        thread = threading.Thread(target=send)
        thread.start()
        batch = joined(c, 2)
        thread.join(PATIENCE)
        assert batch["weight"].tolist() == [1.0] * 4 + [2.0] * 4
        assert batch[VERSION].tolist() == [version] * 4 + [version + 1] * 4
    sender.shutdown()


def test_a_scheme_for_a_part_of_the_policy():
    sender, receiver = pair("SharedMemWeightSyncScheme", Actor(1.0), "actor")
    with collector(Two(), worker_idx=0) as c:
        c.register_scheme_receiver({"actor": receiver})
        batch = c.rollout()
        assert (batch["weight"][0], batch["value"][0]) == (1.0, 0.0)
        sender.send(TensorDict.from_module(Actor(2.0)))
        assert shown(c) == [2.0]
    sender.shutdown()


def test_receive_weights_takes_what_is_there():
    sender, receiver = pair("SharedMemWeightSyncScheme", Actor(1.0))
    with collector(Actor(), worker_idx=0) as c:
        c.register_scheme_receiver({"policy": receiver})
        c.receive_weights()
        assert shown(c) == [1.0]
    sender.shutdown()


def test_a_scheme_that_brings_nothing_changes_nothing():
    scheme = pytest.importorskip("torchrl.weight_update").NoWeightSyncScheme()
    with collector(Actor(), worker_idx=0, weight_recv_schemes={"policy": scheme}) as c:
        c.receive_weights()
        assert shown(c) == [-1.0]


class Scheme:
    """A scheme of one's own: what it brings is in ``mail``."""

    def __init__(self) -> None:
        self.mail: list[float] = []
        self.events: list[str] = []
        self.initialized_on_receiver = False

    def init_on_receiver(
        self, *, model_id: str, context: Any, worker_idx: int | None
    ) -> None:
        self.initialized_on_receiver = True
        self.context = context
        self.events.append(f"init {model_id} {worker_idx}")

    def connect(self, *, worker_idx: int | None) -> None:
        self.events.append("connect")
        self.context.model.weight.data.fill_(1.0)

    def receive(self) -> None:
        for value in self.mail:
            self.context.update_policy_weights_(Actor(value))
        self.mail.clear()

    def shutdown(self) -> None:
        self.events.append("shutdown")


def test_a_scheme_of_ones_own_works_on_a_copy():
    scheme, policy = Scheme(), Actor()
    with collector(policy, worker_idx=4) as c:
        c.register_scheme_receiver({"policy": scheme}, synchronize_weights=False)
        scheme.context.model.weight.data.fill_(7.0)
        assert shown(c) == [-1.0]
        scheme.mail = [2.0, 3.0]
        c.receive_weights()
        assert shown(c) == [3.0]
        assert c.policy_version == 2
        other = Scheme()
        c.register_scheme_receiver({"policy": other})
        assert shown(c) == [1.0]
    assert scheme.events == ["init policy 4", "shutdown"]
    assert other.events == ["init policy 4", "connect", "shutdown"]


def test_what_is_no_scheme_is_refused():
    with collector(Actor()) as c:
        with pytest.raises(BadOption, match="has no init_on_receiver"):
            c.register_scheme_receiver({"policy": object()})
        with pytest.raises(BadOption, match="is not known here"):
            c.register_scheme_receiver({"nothing": Scheme()})
        with pytest.raises(BadWeights, match="has no weights to receive"):
            c.register_scheme_receiver({"policy.training": Scheme()})
        assert c._receiver_schemes == {}
