"""Attention metadata: what one KV cache group knows about the step's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
MAX_TILE = 64


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

    boundaries: torch.Tensor
    """int64 ``[R + 1]``."""

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
            boundaries=boundaries,
        )


@dataclass(frozen=True)
class Tiles:
    """Rows in tiles of equal size, each of one request, so that a tile reads its request's pages once.

    The number of tiles is a host bound; which rows are in one is only known to the device. Tiles may stay empty.
    """

    row: torch.Tensor
    """int64 ``[tiles, size]``: a row of the batch; some row of it where ``real`` is false."""
    real: torch.Tensor
    """bool ``[tiles, size]``."""
    request: torch.Tensor
    """int64 ``[tiles]``."""
    place: torch.Tensor
    """int64 ``[T]``: where row ``t`` lies among the ``tiles * size`` places; anywhere for rows beyond the requests."""

    @classmethod
    def from_rows(cls, rows: Rows, size: int) -> Tiles:
        """
        Args:
            rows: at least one.
            size: rows in a tile; a waste where requests have fewer.
        """
        num_rows, boundaries = rows.request.shape[0], rows.boundaries
        num_reqs = boundaries.shape[0] - 1
        num_tiles = num_rows if size == 1 else num_rows // size + num_reqs
        per_request = (boundaries.diff() + size - 1) // size
        ends = per_request.cumsum(0)
        begins = ends - per_request
        tile = torch.arange(num_tiles, device=boundaries.device)
        request = torch.searchsorted(ends, tile, right=True).clamp(max=num_reqs - 1)
        row = (boundaries[:-1] - begins * size).index_select(0, request) + tile * size
        row = row.unsqueeze(1) + torch.arange(size, device=boundaries.device)
        real = row < boundaries[1:].index_select(0, request).unsqueeze(1)
        place = begins.index_select(0, rows.request) * size + rows.offset
        return cls(
            row=row.clamp(0, num_rows - 1),
            real=real,
            request=request,
            place=place.clamp(0, num_tiles * size - 1),
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
    max_query_len: int
    """No request has more rows; a host bound, and only a hint."""
    max_seq_len: int
    """No request is longer; a host bound, so that reads have a fixed width."""
    kv_start: torch.Tensor | None = None
    """int32 ``[R]``: first position of which window KV exists; ``None``: every position."""

    in_graph: bool = False
    """Whether a FULL graph is captured with it: what is derived from it must be computed inside that graph."""
    _rows: Rows | None = None
    _slots: torch.Tensor | None = None
    _chunk: ReferenceMetadata | None = None

    def rows(self, num_rows: int) -> Rows:
        """Where each of ``num_rows`` rows (padding included) belongs; computed once for all layers of the group."""
        if self.in_graph:
            return Rows.from_boundaries(self.query_start_loc, num_rows)
        if self._rows is None or self._rows.request.shape[0] != num_rows:
            self._rows = Rows.from_boundaries(self.query_start_loc, num_rows)
        return self._rows

    def chunk(self, first: int, num_rows: int) -> ReferenceMetadata:
        """The same requests with the rows ``[first, first + num_rows)`` only: those of a rank's queries.

        It follows the device boundaries; what it knows of lengths stays as a bound. Always the same for one batch.
        """
        if self._chunk is None:
            boundaries = (self.query_start_loc - first).clamp(0, num_rows)
            self._chunk = replace(
                self,
                query_start_loc=boundaries,
                slot_mapping=self.slot_mapping[first : first + num_rows],
                _rows=None,
                _slots=None,
            )
        return self._chunk

    def tiles(self, num_rows: int) -> Tiles:
        """The rows in tiles as large as the longest query fills."""
        size = min(MAX_TILE, 1 << (max(self.max_query_len, 1) - 1).bit_length())
        return Tiles.from_rows(self.rows(num_rows), size)

    def slots(self, num_rows: int) -> torch.Tensor:
        """int64 ``[num_rows]``: `slot_mapping`, and `NO_SLOT` for rows beyond the requests; computed once."""
        if self._slots is None or self._slots.shape[0] != num_rows or self.in_graph:
            slots = self.slot_mapping[:num_rows]
            slots = functional.pad(slots, (0, num_rows - slots.shape[0]), value=NO_SLOT)
            self._slots = torch.where(self.rows(num_rows).real, slots, NO_SLOT)
        return self._slots


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
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> ReferenceMetadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.in_graph = True
        return metadata


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
