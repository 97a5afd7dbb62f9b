"""Triton kernels and their launchers: gather the replay batch, gather the states, scatter the results, pad slots.

Row ``r`` of a step belongs to a request; ``query_start_loc`` (device, int32 ``[R + 1]``) holds the request
boundaries and is authoritative. ``dropped_before`` (int32 ``[R + 1]``) counts the rows that the replay batch leaves
out before each boundary, so boundary ``b`` of the step is row ``query_start_loc[b] - dropped_before[b]`` of the
replay batch. A request keeps its **last** rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.triton_utils import tl, triton

PAD_SLOT = -1
"""Slot of a row that writes no KV (vLLM's PAD_SLOT_ID)."""
PAD_ROW = -1
"""Step row of a padding row of the replay batch."""

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_kept_reqs", "num_reqs", "num_padded", "slot_stride", "kept_slot_stride"])
def _gather_batch_kernel(
    query_start_loc_ptr,
    dropped_before_ptr,
    request_ptr,
    positions_ptr,
    slots_ptr,
    slot_stride,
    rows_ptr,
    boundaries_ptr,
    kept_positions_ptr,
    kept_slots_ptr,
    kept_slot_stride,
    num_kept_reqs,
    num_reqs,
    num_padded,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    total = tl.load(query_start_loc_ptr + num_reqs) - tl.load(dropped_before_ptr + num_reqs)
    for r in range(pid, num_kept_reqs, tl.num_programs(0)):
        req = tl.load(request_ptr + r)
        end = tl.load(query_start_loc_ptr + req + 1)
        kept_begin = tl.load(query_start_loc_ptr + req) - tl.load(dropped_before_ptr + req)
        kept_end = end - tl.load(dropped_before_ptr + req + 1)
        tl.store(boundaries_ptr + r, kept_begin)
        count = kept_end - kept_begin
        first = end - count
        for t in range(0, count, BLOCK):
            ok = lane < count - t
            tl.store(rows_ptr + kept_begin + t + lane, (first + t + lane).to(tl.int64), mask=ok)
            position = tl.load(positions_ptr + first + t + lane, mask=ok)
            tl.store(kept_positions_ptr + kept_begin + t + lane, position, mask=ok)
            for g in tl.static_range(GROUPS):
                slot = tl.load(slots_ptr + g * slot_stride + first + t + lane, mask=ok)
                tl.store(kept_slots_ptr + g * kept_slot_stride + kept_begin + t + lane, slot, mask=ok)
    if pid == 0:
        tl.store(boundaries_ptr + num_kept_reqs, total)
        for t in range(total, num_padded, BLOCK):
            ok = lane < num_padded - t
            pad = tl.full((BLOCK,), -1, tl.int64)
            tl.store(rows_ptr + t + lane, pad, mask=ok)
            tl.store(kept_positions_ptr + t + lane, tl.zeros((BLOCK,), tl.int64), mask=ok)
            for g in tl.static_range(GROUPS):
                tl.store(kept_slots_ptr + g * kept_slot_stride + t + lane, pad, mask=ok)


def gather_batch(
    *,
    query_start_loc: torch.Tensor,
    dropped_before: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    rows: torch.Tensor,
    boundaries: torch.Tensor,
    kept_positions: torch.Tensor,
    kept_slot_mappings: torch.Tensor,
    num_padded: int,
) -> None:
    """Fill the replay batch's row table, boundaries, positions and slot mappings in one launch.

    Args:
        query_start_loc: int32 ``[R + 1]``, device boundaries of the step.
        dropped_before: int32 ``[R + 1]``, rows left out before each boundary.
        requests: int32 ``[R']``, ascending indices of the requests with kept rows, ``R' >= 1``.
        positions: int64 ``[>= T]``.
        slot_mappings: int64 ``[G, >= T]``, last dimension contiguous.
        rows: out, int64 ``[>= num_padded]``; ``PAD_ROW`` from the last kept row to ``num_padded``.
        boundaries: out, int32 ``[>= R' + 1]``.
        kept_positions: out, int64 ``[>= num_padded]``; 0 on padding rows.
        kept_slot_mappings: out, int64 ``[G, >= num_padded]``; ``PAD_SLOT`` on padding rows.
        num_padded: rows to fill, at least the kept rows.

    No output may alias an input or another output.
    """
    if num_padded == 0:
        return
    count = requests.numel()
    _gather_batch_kernel[(count,)](
        query_start_loc,
        dropped_before,
        requests,
        positions,
        slot_mappings,
        slot_mappings.stride(0),
        rows,
        boundaries,
        kept_positions,
        kept_slot_mappings,
        kept_slot_mappings.stride(0),
        count,
        query_start_loc.numel() - 1,
        num_padded,
        GROUPS=slot_mappings.shape[0],
        BLOCK=_BLOCK,
    )


def gather_states(rows: torch.Tensor, states: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """``out[i][k] = states[i][rows[k]]``, zeros where ``rows[k]`` is ``PAD_ROW``.

    Args:
        rows: int64 ``[K]``.
        states: tensors ``[T, ...]``, contiguous, of any dtype.
        out: tensors ``[>= K, ...]``, contiguous, same dtypes and row shapes; all ``K`` rows are written.
    """
    real = rows >= 0
    at = rows.clamp_min(0)
    for source, target in zip(states, out):
        picked = source.index_select(0, at)
        keep = real.view(-1, *[1] * (source.dim() - 1))
        torch.where(keep, picked, torch.zeros_like(picked), out=target[: len(rows)])


def scatter_rows(
    values: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    *,
    query_start_loc: torch.Tensor,
    dropped_before: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Scatter compact rows into whole-step tensors and zero every other row, each element written once.

    Args:
        values: tensors ``[>= K, H]``: final hidden states, then aux states.
        out: tensors ``[T, H]``, same dtypes.
        query_start_loc: int32 ``[R + 1]``, device boundaries of the step.
        dropped_before: int32 ``[R + 1]``.
        rows: int64 ``[>= K]``, step row of each compact row, ``PAD_ROW`` on padding.
    """
    real = rows >= 0
    for value, target in zip(values, out):
        target.zero_()
        target[rows[real]] = value[: len(rows)][real]


@triton.jit(do_not_specialize=["num_reqs", "slot_stride", "window"])
def _pad_replayed_slots_kernel(
    slots_ptr,
    slot_stride,
    groups_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    num_reqs,
    window,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    pad = tl.full((BLOCK,), -1, tl.int64)
    for r in range(tl.program_id(0), num_reqs, tl.num_programs(0)):
        start = tl.load(replay_start_ptr + r)
        begin = tl.load(query_start_loc_ptr + r)
        end = tl.load(query_start_loc_ptr + r + 1)
        if (start > 0) & (end > begin):
            first = tl.load(positions_ptr + begin).to(tl.int32)
            low = begin + tl.maximum(start - first, 0)
            high = tl.minimum(end, begin + start + window - first)
            for t in range(low, high, BLOCK):
                ok = lane < high - t
                for i in tl.static_range(NUM_GROUPS):
                    group = tl.load(groups_ptr + i)
                    tl.store(slots_ptr + group * slot_stride + t + lane, pad, mask=ok)


def pad_replayed_slots(
    slot_mappings: torch.Tensor,
    *,
    groups: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    replay_start: torch.Tensor,
    window: int,
) -> None:
    """Pad the slots of replayed tokens in the prefix-cacheable groups, in place.

    The rows of request ``r`` at positions ``[replay_start[r], replay_start[r] + window)`` rebuild window KV only;
    the cached KV of cacheable groups stays as it is. ``replay_start[r] == 0`` means no replay.

    Args:
        slot_mappings: int64 ``[G, >= T]``, changed in place.
        groups: int32 ``[N]``, indices of the cacheable groups.
        query_start_loc: int32 ``[R + 1]``.
        positions: int64 ``[>= T]``, consecutive inside a request.
        replay_start: int32 ``[R]``.
        window: positions replayed after a hit.
    """
    num_reqs = query_start_loc.numel() - 1
    if num_reqs == 0 or groups.numel() == 0:
        return
    _pad_replayed_slots_kernel[(num_reqs,)](
        slot_mappings,
        slot_mappings.stride(0),
        groups,
        query_start_loc,
        positions,
        replay_start,
        num_reqs,
        window,
        NUM_GROUPS=groups.numel(),
        BLOCK=_BLOCK,
    )
