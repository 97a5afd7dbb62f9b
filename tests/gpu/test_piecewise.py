"""FULL_AND_PIECEWISE: model graphs break out to replay batches, which run in graphs of their own."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.probe import SIZES, Probe, request, schedule, worst


@pytest.fixture(scope="module")
def probe(environment, tmp_path_factory):
    environment.setenv("ASCEND_REPLAY_GRAPH_SIZES", ",".join(map(str, SIZES)))
    probe = Probe(tmp_path_factory.mktemp("m"), "FULL_AND_PIECEWISE")
    yield probe
    probe.engine.shutdown()


def test_model_graphs_break_out_once(probe):
    entries = probe.runner.cudagraph_manager.breakable_cg_runner.entries
    breaks = {key.num_tokens: entry.capture.num_eager_breaks for key, entry in entries.items()}
    print("PIECEWISE model graphs: breaks", breaks)
    # One for each layer before the cut, one for the n-gram lookup, one for all layers from the cut on.
    assert set(breaks.values()) == {probe.tail.cut + 2}
    assert sorted(probe.graphs.buckets) == SIZES


def test_graph_equals_eager(probe):
    run, steps = probe.run(schedule())
    assert run.stats["graph_steps"] > 10
    used = {(step.padded, step.rows == step.padded) for step in steps if step.in_graph}
    print("buckets used (rows, exact)", sorted(used))
    assert {size for size, _ in used} == set(SIZES)
    with probe.eager_but_padded():
        padded_run, padded = probe.run(schedule())
    with probe.without_graphs():
        _, eager = probe.run(schedule())
    assert not any(step.in_graph for step in (*padded, *eager))
    same, other = worst(steps, padded), worst(steps, eager)
    print(f"graph against eager, padded alike: {same:.2e}; not padded: {other:.2e}")
    assert same < 1e-3
    tokens = {name: r.tokens for name, r in run.requests.items()}
    assert tokens == {name: r.tokens for name, r in padded_run.requests.items()}


def test_repeatable_after_a_cache_reset(probe):
    first, a = probe.run(schedule())
    second, b = probe.run(schedule())
    assert worst(a, b) == 0
    assert {n: r.logprobs for n, r in first.requests.items()} == {n: r.logprobs for n, r in second.requests.items()}


def test_the_comparison_can_fail(probe):
    """Another prompt of the same length gives other states, by far."""
    _, a = probe.run([request("a", 100, 0)])
    _, b = probe.run([request("b", 100, 0)])
    assert worst(a, b) > 0.1


def test_live_metadata_and_no_capture_while_serving(probe, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("captured while serving")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    # The same rows over other pages: only the metadata tells.
    _, a = probe.run([request("x", 100, 0)])
    _, b = probe.run([request("filler", 600, 0), request("x", 100, 1)])
    assert [step.padded for step in a] == [32]
    assert worst(a, b[-1:]) < 1e-3


def test_a_moved_tensor_is_caught(probe, caplog):
    layer = probe.model.layers[probe.tail.cut + 3]
    _, before = probe.run([request("x", 100, 0)])
    old = layer.moe.w1
    layer.moe.w1 = old.clone()
    try:
        for _ in range(20):
            _, after = probe.run([request("x", 100, 0)])
    finally:
        layer.moe.w1 = old
    bucket = probe.graphs.buckets[32]
    assert bucket.failed
    assert not after[-1].in_graph
    assert worst(before, after) < 1e-3
    assert not any(b.failed for size, b in probe.graphs.buckets.items() if size != 32)
    bucket.failed = False
