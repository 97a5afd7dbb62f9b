"""The reference model: DeepSeek-V4.1's structure in plain PyTorch, run by vLLM's engine as an out-of-tree model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig

from vllm_ascend_replay.reference.attention import Compressor, LatentAttention
from vllm_ascend_replay.reference.config import ReferenceConfig
from vllm_ascend_replay.reference.engram import Engram, ngram_rows
from vllm_ascend_replay.reference.hyper_connection import HyperConnection, collapse_norm
from vllm_ascend_replay.reference.metadata import layer_metadata
from vllm_ascend_replay.reference.moe import MoE
from vllm_ascend_replay.reference.selection import Selection
from vllm_ascend_replay.reference.sharding import Sharding
from vllm_ascend_replay.reference.weights import SeededWeights, accumulation_dtype, named_weights
from vllm_ascend_replay.tail import ReplayTail


def compute_dtype(config: ReferenceConfig, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights, caches and streams."""
    return model_dtype if config.compute_dtype == "auto" else getattr(torch, config.compute_dtype)


class ReferenceLayer(SeededWeights):
    """One decoder layer: attention and MoE, each inside a hyper-connection whose post is applied here."""

    def __init__(
        self,
        config: ReferenceConfig,
        layer: int,
        *,
        sources: dict[int, Compressor],
        selection: Selection,
        prefix: str,
        dtype: torch.dtype,
        exchange: bool,
        sharding: Sharding,
    ) -> None:
        super().__init__(name=f"{layer}", seed=config.weight_seed, dtype=accumulation_dtype(dtype))
        self.eps = config.rms_norm_eps
        self.weight("attn_norm", config.hidden_size, scale=0.1, mean=1.0)
        self.weight("ffn_norm", config.hidden_size, scale=0.1, mean=1.0)
        self.engram = None
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, name=f"{layer}.engram", dtype=dtype)
        self.hc_attn = HyperConnection(config, name=f"{layer}.hc_attn", dtype=dtype)
        self.hc_ffn = HyperConnection(config, name=f"{layer}.hc_ffn", dtype=dtype)
        self.attn = LatentAttention(
            config, layer, sources=sources, selection=selection, prefix=prefix, dtype=dtype, sharding=sharding
        )
        self.moe = MoE(config, layer, dtype=dtype, exchange=exchange, shares=sharding.layout.size)
        self.sharding = sharding

    def forward(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        table_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on the rows of the running forward context.

        Where the rows are sharded, all of them are in ``positions`` and this rank's chunk in everything else.

        Args:
            positions: int64 ``[T]``.
            streams: ``[T, hc, H]``, the states entering the layer.
            pre_mix: ``[T, hc]`` float32 (float64 in float64 models), handed on by the layer before.
            input_ids: int ``[T]``; crosses the cut with the other states, as in DeepSeek-V4.1, and is not read.
            table_rows: int64 ``[T, columns]``, the n-gram rows; read by Engram layers.

        Returns:
            Streams and pre mix for the next layer.
        """
        if self.engram is not None and table_rows is not None:
            streams = self.engram(streams, table_rows)
        pre, post, comb = self.hc_attn(streams)
        y = self.attn(self._attention_input(streams, pre_mix, positions), positions)
        if not self.sharding.queries:
            y = self.sharding.layout.reduce(y)
        streams = self.hc_attn.spread(y, streams, post, comb)
        x = collapse_norm(streams, pre, self.ffn_norm, self.eps)
        pre, post, comb = self.hc_ffn(streams)
        return self.hc_ffn.spread(self.moe(x), streams, post, comb), pre

    def write_kv(self, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor) -> None:
        """Write the rows' window KV, compressed KV and index keys, and nothing else of the layer.

        A second write of the same rows at ratio 1 stores the same entries. Arguments as in `forward`.
        """
        self.attn.write_kv(self._attention_input(streams, pre_mix, positions), positions)

    def _attention_input(self, streams: torch.Tensor, pre_mix: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The normed input of all rows, ``[T, H]``: attention writes the KV of every row on every rank."""
        x = collapse_norm(streams, pre_mix, self.attn_norm, self.eps)
        return self.sharding.layout.collect([x], positions.shape[0])[0]


class ReplayReferenceForCausalLM(SeededWeights):
    """The model that vLLM loads.

    Every tensor-parallel rank computes the whole model on the same batch, so nothing is sharded or reduced, unless the
    configuration asks for sequence parallelism (`Sharding`). With data parallelism every rank computes its own rows,
    and its MoE layers exchange rows as `moe.exchange_rows` says.
    Weights are generated from ``config.weight_seed``: load with ``--load-format dummy``.
    """

    supports_eagle3: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: ReferenceConfig = vllm_config.model_config.hf_config
        config.validate()
        if not getattr(vllm_config, "use_v2_model_runner", True):
            raise ValueError("this model runs in Model Runner V2 only; set VLLM_USE_V2_MODEL_RUNNER=1")
        dtype = compute_dtype(config, vllm_config.model_config.dtype)
        super().__init__(name="model", seed=config.weight_seed, dtype=dtype)
        self.config = config
        self.num_layers, self.cut, self.window = config.num_hidden_layers, config.cut, config.sliding_window
        self.weight("embedding", config.vocab_size, config.hidden_size, scale=1.0)
        self.weight("norm", config.hidden_size, scale=0.1, mean=1.0, dtype=accumulation_dtype(dtype))
        self.weight("head", config.vocab_size, config.hidden_size)
        data_parallel = vllm_config.parallel_config.data_parallel_size > 1
        exchange = data_parallel if config.dp_moe_collective is None else config.dp_moe_collective and data_parallel
        sharding = Sharding.of(config, vllm_config)
        selection = Selection(config, vllm_config.scheduler_config.max_num_batched_tokens)
        sources: dict[int, Compressor] = {}
        self.layers = nn.ModuleList(
            ReferenceLayer(
                config,
                layer,
                sources=sources,
                selection=selection,
                prefix=f"{prefix}.layers.{layer}".lstrip("."),
                dtype=dtype,
                exchange=exchange,
                sharding=sharding,
            )
            for layer in range(self.num_layers)
        )
        self.aux_layers: tuple[int, ...] = ()
        self.layout, self.shards_tokens = sharding.layout, sharding.is_sharded
        self.tail = ReplayTail(self.layers, cut=self.cut, layout=sharding.layout)
        self.token_lookback_depth = config.engram_max_ngram - 1 if config.engram_layer_ids else 0
        """Ids before a request's first row that the model state hands over as ``lookback_token_ids``."""

    @classmethod
    def get_model_state_cls(cls) -> type:
        """The model state that prepares this model's batches."""
        from vllm_ascend_replay.reference.model_state import ReferenceModelState

        return ReferenceModelState

    @property
    def swa_prefixes(self) -> list[str]:
        """Metadata key of each layer's window cache."""
        return [layer.attn.swa_cache.prefix for layer in self.layers]

    @property
    def replay_metadata_prefixes(self) -> list[str]:
        """All metadata keys that the layers from the cut on read; no ring among them."""
        return list(dict.fromkeys(p for layer in self.layers[self.cut :] for p in layer.attn.metadata_prefixes))

    def crossing_states(self, device: torch.device) -> list[torch.Tensor]:
        """One empty tensor for each state that crosses the cut: streams, pre mix, input ids."""
        hc, hidden, acc = self.config.hc_mult, self.config.hidden_size, accumulation_dtype(self.dtype)
        return [
            torch.empty((0, hc, hidden), dtype=self.dtype, device=device),
            torch.empty((0, hc), dtype=acc, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
        ]

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights by dotted name."""
        return named_weights(self)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[T, H]`` of int ``[T]``."""
        # Padding rows may hold placeholders.
        return functional.embedding(input_ids.clamp(min=0), self.embedding)

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Hand out the streams entering ``layers`` (mean over the hyper-connections) with the hidden states."""
        self.aux_layers = tuple(sorted(layers))
        self.tail.aux_layers = [layer for layer in self.aux_layers if layer >= self.cut]
        self.tail.has_early_aux = any(layer < self.cut for layer in self.aux_layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers that the configuration names."""
        return tuple(self.config.aux_hidden_state_layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        lookback_token_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the model on the rows of the running forward context.

        Args:
            input_ids: int ``[T]``.
            positions: int64 ``[T]``.
            inputs_embeds: ``[T, H]`` in place of the embeddings of ``input_ids``.
            lookback_token_ids: int32 ``[>= R, depth]``, the ids before each request's first row, the nearest first;
                -1 where there is none. Required when Engram layers exist and the step has attention metadata.

        Returns:
            Hidden states ``[T, H]``; with aux layers set also their states, each ``[T, H]``.
        """
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.to(self.dtype)
        num_tokens = hidden.shape[0]
        table_rows = self._ngram_rows(input_ids, lookback_token_ids)
        hidden, input_ids = self.layout.shard(hidden), self.layout.shard(input_ids)
        if table_rows is not None:
            table_rows = self.layout.shard(table_rows)
        streams = hidden.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        # The first sublayer reads the first stream.
        pre_mix = streams.new_zeros((streams.shape[0], self.config.hc_mult), dtype=accumulation_dtype(self.dtype))
        pre_mix[:, 0] = 1
        early_aux = []
        for index, layer in enumerate(self.layers[: self.cut]):
            if index in self.aux_layers:
                early_aux += self.layout.collect([streams.mean(dim=1)], num_tokens)
            streams, pre_mix = layer(positions, streams, pre_mix, input_ids, table_rows)
        streams, pre_mix = self.tail(positions, streams, pre_mix, input_ids)
        hidden = collapse_norm(streams, pre_mix, self.norm, self.config.rms_norm_eps)
        hidden = self.layout.collect([hidden], hidden.shape[0] * self.layout.size)[0]
        hidden, aux = self.tail.finish(hidden, early_aux, num_tokens)
        return (hidden, aux) if self.aux_layers else hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab]`` of hidden states ``[n, H]``."""
        return functional.linear(hidden_states.to(self.dtype), self.head)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """There is nothing to load: the weights are generated."""
        return set()

    def _ngram_rows(self, input_ids: torch.Tensor, lookback: torch.Tensor | None) -> torch.Tensor | None:
        if not self.token_lookback_depth:
            return None
        columns = self.token_lookback_depth * self.config.engram_heads
        table_rows = torch.empty((input_ids.shape[0], columns), dtype=torch.int64, device=input_ids.device)
        self._find_ngram_rows(input_ids, lookback, table_rows)
        return table_rows

    @eager_break_during_capture
    def _find_ngram_rows(self, input_ids: torch.Tensor, lookback: torch.Tensor | None, out: torch.Tensor) -> None:
        """N-gram rows int64 ``[T, columns]`` into ``out``; reads the step's metadata, so it is a break in graphs."""
        metadata = layer_metadata(self.layers[0].attn.swa_cache.prefix)
        if metadata is not None and lookback is None:
            raise RuntimeError("Engram layers need lookback_token_ids: run this model with its own model state")
        rows = None if metadata is None else metadata.rows(input_ids.shape[0])
        out.copy_(ngram_rows(self.config, input_ids, lookback, rows))
