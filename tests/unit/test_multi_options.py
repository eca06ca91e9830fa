"""The options of collectors with workers: values, contradictions, and what cannot go to a worker."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from torch import nn

from muster import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    Restart,
)
from muster.collectors.multi import count_workers
from muster.collectors.multi_options import MultiOptions
from muster.errors import BadOption, UnknownOption
from muster.testing import CountingEnv
from tests.fakes.actors import Actor
from tests.tools import counting, recorded

BOTH = [MultiSyncCollector, MultiAsyncCollector]


def options(**keywords: Any) -> MultiOptions:
    return MultiOptions(None, **{"frames_per_batch": 4, **keywords})


# --- values ---------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_seed():
    made = options()
    assert (made.cat_results, made.update_at_each_batch, made.preemptive_threshold) == (
        "stack",
        False,
        1.0,
    )
    assert (made.num_threads, made.num_sub_threads) == (None, 1)
    assert (made.on_failure, made.backend, made.num_workers, made.max_policy_lag) == (
        "raise",
        "processes",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_workers": 0}, "num_workers=0: expected an integer of at least 1"),
        ({"num_workers": 1.5}, "num_workers=1.5"),
        ({"num_sub_threads": 0}, "num_sub_threads=0"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"max_policy_lag": -1}, "max_policy_lag=-1"),
        ({"max_policy_lag": True}, "max_policy_lag=True"),
        ({"backend": "ray"}, "backend='ray': expected one of 'processes', 'threads'"),
        (
            {"on_failure": "ignore"},
            "on_failure='ignore': expected one of 'raise', 'restart', 'drop'",
        ),
        (
            {"start_method": "fork"},
            "start_method='fork': expected one of 'forkserver', 'spawn'",
        ),
        ({"cat_results": "join"}, "cat_results='join': expected one of 'stack', 'cat'"),
        ({"cat_results": True}, "cat_results=True"),
        ({"cat_results": None}, "cat_results=None"),
        (
            {"preemptive_threshold": 1.5},
            "preemptive_threshold=1.5: expected a share of the workers, from 0 to 1",
        ),
        ({"preemptive_threshold": -0.1}, "preemptive_threshold=-0.1"),
        ({"preemptive_threshold": "half"}, "preemptive_threshold='half'"),
        ({"preemptive_threshold": float("nan")}, "preemptive_threshold=nan"),
        ({"timeouts": 3}, "timeouts=3: expected a dict of seconds by phase"),
        (
            {"timeouts": {"sleep": 3}},
            "there is no phase 'sleep'; expected some of construct, reset, step",
        ),
        (
            {"timeouts": {"step": 0}},
            r"timeouts\['step'\]=0: expected seconds, more than 0, or None",
        ),
        ({"timeouts": {"step": "long"}}, r"timeouts\['step'\]='long'"),
        ({"update_at_each_batch": 1}, "update_at_each_batch=1: expected True or False"),
        ({"preemptive_treshold": 1.0}, "did you mean 'preemptive_threshold'"),
    ],
)
@pytest.mark.parametrize("cls", BOTH)
def test_impossible_values_are_refused_before_anything_is_made(cls, wrong, message):
    factory, made = recorded(counting())
    with pytest.raises(BadOption, match=message):
        cls([factory], None, frames_per_batch=4, **wrong)
    assert made == []


@pytest.mark.parametrize(
    "wrong", [{"max_restarts": -1}, {"max_restarts": 1.5}, {"max_restarts": True}]
)
def test_impossible_numbers_of_restarts_are_refused(wrong):
    with pytest.raises(
        BadOption, match="max_restarts=.*: expected an integer of at least 0"
    ):
        Restart(**wrong)


def test_options_of_workers_are_unknown_to_a_collector_without():
    with pytest.raises(UnknownOption, match="num_workers"):
        Collector(CountingEnv, None, frames_per_batch=4, num_workers=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("threshold", "groups", "enough"),
    [
        (None, 4, None),
        (1, 4, None),
        (1.0, 3, None),
        (0.5, 4, 2),
        (0.74, 4, 2),
        (0.75, 4, 3),
        (0.0, 4, 1),
        (0.1, 4, 1),
    ],
)
def test_how_many_groups_are_enough(threshold, groups, enough):
    assert options(preemptive_threshold=threshold).enough(groups) == enough


@pytest.mark.parametrize(
    ("value", "dim"), [("stack", None), ("cat", 0), (0, 0), (1, 1), (-1, -1)]
)
def test_the_dimension_to_concatenate(value, dim):
    assert options(cat_results=value).cat_dim == dim


def test_no_deadline_is_possible():
    assert options(timeouts={"step": None, "close": 1}).timeouts == {
        "step": None,
        "close": 1,
    }


# --- contradictions -------------------------------------------------------------------------------


class Buffer(list):  # type: ignore[type-arg]
    def extend(self, batch: Any) -> None: ...
    def add(self, step: Any) -> None: ...


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (
            MultiSyncCollector,
            {"max_policy_lag": 1},
            "max_policy_lag: here all .* the newest weights",
        ),
        (
            MultiSyncCollector,
            {"cat_results": "cat", "return_same_td": True},
            "return_same_td.*cat_results",
        ),
        (
            MultiAsyncCollector,
            {"cat_results": "cat"},
            "cat_results joins the rollouts of a batch",
        ),
        (
            MultiAsyncCollector,
            {"cat_results": 0},
            "cat_results joins the rollouts of a batch",
        ),
        (
            MultiAsyncCollector,
            {"preemptive_threshold": 0.5},
            "preemptive_threshold stops workers that are late",
        ),
        (MultiAsyncCollector, {"return_same_td": True}, "return_same_td"),
        (
            MultiAsyncCollector,
            {"replay_buffer": Buffer(), "extend_buffer": False},
            "extend_buffer=False",
        ),
        *(
            (
                cls,
                {"backend": "threads", "start_method": "spawn"},
                "start_method is about processes",
            )
            for cls in BOTH
        ),
        *(
            (
                cls,
                {"weight_sync_schemes": {"critic": "shared"}},
                "model_id='critic' is not known here",
            )
            for cls in BOTH
        ),
        *(
            (
                cls,
                {"weight_sync_schemes": {"policy": "fax"}},
                "'fax' is not a way to send weights",
            )
            for cls in BOTH
        ),
        *(
            (cls, {"set_truncated": True, "trajs_per_batch": 1}, "set_truncated")
            for cls in BOTH
        ),
    ],
)
def test_contradictions_are_refused_before_anything_is_made(cls, wrong, message):
    factory, made = recorded(counting())
    with pytest.raises(BadOption, match=message):
        cls([factory], nn.Linear(2, 2), frames_per_batch=4, **wrong)
    assert made == []


@pytest.mark.parametrize(
    ("env", "more"), [([CountingEnv] * 2, {}), (CountingEnv, {"num_workers": 2})]
)
def test_an_async_collector_has_one_worker(env, more):
    with pytest.raises(
        BadOption, match="AsyncCollector has one worker.*MultiAsyncCollector"
    ):
        AsyncCollector(env, None, frames_per_batch=4, **more)


# --- workers and their groups ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factories", "workers", "expected"),
    [
        (["a", "b", "c"], None, (["a", "b", "c"], 3)),
        (["a", "b", "c"], 2, (["a", "b", "c"], 2)),
        (["a", "b"], 5, (["a", "b"], 2)),
        ("a", None, (["a"], 1)),
        ("a", 3, (["a"] * 3, 3)),
        (("a",), 3, (["a"], 1)),
    ],
)
def test_how_many_workers_there_are(factories, workers, expected):
    assert count_workers(factories, workers) == expected


def test_groups_are_dealt_out_evenly_and_in_order():
    with MultiSyncCollector(
        [CountingEnv] * 5, None, num_workers=2, frames_per_batch=5, backend="threads"
    ) as c:
        assert [worker.env_ids for worker in c.stats().workers] == [(0, 1, 2), (3, 4)]


def test_one_function_makes_the_environments_of_all_workers():
    factory, made = recorded(counting())
    with MultiSyncCollector(
        factory, None, num_workers=3, frames_per_batch=12, backend="threads"
    ) as c:
        assert c.next().shape == (3, 4)
        assert len(made) == 3


def test_no_environments():
    with pytest.raises(BadOption, match="empty list"):
        MultiSyncCollector([], None, frames_per_batch=4)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_environments_that_are_made_already_are_refused(cls, backend):
    with pytest.raises(
        BadOption,
        match=r"create_env_fn\[1\] is an environment, which lives in this process",
    ):
        cls([CountingEnv, CountingEnv()], None, frames_per_batch=4, backend=backend)
    with pytest.raises(BadOption, match=r"create_env_fn\[0\] is an environment"):
        cls(gymnasium.make("CartPole-v1"), None, frames_per_batch=4, backend=backend)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        (
            r"create_env_fn\[1\]",
            {"env": [CountingEnv, partial(CountingEnv, threading.Lock())]},
        ),
        ("policy", {"policy": lambda obs, lock=threading.Lock(): torch.zeros(())}),  # noqa: B008
        ("policy_factory", {"policy_factory": lambda lock=threading.Lock(): None}),  # noqa: B008
        ("create_env_kwargs", {"create_env_kwargs": {"length": threading.Lock()}}),
    ],
)
def test_what_cannot_be_pickled_is_named(what, arguments):
    arguments = dict(arguments)
    env, policy = arguments.pop("env", [CountingEnv] * 2), arguments.pop("policy", None)
    with pytest.raises(
        BadOption, match=f"^{what}.*is a _thread.lock, which cannot be pickled"
    ):
        MultiSyncCollector(env, policy, frames_per_batch=4, **arguments)


def test_keywords_for_each_group():
    options = {"frames_per_batch": 8, "backend": "threads"}
    with MultiSyncCollector(
        [CountingEnv] * 2,
        None,
        create_env_kwargs=[{"length": 2}, {"length": 3}],
        **options,
    ) as c:
        assert c.getattr_env("length") == [2, 3]
    with MultiSyncCollector(
        [CountingEnv] * 2, None, create_env_kwargs={"length": 2}, **options
    ) as c:
        assert c.getattr_env("length") == [2, 2]
    with pytest.raises(BadOption, match="a list of 2 dicts"):
        MultiSyncCollector([CountingEnv] * 2, None, create_env_kwargs=[{}], **options)


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_a_factory_makes_the_policy_here_and_in_workers(backend):
    options = {"frames_per_batch": 8, "backend": backend, "track_policy_version": True}
    with MultiSyncCollector(
        [CountingEnv] * 2, policy_factory=partial(Actor, 2.0), **options
    ) as c:
        assert c.next()["weight"].unique().tolist() == [2.0]
        assert isinstance(c.policy, Actor)
        c.policy.weight.data.fill_(3.0)
        c.update_policy_weights_()
        batch = c.next()
        assert batch["weight"].unique().tolist() == [3.0]


def test_workers_are_told_how_many_threads_torch_has():
    before = torch.get_num_threads()
    options = {"frames_per_batch": 8, "num_sub_threads": 2, "num_threads": 3}
    with MultiSyncCollector([CountingEnv] * 2, Threads(), **options) as c:
        assert c.next()["threads"].unique().tolist() == [2]
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


class Threads(nn.Module):
    def forward(self, obs: torch.Tensor) -> Any:
        return torch.zeros(obs.shape[:-1], dtype=torch.int64), {
            "threads": torch.full(obs.shape[:-1], torch.get_num_threads())
        }
