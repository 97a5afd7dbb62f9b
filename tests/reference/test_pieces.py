"""The pieces that hide a data-dependent shape: masked stores, tiles of rows, and the exchange between MoE ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_ascend_replay.reference import moe
from vllm_ascend_replay.reference.cache import store_rows
from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.hyper_connection import HyperConnection
from vllm_ascend_replay.reference.metadata import Rows, Tiles
from vllm_ascend_replay.reference.selection import best_blocks, best_entries, mask_blocks


@pytest.mark.parametrize("present", [[], [0], [3], [0, 1, 2, 3, 4], [1, 4]])
def test_store_writes_rows_with_a_slot_and_nothing_else(present):
    # Strided, as pages of several layers in a block are; NaN must survive bit for bit.
    pages = torch.full((6, 4, 5), torch.nan)
    cache = pages[:, :, :3]
    slots = torch.full((5,), -1)
    slots[present] = torch.tensor([23, 0, 7, 12, 2])[present]
    values = torch.arange(15.0).view(5, 3)
    want = pages.clone()
    for row in present:
        want[slots[row] // 4, slots[row] % 4, :3] = values[row]
    store_rows(cache, slots, values)
    assert torch.equal(pages.view(torch.int32), want.view(torch.int32))
    store_rows(cache, slots[:0], values[:0])


@pytest.mark.parametrize("lens", [[1], [5], [1, 1, 1], [0, 3, 0, 7, 0], [17, 1, 2, 9], [0]])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_and_tiles(lens, padding):
    boundaries = np.concatenate(([0], np.cumsum(lens)))
    total = int(boundaries[-1])
    rows = Rows.from_boundaries(torch.tensor(boundaries, dtype=torch.int32), total + padding)
    owner = np.repeat(np.arange(len(lens)), lens)
    assert rows.real.tolist() == [True] * total + [False] * padding
    assert rows.request[:total].tolist() == owner.tolist()
    assert rows.offset[:total].tolist() == (np.arange(total) - boundaries[owner]).tolist()
    assert rows.remaining[:total].tolist() == (boundaries[owner + 1] - np.arange(total)).tolist()
    assert ((rows.request >= 0) & (rows.request < len(lens))).all()
    if total + padding == 0:
        return
    for size in (1, 2, 4, 64):
        tiles = Tiles.from_rows(rows, size)
        at = tiles.row.flatten()[tiles.place[:total]]
        assert at.tolist() == list(range(total))
        assert tiles.real.flatten()[tiles.place[:total]].all()
        assert int(tiles.real.sum()) == total
        assert tiles.request[tiles.place[:total] // size].tolist() == owner.tolist()


def test_ties_go_to_the_lower_entry_whatever_the_width():
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0, 1.0, 0.0]])
    wide = torch.nn.functional.pad(scores, (0, 500), value=-torch.inf)
    for line in (scores, wide):
        assert best_entries(line, k=5).tolist() == [[0, 1, 2, 4, 5]]
    assert best_entries(scores[:, :2], k=3).tolist() == [[0, 1, -1]]
    assert best_entries(torch.full((1, 4), -torch.inf), k=2).tolist() == [[-1, -1]]


def test_the_newest_block_is_always_a_candidate():
    scores = torch.tensor([[5.0, 1.0, 4.0, 0.0, 3.0, -torch.inf]])
    blocks = best_blocks(scores, torch.tensor([5]), block=2, k=2)
    assert sorted(blocks[0].tolist()) == [0, 2]
    kept = mask_blocks(scores, blocks, block=2)[0]
    assert kept.isfinite().tolist() == [True, True, False, False, True, False]
    assert best_blocks(scores[:, :1], torch.tensor([1]), block=2, k=3).tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_mixes_in_one_kernel(rows, dtype):
    mixer = HyperConnection(ReferenceConfig(), name="mixer", dtype=dtype)
    raw = torch.randn(rows, 24, dtype=dtype)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for got, want in zip(mixer._launch(raw.unsqueeze(0)), mixer._mixes(raw)):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def exchange(monkeypatch, num_rows: int, told: list[int], others: list[int]) -> None:
    """Run `exchange_rows` as rank 0; the other ranks run ``others`` rows."""

    def gather(received: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        ranks = received.view(-1, sent.numel())
        ranks[0] = sent
        ranks[1:, 0] = torch.tensor(others, dtype=torch.float32)

    monkeypatch.setattr(moe, "get_dp_group", lambda: SimpleNamespace(rank_in_group=0, device_group=None))
    monkeypatch.setattr(moe.dist, "all_gather_into_tensor", gather)
    moe.exchange_rows(torch.ones(num_rows, 4), SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(told)))


def test_ranks_that_agree_exchange_rows(monkeypatch):
    exchange(monkeypatch, 3, [3, 5], [5])
    exchange(monkeypatch, 0, [0, 1], [1])


def test_rows_that_the_metadata_does_not_tell(monkeypatch):
    with pytest.raises(RuntimeError, match=r"rank 0 runs 3 rows; its metadata says \[4, 5\]"):
        exchange(monkeypatch, 3, [4, 5], [5])
    with pytest.raises(RuntimeError, match=r"runs \[3, 2\] rows; the metadata of rank 0 says \[3, 5\]"):
        exchange(monkeypatch, 3, [3, 5], [2])
