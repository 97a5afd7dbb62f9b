"""Manifold-constrained hyper-connections (mHC): how a sublayer reads from and writes to the parallel streams."""

from __future__ import annotations

import torch
from torch.nn import functional
from vllm.triton_utils import tl, triton

from vllm_ascend_replay.reference import fused
from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype, rms_norm


def collapse(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """A sublayer's input: ``sum_i pre_mix_i * streams_i``.

    Args:
        streams: ``[T, hc, H]``.
        pre_mix: ``[T, hc]`` in the accumulation dtype.

    Returns:
        ``[T, H]`` in the streams' dtype.
    """
    return torch.einsum("ti,tih->th", pre_mix, streams.to(pre_mix.dtype)).to(streams.dtype)


def collapse_norm(streams: torch.Tensor, mix: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`collapse`, then `rms_norm` with ``weight [H]``: ``[T, H]``."""
    if fused.takes(streams):
        return fused.collapse_norm(streams, mix, weight, eps)
    return rms_norm(collapse(streams, mix), weight, eps)


@triton.jit
def _sum_of_parts(at, mask, step, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * step, mask=mask, other=0.0)
    return total


@triton.jit
def _mixes_kernel(  # type: ignore[no-untyped-def]  # Triton types the arguments.
    raw_ptr,  # [PARTS, T, LINE]: parts of [T, (2 + HC) * HC], then of the sums of squares if NORM
    scale_ptr,  # [3]
    base_ptr,  # [(2 + HC) * HC]
    pre_ptr,  # [T, HC]
    post_ptr,  # [T, HC]
    comb_ptr,  # [T, HC, HC]
    num_rows,
    width,
    PARTS: tl.constexpr,
    LINE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    ITERS: tl.constexpr,
    HC: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stream = tl.arange(0, HC)
    line = row.to(tl.int64) * LINE
    norm = tl.full([ROWS], 1.0, raw_ptr.dtype.element_ty)
    if NORM:
        squares = _sum_of_parts(raw_ptr + line + (2 + HC) * HC, row < num_rows, num_rows * LINE, PARTS)
        norm = tl.rsqrt(squares / width + NORM_EPS)
    mask = (row < num_rows)[:, None] & (stream >= 0)[None, :]
    out = row[:, None].to(tl.int64) * HC + stream[None, :]
    at = raw_ptr + line[:, None] + stream[None, :]
    pre = _sum_of_parts(at, mask, num_rows * LINE, PARTS) * norm[:, None] * tl.load(scale_ptr)
    tl.store(pre_ptr + out, tl.sigmoid(pre + tl.load(base_ptr + stream)[None, :]) + EPS, mask=mask)
    post = _sum_of_parts(at + HC, mask, num_rows * LINE, PARTS) * norm[:, None] * tl.load(scale_ptr + 1)
    tl.store(post_ptr + out, 2.0 * tl.sigmoid(post + tl.load(base_ptr + HC + stream)[None, :]), mask=mask)

    cell = stream[:, None] * HC + stream[None, :]
    mask = (row < num_rows)[:, None, None] & (cell >= 0)[None, :, :]
    at = raw_ptr + line[:, None, None] + 2 * HC + cell[None, :, :]
    comb = _sum_of_parts(at, mask, num_rows * LINE, PARTS) * norm[:, None, None] * tl.load(scale_ptr + 2)
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
        if fused.takes(streams) and self.hc in (2, 4, 8):
            return self._launch(fused.project(streams.flatten(1), self.fn, squares=True), width=self.fn.shape[1])
        flat = streams.flatten(1).to(self.dtype)
        raw = functional.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return self._launch(raw.unsqueeze(0)) if raw.is_cuda and self.hc in (2, 4, 8) else self._mixes(raw)

    def _launch(self, raw: torch.Tensor, *, width: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`_mixes` in one kernel: on a GPU its many small steps take longer to launch than to run.

        Args:
            raw: ``[parts, T, columns]``, summed over the parts: what `_mixes` takes or, with ``width``, the product
                that is not scaled yet and in the column after it the sums of squares of ``width`` values.
        """
        (parts, num_rows, line), hc, rows = raw.shape, self.hc, 64 if raw.shape[1] >= 4096 else 8
        pre, post, comb = raw.new_empty(num_rows, hc), raw.new_empty(num_rows, hc), raw.new_empty(num_rows, hc, hc)
        if num_rows:
            _mixes_kernel[(triton.cdiv(num_rows, rows),)](
                *(raw, self.scale, self.base, pre, post, comb, num_rows, width),
                PARTS=parts,
                LINE=line,
                NORM=width > 0,
                NORM_EPS=self.eps,
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
        if fused.takes(streams):
            return fused.spread(y, streams, post, comb)
        mixed = torch.einsum("tij,tih->tjh", comb, streams.to(comb.dtype))
        return (mixed + post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(1)).to(streams.dtype)
