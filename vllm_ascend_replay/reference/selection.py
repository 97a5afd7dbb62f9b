"""Which compressed entries a row attends to: two-level top-k, shared by the layers after an index source."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional

from vllm_ascend_replay.reference.config import ReferenceConfig

# Of the largest temporary; bounds memory when a step has many rows over long contexts.
MAX_BYTES = 1 << 29


def row_slices(num_rows: int, bytes_per_row: int, *, limit: int = MAX_BYTES) -> Iterator[slice]:
    """Slices that cover ``num_rows`` so that each temporary stays within ``limit`` bytes."""
    step = max(1, limit // max(bytes_per_row, 1))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def stable_topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best of the last dim; among equals the lower index wins.

    ``relu`` makes exact zeros, so ties are common, and `torch.topk` breaks them by the width of its input.
    """
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def best_blocks(scores: torch.Tensor, lengths: torch.Tensor, *, block: int, k: int) -> torch.Tensor:
    """Level one: the blocks of ``block`` entries with the best entry; the newest block is always among them.

    Args:
        scores: ``[T, n]``, ``-inf`` where a row sees no entry.
        lengths: int64 ``[T]``: entries that the row sees.
        block: entries in a block.
        k: blocks to choose.

    Returns:
        int64 ``[T, k]``, -1 where there are fewer.
    """
    padded = functional.pad(scores, (0, -scores.shape[1] % block), value=-math.inf)
    best = padded.unflatten(1, (-1, block)).amax(-1)
    newest = torch.arange(best.shape[1], device=best.device) == ((lengths - 1) // block).unsqueeze(1)
    values, blocks = stable_topk(best.masked_fill(newest, math.inf), k)
    return functional.pad(torch.where(values > -math.inf, blocks, -1), (0, k - blocks.shape[1]), value=-1)


def block_mask(blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """bool ``[..., num_blocks]``: whether a block is among ``blocks [..., k]``; -1: none."""
    keep = torch.zeros((*blocks.shape[:-1], num_blocks + 1), dtype=torch.bool, device=blocks.device)
    # The last column takes the -1s, and blocks past this step's width, which hold nothing visible.
    outside = (blocks < 0) | (blocks >= num_blocks)
    keep.scatter_(-1, torch.where(outside, num_blocks, blocks.long()), True)
    return keep[..., :num_blocks].contiguous()


def mask_blocks(scores: torch.Tensor, blocks: torch.Tensor, *, block: int) -> torch.Tensor:
    """``scores [T, n]`` with ``-inf`` outside ``blocks [T, k]`` (-1: none) of ``block`` entries."""
    width = scores.shape[1]
    keep = block_mask(blocks, -(-width // block)).repeat_interleave(block, 1)[:, :width]
    return scores.masked_fill(~keep, -math.inf)


def best_entries(scores: torch.Tensor, *, k: int) -> torch.Tensor:
    """Level two: the ``k`` best entries in rising order, int64 ``[T, k]``, -1 at the end where there are fewer."""
    values, entries = stable_topk(scores, k)
    beyond = scores.shape[1]
    entries = torch.where(values > -math.inf, entries, beyond).sort(-1).values
    return functional.pad(torch.where(entries < beyond, entries, -1), (0, k - entries.shape[1]), value=-1)


class Selection:
    """The rows' chosen entries and candidate blocks, in buffers that all layers share.

    A row is addressed by its place in the batch being run, so layers may only use what an index source chose for the
    same batch.
    """

    def __init__(self, config: ReferenceConfig, max_num_rows: int) -> None:
        """
        Args:
            config: the model's.
            max_num_rows: the largest batch, padding included.
        """
        self.k, self.block, self.num_blocks = (
            config.index_topk,
            config.candidate_block_size,
            config.candidate_topk_blocks,
        )
        self._entries = torch.full((max_num_rows, self.k), -1, dtype=torch.int32)
        self._blocks = torch.full((max_num_rows, self.num_blocks), -1, dtype=torch.int32)

    def entries(self, num_rows: int) -> torch.Tensor:
        """int32 ``[num_rows, k]``: the last index source's choice in rising order; -1: none."""
        return self._entries[:num_rows]

    def blocks(self, num_rows: int) -> torch.Tensor:
        """int32 ``[num_rows, num_blocks]``: the candidate source's choice; -1: none."""
        return self._blocks[:num_rows]
