"""What rlpyt's collectors are to record, written down once more: environment by environment, in
plain Python.
"""

from __future__ import annotations

from typing import Any

Columns = dict[str, list[Any]]


def expected(
    length: int, life: int, T: int, batches: int, *, wait: bool
) -> tuple[list[Columns], list[list[int]]]:
    """Batches of one ``Counting`` with an ``Agent``, and the lengths of the episodes that ended in
    each of them.
    """
    t = calls = prev_action = prev_reward = 0
    parts, ended = [], []
    for _ in range(batches):
        rows: Columns = {
            name: []
            for name in ("t", "action", "reward", "done", "over", "calls", "inputs")
        }
        done = False
        lengths = []
        for _ in range(T):
            if wait and done:
                for name, column in rows.items():
                    column.append(
                        True if name == "done" else (0, 0, 0) if name == "inputs" else 0
                    )
                continue
            calls += 1
            action = (t + calls + prev_action + prev_reward) % 5
            before, t = t, t + 1
            over, done = t == length, t == length or t % life == 0
            values = (
                before,
                action,
                t,
                done,
                over,
                calls,
                (before, prev_action, prev_reward),
            )
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
            prev_action, prev_reward = (0, 0) if done else (action, t)
            calls = 0 if done else calls
            lengths += [length] * over
            t = 0 if over else t
        parts.append(rows)
        ended.append(lengths)
    return parts, ended
