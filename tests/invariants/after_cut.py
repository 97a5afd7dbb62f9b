"""A second opinion: run the cut layer whole and only the layers after it on the kept rows.

It writes no KV twice and needs no metadata of its own for the cut layer, but what the cut layer chose for each row (its
top-k entries and candidate blocks, addressed by the row of the batch being run) must be compacted.
"""

from __future__ import annotations

from vllm_ascend_replay.tail import ReplayTail


class AfterCutTail(ReplayTail):
    """`ReplayTail` with the cut one layer later."""

    compacts = True
    compacted = 0
    """Replay batches that were run."""

    def _run_batch(self, batch, positions, streams, pre_mix, input_ids):
        cut, late = self.stages
        run_layer = self.run_layer
        # Not through the module call, whose hooks expect kept rows from the cut layer on.
        self.run_layer = lambda layer, *states: layer.forward(*states)
        streams, pre_mix, aux = self.run_layers(cut, positions, streams, pre_mix, input_ids)
        self.run_layer = run_layer
        if batch is None:
            streams, pre_mix, more = self.run_layers(late, positions, streams, pre_mix, input_ids)
            return streams, pre_mix, aux + more
        if batch.kept is None:
            return streams[:1], pre_mix[:1], []
        self.compacted += 1
        rows = batch.kept.rows.clamp_min(0)
        if self.compacts:
            selection = self.layers[0][1].attn.selection
            for buffer in (selection._entries, selection._blocks):
                buffer[: len(rows)] = buffer[rows]
        aux = batch.kept.gather(aux) if aux else []
        kept_streams, kept_pre, kept_ids = batch.kept.gather([streams, pre_mix, input_ids])
        with batch.late_context():
            kept_streams, kept_pre, more = self.run_layers(late, batch.kept.positions, kept_streams, kept_pre, kept_ids)
        return kept_streams, kept_pre, [*aux, *more]


def use_after_cut_tail(stepper, monkeypatch, *, compacts: bool = True) -> AfterCutTail:
    """Give a stepper's model and state the other tail."""
    model = stepper.model
    tail = AfterCutTail(model.layers, cut=model.cut, aux_layers=model.tail.aux_layers)
    tail.compacts = compacts
    monkeypatch.setattr(model, "tail", tail)
    monkeypatch.setattr(stepper.state, "replay_tail", tail)
    return tail
