"""The paged model, run in full, computes what the dense oracle computes: float64, 1e-10."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from vllm.forward_context import set_forward_context

from tests.support.oracle import Oracle, OracleRun
from tests.support.stepper import Stepper, StepperRequest

TOLERANCE = 1e-10

VARIANTS = {
    "tiny": {},
    "one-late-layer": {"preset": "tiny-one-late-layer"},
    "window-128": {"sliding_window": 128, "swa_block_size": 32},
    "no-engram": {"engram_layer_ids": ()},
    "no-candidates": {"candidate_source_layer_id": -1},
    "all-blocks-fit": {"candidate_topk_blocks": 100, "index_topk": 400},
    "few-entries": {"index_topk": 1, "candidate_topk_blocks": 1},
}


def check(request: StepperRequest, want: OracleRun, *, upto: int | None = None) -> None:
    """Every position that ran has the oracle's states, hidden state, logits and aux states."""
    ran = np.flatnonzero(request.ran[:upto])
    assert len(ran)
    assert request.kept[ran].all()
    at = ran - want.start
    for layer, entering in request.entering.items():
        np.testing.assert_allclose(
            entering[ran].numpy(), want.entering[layer][at], rtol=0, atol=TOLERANCE, err_msg=f"entering layer {layer}"
        )
    np.testing.assert_allclose(request.hidden[ran].numpy(), want.hidden[at], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(request.logits[ran].numpy(), want.logits[at], rtol=0, atol=TOLERANCE)
    for layer, aux in request.aux.items():
        np.testing.assert_allclose(aux[ran].numpy(), want.aux(layer)[at], rtol=0, atol=TOLERANCE)


def cacheable_pages(stepper: Stepper, request: StepperRequest, length: int) -> list[torch.Tensor]:
    """Copies of the pages that hold the compressed entries of the first ``length`` tokens."""
    return [
        stepper.pages[blocks[: length // size]].clone()
        for blocks, size, cacheable in zip(request.blocks, stepper.block_sizes, stepper.is_cacheable)
        if cacheable
    ]


CHUNKS = {
    "one": (),
    "single-tokens": (1,) * 20,
    "odd": (13, 1, 29, 7, 2),
    "window-and-one": (129, 1),
    "window": (31, 128),
}


@pytest.mark.parametrize(
    ("variant", "chunks"),
    [(variant, name) for variant in VARIANTS for name in CHUNKS if variant == "tiny" or name in ("one", "odd")],
)
def test_chunks_and_decodes(make_stepper, tokens, variant, chunks):
    stepper, oracle = make_stepper(**VARIANTS[variant])
    ids = tokens(168, seed=len(chunks))
    request = stepper.add(ids, prompt_len=160)
    stepper.run(request, *CHUNKS[chunks]) if CHUNKS[chunks] else None
    stepper.run(request, request.prefill_len - request.computed, *[1] * 8)
    assert request.ran.all()
    check(request, oracle.run(ids))
    assert stepper.null_block_untouched()


def test_layer_plan_of_v41_flash(make_stepper, tokens):
    small = dict(hidden_size=32, head_dim=16, qk_rope_head_dim=4, q_lora_rank=12, o_lora_rank=8, index_head_dim=8)
    stepper, oracle = make_stepper("v41-flash-plan", **small, moe_intermediate_size=12, vocab_size=97, index_topk=24)
    ids = tokens(302)
    request = stepper.add(ids, prompt_len=300)
    stepper.run(request, 129, 130, 41, 1, 1)
    check(request, oracle.run(ids))


def test_mixed_batch_does_not_change_rows(make_stepper, tokens):
    stepper, oracle = make_stepper()
    requests = [stepper.add(tokens(n, seed=n), prompt_len=n - 20) for n in (25, 90, 61, 40)]
    stepper.step([(requests[0], 5), (requests[1], 33)])
    stepper.step([(requests[0], 1), (requests[1], 1), (requests[2], 40)], pad_tokens=3)
    stepper.step([(requests[0], 1), (requests[1], 30), (requests[3], 9), (requests[2], 1)], pad_tokens=1)
    while any(request.left for request in requests):
        stepper.step([(r, min(r.left, 4 if r.is_prefilling else 1)) for r in requests if r.left])
    for request in requests:
        check(request, oracle.run(request.tokens))
    assert stepper.null_block_untouched()


def test_draft_rows_that_are_rejected_leave_nothing_behind(make_stepper, tokens):
    stepper, oracle = make_stepper()
    ids = tokens(50)
    request = stepper.add(ids, prompt_len=30)
    # The last chunk of the prompt carries drafts beyond it, and all but one are rejected.
    drafts = tokens(4, seed=9)
    request.tokens[30:34] = drafts
    stepper.run(request, 17, 17)
    request.computed, request.tokens[30:34] = 30, ids[30:34]
    while request.left:
        count = min(5, request.left)
        at = request.computed
        request.tokens[at + 1 : at + count] = tokens(count - 1, seed=at)
        stepper.run(request, count)
        request.computed, request.tokens[:] = at + 1, ids
    check(request, oracle.run(ids))


@pytest.mark.parametrize("chunks", [(), (1, 1, 9), (8, 1), (3,), (24, 5)], ids=str)
def test_prefix_hit_with_encoder_replay(make_stepper, tokens, chunks):
    stepper, oracle = make_stepper()
    donor_ids = tokens(70)
    donor = stepper.add(donor_ids)
    stepper.run(donor, 41, 29)
    hit = 48
    before = cacheable_pages(stepper, donor, hit)
    ids = donor_ids[:hit] + tokens(37, seed=1)
    request = stepper.add(ids, prompt_len=len(ids) - 5, donor=donor, hit=hit)
    assert request.replay_start == hit - stepper.config.sliding_window
    stepper.run(request, *chunks) if chunks else None
    stepper.run(request, request.prefill_len - request.computed, *[1] * 5)
    want = oracle.run(ids, start=request.replay_start, hit=hit, donor=oracle.run(donor_ids).sources)
    check(request, want)
    # Encoder-side replay is an approximation, and the oracle plays it, not the cold run.
    assert np.abs(want.logits - oracle.run(ids).logits[request.replay_start :]).max() > 1e-6
    # The replayed tokens left the cached entries as they were, bit for bit.
    for pages, old in zip(cacheable_pages(stepper, request, hit), before):
        assert torch.equal(pages, old)
    assert stepper.null_block_untouched()


def test_hit_after_a_hit_uses_the_cached_entries(make_stepper, tokens):
    stepper, oracle = make_stepper()
    ids = [tokens(64), tokens(40, seed=1), tokens(30, seed=2)]
    first = stepper.add(ids[0])
    stepper.run(first, 64)
    second = stepper.add(ids[0][:32] + ids[1], donor=first, hit=32)
    stepper.run(second, 20, second.left - 20)
    third = stepper.add(second.tokens[:64] + ids[2], donor=second, hit=64)
    stepper.run(third, 17, 21)
    window = stepper.config.sliding_window
    one = oracle.run(first.tokens)
    two = oracle.run(second.tokens, start=32 - window, hit=32, donor=one.sources)
    check(second, two)
    check(third, oracle.run(third.tokens, start=64 - window, hit=64, donor=two.sources))


def test_preempted_and_resumed(make_stepper, tokens):
    stepper, oracle = make_stepper()
    ids = tokens(80)
    other = stepper.add(tokens(60, seed=3), prompt_len=50)
    request = stepper.add(ids, prompt_len=60)
    stepper.run(request, 60, 1, 1, 1)
    stepper.step([(other, 20)])
    stepper.preempt(request)
    stepper.step([(other, 30)])
    stepper.resume(request)
    assert request.prefill_len == 63
    assert request.is_prefilling
    stepper.step([(other, 1), (request, 50)])
    stepper.step([(other, 1), (request, 13)])
    stepper.run(request, *[1] * request.left)
    stepper.run(other, *[1] * other.left)
    for each in (request, other):
        check(each, oracle.run(each.tokens))


def test_device_boundaries_are_authoritative(make_stepper, tokens):
    stepper, oracle = make_stepper()
    requests = [stepper.add(tokens(60, seed=n), prompt_len=30) for n in (1, 2, 3)]
    for request in requests:
        stepper.run(request, 30)
    for device in ((1, 5, 3), (4, 1, 4), (3, 3, 3)):
        stepper.step([(request, 3) for request in requests], device_query_lens=device)
    for request in requests:
        check(request, oracle.run(request.tokens))


def test_padding_rows_are_finite_and_write_nothing(make_stepper, tokens):
    stepper, _ = make_stepper()
    request = stepper.add(tokens(20))
    alone = copy.deepcopy(stepper.step([(request, 20)]).hidden)
    written = {name: cache.kv_cache.clone() for name, cache in stepper.caches.items()}
    stepper.reset()
    request = stepper.add(tokens(20))
    report = stepper.step([(request, 20)], pad_tokens=5)
    assert report.hidden.isfinite().all()
    torch.testing.assert_close(report.hidden[:20], alone, rtol=0, atol=TOLERANCE)
    for name, cache in stepper.caches.items():
        torch.testing.assert_close(cache.kv_cache, written[name], rtol=0, atol=TOLERANCE, equal_nan=True)


def test_kv_only_write_equals_the_layers_own(make_stepper, tokens):
    """What `write_kv` stores is what the layer stores, and storing it twice changes nothing."""
    stepper, _ = make_stepper()
    model, cut = stepper.model, stepper.model.cut
    request = stepper.add(tokens(37))
    captured = {}
    handle = model.layers[cut].register_forward_pre_hook(lambda _, args: captured.update(args=args[:3]), prepend=True)
    again = {}

    def write_again(*_):
        before = stepper.pages.clone()
        model.layers[cut].write_kv(*captured["args"])
        again["same"] = torch.equal(before, stepper.pages)

    after = model.layers[cut].register_forward_hook(write_again)
    try:
        stepper.run(request, 37)
    finally:
        handle.remove()
        after.remove()
    assert again["same"]


def test_without_attention_metadata(make_stepper):
    """As vLLM profiles: nothing is read or written."""
    stepper, _ = make_stepper()
    with torch.no_grad(), set_forward_context(None, stepper.vllm_config, num_tokens=11):
        hidden, aux = stepper.model(torch.zeros(11, dtype=torch.int32), torch.zeros(11, dtype=torch.int64))
    assert hidden.shape == (11, stepper.config.hidden_size)
    assert hidden.isfinite().all()
    assert len(aux) == len(stepper.config.aux_hidden_state_layers)
    assert bool((stepper.pages == stepper.pages[0, 0]).all())


@pytest.mark.parametrize("metadata", [False, True])
def test_zero_rows(make_stepper, tokens, metadata):
    stepper, _ = make_stepper()
    model = stepper.model
    streams = torch.zeros(0, stepper.config.hc_mult, stepper.config.hidden_size, dtype=torch.float64)
    pre_mix, nothing = torch.zeros(0, stepper.config.hc_mult, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    request = stepper.add(tokens(5))
    found = {}
    original = stepper.state.prepare_attn

    def capture(*args, **kwargs):
        found["metadata"] = original(*args, **kwargs)
        return found["metadata"]

    stepper.state.prepare_attn = capture
    try:
        stepper.run(request, 5)
    finally:
        del stepper.state.prepare_attn
    with torch.no_grad(), set_forward_context(found["metadata"] if metadata else None, stepper.vllm_config, 1):
        for layer in model.layers:
            out, pre = layer(nothing, streams, pre_mix, nothing)
            assert out.shape == streams.shape
            assert pre.shape == pre_mix.shape
            layer.write_kv(nothing, streams, pre_mix)


def test_forward_never_waits_for_the_device(make_stepper, tokens, monkeypatch):
    """No value is read back to the host in a forward: on a device each would stall it, and end a graph capture."""
    stepper, oracle = make_stepper()
    requests = [stepper.add(tokens(40, seed=n), prompt_len=30) for n in (1, 2)]

    def refuse(*_, **__):
        raise AssertionError("a device value was read on the host")

    forward = stepper.model.forward

    def guarded(*args, **kwargs):
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "numpy"):
                patch.setattr(torch.Tensor, name, refuse)
            return forward(*args, **kwargs)

    monkeypatch.setattr(stepper.model, "forward", guarded)
    stepper.step([(requests[0], 30)])
    stepper.step([(requests[0], 1), (requests[1], 17)], pad_tokens=2)
    monkeypatch.undo()
    check(requests[0], oracle.run(requests[0].tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(make_stepper, tokens, dtype):
    stepper, oracle = make_stepper(compute_dtype=dtype)
    ids = tokens(90)
    request = stepper.add(ids, prompt_len=80)
    stepper.run(request, 33, 47, *[1] * 10)
    assert request.hidden.dtype == getattr(torch, dtype)
    want = oracle.run(ids)
    got = request.logits.double().numpy()
    assert np.isfinite(got).all()
    if dtype == "float32":
        np.testing.assert_allclose(got, want.logits, rtol=0, atol=2e-5)
    else:
        # Another choice of entries changes a row by O(1), and bfloat16 makes other choices.
        assert np.corrcoef(got.ravel(), want.logits.ravel())[0, 1] > 0.9


def test_floors_change_what_the_oracle_computes(make_stepper, tokens):
    """A control of the oracle: a floor matters, and a floor below the window does not."""
    _, oracle = make_stepper()
    ids = tokens(60)
    full = oracle.run(ids)
    floored = oracle.run(ids, floors=oracle.late_floor(50, 60))
    assert np.abs(full.logits - floored.logits)[50:].max() > 1e-6
    assert np.array_equal(full.entering[oracle.config.cut + 1], floored.entering[oracle.config.cut + 1])
    nothing = oracle.run(ids, floors=oracle.late_floor(0, 60))
    assert np.array_equal(full.logits, nothing.logits)


def test_oracle_is_causal(make_stepper, tokens):
    _, oracle = make_stepper()
    ids = tokens(50)
    whole, part = oracle.run(ids), Oracle.run(oracle, ids[:31])
    np.testing.assert_allclose(whole.logits[:31], part.logits, rtol=0, atol=TOLERANCE)
