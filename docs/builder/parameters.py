"""The groups in which the page of a collector lists its parameters."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "What to collect": (
        "frames_per_batch",
        "total_frames",
        "round_up_total_frames",
        "init_random_frames",
        "interruptor",
        "seed",
        "episode_seeds",
        "track_seeds",
    ),
    "Environments": (
        "create_env_fn",
        "num_envs",
        "create_env_kwargs",
        "info",
        "obs_dtype",
        "compile_env",
        "prev_action_reward",
        "max_decorrelation_steps",
        "validate",
    ),
    "Policy": (
        "policy",
        "policy_factory",
        "trust_policy",
        "exploration_type",
        "execution",
        "compile_policy",
        "cudagraph_policy",
        "num_threads",
        "num_sub_threads",
        "inference",
    ),
    "Devices": ("device", "storing_device", "policy_device", "env_device", "capture"),
    "Weights": (
        "track_policy_version",
        "update_at_each_batch",
        "max_policy_lag",
        "weight_updater",
        "weight_sync_schemes",
        "weight_recv_schemes",
        "worker_idx",
    ),
    "Episodes": (
        "max_frames_per_traj",
        "reset_at_each_iter",
        "reset_when_done",
        "set_truncated",
        "traj_done_key",
        "track_traj_ids",
        "split_trajs",
        "trajs_per_batch",
        "traj_format",
    ),
    "Batches, and where they go": (
        "layout",
        "cat_results",
        "compact_obs",
        "return_same_td",
        "postproc",
        "replay_buffer",
        "replay_write_mode",
        "extend_buffer",
        "record",
        "slot_memory_limit",
    ),
    "Workers and nodes": (
        "num_workers",
        "backend",
        "start_method",
        "cpu_affinity",
        "preemptive_threshold",
    ),
    "Failures": ("on_failure", "timeouts", "crash_dir", "autosave"),
    "Looking at it": (
        "progress",
        "watch",
        "logger",
        "pre_collect_hook",
        "post_collect_hook",
        "on_step",
        "on_episode_done",
        "on_batch",
    ),
}
OTHERS = "Workers and nodes"  # options of node collectors only


def group_of(name: str) -> str:
    """Return the group of a parameter."""
    return next((group for group, names in GROUPS.items() if name in names), OTHERS)
