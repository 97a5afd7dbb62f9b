"""`ReplayModelState`: plans, agrees and prepares the replay batch of every step, whatever the host.

The host (a model state of vLLM or vllm-ascend with this mixin) owns ``prepare_attn`` in its version's signature: it
calls its parent once and then ``self._prepare_replay(...)``. What the mixin asks of a host is `ReplayHost`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import (
    get_dp_group,
    get_tensor_model_parallel_rank,
    model_parallel_is_initialized,
)
from vllm.forward_context import DPMetadata
from vllm.logger import init_logger
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.worker_base import WorkerBase

from vllm_ascend_replay import stats
from vllm_ascend_replay.agreement import Agreement, agree, alone
from vllm_ascend_replay.batch import KeptRows, ReplayBatch, ReplayBuffers, leading
from vllm_ascend_replay.config import ReplaySettings
from vllm_ascend_replay.graphs import GraphHost, ReplayGraphs, choose_sizes, free_bytes
from vllm_ascend_replay.ladder import break_out_size
from vllm_ascend_replay.layouts import WHOLE
from vllm_ascend_replay.plan import (
    ReplayPlan,
    bounded_prefills,
    empty_plan,
    identity_plan,
    lowers_into_unwritten,
    plan_replay,
)
from vllm_ascend_replay.support import breakable_graphs_enabled, graphs_off_reason
from vllm_ascend_replay.tail import ReplayTail

logger = init_logger("vllm.vllm_ascend_replay")


@dataclass(frozen=True)
class StepInputs:
    """What ``prepare_attn`` was given for the step."""

    input_batch: Any
    block_tables: tuple[torch.Tensor, ...]
    """Per KV cache group ``[R, n]`` int32."""
    slot_mappings: torch.Tensor
    """int64 ``[G, T_pad]``."""
    attn_groups: Any
    kv_cache_config: Any
    replay_start: np.ndarray
    """int32 ``[R]``, see `ReplayModelState.replay_starts`."""


class ReplayHost(Protocol):
    """What the core asks of a host."""

    window_align: int
    """First kept positions must be multiples of this."""

    def is_dummy_batch(self, input_batch: Any) -> bool:
        """Whether nobody reads this batch's rows (warm-up, an idle rank's share of a step)."""

    def whole_batch(self, input_batch: Any) -> Any:
        """The batch of which ``input_batch`` is this rank's share (context parallelism), or itself."""

    def share_plan(self, plan: ReplayPlan, input_batch: Any) -> ReplayPlan:
        """What the plan of the whole batch is for this rank's share of its rows."""

    def request_keeps_rows(self, new_request: Any) -> bool:
        """Whether every prompt row of the request is read."""

    def request_replay_start(self, new_request: Any) -> int:
        """First position that a prefix hit replays on the encoder side; 0: none."""

    def build_replay_batch(self, step: StepInputs, kept: KeptRows, dp_metadata: Any) -> ReplayBatch:
        """Attention metadata and nested forward contexts for the kept rows."""

    def forget_attention_groups(self) -> None:
        """Drop whatever was made from the attention groups; the next batch makes it anew."""


def keeps_every_row(sampling_params: Any) -> bool:
    """Whether a request reads the log-probabilities of its prompt's rows (either field, where the version has it)."""
    return sampling_params is not None and (
        getattr(sampling_params, "prompt_logprobs", None) is not None
        or getattr(sampling_params, "prompt_logprob_token_ids", None) is not None
    )


class ReplayModelState:
    """Mixin over a host's model state. Inert until `init_replay` is called."""

    replay_tail: ReplayTail | None = None
    replay_settings: ReplaySettings
    replay_buffers: ReplayBuffers | None = None
    replay_graphs: ReplayGraphs | None = None
    replay_request_factor = 1
    """Requests that a rank's share of a batch has at most, for each request of the batch."""

    # Of the host's model state.
    vllm_config: VllmConfig
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int

    def init_replay(self, host: ReplayHost, tail: ReplayTail, settings: ReplaySettings, *, window: int) -> None:
        """Turn decoder replay on for this model state.

        Args:
            host: usually the model state itself.
            tail: the model's tail, whose ``batch`` is set every step.
            settings: validated settings.
            window: the late layers' sliding window in tokens.
        """
        self.replay_host = host
        self.replay_settings = settings
        self.replay_window = window
        self.replay_keep_last = settings.keep_last(window=window, num_late_layers=len(tail.layers) - 1)
        self.replay_starts_np = np.zeros(self.max_num_reqs, dtype=np.int32)
        self.replay_keeps_rows_np = np.zeros(self.max_num_reqs, dtype=bool)
        self.replay_tail = tail
        self._replay_seen = False
        compilation = self.vllm_config.compilation_config
        tail.break_out_from = (
            break_out_size(settings.policy, compilation, window) if breakable_graphs_enabled() else None
        )
        self._report_stats()

    def init_replay_graphs(self, model: Any, graph_host: GraphHost) -> None:
        """Run the replay layers in graphs where that is possible, else say why not. Call it after `init_replay`.

        Args:
            model: as for `support.unsupported_reason`.
            graph_host: what the graphs need of the host.

        Raises:
            SettingError: graph sizes that are not allowed.
        """
        tail, settings, compilation = self.replay_tail, self.replay_settings, self.vllm_config.compilation_config
        if tail is None or not settings.graphs or not getattr(compilation, "cudagraph_decoder_replay", True):
            return
        sizes = choose_sizes(
            settings,
            self.vllm_config,
            graph_host,
            window=self.replay_window,
            keep_last=self.replay_keep_last,
            num_layers=len(tail.layers),
            align=self.replay_host.window_align,
        )
        reason = graphs_off_reason(self.vllm_config, model)
        if reason is None and not sizes:
            reason = "the device's streams hold none of them"
        if reason is None and tail.layout is not WHOLE:
            reason = "the states that cross the cut are spread over ranks, and graphs gather whole rows"
        if reason is not None:
            # Asked for on purpose: no graph at all. Anything else is worth a warning.
            say = logger.info if self.vllm_config.model_config.enforce_eager else logger.warning
            say("decoder replay runs its layers eagerly, not in graphs: %s", reason)
            return
        self.replay_graphs = ReplayGraphs(
            tail, sizes, host=graph_host, vllm_config=self.vllm_config, device=self.device, debug=settings.debug
        )

    def _report_stats(self) -> None:
        """Hand out this process's counters: one worker of each tensor-parallel group speaks for it."""
        # Workers are asked by the name of a method; replay off leaves vLLM's class as it was.
        WorkerBase.ascend_replay_stats = lambda worker: stats.snapshot()  # type: ignore[attr-defined]
        if not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0:
            stats.start_reporting(self.replay_settings.log_every, self.vllm_config.parallel_config.data_parallel_rank)

    def track_replay_request(self, req_index: int, new_request: Any) -> None:
        """Remember what the plan must know of a new (or resumed) request. Call it from ``add_request``."""
        if self.replay_tail is None:
            return
        self.replay_starts_np[req_index] = self.replay_host.request_replay_start(new_request)
        self.replay_keeps_rows_np[req_index] = self.replay_host.request_keeps_rows(new_request)

    def whole_batch(self, input_batch: Any) -> Any:
        return input_batch

    def share_plan(self, plan: ReplayPlan, input_batch: Any) -> ReplayPlan:
        return plan

    # -- the plan -----------------------------------------------------------------------------------------------

    def replay_starts(self, input_batch: Any) -> np.ndarray:
        """First position that each request's prefix hit replays, int32 ``[R]``; 0 where nothing is replayed."""
        n = input_batch.num_reqs
        starts = self.replay_starts_np[input_batch.idx_mapping_np[:n]]
        # Decodes stand above the hit.
        return starts * input_batch.is_prefilling_np[:n] if np.count_nonzero(starts) else starts

    def plan_step(self, input_batch: Any, replay_start: np.ndarray | None = None) -> ReplayPlan:
        """The step's plan; see `plan.plan_replay`. ``replay_start``: the batch's `replay_starts`, if at hand."""
        n = input_batch.num_reqs
        boundaries = input_batch.query_start_loc_np
        query = boundaries[1 : n + 1] - boundaries[:n]
        return plan_replay(
            # Exact while a request prefills, which is all the plan needs; for decodes the host may only know a bound.
            num_computed=input_batch.num_computed_prefill_tokens_np[:n],
            query_lens=query,
            prefill_lens=input_batch.prefill_len_np[:n],
            is_prefilling=input_batch.is_prefilling_np[:n],
            keeps_rows=self.replay_keeps_rows_np[input_batch.idx_mapping_np[:n]],
            replay_start=self.replay_starts(input_batch) if replay_start is None else replay_start,
            window=self.replay_window,
            keep_last=self.replay_keep_last,
            policy=self.replay_settings.policy,
            min_saved=self.replay_settings.min_saved,
            align=self.replay_host.window_align,
        )

    def forbids_decode_graph(
        self, idx_mapping_np: np.ndarray, num_computed_np: np.ndarray, prefill_len_np: np.ndarray
    ) -> bool:
        """Whether a batch of one-token rows must not run as a FULL decode graph.

        vLLM lets any prefill row with one new token and a context run as a decode. A FULL graph runs every row
        through the late layers without their ``kv_start``, which is right for a prompt's tail only.
        """
        if self.replay_tail is None or self.replay_settings.policy != "final":
            return False
        bounded = bounded_prefills(
            prefill_lens=prefill_len_np,
            keeps_rows=self.replay_keeps_rows_np[idx_mapping_np],
            replay_start=self.replay_starts_np[idx_mapping_np],
            keep_last=self.replay_keep_last,
            min_saved=self.replay_settings.min_saved,
            align=self.replay_host.window_align,
        )
        return lowers_into_unwritten(num_computed=num_computed_np, prefill_lens=prefill_len_np, bounded=bounded)

    # -- a step -------------------------------------------------------------------------------------------------

    def _prepare_replay(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        *,
        for_capture: bool = False,
    ) -> None:
        """Set the tail's replay batch for this step, or none. Called once by the host's ``prepare_attn``."""
        tail = self.replay_tail
        if tail is None:
            return
        tail.batch = None
        if self.replay_buffers is None or self.replay_buffers.num_groups != slot_mappings.shape[0]:
            # Memory profiling may run with other KV cache groups than serving.
            self._allocate_replay_buffers(slot_mappings, input_batch.positions)
        dummy = self.replay_host.is_dummy_batch(input_batch)
        breaks_out = cudagraph_mode == CUDAGraphMode.PIECEWISE and tail.breaks_out(input_batch.num_tokens_after_padding)
        if for_capture or (cudagraph_mode != CUDAGraphMode.NONE and not breaks_out):
            # A graph runs every row; `forbids_decode_graph` keeps bounded prompts out of it.
            if not dummy:
                self._count_full(input_batch, "model graph")
            return
        ranks = self.vllm_config.parallel_config.data_parallel_size
        # Ranks that share a batch's rows decide alike, whatever their shares are.
        whole = input_batch if dummy else self.replay_host.whole_batch(input_batch)
        if ranks == 1 and (dummy or not (whole.has_prefill or breaks_out)):
            if not dummy:
                self._count_full(input_batch, None)
            return
        n = input_batch.num_reqs
        starts = self.replay_starts(input_batch)
        if dummy:
            plan = empty_plan(np.diff(input_batch.query_start_loc_np[: n + 1]))
        else:
            plan = self.plan_step(whole, starts if whole is input_batch else None)
            plan = self.replay_host.share_plan(plan, input_batch)
        agreement = self._agree(plan, ranks)
        if not agreement.replays:
            if not dummy:
                self._count_full(input_batch, "no prompt of the step is bounded" if whole.has_prefill else None)
            if not breaks_out:
                return
        step = StepInputs(input_batch, block_tables, slot_mappings, attn_groups, kv_cache_config, starts)
        tail.batch = batch = self._build_replay(step, plan, agreement)
        if not agreement.replays:
            return
        padded = 0 if batch.kept is None else batch.kept.num_padded - plan.num_rows
        if not dummy:
            graph = self.replay_graphs is not None and batch.graph is not None
            stats.current().count_replay(int(input_batch.num_tokens), plan.num_rows, padded, graph=graph)
        if not self._replay_seen:
            self._replay_seen = True
            logger.info(
                "decoder replay is running: this step's replay layers run %d of %d rows",
                plan.num_rows,
                input_batch.num_tokens,
            )

    def _build_replay(self, step: StepInputs, plan: ReplayPlan, agreement: Agreement) -> ReplayBatch:
        if agreement.skips:
            return ReplayBatch(kept=None)
        graphs = self.replay_graphs
        # Every rank runs the bucket of the largest rank, so that their experts exchange rows of one shape.
        size = None if graphs is None else graphs.size_for(max(*agreement.rows, 1))
        rows = agreement.padded_rows() if size is None else (size,) * len(agreement.rows)
        batch = self._replay_batch(step, plan, max(plan.rows_to_run, 1) if size is None else size, rows)
        if graphs is not None and size is not None and graphs.runs(size):
            batch.graph = graphs
        return batch

    def _replay_batch(
        self, step: StepInputs, plan: ReplayPlan, num_padded: int, rows_across_dp: tuple[int, ...]
    ) -> ReplayBatch:
        """The replay batch of ``plan``, padded to ``num_padded`` rows; ``rows_across_dp`` are those of every rank."""
        n = step.input_batch.num_reqs
        parallel = self.vllm_config.parallel_config
        dp_metadata = None
        # Sequence-parallel experts read each rank's rows from it even without data parallelism.
        if parallel.data_parallel_size > 1 or getattr(parallel, "use_sequence_parallel_moe", False):
            across = torch.tensor(rows_across_dp, dtype=torch.int32)
            dp_metadata = DPMetadata.make(parallel, num_padded, across)
        assert self.replay_buffers is not None
        # Adaptive verification resizes drafts on the device only.
        exact = not getattr(step.input_batch, "num_draft_tokens", 0)
        kept = self.replay_buffers.fill(
            plan,
            query_start_loc=leading(step.input_batch.query_start_loc, n + 1),
            positions=step.input_batch.positions,
            slot_mappings=step.slot_mappings,
            replay_start=step.replay_start,
            num_padded=num_padded,
            host_boundaries=step.input_batch.query_start_loc_np[: n + 1] if exact else None,
        )
        return self.replay_host.build_replay_batch(step, kept, dp_metadata)

    # -- graphs -------------------------------------------------------------------------------------------------

    def forget_attention_groups(self) -> None:
        """Drop copies of attention groups. Memory profiling runs with groups from before the KV cache exists."""

    def capture_inner_cudagraphs(
        self, input_buffers: Any, block_tables: Any, attn_groups: Any, kv_cache_config: Any
    ) -> None:
        """Capture the replay graphs: vLLM >= 0.32 calls it after the model's capture, before the speculator's."""
        inherited = getattr(super(), "capture_inner_cudagraphs", None)
        if inherited is not None:
            inherited(input_buffers, block_tables, attn_groups, kv_cache_config)
        graphs = self.replay_graphs
        if graphs is None:
            return
        self.replay_host.forget_attention_groups()
        if self.replay_buffers is not None:
            self.replay_buffers.block_tables = []
        ranks = self.vllm_config.parallel_config.data_parallel_size

        def prepare(rows: int) -> ReplayBatch:
            # A dummy step, through the code and on the buffers of a real one; the dummy slots write nothing.
            num_reqs = min(rows, self.max_num_reqs)
            batch = graphs.host.make_dummy_batch(num_reqs, rows, input_buffers)
            slots = block_tables.get_dummy_slot_mappings(rows)
            if self.replay_buffers is None:
                self._allocate_replay_buffers(slots, batch.positions)
            tables = block_tables.get_dummy_block_tables(num_reqs)
            query = np.diff(batch.query_start_loc_np[: num_reqs + 1])
            plan = identity_plan(query, np.zeros(num_reqs, dtype=np.int32))
            step = StepInputs(batch, tables, slots, attn_groups, kv_cache_config, self.replay_starts(batch))
            return self._replay_batch(step, plan, rows, (rows,) * ranks)

        graphs.capture(prepare)

    def _agree(self, plan: ReplayPlan, ranks: int) -> Agreement:
        if ranks == 1:
            return alone(plan.needs_replay, plan.rows_to_run)
        return agree(
            plan.needs_replay,
            plan.rows_to_run,
            rank=self.vllm_config.parallel_config.data_parallel_rank,
            ranks=ranks,
            all_reduce=lambda posted: dist.all_reduce(posted, group=get_dp_group().cpu_group),
        )

    def _count_full(self, input_batch: Any, reason: str | None) -> None:
        stats.current().count_full(int(input_batch.num_tokens), reason if input_batch.has_prefill else None)

    def _allocate_replay_buffers(self, slot_mappings: torch.Tensor, positions: torch.Tensor) -> None:
        """Make the buffers and compile the kernels on them: the first (start-up, dummy) batch does it."""
        self.replay_buffers = buffers = ReplayBuffers(
            self.max_num_reqs * self.replay_request_factor, self.max_num_tokens, slot_mappings.shape[0], self.device
        )
        buffers.warm_up(slot_mappings, positions)


def forbid_bounded_decode_graphs(runner_cls: type) -> None:
    """Make a model runner ask `ReplayModelState.forbids_decode_graph` before it may pick a FULL decode graph.

    On vLLM >= 0.32 the runner settles the batch's graph before any hook of the model state runs, so its
    ``gather_batch_req_state`` is wrapped. Before, no prefill row goes to decode graphs.
    """
    real = getattr(runner_cls, "gather_batch_req_state", None)
    if real is None or getattr(real, "guards_bounded_prefills", False):
        return

    @functools.wraps(real)
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> tuple[Any, int | None]:
        batch, uniform = real(self, scheduler_output, dummy_run)
        state = getattr(self, "model_state", None)
        if (
            batch is not None
            and batch.has_prefill
            and getattr(batch, "decode_graph_eligible", False)
            and isinstance(state, ReplayModelState)
        ):
            prefilling = batch.is_prefilling_np
            if state.forbids_decode_graph(
                batch.idx_mapping_np[prefilling],
                batch.num_computed_prefill_tokens_np[prefilling],
                batch.prefill_len_np[prefilling],
            ):
                # A named tuple, not a dataclass.
                return batch._replace(decode_graph_eligible=False), None
        return batch, uniform

    gather_batch_req_state.guards_bounded_prefills = True  # type: ignore[attr-defined]
    runner_cls.gather_batch_req_state = gather_batch_req_state  # type: ignore[attr-defined]


def capture_replay_graphs(runner_cls: type) -> None:
    """Make a model runner capture the replay graphs where vLLM itself does not ask for them.

    vLLM >= 0.32 calls `ReplayModelState.capture_inner_cudagraphs`, but only if the model has graphs of its own; 0.30
    never does. There the replay graphs are captured right after the model's, before a speculator's.
    """
    real = runner_cls.capture_model  # type: ignore[attr-defined]
    if getattr(real, "captures_replay_graphs", False):
        return

    @functools.wraps(real)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> int:
        state = getattr(self, "model_state", None)
        graphs = state.replay_graphs if isinstance(state, ReplayModelState) else None
        if state is None or graphs is None:
            return real(self, *args, **kwargs)
        begun, free = graphs.captures, free_bytes()

        def capture() -> None:
            if graphs.captures == begun:
                buffers = getattr(self, "pcp_manager", None) or self
                state.capture_inner_cudagraphs(
                    buffers.input_buffers, self.block_tables, self.attn_groups, self.kv_cache_config
                )

        if hasattr(ModelState, "capture_inner_cudagraphs"):
            taken = real(self, *args, **kwargs)
        else:
            manager = self.cudagraph_manager
            capture_model_graphs = manager.capture

            def capture_both(*args: Any, **kwargs: Any) -> None:
                capture_model_graphs(*args, **kwargs)
                capture()

            manager.capture = capture_both
            try:
                taken = real(self, *args, **kwargs)
            finally:
                del manager.capture
        if graphs.captures == begun:
            # The model has no graphs of its own.
            with torch.inference_mode(), freeze_gc_for_cudagraph_capture():
                capture()
            taken = max(free - free_bytes(), 0)
        return taken

    capture_model.captures_replay_graphs = True  # type: ignore[attr-defined]
    runner_cls.capture_model = capture_model  # type: ignore[attr-defined]
