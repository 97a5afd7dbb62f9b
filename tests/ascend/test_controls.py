"""What goes wrong when replay is wired carelessly: each control must fail, and fail the way it is said to."""

from dataclasses import replace

import pytest
import torch
from vllm.forward_context import create_forward_context, get_forward_context

import vllm_ascend_replay.tail as tail_module
from tests.ascend.support import WINDOW, first_kept, make_session
from tests.npu_emulator import ON_A5, patches
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.session import tokens
from tests.npu_emulator.stub import OLD_TORCH
from vllm_ascend_replay.ascend import metadata as metadata_module

a2_only = pytest.mark.skipif(ON_A5, reason="A2/A3 window form")


def first_step(session, length=300):
    session.run({"a": tokens(length, 1)}, 512, max_tokens=1)


def layers_run():
    return [int(name.split("layers.")[1].split(".")[0]) for name, _ in patches.MOE_CALLS]


@pytest.mark.skipif(not OLD_TORCH, reason="this torch finds MoE layers by name")
@pytest.mark.parametrize("after_cut", [False, True])
def test_a_fresh_context_runs_the_first_layers_experts(monkeypatch, after_cut):
    s = make_session(after_cut=after_cut)
    assert s.rank.config.compilation_config.fast_moe_cold_start

    def fresh(outer, *, is_padding, additional_kwargs, **changes):
        return create_forward_context(vllm_config=s.rank.config, **changes)

    monkeypatch.setattr(tail_module, "replace", fresh)
    patches.MOE_CALLS.clear()
    first_step(s)
    wrong = [0, 1, 2] if after_cut else [0, 0, 1, 2]
    assert layers_run() == [*range(8 - len(wrong)), *wrong]


@pytest.mark.skipif(not OLD_TORCH, reason="this torch finds MoE layers by name")
def test_a_lost_moe_counter_runs_the_cut_layers_experts_again(monkeypatch):
    """The counter must come back from the first nested context, or the second starts where the first did."""
    s = make_session()
    monkeypatch.setattr(tail_module, "replace", lambda outer, **changes: replace(Frozen.of(outer), **changes))
    patches.MOE_CALLS.clear()
    first_step(s)
    assert layers_run() == [0, 1, 2, 3, 4, 4, 5, 6]


class Frozen:
    """Makes contexts whose counter is not handed back: the copy counts for itself."""

    @staticmethod
    def of(outer):
        return replace(outer, moe_layer_index=4)


def test_the_counter_is_right_by_default():
    s = make_session()
    patches.MOE_CALLS.clear()
    first_step(s)
    assert layers_run() == list(range(8))


def test_live_builders_overwrite_the_step(monkeypatch):
    """Without builders of its own the small batch overwrites the lengths and slots that the full batch still uses."""
    s = make_session(after_cut=True)
    monkeypatch.setattr(
        metadata_module,
        "clone_groups",
        lambda groups, prefixes: [[g for g in gs if not set(prefixes).isdisjoint(g.layer_names)] for gs in groups],
    )
    try:
        first_step(s)
    except RuntimeError as error:
        noticed = "the task-split metadata was built from other lengths" in str(error)
    else:
        r = report(s, "a")
        noticed = r.nan or r.bounded > TIE
    assert noticed


@a2_only
def test_a_stale_task_split_is_noticed(monkeypatch):
    s = make_session()
    monkeypatch.setattr(metadata_module.TailMetadata, "_resplit", lambda self, long_kv, late, requests: long_kv)
    with pytest.raises(RuntimeError, match="other lengths"):
        first_step(s)


def test_uncompacted_buffers_are_wrong():
    s = make_session(after_cut=True)
    s.rank.text.replay_tail.compacts = False
    first_step(s)
    assert report(s, "a").bounded > TIE


@pytest.mark.parametrize("after_cut", [False, True])
def test_an_unbounded_window_reads_unwritten_pages(after_cut):
    s = make_session(after_cut=after_cut)
    state = s.rank.state
    build = state.build_replay_batch

    def unbounded(step, kept, dp_metadata):
        kept.kv_start.zero_()
        kept.plan.kv_start[:] = 0
        return build(step, kept, dp_metadata)

    state.build_replay_batch = unbounded
    first_step(s)
    assert report(s, "a").nan


@a2_only
def test_a_bounded_cut_layer_is_wrong(monkeypatch):
    """The cut layer's window is not bounded: its KV exists for every row."""
    s = make_session()
    state, real = s.rank.state, metadata_module.TailMetadata.build

    def build(self, kept, requests, kv_cache_config, *share):
        cut, late = real(self, kept, requests, kv_cache_config, *share)
        name, like = self.layout.cut_window, late[sorted(self.layout.late_windows)[0]]
        window = replace(cut[name], block_table=like.block_table, seq_lens=like.seq_lens)
        return {**cut, name: window, self.layout.long_kv: late[self.layout.long_kv]}, late

    monkeypatch.setattr(metadata_module.TailMetadata, "build", build)
    assert state._layout.block == 128
    first_step(s)
    assert report(s, "a").bounded > TIE


def test_a_full_step_in_the_middle_of_a_bounded_prompt_reads_holes():
    s = make_session()
    state, tail = s.rank.state, s.rank.state.replay_tail

    def sabotage(session):
        # The prompt's last chunk runs every row through layers whose window KV was never written.
        state.replay_tail = None if len(session.steps) == 3 else tail

    s.run({"a": tokens(706, 1)}, 200, max_tokens=1, each_step=sabotage)
    assert report(s, "a").nan


@a2_only
def test_the_rope_buffer_is_shared_between_builds_without_prefills():
    """`use_cache=True` returns views of one process-wide buffer: why the replay batch brings rows of its own."""
    from vllm_ascend.ops.rope_dsv4 import get_cos_and_sin_dsa

    s = make_session()
    name = s.rank.text.layers[4].self_attn.rotary_emb.layername
    first = get_cos_and_sin_dsa(torch.arange(10, 14), use_cache=True)[0][name]
    before = first.clone()
    get_cos_and_sin_dsa(torch.arange(100, 104), use_cache=True)
    assert not torch.equal(first, before)
    assert torch.equal(get_cos_and_sin_dsa(torch.arange(10, 14), use_cache=False)[0][name], before)


def test_the_outer_context_and_the_mc2_mask_are_restored(monkeypatch):
    """The platform writes the process-wide MC2 mask in place, with holes where the smaller batch is padded."""
    import vllm_ascend.ascend_forward_context as ascend_context
    from vllm.platforms import current_platform

    mask, inside, after = torch.zeros(512, dtype=torch.bool), [], []
    monkeypatch.setattr(ascend_context, "get_mc2_mask", lambda: mask)
    s = make_session()
    tail = s.rank.state.replay_tail
    real, run_layer, run_batch = current_platform.set_additional_forward_context, tail.run_layer, tail._run_batch

    def padded(**kwargs):
        extra = real(**kwargs)
        extra["mc2_mask"][5:] = False
        return extra

    def watched_layer(*args):
        inside.append((get_forward_context().additional_kwargs["num_tokens"], int(mask.sum())))
        return run_layer(*args)

    def watched_batch(batch, *args):
        monkeypatch.setattr(type(current_platform), "set_additional_forward_context", staticmethod(padded))
        outer = get_forward_context()
        before = outer, outer.attn_metadata, outer.additional_kwargs["num_tokens"], mask.clone()
        out = run_batch(batch, *args)
        now = get_forward_context()
        same = before[0] is now and before[1] is now.attn_metadata and before[2] == now.additional_kwargs["num_tokens"]
        after.append((same, torch.equal(before[3], mask), int(mask.sum())))
        return out

    tail.run_layer, tail._run_batch = watched_layer, watched_batch
    first_step(s)
    kept = 300 - first_kept(300, WINDOW)
    assert inside == [(kept, 300 - kept + 5)] * 4
    assert after == [(True, True, 300)]
