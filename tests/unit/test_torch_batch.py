"""Batches of environments on tensors: ends of episodes by mask, and the conventions of the
simulators that have them.

Isaac Lab and ManiSkill need an NVIDIA GPU and are not installed: ``FakeIsaac`` and
``FakeManiSkill`` do what their sources do at the ends of episodes, from classes whose modules have
their names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import OrderEnforcing

from muster import Collector
from muster.envs.build import build_env
from muster.envs.torch_batch import TorchEnvs, adapt, takes
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv, UnsupportedSpace
from muster.rng import GroupRng
from muster.rollout.options import RolloutOptions
from muster.testing import EnvContract, TorchCartPole
from tests.tools import assert_accounted, assert_same, collect, column, joined

LENGTHS = (2, 3, 5)
Mode = AutoresetMode


class Counting:
    """Environment i: observation ``[i, t]``, reward ``t``, episodes of ``LENGTHS[i]`` steps; odd
    ones are truncated.

    Args:
        mode: declared; None declares nothing.
        final: name in ``info`` of the last observations; None leaves them out.
        masked: the mask of that name is handed over, too; it is False for these environments.
        dtype: of observations.
    """

    def __init__(
        self,
        mode: Mode | None = Mode.SAME_STEP,
        final: str | None = "final_obs",
        masked: tuple[int, ...] | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.num_envs, self.device = len(LENGTHS), torch.device("cpu")
        if mode is not None:
            self.metadata = {"autoreset_mode": mode}
        self.mode, self.final, self.masked = Mode(mode or Mode.SAME_STEP), final, masked
        self.single_observation_space: Any = spaces.Box(0, 100, (2,), dtype)
        self.single_action_space: Any = spaces.Discrete(2)
        self.dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self.t = torch.zeros(len(LENGTHS), dtype=torch.int64)
        self.lengths = torch.tensor(LENGTHS)
        self.resets: list[Any] = []
        self.actions: list[Any] = []
        self.closed = 0

    def observe(self) -> Any:
        return torch.stack([torch.arange(len(LENGTHS)), self.t], 1).to(self.dtype)

    def begin(self, mask: torch.Tensor | None) -> Any:
        self.t[:] = 0 if mask is None else torch.where(mask, 0, self.t)
        return self.observe(), {}

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        self.resets.append((seed, options))
        return self.begin((options or {}).get("reset_mask"))

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        self.t += 1
        reward = self.t.float()
        done, odd = self.t >= self.lengths, self.lengths % 2 == 1
        info: dict[str, Any] = {}
        if self.mode is not Mode.DISABLED:
            if self.final is not None:
                info[self.final] = self.observe()
            if self.masked is not None:
                info[f"_{self.final}"] = done & ~torch.isin(
                    torch.arange(len(LENGTHS)), torch.tensor(self.masked)
                )
            self.t.masked_fill_(done, 0)
        return self.observe(), reward, done & ~odd, done & odd, info

    def close(self) -> None:
        self.closed += 1


class ByMask(Counting):
    def reset(self, *, seed: Any = None, mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        self.resets.append((seed, mask))
        return self.begin(mask)


class ByIds(Counting):
    def reset(self, seed: Any = None, env_ids: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        self.resets.append((seed, env_ids))
        return self.begin(
            None if env_ids is None else torch.isin(torch.arange(len(LENGTHS)), env_ids)
        )


class Unseeded(Counting):
    def reset(self, *, mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return self.begin(mask)


class AllAtOnce(Counting):
    def reset(self, *, seed: Any = None) -> Any:  # type: ignore[override]
        return self.begin(None)


class Deaf(Counting):
    """Takes a mask and resets everything."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.begin(None)


def test_a_reset_without_a_seed():
    with pytest.warns(UserWarning, match="Unseeded.reset takes no seed"):
        check(collect(lambda: Unseeded(Mode.DISABLED), frames_per_batch=42, seed=0))


@pytest.mark.parametrize("mode", [Mode.SAME_STEP, Mode.DISABLED])
@pytest.mark.parametrize("limit", [None, 4])
def test_environments_that_wait_begin_the_next_batch_with_a_reset(mode, limit):
    lengths = [min(length, limit or length) for length in LENGTHS]
    with Collector(
        lambda: Counting(mode),
        None,
        frames_per_batch=12,
        reset_when_done=False,
        max_frames_per_traj=limit,
    ) as collector:
        steps = [0, 0, 0]  # of the episode under way
        for _ in range(6):
            batch = collector.next()
            valid = batch["collector", "valid"]
            for i, length in enumerate(lengths):
                count = min(4, length - steps[i])
                assert valid[i].tolist() == [True] * count + [False] * (4 - count)
                seen = batch["observation"][i, :count, 1].tolist()
                assert seen == [float(steps[i] + k) for k in range(count)]
                steps[i] = (steps[i] + count) % length
        assert {(r.length, r.episode_return) for r in collector.episodes} <= {
            (n, n * (n + 1) / 2) for n in lengths
        }
        assert_accounted(collector)


def test_environments_that_cannot_be_reset_one_by_one_cannot_wait():
    with pytest.raises(
        BadOption, match="reset_when_done=False resets.*cannot reset single"
    ):
        Collector(AllAtOnce, None, frames_per_batch=12, reset_when_done=False)


@pytest.mark.parametrize("rows", [1, 2])
def test_random_actions_in_batches_of_few_rows(rows):
    with Collector(Counting, None, frames_per_batch=3 * rows, seed=0) as collector:
        batches = [collector.next().clone() for _ in range(12 // rows)]
        collector.collect(n_step=3)
    with Collector(Counting, None, frames_per_batch=36, seed=0) as collector:
        assert torch.equal(torch.cat(batches, -1)["action"], collector.next()["action"])


# --- expected arrays ------------------------------------------------------------------------------


def expected(T: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    t = np.arange(T)
    n = np.array(lengths)[:, None]
    before = np.stack(
        [np.broadcast_to(np.arange(len(n))[:, None], (len(n), T)), t % n], -1
    )
    done = t % n == n - 1
    return {
        "before": before,
        "after": before + np.array([0, 1]),
        "done": done,
        "reward": t % n + 1,
    }


def check(
    batch: Any, lengths: tuple[int, ...] = LENGTHS, natural: tuple[int, ...] = LENGTHS
) -> None:
    want = expected(batch.shape[-1], lengths)
    assert (batch["observation"].double().numpy() == want["before"]).all()
    assert (batch["next", "observation"].double().numpy() == want["after"]).all()
    assert (batch["next", "reward"][..., 0].numpy() == want["reward"]).all()
    done = torch.as_tensor(want["done"])
    by_itself = (torch.tensor(natural) == torch.tensor(lengths))[:, None]
    terminates = by_itself & (torch.tensor(lengths) % 2 == 0)[:, None]
    assert torch.equal(batch["next", "terminated"][..., 0], done & terminates)
    assert torch.equal(batch["next", "truncated"][..., 0], done & ~terminates)
    assert torch.equal(batch["next", "done"][..., 0], done)


WAYS = {
    "final_obs": Counting,
    "final_observation": lambda: Counting(final="final_observation"),
    "disabled": lambda: Counting(Mode.DISABLED),
    "by name": lambda: Counting(Mode.DISABLED.value),  # type: ignore[arg-type]
    "by mask": lambda: ByMask(Mode.DISABLED),
    "by ids": ByIds,
    "all at once": AllAtOnce,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frames", [36, 9])
def test_every_way_to_reset_gives_the_same_transitions(way, frames):
    batch = collect(
        WAYS[way](),
        tilt,
        batches=36 // frames,
        frames_per_batch=frames,
        validate="full",
    )
    check(batch)
    if ("collector", "next_obs_valid") in batch.keys(True):
        assert batch["collector", "next_obs_valid"].all()


def tilt(obs: Any) -> Any:
    return (obs[:, 1] % 2).long()


@pytest.mark.parametrize(
    "make",
    [Counting, lambda: Counting(Mode.DISABLED), ByMask],
    ids=["same", "disabled", "mask"],
)
def test_a_limit_from_outside_truncates_where_nothing_ends_by_itself(make):
    batch = collect(
        make(),
        tilt,
        batches=2,
        frames_per_batch=3 * 12,
        max_frames_per_traj=3,
        validate="full",
    )
    check(batch, (2, 3, 3), LENGTHS)
    want = expected(24, (2, 3, 3))
    assert (batch["step_count"][..., 0].numpy() == want["before"][..., 1]).all()


def test_unknown_last_observations_are_marked_and_hold_nothing():
    batch = collect(Counting(final=None), tilt, frames_per_batch=36, validate="full")
    want = expected(12)
    unknown = torch.as_tensor(want["done"])
    assert torch.equal(~batch["collector", "next_obs_valid"], unknown)
    after = batch["next", "observation"]
    ended = batch["next", "terminated"].squeeze(-1)
    assert (after[unknown & ended] == 0).all(), "no target needs it"
    assert after[unknown & ~ended].isnan().all(), "it cannot be used unnoticed"
    assert (unknown & ended).any()
    assert (unknown & ~ended).any()
    assert (after[~unknown].numpy() == want["after"][~want["done"]]).all()
    assert (batch["observation"].numpy() == want["before"]).all()


def test_a_mask_says_which_last_observations_are_known():
    batch = collect(Counting(masked=(1,)), tilt, frames_per_batch=36)
    unknown = torch.as_tensor(expected(12)["done"])
    unknown[[0, 2]] = False
    assert torch.equal(~batch["collector", "next_obs_valid"], unknown)
    ended = batch["next", "terminated"].squeeze(-1)
    after = batch["next", "observation"]
    assert (after[unknown & ended] == 0).all()
    assert torch.equal(after.isnan().all(-1), unknown & ~ended)


# --- resets from outside --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [Counting, ByMask, ByIds, lambda: Counting(Mode.DISABLED)]
)
def test_some_environments_can_begin_anew_between_batches(make):
    env = make()
    with Collector(env, tilt, frames_per_batch=3) as collector:
        collector.rollout()
        collector.reset([1, 2])
        assert column(collector.rollout(), "observation") == [
            [[0, 1]],
            [[1, 0]],
            [[2, 0]],
        ]


def test_only_rows_where_the_mask_is_count():
    class Partial(ByMask):
        def reset(self, *, seed: Any = None, mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            obs, info = super().reset(seed=seed, mask=mask)
            return obs if mask is None else torch.where(mask[:, None], obs, -1), info

    check(collect(Partial(Mode.DISABLED), tilt, frames_per_batch=36))
    check(
        collect(Partial(), tilt, frames_per_batch=36, max_frames_per_traj=3), (2, 3, 3)
    )
    with Collector(Partial(), tilt, frames_per_batch=3) as collector:
        collector.rollout()
        collector.reset([1])
        assert column(collector.rollout(), "observation") == [
            [[0, 1]],
            [[1, 0]],
            [[2, 1]],
        ]


def test_an_environment_that_resets_all_at_once_says_what_to_do():
    with Collector(AllAtOnce(), tilt, frames_per_batch=3) as collector:
        collector.rollout()
        with pytest.raises(UnsupportedEnv, match="cannot reset single environments"):
            collector.reset([1])
        collector.reset()
        assert column(collector.rollout(), "observation") == [
            [[i, 0]] for i in range(3)
        ]


@pytest.mark.parametrize("make", [AllAtOnce, ByIds])
def test_a_limit_needs_resets_by_mask(make):
    with pytest.raises(BadOption, match="max_frames_per_traj.*mask"):
        Collector(make(), tilt, frames_per_batch=3, max_frames_per_traj=3)
    with pytest.raises(UnsupportedEnv, match="does not reset by itself.*mask"):
        Collector(make(Mode.DISABLED), tilt, frames_per_batch=3)


@pytest.mark.parametrize(
    "options", [{"mode": Mode.DISABLED}, {"limit": 3}, {"index": [0]}], ids=str
)
def test_an_environment_that_ignores_the_mask_is_found_out(options):
    env = Deaf(options.get("mode", Mode.SAME_STEP))
    with (
        Collector(
            env, tilt, frames_per_batch=3, max_frames_per_traj=options.get("limit")
        ) as collector,
        pytest.raises(UnsupportedEnv, match="also reset others"),
    ):
        collector.rollout()
        collector.reset(options["index"])
        collector.rollout()


# --- what an environment gets and keeps -----------------------------------------------------------


def test_a_saved_collector_goes_on_in_the_middle_of_an_episode():
    options: Any = {"frames_per_batch": 15, "max_frames_per_traj": 7}
    with Collector(TorchCartPole(3), None, **options, seed=0) as collector:
        collector.rollout()
        saved = collector.state_dict()
        expected = joined(collector, 4)
    with Collector(TorchCartPole(3), None, **options, seed=1) as other:
        other.load_state_dict(saved, trust=True)
        assert_same(expected, joined(other, 4), ignore=(("collector", "resumed"),))


def test_the_environment_may_keep_and_change_its_actions():
    class Greedy(Counting):
        def step(self, action: Any) -> Any:
            out = super().step(action.clone())
            action.fill_(9)
            return out

    env = Greedy()
    batch = collect(env, tilt, frames_per_batch=36)
    assert torch.equal(torch.stack(env.actions, 1), batch["action"])
    assert env.actions[0].dtype == torch.int64


def test_the_environment_may_reuse_its_tensors():
    class Reusing(Counting):
        buffer = torch.zeros(3, 2)

        def observe(self) -> Any:
            return self.buffer.copy_(super().observe())

    check(collect(Reusing(Mode.DISABLED), tilt, frames_per_batch=36))
    check(
        collect(
            Reusing(Mode.DISABLED), tilt, frames_per_batch=36, max_frames_per_traj=3
        ),
        (2, 3, 3),
    )


# --- what an environment must not do --------------------------------------------------------------

BAD: dict[str, tuple[int, Any, str]] = {
    "shape": (
        0,
        torch.zeros(3, 3),
        r"observation is a tensor of shape \(3, 3\).*expected a tensor of shape \(3, 2\)",
    ),
    "dtype": (
        0,
        torch.zeros(3, 2, dtype=torch.int64),
        "torch.int64, expected .* torch.float32",
    ),
    "array": (
        0,
        np.zeros((3, 2), np.float32),
        "observation is ndarray, expected a tensor",
    ),
    "reward": (1, torch.zeros(4), r"reward is a tensor of shape \(4,\).*3 numbers"),
    "number": (1, 0.5, "reward is float"),
    "flag": (
        2,
        torch.zeros(3),
        "terminated is a tensor .*float32, expected a tensor of 3 bools",
    ),
    "final": (
        4,
        {"final_obs": torch.zeros(2, 2)},
        r"info\['final_obs'\]: observation is a tensor of shape \(2, 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_output_is_refused_and_the_rows_before_it_are_kept(case):
    place, value, message = BAD[case]

    class Bad(Counting):
        def step(self, action: Any) -> Any:
            out = list(super().step(action))
            if len(self.actions) == 3:
                out[place] = value
            return tuple(out)

    with Collector(Bad(), tilt, frames_per_batch=12) as collector:
        with pytest.raises(BadEnvOutput, match=message):
            collector.rollout()
        batch = collector.rollout()
        assert column(batch, "observation")[2] == [[2, 0], [2, 1], [2, 0], [2, 1]]
        assert_accounted(collector)


def test_another_floating_dtype_is_cast_with_one_warning():
    class Wide(Counting):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return (obs.double(), *rest)

    with pytest.warns(
        UserWarning, match="Wide: observation has dtype torch.float64, but its space"
    ) as caught:
        check(collect(Wide(), tilt, frames_per_batch=36))
    assert len(caught) == 1
    with (
        Collector(Wide(), tilt, frames_per_batch=12, validate="full") as collector,
        pytest.raises(BadEnvOutput, match="torch.float64, expected"),
    ):
        collector.rollout()


def test_a_step_without_five_values_is_refused():
    class Four(Counting):
        def step(self, action: Any) -> Any:
            return super().step(action)[:4]

    class Bare(Counting):
        def reset(self, **_: Any) -> Any:
            return self.observe()

    for env, message in (
        (Four(), "returned tuple of 4"),
        (Bare(), "expected .observation, info."),
    ):
        with (
            Collector(env, tilt, frames_per_batch=3) as collector,
            pytest.raises(BadEnvOutput, match=message),
        ):
            collector.rollout()


@pytest.mark.parametrize("mode", [None, Mode.NEXT_STEP])
def test_how_an_environment_resets_is_not_guessed(mode):
    with pytest.raises(UnsupportedEnv, match="SAME_STEP.*DISABLED"):
        Collector(Counting(mode), tilt, frames_per_batch=3)


def test_compact_observations_are_refused():
    env = TorchEnvs(Counting())
    with pytest.raises(BadOption, match="compact_obs"):
        lane_of(env, compact_obs=True)


def lane_of(env: TorchEnvs, **options: Any) -> Any:
    from muster.memory.slots import Layout, Slot
    from muster.rollout.columns import lane_columns

    layout = Layout(
        4,
        env.spec.num_envs,
        lane_columns(env.spec, (), RolloutOptions(**options)),
        batch_shape=env.spec.batch_shape,
    )
    return env.start(Slot(layout).lanes[0])


def test_a_batch_cannot_be_multiplied():
    with pytest.raises(BadOption, match="Counting is a batch of environments already"):
        adapt([Counting(), Counting()], None)


def test_spaces_without_tensors_are_refused():
    env = Counting()
    env.single_observation_space = spaces.Text(3)
    with pytest.raises(UnsupportedSpace, match="not arrays"):
        TorchEnvs(env)


# --- spaces ---------------------------------------------------------------------------------------


def batched(space: Any, action: Any = None) -> Any:
    return SimpleNamespace(
        num_envs=3,
        device="cpu",
        observation_space=space,
        action_space=action or spaces.MultiDiscrete([4, 4, 4]),
        metadata={"autoreset_mode": Mode.SAME_STEP},
        reset=lambda: None,
    )


def test_batched_spaces_are_taken_apart():
    low = np.array([[0, 1], [0, 1], [0, 1]], np.float32)
    env = TorchEnvs(
        batched(
            spaces.Dict(
                {"a": spaces.Box(low, low + 1), "b": spaces.MultiDiscrete([[2, 3]] * 3)}
            ),
            spaces.MultiDiscrete([4] * 3, start=[-1] * 3),
        )
    )
    a, b, action = (
        env.spec.observation_specs[("a",)],
        env.spec.observation_specs[("b",)],
        env.spec.action_specs[("action",)],
    )
    assert (a.shape, a.low.tolist(), a.high.tolist()) == ((2,), [0, 1], [1, 2])
    assert (b.shape, b.low.tolist(), b.high.tolist()) == ((2,), [0, 0], [1, 2])
    assert (action.shape, action.low.tolist(), action.high.tolist()) == ((), -1, 2)


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 1, (2, 3)), spaces.Discrete(3), spaces.MultiBinary(3)]
)
def test_spaces_that_are_not_of_the_batch_are_refused(space):
    with pytest.raises(UnsupportedSpace, match="not a space of 3 environments"):
        TorchEnvs(batched(space))


EVERY_ACTION = spaces.Dict(
    {
        "die": spaces.Discrete(6, start=1),
        "many": spaces.MultiDiscrete([2, 5]),
        "bits": spaces.MultiBinary(3),
        "box": spaces.Box(np.array([-2, 0.5]), np.array([3, 0.75]), dtype=np.float64),
        "open": spaces.Box(-np.inf, np.inf, (2,), np.float16),
        "half": spaces.Box(
            np.array([1, -np.inf]), np.array([np.inf, -1]), dtype=np.float32
        ),
        "byte": spaces.Box(0, 255, (2,), np.uint8),
    }
)


def sampled(rows: int, cuts: int = 1, seed: int = 0) -> Any:
    env = Counting()
    env.single_action_space = EVERY_ACTION
    batch, rng = TorchEnvs(env), GroupRng(seed)
    parts = [batch.sample(rng, (rows // cuts, 3)) for _ in range(cuts)]
    return {key[-1]: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.slow
def test_random_actions_have_the_space_s_distribution():
    drawn = sampled(1500)
    assert [drawn[k].dtype for k in ("die", "box", "open", "byte")] == [
        np.int64,
        np.float64,
        np.float16,
        np.uint8,
    ]
    assert drawn["die"].shape == (1500, 3)
    assert np.allclose(
        np.bincount(drawn["die"].ravel(), minlength=7)[1:] / 4500, 1 / 6, atol=0.02
    )
    assert np.allclose(drawn["many"].reshape(-1, 2).mean(0), [0.5, 2], atol=0.06)
    assert drawn["many"].reshape(-1, 2).max(0).tolist() == [1, 4]
    assert np.allclose(drawn["bits"].mean(), 0.5, atol=0.02)
    box = drawn["box"].reshape(-1, 2)
    assert np.allclose(box.mean(0), [0.5, 0.625], atol=0.06)
    assert (box >= [-2, 0.5]).all()
    assert (box <= [3, 0.75]).all()
    free = drawn["open"].astype(float)
    assert np.allclose([free.mean(), free.std()], [0, 1], atol=0.04)
    half = drawn["half"].reshape(-1, 2)
    assert (half[:, 0] >= 1).all()
    assert (half[:, 1] <= -1).all()
    assert np.allclose(half.mean(0), [2, -2], atol=0.06)
    assert (drawn["byte"].min(), drawn["byte"].max()) == (0, 255)


# --- the torch CartPole ---------------------------------------------------------------------------


class OfCartPole(EnvContract):
    num_envs = None
    steps = 40
    mode, final_obs = Mode.SAME_STEP, True

    def make_env(self) -> Any:
        return TorchCartPole(
            3, max_steps=15, autoreset=self.mode, final_obs=self.final_obs
        )


class TestSameStep(OfCartPole):
    pass


class TestDisabled(OfCartPole):
    mode = Mode.DISABLED


class TestUnknownFinal(OfCartPole):
    final_obs = False


def test_the_torch_cart_pole_moves_as_gymnasium_s():
    ours = TorchCartPole(8, autoreset=Mode.DISABLED)
    theirs = [gymnasium.make("CartPole-v1") for _ in range(8)]
    obs, _ = ours.reset(seed=0)
    assert (obs.abs() <= 0.05).all()
    for row, env in zip(obs, theirs, strict=True):
        env.reset()
        env.unwrapped.state = row.double().numpy()  # type: ignore[attr-defined]
    assert ours.single_observation_space == theirs[0].observation_space
    generator = np.random.default_rng(0)
    ended = np.zeros(8, bool)
    for _ in range(60):
        actions = generator.integers(2, size=8)
        obs, reward, terminated, truncated, _ = ours.step(torch.from_numpy(actions))
        for i in np.flatnonzero(~ended):
            expected_obs, expected_reward, *expected_flags, _ = theirs[i].step(
                actions[i]
            )
            np.testing.assert_allclose(
                obs[i].numpy(), expected_obs, rtol=1e-4, atol=1e-5
            )
            assert [reward[i].item(), terminated[i].item(), truncated[i].item()] == [
                expected_reward,
                *expected_flags,
            ]
        ended |= terminated.numpy()
    assert ended.all()


# --- simulators -----------------------------------------------------------------------------------


def named(module: str) -> Any:
    """Puts a class into a module of that name."""

    def rename(cls: type) -> type:
        cls.__module__ = module
        return cls

    return rename


@named("isaaclab.envs.manager_based_rl_env")
class FakeIsaac(gymnasium.Env[Any, Any]):
    """Ends of episodes as in Isaac Lab's ManagerBasedRLEnv: ``extras`` is one dict for ever; groups
    of observations.
    """

    def __init__(self, *, declares: bool = True, computes: bool = True) -> None:
        self.inner = Counting()
        self.num_envs, self.device = 3, "cpu"
        self.cfg = (
            SimpleNamespace(compute_final_obs=False) if computes else SimpleNamespace()
        )
        self.metadata = {
            "render_modes": [None],
            **({"autoreset_mode": Mode.SAME_STEP} if declares else {}),
        }
        part = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_observation_space = spaces.Dict({"policy": part, "critic": part})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, 3
        )
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, 3
        )
        self.extras: dict[str, Any] = {}

    def observe(self) -> Any:
        policy = self.inner.observe()
        return {"policy": policy, "critic": -policy}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.inner.begin(None)
        return self.observe(), self.extras

    def step(self, action: Any) -> Any:
        assert action.shape == (3, 2)
        _, reward, terminated, truncated, info = self.inner.step(action)
        if (
            getattr(self.cfg, "compute_final_obs", False)
            and (terminated | truncated).any()
        ):
            self.extras["final_obs"] = {
                "policy": info["final_obs"],
                "critic": -info["final_obs"],
            }
        return self.observe(), reward, terminated, truncated, self.extras


def test_isaac_lab_is_told_to_give_its_last_observations():
    env = FakeIsaac()
    batch = collect(OrderEnforcing(env), None, frames_per_batch=36, validate="full")
    assert env.cfg.compute_final_obs
    assert ("collector", "next_obs_valid") not in batch.keys(True)
    assert torch.equal(batch["critic"], -batch["policy"])
    assert torch.equal(batch["next", "critic"], -batch["next", "policy"])
    batch["observation"], batch["next", "observation"] = (
        batch["policy"],
        batch["next", "policy"],
    )
    check(batch)


@pytest.mark.parametrize("declares", [True, False])
def test_an_isaac_lab_without_last_observations_is_marked(declares):
    batch = collect(
        FakeIsaac(declares=declares, computes=False),
        None,
        frames_per_batch=36,
        validate="full",
    )
    unknown = ~batch["collector", "next_obs_valid"]
    assert torch.equal(unknown, batch["next", "done"][..., 0])
    ended = batch["next", "terminated"][..., 0]
    assert (batch["next", "policy"][unknown & ended] == 0).all()
    assert batch["next", "policy"][unknown & ~ended].isnan().all()


@named("mani_skill.vector.wrappers.gymnasium")
class FakeManiSkill(VectorEnv[Any, Any, Any]):
    """Ends of episodes as in ManiSkillVectorEnv: last observations only where some ended, resets by
    index.
    """

    def __init__(self, auto_reset: bool = True) -> None:
        self.inner, self.auto_reset = Counting(Mode.DISABLED), auto_reset
        self.num_envs = 3
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space

    device = torch.device("cpu")

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        chosen = (options or {}).get("env_idx")
        return self.inner.begin(
            None if chosen is None else torch.isin(torch.arange(3), chosen)
        )

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.inner.step(action)
        done = terminated | truncated
        if done.any() and self.auto_reset:
            final = obs.clone()
            obs, info = self.reset(options={"env_idx": torch.arange(3)[done]})
            info |= {"final_observation": final, "_final_observation": done}
        return obs, reward, terminated, truncated, info


def test_maniskill_gives_exact_transitions():
    batch = collect(FakeManiSkill(), tilt, frames_per_batch=36, validate="full")
    assert ("collector", "next_obs_valid") not in batch.keys(True)
    check(batch)


def test_what_others_write_into_the_metadata_of_all_classes_says_nothing(monkeypatch):
    """ale_py writes the mode of its own environments into the dict that all vector environments
    share.
    """
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", Mode.NEXT_STEP)
    assert build_env(FakeManiSkill(), None).spec.num_envs == 3
    assert "autoreset_mode" in FakeManiSkill().metadata


def test_maniskill_can_begin_some_anew():
    with Collector(FakeManiSkill(), tilt, frames_per_batch=3) as collector:
        collector.rollout()
        collector.reset([2])
        assert column(collector.rollout(), "observation") == [
            [[0, 1]],
            [[1, 1]],
            [[2, 0]],
        ]


def test_maniskill_without_autoreset_is_sent_back():
    with pytest.raises(UnsupportedEnv, match="auto_reset=True"):
        Collector(FakeManiSkill(auto_reset=False), tilt, frames_per_batch=3)


# --- what is one ----------------------------------------------------------------------------------


def test_batches_on_tensors_are_recognised_before_gymnasium_s_own_kinds():
    for env in (
        Counting(),
        FakeIsaac(),
        OrderEnforcing(FakeIsaac()),
        FakeManiSkill(),
        TorchCartPole(2),
    ):
        assert takes(env)
        assert isinstance(build_env(env, None), TorchEnvs)


def test_a_class_is_no_environment():
    class Fixed(Counting):
        num_envs, device, single_action_space = 3, "cpu", spaces.Discrete(2)

    assert not takes(Fixed)
    assert takes(Fixed())
    check(collect(Fixed, tilt, frames_per_batch=36))


def test_other_environments_are_not_taken():
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    torchrl = pytest.importorskip("torchrl.envs")
    for env in (
        gymnasium.make("CartPole-v1"),
        vector,
        torchrl.GymEnv("CartPole-v1", device="cpu"),
        None,
        Counting,
        3,
    ):
        assert not takes(env)
