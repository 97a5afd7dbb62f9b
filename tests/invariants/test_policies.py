"""Chunking, and how many rows are lossless: float64, 1e-10, both ways measured."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.invariants.support import (
    CHUNK,
    DIFFERS,
    EXACT,
    FINAL,
    OFF,
    assert_close,
    check_replay,
    final_oracle,
    keep,
    largest,
    run_prompt,
)

LENGTH, DECODES = 90, 40
LOSSLESS_ROWS = 1 + 3 * 7  # three layers after the cut, window 8
CHUNKINGS = [(1,) * 9, (17, 1, 61), (81,), (83, 1, 1), (68, 5, 9), (89,)]


def run(make_stepper, tokens, settings, chunks=(), seed=0, decodes=4):
    stepper, oracle = make_stepper(settings=settings)
    request = stepper.add(tokens(LENGTH + decodes, seed=seed), prompt_len=LENGTH)
    run_prompt(stepper, request, chunks)
    assert stepper.null_block_untouched()
    return stepper, oracle, request


@pytest.mark.parametrize("chunks", [(), (37, 37), (69, 1, 1)], ids=str)
def test_exact_is_replay_off(make_stepper, tokens, chunks):
    """The first token and 40 decodes."""
    stepper, _, request = run(make_stepper, tokens, EXACT, chunks, decodes=DECODES)
    assert stepper.state.replay_keep_last == LOSSLESS_ROWS
    assert request.kept.sum() == LOSSLESS_ROWS + DECODES
    *_, off = run(make_stepper, tokens, OFF, chunks, decodes=DECODES)
    assert off.kept.all()
    assert_close(request.logits[LENGTH - 1 :], off.logits[LENGTH - 1 :])
    assert_close(request.hidden[LENGTH - 1 :], off.hidden[LENGTH - 1 :])


@pytest.mark.parametrize("seed", range(3))
def test_one_row_fewer_is_not(make_stepper, tokens, seed):
    *_, off = run(make_stepper, tokens, OFF, seed=seed)
    *_, fewer = run(make_stepper, tokens, keep(LOSSLESS_ROWS - 1), seed=seed)
    assert largest(fewer.logits[LENGTH - 1], off.logits[LENGTH - 1]) > DIFFERS
    # Only the first token still stands in the shadow of the missing row.
    assert_close(fewer.logits[LENGTH:], off.logits[LENGTH:])
    *_, more = run(make_stepper, tokens, keep(LOSSLESS_ROWS + 1), seed=seed)
    assert_close(more.logits[LENGTH - 1 :], off.logits[LENGTH - 1 :])


@pytest.mark.parametrize("settings", [FINAL, EXACT, keep(11)], ids=["window", "exact", "11 rows"])
def test_final_does_not_depend_on_chunking(make_stepper, tokens, settings):
    *_, whole = run(make_stepper, tokens, settings)
    for chunks in CHUNKINGS:
        *_, request = run(make_stepper, tokens, settings, chunks)
        assert request.kept.tolist() == whole.kept.tolist()
        assert_close(request.hidden, whole.hidden)
        assert_close(request.logits[LENGTH - 1 :], whole.logits[LENGTH - 1 :])


def test_chunk_depends_on_the_last_chunk_only_if_it_is_longer_than_the_window(make_stepper, tokens):
    last = 9
    *_, first = run(make_stepper, tokens, CHUNK, (LENGTH - last,))
    for chunks in [(40, 41), (1, 1, 1, 1, 1, 76), (3, 8, 70)]:
        *_, request = run(make_stepper, tokens, CHUNK, chunks)
        assert_close(request.logits[LENGTH - 1 :], first.logits[LENGTH - 1 :])
    # A last chunk that fits in the window reads what the one before it wrote, and so on.
    short = [run(make_stepper, tokens, CHUNK, chunks)[2] for chunks in [(82,), (77, 5), (30, 52)]]
    assert max(largest(short[0].logits[LENGTH - 1], other.logits[LENGTH - 1]) for other in short[1:]) > DIFFERS


@pytest.mark.parametrize("begin", [1, 2, 49, 50, 51, 52, 53, 57])
@pytest.mark.parametrize("settings", [FINAL, keep(11), EXACT], ids=["window", "11 rows", "exact"])
def test_chunks_of_one_token_anywhere(make_small, tokens, settings, begin):
    """A budget may cut a prompt anywhere, inside its last window too."""
    stepper, oracle = make_small(settings=settings)
    request = stepper.add(tokens(62), prompt_len=59)
    run_prompt(stepper, request, [begin, 1] if begin < 58 else [begin])
    check_replay(request, final_oracle(stepper, oracle, request), stepper.model.cut)


def test_every_way_to_cut_the_last_window(make_small, tokens):
    """A prompt of 20 tokens with a window of 8, cut in all ways at five borders around and inside the window."""
    stepper, oracle = make_small(settings=FINAL)
    ids, want = tokens(22), None
    for borders in range(1 << 5):
        stepper.reset()
        request = stepper.add(ids, prompt_len=20)
        cuts = [0, *(at for i, at in enumerate((11, 12, 13, 16, 19)) if borders >> i & 1), 20]
        run_prompt(stepper, request, [b - a for a, b in pairwise(cuts[:-1])])
        want = want or final_oracle(stepper, oracle, request)
        check_replay(request, want, stepper.model.cut)
