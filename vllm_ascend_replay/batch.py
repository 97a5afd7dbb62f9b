"""The replay batch: the kept rows of a step as a batch of their own, in buffers that exist from start-up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer, UvaBufferPool

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


@dataclass(frozen=True)
class _Views:
    """Parts of the buffers for one shape of batch, and the launch that fills them."""

    count: int
    """Numbers to upload."""
    uploaded: torch.Tensor
    requests: torch.Tensor
    kept: dict[str, torch.Tensor]
    """Fields of `KeptRows`."""
    gather: kernels.BatchGather


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
        self.num_groups = num_groups
        self.slot_mappings = zeros(num_groups, max_num_tokens, dtype=torch.int64)
        self.seq_lens = zeros(max_num_reqs)
        self.block_tables: list[torch.Tensor] = []
        # One upload a step: dropped_before [R + 1], requests, kv_start and replay_start [R'].
        self._uploaded = zeros(4 * max_num_reqs + 1)
        self._requests = self._uploaded[:0]
        self._every_request = np.arange(max_num_reqs, dtype=np.int32)
        self._every_request.setflags(write=False)
        # The host would spend as long on making the views as on all the rest; batches of the same shape recur.
        self._views = functools.lru_cache(maxsize=4096)(self._make_views)
        self._request_views = functools.lru_cache(maxsize=2048)(self._make_request_views)
        self._row_views = functools.lru_cache(maxsize=2048)(self._make_row_views)
        self._staging = pool = UvaBufferPool(4 * max_num_reqs + 1, torch.int32)
        # What the launch itself can read from the host's memory needs no copy of its own.
        self._reads_host_memory = device.type == "cuda" and is_uva_available()
        mapped = [UvaBuffer(pool.size, pool.dtype) for _ in range(self._reads_host_memory * pool.max_concurrency)]
        self._mapped = itertools.cycle([(buffer.np, buffer.uva()) for buffer in mapped])
        self._kv_cache_config: Any = None

    def _make_views(self, num_reqs: int, num_kept_reqs: int, num_padded: int) -> _Views:
        """The buffers' parts for ``R`` requests, ``R'`` with kept rows and ``N`` rows."""
        uploaded, requests, by_request = self._request_views(num_reqs, num_kept_reqs)
        kept = by_request | self._row_views(num_padded)
        gather = kernels.BatchGather(
            dropped_before=kept["dropped_before"],
            requests=requests,
            rows=kept["rows"],
            boundaries=kept["boundaries"],
            kept_positions=kept["positions"],
            kept_slot_mappings=kept["slot_mappings"],
            num_padded=num_padded,
            uploaded=uploaded if self._reads_host_memory else None,
        )
        return _Views(len(uploaded), uploaded, requests, kept, gather)

    def _make_request_views(
        self, num_reqs: int, num_kept_reqs: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """What is uploaded, the requests, and fields of `KeptRows`."""
        ends = [num_reqs + 1 + i * num_kept_reqs for i in range(4)]
        fields = {
            "dropped_before": self._uploaded[: ends[0]],
            "kv_start": self._uploaded[ends[1] : ends[2]],
            "replay_start": self._uploaded[ends[2] : ends[3]],
            "boundaries": self.boundaries[: num_kept_reqs + 1],
        }
        return self._uploaded[: ends[3]], self._uploaded[ends[0] : ends[1]], fields

    def _make_row_views(self, num_padded: int) -> dict[str, torch.Tensor]:
        """Fields of `KeptRows`."""
        return {
            "rows": self.rows[:num_padded],
            "positions": self.positions[:num_padded],
            "is_padding": self.is_padding[:num_padded],
            "slot_mappings": self.slot_mappings[:, :num_padded],
        }

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
        num_reqs, num_kept_reqs = len(plan.kept_lens), np.count_nonzero(plan.kept_lens)
        only_padding = num_kept_reqs == 0
        if only_padding:
            requests = kv_start = replay_start = np.zeros(1, dtype=np.int32)
        elif num_kept_reqs == num_reqs:
            requests, kv_start = self._every_request[:num_reqs], plan.kv_start
        else:
            requests = plan.requests
            kv_start, replay_start = plan.kv_start[requests], replay_start[requests]
        views = self._views(num_reqs, len(requests), num_padded)
        parts = (plan.dropped_before, requests, kv_start, replay_start)
        source = None
        if self._reads_host_memory:
            host, source = next(self._mapped)
            np.concatenate(parts, out=host[: views.count])
        else:
            self._staging.copy_to_gpu(np.concatenate(parts), out=views.uploaded)
        kept = KeptRows(
            plan=plan,
            requests=requests,
            num_padded=num_padded,
            query_start_loc=query_start_loc,
            host_boundaries=host_boundaries,
            **views.kept,
        )
        views.gather(query_start_loc, positions, slot_mappings, source)
        if only_padding:
            # The padding row is a request of one row at position 0: whatever it reads is dropped.
            kept.boundaries[1:].fill_(1)
        self._requests = views.requests
        return kept

    def slots_by_layer(self, kept: KeptRows, kv_cache_config: Any) -> dict[str, torch.Tensor]:
        """``kept.slot_mappings`` by layer name, as a forward context wants them; not to be written to."""
        if kv_cache_config is not self._kv_cache_config:
            self._kv_cache_config = kv_cache_config

            @functools.lru_cache(maxsize=256)
            def by_layer(num_padded: int) -> dict[str, torch.Tensor]:
                return build_slot_mappings_by_layer(self._row_views(num_padded)["slot_mappings"], kv_cache_config)

            self._by_layer = by_layer
        return self._by_layer(kept.num_padded)

    def select_requests(
        self, kept: KeptRows, seq_lens: torch.Tensor, block_tables: Sequence[torch.Tensor], num_reqs: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Device sequence lengths int32 ``[R']`` and block tables (each ``[R', n]``) of the requests with kept rows."""
        count = len(kept.requests)
        if count == num_reqs and kept.plan.num_rows:
            return leading(seq_lens, num_reqs), tuple([leading(table, num_reqs) for table in block_tables])
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


_PER_REQUEST = (
    "idx_mapping_np",
    "num_computed_tokens_np",
    "prefill_len_np",
    "num_computed_prefill_tokens_np",
    "is_prefilling_np",
)


def leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """``tensor[:count]``, without a new view where that is all of it."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def shrink_input_batch(input_batch: Any, kept: KeptRows, seq_lens: torch.Tensor) -> Any:
    """The step's ``InputBatch`` reduced to the kept rows, for attention metadata only.

    The sampling fields and ``input_ids`` are carried over from the step and must not be read. Fields of a
    host's subclass stay as they are.
    """
    at, plan, num_reqs = kept.requests, kept.plan, input_batch.num_reqs
    # `dataclasses.replace` would spend longer on the fields that stay than all of this takes.
    small = object.__new__(type(input_batch))
    fields = small.__dict__
    fields.update(input_batch.__dict__)
    lens = plan.kept_lens if plan.num_rows else np.ones(1, dtype=np.int32)
    if len(at) == num_reqs and plan.num_rows:
        upper = leading(input_batch.seq_lens_cpu_upper_bound, num_reqs)
        boundaries = input_batch.query_start_loc_np[: num_reqs + 1] - plan.dropped_before
    else:
        upper = input_batch.seq_lens_cpu_upper_bound[torch.from_numpy(at.astype(np.int64))]
        if plan.num_rows:
            lens = lens[at]
        else:
            upper = torch.ones_like(upper)
        fields["req_ids"] = [input_batch.req_ids[i] for i in at]
        for name in _PER_REQUEST:
            fields[name] = getattr(input_batch, name)[at]
        boundaries = np.zeros(len(at) + 1, dtype=np.int32)
        np.add.accumulate(lens, out=boundaries[1:])
    fields.update(
        num_reqs=len(at),
        num_reqs_after_padding=len(at),
        num_scheduled_tokens=lens,
        num_tokens=int(boundaries[-1]),
        num_tokens_after_padding=kept.num_padded,
        query_start_loc=kept.boundaries,
        query_start_loc_np=boundaries,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=upper,
        positions=kept.positions,
        # Adaptive verification may lengthen the decodes on the device, up to the step's own bound.
        max_query_len=max(*lens.tolist(), getattr(input_batch, "max_query_len", None) or 0),
        fast_prefill=None,
        prompt_lens=None,
        dcp_local_seq_lens=None,
        prefill_runs_as_decode_np=None,
    )
    return small
