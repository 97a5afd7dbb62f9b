"""vLLM's own decoder replay on the reference model. For benchmarks only: nothing serves with it.

vLLM's `DeepseekV41ModelState`, `DecoderReplayLayers` and replay graphs run as they are. What they ask of a model is
made here from the reference model:

* seven states cross the cut, as in vLLM's DeepSeek-V4.1: the last FFN's output ``[T, H]``, positions, input ids, pre,
  post and residual mixes, and the streams ``[T, hc, H]`` that entered that FFN. The FFN's hyper-connection is applied
  by whoever reads them: for every row before the cut layer's KV write, and for the kept rows once more.
* the sliding-window metadata builder must be a subclass of vLLM's, or it is told no replay start.
* collapse and final norm run on all rows of the step, since vLLM scatters the streams before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

from vllm_ascend_replay.reference.metadata import WindowBackend, WindowMetadataBuilder
from vllm_ascend_replay.reference.model import ReplayReferenceForCausalLM
from vllm_ascend_replay.reference.model_state import ReferenceModelState
from vllm_ascend_replay.tail import ReplayTail


class SharedWindowBuilder(WindowMetadataBuilder, DeepseekSparseSWAMetadataBuilder):
    """The reference model's window builder, recognised by both hosts."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        # Not the parents': vLLM's plans FlashMLA tiles for a model that runs none.
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)


class SharedWindowBackend(WindowBackend):
    @staticmethod
    def get_name() -> str:
        return "REPLAY_REFERENCE_WINDOW_SHARED"

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        return SharedWindowBuilder


class VllmTail:
    """Stands in `ReplayReferenceForCausalLM` where `ReplayTail` does, over vLLM's `DecoderReplayLayers`."""

    def __init__(self, model: ReplayReferenceForCausalLM) -> None:
        layers = list(model.layers)
        self.late, self.cut = layers[model.cut :], layers[model.cut]
        self.last_early = layers[model.cut - 1].hc_ffn
        self._spread = self.last_early.spread
        self.layers = DecoderReplayLayers(
            model.window,
            self._run_layers,
            self._write_kv,
            set(model.replay_metadata_prefixes),
            model.swa_prefixes[model.cut],
        )
        self._deferred: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def installed(self, model: ReplayReferenceForCausalLM) -> Iterator[None]:
        """Take the tail's place in ``model``, and the last FFN's hyper-connection from the layer before the cut."""
        ours: ReplayTail = model.tail
        model.tail = self
        self.last_early.spread = self._defer
        try:
            yield
        finally:
            model.tail = ours
            del self.last_early.spread

    def __call__(
        self, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arguments as for `ReplayTail`; ``streams`` are those that entered the last FFN before the cut."""
        hidden, post, comb = self._deferred
        self._deferred = ()
        streams, pre_mix = self.layers(hidden, positions, input_ids, pre_mix, post.unsqueeze(-1), comb, streams)
        return streams, pre_mix

    def finish(
        self, hidden: torch.Tensor, early_aux: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """vLLM has scattered the streams already; see `ReplayTail.finish`."""
        return hidden[:num_tokens], list(early_aux)

    def _defer(self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        self._deferred = y, post, comb
        return streams

    def _streams(
        self, hidden: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return self._spread(hidden, residual, post.squeeze(-1), comb)

    def _write_kv(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        pre_mix: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        self.cut.write_kv(positions, self._streams(hidden, post, comb, residual), pre_mix)

    def _run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        pre_mix: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        streams = self._streams(hidden, post, comb, residual)
        for layer in self.late:
            streams, pre_mix = layer(positions, streams, pre_mix, input_ids)
        return streams, pre_mix


class _WithReplayLayers:
    """The model as vLLM's state wants to see it."""

    def __init__(self, model: ReplayReferenceForCausalLM, layers: DecoderReplayLayers) -> None:
        self._model, self.decoder_replay_layers = model, layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class BothModelStates(ReferenceModelState):
    """This package's state, with vLLM's beside it on the same model, caches and engine.

    `use_vllm` hands the runner to vLLM's state while no request is running, so that both are measured in turn in one
    process. Model graphs are captured with this package's tail: steps that are measured must not run in one.
    """

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.vllm_tail = VllmTail(model)
        self.vllm_state = DeepseekV41ModelState(
            vllm_config,
            _WithReplayLayers(model, self.vllm_tail.layers),
            encoder_cache,
            device,
        )
        # Decode graphs read one buffer, whichever state filled it.
        self.vllm_state.lookback_token_ids = self._lookback if self._lookback.shape[1] else None

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.vllm_state._replay is None:
            # A start-up dummy: vLLM's state allocates its buffers and compiles its kernels.
            self.vllm_state.prepare_attn(*args, **kwargs)
            self.vllm_tail.layers.replay_batch = None
        return super().prepare_attn(*args, **kwargs)

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        super().capture_inner_cudagraphs(*args, **kwargs)
        self.vllm_state.capture_inner_cudagraphs(*args, **kwargs)

    def forget_attention_groups(self) -> None:
        super().forget_attention_groups()
        self.vllm_state._replay_attn_groups = None

    @contextmanager
    def use_vllm(self, runner: Any) -> Iterator[DeepseekV41ModelState]:
        """Let vLLM's state and tail run the steps of ``runner``."""
        runner.model_state = self.vllm_state
        try:
            with self.vllm_tail.installed(self.model):
                yield self.vllm_state
        finally:
            runner.model_state = self


class BenchmarkModel(ReplayReferenceForCausalLM):
    """The reference model with both states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.layers:
            layer.attn.swa_cache.backend = SharedWindowBackend

    @classmethod
    def get_model_state_cls(cls) -> type:
        return BothModelStates
