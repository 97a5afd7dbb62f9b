"""Counters of the replay layers, kept on the host: nothing here touches a device.

One process counts its own steps; `snapshot` is what a worker hands out, e.g. through vLLM's ``collective_rpc``. The
counters are plain integers that a step adds to; a `Reporter` reads them from a thread of its own, so that the log line
and the metrics cost a step nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# A child of vLLM's logger: its handlers and its format.
logger = logging.getLogger("vllm.vllm_ascend_replay")

NEVER_TRIMMED_AFTER = 1000
"""Steps with a prefill after which a process that trimmed none of them says so."""
METRICS_EVERY = 1.0
"""Seconds between two updates of the Prometheus metrics."""


@dataclass
class ReplayStats:
    """Counters since start-up or `reset`."""

    steps: int = 0
    """Steps with attention that reached the replay decision, dummy batches excluded."""
    replay_steps: int = 0
    """Steps whose replay layers ran on a replay batch."""
    skipped_steps: int = 0
    """Steps whose replay layers did not run at all: no rank of the whole data-parallel group kept a row. Any decode
    on any rank keeps rows, so these are prefill-only steps of the whole group: frequent on a prefill node or in a cold
    burst, rare where decodes always run."""
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
            if not (self.replay_steps or self.skipped_steps):
                self._look_for_a_trim()

    def _look_for_a_trim(self) -> None:
        if self.full_steps_by_reason.total() == NEVER_TRIMMED_AFTER:
            logger.warning(
                "decoder replay is on but has trimmed none of the first %d steps with a prefill; they ran in full: %s",
                NEVER_TRIMMED_AFTER,
                _by_reason(self.full_steps_by_reason),
            )


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


def difference(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """What was counted between two snapshots; all of ``now`` if counting began anew in between."""
    if before is None or now["steps"] < before["steps"]:
        return now
    values = {name: value - before[name] for name, value in now.items() if name != "full_steps_by_reason"}
    earlier = before["full_steps_by_reason"]
    grown = {reason: n - earlier.get(reason, 0) for reason, n in now["full_steps_by_reason"].items()}
    values["full_steps_by_reason"] = {reason: n for reason, n in grown.items() if n}
    return values


def _by_reason(steps: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in Counter(steps).most_common()) or "none"


def log_line(counted: dict[str, Any], seconds: float) -> str:
    """One line about ``seconds`` of activity.

    Args:
        counted: a snapshot, or the `difference` of two.
        seconds: what it covers.
    """
    share = 100 * counted["rows_kept"] / counted["rows_in"] if counted["rows_in"] else 100.0
    line = (
        f"decoder replay, last {seconds:.0f} s: replay layers ran {share:.1f} % of rows "
        f"({counted['rows_kept']} of {counted['rows_in']}), steps {counted['steps']}, "
        f"trimmed {counted['replay_steps']} (from graphs {counted['graph_steps']}), skipped {counted['skipped_steps']}"
    )
    full = counted["full_steps_by_reason"]
    return f"{line}, prefills in full: {_by_reason(full)}" if full else line


_METRICS = {
    "steps": ("steps", "Steps that reached the replay decision."),
    "replay_steps": ("replay_steps", "Steps whose replay layers ran on a replay batch."),
    "skipped_steps": (
        "skipped_steps",
        "Steps whose replay layers did not run: prefill-only steps of the whole data-parallel group that keep no row.",
    ),
    "rows_in": ("rows", "Rows of all steps."),
    "rows_kept": ("rows_kept", "Rows that the replay layers ran, padding excluded."),
    "graph_steps": ("graph_steps", "Replay steps that ran out of a captured graph."),
    "padded_rows": ("padded_rows", "Rows added to replay batches as padding."),
}


class PrometheusExport:
    """The counters as ``vllm_ascend_replay_*``, for prometheus_client's multiprocess mode.

    A worker has no HTTP server; in multiprocess mode it writes files that the API server's ``/metrics`` reads.
    """

    def __init__(self, engine: int) -> None:
        """
        Args:
            engine: the data-parallel rank, the label that vLLM's own metrics carry.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client import Counter as Metric

        # The files are what is read; a registry of our own never meets vLLM's.
        registry = CollectorRegistry()
        self._engine = str(engine)
        self._counters = {
            name: Metric(f"vllm_ascend_replay_{metric}", text, ["engine"], registry=registry).labels(self._engine)
            for name, (metric, text) in _METRICS.items()
        }
        self._full = Metric(
            "vllm_ascend_replay_full_steps",
            "Steps with a prefill whose replay layers ran every row, by reason.",
            ["engine", "reason"],
            registry=registry,
        )

    @staticmethod
    def possible() -> bool:
        """Whether the server runs prometheus_client in multiprocess mode."""
        return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))

    def add(self, counted: dict[str, Any]) -> None:
        """Add a `difference`."""
        for name, counter in self._counters.items():
            counter.inc(counted[name])
        for reason, steps in counted["full_steps_by_reason"].items():
            self._full.labels(self._engine, reason).inc(steps)


class Reporter:
    """Tells what was counted: a log line each ``log_every`` seconds of activity, and metrics where they are read."""

    def __init__(self, log_every: float, export: PrometheusExport | None = None) -> None:
        """
        Args:
            log_every: seconds; 0: no line.
            export: where metrics go.
        """
        self.log_every = log_every
        self.export = export
        self._logged: dict[str, Any] = snapshot()
        self._exported: dict[str, Any] | None = None
        self._since = time.monotonic()

    def tick(self, now: float) -> None:
        """Look at the counters once.

        Args:
            now: `time.monotonic` in seconds.
        """
        counters = snapshot()
        if self.export is not None:
            counted = difference(counters, self._exported)
            if counted["steps"]:
                self.export.add(counted)
            self._exported = counters
        counted = difference(counters, self._logged)
        if not counted["steps"]:
            # Idle: the next line covers activity only.
            self._since, self._logged = now, counters
        elif self.log_every and now - self._since >= self.log_every:
            logger.info("%s", log_line(counted, now - self._since))
            self._since, self._logged = now, counters

    def start(self) -> None:
        """Tick in a daemon thread for the rest of the process; without a reader there is no thread."""
        if not self.log_every and self.export is None:
            return
        period = min(METRICS_EVERY, self.log_every or METRICS_EVERY)
        threading.Thread(target=self._run, args=(period,), name="replay-stats", daemon=True).start()

    def _run(self, period: float) -> None:
        while True:
            time.sleep(period)
            try:
                self.tick(time.monotonic())
            except Exception:
                logger.exception("the counters of decoder replay are no longer reported")
                return


_reporter: Reporter | None = None


def start_reporting(log_every: float, engine: int) -> None:
    """Start the process's `Reporter`; a second call changes nothing.

    Args:
        log_every: seconds of activity between two log lines; 0: none.
        engine: the data-parallel rank.
    """
    global _reporter
    if _reporter is None:
        _reporter = Reporter(log_every, PrometheusExport(engine) if PrometheusExport.possible() else None)
        _reporter.start()
