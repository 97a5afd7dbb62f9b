"""FULL_DECODE_ONLY and a one-token chunk in the middle of a bounded prompt: it must not run in a decode graph."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.probe import Probe, request

# The window is 32: it begins at position 168 of 200. Two one-token chunks lie inside it.
LENGTH, CHUNKS = 200, (180, 1, 1)


@pytest.fixture(scope="module")
def probe(environment, tmp_path_factory):
    environment.setenv("ASCEND_REPLAY_GRAPH_SIZES", "32,64")
    probe = Probe(tmp_path_factory.mktemp("m"), "FULL_DECODE_ONLY", {"dtype": "float32"}, dtype="float32")
    yield probe
    probe.engine.shutdown()


def in_chunks(probe):
    """Log-probabilities of one request's tokens, and the rows of each step that ran in a FULL graph."""
    scheduler, budget, full = probe.engine._scheduler, list(CHUNKS), []
    schedule, limit = scheduler.schedule, scheduler.max_num_scheduled_tokens
    manager = probe.runner.cudagraph_manager
    run_fullgraph = manager.run_fullgraph

    def limited(*args, **kwargs):
        scheduler.max_num_scheduled_tokens = budget.pop(0) if budget else limit
        return schedule(*args, **kwargs)

    def noted(desc):
        full.append(desc.num_tokens)
        return run_fullgraph(desc)

    scheduler.schedule, manager.run_fullgraph = limited, noted
    try:
        run, _ = probe.run([request("chunked", LENGTH, 0, 4)])
    finally:
        scheduler.schedule, scheduler.max_num_scheduled_tokens = schedule, limit
        del manager.run_fullgraph
    chunked = run.requests["chunked"]
    assert chunked.prefills[0].steps == [*CHUNKS, 18, 1, 1, 1]
    return torch.tensor(chunked.logprobs), chunked.tokens, full


def test_a_one_token_chunk_stays_out_of_decode_graphs(probe, monkeypatch):
    guarded, tokens, full = in_chunks(probe)
    assert full == [1, 1, 1]  # the three decodes
    with monkeypatch.context() as patch, probe.without_graphs():
        patch.setattr(probe.runner.cudagraph_manager, "_candidates", {})
        eager, eager_tokens, full = in_chunks(probe)
    assert full == []
    # Negative control: without the guard the chunks run in decode graphs, over pages that nobody wrote.
    with monkeypatch.context() as patch:
        patch.setattr(type(probe.state), "forbids_decode_graph", lambda *_: False)
        unguarded, _, full = in_chunks(probe)
    assert full == [1] * 5
    right, wrong = (guarded - eager).abs().max().item(), (unguarded - eager).abs().max().item()
    print(f"max |d logprob| against eager: guarded {right:.2e}, not guarded {wrong:.2e}")
    assert tokens == eager_tokens
    assert right < 1e-4
    assert not wrong < 1e-2
