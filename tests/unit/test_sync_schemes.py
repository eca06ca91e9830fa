"""Weight sync schemes without a collector: a sender, and receivers in this process and in others."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muster
from muster import Collector, weights
from muster.errors import BadOption, BadWeights, CollectorClosed, CollectorTimeout
from muster.testing import CountingEnv
from muster.weights import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoSync,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemory,
    SharedMemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from muster.weights.choice import one_transport, transport_for
from tests.fakes.ray_cluster import cluster, needs_ray
from tests.tools import counting
from tests.waits import open_files, wait_until

PATIENCE = 60.0
OF_NODES = [DistributedWeightSyncScheme, RPCWeightSyncScheme, RayWeightSyncScheme]


def layer(value: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    nn.init.constant_(made.bias, value)
    return made


def shown(model: nn.Module) -> list[float]:
    values: list[float] = (
        torch.cat([tensor.detach().flatten() for tensor in model.parameters()])
        .unique()
        .tolist()
    )
    return values


class Ends:
    """A sender, and receivers that are made from its pickle."""

    def __init__(self, cls: type[WeightSyncScheme], **options: Any) -> None:
        self.cls, self.options, self.all = cls, options, list[WeightSyncScheme]()

    def sender(
        self,
        value: float = 0.0,
        workers: int = 2,
        connected: bool = True,
        **options: Any,
    ) -> WeightSyncScheme:
        made = self.cls(**{"sync": False, **self.options, **options})
        self.all.append(made)
        made.init_on_sender(model=layer(value), num_workers=workers)
        if connected:
            made.connect()
        return made

    def receiver(
        self, sender: WeightSyncScheme, worker: int = 0
    ) -> tuple[WeightSyncScheme, nn.Linear]:
        made, model = pickle.loads(pickle.dumps(sender)), layer(-1.0)
        self.all.append(made)
        made.init_on_receiver(model=model, worker_idx=worker)
        made.connect()
        return made, model


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(SharedMemoryWeightSyncScheme)
    yield made
    for scheme in made.all:
        scheme.shutdown()
        scheme.shutdown()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin; gives what ends the thread and gives the result, or raises what was raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 (raised by the test)
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return result


# --- what arrives ---------------------------------------------------------------------------------


def test_a_receiver_gets_the_first_weights_and_then_what_is_newest(ends):
    sender = ends.sender(1.0)
    receiver, model = ends.receiver(sender)
    assert (shown(model), receiver.version, sender.version) == ([1.0], 0, 0)
    assert receiver.receive() is None
    for value in (2.0, 3.0):
        sender.send(layer(value))
    taken = receiver.receive()
    assert (shown(model), receiver.version, sender.version) == ([3.0], 2, 2)
    assert taken is not None
    assert taken["weight"].unique().tolist() == [3.0]
    assert receiver.receive() is None


@pytest.mark.parametrize(
    "form",
    [dict, lambda state: __import__("tensordict").TensorDict(state)],
    ids=["dict", "td"],
)
def test_weights_without_a_module(ends, form):
    scheme = ends.cls(sync=False)
    ends.all.append(scheme)
    scheme.init_on_sender(
        weights=form(layer(1.0).state_dict()), devices=[torch.device("cpu")]
    )
    scheme.connect(weights=form(layer(2.0).state_dict()))
    receiver, model = ends.receiver(scheme)
    assert (shown(model), receiver.version) == ([2.0], 1)
    scheme.send(form(layer(3.0).state_dict()))
    assert receiver.receive() is not None
    assert shown(model) == [3.0]
    with pytest.raises(BadOption, match="give weights"):
        scheme.send()


def nested(value: float) -> dict[str, Any]:
    return {"0": layer(value).state_dict()}


def test_weights_as_nested_dicts(ends):
    scheme = ends.cls(sync=False)
    ends.all.append(scheme)
    scheme.init_on_sender(weights=nested(1.0), num_workers=1)
    scheme.connect(weights=nested(2.0))
    receiver, model = pickle.loads(pickle.dumps(scheme)), nested(-1.0)
    ends.all.append(receiver)
    receiver.init_on_receiver(model=model, worker_idx=0)
    receiver.connect()
    assert model["0"]["weight"].unique().tolist() == [2.0]
    scheme.send({0: nested(3.0)})
    assert receiver.receive() is not None
    assert model["0"]["weight"].unique().tolist() == [3.0]
    receiver.apply_weights(nested(4.0))
    assert model["0"]["bias"].unique().tolist() == [4.0]


def test_weights_of_each_receiver(ends):
    """``params_map``, a dict by number of the receiver, and a context whose workers make the
    policy.
    """
    scheme = ends.cls(sync=False, per_worker_weights=True)
    ends.all.append(scheme)
    own = {0: layer(1.0), 1: layer(2.0)}
    scheme.init_on_sender(params_map=own)
    scheme.connect()
    receivers = [ends.receiver(scheme, worker) for worker in own]
    assert [shown(model) for _, model in receivers] == [[1.0], [2.0]]
    scheme.send({1: layer(3.0)})
    assert [receiver.receive() is None for receiver, _ in receivers] == [True, False]
    own[0].bias.data.fill_(1.0).sub_(1.0)
    scheme.send()
    assert [receiver.receive() is None for receiver, _ in receivers] == [False, False]
    assert [shown(model) for _, model in receivers] == [[0.0, 1.0], [2.0]]
    for factories, first in (
        ([lambda: layer(4.0)] * 2, [4.0]),
        ([lambda: layer(4.0), lambda: layer(5.0)], [5.0]),
    ):
        other = ends.cls(sync=False)
        ends.all.append(other)
        other.init_on_sender(
            context=types.SimpleNamespace(
                policy_factory=factories, policy=None, num_workers=2
            )
        )
        other.connect()
        assert shown(ends.receiver(other, 1)[1]) == first


def test_without_weights_the_models_are_sent(ends):
    model = layer(0.0)
    scheme = ends.cls(sync=False)
    ends.all.append(scheme)
    scheme.init_on_sender(
        context=types.SimpleNamespace(get_model={"critic": model}.get, num_workers=1),
        model_id="critic",
    )
    scheme.connect()
    nn.init.constant_(model.weight, 7.0)
    nn.init.constant_(model.bias, 7.0)
    scheme.send()
    receiver, here = ends.receiver(scheme)
    assert (shown(here), receiver.version) == ([7.0], 1)


def test_tied_weights(ends):
    def tied(value: float) -> nn.Sequential:
        one, two = layer(value), layer(value)
        two.weight = one.weight
        return nn.Sequential(one, two)

    scheme, model = ends.cls(sync=False), tied(0.0)
    ends.all.append(scheme)
    scheme.init_on_sender(
        weights=__import__("tensordict").TensorDict.from_module(tied(5.0)),
        num_workers=1,
    )
    scheme.connect()
    receiver = copy.copy(scheme)
    ends.all.append(receiver)
    receiver.init_on_receiver(model=model, worker_idx=0)
    receiver.connect()
    assert shown(model) == [5.0]


def test_weights_for_some_receivers(ends):
    sender = ends.sender(1.0)
    (one, first), (two, second) = (ends.receiver(sender, worker) for worker in (0, 1))
    sender.send(layer(2.0), worker_ids=1)
    assert (one.receive(), two.receive() is None) == (None, False)
    sender.send(layer(3.0), worker_ids=[0])
    assert (one.receive() is None, two.receive()) == (False, None)
    assert (shown(first), one.version, shown(second), two.version) == (
        [3.0],
        2,
        [2.0],
        1,
    )


def test_a_successor_takes_the_place_of_a_receiver_and_gets_what_is_newest(ends):
    sender = ends.sender(1.0)
    ends.receiver(sender)
    sender.send(layer(2.0))
    receiver, model = ends.receiver(sender)
    assert shown(model) == [2.0]
    sender.send(layer(3.0))
    assert receiver.receive() is not None
    assert shown(model) == [3.0]


def test_a_receiver_waits_for_new_weights(ends):
    sender = ends.sender()
    receiver, model = ends.receiver(sender)
    started = time.monotonic()
    assert receiver.receive(timeout=0.05) is None
    assert time.monotonic() - started >= 0.05
    waiting = in_thread(lambda: receiver.receive(timeout=PATIENCE))
    sender.send(layer(4.0))
    assert waiting() is not None
    assert shown(model) == [4.0]


def test_many_unread_sends_are_no_burden(ends):
    sender = ends.sender()
    receiver, model = ends.receiver(sender)
    for value in range(2_000):  # more notes than a socket holds
        sender.send(layer(float(value)))
    assert receiver.receive() is not None
    assert (shown(model), receiver.version) == ([1999.0], 2000)
    sender.send(layer(-5.0))
    assert receiver.receive(PATIENCE) is not None
    assert shown(model) == [-5.0]


# --- who waits for whom ---------------------------------------------------------------------------


def test_a_synchronous_send_returns_when_the_weights_are_taken(ends):
    sender = ends.sender(sync=True, workers=3)
    (one, first), (two, second) = (
        ends.receiver(sender, worker) for worker in (0, 1)
    )  # the third is not there
    for value in (1.0, 2.0):
        taking = [
            in_thread(lambda r=r: r.receive(timeout=PATIENCE)) for r in (one, two)
        ]
        sender.send(layer(value))
        assert (shown(first), shown(second)) == ([value], [value])
        assert all(result() is not None for result in taking)


def test_a_synchronous_send_does_not_wait_for_ever(ends):
    sender = ends.sender(sync=True, deadline_s=0.2)
    one, _ = ends.receiver(sender)
    late, model = ends.receiver(sender, 1)
    taking = in_thread(lambda: one.receive(timeout=PATIENCE))
    with pytest.raises(
        CollectorTimeout,
        match=r"workers \[1\] have not taken their weights within 0.2 s.*sync=False",
    ):
        sender.send(layer(1.0))
    taking()
    assert (sender.version, late.receive() is None, shown(model), late.version) == (
        1,
        False,
        [1.0],
        1,
    )
    taking = in_thread(lambda: late.receive(timeout=PATIENCE))
    sender.send(layer(2.0), worker_ids=1)
    taking()
    assert (shown(model), late.version) == ([2.0], 2)


def test_nobody_waits_for_a_receiver_that_is_gone(ends):
    sender = ends.sender(sync=True, deadline_s=PATIENCE)
    receiver, model = ends.receiver(sender)
    receiver.shutdown()
    sender.send(layer(1.0))
    assert shown(model) == [0.0]
    with pytest.raises(BadOption, match="for receivers"):
        receiver.receive()


def test_a_receiver_may_come_before_its_sender_serves(ends):
    sender = ends.sender(1.0, connected=False)
    coming = in_thread(lambda: ends.receiver(sender))
    sender.connect()
    assert shown(coming()[1]) == [1.0]
    never = ends.sender(connected=False, deadline_s=0.1)
    with pytest.raises(
        CollectorTimeout,
        match=r"worker 0 came within 0.1 s: the sender has to call connect",
    ):
        ends.receiver(never)


def test_when_the_sender_is_gone_its_receivers_keep_what_they_have(ends):
    sender = ends.sender(1.0)
    receiver, model = ends.receiver(sender)
    sender.send(layer(2.0))
    sender.shutdown()
    assert receiver.receive(timeout=PATIENCE) is not None, "it was there before the end"
    assert (shown(model), receiver.receive()) == ([2.0], None)
    with pytest.raises(CollectorClosed, match="sender of 'policy' is gone"):
        receiver.receive(timeout=PATIENCE)
    with pytest.raises(CollectorClosed, match="no process sends weights to worker 1"):
        ends.receiver(sender, 1)
    with pytest.raises(CollectorClosed, match="shut down"):
        sender.send(layer(3.0))


def test_a_stranger_who_says_nothing_is_not_waited_for_long(ends):
    sender = ends.sender(1.0, deadline_s=0.2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(sender._sender.path)
        waiting = pickle.loads(pickle.dumps(sender))
        waiting.deadline_s = PATIENCE
        _, model = ends.receiver(waiting)
        assert shown(model) == [1.0]


# --- other processes ------------------------------------------------------------------------------


def act(scheme: WeightSyncScheme, worker: int, pipe: Any) -> None:
    """A worker: says what it has whenever it is asked, until nobody asks any more."""
    torch.set_num_threads(1)
    model = layer(-1.0)
    scheme.init_on_receiver(model=model, worker_idx=worker)
    scheme.connect()
    pipe.send((shown(model), scheme.version))
    while pipe.poll(PATIENCE):
        timeout = pipe.recv()
        if timeout is None:
            break
        scheme.receive(timeout=timeout)
        pipe.send((shown(model), scheme.version))
    scheme.shutdown()


class Worker:
    """A process that acts."""

    def __init__(self, scheme: WeightSyncScheme, worker: int, method: str) -> None:
        context = multiprocessing.get_context(method)
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=act, args=(scheme, worker, there))
        self.process.start()
        there.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE)
        return self.pipe.recv()

    def ask(self, timeout: float) -> Any:
        self.pipe.send(timeout)
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self.pipe.send(None)
        self.process.join(PATIENCE)
        self.pipe.close()
        assert self.process.exitcode is not None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"]
)
def test_workers_in_other_processes(ends, method):
    sender = ends.sender(1.0, sync=True, deadline_s=PATIENCE)
    one, two = (Worker(sender, worker, method) for worker in (0, 1))
    assert (one.hear(), two.hear()) == (([1.0], 0), ([1.0], 0))
    for worker in (one, two):
        worker.pipe.send(PATIENCE)
    sender.send(layer(2.0))  # returns when both have it
    assert (one.hear(), two.hear()) == (([2.0], 1), ([2.0], 1))
    os.kill(one.process.pid, signal.SIGKILL)
    one.end()
    two.pipe.send(PATIENCE)
    sender.send(layer(3.0))
    assert two.hear() == ([3.0], 2)
    two.end()
    successor = Worker(sender, 0, method)
    assert successor.hear() == ([3.0], 2), (
        "a fork has not taken its parent's folder along"
    )
    successor.end()


def train(cls: type[WeightSyncScheme], pipe: Any) -> None:
    """A sender in a process of its own, which is killed after one publish."""
    scheme = cls(sync=False)
    scheme.init_on_sender(model=layer(1.0), num_workers=1)
    scheme.connect()
    pipe.send(pickle.dumps(scheme))
    assert pipe.recv() == "publish"
    scheme.send(layer(2.0))
    pipe.send("published")
    pipe.poll(PATIENCE)


def test_a_sender_that_is_killed(ends):
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=train, args=(ends.cls, there))
    process.start()
    assert pipe.poll(PATIENCE)
    sender = pickle.loads(pipe.recv())
    receiver, model = ends.receiver(sender)
    pipe.send("publish")
    assert pipe.poll(PATIENCE)
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    assert receiver.receive() is not None
    assert shown(model) == [2.0]
    with pytest.raises(CollectorClosed):
        receiver.receive(timeout=PATIENCE)
    with pytest.raises(CollectorClosed):
        ends.receiver(sender)


# --- what is left ---------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False], ids=["shutdown", "forgotten"])
def test_nothing_is_left_behind(closed, ends):
    Ends(ends.cls).sender().shutdown()  # what is made once
    gc.collect()
    before, threads = open_files(), threading.active_count()
    own = Ends(ends.cls)
    sender = own.sender()
    folder = Path(sender._sender.path).parent
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    receiver, _ = own.receiver(sender)
    own.all.clear()
    if closed:
        sender.shutdown()
        receiver.shutdown()
    serving = [
        thread for thread in threading.enumerate() if thread.name == "muster-weights"
    ]
    del sender, receiver
    gc.collect()
    for thread in serving:
        thread.join(PATIENCE)
    gc.collect()
    assert not folder.exists()
    wait_until(lambda: threading.active_count() <= threads and open_files() <= before)


# --- collectors -----------------------------------------------------------------------------------


class Actor(nn.Module):
    """Acts 1 where the time step is at least its weight, and shows the weight."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, obs: torch.Tensor) -> Any:
        weight = self.weight.expand(obs.shape[:-1])
        return (obs[..., 1] >= weight).long(), {"weight": weight}


def pair(
    ends: Ends, model: nn.Module, model_id: str = "policy"
) -> tuple[WeightSyncScheme, WeightSyncScheme]:
    sender = ends.cls(deadline_s=PATIENCE)
    sender.init_on_sender(model=model, model_id=model_id, num_workers=1)
    sender.connect()
    ends.all.append(sender)
    return sender, copy.copy(sender)


def test_a_collector_takes_what_its_parent_sends(ends):
    sender, receiver = pair(ends, Actor(1.0))
    options: Any = {
        "worker_idx": 0,
        "weight_recv_schemes": {"policy": receiver},
        "track_policy_version": True,
    }
    with Collector(counting(3), Actor(-1.0), frames_per_batch=4, **options) as c:
        assert c.rollout()["weight"].unique().tolist() == [1.0]
        first = c.policy_version
        for value in (2.0, 3.0):
            sender.send(Actor(value))  # waits until the collector has it
            batch = c.rollout()
            assert batch["weight"].unique().tolist() == [value]
        assert batch["collector", "policy_version"].unique().tolist() == [first + 2]
        c.receive_weights()
        assert c.policy_version == first + 2, "there was nothing new"
    sender.send(Actor(4.0))  # nobody is there any more


def test_weights_change_between_rollouts_only(ends):
    sender, receiver = pair(ends, Actor(1.0))
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(CountingEnv):
        def step(self, action: int) -> Any:
            if self.executed == 1:
                reached.set()
                assert go_on.wait(PATIENCE)
            return super().step(action)

    options: Any = {"worker_idx": 0, "weight_recv_schemes": {"policy": receiver}}
    with Collector(Waiting, Actor(-1.0), frames_per_batch=4, **options) as c:
        collecting = in_thread(c.rollout)
        assert reached.wait(PATIENCE)
        sender.send(Actor(2.0))
        go_on.set()
        assert collecting()["weight"].unique().tolist() == [1.0]
        assert c.rollout()["weight"].unique().tolist() == [2.0]


def test_weights_that_do_not_fit_are_told_of_and_the_next_are_taken(ends):
    sender, receiver = pair(ends, Actor(1.0))
    with Collector(counting(3), Actor(), frames_per_batch=4, worker_idx=0) as c:
        c.register_scheme_receiver({"policy": receiver})
        refused = [True]
        publish = c._weights.publish

        def picky(*args: Any, **named: Any) -> Any:
            if refused.pop():
                raise BadWeights("not these")
            return publish(*args, **named)

        c._weights.publish = picky  # type: ignore[method-assign]
        with pytest.warns(
            RuntimeWarning,
            match="weights for 'policy' came and were not taken: not these",
        ):
            sender.send(Actor(2.0))
        refused.append(False)
        sender.send(Actor(3.0))
        assert c.rollout()["weight"].unique().tolist() == [3.0]


def test_a_collector_that_is_forgotten_is_not_kept_by_its_scheme(ends):
    sender, receiver = pair(ends, Actor(1.0))
    c = Collector(
        counting(3),
        Actor(),
        frames_per_batch=4,
        worker_idx=0,
        weight_recv_schemes={"policy": receiver},
    )
    gone: list[bool] = []
    __import__("weakref").finalize(c, gone.append, True)
    del c
    # its receiver's thread has a reference while it looks for weights
    wait_until(lambda: gc.collect() >= 0 and gone)
    sender.send(Actor(2.0))  # nobody is waited for
    following = receiver._following
    receiver.shutdown()
    following.join(PATIENCE)
    assert not following.is_alive()


# --- which transport is meant ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SharedMemoryWeightSyncScheme(), SharedMemory()),
        (SharedMemWeightSyncScheme(), SharedMemory()),
        (MultiProcessWeightSyncScheme(), SharedMemory()),
        (NoWeightSyncScheme(), NoSync()),
    ],
    ids=repr,
)
def test_what_a_scheme_means_to_a_collector_with_workers(given, expected):
    assert transport_for(given) == expected


@pytest.mark.parametrize("cls", OF_NODES)
def test_schemes_for_nodes_name_their_collector(cls):
    with pytest.raises(
        BadOption,
        match=f"{cls.__name__} is for {cls.collector}, whose workers are on other machines",
    ):
        transport_for(cls())
    for method in ("init_on_sender", "init_on_receiver"):
        with pytest.raises(
            BadOption,
            match=rf"{cls.__name__} is an option of {cls.collector}.*'policy': {cls.__name__}",
        ):
            getattr(cls(), method)(model=layer(0.0), num_workers=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"policy": "none"}, "none"),
        ({"policy": "shared", "critic": SharedMemoryWeightSyncScheme()}, "shared"),
        ({"policy": "none", "critic": NoSync()}, "none"),
    ],
    ids=str,
)
def test_one_way_for_all_models(given, expected):
    assert one_transport(given) == expected


def test_two_ways_are_refused():
    with pytest.raises(
        BadOption,
        match="'policy' has 'shared' and 'critic' has 'none', but .* together",
    ):
        one_transport({"policy": "shared", "critic": "none"})
    with pytest.raises(BadOption, match="published together"):
        one_transport({"a": RayWeightSyncScheme(), "b": DistributedWeightSyncScheme()})
    assert (
        one_transport(
            {"a": (given := RayWeightSyncScheme()), "b": RayWeightSyncScheme()}
        )
        is given
    )
    with pytest.raises(BadOption, match="expected a dict"):
        one_transport("shared")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "cls"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemoryWeightSyncScheme),
        ("thread", SharedMemoryWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
        ("distributed", DistributedWeightSyncScheme),
        ("rpc", RPCWeightSyncScheme),
        ("ray", RayWeightSyncScheme),
    ],
)
def test_schemes_by_backend(backend, cls):
    made = WeightSyncScheme.from_backend(backend, sync=False)
    assert (type(made), made.sync) == (cls, False)


def test_no_scheme_sends_nothing():
    scheme, model = NoWeightSyncScheme(), layer(1.0)
    assert (scheme.initialized_on_sender, scheme.initialized_on_receiver) == (
        False,
        False,
    )
    scheme.init_on_sender(model=layer(2.0), num_workers=3)
    receiver = copy.copy(scheme)
    scheme.connect()
    receiver.init_on_receiver(model=model, worker_idx=1)
    receiver.connect(worker_idx=1)
    scheme.send(layer(3.0))
    assert receiver.receive(timeout=PATIENCE) is None
    assert shown(model) == [1.0]
    assert (
        scheme.initialized_on_sender,
        scheme.synchronized_on_sender,
        receiver.synchronized_on_receiver,
    ) == (True,) * 3
    scheme.shutdown()
    with Collector(counting(3), Actor(5.0), frames_per_batch=4, worker_idx=0) as c:
        c.register_scheme_receiver({"policy": NoWeightSyncScheme()})
        assert c.rollout()["weight"].unique().tolist() == [5.0]


# --- mistakes -------------------------------------------------------------------------------------


def made(**options: Any) -> WeightSyncScheme:
    scheme = SharedMemoryWeightSyncScheme(sync=False)
    scheme.init_on_sender(**{"model": layer(0.0), "num_workers": 2, **options})
    scheme.connect()
    return scheme


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda: WeightSyncScheme.from_backend("fax"),
            "backend='fax': expected one of shared, process, none",
        ),
        (
            lambda: SharedMemoryWeightSyncScheme("pickle"),
            "strategy='pickle': expected 'tensordict' or 'state_dict'",
        ),
        (
            lambda: WeightSyncScheme().init_on_sender(model=layer(0.0)),
            "take a subclass",
        ),
        (
            lambda: SharedMemoryWeightSyncScheme().init_on_sender(num_workers=1),
            "needs the first weights",
        ),
        (lambda: made(weights={}), "one only"),
        (
            lambda: made(num_workers=0),
            "num_workers=0.*expected the number of receivers",
        ),
        (lambda: made(devices=["cpu"]), "num_workers=2, devices=.*once"),
        (lambda: made().init_on_sender(model=layer(0.0)), "initialized already"),
        (
            lambda: SharedMemoryWeightSyncScheme().send(),
            "for senders: call init_on_sender",
        ),
        (
            lambda: SharedMemoryWeightSyncScheme().receive(),
            "for receivers: call init_on_receiver",
        ),
        (
            lambda: SharedMemoryWeightSyncScheme().connect(),
            "comes after init_on_sender",
        ),
        (lambda: SharedMemoryWeightSyncScheme().apply_weights({}), "of a receiver"),
        (
            lambda: SharedMemoryWeightSyncScheme().init_on_receiver(model=layer(0.0)),
            "there is no sender for",
        ),
        (
            lambda: made().init_on_receiver(model=layer(0.0)),
            "this object is the sender: give the receiver a copy",
        ),
        (
            lambda: copy.copy(made()).init_on_receiver(worker_idx=0),
            "give a model or a context",
        ),
        (lambda: made().send(worker_ids=2), "there is no worker 2"),
        (lambda: received(made(), None), "with a worker_idx"),
        (
            lambda: received(kept(), 2),
            "there is no worker 2: workers are numbered 0 to 1",
        ),
        (lambda: received(kept(), -1), "there is no worker -1"),
    ],
)
def test_mistakes(mistake, message):
    with pytest.raises(BadOption, match=message):
        mistake()


KEPT: list[WeightSyncScheme] = []


def kept() -> WeightSyncScheme:
    """A sender that is there as long as it is asked; a bare ``made()`` is gone when its copy is
    made.
    """
    KEPT[:] = [made()]
    return KEPT[0]


def received(sender: WeightSyncScheme, worker: int | None) -> None:
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=layer(0.0), worker_idx=worker)
    receiver.connect()


def test_weights_that_do_not_fit_change_nothing(ends):
    sender = ends.sender(1.0)
    receiver, model = ends.receiver(sender)
    for wrong in (nn.Linear(2, 3), nn.Linear(2, 2, bias=False), layer(float("nan"))):
        with pytest.raises(BadWeights):
            sender.send(wrong)
    assert (sender.version, receiver.receive(), shown(model)) == (0, None, [1.0])
    other = copy.copy(sender)
    other.init_on_receiver(model=nn.Linear(3, 2), worker_idx=1)
    with pytest.raises(BadWeights, match="weight has shape"):
        other.connect()
    sender.send(layer(2.0))
    assert receiver.receive() is not None
    receiver.apply_weights(layer(9.0).state_dict())
    assert shown(model) == [9.0]
    with pytest.raises(BadWeights):
        receiver.apply_weights({"weight": torch.zeros(2, 2)})
    with pytest.raises(BadWeights, match="not finite"):
        receiver.apply_weights(layer(float("inf")))
    assert shown(model) == [9.0]


# --- names ----------------------------------------------------------------------------------------


def test_everything_has_its_names():
    assert (
        set(dir(muster.weights)) >= {"WeightSyncScheme"}
        or weights.WeightSyncScheme is WeightSyncScheme
    )
    assert SharedMemWeightSyncScheme is SharedMemoryWeightSyncScheme
    for name in set(weights.__all__) - {"RayWeightUpdater"}:
        assert getattr(weights, name) is not None
    with pytest.raises(AttributeError, match="Fax"):
        _ = weights.Fax


def test_torchrls_names_are_there():
    theirs = pytest.importorskip("torchrl.weight_update")
    ours = pytest.importorskip("muster.compat.torchrl.weight_update")
    for name in ours.__all__:
        assert hasattr(theirs, name), name
        wanted = (
            "init_on_sender",
            "init_on_receiver",
            "connect",
            "send",
            "receive",
            "apply_weights",
            "shutdown",
        )
        for method in (*wanted, "from_backend"):
            assert hasattr(getattr(theirs, name), method)
            assert callable(getattr(getattr(ours, name), method))
        made = getattr(ours, name)
        assert name == "WeightSyncScheme" or issubclass(made, ours.WeightSyncScheme)


@needs_ray
@pytest.mark.filterwarnings(
    "ignore:RayWeightUpdater is a WeightUpdaterBase:DeprecationWarning"
)
@pytest.mark.slow
def test_the_old_updater_for_collectors_in_ray_actors():
    cluster()
    import ray

    from muster.weights import RayWeightUpdater

    class Remote:
        def __init__(self) -> None:
            self.collector = Collector(counting(3), Actor(0.0), frames_per_batch=4)

        def update_policy_weights_(self, weights: Any) -> None:
            self.collector.update_policy_weights_(weights)

        def shown(self) -> list[float]:
            return self.collector.rollout()["weight"].unique().tolist()  # type: ignore[no-any-return]

    actors = [ray.remote(Remote).remote() for _ in range(2)]
    updater = RayWeightUpdater(Actor(1.0), actors, max_interval=1)

    def seen() -> list[Any]:
        found: list[Any] = ray.get(
            [actor.shown.remote() for actor in actors], timeout=PATIENCE
        )
        return found

    updater.push_weights()
    assert seen() == [[0.0], [0.0]], "the first push passes them by"
    updater.push_weights()
    assert seen() == [[1.0], [1.0]]
    updater.push_weights(Actor(2.0), worker_ids=1)
    updater.push_weights(Actor(3.0), worker_ids=1)
    assert seen() == [[1.0], [3.0]]
    updater.max_interval = 0
    updater.push_weights(nn.Linear(2, 2))
    seen()
    with pytest.raises(Exception, match="BadWeights"):
        updater.push_weights(Actor(4.0))
    for actor in actors:
        ray.kill(actor)
