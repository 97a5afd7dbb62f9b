"""Every wrong way must be noticed: each test breaks one thing and asserts that the comparison with the oracle fails.

The right way passes the same comparison first, so that a failure is the broken thing's.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import create_forward_context, get_forward_context, override_forward_context

from tests.invariants.support import FINAL, check_replay, final_oracle, run_prompt
from vllm_ascend_replay import tail as tail_module
from vllm_ascend_replay.batch import ReplayBuffers
from vllm_ascend_replay.reference.attention import LatentAttention
from vllm_ascend_replay.reference.metadata import ReferenceMetadataBuilder

LENGTH = 50


def run_mixed(stepper, tokens) -> list[Any]:
    """Decodes with drafts, two trimmed prompts and their decodes."""
    decoding = [stepper.add(tokens(40, seed=n), prompt_len=20 + n) for n in (1, 2)]
    for request in decoding:
        stepper.run(request, request.prefill_len)
    prompts = [stepper.add(tokens(LENGTH + 4, seed=n), prompt_len=LENGTH) for n in (3, 4)]
    stepper.step([*((d, 2) for d in decoding), *((p, 23) for p in prompts)], device_query_lens=[1, 3, 23, 23])
    stepper.step([*((d, 2) for d in decoding), *((p, 27) for p in prompts)], device_query_lens=[3, 1, 27, 27])
    for _ in range(4):
        stepper.step([(r, 1) for r in (*decoding, *prompts)])
    return [*decoding, *prompts]


def check_all(stepper, oracle, requests) -> None:
    for request in requests:
        check_replay(request, final_oracle(stepper, oracle, request), stepper.model.cut)


@pytest.fixture
def mixed(make_small, tokens):
    """The stepper, and a function that runs the batch and compares; it has passed once."""
    stepper, oracle = make_small(settings=FINAL)
    # Groups that a control made must not serve the next test.
    stepper.state.forget_attention_groups()
    check_all(stepper, oracle, run_mixed(stepper, tokens))

    def run_again() -> list[Any]:
        stepper.reset()
        stepper.state.forget_attention_groups()
        requests = run_mixed(stepper, tokens)
        check_all(stepper, oracle, requests)
        return requests

    yield stepper, run_again
    stepper.state.forget_attention_groups()


def change_kept(monkeypatch, change) -> None:
    """Apply ``change(kept, arguments)`` to every filled replay batch."""
    fill = ReplayBuffers.fill

    def changed(self, plan, **arguments):
        kept = fill(self, plan, **arguments)
        change(kept, arguments)
        return kept

    monkeypatch.setattr(ReplayBuffers, "fill", changed)


def test_late_window_that_starts_at_the_replay_start(mixed, tokens, monkeypatch):
    """It reads window KV that no late layer wrote: NaN where pages are poisoned."""
    stepper, run_again = mixed
    change_kept(monkeypatch, lambda kept, _: setattr(kept, "kv_start", kept.replay_start))
    with pytest.raises(AssertionError):
        run_again()
    stepper.reset()
    request = stepper.add(tokens(LENGTH))
    run_prompt(stepper, request, [23])
    assert request.hidden[LENGTH - 8].isnan().all()


def test_cut_layer_bounded_at_kv_start(mixed, monkeypatch):
    _, run_again = mixed
    change_kept(monkeypatch, lambda kept, _: setattr(kept, "replay_start", kept.kv_start))
    with pytest.raises(AssertionError):
        run_again()


def test_boundaries_of_the_host(mixed, monkeypatch):
    """Adaptive verification changes the decodes' lengths on the device; the host's boundaries are a bound only."""
    stepper, run_again = mixed
    fill, prepare = ReplayBuffers.fill, stepper.state._prepare_replay
    host = {}

    def remember(input_batch, *args, **kwargs):
        host["boundaries"] = torch.from_numpy(input_batch.query_start_loc_np)
        return prepare(input_batch, *args, **kwargs)

    def from_host(self, plan, **arguments):
        if "boundaries" in host:
            arguments["query_start_loc"] = host["boundaries"]
        return fill(self, plan, **arguments)

    monkeypatch.setattr(stepper.state, "_prepare_replay", remember)
    monkeypatch.setattr(ReplayBuffers, "fill", from_host)
    with pytest.raises(AssertionError):
        run_again()


def test_padding_that_writes_a_slot(mixed, tokens, monkeypatch):
    """A padded batch is right as long as its padding has no slot; slot 0 is the null block's."""
    stepper, run_again = mixed
    real = stepper.state._replay_batch

    def padded(step, plan, num_padded, rows_across_dp):
        return real(step, plan, num_padded + 3, rows_across_dp)

    monkeypatch.setattr(stepper.state, "_replay_batch", padded)
    run_again()
    assert stepper.null_block_untouched()

    def write_slot(kept, _):
        kept.slot_mappings[:, kept.plan.num_rows :] = 0
        # As a batch is handed over whose padding rows count as the last request's.
        kept.boundaries[-1] = kept.num_padded

    change_kept(monkeypatch, write_slot)
    stepper.reset()
    stepper.state.forget_attention_groups()
    run_mixed(stepper, tokens)
    assert not stepper.null_block_untouched()


@pytest.fixture
def counted_experts(make_small, monkeypatch):
    """MoE layers that find themselves by the forward context's counter, as vLLM's do on torch < 2.11."""
    stepper, _ = make_small(settings=FINAL)
    experts = [layer.moe for layer in stepper.model.layers]
    forwards = [moe.forward for moe in experts]

    def by_counter(x):
        context = get_forward_context()
        at, context.moe_layer_index = context.moe_layer_index, context.moe_layer_index + 1
        return forwards[at](x)

    for moe in experts:
        monkeypatch.setattr(moe, "forward", by_counter)


def test_fresh_forward_context(mixed, counted_experts, monkeypatch):
    """The replay layers would run the experts of the first layers."""
    stepper, run_again = mixed
    run_again()

    @contextmanager
    def fresh_context(**changes):
        changes = {k: v for k, v in changes.items() if k in ("attn_metadata", "slot_mapping", "batch_descriptor")}
        made = create_forward_context(
            changes.pop("attn_metadata"), stepper.vllm_config, cudagraph_runtime_mode=CUDAGraphMode.NONE, **changes
        )
        with override_forward_context(made):
            yield made

    monkeypatch.setattr(tail_module, "nested_context", fresh_context)
    with pytest.raises(AssertionError):
        run_again()


def test_builders_of_the_step_reused(mixed, monkeypatch):
    """Builders keep the metadata they made, in buffers: built again, the step's own metadata is the replay batch's."""
    stepper, run_again = mixed
    build, made = ReferenceMetadataBuilder.build, {}

    def persistent(self, *args, **kwargs):
        new = build(self, *args, **kwargs)
        old = made.setdefault(id(self), new)
        old.__dict__.update(new.__dict__)
        return old

    monkeypatch.setattr(ReferenceMetadataBuilder, "build", persistent)
    run_again()

    def reuse(attn_groups, prefixes):
        chosen = []
        for groups in attn_groups:
            named = [(group, [name for name in group.layer_names if name in prefixes]) for group in groups]
            chosen.append([replace(group, layer_names=names) for group, names in named if names])
        return chosen

    monkeypatch.setattr(stepper.state, "_clone_groups", reuse)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        run_again()


def test_masks_from_absolute_positions_on_a_sub_batch(make_window_128, tokens, monkeypatch):
    """A window mask that compares absolute positions with row numbers of the replay batch.

    Of K rows, the one at position p would see rows ``p - W < j <= p``: all is well for a batch that begins at position
    0, and nothing is left of the window for p >= K + W - 1, whatever the prompt's length is a multiple of.
    """
    length, window = 450, 128
    stepper, oracle = make_window_128(settings=FINAL)
    request = stepper.add(tokens(length))
    run_prompt(stepper, request)
    want = final_oracle(stepper, oracle, request)
    check_replay(request, want, stepper.model.cut)
    late = {id(layer.attn) for layer in stepper.model.layers[stepper.model.cut + 1 :]}
    attend, hidden = LatentAttention._attend, []

    def masked(self, query, positions, metadata, out):
        if id(self) in late and bool((positions >= query.shape[0] + window - 1).all()):
            hidden.append(query.shape[0])
            metadata = replace(metadata, kv_start=positions[-1:] + 1)
        return attend(self, query, positions, metadata, out)

    monkeypatch.setattr(LatentAttention, "_attend", masked)
    stepper.reset()
    request = stepper.add(tokens(length))
    run_prompt(stepper, request)
    assert hidden == [window] * len(late)
    assert request.hidden.isfinite().all()
    with pytest.raises(AssertionError):
        check_replay(request, want, stepper.model.cut)


def test_late_layers_need_the_cut_layers_compressed_entries(make_small, tokens, monkeypatch):
    """They find them only if the replay batch's metadata names that group; leaving it out is no silent fault."""
    stepper, _ = make_small(settings=FINAL)
    stepper.state.forget_attention_groups()
    prefix = stepper.model.layers[stepper.model.cut].attn.metadata_prefixes[1]
    clone = stepper.state._clone_groups
    monkeypatch.setattr(stepper.state, "_clone_groups", lambda groups, prefixes: clone(groups, prefixes - {prefix}))
    request = stepper.add(tokens(LENGTH))
    with pytest.raises(KeyError, match=prefix):
        run_prompt(stepper, request)
    stepper.state.forget_attention_groups()
