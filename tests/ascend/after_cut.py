"""The second opinion: run the cut layer in full and only the layers after it on the kept rows.

It writes no KV twice and needs no metadata of its own for the cut layer, but the rows that later layers read from the
cut layer's shared buffers (top-k and candidate rows, indexed by the row of the batch being run) must be compacted.
"""

from vllm_ascend_replay.layouts import QueryRows, share_of
from vllm_ascend_replay.tail import ReplayTail


class AfterCutTail(ReplayTail):
    """`ReplayTail` with the cut one layer later."""

    shared = None
    """vllm-ascend's `DeepseekV41SharedAttentionState`."""
    compacts = True
    """Off: the control that must fail."""
    query_rows = None
    """How the shared buffers' rows lie over the ranks under DSA-CP."""

    def _run_batch(self, batch, positions, streams, pre_mix, input_ids):
        cut, late = self.stages
        streams, pre_mix, aux = self.run_layers(cut, positions, streams, pre_mix, input_ids)
        if batch is not None and batch.kept is None:
            return streams[:1], pre_mix[:1], []
        if batch is None:
            streams, pre_mix, more = self.run_layers(late, positions, streams, pre_mix, input_ids)
            return streams, pre_mix, aux + more
        rows = batch.kept.rows
        names = ("topk_indices", "candidates", "candidate_lengths", "topk_lengths")
        buffers = [buffer for name in names if (buffer := getattr(self.shared, name)) is not None]
        if self.compacts and self.query_rows is not None:
            # Under DSA-CP the rows lie over the ranks, and change their owner.
            share = share_of(positions.shape[0], self.query_rows.size)
            owned = batch.kept.owned(share, self.query_rows.size)
            self.query_rows.move(buffers, positions.shape[0], rows, owned)
        elif self.compacts:
            for buffer in buffers:
                buffer[: len(rows)] = buffer[rows.clamp_min(0)]
        states = [streams, pre_mix] if input_ids is None else [streams, pre_mix, input_ids]
        kept_streams, kept_pre, *ids = batch.kept.gather(states, layout=self.layout)
        with batch.late_context():
            return self.run_layers(late, batch.kept.positions, kept_streams, kept_pre, ids[0] if ids else None)


def use_after_cut_tail(rank) -> AfterCutTail:
    """Replaces a rank's tail, before its first step."""
    text, state = rank.text, rank.state
    old = text.replay_tail
    layers = list(text.layers)
    tail = AfterCutTail(layers, cut=old.cut, run_layer=old.run_layer, write_kv=old.write_kv, layout=old.layout)
    tail.shared = text.shared_attention_state
    if layers[old.cut].self_attn.enable_dsa_cp:
        tail.query_rows = QueryRows(old.layout.ranks)
    text.replay_tail = text.layers._tail_layer.tail = state.replay_tail = tail
    return tail
