"""Manifold-constrained hyper-connections (mHC): how a sublayer reads from and writes to the parallel streams."""

from __future__ import annotations

import torch
from torch.nn import functional
from vllm.triton_utils import tl, triton

from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype


def collapse(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """A sublayer's input: ``sum_i pre_mix_i * streams_i``.

    Args:
        streams: ``[T, hc, H]``.
        pre_mix: ``[T, hc]`` in the accumulation dtype.

    Returns:
        ``[T, H]`` in the streams' dtype.
    """
    return torch.einsum("ti,tih->th", pre_mix, streams.to(pre_mix.dtype)).to(streams.dtype)


@triton.jit
def _mixes_kernel(  # type: ignore[no-untyped-def]  # Triton types the arguments.
    raw_ptr,  # [T, (2 + HC) * HC]
    scale_ptr,  # [3]
    base_ptr,  # [(2 + HC) * HC]
    pre_ptr,  # [T, HC]
    post_ptr,  # [T, HC]
    comb_ptr,  # [T, HC, HC]
    num_rows,
    EPS: tl.constexpr,
    ITERS: tl.constexpr,
    HC: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stream = tl.arange(0, HC)
    line = row[:, None].to(tl.int64) * (2 + HC) * HC + stream[None, :]
    mask = (row < num_rows)[:, None] & (stream >= 0)[None, :]
    out = row[:, None].to(tl.int64) * HC + stream[None, :]
    pre = tl.load(raw_ptr + line, mask=mask, other=0.0) * tl.load(scale_ptr)
    tl.store(pre_ptr + out, tl.sigmoid(pre + tl.load(base_ptr + stream)[None, :]) + EPS, mask=mask)
    post = tl.load(raw_ptr + HC + line, mask=mask, other=0.0) * tl.load(scale_ptr + 1)
    tl.store(post_ptr + out, 2.0 * tl.sigmoid(post + tl.load(base_ptr + HC + stream)[None, :]), mask=mask)

    cell = stream[:, None] * HC + stream[None, :]
    line = row[:, None, None].to(tl.int64) * (2 + HC) * HC + 2 * HC + cell[None, :, :]
    mask = (row < num_rows)[:, None, None] & (cell >= 0)[None, :, :]
    comb = tl.load(raw_ptr + line, mask=mask, other=0.0) * tl.load(scale_ptr + 2)
    comb += tl.load(base_ptr + 2 * HC + cell)[None, :, :]
    comb = tl.exp(comb - tl.max(comb, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + EPS
    comb = comb / (tl.sum(comb, axis=1)[:, None, :] + EPS)
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, axis=2)[:, :, None] + EPS)
        comb = comb / (tl.sum(comb, axis=1)[:, None, :] + EPS)
    tl.store(comb_ptr + row[:, None, None].to(tl.int64) * HC * HC + cell[None, :, :], comb, mask=mask)


class HyperConnection(SeededWeights):
    """The mixes of one sublayer, computed from the streams that enter it.

    Formulas (DeepSeek-V4.1's public reference; all in float32, or float64 in float64 models)::

        f = flatten(X);  m = (f @ fn.T) * rsqrt(mean(f^2) + eps)
        pre = sigmoid(m[:hc] * s0 + b0) + hc_eps;  post = 2 * sigmoid(m[hc:2hc] * s1 + b1)
        C = softmax(m[2hc:] * s2 + b2) + hc_eps, then Sinkhorn: columns, (rows, columns) x (iters - 1)
        X'_j = post_j * y + sum_i C[i, j] * X_i
    """

    def __init__(self, config: ReferenceConfig, *, name: str, dtype: torch.dtype) -> None:
        super().__init__(name=name, seed=config.weight_seed, dtype=accumulation_dtype(dtype))
        self.hc = hc = config.hc_mult
        self.iters, self.hc_eps, self.eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.weight("fn", (2 + hc) * hc, hc * config.hidden_size)
        self.weight("base", (2 + hc) * hc, scale=0.5)
        self.weight("scale", 3, scale=0.3, mean=1.0)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mixes of each row.

        Args:
            streams: ``[T, hc, H]``.

        Returns:
            ``pre [T, hc]`` (for the next sublayer), ``post [T, hc]`` and ``comb [T, hc, hc]``.
        """
        flat = streams.flatten(1).to(self.dtype)
        raw = functional.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return self._launch(raw) if raw.is_cuda and self.hc in (2, 4, 8) else self._mixes(raw)

    def _launch(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`_mixes` in one kernel: on a GPU its many small steps take longer to launch than to run."""
        num_rows, hc, rows = raw.shape[0], self.hc, 64
        pre, post, comb = raw.new_empty(num_rows, hc), raw.new_empty(num_rows, hc), raw.new_empty(num_rows, hc, hc)
        if num_rows:
            _mixes_kernel[(triton.cdiv(num_rows, rows),)](
                *(raw, self.scale, self.base, pre, post, comb, num_rows),
                EPS=self.hc_eps,
                ITERS=self.iters,
                HC=hc,
                ROWS=rows,
            )
        return pre, post, comb

    def _mixes(self, mixes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre, post and comb of the scaled projection ``[T, (2 + hc) * hc]``."""
        hc, eps = self.hc, self.hc_eps
        pre = torch.sigmoid(mixes[:, :hc] * self.scale[0] + self.base[:hc]) + eps
        post = 2.0 * torch.sigmoid(mixes[:, hc : 2 * hc] * self.scale[1] + self.base[hc : 2 * hc])
        comb = mixes[:, 2 * hc :] * self.scale[2] + self.base[2 * hc :]
        comb = torch.softmax(comb.unflatten(1, (hc, hc)), -1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return pre, post, comb

    @staticmethod
    def spread(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams after a sublayer.

        Args:
            y: ``[T, H]``, the sublayer's output.
            streams: ``[T, hc, H]`` that entered it, with their ``post [T, hc]`` and ``comb [T, hc, hc]``.

        Returns:
            ``[T, hc, H]`` in the streams' dtype.
        """
        mixed = torch.einsum("tij,tih->tjh", comb, streams.to(comb.dtype))
        return (mixed + post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(1)).to(streams.dtype)
