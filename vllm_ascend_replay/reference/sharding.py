"""How the reference model lies over tensor-parallel ranks: replicated, token-sharded, or with sharded queries too."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_ascend_replay.layouts import WHOLE, GroupRanks, Layout, TokenShards
from vllm_ascend_replay.reference.config import ReferenceConfig


@dataclass(frozen=True)
class Sharding:
    """This rank's part of the model."""

    layout: Layout = WHOLE
    """Of streams, mixes and ids between the attention layers."""
    rank: int = 0
    queries: bool = False
    """DSA-CP: a rank attends with its chunk of the rows and all heads; else with all rows and its heads."""

    @classmethod
    def of(cls, config: ReferenceConfig, vllm_config: VllmConfig) -> Sharding:
        """
        Raises:
            ValueError: the output groups cannot be shared out evenly.
        """
        size = vllm_config.parallel_config.tensor_parallel_size
        if not config.sequence_parallel or size == 1:
            return cls()
        if not config.dsa_context_parallel and config.o_groups % size:
            raise ValueError(f"o_groups is {config.o_groups}: {size} tensor-parallel ranks cannot share them out")
        ranks = GroupRanks(get_tp_group().device_group)
        return cls(TokenShards(ranks), ranks.rank, config.dsa_context_parallel)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only its chunk of the rows."""
        return self.layout.size > 1

    def part(self, count: int) -> slice:
        """This rank's share of ``count`` heads or output groups."""
        if self.queries:
            return slice(0, count)
        share = count // self.layout.size
        return slice(self.rank * share, (self.rank + 1) * share)
