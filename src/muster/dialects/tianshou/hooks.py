"""Tianshou's hook of several hooks."""

from __future__ import annotations

from typing import Any

from tianshou.data.collector import EpisodeRolloutHookMerged as TianshouMerged


class EpisodeRolloutHookMerged(TianshouMerged):  # type: ignore[misc] # of a package that mypy skips
    """Several episode hooks as one. Tianshou's own refuses whatever the first of them returns.

    Args:
        episode_rollout_hooks: called in this order.
        check_overlapping_keys: raise ``KeyError`` if two return an entry of the same name; else the last one stays.
    """

    def __call__(self, episode_batch: Any) -> dict[str, Any] | None:
        merged: dict[str, Any] = {}
        for hook in self.episode_rollout_hooks:
            entries = hook(episode_batch) or {}
            if self.check_overlapping_keys and (twice := sorted(merged.keys() & entries.keys())):
                raise KeyError(f"{hook} returns {twice}, as a hook before it does: give them names of their own")
            merged.update(entries)
        return merged or None
