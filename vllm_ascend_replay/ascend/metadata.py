"""Attention metadata of the replay batch, made by builders of vllm-ascend's own classes.

The cut layer and the late layers read one long-KV metadata key with different task splits and window starts, so there
are two sets: `cut` (window KV exists for every row) and `late` (from `kv_start` on).

How a window start is given to the operators depends on the device:

* A5 lists window rows explicitly: rows below `kv_start` are left out of the lists.
* A2/A3 derive the window from a length. The window side and the compressed side have independent coordinates, so only
  the window side is moved: the block table loses its first `kv_start / block` entries and the length `kv_start`
  positions. `kv_start` is a multiple of the block, which is the plan's alignment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from vllm_ascend_replay.batch import KeptRows

SPLIT_WORDS = 1024
"""int32 words of the sparse attention's task-split metadata."""


def shift_blocks(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Drop the first `blocks[i]` entries of row i of a block table.

    Args:
        table: int32 `[R, n]`.
        blocks: int32 `[R]`, each in `[0, n]`.

    Returns:
        int32 `[R, n]`; entries past a row's end are block 0, which no length reaches.
    """
    width = table.shape[1]
    at = torch.arange(width, device=table.device) + blocks.long().unsqueeze(1)
    return torch.where(at < width, table.gather(1, at.clamp_max(width - 1)), 0)


def bounded_window(positions: torch.Tensor, start: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions each row sees in its window, none below `start`, ascending and left-aligned.

    Args:
        positions: int64 `[N]`.
        start: int32 `[N]`, at most the row's position.
        window: W.

    Returns:
        int32 `[N, 1, W]`, -1 after the first lengths, and lengths int32 `[N, 1]`.
    """
    first = torch.maximum(positions - (window - 1), start.long()).clamp_min(0)
    length = (positions + 1 - first).int().unsqueeze(-1)
    column = torch.arange(window, device=positions.device, dtype=torch.int32)
    index = torch.where(column < length, first.int().unsqueeze(-1) + column, -1)
    return index.unsqueeze(1), length


def clone_groups(attn_groups: Any, prefixes: Collection[str]) -> list[list[Any]]:
    """The groups that serve a layer of `prefixes`, restricted to those layers, with builders of their own.

    A builder keeps the metadata it built last in persistent buffers: one that builds twice in a step overwrites the
    slots the whole step still writes to. Compressor-state groups are never asked for: their ring must not move twice.
    """
    cloned = []
    for groups in attn_groups:
        mine = []
        for group in groups:
            names = [name for name in group.layer_names if name in prefixes]
            if names:
                builders = [
                    type(b)(b.kv_cache_spec, b.layer_names, b.vllm_config, b.device) for b in group.metadata_builders
                ]
                mine.append(replace(group, layer_names=names, metadata_builders=builders))
        cloned.append(mine)
    return cloned


class OwnRope(ModelSpecificAttnMetadata):
    """Hands the window builders RoPE rows of the replay batch.

    Without prefills a builder takes views of one process-wide buffer, which the step's own metadata may hold too.
    """

    def __init__(self, rope: Any) -> None:
        self.rope = rope

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"rope_views": self.rope}


ADDRESSABLE = 2**32
"""Elements of one KV cache plane that Ascend's operators reach: page id x page stride wraps beyond."""


def unreachable_pages(caches: Mapping[str, Any]) -> str | None:
    """Which KV cache plane is larger than the operators' addresses reach, in words; `None` if all fit.

    Args:
        caches: planes by layer name: tensors whose first axis is the page, or (nested) sequences of them.
    """
    for name, cache in caches.items():
        planes = cache if isinstance(cache, (list, tuple)) else [cache]
        for plane in planes:
            if not torch.is_tensor(plane):
                found = unreachable_pages({name: plane}) if isinstance(plane, (list, tuple)) else None
                if found is not None:
                    return found
            elif plane.dim() and plane.shape[0] * plane.stride(0) >= ADDRESSABLE:
                pages, stride = plane.shape[0], plane.stride(0)
                return (
                    f"the KV cache of {name} has {pages} pages of {stride} elements; page addresses wrap at 2^32 on "
                    f"Ascend, so at most {(ADDRESSABLE - 1) // stride} pages are usable: start with "
                    f"--num-gpu-blocks-override {(ADDRESSABLE - 1) // stride}"
                )
    return None


@dataclass(frozen=True)
class TailLayout:
    """What the metadata must know of the model's layers from the cut on."""

    cut_window: str
    """Cache name of the cut layer's window KV."""
    late_windows: frozenset[str]
    """Cache names of the late layers' window KV."""
    long_kv: str
    index_k: str
    window: int
    block: int
    """Window KV positions per block."""
    lists_rows: bool
    """Whether the operators take explicit window rows (A5)."""
    num_local_heads: int

    @property
    def window_align(self) -> int:
        """First kept positions must be multiples of this."""
        return 1 if self.lists_rows else self.block

    @classmethod
    def of(cls, layers: list[Any], cut: int) -> TailLayout:
        """Read the layout off vllm-ascend's decoder layers."""
        attention = [layer.self_attn for layer in layers]
        source = attention[cut]
        return cls(
            cut_window=f"{source.prefix}.swa_cache",
            late_windows=frozenset(f"{a.prefix}.swa_cache" for a in attention[cut + 1 :]),
            long_kv=source.long_kv_source_prefix,
            index_k=source.index_k_source_prefix,
            window=int(source.window_size),
            block=int(source.dsa_attn.swa_cache_layer.block_size),
            lists_rows=source.packed_cache_ops is not None,
            # DSA-CP attends with all heads to this rank's queries.
            num_local_heads=int(source.n_heads if source.enable_dsa_cp else source.n_local_heads),
        )


@dataclass
class ReplayRequests:
    """The requests of the replay batch."""

    seq_lens: torch.Tensor
    """int32 `[R']` on the device: lengths of decodes that speculate are known there only."""
    seq_lens_np: np.ndarray
    """int32 `[R']`: upper bounds."""
    kv_start_np: np.ndarray
    """int32 `[R']`."""
    row_lens_np: np.ndarray
    """int32 `[R']`: rows of each request."""
    is_prefilling: torch.Tensor
    """bool `[R']` on the host."""
    block_tables: tuple[torch.Tensor, ...]
    """Per KV cache group int32 `[R', n]`."""
    attn_state: Any
    max_query_len: int


@dataclass(frozen=True)
class ContextShare:
    """What the builders must know of a replay batch whose rows lie over a prefill-context-parallel group."""

    context: Any
    """vllm-ascend's `AscendPCPAttentionContext` of the kept rows of all ranks."""
    slot_mappings: torch.Tensor
    """int64 `[G, size * N]`: every rank's rows, one rank after the other; -1 on padding."""


class TailMetadata:
    """Builds both metadata sets with cloned builders, made once per KV cache."""

    def __init__(self, layout: TailLayout, vllm_config: Any, attn_groups: Any, max_model_len: int) -> None:
        self.layout = layout
        self.vllm_config = vllm_config
        self.attn_groups = attn_groups
        """The groups the clones were made of; other groups need other clones."""
        self.max_model_len = max_model_len
        self._no_slots: torch.Tensor | None = None
        self._cut_groups = clone_groups(attn_groups, {layout.cut_window, layout.long_kv, layout.index_k})
        self._late_groups = clone_groups(attn_groups, layout.late_windows)
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            # The runner did this for its own builders only.
            for groups in (*self._cut_groups, *self._late_groups):
                for group in groups:
                    for builder in group.metadata_builders:
                        builder.prepare_source_rope()

    def build(
        self, kept: KeptRows, requests: ReplayRequests, kv_cache_config: Any, share: ContextShare | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """`(cut, late)`: metadata by cache name for the kept rows; `share` under prefill context parallelism."""
        from vllm_ascend.ops.rope_dsv4 import get_cos_and_sin_dsa
        from vllm_ascend.worker.v2.attn_utils import build_attn_metadata

        boundaries = np.zeros(len(requests.row_lens_np) + 1, dtype=np.int32)
        np.cumsum(requests.row_lens_np, out=boundaries[1:])
        common = {
            "num_reqs": len(requests.row_lens_np),
            "num_tokens": kept.num_padded,
            # Attention sees no padding: those rows come out as zeros.
            "num_actual_tokens": int(boundaries[-1]),
            "num_input_tokens": kept.num_padded,
            "query_start_loc_gpu": kept.boundaries,
            "query_start_loc_cpu": torch.from_numpy(boundaries),
            "max_query_len": requests.max_query_len,
            "max_seq_len": self.max_model_len,
            "slot_mappings": kept.slot_mappings,
            "kv_cache_config": kv_cache_config,
            "parallel_config": self.vllm_config.parallel_config,
            "positions": kept.positions,
            "attn_state": requests.attn_state,
            "is_prefilling": requests.is_prefilling,
        }
        if share is None:
            common["model_specific_attn_metadata"] = OwnRope(get_cos_and_sin_dsa(kept.positions, use_cache=False))
        else:
            # These builders have RoPE buffers of their own.
            common["pcp_context"], common["slot_mappings"] = share.context, share.slot_mappings
        whole = {"seq_lens": requests.seq_lens, "seq_lens_np": requests.seq_lens_np}
        # The cut layer's KV is in the cache for every row. Rows of a smaller batch may differ in their last bits, and
        # other requests hit those pages: the cut layer writes nothing a second time.
        late_slots = common.pop("slot_mappings")
        cut = build_attn_metadata(
            attn_groups=self._cut_groups,
            block_tables=requests.block_tables,
            slot_mappings=self._padding_slots(late_slots),
            **whole,
            **common,
        )
        common["slot_mappings"] = late_slots
        if self.layout.lists_rows:
            late = build_attn_metadata(
                attn_groups=self._late_groups, block_tables=requests.block_tables, **whole, **common
            )
            self._bound_listed_rows(late, kept, requests)
            late[self.layout.long_kv] = cut[self.layout.long_kv]
        else:
            blocks = torch.div(kept.kv_start, self.layout.block, rounding_mode="floor")
            late = build_attn_metadata(
                attn_groups=self._late_groups,
                block_tables=[shift_blocks(table, blocks) for table in requests.block_tables],
                seq_lens=requests.seq_lens - kept.kv_start,
                seq_lens_np=requests.seq_lens_np - requests.kv_start_np,
                **common,
            )
            late[self.layout.long_kv] = self._resplit(cut[self.layout.long_kv], late, requests)
        late[self.layout.index_k] = cut[self.layout.index_k]
        return cut, late

    def _padding_slots(self, like: torch.Tensor) -> torch.Tensor:
        """Slots of the shape and type of `like` (int64 `[G, N]`) that no operator writes to."""
        held = self._no_slots
        if held is None or held.shape[0] != like.shape[0] or held.shape[1] < like.shape[1]:
            held = self._no_slots = torch.full_like(like, -1)
        return held[:, : like.shape[1]]

    def _bound_listed_rows(self, late: dict[str, Any], kept: KeptRows, requests: ReplayRequests) -> None:
        """Overwrite the clones' window lists, in their persistent buffers, with lists bounded at `kv_start`."""
        lens, num_rows = torch.diff(kept.boundaries), int(requests.row_lens_np.sum())
        if not num_rows:
            return
        start = kept.kv_start.repeat_interleave(lens, output_size=num_rows)
        all_indices, all_lengths = bounded_window(kept.positions[:num_rows], start, self.layout.window)
        written: set[int] = set()
        for name, metadata in late.items():
            indices, lengths = all_indices, all_lengths
            if metadata.cp_token_range is not None:
                # The queries are this rank's chunk of the rows.
                first = metadata.cp_token_range[0]
                mine = slice(first, first + metadata.num_actual_tokens)
                indices, lengths = indices[mine], lengths[mine]
            target = metadata.ori_sparse_indices
            if target is None:
                raise RuntimeError("the window builder made no row lists, so late layers cannot be bounded")
            if target.data_ptr() not in written:
                written.add(target.data_ptr())
                target[: len(indices)].copy_(indices)
                if metadata.ori_topk_length is not None:
                    metadata.ori_topk_length[: len(lengths)].copy_(lengths)
            if metadata.ori_topk_length is None:
                # DSA-CP's builder hands on the whole batch's rows without their lengths.
                late[name] = replace(metadata, ori_topk_length=lengths)

    def _resplit(self, long_kv: Any, late: dict[str, Any], requests: ReplayRequests) -> Any:
        """The long-KV metadata with its task split made again, for window lengths counted from `kv_start`.

        The operator's split covers both sides at once, and no builder can be given two lengths for one request.
        """
        if long_kv.smla_metadata is None:
            return long_kv
        window = next(late[name] for name in sorted(self.layout.late_windows))
        config = self.vllm_config.model_config.hf_text_config
        split = torch.ops._C_ascend.npu_sparse_flash_mla_metadata(
            self.layout.num_local_heads,
            1,
            int(config.head_dim),
            cu_seqlens_q=long_kv.query_start_loc[: long_kv.num_reqs + 1].int(),
            seqused_ori_kv=window.seq_lens,
            seqused_cmp_kv=long_kv.cache_seq_lens,
            cmp_residual_kv=long_kv.cmp_residual,
            batch_size=long_kv.num_reqs,
            max_seqlen_q=long_kv.max_query_len,
            max_seqlen_ori_kv=int((requests.seq_lens_np - requests.kv_start_np).max()),
            max_seqlen_cmp_kv=long_kv.max_cache_seq_len,
            ori_topk=0,
            cmp_topk=int(config.index_topk),
            cmp_ratio=long_kv.compress_ratio,
            ori_mask_mode=window.ori_mask_mode,
            cmp_mask_mode=3,
            ori_win_left=window.ori_win_left,
            ori_win_right=window.ori_win_right,
            layout_q="TND",
            layout_kv="PA_BBND",
            has_ori_kv=True,
            has_cmp_kv=True,
        )
        return replace(long_kv, smla_metadata=split)
