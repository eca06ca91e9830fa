"""rlpyt's samplers as far as a collector sees them: who is called when, and what is shared."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.fakes.rlpyt_parts import (
    make_samples,
    make_step_buffer,
    part_of,
    shared_zeros,
)

WAIT_S = 30.0
fork = multiprocessing.get_context("fork")  # as rlpyt does


class SerialSampler:
    """One collector in this process."""

    def __init__(
        self,
        CollectorCls: Any,
        envs: Sequence[Any],
        agent: Any,
        TrajInfoCls: Any,
        T: int,
        *,
        samples: Any = None,
        max_decorrelation_steps: int = 0,
    ) -> None:
        B = len(envs)
        self.samples = make_samples(T, B) if samples is None else samples
        self.collector = CollectorCls(
            rank=0,
            envs=envs,
            samples_np=self.samples,
            batch_T=T,
            TrajInfoCls=TrajInfoCls,
            agent=agent,
            global_B=B,
            env_ranks=list(range(B)),
        )
        self.agent_inputs, self.traj_infos = self.collector.start_envs(
            max_decorrelation_steps
        )
        self.collector.start_agent()

    def obtain_samples(self, itr: int) -> tuple[Any, list[Any]]:
        """The buffers, whose content the next call replaces, and records of episodes."""
        collected = self.collector.collect_batch(
            self.agent_inputs, self.traj_infos, itr
        )
        agent_inputs, self.traj_infos, completed = collected
        self.collector.reset_if_needed(agent_inputs)
        self.agent_inputs = agent_inputs
        return self.samples, completed


def worker(common: Any, own: Any) -> None:
    """What a process of CpuSampler or GpuSampler does from its beginning to its end."""
    torch.set_num_threads(1)
    collector = common.CollectorCls(
        rank=own.rank,
        envs=own.envs,
        samples_np=own.samples_np,
        batch_T=common.batch_T,
        TrajInfoCls=common.TrajInfoCls,
        agent=common.agent,
        sync=own.sync,
        step_buffer_np=own.step_buffer_np,
        global_B=common.global_B,
        env_ranks=own.env_ranks,
    )
    agent_inputs, traj_infos = collector.start_envs(common.max_decorrelation_steps)
    collector.start_agent()
    evaluator = common.eval_CollectorCls(
        rank=own.rank,
        envs=own.eval_envs,
        TrajInfoCls=common.TrajInfoCls,
        traj_infos_queue=common.eval_traj_infos_queue,
        max_T=common.eval_max_T,
        agent=common.agent,
        sync=own.sync,
        step_buffer_np=own.eval_step_buffer_np,
    )
    ctrl = common.ctrl
    ctrl.barrier_out.wait(WAIT_S)
    while True:
        collector.reset_if_needed(agent_inputs)
        ctrl.barrier_in.wait(WAIT_S)
        if ctrl.quit.value:
            break
        if ctrl.do_eval.value:
            evaluator.collect_evaluation(ctrl.itr.value)
        else:
            agent_inputs, traj_infos, completed = collector.collect_batch(
                agent_inputs, traj_infos, ctrl.itr.value
            )
            for info in completed:
                common.traj_infos_queue.put(info)
        ctrl.barrier_out.wait(WAIT_S)


class ParallelSampler:
    """Worker processes, and in this one the agent: in a server if ``server``, else only shared with
    the workers.

    Args:
        make_env: called with the number of the environment.
        agent: two of them: each acts for one half of the workers, and then lets the other act.
        workers: how many; each has ``B`` of the environments.
    """

    def __init__(
        self,
        CollectorCls: Any,
        eval_CollectorCls: Any,
        make_env: Callable[[int], Any],
        agent: Any,
        TrajInfoCls: Any,
        *,
        T: int,
        B: int = 2,
        workers: int = 2,
        server: bool = True,
        bootstrap: bool = False,
        max_decorrelation_steps: int = 0,
        eval_max_T: int = 1,
        eval_max_trajectories: int | None = None,
    ) -> None:
        total = B * workers
        agents = agent if isinstance(agent, list) else [agent]
        share = workers // len(agents)
        self.halves = [
            (
                half,
                range(i * share, (i + 1) * share),
                slice(i * share * B, (i + 1) * share * B),
            )
            for i, half in enumerate(agents)
        ]
        self.T, self.eval_max_T, self.eval_max_trajectories = (
            T,
            eval_max_T,
            eval_max_trajectories,
        )
        self.mid_batch_reset, self.server, self.workers = (
            CollectorCls.mid_batch_reset,
            server,
            workers,
        )
        self.samples = make_samples(T, total, bootstrap=bootstrap, zeros=shared_zeros)
        self.step, self.eval_step = (
            make_step_buffer(total, shared_zeros) for _ in range(2)
        )
        self.obs_ready, self.act_ready = (
            [fork.Semaphore(0) for _ in range(workers)] for _ in range(2)
        )
        self.stop_eval = fork.RawValue("b", 0)
        self.ctrl = SimpleNamespace(
            quit=fork.RawValue("b", 0),
            do_eval=fork.RawValue("b", 0),
            itr=fork.RawValue("l", 0),
            barrier_in=fork.Barrier(workers + 1),
            barrier_out=fork.Barrier(workers + 1),
        )
        self.queue, self.eval_queue = fork.Queue(), fork.Queue()
        common = SimpleNamespace(
            CollectorCls=CollectorCls,
            eval_CollectorCls=eval_CollectorCls,
            TrajInfoCls=TrajInfoCls,
            agent=None if server else agent,
            batch_T=T,
            global_B=total,
            ctrl=self.ctrl,
            max_decorrelation_steps=max_decorrelation_steps,
            traj_infos_queue=self.queue,
            eval_traj_infos_queue=self.eval_queue,
            eval_max_T=eval_max_T,
        )
        self.processes = []
        for w in range(workers):
            mine = slice(w * B, (w + 1) * B)
            own = SimpleNamespace(
                rank=w,
                envs=[make_env(i) for i in range(total)[mine]],
                eval_envs=[make_env(i) for i in range(total)[mine]],
                env_ranks=list(range(total)[mine]),
                samples_np=part_of(self.samples, (slice(None), mine)),
                sync=SimpleNamespace(
                    stop_eval=self.stop_eval,
                    obs_ready=self.obs_ready[w],
                    act_ready=self.act_ready[w],
                ),
                step_buffer_np=part_of(self.step, mine) if server else None,
                eval_step_buffer_np=part_of(self.eval_step, mine) if server else None,
            )
            self.processes.append(
                fork.Process(target=worker, args=(common, own), daemon=True)
            )
        for process in self.processes:
            process.start()
        self.ctrl.barrier_out.wait(WAIT_S)
        for half in agents if server else ():
            half.collector_initialize(global_B=total, env_ranks=list(range(total)))
            half.reset()
            half.sample_mode(0)

    def obtain_samples(self, itr: int) -> Any:
        self.ctrl.itr.value = itr
        self.ctrl.barrier_in.wait(WAIT_S)
        if self.server:
            self._serve(itr)
        self.ctrl.barrier_out.wait(WAIT_S)
        return self.samples

    def evaluate_agent(self, itr: int) -> list[Any]:
        """Records of episodes, in whatever order the workers give them."""
        self.ctrl.itr.value, self.ctrl.do_eval.value, self.stop_eval.value = itr, 1, 0
        self.ctrl.barrier_in.wait(WAIT_S)
        infos: list[Any] = []
        left = self.workers
        if self.server:
            left = self._serve_evaluation(itr, infos, left)
        while left:
            left = self._take(infos, left)
            if (
                self.eval_max_trajectories is not None
                and len(infos) >= self.eval_max_trajectories
            ):
                self.stop_eval.value = 1
        self.ctrl.barrier_out.wait(WAIT_S)
        self.ctrl.do_eval.value = 0
        return infos

    def close(self) -> list[int | None]:
        """Exit codes of the workers."""
        self.ctrl.quit.value = 1
        self.ctrl.barrier_in.wait(WAIT_S)
        for process in self.processes:
            process.join(WAIT_S)
        self.queue.close()
        self.eval_queue.close()
        return [process.exitcode for process in self.processes]

    def _take(self, infos: list[Any], left: int) -> int:
        info = self.eval_queue.get(timeout=WAIT_S)
        if info is not None:
            infos.append(info)
        return left - (info is None)

    def _serve(self, itr: int) -> None:
        steps = [part_of(self.step, envs) for _, _, envs in self.halves]
        for agent, _, _ in self.halves:
            agent.sample_mode(itr)
        for _ in range(self.T):
            for (agent, workers, _), step in zip(self.halves, steps, strict=True):
                self._acquire(workers)
                if self.mid_batch_reset:
                    _reset_agent(agent, step)
                _act(agent, step)
                self._release(workers)
        for (agent, workers, envs), step in zip(self.halves, steps, strict=True):
            self._acquire(workers)
            if "bootstrap_value" in self.samples.agent:
                self.samples.agent.bootstrap_value[:, envs] = agent.value(
                    *_inputs(step)
                ).numpy()
            _reset_agent(agent, step)

    def _serve_evaluation(self, itr: int, infos: list[Any], left: int) -> int:
        ((agent, workers, _),), step = self.halves, self.eval_step
        agent.reset()
        agent.eval_mode(itr)
        step.action[:] = 0
        step.reward[:] = 0
        for _ in range(self.eval_max_T):
            self._acquire(workers)
            _reset_agent(agent, step)
            while not self.eval_queue.empty():
                left = self._take(infos, left)
            _act(agent, step)
            if (
                self.eval_max_trajectories is not None
                and len(infos) >= self.eval_max_trajectories
            ):
                self.stop_eval.value = 1
            self._release(workers)
            if self.stop_eval.value:
                break
        self._acquire(workers)
        return left

    def _acquire(self, workers: Sequence[int]) -> None:
        for w in workers:
            assert self.obs_ready[w].acquire(True, WAIT_S), (
                "a worker has not shown its observations"
            )
            assert not self.obs_ready[w].acquire(False), (
                "a worker was ahead of the server"
            )

    def _release(self, workers: Sequence[int]) -> None:
        for w in workers:
            self.act_ready[w].release()


def _reset_agent(agent: Any, step: Any) -> None:
    for b in np.flatnonzero(step.done):
        step.action[b] = 0
        step.reward[b] = 0
        agent.reset_one(idx=int(b))


def _act(agent: Any, step: Any) -> None:
    action, agent_info = agent.step(*_inputs(step))
    step.action[:] = action.numpy()
    step.agent_info.value[:] = agent_info.value.numpy()
    step.agent_info.memory.calls[:] = agent_info.memory.calls.numpy()


def _inputs(step: Any) -> Any:
    return tuple(
        torch.from_numpy(x.copy()) for x in (step.observation, step.action, step.reward)
    )
