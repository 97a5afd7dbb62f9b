"""The places of vllm-ascend that replay holds on to. If one moved, replay is off and the message names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import EnumType
from importlib import import_module
from typing import Any

ARCHITECTURE = "DeepseekV41ForCausalLM"
"""Kept as it is: vllm-ascend compares it."""
DRAFT_ARCHITECTURE = "DeepseekV41DSparkModel"
"""vllm-ascend's DSpark drafter of DeepSeek-V4.1: all its layers slide."""

_BUILD_ARGUMENTS = (
    "attn_groups",
    "num_reqs",
    "num_tokens",
    "query_start_loc_gpu",
    "query_start_loc_cpu",
    "max_query_len",
    "seq_lens",
    "max_seq_len",
    "block_tables",
    "slot_mappings",
    "kv_cache_config",
    "parallel_config",
    "num_actual_tokens",
    "num_input_tokens",
    "seq_lens_np",
    "positions",
    "attn_state",
    "is_prefilling",
    "model_specific_attn_metadata",
)
_STEP_ARGUMENTS = (
    "input_batch",
    "cudagraph_mode",
    "block_tables",
    "slot_mappings",
    "attn_groups",
    "kv_cache_config",
    "for_capture",
)
_METADATA_FIELDS = (
    "query_start_loc",
    "seq_lens",
    "ori_sparse_indices",
    "ori_topk_length",
    "smla_metadata",
    "cache_seq_lens",
    "cmp_residual",
    "num_reqs",
    "max_query_len",
    "max_cache_seq_len",
    "compress_ratio",
    "num_actual_tokens",
    "cache_kind",
)

_V41 = "vllm_ascend.models.deepseek_v41."
SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (_V41 + "model", "AscendDeepseekV41LLMForCausalLM.model_cls", ()),
    (_V41 + "model", "AscendDeepseekV41LLMForCausalLM.get_model_state_cls", ()),
    (_V41 + "model", "DeepseekV41Model.forward", ("input_ids", "positions")),
    (_V41 + "model", "DeepseekV41DecoderLayer.hc_collapse", ()),
    (_V41 + "model", "DeepseekV41DecoderLayer.hc_pre", ("x", "hc_fn", "hc_scale", "hc_base", "pre_mix")),
    (_V41 + "model", "DeepseekV41DecoderLayer.forward", ("positions", "hidden_states", "pre_mix", "input_ids")),
    ("vllm_ascend.attention.dsa_v41", "AscendDSAV41Impl._get_layer_metadata", ("metadata",)),
    ("vllm_ascend.attention.dsa_v41", "AscendDSAV41Impl._update_caches", ("attn", "hidden_states", "metadata")),
    (
        "vllm_ascend.attention.dsa_v41",
        "AscendDSAV41MetadataBuilder",
        ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    ("vllm_ascend.attention.dsa_v41", "AscendDSAV41Metadata", _METADATA_FIELDS),
    ("vllm_ascend.ops.rope_dsv4", "get_cos_and_sin_dsa", ("positions", "use_cache")),
    ("vllm_ascend.worker.v2.attn_utils", "build_attn_metadata", _BUILD_ARGUMENTS),
    ("vllm_ascend.worker.v2.model_states.default", "AscendModelState.prepare_attn", _STEP_ARGUMENTS),
    ("vllm_ascend.worker.v2.model_states.default", "AscendModelState.finish_execution", ("failed",)),
    ("vllm_ascend.worker.v2.input_batch", "AscendInputBatch", ("seq_lens_np", "attn_state", "is_dummy")),
    (
        "vllm_ascend.platform",
        "NPUPlatform.set_additional_forward_context",
        ("attn_metadata", "vllm_config", "dp_metadata", "num_tokens"),
    ),
)
"""`(module, attribute, parameters, fields or members it must have)`."""


GRAPH_SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm_ascend.compilation.breakable_aclgraph", "BreakableACLGraphWrapper", ("runnable", "vllm_config")),
    ("vllm_ascend.worker.v2.input_batch", "AscendInputBatch.make_dummy", ("num_reqs", "num_tokens", "input_buffers")),
    ("vllm_ascend.worker.v2.utils", "communicator_switch", ()),
    ("vllm_ascend.worker.v2.model_runner", "NPUModelRunner.capture_model", ()),
    ("vllm_ascend.ascend_forward_context", "get_mc2_mask", ()),
    ("vllm_ascend.ascend_forward_context", "select_moe_comm_method", ("num_tokens", "vllm_config")),
    ("vllm_ascend.ascend_forward_context", "MoECommType", ("ALLTOALL",)),
)
"""The same for replay graphs: without one, the replay layers run eagerly."""


def missing_seam(seams: Iterable[tuple[str, str, tuple[str, ...]]] | None = None) -> str | None:
    """What replay (or `seams`) needs of vllm-ascend and this version does not have, in words; `None`: all is there."""
    for module_name, path, names in SEAMS if seams is None else seams:
        try:
            found: Any = import_module(module_name)
        except ImportError as error:
            return f"this vllm-ascend has no {module_name} ({error})"
        for part in path.split("."):
            found = getattr(found, part, None)
            if found is None:
                return f"this vllm-ascend has no {module_name}.{path}"
        lacking = sorted(set(names) - _names(found))
        if lacking:
            return f"{module_name}.{path} of this vllm-ascend has no {', '.join(lacking)}"
    return None


def _names(found: Any) -> set[str]:
    if is_dataclass(found):
        return {field.name for field in fields(found)}
    if isinstance(found, EnumType):
        return set(found.__members__)
    return set(inspect.signature(found).parameters)


def own_decoder_replay(*classes: type) -> str | None:
    """The attribute by which one of the classes shows a decoder replay of its own; `None` without one."""
    for cls in classes:
        for name in dir(cls):
            if "decoder_replay" in name or "replay_batch" in name:
                return f"{cls.__name__}.{name}"
    return None
