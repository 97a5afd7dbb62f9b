"""A2/A3: the INT8 lightning indexer, sparse flash attention over BF16 caches, and their task-split metadata.

Lengths are those of the whole sequence: a request with Lq query rows and Lk keys has row i at position Lk - Lq + i.
T query rows, R requests, `cu_seqlens_q` int32 [R + 1] row boundaries.
"""

# ruff: noqa: PT018 - these assertions check operator arguments, several to a line

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from .caches import as_ints, gather_paged
from .numerics import F64

# The released A2/A3 kernels accept explicit window indices only without compressed KV.
ALLOW_ORI_INDICES_WITH_CMP = False
METADATA_WORDS = 1024

# ---- task-split metadata -----------------------------------------------------


def split_digest(kind, *lengths):
    """Stands for the real task split: int32 [1024] with a tag and the very lengths it was made from.

    On an NPU the split hands out work by these lengths; one made from other lengths reads wrong rows or none. Here the
    operators compare and raise, so a split that was not rebuilt cannot pass unnoticed.
    """
    words = [sum(ord(c) << (8 * i) for i, c in enumerate(kind[:3]))]
    for t in lengths:
        values = as_ints(t)
        words += [len(values), *values]
    assert len(words) <= METADATA_WORDS, "more requests than a digest holds"
    out = torch.zeros(METADATA_WORDS, dtype=torch.int32)
    out[: len(words)] = torch.tensor(words, dtype=torch.int32)
    return out


def check_split(kind, metadata, *lengths):
    """Raises RuntimeError when `metadata` was built from other lengths than those in use."""
    if metadata is not None and not torch.equal(metadata, split_digest(kind, *lengths)):
        raise RuntimeError(f"{kind}: the task-split metadata was built from other lengths")


def indexer_metadata(
    num_heads_q, num_heads_k, head_dim, topk, quant_mode, *, cu_seqlens_q=None, seqused_k=None, cmp_residual_k=None, **_
):
    """_C_ascend::npu_quant_lightning_indexer_v2_metadata -> int32 [1024]. Source: the operator's document in csrc."""
    return split_digest("qli", cu_seqlens_q, seqused_k, cmp_residual_k)


def sparse_flash_mla_metadata(
    num_heads_q,
    num_heads_kv,
    head_dim,
    *,
    cu_seqlens_q=None,
    seqused_ori_kv=None,
    seqused_cmp_kv=None,
    cmp_residual_kv=None,
    **_,
):
    """_C_ascend::npu_sparse_flash_mla_metadata -> int32 [1024]. Source: the operator's document in csrc."""
    return split_digest("mla", cu_seqlens_q, seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv)


# ---- indexer -----------------------------------------------------------------


def dynamic_quant(x, dst_type=torch.int8, **_):
    """torch_npu.npu_dynamic_quant: x [.., D] -> (int8 [.., D], float32 scale [..]), symmetric over the last axis."""
    f = x.nan_to_num().to(F64)
    scale = (f.abs().amax(-1) / 127.0).float()
    q = torch.round(f / scale.to(F64).clamp_min(1e-38).unsqueeze(-1)).clamp(-127, 127)
    return q.to(dst_type), scale


def quantize_query(q):
    """[T, heads, D] -> int8 of that shape and float16 scales [T, heads], the ones that were divided by.

    Source: vllm-ascend's Triton kernel `quantize_indexer_query` (its launch insists on an NPU).
    """
    f = q.to(F64)
    scale = (f.abs().amax(-1) / 127.0).half().clamp_min(2.0**-24)
    v = torch.round(f / scale.to(F64).unsqueeze(-1)).clamp(-127, 127)
    return v.to(torch.int8), scale


def stable_topk(score, k):
    """Positions of the k largest per row of score [T, n]; ties go to the lower position; -inf gives -1."""
    order = torch.sort(score, dim=-1, descending=True, stable=True)
    k = min(k, score.shape[-1])
    return torch.where(order.values[..., :k] > -math.inf, order.indices[..., :k], -1)


def visible_groups(num_rows, length, ratio, residual):
    """Compressed groups each row may see, int64 [num_rows]: clamp((position + 1) // ratio, 0, length).

    `length` finished groups and `residual` rows of an unfinished one lie in the cache. Source: `ratio2_a2a3.md` in the
    operator's folder of csrc.
    """
    reach = length * ratio + residual - num_rows + 1 + torch.arange(num_rows)
    return torch.div(reach, ratio, rounding_mode="floor").clamp(0, length)


def candidate_tiles(score, visible, size):
    """Best score of each block of `size` positions [T, blocks]; the newest visible block is always taken (+inf)."""
    length = score.shape[-1]
    tiles = F.pad(score, (0, -length % size), value=-math.inf).unflatten(-1, (-1, size)).amax(-1)
    newest = torch.div(visible - 1, size, rounding_mode="floor")
    pinned = (torch.arange(tiles.shape[-1]) == newest.unsqueeze(-1)) & (visible > 0).unsqueeze(-1)
    return tiles.masked_fill(pinned, math.inf)


def inside_blocks(chosen, live, blocks, size, length):
    """bool [T, length]: which positions lie in each row's chosen blocks; chosen int [T, C], live bool [T, C]."""
    keep = torch.zeros(chosen.shape[0], blocks + 1, dtype=torch.bool)
    keep.scatter_(1, torch.where(live & (chosen >= 0) & (chosen < blocks), chosen.long(), blocks), True)
    return keep[:, :blocks].repeat_interleave(size, -1)[:, :length]


def lightning_indexer(
    query,
    key,
    weights,
    query_scale,
    key_scale,
    topk,
    quant_mode,
    *,
    candidate_topk_index=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    cmp_residual_k=None,
    block_table=None,
    output_idx_offset=None,
    metadata=None,
    max_seqlen_q=-1,
    layout_q="TND",
    layout_k="PA_BBND",
    mask_mode=3,
    cmp_ratio=1,
    candidate_mode=3,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
):
    """_C_ascend::npu_quant_lightning_indexer_v3 in INT8 (quant_mode 2), causal (mask_mode 3).

    query int8 [T, heads, D], query_scale float16 [T, heads]; key int8 [pages, page, 1, D], key_scale float16
    [pages, page, 1]; weights float16 [T, heads]; seqused_k int32 [R] finished groups, cmp_residual_k int32 [R];
    block_table int32 [R, blocks]. score = sum over heads of weight * relu(q . k * scales).
    Returns positions int32 [T, 1, topk] (best first, -1 padded), an empty tensor, and candidate blocks
    int32 [T, 1, blocks]: written in candidate_mode 1, read (`candidate_topk_index`) in mode 2, unused in mode 3.
    Source: aclnnQuantLightningIndexerV2.md in csrc and test_qli_candidate_rows.py.
    """
    assert quant_mode == 2 and layout_q == "TND" and layout_k == "PA_BBND" and mask_mode == 3
    assert (
        query.dtype == key.dtype == torch.int8 and weights.dtype == query_scale.dtype == key_scale.dtype == torch.half
    )
    check_split("qli", metadata, cu_seqlens_q, seqused_k, cmp_residual_k)
    total, size = query.shape[0], candidate_block_size
    picked = torch.full((total, 1, topk), -1, dtype=torch.int32)
    blocks = torch.full((total, 1, candidate_topk_blocks if candidate_mode == 1 else 0), -1, dtype=torch.int32)
    starts, used, residual = as_ints(cu_seqlens_q), as_ints(seqused_k), as_ints(cmp_residual_k)
    for r, (lo, hi) in enumerate(pairwise(starts)):
        n, length = hi - lo, used[r]
        if n == 0 or length == 0:
            continue
        at = torch.arange(length)
        k = gather_paged(key, block_table[r], at).to(F64)
        ks = gather_paged(key_scale, block_table[r], at).to(F64).reshape(-1)
        dots = torch.einsum("thd,kd->thk", query[lo:hi].to(F64), k)
        dots = torch.relu(dots * query_scale[lo:hi].to(F64).unsqueeze(-1) * ks)
        score = torch.einsum("th,thk->tk", weights[lo:hi].to(F64), dots)
        visible = visible_groups(n, length, cmp_ratio, residual[r] if residual else 0)
        score = score.masked_fill(at >= visible.unsqueeze(-1), -math.inf)
        if candidate_mode == 1:
            best = stable_topk(candidate_tiles(score, visible, size), candidate_topk_blocks)
            blocks[lo:hi, 0, : best.shape[-1]] = best.int()
        elif candidate_mode == 2:
            chosen = candidate_topk_index[lo:hi, 0]
            inside = inside_blocks(chosen, torch.ones_like(chosen, dtype=torch.bool), -(-length // size), size, length)
            score = score.masked_fill(~inside, -math.inf)
        best = stable_topk(score, topk)
        picked[lo:hi, 0, : best.shape[-1]] = best.int()
    return picked, torch.empty(0, dtype=torch.bfloat16), blocks


def order_indices(selected, positions, compress_ratio, output=None, *, indices_output=None, lengths_output=None):
    """Drops positions a row cannot see yet and sorts ascending: int32 [T, k], -1 last; lengths int32 [T, 1].

    selected int [T, k], positions int [T]. Source: vllm-ascend's Triton kernel `prepare_indexer_indices`.
    """
    visible = torch.div(positions + 1, compress_ratio, rounding_mode="floor").unsqueeze(-1)
    big = torch.iinfo(torch.int32).max
    kept = torch.where((selected >= 0) & (selected < visible), selected, big).sort(-1).values
    result = torch.where(kept == big, -1, kept).int()
    target = output if indices_output is None else indices_output
    if lengths_output is not None:
        lengths_output.copy_((result >= 0).sum(-1, keepdim=True, dtype=torch.int32))
    return result if target is None else target.copy_(result)


# ---- attention ---------------------------------------------------------------


def _fetch(cache, table, at, ok):
    """float64 [t, k, D]: only the rows a query really uses are read; the others stay zero, never NaN."""
    k = torch.zeros(*at.shape, cache.shape[-1], dtype=F64)
    if bool(ok.any()):
        k[ok] = gather_paged(cache, table, at[ok]).to(F64)
    return k


def attend(q, keys, ok, softmax_scale, sinks):
    """softmax over the keys and one sink per head, K = V -> float64 [t, heads, D].

    q [t, heads, D], keys float64 [t, k, D], ok bool [t, k], sinks float32 [heads] or None.
    """
    logits = torch.einsum("thd,tkd->thk", q.to(F64), keys) * softmax_scale
    logits = logits.masked_fill(~ok.unsqueeze(1), -math.inf)
    if sinks is None:
        p = logits.softmax(-1)
    else:
        sink = sinks.to(F64).view(1, -1, 1).expand(q.shape[0], -1, 1)
        p = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    return torch.einsum("thk,tkd->thd", p, keys)


def sparse_flash_mla(
    q,
    *,
    ori_kv=None,
    cmp_kv=None,
    ori_sparse_indices=None,
    cmp_sparse_indices=None,
    ori_block_table=None,
    cmp_block_table=None,
    cu_seqlens_q=None,
    cu_seqlens_ori_kv=None,
    cu_seqlens_cmp_kv=None,
    seqused_q=None,
    seqused_ori_kv=None,
    seqused_cmp_kv=None,
    cmp_residual_kv=None,
    ori_topk_length=None,
    cmp_topk_length=None,
    sinks=None,
    metadata=None,
    softmax_scale=1.0,
    cmp_ratio=0,
    ori_mask_mode=0,
    cmp_mask_mode=0,
    ori_win_left=-1,
    ori_win_right=-1,
    layout_q="BSND",
    layout_kv="BSND",
    topk_value_mode=1,
    return_softmax_lse=False,
):
    """_C_ascend::npu_sparse_flash_mla: attention over window rows ("ori") and selected compressed rows ("cmp").

    q [T, heads, D]; ori_kv, cmp_kv [pages, page, 1, D] of q's dtype with block tables int32 [R, blocks];
    seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv int32 [R]; cmp_sparse_indices int32 [T, 1, k], -1 padded; sinks
    float32 [heads]. Row i of a request with Lq rows sits at Lo - Lq + i on the window side and at
    Lc * ratio + residual - Lq + i on the compressed side: the two are independent, which is what replay rebases.
    The window is [p - ori_win_left, p] (ori_mask_mode 4), or the listed rows (mode 0, without compressed KV only).
    Returns [T, heads, D] in q.dtype and an empty tensor. Source: aclnnSparseFlashMla.md and ratio2_a2a3.md in csrc.
    """
    assert layout_q == "TND" and layout_kv == "PA_BBND" and topk_value_mode == 1 and not return_softmax_lse
    assert q.dtype == ori_kv.dtype
    has_cmp = cmp_kv is not None
    if ori_sparse_indices is not None:
        assert ori_topk_length is not None and ori_mask_mode == 0
        if has_cmp and not ALLOW_ORI_INDICES_WITH_CMP:
            raise NotImplementedError("window indices together with compressed KV")
    else:
        assert ori_mask_mode == 4 and ori_win_right == 0 and ori_win_left >= 0
    if has_cmp:
        assert cmp_mask_mode == 3 and cmp_sparse_indices is not None and cmp_ratio in (1, 2)
        assert (cmp_residual_kv is None) == (cmp_ratio == 1), "residual is required exactly when ratio != 1"
    else:
        assert cmp_ratio == 0 and cmp_mask_mode == 0
    cmp_lengths = (seqused_cmp_kv, cmp_residual_kv) if has_cmp else (None, None)
    check_split("mla", metadata, cu_seqlens_q, seqused_ori_kv, *cmp_lengths)
    out = torch.zeros_like(q)
    starts, ori_used = as_ints(cu_seqlens_q), as_ints(seqused_ori_kv)
    cmp_used, residual = as_ints(seqused_cmp_kv), as_ints(cmp_residual_kv)
    for r, (lo, hi) in enumerate(pairwise(starts)):
        n = hi - lo
        for a in range(0, n, 64):
            rows = slice(lo + a, min(lo + a + 64, hi))
            here = ori_used[r] - n + torch.arange(rows.start - lo, rows.stop - lo)
            if ori_sparse_indices is None:
                at = here.unsqueeze(-1) + torch.arange(-ori_win_left, 1)
                ok = (at >= 0) & (here >= 0).unsqueeze(-1)
            else:
                at = ori_sparse_indices[rows, 0].long()
                ok = torch.arange(at.shape[-1]) < ori_topk_length[rows, 0].unsqueeze(-1)
                assert bool((at[ok] >= 0).all() & (at[ok] < ori_used[r]).all()), "window index out of range"
            keys, masks = [_fetch(ori_kv, ori_block_table[r], at, ok)], [ok]
            if has_cmp:
                at = cmp_sparse_indices[rows, 0].long()
                visible = visible_groups(n, cmp_used[r], cmp_ratio, residual[r] if residual else 0)
                visible = visible[rows.start - lo : rows.stop - lo]
                ok = (at >= 0) & (at < visible.unsqueeze(-1)) & (here >= 0).unsqueeze(-1)
                keys.append(_fetch(cmp_kv, cmp_block_table[r], at, ok))
                masks.append(ok)
            value = attend(q[rows], torch.cat(keys, 1), torch.cat(masks, 1), softmax_scale, sinks)
            out[rows] = value.masked_fill((here < 0).view(-1, 1, 1), 0).to(q.dtype)
    return out, torch.empty(0)
