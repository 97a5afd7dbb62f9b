"""A tiny DeepSeek-V4.1 text model and a real VllmConfig around it.

Eight layers: 0-1 sliding window only, 2-3 ratio 2, 4-7 ratio 1; KV sources 2 and 4 (so the cut is 4), index sources 2,
4 and 6, candidates from 4. The number of layers must be a multiple of the number of KV sources (vllm-ascend's cache
planner).
"""

import json
import pathlib
import tempfile

from . import ON_A5

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "index_topk": 12,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "max_position_embeddings": 4096,
    "engram_layer_ids": [],
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "image_token_id": 250,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The A5 cache formats fix these widths.
A5_WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "candidate_block_size": 8}
# One layer after the cut: nothing is approximate for a prompt's last row.
ONE_LATE_LAYER = {"num_hidden_layers": 6, "compress_ratios": [0, 0, 2, 2, 1, 1], "index_source_layer_ids": [2, 4]}
# Engram in layer 1; the two n-gram orders use two heads each.
ENGRAM = {
    "engram_layer_ids": [1],
    "engram_num_embeddings": [4096],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 16,
    "engram_compressed_vocab_size": 256,
    "engram_pad_token_id": 2,
    "engram_vocab_size": 128,
}
# A DSpark drafter of two layers (at most one per KV source) that reads the streams entering layers 5, 6 and 7; `DRAFTS`
# among an engine's arguments runs it.
DSPARK = {
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 4,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 2,
}
DRAFTS = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 4}}


def write_config(folder, **overrides) -> str:
    """Writes config.json of the tiny model (`overrides` are text configuration fields); returns the folder."""
    text = {**TINY, **(A5_WIDTHS if ON_A5 else {}), **overrides}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 0},
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_args(*, block_size=128, max_tokens=512, max_reqs=8, max_len=2048, engine=None, **overrides) -> dict:
    """Keyword arguments for `EngineArgs` or `LLM`; `engine` adds or replaces some, `overrides` go to the model."""
    return dict(
        model=write_config(tempfile.mkdtemp(prefix="tiny_v41_"), **overrides),
        skip_tokenizer_init=True,
        language_model_only=True,
        load_format="dummy",
        dtype="bfloat16",
        block_size=block_size,
        max_model_len=max_len,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_reqs,
        **{"enforce_eager": True, "enable_prefix_caching": False, **(engine or {})},
    )


def make_vllm_config(**kwargs):
    """A real VllmConfig made by EngineArgs, the platform's checks included; arguments of `engine_args`."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args(**kwargs)).create_engine_config()


def say_few_words(*models, words=6):
    """Leaves the heads of models and drafters so few words to say that some drafts stand."""
    for model in models:
        for name, weight in model.named_parameters():
            if name.endswith(("lm_head.weight", "markov_w2.weight")):
                weight.data[words:] = 0
