"""The layers from the cut on, run on the kept rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    in_piecewise_cudagraph,
    override_forward_context,
)

from vllm_ascend_replay import kernels
from vllm_ascend_replay.batch import KeptRows, ReplayBatch, States
from vllm_ascend_replay.layouts import WHOLE, Layout

RunLayer = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``run_layer(layer, positions, streams, pre_mix, input_ids) -> (streams, pre_mix)``."""
WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write_kv(positions, streams, pre_mix)``: the cut layer's KV of every row, nothing else."""


@contextmanager
def nested_context(**changes: Any) -> Iterator[ForwardContext]:
    """The running forward context with ``changes``, for the replay batch.

    A copy of the running context, not a fresh one: it carries the MoE layer counter (a fresh one restarts at the
    first layer's experts) and whatever the platform put there. The counter is handed back at the end.
    """
    outer = get_forward_context()
    inner = replace(outer, cudagraph_runtime_mode=CUDAGraphMode.NONE, **changes)
    try:
        with override_forward_context(inner):
            yield inner
    finally:
        outer.moe_layer_index = inner.moe_layer_index


def replay_context(
    kept: KeptRows,
    attn_metadata: dict[str, Any],
    slot_mapping: dict[str, torch.Tensor],
    dp_metadata: Any,
    layout: Layout = WHOLE,
) -> Callable[[], Any]:
    """Enters `nested_context` for the replay batch; made before the forward, entered in it."""

    def enter() -> Any:
        padding = get_forward_context().is_padding
        return nested_context(
            attn_metadata=attn_metadata,
            slot_mapping=slot_mapping,
            dp_metadata=dp_metadata,
            batch_descriptor=BatchDescriptor(num_tokens=kept.num_padded),
            is_padding=None if padding is None else layout.shard(kept.padding_mask(), 1),
        )

    return enter


def _run_reference_layer(
    layer: Any, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, input_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return layer(positions, streams, pre_mix, input_ids)


@dataclass
class BreakOutputs:
    """Fixed tensors in which a break-out leaves its results for the rest of the model's graph, ``N`` rows at most."""

    rows: torch.Tensor
    """int64 ``[N]``: step row of each result; -1: none."""
    values: list[torch.Tensor]
    """Streams ``[N, hc, H]``, pre mix ``[N, hc]`` and late aux states ``[N, H]``."""


class ReplayTail:
    """Stands for the layers ``cut .. end`` in the model's forward.

    Without a replay batch it runs them on every row, as the model would. With one it writes the cut layer's KV for
    every row, runs the layers on the kept rows and returns **compact** states ``[N, ...]``, so that the model's own
    collapse and final norm see kept rows only; `finish` then scatters the final hidden states once. With a batch
    that keeps no row anywhere it runs no layer and returns one dummy row, since a model may not like empty tensors.

    The model state sets ``batch`` before a forward; the forward consumes it, so a batch never outlives its step.

    Where the states are sharded over ranks (``layout``), ``T`` and ``N`` below are this rank's chunks of the states;
    positions are whole. Late aux states are collected: every rank has all their rows. The hidden states given to
    `finish` are the model's to collect, since it collects those of other steps too.

    In a PIECEWISE model graph that `breaks_out`, all this happens in one eager break. What follows in the graph has
    a fixed size, so it reads the compact states from fixed tensors as long as the step.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        *,
        cut: int,
        aux_layers: Collection[int] = (),
        run_layer: RunLayer = _run_reference_layer,
        write_kv: WriteKV | None = None,
        layout: Layout = WHOLE,
    ) -> None:
        """
        Args:
            layers: all layers of the model.
            cut: index of the cut layer.
            aux_layers: layers whose entering streams (mean over the hyper-connections) are handed out; only those
                from the cut on are this tail's.
            run_layer: how the host calls a layer.
            write_kv: how the host writes the cut layer's KV; default ``layers[cut].write_kv``.
            layout: how the states that cross the cut lie over the ranks.
        """
        self.layers = list(enumerate(layers))[cut:]
        self.cut = cut
        self.set_aux_layers(aux_layers)
        self.run_layer = run_layer
        self.write_kv: WriteKV = write_kv or self.layers[0][1].write_kv
        self.layout = layout
        self.batch: ReplayBatch | None = None
        self.break_out_from: int | None = None
        """PIECEWISE model graphs of this many rows or more break out to a replay batch; ``None``: none does."""
        self.moe_layers_before = 0
        """MoE layers that ran before the cut, as the forward context counts them."""
        self._ran: ReplayBatch | BreakOutputs | None = None
        # The states of the first forward, a start-up dummy, until `finish` has compiled the seam's kernels for them.
        self._first_states: list[torch.Tensor] | None = []
        self._aux: list[torch.Tensor] = []
        self._outputs: BreakOutputs | None = None

    def set_aux_layers(self, layers: Collection[int]) -> None:
        """Take the layers whose entering streams are handed out, as the constructor does."""
        self.aux_layers = sorted(i for i in layers if i >= self.cut)
        self.has_early_aux = any(i < self.cut for i in layers)
        """Whether aux states of layers before the cut stay alive while the replay layers run."""

    @property
    def stages(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """``(index, layer)`` of the layers that run in the cut context, and of those in the late context."""
        return self.layers[:1], self.layers[1:]

    def breaks_out(self, num_rows: int) -> bool:
        """Whether a PIECEWISE model graph of ``num_rows`` rows breaks out. Capture and run time both ask here."""
        return self.break_out_from is not None and num_rows >= self.break_out_from

    def __call__(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers.

        Args:
            positions: int64 ``[T]``.
            streams: ``[T, hc, H]``, the states entering the cut layer.
            pre_mix: float ``[T, hc]``.
            input_ids: int ``[T]`` or ``None``.

        Returns:
            Streams ``[N, hc, H]`` and pre mix ``[N, hc]``; ``N = T`` without a replay batch.
        """
        self.moe_layers_before = get_forward_context().moe_layer_index
        num_rows = streams.shape[0]
        if in_piecewise_cudagraph() and self.breaks_out(num_rows):
            self._break_out(positions, streams, pre_mix, input_ids)
            assert self._outputs is not None
            outputs = BreakOutputs(self._outputs.rows[:num_rows], [v[:num_rows] for v in self._outputs.values])
            self._ran, self._aux = outputs, outputs.values[2:]
            return outputs.values[0], outputs.values[1]
        batch, self.batch = self.batch, None
        self._ran = batch
        if self._first_states is not None:
            self._first_states = [streams, pre_mix] if input_ids is None else [streams, pre_mix, input_ids]
        streams, pre_mix, self._aux = self._run_batch(batch, positions, streams, pre_mix, input_ids)
        return streams, pre_mix

    def finish(
        self, hidden: torch.Tensor, early_aux: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Put the final hidden states and aux states back into the step's rows.

        Args:
            hidden: ``[N, H]``, what the model's collapse and norm made of the states that the tail returned. Padding
                may follow, such as that of the ranks' chunks.
            early_aux: aux states ``[T, H]`` of layers before the cut.
            num_tokens: ``T``.

        Returns:
            Hidden states ``[T, H]``, zero on rows that were not kept, and all aux states in layer order.
        """
        ran, self._ran = self._ran, None
        late_aux, self._aux = self._aux, []
        if self._first_states:
            states, self._first_states = self._first_states, None
            kernels.warm_up_states(states=states, outputs=[hidden, *late_aux])
        if ran is None:
            return hidden[:num_tokens], [*early_aux, *late_aux]
        if isinstance(ran, BreakOutputs):
            # Inside the model's graph, so nothing here may depend on a number of the step.
            target = torch.where(ran.rows < 0, num_tokens, ran.rows)
            hidden, *late_aux = (_spread(value, target, num_tokens) for value in (hidden, *late_aux))
            return hidden, [*early_aux, *late_aux]
        if ran.kept is None:
            zeros = hidden.new_zeros((num_tokens, hidden.shape[-1]))
            dtype = early_aux[0].dtype if early_aux else hidden.dtype
            return zeros, [*early_aux, *(torch.zeros_like(zeros, dtype=dtype) for _ in self.aux_layers)]
        hidden, *late_aux = ran.kept.scatter([hidden, *late_aux], num_tokens)
        return hidden, [*early_aux, *late_aux]

    def run_layers(
        self,
        layers: Sequence[tuple[int, Any]],
        positions: torch.Tensor,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        input_ids: torch.Tensor | None,
        *,
        before_layer: Callable[[int], None] | None = None,
    ) -> States:
        """Run ``layers`` (one of `stages`, or all) on the rows of the running forward context.

        Args:
            layers: ``(index, layer)`` of each.
            before_layer: called with the index of each layer before it runs.
        """
        aux = []
        for index, layer in layers:
            if before_layer is not None:
                before_layer(index)
            if index in self.aux_layers:
                aux.append(streams.mean(dim=1))
            streams, pre_mix = self.run_layer(layer, positions, streams, pre_mix, input_ids)
        return streams, pre_mix, aux

    def _run_batch(
        self,
        batch: ReplayBatch | None,
        positions: torch.Tensor,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        input_ids: torch.Tensor | None,
    ) -> States:
        if batch is None:
            streams, pre_mix, aux = self.run_layers(self.layers, positions, streams, pre_mix, input_ids)
            return streams, pre_mix, self.layout.collect(aux, positions.shape[-1])
        self.write_kv(positions, streams, pre_mix)
        if batch.kept is None:
            return streams[:1], pre_mix[:1], []
        assert batch.cut_context is not None
        assert batch.late_context is not None
        states = [streams, pre_mix] if input_ids is None else [streams, pre_mix, input_ids]
        if batch.graph is not None:
            done = batch.graph(batch, states)
            if done is not None:
                return done
        kept_streams, kept_pre, *kept_ids = batch.kept.gather(states, layout=self.layout)
        ids = kept_ids[0] if kept_ids else None
        positions = batch.kept.positions
        aux = []
        for layers, context in zip(self.stages, (batch.cut_context, batch.late_context)):
            with context():
                kept_streams, kept_pre, more = self.run_layers(layers, positions, kept_streams, kept_pre, ids)
            aux += more
        return kept_streams, kept_pre, self.layout.collect(aux, batch.kept.num_padded)

    @eager_break_during_capture
    def _break_out(
        self, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, input_ids: torch.Tensor | None
    ) -> None:
        """Run the step's batch in a break of the model's graph and leave the results in fixed tensors."""
        # The graph's replay ran no layer in Python, so nobody counted.
        get_forward_context().moe_layer_index = self.moe_layers_before
        batch, self.batch = self.batch, None
        *values, aux = self._run_batch(batch, positions, streams, pre_mix, input_ids)
        num_rows = streams.shape[0]
        # Not in the graph's pool: here, nothing is being captured.
        outputs = self._outputs_for(num_rows, streams, pre_mix)
        rows, count = outputs.rows[:num_rows], 0
        if batch is None:
            torch.arange(num_rows, out=rows)
        elif batch.kept is None:
            rows.fill_(-1)
            return
        else:
            # A bucket may be larger than the step; what is left out is padding.
            count = min(batch.kept.num_padded, num_rows)
            rows[:count].copy_(batch.kept.rows[:count])
            rows[count:].fill_(-1)
        for buffer, value in zip(outputs.values, (*values, *aux)):
            buffer[: min(len(value), num_rows)].copy_(value[:num_rows])

    def _outputs_for(self, num_rows: int, streams: torch.Tensor, pre_mix: torch.Tensor) -> BreakOutputs:
        """The fixed tensors. The largest graph is captured first, so the first call sizes them."""
        count = 2 + len(self.aux_layers)
        if self._outputs is None or len(self._outputs.values) != count or len(self._outputs.rows) < num_rows:
            aux = [streams.new_zeros((num_rows, streams.shape[-1])) for _ in self.aux_layers]
            self._outputs = BreakOutputs(
                torch.full((num_rows,), -1, dtype=torch.int64, device=streams.device),
                # Rows of no result are finite: the rest of the graph computes on them, and drops them.
                [torch.zeros_like(streams), torch.zeros_like(pre_mix), *aux],
            )
        return self._outputs


def _spread(values: torch.Tensor, target: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[num_rows, H]`` with ``values[i]`` in row ``target[i]``, zeros elsewhere; row ``num_rows`` is dropped."""
    out = values.new_zeros((num_rows + 1, *values.shape[1:]))
    return out.index_copy_(0, target, values)[:num_rows]
