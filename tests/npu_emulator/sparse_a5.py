"""A5: packed cache formats (MXFP8 window, MXFP4 compressed and index rows) and the operators that read them.

Formats, from vllm-ascend's `ops/packaged_attention.py` and `models/deepseek_v41/cache_config.py`:

* window rows "mxfp8_bf16": D E4M3 bytes, then one BF16 power-of-two scale per 32 values;
* compressed rows "mxfp4_bf16": D/2 bytes of two E2M1 codes (low nibble first), then one BF16 scale per 16 values;
* index rows: 64 bytes of E2M1 codes and 4 E8M0 scale bytes (one per 32 of 128 values), and "folded" copies of eight
  rows as 8 x 64 + 8 x 4 = 544 bytes.
"""

# ruff: noqa: PT018 - these assertions check operator arguments, several to a line

import math
from itertools import pairwise

import torch

from .caches import as_ints, gather_paged
from .numerics import F64
from .sparse_a2 import METADATA_WORDS, attend, candidate_tiles, inside_blocks, stable_topk, visible_groups

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=F64)
_MIDDLE = (_FP4[1:] + _FP4[:-1]) / 2
WINDOW, COMPRESSED = "mxfp8_bf16", "mxfp4_bf16"
_GROUP = {WINDOW: 32, COMPRESSED: 16}
FOLDED_ROW = 544

# ---- formats -----------------------------------------------------------------


def fp4_codes(x, ties_even):
    """float64 [..] -> uint8 E2M1 codes (sign in bit 3); ties to the even code, or to the lower one."""
    magnitude = x.abs().clamp_max(6.0).unsqueeze(-1)
    code = (magnitude > _MIDDLE).sum(-1)
    if ties_even:
        odd = torch.arange(len(_MIDDLE)) % 2 == 1
        code = code + ((magnitude == _MIDDLE) & odd).sum(-1)
    return (code + 8 * (x < 0)).to(torch.uint8)


def fp4_values(code):
    """uint8 E2M1 codes [..] -> float64 values."""
    return _FP4[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0).to(F64)


def pack(code):
    """Two codes per byte, the earlier one in the low nibble: uint8 [.., n] -> [.., n / 2]."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(data):
    """Inverse of `pack`."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def encode(x, kind):
    """Rows [T, D] -> bytes uint8 [T, row] of a packed cache: values, then BF16 scales.

    A scale is the smallest power of two that brings its group into the format's range.
    """
    groups = x.to(F64).unflatten(-1, (-1, _GROUP[kind]))
    top = 448.0 if kind == WINDOW else 6.0
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-120) / top)))
    v = (groups / scale.unsqueeze(-1)).flatten(-2)
    data = v.to(torch.float8_e4m3fn).view(torch.uint8) if kind == WINDOW else pack(fp4_codes(v, ties_even=True))
    return torch.cat((data, scale.to(torch.bfloat16).contiguous().view(torch.uint8)), -1)


def decode(rows, width, kind):
    """Bytes [.., row] of a packed cache -> float64 values [.., width]."""
    split = width if kind == WINDOW else width // 2
    data, scale = rows[..., :split].contiguous(), rows[..., split:].contiguous()
    v = data.view(torch.float8_e4m3fn).to(F64) if kind == WINDOW else fp4_values(unpack(data))
    s = scale.view(torch.bfloat16).to(F64)
    return (v.unflatten(-1, (-1, _GROUP[kind])) * s.unsqueeze(-1)).flatten(-2)


def kv_compress_epilog_v2(
    cache, x, slot_mapping, *, quant_group_size=32, quant_mode=WINDOW, round_scale=True, x_scale=1.0
):
    """_C_ascend::kv_compress_epilog_v2: quantises rows x [T, D] into flat slots of cache [pages, page, 1, row].

    slot_mapping int [T]: page * page size + row; slots out of range are skipped, two rows on one slot raise.
    Source: the operator's README in csrc.
    """
    assert _GROUP.get(quant_mode) == quant_group_size and round_scale and x_scale == 1.0
    store = cache.view(torch.uint8).squeeze(-2)
    page = store.shape[1]
    keep = (slot_mapping >= 0) & (slot_mapping < store.shape[0] * page)
    slots = slot_mapping[keep].long()
    assert torch.unique(slots).numel() == slots.numel(), "two rows write one cache slot"
    store[slots // page, slots % page] = encode(x[keep], quant_mode)


# ---- index rows --------------------------------------------------------------


def quantize_index(x):
    """[.., 128] -> E2M1 bytes [.., 64] and E8M0 bytes [.., 4]. Judge: Triton kernel `quantize_mxfp4_indexer`."""
    groups = x.nan_to_num().to(F64).unflatten(-1, (4, 32))
    ratio = (groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6).float().to(F64)
    power = torch.ceil(torch.log2(ratio))
    code = fp4_codes((groups / torch.exp2(power).unsqueeze(-1)).flatten(-2), ties_even=False)
    return pack(code), (power + 127).to(torch.uint8)


def index_values(data, scale):
    """E2M1 bytes [.., 64] and E8M0 bytes [.., 4] -> float64 values [.., 128]."""
    s = torch.exp2(scale.to(F64) - 127)
    return (fp4_values(unpack(data)).unflatten(-1, (4, 32)) * s.unsqueeze(-1)).flatten(-2)


def write_index(x, slots, data_cache, scale_cache):
    """Quantises x [T, 128] into (page, row) slots int [T, 2]. Judge: Triton kernel `write_mxfp4_indexer_cache`."""
    keep = (slots >= 0).all(-1)
    page, row = slots[keep].long().unbind(-1)
    assert torch.unique(slots[keep], dim=0).shape[0] == page.shape[0], "two rows write one cache slot"
    data_cache[page, row, 0], scale_cache[page, row, 0] = quantize_index(x[keep])


def fold_index(cache, folded, slots):
    """Copies the rows just written into the eight-row groups the sparse indexer reads.

    cache: (codes [pages, page, 1, 64], scales [pages, page, 1, 4]); folded uint8 [pages, page / 8, 1, 544]; slots int
    [T, 2]. Judge: Triton kernel `fold_indexer_cache_rows`.
    """
    key, scale = cache
    page, row = slots[(slots >= 0).all(-1)].long().unbind(-1)
    for i in range(8):
        mine = row % 8 == i
        p, r = page[mine], row[mine]
        folded[p, r // 8, 0, 64 * i : 64 * i + 64] = key[p, r, 0]
        folded[p, r // 8, 0, 512 + 4 * i : 516 + 4 * i] = scale[p, r, 0]


def _index_score(q, descale_q, weights, keys):
    query = index_values(q, descale_q.flatten(-2))
    return torch.einsum("th,thk->tk", weights.to(F64), torch.relu(torch.einsum("thd,kd->thk", query, keys)))


def quant_lightning_indexer(
    q,
    k,
    w,
    descale_q,
    descale_k,
    topk,
    quant_mode,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    cmp_residual_k=None,
    block_table=None,
    output_idx_offset=None,
    metadata=None,
    max_seqlen_q=-1,
    mask_mode=0,
    cmp_ratio=1,
    layout_q="TND",
    layout_k="TND",
    return_value=False,
    candidate_topk_blocks=-1,
    candidate_block_size=-1,
):
    """vllm_ascend::quant_lightning_indexer in MXFP4 (quant_mode 1), causal (mask_mode 3).

    q uint8 [T, heads, 64] with descale_q [T, heads, 2, 2]; k, descale_k: the index cache; w [T, heads]. Returns
    positions int32 [T, 1, topk], an empty tensor, candidate blocks int32 [T, 1, candidate_topk_blocks] and their counts
    int32 [T, 1] (both empty when candidate_topk_blocks < 0). Source: `ops/packaged_attention.py` and its unit test.
    """
    assert quant_mode == 1 and mask_mode == 3 and layout_q == "TND" and layout_k == "PA_BBND"
    total, source = q.shape[0], candidate_topk_blocks > 0
    picked = torch.full((total, 1, topk), -1, dtype=torch.int32)
    blocks = torch.full((total, 1, candidate_topk_blocks) if source else (0,), -1, dtype=torch.int32)
    counts = torch.zeros((total, 1) if source else (0,), dtype=torch.int32)
    starts, used, residual = as_ints(cu_seqlens_q), as_ints(seqused_k), as_ints(cmp_residual_k)
    for r, (lo, hi) in enumerate(pairwise(starts)):
        n, length = hi - lo, used[r]
        if not n or not length:
            continue
        at = torch.arange(length)
        scales = gather_paged(descale_k.flatten(-2), block_table[r], at)
        keys = index_values(gather_paged(k, block_table[r], at), scales)
        visible = visible_groups(n, length, cmp_ratio, residual[r] if residual else 0)
        score = _index_score(q[lo:hi], descale_q[lo:hi], w[lo:hi], keys)
        score = score.masked_fill(at >= visible.unsqueeze(-1), -math.inf)
        if source:
            best = stable_topk(candidate_tiles(score, visible, candidate_block_size), candidate_topk_blocks)
            blocks[lo:hi, 0, : best.shape[-1]] = best.int()
            counts[lo:hi, 0] = (best >= 0).sum(-1).int()
        best = stable_topk(score, topk)
        picked[lo:hi, 0, : best.shape[-1]] = best.int()
    return picked, torch.empty(0, dtype=torch.bfloat16), blocks, counts


def quant_sparse_lightning_indexer(
    q,
    k,
    w,
    descale_q,
    candidate_block_indices,
    candidate_block_length,
    topk,
    quant_mode,
    candidate_block_size,
    *,
    descale_k=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    cmp_residual_k=None,
    block_table=None,
    output_idx_offset=None,
    metadata=None,
    max_seqlen_q=-1,
    mask_mode=0,
    cmp_ratio=1,
    layout_q="TND",
    layout_k="TND",
    return_value=False,
):
    """vllm_ascend::quant_sparse_lightning_indexer: the same among the positions of each row's candidate blocks.

    k: folded rows uint8 [pages, page / 8, 1, 544]; candidate_block_indices int32 [T, 1, blocks] of which the first
    candidate_block_length int32 [T, 1] count. Source: `ops/packaged_attention.py`.
    """
    assert quant_mode == 1 and mask_mode == 3 and candidate_block_size == 8 and k.shape[-1] == FOLDED_ROW
    picked = torch.full((q.shape[0], 1, topk), -1, dtype=torch.int32)
    starts, used, residual = as_ints(cu_seqlens_q), as_ints(seqused_k), as_ints(cmp_residual_k)
    for r, (lo, hi) in enumerate(pairwise(starts)):
        n, length = hi - lo, used[r]
        if not n or not length:
            continue
        groups, at = -(-length // 8), torch.arange(length)
        folded = gather_paged(k, block_table[r], torch.arange(groups))
        keys = index_values(folded[:, :512].unflatten(-1, (8, 64)), folded[:, 512:].unflatten(-1, (8, 4)))
        visible = visible_groups(n, length, cmp_ratio, residual[r] if residual else 0)
        score = _index_score(q[lo:hi], descale_q[lo:hi], w[lo:hi], keys.flatten(0, 1)[:length])
        score = score.masked_fill(at >= visible.unsqueeze(-1), -math.inf)
        chosen = candidate_block_indices[lo:hi, 0]
        live = torch.arange(chosen.shape[-1]) < candidate_block_length[lo:hi]
        best = stable_topk(score.masked_fill(~inside_blocks(chosen, live, groups, 8, length), -math.inf), topk)
        picked[lo:hi, 0, : best.shape[-1]] = best.int()
    return picked, torch.empty(0, dtype=torch.bfloat16)


# ---- attention ---------------------------------------------------------------


def mixed_quant_sparse_flash_mla(
    q,
    *,
    ori_kv=None,
    cmp_kv=None,
    ori_sparse_indices=None,
    cmp_sparse_indices=None,
    ori_block_table=None,
    cmp_block_table=None,
    cu_seqlens_q=None,
    seqused_q=None,
    seqused_ori_kv=None,
    seqused_cmp_kv=None,
    ori_topk_length=None,
    cmp_topk_length=None,
    sinks=None,
    metadata=None,
    quant_mode=1,
    softmax_scale=None,
    layout_q="TND",
    layout_kv="PA_BBND",
    return_softmax_lse=False,
):
    """vllm_ascend::mixed_quant_sparse_flash_mla: attention over exactly the listed rows of both caches.

    q [T, heads, D]; *_sparse_indices int32 [T, 1, k] of which the first *_topk_length int32 [T, 1] count; both caches
    packed. Returns bfloat16 [T, heads, D] and an empty tensor. Raises AssertionError for an index at or beyond the
    request's length. Source: `ops/packaged_attention.py`; `DeepseekV41MixedQuantAttention`'s calls.
    """
    assert quant_mode == 1 and layout_q == "TND" and layout_kv == "PA_BBND" and not return_softmax_lse
    out = torch.zeros(q.shape, dtype=torch.bfloat16)
    width, starts = q.shape[-1], as_ints(cu_seqlens_q)
    sides = [(ori_kv, ori_sparse_indices, ori_topk_length, ori_block_table, as_ints(seqused_ori_kv), WINDOW)]
    if cmp_kv is not None:
        sides.append(
            (cmp_kv, cmp_sparse_indices, cmp_topk_length, cmp_block_table, as_ints(seqused_cmp_kv), COMPRESSED)
        )
    for r, (lo, hi) in enumerate(pairwise(starts)):
        if not sides[0][4][r]:
            # A padding request of a FULL graph: nobody reads its rows.
            continue
        for a in range(lo, hi, 32):
            rows, keys, masks = slice(a, min(a + 32, hi)), [], []
            for cache, indices, lengths, table, used, kind in sides:
                at = indices[rows, 0].long()
                ok = torch.arange(at.shape[-1]) < lengths[rows]
                assert bool(((at >= 0) & (at < used[r]))[ok].all()), "sparse index out of range"
                k = torch.zeros(*at.shape, width, dtype=F64)
                if bool(ok.any()):
                    k[ok] = decode(gather_paged(cache, table[r], at[ok]), width, kind)
                keys.append(k)
                masks.append(ok)
            value = attend(q[rows], torch.cat(keys, 1), torch.cat(masks, 1), softmax_scale, sinks)
            out[rows] = value.to(torch.bfloat16)
    return out, torch.empty(0)


def split_table(*args, **kwargs):
    """The A5 metadata operators -> int32 [1024]. These splits depend on capacities only: nothing to check."""
    return torch.zeros(METADATA_WORDS, dtype=torch.int32)
