"""Agents that take turns (PettingZoo's AEC): rows, rewards and episodes of each agent, and a policy
for each.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muster import (
    Collector,
    MultiSyncCollector,
    Trajectories,
    policies,
    split_trajectories,
)
from muster.episodes.whole import WholeEpisodes
from muster.errors import BadEnvOutput, BadOption, EnvError, UnsupportedEnv
from muster.restore.crash_report import CrashReport
from muster.testing import EnvContract
from tests.tools import assert_accounted, assert_same, collect, column, joined, push

pettingzoo = pytest.importorskip("pettingzoo")
AECEnv = pettingzoo.AECEnv


class Quarrel(AECEnv):
    """A random game.

    Each turn gives rewards to all agents; agents drop out, and the order of turns is random.

    The observation of an agent is ``[its number, its turns, turns of all]``. All draws depend on
    the seed and the number of resets only, not on actions.

    Args:
        agents: number of agents.
        ends: probability that a turn ends an agent's episode, by termination or truncation.
        masks: "obs", "info" or "": where action masks are.
    """

    metadata = {"name": "quarrel_v0", "is_parallelizable": False}  # noqa: RUF012

    def __init__(
        self, agents: int = 3, ends: float = 0.1, masks: str = "obs", fails_at: int = -1
    ) -> None:
        super().__init__()
        self.possible_agents = [f"player_{i}" for i in range(agents)]
        self.agents, self.ends, self.masks, self.fails_at = [], ends, masks, fails_at
        self.actions: list[tuple[str, int]] = []
        self.seed, self.resets, self.steps, self.strict = 0, 0, 0, True

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(0, 1000, (3,), np.float32)
        if self.masks != "obs":
            return box
        return spaces.Dict(
            {"observation": box, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
        )

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def mask(self, agent: str) -> Any:
        number, turns = self.possible_agents.index(agent), self.turns[agent]
        return ((np.arange(4) + number + turns) % 3 > 0).astype(np.int8)

    def observe(self, agent: str) -> Any:
        box = np.array(
            [self.possible_agents.index(agent), self.turns[agent], self.turn],
            np.float32,
        )
        return (
            {"observation": box, "action_mask": self.mask(agent)}
            if self.masks == "obs"
            else box
        )

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.seed, self.resets = seed, 0
        self.rng = np.random.default_rng([self.seed, self.resets])
        self.resets += 1
        self.turn = 0
        self.agents = list(self.possible_agents)
        self.turns = dict.fromkeys(self.agents, 0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.agent_selection = self.agents[self.rng.integers(len(self.agents))]
        self._note()

    def _note(self) -> None:
        self.infos = {
            a: {"action_mask": self.mask(a)} if self.masks == "info" else {}
            for a in self.agents
        }

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the board fell off the table")
        if self.masks and self.strict:
            assert self.mask(agent)[action], f"{agent} may not do {action}"
        self.actions.append((agent, action))
        self._cumulative_rewards[agent] = 0.0
        self.turn += 1
        self.turns[agent] += 1
        self.rewards = {a: float(self.rng.integers(-3, 4)) for a in self.agents}
        for a in self.agents:
            if self.rng.random() < self.ends:
                (self.terminations if self.rng.random() < 0.5 else self.truncations)[
                    a
                ] = True
        self._accumulate_rewards()
        live = [
            a for a in self.agents if not (self.terminations[a] or self.truncations[a])
        ]
        self.agent_selection = (
            live[self.rng.integers(len(live))] if live else self.agents[0]
        )
        self._note()
        self._deads_step_first()

    def close(self) -> None:
        pass


def quarrel(**options: Any) -> Any:
    return lambda: Quarrel(**options)


def reference(env: Any, actions: Any, rows: int) -> list[dict[str, Any]]:
    """Play with PettingZoo's own loop, and return the first complete turns in the order of their
    completion.
    """
    done: list[dict[str, Any]] = []
    while len(done) < rows:
        waiting: dict[str, dict[str, Any]] = {}
        for agent in env.agent_iter():
            observed, reward, terminated, truncated, _ = env.last()
            if agent in waiting:
                row = waiting.pop(agent)
                row |= {
                    "reward": reward,
                    "after": observed,
                    "terminated": terminated,
                    "truncated": truncated,
                }
                done.append(row)
            if terminated or truncated:
                env.step(None)
                continue
            action = next(actions)
            waiting[agent] = {"agent": agent, "observed": observed, "action": action}
            env.step(action)
        assert not waiting
        env.reset()
    return done[:rows]


def expected_rows(batch: Any, env: Quarrel, seed: int, rows: int) -> None:
    """Compare a batch ``[T]`` with the reference loop, played with the actions of the environment."""
    again = Quarrel(len(env.possible_agents), env.ends, env.masks)
    again.strict = False  # beyond the rows to compare it has no actions
    again.reset(seed=seed)
    made = reference(
        again, iter([action for _, action in env.actions] + [1] * 10_000), rows
    )
    names = env.possible_agents
    assert batch["collector", "agent"].tolist() == [
        names.index(row["agent"]) for row in made
    ]
    assert batch["action"].tolist() == [row["action"] for row in made]
    assert column(batch["next"], "reward") == [row["reward"] for row in made]
    for flag in ("terminated", "truncated"):
        assert column(batch["next"], flag) == [row[flag] for row in made]
    for part, name in ((batch, "observed"), (batch["next"], "after")):
        seen = [row[name] for row in made]
        if env.masks == "obs":
            assert part["action_mask"].tolist() == [
                s["action_mask"].astype(bool).tolist() for s in seen
            ]
            seen = [s["observation"] for s in seen]
        assert part["observation"].tolist() == [s.tolist() for s in seen]


# --- rows -----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    agents=st.integers(1, 5),
    ends=st.sampled_from([0.02, 0.1, 0.4]),
    seed=st.integers(0, 1000),
    batch=st.sampled_from([1, 3, 40]),
    masks=st.sampled_from(["obs", "info", ""]),
)
def test_rows_are_those_of_a_plain_loop(agents, ends, seed, batch, masks):
    env = Quarrel(agents, ends, masks)
    with Collector(
        env, None, frames_per_batch=batch, seed=seed, validate="full"
    ) as collector:
        rows = joined(collector, 120 // batch)
        assert_accounted(collector)
    expected_rows(rows, env, seed, len(rows))


class Secretive(Quarrel):
    """Its masks are in infos after the first turn only."""

    def _note(self) -> None:
        super()._note()
        if not self.turn:
            self.infos = {agent: {} for agent in self.agents}


def test_a_mask_in_an_info_that_has_no_column_is_an_error():
    make = lambda: Secretive(masks="info")  # noqa: E731
    with (
        Collector(make, None, frames_per_batch=8, seed=0) as collector,
        pytest.raises(BadEnvOutput, match=r"its info has an action_mask.*Let reset"),
    ):
        collector.rollout()


def test_several_games_are_independent_and_seeded_one_by_one():
    made: list[Quarrel] = []

    def make() -> Quarrel:
        made.append(Quarrel())
        return made[-1]

    batch = collect(make, None, num_envs=3, frames_per_batch=120, seed=7)
    for i in range(3):
        expected_rows(batch[i], made[i], 7 + i, 40)


def test_each_agent_has_its_own_episodes_and_records():
    with Collector(
        quarrel(), None, num_envs=2, frames_per_batch=200, seed=0
    ) as collector:
        batch = collector.rollout()
        records = list(collector.episodes)
    ids, agent, done = (
        batch["collector", "traj_ids"],
        batch["collector", "agent"],
        batch["next", "done"][..., 0],
    )
    found = []
    for number in ids.unique().tolist():
        here = ids == number
        assert len(agent[here].unique()) == 1, "an episode is of one agent"
        rows = here.nonzero()
        assert len(rows[:, 0].unique()) == 1, "and of one game"
        ends = done[here].nonzero()[:, 0].tolist()
        assert ends in ([], [int(here.sum()) - 1]), "only the last row is done"
        if ends:
            env, t = rows[-1].tolist()
            total = batch["next", "reward"][..., 0][here].sum().item()
            flags = [
                batch["next", flag][env, t, 0].item()
                for flag in ("terminated", "truncated")
            ]
            found.append(
                (
                    t,
                    env,
                    number,
                    total,
                    int(here.sum()),
                    *flags,
                    f"player_{agent[env, t]}",
                )
            )
    assert [
        (
            r.env_id,
            r.traj_id,
            r.episode_return,
            r.length,
            r.terminated,
            r.truncated,
            r.info["agent"],
        )
        for r in records
    ] == [row[1:] for row in sorted(found)]


@pytest.mark.parametrize("sizes", [(1,) * 60, (7, 13, 40), (60,)])
def test_data_do_not_depend_on_the_size_of_batches(sizes):
    torch.manual_seed(0)
    head = policies.categorical(nn.Linear(3, 4))
    parts, records = [], []
    options: dict[str, Any] = {"num_envs": 2, "seed": 0, "max_frames_per_traj": 9}
    with Collector(quarrel(), head, **options) as collector:
        for size in sizes:
            parts.append(collector.collect_batch(n_step=2 * size).batch.clone())
            records += collector.episodes
    with Collector(quarrel(), head, frames_per_batch=120, **options) as collector:
        assert_same(torch.cat(parts, -1), collector.rollout())
        assert records == list(collector.episodes)


def test_workers_give_the_same_as_this_process():
    head = policies.categorical(nn.Linear(3, 4))
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 80,
        "seed": 0,
        "max_frames_per_traj": 6,
    }
    with Collector([quarrel()] * 2, head, **options) as collector:
        expected = [collector.rollout().clone() for _ in range(2)]
        records = list(collector.episodes)
    with MultiSyncCollector(
        [quarrel()] * 2, head, cat_results="stack", **options
    ) as collector:
        for batch in expected:
            assert_same(collector.rollout(), batch)
        assert list(collector.episodes) == records
        assert_accounted(collector)


# --- ends and resets ------------------------------------------------------------------------------


def test_the_limit_of_steps_counts_the_turns_of_an_agent_and_cuts_the_game():
    batch = collect(
        quarrel(ends=0.0, agents=2),
        None,
        frames_per_batch=60,
        max_frames_per_traj=4,
        seed=0,
    )
    assert not batch["next", "terminated"].any()
    assert batch["step_count"].max() == 3
    lengths = [len(rows) for rows in _episodes(batch)]
    assert max(lengths) == 4
    for rows in _episodes(batch):
        cut = rows["next", "truncated"][:, 0].tolist()
        assert cut[:-1] == [False] * (len(rows) - 1)
        assert rows["step_count"][:, 0].tolist() == list(range(len(rows)))


def _episodes(batch: Any) -> list[Any]:
    lines = split_trajectories(batch)
    return [line[line["collector", "mask"]] for line in lines]


def test_a_reset_by_the_user_truncates_the_open_turns():
    with Collector(
        quarrel(ends=0.0), None, num_envs=2, frames_per_batch=20, seed=0
    ) as collector:
        first = collector.rollout().clone()
        collector.reset()
        second = collector.rollout().clone()
        assert not first["next", "done"].any()
        ended = second["next", "truncated"][..., 0]
        assert ended.sum() in range(
            2, 7
        )  # one for each agent that has acted and waited
        known = [
            [set(x["collector", "traj_ids"][b].tolist()) for x in (first, second)]
            for b in range(2)
        ]
        for b, (before, after) in enumerate(known):
            over = set(second["collector", "traj_ids"][b][ended[b]].tolist())
            assert over <= before | after
            new = second["collector", "traj_ids"][b][
                ended[b].nonzero().max() + 1 :
            ].tolist()
            assert not over & set(new), "what is over does not continue"
        for b in range(2):
            for agent in range(3):
                before = first["collector", "traj_ids"][b][
                    first["collector", "agent"][b] == agent
                ]
                after = second["collector", "traj_ids"][b][
                    second["collector", "agent"][b] == agent
                ]
                if len(before) and len(after):
                    assert before.unique().tolist() == [after[0].item()], (
                        "open turns belong to the episode before"
                    )
        assert_accounted(collector)


def test_after_an_error_open_turns_are_dropped_and_new_episodes_begin():
    with Collector(
        quarrel(fails_at=30, ends=0.05), None, frames_per_batch=50, seed=0
    ) as collector:
        with pytest.raises(EnvError, match="fell off the table"):
            collector.rollout()
        batch = collector.rollout()
        assert_accounted(collector)
    before = batch[:27]
    for rows in _episodes(before):
        assert rows["next", "done"][-1], "the error ends all episodes"
    shared = set(before["collector", "traj_ids"].tolist()) & set(
        batch[27:]["collector", "traj_ids"].tolist()
    )
    assert not shared


def test_a_crash_report_says_that_turns_cannot_be_replayed(tmp_path):
    given = {
        "frames_per_batch": 50,
        "seed": 0,
        "crash_dir": tmp_path,
        "backend": "threads",
    }
    with MultiSyncCollector(
        quarrel(fails_at=30), None, num_workers=1, **given
    ) as collector:
        with pytest.raises(EnvError, match="fell off the table") as caught:
            collector.next()
        report = CrashReport.load(caught.value.crash_report, trust=True)
    assert "agents take turns" in report.missing


def test_a_saved_collector_goes_on_in_the_middle_of_a_game():
    make, head = quarrel(), policies.categorical(nn.Linear(3, 4))
    with Collector(make, head, num_envs=2, frames_per_batch=14, seed=0) as collector:
        collector.rollout()
        saved = collector.state_dict()
        expected = joined(collector, 4)
    with Collector(make, head, num_envs=2, frames_per_batch=14, seed=1) as other:
        other.load_state_dict(saved, trust=True)
        assert_same(expected, joined(other, 4), ignore=(("collector", "resumed"),))


def test_games_that_cannot_be_restored_begin_anew():
    class Locked(Quarrel):
        def __init__(self) -> None:
            super().__init__(ends=0.0)
            self.lock = threading.Lock()  # cannot be saved

    make = Locked
    with Collector(make, None, num_envs=2, frames_per_batch=14, seed=0) as collector:
        saved_ids = collector.rollout()["collector", "traj_ids"].unique().tolist()
        saved = collector.state_dict()
    with Collector(make, None, num_envs=2, frames_per_batch=14, seed=1) as other:
        other.load_state_dict(saved)
        batch = other.rollout()
    assert not set(saved_ids) & set(batch["collector", "traj_ids"].unique().tolist())
    assert batch["collector", "resumed"][:, 0].all()
    assert {rows["observation"][0, 1].item() for rows in _episodes(batch)} == {0}, (
        "from each agent's first turn"
    )


# --- whole episodes -------------------------------------------------------------------------------


def _check_whole(rows: Any) -> None:
    assert len(rows["collector", "traj_ids"].unique()) == 1
    assert rows["next", "done"][:, 0].tolist() == [False] * (len(rows) - 1) + [True]
    own = rows["observation"][:, 1].tolist()
    assert own == list(range(len(rows))), "all turns of the agent, from its first"


@pytest.mark.parametrize("rule", ["first_begun", "first_done"])
def test_batches_of_whole_episodes_are_those_of_agents(rule):

    seen: list[Any] = []
    with Collector(
        quarrel(),
        None,
        num_envs=2,
        frames_per_batch=20,
        seed=0,
        total_frames=400,
        trajs_per_batch=Trajectories(3, rule=rule),
        traj_format="pad",
        on_episode_done=lambda rows: seen.append(rows.clone()),
    ) as collector:
        lines = [
            line[line["collector", "mask"]] for batch in collector for line in batch
        ]
    assert len(lines) > 10
    for rows in lines:
        _check_whole(rows)
    assert [rows["collector", "traj_ids"][0].item() for rows in seen] == [
        rows["collector", "traj_ids"][0].item() for rows in lines
    ]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_number_of_episodes_is_one_of_agents_episodes(num_envs):
    with Collector(quarrel(), None, num_envs=num_envs, seed=0) as collector:
        batch = collector.collect_batch(n_episode=9).batch
        episodes = _episodes(batch)
        assert len(episodes) == 9
        for rows in episodes:
            _check_whole(rows)
        assert sorted(r.length for r in collector.episodes) == sorted(
            map(len, episodes)
        )


def test_whole_episodes_are_the_same_from_batches_of_every_size():
    whole = collect(quarrel(), None, num_envs=2, frames_per_batch=240, seed=3)
    parts = [whole[:, a:b] for a, b in ((0, 1), (1, 30), (30, 31), (31, 120))]
    results = []
    for batches in ([whole], parts):
        store = WholeEpisodes(2, num_envs=2)
        groups = [
            group.batch["collector", "traj_ids"].tolist()
            for batch in batches
            for group in push(store, batch)
        ]
        results.append(groups)
        for number, batch in enumerate(
            parts
        ):  # what is saved in between changes nothing
            if number == 0:
                store = WholeEpisodes(2, num_envs=2)
            again = WholeEpisodes(2, num_envs=2)
            again.load_state_dict(store.state_dict())
            store = again
            push(store, batch)
    assert results[0] == results[1]
    assert len(results[0]) > 5


# --- a policy for each agent ----------------------------------------------------------------------


class Always(nn.Module):
    """Chooses the first allowed action not below ``at``, and returns itself as an extra."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(float(at)))

    def forward(self, obs: Any) -> Any:
        legal = obs["action_mask"] & (torch.arange(4) >= self.at)
        legal = torch.where(legal.any(-1, keepdim=True), legal, obs["action_mask"])
        return legal.long().argmax(-1), {"who": self.at.expand(len(legal))}


def _acted(batch: Any, agent: int, at: float) -> None:
    rows = batch["collector", "agent"] == agent
    assert rows.any()
    assert (batch["who"][rows] == at).all()
    again, _ = Always(int(at))({"action_mask": batch["action_mask"][rows]})
    assert torch.equal(again, batch["action"][rows])


@pytest.mark.parametrize("num_envs", [None, 3])
def test_each_agent_acts_with_its_own_policy(num_envs):
    made = {"player_0": Always(2), "others": Always(1)}
    batch = collect(quarrel(), made, num_envs=num_envs, frames_per_batch=120, seed=0)
    for agent, at in enumerate((2, 1, 1)):
        _acted(batch, agent, at)


def test_heads_functions_and_random_agents_play_together():
    def first_allowed(obs: Any) -> Any:
        return np.asarray(obs["action_mask"]).argmax(-1)

    torch.manual_seed(0)
    head = policies.categorical(nn.Linear(3, 4))
    made = {"player_0": head, "player_1": None, "player_2": first_allowed}
    batch = collect(
        quarrel(), made, num_envs=2, frames_per_batch=1200, seed=0, validate="full"
    )
    agent, log_prob = batch["collector", "agent"], batch["action_log_prob"]
    assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert log_prob[agent != 0].isnan().all()
    own = batch[agent == 0]
    again = head.distribution(own.select("observation", "action_mask"))
    assert torch.allclose(
        own["action_log_prob"], again.log_prob(own["action"]), atol=1e-5
    )
    scripted = batch[agent == 2]
    assert torch.equal(scripted["action"], scripted["action_mask"].long().argmax(-1))
    free = batch[agent == 1]
    among = free["action_mask"].sum(-1)
    rank = (
        free["action_mask"].cumsum(-1).gather(-1, free["action"].unsqueeze(-1))[:, 0]
        - 1
    )[among == 3]
    assert torch.allclose(
        torch.bincount(rank, minlength=3) / len(rank),
        torch.full((3,), 1 / 3),
        atol=0.12,
    )
    mode = collect(
        quarrel(),
        made,
        num_envs=2,
        frames_per_batch=100,
        seed=0,
        exploration_type="mode",
    )
    own = mode[mode["collector", "agent"] == 0]
    assert torch.equal(
        own["action"], head.mode(own.select("observation", "action_mask"))
    )
    assert own["action_log_prob"].isfinite().all()


def test_the_most_likely_action_and_its_probability_take_two_calls_of_the_network():
    calls = []
    net = nn.Linear(3, 4)
    net.register_forward_hook(lambda *_: calls.append(1))
    made = {"player_0": policies.categorical(net), "others": None}
    with Collector(
        quarrel(),
        made,
        frames_per_batch=60,
        total_frames=120,
        seed=0,
        exploration_type="mode",
    ) as collector:
        collector.next()
        calls.clear()
        batch = collector.next()
    rows = int((batch["collector", "agent"] == 0).sum())
    assert rows > 10
    assert (
        0 <= len(calls) - 2 * rows <= 4
    )  # a turn that is open at the end has no row yet


@pytest.mark.parametrize("where", ["here", "workers"])
def test_policies_are_swapped_between_batches(where):
    made = {"player_0": Always(2), "others": Always(1)}
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 60,
        "seed": 0,
        "track_policy_version": True,
    }
    kind = {"here": Collector, "workers": MultiSyncCollector}[where]
    with kind([quarrel()], made, **options) as collector:
        _acted(collector.rollout(), 0, 2)
        collector.update_policy_weights_(
            weights_dict={"player_0": Always(1), "others": Always(2)}
        )
        batch = collector.rollout()
        version = batch["collector", "policy_version"]
        late = version == version.max()
        assert (~late).sum() in range(1, 5), (
            "open turns were made by the policies before"
        )
        for agent, at in enumerate((1, 2, 2)):
            rows = late & (batch["collector", "agent"] == agent)
            assert (batch["who"][rows] == at).all()
        assert set(batch["who"][~late].tolist()) <= {1.0, 2.0}
        collector.update_policy_weights_(Always(3), model_id="player_0")
        collector.rollout()
        _acted(collector.rollout(), 0, 3)


def test_a_policy_for_each_agent_allows_what_the_environment_allows():
    class Stuck(Quarrel):
        def mask(self, agent: str) -> Any:
            return super().mask(agent) * (self.turn < 9)

    with (
        Collector(Stuck(), {"others": None}, frames_per_batch=30, seed=0) as collector,
        pytest.raises(
            BadEnvOutput, match=r"quarrel_v0\[0\]: action_mask allows no action"
        ),
    ):
        collector.rollout()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, "empty dict"),
        ({"player_0": None}, r"without a policy \['player_1', 'player_2'\]"),
        ({"others": None, "player_9": None}, r"unknown \['player_9'\]"),
        ({"others": 3}, "of type int"),
        ({"others": lambda obs, state: obs}, "has a state"),
    ],
)
def test_policies_that_do_not_fit_the_agents_are_refused(policy, message):
    with pytest.raises(BadOption, match=message):
        Collector(quarrel(), policy, frames_per_batch=8)


def test_a_dict_of_policies_needs_agents_that_take_turns():
    with pytest.raises(BadOption, match="do not take turns"):
        Collector("CartPole-v1", {"others": None}, frames_per_batch=8)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"set_truncated": True},
        {"compact_obs": True},
        {"reset_when_done": False},
        {"max_decorrelation_steps": 3},
        {"prev_action_reward": True},
        {"info": True},
    ],
)
def test_options_that_know_one_agent_are_refused(options):
    with pytest.raises(BadOption, match="take turns"):
        Collector(quarrel(), None, frames_per_batch=8, **options)


def test_policies_with_a_state_are_refused():
    def policy(obs: Any, state: Any) -> Any:
        return torch.tensor(1), torch.zeros(2)

    with (
        Collector(quarrel(masks=""), policy, frames_per_batch=8) as collector,
        pytest.raises(
            BadOption, match="recurrent state, and the agents of quarrel_v0 take turns"
        ),
    ):
        collector.rollout()


def test_agents_must_be_alike():
    class Uneven(Quarrel):
        def action_space(self, agent: str) -> Any:
            return spaces.Discrete(4 if agent == "player_0" else 5)

    with pytest.raises(
        UnsupportedEnv, match="player_1 of environment 0 has other spaces"
    ):
        Collector(Uneven(), None, frames_per_batch=8)
    made = iter([Quarrel(2), Quarrel(3)])
    with pytest.raises(UnsupportedEnv, match="environment 1 has other agents"):
        Collector(lambda: next(made), None, num_envs=2, frames_per_batch=8)


def test_an_agent_that_leaves_without_a_last_turn_is_an_error():
    class Leaving(Quarrel):
        def step(self, action: Any) -> None:
            super().step(action)
            if self.turn == 4:
                self.agents = []

    with (
        Collector(Leaving(ends=0.0), None, frames_per_batch=20, seed=0) as collector,
        pytest.raises(BadEnvOutput, match="left without a last turn"),
    ):
        collector.rollout()


class TestQuarrel(EnvContract):
    """With a single agent, rows follow one another as in other environments."""

    def make_env(self) -> Any:
        return Quarrel(agents=1)


def test_tic_tac_toe_pays_the_winner_and_the_loser_for_their_own_last_moves():
    from pettingzoo.classic import tictactoe_v3

    batch = collect(tictactoe_v3.env, None, num_envs=4, frames_per_batch=400, seed=0)
    for game in batch:
        over = game["next", "done"][:, 0].nonzero()[:, 0].tolist()
        for first, second in zip(over[::2], over[1::2], strict=False):
            assert second == first + 1, "both have their last row, one after the other"
            assert (
                game["collector", "agent"][first] != game["collector", "agent"][second]
            )
            assert (
                game["next", "reward"][first, 0] == -game["next", "reward"][second, 0]
            )
    assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert batch["next", "reward"].abs().sum() > 10
