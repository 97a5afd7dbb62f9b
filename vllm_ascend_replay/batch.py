"""The replay batch: the kept rows of a step as a batch of their own, in buffers that exist from start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

from vllm_ascend_replay import kernels
from vllm_ascend_replay.layouts import WHOLE, Layout, owned_rows
from vllm_ascend_replay.plan import ReplayPlan, empty_plan

Context = Callable[[], AbstractContextManager[Any]]
"""Enters a forward context nested in the running one."""

States = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""What the replay layers return for ``N`` rows: streams ``[N, hc, H]``, pre mix ``[N, hc]``, aux states ``[N, H]``."""
GraphRun = Callable[["ReplayBatch", Sequence[torch.Tensor]], "States | None"]
"""``run(batch, states)``, states being the tensors ``[T, ...]`` that cross the cut."""


@dataclass
class KeptRows:
    """Views of the persistent buffers that describe the kept rows of one step.

    ``R`` requests in the step, ``R'`` of them with kept rows, ``K`` kept rows, ``N >= K`` rows with padding.
    """

    plan: ReplayPlan
    requests: np.ndarray
    """``[R']`` indices into the step's requests, on the host."""
    num_padded: int
    """``N``."""
    query_start_loc: torch.Tensor
    """int32 ``[R + 1]``: the step's device boundaries."""
    dropped_before: torch.Tensor
    """int32 ``[R + 1]``."""
    rows: torch.Tensor
    """int64 ``[N]``: step row of each kept row; ``kernels.PAD_ROW`` on padding."""
    boundaries: torch.Tensor
    """int32 ``[R' + 1]``: request boundaries of the replay batch."""
    positions: torch.Tensor
    """int64 ``[N]``."""
    is_padding: torch.Tensor
    """bool ``[N]``, filled by `padding_mask`."""
    slot_mappings: torch.Tensor
    """int64 ``[G, N]``; ``kernels.PAD_SLOT`` on padding."""
    kv_start: torch.Tensor
    """int32 ``[R']``: lower bound of the late layers' window."""
    replay_start: torch.Tensor
    """int32 ``[R']``: lower bound of the cut layer's window."""
    host_boundaries: np.ndarray | None = None
    """``[R + 1]``: the step's boundaries, where the host's are the device's for certain."""
    _masked: bool = False

    def padding_mask(self) -> torch.Tensor:
        """``is_padding``, computed when it is first asked for."""
        if not self._masked:
            self._masked = True
            torch.lt(self.rows, 0, out=self.is_padding)
        return self.is_padding

    def gather(
        self, states: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None, *, layout: Layout = WHOLE
    ) -> Sequence[torch.Tensor]:
        """The kept rows of ``states`` (each ``[T, ...]``): tensors ``[N, ...]``, zero on padding rows.

        Args:
            states: what crosses the cut.
            out: where to, tensors ``[N, ...]``; default new ones.
            layout: how the states lie over the ranks. If they are sharded, ``states`` and the result are this rank's
                chunks, and ``out`` is not used.
        """
        if layout.size > 1:
            return layout.gather(states, self.rows, self.owned(states[0].shape[0], layout.size))
        if out is None:
            out = [state.new_empty((self.num_padded, *state.shape[1:])) for state in states]
        kernels.gather_states(self.rows, [state.contiguous() for state in states], out)
        return out

    def owned(self, share: int, size: int) -> np.ndarray | None:
        """How many kept rows come before each rank's ``share`` rows of the step, if the host knows; ``[size + 1]``."""
        if not self.plan.num_rows:
            return np.zeros(size + 1, dtype=np.int64)
        if self.host_boundaries is None:
            return None
        return owned_rows(self.plan, self.host_boundaries, share, size)

    def scatter(self, values: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """Compact ``values`` (each ``[N, H]``) as ``[num_tokens, H]``; rows that were not kept are zero."""
        out = [value.new_empty((num_tokens, *value.shape[1:])) for value in values]
        kernels.scatter_rows(
            [value.contiguous() for value in values],
            out,
            query_start_loc=self.query_start_loc,
            dropped_before=self.dropped_before,
            rows=self.rows,
        )
        return out


@dataclass
class ReplayBatch:
    """What the tail of one forward runs on. ``kept is None``: no rank kept a row, the replay layers do not run."""

    kept: KeptRows | None
    cut_context: Context | None = None
    """Context of the cut layer: its window KV exists for every row."""
    late_context: Context | None = None
    """Context of the late layers: their window KV exists from ``kv_start`` on."""
    graph: GraphRun | None = None
    """Runs the batch out of a captured graph; returns ``None`` when the batch must run eagerly after all."""


class ReplayBuffers:
    """Persistent device buffers of the replay batch, sized once."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int, num_groups: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Rows of slots begin on lines of their own: on Ascend, programs must not share 32 bytes that they write.
        max_num_tokens += -max_num_tokens % 4
        self.rows = zeros(max_num_tokens, dtype=torch.int64)
        self.boundaries = zeros(max_num_reqs + 1)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.is_padding = zeros(max_num_tokens, dtype=torch.bool)
        self.slot_mappings = zeros(num_groups, max_num_tokens, dtype=torch.int64)
        self.seq_lens = zeros(max_num_reqs)
        self.block_tables: list[torch.Tensor] = []
        # One upload a step: dropped_before [R + 1], requests, kv_start and replay_start [R'].
        self._uploaded = zeros(4 * max_num_reqs + 1)
        self._requests = self._uploaded[:0]
        self._staging = UvaBufferPool(4 * max_num_reqs + 1, torch.int32)

    def warm_up(self, slot_mappings: torch.Tensor, positions: torch.Tensor) -> None:
        """Compile the gather on these buffers, so that nothing compiles while serving."""
        device = self.rows.device
        self.fill(
            empty_plan(np.zeros(1, dtype=np.int32)),
            query_start_loc=torch.zeros(2, dtype=torch.int32, device=device),
            positions=positions,
            slot_mappings=slot_mappings,
            replay_start=np.zeros(1, dtype=np.int32),
            num_padded=1,
        )

    def fill(
        self,
        plan: ReplayPlan,
        *,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        slot_mappings: torch.Tensor,
        replay_start: np.ndarray,
        num_padded: int,
        host_boundaries: np.ndarray | None = None,
    ) -> KeptRows:
        """Gather the kept rows of a step into the buffers: one upload and one launch.

        Args:
            plan: the step's plan for ``R`` requests.
            query_start_loc: int32 ``[R + 1]``, the step's device boundaries.
            positions: int64 ``[>= T]``.
            slot_mappings: int64 ``[G, >= T]``.
            replay_start: int32 ``[R]`` on the host.
            num_padded: rows of the replay batch, ``>= max(plan.num_rows, 1)``. A plan without rows gets one padding
                row, owned by request 0.
            host_boundaries: ``[R + 1]``, where they are the device's for certain.
        """
        requests = plan.requests
        only_padding = len(requests) == 0
        if only_padding:
            requests = np.zeros(1, dtype=np.int32)
        ends = np.cumsum([len(plan.dropped_before)] + [len(requests)] * 3)
        packed = np.concatenate(
            (
                plan.dropped_before,
                requests,
                np.zeros_like(requests) if only_padding else plan.kv_start[requests],
                np.zeros_like(requests) if only_padding else replay_start[requests],
            )
        )
        uploaded = self._staging.copy_to_gpu(packed, out=self._uploaded[: len(packed)])
        dropped_before = uploaded[: ends[0]]
        kept = KeptRows(
            plan=plan,
            requests=requests,
            num_padded=num_padded,
            query_start_loc=query_start_loc,
            dropped_before=dropped_before,
            rows=self.rows[:num_padded],
            boundaries=self.boundaries[: len(requests) + 1],
            positions=self.positions[:num_padded],
            is_padding=self.is_padding[:num_padded],
            slot_mappings=self.slot_mappings[:, :num_padded],
            kv_start=uploaded[ends[1] : ends[2]],
            replay_start=uploaded[ends[2] : ends[3]],
            host_boundaries=host_boundaries,
        )
        kernels.gather_batch(
            query_start_loc=query_start_loc,
            dropped_before=dropped_before,
            requests=uploaded[ends[0] : ends[1]],
            positions=positions,
            slot_mappings=slot_mappings,
            rows=kept.rows,
            boundaries=kept.boundaries,
            kept_positions=kept.positions,
            kept_slot_mappings=kept.slot_mappings,
            num_padded=num_padded,
        )
        if only_padding:
            # The padding row is a request of one row at position 0: whatever it reads is dropped.
            kept.boundaries[1:].fill_(1)
        self._requests = uploaded[ends[0] : ends[1]]
        return kept

    def select_requests(
        self, kept: KeptRows, seq_lens: torch.Tensor, block_tables: Sequence[torch.Tensor], num_reqs: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Device sequence lengths int32 ``[R']`` and block tables (each ``[R', n]``) of the requests with kept rows."""
        count = len(kept.requests)
        if count == num_reqs and kept.plan.num_rows:
            return seq_lens[:num_reqs], tuple(table[:num_reqs] for table in block_tables)
        if not self.block_tables:
            limit = len(self.seq_lens)
            self.block_tables = [table.new_zeros((limit, *table.shape[1:])) for table in block_tables]
        tables = []
        for buffer, table in zip(self.block_tables, block_tables):
            width = table.shape[1]
            tables.append(torch.index_select(table, 0, self._requests, out=buffer[:count, :width]))
        if kept.plan.num_rows:
            lens = torch.index_select(seq_lens, 0, self._requests, out=self.seq_lens[:count])
        else:
            lens = self.seq_lens[:count].fill_(1)
        return lens, tuple(tables)


def shrink_input_batch(input_batch: Any, kept: KeptRows, seq_lens: torch.Tensor) -> Any:
    """The step's ``InputBatch`` reduced to the kept rows, for attention metadata only.

    The sampling fields and ``input_ids`` are carried over from the step and must not be read. Fields that a vLLM
    version does not have are left out; fields of a host's subclass stay as they are.
    """
    at, lens = kept.requests, kept.plan.kept_lens[kept.requests]
    if not kept.plan.num_rows:
        lens = np.ones(1, dtype=np.int32)
    boundaries = np.zeros(len(at) + 1, dtype=np.int32)
    np.cumsum(lens, out=boundaries[1:])
    upper = input_batch.seq_lens_cpu_upper_bound[torch.from_numpy(at.astype(np.int64))]
    if not kept.plan.num_rows:
        upper = torch.ones_like(upper)
    # Adaptive verification may lengthen the decodes on the device, up to the step's own bound.
    longest = max(int(lens.max()), getattr(input_batch, "max_query_len", None) or 0)
    values = {
        "req_ids": [input_batch.req_ids[i] for i in at],
        "num_reqs": len(at),
        "num_reqs_after_padding": len(at),
        "idx_mapping_np": input_batch.idx_mapping_np[at],
        "num_scheduled_tokens": lens,
        "num_tokens": int(boundaries[-1]),
        "num_tokens_after_padding": kept.num_padded,
        "query_start_loc": kept.boundaries,
        "query_start_loc_np": boundaries,
        "seq_lens": seq_lens,
        "seq_lens_cpu_upper_bound": upper,
        "num_computed_tokens_np": input_batch.num_computed_tokens_np[at],
        "prefill_len_np": input_batch.prefill_len_np[at],
        "num_computed_prefill_tokens_np": input_batch.num_computed_prefill_tokens_np[at],
        "is_prefilling_np": input_batch.is_prefilling_np[at],
        "positions": kept.positions,
        "max_query_len": longest,
        "fast_prefill": None,
        "prompt_lens": None,
        "dcp_local_seq_lens": None,
        "prefill_runs_as_decode_np": None,
    }
    known = {field.name for field in fields(input_batch)}
    return replace(input_batch, **{name: value for name, value in values.items() if name in known})
