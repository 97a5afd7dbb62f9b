"""Paged caches of one layer, bound by vLLM, and how rows are written to and read from their pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from vllm_ascend_replay.reference import fused
from vllm_ascend_replay.reference.metadata import ReferenceBackend, WindowBackend

# DeepSeek-V4's pages are multiples of this; with it a block that packs several layers' pages keeps every page aligned
# for every dtype.
PAGE_ALIGNMENT = 512


def store_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """``cache[slot] = value`` for every slot that is not negative, without a shape that depends on the data.

    A row without a slot repeats the write of a row that has one, which changes nothing; when no row has one they all
    write back what slot 0 holds. So nothing is read back to the host and no page is touched that should not be.

    Args:
        cache: ``[blocks, states, width]``, strided.
        slots: int64 ``[T]``, distinct where not negative: ``block * states + state``.
        values: ``[T, width]`` in the cache's dtype.
    """
    if not slots.shape[0]:
        return
    last = slots.argmax(0, keepdim=True)
    last_slot = slots.index_select(0, last)
    substitute = torch.where(last_slot.unsqueeze(-1) >= 0, values.index_select(0, last), cache[:1, 0])
    missing = slots < 0
    values = torch.where(missing.unsqueeze(-1), substitute, values)
    slots = torch.where(missing, last_slot.clamp(min=0), slots)
    states = cache.shape[1]
    cache.index_put_((slots // states, slots % states), values)


class PagedCache(nn.Module, AttentionLayerBase):
    """One cache of one layer; vLLM finds it in the static forward context, groups it by its spec and binds pages."""

    def __init__(self, prefix: str, backend: type[AttentionBackend] = ReferenceBackend) -> None:
        """
        Args:
            prefix: the key of its attention metadata.
            backend: names the metadata builder of its group.

        Raises:
            ValueError: another layer has the prefix.
        """
        super().__init__()
        self.prefix, self.backend = prefix, backend
        self.kv_cache = torch.tensor([])
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"duplicate cache layer {prefix}")
        context[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pages ``[blocks, 1, states, width]`` as ``[blocks, states, width]``."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        raise NotImplementedError

    def forward(self) -> None:
        raise RuntimeError("a cache is written and read, not called")

    def store(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values [T, width]`` at ``slots`` int64 ``[T]``; negative slots write nothing."""
        store = fused.store_rows if fused.takes(values) else store_rows
        store(self.kv_cache, slots, values)

    def load(self, block_table: torch.Tensor, request: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Read entries of requests.

        Args:
            block_table: int32 ``[R, blocks]``.
            request: int64 ``[T]``, the request of each row.
            entries: int64 ``[T, K]``, valid entry numbers of that request.

        Returns:
            ``[T, K, width]``.
        """
        states = self.kv_cache.shape[1]
        blocks = block_table[request.unsqueeze(1), entries // states].long()
        return self.kv_cache[blocks, entries % states]


class WindowCache(PagedCache):
    """A layer's sliding-window KV; one entry per position, pages below the window are freed."""

    def __init__(self, prefix: str, *, width: int, window: int, block_size: int, dtype: torch.dtype) -> None:
        super().__init__(prefix, WindowBackend)
        self.width, self.window, self.block_size, self.dtype = width, window, block_size, dtype

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        cache_config = vllm_config.cache_config
        return SlidingWindowMLASpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=self.dtype,
            sliding_window=self.window,
            cache_dtype_str=cache_config.cache_dtype,
            alignment=PAGE_ALIGNMENT,
            model_version="deepseek_v4",
            # Absent before vLLM 0.31, where window blocks are cached with the prefix.
            bounded_replay=bool(getattr(cache_config, "swa_bounded_replay", False)),
        )


class CompressedCache(PagedCache):
    """Entries of ``ratio`` tokens each: a KV source's compressed KV or its index keys."""

    def __init__(self, prefix: str, *, width: int, ratio: int, dtype: torch.dtype) -> None:
        super().__init__(prefix)
        self.width, self.ratio, self.dtype = width, ratio, dtype

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block_size = vllm_config.cache_config.block_size
        if block_size % self.ratio:
            raise ValueError(
                f"block_size {block_size} is no multiple of {self.prefix}'s compression ratio {self.ratio}"
            )
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=self.dtype,
            tokens_per_state=self.ratio,
            cache_dtype_str=vllm_config.cache_config.cache_dtype,
            alignment=PAGE_ALIGNMENT,
            model_version="deepseek_v4",
        )


class RingCache(PagedCache):
    """One block per request with the newest rows of the group that is still open."""

    def __init__(self, prefix: str, *, width: int, dtype: torch.dtype) -> None:
        super().__init__(prefix)
        self.width, self.dtype = width, dtype
        # Drafts, the sampled token and the row before them must be held at once (see CircularBufferSpec).
        rows = get_current_vllm_config().num_speculative_tokens + 2
        self.capacity = max(8, 1 << (rows - 1).bit_length())

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return CircularBufferSpec(
            block_size=self.capacity, num_kv_heads=1, head_size=self.width, head_size_v=0, dtype=self.dtype
        )


def cache_layers(vllm_config: VllmConfig) -> dict[str, PagedCache]:
    """All caches of the model by prefix."""
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return {prefix: layer for prefix, layer in context.items() if isinstance(layer, PagedCache)}
