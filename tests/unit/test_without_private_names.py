"""With ``MUSTER_PRIVATE_NAMES=never``, and where a private name is gone, Muster gives the same by
public names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from muster.errors import BadOption, UnsupportedEnv
from muster.restore import plain_state
from muster.restore.snapshot import restore, take
from muster.utils import interrupts, private_names
from muster.utils.private_names import CHECKED, VARIABLE, require, usable

PROGRAM = """
import hashlib, json
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule

from muster import Collector, MultiSyncCollector, policies
from muster.policies.executor import layers_are_known
from muster.utils.private_names import tensordict_maker
from muster.testing import CountingEnv, SpaceEnv

torch.manual_seed(0)
WIDE = 512  # too much work for the NumPy variant, which rounds differently


def network(out):
    first, wide, last = torch.nn.Linear(2, WIDE), torch.nn.Linear(WIDE, WIDE), torch.nn.Linear(WIDE, out)
    return torch.nn.Sequential(first, torch.nn.Tanh(), wide, torch.nn.Tanh(), last)


def actor():
    module = TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical,
        return_log_prob=True, default_interaction_type=InteractionType.RANDOM,
    )
    return ProbabilisticTensorDictSequential(module, draw)


def counting():
    return CountingEnv(3)


def composite():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Dict({"c": spaces.Discrete(3)})})
    return SpaceEnv(space, spaces.Discrete(2))


def digest(batch):
    found = [str(batch.batch_size), str(batch.names), str(batch.device)]
    for key in sorted(batch.keys(True, True), key=str):
        value = batch.get(key)
        shown = value.contiguous().numpy().tobytes() if torch.is_tensor(value) else str(value.tolist())
        found.append([str(key), str(getattr(value, "dtype", "")), str(tuple(value.shape)),
                      hashlib.sha256(shown if isinstance(shown, bytes) else shown.encode()).hexdigest()])
    found += [[str(key), str(batch.get(key).batch_size), str(batch.get(key).names)]
              for key in sorted(batch.keys(True), key=str) if isinstance(batch.get(key), TensorDict)]
    return found


def run(make, policy, kind=Collector, **options):
    with kind(make, policy, seed=0, total_frames=48, **options) as collector:
        return [digest(batch) for batch in collector]


def main():
    results = {
        "random": run(counting, None, num_envs=2, frames_per_batch=16),
        "one": run(counting, None, frames_per_batch=16, layout="time_major"),
        "head": run(counting, policies.categorical(network(2)), num_envs=4, frames_per_batch=16),
        "tensordict": run(counting, actor(), num_envs=4, frames_per_batch=16),
        "nested": run(composite, None, num_envs=2, frames_per_batch=16, max_frames_per_traj=3),
        "device": run(counting, None, num_envs=2, frames_per_batch=16, storing_device="cpu", compact_obs=True),
        "workers": run([counting, counting], actor(), MultiSyncCollector, num_envs=2, frames_per_batch=16),
    }
    print(json.dumps([tensordict_maker() is not TensorDict, layers_are_known(), results]))


if __name__ == "__main__":
    main()
"""


def results(tmp_path: Any, **environ: str) -> Any:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_batches_are_the_same_without_private_names(tmp_path):
    *private, usual = results(tmp_path)
    *public, without = results(tmp_path, **{VARIABLE: "never"})
    assert (private, public) == ([True, True], [False, False])
    assert usual == without


class TestWhenTheyAreUsed:
    def test_in_checked_versions_that_have_them(self, monkeypatch):
        assert usable("torch", (torch.nn.Module(), ("_modules", "_parameters")))
        assert not usable("torch", (torch.nn.Module(), ("_modules", "_no_such_name")))
        monkeypatch.setenv(VARIABLE, "never")
        assert not usable("torch", (torch.nn.Module(), ("_modules",)))

    @pytest.mark.parametrize(
        ("version", "expected"),
        [
            ("2.5.1", False),
            ("2.6.0", True),
            ("2.13.0+cpu", True),
            ("2.99.0a0+git1", True),
            ("3", False),
            ("3.0.0", False),
            ("?", False),
        ],
    )
    def test_a_version_is_checked_or_not(self, version, expected, monkeypatch):
        private_names._is_checked.cache_clear()
        monkeypatch.setattr(torch, "__version__", version)
        try:
            assert usable("torch") == expected
        finally:
            private_names._is_checked.cache_clear()

    def test_an_adapter_without_a_public_way_refuses_other_versions(self, monkeypatch):
        pytest.importorskip("torchrl")
        require("torchrl", extra="torchrl")
        private_names._is_checked.cache_clear()
        monkeypatch.setitem(CHECKED, "torchrl", ((90, 1), (91,)))
        try:
            with pytest.raises(
                BadOption, match=r"torchrl>=90\.1,<91 only.*'muster-rl\[torchrl\]'"
            ):
                require("torchrl", extra="torchrl")
        finally:
            private_names._is_checked.cache_clear()


class TestPublicWays:
    def test_a_space_whose_generator_is_not_found_is_saved_by_a_pickle(
        self, monkeypatch
    ):
        monkeypatch.setattr(plain_state, "SPACE_GENERATOR", None)
        env, other = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
        env.reset(seed=1)
        env.action_space.seed(2)
        saved = take(env)
        assert saved["way"] == "pickle"
        draws = [int(env.action_space.sample()) for _ in range(20)]
        other.reset(seed=7)
        assert "trust=True" in str(restore(other, saved, trust=False))
        assert restore(other, saved, trust=True) is None
        assert [int(other.action_space.sample()) for _ in range(20)] == draws

    def test_ctrl_c_is_postponed_with_the_public_signal_module(self, monkeypatch):
        monkeypatch.setattr(interrupts, "_signal", signal)
        reached = []
        with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
            with interrupts.postponed():
                signal.raise_signal(signal.SIGINT)
                reached.append("after the signal")
        assert reached == ["after the signal"]

    @pytest.mark.slow
    def test_a_fork_server_gets_warnings_and_optimization(self, monkeypatch):
        from muster.workers.launch import _interpreter_flags

        monkeypatch.setattr(sys, "warnoptions", ["error", "ignore::DeprecationWarning"])
        usual = _interpreter_flags()
        monkeypatch.delattr(subprocess, "_args_from_interpreter_flags")
        assert _interpreter_flags() == ["-Werror", "-Wignore::DeprecationWarning"]
        assert set(_interpreter_flags()) <= set(usual)

    @pytest.mark.parametrize("mode", list(AutoresetMode))
    def test_a_vector_environment_that_would_reset_once_more_is_refused(
        self, mode, monkeypatch
    ):
        from muster.compat.prt_rl.envs import _sync_vector_in

        env = SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=mode
        )
        if mode != AutoresetMode.SAME_STEP:
            assert _sync_vector_in(env) is env
        monkeypatch.setenv(VARIABLE, "never")
        if mode == AutoresetMode.DISABLED:
            assert _sync_vector_in(env) is None
            return
        with pytest.raises(
            UnsupportedEnv, match=r"autoreset_mode=AutoresetMode\.DISABLED"
        ):
            _sync_vector_in(env)


def test_what_gymnasium_keeps_is_found_where_it_is():
    from muster.restore.snapshot import CONSTRUCTION, RANDOM

    assert {"_np_random", "_np_random_seed"} == RANDOM
    assert {"env_fns", "metadata", "_ezpickle_args", "_ezpickle_kwargs"} == CONSTRUCTION
    assert plain_state.SPACE_GENERATOR == "_np_random"
