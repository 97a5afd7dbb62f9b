"""The operators under the names and schemas by which vllm-ascend calls them.

`_C_ascend` operators are defined here (the real library is not loaded); the `vllm_ascend::` ones are defined by
vllm-ascend's `ops/packaged_attention.py` and only get a CPU kernel.
"""

import torch

from . import caches, numerics, sparse_a2, sparse_a5

_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
_MLA_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
    "Tensor? seqused_q=None, Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, "
    "Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, "
)

# schema -> implementation
C_ASCEND = {
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice, "
    "bool negate_sin=False) -> ()": numerics.partial_rotary_,
    "npu_hc_pre_v3(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, Tensor? pre_mix=None, *, int hc_mult=4, "
    "int hc_sinkhorn_iters=20, float norm_eps=1e-6, float hc_eps=1e-6) -> (Tensor, Tensor, Tensor, Tensor)": (
        numerics.hc_pre
    ),
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor": numerics.hc_post,
    "npu_scatter_nd_update_sk(Tensor(a!) var, Tensor indices, Tensor update) -> ()": caches.scatter_nd_update_sk,
    "npu_quant_lightning_indexer_v2_metadata(int num_heads_q, int num_heads_k, int head_dim, int topk, int quant_mode, "
    f"*, {_LENGTHS}Tensor? cmp_residual_k=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, "
    "str layout_q='TND', str layout_k='PA_BBND', int mask_mode=3, int cmp_ratio=1, str device='npu') -> Tensor": (
        sparse_a2.indexer_metadata
    ),
    "npu_quant_lightning_indexer_v3(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    f"Tensor key_dequant_scale, int topk, int quant_mode, *, Tensor? candidate_topk_index=None, {_LENGTHS}"
    "Tensor? cmp_residual_k=None, Tensor? block_table=None, Tensor? output_idx_offset=None, Tensor? metadata=None, "
    "int max_seqlen_q=-1, str layout_q='TND', str layout_k='PA_BBND', int mask_mode=3, int cmp_ratio=1, "
    "int candidate_mode=3, int candidate_topk_blocks=2048, int candidate_block_size=8) -> (Tensor, Tensor, Tensor)": (
        sparse_a2.lightning_indexer
    ),
    f"npu_sparse_flash_mla_metadata(int num_heads_q, int num_heads_kv, int head_dim, *, {_MLA_LENGTHS}"
    "int batch_size=0, int max_seqlen_q=0, int max_seqlen_ori_kv=0, int max_seqlen_cmp_kv=0, int ori_topk=0, "
    "int cmp_topk=0, int cmp_ratio=0, int ori_mask_mode=0, int cmp_mask_mode=0, int ori_win_left=-1, "
    "int ori_win_right=-1, str layout_q='BSND', str layout_kv='BSND', bool has_ori_kv=True, bool has_cmp_kv=True) "
    "-> Tensor": sparse_a2.sparse_flash_mla_metadata,
    "npu_sparse_flash_mla(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None, "
    "Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None, "
    f"{_MLA_LENGTHS}Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=1.0, int cmp_ratio=0, "
    "int ori_mask_mode=0, int cmp_mask_mode=0, int ori_win_left=-1, int ori_win_right=-1, str layout_q='BSND', "
    "str layout_kv='BSND', int topk_value_mode=1, bool return_softmax_lse=False) -> (Tensor, Tensor)": (
        sparse_a2.sparse_flash_mla
    ),
    "kv_compress_epilog_v2(Tensor(a!) cache, Tensor x, Tensor slot_mapping, *, int quant_group_size=32, "
    "str quant_mode='mxfp8_bf16', bool round_scale=True, float x_scale=1.0) -> ()": sparse_a5.kv_compress_epilog_v2,
}

_library = None


def register() -> None:
    """Defines the `_C_ascend` operators for the CPU and fills in the `torch_npu` ones; idempotent."""
    global _library
    if _library is not None:
        return
    import torch_npu

    _library = torch.library.Library("_C_ascend", "FRAGMENT")
    for schema, fn in C_ASCEND.items():
        _library.define(schema)
        _library.impl(schema.split("(", 1)[0], fn, "CPU")
    torch_npu.npu_rms_norm = numerics.rms_norm
    torch_npu.npu_rotary_mul = numerics.rotary_mul
    torch_npu.npu_swiglu = numerics.swiglu
    torch_npu.npu_dynamic_quant = sparse_a2.dynamic_quant
    torch_npu.npu_transpose_batchmatmul = numerics.transpose_batchmatmul


def register_packaged() -> None:
    """Gives the operators of vllm-ascend's `packaged_attention` a CPU kernel; call once, after `register`."""
    import vllm_ascend.ops.packaged_attention  # noqa: F401

    for fn in (
        sparse_a5.quant_lightning_indexer,
        sparse_a5.quant_sparse_lightning_indexer,
        sparse_a5.mixed_quant_sparse_flash_mla,
    ):
        torch.library.impl(f"vllm_ascend::{fn.__name__}", "CPU")(fn)
        torch.library.impl(f"vllm_ascend::{fn.__name__}_metadata", "CPU")(sparse_a5.split_table)
