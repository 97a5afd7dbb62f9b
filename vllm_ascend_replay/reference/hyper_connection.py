"""Manifold-constrained hyper-connections (mHC): how a sublayer reads from and writes to the parallel streams."""

from __future__ import annotations

import torch
from torch.nn import functional

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
        hc, eps = self.hc, self.hc_eps
        flat = streams.flatten(1).to(self.dtype)
        mixes = functional.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
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
