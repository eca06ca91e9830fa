"""What runs without torch: a worker process that steps environments never imports it.

``scripts/pythons.py`` runs this file with interpreters for which there is no CPU build of torch.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensordict"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
import gymnasium, numpy as np

from muster.rollout.columns import lane_columns
from muster.rollout.options import Execution, RolloutOptions
from muster.envs.build import build_env
from muster.restore.snapshot import restore, take
from muster.memory.slots import Layout, Slot
from muster.policies.random import random_policy
from muster.rng import GroupRng
from muster.rollout.first_call import begin_episodes
from muster.rollout.loop import rollout
from muster.rollout.progress import Progress
from muster.rollout.request import RolloutRequest
from muster.workers.build import make_group
from muster.testing.envs import CountingEnv


def rows(source, num_envs, steps, rollouts):
    built = build_env(source, num_envs)
    options = RolloutOptions(execution=Execution(own_rng=False, inference_mode=False))
    count = built.spec.num_envs
    group = make_group(built, 0, 0, count, options, GroupRng(3, 0, None), shared=True,
                       progress=Progress())
    group.reset(seeds=range(count))
    begin_episodes(group)
    policy = random_policy(built)
    layout = Layout(steps, count, lane_columns(built.spec, (), options))
    found = {"observation": [], "next.reward": [], "next.terminated": [], "action": []}
    for _ in range(rollouts):
        (lane,) = Slot(layout).lanes
        rollout(group, policy, RolloutRequest(0, 0, 0, "policy"), lane)
        for name in found:
            found[name] += lane.arrays[tuple(name.split("."))][:steps].tolist()
    built.close()
    return found


lengths = iter([2, 3])
counted = rows(lambda: CountingEnv(next(lengths)), 2, 4, 2)
whole, parts = rows("CartPole-v1", 3, 60, 1), rows("CartPole-v1", 3, 20, 3)

env = gymnasium.make("CartPole-v1")
env.reset(seed=1)
env.action_space.seed(2)
state = take(env)
draws = [[env.reset()[0].tolist(), int(env.action_space.sample())] for _ in range(3)]
other = gymnasium.make("CartPole-v1")
other.reset(seed=5)
assert restore(other, state, trust=False) is None
again = [[other.reset()[0].tolist(), int(other.action_space.sample())] for _ in range(3)]
print(json.dumps([counted, whole == parts, draws == again, np.__version__]))
"""


def test_rollouts_and_snapshots_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    counted, same, restored, _ = json.loads(done.stdout)
    lengths = [2, 3]
    assert counted["observation"] == [[[n, t % n] for n in lengths] for t in range(8)]
    assert counted["next.reward"] == [[t % n + 1 for n in lengths] for t in range(8)]
    assert counted["next.terminated"] == [
        [t % n == n - 1 for n in lengths] for t in range(8)
    ]
    assert same
    assert restored
