"""The layers from the cut on, run on the kept rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context, override_forward_context

from vllm_ascend_replay.batch import KeptRows, ReplayBatch

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
    kept: KeptRows, attn_metadata: dict[str, Any], slot_mapping: dict[str, torch.Tensor], dp_metadata: Any
) -> Callable[[], Any]:
    """Enters `nested_context` for the replay batch; made before the forward, entered in it."""

    def enter() -> Any:
        padding = get_forward_context().is_padding
        return nested_context(
            attn_metadata=attn_metadata,
            slot_mapping=slot_mapping,
            dp_metadata=dp_metadata,
            batch_descriptor=BatchDescriptor(num_tokens=kept.num_padded),
            is_padding=None if padding is None else kept.rows < 0,
        )

    return enter


def _run_reference_layer(
    layer: Any, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, input_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return layer(positions, streams, pre_mix, input_ids)


class ReplayTail:
    """Stands for the layers ``cut .. end`` in the model's forward.

    Without a replay batch it runs them on every row, as the model would. With one it writes the cut layer's KV for
    every row, runs the layers on the kept rows and returns **compact** states ``[N, ...]``, so that the model's own
    collapse and final norm see kept rows only; `finish` then scatters the final hidden states once. With a batch
    that keeps no row anywhere it runs no layer and returns one dummy row, since a model may not like empty tensors.

    The model state sets ``batch`` before a forward; the forward consumes it, so a batch never outlives its step.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        *,
        cut: int,
        aux_layers: Collection[int] = (),
        run_layer: RunLayer = _run_reference_layer,
        write_kv: WriteKV | None = None,
    ) -> None:
        """
        Args:
            layers: all layers of the model.
            cut: index of the cut layer.
            aux_layers: layers whose entering streams (mean over the hyper-connections) are handed out; only those
                from the cut on are this tail's.
            run_layer: how the host calls a layer.
            write_kv: how the host writes the cut layer's KV; default ``layers[cut].write_kv``.
        """
        self.layers = list(enumerate(layers))[cut:]
        self.cut = cut
        self.aux_layers = sorted(i for i in aux_layers if i >= cut)
        self.run_layer = run_layer
        self.write_kv: WriteKV = write_kv or self.layers[0][1].write_kv
        self.batch: ReplayBatch | None = None
        self._ran: ReplayBatch | None = None
        self._aux: list[torch.Tensor] = []

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
        batch, self.batch = self.batch, None
        self._ran, self._aux = batch, []
        if batch is None:
            return self._run(self.layers, positions, streams, pre_mix, input_ids)
        self.write_kv(positions, streams, pre_mix)
        if batch.kept is None:
            return streams[:1], pre_mix[:1]
        assert batch.cut_context is not None
        assert batch.late_context is not None
        states = [streams, pre_mix] if input_ids is None else [streams, pre_mix, input_ids]
        kept_streams, kept_pre, *kept_ids = batch.kept.gather(states)
        ids = kept_ids[0] if kept_ids else None
        positions = batch.kept.positions
        with batch.cut_context():
            kept_streams, kept_pre = self._run(self.layers[:1], positions, kept_streams, kept_pre, ids)
        with batch.late_context():
            return self._run(self.layers[1:], positions, kept_streams, kept_pre, ids)

    def finish(
        self, hidden: torch.Tensor, early_aux: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Put the final hidden states and aux states back into the step's rows.

        Args:
            hidden: ``[N, H]``, what the model's collapse and norm made of the states that the tail returned.
            early_aux: aux states ``[T, H]`` of layers before the cut.
            num_tokens: ``T``.

        Returns:
            Hidden states ``[T, H]``, zero on rows that were not kept, and all aux states in layer order.
        """
        batch, self._ran = self._ran, None
        late_aux, self._aux = self._aux, []
        if batch is None:
            return hidden, [*early_aux, *late_aux]
        if batch.kept is None:
            zeros = hidden.new_zeros((num_tokens, hidden.shape[-1]))
            dtype = early_aux[0].dtype if early_aux else hidden.dtype
            return zeros, [*early_aux, *(torch.zeros_like(zeros, dtype=dtype) for _ in self.aux_layers)]
        hidden, *late_aux = batch.kept.scatter([hidden, *late_aux], num_tokens)
        return hidden, [*early_aux, *late_aux]

    def _run(
        self,
        layers: Sequence[tuple[int, Any]],
        positions: torch.Tensor,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        input_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for index, layer in layers:
            if index in self.aux_layers:
                self._aux.append(streams.mean(dim=1))
            streams, pre_mix = self.run_layer(layer, positions, streams, pre_mix, input_ids)
        return streams, pre_mix
