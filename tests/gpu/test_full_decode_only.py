"""FULL_DECODE_ONLY: prefills are eager steps, in which the replay layers run in graphs."""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.probe import SIZES, WINDOW, Probe, schedule, worst
from vllm_ascend_replay.address_guard import NativeWeights
from vllm_ascend_replay.graphs import ReplayGraphs
from vllm_ascend_replay.reference.attention import Indexer, LatentAttention
from vllm_ascend_replay.tail import ReplayTail


@pytest.fixture(scope="module")
def probe(environment, tmp_path_factory):
    environment.setenv("ASCEND_REPLAY_GRAPH_SIZES", ",".join(map(str, SIZES)))
    probe = Probe(tmp_path_factory.mktemp("m"), "FULL_DECODE_ONLY", {"hidden_size": 1024})
    yield probe
    probe.engine.shutdown()


def test_graph_equals_eager(probe):
    run, steps = probe.run(schedule())
    used = {(step.padded, step.rows == step.padded) for step in steps if step.in_graph}
    print("buckets used (rows, exact)", sorted(used))
    assert {size for size, _ in used} == set(SIZES)
    with probe.eager_but_padded():
        padded_run, padded = probe.run(schedule())
    with probe.without_graphs():
        _, eager = probe.run(schedule())
    exact = [i for i, step in enumerate(steps) if step.in_graph and step.rows == step.padded]
    assert exact
    same, alone = worst(steps, padded), worst([steps[i] for i in exact], [eager[i] for i in exact])
    print(f"graph against eager, padded alike: {same:.2e}; exact sizes against no graphs at all: {alone:.2e}")
    print(f"padded against not padded: {worst(steps, eager):.2e}")
    assert same < 1e-3
    assert alone < 1e-3
    assert {n: r.tokens for n, r in run.requests.items()} == {n: r.tokens for n, r in padded_run.requests.items()}


@pytest.fixture(scope="module")
def dummy(probe):
    """``dummy(rows)``: a replay batch of ``rows`` and the states of a step for it."""
    runner, state = probe.runner, probe.state

    def make(rows):
        prepared = {}

        class Once:
            host, captures = probe.graphs.host, 0

            def capture(self, prepare):
                prepared["batch"] = prepare(rows)

        state.replay_graphs = Once()
        try:
            with torch.inference_mode():
                state.capture_inner_cudagraphs(
                    runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config
                )
        finally:
            state.replay_graphs = probe.graphs
        states = [
            torch.randn((rows, *like.shape[1:]), device="cuda").to(like.dtype).abs()
            for like in probe.graphs.host.states
        ]
        return prepared["batch"], states

    return make


def test_host_time(probe, dummy, monkeypatch):
    """The host's time of the tail's 20 layers, with and without graphs, in attention calls and outside them."""
    from vllm.forward_context import set_forward_context

    spent = [0.0]

    def timed(function):
        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for owner, name in ((LatentAttention, "_write"), (LatentAttention, "_attend"), (Indexer, "choose")):
        monkeypatch.setattr(owner, name, timed(getattr(owner, name)))
    batch, states = dummy(WINDOW)
    positions = torch.arange(WINDOW, device="cuda")

    def measure(graph):
        batch.graph = graph
        whole, inside = [], []
        with torch.inference_mode(), set_forward_context(None, probe.runner.vllm_config, num_tokens=WINDOW):
            for _ in range(30):
                torch.cuda.synchronize()
                spent[0], began = 0.0, time.perf_counter()
                ReplayTail._run_batch(probe.tail, batch, positions, *states)
                whole.append(time.perf_counter() - began)
                inside.append(spent[0])
        at = sorted(range(30), key=whole.__getitem__)[15]
        return whole[at] * 1e3, inside[at] * 1e3

    monkeypatch.setattr(probe.tail, "write_kv", lambda *_: None)
    eager, eager_attention = measure(None)
    graph, graph_attention = measure(probe.graphs)
    outside, graph_outside = eager - eager_attention, graph - graph_attention
    print(
        f"host time of the 20-layer tail, {WINDOW} rows (ms): eager {eager:.2f} (attention {eager_attention:.2f}), "
        f"graphs {graph:.2f} (attention {graph_attention:.2f}); outside attention {outside:.2f} -> {graph_outside:.2f} "
        f"({outside / graph_outside:.1f}x), whole {eager / graph:.1f}x"
    )
    assert outside >= 5 * graph_outside
    assert eager >= 2 * graph


def test_guard_cost(probe, dummy):
    batch, _ = dummy(WINDOW)
    guard, bucket = probe.graphs._guard, probe.graphs.buckets[WINDOW]
    began = time.perf_counter()
    for _ in range(1000):
        assert guard.moved(batch.kept, bucket.addresses) is None
    cost = (time.perf_counter() - began) * 1e3
    print(f"address guard: {cost:.1f} us a check of all {len(guard.weights.names)} weights")
    assert isinstance(guard.weights, NativeWeights)
    assert cost < 20


def test_memory(probe, monkeypatch):
    """Buckets share a pool: all of them cost little more than the largest alone."""
    import vllm.compilation.monitor as monitor
    from vllm.platforms import current_platform

    runner, state, tail = probe.runner, probe.state, probe.tail
    print("bytes per bucket", {size: bucket.bytes for size, bucket in probe.graphs.buckets.items()})
    print("pieces per bucket", {size: bucket.pieces for size, bucket in probe.graphs.buckets.items()})
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)

    def capture(sizes):
        monkeypatch.setattr(type(current_platform), "_global_graph_pool", current_platform.graph_pool_handle())
        graphs = ReplayGraphs(
            tail, sizes, host=probe.graphs.host, vllm_config=runner.vllm_config, device=probe.graphs.device
        )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        state.replay_graphs = graphs
        try:
            state.capture_inner_cudagraphs(
                runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config
            )
        finally:
            state.replay_graphs = probe.graphs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return graphs, free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved

    one, one_device, one_pool = capture(SIZES[-1:])
    every, all_device, all_pool = capture(SIZES)
    print(
        f"pool: the largest alone {one_pool / 2**20:.1f} MiB, all {all_pool / 2**20:.1f} MiB "
        f"({all_pool / one_pool - 1:+.1%}); device memory: {one_device / 2**20:.1f} and {all_device / 2**20:.1f} MiB"
    )
    assert one_pool
    assert all_pool < 1.1 * one_pool
    del one, every
