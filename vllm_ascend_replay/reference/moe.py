"""Mixture of experts with a shared expert, and the exchange over the data-parallel group that a real one does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional
from vllm.distributed.parallel_state import get_dp_group
from vllm.forward_context import DPMetadata, get_forward_context

from vllm_ascend_replay.reference import fused
from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.selection import row_slices
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype


def exchange_rows(x: torch.Tensor, metadata: DPMetadata, shares: int = 1) -> None:
    """Send every rank of the data-parallel group the number and the sums of this rank's rows.

    The experts here are replicated, so nothing is needed from the others; but a real MoE layer exchanges rows in
    shapes that the metadata settles, and ranks that disagree about how many layers run, or on how many rows, must
    fail here as they would there.

    Args:
        x: ``[T, H]``, the rows that this rank runs.
        metadata: the running forward's.
        shares: ranks that have an even share each of the rows that the metadata counts (sequence parallelism).

    Raises:
        RuntimeError: ``T`` is not what the metadata says of this rank or, on a CPU, another rank's rows are not what
            it says of that one.
    """
    group = get_dp_group()
    told = (metadata.num_tokens_across_dp_cpu + shares - 1) // shares
    rank, num_rows = group.rank_in_group, x.shape[0]
    if int(told[rank]) != num_rows:
        raise RuntimeError(f"MoE on DP rank {rank} runs {num_rows} rows; its metadata says {told.tolist()}")
    sent = x.new_zeros(int(told.max()) + 1, dtype=torch.float32)
    sent[0] = num_rows
    sent[1 : num_rows + 1] = x.float().sum(-1)
    # Flat: gloo wants the ranks' parts along the dimension that the sent tensor has.
    gathered = sent.new_empty(told.numel() * sent.numel())
    dist.all_gather_into_tensor(gathered, sent, group=group.device_group)
    received = gathered.view(told.numel(), sent.numel())
    if x.device.type == "cpu" and (counts := received[:, 0].long().tolist()) != told.tolist():
        raise RuntimeError(f"MoE on DP ranks runs {counts} rows; the metadata of rank {rank} says {told.tolist()}")


class MoE(SeededWeights):
    """Routed experts plus one shared expert, which every row uses with weight 1::

    s = sqrt(softplus(gate(x)));  top-k of s + bias;  weights s / sum(s) * routed_scaling_factor
    expert(x) = w2(silu(min(w1 x, limit)) * clamp(w3 x, +-limit))
    """

    def __init__(
        self, config: ReferenceConfig, layer: int, *, dtype: torch.dtype, exchange: bool, shares: int = 1
    ) -> None:
        super().__init__(name=f"{layer}.moe", seed=config.weight_seed, dtype=dtype)
        acc, hidden, inner = accumulation_dtype(dtype), config.hidden_size, config.moe_intermediate_size
        self.k, self.factor, self.limit = config.num_experts_per_tok, config.routed_scaling_factor, config.swiglu_limit
        self.exchange, self.shares = exchange, shares
        self.weight("gate", config.num_experts, hidden, dtype=acc)
        self.weight("gate_bias", config.num_experts, scale=0.1, dtype=acc)
        experts = config.num_experts + 1  # the last one is the shared expert
        self.weight("w1", experts, inner, hidden)
        self.weight("w3", experts, inner, hidden)
        self.weight("w2", experts, hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: ``[T, H]``.

        Returns:
            ``[T, H]``.
        """
        metadata = get_forward_context().dp_metadata
        if self.exchange and metadata is not None:
            exchange_rows(x, metadata, self.shares)
        if self._can_group(x):
            return self._grouped(x)
        out = torch.empty_like(x)
        for part in row_slices(x.shape[0], self.w1.shape[0] * max(self.w1.shape[1:]) * x.dtype.itemsize):
            out[part] = self._dense(x[part])
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 ``[T, k]`` of each row, and their weights in the accumulation dtype."""
        scores = functional.softplus(functional.linear(x.to(self.gate.dtype), self.gate)).sqrt()
        chosen = (scores + self.gate_bias).topk(self.k, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor
        return chosen, weights

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert on every row: right in any dtype, and quick while there are few experts."""
        chosen, weights = self._route(x)
        spread = weights.new_zeros((x.shape[0], self.w1.shape[0])).scatter(1, chosen, weights)
        spread[:, -1] = 1.0
        inner = self._activate(torch.einsum("eih,th->tei", self.w1, x), torch.einsum("eih,th->tei", self.w3, x))
        y = torch.einsum("ehi,tei->teh", self.w2, inner)
        return torch.einsum("te,teh->th", spread, y.to(spread.dtype)).to(x.dtype)

    @staticmethod
    def _can_group(x: torch.Tensor) -> bool:
        # What PyTorch's grouped product takes without waiting for the group sizes on the host.
        return x.is_cuda and x.dtype == torch.bfloat16

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Each row on its own experts: rows sorted by expert, one grouped product per matrix."""
        weights, place, source, ends = fused.route(fused.project(x, self.gate), self.gate_bias, self.k, self.factor)
        rows = x.index_select(0, source)

        def product(values: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(values, matrices.transpose(1, 2), offs=ends)

        y = product(fused.swiglu(product(rows, self.w1), product(rows, self.w3), self.limit), self.w2)
        return fused.combine(y, place, weights)
