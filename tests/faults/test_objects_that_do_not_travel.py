"""Objects of rows and results that a worker process cannot send, or its parent cannot read: a typed
error that names them, every step in the ledger, and the next call goes on.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from tensordict.nn import TensorDictModule

from muster import MultiAsyncCollector, MultiSyncCollector
from muster.compat.gymnasium import VectorEnv
from muster.errors import BadEnvOutput, BadOption, MusterError
from tests.fakes.node_runs import sync_nodes
from tests.fakes.travellers import (
    BAD,
    LENGTH,
    READER,
    EchoEnv,
    InfoEnv,
    Numbers,
    TravelEnv,
    Traveller,
    own_traveller,
    traveller_of,
    traveller_of_script,
)
from tests.tools import assert_accounted

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no worker processes")

T = 4
KINDS = [
    MultiSyncCollector,
    MultiAsyncCollector,
    pytest.param(sync_nodes, id="nodes"),
]


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READER, str(os.getpid()))


def collector(
    kind: Any,
    trouble: str,
    episodes: Any = (),
    cls: type[Traveller] = Traveller,
    **options: Any,
) -> Any:
    """Two environments, of which number 0 has such a trouble in these episodes."""
    envs = [partial(TravelEnv, 0, trouble, episodes, cls), partial(TravelEnv, 1)]
    policy = TensorDictModule(Numbers(), ["x"], ["action"])
    frames = T if kind is MultiAsyncCollector else 2 * T
    return kind(envs, policy, frames_per_batch=frames, seed=0, **options)


def collected(c: Any, calls: int) -> tuple[dict[int, list[int]], list[MusterError]]:
    """Return the numbers in the rows of all batches, by environment, and the errors."""
    found: dict[int, list[int]] = {0: [], 1: []}
    errors: list[MusterError] = []
    for _ in range(calls):
        try:
            batch = c.next()
        except MusterError as error:
            errors.append(error)
            continue
        for row in batch.reshape(-1):
            number, env = row["x"].tolist()
            assert row["who"].number == number
            found[int(env)].append(int(number))
    return found, errors


def is_stream(numbers: list[int]) -> bool:
    """Whether each observation follows the one before it, or begins an episode."""
    return all(b in (0, a + 1) for a, b in pairwise(numbers))


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}], ids=["", "compact"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_pickled_is_an_error_of_the_environment(
    kind: Any, options: Any
) -> None:
    """The error names it, and the rows before it are kept."""
    with collector(kind, "sending", {1}, **options) as c:
        found, (error,) = collected(c, 12)
        assert isinstance(error, BadEnvOutput)
        assert "who is a tests.fakes.travellers.Traveller, which cannot" in str(error)
        assert "it does not travel" in str(error)
        assert error.phase == "step"
        # the transition to the bad one is discarded
        assert found[0][: LENGTH + BAD] == [*range(LENGTH), *range(BAD - 1), 0]
        assert is_stream(found[1])
        assert_accounted(c)


def classes(monkeypatch: pytest.MonkeyPatch) -> list[type[Traveller]]:
    """Classes that a worker cannot import, and knows from the environment."""
    return [own_traveller(), traveller_of_script(monkeypatch)]


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}], ids=["", "compact"])
@pytest.mark.parametrize("of", [0, 1], ids=["function", "script"])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_a_class_of_the_program_come_back_as_they_are(
    kind: Any, of: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = classes(monkeypatch)[of]
    with collector(kind, "", cls=cls, **options) as c:
        kinds = set()
        for _ in range(6):
            kinds |= {type(row["who"]) for row in c.next().reshape(-1)}
            if options:
                kinds |= {type(row["who"]) for row in c.final_observations()}
        assert kinds == {cls, Traveller}
        assert {type(each) for each in c.map_envs(lambda env: cls(0, ""))} == {cls}
        assert_accounted(c)


@pytest.mark.parametrize("mode", ["raise", "restart"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_read_here_ends_its_worker(
    kind: Any, mode: str
) -> None:
    """Its rollout cannot be used. The next worker comes to such an object again."""
    with collector(kind, "reading", {1}, on_failure=mode) as c:
        found, errors = collected(c, 8)
        for error in errors:
            assert "ValueError: it cannot be made here" in str(error)
        assert bool(errors) == (mode == "raise")
        assert found[0][: LENGTH + 1] == [*range(LENGTH), 0]
        assert BAD not in found[0][LENGTH : LENGTH + BAD + 1]
        assert is_stream(found[1])
        if kind is not sync_nodes:  # what a lost node has done is not known exactly
            assert c.stats().discarded["worker_died"] >= T
        assert_accounted(c)


@pytest.mark.parametrize("trouble", ["sending", "reading", "everywhere"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_does_not_travel_costs_no_worker(kind: Any, trouble: str) -> None:
    with collector(kind, "") as c:
        c.next()
        pids = [worker.pid for worker in c.stats().workers]
        with pytest.raises(BadOption, match="a result") as raised:
            c.map_envs(traveller_of, trouble)
        assert "ValueError" in str(raised.value) or "RuntimeError" in str(raised.value)
        assert [each.number for each in c.map_envs(traveller_of, "")] == [3, 3]
        c.next()
        assert [worker.pid for worker in c.stats().workers] == pids
        assert_accounted(c)


@pytest.mark.parametrize("of", [0, 1], ids=["function", "script"])
def test_a_vector_environment_exchanges_objects_of_a_class_of_the_program(
    of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = classes(monkeypatch)[of]
    make = partial(EchoEnv, cls)
    with closing(VectorEnv([make] * 2, num_workers=1, on_failure="restart")) as envs:
        envs.reset()
        for number in (1, 2):
            obs, *_, infos = envs.step((cls(number, ""), cls(number + 1, "")))
            assert [each.number for each in obs] == [number, number + 1]
            assert {type(each) for each in [*obs, *infos["who"]]} == {cls}
        (worker,) = {handle.process.child for handle in envs._workers._slices.handles}
        worker.kill()  # the next one gets the last observations
        obs, _, _, truncated, _ = envs.step((cls(3, ""), cls(4, "")))
        assert truncated.all()
        assert [each.number for each in obs] == [2, 3]
        assert {type(each) for each in obs} == {cls}


def test_infos_that_do_not_travel_end_the_step() -> None:
    with closing(VectorEnv([partial(InfoEnv, "reading")] * 2, num_workers=1)) as envs:
        envs.reset()
        with pytest.raises(BadOption, match="the info of environment 0 was pickled"):
            envs.step([0, 0])
        with pytest.raises(MusterError):
            envs.step([0, 0])  # the environments are not at the same step
        _, infos = envs.reset()
        assert not infos
