"""vllm-ascend's model state with decoder replay: the core's mixin over whatever class the model names."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from vllm_ascend_replay.ascend import facts
from vllm_ascend_replay.ascend.context import replay_context
from vllm_ascend_replay.ascend.context_parallel import ContextSharing
from vllm_ascend_replay.ascend.graphs import make_graph_host
from vllm_ascend_replay.ascend.metadata import ReplayRequests, TailLayout, TailMetadata, unreachable_pages
from vllm_ascend_replay.ascend.prefix_cap import hit_limit
from vllm_ascend_replay.ascend.seams import GRAPH_SEAMS, missing_seam
from vllm_ascend_replay.batch import KeptRows, ReplayBatch
from vllm_ascend_replay.config import read_settings
from vllm_ascend_replay.model_state import (
    ReplayModelState,
    StepInputs,
    capture_replay_graphs,
    forbid_bounded_decode_graphs,
    keeps_every_row,
)
from vllm_ascend_replay.plan import ReplayPlan
from vllm_ascend_replay.tail import ReplayTail

logger = init_logger("vllm.vllm_ascend_replay")


@functools.cache
def make_state_cls(base: type) -> type:
    """The replay state over `base`, the class that the parent model's `get_model_state_cls()` returned."""
    return type(f"Replay{base.__name__}", (AscendReplayState, base), {"__module__": __name__})


def text_model(model: Any) -> Any:
    """The text model inside a vision wrapper or a language model."""
    language = getattr(model, "language_model", model)
    return language.model


class AscendReplayState(ReplayModelState):
    """Mixin over `AscendModelState`; implements the core's `ReplayHost`."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        text = text_model(model)
        tail = text.replay_tail
        settings = read_settings()
        self._layout = TailLayout.of(list(text.layers), tail.cut)
        self._tail_metadata: TailMetadata | None = None
        self._checked_cache: Any = None
        self.window_align = self._layout.window_align
        self._sharing: ContextSharing | None = None
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            self._sharing = ContextSharing(vllm_config.parallel_config.prefill_context_parallel_size, device)
            self.replay_request_factor = ContextSharing.REQUEST_FACTOR
        self.init_replay(self, tail, settings, window=self._layout.window)
        logger.info(
            "decoder replay is on: policy %s, layers %d-%d of %d run on the last %d rows of a prompt (window %d, "
            "window starts at multiples of %d)",
            settings.policy,
            tail.cut,
            len(text.layers) - 1,
            len(text.layers),
            self.replay_keep_last,
            self._layout.window,
            self.window_align,
        )
        self._turn_graphs_on(tail)

    def _turn_graphs_on(self, tail: ReplayTail) -> None:
        """Run the replay layers in graphs where that is possible; else one line says why they run eagerly."""
        from vllm_ascend.worker.v2.model_runner import NPUModelRunner

        forbid_bounded_decode_graphs(NPUModelRunner)
        missing = missing_seam(GRAPH_SEAMS)
        if missing is not None:
            logger.warning("decoder replay runs its layers eagerly, not in graphs: %s", missing)
            return
        self.init_replay_graphs(facts(self.vllm_config), make_graph_host(self.vllm_config, tail, self.device))
        if self.replay_graphs is not None:
            capture_replay_graphs(NPUModelRunner)

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: Any, *args: Any, **kwargs: Any) -> None:
        """Track the request; refuses one that starts where its late layers would read KV nobody wrote.

        Raises:
            RuntimeError: a bounded prompt starts beyond its first kept position, so somebody took a prefix hit
                without the cap of `prefix_cap`.
        """
        self.track_replay_request(req_index, new_req_data)
        self._check_start(new_req_data)
        super().add_request(req_index, new_req_data, *args, **kwargs)  # type: ignore[misc]

    def _check_start(self, new_request: Any) -> None:
        if self.replay_tail is None or self.replay_settings.policy != "final":
            return
        limit = hit_limit(
            len(new_request.prefill_token_ids),
            keeps_rows=self.request_keeps_rows(new_request),
            keep_last=self.replay_keep_last,
            min_saved=self.replay_settings.min_saved,
            align=self.window_align,
        )
        start = new_request.num_computed_tokens
        if limit and start > limit:
            raise RuntimeError(
                f"request {new_request.req_id} starts at {start} computed tokens; with decoder replay at most {limit} "
                "of its cached tokens are usable. The scheduler does not cap prefix hits: start with "
                "--no-enable-prefix-caching, or with ASCEND_REPLAY=0"
            )

    def request_keeps_rows(self, new_request: Any) -> bool:
        return keeps_every_row(new_request.sampling_params)

    def request_replay_start(self, new_request: Any) -> int:
        return int(getattr(new_request, "replay_start", 0))

    # -- a step -------------------------------------------------------------------------------------------------

    def is_dummy_batch(self, input_batch: Any) -> bool:
        return bool(input_batch.is_dummy)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        step = (input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config)
        metadata = super().prepare_attn(*step, for_capture=for_capture, **kwargs)  # type: ignore[misc]
        if self._checked_cache is not kv_cache_config:
            self._checked_cache = kv_cache_config
            self._check_addresses()
        self._prepare_replay(*step, for_capture=for_capture)
        return metadata

    def _check_addresses(self) -> None:
        """Turn replay off, before any step used it, where a KV cache plane is larger than page addresses reach.

        Raises:
            RuntimeError: the same with data parallelism, where ranks with caches of different sizes would disagree.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
        reason = unreachable_pages(caches)
        if reason is None or self.replay_tail is None:
            return
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError(f"decoder replay cannot run: {reason}, or with ASCEND_REPLAY=0")
        logger.warning("decoder replay is off: %s", reason)
        self.replay_tail = self.replay_graphs = None
        text_model(self.model).drop_tail()  # type: ignore[attr-defined]

    def finish_execution(self, *, failed: bool) -> None:
        if self.replay_tail is not None:
            self.replay_tail.batch = None
        if self._sharing is not None:
            self._sharing.forget()
        super().finish_execution(failed=failed)  # type: ignore[misc]

    # -- context parallelism ------------------------------------------------------------------------------------

    def whole_batch(self, input_batch: Any) -> Any:
        return input_batch if self._sharing is None else self.pcp_manager.global_batch  # type: ignore[attr-defined]

    def share_plan(self, plan: ReplayPlan, input_batch: Any) -> ReplayPlan:
        return plan if self._sharing is None else self._sharing.share_plan(plan, self.pcp_manager)  # type: ignore[attr-defined]

    def _allocate_replay_buffers(self, slot_mappings: torch.Tensor, positions: torch.Tensor) -> None:
        super()._allocate_replay_buffers(slot_mappings, positions)
        if self._sharing is not None:
            self._sharing.allocate(self.max_num_reqs, self.max_num_tokens, slot_mappings, positions)

    # -- the replay batch ---------------------------------------------------------------------------------------

    def build_replay_batch(self, step: StepInputs, kept: KeptRows, dp_metadata: Any) -> ReplayBatch:
        if self._tail_metadata is None or self._tail_metadata.attn_groups is not step.attn_groups:
            self._tail_metadata = TailMetadata(
                self._layout,
                self.vllm_config,
                step.attn_groups,
                self.max_model_len,  # type: ignore[attr-defined]
            )
        requests = self._replay_requests(step, kept)
        share = None if self._sharing is None else self._sharing.share(step, kept, self.pcp_context)  # type: ignore[attr-defined]
        cut, late = self._tail_metadata.build(kept, requests, step.kv_cache_config, share)
        if share is None:
            assert self.replay_buffers is not None
            slots = self.replay_buffers.slots_by_layer(kept, step.kv_cache_config)
        else:
            slots = build_slot_mappings_by_layer(share.slot_mappings, step.kv_cache_config)
        assert self.replay_tail is not None
        layout = self.replay_tail.layout
        contexts = [replay_context(kept, m, slots, dp_metadata, self.vllm_config, layout) for m in (cut, late)]
        return ReplayBatch(kept, cut_context=contexts[0], late_context=contexts[1])

    def forget_attention_groups(self) -> None:
        self._tail_metadata = None

    def capture_inner_cudagraphs(self, *inputs: Any) -> None:
        text_model(self.model).place_aux_layers()  # type: ignore[attr-defined]
        super().capture_inner_cudagraphs(*inputs)

    def _replay_requests(self, step: StepInputs, kept: KeptRows) -> ReplayRequests:
        batch, at = step.input_batch, kept.requests
        assert self.replay_buffers is not None
        seq_lens, tables = self.replay_buffers.select_requests(kept, batch.seq_lens, step.block_tables, batch.num_reqs)
        if kept.plan.num_rows:
            row_lens, lens_np = kept.plan.kept_lens[at], batch.seq_lens_np[: batch.num_reqs][at]
            kv_start = kept.plan.kv_start[at]
        elif kept.plan.shared_rows:
            # Other ranks have rows: this one has a request without any, as vLLM's manager gives an empty rank.
            row_lens = lens_np = kv_start = np.zeros(1, dtype=np.int32)
            kept.boundaries.zero_()
            seq_lens.zero_()
        else:
            # One padding row: a request of one row at position 0.
            row_lens = lens_np = np.ones(1, dtype=np.int32)
            kv_start = np.zeros(1, dtype=np.int32)
        return ReplayRequests(
            seq_lens=seq_lens,
            seq_lens_np=lens_np.astype(np.int32),
            kv_start_np=kv_start,
            row_lens_np=row_lens,
            is_prefilling=torch.from_numpy(batch.is_prefilling_np[: batch.num_reqs][at]),
            block_tables=tables,
            attn_state=batch.attn_state,
            max_query_len=max(int(row_lens.max()), getattr(batch, "max_query_len", None) or 0),
        )
