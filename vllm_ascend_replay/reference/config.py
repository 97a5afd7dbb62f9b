"""The reference model's configuration and the function that writes a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

COMPUTE_DTYPES = ("auto", "float32", "float64", "bfloat16")


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "engram_vocab_size",
    "engram_heads",
    "engram_head_dim",
    "swa_block_size",
    "max_position_embeddings",
)


def _strictly_increasing(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


class ReferenceConfig(PretrainedConfig):
    """Shapes and layer plan of the reference model; the defaults are the preset ``tiny``.

    The layer plan follows DeepSeek-V4.1: ``compress_ratios[i]`` is 0 for a layer with sliding-window attention only,
    else the number of tokens in one compressed entry that layer ``i`` reads. Layers in ``kv_source_layer_ids`` write
    compressed KV and index keys, layers in ``index_source_layer_ids`` choose the top-k entries; every other layer
    uses the last source's. The cut is the last KV source.
    """

    model_type = "ascend_replay_reference"

    def __init__(
        self,
        *,
        vocab_size: int = 97,
        hidden_size: int = 32,
        num_attention_heads: int = 4,
        head_dim: int = 16,
        qk_rope_head_dim: int = 4,
        q_lora_rank: int = 12,
        o_groups: int = 2,
        o_lora_rank: int = 8,
        sliding_window: int = 8,
        compress_ratios: Sequence[int] = (0, 0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids: Sequence[int] = (2, 5),
        index_source_layer_ids: Sequence[int] = (2, 5, 7),
        candidate_source_layer_id: int = 5,
        index_n_heads: int = 3,
        index_head_dim: int = 8,
        index_topk: int = 6,
        candidate_topk_blocks: int = 3,
        candidate_block_size: int = 4,
        hc_mult: int = 4,
        hc_sinkhorn_iters: int = 20,
        hc_eps: float = 1e-6,
        rms_norm_eps: float = 1e-20,
        num_experts: int = 6,
        num_experts_per_tok: int = 2,
        moe_intermediate_size: int = 12,
        routed_scaling_factor: float = 1.5,
        swiglu_limit: float = 10.0,
        window_rope_theta: float = 1e4,
        compress_rope_theta: float = 1.6e5,
        engram_layer_ids: Sequence[int] = (1,),
        engram_vocab_size: int = 101,
        engram_heads: int = 2,
        engram_head_dim: int = 4,
        engram_max_ngram: int = 3,
        aux_hidden_state_layers: Sequence[int] = (6, 7, 8),
        swa_block_size: int = 4,
        max_position_embeddings: int = 4096,
        weight_seed: int = 0,
        compute_dtype: str = "auto",
        dp_moe_collective: bool | None = None,
        sequence_parallel: bool = False,
        dsa_context_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            vocab_size, hidden_size, num_attention_heads, head_dim: as usual; one latent KV head of ``head_dim``.
            qk_rope_head_dim: last dims of a head that are rotated, as interleaved pairs.
            q_lora_rank, o_groups, o_lora_rank: low-rank query, and output projection in groups.
            sliding_window: positions a row's window holds, its own included.
            compress_ratios, kv_source_layer_ids, index_source_layer_ids, candidate_source_layer_id: the layer plan
                (see the class); the candidate source is an index source, or -1 for none.
            index_n_heads, index_head_dim, index_topk: indexer shapes; entries chosen per row.
            candidate_topk_blocks, candidate_block_size: level one of the choice: best blocks, entries in a block.
            hc_mult, hc_sinkhorn_iters, hc_eps: hyper-connection streams, normalisation steps and epsilon.
            num_experts, num_experts_per_tok, moe_intermediate_size, routed_scaling_factor, swiglu_limit: the MoE; one
                shared expert of the same width is added.
            window_rope_theta, compress_rope_theta: rotary bases of layers without and with compressed KV.
            engram_layer_ids: layers (before the cut) that look up n-grams of token ids; may be empty.
            engram_vocab_size, engram_heads, engram_head_dim, engram_max_ngram: n-gram tables: rows, tables per n,
                row width, longest n.
            aux_hidden_state_layers: layers whose entering streams are handed out when the engine asks for them.
            swa_block_size: tokens in one page of window KV.
            weight_seed: seed of the generated weights.
            compute_dtype: dtype of weights, caches and streams: ``auto`` follows vLLM's ``dtype``; ``float64`` is
                for exact comparisons and holds inside the engine too.
            dp_moe_collective: whether every MoE layer exchanges rows over the data-parallel group as a real one
                would; ``None``: yes when there is a group.
            sequence_parallel: whether tensor-parallel ranks hold a chunk of the rows each between attention layers,
                gather them before attention and reduce-scatter after; otherwise each computes everything.
            dsa_context_parallel: under ``sequence_parallel``, whether a rank's queries are those of its chunk; every
                rank writes the KV of all rows.

        Raises:
            ValueError: a value or a combination that describes no such model; the message names it.
        """
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = 1
        self.head_dim = head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.q_lora_rank = q_lora_rank
        self.o_groups = o_groups
        self.o_lora_rank = o_lora_rank
        self.sliding_window = sliding_window
        self.compress_ratios = list(compress_ratios)
        self.num_hidden_layers = len(self.compress_ratios)
        self.kv_source_layer_ids = list(kv_source_layer_ids)
        self.index_source_layer_ids = list(index_source_layer_ids)
        self.candidate_source_layer_id = candidate_source_layer_id
        self.index_n_heads = index_n_heads
        self.index_head_dim = index_head_dim
        self.index_topk = index_topk
        self.candidate_topk_blocks = candidate_topk_blocks
        self.candidate_block_size = candidate_block_size
        self.hc_mult = hc_mult
        self.hc_sinkhorn_iters = hc_sinkhorn_iters
        self.hc_eps = hc_eps
        self.rms_norm_eps = rms_norm_eps
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.routed_scaling_factor = routed_scaling_factor
        self.swiglu_limit = swiglu_limit
        self.window_rope_theta = window_rope_theta
        self.compress_rope_theta = compress_rope_theta
        self.engram_layer_ids = list(engram_layer_ids)
        self.engram_vocab_size = engram_vocab_size
        self.engram_heads = engram_heads
        self.engram_head_dim = engram_head_dim
        self.engram_max_ngram = engram_max_ngram
        self.aux_hidden_state_layers = list(aux_hidden_state_layers)
        self.swa_block_size = swa_block_size
        self.max_position_embeddings = max_position_embeddings
        self.weight_seed = weight_seed
        self.compute_dtype = compute_dtype
        self.dp_moe_collective = dp_moe_collective
        self.sequence_parallel = sequence_parallel
        self.dsa_context_parallel = dsa_context_parallel
        self.validate()

    @property
    def cut(self) -> int:
        """Index of the cut layer: the last KV source."""
        return self.kv_source_layer_ids[-1]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV ``layer`` reads, or ``None`` for a sliding-window layer."""
        return self._last_source(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k rows ``layer`` uses, or ``None`` for a sliding-window layer."""
        return self._last_source(self.index_source_layer_ids, layer)

    def rope_theta_of(self, layer: int) -> float:
        """Rotary base of ``layer``."""
        return self.compress_rope_theta if self.compress_ratios[layer] else self.window_rope_theta

    def _last_source(self, sources: Sequence[int], layer: int) -> int | None:
        return max(s for s in sources if s <= layer) if self.compress_ratios[layer] else None

    def validate(self) -> None:
        """Check the values; also called by the model, since vLLM's ``hf_overrides`` set fields afterwards.

        Raises:
            ValueError: see the constructor.
        """

        def need(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"{type(self).__name__}: {message}")

        for name in _POSITIVE:
            value = getattr(self, name)
            need(isinstance(value, int) and value > 0, f"{name} is {value!r}; it must be a positive whole number")
        layers, ratios = self.num_hidden_layers, self.compress_ratios
        need(layers == len(ratios), f"num_hidden_layers is {layers}, compress_ratios names {len(ratios)} layers")
        kv, index = self.kv_source_layer_ids, self.index_source_layer_ids
        need(set(ratios) <= {0, 1, 2}, f"compress_ratios {ratios} may hold 0, 1 and 2 only")
        need(bool(kv), "kv_source_layer_ids is empty: without a KV source there is no cut")
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "aux_hidden_state_layers"):
            ids = getattr(self, name)
            need(
                _strictly_increasing(ids) and all(0 <= i < layers for i in ids),
                f"{name} {ids} must rise strictly within 0..{layers - 1}",
            )
        for i, ratio in enumerate(ratios):
            if not ratio:
                continue
            need(kv[0] <= i and bool(index) and index[0] <= i, f"layer {i} reads compressed KV before any source")
            source = max(s for s in kv if s <= i)
            need(ratios[source] == ratio, f"layer {i} has ratio {ratio}, its KV source {source} has {ratios[source]}")
        need(all(ratios[i] for i in (*kv, *index)), "a source layer must have a compression ratio")
        need(set(kv) <= set(index), f"every KV source {kv} must be an index source {index}: its old rows point nowhere")
        need(ratios[kv[-1]] == 1, f"the cut layer {kv[-1]} must have ratio 1: the replay batch writes no ring")
        candidate = self.candidate_source_layer_id
        need(candidate == -1 or candidate in index, f"candidate source {candidate} is no index source {index}")
        need(
            candidate == -1 or all(s <= candidate for s in kv),
            f"KV sources {kv} after the candidate source {candidate} would use its blocks on other entries",
        )
        need(all(i < kv[-1] for i in self.engram_layer_ids), f"Engram layers must come before the cut {kv[-1]}")
        need(self.engram_max_ngram >= 2, "engram_max_ngram must be at least 2")
        need(
            self.sequence_parallel or not self.dsa_context_parallel,
            "dsa_context_parallel needs sequence_parallel: the output stays in the rows' chunks",
        )
        heads = self.num_attention_heads
        need(
            heads % self.o_groups == 0 or not self.sequence_parallel, "o_groups must divide the heads to share them out"
        )
        need((heads * self.head_dim) % self.o_groups == 0, f"o_groups {self.o_groups} does not divide the heads' width")
        rope = self.qk_rope_head_dim
        need(
            rope > 0 and rope % 2 == 0 and rope <= min(self.head_dim, self.index_head_dim),
            f"qk_rope_head_dim {rope} must be even and fit in head_dim and index_head_dim",
        )
        need(self.num_experts_per_tok <= self.num_experts, "num_experts_per_tok exceeds num_experts")
        need(
            self.compute_dtype in COMPUTE_DTYPES,
            f"compute_dtype is {self.compute_dtype!r}; allowed: {', '.join(COMPUTE_DTYPES)}",
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    # One layer after the cut: what it hands on is exact with replay, so logits and decodes equal a full run.
    "tiny-one-late-layer": {
        "compress_ratios": (0, 0, 2, 2, 2, 1, 1),
        "index_source_layer_ids": (2, 5),
        "aux_hidden_state_layers": (6,),
    },
    # DeepSeek-V4.1-Flash's layer plan and ratios of sizes; the widths are small and meant to be overridden.
    "v41-flash-plan": {
        "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20,
        "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
        "candidate_source_layer_id": 20,
        "engram_layer_ids": (1, 14),
        "aux_hidden_state_layers": (37, 38, 39),
        "sliding_window": 128,
        "swa_block_size": 64,
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 4,
        "o_lora_rank": 64,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "engram_vocab_size": 4099,
        "max_position_embeddings": 131072,
    },
}


def write_model(directory: str | Path, preset: str = "tiny", **overrides: Any) -> Path:
    """Write a model directory that vLLM loads with ``--load-format dummy --skip-tokenizer-init``.

    The directory holds a ``config.json`` only: the weights are generated when the model is built.

    Args:
        directory: where to; made if missing.
        preset: one of `PRESETS`.
        overrides: fields of `ReferenceConfig` that replace the preset's.

    Returns:
        The directory.

    Raises:
        ValueError: an unknown preset or field, or values that describe no such model.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; allowed: {', '.join(PRESETS)}")
    known = set(ReferenceConfig().to_dict()) | {"dtype"}
    if unknown := sorted(set(overrides) - known):
        raise ValueError(f"{', '.join(unknown)}: no field of ReferenceConfig")
    values = {"dtype": "float32", "bos_token_id": None, "eos_token_id": None, **PRESETS[preset], **overrides}
    config = ReferenceConfig(architectures=["ReplayReferenceForCausalLM"], **values)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True, default=str) + "\n")
    return path
