"""The compat layer's Collector where it does not do as Tianshou's: errors, gradients, what it says
of itself.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import muster

pytest.importorskip("tianshou")
from tianshou import data
from tianshou.algorithm import DQN
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    CollectStats,
    ReplayBuffer,
    VectorReplayBuffer,
)
from tianshou.data.collector import BaseCollector, EpisodeRolloutHookMCReturn
from tianshou.env import DummyVectorEnv
from tianshou.env.venv_wrappers import VectorEnvWrapper
from tianshou.utils.net.common import Net

from muster.compat import tianshou as compat
from muster.compat.tianshou import Collector, EpisodeRolloutHookMerged, steps
from muster.errors import BadOption, CollectorClosed, UnsupportedEnv
from tests.parity.tianshou_envs import POLICIES, Counting
from tests.parity.tianshou_tools import Program, assert_same, collects, play
from tests.warned import warnings_are_errors


def made(lengths: Any = (3, 5), policy: str = "values", **kwargs: Any) -> Collector:
    envs = [Counting(n) for n in lengths]
    kwargs.setdefault("buffer", VectorReplayBuffer(40 * len(envs), len(envs)))
    return Collector(
        POLICIES[policy](envs[0].action_space),
        DummyVectorEnv([lambda e=e: e for e in envs]),
        **kwargs,
    )


def test_environments_must_have_been_reset() -> None:
    collector = made()
    with pytest.raises(BadOption, match="reset_before_collect=True"):
        collector.collect(n_step=2)
    assert collector.collect(n_step=2, reset_before_collect=True).n_collected_steps == 2


def test_it_says_when_it_collects_more_steps_or_uses_fewer_environments() -> None:
    collector = made()
    collector.reset()
    with pytest.warns(UserWarning, match="n_step=3 is not a multiple of 2") as seen:
        assert collector.collect(n_step=3).n_collected_steps == 4
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="the last 1 of them take no part"):
        assert collector.collect(n_episode=1).lens.tolist() == [3]


def test_one_environment_is_wrapped() -> None:
    env = Counting(3)
    with pytest.warns(UserWarning, match="DummyVectorEnv") as seen:
        collector = Collector(POLICIES["values"](env.action_space), env)
    assert seen[0].filename == __file__
    assert (collector.env_num, collector.buffer.maxsize) == (1, 10_000)
    collector.reset()
    assert collector.collect(n_episode=2).lens.tolist() == [3, 3]


def test_a_vector_environment_of_gymnasium_is_refused() -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: Counting(3)] * 2)
    with pytest.raises(
        UnsupportedEnv,
        match="SyncVectorEnv is a vector environment of Gymnasium: pass one of Tian",
    ):
        Collector(POLICIES["values"](Counting(3).action_space), envs)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (ReplayBuffer(10), r"ReplayBuffer has 1 buffer for 2 environments"),
        (
            VectorReplayBuffer(10, 1),
            r"VectorReplayBuffer has 1 buffers for 2 environments",
        ),
        (CachedReplayBuffer(ReplayBuffer(10), 1, 5), r"1 cached buffers for 2"),
        (ReplayBuffer(0), r"maxsize=0"),
    ],
)
def test_a_buffer_needs_room_for_every_environment(buffer: Any, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        made(buffer=buffer)


def test_it_is_closed_once_and_by_with() -> None:
    with made() as collector:
        assert not collector.is_closed
    assert collector.is_closed
    assert collector.env.is_closed
    collector.close()
    for use in (
        collector.reset,
        collector.reset_env,
        lambda: collector.collect(n_step=2),
        lambda: collector.collect(n_step=2, reset_before_collect=True),
    ):
        with pytest.raises(CollectorClosed, match="make new ones, and a new Collector"):
            use()


@pytest.mark.parametrize("wrap", [VectorEnvWrapper, lambda venv: venv])
def test_environments_that_were_closed_elsewhere_are_noticed(wrap: Any) -> None:
    venv = wrap(DummyVectorEnv([lambda: Counting(3)]))
    collector = Collector(POLICIES["values"](Counting(3).action_space), venv)
    collector.reset()
    collector.collect(n_step=2)
    venv.close()
    with pytest.raises(CollectorClosed):
        collector.collect(n_step=2)
    assert collector.collect_step == len(collector.buffer) == 2


WRONG_ENVS: list[Any] = [
    None,
    5,
    "CartPole-v1",
    Counting,
    lambda: Counting(3),
    [],
    [Counting(3)],
]


@pytest.mark.parametrize("env", WRONG_ENVS)
def test_what_is_no_environment_is_refused(env: Any) -> None:
    with pytest.raises(UnsupportedEnv, match=r"env is .*DummyVectorEnv\(\[make_env\]"):
        Collector(POLICIES["values"](Counting(3).action_space), env)


WRONG_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "no policy": ("policy", None),
    "a number": ("policy", 5),
    "a class of policies": ("policy", Net),
    "a function": ("policy", lambda obs: obs),
    "a network": ("policy", torch.nn.Linear(2, 2)),
    "the size of a buffer": ("buffer", 100),
    "a class of buffers": ("buffer", VectorReplayBuffer),
    "a list": ("buffer", []),
    "a memory of Muster": ("buffer", muster.ReplayMemory(10)),
    "a name": ("on_step_hook", "x"),
    "a hook that is a number": ("on_episode_done_hook", 5),
    "another class": ("collect_stats_class", dict),
    "no class": ("collect_stats_class", None),
    "statistics": ("collect_stats_class", CollectStats()),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_refused_at_once(case: str) -> None:
    name, value = WRONG_ARGUMENTS[case]
    arguments = {
        "policy": POLICIES["values"](Counting(3).action_space),
        "env": DummyVectorEnv([lambda: Counting(3)]),
        name: value,
    }
    with pytest.raises(BadOption, match=f"{name} is .*expected "):
        Collector(**arguments)


def test_so_is_what_is_set_later() -> None:
    collector = made()
    collector.reset()
    with pytest.raises(BadOption, match="on_step_hook is of type str"):
        collector.set_on_step_hook("x")
    with pytest.raises(BadOption, match="on_episode_done_hook is of type int"):
        collector.set_on_episode_done_hook(5)
    policy: Any = POLICIES["values"](Counting(3).action_space)
    collector.policy = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3))
    with pytest.raises(BadOption, match="an algorithm: set collector.policy to its"):
        collector.collect(n_step=2)
    collector.policy = policy
    assert collector.collect(n_step=2).n_collected_steps == 2


@pytest.mark.parametrize("value", ["4", 4.5, [4], float("nan"), float("inf"), True])
@pytest.mark.parametrize("name", ["n_step", "n_episode"])
def test_numbers_of_steps_and_episodes_are_whole(name: str, value: Any) -> None:
    collector = made()
    collector.reset()
    with pytest.raises(BadOption, match=f"{name}=.*expected an integer"):
        collector.collect(**{name: value})
    assert len(collector.buffer) == 0


@pytest.mark.parametrize("value", [4.0, np.int64(4), np.float64(4), torch.tensor(4)])
def test_whole_numbers_can_be_of_any_type(value: Any) -> None:
    collector = made()
    collector.reset()
    assert collector.collect(n_step=value).n_collected_steps == 4
    assert collector.collect(n_episode=value).lens.tolist() == [3, 5, 3, 5]


def test_an_episode_hook_returns_a_dictionary() -> None:
    collector = made(on_episode_done_hook=lambda episode: 5)
    collector.reset()
    with pytest.raises(BadOption, match="on_episode_done_hook returned int, expected"):
        collector.collect(n_episode=2)
    assert collector.buffer.obs[:3, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "rewards", [0.5, [1.0], None, ["a", "b"], torch.zeros(2)], ids=str
)
def test_a_step_hook_leaves_rewards_of_all_environments(rewards: Any) -> None:
    def change(action: Any, step: Any) -> None:
        if step.obs[0, 1] == 2:
            step.rew = rewards

    collector = made((5, 9), on_step_hook=change)
    collector.reset()
    with pytest.raises(BadOption, match="on_step_hook has set the rewards to .*of 2"):
        collector.collect(n_step=20)
    collector.set_on_step_hook(None)
    assert collector.collect(n_step=12).lens.tolist() == [5, 9]
    assert collector.buffer.obs[:4, 1].tolist() == [0, 1, 3, 4]


def test_it_passes_for_tianshous() -> None:
    collector = made()
    assert isinstance(collector, data.Collector)
    assert isinstance(collector, BaseCollector)
    assert not isinstance(collector, data.AsyncCollector)
    assert isinstance(
        Collector[CollectStats](collector.policy, collector.env), Collector
    )


def test_policy_noise_and_buffer_can_be_exchanged() -> None:
    collector = made(policy="actor")
    collector.reset()
    collector.collect(n_step=4)
    collector.policy, collector.exploration_noise = (
        POLICIES["values"](Counting(3).action_space),
        True,
    )
    collector.buffer = VectorReplayBuffer(20, 2)
    assert collector.collect(n_step=4).pred_dist_std_array is None
    assert len(collector.buffer) == 4


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_long_call_is_made_in_pieces(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = collects(
        {"n_step": 30}, {"n_episode": 7}, {"n_step": 6, "random": True}, {"n_step": 12}
    )
    program = Program((3, 5, 2), calls, "batch", "small", env={"infos": "some"})
    whole = play(compat, program)
    monkeypatch.setattr(steps, "LANE_ROWS", rows)
    assert_same(play(compat, program), whole)


def test_the_rows_of_a_call_are_added_at_once_but_for_the_first_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counting(buffer: Any, taken: Any, added: Any) -> None:
        calls.append(len(taken.ends) - 1)
        original(buffer, taken, added)

    original = steps.add
    monkeypatch.setattr(steps, "add", counting)
    collector = made(policy="array", buffer=VectorReplayBuffer(400, 2))
    collector.reset()
    for _ in range(2):
        collector.collect(n_step=60)
    assert calls == [1, 29, 30]


def test_a_policy_whose_entries_change_within_a_call_is_stored_as_tianshou_does() -> (
    None
):
    class Fickle(type(POLICIES["array"](Counting(3).action_space))):  # type: ignore[misc]
        calls = 0

        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            self.calls += 1
            n = len(batch.obs)
            entry = Batch(value=np.full(n, self.calls)) if self.calls > 2 else Batch()
            return Batch(act=np.zeros(n, int), policy=entry)

    seen = []
    for module in (compat, data):
        envs = DummyVectorEnv([lambda n=n: Counting(n) for n in (3, 5)])
        collector = module.Collector(
            Fickle(Counting(3).action_space, "none"), envs, VectorReplayBuffer(40, 2)
        )
        collector.reset()
        collector.collect(n_step=12)
        seen.append(collector.buffer.policy.value.tolist())
    assert seen[0] == seen[1]
    assert seen[0][:6] == [0, 0, 3, 4, 5, 6]


def test_of_an_episode_longer_than_its_ring_a_hook_gets_the_last_steps_and_its_length_is_known() -> (
    None
):
    seen: list[Any] = []
    buffer = VectorReplayBuffer(2 * 3, 2)
    collector = made(
        (5, 3),
        buffer=buffer,
        on_episode_done_hook=lambda episode: seen.append(episode.obs[:, 1].tolist()),
    )
    collector.reset()
    stats = collector.collect(n_episode=4)
    assert stats.lens.tolist() == [3, 5, 3, 5]
    assert seen == [[0, 1, 2], [2, 3, 4], [0, 1, 2], [2, 3, 4]]


def test_statistics_of_ones_own_see_what_a_hook_has_added() -> None:
    class Marks(CollectStats):
        marks = 0.0

        def update_at_episode_done(
            self, episode_batch: Any, *args: Any, **kwargs: Any
        ) -> None:
            self.marks += episode_batch.mark.sum()
            super().update_at_episode_done(episode_batch, *args, **kwargs)

    collector = made(
        collect_stats_class=Marks,
        on_episode_done_hook=lambda episode: {"mark": np.full(len(episode), 0.5)},
    )
    collector.reset()
    assert collector.collect(n_episode=2).marks == 4.0


def test_several_episode_hooks_are_one() -> None:
    def mark(episode: Any) -> dict[str, Any]:
        return {"mark": np.arange(len(episode), dtype=float)}

    hook = EpisodeRolloutHookMerged(
        EpisodeRolloutHookMCReturn(1.0), lambda episode: None, mark
    )
    collector = made(on_episode_done_hook=hook)
    collector.reset()
    collector.collect(n_episode=2)
    assert collector.buffer.mark[:3].tolist() == [0, 1, 2]
    assert (
        collector.buffer.mc_return_to_go[40]
        == collector.buffer.full_episode_mc_return[44]
    )
    assert EpisodeRolloutHookMerged(lambda episode: None)(Batch()) is None
    with pytest.raises(KeyError, match="mark"):
        EpisodeRolloutHookMerged(mark, mark)(Batch(a=np.zeros(2)))
    assert (
        EpisodeRolloutHookMerged(mark, mark, check_overlapping_keys=False)(
            Batch(a=np.zeros(2))
        )
        is not None
    )


def test_a_net_of_tianshous_acts() -> None:
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy

    env = Counting(3)
    net = Net(state_shape=(2,), action_shape=5, hidden_sizes=[8])
    collector = Collector(
        DiscreteQLearningPolicy(model=net, action_space=env.action_space),
        DummyVectorEnv([lambda: env]),
    )
    with warnings_are_errors():
        collector.reset()
        stats = collector.collect(n_episode=2)
    assert isinstance(stats, CollectStats)
    assert (stats.lens_stat.mean, stats.n_collected_steps) == (3.0, 6)
