"""Counters, what they cost, the log line, the metrics, and the word about a server that never trims."""

import logging
import os
import subprocess
import sys
import time

import pytest

from vllm_ascend_replay import stats


@pytest.fixture(autouse=True)
def _fresh():
    stats.reset()
    yield
    stats.reset()


@pytest.fixture
def log(caplog, monkeypatch):
    """Records of the package's logger, whatever vLLM did to its parents."""
    monkeypatch.setattr(stats.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(stats.logger, "propagate", False)
    stats.logger.setLevel(logging.INFO)
    return caplog


def test_counters_and_snapshot_is_a_copy():
    counters = stats.current()
    counters.count_replay(700, 128, 0)
    counters.count_replay(512, 0, 0)
    counters.count_replay(300, 0, 1)
    counters.count_replay(300, 7, 9, graph=True)
    counters.count_full(40, "model graph")
    counters.count_full(3)
    snapshot = stats.snapshot()
    assert snapshot == {
        "steps": 6,
        "replay_steps": 3,
        "skipped_steps": 1,
        "rows_in": 1855,
        "rows_kept": 128 + 7 + 43,
        "graph_steps": 1,
        "padded_rows": 10,
        "full_steps_by_reason": {"model graph": 1},
    }
    snapshot["full_steps_by_reason"]["x"] = 1
    snapshot["steps"] = 99
    assert stats.snapshot()["steps"] == 6
    assert "x" not in stats.snapshot()["full_steps_by_reason"]
    stats.reset()
    assert stats.snapshot()["steps"] == 0


def test_difference():
    counters = stats.current()
    counters.count_full(40, "a")
    before = stats.snapshot()
    counters.count_full(10, "b")
    counters.count_replay(300, 7, 9, graph=True)
    counted = stats.difference(stats.snapshot(), before)
    assert counted == {
        "steps": 2,
        "replay_steps": 1,
        "skipped_steps": 0,
        "rows_in": 310,
        "rows_kept": 17,
        "graph_steps": 1,
        "padded_rows": 9,
        "full_steps_by_reason": {"b": 1},
    }
    assert stats.difference(before, None) == before
    stats.reset()
    assert stats.difference(stats.snapshot(), before)["steps"] == 0  # counting began anew


def test_a_step_costs_less_than_two_microseconds():
    counters, n = stats.current(), 20_000
    best = float("inf")
    for _ in range(5):  # the machine may be busy; the cost is the best round's
        began = time.perf_counter()
        for _ in range(n):
            counters.count_replay(4096, 128, 0, graph=True)
        for _ in range(n):
            counters.count_full(8, "model graph")
        best = min(best, (time.perf_counter() - began) / (2 * n))
    assert best < 2e-6, f"{best * 1e6:.2f} us a step"


def test_log_line_covers_activity_only(log):
    reporter = stats.Reporter(10.0)
    start = reporter._since
    counters = stats.current()
    reporter.tick(start + 500)  # idle: nothing is said and the window moves
    counters.count_replay(1000, 128, 0)
    counters.count_replay(600, 0, 0)
    counters.count_full(400, "model graph")
    reporter.tick(start + 505)
    assert not log.messages
    reporter.tick(start + 511)
    reporter.tick(start + 530)
    assert log.messages == [
        "decoder replay, last 11 s: replay layers ran 26.4 % of rows (528 of 2000), steps 3, trimmed 1 "
        "(from graphs 0), skipped 1, prefills in full: model graph 1"
    ]
    counters.count_full(400)
    reporter.tick(start + 545)
    assert log.messages[1].endswith("ran 100.0 % of rows (400 of 400), steps 1, trimmed 0 (from graphs 0), skipped 0")


def test_without_a_reader_there_is_no_thread(monkeypatch):
    monkeypatch.setattr(stats.threading, "Thread", lambda **_: pytest.fail("a thread was made"))
    stats.Reporter(0.0).start()


def test_a_server_that_never_trims_says_so_once(log):
    counters = stats.current()
    for i in range(2 * stats.NEVER_TRIMMED_AFTER):
        counters.count_full(8)  # decodes do not count
        counters.count_full(8, "model graph" if i % 4 else "no prompt of the step is bounded")
    assert log.messages == [
        "decoder replay is on but has trimmed none of the first 1000 steps with a prefill; they ran in full: "
        "model graph 750, no prompt of the step is bounded 250"
    ]


def test_a_server_that_trimmed_once_does_not(log):
    counters = stats.current()
    counters.count_replay(300, 0, 0)
    for _ in range(2 * stats.NEVER_TRIMMED_AFTER):
        counters.count_full(8, "model graph")
    assert not log.messages


_EXPORT = """
import time
from vllm_ascend_replay import stats
stats.start_reporting(0.0, 3)
counters = stats.current()
counters.count_replay(1000, 128, 2, graph=True)
counters.count_replay(500, 0, 0)
counters.count_full(40, "model graph")
time.sleep(2.5)
counters.count_full(40, "model graph")
time.sleep(2.5)
"""


def test_metrics_in_multiprocess_mode(tmp_path):
    """Two worker processes write, this one reads, as an API server does."""
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client import multiprocess

    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", _EXPORT], env=env) for _ in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    read = {
        (sample.name, sample.labels.get("reason")): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels["engine"] == "3"
    }
    assert read == {
        ("vllm_ascend_replay_steps_total", None): 8.0,
        ("vllm_ascend_replay_replay_steps_total", None): 2.0,
        ("vllm_ascend_replay_skipped_steps_total", None): 2.0,
        ("vllm_ascend_replay_rows_total", None): 3160.0,
        ("vllm_ascend_replay_rows_kept_total", None): 416.0,
        ("vllm_ascend_replay_graph_steps_total", None): 2.0,
        ("vllm_ascend_replay_padded_rows_total", None): 4.0,
        ("vllm_ascend_replay_full_steps_total", "model graph"): 4.0,
    }
