"""Replay batches under MRV2's prefill context parallelism (PCP).

Every rank knows the whole batch and holds some segments of each prompt (DualChunkSwap: rank r has the r-th of `2 size`
chunks from either end) and all decodes. Replay moves no state: a rank keeps the kept rows it has, padded to the fullest
rank; a long prompt's are all on rank 0, and the others run every layer on padding for the collectives they owe. The
builders want what the kept rows of all ranks are (caches are whole on every rank), and how to put the ranks' rows, one
rank after the other, back into the order of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_ascend_replay.ascend.metadata import ContextShare
from vllm_ascend_replay.batch import KeptRows, ReplayBuffers, shrink_input_batch
from vllm_ascend_replay.kernels import PAD_SLOT
from vllm_ascend_replay.layouts import SharedRows, share_segments
from vllm_ascend_replay.model_state import StepInputs
from vllm_ascend_replay.plan import ReplayPlan, empty_plan


def segments_of(manager: Any, whole: Any) -> list[list[tuple[int, int, int]]]:
    """Request, first row and end row in the whole batch of each rank's segments, in the order of the rank's rows."""
    return [
        [
            (s.global_batch_req_idx, s.global_batch_slice.start, s.global_batch_slice.stop)
            for s in manager._get_rank_segments(
                rank, whole.num_scheduled_tokens, whole.is_prefilling_np, whole.query_start_loc_np
            )
        ]
        for rank in range(manager.pcp_world_size)
    ]


class ContextSharing:
    """Turns the plan of the whole batch into this rank's, and describes the kept rows of all ranks to the builders."""

    REQUEST_FACTOR = 2
    """Segments of a prompt that one rank has at most."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._planned: tuple[ReplayPlan, SharedRows] | None = None
        self._buffers: ReplayBuffers | None = None

    def allocate(
        self, max_num_reqs: int, max_num_tokens: int, slot_mappings: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Make the buffers of the whole batch's kept rows, at start-up."""
        self._buffers = ReplayBuffers(max_num_reqs, max_num_tokens, slot_mappings.shape[0], self.device)
        self._buffers.warm_up(slot_mappings, positions)

    def share_plan(self, plan: ReplayPlan, manager: Any) -> ReplayPlan:
        """This rank's part of the plan of the whole batch."""
        whole = manager.global_batch
        boundaries = whole.query_start_loc_np[: whole.num_reqs + 1]
        shared = share_segments(plan, boundaries, segments_of(manager, whole), manager.pcp_rank)
        self._planned = plan, shared
        return shared.local

    def forget(self) -> None:
        """The step is over."""
        self._planned = None

    def share(self, step: StepInputs, kept: KeptRows, context: Any) -> ContextShare:
        """What the builders must know.

        Args:
            step: of this rank.
            kept: this rank's kept rows.
            context: the step's `AscendPCPAttentionContext`.
        """
        whole, n = context.global_batch, context.global_batch.num_reqs
        if self._planned is None:
            # A dummy batch: one padding row on every rank.
            plan = empty_plan(np.diff(whole.query_start_loc_np[: n + 1]))
            places = restore = np.zeros(0, dtype=np.int64)
        else:
            plan, shared = self._planned
            places, restore = shared.places, shared.restore
        if not plan.num_rows:
            places, restore = np.full(self.size, -1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        buffers = self._buffers
        assert buffers is not None
        all_kept = buffers.fill(
            plan,
            query_start_loc=whole.query_start_loc[: n + 1],
            positions=whole.positions,
            slot_mappings=context.global_slot_mappings,
            replay_start=np.zeros(n, dtype=np.int32),
            num_padded=max(plan.num_rows, 1),
        )
        seq_lens, tables = buffers.select_requests(all_kept, whole.seq_lens, context.global_block_tables, n)
        batch = shrink_input_batch(whole, all_kept, seq_lens)
        lens = whole.seq_lens_np[all_kept.requests] if plan.num_rows else np.ones(1, dtype=np.int32)
        batch.seq_lens_np = lens.astype(np.int32)
        assert len(places) == self.size * kept.num_padded
        place = torch.from_numpy(places).to(self.device)
        slots = all_kept.slot_mappings.index_select(1, place.clamp_min(0)).masked_fill_(place < 0, PAD_SLOT)
        return ContextShare(
            replace(
                context,
                global_batch=batch,
                global_block_tables=tables,
                global_slot_mappings=all_kept.slot_mappings,
                hidden_restore_idx=torch.from_numpy(restore).to(self.device),
                padded_gather_idx=None,
                gathered_kv_write_mask=None,
                local_token_indices=None,
                local_to_global_req_indices=None,
            ),
            slots,
        )
