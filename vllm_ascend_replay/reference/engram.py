"""Engram: tables looked up by n-grams of token ids, added to the streams through a gate."""

from __future__ import annotations

import torch
from torch.nn import functional

from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.metadata import Rows
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype

_MULTIPLIER = 1009


def preceding_ids(
    input_ids: torch.Tensor, lookback: torch.Tensor | None, rows: Rows | None, distance: int
) -> torch.Tensor:
    """The token id ``distance`` places before each row, -1 where there is none.

    Ids of the step are taken from ``input_ids``; ids before a request's first row from ``lookback``.

    Args:
        input_ids: int ``[T]``.
        lookback: int ``[>= R, depth]``: ``lookback[r, k]`` is the id ``k + 1`` places before request ``r``'s first
            row of the step; -1 where there is none.
        rows: the rows' requests; ``None`` takes the whole batch as one fresh sequence (profiling).
        distance: 0 or more.

    Returns:
        int64 ``[T]``.
    """
    index = torch.arange(input_ids.shape[0], device=input_ids.device)
    in_step = input_ids.long().index_select(0, (index - distance).clamp(min=0))
    if rows is None or lookback is None:
        return torch.where(index >= distance, in_step, -1)
    before = distance - 1 - rows.offset
    earlier = lookback[rows.request, before.clamp(0, lookback.shape[1] - 1)].long()
    return torch.where(before < 0, in_step, earlier)


def ngram_rows(
    config: ReferenceConfig, input_ids: torch.Tensor, lookback: torch.Tensor | None, rows: Rows | None
) -> torch.Tensor:
    """Table rows of the n-grams that end at each row.

    Args: see `preceding_ids`.

    Returns:
        int64 ``[T, (max_ngram - 1) * heads]``.
    """
    ids = [preceding_ids(input_ids, lookback, rows, k) + 1 for k in range(config.engram_max_ngram)]
    columns = []
    for n in range(2, config.engram_max_ngram + 1):
        for head in range(config.engram_heads):
            value = torch.zeros_like(ids[0])
            for k in range(n):
                value = (value * _MULTIPLIER + ids[k] * (7 + 2 * head) + k) % config.engram_vocab_size
            columns.append(value)
    return torch.stack(columns, 1)


class Engram(SeededWeights):
    """``streams + gate * value``; key and value come from the looked-up rows, the gate from key and streams."""

    def __init__(self, config: ReferenceConfig, *, name: str, dtype: torch.dtype) -> None:
        super().__init__(name=name, seed=config.weight_seed, dtype=dtype)
        hc, hidden = config.hc_mult, config.hidden_size
        self.hc, self.hidden, self.eps = hc, hidden, config.rms_norm_eps
        width = (config.engram_max_ngram - 1) * config.engram_heads * config.engram_head_dim
        self.weight("table", config.engram_vocab_size, config.engram_head_dim, scale=1.0)
        self.weight("wkv", (hc + 1) * hidden, width)
        acc = accumulation_dtype(dtype)
        self.weight("q_norm", hc, hidden, scale=0.1, mean=1.0, dtype=acc)
        self.weight("k_norm", hc, hidden, scale=0.1, mean=1.0, dtype=acc)

    def forward(self, streams: torch.Tensor, table_rows: torch.Tensor) -> torch.Tensor:
        """
        Args:
            streams: ``[T, hc, H]``.
            table_rows: int64 ``[T, columns]`` of `ngram_rows`.

        Returns:
            ``[T, hc, H]``.
        """
        acc = accumulation_dtype(self.dtype)
        kv = functional.linear(self.table[table_rows].flatten(1), self.wkv).to(acc)
        key, value = kv[:, : self.hc * self.hidden].unflatten(1, (self.hc, self.hidden)), kv[:, -self.hidden :]
        x = streams.to(acc)
        norms = torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        dot = (x * self.q_norm * self.k_norm * key).sum(-1) * norms * self.hidden**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
        return (x + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
