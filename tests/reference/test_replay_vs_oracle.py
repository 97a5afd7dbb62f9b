"""Decoder replay on the paged model: kept rows are those of a full run whose late windows begin at ``kv_start``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.test_model_vs_oracle import TOLERANCE, check

CHUNKS = [(), (1,) * 30, (13, 1, 29), (30, 29, 127), (57, 100), (70, 86), (199,), (190, 1)]


def check_kept(request, want) -> None:
    """Kept rows equal the oracle's, and rows that ran but were not kept are exact zeros."""
    kept, trimmed = np.flatnonzero(request.kept), np.flatnonzero(request.ran & ~request.kept)
    at = kept - want.start
    np.testing.assert_allclose(request.hidden[kept].numpy(), want.hidden[at], rtol=0, atol=TOLERANCE)
    for layer, entering in request.entering.items():
        np.testing.assert_allclose(entering[kept].numpy(), want.entering[layer][at], rtol=0, atol=TOLERANCE)
    for layer, aux in request.aux.items():
        np.testing.assert_allclose(aux[kept].numpy(), want.aux(layer)[at], rtol=0, atol=TOLERANCE)
        assert not aux[trimmed].any()
    assert not request.hidden[trimmed].any()


def run_in_chunks(stepper, request, chunks) -> None:
    stepper.run(request, *chunks) if chunks else None
    stepper.run(request, request.prefill_len - request.computed, *[1] * (request.left + request.computed - 200))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 128, "swa_block_size": 32}], ids=["w8", "w128"])
def test_final(make_stepper, tokens, chunks, overrides):
    stepper, oracle = make_stepper(settings={"ASCEND_REPLAY": "1"}, **overrides)
    window, ids = stepper.config.sliding_window, tokens(206)
    request = stepper.add(ids, prompt_len=200)
    run_in_chunks(stepper, request, chunks)
    assert request.kept.tolist() == [False] * (200 - window) + [True] * (window + 6)
    check_kept(request, oracle.run(ids, floors=oracle.late_floor(200 - window, 206)))
    assert stepper.null_block_untouched()


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_exact_equals_the_full_run(make_stepper, tokens, chunks):
    stepper, oracle = make_stepper(settings={"ASCEND_REPLAY": "1", "ASCEND_REPLAY_KEEP": "exact"})
    ids = tokens(206)
    request = stepper.add(ids, prompt_len=200)
    run_in_chunks(stepper, request, chunks)
    full = oracle.run(ids)
    np.testing.assert_allclose(request.logits[199:].numpy(), full.logits[199:], rtol=0, atol=TOLERANCE)
    layers = stepper.model.num_layers - stepper.model.cut - 1
    assert request.kept.sum() == 1 + layers * (stepper.config.sliding_window - 1) + 6


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunk(make_stepper, tokens, chunks):
    stepper, oracle = make_stepper(settings={"ASCEND_REPLAY": "1", "ASCEND_REPLAY_POLICY": "chunk"})
    window, ids = stepper.config.sliding_window, tokens(206)
    request = stepper.add(ids, prompt_len=200)
    run_in_chunks(stepper, request, chunks)
    floor, begin = np.zeros(206, dtype=int), 0
    for count in (*chunks, 200 - sum(chunks)):
        end = begin + count
        if count > window:
            floor[begin:end] = end - window
        begin = end
    floor = np.minimum(floor, np.arange(206))
    late = range(stepper.model.cut + 1, stepper.model.num_layers)
    check_kept(request, oracle.run(ids, floors=dict.fromkeys(late, floor)))


def test_with_one_late_layer_logits_are_those_of_the_full_run(make_stepper, tokens):
    stepper, oracle = make_stepper("tiny-one-late-layer", settings={"ASCEND_REPLAY": "1"})
    ids = tokens(206)
    request = stepper.add(ids, prompt_len=200)
    stepper.run(request, 130, 70, *[1] * 6)
    np.testing.assert_allclose(request.logits[199:].numpy(), oracle.run(ids).logits[199:], rtol=0, atol=TOLERANCE)


def test_mixed_batch(make_stepper, tokens):
    """A decode, a trimmed prompt, one that keeps every row, a short one and a prefix hit, with padding."""
    stepper, oracle = make_stepper(settings={"ASCEND_REPLAY": "1"})
    window = stepper.config.sliding_window
    decoding = stepper.add(tokens(60, seed=1), prompt_len=40)
    stepper.run(decoding, 40)
    trimmed = stepper.add(tokens(95, seed=2), prompt_len=90)
    keeps = stepper.add(tokens(60, seed=3), prompt_len=50, prompt_logprobs=True)
    short = stepper.add(tokens(12, seed=4), prompt_len=window)
    hit = stepper.add(decoding.tokens[:32] + tokens(33, seed=5), prompt_len=60, donor=decoding, hit=32)
    report = stepper.step([(decoding, 1), (trimmed, 37), (keeps, 25), (short, window), (hit, 30)], pad_tokens=2)
    assert report.kept_rows is not None
    stepper.step([(decoding, 1), (trimmed, 53), (keeps, 25), (short, 1), (hit, 6)], pad_tokens=1)
    unfinished = [decoding, trimmed, keeps, short, hit]
    while unfinished := [request for request in unfinished if request.left]:
        stepper.step([(request, 1) for request in unfinished])
    start = decoding.prompt_len - window
    check_kept(decoding, oracle.run(decoding.tokens, floors=oracle.late_floor(start, 60)))
    check_kept(trimmed, oracle.run(trimmed.tokens, floors=oracle.late_floor(90 - window, 95)))
    check(keeps, oracle.run(keeps.tokens))
    check(short, oracle.run(short.tokens))
    want = oracle.run(
        hit.tokens,
        start=hit.replay_start,
        hit=32,
        donor=oracle.run(decoding.tokens).sources,
        floors=oracle.late_floor(60 - window, 65, hit.replay_start),
    )
    check_kept(hit, want)
    assert stepper.null_block_untouched()
