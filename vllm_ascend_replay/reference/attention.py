"""Attention of one layer: its own window KV, and the last KV source's entries chosen by the last index source."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.nn import functional
from vllm.compilation.breakable_cudagraph import eager_break_during_capture

from vllm_ascend_replay.layouts import share_of
from vllm_ascend_replay.reference import fused
from vllm_ascend_replay.reference.cache import CompressedCache, RingCache, WindowCache
from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.metadata import NO_SLOT, ReferenceMetadata, Tiles, layer_metadata
from vllm_ascend_replay.reference.selection import (
    Selection,
    best_blocks,
    best_entries,
    block_mask,
    mask_blocks,
    row_slices,
)
from vllm_ascend_replay.reference.sharding import Sharding
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype, rms_norm

# Of the scores that are looked at together.
MAX_SCORE_BYTES = 2 << 30


class Rotary:
    """Rotation of a vector's last dims as interleaved pairs, by position."""

    def __init__(self, positions: torch.Tensor, dim: int, theta: float) -> None:
        """
        Args:
            positions: int64 ``[T]``.
            dim: rotated dims.
            theta: base; pair ``i`` turns by ``position / theta ** (2 i / dim)``.
        """
        self.positions, self.dim, self.theta = positions, dim, theta

    @functools.cached_property
    def _angles(self) -> torch.Tensor:
        # float64: at a million positions a float32 angle is off by a tenth of a radian.
        exponent = torch.arange(0, self.dim, 2, device=self.positions.device, dtype=torch.float64) / self.dim
        return self.positions.double().unsqueeze(1) * self.theta**-exponent

    @functools.cached_property
    def cos(self) -> torch.Tensor:
        """float64 ``[T, dim / 2]``."""
        return self._angles.cos()

    @functools.cached_property
    def sin(self) -> torch.Tensor:
        """float64 ``[T, dim / 2]``."""
        return self._angles.sin()

    def __call__(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotate ``x``, ``[T, d]`` or ``[T, heads, d]``, which may be overwritten; ``inverse`` turns back."""
        if fused.takes(x):
            return fused.rotate(x, self.positions, self.dim, self.theta, inverse=inverse)
        acc = accumulation_dtype(x.dtype)
        cos, sin = self.cos.to(acc), (-self.sin if inverse else self.sin).to(acc)
        if x.ndim == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        pairs = x[..., -self.dim :].to(acc).unflatten(-1, (-1, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return torch.cat((x[..., : -self.dim], turned.to(x.dtype)), -1)


class Compressor(SeededWeights):
    """A KV source's second output: one latent entry per ``ratio`` tokens, and an index key for each.

    Ratio 1 has no pooling. Ratio 2 pools two rows with a softmax gate per dim; the first row of a group that a step
    leaves open waits in a ring, one block per request.
    """

    def __init__(self, config: ReferenceConfig, layer: int, *, prefix: str, dtype: torch.dtype) -> None:
        super().__init__(name=f"{layer}.compressor", seed=config.weight_seed, dtype=dtype)
        acc, dim, key_dim = accumulation_dtype(dtype), config.head_dim, config.index_head_dim
        self.ratio, self.dim, self.eps = config.compress_ratios[layer], dim, config.rms_norm_eps
        self.rope = (config.qk_rope_head_dim, config.rope_theta_of(layer))
        self.weight("wkv", dim, config.hidden_size)
        self.weight("norm", dim, scale=0.1, mean=1.0, dtype=acc)
        self.weight("wk", key_dim, dim)
        self.weight("k_norm", key_dim, scale=0.1, mean=1.0, dtype=acc)
        self.latents = CompressedCache(f"{prefix}.attn", width=dim, ratio=self.ratio, dtype=dtype)
        self.keys = CompressedCache(f"{prefix}.indexer.k_cache", width=key_dim, ratio=self.ratio, dtype=dtype)
        self.ring: RingCache | None = None
        if self.ratio > 1:
            self.weight("wgate", dim, config.hidden_size)
            self.ring = RingCache(f"{prefix}.compressor.state_cache", width=2 * dim, dtype=acc)

    def write(self, x: torch.Tensor, positions: torch.Tensor, metadata: ReferenceMetadata) -> None:
        """Write the entries that these rows complete.

        Args:
            x: ``[T, H]``, the layer's normed attention input.
            positions: int64 ``[T]``.
            metadata: of the compressed KV cache; the ring's and the index keys' are looked up.
        """
        num_rows = x.shape[0]
        slots = metadata.slots(num_rows)
        key_metadata = layer_metadata(self.keys.prefix)
        assert key_metadata is not None
        key_slots = key_metadata.slots(num_rows)
        first = positions
        raw = functional.linear(x, self.wkv)
        if self.ring is not None:
            raw = self._pool(raw, functional.linear(x, self.wgate), positions)
            closes = positions % self.ratio == self.ratio - 1
            slots = torch.where(closes & (slots >= 0), slots // self.ratio, NO_SLOT)
            key_slots = torch.where(closes & (key_slots >= 0), key_slots // self.ratio, NO_SLOT)
            first = positions - (self.ratio - 1)
        latent = rms_norm(raw, self.norm, self.eps)
        key = rms_norm(functional.linear(latent, self.wk), self.k_norm, self.eps)
        rotary = Rotary(first, *self.rope)
        self.keys.store(key_slots, rotary(key))
        self.latents.store(slots, rotary(latent))

    def _pool(self, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The pooled pair (row before, row) of each row, ``[T, dim]``; meaningful where the row closes a group."""
        assert self.ring is not None
        num_rows = kv.shape[0]
        metadata = layer_metadata(self.ring.prefix)
        assert metadata is not None
        rows, capacity = metadata.rows(num_rows), self.ring.capacity
        state = torch.cat((kv, gate), -1).to(self.ring.dtype)
        block = metadata.block_table[:, 0].long().index_select(0, rows.request)
        held = self.ring.kv_cache[block, (positions - 1) % capacity]
        previous = torch.where((rows.offset == 0).unsqueeze(-1), held, state.roll(1, 0))
        # A step may hold more rows of a request than the ring; the newest stay.
        kept = rows.real & (rows.remaining <= capacity) & (block > 0)
        self.ring.store(torch.where(kept, block * capacity + positions % capacity, NO_SLOT), state)
        both = torch.stack((previous, state), 1)
        weights = torch.softmax(both[..., self.dim :], 1)
        return (both[..., : self.dim] * weights).sum(1).to(kv.dtype)


@dataclass
class _Search:
    """One layer's choice of entries in a step of ``T`` rows, which are treated in tiles of one request."""

    query: torch.Tensor
    """``[T, heads, dim]``."""
    weight: torch.Tensor
    """``[T, heads]``."""
    tiles: Tiles
    lengths: torch.Tensor
    """int64 ``[tiles, size]``: entries that a row sees, ``width`` at most."""
    source: Compressor
    metadata: ReferenceMetadata
    """Of the source's cache."""
    selection: Selection
    width: int
    found: torch.Tensor
    """Out, int32 ``[tiles, size, k]``."""
    found_blocks: torch.Tensor
    """Out, int32 ``[tiles, size, blocks]``; the candidate source fills it."""


class Indexer(SeededWeights):
    """Scores a row against index keys: ``sum_h w_h * relu(q_h . k)``, and chooses the row's entries."""

    def __init__(self, config: ReferenceConfig, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__(name=f"{layer}.indexer", seed=config.weight_seed, dtype=dtype)
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.find_blocks = layer == config.candidate_source_layer_id
        self.use_blocks = 0 <= config.candidate_source_layer_id < layer
        self.weight("wq", self.heads * self.dim, config.q_lora_rank)
        self.weight("wproj", self.heads, config.hidden_size)

    def choose(
        self,
        x: torch.Tensor,
        low_rank_q: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        source: Compressor,
        metadata: ReferenceMetadata,
        selection: Selection,
    ) -> None:
        """Fill ``selection`` for these rows.

        Args:
            x: ``[T, H]``; low_rank_q: ``[T, q_lora]``; positions: int64 ``[T]`` with their ``rotary``.
            source: whose index keys are scored, with their cache's ``metadata``.
        """
        num_rows, acc = x.shape[0], accumulation_dtype(self.dtype)
        chosen, blocks = selection.entries(num_rows), selection.blocks(num_rows)
        ratio, states = source.ratio, source.keys.kv_cache.shape[1]
        width = min(metadata.max_seq_len // ratio, metadata.block_table.shape[1] * states)
        if not width or not num_rows:
            chosen.fill_(-1)
            return
        query = rotary(functional.linear(low_rank_q, self.wq).unflatten(1, (self.heads, self.dim)))
        weight = functional.linear(x, self.wproj).to(acc) * (self.dim * self.heads) ** -0.5
        tiles = metadata.tiles(num_rows)
        num_tiles, size = tiles.row.shape
        lengths = torch.where(tiles.real, (positions[tiles.row] + 1) // ratio, 0)
        found = chosen.new_empty((num_tiles, size, selection.k))
        found_blocks = blocks.new_empty((num_tiles, size, selection.num_blocks))
        search = _Search(query, weight, tiles, lengths, source, metadata, selection, width, found, found_blocks)
        if fused.takes(x):
            self._find_fused(search)
        else:
            self._find(search)
        real = metadata.rows(num_rows).real.unsqueeze(1)
        chosen.copy_(found.flatten(0, 1).index_select(0, tiles.place).masked_fill(~real, -1))
        if self.find_blocks:
            blocks.copy_(found_blocks.flatten(0, 1).index_select(0, tiles.place))

    def _find(self, search: _Search) -> None:
        """Choose the entries of the tiles' rows."""
        query, weight, tiles, lengths = search.query, search.weight, search.tiles, search.lengths
        source, metadata, selection, width = search.source, search.metadata, search.selection, search.width
        num_tiles, size = tiles.row.shape
        acc, blocks = weight.dtype, selection.blocks(query.shape[0])
        entries = torch.arange(width, device=query.device)
        for part in row_slices(num_tiles, width * max(size * self.heads, self.dim) * acc.itemsize):
            row, length = tiles.row[part], lengths[part]
            visible = entries < length.unsqueeze(-1)
            # Pages that hold nothing yet may hold anything, NaN included.
            written = entries < length.amax(1, keepdim=True)
            keys = source.keys.load(metadata.block_table, tiles.request[part], torch.where(written, entries, 0))
            keys = keys.masked_fill(~written.unsqueeze(-1), 0)
            scores = torch.matmul(query[row].flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (size, self.heads))
            scores = torch.einsum("bthn,bth->btn", scores.to(acc).relu(), weight[row])
            scores = scores.masked_fill(~visible, -math.inf).flatten(0, 1)
            if self.find_blocks:
                best = best_blocks(scores, length.flatten(), block=selection.block, k=selection.num_blocks)
                search.found_blocks[part] = best.int().unflatten(0, (-1, size))
            if self.use_blocks:
                scores = mask_blocks(scores, blocks[row].flatten(0, 1), block=selection.block)
            search.found[part] = best_entries(scores, k=selection.k).int().unflatten(0, (-1, size))

    def _find_fused(self, search: _Search) -> None:
        """`_find` in few launches; scores are not rounded to the model's dtype."""
        query, weight, tiles, lengths = search.query, search.weight, search.tiles, search.lengths
        source, metadata, selection, width = search.source, search.metadata, search.selection, search.width
        num_tiles, size = tiles.row.shape
        block, blocks = selection.block, selection.blocks(query.shape[0])
        for part in row_slices(num_tiles, width * size * weight.dtype.itemsize, limit=MAX_SCORE_BYTES):
            row, length = tiles.row[part], lengths[part]
            scores = fused.score(
                query,
                weight,
                row=row,
                lengths=length,
                request=tiles.request[part],
                cache=source.keys.kv_cache,
                block_table=metadata.block_table,
                width=width,
                keep=block_mask(blocks[row], -(-width // block)) if self.use_blocks else None,
                keep_block=block,
            )
            length = length.flatten()
            if self.find_blocks:
                best = fused.best_of_blocks(scores, length, block)
                chosen = fused.choose(best, (length + block - 1) // block, selection.num_blocks)
                search.found_blocks[part] = chosen.unflatten(0, (-1, size))
            search.found[part] = fused.choose(scores, length, selection.k).unflatten(0, (-1, size))


class LatentAttention(SeededWeights):
    """Attention over one shared latent head, K = V::

        out = softmax over window and chosen entries, with a per-head sink in the denominator only

    The window of a row at position ``p`` is ``max(p - W + 1, kv_start) <= j <= p``.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        layer: int,
        *,
        sources: dict[int, Compressor],
        selection: Selection,
        prefix: str,
        dtype: torch.dtype,
        sharding: Sharding,
    ) -> None:
        """
        Args:
            config: the model's.
            layer: index of the layer.
            sources: KV sources so far; this layer adds itself if it is one.
            selection: shared by all layers.
            prefix: of the layer; the caches' prefixes begin with it.
            dtype: of weights and caches.
            sharding: this rank's heads or rows.
        """
        super().__init__(name=f"{layer}.attention", seed=config.weight_seed, dtype=dtype)
        acc = accumulation_dtype(dtype)
        heads, dim = config.num_attention_heads, config.head_dim
        self.heads, self.dim, self.window, self.eps = heads, dim, config.sliding_window, config.rms_norm_eps
        self.rope = (config.qk_rope_head_dim, config.rope_theta_of(layer))
        self.weight("wq_a", config.q_lora_rank, config.hidden_size)
        self.weight("q_norm", config.q_lora_rank, scale=0.1, mean=1.0, dtype=acc)
        self.weight("wq_b", heads * dim, config.q_lora_rank)
        self.weight("wkv", dim, config.hidden_size)
        self.weight("kv_norm", dim, scale=0.1, mean=1.0, dtype=acc)
        self.weight("wo_a", config.o_groups, config.o_lora_rank, heads * dim // config.o_groups)
        self.weight("wo_b", config.hidden_size, config.o_groups * config.o_lora_rank)
        self.weight("sink", heads, scale=1.0, dtype=acc)
        self.swa_cache = WindowCache(
            f"{prefix}.swa_cache", width=dim, window=self.window, block_size=config.swa_block_size, dtype=dtype
        )
        self.compressor: Compressor | None = None
        if layer in config.kv_source_layer_ids:
            self.compressor = sources[layer] = Compressor(config, layer, prefix=prefix, dtype=dtype)
        source = config.kv_source(layer)
        # In a tuple, so that the source stays a module of its own layer alone.
        self._source: tuple[Compressor, ...] = () if source is None else (sources[source],)
        self.indexer = Indexer(config, layer, dtype=dtype) if layer in config.index_source_layer_ids else None
        self.selection = selection
        self.sharding = sharding
        self.my_heads, self.my_groups = sharding.part(heads), sharding.part(config.o_groups)
        self.heads = self.my_heads.stop - self.my_heads.start

    @property
    def metadata_prefixes(self) -> list[str]:
        """Keys of the attention metadata that this layer reads, the ring's excluded."""
        return [self.swa_cache.prefix, *(p for s in self._source for p in (s.latents.prefix, s.keys.prefix))]

    def write_kv(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Write these rows' window KV and, in a KV source, compressed KV and index keys.

        Args:
            x: ``[T, H]``, the normed input; positions: int64 ``[T]``.
        """
        metadata = layer_metadata(self.swa_cache.prefix)
        if metadata is not None:
            self._write(x, self._window_kv(x, Rotary(positions, *self.rope)), positions, metadata)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Write these rows' KV and attend.

        Args:
            x: ``[T, H]``, the normed input; positions: int64 ``[T]``.

        Returns:
            ``[T, H]``; from this rank's heads only where the rows are sharded. With sharded queries this rank's chunk
            of the rows, ``[ceil(T / size), H]``.
        """
        rotary = Rotary(positions, *self.rope)
        kv, at = self._window_kv(x, rotary), self._query_rows(x.shape[0])
        if at != slice(0, x.shape[0]):
            rotary = Rotary(positions[at], *self.rope)
        low_rank_q = rms_norm(functional.linear(x[at], self.wq_a), self.q_norm, self.eps)
        heads = slice(self.my_heads.start * self.dim, self.my_heads.stop * self.dim)
        query = rotary(functional.linear(low_rank_q, self.wq_b[heads]).unflatten(1, (self.heads, self.dim)))
        attended = torch.empty_like(query)
        self._cached_attention(x, low_rank_q, query, kv, positions, attended)
        wo_a, rank = self.wo_a[self.my_groups], self.wo_a.shape[1]
        grouped = rotary(attended, inverse=True).flatten(1).unflatten(1, (wo_a.shape[0], wo_a.shape[2]))
        wo_b = self.wo_b[:, self.my_groups.start * rank : self.my_groups.stop * rank]
        out = functional.linear(torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1), wo_b)
        return self._padded_chunk(out, x.shape[0])

    def _query_rows(self, num_rows: int) -> slice:
        """The rows whose queries this rank attends with."""
        if not self.sharding.queries:
            return slice(0, num_rows)
        share = share_of(num_rows, self.sharding.layout.size)
        begin = min(self.sharding.rank * share, num_rows)
        return slice(begin, min(begin + share, num_rows))

    def _padded_chunk(self, out: torch.Tensor, num_rows: int) -> torch.Tensor:
        """``out`` of this rank's query rows, with zero rows up to the length of a chunk."""
        if not self.sharding.queries:
            return out
        share = share_of(num_rows, self.sharding.layout.size)
        return functional.pad(out, (0, 0, 0, share - out.shape[0]))

    @eager_break_during_capture
    def _cached_attention(
        self,
        x: torch.Tensor,
        low_rank_q: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """All that reads the step's metadata or the caches: an eager break in PIECEWISE graphs.

        Args:
            x: ``[T, H]``; kv: ``[T, dim]``; positions: int64 ``[T]``.
            low_rank_q: ``[n, q_lora]``; query: ``[n, heads, dim]``, of this rank's `_query_rows`: all, unless they are
                sharded.
            out: ``[n, heads, dim]``, filled.
        """
        metadata = layer_metadata(self.swa_cache.prefix)
        if metadata is None:
            out.zero_()
            return
        self._write(x, kv, positions, metadata)
        at = self._query_rows(x.shape[0])
        if at.start == at.stop:
            return
        x, positions = x[at], positions[at]
        metadata = self._of_queries(metadata, at)
        if self.indexer is not None:
            source = self._source[0]
            key_metadata = layer_metadata(source.keys.prefix)
            assert key_metadata is not None
            key_metadata = self._of_queries(key_metadata, at)
            rotary = Rotary(positions, *self.rope)
            self.indexer.choose(x, low_rank_q, positions, rotary, source, key_metadata, self.selection)
        self._attend(query, positions, metadata, out)

    def _of_queries(self, metadata: ReferenceMetadata, at: slice) -> ReferenceMetadata:
        return metadata.chunk(at.start, at.stop - at.start) if self.sharding.queries else metadata

    def _window_kv(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return rotary(rms_norm(functional.linear(x, self.wkv), self.kv_norm, self.eps))

    def _write(self, x: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, metadata: ReferenceMetadata) -> None:
        self.swa_cache.store(metadata.slots(x.shape[0]), kv)
        if self.compressor is not None:
            compressed = layer_metadata(self.compressor.latents.prefix)
            assert compressed is not None
            self.compressor.write(x, positions, compressed)

    def _attend(
        self, query: torch.Tensor, positions: torch.Tensor, metadata: ReferenceMetadata, out: torch.Tensor
    ) -> None:
        """Attention of ``query [T, heads, dim]`` over pages, into ``out``, shaped alike."""
        num_rows, acc = query.shape[0], accumulation_dtype(self.dtype)
        rows = metadata.rows(num_rows)
        if fused.takes(query):
            compressed_kv: dict[str, torch.Tensor] = {}
            for source in self._source:
                compressed = layer_metadata(source.latents.prefix)
                assert compressed is not None
                compressed_kv = {
                    "chosen": self.selection.entries(num_rows),
                    "source_cache": source.latents.kv_cache,
                    "source_table": compressed.block_table,
                }
            fused.attend(
                query,
                out,
                positions=positions,
                request=rows.request,
                real=rows.real,
                sink=self.sink[self.my_heads],
                kv_start=metadata.kv_start,
                window=self.window,
                cache=self.swa_cache.kv_cache,
                block_table=metadata.block_table,
                **compressed_kv,
            )
            return
        lowest = (positions - self.window + 1).clamp(min=0)
        if metadata.kv_start is not None:
            lowest = torch.maximum(lowest, metadata.kv_start.long().index_select(0, rows.request))
        steps = torch.arange(self.window, device=query.device)
        width = self.window + (self.selection.k if self._source else 0)
        for part in row_slices(num_rows, width * max(self.dim, self.heads) * query.dtype.itemsize):
            request = rows.request[part]
            entries = lowest[part].unsqueeze(1) + steps
            valid = (entries <= positions[part].unsqueeze(1)) & rows.real[part].unsqueeze(1)
            kv = self.swa_cache.load(metadata.block_table, request, torch.where(valid, entries, 0))
            for source in self._source:
                chosen = self.selection.entries(num_rows)[part].long()
                compressed = layer_metadata(source.latents.prefix)
                assert compressed is not None
                latents = source.latents.load(compressed.block_table, request, chosen.clamp(min=0))
                kv, valid = torch.cat((kv, latents), 1), torch.cat((valid, chosen >= 0), 1)
            # What is not attended to may be unwritten, and 0 * NaN is NaN.
            kv = kv.masked_fill(~valid.unsqueeze(-1), 0)
            scores = torch.einsum("thd,tkd->thk", query[part], kv).to(acc) * self.dim**-0.5
            scores = scores.masked_fill(~valid.unsqueeze(1), -math.inf)
            sink = self.sink[self.my_heads].view(1, -1, 1).expand(scores.shape[0], -1, 1)
            weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1].to(kv.dtype)
            out[part] = torch.einsum("thk,tkd->thd", weights, kv)
