"""Replaces the NPU-bound Python functions of vllm-ascend, one by one.

Nothing of the model, the cache layout, the metadata builders, the scheduler or the runner is replaced, except where a
device is asked for: `_enable_device_ops`. `REAL` keeps every original, which the tests use as a judge.
"""

import functools
import importlib
from itertools import pairwise

import torch
import torch.nn.functional as F

from . import caches, graphs, numerics, operators, sparse_a2, sparse_a5
from .graphs import kernel

REAL = {}
# (layer name, rows) of every MoE call since the last clear(): what each layer really ran.
MOE_CALLS: list[tuple[str, int]] = []
_installed = False


def _swap(new, *places):
    """Rebinds a function, one kernel to graphs, in every module that imported it by name."""
    new = kernel(new)
    for place in places:
        path, name = place.rsplit(".", 1)
        module = importlib.import_module(path)
        REAL.setdefault(name, getattr(module, name))
        setattr(module, name, new)


def moe_forward_impl(runner, hidden_states, router_logits, shared_experts_input=None, input_ids=None):
    """Plain MoE in place of `AscendMoERunner._forward_impl`: (shared, routed), each [T, H].

    The runner's own forward, its custom operator and the lookup of the layer (by name, or by the context's counter)
    stay real, so a layer that runs with another layer's experts shows.
    """
    spec = runner.emulated
    logits = router_logits.to(numerics.F64)
    if runner.is_internal_router:
        logits = logits @ runner._gate.weight.to(numerics.F64).t()
    ids, weights = numerics.route(logits, spec["top_k"], spec["bias"], scoring=spec["scoring"], scale=spec["scale"])
    x = hidden_states.to(numerics.F64)
    experts = runner.routed_experts
    w13, w2, limit = experts.w13_weight, experts.w2_weight, spec["limit"]
    out = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        rows, slot = (ids == e).nonzero(as_tuple=True)
        if rows.numel():
            gate, up = (x[rows] @ w13[e].to(numerics.F64)).chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out.index_add_(0, rows, (F.silu(gate) * up) @ w2[e].to(numerics.F64) * weights[rows, slot, None])
    MOE_CALLS.append((runner.layer_name, x.shape[0]))
    routed = out.to(hidden_states.dtype)
    if spec["shared"] is None:
        return routed
    return spec["shared"](hidden_states), routed


def rows_per_layer() -> dict[int, int]:
    """Rows each layer's MoE ran since `MOE_CALLS` was cleared: {layer index: rows}, in order of first use."""
    rows: dict[int, int] = {}
    for name, n in MOE_CALLS:
        layer = int(name.split("layers.")[1].split(".")[0])
        rows[layer] = rows.get(layer, 0) + n
    return rows


def _install_moe():
    from vllm_ascend.models.deepseek_v41.model import DeepseekV41MoE
    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner

    AscendMoERunner._forward_impl = kernel(moe_forward_impl)
    # The emulated weights are scaled already; the runner would scale once more on its way out.
    AscendMoERunner._maybe_apply_routed_scale_to_output = lambda self, shared, routed: (shared, routed)
    init = DeepseekV41MoE.__init__

    @functools.wraps(init)
    def moe_init(self, config, *args, **kwargs):
        init(self, config, *args, **kwargs)
        self.experts.emulated = {
            "top_k": config.num_experts_per_tok,
            "bias": self.gate.e_score_correction_bias,
            "scoring": config.scoring_func,
            "scale": self.routed_scaling_factor,
            "limit": self.swiglu_limit if self.swiglu_limit is not None else float("inf"),
            "shared": self.shared_experts,
        }

    DeepseekV41MoE.__init__ = moe_init


def greedy_sample(logits, expanded_idx_mapping, temperature, *args, **kwargs):
    """Argmax in place of the Gumbel sampling kernel; raises AssertionError for a request that is not greedy."""
    assert bool((temperature[expanded_idx_mapping.long()] == 0).all()), "only greedy sampling is emulated"
    return logits.argmax(-1)


def greedy_rejection_sample(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    *args,
    **kwargs,
):
    """Verification of greedy drafts in place of the rejection kernels: (tokens int64 [R, steps + 1], counts int32 [R]).

    target_logits [L, V]; draft_sampled int [L], a request's last token and its drafts; cu_num_logits int32 [R + 1]. A
    draft stands while it is the target's argmax; the target's own token follows the last that stands. -1 fills a row
    up. Raises AssertionError for a request that is not greedy. Source: `_probabilistic_rejection_kernel` of
    vllm-ascend's `rejection_sampler_utils.py`, temperature 0.
    """
    assert bool((temperature[idx_mapping.long()] == 0).all()), "only greedy verification is emulated"
    best, bounds = target_logits.argmax(-1), cu_num_logits.tolist()
    tokens = torch.full((len(bounds) - 1, args[1] + 1), -1, dtype=torch.int64)
    counts = torch.ones(len(bounds) - 1, dtype=torch.int32)
    for r, (lo, hi) in enumerate(pairwise(bounds)):
        stands = (draft_sampled[lo + 1 : hi] == best[lo : hi - 1]).long().cumprod(0)
        counts[r] += int(stands.sum())
        tokens[r, : counts[r]] = best[lo : lo + int(counts[r])]
    return tokens, counts


def _enable_device_ops(builder):
    """Lets a metadata builder on the CPU take the branches it takes on an NPU, with the buffers it has there."""
    builder._supports_device_ops = True
    if builder._uses_a5_packed_cache and builder._cache_kind == "swa":
        n, window = builder._max_tokens, int(builder.vllm_config.model_config.hf_text_config.sliding_window)
        builder._a5_causal_swa_indices = torch.empty((n, 1, window), dtype=torch.int32)
        builder._a5_causal_swa_lengths = torch.empty((n, 1), dtype=torch.int32)
        builder._a5_smla_metadata = torch.empty(sparse_a2.METADATA_WORDS, dtype=torch.int32)
        builder._a5_smla_length_rows = torch.empty((n, 1), dtype=torch.int32)
    if builder._cache_kind == "compressor_state":
        rows = builder._c2_source_positions.shape[0]
        shape = (rows, *builder._c2_source_cos.shape[1:])
        builder._c2_source_cos = builder._c2_source_cos.new_ones(shape)
        builder._c2_source_sin = builder._c2_source_sin.new_zeros(shape)


def _install_builders():
    from vllm_ascend.attention.dsa_v41 import AscendDSAV41MetadataBuilder

    init = AscendDSAV41MetadataBuilder.__init__

    @functools.wraps(init)
    def builder_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        _enable_device_ops(self)

    AscendDSAV41MetadataBuilder.__init__ = builder_init


def _install_kernels():
    """Functions that launch an NPU kernel, replaced in every module that imported them by name."""
    here = "vllm_ascend."
    triton, v41 = here + "ops.triton.", here + "models.deepseek_v41."
    _swap(
        sparse_a2.order_indices,
        v41 + "indexer.prepare_indexer_indices",
        v41 + "mixed_quant_attention.prepare_indexer_indices",
        triton + "prepare_indexer_indices.prepare_indexer_indices",
    )
    _swap(
        sparse_a2.quantize_query,
        v41 + "indexer.quantize_indexer_query",
        triton + "quantize_indexer_query.quantize_indexer_query",
    )
    _swap(caches.compress_ring, triton + "compressor.compressor_triton.compressor_from_projected")
    _swap(numerics.muls_add, v41 + "model.muls_add_triton", triton + "mul_add.muls_add_triton")
    _swap(
        sparse_a5.quantize_index,
        v41 + "indexer.quantize_mxfp4_indexer",
        triton + "quantize_mxfp4_indexer.quantize_mxfp4_indexer",
    )
    _swap(
        sparse_a5.write_index,
        v41 + "mixed_quant_attention.write_mxfp4_indexer_cache",
        triton + "quantize_mxfp4_indexer.write_mxfp4_indexer_cache",
    )
    _swap(sparse_a5.fold_index, v41 + "indexer.fold_indexer_cache_rows")
    _swap(
        caches.window_indices,
        v41 + "mixed_quant_attention.build_window_indices_triton",
        triton + "build_window_indices.build_window_indices_triton",
    )
    _swap(
        caches.draft_window_indices,
        here + "attention.dsa_v41.build_dspark_swa_indices",
    )
    from vllm_ascend.models.deepseek_v41.mixed_quant_attention import MixedQuantPackedCacheOps

    MixedQuantPackedCacheOps.build_window_indices = staticmethod(kernel(caches.window_indices))
    _swap(
        caches.ring_metadata,
        here + "attention.dsa_v41.build_c2_ring_metadata",
        triton + "c2_ring_metadata.build_c2_ring_metadata",
    )
    sampler = "vllm.v1.worker.gpu.sample."
    _swap(greedy_sample, sampler + "sampler.gumbel_sample", sampler + "gumbel.gumbel_sample")
    verify = "vllm.v1.worker.gpu.spec_decode."
    _swap(
        greedy_rejection_sample,
        verify + "rejection_sampler.rejection_sample",
        verify + "rejection_sampler_utils.rejection_sample",
    )


def _install_linear():
    import vllm_ascend.ops.linear as ascend_linear

    ascend_linear.AscendUnquantizedLinearMethod.apply = lambda self, layer, x, bias=None: numerics.linear(
        x, layer.weight, bias
    )
    forward = torch.nn.Linear.forward
    torch.nn.Linear.forward = lambda self, x: (
        numerics.linear(x, self.weight, self.bias) if x.device.type == "cpu" else forward(self, x)
    )


def _install_warmup():
    """Nothing is compiled here; one of the kernels warmed up at start-up asks for CANN's language extension."""
    warmup = "vllm_ascend.model_executor.warmup.kernel_warmup."
    _swap(lambda worker: None, warmup + "rejection_sampler_triton_warmup")


def _install_gloo():
    """Process groups over gloo: HCCL needs a device."""
    import vllm.distributed.parallel_state as groups

    start = groups.init_distributed_environment

    def over_gloo(world, rank, method, local_rank, backend="gloo", *args, **kwargs):
        return start(world, rank, method, local_rank, "gloo", *args, **kwargs)

    _swap(over_gloo, "vllm_ascend.worker.worker.init_distributed_environment")


def install() -> None:
    """Applies every patch; idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    operators.register()
    from vllm_ascend.utils import adapt_patch

    adapt_patch(True)
    adapt_patch()
    operators.register_packaged()
    graphs.refuse_unseen_kernels()
    _install_kernels()
    _install_linear()
    _install_gloo()
    _install_warmup()
    _install_moe()
    _install_builders()
