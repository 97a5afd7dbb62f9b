"""The reference model's kernels against its plain PyTorch, interpreted or on a GPU, and inside the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.oracle import Oracle
from tests.support.stepper import Stepper
from vllm_ascend_replay.reference import fused
from vllm_ascend_replay.reference.attention import Rotary
from vllm_ascend_replay.reference.cache import store_rows
from vllm_ascend_replay.reference.config import ReferenceConfig, write_model
from vllm_ascend_replay.reference.hyper_connection import HyperConnection, collapse
from vllm_ascend_replay.reference.moe import MoE
from vllm_ascend_replay.reference.selection import best_entries, block_mask
from vllm_ascend_replay.reference.weights import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float32 products are tf32 there.
TOLERANCE = 1e-2 if torch.cuda.is_available() else 1e-5


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def here():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_hyper_connections(rows):
    mixer = HyperConnection(ReferenceConfig(hidden_size=40), name="mixer", dtype=torch.float32)
    streams, y, weight = torch.randn(rows, 4, 40), torch.randn(rows, 40), torch.rand(40)
    pre, post, comb = mixer(streams)
    parts = fused.project(streams.flatten(1), mixer.fn, squares=True)
    assert parts.shape[0] > 1
    close(parts.sum(0)[:, 24], streams.square().sum((1, 2)))
    for got, want in zip(mixer._launch(parts, width=160), (pre, post, comb)):
        close(got, want)
    close(fused.spread(y, streams, post, comb), mixer.spread(y, streams, post, comb))
    close(fused.collapse_norm(streams, pre, weight, 1e-6), rms_norm(collapse(streams, pre), weight, 1e-6))
    close(fused.rms_norm(y, weight, 1e-6), rms_norm(y, weight, 1e-6))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter takes the bits of bfloat16 for numbers in a product")
def test_products_of_bfloat16_rows_are_as_precise_as_the_weights():
    x, fn = torch.randn(20, 300).bfloat16(), torch.randn(24, 300)
    got = fused.project(x, fn).sum(0)[:, :24].double()
    want = x.double() @ fn.double().T
    assert (got - want).norm() / want.norm() < 2e-5


@pytest.mark.parametrize("shape", [(3, 12), (5, 3, 12), (0, 12)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation(shape, inverse):
    x, positions = torch.randn(shape), torch.randint(0, 1 << 20, shape[:1])
    want = Rotary(positions, 6, 1.6e5)(x, inverse=inverse)
    close(fused.rotate(x, positions, 6, 1.6e5, inverse=inverse), want)


@pytest.mark.parametrize("slots", [[], [-1, -1], [23, -1, 0, 7, 12, -1, 2]])
def test_store(slots):
    # Strided, as pages of several layers in a block are.
    pages = torch.full((6, 4, 7), 3.0)
    want, values = pages.clone(), torch.randn(len(slots), 5)
    store_rows(want[:, :, :5], torch.tensor(slots, dtype=torch.int64), values)
    fused.store_rows(pages[:, :, :5], torch.tensor(slots, dtype=torch.int64), values)
    assert torch.equal(pages, want)


@pytest.mark.parametrize("width", [1, 40, 3000])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_choice_of_entries(width, k):
    """Ties, infinities and both signs; what lies beyond a row's length is never looked at."""
    scores = torch.randint(-3, 3, (9, width)).float() * torch.rand(9, 1).round()
    scores[torch.rand(9, width) < 0.2] = -torch.inf
    scores[8] = torch.randn(width) * 1e-20
    scores[7] = -torch.inf
    lengths = torch.randint(0, width + 1, (9,))
    lengths[8] = width
    beyond = torch.arange(width) >= lengths.unsqueeze(1)
    want = best_entries(scores.masked_fill(beyond, -torch.inf), k=k)
    got = fused.choose(scores.masked_fill(beyond, torch.nan), lengths, k)
    assert torch.equal(got.long(), want)


def test_scores_and_blocks():
    """Tiles of two requests, pages in any order, blocks that do not count."""
    rows, heads, dim, width, block = 6, 3, 8, 21, 4
    query, weight = torch.randn(rows, heads, dim), torch.randn(rows, heads)
    pages, table = torch.randn(12, 4, dim), torch.tensor([[3, 1, 7, 2, 9, 4], [5, 6, 8, 10, 11, 0]], dtype=torch.int32)
    row = torch.tensor([[0, 1, 2, 3], [4, 5, 5, 5]])
    lengths = torch.tensor([[1, 8, 9, 21], [13, 20, 0, 0]])
    blocks = torch.tensor([[0, 2, -1], [1, 9, -1], [0, 1, 2], [5, 3, 0], [-1, -1, -1], [4, 0, 1]])[row]
    arguments = dict(row=row, lengths=lengths, request=torch.arange(2), cache=pages, block_table=table, width=width)
    keep = block_mask(blocks, 6)
    for extra in ({}, {"keep": keep, "keep_block": block}):
        got = fused.score(query, weight, **arguments, **extra).view(2, 4, width)
        for tile, slot in np.ndindex(2, 4):
            length, at = int(lengths[tile, slot]), int(row[tile, slot])
            keys = pages[table[tile]].flatten(0, 1)[:length].float()
            want = (torch.relu(query[at] @ keys.T) * weight[at].unsqueeze(1)).sum(0)
            if extra:
                want[~keep[tile, slot].repeat_interleave(block)[:length]] = -torch.inf
            close(got[tile, slot, :length], want)
    best = fused.best_of_blocks(got.flatten(0, 1), lengths.flatten(), block)
    for line, scores, length in zip(best, got.flatten(0, 1), lengths.flatten().tolist()):
        for number in range(-(-length // block)):
            mine = scores[number * block : min((number + 1) * block, length)]
            assert line[number] == (torch.inf if number == (length - 1) // block else mine.max())


@pytest.mark.parametrize("rows", [1, 33, 100])
def test_routing(rows):
    config = ReferenceConfig(num_experts=6, num_experts_per_tok=2, hidden_size=32)
    moe, x = MoE(config, 0, dtype=torch.float32, exchange=False), torch.randn(rows, 32)
    chosen, weights = moe._route(x)
    logits = fused.project(x, moe.gate)
    got, place, source, ends = fused.route(logits, moe.gate_bias, 2, moe.factor)
    close(got[:, :2], weights)
    assert (got[:, 2] == 1).all()
    chosen = torch.nn.functional.pad(chosen, (0, 1), value=6)
    assert ends.tolist() == (chosen.flatten() == torch.arange(7).view(-1, 1)).sum(1).cumsum(0).tolist()
    # Every copy of a row lies among its expert's, and the places are all different.
    assert torch.equal(torch.searchsorted(ends, place.flatten(), right=True), chosen.flatten())
    assert torch.equal(source[place.long()], torch.arange(rows).view(-1, 1).expand(-1, 3).int())
    assert place.flatten().sort().values.tolist() == list(range(3 * rows))


def test_experts():
    gate, up = torch.randn(3, 10) * 9, torch.randn(3, 10) * 9
    moe = MoE(ReferenceConfig(swiglu_limit=4.0), 0, dtype=torch.float32, exchange=False)
    want = moe._activate(gate, up)
    close(fused.swiglu(gate, up, 4.0), want)
    y, place, weights = torch.randn(8, 5), torch.randperm(8).view(4, 2), torch.rand(4, 2)
    close(fused.combine(y, place, weights), torch.einsum("tk,tkh->th", weights, y[place]))


def noted(name, function, used):
    def run(*args, **kwargs):
        used.add(name)
        return function(*args, **kwargs)

    return run


def test_model_with_kernels_equals_the_oracle(tmp_path, monkeypatch):
    """All of them inside the model, with replay, over poisoned pages; float32, so that errors show."""
    used: set[str] = set()
    for name in ("collapse_norm", "spread", "project", "rotate", "store_rows", "attend", "score", "choose"):
        monkeypatch.setattr(fused, name, noted(name, getattr(fused, name), used))
    monkeypatch.setattr(fused, "takes", lambda x: True)
    directory = write_model(tmp_path / "model", compute_dtype="float32")
    stepper = Stepper(directory, settings={"ASCEND_REPLAY": "1"})
    oracle = Oracle(stepper.config, stepper.model.weights())
    draw = np.random.default_rng(3)
    first = stepper.add(draw.integers(0, 97, 20).tolist(), prompt_len=19)
    second = stepper.add(draw.integers(0, 97, 11).tolist(), prompt_len=10)
    stepper.run(first, 12)
    stepper.step([(first, 7), (second, 10)], pad_tokens=1)
    stepper.step([(first, 1), (second, 1)])
    for request, prompt in ((first, 19), (second, 10)):
        floors = oracle.late_floor(prompt - stepper.config.sliding_window, prompt + 1)
        want, ran = oracle.run(request.tokens, floors=floors), np.flatnonzero(request.kept)
        np.testing.assert_allclose(request.logits[ran].numpy(), want.logits[ran], rtol=0, atol=20 * TOLERANCE)
    assert stepper.null_block_untouched()
    assert len(used) == 8
