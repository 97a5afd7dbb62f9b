"""Attention metadata: what one KV cache group knows about the step's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

NO_SLOT = -1


@dataclass(frozen=True)
class Rows:
    """Where each row of a step belongs; all of it follows the device boundaries."""

    request: torch.Tensor
    """int64 ``[T]``: index of the row's request; the last one for rows beyond the requests."""
    real: torch.Tensor
    """bool ``[T]``: false for rows beyond the last request's boundary."""
    offset: torch.Tensor
    """int64 ``[T]``: rows of the same request before this one in the step."""
    remaining: torch.Tensor
    """int64 ``[T]``: rows of the same request from this one on, this one included."""

    @classmethod
    def from_boundaries(cls, query_start_loc: torch.Tensor, num_rows: int) -> Rows:
        """
        Args:
            query_start_loc: int ``[R + 1]`` on the device; requests may be empty.
            num_rows: rows to describe, padding included.
        """
        row = torch.arange(num_rows, device=query_start_loc.device)
        boundaries = query_start_loc.long()
        real = row < boundaries[-1:]
        request = torch.searchsorted(boundaries[1:], row, right=True).clamp(max=max(boundaries.numel() - 2, 0))
        return cls(
            request=request,
            real=real,
            offset=row - boundaries.index_select(0, request),
            remaining=boundaries.index_select(0, request + 1) - row,
        )


@dataclass
class ReferenceMetadata:
    """One KV cache group's view of a batch of ``R`` requests and ``T`` rows.

    The device tensors are those of the batch itself; nothing here was read back to the host.
    """

    block_table: torch.Tensor
    """int32 ``[R, blocks]``."""
    slot_mapping: torch.Tensor
    """int64 ``[T]``: where a row's entry goes, in tokens; negative: nowhere."""
    query_start_loc: torch.Tensor
    """int32 ``[R + 1]``."""
    max_seq_len: int
    """No request is longer; a host bound, so that reads have a fixed width."""
    kv_start: torch.Tensor | None = None
    """int32 ``[R]``: first position of which window KV exists; ``None``: every position."""

    _rows: Rows | None = None

    def rows(self, num_rows: int) -> Rows:
        """Where each of ``num_rows`` rows (padding included) belongs; computed once for all layers of the group."""
        if self._rows is None or self._rows.request.shape[0] != num_rows:
            self._rows = Rows.from_boundaries(self.query_start_loc, num_rows)
        return self._rows

    def slots(self, num_rows: int) -> torch.Tensor:
        """int64 ``[num_rows]``: `slot_mapping`, and `NO_SLOT` for rows beyond the requests."""
        slots = self.slot_mapping[:num_rows]
        slots = functional.pad(slots, (0, num_rows - slots.shape[0]), value=NO_SLOT)
        return torch.where(self.rows(num_rows).real, slots, NO_SLOT)


def layer_metadata(prefix: str) -> ReferenceMetadata | None:
    """The running forward's metadata of the cache layer ``prefix``; ``None`` when it has none (profiling)."""
    metadata = get_forward_context().attn_metadata
    return metadata[prefix] if isinstance(metadata, dict) else None


class ReferenceMetadataBuilder(AttentionMetadataBuilder[ReferenceMetadata]):
    """Builds metadata of groups whose every written entry may be read."""

    takes_replay_start: ClassVar[bool] = False
    # Decode graphs only: a prefill's graph would have to hold a replay start, which capture does not hand over.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ReferenceMetadata:
        common = common_attn_metadata
        num_reqs = common.num_reqs
        return ReferenceMetadata(
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            max_seq_len=common.max_seq_len,
        )


class WindowMetadataBuilder(ReferenceMetadataBuilder):
    """Builds metadata of sliding-window groups, whose KV may begin in the middle of a request."""

    takes_replay_start: ClassVar[bool] = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        replay_start: torch.Tensor | None = None,
    ) -> ReferenceMetadata:
        """
        Args:
            replay_start: int32 ``[R]``: first position of which window KV exists, per request; ``None``: every one.
        """
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.kv_start = replay_start
        return metadata


class ReferenceBackend(AttentionBackend):
    """Names the builder; the attention itself is the model's."""

    @staticmethod
    def get_name() -> str:
        return "REPLAY_REFERENCE"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the reference model computes attention itself")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of several sizes lie side by side in a block, as DeepSeek-V4's do.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @staticmethod
    def get_builder_cls() -> type[ReferenceMetadataBuilder]:
        return ReferenceMetadataBuilder


class WindowBackend(ReferenceBackend):
    """`ReferenceBackend` for sliding-window groups."""

    @staticmethod
    def get_name() -> str:
        return "REPLAY_REFERENCE_WINDOW"

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        return WindowMetadataBuilder
