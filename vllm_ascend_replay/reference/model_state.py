"""The reference model's state: vLLM's default one, encoder-side replay, token lookback, and decoder replay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from vllm_ascend_replay import kernels
from vllm_ascend_replay.batch import KeptRows, ReplayBatch, shrink_input_batch
from vllm_ascend_replay.config import read_settings
from vllm_ascend_replay.graphs import GraphHost
from vllm_ascend_replay.model_state import (
    ReplayModelState,
    StepInputs,
    capture_replay_graphs,
    forbid_bounded_decode_graphs,
    keeps_every_row,
)
from vllm_ascend_replay.support import unsupported_reason
from vllm_ascend_replay.tail import replay_context

logger = init_logger("vllm.vllm_ascend_replay")


class WindowStarts(ModelSpecificAttnMetadata):
    """Hands the first position of which window KV exists to the sliding-window builders."""

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        if getattr(attn_metadata_builder, "takes_replay_start", False):
            return {"replay_start": self.start[:num_reqs]}
        return {}


class ReferenceModelState(ReplayModelState, DefaultModelState):
    """Runs the reference model in vLLM's Model Runner V2, with and without decoder replay."""

    window_align = 1

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        # Prefix hits are replayed on the encoder side whether or not decoder replay is on.
        self.replay_starts_np = np.zeros(self.max_num_reqs, dtype=np.int32)
        self._start = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._no_start = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._start_staging = UvaBufferPool(self.max_num_reqs, torch.int32)
        self._lookback = torch.full(
            (self.max_num_reqs, model.token_lookback_depth), -1, dtype=torch.int32, device=device
        )
        # (window replayed after a hit, indices of the cacheable groups), from the KV cache configuration.
        self._encoder: tuple[int, torch.Tensor] | None = None
        self._replay_groups: tuple[Any, Any] | None = None
        self._compressed_prefixes = [
            prefix for prefix in model.replay_metadata_prefixes if prefix not in model.swa_prefixes
        ]
        self._no_slots = torch.full((self.max_num_tokens,), kernels.PAD_SLOT, dtype=torch.int64, device=device)
        self._turn_replay_on(model)

    def _turn_replay_on(self, model: Any) -> None:
        settings = read_settings()
        wanted = settings.enabled and getattr(self.vllm_config.cache_config, "swa_bounded_replay", True)
        if not wanted:
            return
        # A number of kept rows below the model's window stops start-up here.
        settings.keep_last(window=model.window, num_late_layers=max(model.num_layers - model.cut - 1, 0))
        reason = unsupported_reason(self.vllm_config, model)
        if reason is not None:
            logger.warning("decoder replay is off: %s", reason)
            return
        self.init_replay(self, model.tail, settings, window=model.window)
        forbid_bounded_decode_graphs(_model_runner_class())
        self.init_replay_graphs(model, GraphHost(states=model.crossing_states(self.device)))
        capture_replay_graphs(_model_runner_class())
        logger.info(
            "decoder replay is on: policy %s, layers %d-%d of %d run on the last %d rows of a prompt (window %d)",
            settings.policy,
            model.cut,
            model.num_layers - 1,
            model.num_layers,
            self.replay_keep_last,
            model.window,
        )
        if settings.keep == "exact" and self.vllm_config.cache_config.enable_prefix_caching:
            logger.info(
                "decoder replay is lossless for cold prompts; after a prefix hit results equal those of encoder-side "
                "replay alone, which is an approximation of its own"
            )

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self.replay_starts_np[req_index] = self.request_replay_start(new_req_data)
        self.track_replay_request(req_index, new_req_data)

    def request_replay_start(self, new_request: Any) -> int:
        return int(getattr(new_request, "replay_start", 0))

    def request_keeps_rows(self, new_request: Any) -> bool:
        return keeps_every_row(new_request.sampling_params)

    def is_dummy_batch(self, input_batch: Any) -> bool:
        # Rows that are no prefill and have no context belong to nobody; a real decode has a context.
        n = input_batch.num_reqs
        return not (input_batch.is_prefilling_np[:n].any() or input_batch.num_computed_tokens_np[:n].any())

    # -- a step -------------------------------------------------------------------------------------------------

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        # What graphs are captured with; `prepare_inputs` refills it in place.
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if self._lookback.shape[1]:
            inputs["lookback_token_ids"] = self._lookback
        return inputs

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        if self._lookback.shape[1]:
            n = input_batch.num_reqs
            at = input_batch.idx_mapping[:n].long()
            before = req_states.num_computed_tokens.gpu[at].unsqueeze(1) - 1
            position = before - torch.arange(self._lookback.shape[1], device=self.device)
            tokens = req_states.all_token_ids.gpu[at.unsqueeze(1), position.clamp_min(0).long()]
            self._lookback.fill_(-1)
            self._lookback[:n] = torch.where(position >= 0, tokens, -1)
            inputs["lookback_token_ids"] = self._lookback
        return inputs

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: Any = None,
    ) -> dict[str, Any]:
        starts = self._encoder_side(input_batch, slot_mappings, kv_cache_config)
        metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            ubatch_idx=ubatch_idx,
            model_specific_attn_metadata=WindowStarts(starts),
        )
        self._prepare_replay(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
        )
        return metadata

    def _encoder_side(self, input_batch: Any, slot_mappings: torch.Tensor, kv_cache_config: Any) -> torch.Tensor:
        """Window starts of the step, int32 ``[R]``; pads the slots of replayed tokens in cacheable groups."""
        if self._encoder is None:
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            cacheable = [i for i, spec in enumerate(specs) if spec.prefix_cacheable]
            groups = torch.tensor(cacheable, dtype=torch.int32, device=self.device)
            self._encoder = max(spec.prefix_replay_tokens for spec in specs), groups
            # The first batch is a start-up dummy: compile the kernel now, on a request that replays nothing.
            kernels.pad_replayed_slots(
                slot_mappings,
                groups=groups,
                query_start_loc=self._no_start.new_zeros(2),
                positions=input_batch.positions,
                replay_start=self._no_start[:1],
                window=self._encoder[0],
            )
        window, groups = self._encoder
        n = input_batch.num_reqs
        if not window or not input_batch.has_prefill:
            # Decodes stand above the hit: no upload, no launch.
            return self._no_start
        start_np = self.replay_starts(input_batch)
        if not start_np.any():
            return self._no_start
        start = self._start_staging.copy_to_gpu(start_np, out=self._start[:n])
        kernels.pad_replayed_slots(
            slot_mappings,
            groups=groups,
            query_start_loc=input_batch.query_start_loc[: n + 1],
            positions=input_batch.positions,
            replay_start=start,
            window=window,
        )
        return self._start

    # -- the replay batch ---------------------------------------------------------------------------------------

    def build_replay_batch(self, step: StepInputs, kept: KeptRows, dp_metadata: Any) -> ReplayBatch:
        if self._replay_groups is None:
            model, cut_window = self.model, self.model.swa_prefixes[self.model.cut]
            others = frozenset(model.replay_metadata_prefixes) - {cut_window}
            self._replay_groups = (
                self._clone_groups(step.attn_groups, others),
                self._clone_groups(step.attn_groups, {cut_window}),
            )
        others_groups, cut_groups = self._replay_groups
        assert self.replay_buffers is not None
        seq_lens, tables = self.replay_buffers.select_requests(
            kept, step.input_batch.seq_lens, step.block_tables, step.input_batch.num_reqs
        )
        batch = shrink_input_batch(step.input_batch, kept, seq_lens)

        def build(groups: Any, start: torch.Tensor) -> dict[str, Any]:
            return DefaultModelState.prepare_attn(
                self,
                batch,
                CUDAGraphMode.NONE,
                tables,
                kept.slot_mappings,
                groups,
                step.kv_cache_config,
                model_specific_attn_metadata=WindowStarts(start),
            )

        # The cut layer wrote every row's window KV, so its window starts where the encoder side's does.
        metadata = build(others_groups, kept.kv_start)
        metadata.update(build(cut_groups, kept.replay_start))
        # Compressed KV and index keys of every row are written by then; a second write may round otherwise, and they
        # go to the prefix cache.
        for prefix in self._compressed_prefixes:
            metadata[prefix].slot_mapping = self._no_slots[: kept.num_padded]
        slots = self.replay_buffers.slots_by_layer(kept, step.kv_cache_config)
        context = replay_context(kept, metadata, slots, dp_metadata, self.model.layout)
        return ReplayBatch(kept, cut_context=context, late_context=context)

    def forget_attention_groups(self) -> None:
        self._replay_groups = None

    def _clone_groups(self, attn_groups: Any, prefixes: Collection[str]) -> list[list[Any]]:
        """The groups restricted to layers in ``prefixes``, with builders of their own.

        A builder keeps the metadata it built last, so the step's own builders must not build the replay batch's.
        """
        cloned = []
        for groups in attn_groups:
            mine = []
            for group in groups:
                names = [name for name in group.layer_names if name in prefixes]
                if names:
                    copy = replace(group, layer_names=names, metadata_builders=[])
                    copy.create_metadata_builders(self.vllm_config, self.device, group.kernel_block_size)
                    mine.append(copy)
            cloned.append(mine)
        return cloned


def _model_runner_class() -> type:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return GPUModelRunner
