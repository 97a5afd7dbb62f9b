"""Counters of the replay layers, kept on the host: nothing here touches a device.

One process counts its own steps; `snapshot` is what a worker hands out, e.g. through vLLM's ``collective_rpc``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReplayStats:
    """Counters since start-up or `reset`."""

    steps: int = 0
    """Steps with attention that reached the replay decision, dummy batches excluded."""
    replay_steps: int = 0
    """Steps whose replay layers ran on a replay batch."""
    skipped_steps: int = 0
    """Steps whose replay layers did not run at all: no rank of the DP group kept a row."""
    rows_in: int = 0
    """Rows of all steps."""
    rows_kept: int = 0
    """Rows that the replay layers ran, padding excluded."""
    graph_steps: int = 0
    """Replay steps that ran out of a captured graph."""
    padded_rows: int = 0
    """Rows added to replay batches as padding."""
    full_steps_by_reason: Counter[str] = field(default_factory=Counter)
    """Steps with a prefill whose replay layers ran every row, by reason."""

    def count_replay(self, rows_in: int, rows_kept: int, padded: int, *, graph: bool = False) -> None:
        """A step that ran on a replay batch, or skipped the replay layers (``rows_kept + padded == 0``)."""
        self.steps += 1
        self.rows_in += rows_in
        self.rows_kept += rows_kept
        self.padded_rows += padded
        if rows_kept + padded:
            self.replay_steps += 1
            self.graph_steps += graph
        else:
            self.skipped_steps += 1

    def count_full(self, rows_in: int, reason: str | None = None) -> None:
        """A step whose replay layers ran every row; ``reason`` only where it had a prefill."""
        self.steps += 1
        self.rows_in += rows_in
        self.rows_kept += rows_in
        if reason is not None:
            self.full_steps_by_reason[reason] += 1


_stats = ReplayStats()


def current() -> ReplayStats:
    """The process's counters."""
    return _stats


def reset() -> None:
    """Start counting anew."""
    global _stats
    _stats = ReplayStats()


def snapshot() -> dict[str, Any]:
    """A plain copy of the counters: ints, and ``full_steps_by_reason`` as ``{reason: steps}``."""
    values = dict(vars(_stats))
    values["full_steps_by_reason"] = dict(_stats.full_steps_by_reason)
    return values
