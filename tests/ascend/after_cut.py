"""The second opinion: run the cut layer in full and only the layers after it on the kept rows.

It writes no KV twice and needs no metadata of its own for the cut layer, but the rows that later layers read from the
cut layer's shared buffers (top-k and candidate rows, indexed by the row of the batch being run) must be compacted.
"""

from vllm_ascend_replay.tail import ReplayTail


class AfterCutTail(ReplayTail):
    """`ReplayTail` with the cut one layer later."""

    shared = None
    """vllm-ascend's `DeepseekV41SharedAttentionState`."""
    compacts = True
    """Off: the control that must fail."""

    def _run_batch(self, batch, positions, streams, pre_mix, input_ids):
        cut, late = self.stages
        streams, pre_mix, aux = self.run_layers(cut, positions, streams, pre_mix, input_ids)
        if batch is not None and batch.kept is None:
            return streams[:1], pre_mix[:1], []
        if batch is None:
            streams, pre_mix, more = self.run_layers(late, positions, streams, pre_mix, input_ids)
            return streams, pre_mix, aux + more
        rows = batch.kept.rows
        for name in ("topk_indices", "candidates", "candidate_lengths", "topk_lengths"):
            buffer = getattr(self.shared, name)
            if buffer is not None and self.compacts:
                buffer[: len(rows)] = buffer[rows.clamp_min(0)]
        states = [streams, pre_mix] if input_ids is None else [streams, pre_mix, input_ids]
        kept_streams, kept_pre, *ids = batch.kept.gather(states)
        with batch.late_context():
            return self.run_layers(late, batch.kept.positions, kept_streams, kept_pre, ids[0] if ids else None)


def use_after_cut_tail(rank) -> AfterCutTail:
    """Replaces a rank's tail, before its first step."""
    text, state = rank.text, rank.state
    old = text.replay_tail
    layers = list(text.layers)
    tail = AfterCutTail(layers, cut=old.cut, run_layer=old.run_layer, write_kv=old.write_kv)
    tail.shared = text.shared_attention_state
    text.replay_tail = text.layers._tail_layer.tail = state.replay_tail = tail
    return tail
