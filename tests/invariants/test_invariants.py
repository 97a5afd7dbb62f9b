"""The invariants of decoder replay, in float64 to 1e-10, and where each is proved.

1.  Kept rows equal a full run whose late layers read no window KV below kv_start, decodes after it too:
    `tests.reference.test_replay_vs_oracle` (window 8 and 128, chunks), `test_odd_lengths` and
    `test_last_chunks_under_chunk` here, `test_schedules`.
2.  Rows that were not kept are exact zeros at the end: `check_replay`, which all of these call.
3.  Streams that enter the cut layer and the one after it equal the true full run on kept rows:
    `test_streams_that_enter_late_layers`.
4.  Streams that enter layer cut + 1 + k equal the full run from ``begin + k * (W - 1)`` on, and outputs after the last
    layer's: `test_streams_that_enter_late_layers`, in both directions.
5.  With one layer after the cut, logits are those of the full run:
    `tests.reference.test_replay_vs_oracle.test_with_one_late_layer_logits_are_those_of_the_full_run`.
6.  Policies, chunking and the lossless number of rows: `test_policies`.
7.  A request that keeps every row equals its own untrimmed run inside a trimmed batch:
    `test_keeps_every_row_inside_a_trimmed_batch`; a prompt of at most W tokens is never trimmed:
    `tests.unit.test_plan` and `test_a_prompt_of_a_window_is_not_trimmed`.
8.  Composition and padding of the replay batch do not change kept rows: `test_composition_of_the_replay_batch` and
    `test_padding_of_the_replay_batch`.
9.  Cacheable pages are bit-identical with replay on and off: `test_cacheable_pages_are_bit_identical`.
10. After a prefix hit the replayed tokens write no cacheable page, bitwise:
    `tests.reference.test_model_vs_oracle.test_prefix_hit_with_encoder_replay` with replay off,
    `test_replayed_tokens_write_no_cacheable_page` with replay on, `test_schedules`.
11. Writing the cut layer's KV for all rows and running it again on the kept ones equals running it whole and
    compacting what it chose: `test_the_after_cut_form_is_the_same`.
12. The wrong ways are noticed: `test_negative_controls`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.invariants.after_cut import use_after_cut_tail
from tests.invariants.support import (
    CHUNK,
    DIFFERS,
    FINAL,
    OFF,
    assert_close,
    check_replay,
    chunk_floor,
    final_oracle,
    keep,
    largest,
    run_prompt,
)
from tests.reference.test_model_vs_oracle import cacheable_pages, check

ODD_LENGTHS = [129, 130, 255, 257, 450, 706, 1930]
LAST_CHUNKS = [1, 4, 127, 128, 129]


def last_chunks(length: int) -> list[int]:
    """Last chunks that leave something before them."""
    return [last for last in LAST_CHUNKS if last < length]


@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_odd_lengths(make_window_128, tokens, length):
    """``final``, window 128: whole, and in two chunks with each last chunk."""
    stepper, oracle = make_window_128(settings=FINAL)
    ids, want = tokens(length + 3), None
    for last in [length, *last_chunks(length)]:
        stepper.reset()
        request = stepper.add(ids, prompt_len=length)
        run_prompt(stepper, request, [length - last] if last < length else [])
        want = want or final_oracle(stepper, oracle, request)
        assert request.kept.sum() == 128 + 3
        check_replay(request, want, stepper.model.cut)


@pytest.mark.parametrize(
    ("length", "last"),
    # The longest with the last chunks on both sides of the window only: its oracle takes seconds.
    [(n, last) for n in ODD_LENGTHS[:-1] for last in (n, *last_chunks(n))] + [(1930, 127), (1930, 129)],
)
def test_last_chunks_under_chunk(make_window_128, tokens, length, last):
    stepper, oracle = make_window_128(settings=CHUNK)
    ids, chunks = tokens(length + 3), [length - last, last] if last < length else [length]
    request = stepper.add(ids, prompt_len=length)
    run_prompt(stepper, request, chunks[:-1])
    assert request.kept.sum() == sum(min(chunk, 128) for chunk in chunks) + 3
    floors = chunk_floor(stepper, chunks, len(ids))
    check_replay(request, oracle.run(ids, floors=floors), stepper.model.cut)


def test_streams_that_enter_late_layers(make_stepper, tokens):
    stepper, oracle = make_stepper(settings=FINAL)
    window, cut, layers = stepper.config.sliding_window, stepper.model.cut, stepper.model.num_layers
    ids, length = tokens(100), 57
    request = stepper.add(ids, prompt_len=length)
    run_prompt(stepper, request, [31, 13])
    full, begin = oracle.run(ids), length - window
    for layer in (cut, cut + 1):
        assert_close(request.entering[layer][begin:], full.entering[layer][begin:])
    for k in range(1, layers - cut - 1):
        exact_from = begin + k * (window - 1)
        got, want = request.entering[cut + 1 + k], full.entering[cut + 1 + k]
        assert_close(got[exact_from:], want[exact_from:])
        assert min(largest(got[p], want[p]) for p in range(begin, exact_from)) > DIFFERS
    exact_from = begin + (layers - cut - 1) * (window - 1)
    assert_close(request.logits[exact_from:], full.logits[exact_from:])
    assert min(largest(request.logits[p], full.logits[p]) for p in range(begin, exact_from)) > DIFFERS


@pytest.mark.parametrize("settings", [FINAL, CHUNK], ids=["final", "chunk"])
def test_keeps_every_row_inside_a_trimmed_batch(make_small, tokens, settings):
    ids = tokens(60, seed=1)

    def run(settings, others):
        stepper, oracle = make_small(settings=settings)
        request = stepper.add(ids, prompt_len=50, prompt_logprobs=True)
        beside = [stepper.add(tokens(45, seed=n), prompt_len=40) for n in range(2, 2 + others)]
        trimmed = stepper.step([(request, 33), *((other, 19) for other in beside)]).kept_rows
        stepper.step([(request, 17), *((other, 21) for other in beside)])
        for _ in range(5):
            stepper.step([(each, 1) for each in (request, *beside)])
        stepper.run(request, *[1] * request.left)
        return oracle, request, beside, trimmed

    _, alone, _, _ = run(OFF, 0)
    oracle, request, beside, trimmed = run(settings, 2)
    assert len(trimmed) < 33 + 2 * 19
    assert request.kept.all()
    assert_close(request.logits, alone.logits)
    check(request, oracle.run(ids))
    assert not any(other.kept.all() for other in beside)


@pytest.mark.parametrize("settings", [FINAL, CHUNK], ids=["final", "chunk"])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_prompt_of_a_window_is_not_trimmed(make_small, tokens, settings, length):
    stepper, oracle = make_small(settings=settings)
    request = stepper.add(tokens(length + 2), prompt_len=length)
    assert stepper.step([(request, length)]).kept_rows is None
    stepper.run(request, 1, 1)
    check(request, oracle.run(request.tokens))


@pytest.mark.parametrize("settings", [FINAL, CHUNK], ids=["final", "chunk"])
def test_composition_of_the_replay_batch(make_small, tokens, settings):
    """A prompt's kept rows are the same alone and beside decodes, other prompts, and requests without kept rows."""
    ids = tokens(54, seed=1)

    def run(others):
        stepper, _ = make_small(settings=settings)
        decoding = [stepper.add(tokens(40, seed=n), prompt_len=20 + n) for n in range(others)]
        for each in decoding:
            stepper.run(each, each.prefill_len)
        request = stepper.add(ids, prompt_len=50)
        prompts = [stepper.add(tokens(50, seed=20 + n), prompt_len=45) for n in range(others)]
        for count in (21, 29):
            stepper.step([(request, count), *((d, 1) for d in decoding), *((p, count - 7) for p in prompts)])
        run_prompt(stepper, request)
        return request

    alone, beside = run(0), run(3)
    assert beside.kept.tolist() == alone.kept.tolist()
    assert_close(beside.hidden, alone.hidden)
    assert_close(beside.logits, alone.logits)
    for layer, aux in beside.aux.items():
        assert_close(aux, alone.aux[layer])


@pytest.mark.parametrize("settings", [FINAL, CHUNK], ids=["final", "chunk"])
@pytest.mark.parametrize("padding", [1, 5, 64])
def test_padding_of_the_replay_batch(make_small, tokens, monkeypatch, settings, padding):
    """Rows beyond the kept ones, as a bucket of a graph has them, change nothing and write nothing."""

    def run():
        stepper, _ = make_small(settings=settings)
        requests = [stepper.add(tokens(50, seed=n), prompt_len=47 - n) for n in range(3)]
        for count in (23, 24):
            stepper.step([(r, min(count, r.prefill_len - r.computed)) for r in requests], pad_tokens=1)
        for _ in range(3):
            stepper.step([(r, 1) for r in requests])
        return stepper, requests, stepper.pages.clone()

    stepper, plain, pages = run()
    real = stepper.state._replay_batch

    def padded(step, plan, num_padded, rows_across_dp):
        return real(step, plan, num_padded + padding, rows_across_dp)

    monkeypatch.setattr(stepper.state, "_replay_batch", padded)
    stepper, requests, padded_pages = run()
    assert stepper.null_block_untouched()
    for request, want in zip(requests, plain):
        assert_close(request.hidden, want.hidden)
        for layer, aux in request.aux.items():
            assert_close(aux, want.aux[layer])
    # The same pages hold something; none was touched by padding.
    poison = 0x7FFF
    assert torch.equal((padded_pages == poison).all(1), (pages == poison).all(1))


@pytest.mark.parametrize("settings", [FINAL, CHUNK, keep(11)], ids=["final", "chunk", "11 rows"])
def test_cacheable_pages_are_bit_identical(make_small, tokens, settings):
    """Nothing approximate gets into the prefix cache: in chunks, beside decodes, and after a hit."""

    def run(settings):
        stepper, _ = make_small(settings=settings)
        donor = stepper.add(tokens(60), prompt_len=55)
        stepper.run(donor, 30, 25, 1)
        hit = stepper.add(donor.tokens[:24] + tokens(30, seed=1), prompt_len=50, donor=donor, hit=24)
        other = stepper.add(tokens(40, seed=2), prompt_len=39)
        stepper.step([(donor, 1), (hit, 20), (other, 33)])
        stepper.step([(donor, 1), (hit, 14), (other, 6)])
        return [page for r in (donor, hit, other) for page in cacheable_pages(stepper, r, r.computed)]

    off, on = run(OFF), run(settings)
    assert len(off) == len(on) > 0
    for a, b in zip(off, on):
        assert torch.equal(a, b)


@pytest.mark.parametrize("settings", [FINAL, CHUNK, keep(30)], ids=["final", "chunk", "30 rows"])
@pytest.mark.parametrize("chunks", [(), (3, 1), (8, 9), (30,)], ids=str)
def test_replayed_tokens_write_no_cacheable_page(make_small, tokens, settings, chunks):
    stepper, oracle = make_small(settings=settings)
    donor = stepper.add(tokens(60))
    stepper.run(donor, 35, 25)
    hit = 28
    before = cacheable_pages(stepper, donor, hit)
    request = stepper.add(donor.tokens[:hit] + tokens(33, seed=1), prompt_len=58, donor=donor, hit=hit)
    run_prompt(stepper, request, chunks)
    for pages, old in zip(cacheable_pages(stepper, request, hit), before):
        assert torch.equal(pages, old)
    if settings != CHUNK:
        donor_sources = oracle.run(donor.tokens).sources
        want = final_oracle(stepper, oracle, request, hit=hit, donor=donor_sources)
        check_replay(request, want, stepper.model.cut)


AFTER_CUT = [(FINAL, "final"), (CHUNK, "chunk"), (keep(11), "11 rows")]


def run_mixed(stepper, tokens):
    decoding = stepper.add(tokens(40), prompt_len=30)
    stepper.run(decoding, 30)
    requests = [stepper.add(tokens(60, seed=n), prompt_len=50) for n in (1, 2)]
    requests.append(stepper.add(tokens(44, seed=3), prompt_len=40, prompt_logprobs=True))
    for count in (13, 27, 10):
        stepper.step([(decoding, 1), *((r, min(count, r.left)) for r in requests)], pad_tokens=1)
    for _ in range(4):
        stepper.step([(r, 1) for r in requests if r.left])
    return [decoding, *requests]


@pytest.mark.parametrize(("settings", "name"), AFTER_CUT, ids=[name for _, name in AFTER_CUT])
def test_the_after_cut_form_is_the_same(make_small, tokens, monkeypatch, settings, name):
    stepper, _ = make_small(settings=settings)
    ours = run_mixed(stepper, tokens)
    stepper, _ = make_small(settings=settings)
    tail = use_after_cut_tail(stepper, monkeypatch)
    for mine, theirs in zip(ours, run_mixed(stepper, tokens)):
        assert mine.kept.tolist() == theirs.kept.tolist()
        kept = np.flatnonzero(mine.kept)
        assert_close(mine.hidden[kept], theirs.hidden[kept])
        for layer, aux in mine.aux.items():
            assert_close(aux[kept], theirs.aux[layer][kept])
    assert tail.compacted > 0


def test_the_after_cut_form_needs_the_chosen_rows_compacted(make_small, tokens, monkeypatch):
    """The control: with the rows of the whole step in place, late layers read other rows' choices."""
    stepper, _ = make_small(settings=FINAL)
    ours = run_mixed(stepper, tokens)
    stepper, _ = make_small(settings=FINAL)
    use_after_cut_tail(stepper, monkeypatch, compacts=False)
    theirs = run_mixed(stepper, tokens)
    assert max(largest(a.hidden[a.kept], b.hidden[a.kept]) for a, b in zip(ours, theirs)) > DIFFERS


def test_kept_rows_do_not_follow_the_true_full_run(make_stepper, tokens):
    """The control of invariant 1: the late floor matters, so the oracle without it must not fit."""
    stepper, oracle = make_stepper(settings=FINAL)
    ids = tokens(63)
    request = stepper.add(ids, prompt_len=60)
    run_prompt(stepper, request)
    with pytest.raises(AssertionError):
        check_replay(request, oracle.run(ids), stepper.model.cut)
