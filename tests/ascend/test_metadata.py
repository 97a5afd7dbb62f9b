"""The small functions of the replay batch's metadata, against plain loops."""

import pytest
import torch

from vllm_ascend_replay.ascend.metadata import bounded_window, shift_blocks


@pytest.mark.parametrize("window", [1, 16, 128])
def test_bounded_window(window):
    positions = torch.tensor([0, 5, 127, 128, 300, 301])
    start = torch.tensor([0, 3, 0, 128, 256, 301], dtype=torch.int32)
    index, length = bounded_window(positions, start, window)
    assert index.shape == (6, 1, window)
    assert index.dtype == length.dtype == torch.int32
    for row in range(6):
        p, s = int(positions[row]), int(start[row])
        want = list(range(max(p - window + 1, s, 0), p + 1))
        assert index[row, 0].tolist() == want + [-1] * (window - len(want))
        assert length[row].tolist() == [len(want)]


def test_shift_blocks():
    table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    got = shift_blocks(table, torch.tensor([0, 1, 4], dtype=torch.int32))
    assert got.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0], [0, 0, 0, 0]]
    assert got.dtype == torch.int32
